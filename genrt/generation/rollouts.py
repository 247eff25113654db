"""Rollouts: a right-padded batch of prompts -> their texts as tensors, with the log-probabilities that
policy gradients need.

The fields have NeMo-RL's names, and mean what they mean there; ``Rollout`` says where more is promised.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, Literal, Required, TypeAlias, Unpack, cast, get_args

import numpy as np
import torch
from torch import Tensor

from genrt.errors import ContextTooLong, EngineFailed, InvalidRequest, TimedOut
from genrt.generation.many import Failed, Item, generate_many
from genrt.generation.padding import check_pad_value, unpadded
from genrt.lm import AsyncLM
from genrt.numbers import check_int, named, shown
from genrt.questions.completions import Completion, DecodingOptions, LogprobsMode
from genrt.questions.contexts import LAST_SEED, check_seed, seed_at
from genrt.questions.token_ids import id_words
from genrt.runtime.concurrency import blocking

__all__ = [
    "Rollout",
    "RolloutBatch",
    "RolloutOptions",
    "StopStrings",
    "StopTokenIds",
    "is_for_each",
    "rollout",
    "rollout_samples",
    "rollout_sync",
]

StopStrings: TypeAlias = str | Sequence[str] | Sequence[Sequence[str] | None] | None
"""Texts that end every sample, or a list of these, or ``None``, for each."""

StopTokenIds: TypeAlias = Collection[int] | Sequence[Collection[int] | None] | None
"""Tokens that end every sample, or a list of these, or ``None``, for each."""

OnTimeout: TypeAlias = Literal["raise", "truncate"]
"""What becomes of a sample that takes too long."""

FOREIGN = {"max_tokens": "max_new_tokens", "stop": "stop_strings"}
"""Options of completions that have another name here."""

OWN = ("logprobs", "in_order", "on_error", "tools", "chat_template_kwargs")
"""Options of completions, and of many, that rollouts decide."""


class RolloutOptions(DecodingOptions, total=False):
    """The options of ``rollout``: with those of ``DecodingOptions``, all of a completion that say how its
    tokens are drawn; ``CompletionOptions`` documents those that are not here.

    Attributes:
        pad_value: what the batch is padded with, and the result.
        max_new_tokens: how many tokens at most; by default, and at most, what the context leaves room
            for.
        min_tokens: as a completion's; at most what there is room for.
        stop_strings: a text or a list of texts for all samples, or a list with a list (or ``None``)
            for each.
        stop_token_ids: as ``stop_strings``, of token ids.
        seed: an int, with which sample ``i`` is drawn with seed ``seed + i``, or one for each sample.
            Without, samples are independent.
        logprobs_mode: "raw_logprobs", the default, are the model's, as ``AsyncLM.score`` has them;
            "processed_logprobs" those of the law that tokens are drawn from.
        adapter: the name of the adapter to ask; by default the base model.
        timeout: seconds for each sample, from when it is asked.
        on_timeout: what then happens: "raise", the default, raises TimedOut and cancels the others;
            "truncate" takes what was drawn by then, maybe nothing, as a text that is ``truncated``, whose
            ``finish_reason`` is "abort".
        concurrency: how many samples are under way at once, as of ``generate_many``.
        progress: whether a bar shows how far it is.
    """

    pad_value: Required[int]
    max_new_tokens: int | None
    min_tokens: int
    stop_strings: StopStrings
    stop_token_ids: StopTokenIds
    seed: int | Sequence[int] | None
    logprobs_mode: LogprobsMode
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bad_words: Sequence[str]
    logit_bias: Mapping[int, float]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    json_schema: Mapping[str, Any] | str | type
    regex: str
    grammar: str
    choice: Sequence[str]
    adapter: str | None
    timeout: float | None
    on_timeout: OnTimeout
    concurrency: int | None
    progress: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Texts that were drawn after the prompts of a batch. Tensors are on the device of ``input_ids``.

    Attributes:
        output_ids: ``[batch, width]``, of the prompts' type: each prompt and, right behind it, the tokens
            that were drawn, one that stopped it included; then ``pad_value``. ``width`` is that of the
            prompts and the longest generation together; of a single sample, its own length.
        generation_lengths: int64 ``[batch]``: how many tokens were drawn.
        unpadded_sequence_lengths: int64 ``[batch]``: how many tokens are no padding.
        logprobs: float32 ``[batch, width]``: those of the drawn tokens, each at its token's place; 0 at
            prompts and padding.
        truncated: bool ``[batch]``: whether a text was cut off. One whose prompt fills the context is (in
            NeMo-RL it is not): it did not come to an end.
        weights_versions: int64 ``[batch]``: with which weights each text was drawn, all of it, as
            ``AsyncLM.weights_version`` counts them.
        completions: what was drawn, as ``AsyncLM.generate`` returns it: the texts, and why each ended.
    """

    output_ids: Tensor
    generation_lengths: Tensor
    unpadded_sequence_lengths: Tensor
    logprobs: Tensor
    truncated: Tensor
    weights_versions: Tensor
    completions: tuple[Completion, ...]

    def as_dict(self) -> dict[str, Tensor]:
        """Return the tensors by their names."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "completions"]
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        drawn, cut = int(self.generation_lengths.sum()), int(self.truncated.sum())
        return f"Rollout({len(self.completions)} samples, {drawn} tokens drawn, {cut} truncated)"


async def rollout(
    lm: AsyncLM, input_ids: Tensor, input_lengths: Tensor, **options: Unpack[RolloutOptions]
) -> Rollout:
    """Draw a text after each prompt of a batch.

    All samples are asked at once, as far as ``concurrency`` goes, and share steps with whatever else the
    runtime is asked. What a sample is depends on its prompt, its stops and its seed alone, not on the
    batch. A prompt that fills the context gets no token, and an empty batch a rollout of nothing.
    An error of one sample is raised, with a note that names it, and cancels the others; cancelling
    withdraws all.

    Args:
        input_ids: integers ``[batch, time]``, padded on the right.
        input_lengths: integers ``[batch]``: how many tokens each prompt has, from 1.

    Raises:
        InvalidRequest: these are no such tensors (the message names row and position), or an option is
            wrong.
        ContextTooLong: a prompt is longer than the context.
        TimedOut: a sample took longer than ``timeout``, and ``on_timeout`` says so. Else as
            ``AsyncLM.generate``.
    """
    batch = RolloutBatch(lm, input_ids, input_lengths, options, "rollout")
    async with contextlib.aclosing(batch.completions()) as ended:
        found = {number: completion async for number, completion in ended}
    completions = [found[number] for number in range(len(found))]
    return batch.rollout(completions, input_ids.shape[1])


def rollout_sync(
    lm: AsyncLM, input_ids: Tensor, input_lengths: Tensor, **options: Unpack[RolloutOptions]
) -> Rollout:
    """Return what ``rollout`` returns, blocking; it may be called where an event loop is running too. It
    runs in another thread; an interrupt cancels it."""
    return blocking(rollout(lm, input_ids, input_lengths, **options))


def rollout_samples(
    lm: AsyncLM, input_ids: Tensor, input_lengths: Tensor, **options: Unpack[RolloutOptions]
) -> AsyncGenerator[tuple[int, Rollout], None]:
    """Yield the number of each sample and its rollout, a batch of one, as they finish.

    Wrong arguments raise here, options of texts and all else when the first sample is taken. Leaving
    early cancels what is under way, as leaving ``generate_many`` does: one that is kept in a variable
    is to be closed, ``async with contextlib.aclosing(rollout_samples(…)) as …``. See ``rollout``."""
    return RolloutBatch(lm, input_ids, input_lengths, options, "rollout_samples").samples()


class RolloutBatch:
    """The prompts of a batch, checked, and how each is asked; ``name`` is the function that was
    called."""

    def __init__(
        self,
        lm: AsyncLM,
        input_ids: Tensor,
        input_lengths: Tensor,
        options: RolloutOptions,
        name: str,
    ) -> None:
        given: dict[str, Any] = {**options}
        if "pad_value" not in given:
            raise TypeError(f"{name}() missing a required keyword argument: 'pad_value'")
        if not isinstance(lm, AsyncLM):
            raise InvalidRequest(f"lm must be an AsyncLM, as genrt.load returns, got {shown(lm)}")
        for other, own in FOREIGN.items():
            if other in given:
                raise InvalidRequest(f"{name} has no option {other!r}: give {own}")
        if taken := [each for each in OWN if each in given]:
            raise InvalidRequest(f"{name} has no option {taken[0]!r}")
        self._lm = lm
        self._name = name
        self._pad_value = check_pad_value(given.pop("pad_value"))
        ids, lengths = unpadded(input_ids, input_lengths, self._pad_value)
        if torch.iinfo(input_ids.dtype).max < lm.vocab_size - 1:
            raise InvalidRequest(
                f"input_ids are {input_ids.dtype}: not every token id fits in them"
            )
        self._like = input_ids
        rows = enumerate(zip(ids, lengths.tolist(), strict=True))
        self._prompts = [self._prompt(number, row[:length]) for number, (row, length) in rows]
        count = len(self._prompts)
        self._own: list[dict[str, Any]] = [{} for _ in range(count)]  # options of each sample
        for option, of_all in (("stop", "stop_strings"), ("stop_token_ids", "stop_token_ids")):
            stops = given.pop(of_all, None)
            if not is_for_each(stops):
                given |= {} if stops is None else {option: stops}
                continue
            _check_count(of_all, len(stops), count)
            for number, own in enumerate(stops):
                self._own[number] |= {} if own is None else {option: own}
        for number, seed in enumerate(_seeds(given.pop("seed", None), count)):
            self._own[number]["seed"] = seed
        most = given.pop("max_new_tokens", None)
        self._most = None if most is None else check_int("max_new_tokens", most, 1)
        self._least = check_int("min_tokens", given.pop("min_tokens", 0), 0, self._most)
        on_timeout = given.pop("on_timeout", "raise")
        if not isinstance(on_timeout, str) or on_timeout not in get_args(OnTimeout):
            raise InvalidRequest(
                f"on_timeout must be 'raise' or 'truncate', got {named(on_timeout)}"
            )
        self._truncates = on_timeout == "truncate"
        self._given = given

    def _prompt(self, number: int, tokens: np.ndarray) -> list[int]:
        """Return a row's tokens as ints. Raises InvalidRequest if they are no prompt."""
        if not len(tokens):
            raise InvalidRequest(f"row {number} is empty: a prompt has at least one token")
        if len(tokens) > self._lm.max_model_len:
            raise ContextTooLong(
                f"row {number} has {len(tokens)} tokens, over max_model_len={self._lm.max_model_len}"
            )
        prompt: list[int] = tokens.tolist()
        id_words(prompt, self._lm.vocab_size, name=f"token ids of row {number}")
        return prompt

    def _item(self, number: int) -> Item:
        """Return how a sample is asked for which there is room."""
        prompt = self._prompts[number]
        room = self._lm.max_model_len - len(prompt)
        most = room if self._most is None else min(self._most, room)
        limits = {"max_tokens": most, "min_tokens": min(self._least, most)}
        return Item(prompt, options=cast("Any", limits | self._own[number]))

    async def completions(self) -> AsyncGenerator[tuple[int, Completion], None]:
        """Yield the number of each sample and its completion, as they finish; raise the first error."""
        asked = [n for n, each in enumerate(self._prompts) if len(each) < self._lm.max_model_len]
        texts = generate_many(
            self._lm, map(self._item, asked), on_error="return", logprobs=0, **self._given
        )
        async with contextlib.aclosing(texts):
            async for place, text in texts:
                if isinstance(text, Failed) and isinstance(text.error, TimedOut):
                    text = text.partial if self._truncates and text.partial else text
                if isinstance(text, Failed):
                    text.error.add_note(f"sample {asked[place]} of {self._name}")
                    raise text.error
                if len(text.logprobs) != len(text.token_ids):
                    raise EngineFailed(
                        f"sample {asked[place]} has {len(text.token_ids)} tokens, and the engine gave "
                        f"log-probabilities of {len(text.logprobs)}"
                    )
                yield asked[place], text
        for number in sorted({*range(len(self._prompts))} - {*asked}):
            prompt, version = tuple(self._prompts[number]), self._lm.weights_version
            yield (
                number,
                Completion(
                    "", (), prompt, (), (), "length", None, 0.0, 0.0, weights_version=version
                ),
            )

    async def samples(self) -> AsyncGenerator[tuple[int, Rollout], None]:
        """Yield the number of each sample and its rollout, as they finish."""
        async with contextlib.aclosing(self.completions()) as ended:
            async for number, completion in ended:
                yield number, self.rollout([completion], len(completion.prompt_token_ids))

    def rollout(self, completions: Sequence[Completion], width: int) -> Rollout:
        """Return the rollout of these, behind prompts that are padded to ``width``."""
        drawn = [len(each.token_ids) for each in completions]
        before = [len(each.prompt_token_ids) for each in completions]
        shape = len(completions), width + max(drawn, default=0)
        output_ids = np.full(shape, self._pad_value, dtype=np.int64)
        logprobs = np.zeros(shape, dtype=np.float32)
        for row, each in enumerate(completions):
            end = before[row] + drawn[row]
            output_ids[row, :end] = (*each.prompt_token_ids, *each.token_ids)
            logprobs[row, before[row] : end] = each.logprobs
        device = self._like.device
        lengths = torch.tensor([drawn, before], dtype=torch.int64, device=device)
        return Rollout(
            torch.from_numpy(output_ids).to(device, self._like.dtype),
            lengths[0],
            lengths.sum(0),
            torch.from_numpy(logprobs).to(device),
            torch.tensor([each.truncated for each in completions], dtype=torch.bool, device=device),
            torch.tensor([each.weights_version for each in completions], device=device).long(),
            tuple(completions),
        )


def is_for_each(given: object) -> bool:
    """Tell whether stops are given for each sample, and not for all."""
    kinds = (list, tuple, set, frozenset, np.ndarray, Tensor)
    return isinstance(given, list | tuple) and any(
        each is None or isinstance(each, kinds) for each in given
    )


def _check_count(name: str, found: int, count: int) -> None:
    if found != count:
        raise InvalidRequest(f"{name} is given for {found} samples, and the batch has {count}")


def _seeds(given: Any, count: int) -> Sequence[int | None]:
    """Return a seed for each sample; ``None`` for each if there is none."""
    if given is None:
        return [None] * count
    if not isinstance(given, list | tuple | range) and getattr(given, "ndim", 0) != 1:
        first = cast("int", check_seed(given))
        return [seed_at(first, number) for number in range(count)]
    _check_count("seed", len(given), count)
    return [
        check_int(f"seed of row {number}", each, 0, LAST_SEED) for number, each in enumerate(given)
    ]
