"""The family tree of a run's particles, and its picture.

A node is a particle after a step; its parent is its ancestor after the previous step. A lineage is a path
from the beginning to a leaf: a particle of the last step, one that died, or one without children.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from genrt.errors import InvalidRequest
from genrt.inference.display.formatting import (
    BLUE,
    GREY,
    ORANGE,
    count_of,
    escape_attribute,
    escape_text,
    number,
    said,
    shorten,
    token_label,
    width,
)
from genrt.inference.model import DEAD
from genrt.inference.resampling import Floats, normalized_weights
from genrt.inference.state import Info

Node: TypeAlias = tuple[int, int]
"""A step and a particle."""

End: TypeAlias = Literal["survived", "died", "dropped", "forked"]
"""How a branch ends: at the last step, by dying, without children, or with several."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A stretch of the tree without forks.

    Attributes:
        row: its place in the picture; a branch and its first child share one.
        parent: the index of the branch that it grew from, ``None`` at the beginning.
        first: the place of its first step in the infos.
        particles: the index of its particle in each of its steps.
        token_ids: the tokens that they drew; -1 for none.
        share: the posterior weight of all descendants of its last particle, shown or not.
    """

    row: int
    parent: int | None
    first: int
    particles: tuple[int, ...]
    token_ids: tuple[int, ...]
    end: End
    share: float

    @property
    def last(self) -> int:
        """The place of its last step in the infos."""
        return self.first + len(self.particles) - 1

    @property
    def drawn(self) -> list[tuple[int, int]]:
        """The tokens that were drawn, each after the place of its step in the infos."""
        return [each for each in enumerate(self.token_ids, self.first) if each[1] != DEAD]


@dataclass(frozen=True, slots=True)
class Tree:
    """Branches, each after its parent; ``shown[end]`` of ``total[end]`` lineages are among them."""

    branches: tuple[Branch, ...]
    shown: dict[End, int]
    total: dict[End, int]

    def lineage(self, index: int) -> tuple[int, ...]:
        """Return the tokens from the beginning of the run to the end of a branch."""
        place: int | None = index
        tokens: list[int] = []
        while place is not None:
            tokens[:0] = [token_id for _, token_id in self.branches[place].drawn]
            place = self.branches[place].parent
        return tuple(tokens)


def tree_of(infos: Sequence[Info], *, lineages: int) -> Tree:
    """Return at most this many lineages: two thirds survivors, distinct texts first, then the heaviest;
    the others are spread evenly over the steps."""
    alive = np.array([info.log_weights for info in infos]) > -math.inf
    died = ~alive & (np.array([info.log_increments for info in infos]) == -math.inf)
    dropped = alive.copy()
    for step, info in enumerate(infos[1:]):
        dropped[step, info.ancestors] = False
    dropped[-1] = False
    others = np.argwhere(died | dropped)
    survivors = _ranked(infos)[: lineages - min(len(others), lineages // 3)]
    room = min(lineages - len(survivors), len(others))
    spread = others[(2 * np.arange(room) + 1) * len(others) // (2 * max(room, 1))]
    ends: dict[Node, End] = {(len(infos) - 1, particle): "survived" for particle in survivors}
    for step, particle in spread.tolist():
        ends[step, particle] = "died" if died[step, particle] else "dropped"
    children: defaultdict[Node | None, list[Node]] = defaultdict(list)
    for step, particle in ends:
        while True:
            parent = (step - 1, int(infos[step].ancestors[particle])) if step else None
            is_known = parent in children
            children[parent].append((step, particle))
            if parent is None or is_known:
                break
            step, particle = parent
    total: dict[End, int] = {
        "survived": int(alive[-1].sum()),
        "died": int(died.sum()),
        "dropped": int(dropped.sum()),
    }
    shown = Counter(ends.values())
    return Tree(_branches(infos, children, ends), {end: shown[end] for end in total}, total)


def _ranked(infos: Sequence[Info]) -> list[int]:
    """Return the survivors by weight, all first copies of a text before second copies, and so on."""
    hashes = np.zeros(len(infos[0].ancestors), dtype=np.uint64)
    for info in infos:
        before = hashes[info.ancestors]
        with np.errstate(over="ignore"):
            longer = before * np.uint64(0x9E3779B97F4A7C15) + info.token_ids.astype(np.uint64) + 1
        hashes = np.where(info.token_ids == DEAD, before, longer)
    log_weights = infos[-1].log_weights
    heaviest = np.argsort(-log_weights, kind="stable")[: (log_weights > -math.inf).sum()].tolist()
    seen: Counter[int] = Counter()
    copies = {}
    for particle in heaviest:
        copies[particle] = seen[int(hashes[particle])]
        seen[int(hashes[particle])] += 1
    return sorted(heaviest, key=copies.__getitem__)


def _branches(
    infos: Sequence[Info], children: Mapping[Node | None, list[Node]], ends: dict[Node, End]
) -> tuple[Branch, ...]:
    """Place the branches depth first, heavier children before lighter ones, so that no two cross."""
    log_weights = infos[-1].log_weights
    alive = bool((log_weights > -math.inf).any())
    shares: list[Floats] = [
        normalized_weights(log_weights) if alive else np.zeros(len(log_weights))
    ]
    for info in reversed(infos[1:]):
        shares.append(np.bincount(info.ancestors, shares[-1], len(log_weights)).astype(np.float64))
    shares.reverse()

    def lightest_first(parent: Node | None) -> list[Node]:
        nodes = children.get(parent, [])
        return sorted(nodes, key=lambda node: (shares[node[0]][node[1]], -node[1]))

    branches: list[Branch] = []
    waiting: list[tuple[Node, int | None]] = [(node, None) for node in lightest_first(None)]
    row = 0
    while waiting:
        node, parent = waiting.pop()
        path = [node]
        while len(following := children.get(path[-1], [])) == 1:
            path.append(following[0])
        step, particle = path[-1]
        branches.append(
            Branch(
                row=row,
                parent=parent,
                first=node[0],
                particles=tuple(particle for _, particle in path),
                token_ids=tuple(int(infos[step].token_ids[each]) for step, each in path),
                end=ends.get(path[-1], "forked"),
                share=float(shares[step][particle]),
            )
        )
        waiting += [(each, len(branches) - 1) for each in lightest_first(path[-1])]
        row += not following
    return tuple(branches)


FONT = "ui-monospace,'SFMono-Regular',Menlo,Consolas,'DejaVu Sans Mono',monospace"
SIZE, CHARACTER = 11, 6.65
"""The tokens' font: its size and the width of its characters, in pixels."""

ROW, TOP, LEFT, RIGHT = 24.0, 34.0, 60.0, 104.0
NARROWEST, WIDEST, LONGEST = 16.0, 96.0, 8000.0
"""The widths of columns, and the most for all of them together, in pixels."""

TITLE = 900
"""The most bytes of a title's text."""

SIGNS = {
    "survived": "\N{EM DASH}",
    "died": "\N{MULTIPLICATION SIGN}",
    "dropped": "\N{WHITE CIRCLE}",
}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Genealogy:
    """The family tree of a run's particles.

    In its picture columns are steps and lines are lineages, with their tokens above. A line is as wide as
    the posterior share of its descendants, and dotted after the last token of its branch. It ends in a
    cross where a particle died, in a ring where resampling removed one, and in a bar of its share at the
    last step. Dashed vertical lines are resamplings. Jupyter shows it.
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
        return self._picture('color="#1f2328"', '<rect width="100%" height="100%" fill="#fff"/>')

    def save(self, path: str | Path) -> None:
        """Write ``svg`` to a file. Raises InvalidRequest if its name does not end in ``.svg``."""
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
        picture = self._picture('color="currentColor"')
        return f'<div style="overflow-x:auto">{picture}</div>'

    def _picture(self, colour: str, paper: str = "") -> str:
        tree = self.tree
        edges = self._edges(tree)
        bottom = TOP + (1 + max((branch.row for branch in tree.branches), default=-1)) * ROW
        legend = [
            f"{SIGNS[end]} {'without children' if end == 'dropped' else end}: {total:,}"
            + f", {tree.shown[end]:,} of them shown" * (tree.shown[end] < total)
            for end, total in tree.total.items()
            if total
        ]
        wide, high = max(edges[-1] + RIGHT, 320), bottom + 20 + 14 * len(legend)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high:.0f}" '
                f'viewBox="0 0 {wide:.0f} {high:.0f}" role="img" aria-label="Genealogy of particles" '
                f'{colour} font-family="system-ui,sans-serif" font-size="10" fill="none">{paper}',
                *self._axis(edges, bottom),
                *(self._line(tree, index, edges) for index in range(len(tree.branches))),
                '<g fill="currentColor" opacity="0.85">',
                *(
                    f'<text x="12" y="{bottom + 20 + 14 * place:.0f}">{words}</text>'
                    for place, words in enumerate(legend)
                ),
                "</g></svg>",
            ]
        )

    def _edges(self, tree: Tree) -> list[float]:
        """Return where each step's column begins, and where the last one ends."""
        widths = [NARROWEST] * len(self.infos)
        for branch in tree.branches:
            for step, token_id in branch.drawn:
                needed = CHARACTER * width(token_label(token_id, self.tokens)) + 12
                widths[step] = min(WIDEST, max(widths[step], needed))
        scale = min(1.0, LONGEST / sum(widths))
        return list(accumulate((scale * each for each in widths), initial=LEFT))

    def _axis(self, edges: Sequence[float], bottom: float) -> list[str]:
        """Draw the numbers of the steps, and a line for each resampling."""
        numbers: list[str] = []
        lines: list[str] = []
        free, particles = 0.0, len(self.infos[0].ancestors)
        for place, info in enumerate(self.infos):
            x = edges[place]
            if x >= free:
                numbers.append(f'<text x="{x + 2:.1f}" y="12">{info.step}</text>')
                free = x + 30
            if info.resampled:
                before = f": ESS {self.infos[place - 1].ess:.1f} of {particles}" if place else ""
                lines.append(
                    f'<path class="resampling" d="M{x:.1f} 18V{bottom:.0f}" stroke="currentColor" '
                    'stroke-dasharray="2 3"><title>resampled before step '
                    f"{info.step}{before}</title></path>"
                )
        step = '<text x="4" y="12">step</text>'
        numbers = ['<g fill="currentColor" opacity="0.6">', step, *numbers, "</g>"]
        return ['<g opacity="0.4">', *lines, "</g>", *numbers]

    def _line(self, tree: Tree, index: int, edges: Sequence[float]) -> str:
        """Draw a branch: its line from its parent's end, its ending, its tokens above it."""
        branch = tree.branches[index]
        colour = BLUE if branch.share > 0 else ORANGE if branch.end == "died" else GREY
        y, left, right = _y(branch.row), edges[branch.first] + 5, edges[branch.last + 1] - 5
        x, above = 12.0, _y(0)
        if branch.parent is not None:
            parent = tree.branches[branch.parent]
            x, above = edges[parent.last + 1] - 5, _y(parent.row)
        middle = (x + left) / 2
        end = edges[branch.drawn[-1][0] + 1] - 5 if branch.drawn else left
        marks = {
            "died": f'<path d="M{right - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8" stroke="{colour}"/>',
            "dropped": f'<circle cx="{right + 3:.1f}" cy="{y:.1f}" r="3" stroke="{colour}"/>',
            "survived": f'<rect x="{right + 10:.1f}" y="{y - 5:.1f}" height="10" fill="{colour}" '
            f'width="{max(50 * branch.share, 0.5):.1f}" fill-opacity="0.55"/><text '
            f'x="{right + 14 + 50 * branch.share:.1f}" y="{y + 3.5:.1f}" fill="currentColor">'
            f"{branch.share:.3f}</text>",
        }
        return (
            f'<g class="{branch.end}"><title>{self._title(tree, index)}</title><path d="M{x:.1f} '
            f"{above:.1f}C{middle:.1f} {above:.1f} {middle:.1f} {y:.1f} {left:.1f} {y:.1f}"
            f'H{end:.1f}" stroke="{colour}" stroke-opacity="0.75" '
            f'stroke-width="{0.9 + 5.1 * math.sqrt(branch.share):.1f}"/><path '
            f'd="M{end:.1f} {y:.1f}H{right:.1f}" stroke="{colour}" stroke-dasharray="1 3"/>'
            f"{marks.get(branch.end, '')}{self._tokens(branch, y, edges)}</g>"
        )

    def _tokens(self, branch: Branch, y: float, edges: Sequence[float]) -> str:
        """Draw the tokens above the line, each in its column, shortened to its room."""
        spans = []
        for step, token_id in branch.drawn:
            room = int((edges[step + 1] - edges[step] - 10) / CHARACTER)
            if room > 0:
                text = escape_text(shorten(token_label(token_id, self.tokens), room))
                spans.append(f'<tspan x="{edges[step] + 7:.1f}">{text}</tspan>')
        return (
            f'<text y="{y - 6:.1f}" fill="currentColor" font-family="{FONT}" font-size="{SIZE}" '
            f'xml:space="preserve" style="white-space:pre">{"".join(spans)}</text>'
        )

    def _title(self, tree: Tree, index: int) -> str:
        branch = tree.branches[index]
        first, last = self.infos[branch.first], self.infos[branch.last]
        log_weight = float(last.log_weights[branch.particles[-1]])
        weight = 0.0
        if log_weight > -math.inf:
            weight = float(normalized_weights(last.log_weights)[branch.particles[-1]])
        text = escape_attribute(said(tree.lineage(index), self.tokens), most=TITLE)
        ending = "left without children by resampling" if branch.end == "dropped" else branch.end
        return (
            f"{text}\nsteps {first.step} to {last.step}, then particle {branch.particles[-1]}, "
            f"{ending}; weight {weight:.3g}, log-weight {number(log_weight)}"
        )


def _y(row: int) -> float:
    return TOP + (row + 0.75) * ROW
