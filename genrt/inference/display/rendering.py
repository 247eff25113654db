"""A result as text for a terminal, and as a piece of HTML for a notebook, of bounded size.

The HTML has no scripts and no external parts, and takes the colours of the page. Its parts are
the figures, the posterior's table, the genealogy, and the runtime's statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from genrt.inference.diagnostics import ChainStatistics
from genrt.inference.display.formatting import (
    BLUE,
    count_of,
    escape_attribute,
    escape_text,
    fixed,
    number,
    shorten,
)
from genrt.inference.display.genealogy import Genealogy
from genrt.inference.display.summary import PosteriorEntry, Summary
from genrt.runtime.statistics import Statistics

COLUMNS = 100
"""The most columns of a text in the posterior's table."""

TITLE = 6000
"""The most bytes of a title, which has the whole text of a row."""


STYLE = f"""
.genrt {{ font: 13px/1.45 system-ui, sans-serif; }}
.genrt .figures {{ display: flex; flex-wrap: wrap; gap: 6px 28px; margin: 2px 0 10px; }}
.genrt .figures div {{ white-space: nowrap; }}
.genrt b {{ font-weight: 600; font-size: 15px; }}
.genrt .note {{ opacity: .65; }}
.genrt table {{ border-collapse: collapse; margin: 0 0 12px; border: 0; font-size: 13px; }}
.genrt tr, .genrt tr:hover, .genrt tr:nth-child(even) {{ background: none; }}
.genrt th, .genrt td {{ border: 0; padding: 2px 10px 2px 0; text-align: left; vertical-align: top; }}
.genrt th {{ font-weight: 400; opacity: .65; }}
.genrt td.weight {{ text-align: right; font-variant-numeric: tabular-nums; }}
.genrt td.text {{ font-family: ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }}
.genrt .bar {{ width: 120px; height: 10px; margin-top: 5px; }}
.genrt .bar div {{ height: 10px; border-radius: 1px; background: {BLUE}; opacity: .75; }}
.genrt .wide {{ overflow-x: auto; }}
.genrt details {{ margin: 0 0 10px; }}
.genrt summary {{ cursor: pointer; margin: 0 0 6px; }}
"""


def to_line(summary: Summary) -> str:
    """Return the figures and the heaviest value, for ``repr``."""
    parts = [count_of(summary.particles, "particle"), f"{summary.alive:,} alive"]
    if summary.infos:
        parts.append(count_of(len(summary.infos), "step"))
    if summary.chains is None:
        parts.append(f"log_evidence={fixed(summary.log_evidence)}, ess={summary.ess:.1f}")
    else:
        parts.append(count_of(len(summary.chains.values), "chain"))
        parts.append(f"ess={summary.ess:.1f}, r_hat={summary.chains.r_hat:.2f}")
    parts += [f'{each.weight:.3f} "{shorten(each.label, 60)}"' for each in summary.entries[:1]]
    return f"Result({', '.join(parts)})"


def to_text(summary: Summary) -> str:
    """Return the figures and the posterior's table, for ``print``."""
    figures = list(_key_figures(summary))
    name_width, figure_width, _ = (max(map(len, column)) for column in zip(*figures, strict=True))
    lines = [
        f"{name:<{name_width}}  {figure:>{figure_width}}  {note}".rstrip()
        for name, figure, note in figures
    ]
    if not summary.entries:
        return "\n".join([*lines, "", _explain_empty(summary)])
    lines += ["", "weight  value"]
    lines += [f"{entry.weight:.4f}  {shorten(entry.label, COLUMNS)}" for entry in summary.entries]
    if summary.others is not None:
        lines.append(f"{summary.others.weight:.4f}  ({summary.others.label})")
    return "\n".join(lines)


def to_html(summary: Summary, genealogy: Genealogy | None) -> str:
    """Return everything as a piece of HTML, for Jupyter."""
    parts = [
        '<div class="genrt">',
        f"<style>{STYLE}</style>",
        '<div class="figures">',
        *(
            f'<div><span class="note">{name}</span> <b>{figure}</b> '
            f'<span class="note">{escape_text(note)}</span></div>'
            for name, figure, note in _key_figures(summary)
        ),
        "</div>",
        *_posterior_table(summary),
    ]
    if genealogy is not None:
        parts += [
            '<details open=""><summary>genealogy</summary>',
            genealogy._repr_html_(),
            "</details>",
        ]
    if summary.statistics is not None:
        parts += [
            '<details><summary>runtime <span class="note">meanwhile</span></summary>',
            *_statistics_table(summary.statistics),
            "</details>",
        ]
    return "\n".join([*parts, "</div>"])


def _explain_empty(summary: Summary) -> str:
    """Say why there is no posterior."""
    if not summary.particles:
        return "There are no particles."
    return f"Every particle died: {str(summary.deaths) or 'nothing has a positive weight'}."


def _key_figures(summary: Summary) -> Iterable[tuple[str, str, str]]:
    """Yield name, figure and note."""
    alive = ""
    if summary.alive < summary.particles:
        alive = f"{summary.alive:,} {'of them alive' if summary.infos else 'of positive weight'}"
    yield "particles", f"{summary.particles:,}", alive
    if not math.isnan(summary.log_evidence):
        note = f"Z = {math.exp(summary.log_evidence):.3g}" if summary.log_evidence < 700 else ""
        yield "log evidence", number(summary.log_evidence), note
    if summary.chains is not None and summary.alive:
        yield from _mixing(summary.chains)
    else:
        yield "ESS", f"{summary.ess:,.1f}", ""
    if summary.infos:
        often = f"before {summary.resampled:,} of them"
        note = f"resampled {often}" if summary.resampled else "never resampled"
        yield "steps", f"{len(summary.infos):,}", note


def _mixing(chains: ChainStatistics) -> Iterable[tuple[str, str, str]]:
    steps = count_of(len(chains.values[0]), "step")
    missing = f"; {chains.missing:,} more found no text" if chains.missing else ""
    yield "chains", f"{len(chains.values):,}", f"of {steps} each{missing}"
    known = chains.ess == chains.ess
    note = "by autocorrelation" if known else "too few steps, or all at one value: unknown"
    yield "ESS", f"{chains.ess:,.1f}" if known else number(math.nan), note
    known = chains.r_hat == chains.r_hat
    yield "R-hat", number(chains.r_hat, digits=2), "1 if chains agree" if known else "unknown"
    if not np.isnan(chains.acceptance).any():
        least, most = chains.acceptance.min(), chains.acceptance.max()
        note = f"of the moves; {least:.2f} to {most:.2f} by chain"
        yield "accepted", f"{chains.acceptance.mean():.2f}", note


def _posterior_table(summary: Summary) -> Iterable[str]:
    if not summary.entries:
        yield f"<p>{_explain_empty(summary)}</p>"
        return
    names = "<th>weight</th><th></th><th>particles</th><th>value</th>"
    yield f'<table class="posterior"><thead><tr>{names}</tr></thead><tbody>'
    for entry in summary.entries:
        share = 100 * entry.weight / summary.entries[0].weight
        bar = f'<div class="bar"><div style="width:{share:.1f}%"></div></div>'
        yield _posterior_row(entry, bar, _value(entry.label))
    if summary.others is not None:
        yield _posterior_row(summary.others, "", f'<td class="note">{summary.others.label}</td>')
    yield "</tbody></table>"


def _posterior_row(entry: PosteriorEntry, bar: str, value: str) -> str:
    return (
        f'<tr><td class="weight">{entry.weight:.4f}</td><td>{bar}</td>'
        f'<td class="weight">{entry.particles:,}</td>{value}</tr>'
    )


def _value(value: str) -> str:
    shown = shorten(value, COLUMNS)
    title = f' title="{escape_attribute(value, most=TITLE)}"' if shown != value else ""
    # A right-to-left text keeps its direction, but an escape in it must not be reversed.
    direction = "ltr" if "\\" in shown else "auto"
    return f'<td class="text"{title}><bdi dir="{direction}">{escape_text(shown)}</bdi></td>'


def _statistics_table(statistics: Statistics) -> Iterable[str]:
    batcher, cache, engine = statistics.batcher, statistics.cache, statistics.engine
    rows = [
        ("questions", f"{batcher.questions:,}", "asked, whoever asked them"),
        ("deduplicated", f"{batcher.deduplicated:,}", "joined an equal question in flight"),
        ("cached", f"{batcher.cached:,}", "had been answered before"),
        ("failed", f"{batcher.failed:,}", "ended in an error"),
        ("cancelled", f"{batcher.cancelled:,}", "were given up"),
        ("engine steps", f"{engine.steps:,}", f"in {batcher.flushes:,} flushes"),
        ("rows", f"{engine.rows:,}", "computed"),
        ("reads", f"{engine.reads:,}", "answered from rows that stayed on the device"),
        ("extended", f"{engine.extended:,}", "of them by a token after a resident sequence"),
        ("forked", f"{engine.forked:,}", "of them from a resident sequence"),
        ("evicted", f"{engine.evicted:,}", "resident sequences, for want of room"),
        ("tokens", f"{engine.computed_tokens:,}", "put through the model"),
        ("to the host", f"{engine.bytes_to_host / 2**20:,.1f} MiB", "copied off the device"),
        ("engine time", f"{engine.seconds:.2f} s", ""),
        ("cache", f"{cache.bytes / 2**20:,.1f} MiB", f"in {cache.rows:,} rows, now"),
    ]
    always = {"questions", "deduplicated", "cached", "engine steps", "rows", "engine time"}
    yield '<table class="runtime"><tbody>'
    for name, figure, note in rows:
        if name in always or not figure.startswith(("0", "0.0 ")):
            yield (
                f'<tr><td>{name}</td><td class="weight">{figure}</td>'
                f'<td class="note">{note}</td></tr>'
            )
    yield "</tbody></table>"
