"""Draws of several populations from the rows of one step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.questions.arguments import nonces_of
from genrt.questions.draws import PopulationDraw, launch_draws, population_draw
from genrt.questions.rows import LogprobsRequest
from genrt.tokens.sampling import DrawGraphs, seeded_uniforms
from tests.scripted import contexts_of
from tests.tokens.draws_by_hand import Case, disagreements

VOCAB_SIZE = 40


def population(
    size: int, seed: int, temperature: float, is_masked: bool, laws: Any = ()
) -> PopulationDraw:
    """Draws of texts, with a sequence for each law."""
    masks = torch.zeros(size, VOCAB_SIZE, dtype=torch.bool)
    masks[:, [seed % VOCAB_SIZE, (seed + 7) % VOCAB_SIZE]] = True
    size *= len(laws) or 1
    request = population_draw(
        contexts_of(*(LogprobsRequest((number, 5)) for number in range(size))),
        None,
        np.arange(size),
        nonces_of(0),
        masks=masks if is_masked else None,
        count=size,
        vocab_size=VOCAB_SIZE,
        temperature=temperature,
        seed=seed,
        laws=laws,
    )
    assert request is not None
    return request


POPULATIONS = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.integers(0, 2**32),
        st.sampled_from([1.0, 0.0, 0.5, 2.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(kinds=POPULATIONS, in_order=st.booleans(), seed=st.integers(0, 2**16))
def test_draws_together_are_those_of_each_population_alone(
    kinds: list[tuple[Any, ...]], in_order: bool, seed: int
) -> None:
    """Whatever masks and temperatures they have, and wherever their rows are."""
    several = [population(*kind) for kind in kinds]
    generator = torch.Generator().manual_seed(seed)
    count = sum(map(len, several)) + 3
    rows = torch.randn(count, VOCAB_SIZE, generator=generator).log_softmax(-1)
    order = np.arange(1, count) if in_order else torch.randperm(count, generator=generator).numpy()
    ends = np.cumsum([len(each) for each in several])
    places = [order[end - len(each) : end] for each, end in zip(several, ends, strict=True)]
    found, on_host = launch_draws(several, rows, [*places], DrawGraphs())
    alone = [each.draw([*rows[at]]) for each, at in zip(several, places, strict=True)]
    assert torch.equal(found, torch.cat(alone))
    for part, end, single in zip(several, ends, alone, strict=True):
        assert torch.equal(on_host.part(slice(end - len(part), end)).result(), single)


def test_the_first_rows_are_drawn_from_where_no_places_are_said() -> None:
    several = [population(3, 5, 1.0, True), population(2, 6, 0.5, False)]
    rows = torch.randn(8, VOCAB_SIZE).log_softmax(-1)
    found, _ = launch_draws(several, rows, [None, np.array([6, 4])], DrawGraphs())
    assert torch.equal(found[:3], several[0].draw(rows[:3]))
    assert torch.equal(found[3:], several[1].draw([rows[6], rows[4]]))
    [only], both = several[:1], rows[:3]
    assert torch.equal(launch_draws([only], both, [None], DrawGraphs())[0], only.draw([*both]))


HEATS = st.sampled_from([1.0, 1e-7]) | st.floats(0.1, 5.0)
POWERS = st.sampled_from([1.0, 2.0, -0.5]) | st.floats(0.1, 4.0)
LAWS = st.lists(st.tuples(HEATS, POWERS), min_size=1, max_size=3).filter(
    lambda laws: any(power > 0 for _, power in laws)
)


@settings(max_examples=150, deadline=None)
@given(
    laws=LAWS, size=st.integers(1, 5), seed=st.integers(0, 2**32), is_masked=st.booleans(),
    in_order=st.booleans(), most=st.integers(1, 12), temperature=st.sampled_from([1.0, 0.0, 0.6]),
)  # fmt: skip
def test_the_weights_of_laws_are_the_product_of_tempered_rows_to_powers(
    laws: Any, size: int, seed: int, is_masked: bool, in_order: bool, most: int, temperature: float
) -> None:
    """In float64, of rows with zeros; beside another population, in parts, and from separate rows."""
    turns, generator = len(laws), torch.Generator().manual_seed(seed)
    whole = population(size, seed, temperature, is_masked, laws)
    other = population(2, 1, 1.0, False)
    rows = torch.randn(2 + size * turns, VOCAB_SIZE, generator=generator)
    rows = rows.masked_fill(torch.rand(rows.shape, generator=generator) > 0.6, -math.inf)
    rows[:, seed % 3] = 0.5
    rows = rows.log_softmax(-1)
    order = torch.arange(len(rows)) if in_order else torch.randperm(len(rows), generator=generator)
    places = order.numpy()[2:]
    found, on_host = launch_draws([other, whole], rows, [order.numpy()[:2], places], DrawGraphs())
    found = found[2:]
    assert torch.equal(on_host.part(slice(2, None)).result(), found)
    assert torch.equal(found, whole.draw([*rows[places]]))
    first, several = 0, []
    for part in whole.parts(most):
        assert len(part) % turns == 0
        assert len(part) <= max(most, turns)
        several.append(part.draw(rows, places[first : first + len(part)]))
        first += len(part)
    assert torch.equal(torch.cat(several), found)

    table = None if whole.mask_table is None else torch.tensor(whole.mask_table)
    numbers = seeded_uniforms(whole.seeds)  # type: ignore[arg-type]
    heat = torch.full((size, 1), temperature, dtype=torch.float64)
    assert torch.equal(found, found[::turns].repeat_interleave(turns, 0))
    case = Case(rows, numbers, table, heat, torch.from_numpy(places), laws)
    assert disagreements(case, found[::turns], found[::turns]) == []
