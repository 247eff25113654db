"""Draws by numpy have the tokens of torch's path, and its numbers within rounding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from genrt.tokens.sampling import BLOCK, LARGEST, draw_chunk, seeded_uniforms
from tests.scripted import logprobs, population_of
from tests.tokens.draws_by_hand import (
    WIDTHS,
    Case,
    by_the_way_of,
    by_torch,
    cases,
    disagreements,
    packed,
)

NEAR = 2e-6


def normalised(count: int, width: int, *, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(count, width, generator=generator).mul_(scale).log_softmax(-1)


def expect_torchs(
    rows: Tensor, allowed: Tensor | None, numbers: Tensor, places: Tensor | None = None
) -> Tensor:
    """Return the draws, which have the tokens of torch's path."""
    mask = None if allowed is None else packed(allowed)
    found = draw_chunk(rows, numbers, mask=mask, places=places)
    wanted = by_torch(Case(rows, numbers, mask, None, places))
    assert found[:, 0].tolist() == wanted[:, 0].tolist()
    torch.testing.assert_close(found, wanted, atol=NEAR, rtol=NEAR)
    return found


@pytest.mark.parametrize("width", WIDTHS[:-1])
def test_draws_agree_with_torch_and_with_the_law(width: int) -> None:
    for case in cases(width):
        if case.mask is not None:  # bounding keeps NaN, choosing may not
            case = case._replace(batch=case.batch.nan_to_num(0.0, neginf=-math.inf))
        assert disagreements(case, by_the_way_of(case), by_torch(case)) == []


@pytest.mark.parametrize("first", [0.0, 0.25, 0.5, 0.75, LARGEST])
def test_a_number_at_a_border_is_the_next_tokens(first: float) -> None:
    rows = torch.full((BLOCK, 4 * BLOCK), -math.log(4 * BLOCK))
    numbers = torch.full((BLOCK, 2), first, dtype=torch.float64)
    numbers[:, 1] = torch.arange(BLOCK) / BLOCK
    found = expect_torchs(rows, None, numbers)
    assert found[:, 0].tolist() == [int(4 * first) * BLOCK + n for n in range(BLOCK)]


@pytest.mark.parametrize("width", [100, 128, 300, 4096])
def test_a_draw_is_the_same_alone_and_beside_rows_that_are_not_ordinary(width: int) -> None:
    rows, numbers = normalised(9, width), seeded_uniforms(range(9))
    rows[2], rows[5] = -math.inf, rows[5] - 300
    mask = packed(torch.arange(9 * width).reshape(9, width) % 3 > 0)
    together = draw_chunk(rows, numbers, mask=mask)
    for n in range(9):
        part = slice(n, n + 1)
        alone = draw_chunk(rows[part], numbers[part], mask=mask[part])
        assert torch.equal(together[part], alone)


def test_gapped_rows_and_rows_with_gradients_are_read_and_nothing_is_changed() -> None:
    wide, numbers = normalised(4, 700), seeded_uniforms(range(4))
    rows, allowed = wide[:, 30:330], torch.arange(1200).reshape(4, 300) % 2 > 0
    before, mask = wide.clone(), packed(allowed)
    bits = mask.clone()
    found = draw_chunk(rows, numbers, mask=mask)
    assert torch.equal(found, draw_chunk(rows.contiguous(), numbers, mask=mask))
    assert torch.equal(found, draw_chunk(rows.clone().requires_grad_(), numbers, mask=mask))
    assert torch.equal(found, draw_chunk(rows, numbers, mask=allowed))
    assert torch.equal(wide, before)
    assert torch.equal(mask, bits)


def test_a_population_draws_by_masks_that_it_may_not_write_to() -> None:
    rows, several = normalised(3, 300), population_of(*map(logprobs, range(3)))
    masks = packed(torch.arange(900).reshape(3, 300) % 5 > 0).numpy()
    found = replace(several, masks=masks).draw(rows)
    assert torch.equal(
        found,
        draw_chunk(rows, seeded_uniforms([*cast("Any", several.seeds)]), mask=torch.tensor(masks)),
    )
    masks.flags.writeable = False
    assert torch.equal(found, replace(several, masks=masks).draw(rows))
