"""An Engine made of replicas, which share the questions.

The runtime above is the same as over any engine: cache, deduplication, waiters, holds. Reads, draws and
populations are answered where the rows are.

Rules:
    One thread calls this. Messages of replicas arrive in a queue; ``step`` and ``tend`` handle them.
    A question is with one replica, or waits here, and ends once. If the replica dies or its engine fails,
    one other replica gets the question.
    Settings are recorded before replicas get them: a replica that starts later gets them all first.
    A change that a replica refuses is undone in the others; a replica that it kills starts again.
    No replica opens an engine while the runtime sleeps: the memory belongs to others until all is awake.
    An open replica sends its answers, or none, four times in ``STALL_SECONDS``; one that is silent for
    longer is killed.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch

from genrt.cluster.actors import Gone
from genrt.cluster.replica import Facts, Settings, stored
from genrt.cluster.routing import Router
from genrt.engines.protocol import EngineStatistics, Finished, ReplicaStatistics
from genrt.engines.remote.flushes import Answers, FarEnd, HandleNumbers, unpacked_ends
from genrt.engines.remote.wire import KINDS, unpacked_tokenizer
from genrt.engines.weights import (
    NO_TEXT_CONTINUES,
    SLEEPING_PARTS,
    KVCache,
    Layout,
    NamedTensors,
    SleepingPart,
)
from genrt.errors import (
    Closed,
    EngineDied,
    EngineFailed,
    EngineUnsupported,
    GenrtError,
    InvalidRequest,
    NotFinite,
    OutOfMemory,
)
from genrt.questions.arguments import Adapter
from genrt.questions.completions import Decoding, NativeRequest, Streamed, TextRequest, Told
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.runtime.streams import Flow, NativeFlow, StreamBuffer

MOST_ASKED = 2
"""How many replicas a question is asked of at most."""

STALL_SECONDS = 600.0
"""A replica that is at one step, or one change, for longer is killed. It may take as long as it likes to
open."""

MOST_FAILURES = 3
"""A replica that fails so many questions in a row is killed."""


@dataclass(slots=True, eq=False)
class _ReplicaRecord:
    """One replica.

    Attributes:
        state: as ``ReplicaStatistics`` has it.
        life: counts deaths; messages of an earlier life are ignored.
        is_open: whether it has opened in this life.
        asked: its unanswered questions, by ticket.
        heard: when its last answers came.
        calls: how many messages have not returned, of so many that were ``sent``.
        early: answers that came before earlier ones, by number; so many have been ``taken``.
        gone: collected populations, for its next message.
    """

    number: int
    far: FarEnd
    state: str = "restarting"
    life: int = 0
    is_open: bool = False
    restarts: int = 0
    asked: dict[int, Request] = field(default_factory=dict)
    heard: float = 0.0
    calls: int = 0
    sent: int = 0
    early: dict[int, Any] = field(default_factory=dict)
    taken: int = 0
    gone: list[int] = field(default_factory=list)
    failures: int = 0
    reason: str = ""
    counted: EngineStatistics = field(default_factory=EngineStatistics)


class ReplicaEngine:
    """The engine of a runtime with replicas.

    Args:
        replicas: ``Actors``, or other replicas with its methods; this closes them.
        count: how many.
        stall_seconds: as ``STALL_SECONDS``.
        seed: of the router's generator; it decides no answer.
        clock: monotonic seconds.

    Raises:
        GenrtError: a replica's engine does not open; EngineDied if the replica dies meanwhile.
    """

    reads = KINDS | {PopulationDraw}
    blocks = True
    device = torch.device("cpu")
    runs_programs = True

    def __init__(
        self,
        replicas: Any,
        count: int,
        *,
        stall_seconds: float | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._set, self._clock = replicas, clock
        self.adapters: dict[str, Adapter] = {}
        self._stall_seconds = stall_seconds or STALL_SECONDS
        self._numbers = HandleNumbers()
        self._replicas = [_ReplicaRecord(n, FarEnd(self._numbers)) for n in range(count)]
        self._router = Router(count, seed=seed)
        self._came: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._tick_seconds = min(1.0, self._stall_seconds / 4)
        self._next_tick = clock() + self._tick_seconds
        self._last_ticket = 0
        self._waiting: dict[Request, None] = {}
        self._at: dict[Request, tuple[_ReplicaRecord, int]] = {}
        self._moved: dict[Request, int] = {}  # from the replica of this number, which failed
        self._ends: list[Finished] = []
        self._streams: dict[Request, StreamBuffer[Any]] = {}
        self._adapters: dict[Adapter, dict[str, bytes]] = {}
        self._refusals: list[GenrtError] = []
        self._facts: Facts | None = None
        self._past = EngineStatistics()
        self._is_closed = False
        self.weights = _ReplicaWeights(self)
        try:
            self._open()
            facts = cast("Facts", self._facts)
            self.tokenizer = unpacked_tokenizer(facts.tokenizer)
        except BaseException:
            self.close()
            raise
        self.vocab_size, self.max_model_len = facts.vocab_size, facts.max_model_len
        self.max_batch_size, self.scores = facts.max_batch_size, facts.scores
        self.sleep_refused, self.continues = facts.sleep_refused, facts.continues

    def __repr__(self) -> str:
        return f"ReplicaEngine({len(self._serving)} of {len(self._replicas)} serve)"

    def submit(self, requests: Sequence[Request]) -> None:
        """Take a flush. Raises Closed, or InvalidRequest for a request in progress."""
        if self._is_closed:
            raise Closed("the engine is closed: open another one")
        if any(each in self._at or each in self._waiting for each in requests):
            raise InvalidRequest("a request is in progress already: join it, don't submit it again")
        self._waiting.update(dict.fromkeys(requests))
        self._send()

    def step(self) -> list[Finished]:
        """Wait for an answer or for ``interrupt``; return the requests that ended. Raises EngineDied once
        all replicas are dead."""
        if self.is_busy and not self._ends:
            self._pump(self._tick_seconds)
        ends, self._ends = self._ends, []
        return ends

    def tend(self) -> float:
        """Handle the messages of replicas; return the seconds until the next call. Raises EngineDied once
        all replicas are dead."""
        self._pump(0.0)
        return max(0.0, self._next_tick - self._clock())

    def interrupt(self) -> None:
        self._came.put(None)

    def cancel(self, requests: Sequence[Request]) -> None:
        tickets: dict[int, list[int]] = {}
        for request in requests:
            self._waiting.pop(request, None)
            self._moved.pop(request, None)
            self._streams.pop(request, None)
            if request in self._at:
                replica, ticket = self._taken_off(request)
                tickets.setdefault(replica.number, []).append(ticket)
        for number, several in tickets.items():
            self._exchange(self._replicas[number], withdrawn=several)

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        """Load an adapter in all replicas, or raise."""
        files = {each.name: each.read_bytes() for each in path.iterdir() if each.is_file()}
        self._adapters[adapter] = files
        for result in self.everyone("add_adapter", adapter, files).values():
            if isinstance(result, GenrtError):
                self.remove_adapter(adapter)
                raise result

    def remove_adapter(self, adapter: Adapter) -> None:
        self._adapters.pop(adapter, None)
        self._tell("remove_adapter", adapter)

    def forget_residents(self) -> None:
        self._tell("do", "forget_residents")

    def unsupported(self, decoding: Decoding) -> str | None:
        """Return ``None``: a replica whose engine cannot do it refuses the question itself."""
        return None

    def progress(self, streamed: Sequence[Streamed]) -> list[Told | None]:
        found: list[Told | None] = []
        for each in streamed:
            told = self._streams[each].take() if each in self._streams else None
            if told is not None and isinstance(each, NativeRequest):
                each.asked.tell(told)  # another replica that begins it leaves that out
            found.append(told)
        return found

    def statistics(self) -> EngineStatistics:
        return sum_counters([self._past, *(each.counted for each in self._replicas)])

    def replicas(self) -> tuple[ReplicaStatistics, ...]:
        return tuple(
            ReplicaStatistics(each.state, each.restarts, len(each.asked), each.counted)
            for each in self._replicas
        )

    def close(self) -> None:
        self._is_closed = True
        self._set.close()

    @cached_property
    def vllm_config(self) -> Any:
        """vLLM's configuration, or ``None`` for other engines. Any thread may ask."""
        if self._facts is None or not self._facts.serves_vllm:
            return None
        return self._set.call(self._serving[0].number, "do", "engine.vllm_config").result()

    @property
    def has_texts_only(self) -> bool:
        """True if nothing but texts is in progress."""
        return all(isinstance(each, TextRequest) for each in (*self._at, *self._waiting))

    @property
    def is_busy(self) -> bool:
        """True if something is in progress."""
        return bool(self._at or self._waiting)

    def _send(self) -> None:
        """Send the questions that wait, and the numbers of collected populations."""
        if gone := self._numbers.taken():
            self._router.left(gone)
            for each in self._replicas:
                each.gone += gone if each.is_open else []
        usable = [each.number for each in self._serving]
        if not self._waiting or not usable:
            return
        flushes: dict[int, list[tuple[int, Request]]] = {}
        waiting, self._waiting = self._waiting, {}
        for request in waiting:
            extends: list[int] = []
            if isinstance(request, PopulationDraw):
                extends = [self._numbers.of(each) for each in request.came_from]
            others = [each for each in usable if each != self._moved.get(request)]
            number = self._router.route(request, others or usable, extends)
            if isinstance(request, PopulationDraw):
                self._router.stays(self._numbers.of(request.handle), number, len(request))
            if getattr(request, "streamed", False):
                is_native = isinstance(request, NativeRequest)
                self._streams[request] = NativeFlow() if is_native else Flow()
            self._last_ticket += 1
            replica = self._replicas[number]
            replica.asked[self._last_ticket] = request
            self._at[request] = replica, self._last_ticket
            flushes.setdefault(number, []).append((self._last_ticket, request))
        for number, asked in flushes.items():
            self._exchange(self._replicas[number], asked)

    def _exchange(
        self,
        replica: _ReplicaRecord,
        asked: Sequence[tuple[int, Request]] = (),
        withdrawn: Sequence[int] = (),
    ) -> None:
        """Send a message. An open replica always has one, with which it returns its answers."""
        gone, replica.gone = replica.gone, []
        tickets, requests = zip(*asked, strict=True) if asked else ((), ())
        more: dict[str, Any] = {"tickets": tickets, "withdrawn": withdrawn, "forgotten": gone}
        more |= {"number": replica.sent, "seconds": self._stall_seconds / 4}
        data, others = replica.far.flush(requests, **more)
        replica.calls += 1
        replica.sent += 1
        self._call(replica, "exchange", data, *others, then=self._answered)

    def _answered(self, replica: _ReplicaRecord, message: bytes | Answers | None) -> None:
        replica.calls -= 1
        if not replica.calls:
            self._exchange(replica)
        if message is None:
            return
        replica.heard = self._clock()
        asked = replica.asked

        def version_of(ticket: int) -> int:
            return asked[ticket].weights_version if ticket in asked else 0

        # Two calls wait for answers, and the later one may return first.
        number, *found = unpacked_ends(message, version_of)
        replica.early[number] = found
        while (due := replica.early.pop(replica.taken, None)) is not None:
            replica.taken += 1
            self._take_answers(replica, *due)

    def _take_answers(
        self,
        replica: _ReplicaRecord,
        ends: Sequence[tuple[int, Any]],
        told: Sequence[tuple[int, Told]],
        counters: Sequence[Any],
    ) -> None:
        asked = replica.asked
        replica.counted = EngineStatistics(*counters)
        for ticket, part in told:
            if ticket in asked:
                self._streams[asked[ticket]].put(part)
        for ticket, result in ends:
            if (request := asked.get(ticket)) is None:  # it was withdrawn
                continue
            if isinstance(result, EngineDied | Closed):
                self._give_up(replica, str(result))
                return
            self._taken_off(request)
            failed = _is_the_engines(result)
            replica.failures = replica.failures + 1 if failed else 0
            if failed and request not in self._moved and len(self._serving) > 1:
                self._moved[request] = replica.number
                self._waiting[request] = None
            else:
                self._end(request, result)
        if replica.failures >= MOST_FAILURES:
            self._give_up(replica, "its steps failed")

    def _taken_off(self, request: Request) -> tuple[_ReplicaRecord, int]:
        replica, ticket = self._at.pop(request)
        del replica.asked[ticket]
        self._router.done(replica.number, request)
        return replica, ticket

    def _end(self, request: Request, result: Any) -> None:
        self._moved.pop(request, None)
        flow = self._streams.pop(request, None)
        if isinstance(result, GenrtError):
            self._ends.append(Finished(request, error=result))
            return
        if isinstance(flow, NativeFlow):
            result = flow.end(result)
        self._ends.append(Finished(request, result))

    @property
    def _serving(self) -> list[_ReplicaRecord]:
        return [each for each in self._replicas if each.state == "healthy"]

    def _open(self) -> None:
        for each in self._replicas:
            self._prepare(each)
        while len(self._serving) < len(self._replicas):
            self._pump(self._tick_seconds)
            if self._refusals:
                raise self._refusals[0]
            for each in self._replicas:
                if each.life:
                    raise EngineDied(f"replica {each.number} did not open: {each.reason}")

    def _prepare(self, replica: _ReplicaRecord) -> None:
        """Give a replica all settings; it serves once it has them."""
        replica.state = "restarting"
        weights = self.weights
        wanted = Settings(
            weights.version,
            weights.tensors,
            tuple(self._adapters.items()),
            weights.label,
            weights.texts,
        )
        self._call(replica, "prepare", wanted, then=partial(self._prepared, wanted))

    def _prepared(self, wanted: Settings, replica: _ReplicaRecord, facts: Facts) -> None:
        self._facts = self._facts or facts
        if not replica.is_open:
            replica.is_open = True
            replica.restarts += replica.life > 0
            replica.heard = self._clock()
            self._exchange(replica)
        present = self.weights.version, tuple(self._adapters.items())
        if (wanted.version, wanted.adapters) == present:
            replica.state = "healthy"
        else:  # they have changed meanwhile
            self._prepare(replica)

    def _call(
        self,
        replica: _ReplicaRecord,
        name: str,
        *arguments: Any,
        then: Callable[[_ReplicaRecord, Any], object] = lambda *_: None,
    ) -> None:
        """Call a replica. Its result goes to ``then``, on this thread; its death is handled."""
        life = replica.life

        def ended(calling: Future[Any]) -> None:
            self._came.put(partial(self._take, replica, life, calling, then))

        self._set.call(replica.number, name, *arguments).add_done_callback(ended)

    def _take(
        self,
        replica: _ReplicaRecord,
        life: int,
        calling: Future[Any],
        then: Callable[[_ReplicaRecord, Any], object],
    ) -> None:
        if life != replica.life or self._is_closed:
            return
        try:
            result = calling.result()
        except Gone as gone:
            self._lost(replica, str(gone), is_final=gone.is_final)
        except Exception as error:
            self._refusals += [error] if isinstance(error, GenrtError) else []
            self._give_up(replica, f"{type(error).__name__}: {error}")
        else:
            then(replica, result)

    def _give_up(self, replica: _ReplicaRecord, reason: str) -> None:
        """Kill a replica, which starts again."""
        self._set.kill(replica.number)
        self._lost(replica, reason)

    def _lost(self, replica: _ReplicaRecord, reason: str, *, is_final: bool = False) -> None:
        """Ask the questions of a dead replica again; the next tick prepares it, unless it is final."""
        replica.state, replica.reason = "retired" if is_final else "dead", reason
        replica.life, replica.is_open = replica.life + 1, False
        replica.failures = replica.calls = replica.sent = replica.taken = 0
        replica.gone, replica.early = [], {}
        replica.far = FarEnd(self._numbers)
        counted, replica.counted = replica.counted, EngineStatistics()
        self._past = sum_counters([self._past, replace(counted, resident=0, kept_tokens=0)])
        lost, replica.asked = replica.asked, {}
        self._router.lost(replica.number)
        for request in lost.values():
            del self._at[request]
            if request in self._moved:
                self._end(
                    request,
                    EngineFailed(
                        f"{MOST_ASKED} replicas died with this question in flight, which may be why: "
                        f"{reason}"
                    ),
                )
            else:
                self._moved[request], self._waiting[request] = replica.number, None

    def _tick(self, replica: _ReplicaRecord) -> None:
        """Prepare a replica that is dead, and kill one that has been silent for too long."""
        if replica.state == "dead" and not self.weights.asleep:
            self._prepare(replica)
        elif replica.is_open and self._clock() - replica.heard > self._stall_seconds:
            self._give_up(replica, f"it was silent for {self._stall_seconds:g} s")
        elif replica.is_open and replica.gone:
            self._exchange(replica)

    def _until(self, is_over: Callable[[], bool]) -> None:
        """Handle messages until something holds; raises as ``_pump``."""
        while not is_over():
            self._pump(self._tick_seconds)

    def _pump(self, seconds: float) -> None:
        """Handle messages, after waiting for them at most so long. Raises EngineDied once all replicas
        are dead."""
        seconds = min(seconds, self._next_tick - self._clock())
        with contextlib.suppress(queue.Empty):
            take = self._came.get(timeout=max(0.0, seconds))
            while True:
                if take is not None:
                    take()
                take = self._came.get_nowait()
        if self._clock() >= self._next_tick:
            self._next_tick = self._clock() + self._tick_seconds
            for each in self._replicas:
                self._tick(each)
        self._send()
        if all(each.state == "retired" for each in self._replicas):
            reasons = dict.fromkeys(each.reason for each in self._replicas)
            raise EngineDied(
                f"all replicas died, and may not be started again: {'; '.join(reasons)}"
            )

    def everyone(self, name: str, *arguments: Any) -> dict[int, Any]:
        """Call a method of every serving replica; return the results, errors included, by number: at
        least one, unless the runtime sleeps."""
        if not self.weights.asleep:
            self._until(lambda: bool(self._serving))
        found: dict[int, Any] = {}
        lives = {each: each.life for each in self._serving}
        for each in lives:
            self._call(each, name, *arguments, then=lambda at, it: found.update({at.number: it}))
        self._until(
            lambda: all(each.number in found or each.life != life for each, life in lives.items())
        )
        return found if found or self.weights.asleep else self.everyone(name, *arguments)

    def _tell(self, name: str, *arguments: Any) -> None:
        """Have every open replica do something, some time."""
        for each in self._replicas:
            if each.is_open:
                self._call(each, name, *arguments)

    def renew(self) -> None:
        """Give every replica the present weights. Return once one has them, or all have died in their
        sleep. Raises the first error if all replicas fail."""
        served = {each: each.life for each in self._serving}
        self._refusals.clear()

        def is_over() -> bool:
            if self._refusals and all(each.life != life for each, life in served.items()):
                raise self._refusals[0]
            alive = any(each.state in ("healthy", "restarting") for each in self._replicas)
            return bool(self._serving or (self.weights.asleep and not alive))

        for each in served:
            self._prepare(each)
        self._until(is_over)


def _is_the_engines(error: object) -> bool:
    return isinstance(error, EngineFailed) and not isinstance(error, OutOfMemory | NotFinite)


class _ReplicaWeights:
    """The weights of all replicas. New weights are in the object store before any replica gets them, and
    stay there for replicas that start later. The first four attributes are those of ``Settings``."""

    def __init__(self, engine: ReplicaEngine) -> None:
        self.version = self.label = 0
        self.tensors: tuple[Any, ...] = ()
        self.texts: KVCache | None = None
        self.asleep: frozenset[SleepingPart] = frozenset()
        self._engine = engine
        self._coming: list[Any] = []

    def layout(self) -> Layout:
        return cast("Layout", self._first("layout"))

    def checkpoint(self) -> list[Path]:
        return cast("list[Path]", self._first("checkpoint"))

    def begin(self) -> None:
        if self._engine.is_busy:
            raise EngineFailed("not all questions have ended yet")
        self.texts, self._coming = None, []

    def begin_beside_texts(self, keeps_kv: bool) -> None:
        """Begin as ``begin``, but keep the texts in progress: each replica goes on with its old weights
        until it has the new ones."""
        if not self._engine.continues:
            raise EngineUnsupported(NO_TEXT_CONTINUES)
        if not self._engine.has_texts_only:
            raise EngineFailed("not all rows have been computed yet")
        self.texts, self._coming = "keep" if keeps_kv else "recompute", []

    def set_version(self, version: int) -> None:
        """Label the tokens that replicas draw with the weights that come next."""
        self.label = version

    def load(self, tensors: NamedTensors) -> None:
        self._coming.append(self._engine._set.put([stored(*each) for each in tensors]))

    def finish(self) -> None:
        """Give all replicas the new weights; raises as ``ReplicaEngine.renew``."""
        self.version += 1
        self.tensors, self._coming = tuple(self._coming), []
        self._engine.renew()

    def check_sleep(self) -> None:
        if (reason := self._engine.sleep_refused) is not None:
            raise EngineUnsupported(f"the engines of these replicas cannot sleep: {reason}")

    def sleep(self, level: int) -> int:
        """Put all replicas to sleep; return how many bytes became free. A replica that dies from now on
        starts again once all is awake."""
        self.asleep = SLEEPING_PARTS
        for each in self._engine._replicas:
            if each.state == "restarting":  # it is opened once the runtime is awake
                self._engine._give_up(each, "the runtime went to sleep")
        self._engine.everyone("do", "begin_update")
        found = self._engine.everyone("do", "engine.weights.sleep", level)
        if refused := [each for each in found.values() if isinstance(each, Exception)]:
            self.wake_up(SLEEPING_PARTS)
            raise refused[0]
        return sum(found.values())

    def wake_up(self, parts: frozenset[SleepingPart]) -> None:
        """Wake these parts of all replicas. A replica that fails is killed. If all fail, this raises the
        first error, and they sleep on."""
        parts &= self.asleep
        found = self._engine.everyone("do", "engine.weights.wake_up", parts)
        refused = {n: each for n, each in found.items() if isinstance(each, Exception)}
        if refused and len(refused) == len(found):
            raise next(iter(refused.values()))
        self.asleep -= parts
        for number, reason in refused.items():
            self._engine._give_up(self._engine._replicas[number], str(reason))

    def _first(self, name: str) -> Any:
        for result in self._engine.everyone("do", f"engine.weights.{name}").values():
            if isinstance(result, GenrtError):
                raise result
            return result
        raise EngineFailed(
            "every replica died in its sleep: wake the runtime up, which starts them again"
        )


def sum_counters(several: Sequence[EngineStatistics]) -> EngineStatistics:
    """Return the sums of the counters of several engines."""
    names = [each.name for each in fields(EngineStatistics)]
    return EngineStatistics(*(sum(getattr(each, name) for each in several) for name in names))
