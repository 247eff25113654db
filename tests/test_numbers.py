"""Numbers: what is accepted gives the right law, and what could make a step raise is refused at the call.

Every numeric parameter of a question is drawn over the whole range of its type, subnormal numbers and
integers beyond 64 bits included, in Python's and in NumPy's types. A row's law is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import ContextTooLong, InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import check_float, check_int, check_one_of, displayed, shown
from genrt.questions.completions import SampleRequest
from genrt.tokens.sampling import GREEDY_BELOW, draw, seeded_uniforms, truncate

quick = settings(max_examples=60, deadline=None)

AT_THE_EDGES = (
    *(5e-324, 1e-320, 2.2e-308, 1e-300, 1e-46, 1e-45, 1e-40, 1.2e-38, 1e-30, 1e-17, 1e-9),
    *(math.nextafter(1e-5, 0), 1e-5, math.nextafter(1e-5, 1), 1e-3, 0.01, 0.5, 1 - 1e-9, 1.0),
    *(math.nextafter(1.0, 0), math.nextafter(1.0, 2), 2.0, 1e5, 1e20, 1e37, 1e38, 3.4e38, 3.5e38),
    *(4e38, 1e39, 1e100, 1e300, math.nextafter(math.inf, 0)),
)
FLOATS = st.sampled_from([*AT_THE_EDGES, 0.0, -0.0]) | st.floats(0.0, allow_infinity=False)
SHARES = st.sampled_from([x for x in AT_THE_EDGES if x <= 1]) | st.floats(0, 1, exclude_min=True)
INTS = st.integers(0, 12) | st.integers(0, 2**70) | st.sampled_from([2**31, 2**32, 2**63, 2**64])
FLOAT_FORMS: list[Callable[[float], Any]] = [
    float,
    np.float64,
    np.longdouble,
    lambda x: np.float32(x) if x == 0 or 1e-45 < x < 3e38 else x,
    lambda x: np.float16(x) if x == 0 or 1e-7 < x < 6e4 else x,
    lambda x: int(x) if x >= 1 and x == int(x) else x,
]
INT_FORMS: list[Callable[[int], Any]] = [
    int,
    *(
        lambda n, kind=kind: kind(n) if n <= np.iinfo(kind).max else n
        for kind in (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64)
    ),
]


def numbers(values: st.SearchStrategy[Any], forms: list[Callable[[Any], Any]]) -> Any:
    return st.builds(lambda value, form: form(value), values, st.sampled_from(forms))


TEMPERATURES = numbers(FLOATS, FLOAT_FORMS)
TRUNCATIONS = st.fixed_dictionaries(
    {},
    optional={
        "top_p": numbers(SHARES, FLOAT_FORMS),
        "top_k": numbers(INTS, INT_FORMS),
        "min_p": numbers(SHARES | st.just(0.0), FLOAT_FORMS),
    },
)
SEEDS = numbers(st.integers(0, 2**63 - 1), INT_FORMS)
ENTRIES = st.just(-math.inf) | st.floats(-60, 0, width=32) | st.sampled_from([-2.0, -2.0 - 2**-22])
ROWS = st.lists(ENTRIES, min_size=2, max_size=9).filter(lambda row: max(row) > -math.inf)


def law(row: list[float], temperature: float, **how: Any) -> list[float]:
    """The log-probabilities of a row of float32 under these parameters, in float64 and in logarithms.
    Skips examples in which the rounding of a sum could decide."""
    temperature, how = float(temperature), {name: float(value) for name, value in how.items()}
    peak = max(row)
    if peak == -math.inf:
        return row
    if temperature < GREEDY_BELOW:
        return [0.0 if token == row.index(peak) else -math.inf for token in range(len(row))]
    below = [entry - peak for entry in row]
    least = math.log(how["min_p"]) * temperature if how.get("min_p") else -math.inf
    assume(all(b == 0 or not math.isclose(b, least, rel_tol=1e-9) for b in below))
    below = [b if b >= least else -math.inf for b in below]
    if 0 < how.get("top_k", 0) < len(below):
        last = sorted(below, reverse=True)[int(how["top_k"]) - 1]
        below = [b if b >= last else -math.inf for b in below]
    weights = [math.exp(b / temperature) for b in below]
    top_p = how.get("top_p", 1.0)
    if top_p < 1:
        dropped = 0.0
        for token in sorted(range(len(row)), key=below.__getitem__)[:-1]:
            dropped += weights[token] / math.fsum(weights)
            if top_p * len(row) > 0.5:  # else it is under the likeliest token's share
                assume(not math.isclose(dropped, 1 - top_p, rel_tol=1e-6))
                if dropped > 1 - top_p:
                    break
            below[token] = -math.inf
    total = math.log(math.fsum(math.exp(b / temperature) for b in below))
    return [b / temperature - total for b in below]


def expect_law(found: list[float], wanted: list[float]) -> None:
    for one, other in zip(found, wanted, strict=True):
        if other == -math.inf:
            assert one == -math.inf, "a token outside the mask or truncation"
        elif other > -1e30:
            assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
    assert not any(map(math.isnan, found))


@pytest.mark.promise(number=29)
@quick
@given(ROWS, TEMPERATURES, TRUNCATIONS, st.sampled_from([torch.float32, torch.float64]))
def test_truncation_has_the_law_of_float64(
    row: list[float], temperature: Any, how: dict[str, Any], dtype: torch.dtype
) -> None:
    wanted = law(row, temperature, **how)
    given_row = torch.tensor(row, dtype=dtype)
    expect_law(truncate(given_row, temperature=temperature, **how).tolist(), wanted)
    tensors = {
        name: torch.tensor([float(value)] * 2, dtype=torch.float64)
        for name, value in {"temperature": temperature, **how}.items()
    }
    if "top_k" in how:
        tensors["top_k"] = torch.tensor([min(int(how["top_k"]), 2**63 - 1)] * 2)
    for each in truncate(given_row.expand(2, -1), **tensors).tolist():
        expect_law(each, wanted)


@pytest.mark.promise(number=29)
@quick
@given(ROWS, TEMPERATURES, st.integers(0, 2**63), st.data())
def test_a_tempered_draw_has_the_law_of_float64(
    row: list[float], temperature: Any, seed: int, data: st.DataObject
) -> None:
    allowed = data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
    masked = [entry if ok else -math.inf for entry, ok in zip(row, allowed, strict=True)]
    wanted = law(masked, temperature)
    [token], [logprob], [mass] = (
        part.tolist()
        for part in draw(
            torch.tensor(row),
            mask=torch.tensor(allowed),
            temperature=temperature,
            uniforms=seeded_uniforms([seed]),
        )
    )
    expect_draw(token, logprob, mass, masked, wanted)


def expect_draw(
    token: int, logprob: float, mass: float, masked: list[float], wanted: list[float]
) -> None:
    if max(masked) == -math.inf:
        assert (token, logprob, mass) == (-1, -math.inf, -math.inf)
        return
    assert masked[token] > -math.inf, "a token outside the mask"
    assert -math.inf < logprob <= 0
    assert logprob == pytest.approx(wanted[token], rel=1e-5, abs=1e-5)
    assert mass == pytest.approx(float(torch.tensor(masked).double().logsumexp(-1)), abs=1e-5)


# -- the same of whole runtimes --------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact() -> Iterator[AsyncLM]:
    with genrt.load(NGram.random(11, order=1, seed=2, zeros=0.3), engine="exact") as lm:
        yield lm


@pytest.fixture(scope="module")
def transformers(llama: Path) -> Iterator[AsyncLM]:
    with genrt.load(llama, engine="transformers") as lm:
        yield lm


ENGINES = ("exact", "transformers")


@pytest.mark.promise(number=29)
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=40, deadline=None)
@given(temperature=TEMPERATURES, how=TRUNCATIONS, seed=SEEDS)
def test_a_sample_of_any_accepted_parameters_is_of_their_law(
    engine: str, request: pytest.FixtureRequest, temperature: Any, how: dict[str, Any], seed: Any
) -> None:
    lm: AsyncLM = request.getfixturevalue(engine)
    wanted = law(lm.next_token_logprobs_sync([3]).tolist(), temperature, **how)
    [token] = lm.sample_sync([3], max_tokens=1, temperature=temperature, seed=seed, **how)
    assert wanted[token] > -math.inf
    pair = lm.batch_sample_sync([[3], [3]], max_tokens=1, temperature=temperature, seed=seed, **how)
    assert pair[0] == [token]
    assert wanted[pair[1][0]] > -math.inf


@pytest.mark.promise(number=29)
@pytest.mark.parametrize("engine", ENGINES)
@quick
@given(temperature=TEMPERATURES, seed=SEEDS, allowed=st.sets(st.integers(0, 10)))
def test_a_draw_at_any_accepted_temperature_is_of_its_law(
    engine: str, request: pytest.FixtureRequest, temperature: Any, seed: Any, allowed: set[int]
) -> None:
    lm: AsyncLM = request.getfixturevalue(engine)
    row = lm.next_token_logprobs_sync([3]).tolist()
    masked = [entry if token in allowed else -math.inf for token, entry in enumerate(row)]
    drawn = lm.draw_sync([3], mask=allowed, temperature=temperature, seed=seed)
    expect_draw(*drawn, masked, law(masked, temperature))


@pytest.mark.promise(number=29)
@pytest.mark.promise(number=8)
def test_samples_in_company_of_extreme_parameters_are_their_own(exact: AsyncLM) -> None:
    """All in one step: one caller's parameter is nobody else's."""
    extreme: list[dict[str, Any]] = [
        {},
        {"top_p": 1e-46},
        {"temperature": 1e39},
        {"top_k": 2**63},
        {"min_p": 1e-320},
        {"temperature": 5e-324},
    ]
    engine = ExactEngine(NGram.random(11, order=1, seed=2, zeros=0.3))
    asked = [SampleRequest((3,), 4, seed=5, **how) for how in extreme]
    engine.submit(asked)
    ends = {end.request: end for _ in range(4) for end in engine.step()}
    alone = [exact.sample_sync([3], max_tokens=4, seed=5, **how) for how in extreme]
    assert [ends[each].error for each in asked] == [None] * len(asked)
    assert [list(ends[each].result or ()) for each in asked] == alone


# -- what is refused -------------------------------------------------------------------------------


def name_of(value: Any) -> str:
    return f"{type(value).__name__} {shown(value):.20}"


@pytest.mark.promise(number=29)
@pytest.mark.parametrize("value", ids=name_of, argvalues=[2**63, 10**5000, np.uint64(2**64 - 1)])
def test_integers_beyond_their_bounds_are_refused_or_mean_no_bound(
    exact: AsyncLM, value: Any
) -> None:
    with pytest.raises(ContextTooLong, match="max_tokens can be 1023 here"):
        exact.sample_sync([1], max_tokens=value)
    every = exact.sample_sync([1], max_tokens=5, seed=1)
    assert exact.sample_sync([1], max_tokens=5, seed=1, top_k=value) == every


@pytest.mark.parametrize(
    "uniforms", [[-0.5, 0.5], [0.5, -1e-300], [1.0, 0.5], [math.nan, 0.5], [0.5, math.inf]]
)
def test_random_numbers_outside_their_range_are_refused(uniforms: list[float]) -> None:
    with pytest.raises(InvalidRequest, match=r"uniforms.*\[0, 1\)"):
        draw(torch.zeros(1, 4), uniforms=torch.tensor([uniforms], dtype=torch.float64))


@pytest.mark.parametrize(
    "value",
    [torch.tensor([True, True]), torch.tensor([1j, 1]), torch.ones(1, 2), "hot", [1.0, 1.0]],
)
def test_tensors_of_parameters_are_numbers_one_a_row(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="temperature is"):
        truncate(torch.zeros(2, 4), temperature=value)
    with pytest.raises(InvalidRequest, match="top_k is"):
        truncate(torch.zeros(2, 4), top_k=torch.tensor([1.0, 2.0]))


# -- runtimes and engines --------------------------------------------------------------------------

TINY = NGram.random(5, order=1, seed=1)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_bytes": 2**70},
        {"max_batch_size": 2**70},
        {"max_queued_requests": 2**70, "max_queued_bytes": 10**5000},
        {"engine_options": {"max_model_len": 2**62, "max_batch_size": 2**63 - 1}},
        {"cache_bytes": np.uint64(2**63), "max_batch_size": np.int8(1)},
    ],
)
def test_a_runtime_without_bounds_answers(options: dict[str, Any]) -> None:
    with genrt.load(TINY, engine="exact", **options) as lm:
        assert len(lm.sample_sync([1], max_tokens=3)) == 3
        assert lm.next_token_logprobs_sync([1]).shape == (5,)


# -- the checks themselves -------------------------------------------------------------------------


@given(st.integers() | st.floats(), st.integers(-5, 5), st.integers(0, 10))
def test_bounds_are_inclusive(value: float, low: int, width: int) -> None:
    inside = low <= value <= low + width
    for check, fits in ((check_float, inside), (check_int, inside and isinstance(value, int))):
        if fits:
            assert check("it", value, low, low + width) == value
        else:
            with pytest.raises(InvalidRequest, match="it must be"):
                check("it", value, low, low + width)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_numbers_of_numpy_become_plain_ones(kind: Any) -> None:
    assert type(check_int("it", kind(3), 0, 2**63 - 1)) is int
    assert type(check_float("it", kind(3), 0.0, math.inf)) is float


def test_no_int_is_too_long_for_a_message() -> None:
    assert shown(10**39) == "1" + "0" * 39
    assert shown(10**5000) == "an int of 16610 bits"
    assert shown(np.float32(0.5)) == "0.5"


def test_a_message_has_the_beginning_of_a_long_value() -> None:
    assert displayed("short") == "'short'"
    assert displayed("x" * 10**6) == "'" + "x" * 199
    assert displayed([10**5000]) == "a value of type list"


def test_a_value_that_is_none_of_several_is_refused_with_all_of_them() -> None:
    assert check_one_of("it", None, ("a", None)) is None
    for wrong, got in (("c", "'c'"), (1, "1"), (np.zeros(2), "a value of type ndarray")):
        with pytest.raises(InvalidRequest, match=f"^it must be 'a', 'b' or None, got {got}$"):
            check_one_of("it", wrong, ("a", "b", None))
