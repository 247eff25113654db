"""The family tree of a run's particles, and its picture.

A node is a particle after a step; its parent is its ancestor after the previous step. A lineage is a path
from the beginning to a leaf: a particle of the last step, one that died, or one without children.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genrt.inference.display.formatting import (
    BLUE,
    GREY,
    ORANGE,
    count_of,
    number,
    said,
    shorten,
    token_label,
    width,
)
from genrt.inference.model import DEAD, Info
from genrt.inference.resampling import Floats, normalized_weights

Node: TypeAlias = tuple[int, int]
"""The place of a step in the infos, and a particle."""

End: TypeAlias = Literal["survived", "died", "dropped"]
"""How a lineage ends: at the last step, by dying, or without children."""

FONT = "ui-monospace,'SFMono-Regular',Menlo,Consolas,'DejaVu Sans Mono',monospace"
CHARACTER, ROW, TOP, LEFT, RIGHT = 6.65, 24.0, 34.0, 60.0, 104.0
"""The size of a token's characters, of rows and margins, in pixels."""

NARROWEST, WIDEST, LONGEST = 16.0, 96.0, 8000.0
"""The widths of a column, and the most for all of them together, in pixels."""

LEAVES: dict[End, str] = {
    "survived": "\N{EM DASH} survived",
    "died": "\N{MULTIPLICATION SIGN} died",
    "dropped": "\N{WHITE CIRCLE} without children",
}


@dataclass(frozen=True, slots=True)
class Lineage:
    """The path to a leaf.

    Attributes:
        path: its particles, step by step.
        own: how many of the last ones no lineage before it has.
        parent: the place of the lineage that has the one before them, ``None`` at the beginning.
        end: how it ends.
    """

    path: tuple[Node, ...]
    own: int
    parent: int | None
    end: End


def leaves_of(infos: Sequence[Info]) -> dict[End, list[Node]]:
    """Return the leaves by how they end: survivors by weight, all first copies of a text before second
    copies, and so on; the others by step."""
    dropped = [info.log_weights > -math.inf for info in infos]
    places, columns = np.arange(len(infos[-1].ancestors)), []
    for step, info in reversed([*enumerate(infos)]):
        if step:
            dropped[step - 1][info.ancestors] = False
        columns.append(info.token_ids[places])
        places = info.ancestors[places]
    log_weights, texts = infos[-1].log_weights, np.concatenate(columns[::-1], axis=1)
    seen, ranked = Counter[bytes](), []
    for particle in np.argsort(-log_weights, kind="stable").tolist():
        if log_weights[particle] > -math.inf:
            text = texts[particle][texts[particle] != DEAD].tobytes()
            ranked.append((seen[text], particle))
            seen[text] += 1
    ranked.sort(key=lambda each: each[0])
    dropped[-1][:] = False
    died = [info.log_increments == -math.inf for info in infos]
    return {
        "survived": [(len(infos) - 1, particle) for _, particle in ranked],
        "died": _nodes(died),
        "dropped": _nodes(dropped),
    }


def _nodes(flags: Sequence[NDArray[np.bool_]]) -> list[Node]:
    """Return the particles of each step whose flag is set."""
    return [(step, each) for step, own in enumerate(flags) for each in np.nonzero(own)[0].tolist()]


def lineages_of(infos: Sequence[Info], ends: Mapping[Node, End]) -> list[Lineage]:
    """Return the lineages of these leaves, in the order of their particles from the first step on, so
    that no two lines cross."""
    paths = []
    for leaf in ends:
        path = [leaf]
        while path[-1][0]:
            step, particle = path[-1]
            path.append((step - 1, int(infos[step].ancestors[particle])))
        paths.append(tuple(reversed(path)))
    found: list[Lineage] = []
    rows: dict[Node, int] = {}
    for row, nodes in enumerate(sorted(paths, key=lambda path: [each for _, each in path])):
        known = sum(node in rows for node in nodes)
        parent = rows[nodes[known - 1]] if known else None
        found.append(Lineage(nodes, len(nodes) - known, parent, ends[nodes[-1]]))
        rows |= dict.fromkeys(nodes[known:], row)
    return found


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Genealogy:
    """The family tree of a run's particles.

    In its picture columns are steps and lines are lineages, with their tokens above, from the step on at
    which they leave another. A line ends in a cross where a particle died, in a ring where resampling
    removed one, and in a bar of its posterior weight at the last step; its width shows the weight, too.
    Dashed vertical lines are resamplings. Jupyter shows it.
    """

    infos: tuple[Info, ...]
    tokens: Mapping[int, bytes]
    lineages: int

    @property
    def svg(self) -> str:
        """The picture as a document that stands alone, dark on white."""
        return self._picture('color="#1f2328"', '<rect width="100%" height="100%" fill="#fff"/>')

    def __repr__(self) -> str:
        particles = count_of(len(self.infos[0].ancestors), "particle")
        resampled = sum(info.resampled for info in self.infos)
        return f"Genealogy({particles}, {count_of(len(self.infos), 'step')}, {resampled} resampled)"

    def _repr_html_(self) -> str:
        """Return the picture in the colours of the page around it, scrolled if it is wide."""
        picture = self._picture('color="currentColor"')
        return f'<div style="overflow-x:auto">{picture}</div>'

    def _shown(self, leaves: Mapping[End, list[Node]]) -> dict[Node, End]:
        """Return the leaves of the picture: two thirds survivors, the others spread over the steps."""
        others = sorted(leaves["died"] + leaves["dropped"])
        survivors = leaves["survived"][: self.lineages - min(len(others), self.lineages // 3)]
        room = min(self.lineages - len(survivors), len(others))
        chosen = [others[(2 * place + 1) * len(others) // (2 * room)] for place in range(room)]
        died = set(leaves["died"])
        ends: dict[Node, End] = dict.fromkeys(survivors, "survived")
        return ends | {node: "died" if node in died else "dropped" for node in chosen}

    def _picture(self, colour: str, paper: str = "") -> str:
        leaves = leaves_of(self.infos)
        ends = self._shown(leaves)
        lineages = lineages_of(self.infos, ends)
        shown = Counter(ends.values())
        labels = (self._label(node) for each in lineages for node in each.path)
        widest = CHARACTER * max(map(width, labels), default=0) + 12
        column = min(max(NARROWEST, widest), WIDEST, LONGEST / len(self.infos))
        bottom = TOP + len(lineages) * ROW
        legend = [
            f"{words}: {shown[end]:,} of {len(leaves[end]):,}"
            for end, words in LEAVES.items()
            if leaves[end]
        ]
        wide = max(LEFT + column * len(self.infos) + RIGHT, 320)
        high = bottom + 20 + 14 * len(legend)
        texts = [
            f'<text x="12" y="{bottom + 20 + 14 * place:.0f}">{words}</text>'
            for place, words in enumerate(legend)
        ]
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high:.0f}" '
            f'viewBox="0 0 {wide:.0f} {high:.0f}" role="img" aria-label="Genealogy of particles" '
            f'{colour} font-family="system-ui,sans-serif" font-size="10" fill="none">{paper}'
        )
        log_weights = self.infos[-1].log_weights
        alive = bool(leaves["survived"])
        weights = normalized_weights(log_weights) if alive else np.zeros(len(log_weights))
        lines = [self._line(row, each, column, weights) for row, each in enumerate(lineages)]
        notes = ['<g fill="currentColor" opacity="0.85">', *texts, "</g></svg>"]
        return "\n".join([head, *self._axis(column, bottom), *lines, *notes])

    def _label(self, node: Node) -> str:
        """Return the tokens that a particle drew in a step, printable; "" without one."""
        return "".join(token_label(each, self.tokens) for each in self._drawn(node))

    def _drawn(self, node: Node) -> list[int]:
        drawn = self.infos[node[0]].token_ids[node[1]]
        found: list[int] = drawn[drawn != DEAD].tolist()
        return found

    def _axis(self, column: float, bottom: float) -> list[str]:
        """Draw the numbers of the steps, and a line for each resampling."""
        numbers, lines, free = ['<text x="4" y="12">step</text>'], [], 0.0
        for place, info in enumerate(self.infos):
            x = LEFT + column * place
            if x >= free:
                numbers.append(f'<text x="{x + 2:.1f}" y="12">{info.step}</text>')
                free = x + 30
            if info.resampled:
                lines.append(f'<path class="resampling" d="M{x:.1f} 18V{bottom:.0f}"/>')
        numbers = ['<g fill="currentColor" opacity="0.6">', *numbers, "</g>"]
        dashed = '<g stroke="currentColor" stroke-dasharray="2 3" opacity="0.4">'
        return [dashed, *lines, "</g>", *numbers]

    def _line(self, row: int, lineage: Lineage, column: float, weights: Floats) -> str:
        """Draw a lineage: its line from its parent's, its ending, its own tokens above it."""
        colour = {"survived": BLUE, "died": ORANGE, "dropped": GREY}[lineage.end]
        own = lineage.path[-lineage.own :]
        step, particle = own[-1]
        share = float(weights[particle]) if lineage.end == "survived" else 0.0
        y, left = _y(row), LEFT + column * own[0][0] + 5
        right = LEFT + column * (own[-1][0] + 1) - 5
        x, above = (12.0, _y(0)) if lineage.parent is None else (left - 10, _y(lineage.parent))
        middle = (x + left) / 2
        marks = {
            "died": f'<path d="M{right - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8" stroke="{colour}"/>',
            "dropped": f'<circle cx="{right + 3:.1f}" cy="{y:.1f}" r="3" stroke="{colour}"/>',
            "survived": f'<rect x="{right + 10:.1f}" y="{y - 5:.1f}" height="10" fill="{colour}" '
            f'width="{max(50 * share, 0.5):.1f}" fill-opacity="0.55"/><text '
            f'x="{right + 14 + 50 * share:.1f}" y="{y + 3.5:.1f}" fill="currentColor">'
            f"{share:.3f}</text>",
        }
        room = int((column - 10) / CHARACTER)
        spans = [
            f'<tspan x="{LEFT + column * node[0] + 7:.1f}">{escape(shorten(token, room))}</tspan>'
            for node in own
            if room > 0 and (token := self._label(node))
        ]
        text = said([each for node in lineage.path for each in self._drawn(node)], self.tokens)
        log_weight = number(float(self.infos[step].log_weights[particle]))
        return (
            f'<g class="{lineage.end}"><title>{escape(shorten(text, 300))}\nparticle {particle} of '
            f"step {self.infos[step].step}: {lineage.end}, log-weight {log_weight}</title>"
            f'<path d="M{x:.1f} {above:.1f}C{middle:.1f} {above:.1f} {middle:.1f} {y:.1f} {left:.1f} '
            f'{y:.1f}H{right:.1f}" stroke="{colour}" stroke-opacity="0.75" '
            f'stroke-width="{0.9 + 5.1 * math.sqrt(share):.1f}"/>{marks[lineage.end]}'
            f'<text y="{y - 6:.1f}" fill="currentColor" font-family="{FONT}" font-size="11" '
            f'xml:space="preserve" style="white-space:pre">{"".join(spans)}</text></g>'
        )


def _y(row: int) -> float:
    return TOP + (row + 0.75) * ROW
