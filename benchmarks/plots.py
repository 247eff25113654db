"""Charts of results as SVG, for light and dark pages and for phones: bars with lines for their intervals.

    python -m benchmarks.plots benchmarks/results/*step*.jsonl --svg step.svg

The command draws results of ``benchmarks.step``: the time of a step in each mode, in units of vLLM's
own decode loop. The lines span the quartiles over the repeats. Where results differ in nothing but time
and options, the last one counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

MODES = {
    "population": "population",
    "population-resample": "population, copied",
    "populations": "four populations",
    "contexts": "contexts",
    "contexts-fork": "contexts, copied",
    "contexts-rows": "contexts, rows",
    "programs": "programs",
    "draw": "coroutines, draws",
    "resident": "coroutines, rows",
    "resample": "coroutines, copied",
    "batch": "a batch of rows",
    "fresh": "vLLM, max_tokens=1",
}
"""The modes of ``benchmarks.step`` in the order of their bars, with their labels."""

WIDTH, LEFT, RIGHT, ROW = 400, 140, 52, 18
STYLE = """
.page{fill:#fff}text{fill:#1f2328;font:12px system-ui,sans-serif}
.value{paint-order:stroke;stroke:#fff;stroke-width:3px}.bar{fill:#5b9bd5}
.line,.one{stroke:#1f2328;fill:none}.one{stroke-dasharray:3 3}
.bold{font-weight:600}.small{fill:#57606a;font-size:10px}
@media(prefers-color-scheme:dark){.page{fill:#1e2129}text{fill:#e3e5ea}.bar{fill:#3a78b3}.value{stroke:#1e2129}
.line,.one{stroke:#e3e5ea}.small{fill:#a0a6b1}}
"""


class Bar(NamedTuple):
    """A number of at least 0, and its interval where it has one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


class Group(NamedTuple):
    title: str
    bars: list[Bar]


def of_steps(results: Iterable[Mapping[str, Any]]) -> list[Group]:
    """Return a group for each model, context and number of particles, in that order. Lines of other
    benchmarks are left out, and ratios that are not positive, as a difference of noisy times may be."""
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for result in results:
        if (result.get("ratio_to_decode") or 0.0) > 0.0:
            keys = ("model", "device", "runner", "context", "shared", "particles")
            found.setdefault(tuple(result[key] for key in keys), {})[result["mode"]] = result
    groups = []
    for (model, _, _, context, _, count), modes in sorted(found.items()):
        title = f"{shape(model)}, {count} sequence{'s' * (count > 1)} of {context} tokens"
        if "decode" in modes:
            title += f"; vLLM {modes['decode']['ms_per_step']:#.3g} ms"
        bars = [
            Bar(MODES[mode], modes[mode]["ratio_to_decode"], *modes[mode]["ratio_quartiles"])
            for mode in MODES
            if mode in modes
        ]
        groups += [Group(title, bars)] if bars else []
    return groups


def chart(
    title: str, groups: Sequence[Group], notes: Sequence[str] = (), *, one: str | None = None
) -> str:
    """Return the SVG of groups of bars.

    Args:
        notes: the lines under the chart.
        one: the meaning of 1, which a line shows; all groups then have one scale, else each its own.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not groups:
        raise ValueError("no results to draw")
    room = WIDTH - LEFT - RIGHT
    tops = [max(max(bar.value, bar.high or 0.0) for bar in group.bars) for group in groups]
    if one is not None:
        tops = [max(1.0, *tops)] * len(groups)
    drawn, y = [_text(8, 20, title, "bold")], 26
    if one is not None:
        place = LEFT + room / tops[0]
        drawn.append(_text(LEFT, y + 10, f"dashed: {one} = 1", "small"))
        y += 12
    for group, top in zip(groups, tops, strict=True):
        drawn.append(_text(8, y + 18, group.title, "bold"))
        begin, values = y + 26, []
        y = begin
        for bar in group.bars:
            ends = [LEFT + room * max(end or 0.0, 0.0) / top for end in bar[1:]]
            drawn.append(_text(LEFT - 6, y + 11, bar.label, "end"))
            drawn.append(
                f'<rect class="bar" x="{LEFT}" y="{y + 2}" width="{ends[0] - LEFT:.1f}" height="11"/>'
            )
            if bar.high is not None:
                low, high = (f"{end:.1f} {y + 5}v5" for end in ends[1:])
                across = f"M{ends[1]:.1f} {y + 7.5}H{ends[2]:.1f}"
                drawn.append(f'<path class="line" d="M{low}M{high}{across}"/>')
            values.append(_text(max(ends) + 4, y + 11, short(bar.value), "value"))
            y += ROW
        if one is not None:
            drawn.append(f'<path class="one" d="M{place:.1f} {begin}V{y}"/>')
        drawn += values
    for note in notes:
        y += 14
        drawn.append(_text(8, y, note, "small"))
    height = y + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' width="{WIDTH * 1.35:.0f}" height="{height * 1.35:.0f}" aria-label="{escape(title)}">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def shape(model: str) -> str:
    """Return the size of a model with random weights, or a model's name."""
    return model.removeprefix("dummy-").upper() if model.startswith("dummy-") else model


def short(value: float) -> str:
    """Return a number of at least 0 with two digits after the point, or fewer if it is large."""
    return f"{value:,.{2 - (value >= 10) - (value >= 100)}f}"


def _text(x: float, y: float, text: str, style: str) -> str:
    anchor = ' text-anchor="end"' * (style == "end")
    return f'<text class="{style}" x="{x:.1f}" y="{y}"{anchor}>{escape(text)}</text>'


def lines(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the results in these files."""
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="files of benchmarks.step's --json")
    parser.add_argument("--svg", type=Path, required=True, help="the chart to write")
    arguments = parser.parse_args()
    try:
        drawn = chart("A step", of_steps(lines(arguments.results)), one="vLLM's own decode loop")
    except ValueError as error:
        parser.error(str(error))
    arguments.svg.write_text(drawn, "utf-8")


if __name__ == "__main__":
    main()
