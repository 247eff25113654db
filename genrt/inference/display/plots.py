"""A result for the libraries of data analysis: a figure of matplotlib, tables of pandas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from genrt.errors import ExtraNotInstalled
from genrt.inference.display.formatting import BLUE, GREY, ORANGE, count_of
from genrt.inference.model import Info
from genrt.inference.resampling import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


def steps_figure(infos: Sequence[Info]) -> Figure:
    """Draw the curves of ESS, log evidence and log-weights over one or more steps. Raises
    ExtraNotInstalled if matplotlib is missing."""
    try:
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ExtraNotInstalled(
            'drawing needs matplotlib, which is not installed: pip install "genrt[plot]"'
        ) from error
    steps = [info.step for info in infos]
    particles = len(infos[0].log_weights)
    low, middle, high, heaviest = np.array([_relative_quantiles(info) for info in infos]).T
    # Only a figure of pyplot's makes a notebook ready to show figures. It is closed, so that it is shown
    # where it is returned, and not once more at the end of the cell.
    figure: Figure = pyplot.figure(figsize=(11.0, 2.8), layout="constrained")
    pyplot.close(figure)
    ess, evidence, weights = axes = list(figure.subplots(1, 3))
    style: dict[str, Any] = {"color": BLUE, "marker": "o" if len(steps) == 1 else None}
    ess.plot(steps, _alive(infos), **(style | {"color": GREY}), linestyle="--", label="alive")
    ess.plot(steps, [info.ess for info in infos], **style, label="ESS")
    ess.set_ylim(0, 1.05 * particles)
    ess.set_title(f"ESS of {count_of(particles, 'particle')}")
    log_evidence = np.array([info.log_evidence for info in infos])
    finite = np.where(np.isfinite(log_evidence), log_evidence, math.nan)
    evidence.plot(steps, finite, **style, label="log evidence")
    evidence.set_title("log evidence")
    weights.fill_between(steps, low, high, color=BLUE, alpha=0.25, linewidth=0, label="5 % to 95 %")
    weights.plot(steps, middle, **style, label="median")
    weights.plot(steps, heaviest, **(style | {"color": ORANGE}), label="heaviest")
    weights.set_title("log-weights over the mean")
    for each in axes:
        for info in infos:
            if info.resampled:
                each.axvline(info.step - 0.5, color=GREY, linestyle=":", linewidth=0.8, zorder=0)
        each.set_xlabel("step")
        each.xaxis.set_major_locator(MaxNLocator(integer=True))
        each.spines[["top", "right"]].set_visible(False)
    ess.legend(frameon=False, fontsize=8)
    weights.legend(frameon=False, fontsize=8)
    return figure


def _alive(infos: Sequence[Info]) -> list[int]:
    return [int((info.log_weights > -math.inf).sum()) for info in infos]


def _relative_quantiles(info: Info) -> Floats:
    """Return quantiles and the maximum of the living particles' log-weights, less the log of the mean
    over all; NaN if all are dead."""
    alive = info.log_weights[info.log_weights > -math.inf]
    if not len(alive):
        return np.full(4, math.nan)
    return np.asarray(np.quantile(alive, [0.05, 0.5, 0.95, 1.0]) - info.log_evidence, np.float64)


def frame(columns: Mapping[str, Any], *, rows: str, numbers: Iterable[int]) -> DataFrame:
    """Return a table with these columns and numbered rows. Raises ExtraNotInstalled if pandas is
    missing."""
    try:
        import pandas
    except ImportError as error:
        raise ExtraNotInstalled(
            'tables need pandas, which is not installed: pip install "genrt[plot]"'
        ) from error
    index = pandas.Index([*numbers], name=rows)
    table = pandas.DataFrame(index=index)
    for name, column in columns.items():
        # As objects, lists and tuples among the values stay whole, one in a cell.
        is_plain = isinstance(column, np.ndarray) or {*map(type, column)} <= {bool, int, float}
        cells = np.array(column) if isinstance(column, np.ndarray) else list(column)
        table[name] = pandas.Series(cells, index=index, dtype=None if is_plain else object)
    return table


def steps_frame(infos: Sequence[Info]) -> DataFrame:
    """Return a table with one row a step. Raises ExtraNotInstalled if pandas is missing."""
    columns = {
        "resampled": [info.resampled for info in infos],
        "ancestors": [len(np.unique(info.ancestors)) for info in infos],
        "alive": _alive(infos),
        "unfinished": [info.unfinished for info in infos],
        "ess": [info.ess for info in infos],
        "log_evidence": [info.log_evidence for info in infos],
    }
    return frame(columns, rows="step", numbers=[info.step for info in infos])
