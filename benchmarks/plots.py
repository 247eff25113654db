"""Results of ``benchmarks.step`` as a picture: how many times decode's time a step takes in each mode.

    python -m benchmarks.plots benchmarks/results/*step*.jsonl --png step.png

A panel is a model, device, runner and context; within it there is a group of bars for each number of
particles, and in the group a bar for each mode, from decode's time (1) up, or down where it is faster.
The thin line on a bar spans the quartiles over the repeats. Where results differ in nothing but time
and options, the last one counts. ``cached`` is left out: it asks the engine nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MISSING = 'drawing needs matplotlib, which is not installed: pip install "genrt[plot]"'
COLOURS = {
    "resident": "#0072b2",
    "batch": "#56b4e9",
    "draw": "#009e73",
    "resample": "#e69f00",
    "population": "#cc79a7",
    "population-resample": "#8c6d31",
    "populations": "#7b6fd0",
    "fresh": "#b03a2e",
}
"""In the order of the bars; told apart with any kind of colour vision."""
TICKS = [0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100, 200, 500]
TIMES = "\N{MULTIPLICATION SIGN}"
COLUMNS = 2


@dataclass(slots=True)
class Panel:
    """Of one model, device, runner and context: ``bars[mode][particles]`` is the ratio to decode with
    its first and third quartile, ``decode[particles]`` decode's own milliseconds a step."""

    title: str
    bars: dict[str, dict[int, tuple[float, float, float]]] = field(default_factory=dict)
    decode: dict[int, float] = field(default_factory=dict)

    @property
    def counts(self) -> list[int]:
        """The numbers of particles, upwards."""
        return sorted({*self.decode, *(count for bars in self.bars.values() for count in bars)})


def panels(results: Iterable[Mapping[str, Any]]) -> list[Panel]:
    """What there is to draw. Passes over lines of other benchmarks, and over ratios that are missing or
    not positive, which the difference of two noisy times may be."""
    found: dict[tuple[Any, ...], Panel] = {}
    for result in results:
        ratio = result.get("ratio_to_decode")
        if ratio is None or ratio <= 0.0:
            continue
        keys = ("model", "device", "runner", "context", "shared")
        model, device, runner, context, shared = key = tuple(result[name] for name in keys)
        title = f"{model}, context {context}" + f", {shared} of them shared" * bool(shared)
        panel = found.setdefault(key, Panel(f"{title}\n{device}, runner {runner}"))
        mode, count = result["mode"], result["particles"]
        if mode == "decode":
            panel.decode[count] = result["ms_per_step"]
        elif mode in COLOURS:
            low, high = result["ratio_quartiles"]
            panel.bars.setdefault(mode, {})[count] = (ratio, low, high)
    return [panel for panel in found.values() if panel.bars]


def plot(results: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw the results to a PNG file.

    Raises:
        ValueError: none of them has a ratio to decode.
    """
    drawn = panels(results)
    if not drawn:
        raise ValueError("no results of benchmarks.step with a ratio to decode")
    columns = min(COLUMNS, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    widest = max(len(panel.counts) for panel in drawn)
    width = max(5.0, 1.2 + 1.9 * widest)
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(width * columns, 0.8 + 4.2 * rows), layout="constrained"
    )
    legend: dict[str, Any] = {}
    for number, panel in enumerate(drawn, start=1):
        axes = figure.add_subplot(rows, columns, number)
        legend |= _draw(axes, panel, scale=_scale(drawn))
    shown = [name for name in (*COLOURS, "decode") if name in legend]
    figure.legend(
        [legend[name] for name in shown], shown, loc="outside upper center", ncols=len(shown)
    )
    figure.savefig(path, format="png", dpi=150)


def _scale(drawn: Sequence[Panel]) -> tuple[float, float]:
    """The ratios at the bottom and the top of every panel, so that panels can be compared."""
    highs = [bar[2] for panel in drawn for bars in panel.bars.values() for bar in bars.values()]
    lows = [bar[1] for panel in drawn for bars in panel.bars.values() for bar in bars.values()]
    positive = [low for low in lows if low > 0.0]
    return min(0.9, *positive) / 1.1, max(2.0, *highs) * 1.25


def _draw(axes: Any, panel: Panel, *, scale: tuple[float, float]) -> dict[str, Any]:
    """One panel; returns what its legend shows, by label."""
    counts = panel.counts
    modes = [mode for mode in COLOURS if mode in panel.bars]
    width = 0.86 / len(modes)
    legend: dict[str, Any] = {}
    for place, mode in enumerate(modes):
        offset = (place - (len(modes) - 1) / 2) * width
        for count, (ratio, low, high) in panel.bars.get(mode, {}).items():
            x = counts.index(count) + offset
            [bar] = axes.bar(x, ratio - 1.0, width * 0.92, bottom=1.0, color=COLOURS[mode])
            axes.plot([x, x], [max(low, scale[0]), high], color="black", linewidth=0.8)
            above = ratio >= 1.0
            axes.annotate(
                f"{ratio:.1f}" if ratio >= 9.95 else f"{ratio:.2f}",
                (x, max(ratio, high) if above else min(ratio, low)),
                xytext=(0, 3 if above else -3),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
                fontsize=8,
            )
            legend[mode] = bar
    legend["decode"] = axes.axhline(1.0, color="black", linewidth=1.2)
    axes.set_yscale("log")
    axes.set_ylim(*scale)
    ticks = [tick for tick in TICKS if scale[0] <= tick <= scale[1]]
    axes.set_yticks(ticks, [f"{tick:g}{TIMES}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xticks(range(len(counts)), [_label(panel, count) for count in counts])
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.set_xlabel("particles")
    axes.set_ylabel("time of a step over decode's")
    axes.set_title(panel.title, fontsize=10)
    return legend


def _label(panel: Panel, count: int) -> str:
    """``decode`` in milliseconds, by which the ratios can be read as times."""
    return (
        f"{count}\ndecode: {panel.decode[count]:#.3g} ms" if count in panel.decode else f"{count}"
    )


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="files of benchmarks.step's --json")
    parser.add_argument("--png", type=Path, required=True, help="the picture to write")
    arguments = parser.parse_args()
    if not available():
        parser.error(MISSING)
    lines = [line for file in arguments.results for line in file.read_text().splitlines()]
    try:
        plot(map(json.loads, lines), arguments.png)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
