"""Every question of a simulation: what must become of it, told from what passes between batcher and
engine, and what became of it.

The ledger stands on both sides of the batcher. From the callers it hears what is asked and how it ends,
from the engine's side what was sent, withdrawn, finished and failed; so it knows of every open question
what it waits for, and of every ended one what it had to end in. Nothing of the batcher's own bookkeeping
is believed, but for what it does at its own time: the waiters of a closed loop go when it comes by them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from genrt.engines.protocol import Finished, failure
from genrt.errors import GenrtError, OutOfMemory, TimedOut
from genrt.questions.draws import DrawToken
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.batcher import Entry, Waiter
from genrt.tokens.sampling import Draw, TopLogprobs
from tests.inside import entries_of, ready_of

if TYPE_CHECKING:
    from tests.simulation.runtime import SimulatedRuntime


@dataclass(slots=True, eq=False)
class Question:
    """One caller's question. It waits for the requests in ``missing``, and ends in ``error`` if that is
    not ``None``. One that is ``lost`` was asked on a loop that has been closed: nobody will hear the
    answer."""

    number: int
    requests: list[Request]
    stacked: bool
    loop: asyncio.AbstractEventLoop
    deadline: float
    missing: dict[Request, None] = field(default_factory=dict)
    is_registered: bool = False
    has_left: bool = False
    error: GenrtError | None = None
    ended: bool = False
    lost: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether the batcher still owes it something: an answer, or room in the queue."""
        return self.error is None and (bool(self.missing) or not self.is_registered)


@dataclass(slots=True, eq=False)
class _Life:
    """A request from the question that queued it to its end, and the questions that want it."""

    questions: dict[Question, None]
    sent: bool = False
    is_retried: bool = False

    @property
    def is_wanted(self) -> bool:
        return any(not question.lost for question in self.questions)


def _weight(requests: Sequence[Request]) -> int:
    return sum(request.weight for request in requests)


class Ledger:
    """What was asked in one simulation, and what became of it. Its methods raise a Violation where
    something is wrong."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self.questions: list[Question] = []
        self._runtime = runtime  # whose batcher, cache and engine do not exist yet
        self._by_requests: dict[int, Question] = {}  # by the identity of the list, which is kept
        self._streams: dict[Request, Question] = {}
        self._lives: dict[Request, _Life] = {}
        self._flush: list[Request] = []
        self._ending: dict[Request, GenrtError | None] = {}  # what came out, and has not ended yet
        self._withdrawing: set[Request] = set()
        self._closed: GenrtError | None = None
        self._errors: dict[int, BaseException] = {}
        self._decided: dict[Request, Draw] = {}
        # What was so when the present turn began.
        self._turns = self._steps = 0
        self._ready_since: dict[Entry, int] = {}
        self._to_withdraw: dict[Request, _Life] = {}
        self._lost: set[Question] = set()
        # What the batcher should have counted.
        self._asked = self._cached = self._deduplicated = self._entered = self._sent = 0
        self._flushes = self._retried = self._dropped = self._cancelled = 0
        self._answered = self._failed = 0

    def _violated(self, message: str) -> NoReturn:
        self._runtime.record.violated(message)

    # -- the callers' side --------------------------------------------------------------------

    def asked(self, requests: list[Request], stacked: bool, timeout: float | None) -> Question:
        """Return a new question, which the batcher gets next: this very list of requests."""
        loop = asyncio.get_running_loop()
        deadline = math.inf if timeout is None else loop.time() + timeout
        question = Question(len(self.questions), requests, stacked, loop, deadline)
        self.questions.append(question)
        self._by_requests[id(question.requests)] = question
        if self._closed is not None:
            question.error = self._closed
        return question

    def streamed(self, request: Request, timeout: float | None) -> Question:
        """Return a new question of one who reads what is drawn."""
        question = self._streams[request] = self.asked([request], False, timeout)
        return question

    def _question(self, waiter: Waiter) -> Question:
        if waiter.flow is not None:
            return self._streams[waiter.requests[0]]
        return self._by_requests[id(waiter.requests)]

    def dropped(self, question: Question) -> None:
        """Note that nobody holds a stream any more: it leaves when that is collected."""
        question.ended = True

    def registering(self, waiter: Waiter) -> None:
        """Note that the batcher is about to find, join or queue the requests of a question."""
        question = self._question(waiter)
        if question.is_registered or question.has_left:
            self._violated(f"{question} is registered, and was before or has left")
        self._check_turn(question)
        question.is_registered = True
        requests = question.requests
        self._asked += _weight(requests)
        hits: set[Request] = set()
        for request in requests:
            if request in question.missing:
                self._deduplicated += request.weight
            elif request in hits or (
                isinstance(request, LogprobsRequest) and request in self._runtime.cache
            ):
                self._cached += 1
                hits.add(request)
            else:
                question.missing[request] = None
                self._join(question, request)

    def _check_turn(self, question: Question) -> None:
        """Check that of those on one loop that wait for room, the first to ask is the first to enter."""
        waiting = self._runtime.batcher._line.get(question.loop)
        entries, cache = entries_of(self._runtime.batcher), self._runtime.cache
        if not waiting or all(each in entries or each in cache for each in question.requests):
            return  # nobody waits, or it takes no room
        oldest = min(self._question(waiter).number for waiter in waiting)
        if oldest < question.number:
            self._violated(f"{question} entered the queue before {oldest} on its loop")

    def _join(self, question: Question, request: Request) -> None:
        self._find_swept(request)
        life = self._lives.get(request)
        if life is None:
            life = self._lives[request] = _Life({})
            self._entered += request.weight
        else:
            self._deduplicated += request.weight
        life.questions[question] = None

    def _find_swept(self, request: Request) -> None:
        """Forget a request whose last waiters went with their loop, once the batcher came by it, or if it
        is withdrawing it at this moment."""
        life = self._lives.get(request)
        if life is None or life.is_wanted or request in entries_of(self._runtime.batcher):
            return
        if life.sent:
            self._withdrawing.add(request)
        else:
            self._dropped += request.weight
        del self._lives[request]

    def answered(self, question: Question, results: list[Result]) -> None:
        """Check what the batcher returned."""
        self._end(question)
        if question.error is not None:
            self._violated(f"{question} was answered, but had to end in {question.error!r}")
        if question.missing or not question.is_registered:
            self._violated(f"{question} was answered before {list(question.missing)} were")
        if question.stacked:
            [whole] = results
            if not isinstance(whole, Tensor) or not owns_storage(whole):
                self._violated(f"{question} got no stack in storage of its own")
            results = list(whole.unbind())
        elif not all(map(owns_storage, results)):
            self._violated(f"{question} got a view of something")
        if len(results) != len(question.requests):
            self._violated(f"{question} got {len(results)} results")
        for request, result in zip(question.requests, results, strict=True):
            if isinstance(result, Draw) and not is_random(request):
                known = self._decided.setdefault(request, result)
                if known.token_id != result.token_id:
                    self._violated(f"{request} was answered with {known} before: {result}")

    def left(self, question: Question, error: BaseException) -> None:
        """Check what the batcher raised, or the caller's own leaving."""
        if question.lost:
            return  # collected with its loop, whenever that happens
        self._end(question)
        if isinstance(error, TimedOut):
            if question.loop.time() < question.deadline:
                self._violated(f"{question} timed out before {question.deadline}")
        elif isinstance(error, GenrtError):
            self._check_error(question, error)
            return
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                self._violated(f"{question} was cancelled, but not by its caller")
        if question.is_waiting and not question.has_left:
            self._violated(f"{question} has left, and the batcher was not told")

    def leaving(self, waiter: Waiter) -> None:
        """Note that the batcher is about to take off a waiter that leaves by itself."""
        question = self._question(waiter)
        if question.is_waiting and not question.lost:
            question.has_left = True
            self._cancelled += 1
            self._drop(question)

    def _check_error(self, question: Question, error: GenrtError) -> None:
        expected = question.error
        if expected is None:
            self._violated(f"{question} ended in {error!r}, and nothing explains that")
        if type(error) is not type(expected) or str(error) != str(expected):
            self._violated(f"{question} ended in {error!r}, not in {expected!r}")
        if error is expected or id(error) in self._errors:
            self._violated(f"{question} got an exception object that is not its own")
        self._errors[id(error)] = error

    def _end(self, question: Question) -> None:
        if question.ended:
            self._violated(f"{question} ended twice")
        question.ended = True

    def loop_closed(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note that nobody hears what is delivered to this loop any more."""
        for question in self.questions:
            is_dropped = question.is_waiting and not question.has_left
            question.lost |= question.loop is loop and (not question.ended or is_dropped)

    # -- the engine's side --------------------------------------------------------------------

    def turning(self) -> None:
        """Note what is ready, and since when, before a turn."""
        self._turns += 1
        self._ready_since = {entry: self._since(entry) for entry in ready_of(self._runtime.batcher)}
        self._to_withdraw = {
            request: life
            for request, life in self._lives.items()
            if life.sent and not life.questions
        }
        self._lost = {question for question in self.questions if question.lost}
        self._steps = self._runtime.engine.calls["step"]

    def _since(self, entry: Entry) -> int:
        """Return since which turn this one is ready; what is sent again goes first."""
        life = self._lives.get(entry.request)
        is_retried = life is not None and life.is_retried
        return 0 if is_retried else self._ready_since.get(entry, self._turns)

    def turned(self) -> None:
        """Check after a turn that what had lost its last waiter before it has been withdrawn."""
        if self._ending:
            self._violated(
                f"{list(self._ending)} came out of the engine, and the batcher did nothing"
            )
        for request, life in self._to_withdraw.items():
            if self._lives.get(request) is life and not life.questions:
                self._violated(f"{request} is not wanted any more, but was not withdrawn")
        is_in_flight = any(life.sent for life in self._lives.values())
        if is_in_flight and self._runtime.engine.calls["step"] == self._steps:
            self._violated("something is in flight, but the turn made no step")
        batcher = self._runtime.batcher
        kept = [waiter for entry in entries_of(batcher).values() for waiter in entry.waiters]
        for waiter in (*kept, *batcher._in_line()):
            if (question := self._question(waiter)) in self._lost:
                self._violated(
                    f"{question} still waits, though its loop was closed before the turn"
                )

    def taken(self, flush: Sequence[Request]) -> None:
        """Check a flush that the batcher is about to send."""
        self._flushes += 1
        self._flush = [*flush]
        self._sent += _weight(flush)
        most = self._runtime.batcher._max_batch_size
        if len(flush) > 1 and _weight(flush) > most:
            self._violated(f"{flush} weigh {_weight(flush)}, of {most} in a flush")
        for request in flush:
            life = self._lives.get(request)
            if life is None or not life.is_wanted:
                self._violated(f"{request} was sent, and nobody wants it")
            if life.sent:
                self._violated(f"{request} was sent twice")
            life.sent = True
        sent = set(flush)
        newest = max(
            (since for entry, since in self._ready_since.items() if entry.request in sent),
            default=0,
        )
        waiting = ready_of(
            self._runtime.batcher
        )  # one that was withdrawn and asked anew is another entry
        for entry, since in self._ready_since.items():
            life = self._lives.get(entry.request)
            if entry in waiting and life is not None and life.is_wanted and since < newest:
                self._violated(f"{entry.request} was passed over by younger ones")

    def submitted(self, flush: Sequence[Request]) -> None:
        """Check a flush that arrives at the engine."""
        if flush != self._flush:
            self._violated(f"{self._flush} was taken, but {flush} was sent")

    def finished(self, ends: Sequence[Finished]) -> None:
        """Note what came out of a step."""
        if self._closed is not None:
            return
        for end in ends:
            life = self._lives.get(end.request)
            if life is None or not life.sent:
                if end.request not in self._runtime.engine.echoed:
                    self._violated(f"{end.request} is not in progress, but was answered")
                continue
            if end.error is not None and not self._runtime.engine.explains(end.request, end.error):
                self._violated(f"{end.request} ended in {end.error!r}, and nothing explains that")
            self._ending[end.request] = end.error

    def submit_failed(self, flush: Sequence[Request], error: Exception) -> None:
        """Note that the flush was not taken."""
        self._check_raised(error)
        if self._closed is None:
            self._ending |= dict.fromkeys(flush, failure(error))

    def step_failed(self, error: Exception) -> None:
        """Note that nothing is in progress any more."""
        self._check_raised(error)
        if self._closed is None:
            failed = [request for request, life in self._lives.items() if life.sent]
            self._ending |= dict.fromkeys(failed, failure(error))

    def _check_raised(self, error: Exception) -> None:
        if not self._runtime.engine.raised(error):
            self._violated(f"{error!r} came from no engine")

    def died(self, error: BaseException) -> None:
        """Check what a turn raised."""
        if not self._runtime.engine.raised(error):
            self._violated(f"a turn ended in {error!r}, which no engine raised")

    def resumed(self) -> None:
        """Note that another engine has taken the place of one that died, and gets what that one had."""
        self._ending.clear()
        self._send_again([request for request, life in self._lives.items() if life.sent])

    def _send_again(self, requests: Sequence[Request]) -> None:
        for request in requests:
            life = self._lives[request]
            is_swept = not life.is_wanted and request not in entries_of(self._runtime.batcher)
            if is_swept or not life.questions:
                del self._lives[request]
                continue
            life.sent, life.is_retried = False, True
            self._sent -= request.weight
            self._retried += request.weight

    def settling(self) -> None:
        """Note that the batcher is about to end what came out of the engine; what ran out of memory with
        others in flight is queued again before that."""
        short = [each for each, error in self._ending.items() if isinstance(error, OutOfMemory)]
        if short and sum(life.sent for life in self._lives.values()) > 1:
            for request in short:
                del self._ending[request]
            self._send_again(short)

    def settled(self) -> None:
        """Note that the rows are cached: what came out of the engine ends."""
        ending, self._ending = self._ending, {}
        for request, error in ending.items():
            self._finish(request, error)

    def withdrawn(self, requests: Sequence[Request]) -> None:
        """Check what the batcher is about to have the engine forget."""
        for request in requests:
            if request in self._withdrawing:
                self._withdrawing.remove(request)
                continue
            life = self._lives.get(request)
            if life is None or not life.sent or life.is_wanted:
                self._violated(f"{request} was withdrawn, but it is wanted")
            del self._lives[request]

    def cancelling(self, requests: Sequence[Request]) -> None:
        """Check that the engine is told to forget nothing that somebody waits for, unless it failed."""
        for request in requests:
            life = self._lives.get(request)
            if life is not None and life.sent and life.is_wanted and request not in self._ending:
                self._violated(f"{request} was cancelled, but it is wanted")

    def closed(self, reason: GenrtError) -> None:
        """Note that the batcher is closed: every question ends in this, the later ones too."""
        self._closed = self._closed or reason
        for question in self.questions:
            if question.is_waiting and not question.has_left:
                question.error = self._closed
        self._dropped += _weight([each for each, life in self._lives.items() if not life.sent])
        self._lives.clear()
        self._ending.clear()

    def reopened(self) -> None:
        """Note that the batcher takes questions again, for another engine."""
        self._closed = None

    def _finish(self, request: Request, error: GenrtError | None) -> None:
        life = self._lives.pop(request)
        self._failed += request.weight * (error is not None)
        self._answered += request.weight * (error is None)
        for question in life.questions:
            if question.error is not None:
                continue
            if error is None:
                question.missing.pop(request)
            else:
                question.error = error
                self._drop(question)

    def _drop(self, question: Question) -> None:
        for request in question.missing:
            life = self._lives.get(request)
            if life is None or question not in life.questions:
                continue
            del life.questions[question]
            if not life.questions and not life.sent:
                self._dropped += request.weight
                del self._lives[request]

    # -- at the end ---------------------------------------------------------------------------

    def check_counters(self) -> None:
        """Check that the batcher counted what happened; of waiters of closed loops, those it came by."""
        for request in list(self._lives):
            self._find_swept(request)
        s = self._runtime.batcher.statistics()
        lost = sum(question.lost for question in self.questions)
        expected = {
            "questions": self._asked,
            "cached": self._cached,
            "deduplicated": self._deduplicated,
            "flushes": self._flushes,
            "retried": self._retried,
            "answered": self._answered,
            "failed": self._failed,
        }
        counted = {name: getattr(s, name) for name in expected}
        if counted != expected:
            self._violated(f"the batcher counted {counted}, not {expected}")
        if not self._cancelled <= s.cancelled <= self._cancelled + lost:
            self._violated(f"{s.cancelled} cancelled, not {self._cancelled} (and {lost} lost)")
        if s.questions != s.cached + s.deduplicated + self._entered:
            self._violated(f"{self._entered} requests entered the queue, but {s}")
        if self._entered != self._sent + self._dropped + s.queued:
            self._violated(
                f"{self._entered} entered, {self._sent} were sent, {self._dropped} dropped: {s}"
            )


def owns_storage(result: Result) -> bool:
    """Return whether every tensor in this result has storage that holds nothing else."""
    parts = result if isinstance(result, TopLogprobs) else (result,)
    return all(
        part.untyped_storage().nbytes() == part.nbytes for part in parts if isinstance(part, Tensor)
    )


def is_random(request: Request) -> bool:
    """Return whether the answer is a draw that nothing decides."""
    match request:
        case ReadRequest(wanted=DrawToken(seed=None, temperature=temperature)):
            return temperature > 0.0
    return False
