"""Conversations of many turns, as trajectories: the exact drawn tokens between the tokens of a chat
template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeAlias, Unpack, cast

import torch
from torch import Tensor

from genrt.errors import ContextTooLong, InvalidRequest
from genrt.generation.many import check_lm
from genrt.lm import AsyncLM
from genrt.numbers import check_int, check_options, shown
from genrt.questions.arguments import TokenIds
from genrt.questions.completions import Completion, GenerateOptions
from genrt.questions.rows import id_words
from genrt.tokens import encoding

Message: TypeAlias = Mapping[str, Any]
"""A message such as ``{"role": "user", "content": "Hello!"}``."""


def splice_turn(
    model_ids: TokenIds, template_prefix_ids: TokenIds, template_ids: TokenIds, eos_token_id: int
) -> list[int]:
    """Return the tokens of the next prompt of a conversation, which begins with ``model_ids``.

    A template formats the whole conversation again, and the tokenizer may split the model's texts
    differently. So the model's own tokens stay up to the end of its last turn, and the template's tokens
    follow. Turns end with ``eos_token_id``: the ends in the prefix are counted in ``template_ids``. Their
    positions may differ, since templates drop the reasoning of earlier turns.

    A truncated last turn gets the end token of the template. Without ``model_ids`` the template's tokens
    are returned. InvalidRequest says that the prefix has no end token, or more of them than the template.

    Args:
        model_ids: the tokens of the last prompt and the model's last turn.
        template_prefix_ids: the template's tokens for the messages up to and including that turn.
        template_ids: the template's tokens for all messages.
        eos_token_id: the token at the end of the model's turns.
    """
    end = check_int("eos_token_id", eos_token_id, 0, 2**32 - 1)
    model, prefix, template = (
        list(id_words(each, 2**32, allow_empty=True, name=name))
        for name, each in (
            ("model_ids", model_ids),
            ("template_prefix_ids", template_prefix_ids),
            ("template_ids", template_ids),
        )
    )
    if not model:
        return template
    turns = prefix.count(end)
    if turns == 0:
        raise InvalidRequest(
            f"there is no end token {end} among the {len(prefix)} tokens of the template's prefix: give "
            "the token with which the template ends the model's turns, and the prefix with the last one"
        )
    ends = [place for place, token in enumerate(template) if token == end]
    if len(ends) < turns:
        raise InvalidRequest(
            f"the template's prefix ends {turns} turns, and the whole only {len(ends)} (token {end}): "
            "they are not of the same conversation, or the template leaves out earlier turns"
        )
    kept = model[:-1] if model[-1] == end else model
    return kept + template[ends[turns - 1] :]


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A conversation up to its last answer, for training; aligned tensors ``[time]`` on the host.

    Attributes:
        token_ids: int64.
        loss_mask: bool: whether the model drew the token.
        logprobs: float32: the log-probability of drawn tokens, in the ``logprobs_mode`` of their
            answer; 0 elsewhere.
        weights_versions: int64: the ``AsyncLM.weights_version`` of drawn tokens; -1 elsewhere.
    """

    token_ids: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    weights_versions: Tensor


class Conversation:
    """A chat of the model with other roles: users, tools, environments.

    The tokenizer's chat template formats the messages, but drawn tokens stay as they are: every prompt
    begins with the last prompt and its answer (``splice_turn``). So the prefix cache serves every turn,
    and log-probabilities belong to the drawn tokens.

    A truncated answer gets the template's end token, which is not part of the loss. Reasoning stays in
    the tokens, even if the template drops it from earlier turns.

    Args:
        lm: the runtime, with a chat template.
        messages: the first messages. Answers among them are not the model's.
        tools: the tools of the model, as for transformers' ``apply_chat_template``.
        chat_template_kwargs: other options of the template, such as ``enable_thinking``.
        end_token_id: the token at the end of the model's turns; by default the tokenizer's
            ``eos_token_id``.
        message_of: returns the message of an answer, for example with its ``tool_calls``. By default the
            content is the text, and ``reasoning_content`` the reasoning.

    Raises:
        InvalidRequest: the tokenizer of ``lm`` has no end token, or the messages are wrong.
    """

    def __init__(
        self,
        lm: AsyncLM,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        end_token_id: int | None = None,
        message_of: Callable[[Completion], Message] | None = None,
    ) -> None:
        check_lm(lm)
        if message_of is not None and not callable(message_of):
            raise InvalidRequest(f"message_of must be a function, got {shown(message_of)}")
        if end_token_id is None:
            end_token_id = getattr(lm.tokenizer, "eos_token_id", None)
            if end_token_id is None:
                raise InvalidRequest(
                    "the tokenizer has no end token: give end_token_id, with which turns end"
                )
        self._lm = lm
        self._end = check_int("end_token_id", end_token_id, 0, lm.vocab_size - 1)
        self._message_of = message_of or _answer_message
        self._tools, self._template_kwargs = tools, chat_template_kwargs
        self._messages: list[Message] = []
        self._answers: list[Completion] = []
        self._drawn: list[int] = []  # the positions of these answers among the messages
        encoding.check_messages(messages)
        self.add(*messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages so far, including the model's answers."""
        return tuple(self._messages)

    def add(self, *messages: Message) -> None:
        """Add messages, such as a user's or the results of tools. Raises InvalidRequest, and adds no
        message, if one is wrong or the tokenizer loses a part of its text."""
        if messages:
            encoding.check_messages(messages)
        for each in messages:
            if isinstance(content := each.get("content"), str):
                encoding.encode(self._lm.tokenizer, content)
        self._messages += [dict(each) for each in messages]

    def prompt_ids(self) -> list[int]:
        """Return the prompt of the model's next answer. Raises InvalidRequest if the last message is an
        answer, the template refuses the messages, or turns do not end with ``end_token_id``."""
        if self._messages[-1]["role"] == "assistant":
            raise InvalidRequest(
                "the last message is the assistant's: add what comes after it first"
            )
        messages = [self._shown(place) for place in range(len(self._messages))]
        if not self._drawn:
            return self._written(messages)
        # Drawn texts may not survive a round trip; their tokens are not used here.
        whole = self._written(messages, lossy=True)
        prefix = self._written(messages[: self._drawn[-1] + 1], begun=False, lossy=True)
        return splice_turn(self._token_ids(), prefix, whole, self._end)

    def _token_ids(self) -> list[int]:
        """Return the tokens up to the last answer."""
        return [
            token
            for last in self._answers[-1:]
            for token in (*last.prompt_token_ids, *last.token_ids)
        ]

    def _written(
        self, messages: Sequence[Message], *, begun: bool = True, lossy: bool = False
    ) -> list[int]:
        """Return the template's tokens for messages, with or without the start of the next answer."""
        return encoding.encode_chat(
            self._lm.tokenizer,
            messages,
            add_generation_prompt=begun,
            tools=self._tools,
            chat_template_kwargs=self._template_kwargs,
            lossy=lossy,
        )

    def _shown(self, place: int) -> Message:
        """Return a message for the template. The text of the end token is removed from drawn messages, so
        that it does not count as the end of a turn."""
        message, end = self._messages[place], encoding.decode(self._lm.tokenizer, [self._end])
        if place not in self._drawn or not end:
            return message
        rest = {name: each for name, each in message.items() if name != "role"}
        return {"role": message["role"], **_remove_text(end, rest)}

    def answer(self, completion: Completion) -> None:
        """Add a completion of ``prompt_ids()``, drawn with ``logprobs``, as the model's answer. ``ask``
        does this by itself. Raises InvalidRequest for another prompt, or without log-probabilities, and
        the errors of ``message_of``; the conversation is then unchanged."""
        if not isinstance(completion, Completion):
            raise InvalidRequest(f"completion must be a Completion, got {shown(completion)}")
        prompt = list(completion.prompt_token_ids)
        if self._messages[-1]["role"] == "assistant" or prompt != self.prompt_ids():
            raise InvalidRequest(
                "this answer is not to the conversation as it is now: draw it after prompt_ids()"
            )
        if len(completion.logprobs) != len(completion.token_ids):
            raise InvalidRequest("this answer has no log-probabilities: draw it with logprobs=0")
        message = self._message_of(completion)
        encoding.check_messages([message])
        self._answers.append(completion)
        self._drawn.append(len(self._messages))
        self._messages.append(dict(message))

    async def ask(
        self, *, max_new_tokens: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Draw the model's next answer, add it, and return it. After an error or a cancellation the
        conversation is unchanged.

        Args:
            max_new_tokens: the maximum number of tokens, within the rest of the context.
            options: as for ``AsyncLM.generate``, with ``logprobs=0`` by default.

        Raises:
            InvalidRequest: the last message is an answer, or the conversation changed meanwhile; else as
                ``AsyncLM.generate``.
            ContextTooLong: the conversation fills the context.
        """
        known = [name for name in GenerateOptions.__annotations__ if name != "max_tokens"]
        check_options("ask", options, ["max_new_tokens", *known])
        prompt = self.prompt_ids()
        room = self._lm.max_model_len - len(prompt)
        if room <= 0:
            raise ContextTooLong(
                f"the conversation has {len(prompt)} tokens, and max_model_len is "
                f"{self._lm.max_model_len}: there is no room for an answer"
            )
        if max_new_tokens is not None:
            room = min(room, check_int("max_new_tokens", max_new_tokens, 1))
        given = {"logprobs": 0, **options, "max_tokens": room}
        completion = await self._lm.generate(prompt, **cast("Any", given))
        self.answer(completion)
        return completion

    def trajectory(self) -> Trajectory:
        """Return the tokens up to the last answer; empty tensors before the first one."""
        token_ids = torch.tensor(self._token_ids(), dtype=torch.int64)
        loss_mask, logprobs = torch.zeros_like(token_ids).bool(), torch.zeros(len(token_ids))
        versions = torch.full_like(token_ids, -1)
        for each in self._answers:
            start = len(each.prompt_token_ids)
            drawn = slice(start, start + len(each.token_ids))
            loss_mask[drawn] = True
            logprobs[drawn] = torch.tensor(each.logprobs, dtype=torch.float32)
            for version, *span in each.weights_spans:
                versions[drawn][slice(*span)] = version
        return Trajectory(token_ids, loss_mask, logprobs, versions)

    def fork(self) -> Conversation:
        """Return an independent copy."""
        other = copy(self)
        other._messages, other._drawn = [*self._messages], [*self._drawn]
        other._answers = [*self._answers]
        return other

    def __repr__(self) -> str:
        return (
            f"Conversation({len(self._messages)} messages, {len(self._token_ids())} tokens, "
            f"{sum(len(each.token_ids) for each in self._answers)} of them drawn)"
        )


def _answer_message(completion: Completion) -> Message:
    """Return the message of an answer."""
    message = {"role": "assistant", "content": completion.text}
    return message | ({"reasoning_content": completion.reasoning} if completion.reasoning else {})


def _remove_text(text: str, value: Any) -> Any:
    """Return a value of a message with all its texts without ``text``."""
    if isinstance(value, Mapping):
        return {name: _remove_text(text, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_remove_text(text, each) for each in value]
    while isinstance(value, str) and text in value:  # the rest may spell it again
        value = value.replace(text, "")
    return value
