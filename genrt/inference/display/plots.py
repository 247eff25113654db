"""A result for the libraries of data analysis: a figure of matplotlib, tables of pandas."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from genrt.errors import ExtraNotInstalled, InvalidRequest
from genrt.inference.display.formatting import BLUE, GREY, ORANGE, count_of, shorten
from genrt.inference.display.summary import Curves, Summary
from genrt.inference.resampling import Floats
from genrt.inference.state import Info

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame


LABEL = 48
"""The most columns of a text beside its bar."""


def figure_of(summary: Summary) -> Figure:
    """Draw the posterior as bars and, if there were steps, the curves of ESS, log evidence and
    log-weights. Raises ExtraNotInstalled if matplotlib is missing."""
    bars = 0.9 + 0.28 * max(len(_bars(summary)), 2)
    if summary.curves is None:
        figure = _empty_figure(9.0, bars)
        _draw_posterior(figure.add_subplot(), summary)
        return figure
    figure = _empty_figure(11.0, 2.8 + bars)
    above, below = cast("Any", figure.subfigures(2, 1, height_ratios=[2.8, bars]))
    _draw_curves(above.subplots(1, 3), summary.curves, summary)
    _draw_posterior(below.add_subplot(), summary)
    return figure


def _empty_figure(wide: float, high: float) -> Figure:
    try:
        if "ipykernel" in sys.modules:
            # Only a figure of pyplot's makes a notebook ready to show figures. It is closed, so that it
            # is shown where it is returned, and not once more at the end of the cell.
            from matplotlib import pyplot

            made: Figure = pyplot.figure(figsize=(wide, high), layout="constrained")
            pyplot.close(made)
            return made
        from matplotlib import figure
    except ImportError as error:
        raise ExtraNotInstalled(
            'drawing needs matplotlib, which is not installed: pip install "genrt[plot]"'
        ) from error
    return figure.Figure(figsize=(wide, high), layout="constrained")


def _draw_curves(axes: Iterable[Axes], curves: Curves, summary: Summary) -> None:
    from matplotlib.ticker import MaxNLocator

    ess, evidence, weights = axes = list(axes)
    marker = "o" if len(curves.steps) == 1 else None
    ess.plot(curves.steps, curves.alive, color=GREY, linestyle="--", marker=marker, label="alive")
    ess.plot(curves.steps, curves.ess, color=BLUE, marker=marker, label="ESS")
    ess.set_ylim(0, 1.05 * summary.particles)
    ess.set_title(f"ESS of {count_of(summary.particles, 'particle')}")
    finite = np.where(np.isfinite(curves.log_evidence), curves.log_evidence, math.nan)
    evidence.plot(curves.steps, finite, color=BLUE, marker=marker, label="log evidence")
    evidence.set_title("log evidence")
    low, middle, high = curves.band
    weights.fill_between(
        curves.steps, low, high, color=BLUE, alpha=0.25, linewidth=0, label="5 % to 95 %"
    )
    weights.plot(curves.steps, middle, color=BLUE, marker=marker, label="median")
    weights.plot(curves.steps, curves.heaviest, color=ORANGE, marker=marker, label="heaviest")
    weights.set_title("log-weights over the mean")
    for each in axes:
        for step in curves.steps[curves.resampled]:
            each.axvline(step - 0.5, color=GREY, linestyle=":", linewidth=0.8, zorder=0)
        each.set_xlabel("step")
        each.xaxis.set_major_locator(MaxNLocator(integer=True))
        each.spines[["top", "right"]].set_visible(False)
    ess.legend(frameon=False, fontsize=8)
    weights.legend(frameon=False, fontsize=8)


def _draw_posterior(axes: Axes, summary: Summary) -> None:
    axes.set_title("posterior" if summary.entries else "posterior: every particle died")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("weight")
    rows = _bars(summary)
    places, weights = range(len(rows)), [weight for _, weight, _ in rows]
    drawn = axes.barh(places, weights, color=[colour for _, _, colour in rows])
    axes.bar_label(drawn, fmt="%.3f", padding=3, fontsize=8)
    axes.set_xlim(0, 1.15 * max(weights, default=1.0))
    axes.set_yticks(places, [_drawable(shorten(name, LABEL)) for name, _, _ in rows])
    for tick in axes.get_yticklabels():
        tick.set_parse_math(False)
        tick.set_fontsize(9)
    axes.invert_yaxis()


def _bars(summary: Summary) -> list[tuple[str, float, str]]:
    """Return label, weight and colour of every bar."""
    rows = [(entry.label, entry.weight, BLUE) for entry in summary.entries]
    others = summary.others
    return rows if others is None else [*rows, (f"({others.label})", others.weight, GREY)]


def _drawable(text: str) -> str:
    """Put U+FFFD for the characters that the reader's font does not have."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont(font_manager.FontProperties()))
    return "".join(c if font.get_char_index(ord(c)) else "\N{REPLACEMENT CHARACTER}" for c in text)


def particles_frame(
    texts: Sequence[str],
    token_ids: Sequence[tuple[int, ...]],
    values: Sequence[Any],
    log_weights: Floats,
    weights: Floats,
) -> DataFrame:
    """Return a table with one row a particle. Raises ExtraNotInstalled if pandas is missing."""
    pandas = _pandas()
    index = pandas.RangeIndex(len(texts), name="particle")
    # As objects, lists and tuples among the values stay whole, one in a cell; numbers and truth values
    # keep the dtype that pandas chooses.
    kinds = {type(value) for value in values}
    dtype = None if kinds and kinds <= {bool, int, float} else object
    return pandas.DataFrame(
        {
            "text": pandas.Series(list(texts), index=index, dtype=object),
            "tokens": pandas.Series(list(token_ids), index=index, dtype=object),
            "value": pandas.Series(list(values), index=index, dtype=dtype),
            "log_weight": np.array(log_weights),
            "weight": np.array(weights),
            "alive": np.array(log_weights > -math.inf),
        },
        index=index,
    )


def steps_frame(infos: Sequence[Info], curves: Curves | None) -> DataFrame:
    """Return a table with one row a step. Raises InvalidRequest without steps, ExtraNotInstalled if
    pandas is missing."""
    if curves is None:
        raise InvalidRequest("this result has no steps: SMC and importance sampling keep them")
    pandas = _pandas()
    return pandas.DataFrame(
        {
            "resampled": curves.resampled,
            "ancestors": [len(np.unique(info.ancestors)) for info in infos],
            "alive": curves.alive,
            "unfinished": [info.unfinished for info in infos],
            "ess": curves.ess,
            "log_evidence": curves.log_evidence,
        },
        index=pandas.Index(curves.steps, name="step"),
    )


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ExtraNotInstalled(
            'tables need pandas, which is not installed: pip install "genrt[plot]"'
        ) from error
    return pandas
