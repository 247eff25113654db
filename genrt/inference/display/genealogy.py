"""The genealogy of a run: the family tree of its particles, and its picture.

A node is a particle after a step. Its parent is its ancestor after the step before. A lineage is a path
from the beginning to a leaf: a particle of the last step, a particle that died (its weight became 0), or
a particle that resampling removed.

In the picture columns are steps, and lines are lineages with their texts. A line is as wide as the share
of the posterior that descends from it. It ends in a cross where a particle died, and in a ring where
resampling removed one; a dot is the end of a text.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

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

Nodes: TypeAlias = NDArray[np.int64]
"""``[n, 2]``: steps and particles."""

End: TypeAlias = Literal["survived", "died", "dropped", "forked"]
"""How a branch ends: at the last step; by dying; without children; or by having several."""

SURVIVORS = 2 / 3
"""The share of survivors among the lineages shown, if there are enough others to fill the rest."""

FACTOR = np.uint64(0x9E3779B97F4A7C15)


class _Node(NamedTuple):
    step: int
    particle: int


@dataclass(frozen=True, slots=True)
class Branch:
    """A stretch of the tree on which nothing forks, of the lineages that are shown.

    Attributes:
        row: where to draw it; a branch and its first child share one.
        parent: the index of the branch it grew from, ``None`` for one from the beginning.
        first: the place of its first step in the infos.
        particles: the indices of the particles it is made of, one for each of its steps.
        token_ids: what these drew; -1 for nothing.
        end: how it ends.
        share: the posterior weight of all that descends from its last particle, shown or not.
        log_weights: of its particles, after each step.
    """

    row: int
    parent: int | None
    first: int
    particles: tuple[int, ...]
    token_ids: tuple[int, ...]
    end: End
    share: float
    log_weights: tuple[float, ...]

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
    """Branches, each after the one it grew from.

    Of the ``total[end]`` lineages that end in each way, ``shown[end]`` are among the branches.
    """

    branches: tuple[Branch, ...]
    rows: int
    shown: dict[End, int]
    total: dict[End, int]


def tree_of(infos: Sequence[Info], *, lineages: int) -> Tree:
    """Return at most this many lineages: survivors first, distinct texts before equal ones, the heaviest
    first; of the others an even sample over the steps."""
    leaves = _leaves(infos)
    chosen = _chosen(leaves, _sort_survivors(infos, leaves["survived"]), lineages)
    children: defaultdict[_Node | None, list[_Node]] = defaultdict(list)
    ends: dict[_Node, End] = {}
    for end, nodes in chosen.items():
        for node in nodes:
            ends[node] = end
            _trace(infos, node, children)
    return Tree(
        branches=_branches(infos, children, ends, _descendant_weights(infos)),
        rows=len(ends),
        shown={end: len(nodes) for end, nodes in chosen.items()},
        total={end: len(nodes) for end, nodes in leaves.items()},
    )


def _leaves(infos: Sequence[Info]) -> dict[End, Nodes]:
    """Return all leaves by how they end, in the order of their steps."""
    alive = np.array([info.log_weights for info in infos]) > -math.inf
    increments = np.array([info.log_increments for info in infos])
    dropped, survived = alive.copy(), np.zeros_like(alive)
    for step, info in enumerate(infos[1:]):
        dropped[step, info.ancestors] = False
    dropped[-1], survived[-1] = False, alive[-1]
    return {
        "survived": np.argwhere(survived),
        "died": np.argwhere(~alive & (increments == -math.inf)),
        "dropped": np.argwhere(dropped),
    }


def _sort_survivors(infos: Sequence[Info], survivors: Nodes) -> Nodes:
    """Sort survivors by weight, heaviest first, but every text's second copy after all first ones, and so
    on."""
    hashes = np.zeros(len(infos[0].ancestors), dtype=np.uint64)
    for info in infos:
        parents = hashes[info.ancestors]
        with np.errstate(over="ignore"):
            longer = parents * FACTOR + info.token_ids.astype(np.uint64) + np.uint64(1)
        hashes = np.where(info.token_ids == DEAD, parents, longer)
    particles = survivors[:, 1]
    order = np.argsort(-infos[-1].log_weights[particles], kind="stable")
    seen: defaultdict[int, int] = defaultdict(int)
    ranks = []
    for same in hashes[particles[order]].tolist():
        ranks.append(seen[same])
        seen[same] += 1
    return survivors[order[np.argsort(ranks, kind="stable")]]


def _chosen(leaves: dict[End, Nodes], ranked: Nodes, lineages: int) -> dict[End, list[_Node]]:
    died, dropped = leaves["died"], leaves["dropped"]
    ended = len(died) + len(dropped)
    survivors = ranked[: lineages - min(ended, lineages - math.ceil(SURVIVORS * lineages))]
    room = min(lineages - len(survivors), ended)
    # In proportion, but at least one of each kind if there is room for two.
    share = round(room * len(died) / max(ended, 1))
    least, most = max(room - len(dropped), 0), min(room, len(died))
    if room > 1:
        least, most = max(least, min(1, len(died))), min(most, room - min(1, len(dropped)))
    share = min(max(share, least), most)
    chosen: dict[End, Nodes] = {
        "survived": survivors,
        "died": _evenly_spaced(died, share),
        "dropped": _evenly_spaced(dropped, room - share),
    }
    return {end: [_Node(*node) for node in nodes.tolist()] for end, nodes in chosen.items()}


def _evenly_spaced(nodes: Nodes, count: int) -> Nodes:
    """Return this many of the nodes, evenly spread."""
    return nodes[((np.arange(count) + 0.5) * len(nodes) / max(count, 1)).astype(np.int64)]


def _trace(
    infos: Sequence[Info], node: _Node, children: defaultdict[_Node | None, list[_Node]]
) -> None:
    """Add the path that leads to this node, back to where it is known already."""
    while True:
        step, particle = node
        parent = _Node(step - 1, int(infos[step].ancestors[particle])) if step else None
        is_known = parent in children
        children[parent].append(node)
        if parent is None or is_known:
            return
        node = parent


def _descendant_weights(infos: Sequence[Info]) -> list[Floats]:
    """Return for every step ``[N]`` the posterior weight of all that descends from each particle."""
    log_weights = infos[-1].log_weights
    alive = bool((log_weights > -math.inf).any())
    shares = [normalized_weights(log_weights) if alive else np.zeros(len(log_weights))]
    for info in reversed(infos[1:]):
        share = np.bincount(info.ancestors, shares[-1], len(log_weights))
        shares.append(share.astype(np.float64))
    return shares[::-1]


def _branches(
    infos: Sequence[Info],
    children: dict[_Node | None, list[_Node]],
    ends: dict[_Node, End],
    shares: list[Floats],
) -> tuple[Branch, ...]:
    """Place the branches depth first, heavier children before lighter ones, so that no two cross."""

    def lightest_first(nodes: list[_Node]) -> list[_Node]:
        return sorted(nodes, key=lambda node: (shares[node.step][node.particle], -node.particle))

    branches: list[Branch] = []
    waiting: list[tuple[_Node, int | None]] = [
        (node, None) for node in lightest_first(children.get(None, []))
    ]
    row = 0
    while waiting:
        node, parent = waiting.pop()
        path = [node]
        while len(following := children.get(path[-1], [])) == 1:
            path.append(following[0])
        last = path[-1]
        branches.append(
            Branch(
                row=row,
                parent=parent,
                first=node.step,
                particles=tuple(each.particle for each in path),
                token_ids=tuple(int(infos[step].token_ids[each]) for step, each in path),
                end=ends.get(last, "forked"),
                share=float(shares[last.step][last.particle]),
                log_weights=tuple(float(infos[step].log_weights[each]) for step, each in path),
            )
        )
        if following:
            waiting += [(each, len(branches) - 1) for each in lightest_first(following)]
        else:
            row += 1
    return tuple(branches)


def lineage(branches: Sequence[Branch], index: int) -> tuple[int, ...]:
    """Return the tokens from the beginning of the run to the end of a branch."""
    parts: list[list[tuple[int, int]]] = []
    place: int | None = index
    while place is not None:
        parts.append(branches[place].drawn)
        place = branches[place].parent
    return tuple(token_id for part in reversed(parts) for _, token_id in part)


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


MARKS: dict[End, str] = {
    "survived": f'<path d="M0 -3.5h16" stroke="{BLUE}" stroke-width="3"/>',
    "died": f'<path d="M4 -7.5l8 8m0-8l-8 8" stroke="{ORANGE}" stroke-width="2"/>',
    "dropped": f'<circle cx="8" cy="-3.5" r="3" stroke="{GREY}"/>',
}
"""The legend's marks of how lineages end."""


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
        return f'<div style="overflow-x:auto">{self._drawn(standalone=False)}</div>'

    def _drawn(self, *, standalone: bool) -> str:
        return _Picture(self.infos, self.tokens, self.tree).svg(standalone=standalone)


class _Picture:
    """The picture of a tree: step ``k`` is drawn from ``left[k]`` to ``right[k]``, in pixels."""

    def __init__(self, infos: Sequence[Info], tokens: Mapping[int, bytes], tree: Tree) -> None:
        self.infos = infos
        self.tokens = tokens
        self.tree = tree
        self.is_aligned = len(infos) <= MOST_ALIGNED
        share = COMPRESSED / len(infos)
        gutter = GUTTER if self.is_aligned else min(GUTTER, share)
        widths = [NARROWEST if self.is_aligned else min(CHARACTER * 2, share)] * len(infos)
        for branch in tree.branches if self.is_aligned else ():
            for step, token_id in branch.drawn:
                needed = CHARACTER * width(token_label(token_id, tokens)) + 5
                widths[step] = min(WIDEST, max(widths[step], needed))
        before = [gutter * (info.resampled or place == 0) for place, info in enumerate(infos)]
        # The places of all edges, one after the other: a gutter, a column, a gutter, and so on.
        edges = list(
            accumulate(chain.from_iterable(zip(before, widths, strict=True)), initial=LEFT)
        )
        self.left, self.right = edges[1::2], edges[2::2]

    def svg(self, *, standalone: bool) -> str:
        marks = self.marks()
        wide = max(self.right[-1] + RIGHT, LEGEND_LEFT + max(_room(words) for _, words in marks))
        bottom = TOP + self.tree.rows * ROW
        legend, high = _legend(marks, wide, bottom + 30)
        paper = f'<rect width="{wide:.0f}" height="{high:.0f}" fill="#fff"/>' * standalone
        colour = 'color="#1f2328"' if standalone else 'color="currentColor"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high:.0f}" '
                f'viewBox="0 0 {wide:.0f} {high:.0f}" role="img" aria-label="Genealogy of particles" '
                f'{colour} font-family="system-ui,sans-serif" font-size="10" fill="none">{paper}',
                *self.axis(bottom),
                *map(self.branch, range(len(self.tree.branches))),
                legend,
                "</svg>",
            ]
        )

    def axis(self, bottom: float) -> list[str]:
        """Draw the numbers of the steps, and a line for each resampling."""
        numbers: list[str] = []
        lines: list[str] = []
        free, particles = 0.0, len(self.infos[0].ancestors)
        for place, info in enumerate(self.infos):
            left = self.left[place]
            middle = (left + self.right[place]) / 2
            if middle >= free:
                numbers.append(f'<text x="{middle:.1f}" y="12">{info.step}</text>')
                free = middle + 30
            if info.resampled:
                x = left - (left - self.right[place - 1] if place else GUTTER) / 2
                before = f": ESS {self.infos[place - 1].ess:.1f} of {particles}" if place else ""
                lines.append(
                    f'<path class="resampling" d="M{x:.1f} 18V{bottom:.0f}" stroke="currentColor" '
                    'stroke-dasharray="2 3"><title>resampled before step '
                    f"{info.step}{before}</title></path>"
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

    def branch(self, index: int) -> str:
        """Draw a branch: its line, dotted after the end of the text, its end, its tokens above it."""
        branch = self.tree.branches[index]
        colour = BLUE if branch.share > 0 else ORANGE if branch.end == "died" else GREY
        y, left, right = _y(branch.row), self.left[branch.first], self.right[branch.last]
        x, above = 12.0, _y(0)
        if branch.parent is not None:
            parent = self.tree.branches[branch.parent]
            x, above = self.right[parent.last], _y(parent.row)
        line, dotted = f"M{x:.1f} {y:.1f}", f'stroke="{colour}" stroke-dasharray="1 3"/>'
        if above != y:
            middle = (x + left) / 2
            line = f"M{x:.1f} {above:.1f}C{middle:.1f} {above:.1f} {middle:.1f} {y:.1f} "
            line += f"{left:.1f} {y:.1f}"
        over = self.over(index)
        if over is not None and over < branch.first:
            lines = [f'<path d="{line}H{right:.1f}" {dotted}']
        else:
            end = right if over is None else self.right[over]
            lines = [
                f'<path d="{line}H{end:.1f}" stroke="{colour}" '
                f'stroke-width="{0.9 + 5.1 * math.sqrt(branch.share):.1f}" stroke-opacity="0.75"/>'
            ]
            if over is not None:
                lines.append(f'<circle cx="{end:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>')
            if end < right:
                lines.append(f'<path d="M{end:.1f} {y:.1f}H{right:.1f}" {dotted}')
        return "".join(
            [
                f'<g class="{branch.end}">',
                f"<title>{self.title(index)}</title>",
                *lines,
                _ending(branch, right, y, colour),
                self.spelled(branch, y),
                "</g>",
            ]
        )

    def over(self, index: int) -> int | None:
        """Return the step in which the text of a branch ended, here or in an earlier branch; ``None`` if
        it goes on.

        A text has ended if no token is drawn after it: not here, not in the children, or the whole run
        is over. The last step of a particle that died does not count: it drew no token for another
        reason.
        """
        branch = self.tree.branches[index]
        token_ids = branch.token_ids[: -1 if branch.end == "died" else None]
        if not token_ids:
            return None
        if token_ids[-1] != DEAD and not (
            (branch.end == "survived" and self.infos[-1].unfinished == 0)
            or any(each.parent == index and _begins_over(each) for each in self.tree.branches)
        ):
            return None
        counted = [step for step, _ in branch.drawn if step < branch.first + len(token_ids)]
        return counted[-1] if counted else branch.first - 1

    def spelled(self, branch: Branch, y: float) -> str:
        """Draw the tokens above the line: each in its column, or in one run where columns are narrow."""
        opening = (
            f'<text y="{y - 6:.1f}" fill="currentColor" font-family="{FONT}" font-size="{SIZE}" '
            'xml:space="preserve" style="white-space:pre"'
        )
        if not self.is_aligned:
            left = self.left[branch.first] + 2
            room = int((self.right[branch.last] - left) / CHARACTER)
            text = said([token_id for _, token_id in branch.drawn], self.tokens)
            if room < 3 or not text:
                return ""
            return f'{opening} x="{left:.1f}">{escape_text(shorten(text, room))}</text>'
        spans = []
        for step, token_id in branch.drawn:
            room = int((self.right[step] - self.left[step] - 3) / CHARACTER)
            shown = shorten(token_label(token_id, self.tokens), max(room, 1))
            spans.append(f'<tspan x="{self.left[step] + 2:.1f}">{escape_text(shown)}</tspan>')
        return f"{opening}>{''.join(spans)}</text>" if spans else ""

    def title(self, index: int) -> str:
        branch = self.tree.branches[index]
        weight = 0.0
        if branch.log_weights[-1] > -math.inf:
            weights = normalized_weights(self.infos[branch.last].log_weights)
            weight = float(weights[branch.particles[-1]])
        first, last = self.infos[branch.first].step, self.infos[branch.last].step
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        text = said(lineage(self.tree.branches, index), self.tokens)
        is_dropped = branch.end == "dropped"
        ending = "left without children by resampling" if is_dropped else branch.end
        return (
            f"{escape_attribute(text, most=TITLE)}\n{steps}, then particle {branch.particles[-1]}, "
            f"{ending}; weight {weight:.3g}, log-weight {number(branch.log_weights[-1])}"
        )

    def marks(self) -> list[tuple[str, str]]:
        """Return the legend's marks and words, with how many lineages there are of each kind."""
        marks = []
        for end, mark in MARKS.items():
            shown, total = self.tree.shown[end], self.tree.total[end]
            if total:
                name = "without children" if end == "dropped" else end
                words = f"{name}: {total:,}" + f", {shown:,} of them shown" * (shown < total)
                marks.append((mark, words))
        if any(info.resampled for info in self.infos):
            line = '<path d="M8 -10v12" stroke="currentColor" stroke-dasharray="2 3"/>'
            marks.append((line, "resampling"))
        return marks


def _y(row: int) -> float:
    return TOP + (row + 0.75) * ROW


def _begins_over(branch: Branch) -> bool:
    return branch.token_ids[0] == DEAD and not (branch.end == "died" and len(branch.particles) == 1)


def _ending(branch: Branch, x: float, y: float, colour: str) -> str:
    match branch.end:
        case "died":
            cross = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8"
            return f'<path d="{cross}" stroke="{colour}" stroke-width="2"/>'
        case "dropped":
            return f'<circle cx="{x + 3:.1f}" cy="{y:.1f}" r="3" stroke="{colour}"/>'
        case "survived":
            bar, share = 50 * branch.share, branch.share
            said = f"{share:.3f}" if share >= 0.0005 else f"{share:.0e}" if share else "0"
            return (
                f'<rect x="{x + 10:.1f}" y="{y - 5:.1f}" width="{max(bar, 0.5):.1f}" height="10" rx="1" '
                f'fill="{colour}" fill-opacity="0.55"/>'
                f'<text x="{x + 14 + bar:.1f}" y="{y + 3.5:.1f}" fill="currentColor">{said}</text>'
            )
        case "forked":
            return ""


def _room(words: str) -> float:
    """Return how much room an entry of the legend takes, in pixels, with a distance from the next."""
    return 34 + LETTER * len(words)


def _legend(marks: Sequence[tuple[str, str]], wide: float, y: float) -> tuple[str, float]:
    """Draw the legend from height ``y`` on, in as many rows as it takes; return it and where it ends."""
    parts, x = [], LEGEND_LEFT
    for mark, words in marks:
        if x > LEGEND_LEFT and x + _room(words) > wide:
            x, y = LEGEND_LEFT, y + LEGEND_ROW
        parts.append(
            f'<g transform="translate({x:.0f} {y:.0f})">{mark}'
            f'<text x="20" fill="currentColor">{words}</text></g>'
        )
        x += _room(words)
    return f'<g opacity="0.85">{"".join(parts)}</g>', y + 14
