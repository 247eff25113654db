"""The byte trie of a vocabulary: sums a row's mass under every prefix at once."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.tokens.vocabulary import checked_vocabulary

# The numbers to process at a time: as many as a CPU's caches hold, or 256 MiB elsewhere.
_CPU_CHUNK = 1 << 21
_DEVICE_CHUNK = 1 << 26


class ByteTrie:
    """The trie of all tokens' bytes; it sums rows over the tokens that share a prefix. Safe from any
    thread.

    Node 0 is the root. Nodes are numbered in the lexicographic order of their prefixes, so a node's
    descendants follow it. Tokens with equal bytes share a node. A token without bytes has no node and is
    in no sum; use ``b""`` for tokens that are not text.
    """

    def __init__(self, vocabulary: Sequence[bytes], *, device: torch.device | str = "cpu") -> None:
        """Build the trie for rows on ``device``; rows on another device build their own index. Raises
        InvalidRequest if an entry is not bytes."""
        tokens = checked_vocabulary(vocabulary)
        self._vocab_size = len(tokens)
        self._token_ids = sorted((i for i, t in enumerate(tokens) if t), key=tokens.__getitem__)
        spelt = [tokens[token_id] for token_id in self._token_ids]
        begun = Counter(token[:depth] for token in spelt for depth in range(len(token) + 1))
        self._prefixes = sorted({b"", *begun})
        nodes = {prefix: node for node, prefix in enumerate(self._prefixes)}
        token_nodes = np.array([nodes[token] for token in spelt], dtype=np.int64)
        # Where each node's own tokens begin, plus the end of the last; and where its descendants' end.
        self._starts = np.searchsorted(token_nodes, np.arange(self.num_nodes + 1)).tolist()
        self._stops = [
            start + begun[x] for start, x in zip(self._starts, self._prefixes, strict=False)
        ]

        node_of = np.full(self._vocab_size, -1, dtype=np.int64)
        node_of[self._token_ids] = token_nodes
        self.token_node: Tensor = torch.from_numpy(node_of).to(device)
        """``[vocab_size]``, int64: each token's node, -1 for one without bytes. Do not write to it."""
        self._sums: dict[torch.device, _RangeSums] = {}
        self._sums_on(self.token_node.device)

    @property
    def num_nodes(self) -> int:
        """The number of distinct prefixes of the tokens, including the empty one."""
        return len(self._prefixes)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def __repr__(self) -> str:
        return f"ByteTrie({self.vocab_size} tokens, {self.num_nodes} nodes)"

    def node(self, prefix: bytes) -> int | None:
        """Return the node of a prefix; ``None`` if no token starts with it."""
        node = bisect_left(self._prefixes, prefix)
        return node if self._prefixes[node : node + 1] == [prefix] else None

    def prefix(self, node: int) -> bytes:
        """Return the bytes on the path from the root. Raises InvalidRequest if there is no such node."""
        return self._prefixes[self._checked(node)]

    def children(self, node: int) -> dict[int, int]:
        """Return the child nodes by their byte, in the order of the bytes. Raises as ``prefix``."""
        depth = len(self.prefix(node))
        children, child, end = {}, int(node) + 1, self._end(node)
        while child < end:
            children[self._prefixes[child][depth]] = child
            child = self._end(child)
        return children

    def _end(self, node: int) -> int:
        """Return the first node after a node's descendants."""
        return bisect_left(self._starts, self._stops[node])

    def tokens(self, node: int) -> tuple[int, ...]:
        """Return the ids of the tokens that spell the prefix, ascending. Raises as ``prefix``."""
        node = self._checked(node)
        return tuple(self._token_ids[self._starts[node] : self._starts[node + 1]])

    def mass(self, rows: Tensor) -> Tensor:
        """Return the total probability of the tokens that start with each node's prefix.

        Each total is a pairwise sum, never a difference: its relative error is a few dozen roundings down
        to 1e-38 in float32; below that, use ``log_mass``. A row's result does not depend on other rows.
        Gradients do not flow.

        Args:
            rows: log-probabilities ``[vocab_size]`` or ``[n, vocab_size]``, normalized or not, on any
                device; half precision is computed and returned as float32.

        Returns:
            ``[num_nodes]`` or ``[n, num_nodes]`` on the rows' device.

        Raises:
            InvalidRequest: rows of another shape or of integers.
        """
        return self._summed(rows, torch.exp, torch.add, 0.0)

    def log_mass(self, rows: Tensor) -> Tensor:
        """Return the logarithm of ``mass``, also correct where ``mass`` underflows; -inf for 0."""
        return self._summed(rows, torch.clone, torch.logaddexp, -torch.inf)

    def weight_max(self, weights: Tensor) -> Tensor:
        """Return the largest weight among the tokens that start with each node's prefix; -inf for the
        root if no token has bytes. Arguments, shapes and errors are as for ``mass``; weights may be any
        numbers."""
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
        sums = self._sums_on(rows.device)
        many = rows.detach().to(torch.promote_types(rows.dtype, torch.float32))
        if rows.dim() == 1:
            many = many[None]
        result = many.new_empty(many.shape[0], self.num_nodes)
        numbers = _CPU_CHUNK if rows.device.type == "cpu" else _DEVICE_CHUNK
        chunk = max(1, numbers // (sums.width + self.num_nodes))
        for part, out in zip(torch.split(many, chunk), torch.split(result, chunk), strict=True):
            sums.sum(part, leaf, add, zero, out=out)
        return result if rows.dim() == 2 else result[0]

    def _sums_on(self, device: torch.device) -> _RangeSums:
        if device not in self._sums:
            self._sums[device] = _RangeSums(self._token_ids, self._starts[:-1], self._stops, device)
        return self._sums[device]


class _RangeSums:
    """Sums many ranges of columns at once, in about ``2 log2(columns)`` vectorized additions.

    It is a segment tree. Level 0 holds the columns in their order, and each further level adds
    the complete pairs of the level below. A range is the union of at most two tree nodes per level. The
    levels lie side by side, followed by a zero. ``_rounds[k]`` holds the k-th tree node of each range,
    for ranges with the most nodes first. Equal ranges are summed once.
    """

    def __init__(
        self, columns: list[int], starts: list[int], stops: list[int], device: torch.device
    ) -> None:
        """Prepare the sums of the ranges ``starts[i] .. stops[i] - 1`` of places in ``columns``."""
        sizes = [len(columns)]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
        begins = [0, *np.cumsum(sizes).tolist()]
        zero = begins.pop()
        ends, ranges = np.unique(np.array([starts, stops]), axis=1, return_inverse=True)
        # One column per range: the tree nodes that make up the range.
        table = np.full((2 * len(begins), ends.shape[1]), zero)
        counts = np.zeros(ends.shape[1], dtype=np.int64)
        for begin in begins:
            for side in (0, 1):
                odd = np.flatnonzero((ends[0] < ends[1]) & (ends[side] % 2 == 1))
                table[counts[odd], odd] = begin + ends[side, odd] - side
                counts[odd] += 1
            ends = (ends + np.array([[1], [0]])) // 2
        counts = np.maximum(counts, 1)  # an empty range sums the zero
        order = np.argsort(-counts, kind="stable")

        self.width = zero + 1
        self._levels = list(zip(begins, sizes, strict=True))
        self._columns = torch.tensor(columns, dtype=torch.int64, device=device)
        self._rounds = [
            torch.tensor(table[turn, order[: np.sum(counts > turn)]], device=device)
            for turn in range(counts.max())
        ]
        self._ranges = torch.tensor(np.argsort(order)[ranges.reshape(-1)], device=device)

    def sum(
        self,
        rows: Tensor,
        leaf: Callable[[Tensor], Tensor],
        add: Callable[..., Tensor],
        zero: float,
        *,
        out: Tensor,
    ) -> None:
        """Fill ``out [n, ranges]`` with ``add``-sums of ``leaf(rows)``; ``zero`` is neutral for
        ``add``."""
        tree = rows.new_full((rows.shape[0], self.width), zero)
        tree[:, : len(self._columns)] = leaf(rows.index_select(1, self._columns))
        for (begin, _), (above, half) in pairwise(self._levels):
            pairs = tree[:, begin : begin + 2 * half]
            add(pairs[:, 0::2], pairs[:, 1::2], out=tree[:, above : above + half])
        totals = tree.index_select(1, self._rounds[0])
        for nodes in self._rounds[1:]:
            front = totals[:, : len(nodes)]
            add(front, tree.index_select(1, nodes), out=front)
        torch.index_select(totals, 1, self._ranges, out=out)
