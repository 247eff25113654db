"""Figures and tables: they hold the result's own numbers, and say what is missing."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from genrt.errors import ExtraNotInstalled
from genrt.inference import Result
from tests import runs
from tests.inference.display.test_rendering import result_of


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return runs.run(tmp_path_factory.mktemp("runs") / "model")


def test_a_figure_draws_the_infos(real: Result) -> None:
    from matplotlib import pyplot

    ess, evidence, weights = real.plot().axes
    assert pyplot.get_fignums() == []  # a notebook shows the figure where it is returned alone
    steps = [info.step for info in real.infos]
    lines = {str(line.get_label()): line for line in (*ess.lines, *evidence.lines, *weights.lines)}
    for label, values in {
        "ESS": [info.ess for info in real.infos],
        "alive": [np.isfinite(info.log_weights).sum() for info in real.infos],
        "log evidence": [info.log_evidence for info in real.infos],
        "heaviest": [info.log_weights.max() - info.log_evidence for info in real.infos],
        "median": [
            np.median(info.log_weights[np.isfinite(info.log_weights)]) - info.log_evidence
            for info in real.infos
        ],
    }.items():
        assert lines[label].get_xdata() == pytest.approx(steps)
        assert lines[label].get_ydata() == pytest.approx(values)
    resampled = [info.step - 0.5 for info in real.infos if info.resampled]
    for axes in (ess, evidence, weights):
        dotted = [line for line in axes.lines if line.get_linestyle() == ":"]
        marks = [float(np.asarray(line.get_xdata())[0]) for line in dotted]
        assert marks == resampled


@pytest.mark.parametrize(
    "result",
    [runs.drawn(20, 4, dying=1.0), runs.drawn(1, 1, dying=0.0), runs.drawn(200, 30)],
    ids=["all dead", "one step", "many"],
)
def test_a_figure_of_any_run_is_drawn_without_a_warning(result: Result, tmp_path: Path) -> None:
    figure = result.plot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(tmp_path / "figure.svg")
    assert len(figure.axes) == 3
    assert (tmp_path / "figure.svg").stat().st_size > 1000


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
    by_value = table.groupby("value").weight.sum()
    assert {value: by_value[value] for value, _ in real.posterior()} == pytest.approx(
        dict(real.posterior())
    )


def test_changing_a_table_leaves_the_result_as_it_was(real: Result) -> None:
    before = real.log_weights.copy()
    table = real.to_pandas()
    table["log_weight"] = 0.0
    table.loc[0, "weight"] = 7.0
    assert np.array_equal(real.log_weights, before)


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


def test_numbers_can_be_counted_with() -> None:
    table = result_of([2, 4], [1.0, 3.0]).to_pandas()
    assert (table.value * table.weight).sum() == pytest.approx(3.5)
    assert table.value.dtype.kind == "i"


@pytest.mark.parametrize("package", ["matplotlib", "pandas"])
def test_what_is_missing_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    result = runs.drawn(2, 2)
    with pytest.raises(ExtraNotInstalled, match=rf'{package}.*pip install "genrt\[plot\]"'):
        result.plot() if package == "matplotlib" else result.to_pandas()
