"""Rollouts: the texts after a right-padded batch of prompts, as tensors with log-probabilities. The
fields have the names and meanings of NeMo-RL; ``Rollout`` documents the differences."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, Required, TypeAlias, Unpack, cast, get_args

import numpy as np
import torch
from torch import Tensor

from genrt.errors import ContextTooLong, InvalidRequest, TimedOut
from genrt.generation.many import Failed, Item, check_lm, generate_many
from genrt.lm import AsyncLM
from genrt.numbers import check_int, check_one_of, check_options, shown
from genrt.questions.arguments import check_seed, host_array, seed_at
from genrt.questions.completions import Completion, CompletionOptions, SamplingMask
from genrt.questions.rows import id_words
from genrt.runtime.concurrency import blocking
from genrt.tokens.sets import MaskForm

StopStrings: TypeAlias = str | Sequence[str] | Sequence[Sequence[str] | None] | None
"""Texts that end every sample, or a list with such texts or ``None`` for each sample."""

OnTimeout: TypeAlias = Literal["raise", "truncate"]
"""How a timeout of a sample is handled."""


class RolloutOptions(CompletionOptions, total=False):
    """The options of ``rollout``: ``CompletionOptions`` without ``max_tokens``, ``stop`` and
    ``logprobs``, and these.

    Attributes:
        pad_value: the padding of the batch and of the result.
        max_new_tokens: the maximum number of tokens; by default the rest of the context. ``min_tokens``
            is within it too.
        stop_strings: a text or a list of texts for all samples, or a list with a list (or ``None``)
            for each.
        seed: sample ``i`` is drawn with seed ``seed + i``. By default samples are independent.
        adapter: the name of an adapter; by default the base model.
        timeout: seconds for each sample, from its request on.
        on_timeout: "raise", the default, raises TimedOut and cancels the other samples; "truncate"
            returns the tokens so far, maybe none, as a ``truncated`` text with ``finish_reason`` "abort".
        concurrency: the maximum number of running samples, as for ``generate_many``.
        progress: whether to show a progress bar.
    """

    pad_value: Required[int]
    max_new_tokens: int | None
    stop_strings: StopStrings
    seed: int | None
    adapter: str | None
    timeout: float | None
    on_timeout: OnTimeout
    concurrency: int | None
    progress: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """The texts after the prompts of a batch. Tensors are on the device of ``input_ids``.

    Attributes:
        output_ids: ``[batch, width]``, of the prompts' type: each prompt, followed by its drawn tokens
            (also the one that stopped it) and ``pad_value``. ``width`` is the width of the prompts plus
            the longest generation; for a single sample, its own length.
        generation_lengths: int64 ``[batch]``: the number of drawn tokens.
        unpadded_sequence_lengths: int64 ``[batch]``: the number of tokens without padding.
        logprobs: float32 ``[batch, width]``: the log-probability of each drawn token, at its position;
            0 at prompts and padding.
        truncated: bool ``[batch]``: whether a text was cut off. Prompts that fill the context count too,
            unlike in NeMo-RL.
        weights_versions: int64 ``[batch, width]``: the ``AsyncLM.weights_version`` that drew each token;
            -1 at prompts and padding.
        sampling_mask: with the option ``sampling_mask``, the sets of all drawn tokens, in the order of
            ``output_ids``.
        completions: the completions of ``AsyncLM.generate``.
    """

    output_ids: Tensor
    generation_lengths: Tensor
    unpadded_sequence_lengths: Tensor
    logprobs: Tensor
    truncated: Tensor
    weights_versions: Tensor
    completions: tuple[Completion, ...]
    sampling_mask: SamplingMask | None = None

    def as_dict(self) -> dict[str, Tensor]:
        """Return the tensors by name. With ``sampling_mask``, there are ``sampling_logprobs`` and
        ``sampling_log_mass``, float32 ``[batch, width]``. With ``"ids"``, as in NeMo-RL, there are
        ``sampling_mask_token_ids``, int32 ``[batch, width, widest]``, each set followed by 0, and
        ``sampling_mask_sizes``, int32 ``[batch, width]``; with ``"bits"``, ``sampling_mask_bits``, int32
        ``[drawn tokens, words]``."""
        others = ("completions", "sampling_mask")
        names = [each.name for each in dataclasses.fields(self) if each.name not in others]
        found: dict[str, Tensor] = {name: getattr(self, name) for name in names}
        return found if self.sampling_mask is None else found | self._masks(self.sampling_mask)

    def _masks(self, mask: SamplingMask) -> dict[str, Tensor]:
        ends, lengths = self.unpadded_sequence_lengths.cpu(), self.generation_lengths.cpu()
        at = torch.arange(self.output_ids.shape[1])
        is_drawn = (at < ends[:, None]) & (at >= (ends - lengths)[:, None])

        def placed(numbers: np.ndarray) -> Tensor:
            whole = torch.from_numpy(np.zeros((*is_drawn.shape, *numbers.shape[1:]), numbers.dtype))
            whole[is_drawn] = torch.tensor(numbers)
            return whole.to(self.output_ids.device)

        numbers = {
            "sampling_logprobs": placed(mask.logprobs),
            "sampling_log_mass": placed(mask.log_mass),
        }
        if mask.form == "bits":
            bits = torch.tensor(mask.bits, device=self.output_ids.device)
            return numbers | {"sampling_mask_bits": bits}
        sizes = np.diff(mask.offsets).astype(np.int32)
        sets = np.zeros((len(sizes), int(sizes.max(initial=0))), np.int32)
        sets[np.arange(sets.shape[1]) < sizes[:, None]] = mask.token_ids
        ids = {"sampling_mask_token_ids": placed(sets), "sampling_mask_sizes": placed(sizes)}
        return numbers | ids

    def __repr__(self) -> str:
        drawn, cut = int(self.generation_lengths.sum()), int(self.truncated.sum())
        return f"Rollout({len(self.completions)} samples, {drawn} tokens drawn, {cut} truncated)"


async def rollout(
    lm: AsyncLM, input_ids: Tensor, input_lengths: Tensor, **options: Unpack[RolloutOptions]
) -> Rollout:
    """Draw a text after each prompt of a batch.

    A sample depends on its prompt, its stops and its seed, but not on the batch. Prompts that fill the
    context get no token; an empty batch gives an empty rollout. The error of a sample is raised with a
    note that names it, and cancels the others. Cancelling withdraws all.

    Args:
        input_ids: integers ``[batch, time]``, padded on the right.
        input_lengths: integers ``[batch]``: the length of each prompt, from 1.

    Raises:
        InvalidRequest: the tensors (the message has row and position) or an option are wrong.
        ContextTooLong: a prompt is longer than the context.
        TimedOut: a sample exceeded ``timeout``, unless ``on_timeout="truncate"``. Else as
            ``AsyncLM.generate``.
    """
    batch = _RolloutBatch(lm, input_ids, input_lengths, options)
    async with contextlib.aclosing(batch.completions()) as finished:
        found = {number: completion async for number, completion in finished}
    completions = [found[number] for number in range(len(found))]
    return batch.rollout(completions, input_ids.shape[1])


def rollout_sync(
    lm: AsyncLM, input_ids: Tensor, input_lengths: Tensor, **options: Unpack[RolloutOptions]
) -> Rollout:
    """Return the result of ``rollout``, blocking, also inside a running event loop. It runs in another
    thread; an interrupt cancels it."""
    return blocking(rollout(lm, input_ids, input_lengths, **options))


def rollout_samples(
    lm: AsyncLM, input_ids: Tensor, input_lengths: Tensor, **options: Unpack[RolloutOptions]
) -> AsyncGenerator[tuple[int, Rollout], None]:
    """Yield the number of each sample and its rollout, a batch of one, as they finish.

    Wrong arguments raise here, wrong options of texts when the first sample is taken. Leaving early
    cancels the rest, as for ``generate_many``: close a generator with further references, ``async with
    contextlib.aclosing(rollout_samples(…)) as …``. See ``rollout``."""
    return _RolloutBatch(lm, input_ids, input_lengths, options).samples()


class _RolloutBatch:
    """The checked prompts of a batch, and the options of each sample."""

    def __init__(
        self, lm: AsyncLM, input_ids: Tensor, input_lengths: Tensor, options: RolloutOptions
    ) -> None:
        given: dict[str, Any] = {**options}
        self._lm = check_lm(lm)
        others = "max_tokens", "stop", "logprobs"
        known = [name for name in RolloutOptions.__annotations__ if name not in others]
        check_options("rollout", given, known)
        self._pad_value = _check_pad_value(given.pop("pad_value", None))
        ids, lengths = _unpadded(input_ids, input_lengths, self._pad_value)
        if torch.iinfo(input_ids.dtype).max < lm.vocab_size - 1:
            raise InvalidRequest(
                f"input_ids are {input_ids.dtype}: not every token id fits in them"
            )
        if len(empty := np.flatnonzero(lengths == 0)):
            raise InvalidRequest(f"row {empty[0]} is empty: a prompt has at least one token")
        if len(long := np.flatnonzero(lengths > lm.max_model_len)):
            raise ContextTooLong(
                f"row {long[0]} has {lengths[long[0]]} tokens, over max_model_len={lm.max_model_len}"
            )
        self._like = input_ids
        seed = check_seed(given.pop("seed", None))
        stops = given.pop("stop_strings", None)
        if not is_per_sample(stops):
            given |= {} if stops is None else {"stop": stops}
            stops = [None] * len(ids)
        elif len(stops) != len(ids):
            raise InvalidRequest(
                f"stop_strings has length {len(stops)}, not {len(ids)}: give one for each sample"
            )
        most = given.pop("max_new_tokens", None)
        most = None if most is None else check_int("max_new_tokens", most, 1)
        least = check_int("min_tokens", given.pop("min_tokens", 0), 0, most)
        on_timeout = given.pop("on_timeout", "raise")
        check_one_of("on_timeout", on_timeout, get_args(OnTimeout))
        self._truncates = on_timeout == "truncate"
        self._form: MaskForm | None = given.get("sampling_mask")
        self._given = given
        self._items: dict[int, Item] = {}  # of prompts that have room for a token
        self._full: dict[int, tuple[int, ...]] = {}  # the others
        for number, row in enumerate(ids):
            prompt = row[: lengths[number]].tolist()
            id_words(prompt, lm.vocab_size, name=f"token ids of row {number}")
            if room := lm.max_model_len - len(prompt):
                room = room if most is None else min(most, room)
                own: dict[str, Any] = {"max_tokens": room, "min_tokens": min(least, room)}
                own |= {} if seed is None else {"seed": seed_at(seed, number)}
                own |= {} if stops[number] is None else {"stop": stops[number]}
                self._items[number] = Item(prompt, options=cast("Any", own))
            else:
                self._full[number] = tuple(prompt)

    async def completions(self) -> AsyncGenerator[tuple[int, Completion], None]:
        """Yield the number of each sample and its completion, as they finish. Raise the first error."""
        numbers = [*self._items]
        texts = generate_many(
            self._lm, self._items.values(), on_error="return", logprobs=0, **self._given
        )
        async with contextlib.aclosing(texts):
            async for place, text in texts:
                if isinstance(text, Failed) and isinstance(text.error, TimedOut):
                    text = text.partial if self._truncates and text.partial else text
                if isinstance(text, Failed):
                    text.error.add_note(f"sample {numbers[place]} of rollout")
                    raise text.error
                yield numbers[place], text
        for number, prompt in self._full.items():
            none: Any = ("", (), prompt, (), (), "length", None, 0.0, 0.0)
            version = self._lm.weights_version
            yield number, dataclasses.replace(Completion(*none), weights_version=version)

    async def samples(self) -> AsyncGenerator[tuple[int, Rollout], None]:
        """Yield the number of each sample and its rollout, as they finish."""
        async with contextlib.aclosing(self.completions()) as finished:
            async for number, completion in finished:
                yield number, self.rollout([completion], len(completion.prompt_token_ids))

    def rollout(self, completions: Sequence[Completion], width: int) -> Rollout:
        """Return the rollout of completions after prompts that are padded to ``width``."""
        drawn = [len(each.token_ids) for each in completions]
        before = [len(each.prompt_token_ids) for each in completions]
        shape = len(completions), width + max(drawn, default=0)
        output_ids = np.full(shape, self._pad_value, dtype=np.int64)
        logprobs = np.zeros(shape, dtype=np.float32)
        versions = np.full(shape, -1, dtype=np.int64)
        for row, each in enumerate(completions):
            end = before[row] + drawn[row]
            output_ids[row, :end] = (*each.prompt_token_ids, *each.token_ids)
            logprobs[row, before[row] : end] = each.logprobs
            for version, *span in each.weights_spans:
                versions[row, before[row] : end][slice(*span)] = version
        masks = [each.sampling_mask for each in completions]
        places = [place for mask in masks if mask is not None for place in mask.places]
        words = -(-self._lm.vocab_size // 32)
        device = self._like.device
        lengths = torch.tensor([drawn, before], dtype=torch.int64, device=device)
        return Rollout(
            torch.from_numpy(output_ids).to(device, self._like.dtype),
            lengths[0],
            lengths.sum(0),
            torch.from_numpy(logprobs).to(device),
            torch.tensor([each.truncated for each in completions], dtype=torch.bool, device=device),
            torch.from_numpy(versions).to(device),
            tuple(completions),
            None if self._form is None else SamplingMask(self._form, tuple(places), words),
        )


def is_per_sample(given: object) -> bool:
    """Return whether stop strings are a list for the samples, rather than texts for all of them."""
    kinds = (list, tuple, set, frozenset, np.ndarray, Tensor)
    return isinstance(given, list | tuple) and any(
        each is None or isinstance(each, kinds) for each in given
    )


def _check_pad_value(pad_value: int) -> int:
    if pad_value is None:
        raise InvalidRequest(
            "pad_value must be an int, got None: where a tokenizer has no pad_token_id, its eos_token_id "
            "will do, for lengths say what is padding"
        )
    return check_int("pad_value", pad_value, -(2**63), 2**63 - 1)


def _unpadded(ids: Tensor, lengths: Tensor, pad_value: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch padded on the right, int64 ``[batch, time]``, and its lengths, on the host."""
    tokens = _integer_array(ids, "input_ids", 2)
    counts = _integer_array(lengths, "input_lengths", 1)
    if not torch.iinfo(ids.dtype).min <= pad_value <= torch.iinfo(ids.dtype).max:
        raise InvalidRequest(
            f"pad_value={shown(pad_value)} does not fit {ids.dtype}, the dtype of input_ids"
        )
    batch, width = tokens.shape
    if len(counts) != batch:
        raise InvalidRequest(
            f"input_lengths has length {len(counts)}, not {batch}: one for each row"
        )
    out = np.flatnonzero((counts < 0) | (counts > width))
    if len(out):
        raise InvalidRequest(
            f"row {out[0]}: input_lengths says {counts[out[0]]}, and input_ids is {width} wide"
        )
    wrong = (tokens != pad_value) & (np.arange(width) >= counts[:, None])
    if wrong.any():
        row, position = np.argwhere(wrong)[0]
        is_left = counts[row] and tokens[row, 0] == pad_value
        advice = "; it looks padded on the left" if is_left else ""
        raise InvalidRequest(
            f"row {row}, position {position} of input_ids: there is {tokens[row, position]} behind the "
            f"row's length of {counts[row]}, where padding must be {pad_value}{advice}"
        )
    return tokens, counts


def _integer_array(tensor: object, name: str, dimensions: int) -> np.ndarray:
    if not isinstance(tensor, Tensor):
        raise InvalidRequest(f"{name} must be a tensor, got {shown(tensor)}")
    kind = tensor.dtype
    is_integer = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
    if tensor.dim() != dimensions or not is_integer:
        shape = "[batch, time]" if dimensions == 2 else "[batch]"
        raise InvalidRequest(
            f"{name} must be integers {shape}, got {kind} of shape {list(tensor.shape)}"
        )
    return host_array(tensor, name).astype(np.int64)
