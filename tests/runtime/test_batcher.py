"""batcher.py, turned by hand: what reaches the engine, who gets which answer, and who is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from genrt.engines.protocol import Finished
from genrt.errors import Closed, EngineFailed, OutOfMemory, UnknownAdapter
from genrt.questions.arguments import Adapter
from genrt.questions.draws import DrawToken
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.ask import MAX_UNAWAITED
from genrt.runtime.batcher import MAX_PASSES, WAITERS_A_PASS, Waiter, deliver
from genrt.tokens.rows import separate_copies
from tests.inside import is_held, unlogged
from tests.scripted import (
    PATIENCE_SECONDS,
    ByHand,
    ScriptedEngine,
    expected_row,
    logprobs,
    passes,
    population_of,
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


@pytest.mark.parametrize("question", AT_ONCE)
async def test_who_is_cancelled_while_the_event_loop_runs_has_been_answered(question: str) -> None:
    hand = await cached(question)
    before = hand.batcher.statistics()

    async def asks() -> None:
        for _ in range(20 * MAX_UNAWAITED):
            with contextlib.suppress(Closed):
                await AT_ONCE[question](hand)

    task = asyncio.create_task(asks())
    await passes(1)
    answered = hand.batcher.statistics()
    task.cancel()
    await passes(1)
    assert task.cancelled()
    assert hand.batcher.statistics() == answered
    assert answered.questions - before.questions in (0, MAX_UNAWAITED)


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


# -- cancellation -----------------------------------------------------------------------------

KINDS: dict[str, Request] = {
    "row": A,
    "sample": sample(1),
    "draw": ReadRequest(A, DrawToken(seed=1)),
    "population": population_of(A, C),
}
TURNS = {"gathered": 0, "ready": 0, "in flight": 1, "a step later": 2, "computed": 3}
"""How many turns have been taken when a caller leaves; its request takes three steps."""


@pytest.mark.promise(number=1)
@pytest.mark.promise(number=2)
@pytest.mark.parametrize("company", ["alone", "shared", "rescued"])
@pytest.mark.parametrize("when", TURNS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_caller_that_leaves_takes_its_request_along_and_disturbs_nobody(
    by_hand: Make, kind: str, when: str, company: str
) -> None:
    """Unless another caller waits, or asks before the next turn. An equal question is answered after."""
    request, reports = KINDS[kind], list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    hand = by_hand(ScriptedEngine(steps=lambda each: 9 if each == B else 3))
    asked = [hand.ask(B), hand.ask(request)]
    if company == "shared":
        asked.append(hand.ask(request))
    await passes(1 if when == "gathered" else 5)
    for _ in range(TURNS[when]):
        hand.turn()
    wakes = hand.wakes
    asked[1].cancel()
    await passes(2)
    assert asked[1].cancelled()
    is_unsent, is_computed = when in ("gathered", "ready"), when == "computed"
    if is_unsent and company != "shared":
        hand.dropped = request.weight
        assert hand.batcher.statistics().queued == 1, "withdrawn from the queue at once"
    if company == "rescued":
        asked.append(await hand.queued(request))
    assert is_computed or is_unsent or hand.wakes > wakes
    hand.turn()
    rows = [A, C] if kind == "population" else [getattr(request, "row", request)]
    is_withdrawn = company == "alone" and not is_unsent and not is_computed
    assert hand.engine.cancelled == ([rows] if is_withdrawn else [])
    asked.append(hand.ask(request))
    await hand.finish()
    fresh = ByHand()
    alone = fresh.ask(request)
    await fresh.finish()
    for task in asked[2:]:
        assert repr(await task) == repr(await alone)
    assert right([B], await asked[0])
    assert reports == []
    s = hand.batcher.statistics()
    assert (s.cancelled, s.queued, s.in_flight) == (not is_computed, 0, 0)
    if is_computed and kind == "row":
        assert sum(A in flush for flush in hand.engine.submitted) == 1, "the row was cached"


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


async def test_no_memory_for_the_copy_of_a_cached_row_is_an_error_of_genrt(
    by_hand: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = by_hand()
    await hand.queued(A)
    await hand.finish()

    def full(_: list[torch.Tensor]) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("genrt.runtime.batcher.separate_copies", full)
    with pytest.raises(OutOfMemory, match="no room"):
        await hand.asker.ask([A])


@pytest.mark.promise(number=15)
@pytest.mark.parametrize("cache_bytes", [0, 2**20])
async def test_what_a_waiter_gets_is_no_part_of_a_steps_rows(
    by_hand: Make, cache_bytes: int
) -> None:
    """The engine's rows are views of one tensor; nobody who is answered keeps it alive."""
    step = torch.stack([expected_row(request) for request in (A, B, C)])
    places = {A: 0, B: 1, C: 2}
    hand = by_hand(
        ScriptedEngine(row=lambda request: step[places[request]]), cache_bytes=cache_bytes
    )
    single, both = await hand.queued(A), await hand.queued(A, B)
    stacked = asyncio.create_task(hand.asker.ask([C, A, C], stacked=True))
    await passes()
    await hand.finish()
    rows = [*await single, *await both]
    assert right([A, A, B], rows)
    assert [row.untyped_storage().nbytes() for row in rows if isinstance(row, torch.Tensor)] == (
        [step[0].nbytes] * 3
    )
    assert len({row.data_ptr() for row in rows if isinstance(row, torch.Tensor)}) == 3
    [stack] = await stacked
    assert isinstance(stack, torch.Tensor)
    assert torch.equal(stack, step[[2, 0, 2]])
    assert stack.untyped_storage().nbytes() == 3 * step[0].nbytes
    stack.zero_()
    rows[0].zero_()
    assert torch.equal(step[0], expected_row(A))
    again = asyncio.create_task(hand.asker.ask([A, A], stacked=True))
    await passes()
    await hand.finish()
    assert torch.equal((await again)[0], step[[0, 0]])


# -- closing ----------------------------------------------------------------------------------


async def test_close_while_results_are_copied_leaves_no_batch_with_holes(by_hand: Make) -> None:
    """A batch question that lacks one row is closed; one that lacks none is answered."""

    class Row(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is torch.empty_like:
                hand.batcher.close()
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]

    engine = ScriptedEngine(
        steps=lambda r: 5 if r == B else 1, row=lambda r: expected_row(r).as_subclass(Row)
    )
    hand = by_hand(engine, cache_bytes=0)
    whole, partly = await hand.queued(A, A), await hand.queued(A, B)
    hand.turn()
    engine.in_progress.clear()
    await passes()
    assert [torch.equal(torch.Tensor(row), expected_row(A)) for row in await whole] == [True, True]
    with pytest.raises(Closed):
        await partly


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


def abandon(tasks: list[asyncio.Task[Any]]) -> None:
    """Let tasks of a closed loop be collected, without the loop's complaint that they are pending."""
    for task in tasks:
        unlogged(task)
        del task
    tasks.clear()
    gc.collect()


@pytest.mark.promise(number=20)
@pytest.mark.parametrize("cancelled", [False, True])
def test_a_collection_inside_the_batchers_own_lock_does_not_deadlock(cancelled: bool) -> None:
    """The clock is read under the lock, so a clock that collects garbage does it there: here the tasks of
    a closed loop, whose answer was computed but never delivered, or which were cancelled and never ran
    again."""
    lost: list[asyncio.Task[Any]] = []
    alive: list[weakref.ref[asyncio.Task[Any]]] = []

    def clock() -> float:
        if lost:
            abandon(lost)
        return 0.0

    def scenario() -> None:
        hand = ByHand(ScriptedEngine(steps=lambda request: 1 + cancelled), clock=clock)
        ended, other = asyncio.new_event_loop(), asyncio.new_event_loop()
        task = ended.create_task(hand.asker.ask([B]))
        spin(ended)
        hand.turn()
        if cancelled:
            task.cancel()
        ended.close()
        lost.append(task)
        alive.append(weakref.ref(task))
        del task
        asked = other.create_task(hand.asker.ask([A]))
        spin(other)
        hand.turn()
        hand.turn()
        spin(other)
        assert right([A], asked.result())
        other.close()

    thread = threading.Thread(target=scenario, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "deadlock: the collected waiter took the lock"
    assert lost == []
    assert [reference() for reference in alive] == [None], "it was collected"


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


@pytest.mark.promise(number=10)
@pytest.mark.promise(number=20)
async def test_a_close_that_is_interrupted_is_made_good_by_the_next(
    by_hand: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which the engine's thread makes one."""
    hand = by_hand()
    tasks = [await hand.queued(A), await hand.queued(B)]
    hand.dropped = 2

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("genrt.runtime.batcher.deliver", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hand.batcher.close()
    assert hand.batcher.is_closed
    hand.batcher.close()
    await passes()
    assert [type(task.exception()) for task in tasks] == [Closed, Closed]


# -- adapters ---------------------------------------------------------------------------------

OLD, NEW = Adapter("lora", 1), Adapter("lora", 2)


async def test_a_retired_adapter_that_is_still_bound_keeps_no_thread_busy(by_hand: Make) -> None:
    bound, now = logprobs(1, adapter=OLD), 0.0
    hand = by_hand(max_wait_seconds=3.0, clock=lambda: now)
    hand.load(OLD)
    task = await hand.queued(bound)
    hand.batcher.retire(OLD)
    assert hand.batcher.seconds_until_due() == 3.0, "not 0.0, which would make the thread spin"
    before = hand.wakes
    task.cancel()
    await passes()
    assert hand.wakes == before + 1, "and it is told when the last bound request is gone"
    assert hand.batcher.seconds_until_due() == 0.0
    hand.turn()
    assert hand.engine.removed == [OLD]
    assert hand.batcher.seconds_until_due() is None
    hand.dropped = 1


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


# -- what it says of itself -------------------------------------------------------------------


async def test_statistics_are_frozen_and_repr_shows_live_state(by_hand: Make) -> None:
    hand = by_hand(by_tokens({A: 2}))
    await hand.queued(A)
    assert repr(hand.batcher) == "Batcher(open, 1 queued, 0 in flight, 0 flushes)"
    hand.turn()
    await hand.queued(B)
    assert repr(hand.batcher) == "Batcher(open, 1 queued, 1 in flight, 1 flushes)"
    with pytest.raises(AttributeError):
        hand.batcher.statistics().questions = 0  # type: ignore[misc]
    await hand.finish()
    assert repr(hand.batcher) == "Batcher(open, 0 queued, 0 in flight, 2 flushes)"
