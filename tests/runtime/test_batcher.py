"""batcher.py, turned by hand: what reaches the engine, who gets which answer, and who is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from genrt.engines.protocol import Finished
from genrt.errors import Closed, EngineFailed, OutOfMemory, UnknownAdapter
from genrt.questions.arguments import Adapter
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.ask import MAX_UNAWAITED
from genrt.runtime.batcher import MAX_PASSES, WAITERS_A_PASS, Waiter, deliver
from genrt.tokens.rows import separate_copies
from tests.inside import is_held, unlogged
from tests.scripted import (
    ByHand,
    ScriptedEngine,
    expected_row,
    logprobs,
    passes,
    right,
    sample,
)

A, B, C, D = logprobs(1), logprobs(2), logprobs(3, 1), logprobs(4, 1, 2)


@pytest.fixture
def hands() -> Iterator[list[ByHand]]:
    """Batchers made by a test; afterwards each must account for every question."""
    made: list[ByHand] = []
    yield made
    assert made
    for hand in made:
        hand.check()


@pytest.fixture
def by_hand(hands: list[ByHand]) -> Callable[..., ByHand]:
    def make(*arguments: Any, **options: Any) -> ByHand:
        hands.append(ByHand(*arguments, **options))
        return hands[-1]

    return make


Make = Callable[..., ByHand]


def by_tokens(steps: dict[Request, int]) -> ScriptedEngine:
    """An engine whose requests take as many steps as the table says, or one."""
    return ScriptedEngine(steps=lambda request: steps.get(request, 1))


# -- deduplication and the flush --------------------------------------------------------------


async def test_a_flush_joins_work_in_progress_between_two_steps(by_hand: Make) -> None:
    hand = by_hand(by_tokens({A: 3}))
    slow = await hand.queued(A)
    hand.turn()
    quick = await hand.queued(B)
    hand.turn()
    await passes()
    assert quick.done()
    assert not slow.done()
    await hand.finish()
    assert hand.engine.stepped == [[A], [A, B], [A]]
    assert right([A], await slow)


async def test_a_flush_holds_everything_that_is_asked_until_the_loop_is_quiet(
    by_hand: Make,
) -> None:
    hand = by_hand()

    async def after(count: int) -> list[Result]:
        await passes(count)
        return await hand.asker.ask([logprobs(1, count)])

    tasks = [asyncio.create_task(after(count)) for count in range(30)]
    await passes(29)
    assert hand.batcher.seconds_until_due() is None, "the loop was taken for quiet too early"
    await hand.finish()
    assert hand.engine.submitted == [[logprobs(1, count) for count in range(30)]]
    for count, task in enumerate(tasks):
        assert right([logprobs(1, count)], await task)


@pytest.mark.promise(number=19)
async def test_a_loop_that_never_goes_quiet_is_not_waited_for_forever(by_hand: Make) -> None:
    hand = by_hand()
    tasks = []
    for number in range(2 * MAX_PASSES):
        tasks.append(hand.ask(logprobs(number)))
        await passes(1)
        if hand.batcher.seconds_until_due() == 0.0:
            break
    assert len(tasks) <= MAX_PASSES + 1
    hand.turn()
    await passes()
    assert tasks[0].done(), "the oldest question is in the first flush"
    await hand.finish()
    assert sum(map(len, hand.engine.submitted)) == len(tasks)


async def test_one_call_into_each_loop_delivers_everything_of_a_turn(
    by_hand: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = by_hand()
    tasks = [hand.ask(logprobs(number % 7), sample(number)) for number in range(50)]
    await passes()
    loop, calls = asyncio.get_running_loop(), 0
    true_call = loop.call_soon_threadsafe

    def counted(*arguments: Any, **options: Any) -> asyncio.Handle:
        nonlocal calls
        calls += 1
        return true_call(*arguments, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    hand.turn()
    assert calls == 1
    await passes()
    assert all(task.done() for task in tasks)
    hand.turn()
    assert calls == 1, "a turn without answers calls into no loop"


@pytest.mark.promise(number=31)
async def test_a_loop_goes_round_while_many_of_its_waiters_are_told(by_hand: Make) -> None:
    """The answers of one step, however many, do not hold up what else the loop has to do."""
    hand, told_in_a_pass = by_hand(), []
    tasks = [hand.ask(logprobs(number, 1)) for number in range(3 * WAITERS_A_PASS + 1)]
    await passes()
    hand.turn()
    before = 0
    while not all(task.done() for task in tasks):
        await passes(1)
        told = sum(task.done() for task in tasks)
        told_in_a_pass.append(told - before)
        before = told
        assert len(told_in_a_pass) < 10
    assert max(told_in_a_pass) == WAITERS_A_PASS
    assert all(right([logprobs(n, 1)], task.result()) for n, task in enumerate(tasks))


Asking = Callable[[ByHand], Any]

AT_ONCE: dict[str, Asking] = {
    "a cached row": lambda hand: hand.asker.ask([A]),
    "with a timeout": lambda hand: hand.asker.ask([A], timeout=0.0),
    "a batch": lambda hand: hand.asker.ask([A] * MAX_UNAWAITED),
    "nothing": lambda hand: hand.asker.ask([]),
    "a closed runtime": lambda hand: hand.asker.ask([B]),
}


async def cached(question: str) -> ByHand:
    """A batcher that answers this question without a wait."""
    hand = ByHand()
    await hand.queued(A)
    await hand.finish()
    if question == "a closed runtime":
        hand.batcher.close()
    return hand


@pytest.mark.parametrize("question", AT_ONCE)
async def test_a_loop_of_questions_that_need_no_wait_lets_its_event_loop_run(
    question: str,
) -> None:
    hand = await cached(question)
    asked = rounds = 0

    async def asks() -> None:
        nonlocal asked
        for _ in range(20 * MAX_UNAWAITED):  # what is wrong must end, too
            with contextlib.suppress(Closed):
                await AT_ONCE[question](hand)
            asked += 1

    task = asyncio.create_task(asks())
    while not task.done():
        await passes(1)
        rounds += 1
        assert asked <= rounds * MAX_UNAWAITED
    await task
    assert rounds < 50 or question == "a batch", "nor does every question cost a pass"


async def test_questions_that_wait_cost_no_pass_of_the_loop(by_hand: Make) -> None:
    """However many are asked: they wait anyway, and are asked in the pass that asks them."""
    hand = by_hand()
    tasks = [hand.ask(logprobs(number, 1)) for number in range(3 * MAX_UNAWAITED)]
    await passes(1)
    assert hand.batcher.statistics().queued == 3 * MAX_UNAWAITED
    await hand.finish()
    await asyncio.gather(*tasks)


# -- errors of a batch question ---------------------------------------------------------------


async def test_an_engine_that_fails_in_a_step_is_told_to_forget_it(by_hand: Make) -> None:
    class Remembers(ScriptedEngine):
        def step(self) -> list[Finished]:
            in_progress = dict(self.in_progress)
            try:
                return super().step()
            except RuntimeError:
                self.in_progress = in_progress
                raise

    hand = by_hand(Remembers(fail_at={1: RuntimeError("boom")}))
    failing = await hand.queued(A, B)
    hand.turn()
    with pytest.raises(EngineFailed, match="boom"):
        await failing
    again = await hand.queued(A)
    await hand.finish()
    assert hand.engine.stepped == [[A, B], [A]]
    assert right([A], await again)


# -- failures ---------------------------------------------------------------------------------


@pytest.mark.promise(number=8)
@pytest.mark.parametrize("ends", ["turn", "close"])
async def test_a_question_that_ends_before_its_thread_goes_on_has_its_own_error(
    by_hand: Make, ends: str
) -> None:
    hand = by_hand(ScriptedEngine(fail_at={1: RuntimeError("boom")}))

    def at_once() -> None:  # as the engine's thread may, which has the processor from here on
        if ends == "turn":
            hand.turn()
        else:
            hand.batcher.close(EngineFailed("boom"))
            hand.dropped = 1

    hand.batcher._wake = at_once
    with pytest.raises(EngineFailed, match="boom"):
        hand.asker.ask_sync([A])


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
async def test_no_memory_for_a_copy_fails_that_waiter_alone(
    by_hand: Make, cache_bytes: int
) -> None:
    """Neither the copy of a waiter nor that of the cache."""

    class Row(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is torch.empty_like:
                raise torch.OutOfMemoryError("no room")
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]

    def scarce(request: LogprobsRequest) -> torch.Tensor:
        row = expected_row(request)
        return row.as_subclass(Row) if request == A else row

    hand = by_hand(ScriptedEngine(row=scarce), cache_bytes=cache_bytes)
    first, second = await hand.queued(C), await hand.queued(B, A, C)
    await hand.finish()
    assert right([C], await first)
    with pytest.raises(OutOfMemory, match="no room"):
        await second
    after = await hand.queued(B)
    await hand.finish()
    assert right([B], await after)


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
async def test_a_steps_rows_are_copied_together(
    by_hand: Make, monkeypatch: pytest.MonkeyPatch, cache_bytes: int
) -> None:
    hand = by_hand(cache_bytes=cache_bytes)
    tasks = [await hand.queued(A, B, A), await hand.queued(C), await hand.queued(B)]
    copied: list[int] = []

    def counted(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        copied.append(len(rows))
        return separate_copies(rows)

    for module in ("batcher", "cache"):
        monkeypatch.setattr(f"genrt.runtime.{module}.separate_copies", counted)
    hand.turn()
    await passes()
    assert copied == ([3] if cache_bytes else []) + [5]
    assert [right([A, B, A], await tasks[0]), right([C], await tasks[1])] == [True, True]
    assert right([B], await tasks[2])


# -- the flush policy -------------------------------------------------------------------------


async def test_max_batch_size_queued_requests_wait_for_no_quiet_and_no_company(
    by_hand: Make,
) -> None:
    hand = by_hand(max_batch_size=3, max_wait_seconds=1000.0)
    for number in range(3):
        assert hand.wakes == 0
        assert hand.batcher.seconds_until_due() is None
        hand.ask(logprobs(number))
        await passes(1)
    assert hand.wakes == 1
    assert hand.batcher.seconds_until_due() == 0.0
    hand.turn()
    assert hand.engine.submitted == [[logprobs(number) for number in range(3)]]


async def test_ready_requests_wait_for_company_as_long_as_they_are_told_to(by_hand: Make) -> None:
    now = 100.0
    hand = by_hand(max_wait_seconds=2.0, clock=lambda: now)
    first = await hand.queued(A)
    assert hand.batcher.seconds_until_due() == 2.0
    hand.turn()
    assert hand.engine.submitted == []
    now = 101.5
    second = await hand.queued(B)
    assert hand.batcher.seconds_until_due() == 0.5, "the oldest decides"
    now = 102.0
    assert hand.batcher.seconds_until_due() == 0.0
    hand.turn()
    await passes()
    assert hand.engine.submitted == [[A, B]]
    assert right([A], await first)
    assert right([B], await second)
    await hand.queued(C)
    assert hand.batcher.seconds_until_due() == 2.0, "and the wait begins anew"
    now = 104.0
    hand.turn()


# -- several loops and threads ----------------------------------------------------------------


def spin(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_until_complete(passes())


# -- loops that were closed with tasks on them ------------------------------------------------


def test_a_closed_loops_tasks_end_where_nothing_is_locked(by_hand: Make) -> None:
    """Nobody but the batcher holds them; what they do in their end may be anything."""
    hand = by_hand(by_tokens({A: 10}))
    ended, locked = asyncio.new_event_loop(), []

    async def asks() -> None:
        try:
            await hand.asker.ask([A])
        finally:
            locked.append(is_held(hand.batcher.lock))

    task = ended.create_task(asks())
    unlogged(task)
    del task
    spin(ended)
    hand.turn()
    ended.close()
    hand.turn()
    gc.collect()
    assert locked == [False]
    assert hand.engine.cancelled == [[A]]


@pytest.mark.promise(number=10)
def test_a_loop_interrupted_while_it_is_told_tells_the_rest_when_it_goes_on() -> None:
    class Interrupting:
        """A future at which the interrupt comes."""

        def set_result(self, result: object) -> None:
            raise KeyboardInterrupt

    loop = asyncio.new_event_loop()
    futures: list[Any] = [loop.create_future(), Interrupting(), loop.create_future()]
    waiters = [Waiter([A], loop, future) for future in futures]
    deliver((waiter, [expected_row(A)]) for waiter in waiters)
    with pytest.raises(KeyboardInterrupt):
        spin(loop)
    assert (futures[0].done(), futures[2].done()) == (True, False)
    with pytest.raises(KeyboardInterrupt):
        spin(loop)
    futures[1].set_result = lambda result: None
    spin(loop)
    assert right([A], futures[2].result())
    loop.close()


# -- adapters ---------------------------------------------------------------------------------

OLD, NEW = Adapter("lora", 1), Adapter("lora", 2)


@pytest.mark.promise(number=30)
@pytest.mark.parametrize("where", ["ready", "gathering", "waiting for room"])
async def test_a_question_for_a_lost_adapter_fails_wherever_it_waits(where: str) -> None:
    bound = logprobs(1, adapter=OLD)
    room = 1 if where == "waiting for room" else 10
    hand = ByHand(by_tokens({bound: 3, A: 3}), max_queued_requests=room)
    hand.load(OLD)
    kept, lost = hand.ask(A), hand.ask(bound)
    await passes(1 if where == "gathering" else 5)
    hand.answering._adapters.lose(OLD, LookupError("a rank"))
    await hand.finish()
    with pytest.raises(UnknownAdapter, match="lost"):
        await lost
    assert right([A], await kept)
    assert hand.batcher.statistics().failed == 1
    assert not hand.batcher._bound, "nothing is bound to it any more"


async def test_a_row_that_comes_after_its_adapter_is_gone_is_not_cached(by_hand: Make) -> None:
    """An engine that fails to cancel a request may still compute it."""

    class Stubborn(ScriptedEngine):
        def remove_adapter(self, adapter: Adapter) -> None:
            self.removed.append(adapter)

    late = logprobs(1, adapter=OLD)
    steps: dict[Request, int] = {late: 3, A: 4}
    hand = by_hand(Stubborn(steps=steps.__getitem__, fail_cancel=RuntimeError("no")))
    hand.load(OLD)
    hand.ask(A)
    left = await hand.queued(late)
    hand.turn()
    left.cancel()
    hand.batcher.retire(OLD)
    await passes()
    hand.turn()
    assert hand.engine.removed == [OLD]
    await hand.finish()
    assert hand.engine.finished == [[], [], [late], [A]]
    assert [each in hand.cache for each in (late, A)] == [False, True]
