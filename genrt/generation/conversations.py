"""Conversations of many turns, as trajectories: the tokens that were drawn, exactly, between those that a
chat template wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeAlias, Unpack, cast

import torch
from torch import Tensor

from genrt.errors import ContextTooLong, InvalidRequest
from genrt.generation.turns import splice_turn
from genrt.lm import AsyncLM
from genrt.numbers import check_int, shown
from genrt.questions.completions import Completion, GenerateOptions
from genrt.tokens import encoding

__all__ = ["Conversation", "Message", "Trajectory"]

Message: TypeAlias = Mapping[str, Any]
"""A message such as ``{"role": "user", "content": "Hello!"}``."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A conversation up to its last answer, for training; tensors ``[time]`` on the host, aligned.

    Attributes:
        token_ids: int64.
        loss_mask: bool: which tokens the model drew.
        logprobs: float32: the log-probabilities with which these were drawn, as ``logprobs_mode`` said; 0
            elsewhere.
        weights_versions: int64: with which weights each of these was drawn, as
            ``AsyncLM.weights_version`` counts them; -1 elsewhere.
    """

    token_ids: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    weights_versions: Tensor


class Conversation:
    """A chat between the model and whoever else has a role: users, tools, environments.

    The messages are written by the tokenizer's chat template, but what the model drew stays the tokens
    that it drew: every prompt begins with the last prompt and the answer to it (``splice_turn``). So
    the prefix cache serves every turn, and the log-probabilities are those of the tokens that were
    drawn.

    An answer that was cut off gets the template's end token, which is not the model's. Reasoning stays in
    the tokens, also where the template leaves it out of earlier turns.

    Args:
        lm: the runtime, whose tokenizer has a chat template.
        messages: what begins the conversation; answers among them are not the model's.
        tools: what the model may call, as transformers' ``apply_chat_template`` takes it.
        chat_template_kwargs: other options of the template, such as ``enable_thinking``.
        end_token_id: the token with which the template ends the model's turns; by default the tokenizer's
            ``eos_token_id``.
        message_of: returns the message that stands for an answer, with its ``tool_calls`` for example; by
            default its text is the content, and its reasoning, if told apart, ``reasoning_content``.

    Raises:
        InvalidRequest: ``lm`` has no tokenizer with an end token, or these are no messages.
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
        if not isinstance(lm, AsyncLM):
            raise InvalidRequest(f"lm must be an AsyncLM, as genrt.load returns, got {shown(lm)}")
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
        self._message_of = message_of or _message
        self._tools, self._template_kwargs = tools, chat_template_kwargs
        self._messages: list[Message] = []
        self._answered = 0  # how many messages there are up to and with the model's last answer
        self._drawn: set[int] = set()  # which messages are the model's
        # The last prompt and the answer to it; of each token, whether it was drawn, how likely, and with
        # which weights.
        self._token_ids: list[int] = []
        self._loss_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        encoding.check_messages(messages)
        self.add(*messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages so far, the model's answers included."""
        return tuple(self._messages)

    def add(self, *messages: Message) -> None:
        """Add messages: what a user says next, or what tools returned. Raises InvalidRequest if one is no
        message, or the tokenizer loses some of its text; then none is added."""
        if messages:
            encoding.check_messages(messages)
        for each in messages:
            if isinstance(content := each.get("content"), str):
                encoding.encode(self._lm.tokenizer, content)
        self._messages += [dict(each) for each in messages]

    def prompt_ids(self) -> list[int]:
        """Return the tokens that the model's next answer comes after.

        Raises:
            InvalidRequest: the last message is an answer already, the template does not take the
                messages, or it ends the model's turns with another token than ``end_token_id``."""
        if self._messages[-1]["role"] == "assistant":
            raise InvalidRequest(
                "the last message is the assistant's: add what comes after it first"
            )
        messages = [self._shown(place) for place in range(len(self._messages))]
        if not self._answered:
            return self._written(messages)
        # What the model drew may not come back; its tokens are not taken from here.
        whole = self._written(messages, lossy=True)
        prefix = self._written(messages[: self._answered], begun=False, lossy=True)
        return splice_turn(self._token_ids, prefix, whole, self._end)

    def _written(
        self, messages: Sequence[Message], *, begun: bool = True, lossy: bool = False
    ) -> list[int]:
        """Return the tokens that the template makes of messages, with the next answer begun or not."""
        return encoding.encode_chat(
            self._lm.tokenizer,
            messages,
            add_generation_prompt=begun,
            tools=self._tools,
            chat_template_kwargs=self._template_kwargs,
            lossy=lossy,
        )

    def _shown(self, place: int) -> Message:
        """Return a message as the template is shown it. What the model drew is without any text of the
        end token, with which no turn ends: ends are counted, and its tokens are known."""
        message, end = self._messages[place], encoding.decode(self._lm.tokenizer, [self._end])
        if place not in self._drawn or not end:
            return message
        rest = {name: each for name, each in message.items() if name != "role"}
        return {"role": message["role"], **_without(end, rest)}

    def answer(self, completion: Completion) -> None:
        """Take a completion as the model's answer: one that was drawn after ``prompt_ids()``, with
        ``logprobs``. ``ask`` does it by itself.

        Raises:
            InvalidRequest: it is of another prompt, or has no log-probabilities. Whatever ``message_of``
                raises; then nothing has changed.
        """
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
        before, drawn = len(prompt) - len(self._token_ids), len(completion.token_ids)
        self._token_ids = [*prompt, *completion.token_ids]
        self._loss_mask += [False] * before + [True] * drawn
        self._logprobs += [0.0] * before + [*completion.logprobs]
        self._versions += [-1] * before + [completion.weights_version] * drawn
        self._drawn.add(len(self._messages))
        self._messages.append(dict(message))
        self._answered = len(self._messages)

    async def ask(
        self, *, max_new_tokens: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Draw the model's next answer, add it, and return it. An error or a cancellation changes
        nothing.

        Args:
            max_new_tokens: how many tokens at most; by default, and at most, what the context leaves
                room for.
            options: as of ``AsyncLM.generate``, with ``logprobs=0`` unless it says more.

        Raises:
            InvalidRequest: the last message is an answer already, or something else was added or answered
                meanwhile; else as ``AsyncLM.generate``.
            ContextTooLong: the conversation fills the context.
        """
        prompt = self.prompt_ids()
        room = self._lm.max_model_len - len(prompt)
        if room <= 0:
            raise ContextTooLong(
                f"the conversation has {len(prompt)} tokens, and max_model_len is "
                f"{self._lm.max_model_len}: there is no room for an answer"
            )
        if max_new_tokens is not None:
            room = min(room, check_int("max_new_tokens", max_new_tokens, 1))
        if "max_tokens" in options:
            raise InvalidRequest("ask has no option 'max_tokens': give max_new_tokens")
        given = {"logprobs": 0, **options, "max_tokens": room}
        completion = await self._lm.generate(prompt, **cast("Any", given))
        self.answer(completion)
        return completion

    def trajectory(self) -> Trajectory:
        """Return the tokens up to the last answer, all of length 0 if there is none."""
        return Trajectory(
            torch.tensor(self._token_ids, dtype=torch.int64),
            torch.tensor(self._loss_mask, dtype=torch.bool),
            torch.tensor(self._logprobs, dtype=torch.float32),
            torch.tensor(self._versions, dtype=torch.int64),
        )

    def fork(self) -> Conversation:
        """Return a conversation that begins as this one, and goes on by itself."""
        other = copy(self)
        other._messages, other._drawn = [*self._messages], {*self._drawn}
        other._token_ids, other._loss_mask = [*self._token_ids], [*self._loss_mask]
        other._logprobs, other._versions = [*self._logprobs], [*self._versions]
        return other

    def __repr__(self) -> str:
        return (
            f"Conversation({len(self._messages)} messages, {len(self._token_ids)} tokens, "
            f"{sum(self._loss_mask)} of them drawn)"
        )


def _message(completion: Completion) -> Message:
    """Return an answer as a message."""
    message = {"role": "assistant", "content": completion.text}
    return message | ({"reasoning_content": completion.reasoning} if completion.reasoning else {})


def _without(text: str, value: Any) -> Any:
    """Return a value of a message with this text nowhere in its texts."""
    if isinstance(value, Mapping):
        return {name: _without(text, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without(text, each) for each in value]
    while isinstance(value, str) and text in value:  # what is left may spell it anew
        value = value.replace(text, "")
    return value
