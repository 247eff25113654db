"""Draws: one token of a row, sampled on the device under a mask, with its importance weight.

``DrawToken`` reads one row; ``PopulationDraw`` is one request for many sequences. Both draw by
``draw_from_rows``, so a seed gives the same token either way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch import Tensor

from genrt.numbers import check_float
from genrt.questions.arguments import Adapter, TokenIds, check_seed, deciding_seed, seeds_at
from genrt.questions.masks import Mask, Masks, packed_mask, packed_masks
from genrt.questions.reads import Answering, Read, ReadRequest, Wanted, wanted_of
from genrt.questions.request import Request
from genrt.questions.rows import Limits, LogprobsRequest, row_request
from genrt.questions.scores import ScoreRequest
from genrt.questions.sequences import Contexts, Origins, SequenceHandle, token_counts
from genrt.tokens.rows import AsyncHostCopy, gather_rows, moved
from genrt.tokens.sampling import (
    BatchDraw,
    Draw,
    DrawGraphs,
    DrawInputs,
    Laws,
    PackedMasks,
    copy_masks,
    draw_chunk,
    rows_at_once,
    seeded_uniforms,
)


@dataclass(frozen=True, slots=True)
class DrawToken(Wanted):
    """One token with its importance weight. The answer is a ``Draw``.

    Attributes:
        mask: the allowed tokens, packed: token ``i`` is bit ``i % 8`` of byte ``i // 8``, in whole 32-bit
            words with 0 beyond the vocabulary; ``None`` allows every token.
        temperature: 0 is greedy; otherwise the masked row is divided by it.
        seed: fixes the draw, independent of the rest of the batch.
        nonce: as in ``SampleRequest``.
    """

    mask: bytes | None = None
    temperature: float = 1.0
    seed: int | None = None
    nonce: int | None = None

    def __hash__(self) -> int:
        # A mask is long; a nonce identifies its draw.
        own = self.mask if self.nonce is None else self.nonce
        return hash((self.temperature, self.seed, own))

    @property
    def nbytes(self) -> int:
        return len(self.mask or b"")

    @property
    def group(self) -> tuple[type, bool]:
        """The kind of reads that are answered together: draws at temperature 1 need fewer kernels."""
        return type(self), self.temperature == 1.0

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[Draw]:
        """Return the draws by one copy to the host; logprob and log mass are float32 numbers. The engine
        learns of the tokens before the host waits for them."""
        wanted: list[DrawToken] = wanted_of(reads)
        rows, masks, heats = [read.row for read in reads], None, None
        if any(each.mask is not None for each in wanted):
            every = b"\xff" * (-(-len(rows[0]) // 32) * 4)
            masks = [every if each.mask is None else each.mask for each in wanted]
        if wanted[0].temperature != 1.0:
            heats = np.array([each.temperature for each in wanted])
        seeds = np.array([deciding_seed(each) for each in wanted], np.uint64)
        whole = draw_from_rows(rows, seeds, masks, heats)
        on_host = AsyncHostCopy(whole)
        engine.expect([read.request.row for read in reads], whole[:, 0])
        token_ids, logprobs, log_mass = on_host.result().unbind(dim=-1)
        columns = token_ids.long(), logprobs.float(), log_mass.float()
        found = zip(*[each.tolist() for each in columns], strict=True)
        return map(Draw.of, found, [read.request.weights_version for read in reads])


def draw_request(
    limits: Limits,
    token_ids: TokenIds,
    adapter: Adapter | None,
    nonce: int,
    mask: Mask | None,
    temperature: float,
    seed: int | None,
) -> ReadRequest:
    """Return the request for a draw; ``nonce`` decides it unless a seed or temperature 0 does. Raises
    InvalidRequest for a bad argument, ContextTooLong for too many token ids."""
    row = row_request(limits, token_ids, adapter)
    temperature, seed = draw_temperature(temperature), check_seed(seed)
    packed = None if mask is None else packed_mask(mask, limits.vocab_size)
    if temperature == 0.0:
        return ReadRequest(row, DrawToken(packed, 0.0))
    own = nonce if seed is None else None
    return ReadRequest(row, DrawToken(packed, temperature, seed, own))


def draw_temperature(temperature: float) -> float:
    """Return the temperature of a draw. Raises InvalidRequest unless it is finite and at least 0."""
    if type(temperature) is float and 0.0 <= temperature < math.inf:
        return temperature  # at once, for the many draws of a step
    return check_float("temperature", temperature, 0.0)


def batch_draw(draws: Sequence[Draw]) -> BatchDraw:
    """Return single draws as tensors on the host."""
    token_ids, logprobs, masses = zip(*draws, strict=True) if draws else ((), (), ())
    columns = torch.tensor(token_ids, dtype=torch.int64), *map(torch.tensor, (logprobs, masses))
    return BatchDraw.of(columns, draws[0].weights_version if draws else 0)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PopulationDraw(Request):
    """A draw after each of several sequences, which may be equal. Without seeds, the rows, ``[n,
    vocab_size]``, or with a ``block``, the log-probabilities of its tokens. No two requests are equal.

    With k ``laws``, k sequences in turn are one text after k prompts, and get one draw. Its weights are
    the product of their tempered rows to the powers, and its log mass is that of all allowed weights.

    Attributes:
        contexts: the sequences, at least one.
        masks: one for each draw; ``None`` allows every token.
        temperature: of all draws.
        seeds: uint64 ``[n]``, one for each draw, or ``[n, k]`` for k draws in turn after each sequence,
            each after the token before; without them, the request is for the rows.
        origins: where to find the sequences that these extend, if each extends one.
        came_from: the handles of all sequences that these extend, which stay known until then.
        laws: the temperature and the power of each factor; without them, the weights are the row.
        block: known tokens, int64 ``[n, k]``, at least one of each sequence, with -1 after the last. A
            context ends before the last token. The answer is float32 ``[n, k]``, 0 after the last token,
            from rows at the temperature.
        handle: stands for these sequences in later origins.
    """

    contexts: Contexts
    adapter: Adapter | None
    masks: PackedMasks | None
    temperature: float
    seeds: np.ndarray | None
    origins: Origins | None = None
    weights_version: int = 0
    came_from: tuple[SequenceHandle, ...] = ()
    laws: Laws = ()
    block: np.ndarray | None = None
    handle: SequenceHandle = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", SequenceHandle(len(self.contexts)))

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def steps(self) -> int:
        """How many draws in turn there are after each sequence; 0 for a single draw or rows."""
        return 0 if self.seeds is None or self.seeds.ndim == 1 else int(self.seeds.shape[1])

    def step(
        self, number: int, before: PopulationDraw | None = None, token_ids: Tensor | None = None
    ) -> PopulationDraw:
        """Return the request for draw ``number`` in turn, from 0, after the request before it has drawn
        these tokens, int64 ``[n]``. The last one has this request's handle."""
        found = replace(self, seeds=cast("np.ndarray", self.seeds)[:, number])
        if before is not None and token_ids is not None:
            every, new = np.arange(len(self)), token_ids.numpy().astype(np.uint32)
            contexts = Contexts.grown([before.contexts], every, new)
            origins = Origins((before.handle,), every, before.contexts.lengths)
            found = replace(found, contexts=contexts, origins=origins, came_from=origins.handles)
        if number + 1 == self.steps:
            object.__setattr__(found, "handle", self.handle)
        return found

    @property
    def rows(self) -> list[LogprobsRequest]:
        """The requests for the rows, in order; created at every access."""
        return self.contexts.rows(self.adapter, self.weights_version)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first context."""
        return LogprobsRequest(packed=self.contexts.packed(0)).token_ids

    @property
    def weight(self) -> int:
        return len(self.contexts)

    @property
    def nbytes(self) -> int:
        return self.contexts.nbytes + (
            0 if self.masks is None else len(self.masks) * self.masks[0].nbytes
        )

    @property
    def mask_table(self) -> np.ndarray | None:
        """The masks as one array, uint8 ``[n, size]``."""
        if self.masks is None or isinstance(self.masks, np.ndarray):
            return self.masks
        table: np.ndarray = torch.stack([*self.masks]).numpy().view(np.uint8)
        return table

    def bound_to(self, adapter: Adapter | None) -> PopulationDraw:
        return replace(self, adapter=adapter, origins=None, came_from=())

    def of_weights(self, version: int) -> PopulationDraw:
        again = replace(self, weights_version=version)
        object.__setattr__(again, "handle", self.handle)
        return again

    def score(self, number: int) -> ScoreRequest:
        """Return the request for the log-probabilities of one sequence's tokens in the block."""
        tokens = cast("np.ndarray", self.block)[number]
        tokens = tokens[tokens >= 0]
        text = self.contexts.packed(number) + tokens[-1:].astype(np.uint32).tobytes()
        start = int(self.contexts.lengths[number]) + 1 - len(tokens)
        own = text, start, self.adapter, self.weights_version
        return ScoreRequest(*own, temperature=self.temperature)

    def sources(self, *, in_one: bool) -> list[LogprobsRequest] | list[ScoreRequest]:
        """Return the requests that ``answer`` needs the results of: for a block, one for each sequence if
        ``in_one``, otherwise the row before each token."""
        if self.block is None:
            return self.rows
        scores = [self.score(number) for number in range(len(self))]
        return scores if in_one else [row for each in scores for row in each.rows]

    def scored(self, results: Sequence[Tensor], *, in_one: bool) -> Tensor:
        """Return the answer for a block, on the host, from the results of its ``sources``."""
        block, found = cast("np.ndarray", self.block), iter(results)
        whole = torch.zeros(block.shape)
        for number, count in enumerate(token_counts(block).tolist()):
            if in_one:
                whole[number, :count] = next(found)
            else:
                whole[number, :count] = self.score(number).answer([*islice(found, count)])
        return whole

    def parts(self, size: int) -> Iterator[PopulationDraw]:
        """Yield requests for ``size`` sequences at a time, or for those of one text."""
        turns = len(self.laws) or 1
        size = max(turns, size - size % turns)
        if len(self) <= size:
            yield self
            return
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            draws = slice(start // turns, (start + size) // turns)
            origins = None if self.origins is None else self.origins.take(part).needed()
            yield replace(
                self,
                contexts=self.contexts.part(part),
                masks=None if self.masks is None else self.masks[draws],
                seeds=None if self.seeds is None else self.seeds[draws],
                origins=origins,
                came_from=self.came_from if origins is None else origins.handles,
                block=None if self.block is None else self.block[part],
            )

    def draw(self, rows: Sequence[Tensor] | Tensor, places: np.ndarray | None = None) -> Tensor:
        """Return the draws as ``draw_from_rows`` does, one for each sequence. Without seeds, return the
        rows: a copy of a tensor's, or a view of separate ones."""
        rows = rows[: len(self)] if places is None else rows
        if self.seeds is None:
            if not isinstance(rows, Tensor):
                return gather_rows(rows)
            at = np.arange(len(self)) if places is None else places
            return rows.index_select(0, moved(torch.from_numpy(at), rows.device))
        heats = None if self.temperature == 1.0 else np.full(len(self.seeds), self.temperature)
        found = draw_from_rows(rows, self.seeds, self.masks, heats, places, self.laws)
        turns = len(self) // len(found)
        return found if turns == 1 else found.repeat_interleave(turns, dim=0)

    def __repr__(self) -> str:
        return f"PopulationDraw({len(self)} sequences, adapter={self.adapter})"


def population_draw(
    contexts: Contexts,
    adapter: Adapter | None,
    places: np.ndarray,
    nonces: Iterator[int],
    masks: Masks | None,
    count: int,
    vocab_size: int,
    temperature: float,
    seed: int | None,
    origins: Origins | None = None,
    came_from: tuple[SequenceHandle, ...] = (),
    laws: Laws = (),
) -> PopulationDraw | None:
    """Return the request for draws after these contexts, or ``None`` if there are none. They are the
    sequences at ``places`` of a caller with ``count`` sequences; ``masks`` has one for each of these, or
    for each text of these. Raises InvalidRequest for bad masks or a bad parameter."""
    turns = len(laws) or 1
    temperature, seed = draw_temperature(temperature), check_seed(seed)
    packed = packed_masks(masks, count // turns, vocab_size)
    if not len(contexts):
        return None
    texts = places[::turns] // turns
    seeds = np.fromiter(nonces, np.uint64, len(texts)) if seed is None else seeds_at(seed, texts)
    if packed is not None and len(places) < count:
        packed = packed[texts]
    return PopulationDraw(
        contexts, adapter, packed, temperature, seeds, origins, came_from=came_from, laws=laws
    )


def block_seeds(nonces: Iterator[int], seed: int | None, count: int, length: int) -> np.ndarray:
    """Return the seeds of ``length`` draws in turn after each of ``count`` sequences: uint64
    ``[count, length]``. The first column has the seeds of a single draw."""
    if seed is None:
        found = np.fromiter(nonces, np.uint64, count * length)
        return found.reshape(length, count).T
    later = [step_seed(seed, number) for number in range(2, length + 1)]
    return np.stack([seeds_at(each, np.arange(count)) for each in (seed, *later)], axis=1)


def step_seed(seed: int, number: int) -> int:
    """Return the seed of the numbered draw in turn, below 2^63; the first has number 1."""
    state = np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1, np.uint64)
    return int(state[0] >> 1)


def merge_draws(several: Sequence[BatchDraw], places: np.ndarray, count: int) -> BatchDraw:
    """Return draws of the sequences at ``places`` of ``count``. The others get token -1, logprob 0 and
    log mass 0."""
    if len(several) == 1 and np.array_equal(places, np.arange(count)):
        return several[0]
    whole = BatchDraw(torch.full((count,), -1), torch.zeros(count), torch.zeros(count))
    if several:
        at = torch.from_numpy(places)
        for target, parts in zip(whole, zip(*several, strict=True), strict=True):
            target[at] = torch.cat(parts)
        whole.weights_version = several[0].weights_version
    return whole


def launch_draws(
    several: Sequence[PopulationDraw],
    rows: Tensor,
    places: Sequence[np.ndarray | None],
    graphs: DrawGraphs,
) -> tuple[Tensor, AsyncHostCopy]:
    """Return the draws of all populations in order, and their copy on its way to the host.

    One launch draws all of them if a graph can and they have the same laws; both results are then valid
    until the next launch. Sequence ``i`` of population ``k`` draws from row ``places[k][i]``, or from row
    ``i``.
    """
    pairs, laws = [*zip(several, places, strict=True)], several[0].laws
    if all(each.laws == laws for each in several):
        inputs = [
            DrawInputs(cast("np.ndarray", each.seeds), each.masks, at, each.temperature)
            for each, at in pairs
        ]
        if (found := graphs.launch(rows, inputs, laws)) is not None:
            return found
    whole = _one([each.draw(rows, at) for each, at in pairs])
    return whole, AsyncHostCopy(whole)


def draw_from_rows(
    rows: Sequence[Tensor] | Tensor,
    seeds: np.ndarray,
    masks: PackedMasks | Sequence[bytes] | None,
    heats: np.ndarray | None,
    places: np.ndarray | None = None,
    laws: Laws = (),
) -> Tensor:
    """Return one draw per seed as ``draw_chunk`` does, without waiting for the device.

    Args:
        rows: on one device, each ``[vocab_size]``.
        seeds: uint64 ``[n]``.
        masks: one for each draw, packed; also as bytes.
        heats: the temperatures, float64 ``[n]``; ``None`` is 1 for all.
        places: int64 ``[n]``: draw ``i`` is from row ``places[i]``; by default from row ``i``.
        laws: as in ``PopulationDraw``; a draw is then from as many rows or places in turn.
    """
    device, heat, at = rows[0].device, None, None
    numbers, mask = _moved_inputs(seeded_uniforms(seeds), masks, device)
    if heats is not None:
        heat = moved(torch.from_numpy(heats.reshape(-1, 1)), device)
    if places is not None:
        # A GPU reads rows by their places, and compiles for their alignment. A CPU copies no rows that
        # lie side by side.
        if (device.type == "cpu" or places[0] == 0) and (np.diff(places) == 1).all():
            rows = rows[places[0] : places[-1] + 1]
        else:
            at = moved(torch.from_numpy(places), device)
    turns, parts = len(laws) or 1, list[Tensor]()
    size = max(1, rows_at_once(rows[0]) // turns)
    for start in range(0, len(numbers), size):
        part, own = slice(start, start + size), slice(turns * start, turns * (start + size))
        batch = rows if at is not None else rows[own]
        bits, hot = [None if x is None else x[part] for x in (mask, heat)]
        there = None if at is None else at[own]
        batch = batch if isinstance(batch, Tensor) else gather_rows(batch)
        parts.append(draw_chunk(batch, numbers[part], mask=bits, heat=hot, places=there, laws=laws))
    return _one(parts)


def _one(parts: list[Tensor]) -> Tensor:
    """Return parts as one, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _moved_inputs(
    uniforms: Tensor, masks: PackedMasks | Sequence[bytes] | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return random numbers, float64 ``[n, 2]``, and masks on the device, by one copy."""
    if masks is None:
        return moved(uniforms, device), None
    if isinstance(masks, np.ndarray) and device.type == "cpu" and masks.flags.writeable:
        return uniforms, torch.from_numpy(masks)  # torch warns of others
    count, first = len(uniforms), uniforms.nbytes
    size = len(masks[0]) if isinstance(masks[0], bytes) else masks[0].nbytes
    both = torch.empty(first + count * size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    both[:first] = uniforms.view(torch.uint8).reshape(-1)
    if isinstance(masks[0], bytes):
        places = both.numpy().data
        for start, mask in zip(range(first, len(places), size), masks, strict=True):
            places[start : start + size] = cast("bytes", mask)
    else:
        copy_masks(both[first:].view(count, size), cast("PackedMasks", masks))
    both = both.to(device, non_blocking=True)
    return both[:first].view(torch.float64).view(count, 2), both[first:].view(count, size)
