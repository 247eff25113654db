"""Rows that are there before they are asked for: after a sequence, and after each token of a draft, which
it may go on with.

Whoever draws from such a row asks no engine. A draft that was wrong costs what was computed for it, and
nothing else: a sequence that goes another way lets go of its rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from genrt.questions.contexts import TOKEN_BYTES, Adapter, Limits
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.questions.token_ids import TokenIds, id_words

__all__ = ["Draft", "RowsAhead", "Source", "check_drafts", "joined_rows", "missing_rows"]

Draft: TypeAlias = tuple[int, ...]
"""The token ids that a sequence may go on with."""

Source: TypeAlias = LogprobsRequest | ScoreRequest
"""A request whose answer is one row, or several."""


@dataclass(frozen=True, slots=True, eq=False)
class RowsAhead:
    """The rows after one sequence: as it is, and with each further token of a draft. A value: they are
    never written to.

    Attributes:
        draft: the tokens.
        rows: float32 ``[1 + len(draft), vocab_size]`` on the engine's device.
        adapter: what they were computed with.
        weights_version: the version of the weights that gave them.
    """

    draft: Draft
    rows: Tensor
    adapter: Adapter | None
    weights_version: int

    def after(self, token_ids: Sequence[int]) -> RowsAhead | None:
        """Return those after the sequence has gone on with these tokens; ``None`` if there are none."""
        count = len(token_ids)
        if tuple(token_ids) != self.draft[:count]:
            return None
        own = self.draft[count:], self.rows[count:], self.adapter, self.weights_version
        return RowsAhead(*own)

    def in_common(self, draft: Draft) -> int:
        """Return how many of the rows are those after the sequence and its part of this draft too."""
        pairs = zip(self.draft, draft, strict=False)
        most = min(len(self.draft), len(draft))
        return 1 + next((n for n, (one, other) in enumerate(pairs) if one != other), most)

    def are_of(self, adapter: Adapter | None, weights_version: int) -> bool:
        """Return whether these are what an adapter gives by a version of the weights."""
        return self.adapter == adapter and self.weights_version == weights_version


def check_drafts(
    limits: Limits, drafts: Sequence[TokenIds], lengths: np.ndarray, most: int
) -> tuple[Draft, ...]:
    """Return the drafts of sequences of these lengths, cut to ``most`` tokens and to what a context has
    room for. Raises InvalidRequest for bad token ids."""
    room = (limits.max_model_len - lengths).clip(0, most).tolist()
    return tuple(
        tuple(id_words(each, limits.vocab_size, allow_empty=True, name="drafts")[:count])
        for each, count in zip(drafts, room, strict=True)
    )


def missing_rows(
    packed: bytes,
    draft: Draft,
    known: RowsAhead | None,
    adapter: Adapter | None,
    weights_version: int,
    *,
    in_one: bool,
) -> list[Source]:
    """Return the requests for the rows after a sequence and its draft that are not known, in order; one
    request for several with ``in_one``."""
    there = 0 if known is None else known.in_common(draft)
    text = packed + array("I", draft).tobytes()
    first = len(packed) // TOKEN_BYTES + there
    wanted = range(first, len(text) // TOKEN_BYTES + 1)
    if in_one and len(wanted) > 1:
        # The rows before tokens are wanted: one more stands for what follows the last of them.
        whole = text + bytes(TOKEN_BYTES)
        return [ScoreRequest(whole, first, adapter, weights_version, wanted="rows")]
    return [
        LogprobsRequest(
            packed=text[: end * TOKEN_BYTES], adapter=adapter, weights_version=weights_version
        )
        for end in wanted
    ]


def joined_rows(draft: Draft, known: RowsAhead | None, found: Sequence[Tensor]) -> Tensor:
    """Return the rows after a sequence and its draft, given those that ``missing_rows`` asks for."""
    parts = [each if each.ndim > 1 else each[None] for each in found]
    if known is not None:
        parts.insert(0, known.rows[: known.in_common(draft)])
    return torch.cat(parts)
