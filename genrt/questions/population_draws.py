"""The draws of a population: one request, however many its sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from genrt.numbers import check_float
from genrt.questions.contexts import Adapter, check_seed, seeds_at
from genrt.questions.draws import DrawToken
from genrt.questions.masks import Masks, packed_masks
from genrt.questions.origins import Asked, Origins
from genrt.questions.reads import moved
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import Contexts
from genrt.tokens.draw_graphs import DrawGraphs, Draws, fill
from genrt.tokens.rows import Leaving, together
from genrt.tokens.sampling import BatchDraw, Draw, drawn, rows_at_once, seeded_uniforms

__all__ = ["PopulationDraw", "joined_draws", "launched", "population_draw"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PopulationDraw:
    """A draw after each of several sequences, which may be equal. No two requests are.

    Attributes:
        contexts: the sequences, at least one.
        adapter: what their rows are computed with.
        masks: uint8 ``[n, size]``, each as ``draws.DrawToken`` has one; ``None`` is every token.
        temperature: of all.
        seeds: uint64 ``[n]``: what each is drawn from.
        origins: where each comes from, if all are one token longer than that.
        weights_version: the version of the model's weights, as a ``LogprobsRequest`` has it.
        came_from: the questions whose sequences these were, before whatever has changed them since: who
            was asked those has most of the rows.
        asked: stands for these sequences in what is asked later.
    """

    contexts: Contexts
    adapter: Adapter | None
    masks: np.ndarray | None
    temperature: float
    seeds: np.ndarray
    origins: Origins | None = None
    weights_version: int = 0
    came_from: tuple[Asked, ...] = ()
    asked: Asked = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "asked", Asked(len(self.contexts)))

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def rows(self) -> list[LogprobsRequest]:
        """The questions for the rows that are drawn from, in order; made every time."""
        return self.contexts.rows(self.adapter, self.weights_version)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first of the contexts."""
        return LogprobsRequest(packed=self.contexts.packed(0)).token_ids

    @property
    def weight(self) -> int:
        """How many questions it counts as: one for each sequence."""
        return len(self.contexts)

    @property
    def nbytes(self) -> int:
        """The memory that the contexts and masks take."""
        return self.contexts.nbytes + getattr(self.masks, "nbytes", 0)

    def bound_to(self, adapter: Adapter | None) -> PopulationDraw:
        """Return the same question to another adapter."""
        return replace(self, adapter=adapter, origins=None, came_from=())

    def of_weights(self, version: int) -> PopulationDraw:
        """Return the same question, about the same sequences, to this version of the weights."""
        again = replace(self, weights_version=version)
        object.__setattr__(again, "asked", self.asked)
        return again

    def owned(self, result: object) -> object:
        """Return the result, which one caller alone asked for."""
        return result

    def parts(self, size: int) -> Iterator[PopulationDraw]:
        """Yield requests for ``size`` of the sequences at a time."""
        if len(self) <= size:
            yield self
            return
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            origins = None if self.origins is None else self.origins.take(part).needed()
            yield PopulationDraw(
                self.contexts.part(part),
                self.adapter,
                None if self.masks is None else self.masks[part],
                self.temperature,
                self.seeds[part],
                origins,
                self.weights_version,
                self.came_from if origins is None else origins.asked,
            )

    def drawn(self, rows: Sequence[Tensor] | Tensor, places: np.ndarray | None = None) -> Tensor:
        """Return the draws as ``sampling.drawn`` does, without waiting for the device: from a row for
        each sequence, or from row ``places[i]`` for sequence ``i``."""
        return _drawn([self], rows, [places])

    def is_answer(self, rows: Sequence[Tensor], result: object) -> bool:
        """Return whether each draw is possible after its row, as ``DrawToken.is_answer`` has it."""
        if not isinstance(result, BatchDraw) or len(result.token_ids) != len(rows):
            return False
        draws = map(Draw, *[numbers.tolist() for numbers in result])
        masks = [None] * len(rows) if self.masks is None else [m.tobytes() for m in self.masks]
        return all(
            DrawToken(mask, self.temperature, seed=0).is_answer(row, draw)
            for row, mask, draw in zip(rows, masks, draws, strict=True)
        )

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
    came_from: tuple[Asked, ...] = (),
) -> PopulationDraw | None:
    """Return the request for draws after these contexts, of the sequences at ``places`` of ``count``;
    ``None`` if there are none. ``masks`` has one for each of the ``count``.

    Raises:
        InvalidRequest: masks or a parameter of the wrong type, shape or range.
    """
    temperature = check_float("temperature", temperature, 0.0)
    seed, packed = check_seed(seed), packed_masks(masks, count, vocab_size)
    if not len(contexts):
        return None
    drawn_from = (
        np.fromiter(nonces, np.uint64, len(places)) if seed is None else seeds_at(seed, places)
    )
    if packed is not None and len(places) < count:
        packed = packed[places]
    own = contexts, adapter, packed, temperature, drawn_from, origins
    return PopulationDraw(*own, came_from=came_from)


def launched(
    several: Sequence[PopulationDraw],
    rows: Tensor,
    places: Sequence[np.ndarray | None],
    graphs: DrawGraphs,
) -> tuple[Tensor, Leaving]:
    """Return what ``drawn`` does of each population, one after the other, and the same on its way to the
    host: by one launch where it can be, and valid until the next one then."""
    if all(each.temperature == 1.0 for each in several):
        draws = [
            Draws(each.seeds, each.masks, at) for each, at in zip(several, places, strict=True)
        ]
        if (found := graphs.drawn(rows, draws)) is not None:
            return found
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for number, each in enumerate(several):
        kinds.setdefault((each.masks is None, each.temperature == 1.0), []).append(number)
    parts: dict[int, Tensor] = {}
    for numbers in kinds.values():
        alike = [several[number] for number in numbers]
        draws_of = _drawn(alike, rows, [places[number] for number in numbers])
        sizes = [len(each) for each in alike]
        parts |= zip(numbers, torch.split(draws_of, sizes), strict=True)
    whole = _one([parts[number] for number in range(len(several))], torch.cat)
    return whole, Leaving(whole)


def _drawn(
    several: Sequence[PopulationDraw],
    rows: Sequence[Tensor] | Tensor,
    places: Sequence[np.ndarray | None],
) -> Tensor:
    """Return the draws of populations, one after the other; all have masks, or none, and all the
    temperature 1, or all another."""
    device, heat, at = rows[0].device, None, None
    masks = [each.masks for each in several if each.masks is not None]
    uniforms = seeded_uniforms(_one([each.seeds for each in several], np.concatenate))
    numbers, mask = _moved(uniforms, _one(masks, np.concatenate) if masks else None, device)
    if several[0].temperature != 1.0:
        heats = [np.full((len(each), 1), each.temperature) for each in several]
        heat = moved(torch.from_numpy(np.concatenate(heats)), device)
    each_at = [
        np.arange(len(each)) if there is None else there
        for each, there in zip(several, places, strict=True)
    ]
    all_at = _one(each_at, np.concatenate)
    # So that a CPU gathers nothing. A GPU finds rows by their places, and compiles for their alignment.
    if (device.type == "cpu" or all_at[0] == 0) and (np.diff(all_at) == 1).all():
        rows = rows[all_at[0] : all_at[-1] + 1]
    else:
        at = moved(torch.from_numpy(all_at), device)
    size, parts = rows_at_once(rows[0]), list[Tensor]()
    for start in range(0, len(numbers), size):
        part = slice(start, start + size)
        batch = rows if at is not None else rows[part]
        bits, hot, there = [None if x is None else x[part] for x in (mask, heat, at)]
        batch = batch if isinstance(batch, Tensor) else together(batch)
        parts.append(drawn(batch, numbers[part], mask=bits, heat=hot, places=there))
    return _one(parts, torch.cat)


def _one(parts: list[T], joined: Callable[[list[T]], T]) -> T:
    """Return parts as one, without copying one alone."""
    return parts[0] if len(parts) == 1 else joined(parts)


def joined_draws(several: Sequence[BatchDraw], places: np.ndarray, count: int) -> BatchDraw:
    """Return draws of the sequences at ``places`` of ``count``; of the others, token -1, logprob 0 and
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


def _moved(
    uniforms: Tensor, masks: np.ndarray | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return random numbers, float64 ``[n, 2]``, and masks on the device: by one copy, without
    synchronizing with it."""
    if masks is None:
        return moved(uniforms, device), None
    if device.type == "cpu" and masks.flags.writeable:  # or torch warns
        return uniforms, torch.from_numpy(masks)
    count, first = len(uniforms), uniforms.nbytes
    both = torch.empty(first + masks.size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    both[:first] = uniforms.view(torch.uint8).reshape(-1)
    packed = both[first:].view(masks.shape)
    fill(packed, masks)
    both = both.to(device, non_blocking=True)
    return both[:first].view(torch.float64).view(count, 2), both[first:].view(masks.shape)
