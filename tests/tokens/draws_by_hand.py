"""DrawInputs of ``draw_kernels`` beside those of torch, and both beside the law in float64.

``python -m tests.tokens.draws_by_hand [width ...]`` runs the kernels in Triton's interpreter, on the CPU,
and prints where they disagree; it needs Triton.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from genrt.tokens import sampling, sets
from genrt.tokens.sampling import (
    BLOCK,
    GREEDY_BELOW,
    LARGEST,
    DrawGraphs,
    DrawInputs,
    Laws,
    draw_chunk,
    seeded_uniforms,
)

LAST = 1 - 2.0**-53
"""The largest number under 1 in float64."""
NEAR, TOLERANCE = 1e-5, 1e-4
"""How near to a boundary a uniform may go either way; how far logprobs and log masses may be off."""
WIDTHS = (5, 128, 1000, 4097, 9001)
"""A part of a block, a block, and several; a tile of blocks and a token; several tiles."""
HEATS = (1.0, 0.0, 0.3, 2.0, 1e30, 1e300, 0.9e-5, 1.0)
LAWS: tuple[Laws, ...] = (
    ((1.0, 2.5),),
    ((0.5, 1.0),),
    ((1.0, 1.0), (1.0, 0.3)),
    ((1.0, 1.5), (2.0, -0.5)),
    ((2.0, 1.5), (1.0, 1.0), (1e300, 2.0)),
)
"""A temperature and a power for each row of a draw."""


class Case(NamedTuple):
    """What ``draw_chunk`` is given."""

    batch: Tensor
    numbers: Tensor
    mask: Tensor | None = None
    heat: Tensor | None = None
    places: Tensor | None = None
    laws: Laws = ()


def by_torch(case: Case) -> Tensor:
    """Return the draws of torch's path as GPUs have it, where a mask chooses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "HOSTS", ())
        return by_the_way_of(case)


def by_the_way_of(case: Case) -> Tensor:
    """Return the draws of a case as this machine makes them."""
    batch, numbers, mask, heat, places, laws = case
    return draw_chunk(batch, numbers, mask=mask, heat=heat, places=places, laws=laws)


def disagreements(case: Case, found: Tensor, wanted: Tensor) -> list[str]:
    """Return what is wrong with the draws found: against those wanted, and by the law itself."""
    rows = _masked(case)
    uniforms = case.numbers.clamp(max=LARGEST)
    heat = torch.ones(len(rows), 1) if case.heat is None else case.heat
    peak = rows.max(-1, keepdim=True).values
    is_greedy = heat < GREEDY_BELOW
    heated = (rows - peak) / heat.masked_fill(is_greedy, 1.0)
    heated = torch.where(is_greedy, (rows == peak).double().log(), heated)
    uniforms = uniforms.masked_fill(is_greedy, 0.0)
    is_dead = ~(peak[:, 0].abs() < math.inf)

    wrong = []
    for index, (row, (first, second)) in enumerate(zip(heated, uniforms.tolist(), strict=True)):
        token, logprob, log_mass = found[index].tolist()
        expected_token, expected_logprob, expected_mass = wanted[index].tolist()
        own_mass = float(rows[index].logsumexp(-1))
        if not (_same(log_mass, expected_mass) and _same(log_mass, own_mass)):
            wrong.append(f"draw {index}: log mass {log_mass}, not {expected_mass} or {own_mass}")
        if is_dead[index]:
            if (token, logprob, expected_token) != (-1, -math.inf, -1):
                wrong.append(f"draw {index}: token {token}, {logprob} of a dead row")
            continue
        distance, by_law = _distance(row, int(token), first, second)
        if distance > NEAR:
            wrong.append(f"draw {index}: token {token} is {distance:.2g} off")
        if token != expected_token and distance < -NEAR:
            wrong.append(f"draw {index}: token {token}, not {expected_token}")
        if not _same(logprob, 0.0 if is_greedy[index] else by_law) or logprob > 0:
            wrong.append(f"draw {index}: logprob {logprob}, not {by_law}")
        if token == expected_token and not _same(logprob, expected_logprob):
            wrong.append(f"draw {index}: logprob {logprob}, not {expected_logprob}")
    return wrong


def _distance(row: Tensor, token: int, first: float, second: float) -> tuple[float, float]:
    """Return how far the uniforms are outside of a token's intervals, negative inside of them, and the
    token's logprob."""
    if row[token] == -math.inf:
        return math.inf, -math.inf
    start = token // BLOCK * BLOCK
    law, block = row.softmax(-1), row[start : start + BLOCK].softmax(-1)
    outside = -math.inf
    for weights, begin, end, uniform in (
        (law, start, start + BLOCK, first),
        (block, token - start, token - start + 1, second),
    ):
        low, high = float(weights[:begin].sum()), float(weights[:end].sum())
        outside = max(outside, low - uniform, uniform - high)
    return outside, float(row[token] - row.logsumexp(-1))


def _same(one: float, other: float) -> bool:
    """Return whether two numbers are near, or both NaN, or the same infinity."""
    return one == other or abs(one - other) <= TOLERANCE or (one != one and other != other)


def _masked(case: Case) -> Tensor:
    """Return each draw's weights in float64, -inf where nothing is allowed."""
    rows = case.batch.double()
    if case.places is not None:
        rows = rows[case.places]
    if case.laws:
        rows = multiplied(
            [rows[turn :: len(case.laws)] for turn in range(len(case.laws))], case.laws
        )
    if case.mask is None:
        return rows
    bits = np.unpackbits(case.mask.numpy(), axis=-1, bitorder="little")
    allowed = torch.from_numpy(bits).bool()[:, : rows.shape[-1]]
    return rows.masked_fill(~allowed, -math.inf)


def multiplied(factors: Sequence[Tensor], laws: Laws) -> Tensor:
    """Return the product of tempered rows to powers in float64: -inf where a row of positive power is."""
    likely, unlikely = torch.zeros(()), torch.zeros(())
    for rows, (heat, power) in zip(factors, laws, strict=True):
        own = rows.double()
        if heat < GREEDY_BELOW:
            own = torch.zeros_like(own).scatter(-1, own.argmax(-1, keepdim=True), 1.0).log()
        elif heat != 1.0:
            total = (own / heat).logsumexp(-1, keepdim=True)
            own = own / heat - total.masked_fill(total == -math.inf, 0.0)
        if power > 0:
            likely = likely + power * own
        else:
            unlikely = unlikely + power * own
    is_opposite = (likely == -math.inf) & (unlikely == math.inf)
    return likely + unlikely.masked_fill(is_opposite, 0.0)


def packed(allowed: Tensor) -> Tensor:
    """Return bools ``[n, V]`` as a packed mask."""
    bits = np.pad(allowed.numpy(), ((0, 0), (0, -allowed.shape[-1] % 32)))
    return torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little"))


def cases(width: int) -> Iterator[Case]:
    """Yield draws from rows of this width with every pair of arguments; wide ones with all or none. Then
    draws from products of rows."""
    for number, case in enumerate(_cases_of_rows(width)):
        yield case
        yield _of_laws(case, LAWS[number % len(LAWS)])


def _of_laws(case: Case, laws: Laws) -> Case:
    """Return the same draws, each from the product of several of the rows."""
    first = torch.arange(len(case.numbers)) if case.places is None else case.places
    others = [(first + 3 * turn) % len(case.batch) for turn in range(len(laws))]
    places = torch.stack(others, dim=1).reshape(-1)
    # NaN logits make the whole row NaN, and a tempered row is normalized beyond the mask.
    case.batch[case.batch.isnan().any(-1)] = math.nan
    if case.places is None:
        return case._replace(batch=case.batch[places], laws=laws)
    return case._replace(places=places, laws=laws)


def _cases_of_rows(width: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(width)
    is_wide = width > 1000
    count = len(HEATS)
    for masked, heated, placed in itertools.product((False, True), repeat=3):
        if (masked != heated or heated != placed) if is_wide else (masked + heated + placed) % 2:
            continue
        rows = count // 2 if placed else count
        wide = torch.randn(rows, width + 64 * masked, generator=generator).mul_(3)
        batch = wide[:, :width]  # with a gap between rows, where there are masks
        batch[torch.rand(rows, width, generator=generator) > 0.7] = -math.inf
        batch[1] = math.nan
        batch[2, 0] = math.nan
        batch[3] = -math.inf
        batch[5 % rows] = -700.0
        batch[5 % rows, width // 2 :: 97] = -390.0
        numbers = torch.rand(count, 2, dtype=torch.float64, generator=generator)
        edges = list(itertools.product((0.0, LAST), repeat=2))
        numbers[-4:] = torch.tensor(edges, dtype=torch.float64)
        case = Case(batch, numbers)
        if masked:
            allowed = torch.rand(count, width, generator=generator) > 0.5
            allowed[::4] = False
            allowed[::8, width - 1] = True
            allowed[2, 0] = False
            case = case._replace(mask=packed(allowed))
        if heated:
            case = case._replace(heat=torch.tensor(HEATS, dtype=torch.float64)[:, None])
        if placed:
            case = case._replace(places=torch.randint(rows, (count,), generator=generator))
        yield case


def by_kernels(case: Case) -> Tensor:
    """Return the draws of the kernels."""
    from genrt.tokens import draw_kernels

    batch, numbers, mask, heat, places, laws = case
    return draw_kernels.draw_fused(
        batch,
        numbers,
        mask=mask,
        heat=heat,
        places=places,
        laws=laws,
        block=BLOCK,
        largest=LARGEST,
        greedy_below=GREEDY_BELOW,
    )


def alone(case: Case, index: int) -> Case:
    """Return one draw of these, from the same batch."""
    turns = len(case.laws) or 1
    own = slice(turns * index, turns * (index + 1))
    rows = torch.arange(len(case.batch))[own] if case.places is None else case.places[own]
    mask, heat = [None if x is None else x[index : index + 1] for x in (case.mask, case.heat)]
    return case._replace(numbers=case.numbers[index : index + 1], mask=mask, heat=heat, places=rows)


def by_graphs(case: Case, graphs: DrawGraphs) -> tuple[Tensor, Tensor]:
    """Return the draws of a case as those of two populations go, of a temperature each, and those of its
    kernels from the same numbers."""
    count, turns = len(case.numbers), len(case.laws) or 1
    seeds = np.arange(count, dtype=np.uint64) * np.uint64(2**61 + 5)
    places = np.arange(turns * count) if case.places is None else case.places.numpy()
    heats = (1.0, 1.0) if case.heat is None else (1.0, 0.3)
    parts = [slice(0, count // 3), slice(count // 3, count)]
    several = [
        DrawInputs(
            seeds[part],
            None if case.mask is None else case.mask.numpy()[part],
            places[turns * part.start : turns * part.stop],
            heat,
        )
        for part, heat in zip(parts, heats, strict=True)
    ]
    if case.places is None:  # the first part is from the first rows, which need not be said
        several[0] = several[0]._replace(places=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "has_kernels", lambda _: True)  # there is no GPU
        found = graphs.launch(case.batch, several, case.laws)
    assert found is not None
    whole, on_host = found
    assert torch.equal(whole.view(torch.int64), on_host.result().view(torch.int64))
    if case.heat is not None:
        heat = torch.tensor(heats, dtype=torch.float64).repeat_interleave(
            torch.tensor([each.stop - each.start for each in parts])
        )
        case = case._replace(heat=heat[:, None])
    right = by_kernels(case._replace(numbers=seeded_uniforms(seeds)))
    return whole.clone(), right.repeat_interleave(turns, dim=0)


def disagreements_of_sets(width: int) -> Iterator[str]:
    """Describe sets of one token, of all, and of some, by the kernel and with torch."""
    from genrt.tokens import set_kernels

    generator = torch.Generator().manual_seed(width)
    shares = torch.tensor([1.0, 0.9, 0.1, 0.01, 0.0])[:, None]
    rows = (4 * torch.randn(len(shares), width, generator=generator)).log_softmax(-1)
    drawn = torch.randint(width, (len(shares),), generator=generator)
    is_in = torch.rand(rows.shape, generator=generator) < shares
    is_in[torch.arange(len(shares)), drawn] = True
    sizes, words = is_in.sum(-1), -(-width // 32)
    for heats in (None, torch.tensor([1.0, 0.3, 2.5, 1e-4, 1e9])):
        laws = rows if heats is None else rows / heats[:, None]
        given = laws.masked_fill(~is_in, -math.inf), rows, heats, drawn
        found, by_torch = set_kernels.described(*given), sets._described(*given)
        own, right = (each[:, :2].contiguous().view(torch.float32) for each in (found, by_torch))
        if not torch.allclose(own, right, rtol=1e-6, atol=1e-5):
            yield f"{width}: sets at {heats} have other numbers"
        if not torch.equal(found[:, 3 : 3 + words], by_torch[:, 3 : 3 + words]):
            yield f"{width}: sets at {heats} have other bits"
        if not torch.equal(found[:, 2], sizes.int()):
            yield f"{width}: sets at {heats} have other sizes"
        for row, ids in zip(found[:, 3 + words :], is_in, strict=True):
            first = ids.nonzero()[: set_kernels.LISTED, 0].int()
            if not torch.equal(row[: len(first)], first):
                yield f"{width}: a set of {int(ids.sum())} at {heats} lists other tokens"


def main(widths: Sequence[int]) -> None:
    """Print every disagreement of the kernels with torch, with the law, and with themselves."""
    warnings.simplefilter("ignore")  # numpy's, of the interpreter: 0 / 0 and the logarithm of 0
    graphs = DrawGraphs()
    for width in widths:
        for line in disagreements_of_sets(width):
            print(line)
        for number, case in enumerate(cases(width)):
            found = by_kernels(case)
            for line in disagreements(case, found, by_torch(case)):
                print(f"{width}, case {number}: {line}")
            if case.batch.data_ptr() % 16 == 0:
                whole, right = by_graphs(case, graphs)
                if not torch.equal(whole.view(torch.int64), right.view(torch.int64)):
                    print(f"{width}, case {number}: as a population's draws they are others")
            for index in (2, len(found) - 1):
                [single] = by_kernels(alone(case, index)).view(torch.int64)  # NaN equals itself
                if not torch.equal(single, found.view(torch.int64)[index]):
                    print(f"{width}, case {number}: draw {index} depends on the others")


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is later
    main([int(width) for width in sys.argv[1:]] or WIDTHS)
