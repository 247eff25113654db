"""The genealogy of a run as a picture: columns are steps, lines are lineages with their texts.

A line is as wide as the share of the posterior that descends from it. It ends in a cross where a particle
died, in a ring where resampling left one without children; a dot is the end of a text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from genrt.errors import InvalidRequest
from genrt.inference.display.charts import BLUE, GREY, ORANGE
from genrt.inference.display.legible import (
    abbreviated,
    count_of,
    escaped,
    escaped_attribute,
    number,
    said,
    token_label,
    width,
)
from genrt.inference.display.lineages import Branch, End, Tree, lineage, tree_of
from genrt.inference.model import DEAD
from genrt.inference.resampling import normalised
from genrt.inference.state import Info

FONT = "ui-monospace,'SFMono-Regular',Menlo,Consolas,'DejaVu Sans Mono',monospace"
SIZE, CHARACTER = 11, 6.65
"""The tokens' font: its size and the width of its characters, in pixels."""

ROW, TOP, LEFT, RIGHT = 24.0, 34.0, 34.0, 104.0
GUTTER = 26.0
"""Room for the forks before a step that began by resampling."""

MOST_ALIGNED = 80
"""With more steps, tokens are shown in one run along the line and not in columns."""

NARROWEST, WIDEST = 16.0, 96.0
COMPRESSED = 2400.0
"""The largest total width of a longer run's columns, in pixels."""

LEGEND_LEFT, LEGEND_ROW = 12.0, 18.0
LETTER = 6.0
"""The mean width of a letter of the legend, in the widest of the usual fonts, in pixels."""

TITLE = 900
"""The most bytes of a title's text."""


class _Columns(NamedTuple):
    """Where the steps are: ``left[k]`` to ``right[k]``, in pixels."""

    left: list[float]
    right: list[float]

    @property
    def end(self) -> float:
        return self.right[-1]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Genealogy:
    """The family tree of the particles: which grew from which, which steps resampled, what the lineages
    said.

    Jupyter shows it; ``svg`` is a document that stands alone, ``save`` writes it to a file.
    """

    infos: tuple[Info, ...]
    tokens: Mapping[int, bytes]
    lineages: int

    @property
    def tree(self) -> Tree:
        """The lineages that are shown, as data."""
        return tree_of(self.infos, lineages=self.lineages)

    @property
    def svg(self) -> str:
        """The picture as a document that stands alone, dark on white."""
        return self._drawn(standalone=True)

    def save(self, path: str | Path) -> None:
        """Write ``svg`` to a file.

        Raises:
            InvalidRequest: the file's name does not end in ``.svg``.
        """
        path = Path(path)
        if path.suffix.lower() != ".svg":
            raise InvalidRequest(f"{path.name} is no name for an SVG: let it end in .svg")
        path.write_text(self.svg, encoding="utf-8")

    def __repr__(self) -> str:
        particles = len(self.infos[0].ancestors)
        resampled = sum(info.resampled for info in self.infos)
        return (
            f"Genealogy({count_of(particles, 'particle')}, {count_of(len(self.infos), 'step')}, "
            f"{resampled} resampled)"
        )

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        """Return the picture in the colours of the page around it, scrolled if it is wide."""
        return f'<div style="overflow-x:auto">{self._drawn(standalone=False)}</div>'

    def _drawn(self, *, standalone: bool) -> str:
        tree = self.tree
        columns = _columns(self.infos, tree, self.tokens)
        marks = _marks(tree, has_resampling=any(info.resampled for info in self.infos))
        wide = max(columns.end + RIGHT, LEGEND_LEFT + max(entry.width for entry in marks))
        bottom = TOP + tree.rows * ROW
        legend, high = _legend(marks, wide, bottom + 30)
        paper = f'<rect width="{wide:.0f}" height="{high:.0f}" fill="#fff"/>' * standalone
        colour = 'color="#1f2328"' if standalone else 'color="currentColor"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high:.0f}" '
                f'viewBox="0 0 {wide:.0f} {high:.0f}" role="img" aria-label="Genealogy of particles" '
                f'{colour} font-family="system-ui,sans-serif" font-size="10" fill="none">{paper}',
                *_axis(self.infos, columns, bottom),
                *(
                    _branch(tree.branches, index, columns, self.infos, self.tokens)
                    for index in range(len(tree.branches))
                ),
                legend,
                "</svg>",
            ]
        )


def _columns(infos: Sequence[Info], tree: Tree, tokens: Mapping[int, bytes]) -> _Columns:
    if len(infos) <= MOST_ALIGNED:
        widths = [NARROWEST] * len(infos)
        for branch in tree.branches:
            for step, token_id in enumerate(branch.token_ids, start=branch.first):
                if token_id != DEAD:
                    needed = CHARACTER * width(token_label(token_id, tokens)) + 5
                    widths[step] = min(WIDEST, max(widths[step], needed))
        gutter = GUTTER
    else:
        widths = [min(CHARACTER * 2, COMPRESSED / len(infos))] * len(infos)
        gutter = min(GUTTER, COMPRESSED / len(infos))
    left, right, x = [], [], LEFT
    for place, (info, each) in enumerate(zip(infos, widths, strict=True)):
        x += gutter if info.resampled or place == 0 else 0.0
        left.append(x)
        x += each
        right.append(x)
    return _Columns(left, right)


def _axis(infos: Sequence[Info], columns: _Columns, bottom: float) -> list[str]:
    """Draw the numbers of the steps, and a line for each resampling."""
    numbers: list[str] = []
    lines: list[str] = []
    free, particles = 0.0, len(infos[0].ancestors)
    for place, (info, left, right) in enumerate(zip(infos, *columns, strict=True)):
        middle = (left + right) / 2
        if middle >= free:
            numbers.append(f'<text x="{middle:.1f}" y="12">{info.step}</text>')
            free = middle + 30
        if info.resampled:
            x = left - (GUTTER if place == 0 else left - columns.right[place - 1]) / 2
            before = f": ESS {infos[place - 1].ess:.1f} of {particles}" if place else ""
            lines.append(
                f'<path class="resampling" d="M{x:.1f} 18V{bottom:.0f}" stroke="currentColor" '
                f'stroke-dasharray="2 3"><title>resampled before step {info.step}{before}</title></path>'
            )
    return [
        '<g opacity="0.4">',
        *lines,
        "</g>",
        '<g fill="currentColor" opacity="0.6" text-anchor="middle">',
        *numbers,
        "</g>",
        '<text x="4" y="12" fill="currentColor" opacity="0.6">step</text>',
    ]


def _y(branch: Branch) -> float:
    return TOP + (branch.row + 0.75) * ROW


def _colour(branch: Branch) -> str:
    if branch.share > 0:
        return BLUE
    return ORANGE if branch.end == "died" else GREY


def _branch(
    branches: Sequence[Branch],
    index: int,
    columns: _Columns,
    infos: Sequence[Info],
    tokens: Mapping[int, bytes],
) -> str:
    branch = branches[index]
    colour, y = _colour(branch), _y(branch)
    left, right = columns.left[branch.first], columns.right[branch.last]
    began = (
        (12.0, TOP + 0.75 * ROW)
        if branch.parent is None
        else (columns.right[branches[branch.parent].last], _y(branches[branch.parent]))
    )
    over = _over(branches, index, is_over=infos[-1].unfinished == 0)
    drawn_to = right if over is None else columns.right[max(over, branch.first)]
    lines = [
        f'<path d="{_joint(began, left, y)}H{drawn_to:.1f}" stroke="{colour}" '
        f'stroke-width="{0.9 + 5.1 * math.sqrt(branch.share):.1f}" stroke-opacity="0.75"/>'
    ]
    if over is not None and over < branch.first:
        lines = [
            f'<path d="{_joint(began, left, y)}H{right:.1f}" stroke="{colour}" stroke-dasharray="1 3"/>'
        ]
    elif over is not None:
        lines.append(f'<circle cx="{drawn_to:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>')
        if drawn_to < right:
            lines.append(
                f'<path d="M{drawn_to:.1f} {y:.1f}H{right:.1f}" stroke="{colour}" '
                'stroke-dasharray="1 3"/>'
            )
    title = _title(branches, index, infos, tokens)
    return "".join(
        [
            f'<g class="{branch.end}">',
            f"<title>{title}</title>",
            *lines,
            _ending(branch, right, y, colour),
            _tokens(branch, columns, y, tokens),
            "</g>",
        ]
    )


def _joint(began: tuple[float, float], left: float, y: float) -> str:
    """Draw the line from the end of the parent to the branch's own row."""
    x, above = began
    if above == y:
        return f"M{x:.1f} {y:.1f}"
    middle = (x + left) / 2
    return f"M{x:.1f} {above:.1f}C{middle:.1f} {above:.1f} {middle:.1f} {y:.1f} {left:.1f} {y:.1f}"


def _over(branches: Sequence[Branch], index: int, *, is_over: bool) -> int | None:
    """Return the step in which the text of a branch ended, here or in an earlier branch; ``None`` if it
    goes on.

    A text has ended if no token is drawn after it: not here, not in the children, or the whole run
    ``is_over``. The last step of a particle that died does not count: it drew no token for another
    reason.
    """
    branch = branches[index]
    token_ids = branch.token_ids[: -1 if branch.end == "died" else None]
    if not token_ids:
        return None
    if token_ids[-1] != DEAD and not (
        (branch.end == "survived" and is_over)
        or any(each.parent == index and _begins_over(each) for each in branches)
    ):
        return None
    drawn = [place for place, token_id in enumerate(token_ids) if token_id != DEAD]
    return branch.first + drawn[-1] if drawn else branch.first - 1


def _begins_over(branch: Branch) -> bool:
    return branch.token_ids[0] == DEAD and not (branch.end == "died" and len(branch.particles) == 1)


def _ending(branch: Branch, x: float, y: float, colour: str) -> str:
    match branch.end:
        case "died":
            return (
                f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8" stroke="{colour}" '
                'stroke-width="2"/>'
            )
        case "dropped":
            return f'<circle cx="{x + 3:.1f}" cy="{y:.1f}" r="3" stroke="{colour}"/>'
        case "survived":
            bar = 50 * branch.share
            return (
                f'<rect x="{x + 10:.1f}" y="{y - 5:.1f}" width="{max(bar, 0.5):.1f}" height="10" rx="1" '
                f'fill="{colour}" fill-opacity="0.55"/>'
                f'<text x="{x + 14 + bar:.1f}" y="{y + 3.5:.1f}" fill="currentColor">'
                f"{_share(branch.share)}</text>"
            )
        case "forked":
            return ""


def _share(share: float) -> str:
    return f"{share:.3f}" if share >= 0.0005 else f"{share:.0e}" if share else "0"


def _tokens(branch: Branch, columns: _Columns, y: float, tokens: Mapping[int, bytes]) -> str:
    """Draw the tokens above the line: each in its column, or in one run where columns are narrow."""
    opening = (
        f'<text y="{y - 6:.1f}" fill="currentColor" font-family="{FONT}" font-size="{SIZE}" '
        'xml:space="preserve" style="white-space:pre"'
    )
    if len(columns.left) > MOST_ALIGNED:
        left, right = columns.left[branch.first] + 2, columns.right[branch.last]
        room = int((right - left) / CHARACTER)
        text = said([each for each in branch.token_ids if each != DEAD], tokens)
        if room < 3 or not text:
            return ""
        return f'{opening} x="{left:.1f}">{escaped(abbreviated(text, room))}</text>'
    spans = []
    for step, token_id in enumerate(branch.token_ids, start=branch.first):
        if token_id != DEAD:
            room = int((columns.right[step] - columns.left[step] - 3) / CHARACTER)
            shown = abbreviated(token_label(token_id, tokens), max(room, 1))
            spans.append(f'<tspan x="{columns.left[step] + 2:.1f}">{escaped(shown)}</tspan>')
    return f"{opening}>{''.join(spans)}</text>" if spans else ""


ENDINGS: dict[End, str] = {
    "survived": "survived",
    "died": "died",
    "dropped": "left without children by resampling",
    "forked": "forked",
}


def _title(
    branches: Sequence[Branch], index: int, infos: Sequence[Info], tokens: Mapping[int, bytes]
) -> str:
    branch = branches[index]
    weight = 0.0
    if branch.log_weights[-1] > -math.inf:
        weight = float(normalised(infos[branch.last].log_weights)[branch.particles[-1]])
    first, last = infos[branch.first].step, infos[branch.last].step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    text = said(lineage(branches, index), tokens)
    backwards = escaped_attribute(text, most=TITLE)
    return (
        f"{backwards}\n{steps}, then particle {branch.particles[-1]}, {ENDINGS[branch.end]}; "
        f"weight {weight:.3g}, log-weight {number(branch.log_weights[-1])}"
    )


class _Mark(NamedTuple):
    """An entry of the legend: a mark, and what it means."""

    svg: str
    words: str

    @property
    def width(self) -> float:
        """How much room it takes, in pixels, with a distance from the next."""
        return 34 + LETTER * len(self.words)


def _marks(tree: Tree, *, has_resampling: bool) -> list[_Mark]:
    """Return the legend's entries, with how many lineages there are of each kind."""
    kinds: list[tuple[End, str, str]] = [
        ("survived", "survived", f'<path d="M0 -3.5h16" stroke="{BLUE}" stroke-width="3"/>'),
        ("died", "died", f'<path d="M4 -7.5l8 8m0-8l-8 8" stroke="{ORANGE}" stroke-width="2"/>'),
        ("dropped", "without children", f'<circle cx="8" cy="-3.5" r="3" stroke="{GREY}"/>'),
    ]
    marks = []
    for end, name, svg in kinds:
        shown, total = tree.shown[end], tree.total[end]
        if total:
            words = f"{name}: {total:,}" + f", {shown:,} of them shown" * (shown < total)
            marks.append(_Mark(svg, words))
    if has_resampling:
        line = '<path d="M8 -10v12" stroke="currentColor" stroke-dasharray="2 3"/>'
        marks.append(_Mark(line, "resampling"))
    return marks


def _legend(marks: Sequence[_Mark], wide: float, y: float) -> tuple[str, float]:
    """Draw the legend from height ``y`` on, in as many rows as it takes; return it and where it ends."""
    parts, x = [], LEGEND_LEFT
    for mark in marks:
        if x > LEGEND_LEFT and x + mark.width > wide:
            x, y = LEGEND_LEFT, y + LEGEND_ROW
        parts.append(
            f'<g transform="translate({x:.0f} {y:.0f})">{mark.svg}'
            f'<text x="20" fill="currentColor">{mark.words}</text></g>'
        )
        x += mark.width
    return f'<g opacity="0.85">{"".join(parts)}</g>', y + 14
