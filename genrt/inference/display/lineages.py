"""The family tree of a run's particles: which lineages lived, which ended, and a readable choice of them.

A node is a particle after a step; its parent is its ancestor after the step before. A lineage is a
path from the beginning to a leaf: a particle of the last step, one that died (its weight became 0), or
one that resampling left without children.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genrt.inference.model import DEAD
from genrt.inference.resampling import Floats, normalised
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
    chosen = _chosen(leaves, _ranked(infos, leaves["survived"]), lineages)
    children: defaultdict[_Node | None, list[_Node]] = defaultdict(list)
    ends: dict[_Node, End] = {}
    for end, nodes in chosen.items():
        for node in nodes:
            ends[node] = end
            _trace(infos, node, children)
    return Tree(
        branches=_branches(infos, children, ends, _shares(infos)),
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


def _ranked(infos: Sequence[Info], survivors: Nodes) -> Nodes:
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
        "died": _spread(died, share),
        "dropped": _spread(dropped, room - share),
    }
    return {end: [_Node(*node) for node in nodes.tolist()] for end, nodes in chosen.items()}


def _spread(nodes: Nodes, count: int) -> Nodes:
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


def _shares(infos: Sequence[Info]) -> list[Floats]:
    """Return for every step ``[N]`` the posterior weight of all that descends from each particle."""
    log_weights = infos[-1].log_weights
    alive = bool((log_weights > -math.inf).any())
    shares = [normalised(log_weights) if alive else np.zeros(len(log_weights))]
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
