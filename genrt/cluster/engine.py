"""An Engine that is made of engines: several replicas, of which each question is one's.

The runtime above is one, as over any engine: cache, dedupe, waiters, holds. Reads, draws and populations
are answered where the rows are.

Rules:
    One thread calls this and moves everything: replicas are heard, probed and mended in ``step``, in
    ``tend`` and wherever something is waited for. ``Fleet`` decides; here it is done.
    What the replicas are to have is written down before any is told: a replica that is started later is
    given all of it before it is asked.
    A change that a replica refuses is taken back from those that took it; one that dies of it is
    started again, with what the others have.
    No replica is started while the runtime sleeps: its memory is somebody else's until all of it is back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from genrt.cluster.fleet import Fleet, Replica
from genrt.cluster.health import ReplicaLimits
from genrt.cluster.joining import ReplicaPrefixes, ReplicaStreams, sum_counters
from genrt.cluster.messages import AskedNumbers, load_message, split_questions
from genrt.cluster.routing import Router
from genrt.cluster.transport import Came, Gone, Pulsed, Transport
from genrt.cluster.weights import ReplicaWeights
from genrt.cluster.worker import Answers, Facts, Renewal
from genrt.engines.protocol import EngineStatistics, Finished, ReplicaStatistics
from genrt.engines.remote.wire import unpacked_tokenizer
from genrt.errors import Closed, EngineDied, EngineFailed, GenrtError, InvalidRequest
from genrt.questions.completions import Decoding, Streamed, Told
from genrt.questions.contexts import Adapter
from genrt.questions.draws import DrawToken, PopulationDraw
from genrt.questions.reads import Candidates, TopTokens
from genrt.questions.request import Request

__all__ = ["ReplicaEngine"]


class ReplicaEngine:
    """The engine of a runtime with replicas.

    Args:
        transport: starts them, and carries messages; this closes it.
        count: how many.
        numbers: of the questions of populations, as the transport has them.
        seed: of the generator that spreads questions; it decides no answer.
        clock: monotonic seconds.

    Raises:
        EngineDied: one of them does not open; GenrtError, whatever its engine raised.
    """

    reads = frozenset({DrawToken, TopTokens, Candidates, PopulationDraw})
    adapters: MappingProxyType[str, Adapter] = MappingProxyType({})
    device = torch.device("cpu")
    runs_programs = True

    def __init__(
        self,
        transport: Transport,
        count: int,
        *,
        limits: ReplicaLimits | None = None,
        numbers: AskedNumbers | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._clock, self._transport = limits or ReplicaLimits(), clock, transport
        self._numbers = numbers or AskedNumbers()
        router = Router(count, seed=seed)
        now = clock()
        self.fleet = Fleet(count, self._limits, router, now=now, number_of=self._numbers.of)
        self._next_probe = now + self._limits.probe_seconds
        self._last = 0
        self._asked: dict[int, Request] = {}
        self._tickets: dict[Request, int] = {}
        self._ends: list[Finished] = []
        self._streams = ReplicaStreams()
        self._calls: dict[int, tuple[Replica, int, float]] = {}
        self._results: dict[int, Any] = {}
        self._adapters: dict[Adapter, str] = {}
        self._rounds: dict[int, tuple[int, int]] = {}
        self._refusals: list[GenrtError] = []
        self._facts: Facts | None = None
        # Read by any thread, in ``statistics``.
        self._past = EngineStatistics()
        self._counted = [EngineStatistics()] * count
        self._is_closed = False
        self.prefixes = ReplicaPrefixes(self.tell)
        self.weights = ReplicaWeights(self)
        try:
            facts = self._opened()
        except BaseException:
            self.close()
            raise
        self.vocab_size, self.max_model_len = facts.vocab_size, facts.max_model_len
        self.max_batch_size = facts.max_batch_size
        self.tokenizer = unpacked_tokenizer(facts.tokenizer)
        self.sleep_refused: str | None = facts.sleep_refused
        self.scores = facts.scores

    def __repr__(self) -> str:
        serving = len(self.fleet.serving)
        return f"ReplicaEngine({serving} of {len(self.fleet.replicas)} serve)"

    # -- the Engine protocol ------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Take a flush, and send it by replicas. Raises Closed, or InvalidRequest for one in progress."""
        if self._is_closed:
            raise Closed("the engine is closed: open another one")
        if any(each in self.fleet for each in requests):
            raise InvalidRequest("a request is in progress already: join it, don't submit it again")
        self.fleet.submit(requests)
        self._send()

    def step(self) -> list[Finished]:
        """Wait until a replica has answered something, or ``interrupt`` was called; return what ended.
        Raises EngineDied once no replica is left."""
        if len(self.fleet) and not self._ends:
            self._pump(math.inf)
            self._check()
        ends, self._ends = self._ends, []
        return ends

    def tend(self) -> float:
        """Return in how many seconds to do this again: take what replicas tell, probe and mend them while
        nothing is in progress. Raises EngineDied once no replica is left."""
        self._pump(0.0)
        self._check()
        return max(0.0, self._next_probe - self._clock())

    def interrupt(self) -> None:
        """Have ``step`` return soon; from any thread."""
        self._transport.interrupt()

    def cancel(self, requests: Sequence[Request]) -> None:
        self._streams.forget(requests)
        for number, unwanted in self.fleet.cancel(requests).items():
            tickets = [self._forgotten(each) for each in unwanted]
            self._transport.send(number, ("cancel", tickets))

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        """Load an adapter in every replica, or in none."""
        before = self.fleet.settings
        results = self.everyone("add_adapter", adapter, str(path))
        refused = [each for each in results.values() if isinstance(each, GenrtError)]
        if refused:
            self.tell("remove_adapter", adapter)
            raise refused[0]
        self._adapters[adapter] = str(path)
        having = results if self.fleet.settings == before else {}
        self.fleet.change(self._clock(), having=[*having])
        self._mend()

    def remove_adapter(self, adapter: Adapter) -> None:
        self._adapters.pop(adapter, None)
        self.tell("remove_adapter", adapter)

    def forget_residents(self) -> None:
        """Have every replica forget what nothing in progress needs."""
        self.tell("forget_residents")

    def unsupported(self, decoding: Decoding) -> str | None:
        """Return ``None``: a replica whose engine cannot do it refuses the question itself."""
        return None

    def progress(self, streamed: Sequence[Streamed]) -> list[Told | None]:
        new = [each for each in streamed if each in self._tickets and self._streams.begin(each)]
        self._stream(new)
        return [self._streams.take(each) for each in streamed]

    def statistics(self) -> EngineStatistics:
        return sum_counters([self._past, *self._counted])

    def replicas(self) -> tuple[ReplicaStatistics, ...]:
        """Return what each replica is and has done; any thread may ask."""
        return tuple(
            ReplicaStatistics(
                state=each.health.state.value,
                restarts=each.health.restarts,
                in_flight=len(each.work),
                engine=counted,
            )
            for each, counted in zip(self.fleet.replicas, self._counted, strict=True)
        )

    def close(self) -> None:
        self._is_closed = True
        self._transport.close()
        self.weights.close()

    @cached_property
    def vllm_config(self) -> Any:
        """vLLM's configuration of the model; ``None`` if the replicas' engines are others."""
        packed = None if self._facts is None else self._facts.vllm_config
        return None if packed is None else load_message(packed)

    @property
    def is_busy(self) -> bool:
        """True if something is in progress."""
        return bool(len(self.fleet))

    # -- everyone -----------------------------------------------------------------------------

    def everyone(self, name: str, *arguments: Any) -> dict[int, Any]:
        """Have every replica that serves do something; return the results, errors among them, of those
        that live. Raises EngineDied if none does."""
        while True:
            self._until(lambda: bool(self.fleet.serving))
            calls = {self._call(each, name, *arguments): each for each in self.fleet.serving}
            self._until_answered(calls)
            found = {
                each.number: self._results.pop(call)
                for call, each in calls.items()
                if call in self._results
            }
            if found:
                return found

    def all_open(self, name: str, *arguments: Any) -> dict[int, Any]:
        """Have every replica that is open do something, also while it is given weights; return the
        results, errors among them, of those that live."""
        calls = {
            self._call(each, name, *arguments): each.number
            for each in self.fleet.replicas
            if each.health.is_open
        }
        self._until_answered(calls)
        return {n: self._results.pop(call) for call, n in calls.items() if call in self._results}

    def put_off(self) -> None:
        """Have the replicas that are being opened be opened later, once the runtime is awake."""
        for each in self.fleet.replicas:
            if each.health.put_off():
                self._give_up(each.number, each.life, "the runtime went to sleep")

    def give_up(self, number: int, reason: str) -> None:
        """Do without a replica until it has been started again."""
        self._give_up(number, self.fleet.replicas[number].life, reason)

    def awoke(self) -> None:
        """Start the replicas that died in the sleep."""
        self.fleet.look_again()
        self._mend()

    def anyone(self, name: str) -> Any:
        """Return what a replica returns, or raise what it raises."""
        self._until(lambda: bool(self.fleet.serving))
        while True:
            call = self._call(self.fleet.serving[0], name)
            self._until_answered([call])
            if call in self._results:
                result = self._results.pop(call)
                if isinstance(result, GenrtError):
                    raise result
                return result
            self._until(lambda: bool(self.fleet.serving))

    def renew(self) -> None:
        """Give every replica new weights, which ``self.weights`` has. Returns once one has them, or all
        have died in their sleep; others are asked again when they do. Raises EngineFailed if all refuse
        them."""
        served = [(each, each.life) for each in self.fleet.serving]
        self._refusals.clear()
        self.fleet.change(self._clock())
        self._mend()
        self._until(
            lambda: (
                bool(self.fleet.serving)
                or self._all_died_asleep
                or all(each.life != life for each, life in served)
            )
        )
        if self._refusals and not self.fleet.serving:
            raise self._refusals[0]
        self._until(lambda: bool(self.fleet.serving) or self._all_died_asleep)

    def tell(self, name: str, *arguments: Any) -> None:
        """Have every replica that is open do something, some time."""
        for each in self.fleet.replicas:
            if each.health.is_open:
                self._transport.send(each.number, ("do", 0, name, *arguments))

    def _call(self, replica: Replica, name: str, *arguments: Any) -> int:
        self._last += 1
        self._calls[self._last] = replica, replica.life, self._clock()
        self._transport.send(replica.number, ("do", self._last, name, *arguments))
        return self._last

    def _until_answered(self, calls: Collection[int]) -> None:
        """Wait until none of these calls is under way: answered, or its replica is dead."""
        self._until(lambda: self._calls.keys().isdisjoint(calls))

    def _until(self, is_over: Callable[[], bool]) -> None:
        """Wait until something holds, which the bounds of the replicas' health see to.

        Raises:
            EngineDied: no replica is left.
            EngineFailed: none is until the runtime wakes up.
        """
        while not is_over():
            if self._all_died_asleep:
                raise EngineFailed(
                    "every replica died in its sleep: wake the runtime up, which starts them again"
                )
            self._pump(self._limits.probe_seconds)
            self._check()

    @property
    def _all_died_asleep(self) -> bool:
        lives = any(each.health.lives for each in self.fleet.replicas)
        return bool(self.weights.asleep) and not lives

    # -- what happens -------------------------------------------------------------------------

    def _opened(self) -> Facts:
        """Start all replicas, and return what they say once each of them serves."""
        for each in self.fleet.replicas:
            self._transport.start(each.number, each.life)
        while len(self.fleet.serving) < len(self.fleet.replicas):
            self._pump(self._limits.probe_seconds)
            if self._refusals:
                raise self._refusals[0]
            gone = [each for each in self.fleet.replicas if each.life]
            if gone:
                raise EngineDied(f"replica {gone[0].number} did not open: {gone[0].reason}")
        if self._facts is None:
            raise EngineFailed("no replica has told of its engine")
        return self._facts

    def _pump(self, seconds: float) -> None:
        """Wait for what comes, at most so long; do what it asks for."""
        for event in self._transport.wait(min(seconds, self._next_probe - self._clock())):
            number, life = event.number, event.life
            if isinstance(event, Came):
                kind, *rest = event.message
                if life == self.fleet.replicas[number].life:
                    getattr(self, f"_on_{kind}")(number, life, *rest)
            elif isinstance(event, Pulsed):
                self.fleet.answered_probe(number, life)
                self._on_rounds(number, life, event.rounds)
            elif isinstance(event, Gone):
                self._bury(number, life, event.reason)
        if self._clock() >= self._next_probe:
            self._next_probe = self._clock() + self._limits.probe_seconds
            self.fleet.tick(self._clock())
            for each in self.fleet.to_probe():
                self._transport.probe(each.number)
        self._mend()

    def _mend(self) -> None:
        """Kill, start and renew replicas that need it, and send what waits."""
        now = self._clock()
        for replica, life, since in [*self._calls.values()]:
            if now - since > self._limits.stall_seconds:
                self._give_up(replica.number, life, "it did not do what it was told")
        if self.fleet.has_changed():  # most of the time nothing has, of replicas there may be many
            for each in self.fleet.to_kill():
                self._transport.kill(each.number)
                self._bury(each.number, each.life, each.reason)
            for each in () if self.weights.asleep else self.fleet.to_start(now):
                self._transport.start(each.number, each.life)
            for each in self.fleet.to_renew():
                self._transport.send(each.number, ("renew", self._wanted()))
        self._send()

    def _send(self) -> None:
        """Send the questions that wait, and the numbers of populations that nobody goes on from."""
        gone = [self._numbers.gone.popleft() for _ in range(len(self._numbers.gone))]
        if gone:
            self.fleet.left(gone)
            for each in self.fleet.replicas:
                if each.health.is_open:  # those that are given new weights meanwhile too
                    self._transport.send(each.number, ("forget", gone))
        for number, requests in self.fleet.place().items():
            for request in requests:
                self._forgotten(request)
                self._last += 1
                self._tickets[request] = self._last
                self._asked[self._last] = request
            pairs = [(self._tickets[request], request) for request in requests]
            self._transport.send(number, ("ask", *split_questions(pairs)))
            self._stream(self._streams.begun(requests))

    def _stream(self, streamed: Sequence[Request]) -> None:
        for number, replica in enumerate(self.fleet.replicas if streamed else ()):
            tickets = [self._tickets[each] for each in streamed if each in replica.work]
            if tickets:
                self._transport.send(number, ("stream", tickets))

    def _wanted(self) -> Renewal:
        return Renewal(
            settings=self.fleet.settings,
            weights=self.weights.version,
            files=self.weights.files,
            adapters=tuple(self._adapters.items()),
            prefixes=tuple(self.prefixes),
        )

    def _on_opened(self, number: int, life: int, facts: Facts) -> None:
        self._facts = self._facts or facts
        self.fleet.opened(number, life, self._clock())

    def _on_refused(self, number: int, life: int, error: GenrtError) -> None:
        self._refusals.append(error)
        self._give_up(number, life, str(error))

    def _on_died(self, number: int, life: int, reason: str) -> None:
        self._give_up(number, life, reason)

    def _on_renewed(self, number: int, life: int, settings: int, error: GenrtError | None) -> None:
        if error is None:
            self.fleet.renewed(number, life, settings, self._clock())
            return
        self._refusals.append(error)
        self._give_up(number, life, str(error))

    def _on_answers(self, number: int, life: int, answers: Answers) -> None:
        self._counted[number] = answers.statistics
        ends = [
            Finished(self._asked[ticket], result, error)
            for ticket, result, error in answers.ends
            if ticket in self._asked
        ]
        for ticket, told in answers.told:
            self._streams.add(self._asked.get(ticket), told)
        self.fleet.worked(number, life, self._clock())
        for end in self.fleet.ended(number, life, ends):
            self._end(end)

    def _on_done(
        self, number: int, life: int, call: int, result: Any, error: GenrtError | None
    ) -> None:
        if self._calls.pop(call, None) is not None:
            self._results[call] = result if error is None else error

    def _on_rounds(self, number: int, life: int, rounds: int) -> None:
        if self._rounds.get(number) != (life, rounds):
            self._rounds[number] = life, rounds
            self.fleet.worked(number, life, self._clock())

    def _give_up(self, number: int, life: int, reason: str) -> None:
        self._transport.kill(number)
        self._bury(number, life, reason)

    def _bury(self, number: int, life: int, reason: str) -> None:
        """Do without a replica that is dead: its questions go elsewhere, its calls end, its counters
        stay."""
        if life != self.fleet.replicas[number].life:
            return
        for call, (replica, of, _) in [*self._calls.items()]:
            if replica.number == number and of == life:
                del self._calls[call]
        counted, self._counted[number] = self._counted[number], EngineStatistics()
        self._past = sum_counters([self._past, replace(counted, resident=0, kept_tokens=0)])
        for end in self.fleet.died(number, life, reason):
            self._end(end)

    def _end(self, end: Finished) -> None:
        self._forgotten(end.request)
        self._ends.append(self._streams.end(end))

    def _forgotten(self, request: Request) -> int:
        """Forget a question's ticket, if it has one, and return it."""
        ticket = self._tickets.pop(request, 0)
        self._asked.pop(ticket, None)
        return ticket

    def _check(self) -> None:
        if self.fleet.is_lost:
            raise self.fleet.why_lost()
