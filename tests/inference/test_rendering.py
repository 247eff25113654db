"""Results shown: without control characters, bounded in size, and with what the result holds."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genrt
from genrt.errors import ExtraNotInstalled
from genrt.inference import (
    MetropolisHastings,
    Result,
    TextModel,
)
from genrt.inference.formatting import (
    label,
    printable,
    shorten,
)
from genrt.lm import AsyncLM
from tests import runs


def result_of(values: list[Any], weights: list[float], log_evidence: float = math.nan) -> Result:
    with np.errstate(divide="ignore"):
        log_weights = np.log(np.array(weights, dtype=np.float64))
    texts = tuple(map(label, values))
    return Result(texts, ((),) * len(values), tuple(values), log_weights, log_evidence)


def rows(result: Result) -> dict[str, str]:
    """The printed weight of each value."""
    lines = str(result).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("weight"))
    return {value: weight for weight, value in (line.split("  ", 1) for line in lines[start + 1 :])}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return runs.run(tmp_path_factory.mktemp("runs") / "model")


def test_the_table_is_the_posterior(real: Result) -> None:
    posterior = real.posterior()
    assert len(posterior) <= 10
    assert rows(real) == {shorten(label(text), 100): f"{weight:.4f}" for text, weight in posterior}


def test_what_is_no_longer_shown_is_summed() -> None:
    values = [f"value {index}" for index in range(25)]
    result = result_of(values, [30.0 - index for index in range(25)])
    hidden = sum(weight for _, weight in result.posterior()[10:])
    text = str(result)
    assert "value 9" in text
    assert "value 10" not in text
    assert f"{hidden:.4f}  (15 values more)" in text


def test_no_control_character_is_shown(real: Result) -> None:
    assert not "".join(real.texts).isprintable()
    for shown in (str(real), repr(real)):
        assert all(character.isprintable() or character == "\n" for character in shown)


@pytest.mark.parametrize(
    ("particles", "steps"), [(1, 1), (1, 1000), (300, 1000), (10_000, 1), (10_000, 40)]
)
def test_a_result_of_any_size_is_bounded(particles: int, steps: int) -> None:
    result = runs.drawn(particles, steps, dying=0.0 if particles == 1 else 0.01)
    assert len(str(result)) < 2000
    assert len(repr(result)) < 200


def test_values_of_a_megabyte_are_bounded() -> None:
    values = [character * 1_000_000 for character in '<"\x1b\N{GRINNING FACE}\N{COMBINING TILDE}']
    assert len(str(result_of(values, [1.0] * len(values)))) < 2000


def test_figures_are_those_of_the_result(real: Result) -> None:
    resampled = sum(info.resampled for info in real.infos)
    alive = int(np.isfinite(real.log_weights).sum())
    plain = str(real).replace("\N{MINUS SIGN}", "-")
    assert f"{real.log_evidence:.3f}" in plain
    assert f"{real.ess:.1f}" in plain
    assert f"resampled before {resampled} of them" in plain
    assert (f"{alive} of them alive" in plain) == (alive < len(real.texts))
    assert f"log_evidence={real.log_evidence:.3f}, ess={real.ess:.1f}" in repr(real)


def test_a_run_in_which_everything_died_says_so() -> None:
    result = runs.drawn(20, 4, dying=1.0)
    assert result.ess == 0
    assert "Every particle died" in str(result)
    assert "\N{MINUS SIGN}\N{INFINITY}" in str(result)
    assert repr(result) == "Result(20 particles, 0 alive, log_evidence=-inf, ess=0.0)"


def test_nothing_at_all_is_shown_as_such() -> None:
    result = result_of([], [], -math.inf)
    assert "There are no particles" in str(result)
    assert repr(result) == "Result(0 particles, 0 alive, log_evidence=-inf, ess=0.0)"


class Rude:
    """A value that will not be looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_values_of_any_type_are_shown() -> None:
    values = [[1, 2], [1, 2], {"a": np.arange(2)}, None, Rude(), 1, True, "", "1"]
    result = result_of(values, [1.0] * len(values))
    shown = [line.split("  ", 1)[1] for line in str(result).splitlines() if line[:2] == "0."]
    assert shown[0] == "[1, 2]"
    assert sorted(shown[1:]) == sorted(
        [
            "{'a': array([0, 1])}",
            "None",
            "<Rude, whose repr raised RuntimeError>",
            "1",
            "True",
            "(empty)",
            "1",
        ]
    )
    assert "0.2222  [1, 2]" in str(result)


@pytest.fixture
def lm(tmp_path: Path) -> AsyncLM:
    runs.MODEL.save(tmp_path / "model")
    return genrt.load(str(tmp_path / "model"), engine="exact")


def test_chains_are_shown_with_how_well_they_mixed(lm: AsyncLM) -> None:
    text = TextModel(lm, [0], max_tokens=4)
    with lm:
        result = MetropolisHastings(text, num_chains=5, num_steps=40).run_sync(0)
        unknown = MetropolisHastings(text, num_chains=2, num_steps=3).run_sync(0)
    assert result.chains is not None
    shown = str(result)
    assert "of 40 steps each" in shown
    assert f"{result.chains.ess:.1f}" in shown
    assert "by autocorrelation" in shown
    assert f"{result.chains.r_hat:.2f}" in shown
    assert f"{result.chains.acceptance.mean():.2f}" in shown
    assert "log evidence" not in shown
    assert "too few steps, or all at one value" in str(unknown)
    assert "nan" not in str(unknown)


def test_lines_are_abbreviated_in_their_middle() -> None:
    assert shorten("abcdefghij" * 3, 10) == "abcdefg\N{HORIZONTAL ELLIPSIS}ij"
    assert shorten("a" * 21, 21) == "a" * 21
    assert len(shorten("a" * 22, 21)) == 21


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\tb\n", r"a\tb\n"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\u202eabc", r"\u202eabc"),
        ("\ud800", r"\ud800"),
        ("\N{NO-BREAK SPACE}", r"\xa0"),
        ("né 日", "né 日"),
    ],
)
def test_printable_text_is_what_python_would_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


# -- tables of pandas ----------------------------------------------------------------------------


def test_a_table_has_a_row_for_each_particle(real: Result) -> None:
    table = real.to_pandas()
    assert list(table.columns) == ["text", "tokens", "value", "log_weight", "weight", "alive"]
    assert tuple(table.text) == real.texts
    assert tuple(table.tokens) == real.token_ids
    assert tuple(table.value) == real.values
    assert table.log_weight.tolist() == real.log_weights.tolist()
    assert table.weight.tolist() == real.weights.tolist()
    assert table.alive.tolist() == np.isfinite(real.log_weights).tolist()
    assert table.index.name == "particle"
    table["log_weight"] = 0.0
    assert real.log_weights.any()
    by_value = table.groupby("value").weight.sum()
    assert {value: by_value[value] for value, _ in real.posterior()} == pytest.approx(
        dict(real.posterior())
    )


def test_a_table_has_a_row_for_each_step(real: Result) -> None:
    table = real.to_pandas(steps=True)
    assert table.index.tolist() == [info.step for info in real.infos]
    assert table.index.name == "step"
    for name in ("resampled", "ess", "log_evidence", "unfinished"):
        assert table[name].tolist() == [getattr(info, name) for info in real.infos]
    assert table.ancestors.tolist() == [len(set(info.ancestors)) for info in real.infos]
    assert table.alive.tolist() == [np.isfinite(i.log_weights).sum() for i in real.infos]
    assert table.ancestors[table.resampled].max() < len(real.texts)


@pytest.mark.parametrize(
    "values", [[(1, 2), (3, 4)], [[1], [2, 3]], [{"a": 1}, None], [np.ones(2), np.ones(2)]]
)
def test_a_value_stays_one_cell(values: list[object]) -> None:
    table = result_of(values, [1.0, 3.0]).to_pandas()
    assert [value is again for value, again in zip(values, table.value, strict=True)] == [True] * 2


def test_without_pandas_it_is_named(real: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ExtraNotInstalled, match=r'pandas.*pip install "genrt\[plot\]"'):
        real.to_pandas()
