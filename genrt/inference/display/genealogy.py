"""The family tree of a run's particles, as a table.

A node is a particle after a step; its parent is its ancestor after the previous step. A leaf is a
particle of the last step, one that died, or one without children. A lineage is the path from the
beginning to a leaf.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise, takewhile
from typing import Literal, TypeAlias

import numpy as np

from genrt.inference.display.formatting import STYLE, count_of, said, shorten
from genrt.inference.model import DEAD, Info
from genrt.inference.resampling import Floats, normalized_weights

Node: TypeAlias = tuple[int, int]
"""The place of a step in the infos, and a particle."""

End: TypeAlias = Literal["survived", "died", "dropped"]
"""How a lineage ends: at the last step, by dying, or without children."""

SIGNS: dict[End, str] = {
    "survived": "",
    "died": "\N{MULTIPLICATION SIGN} ",
    "dropped": "\N{WHITE CIRCLE} ",
}

LEGEND: dict[End, str] = {"survived": "survived", "died": "died", "dropped": "without children"}

CELL = 60
"""The most columns of a cell's text."""


def path_to(leaf: Node, infos: Sequence[Info]) -> tuple[Node, ...]:
    """Return the lineage of a leaf, from the first step on."""
    path = [leaf]
    while (step := path[-1][0]) > 0:
        path.append((step - 1, int(infos[step].ancestors[path[-1][1]])))
    return tuple(reversed(path))


def drawn(path: Sequence[Node], infos: Sequence[Info]) -> list[int]:
    """Return the tokens that particles drew at these nodes."""
    rows = [infos[step].token_ids[particle] for step, particle in path]
    return [token for row in rows for token in row.tolist() if token != DEAD]


def leaves_of(infos: Sequence[Info]) -> dict[End, list[Node]]:
    """Return the leaves by how they end: survivors by weight, all first copies of a text before second
    copies, and so on; the others by step."""
    died, dropped = list[Node](), list[Node]()
    for step, info in enumerate(infos):
        died += [(step, each) for each in np.nonzero(info.log_increments == -math.inf)[0].tolist()]
        if step + 1 < len(infos):
            alive = np.nonzero(info.log_weights > -math.inf)[0]
            childless = np.setdiff1d(alive, infos[step + 1].ancestors)
            dropped += [(step, each) for each in childless.tolist()]
    log_weights, last = infos[-1].log_weights, len(infos) - 1
    order = np.argsort(-log_weights, kind="stable").tolist()
    survivors = [(last, each) for each in order if log_weights[each] > -math.inf]
    seen, copies = Counter[tuple[int, ...]](), dict[Node, int]()
    for leaf in survivors:
        text = tuple(drawn(path_to(leaf, infos), infos))
        copies[leaf] = seen[text]
        seen[text] += 1
    return {"survived": sorted(survivors, key=copies.__getitem__), "died": died, "dropped": dropped}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Genealogy:
    """The family tree of a run's particles, as Jupyter shows it.

    A row is a lineage. It begins with its posterior weight, or a cross and the step in which its particle
    died, or a ring and the last step of a particle without children. A cell has the tokens up to the step
    in which lineages part; it is as high as the lineages that share it.
    """

    infos: tuple[Info, ...]
    tokens: Mapping[int, bytes]
    lineages: int

    def __repr__(self) -> str:
        particles = count_of(len(self.infos[0].ancestors), "particle")
        resampled = sum(info.resampled for info in self.infos)
        return f"Genealogy({particles}, {count_of(len(self.infos), 'step')}, {resampled} resampled)"

    def _repr_html_(self) -> str:
        """Return the table as a piece of HTML, in the colors of the page around it."""
        leaves = leaves_of(self.infos)
        shown = self._shown(leaves)
        log_weights = self.infos[-1].log_weights
        is_alive = bool(leaves["survived"])
        weights = normalized_weights(log_weights) if is_alive else np.zeros(len(log_weights))
        counts = Counter(shown.values())
        legend = [
            f"{SIGNS[end]}{LEGEND[end]}: {counts[end]:,} of {len(all_of):,}"
            for end, all_of in leaves.items()
            if all_of
        ]
        rows = "\n".join(self._rows(shown, weights))
        return (
            f'<div class="genrt"><style>{STYLE}</style><table class="tree">'
            f'<caption class="note">{", ".join(legend)}</caption><tbody>\n{rows}\n'
            "</tbody></table></div>"
        )

    def _shown(self, leaves: Mapping[End, list[Node]]) -> dict[Node, End]:
        """Return the leaves of the table: two thirds survivors, the others spread over the steps."""
        others = sorted(leaves["died"] + leaves["dropped"])
        survivors = leaves["survived"][: self.lineages - min(len(others), self.lineages // 3)]
        room = min(self.lineages - len(survivors), len(others))
        chosen = [others[(2 * place + 1) * len(others) // (2 * room)] for place in range(room)]
        died = set(leaves["died"])
        ends: dict[Node, End] = dict.fromkeys(survivors, "survived")
        return ends | {node: "died" if node in died else "dropped" for node in chosen}

    def _rows(self, ends: Mapping[Node, End], weights: Floats) -> Iterator[str]:
        """Yield a row for each lineage, in the order of the particles from the first step on."""
        paths = sorted(
            [path_to(leaf, self.infos) for leaf in ends],
            key=lambda path: [each for _, each in path],
        )
        # How many nodes a lineage shares with the one before; no lineage is the beginning of another.
        shared = [
            0,
            *[sum(a == b for a, b in zip(*each, strict=False)) for each in pairwise(paths)],
        ]
        for row, path in enumerate(paths):
            start, (step, particle) = shared[row], path[-1]
            least = accumulate(shared[row + 1 :], min)  # shared with each lineage below
            below = [*takewhile(lambda each, start=start: each > start, least)]  # type: ignore[misc]
            cells = []
            for stop in sorted({*below, len(path)}):
                height, first, last = 1 + sum(each >= stop for each in below), start, stop - 1
                text = said(drawn(path[start:stop], self.infos), self.tokens)
                start = stop
                if text:  # a finished particle draws no more
                    steps = f"steps {self.infos[first].step} to {self.infos[last].step}"
                    cells.append(
                        f'<td class="text" rowspan="{height}" title="{steps}: '
                        f'{escape(shorten(text, 300))}">{escape(shorten(text, CELL))}</td>'
                    )
            end = ends[path[-1]]
            figure = f"{weights[particle]:.4f}" if end == "survived" else self.infos[step].step
            yield f'<tr class="{end}"><td class="weight">{SIGNS[end]}{figure}</td>{"".join(cells)}</tr>'
