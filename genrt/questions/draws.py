"""Draws: one token of a row, sampled on the device under a mask, with its importance weight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from genrt.numbers import check_float
from genrt.questions.contexts import Adapter, Limits, check_seed, seed_of
from genrt.questions.masks import Mask, packed_mask
from genrt.questions.reads import (
    Answering,
    Read,
    ReadRequest,
    Wanted,
    moved,
    parts_of,
    rows_of,
    wanted_of,
)
from genrt.questions.rows import row_request
from genrt.questions.token_ids import TokenIds
from genrt.tokens.rows import Leaving
from genrt.tokens.sampling import BatchDraw, Draw, drawn, seeded_uniforms

__all__ = ["DrawToken", "batch_draw", "draw_request"]

TOLERANCE = 1e-4
"""How far a draw's numbers may be from those of double precision."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawToken(Wanted):
    """Wanted of a row: one token, with its importance weight; the answer is a ``Draw``.

    Masks are long, so they are compared last. The hash looks at one only where nothing but the mask may
    tell draws apart: those with a nonce have that.

    Attributes:
        mask: the tokens that may be drawn, packed: token ``i`` is bit ``i % 8`` of byte ``i // 8``, in
            whole words of 32 bits, those beyond the vocabulary 0; ``None`` is every token.
        temperature: 0 is greedy; otherwise the row is divided by it, under the mask.
        seed: fixes the draw, whatever else is in the batch.
        nonce: sets apart the draws that are independent of each other, as in ``SampleRequest``.
    """

    mask: bytes | None = None
    temperature: float = 1.0
    seed: int | None = None
    nonce: int | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DrawToken):
            return NotImplemented
        return (
            self.nonce == other.nonce
            and self.seed == other.seed
            and self.temperature == other.temperature
            and self.mask == other.mask
        )

    def __hash__(self) -> int:
        if self.nonce is not None:
            return hash((self.temperature, self.seed, self.nonce))
        return hash((self.temperature, self.seed, self.mask))

    @property
    def nbytes(self) -> int:
        """The memory that the mask takes."""
        return len(self.mask or b"")

    @property
    def group(self) -> tuple[type, bool]:
        """Draws at temperature 1 need fewer kernels, so they are answered by themselves."""
        return type(self), self.temperature == 1.0

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[Draw]:
        """Return the draws, by one copy to the host; logprob and log mass are float32 numbers. The engine
        is told of the tokens before anything waits for them."""
        parts = [_drawn(part) for part in parts_of(reads)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        on_host = Leaving(whole)
        engine.expect([read.request.row for read in reads], whole[:, 0])
        token_ids, logprobs, log_mass = on_host.arrived().unbind(dim=-1)
        found = zip(
            token_ids.long().tolist(),
            logprobs.float().tolist(),
            log_mass.float().tolist(),
            strict=True,
        )
        return map(Draw.of, found, [read.request.weights_version for read in reads])

    def is_answer(self, row: Tensor, result: object, *, tolerance: float = TOLERANCE) -> bool:
        """Return whether the token of a draw is possible, and its two numbers are those of that token."""
        if not isinstance(result, Draw):
            return False
        tolerance = max(tolerance, TOLERANCE)
        masked = row.double().cpu()
        if self.mask is not None:
            bits = torch.frombuffer(bytearray(self.mask), dtype=torch.uint8)
            allowed = bits[:, None] >> torch.arange(8) & 1
            masked = masked.masked_fill(allowed.reshape(-1)[: len(row)] == 0, -math.inf)
        log_mass = float(masked.logsumexp(-1))
        if log_mass == -math.inf:
            return result == Draw(-1, -math.inf, -math.inf)
        if not 0 <= result.token_id < len(row) or abs(result.log_mass - log_mass) > tolerance:
            return False
        own = float(masked[result.token_id])
        if self.temperature == 0.0:
            return own >= float(masked.max()) - tolerance and result.logprob == 0.0
        if own == -math.inf:
            return False
        heated = masked / self.temperature
        expected = float(heated[result.token_id] - heated.logsumexp(-1))
        return abs(result.logprob - expected) <= tolerance * max(1.0, 1.0 / self.temperature)

    @classmethod
    def examples(cls, vocab_size: int, generator: torch.Generator) -> list[Self]:
        """Return draws with and without a mask, greedy ones and tempered ones."""
        allowed = torch.randperm(vocab_size, generator=generator)[: max(1, vocab_size // 3)]
        mask = packed_mask(allowed, vocab_size)
        return [cls(mask, seed=8), cls(seed=9), cls(mask, 0.0), cls(mask, 2.0, seed=10)]


def draw_request(
    limits: Limits,
    token_ids: TokenIds,
    adapter: Adapter | None,
    nonce: int,
    mask: Mask | None,
    temperature: float,
    seed: int | None,
) -> ReadRequest:
    """Return the request for a draw; ``nonce`` sets it apart unless a seed or temperature 0 decides it.

    Raises:
        InvalidRequest: a mask or parameter is of the wrong type, shape or range; bad token ids.
        ContextTooLong: too many of them.
    """
    row = row_request(limits, token_ids, adapter)
    if type(temperature) is not float or not 0.0 <= temperature < math.inf:
        temperature = check_float("temperature", temperature, 0.0, math.inf)
    seed = check_seed(seed)
    packed = None if mask is None else packed_mask(mask, limits.vocab_size)
    if temperature == 0.0:
        return ReadRequest(row, DrawToken(packed, 0.0))
    if seed is None:
        return ReadRequest(row, DrawToken(packed, temperature, nonce=nonce))
    return ReadRequest(row, DrawToken(packed, temperature, seed=seed))


def batch_draw(draws: Sequence[Draw]) -> BatchDraw:
    """Return the draws of one question as tensors on the host."""
    columns = (
        torch.tensor([each.token_id for each in draws], dtype=torch.int64),
        torch.tensor([each.logprob for each in draws]),
        torch.tensor([each.log_mass for each in draws]),
    )
    return BatchDraw.of(columns, draws[0].weights_version if draws else 0)


def _drawn(reads: Sequence[Read]) -> Tensor:
    """Return the draws as ``sampling.drawn`` does. Masks, temperatures and random numbers are on their
    way before the rows are touched, which may still be computed."""
    row = reads[0].row
    asked: list[DrawToken] = wanted_of(reads)
    numbers = moved(seeded_uniforms([seed_of(each) for each in asked]), row.device)
    heat = None
    if asked[0].temperature != 1.0:
        heats = torch.tensor([[each.temperature] for each in asked], dtype=torch.float64)
        heat = moved(heats, row.device)
    return drawn(rows_of(reads), numbers, mask=_masks(asked, row), heat=heat)


def _masks(asked: Sequence[DrawToken], row: Tensor) -> Tensor | None:
    """Return the masks as ``sampling.drawn`` takes them, packed and on the row's device; ``None`` if
    nothing is masked."""
    masks = [each.mask for each in asked]
    if not any(mask is not None for mask in masks):
        return None
    size = -(-len(row) // 32) * 4
    everything = b"\xff" * size
    packed = torch.empty(len(asked), size, dtype=torch.uint8, pin_memory=row.is_cuda)
    places = packed.view(-1).numpy().data
    for start, mask in zip(range(0, len(places), size), masks, strict=True):
        places[start : start + size] = everything if mask is None else mask
    return packed.to(row.device, non_blocking=True)
