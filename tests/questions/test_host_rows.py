"""Rows that are moved to the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from genrt.questions import rows as questions_rows
from genrt.questions.rows import move_rows, moved_rows


def scattered(count: int, width: int) -> list[Tensor]:
    """Rows of one storage in an order of their own, and one of another."""
    whole = torch.randn(count, width)
    order = torch.randperm(count).tolist()
    return [*(whole[place] for place in order[:-1]), torch.randn(width)]


@pytest.mark.parametrize("at_once", [1, 3, 7, 100])
def test_rows_are_moved_in_their_order_however_many_at_a_time(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(questions_rows, "rows_at_once", lambda _: at_once)
    rows = scattered(7, 50)
    assert torch.equal(moved_rows(rows), torch.stack(rows))
    block = torch.full((9, 50), 7.0)
    move_rows(rows, block[1:8])
    assert torch.equal(block[1:8], torch.stack(rows))
    assert (block[[0, 8]] == 7.0).all()


def test_rows_for_which_there_is_no_room_together_are_moved_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def without_room(rows: Sequence[Tensor]) -> Any:
        tried.append(len(rows))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(questions_rows, "gather_rows", without_room)
    monkeypatch.setattr(questions_rows, "rows_at_once", lambda _: 3)
    rows = scattered(7, 50)
    assert torch.equal(moved_rows(rows), torch.stack(rows))
    assert tried == [3, 3, 1]
