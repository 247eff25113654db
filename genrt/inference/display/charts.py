"""Small charts of a run's weights as SVG, to stand in a page: ESS, log evidence, weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from genrt.inference.display.legible import count_of, number
from genrt.inference.display.summary import Curves
from genrt.inference.resampling import Floats

BLUE, ORANGE, GREY = "#2f7fc1", "#d55e00", "#8b929c"
"""Distinct with any kind of colour vision, and visible on white and on black."""

WIDE, HIGH = 310, 130
LEFT, RIGHT, TOP, BOTTOM = 40.0, 302.0, 26.0, 108.0

MOST_POINTS = 400
"""Of a curve; a curve of more points is drawn through the extremes of equal stretches."""


Line: TypeAlias = tuple[Floats, str, str]
"""A line over the steps, its colour and style; dashed or faint if the chart is not about it."""


def charts(curves: Curves, *, particles: int) -> list[str]:
    """Draw ESS, log evidence and weights, as one SVG each."""
    dashed, faint, full = 'stroke-dasharray="3 3"', 'stroke-opacity="0.45"', ""
    alive = curves.alive.astype(np.float64)
    (low, median, high), top = curves.band, (curves.heaviest, ORANGE, full)
    return [
        _chart(
            "effective sample size",
            f"of {count_of(particles, 'particle')}; dashed: alive",
            curves,
            [(alive, GREY, dashed), (curves.ess, BLUE, full)],
            limits=(0.0, float(particles)),
        ),
        _chart("log evidence", "so far", curves, [(curves.log_evidence, BLUE, full)]),
        _chart(
            "log-weights",
            "over the mean; faint: 5 and 95 %; orange: top",
            curves,
            [(low, BLUE, faint), (high, BLUE, faint), (median, BLUE, full), top],
        ),
    ]


def _chart(
    name: str,
    note: str,
    curves: Curves,
    lines: Sequence[Line],
    *,
    limits: tuple[float, float] | None = None,
) -> str:
    low, high = limits or _limits([y for y, _, _ in lines])
    steps = curves.steps.astype(np.float64)
    # A single step is in the middle.
    place = (steps - steps[0]) / (steps[-1] - steps[0]) if len(steps) > 1 else np.array([0.5])
    x = LEFT + place * (RIGHT - LEFT)
    ticks = sorted({round(float(each)) for each in x[curves.resampled]})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{HIGH}" '
        f'viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{name}" color="currentColor" '
        'font-family="system-ui,sans-serif" font-size="10" fill="none">',
        f'<text x="0" y="10" fill="currentColor" font-weight="600">{name}'
        f'<tspan font-weight="400" opacity="0.6" dx="5">{note}</tspan></text>',
        f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" stroke="currentColor" stroke-opacity="0.35"/>',
        '<g fill="currentColor" fill-opacity="0.7" text-anchor="end">'
        f'<text x="{LEFT - 4}" y="{TOP + 4}">{_axis_number(high)}</text>'
        f'<text x="{LEFT - 4}" y="{BOTTOM + 1}">{_axis_number(low)}</text>'
        f'<text x="{RIGHT}" y="{BOTTOM + 18}">{steps[-1]:.0f}</text>'
        f'<text x="{LEFT}" y="{BOTTOM + 18}" text-anchor="start">step {steps[0]:.0f}</text></g>',
    ]
    if ticks:
        marks = "".join(f"M{each} {BOTTOM:.0f}v6" for each in ticks)
        parts.append(
            f'<path d="{marks}" stroke="{ORANGE}" stroke-width="1.2"><title>resampled: '
            f"{int(curves.resampled.sum())} of {count_of(len(steps), 'step')}</title></path>"
        )
    parts += [
        f'<path d="{path}" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round" '
        f'stroke-linecap="round" {style}/>'
        for y, colour, style in lines
        for path in _paths(x, BOTTOM - (y - low) / (high - low) * (BOTTOM - TOP))
    ]
    return "".join([*parts, "</svg>"])


def _axis_number(value: float) -> str:
    digits = 0 if value == round(value) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return number(value, digits=digits)


def _limits(lines: Sequence[Floats]) -> tuple[float, float]:
    everything = np.concatenate(lines)
    finite = everything[np.isfinite(everything)]
    if not len(finite):
        return -1.0, 0.0
    low, high = float(finite.min()), float(finite.max())
    return (low - 0.5, high + 0.5) if high - low < 1e-9 else (low, high)


def _paths(x: Floats, y: Floats) -> list[str]:
    """Return a path for each stretch of finite values; a single value is a dot."""
    found = []
    edges = np.flatnonzero(np.diff(np.isfinite(y), prepend=False, append=False))
    for start, stop in edges.reshape(-1, 2):
        places = start + thinned(y[start:stop])
        points = [f"{a:.1f} {b:.1f}" for a, b in zip(x[places], y[places], strict=True)]
        found.append("M" + "L".join(points) + "h0.01" * (len(points) == 1))
    return found


def thinned(y: Floats) -> NDArray[np.int64]:
    """Return the places of at most ``MOST_POINTS`` points through which a curve looks the same."""
    if len(y) <= MOST_POINTS:
        return np.arange(len(y))
    stretches = np.array_split(np.arange(len(y)), MOST_POINTS // 2 - 1)
    extremes = [each[[y[each].argmin(), y[each].argmax()]] for each in stretches]
    return np.unique(np.concatenate([[0], *extremes, [len(y) - 1]]))
