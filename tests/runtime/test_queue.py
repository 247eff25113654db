"""queue.py in the batcher: a bounded queue, room by turns, nobody dropped, nobody left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import genrt
from genrt.engines.protocol import Finished
from genrt.errors import TimedOut
from genrt.questions.request import Request
from genrt.runtime.batcher import GOOD_STEPS, Waiter
from tests.scripted import (
    PATIENCE_SECONDS,
    ByHand,
    Gate,
    ScriptedEngine,
    logprobs,
    passes,
    right,
)

A, B, C, D, E = (logprobs(number) for number in range(1, 6))


@pytest.fixture
def by_hand() -> Iterator[Callable[..., ByHand]]:
    """Makes batchers; afterwards each must account for every question."""
    made: list[ByHand] = []

    def make(*arguments: Any, **options: Any) -> ByHand:
        made.append(ByHand(*arguments, **options))
        return made[-1]

    yield make
    for hand in made:
        hand.check()


Make = Callable[..., ByHand]


@pytest.mark.promise(number=11)
async def test_the_queue_holds_no_more_than_its_bound_and_everyone_is_answered(
    by_hand: Make,
) -> None:
    hand = by_hand(max_queued_requests=3)
    requests = [logprobs(number, 1) for number in range(20)]
    tasks = [hand.ask(request) for request in requests]
    seen = []
    for _ in range(20):
        await passes()
        statistics = hand.batcher.statistics()
        seen.append(statistics.queued)
        if not statistics.queued:
            break
        hand.turn()
    assert max(seen) == 3
    assert all(len(flush) <= 3 for flush in hand.engine.submitted)
    await hand.finish()
    for request, task in zip(requests, tasks, strict=True):
        assert right([request], await task)
    sent = [request for flush in hand.engine.submitted for request in flush]
    assert sent == requests, "who came first is sent first"


@pytest.mark.promise(number=11)
async def test_the_queue_is_bounded_in_bytes_too(by_hand: Make) -> None:
    long = logprobs(*range(1, 9), *range(1, 9))
    hand = by_hand(max_queued_bytes=long.nbytes + A.nbytes)
    tasks = [hand.ask(request) for request in (A, long, B, C)]
    await passes()
    statistics = hand.batcher.statistics()
    assert (statistics.queued, statistics.waiting) == (2, 2)
    await hand.finish()
    assert hand.engine.submitted == [[A, long], [B, C]]
    for request, task in zip((A, long, B, C), tasks, strict=True):
        assert right([request], await task)


async def test_a_full_queue_holds_up_nobody_who_needs_no_place_in_it(by_hand: Make) -> None:
    hand = by_hand(max_queued_requests=1)
    await hand.queued(A)
    await hand.finish()
    queued, waiting = await hand.queued(B), await hand.queued(C)
    cached, joining = await hand.queued(A), await hand.queued(B)
    assert cached.done()
    assert right([A], await cached)
    assert hand.batcher.statistics().waiting == 1
    hand.turn()
    await passes()
    assert right([B], await queued)
    assert right([B], await joining)
    await hand.finish()
    assert right([C], await waiting)


@pytest.mark.promise(number=11)
async def test_clients_take_turns(by_hand: Make) -> None:
    """A flood on one loop delays another loop's question by one flush, not by the flood."""
    hand = by_hand(max_queued_requests=2)
    flood = [hand.ask(logprobs(number, 2)) for number in range(12)]
    await passes()
    asked = threading.Event()

    def other() -> list[Any]:
        asked.set()
        return asyncio.run(hand.asker.ask([E]))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(other)
        await asyncio.to_thread(asked.wait, PATIENCE_SECONDS)
        while hand.batcher.statistics().waiting < 11:
            await asyncio.to_thread(lambda: None)
        await hand.finish()
        assert right([E], await asyncio.to_thread(answer.result, PATIENCE_SECONDS))
    assert E in hand.engine.submitted[1]
    await asyncio.gather(*flood)


async def test_newcomers_there_is_room_for_wait_behind_those_there_is_none_for(
    by_hand: Make,
) -> None:
    hand = by_hand(max_queued_requests=3)
    tasks = [hand.ask(*requests) for requests in ([A, B], [C, D], [E])]
    await hand.finish()
    assert hand.engine.submitted == [[A, B], [C, D, E]]
    await asyncio.gather(*tasks)


def test_a_waiting_thread_is_answered_and_can_time_out() -> None:
    gate = Gate()
    engine = ScriptedEngine(gate=gate)
    with (
        genrt.load(engine=lambda: engine, max_queued_requests=1) as lm,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        held = pool.submit(lm.next_token_logprobs_sync, [1])
        gate.wait_until_held()
        queued = pool.submit(lm.next_token_logprobs_sync, [2])
        while not lm.statistics().batcher.queued:
            pass
        with pytest.raises(TimedOut):
            lm.next_token_logprobs_sync([3], timeout=0.0)
        with pytest.raises(TimedOut):
            lm.next_token_logprobs_sync([1], timeout=0.0)
        gate.open()
        assert len(held.result(PATIENCE_SECONDS)) == engine.vocab_size
        assert len(queued.result(PATIENCE_SECONDS)) == engine.vocab_size
        statistics = lm.statistics().batcher
        assert (statistics.waiting, statistics.queued, statistics.in_flight) == (0, 0, 0)
        assert statistics.cancelled == 2


# -- timeouts ---------------------------------------------------------------------------------


async def test_a_timeout_withdraws_the_question_and_is_a_timeout_error(by_hand: Make) -> None:
    hand = by_hand()
    hand.dropped += 1
    with pytest.raises(TimedOut, match="no answer within 0 s") as caught:
        await hand.asker.ask([A], timeout=0.0)
    assert isinstance(caught.value, TimeoutError)
    assert hand.batcher.statistics().queued == 0
    await hand.queued(A)
    await hand.finish()
    assert right([A], await hand.asker.ask([A], timeout=0.0)), "the cache needs no time"


# -- the bookkeeping itself -------------------------------------------------------------------


def waiter(*requests: Request) -> Waiter:
    return Waiter(requests, None, concurrent.futures.Future())


@pytest.mark.promise(number=10)
def test_who_is_interrupted_on_its_way_to_wait_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = ByHand(max_queued_requests=1)
    hand.batcher.join(waiter(A))

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("genrt.runtime.batcher.OrderedDict", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hand.batcher.join(waiter(B))
    assert hand.batcher.statistics().waiting == 0
    hand.turn()
    assert hand.batcher.statistics().queued == 0
    assert hand.batcher.seconds_until_due() is None


def test_what_may_be_in_flight_is_halved_and_grows_back() -> None:
    class Short(ScriptedEngine):
        most = 2

        def step(self) -> list[Finished]:
            if len(self.in_progress) > self.most:
                self.in_progress.clear()
                raise MemoryError
            return super().step()

    engine = Short()
    hand = ByHand(engine, cache_bytes=0)
    batcher = hand.batcher

    def ask_many() -> None:
        hand.engine.submitted.clear()
        batcher.join(waiter(*(logprobs(number) for number in range(9))))
        while batcher.seconds_until_due() is not None:
            hand.turn()

    ask_many()
    assert [*map(len, engine.submitted)] == [9, 4, 2, 2, 2, 2, 1]
    engine.most = 100
    ask_many()
    assert [*map(len, engine.submitted)] == [2, 2, 2, 3]
    assert batcher.most_in_flight == 4
    for _ in range(2 * GOOD_STEPS):
        batcher.join(waiter(A))
        hand.turn()
    assert batcher.most_in_flight == 16
