"""ThreadTurns go round in the order in which they were asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from genrt.engines.vllm.process import ThreadTurns
from tests.scripted import PATIENCE_SECONDS

pytestmark = pytest.mark.vllm


def started(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def wait_for(turns: ThreadTurns, count: int) -> None:
    """Until so many threads wait."""
    enough = threading.Event()
    while len(turns._waiting) < count:
        enough.wait(0.001)


def test_who_comes_back_at_once_waits_behind_those_who_were_there() -> None:
    turns, order = ThreadTurns(), list[str]()

    def other(name: str) -> None:
        with turns:
            order.append(name)

    threads = []
    with turns:
        for number in range(3):
            threads.append(started(lambda name=f"other {number}": other(name)))  # type: ignore[misc]
            wait_for(turns, number + 1)
    with turns:
        order.append("again")
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert order == ["other 0", "other 1", "other 2", "again"]


def test_the_holder_enters_again_and_hands_over_when_it_is_out_of_all() -> None:
    turns, order = ThreadTurns(), list[str]()

    def other() -> None:
        with turns:
            order.append("other")

    with turns:
        with turns:
            thread = started(other)
            wait_for(turns, 1)
        order.append("still in")
    thread.join(PATIENCE_SECONDS)
    assert order == ["still in", "other"]
    with turns:
        pass


def test_one_thread_at_a_time_is_in() -> None:
    turns, inside, most = ThreadTurns(), list[int](), list[int]()

    def work() -> None:
        for _ in range(500):
            with turns:
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [started(work) for _ in range(4)]
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert len(most) == 2000
    assert set(most) == {1}


@pytest.mark.parametrize("let_in", [False, True])
def test_one_that_is_interrupted_while_it_waits_leaves_the_queue(
    let_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after the holder has left, with another thread behind it."""
    turns, leave = ThreadTurns(), threading.Event()
    wait, own = turns._changed.wait, threading.get_ident()

    def hold() -> None:
        with turns:
            leave.wait(PATIENCE_SECONDS)

    def interrupted(timeout: float | None = None) -> bool:
        if threading.get_ident() != own:
            return wait(timeout)
        if let_in:
            leave.set()
            wait(PATIENCE_SECONDS)
        raise KeyboardInterrupt

    holder = started(hold)
    while not turns._depth:
        leave.wait(0.001)
    monkeypatch.setattr(turns._changed, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), turns:
        raise AssertionError("it was let in")
    assert not turns._waiting
    behind = started(turns.__enter__)
    leave.set()
    for thread in (holder, behind):
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert turns._holder == behind.ident
