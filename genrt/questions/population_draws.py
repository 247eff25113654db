"""The draws of a population: one request, however many its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from genrt.numbers import check_float
from genrt.questions.contexts import Adapter, check_seed, seeds_at
from genrt.questions.draws import DrawToken
from genrt.questions.masks import Masks, packed_masks
from genrt.questions.reads import Answering, moved
from genrt.questions.rows import LogprobsRequest
from genrt.tokens.rows import Leaving, together
from genrt.tokens.sampling import BatchDraw, Draw, drawn, rows_at_once, seeded_uniforms

__all__ = ["PopulationDraw", "joined_draws", "population_draws"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PopulationDraw:
    """A draw after each of several sequences, which may be equal. No two requests are.

    Attributes:
        rows: the rows to draw from, at least one, with the same adapter.
        masks: uint8 ``[n, size]``, each as ``draws.DrawToken`` has one; ``None`` is every token.
        temperature: of all.
        seeds: uint64 ``[n]``: what each is drawn from.
    """

    rows: Sequence[LogprobsRequest]
    masks: np.ndarray | None
    temperature: float
    seeds: np.ndarray

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first of the contexts."""
        return self.rows[0].token_ids

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that the rows are computed with."""
        return self.rows[0].adapter

    @property
    def nbytes(self) -> int:
        """The memory that the contexts and masks take."""
        return sum([row.nbytes for row in self.rows]) + getattr(self.masks, "nbytes", 0)

    def bound_to(self, adapter: Adapter | None) -> PopulationDraw:
        """Return the same question to another adapter."""
        return replace(self, rows=[row.bound_to(adapter) for row in self.rows])

    def owned(self, result: object) -> object:
        """Return the result, which one caller alone asked for."""
        return result

    def parts(self, size: int) -> Iterator[PopulationDraw]:
        """Yield requests for ``size`` of the sequences at a time."""
        for start in range(0, len(self.rows), size):
            part = slice(start, start + size)
            masks = None if self.masks is None else self.masks[part]
            yield PopulationDraw(self.rows[part], masks, self.temperature, self.seeds[part])

    def answer(self, rows: Sequence[Tensor], engine: Answering) -> BatchDraw:
        """Return the draws from these rows, one for each sequence, by one copy to the host. The engine is
        told of the tokens before anything waits for them."""
        size = rows_at_once(rows[0])
        parts = [
            part._drawn(rows[start : start + size])
            for start, part in zip(range(0, len(rows), size), self.parts(size), strict=True)
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        on_host = Leaving(whole)
        engine.expect(self.rows, whole[:, 0])
        token_ids, logprobs, log_mass = on_host.arrived().unbind(dim=-1)
        return BatchDraw(token_ids.long(), logprobs.float(), log_mass.float())

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

    def _drawn(self, rows: Sequence[Tensor]) -> Tensor:
        device, heat, masks = rows[0].device, None, None
        numbers = moved(seeded_uniforms(self.seeds), device)
        if self.temperature != 1.0:
            heat = moved(torch.full((len(rows), 1), self.temperature, dtype=torch.float64), device)
        if self.masks is not None:
            shape = self.masks.shape
            packed = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
            packed.numpy()[:] = self.masks
            masks = packed.to(device, non_blocking=True)
        return drawn(together(rows), numbers, mask=masks, heat=heat)

    def __repr__(self) -> str:
        return f"PopulationDraw({len(self.rows)} sequences, adapter={self.adapter})"


def population_draws(
    rows: Sequence[LogprobsRequest],
    places: np.ndarray,
    nonces: Iterator[int],
    masks: Masks | None,
    count: int,
    vocab_size: int,
    temperature: float,
    seed: int | None,
) -> list[PopulationDraw]:
    """Return the request for draws from these rows, of the sequences at ``places`` of ``count``; none if
    there are no rows. ``masks`` has one for each of the ``count``.

    Raises:
        InvalidRequest: masks or a parameter of the wrong type, shape or range.
    """
    temperature = check_float("temperature", temperature, 0.0)
    seed, packed = check_seed(seed), packed_masks(masks, count, vocab_size)
    if not rows:
        return []
    chosen = np.fromiter(nonces, np.uint64, len(rows)) if seed is None else seeds_at(seed, places)
    if packed is not None and len(places) < count:
        packed = packed[places]
    return [PopulationDraw(rows, packed, temperature, chosen)]


def joined_draws(several: Sequence[BatchDraw], places: np.ndarray, count: int) -> BatchDraw:
    """Return draws of the sequences at ``places`` of ``count``; of the others, token -1, logprob 0 and
    log mass 0."""
    if len(several) == 1 and len(places) == count:
        return several[0]
    whole = BatchDraw(torch.full((count,), -1), torch.zeros(count), torch.zeros(count))
    if several:
        at = torch.from_numpy(places)
        for target, parts in zip(whole, zip(*several, strict=True), strict=True):
            target[at] = torch.cat(parts)
    return whole
