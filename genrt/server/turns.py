"""Turns over HTTP: prompts of chats that begin with the tokens that the model drew, as trainers ask for.

A chat request, or one to tokenize a chat, may have ``required_prefix_token_ids``: the tokens of the
conversation up to and with the model's last turn. Without them, they are those of the last message with
``prompt_token_ids`` and ``generation_token_ids``. ``splice_turn`` makes the prompt begin with them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

from genrt.errors import InvalidRequest
from genrt.generation.conversations import splice_turn
from genrt.lm import AsyncLM
from genrt.numbers import shown
from genrt.questions.contexts import id_words

__all__ = ["keeping_turns"]

PREFIX = "required_prefix_token_ids"

OF_TEXT = {"prompt", "prompt_token_offsets"}
"""What vLLM keeps with a prompt's tokens of the text that they were."""

Written: TypeAlias = tuple[list[Any], list[Any]]
"""A conversation as vLLM reads it, and its prompt."""

Writes: TypeAlias = Callable[..., Awaitable[Written]]


def keeping_turns(lm: AsyncLM, write: Writes) -> Writes:
    """Return what writes prompts as vLLM's ``OnlineRenderer.preprocess_chat`` does, with the tokens that
    the model drew kept.

    Raises:
        InvalidRequest: the prefix is no list of the model's tokens, or is not of this conversation; from
            what is returned.
    """

    async def written(request: Any, messages: list[Any], *given: Any, **options: Any) -> Written:
        prefix = _prefix_of(request, messages)
        if not prefix:
            return await write(request, messages, *given, **options)
        if "add_generation_prompt" not in type(request).model_fields:
            raise InvalidRequest(f"{PREFIX} is for chat completions alone")
        end = getattr(lm.tokenizer, "eos_token_id", None)
        if end is None:
            raise InvalidRequest(f"{PREFIX}: the tokenizer has no end token")
        kept = list(id_words(prefix, lm.vocab_size, name=PREFIX))
        earlier = deepcopy(
            messages[: _turns_end(messages)]
        )  # vLLM parses arguments of tools in place
        conversation, [prompt] = await write(request, messages, *given, **options)
        ended = {"add_generation_prompt": False, "continue_final_message": False}
        options = {**options, "parser": None}
        _, [begun] = await write(request.model_copy(update=ended), earlier, *given, **options)
        token_ids = splice_turn(kept, begun["prompt_token_ids"], prompt["prompt_token_ids"], end)
        own = {name: prompt[name] for name in prompt.keys() - OF_TEXT}
        return conversation, [own | {"prompt_token_ids": token_ids}]

    return written


def _prefix_of(request: Any, messages: Sequence[Any]) -> Sequence[Any] | None:
    """Return the tokens that a prompt is to begin with. Raises InvalidRequest if they are no list."""
    found = (getattr(request, "model_extra", None) or {}).get(PREFIX)
    if found is None:
        for each in reversed(messages):
            if isinstance(each, Mapping) and "prompt_token_ids" in each:
                parts = [each["prompt_token_ids"], each.get("generation_token_ids")]
                found = _joined(parts)
                break
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise InvalidRequest(f"{PREFIX} must be a list of token ids, got {shown(found)}")
    return found


def _joined(parts: Sequence[Any]) -> list[Any]:
    if not all(isinstance(each, list) for each in parts):
        raise InvalidRequest(
            "a message with prompt_token_ids needs generation_token_ids too, both lists of token ids"
        )
    return [token for each in parts for token in each]


def _turns_end(messages: Sequence[Any]) -> int:
    """Return how many messages there are up to and with the model's last; all if none is the model's."""
    for place in reversed(range(len(messages))):
        if messages[place].get("role") == "assistant":
            return place + 1
    return len(messages)
