"""Laws of sampling: what may be drawn, how often, and that a row's draw is its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from genrt.errors import InvalidRequest
from genrt.tokens.sampling import draw, mixed, seeded_uniforms, truncate

LEVEL = 1e-4
"""Of the G-tests: the seeds are fixed, so a test either always passes or always fails."""

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
quick = settings(max_examples=80, deadline=None)


def g_test(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """The p-value of ``counts`` under ``probabilities``, by the likelihood-ratio statistic."""
    total, possible = sum(counts), sum(p > 0 for p in probabilities)
    statistic = 2 * sum(
        count * math.log(count / (total * p))
        for count, p in zip(counts, probabilities, strict=True)
        if count
    )
    return float(chi2.sf(statistic, possible - 1))


def truncated_by_hand(
    row: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """The same law in plain Python; skips examples where rounding could decide."""
    peak = max(row)
    if temperature == 0:
        return [float(token == row.index(peak)) for token in range(len(row))]
    weights = [math.exp((entry - peak) / temperature) for entry in row]
    for weight in weights:
        assume(weight == 1.0 or abs(weight - min_p) > 1e-5)
    weights = [weight if weight >= min_p else 0.0 for weight in weights]
    if 0 < top_k < len(weights):
        least = sorted(weights, reverse=True)[top_k - 1]
        weights = [weight if weight >= least else 0.0 for weight in weights]
    if top_p < 1:
        below, total = 0.0, sum(weights)
        ascending = sorted(range(len(weights)), key=lambda token: weights[token])
        for token in ascending[:-1]:
            below += weights[token] / total
            assume(abs(below - (1 - top_p)) > 1e-5)
            if below > 1 - top_p:
                break
            weights[token] = 0.0
    return [weight / sum(weights) for weight in weights]


@quick
@given(logits, parameters)
def test_truncation_equals_a_plain_computation(row: list[float], how: dict[str, float]) -> None:
    wanted = truncated_by_hand(row, **how)  # type: ignore[arg-type]
    found = truncate(torch.tensor(row).log_softmax(-1), **how).exp()  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx(wanted, abs=1e-6)
    assert [p > 0 for p in found.tolist()] == [p > 0 for p in wanted]


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


@quick
@given(logits, parameters)
def test_truncation_is_normalised_keeps_a_likeliest_and_leaves_its_input(
    row: list[float], how: dict[str, float]
) -> None:
    given_row = torch.tensor(row)
    found = truncate(given_row, **how)  # type: ignore[arg-type]
    assert found.logsumexp(-1).item() == pytest.approx(0.0, abs=1e-6)
    assert bool((found[given_row == given_row.max()] > -math.inf).any())
    assert not bool((found[given_row == -math.inf] > -math.inf).any())
    assert given_row.tolist() == row


def test_everything_off_changes_nothing() -> None:
    rows = torch.randn(4, 50).log_softmax(-1)
    torch.testing.assert_close(truncate(rows), rows, atol=1e-6, rtol=0.0)


def test_tokens_tied_with_the_kth_stay() -> None:
    kept = truncate(torch.tensor([0.0, 1.0, 1.0, 1.0]), top_k=2)
    assert kept.exp().tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])


def test_top_p_drops_lower_ids_first_among_equals() -> None:
    kept = truncate(torch.zeros(4), top_p=0.4)
    assert kept.exp().tolist() == pytest.approx([0, 0, 0.5, 0.5])


def test_min_p_is_taken_after_the_temperature() -> None:
    row = torch.tensor([0.8, 0.2]).log()
    assert truncate(row, min_p=0.3).exp().tolist() == pytest.approx([1, 0])
    assert truncate(row, temperature=2.0, min_p=0.3).exp()[1] > 0.3


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert truncate(torch.tensor([0.0, 3.0, 3.0]), temperature=0.0).tolist() == [
        -math.inf,
        0.0,
        -math.inf,
    ]


def test_tiny_temperatures_stay_finite() -> None:
    kept = truncate(torch.tensor([-80.0, 0.0, -0.1]), temperature=2e-5)
    assert kept.exp().tolist() == [0.0, 1.0, 0.0]


def test_a_row_without_mass_stays_without() -> None:
    dead = torch.full((2, 3), -math.inf)
    for temperature in (0.0, 1.0):
        assert torch.equal(truncate(dead, temperature=temperature, top_k=2, top_p=0.5), dead)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"top_p": torch.tensor([0.5, 0.0])},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    [name] = wrong
    with pytest.raises(InvalidRequest, match=name):
        truncate(torch.zeros(2, 4), **wrong)  # type: ignore[arg-type]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="2 values for 3 rows"):
        truncate(torch.zeros(3, 4), temperature=torch.ones(2))
    with pytest.raises(InvalidRequest, match="rows are"):
        draw(torch.zeros(2, 3, 4))
    with pytest.raises(InvalidRequest, match="mask is"):
        draw(torch.zeros(2, 3), mask=torch.ones(2, 3))
    with pytest.raises(InvalidRequest, match="mask is"):
        draw(torch.zeros(2, 3), mask=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(InvalidRequest, match=r"packed torch.uint8, \[2, 4\]"):
        draw(torch.zeros(2, 3), mask=torch.ones(2, 3, dtype=torch.uint8))
    with pytest.raises(InvalidRequest, match="1 generators for 2 rows"):
        draw(torch.zeros(2, 3), generators=[torch.Generator()])
    with pytest.raises(InvalidRequest, match="2 values for 3 rows"):
        draw(torch.zeros(3, 4), temperature=torch.ones(2))
    with pytest.raises(InvalidRequest, match="temperature is -1"):
        draw(torch.zeros(3, 4), temperature=-1.0)
    with pytest.raises(InvalidRequest, match="both given"):
        draw(torch.zeros(1, 3), generators=torch.Generator(), uniforms=seeded_uniforms([1]))
    for uniforms in (seeded_uniforms([1]), seeded_uniforms([1, 2]).float()):
        with pytest.raises(InvalidRequest, match="uniforms are"):
            draw(torch.zeros(2, 3), uniforms=uniforms)


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
    counts = drawn.token_ids.bincount(minlength=7).tolist()
    assert counts[4] == counts[6] == 0
    assert g_test(counts, allowed) > LEVEL
    assert drawn.log_mass.tolist() == pytest.approx([math.log(0.75)] * count, abs=1e-6)
    torch.testing.assert_close(drawn.logprobs.exp(), torch.tensor(allowed)[drawn.token_ids])


def packed(mask: torch.Tensor) -> torch.Tensor:
    """As uint8, in whole words of 32 bits."""
    bits = np.pad(mask.numpy(), ((0, 0), (0, -mask.shape[-1] % 32)))
    return torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adding", [(), ("cpu",)])
@pytest.mark.parametrize("width", [1, 31, 32, 41, 128, 300, 512])
def test_a_packed_mask_is_the_same_mask(
    width: int, adding: tuple[str, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genrt.tokens.sampling.ADDING", adding)
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
    counts = drawn.token_ids.bincount(minlength=1000)[[300, 301, 999]].tolist()
    assert g_test(counts, law[[300, 301, 999]].tolist()) > LEVEL
    torch.testing.assert_close(drawn.logprobs, law.log()[drawn.token_ids].float())
    torch.testing.assert_close(drawn.log_mass, masked.logsumexp(-1).float().expand(4000))


def test_the_g_test_sees_a_wrong_distribution() -> None:
    tempered = truncate(torch.tensor([0.5, 0.3, 0.2]).log(), temperature=1.2)
    drawn = draw(tempered.expand(20_000, -1), generators=generators(7)[0]).token_ids
    assert g_test(drawn.bincount(minlength=3).tolist(), [0.5, 0.3, 0.2]) < LEVEL


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


@quick
@given(st.data())
def test_draws_obey_mask_and_support(data: st.DataObject) -> None:
    width = data.draw(st.integers(2, 8))
    rows = torch.tensor(
        data.draw(st.lists(st.lists(entries, min_size=width, max_size=width), min_size=1))
    )
    mask = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.booleans(), min_size=width, max_size=width),
                min_size=len(rows),
                max_size=len(rows),
            )
        )
    )
    drawn = draw(rows, mask=mask, generators=generators(data.draw(st.integers(0, 1000)))[0])
    assert drawn.token_ids.dtype == torch.int64
    assert drawn.logprobs.dtype == drawn.log_mass.dtype == torch.float32
    masked = rows.masked_fill(~mask, -math.inf)
    for row, token, logprob, mass in zip(masked, *drawn, strict=True):
        if bool((row > -math.inf).any()):
            assert row[token] > -math.inf
            assert mass.item() == pytest.approx(row.logsumexp(-1).item(), abs=1e-6)
            assert logprob.item() == pytest.approx((row[token] - mass).item(), abs=1e-6)
            assert logprob <= 0
        else:
            assert (token, logprob, mass) == (-1, -math.inf, -math.inf)


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


@quick
@given(st.integers(1, 700), st.floats(0, LAST), st.floats(0, LAST), st.integers(0, 100))
def test_a_draw_is_the_inverse_of_the_blockwise_cumulative_law(
    width: int, first: float, second: float, seed: int
) -> None:
    row = torch.randn(width, generator=generators(seed)[0]).mul(3)
    uniforms = torch.tensor([[first, second]], dtype=torch.float64)
    token = int(draw(row, uniforms=uniforms).token_ids)
    law = row.double().softmax(-1)
    start = token // 128 * 128
    block = law[start : start + 128]
    below, inside = law[:start].sum(), law[start:token].sum() / block.sum()
    assert below - 1e-6 <= first <= below + block.sum() + 1e-6
    assert inside - 1e-6 <= second <= inside + law[token] / block.sum() + 1e-6


def test_tokens_in_the_tail_of_a_wide_row_are_drawn_as_often_as_they_should() -> None:
    """One token in the middle has half of the mass; 50,000 others, each of about 1e-5, share the rest."""
    width, count = 50_000, 2_000
    row = torch.full((width,), -13.8)
    row[width // 2] = -3.0
    law = row.double().softmax(-1)
    drawn = torch.cat(
        [draw(row.expand(500, -1), generators=generators(s)[0]).token_ids for s in range(4)]
    )
    peak = float(law[width // 2])
    counts = [
        int((drawn < width // 2).sum()),
        int((drawn == width // 2).sum()),
        int((drawn > width // 2).sum()),
    ]
    assert sum(counts) == count
    assert g_test(counts, [(1 - peak) / 2, peak, (1 - peak) / 2]) > LEVEL


@quick
@given(logits, st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]), st.integers(0, 2**32), st.data())
def test_a_tempered_draw_is_one_from_the_truncated_row_with_the_rows_own_mass(
    row: list[float], temperature: float, seed: int, data: st.DataObject
) -> None:
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))))
    masked = torch.tensor(row).masked_fill(~mask, -math.inf)
    uniforms = seeded_uniforms([seed])
    tempered = draw(truncate(masked, temperature=temperature), uniforms=uniforms)
    drawn = draw(torch.tensor(row), mask=mask, temperature=temperature, uniforms=uniforms)
    assert torch.allclose(drawn.logprobs, tempered.logprobs, atol=1e-5)
    assert drawn.token_ids == tempered.token_ids
    assert torch.allclose(drawn.log_mass, masked.logsumexp(-1)[None], atol=1e-5)


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
        counts = (cells[:, 0] * 8 + cells[:, 1]).bincount(minlength=64).tolist()
        assert g_test(counts, [1 / 64] * 64) > LEVEL
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


def test_frequencies_of_seeded_draws_are_the_probabilities() -> None:
    row = torch.tensor([0.3, 0.2, 0.1, 1e-3, 0.0, 0.149, 0.25]).log()
    drawn = draw(row.expand(20_000, -1), uniforms=seeded_uniforms(range(5, 20_005))).token_ids
    assert g_test(drawn.bincount(minlength=7).tolist(), row.exp().tolist()) > LEVEL


def test_drawing_leaves_rows_mask_and_other_generators_alone() -> None:
    rows, mask = torch.randn(3, 5), torch.rand(3, 5) > 0.3
    before = rows.clone(), mask.clone(), torch.get_rng_state()
    draw(rows, mask=mask, generators=generators(1, 2, 3))
    assert torch.equal(rows, before[0])
    assert torch.equal(mask, before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_no_rows_give_no_draws() -> None:
    drawn = draw(torch.zeros(0, 5))
    assert [part.shape for part in drawn] == [(0,)] * 3


def test_half_precision_rows_are_drawn_in_float32() -> None:
    drawn = draw(torch.randn(4, 9).log_softmax(-1).half(), generators=generators(1)[0])
    assert drawn.logprobs.dtype == torch.float32
    assert bool((drawn.logprobs > -math.inf).all())
