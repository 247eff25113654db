"""Laws of sampling: what may be drawn, how often, and that a row's draw is its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.errors import InvalidRequest
from genrt.testing import assert_samples_from
from genrt.tokens.sampling import draw, mixed, seeded_uniforms, truncate
from tests.tokens.draws_by_hand import packed

entries = st.one_of(st.integers(-12, 4).map(lambda quarter: quarter / 4), st.just(-math.inf))
logits = st.lists(entries, min_size=2, max_size=12).filter(lambda row: max(row) > -math.inf)
parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.25, 1.0, 2.0]),
        "top_k": st.integers(0, 14),
        "top_p": st.sampled_from([0.01, 0.3, 0.62, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.07, 0.4, 1.0]),
    }
)
UNIFORMS = seeded_uniforms([1])
quick = settings(max_examples=80, deadline=None)


@quick
@given(st.lists(st.tuples(logits, parameters), min_size=1, max_size=5))
def test_truncation_of_a_batch_is_that_of_each_row(
    cases: list[tuple[list[float], dict[str, float]]],
) -> None:
    width = max(len(row) for row, _ in cases)
    rows = torch.tensor([row + [-math.inf] * (width - len(row)) for row, _ in cases])
    together = truncate(
        rows,
        **{name: torch.tensor([how[name] for _, how in cases]) for name in cases[0][1]},
    )
    for row, (_, how), found in zip(rows, cases, together, strict=True):
        assert torch.equal(found, truncate(row, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "size", "options", "message"),
    [
        (truncate, (2, 4), {"top_p": torch.tensor([0.5, 0.0])}, "top_p"),
        (truncate, (3, 4), {"temperature": torch.ones(2)}, "2 values for 3 rows"),
        (draw, (2, 3, 4), {}, "rows are"),
        (draw, (2, 3), {"mask": torch.ones(2, 3)}, "mask is"),
        (draw, (2, 3), {"mask": torch.ones(3, 3, dtype=torch.bool)}, "mask is"),
        (draw, (2, 3), {"mask": torch.ones(2, 3, dtype=torch.uint8)}, r"torch.uint8, \[2, 4\]"),
        (draw, (2, 3), {"generators": [torch.Generator()]}, "1 generators for 2 rows"),
        (draw, (3, 4), {"temperature": torch.ones(2)}, "2 values for 3 rows"),
        (draw, (3, 4), {"temperature": -1.0}, "temperature is -1"),
        (draw, (1, 3), {"generators": torch.Generator(), "uniforms": UNIFORMS}, "both given"),
        (draw, (2, 3), {"uniforms": UNIFORMS}, "uniforms are"),
        (draw, (1, 3), {"uniforms": UNIFORMS.float()}, "uniforms are"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    function: Any, size: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        function(torch.zeros(size), **options)


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("per_row", [False, True])
def test_frequencies_are_the_probabilities_under_the_mask(per_row: bool) -> None:
    count = 20_000
    row = torch.tensor([0.3, 0.2, 0.1, 1e-3, 0.0, 0.149, 0.25]).log()
    mask = torch.tensor([True, True, True, True, True, True, False])
    made = generators(*range(count)) if per_row else generators(7)[0]
    drawn = draw(row.expand(count, -1), mask=mask, generators=made)
    allowed = (row.exp() * mask / 0.75).tolist()
    assert_samples_from(drawn.token_ids.tolist(), dict(enumerate(allowed)))
    assert drawn.log_mass.tolist() == pytest.approx([math.log(0.75)] * count, abs=1e-6)
    torch.testing.assert_close(drawn.logprobs.exp(), torch.tensor(allowed)[drawn.token_ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hosts", [(), ("cpu",)])
@pytest.mark.parametrize("width", [1, 31, 32, 41, 128, 300, 512])
def test_a_packed_mask_is_the_same_mask(
    width: int, hosts: tuple[str, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genrt.tokens.sampling.HOSTS", hosts)
    rows = torch.randn(12, width, generator=generators(width)[0]).to(dtype)
    rows[::5, ::2] = -math.inf
    mask = torch.rand(12, width, generator=generators(1)[0]) > 0.6
    mask[3] = False
    uniforms = seeded_uniforms(range(12))
    for temperature in (1.0, 0.5, 0.0):
        bools = draw(rows, mask=mask, temperature=temperature, uniforms=uniforms)
        bits = draw(rows, mask=packed(mask), temperature=temperature, uniforms=uniforms)
        for one, other in zip(bools, bits, strict=True):
            assert torch.equal(one, other)


def test_laws_of_improbable_tokens_are_exact_however_improbable() -> None:
    """What is left under a mask may be e^-300 of the row, in blocks that are e^-90 of each other."""
    row = torch.full((1000,), -700.0)
    row[0] = 0.0
    row[[300, 301, 999]] = torch.tensor([-300.0, -301.0, -300.5])
    row[500] = -390.0
    mask = torch.ones(1, 1000, dtype=torch.bool)
    mask[0, 0] = False
    drawn = draw(row.expand(4000, -1), mask=mask[0], uniforms=seeded_uniforms(range(4000)))
    masked = row.double().masked_fill(~mask[0], -math.inf)
    law = masked.softmax(-1)
    assert_samples_from(drawn.token_ids.tolist(), dict(enumerate(law.tolist())))
    torch.testing.assert_close(drawn.logprobs, law.log()[drawn.token_ids].float())
    torch.testing.assert_close(drawn.log_mass, masked.logsumexp(-1).float().expand(4000))


@quick
@given(st.lists(st.tuples(logits, st.integers(0, 2**63)), min_size=1, max_size=6))
def test_a_row_with_its_own_generator_does_not_see_the_batch(
    cases: list[tuple[list[float], int]],
) -> None:
    width = max(len(row) for row, _ in cases)
    rows = torch.tensor([row + [-math.inf] * (width - len(row)) for row, _ in cases])
    seeds = [seed for _, seed in cases]
    together = draw(rows, generators=generators(*seeds))
    for index, seed in enumerate(seeds):
        alone = draw(rows[index], generators=generators(seed))
        for one, of_all in zip(alone, together, strict=True):
            assert one[0] == of_all[index]


LAST = 1 - 2.0**-53
"""The largest number under 1 in float64."""


@pytest.mark.parametrize("numbers", [(0.0, 0.0), (LAST, LAST), (0.0, LAST), (LAST, 0.0)])
@pytest.mark.parametrize("width", [4, 256, 257, 1000])
def test_extreme_numbers_draw_no_impossible_token(width: int, numbers: tuple[float, float]) -> None:
    for possible in (0, 1, width // 2, width - 1):
        rows = torch.full((1, width), -math.inf)
        rows[0, possible] = -200.0
        uniforms = torch.tensor([numbers], dtype=torch.float64)
        assert draw(rows, uniforms=uniforms).token_ids.tolist() == [possible]
    if numbers[0] == numbers[1]:
        [token] = draw(torch.zeros(1, width), uniforms=uniforms).token_ids.tolist()
        assert token == (0 if numbers[0] == 0 else width - 1)


def test_a_batch_is_drawn_as_its_rows_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, mask = torch.randn(30, 300), torch.rand(30, 300) > 0.5
    heat = torch.arange(30) % 3 / 2
    uniforms = seeded_uniforms(range(30))
    whole = draw(rows, mask=mask, temperature=heat, uniforms=uniforms)
    monkeypatch.setattr("genrt.tokens.sampling.CPU_CHUNK", 7 * 300)
    parts = draw(rows, mask=mask, temperature=heat, uniforms=uniforms)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
    plain = draw(rows[2::3], mask=mask[2::3], uniforms=uniforms[2::3])
    assert torch.equal(whole.token_ids[2::3], plain.token_ids)
    for one, other in zip(whole[1:], plain[1:], strict=True):
        torch.testing.assert_close(one[2::3], other)
    monkeypatch.undo()
    for one, other in zip(
        plain, draw(rows[2::3], mask=mask[2::3], uniforms=uniforms[2::3]), strict=True
    ):
        assert torch.equal(one, other)


def test_seeded_numbers_are_fixed_by_their_seed_and_spread_evenly() -> None:
    """Neighbouring seeds: 20,000 pairs in 8 x 8 cells, by a G-test; and the same for differences of
    neighbours, which correlated seeds would crowd."""
    numbers = seeded_uniforms(range(20_000))
    assert numbers.dtype == torch.float64
    assert numbers.shape == (20_000, 2)
    assert bool(((numbers >= 0) & (numbers < 1)).all())
    assert torch.equal(seeded_uniforms([17, 2**63 - 1])[0], numbers[17])
    assert len(set(numbers.flatten().tolist())) == numbers.numel()
    for pairs in (
        numbers,
        torch.stack([numbers[:, 0], (numbers[:, 1].roll(1) - numbers[:, 0]) % 1], 1),
    ):
        cells = (pairs * 8).long()
        numbers_of = (cells[:, 0] * 8 + cells[:, 1]).tolist()
        assert_samples_from(numbers_of, dict.fromkeys(range(64), 1 / 64))
    assert seeded_uniforms([]).shape == (0, 2)


def test_a_seed_and_a_step_are_mixed_into_32_bits_that_neither_repeats() -> None:
    numbers = [
        mixed(seed + high * 2**32, step)
        for seed in (0, 5)
        for high in range(5)
        for step in range(20)
    ]
    assert len(set(numbers)) == len(numbers)
    assert 0 <= min(numbers) < 2**28 < 2**32 - 2**28 < max(numbers) < 2**32
