"""Populations over simulated replicas: they draw, and are resampled, split, joined, cut and extended.

``SimulatedPopulations`` has real ones, whose questions ``Simulation`` asks for them, and keeps account of
where each question went. ``KeepingEngine`` is an exact engine that goes on by number, as vLLM's does.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from genrt.cluster.fleet import Fleet
from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import Finished
from genrt.errors import GenrtError
from genrt.populations import Population, PopulationRuntime, begin
from genrt.questions.contexts import Adapter, Limits
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.sequences import SequenceHandle
from genrt.tokens.rows import Leaving
from genrt.tokens.sampling import BatchDraw

MOST = 6
"""How many sequences one request has at most."""

MOST_AT_ONCE = 12
LONGEST = 40


@dataclass(slots=True)
class Seen:
    """What the engines of all replicas have seen.

    Attributes:
        wrong: what must not be: a sequence that goes on from another one than it says.
        by_number: how many questions went on from sequences that the engine had.
        by_tokens: how many of these came as the last tokens of their sequences.
    """

    wrong: list[str] = field(default_factory=list)
    by_number: int = 0
    by_tokens: int = 0


class KeepingEngine(ExactEngine):
    """Keeps the sequences of populations, and answers those that go on from them without other rows; it
    tells of every other one before its step is over."""

    tell: Callable[[Sequence[Finished]], object] | None = None

    def __init__(self, model: NGram, seen: Seen) -> None:
        super().__init__(model)
        self._seen = seen
        self._known: dict[SequenceHandle, list[tuple[int, ...]]] = {}
        self._taken: dict[PopulationDraw, None] = {}

    def go_on(self, population: PopulationDraw) -> bool:
        origins = population.origins
        if origins is None or any(each not in self._known for each in origins.handles):
            return False
        self._seen.by_tokens += population.contexts._growth is not None
        before = [each for asked in origins.handles for each in self._known[asked]]
        for number, row in zip(origins.numbers, population.rows, strict=True):
            if before[number] != row.token_ids[:-1]:
                self._seen.wrong.append(f"{row.token_ids} does not go on from {before[number]}")
        self._taken[population] = None
        return True

    def settle(self, population: PopulationDraw) -> None:
        self._known[population.handle] = [row.token_ids for row in population.rows]

    def release(self, asked: Sequence[SequenceHandle]) -> None:
        for each in asked:
            self._known.pop(each, None)

    def step(self) -> list[Finished]:
        ends = super().step()
        taken, self._taken = self._taken, {}
        told: list[Finished] = []
        for population in taken:
            contexts = [row.token_ids for row in population.rows]
            rows = self._model.logits(contexts, population.adapter)
            end = Finished(population, Leaving(population.draw([*rows])))
            if self.tell is not None and self._seen.by_number % 2:
                told.append(end)
            else:
                ends.append(end)
            self.settle(population)
            self._seen.by_number += 1
        if self.tell is not None and told:
            self.tell(told)
        return ends

    def cancel(self, requests: Sequence[Request]) -> None:
        kept: dict[Any, None] = self._taken
        super().cancel([each for each in requests if kept.pop(each, self) is self])


@dataclass(slots=True, eq=False)
class Walker:
    """A population, the draw that it waits for, and where its questions went.

    Attributes:
        could_stay: how many questions might have gone to a replica that had been asked about sequences
            that they go on from, and was asked others.
        stayed: how many of these did.
    """

    population: Population
    drawing: Coroutine[Any, Any, BatchDraw] | None = None
    asked: dict[Request, Any] = field(default_factory=dict)  # to its result, None before
    could_stay: int = 0
    stayed: int = 0


@types.coroutine
def _results(requests: Sequence[Request]) -> Generator[Any, Any, list[Any]]:
    found: list[Any] = yield requests
    return found


class _Asker:
    """Hands requests to whoever drives the coroutine."""

    async def ask(self, requests: Sequence[Request], **_: Any) -> list[Any]:
        return await _results(requests)

    ask_sync = None


class SimulatedPopulations:
    """The populations of a simulation.

    Args:
        fleet: whose placements are watched.
        adapters: those that there are.
    """

    def __init__(self, fleet: Fleet, adapters: dict[Adapter, NGram], seed: int) -> None:
        self.walkers: list[Walker] = []
        self.ended: list[Walker] = []
        self.steps = 0
        self._random = random.Random(seed)
        self._adapters, self._fleet = adapters, fleet
        self._at: WeakKeyDictionary[SequenceHandle, tuple[int, int]] = WeakKeyDictionary()
        self._of: dict[SequenceHandle, Walker] = {}
        thread: Any = SimpleNamespace(max_weight=MOST, give_back=lambda asked: None)
        names: Any = SimpleNamespace(bound=self._bound)
        asker: Any = _Asker()
        self._home = PopulationRuntime(thread, asker, Limits(5, 1000), names, itertools.count())
        self._place = fleet.place
        vars(fleet)["place"] = self._placed

    def _bound(self, name: str | None) -> Adapter | None:
        return next((each for each in self._adapters if str(each.version) == name), None)

    def begin(self) -> None:
        """Have one population more."""
        chosen = self._random
        name = chosen.choice([None, *[str(each.version) for each in self._adapters]])
        prompt = [chosen.randrange(5) for _ in range(chosen.randrange(1, 4))]
        self._add(begin(self._home, prompt, chosen.randrange(1, 10), name))

    def ask(self, version: int) -> list[Request]:
        """Have a population that waits for nothing draw; return its questions, if there are any."""
        idle = [each for each in self.walkers if each.drawing is None]
        if not idle:
            return []
        walker, chosen = self._random.choice(idle), self._random
        where = [chosen.random() < 0.8 for _ in range(len(walker.population))]
        walker.drawing = walker.population.draw(
            seed=chosen.randrange(1000), where=where if chosen.random() < 0.2 else None
        )
        parts = [each.of_weights(version) for each in walker.drawing.send(None)]
        walker.asked = dict.fromkeys(parts)
        for each in parts:
            self._of[each.handle] = walker
        if not parts:
            self._go_on(walker, [])
        return parts

    def take(self, end: Finished) -> list[Request]:
        """Take the right answer of a question, or its error; return the other questions of that draw,
        which nobody waits for after an error."""
        walker = self._of[end.request.handle]  # type: ignore[attr-defined]
        if end.error is not None:
            others = [each for each, result in walker.asked.items() if result is None]
            self._fail(walker, end.error)
            return [each for each in others if each is not end.request]
        walker.asked[end.request] = end.result
        if None not in walker.asked.values():
            self._go_on(walker, [*walker.asked.values()])
        return []

    def withdraw(self, request: Request) -> list[Request]:
        """Give up the draw that a question is of; return its questions."""
        walker = self._of[request.handle]  # type: ignore[attr-defined]
        asked = [*walker.asked]
        if walker.drawing is not None:
            walker.drawing.close()
        self._over(walker)
        return asked

    def change(self) -> None:
        """Have something happen to a population, which may be drawing."""
        chosen = self._random
        if len(self.walkers) < 3:
            self.begin()
            return
        walker = chosen.choice(self.walkers)
        population, count = walker.population, len(walker.population)
        longest = int(population.lengths.max()) if count else 0
        changes: list[Callable[[], object]] = [
            lambda: population.resample([chosen.randrange(count) for _ in range(count)]),
            lambda: population.resample([chosen.randrange(count) for _ in range(count)]),
            lambda: population.cut(chosen.randrange(1, 6)),
            lambda: population.extend([[chosen.randrange(5)] * 3] * count),
            lambda: self._split(walker),
            lambda: self._join(walker),
            lambda: self._close(walker),
        ]
        if longest > LONGEST:
            population.cut(3)
        elif not count or len(self.walkers) > MOST_AT_ONCE:
            self._close(walker)
        else:
            chosen.choice(changes)()

    def close(self) -> None:
        """Close all populations, and let go of them."""
        for each in [*self.walkers]:
            self._close(each)
        self.ended.clear()

    def without(self, adapter: Adapter) -> None:
        """Close the populations of an adapter that is going."""
        for each in [*self.walkers]:
            if each.population.adapter == str(adapter.version):
                self._close(each)

    def _split(self, walker: Walker) -> None:
        count = len(walker.population)
        first = self._random.randrange(count + 1)
        for each in walker.population.split([first, count - first]):
            self._add(each)
        self._close(walker)

    def _join(self, walker: Walker) -> None:
        population = walker.population
        others = [
            each
            for each in self.walkers
            if each is not walker
            and each.population.adapter == population.adapter
            and len(each.population) + len(population) < 20
        ]
        if others:
            other = self._random.choice(others)
            self._add(population.join(other.population))
            self._close(walker)
            self._close(other)

    def _add(self, population: Population) -> None:
        self.walkers.append(Walker(population))

    def _close(self, walker: Walker) -> None:
        # One that still draws goes on to the end: what it asked was asked before.
        walker.population.close()
        self.walkers.remove(walker)
        self.ended.append(walker)

    def _go_on(self, walker: Walker, results: list[Any]) -> None:
        population, drawing = walker.population, walker.drawing
        self._over(walker)
        try:
            drawing.send(results)  # type: ignore[union-attr]
        except StopIteration as found:
            draws: BatchDraw = found.value
            self.steps += 1
            if walker in self.walkers and len(draws.token_ids) == len(population):
                population.append(draws.token_ids)
            return
        raise AssertionError("a draw asks twice")

    def _fail(self, walker: Walker, error: GenrtError) -> None:
        drawing = walker.drawing
        self._over(walker)
        with contextlib.suppress(type(error)):
            drawing.throw(error)  # type: ignore[union-attr]
            raise AssertionError("an error of a draw is lost")

    def _over(self, walker: Walker) -> None:
        for each in walker.asked:
            del self._of[each.handle]  # type: ignore[attr-defined]
        walker.drawing, walker.asked = None, {}

    def _placed(self) -> dict[int, list[Request]]:
        """Place questions, and note which went where sequences that they go on from are."""
        sent = self._place()
        replicas = self._fleet.replicas
        for number, requests in sent.items():
            for request in requests:
                if not isinstance(request, PopulationDraw):
                    continue
                self._note(self._of.get(request.handle), number)
                self._at[request.handle] = number, replicas[number].life
        return sent

    def _note(self, walker: Walker | None, number: int) -> None:
        if walker is None:  # it has been withdrawn, and its replica told
            return
        usable, replicas = self._fleet._usable or (), self._fleet.replicas
        before = walker.population._sequences.origins.handles
        homes = [self._at[each] for each in before if each in self._at]
        there = {n for n, life in homes if replicas[n].life == life and n in usable}
        if len(there) == len({*homes}):  # and none of them is lost
            walker.could_stay += bool(there)
            walker.stayed += number in there
