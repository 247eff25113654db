"""Which tokens byte-pair encoding leaves side by side.

Byte-pair encoding joins, as long as it can, the two neighbors of the least rank, the leftmost first. It
leaves tokens a, b, c, … as they are exactly if it leaves a as it is, b, c, and so on, and each pair of
neighbors: until a merge crosses a boundary, both sides are merged as if alone.

A merge of u and v crosses the boundary of a and b if u is on the right edge of a's tree of merges, v on
the left edge of b's tree, and its rank is lower than that of the merge that takes u away, and not above
that of the merge that takes v away.

Vieira, Liu, Pasti, Emara, DuSell, LeBrun, Giulianelli, Gastaldi, Gimpel, O'Donnell & Cotterell (2025),
*Language models over canonical byte-pair encodings*. Berglund & van der Merwe (2023), *Formalizing BPE
tokenization*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from genrt.errors import InvalidConstraint


class Merges:
    """The trees of merges of a vocabulary.

    Attributes:
        whole: the tokens that byte-pair encoding leaves as they are; it never returns another token.
    """

    whole: frozenset[int]

    def __init__(self, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
        """
        Args:
            vocab: the token of each piece.
            merges: pairs of pieces, the first merged first.

        Raises:
            InvalidConstraint: a merge comes before one that makes its parts.
        """
        ids = [(vocab[left], vocab[right], vocab[left + right]) for left, right in merges]
        self._most = len(ids)
        self._ranks = {(left, right): rank for rank, (left, right, _) in enumerate(ids)}
        self._parts: dict[int, tuple[int, int, int] | None] = dict.fromkeys(
            token for piece, token in vocab.items() if len(piece) == 1
        )
        early: set[int] = set()
        for rank, (left, right, whole) in enumerate(ids):
            missing = {part for part in (left, right) if part not in self._parts}
            early |= missing
            if not missing and whole not in self._parts and not self._crosses(left, right, rank):
                self._parts[whole] = left, right, rank
                if whole in early:
                    raise InvalidConstraint(
                        f"the tokenizer merges token {whole} with others before it is made: its "
                        "canonical tokens cannot be told by their neighbors"
                    )
        self.whole = frozenset(self._parts)
        edges = np.array(
            [(v, loss, token) for token in self._parts for v, loss in self._edge(token, 0)]
        )
        left, loss, tokens = edges[np.lexsort(edges.T[::-1])].T
        made = np.array([(u, rank, v) for (u, v), rank in self._ranks.items()]).reshape(-1, 3)
        self._u, self._rank, right = made[np.lexsort(made.T[::-1])].T
        size = self._most + 1
        keys = left * size + loss
        self._first = np.searchsorted(keys, right * size + self._rank)
        self._last = np.searchsorted(keys, (right + 1) * size)
        self._tokens = tokens

    def _edge(self, token: int, side: int, loss: int | None = None) -> list[tuple[int, int]]:
        """Return the parts on an edge of a token's tree, 0 for the left one, with the rank of the merge
        that takes each away."""
        found = [(token, self._most if loss is None else loss)]
        while parts := self._parts[token]:
            token = parts[side]
            found.append((token, parts[2]))
        return found

    def _crosses(self, left: int, right: int, rank: int | None = None) -> bool:
        edge = self._edge(right, 0, rank)
        for u, loss in self._edge(left, 1, rank):
            for v, other in edge:
                crossing = self._ranks.get((u, v), self._most)
                if crossing < loss and crossing <= other:
                    return True
        return False

    def side_by_side(self, left: int, right: int) -> bool:
        """Return whether these two stay as they are; both are in ``whole``."""
        return not self._crosses(left, right)

    def apart(self, left: int) -> NDArray[np.intp]:
        """Return the tokens of ``whole`` that do not stay beside ``left``, some repeatedly."""
        found = [np.zeros(0, np.intp)]
        for u, loss in self._edge(left, 1):
            start, stop = np.searchsorted(self._u, (u, u + 1))
            stop = start + np.searchsorted(self._rank[start:stop], loss)
            ranges = zip(self._first[start:stop], self._last[start:stop], strict=True)
            found += [self._tokens[first:last] for first, last in ranges]
        return np.concatenate(found)
