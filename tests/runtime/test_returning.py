"""Loops that ask again at once are in every step; nobody is waited for who does not. Steps are counted,
in the worst order of events: the next step begins as soon as it may."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.engines.protocol import Finished
from genrt.runtime.batcher import RETURN_SHARE as SHARE
from genrt.testing.virtual_loop import VirtualClock, VirtualLoop
from tests.scripted import ByHand, ScriptedEngine, logprobs, sample

DRAWS = 40
STEP = 1.0
LONG = sample(1, max_tokens=1)
"""A text that is in flight all the time."""


class Race:
    """A batcher over an engine whose steps take ``STEP`` seconds, and a loop that runs ``delay`` seconds
    after it has been told something: in the middle of the step, unless the step waits for it."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.waited = 0.0
        self.clock = VirtualClock()
        self.loop = VirtualLoop(self.clock)
        self.engine = Racing(self)
        self.hand = ByHand(self.engine, clock=self.clock.time)

    def ask_long(self) -> None:
        """Have the text in flight, asked by a thread."""
        asked = self.loop.create_task(self.hand.asker.ask([LONG]))
        self.go_round()
        self.hand.turn()
        assert not asked.done()

    def go_round(self) -> None:
        """Run the loop until it has nothing to do."""
        while self.loop.has_work:
            self.loop.run_one()

    def answer_late(self, seconds: float) -> None:
        """Pass this time, in the middle of which the loop does what it was told."""
        before = self.clock.now
        if self.loop.has_work and self.delay <= seconds:
            self.clock.pass_until(before + self.delay)
            self.go_round()
        self.clock.pass_until(before + seconds)

    def run(self, until: Callable[[], bool]) -> None:
        """Do what the engine's thread does, until something is so."""
        for _ in range(20 * DRAWS):
            if until():
                return
            seconds = self.hand.batcher.seconds_until_due()
            if seconds == 0.0:
                self.hand.turn()
                continue
            assert seconds is not None
            # The loop's question wakes the thread.
            lasts = min(seconds, self.delay) if self.loop.has_work else seconds
            self.waited += lasts
            self.answer_late(lasts)
        raise AssertionError(f"it never happens: {self.hand.batcher}")


class Racing(ScriptedEngine):
    def __init__(self, race: Race) -> None:
        super().__init__(steps=lambda request: 10**6 if request == LONG else 1)
        self._race = race

    def step(self) -> list[Finished]:
        self._race.answer_late(STEP)
        return super().step()


@pytest.fixture
def races() -> Iterator[Callable[[float], Race]]:
    made: list[Race] = []

    def make(delay: float) -> Race:
        made.append(Race(delay))
        made[-1].ask_long()
        return made[-1]

    yield make
    for each in made:
        _end(each)


def _end(race: Race) -> None:
    race.hand.batcher.close()
    race.go_round()
    race.loop.close()


async def draws(race: Race, count: int = DRAWS) -> None:
    for number in range(count):
        await race.hand.asker.ask([logprobs(2, number)])


def test_a_sampler_beside_texts_is_in_every_step(races: Callable[[float], Race]) -> None:
    race = races(0.05)
    before = len(race.engine.stepped)
    sampler = race.loop.create_task(draws(race))
    race.go_round()
    race.run(sampler.done)
    assert len(race.engine.stepped) - before <= DRAWS + 3
    assert race.waited == pytest.approx(0.05 * (DRAWS - 1), abs=0.2)


@pytest.mark.parametrize("delay", [SHARE * 1.5, 0.5])
def test_who_takes_long_to_ask_again_is_not_waited_for(
    races: Callable[[float], Race], delay: float
) -> None:
    race = races(delay)
    before = len(race.engine.stepped)
    sampler = race.loop.create_task(draws(race))
    race.go_round()
    race.run(sampler.done)
    assert len(race.engine.stepped) - before >= 2 * DRAWS - 2
    assert race.waited == 0.0


def test_texts_that_end_are_waited_for_by_nobody(races: Callable[[float], Race]) -> None:
    race = races(0.01)

    async def texts() -> None:
        for seed in range(DRAWS):
            await race.hand.asker.ask([sample(2, seed=seed)])

    ended = race.loop.create_task(texts())
    race.go_round()
    race.run(ended.done)
    assert race.waited == 0.0


def test_an_idle_engine_waits_for_nobody() -> None:
    race = Race(0.01)
    sampler = race.loop.create_task(draws(race))
    race.go_round()
    for _ in range(3 * DRAWS):
        if sampler.done():
            break
        due = race.hand.batcher.seconds_until_due()
        assert due in (0.0, None)
        if due is None:
            race.go_round()
        else:
            race.hand.turn()
    assert len(race.engine.stepped) == DRAWS
    _end(race)


@pytest.mark.parametrize("ended", ["closed loop", "closed batcher", "cancelled"])
def test_who_is_gone_is_waited_for_once_at_most(races: Callable[[float], Race], ended: str) -> None:
    race = races(0.05)
    other = VirtualLoop(race.clock)
    sampler = other.create_task(draws(race))
    race.loop, text_loop = other, race.loop
    race.go_round()
    race.run(lambda: race.waited > 5 * 0.05)
    race.waited = 0.0
    if ended == "closed batcher":
        race.hand.batcher.close()
        race.go_round()
        assert isinstance(sampler.exception(), Exception)
        assert race.hand.batcher.seconds_until_due() is None
    else:
        sampler.cancel()
        race.go_round()
        if ended == "closed loop":
            other.close()
        race.loop, steps = text_loop, len(race.engine.stepped)
        race.run(lambda: len(race.engine.stepped) == steps + 5)
        assert race.waited <= SHARE * STEP * 1.001
    if not other.is_closed():
        other.close()
    race.loop = text_loop


@settings(deadline=None)
@given(
    delays=st.lists(st.floats(0.0, 0.4), min_size=1, max_size=60),
)
def test_waits_are_a_bounded_share_of_the_steps(delays: list[float]) -> None:
    race = Race(0.0)
    race.ask_long()

    async def uneven() -> None:
        for number, delay in enumerate(delays):
            await race.hand.asker.ask([logprobs(3, number)])
            race.delay = delay

    before = len(race.engine.stepped)
    sampler = race.loop.create_task(uneven())
    race.go_round()
    race.run(sampler.done)
    steps = len(race.engine.stepped) - before
    assert race.waited <= SHARE * STEP * steps * 1.001
    assert len(delays) <= steps <= 2 * len(delays) + 2
    _end(race)
