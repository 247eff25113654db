"""The byte trie of a vocabulary: a row's mass under every prefix, all at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.tokens.vocabulary import checked_vocabulary

# How many numbers a sum over rows works on at once: what stays in a CPU's caches, and elsewhere what
# keeps launches few (256 MiB of float32).
_CPU_CHUNK = 1 << 21
_DEVICE_CHUNK = 1 << 26


class ByteTrie:
    """The trie of the bytes of all tokens, which sums a row over the tokens that share a prefix.

    Node 0 is the root. Nodes are numbered in the lexicographic order of their prefixes, so a node's
    descendants are the numbers that follow it. Tokens with equal bytes share a node; a token without
    bytes has none: give ``b""`` to those that are not text, and no sum counts them.

    Reading it is safe from any thread.
    """

    def __init__(self, vocabulary: Sequence[bytes], *, device: torch.device | str = "cpu") -> None:
        """Build the trie for rows on ``device``; the first rows on another one copy the sums' index
        there.

        Raises:
            InvalidRequest: an entry is not bytes.
        """
        tokens = checked_vocabulary(vocabulary)
        self._vocab_size = len(tokens)
        self._token_ids = sorted((i for i, t in enumerate(tokens) if t), key=tokens.__getitem__)
        self._tokens = [tokens[token_id] for token_id in self._token_ids]
        # Of each node: its depth, where its tokens begin and end in self._tokens, and the first node
        # after its descendants. Of each token: its node.
        self._depths, self._starts, self._stops, self._ends = [0], [0], [0], [0]
        self._token_nodes: list[int] = []
        path = [0]
        previous = b""
        for index, token in enumerate(self._tokens):
            shared = _shared_length(previous, token)
            self._close(path[shared + 1 :], index)
            del path[shared + 1 :]
            for depth in range(shared + 1, len(token) + 1):
                path.append(len(self._depths))
                self._depths.append(depth)
                self._starts.append(index)
                self._stops.append(0)
                self._ends.append(0)
            self._token_nodes.append(path[-1])
            previous = token
        self._close(path, len(self._tokens))

        nodes = np.full(self._vocab_size, -1, dtype=np.int64)
        nodes[self._token_ids] = self._token_nodes
        self.token_node: Tensor = torch.from_numpy(nodes).to(device)
        """``[vocab_size]``, int64: each token's node, -1 for one without bytes. Do not write to it."""
        sums = _RangeSums.of(self._token_ids, self._starts, self._stops)
        self._sums = {self.token_node.device: sums.to(self.token_node.device)}

    def _close(self, nodes: Sequence[int], stop: int) -> None:
        for node in nodes:
            self._stops[node] = stop
            self._ends[node] = len(self._depths)

    @property
    def num_nodes(self) -> int:
        """The number of distinct prefixes of the tokens, the empty one included."""
        return len(self._depths)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def __repr__(self) -> str:
        return f"ByteTrie({self.vocab_size} tokens, {self.num_nodes} nodes)"

    def node(self, prefix: bytes) -> int | None:
        """Return the node of a prefix; ``None`` if no token begins with it."""
        if not prefix:
            return 0
        first = bisect_left(self._tokens, prefix)
        if first == len(self._tokens) or not self._tokens[first].startswith(prefix):
            return None
        # The first token with this prefix made the nodes from here to its own, numbered in a row.
        return self._token_nodes[first] - (len(self._tokens[first]) - len(prefix))

    def prefix(self, node: int) -> bytes:
        """Return the bytes on the way from the root. Raises InvalidRequest for a number that is no
        node."""
        node = self._checked(node)
        return self._tokens[self._starts[node]][: self._depths[node]] if node else b""

    def children(self, node: int) -> dict[int, int]:
        """Return the next nodes by their byte, in the order of the bytes. Raises as ``prefix`` does."""
        node = self._checked(node)
        children = {}
        child = node + 1
        while child < self._ends[node]:
            children[self._tokens[self._starts[child]][self._depths[node]]] = child
            child = self._ends[child]
        return children

    def tokens(self, node: int) -> tuple[int, ...]:
        """Return the ids of the tokens whose bytes are the node's prefix, rising. Raises as ``prefix``
        does."""
        prefix = self.prefix(node)
        start = self._starts[node]
        return tuple(self._token_ids[start : bisect_right(self._tokens, prefix, lo=start)])

    def mass(self, rows: Tensor) -> Tensor:
        """Return the total probability of the tokens that begin with each node's prefix.

        Each total is a sum of the tokens' probabilities in pairs of pairs, never a difference, so that
        its relative error stays within a few dozen roundings down to the smallest normal number (1e-38 in
        float32); below that, use ``log_mass``. A row's result does not depend on the rows beside it, nor
        on chance. Gradients do not flow.

        Args:
            rows: log-probabilities ``[vocab_size]`` or ``[n, vocab_size]``, normalised or not, on any
                device; half precision is computed and returned as float32.

        Returns:
            ``[num_nodes]`` or ``[n, num_nodes]`` on the rows' device.

        Raises:
            InvalidRequest: rows of another shape or of integers.
        """
        return self._summed(rows, torch.exp, torch.add, 0.0)

    def log_mass(self, rows: Tensor) -> Tensor:
        """Return the logarithm of ``mass``, right also where that is too small for its type; -inf for
        0."""
        return self._summed(rows, torch.clone, torch.logaddexp, -torch.inf)

    def weight_max(self, weights: Tensor) -> Tensor:
        """Return the largest weight among the tokens that begin with each node's prefix.

        Weights may be probabilities or their logarithms: the same token has the largest. -inf where no
        token has bytes. Gradients do not flow.

        Args:
            weights: ``[vocab_size]`` or ``[n, vocab_size]``, on any device; half precision is returned as
                float32.

        Returns:
            ``[num_nodes]`` or ``[n, num_nodes]`` on the weights' device.

        Raises:
            InvalidRequest: weights of another shape or of integers.
        """
        return self._summed(weights, torch.clone, torch.maximum, -torch.inf)

    def _checked(self, node: int) -> int:
        if not isinstance(node, int | np.integer) or not 0 <= node < self.num_nodes:
            raise InvalidRequest(f"{node!r} is not a node; they are 0 .. {self.num_nodes - 1}")
        return int(node)

    def _summed(
        self,
        rows: Tensor,
        leaf: Callable[[Tensor], Tensor],
        add: Callable[..., Tensor],
        zero: float,
    ) -> Tensor:
        if rows.dim() not in (1, 2) or rows.shape[-1] != self._vocab_size:
            raise InvalidRequest(
                f"rows have the shape {list(rows.shape)}; give [{self._vocab_size}] or "
                f"[n, {self._vocab_size}] log-probabilities"
            )
        if not rows.is_floating_point():
            raise InvalidRequest(f"rows are {rows.dtype}; give log-probabilities")
        sums = self._sums.get(rows.device)
        if sums is None:
            sums = self._sums[rows.device] = self._sums[self.token_node.device].to(rows.device)
        many = rows.detach().to(torch.promote_types(rows.dtype, torch.float32))
        if rows.dim() == 1:
            many = many[None]
        result = many.new_empty(many.shape[0], self.num_nodes)
        numbers = _CPU_CHUNK if rows.device.type == "cpu" else _DEVICE_CHUNK
        chunk = max(1, numbers // (sums.width + self.num_nodes))
        for start in range(0, many.shape[0], chunk):
            part = slice(start, start + chunk)
            sums.sum(many[part], leaf, add, zero, out=result[part])
        return result if rows.dim() == 2 else result[0]


@dataclass(frozen=True, slots=True)
class _RangeSums:
    """Sums of many ranges of columns at once, in about ``2 log2(columns)`` vectorised additions.

    A segment tree: level 0 holds the columns, in the given order, and each further level adds the
    complete pairs of the one below. A range is the union of at most two tree nodes a level. The levels
    lie side by side, followed by a zero. ``rounds[k]`` holds each range's k-th tree node, the ranges with
    most nodes first, so that later rounds concern a shrinking front part; equal ranges are summed once.
    """

    columns: Tensor  # which column of a row is where at level 0
    levels: tuple[tuple[int, int], ...]  # where each level begins and how many tree nodes it has
    width: int
    rounds: tuple[Tensor, ...]
    ranges: Tensor  # for each asked range, its place in the rounds' order

    @staticmethod
    def of(columns: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> _RangeSums:
        """Prepare the sums of ranges ``starts[i] .. stops[i] - 1`` of places in ``columns``."""
        sizes = [len(columns)]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
        begins = [0, *np.cumsum(sizes).tolist()]
        zero = begins.pop()
        asked, ranges = np.unique(np.array([starts, stops]), axis=1, return_inverse=True)
        left, right = asked[0].copy(), asked[1].copy()
        owners, nodes = [], []
        for begin in begins:
            odd = np.flatnonzero((left < right) & (left % 2 == 1))
            owners.append(odd)
            nodes.append(begin + left[odd])
            left[odd] += 1
            odd = np.flatnonzero((left < right) & (right % 2 == 1))
            right[odd] -= 1
            owners.append(odd)
            nodes.append(begin + right[odd])
            left //= 2
            right //= 2
        owner, node = np.concatenate(owners), np.concatenate(nodes)
        by_owner = np.argsort(owner, kind="stable")
        owner, node = owner[by_owner], node[by_owner]
        counts = np.bincount(owner, minlength=asked.shape[1])
        turn = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
        most_first = np.argsort(-counts, kind="stable")
        place = np.empty_like(most_first)
        place[most_first] = np.arange(len(place))
        rounds = []
        for number in range(max(1, int(counts.max()))):
            of_range = np.full(int(np.sum(counts > number)) if number else len(place), zero)
            now = turn == number
            of_range[place[owner[now]]] = node[now]
            rounds.append(torch.from_numpy(of_range))
        return _RangeSums(
            columns=torch.tensor(columns, dtype=torch.int64),
            levels=tuple(zip(begins, sizes, strict=True)),
            width=zero + 1,
            rounds=tuple(rounds),
            ranges=torch.from_numpy(place[ranges.reshape(-1)]),
        )

    def to(self, device: torch.device) -> _RangeSums:
        return _RangeSums(
            columns=self.columns.to(device),
            levels=self.levels,
            width=self.width,
            rounds=tuple(nodes.to(device) for nodes in self.rounds),
            ranges=self.ranges.to(device),
        )

    def sum(
        self,
        rows: Tensor,
        leaf: Callable[[Tensor], Tensor],
        add: Callable[..., Tensor],
        zero: float,
        *,
        out: Tensor,
    ) -> None:
        """Fill ``out [n, ranges]`` with ``add``-sums of ``leaf(rows)``; ``zero`` is the neutral
        element."""
        tree = rows.new_full((rows.shape[0], self.width), zero)
        tree[:, : len(self.columns)] = leaf(rows.index_select(1, self.columns))
        for (begin, _), (above, half) in pairwise(self.levels):
            pairs = tree[:, begin : begin + 2 * half]
            add(pairs[:, 0::2], pairs[:, 1::2], out=tree[:, above : above + half])
        totals = tree.index_select(1, self.rounds[0])
        for nodes in self.rounds[1:]:
            front = totals[:, : len(nodes)]
            add(front, tree.index_select(1, nodes), out=front)
        torch.index_select(totals, 1, self.ranges, out=out)


def _shared_length(a: bytes, b: bytes) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
