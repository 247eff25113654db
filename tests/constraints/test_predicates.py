"""Predicates: asked once about each token, off the loop or on it, and left alone by cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.constraints import CheckedState, amasks, predicate
from genrt.errors import InvalidRequest
from genrt.lm import AsyncLM
from genrt.tokens.texts import Predicate, Text
from tests.vocabularies import EOS, led_to, lm_over, marked, sequences, spelt, vocabularies


class Recorded:
    """A predicate that counts what it is asked: at most one ``a``, and whole texts of even length."""

    def __init__(self) -> None:
        self.texts: list[Text] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self, text: Text) -> bool:
        self.texts.append(text)
        self.threads.add(threading.current_thread())
        return judge(text)


def judge(text: Text) -> bool:
    return text.bytes.count(b"a") < 2 and (not text.finished or len(text.bytes) % 2 == 0)


def plain(recorded: Recorded) -> Predicate:
    return recorded


def coroutine(recorded: Recorded) -> Predicate:
    async def ask(text: Text) -> bool:
        await asyncio.sleep(0)
        return recorded(text)

    return ask


def returns_awaitables(recorded: Recorded) -> Predicate:
    asked = coroutine(recorded)
    return lambda text: asked(text)


KINDS = [plain, coroutine, returns_awaitables]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)
@given(lm=vocabularies)
def test_masks_hold_what_the_predicate_wants(kind: Any, lm: AsyncLM) -> None:
    async def check() -> None:
        prefixes, whole = await led_to(predicate(kind(Recorded()), lm), 2)
        expected = {ids for ids in sequences(lm, 2) if judge(Text(ids, spelt(lm, ids)))}
        assert prefixes == expected
        assert whole == {ids for ids in expected if judge(Text(ids, spelt(lm, ids), True))}

    asyncio.run(check())


@pytest.mark.parametrize("kind", KINDS)
async def test_each_token_of_a_state_is_asked_about_once(kind: Any) -> None:
    recorded = Recorded()
    lm = lm_over(b"a", b"b", b"", b"a")
    state = predicate(kind(recorded), lm).start()
    assert isinstance(state, CheckedState)
    assert await state.check([1, 1, 2]) == [True, True, True]
    assert await state.check([]) == []
    assert len(recorded.texts) == 2
    (mask,) = await amasks([state])
    assert marked(mask) == [EOS, 1, 2, 4]
    assert await state.check([EOS, 3, 4, 1, 2]) == [True, False, True, True, True]
    assert (await amasks([state, state])).tolist() == [mask.tolist()] * 2
    assert sorted(recorded.texts, key=repr) == sorted(
        [Text((1,), b"a"), Text((2,), b"b"), Text((4,), b"a"), Text((), b"", finished=True)],
        key=repr,
    )
    after = state.advance(1)
    assert await after.check([1, 2, EOS]) == [False, True, False]
    assert recorded.texts[-3:].count(Text((1,), b"a", finished=True)) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_plain_function_is_called_off_the_loop_and_others_on_it(kind: Any) -> None:
    recorded = Recorded()
    state: Any = predicate(kind(recorded), lm_over(b"a", b"b")).start()
    await state.check([1, 2])
    (thread,) = recorded.threads
    assert (thread is threading.current_thread()) == (kind is not plain)


async def test_no_more_calls_at_once_than_said() -> None:
    under_way = most = 0

    async def ask(text: Text) -> bool:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(3):
            await asyncio.sleep(0)
        under_way -= 1
        return True

    start = predicate(ask, lm_over(*[b"a"] * 20), max_concurrent=3).start()
    await amasks([start, start.advance(1), start.advance(2)])
    assert most == 3


class Gate:
    """A predicate that waits until it is opened."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.texts: list[Text] = []
        self.left = 0

    async def __call__(self, text: Text) -> bool:
        self.texts.append(text)
        self.entered.set()
        try:
            await self.open.wait()
        finally:
            self.left += 1
        return True


async def test_a_cancelled_check_leaves_those_who_wait_for_the_same() -> None:
    gate = Gate()
    state: Any = predicate(gate, lm_over(b"a", b"b")).start()
    first = asyncio.create_task(state.check([1, 2]))
    await gate.entered.wait()
    second = asyncio.create_task(state.check([1]))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert gate.left == len(gate.texts), "what was called has been cancelled"
    gate.open.set()
    assert await second == [True]
    assert await state.check([1, 2]) == [True, True]
    assert Counter(text.token_ids for text in gate.texts) == {(1,): 2, (2,): 2}
    assert asyncio.all_tasks() == {asyncio.current_task()}


class BrokenError(Exception):
    """What a predicate of a user raises."""


@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_predicate_raises_reaches_the_caller(kind: Any) -> None:
    class Failing(Recorded):
        def __call__(self, text: Text) -> bool:
            if text.token_ids == (2,) and not self.threads:
                self.threads.add(threading.current_thread())
                raise BrokenError("by the user")
            self.texts.append(text)
            return True

    failing = Failing()
    state: Any = predicate(kind(failing), lm_over(b"a", b"b", b"c")).start()
    with pytest.raises(BrokenError, match="by the user") as raised:
        await state.check([1, 2, 3])
    [note] = raised.value.__notes__
    assert note == f"the function was asked about {Text((2,), b'b')!r}"
    assert await state.check([1, 2, 3]) == [True, True, True]
    assert Counter(failing.texts)[Text((2,), b"b")] == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("answer", [1, 0.0, None, "yes", np.float64(1), [True]])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_anything_but_a_bool_is_refused(answer: Any, asynchronous: bool) -> None:
    async def later(text: Text) -> Any:
        return answer

    function = later if asynchronous else lambda text: answer
    state: Any = predicate(function, lm_over(b"a"), name="rhymes").start()
    with pytest.raises(InvalidRequest, match=r"predicate rhymes said .* return True or False"):
        await state.check([1])


async def test_advancing_by_what_may_not_follow_is_refused() -> None:
    state = predicate(judge, lm_over(b"a", b"b", b"")).start().advance(1)
    assert isinstance(state, CheckedState)
    unasked = state.advance(1)
    assert await state.check([1]) == [False]
    for token_id, message in [
        (1, "may not follow"),
        (3, "may not follow"),
        (EOS, "ends the text"),
        (4, "not in"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            state.advance(token_id)
    assert await unasked.check([2]) == [False]
    with pytest.raises(InvalidRequest, match=r"not in 0 \.\. 3"):
        await state.check([1, 4])
    with pytest.raises(InvalidRequest, match="give an integer"):
        await state.check(["a"])  # type: ignore[list-item]


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(1, 4))
def test_loops_in_several_threads_share_the_answers(max_concurrent: int, loops: int) -> None:
    recorded = Recorded()
    lm = lm_over(*[b"a", b"b"] * 4)
    state: Any = predicate(coroutine(recorded), lm, max_concurrent=max_concurrent).start()
    together = threading.Barrier(loops)
    answers: list[list[bool]] = []

    def use() -> None:
        together.wait()
        answers.append(asyncio.run(state.check(range(9))))

    threads = [threading.Thread(target=use) for _ in range(loops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[True] * 9] * loops
    assert set(Counter(recorded.texts).values()) == {1}
