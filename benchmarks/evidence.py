"""Measures on this machine, and writes the charts and tables of docs/benchmarks/.

    python -m benchmarks.evidence            # minutes on a CPU; or: make evidence
    python -m benchmarks.evidence --drawn    # measures nothing

The results of GPUs are the committed files of benchmarks/results/. Those of this machine replace the
two files HERE there: ``benchmarks.step`` with a tiny model, and ``benchmarks.papers``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from benchmarks.plots import Bar, Group, chart, lines, of_steps, shape, short

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
HERE = {
    "here-step": "step --quick --model tiny --particles 16 64 --modes decode fresh resident contexts"
    " population population-resample",
    "here-papers": "papers",
}
"""The commands that measure on this machine, by the files of their results."""

WAYS = {
    "generate": "batch_generate",
    "each": "generate each",
    "many": "generate_many",
    "stream": "stream each",
}
"""The modes of ``benchmarks.generation``."""

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Results: TypeAlias = list[dict[str, Any]]


def of_texts(results: Results) -> list[Group]:
    """Return the throughput of each way to whole texts, as a share of ``LLM.generate``'s. A model's
    first run counts."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for each in results:
        if each["mode"] == "vllm":  # the first line of a run
            modes: dict[str, dict[str, Any]] = {}
            found.setdefault((each["model"], each["prompts"]), modes)
        modes[each["mode"]] = each
    groups = []
    for (model, count), modes in found.items():
        speed = modes["vllm"]["tokens_per_second"]
        title = f"{shape(model)}, {count} prompts; vLLM {speed:,.0f} tokens/s"
        bars = [
            Bar(label, modes[mode]["ratio"], *(modes[mode].get("ratio_quartiles") or ()))
            for mode, label in WAYS.items()
            if mode in modes
        ]
        groups.append(Group(title, bars))
    return groups


def of_smc(results: Results) -> list[Group]:
    """Return the time of SMC beside its population's, all repeats; a model's last result counts."""
    bars = {}
    for each in results:
        low, middle, high = each["of_population"]
        size = "8B" if "8B" in each["model"] else "1B"
        bars[size] = Bar(size, middle, low, high)
    return [Group(f"{results[0]['particles']} particles under a JSON schema", [*bars.values()])]


def variance(log_evidences: Floats) -> Any:
    """Return the variance of the evidence over its squared mean, of each row."""
    evidences = np.exp(log_evidences)
    return evidences.var(axis=-1, ddof=1) / evidences.mean(axis=-1) ** 2


def estimated(statistic: Callable[[Floats], Any], runs: Iterable[float]) -> Iterator[float]:
    """Yield a statistic of the runs, and the ends of its 95 % bootstrap interval."""
    found = np.array([*runs])
    again = np.random.default_rng(0).choice(found, (2000, len(found)))
    yield float(statistic(found))
    yield from np.quantile(statistic(again), [0.025, 0.975]).tolist()


def of_paper(results: Results, titles: Mapping[str, str]) -> list[Group]:
    """Return a group for each of these numbers of the runs, with a bar for each method."""
    groups = []
    for name, title in titles.items():
        statistic = variance if name == "log_evidence" else partial(np.mean, axis=-1)
        bars = [
            Bar(each["method"], *estimated(statistic, (run[name] for run in each["runs"])))
            for each in results
        ]
        groups.append(Group(title, bars))
    return groups


REJECTION = {
    "checks": "checks of the constraint for a token",
    "seconds": "seconds of a run",
    "log_evidence": "relative variance of the evidence",
}
POWER = {
    "nats": "-log p of a text (nats; less is likelier)",
    "pairs": "different pairs of tokens (share; more is diverse)",
    "texts": "different texts of 8",
    "drawn": "drawn tokens for a text",
    "computed": "computed tokens for a text",
}


class Figure(NamedTuple):
    """A chart of the results in these files that have these values."""

    name: str
    title: str
    files: tuple[str, ...]
    groups: Callable[[Results], list[Group]]
    only: Mapping[str, Any] = {}
    one: str | None = None


OWN_LOOP = "vLLM's own decode loop"
FIGURES = [
    Figure(
        "step-h100",
        "A step on an H100: time, less is better",
        ("2026-11-25-h100-step",),
        of_steps,
        one=OWN_LOOP,
    ),
    Figure(
        "step-h200",
        "A step on an H200: time, less is better",
        ("2026-11-23-h200-population",),
        of_steps,
        {"runner": "V2", "context": 128},
        OWN_LOOP,
    ),
    Figure(
        "populations-h100",
        "Several populations: time, less is better",
        ("2026-11-25-h100-populations",),
        of_steps,
        one=OWN_LOOP,
    ),
    Figure(
        "texts-h200",
        "Whole texts: throughput, more is better",
        ("2026-11-22-h200-generation-1b", "2026-11-22-h200-generation"),
        of_texts,
        {"schema": False},
        "LLM.generate",
    ),
    Figure(
        "smc-h200",
        "SMC: time, less is better",
        ("2026-11-23-h200-smc-launches", "2026-11-25-h200-smc"),
        of_smc,
        one="the draws of its population alone",
    ),
    Figure(
        "here-step",
        "A step on a CPU: time, less is better",
        ("here-step",),
        of_steps,
        one=OWN_LOOP,
    ),
    Figure(
        "rejection",
        "Rejection against masking",
        ("here-papers",),
        partial(of_paper, titles=REJECTION),
        {"paper": "rejection"},
    ),
    Figure(
        "power",
        "Power sampling against best of N",
        ("here-papers",),
        partial(of_paper, titles=POWER),
        {"paper": "power"},
    ),
]


def provenance(results: Results) -> list[str]:
    """Return the lines that say where, when and with what the results were taken."""

    def every(name: str) -> str:
        return ", ".join(dict.fromkeys(str(each[name]) for each in results if name in each))

    versions = {
        f"{name} {version}" for each in results for name, version in each["versions"].items()
    }
    found = [f"{every('device')}, {every('date')}", ", ".join(sorted(versions))]
    if runners := every("runner"):
        found[1] += f", runner {runners}"
    if loads := every("load"):
        found.append(f"load average at the end: {loads}")
    return found


def table(groups: Iterable[Group]) -> str:
    """Return the numbers of a chart as a Markdown table with a row for each group."""
    rows = {group.title: {bar.label: bar for bar in group.bars} for group in groups}
    labels = [*dict.fromkeys(label for bars in rows.values() for label in bars)]
    cells = [["", *labels], ["---"] * (1 + len(labels))]
    for title, bars in rows.items():
        cells.append([title, *(in_words(bars[each]) if each in bars else "" for each in labels)])
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def in_words(bar: Bar) -> str:
    """Return a number with its interval."""
    interval = "" if bar.high is None else f" ({short(bar.low or 0.0)}\N{EN DASH}{short(bar.high)})"
    return short(bar.value) + interval


def draw(results: Path, folder: Path) -> None:
    """Write the charts of the results in a folder, and the table under each chart of its page."""
    page = folder / "index.md"
    text = page.read_text("utf-8")
    for figure in FIGURES:
        found = [
            each
            for each in lines(results / f"{file}.jsonl" for file in figure.files)
            if figure.only.items() <= each.items()
        ]
        groups = figure.groups(found)
        drawn = chart(figure.title, groups, provenance(found), one=figure.one)
        (folder / f"{figure.name}.svg").write_text(drawn, "utf-8")
        before, image, after = text.partition(f"![{figure.title}]({figure.name}.svg)\n\n")
        if not image:
            raise ValueError(f"{page} does not show {figure.name}.svg as {figure.title!r}")
        text = before + image + table(groups) + re.sub(r"\A(\|.*\n)*\n*", "\n", after)
    page.write_text(text.rstrip() + "\n", "utf-8")


def measure(results: Path, *more: str) -> None:
    """Replace the results of this machine in a folder."""
    for file, command in HERE.items():
        path = results / f"{file}.jsonl"
        path.unlink(missing_ok=True)
        module, *options = command.split()
        arguments = [*options, *more, "--json", str(path)]
        subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drawn", action="store_true", help="draw the results that are there")
    arguments = parser.parse_args()
    if not arguments.drawn:
        measure(RESULTS)
    draw(RESULTS, PAGE)


if __name__ == "__main__":
    main()
