"""The replicas of a runtime, and which questions each has. No clock, no process: data in, decisions out.

``ReplicaEngine`` tells a ``Fleet`` what happens, and does what it says: whom to send which questions,
what has ended, whom to kill, start, probe and renew. A simulation does the same without processes.

Rules:
    A question is with one replica, or waits here; it ends once, whatever becomes of replicas.
    What comes from a life of a replica that is over, or to a question that it does not have, is ignored.
    A question of a replica that died, or whose engine failed at it, goes to another one, at most
    ``MOST_MOVES`` times; then it ends in an error that says so.
    Only replicas with the present settings are asked: healthy ones, suspect ones if there are no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from genrt.cluster.health import Health, ReplicaLimits, ReplicaState
from genrt.cluster.routing import Router
from genrt.engines.protocol import Finished
from genrt.errors import EngineDied, EngineFailed, GenrtError, NotFinite, OutOfMemory
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request

__all__ = ["MOST_MOVES", "Fleet", "Replica"]

MOST_MOVES = 2
"""How often a question is sent to another replica at most."""


@dataclass(slots=True)
class Replica:
    """One replica, in the life that it has now.

    Attributes:
        life: which of its lives this is; each process is one.
        work: what it was asked and has not answered, and how much work each of these is.
        is_probed: whether it has a probe to answer.
        renewing: which settings it is being given.
        reason: why it died last.
    """

    number: int
    health: Health
    life: int = 0
    work: dict[Request, float] = field(default_factory=dict)
    is_probed: bool = False
    renewing: int | None = None
    reason: str = ""


class Fleet:
    """The replicas of one runtime.

    Args:
        count: how many.
        limits: of their health.
        router: says who is asked.
        number_of: the number by which replicas know the question of a population, for ``Router``.
    """

    def __init__(
        self,
        count: int,
        limits: ReplicaLimits,
        router: Router,
        *,
        now: float = 0.0,
        number_of: Callable[[object], int] = id,
    ) -> None:
        health = [Health(limits, now, self._changed) for _ in range(count)]
        self.replicas = [Replica(number, each) for number, each in enumerate(health)]
        self._usable: frozenset[int] | None = None  # whom to ask; None is to be found out
        self._is_changed = True  # since ``has_changed`` was asked
        self.settings = 0
        self.moved = 0
        self._router = router
        self._number_of = number_of
        self._moves: dict[Request, int] = {}
        self._waiting: dict[Request, None] = {}
        self._at: dict[Request, Replica] = {}

    def __len__(self) -> int:
        """Return how many questions have not ended."""
        return len(self._waiting) + len(self._at)

    def __contains__(self, request: Request) -> bool:
        return request in self._at or request in self._waiting

    @property
    def serving(self) -> list[Replica]:
        """The replicas that have the present settings."""
        return [each for each in self.replicas if each.health.serves]

    @property
    def is_lost(self) -> bool:
        """True if no replica is left, and none comes back."""
        return all(each.health.state is ReplicaState.RETIRED for each in self.replicas)

    # -- questions ----------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        """Take questions, none of which is here; ``place`` says who gets them."""
        self._waiting.update(dict.fromkeys(requests))

    def place(self) -> dict[int, list[Request]]:
        """Return which of the questions that wait each replica is sent now."""
        sent: dict[int, list[Request]] = {}
        if not self._waiting or not self._has_usable():
            return sent
        waiting, self._waiting = self._waiting, {}
        for request in waiting:
            goes_on: list[int] = []
            if isinstance(request, PopulationDraw):
                goes_on = [self._number_of(each) for each in request.came_from]
            number, work = self._router.route(request, goes_on=goes_on)
            replica = self.replicas[number]
            replica.work[request] = work
            self._at[request] = replica
            if isinstance(request, PopulationDraw):
                self._router.stays(self._number_of(request.handle), number, len(request))
            sent.setdefault(number, []).append(request)
        return sent

    def ended(self, number: int, life: int, ends: Sequence[Finished]) -> list[Finished]:
        """Return which of the ends that a replica tells of are ends of questions."""
        replica = self.replicas[number]
        if life != replica.life or not replica.health.lives:
            return []
        mine = [end for end in ends if end.request in replica.work]
        failed = [end.error for end in mine if _is_the_engines(end.error)]
        if failed:  # once, however many questions a step had
            replica.reason = str(failed[0])
            replica.health.failed()
        elif any(end.error is None for end in mine):
            replica.health.succeeded()
        moves = bool(failed) and not self._is_alone(replica)
        finished: list[Finished] = []
        for end in mine:
            self._take_off(replica, end.request)
            moved = self._moves.get(end.request, 0)
            if moves and moved < MOST_MOVES and _is_the_engines(end.error):
                self._move(end.request)
                continue
            self._moves.pop(end.request, None)
            finished.append(end)
        return finished

    def cancel(self, requests: Iterable[Request]) -> dict[int, list[Request]]:
        """Forget questions; return what each replica has to forget."""
        told: dict[int, list[Request]] = {}
        for request in requests:
            self._moves.pop(request, None)
            self._waiting.pop(request, None)
            replica = self._at.get(request)
            if replica is not None:
                self._take_off(replica, request)
                told.setdefault(replica.number, []).append(request)
        return told

    def left(self, populations: Sequence[int]) -> None:
        """Forget populations that nobody goes on from."""
        self._router.left(populations)

    # -- replicas -----------------------------------------------------------------------------

    def opened(self, number: int, life: int, now: float) -> None:
        """Note that a replica is open; it is to be renewed."""
        if self.replicas[number].life == life:
            self.replicas[number].health.opened(now)

    def to_renew(self) -> list[Replica]:
        """Return the replicas that are to be given the present settings, each once."""
        found = [
            each
            for each in self.replicas
            if each.health.state is ReplicaState.STALE and each.renewing != self.settings
        ]
        for each in found:
            each.renewing = self.settings
        return found

    def renewed(self, number: int, life: int, settings: int, now: float) -> None:
        """Note that a replica has these settings."""
        replica = self.replicas[number]
        if replica.life == life:
            replica.health.renewed(settings, self.settings, now)

    def change(self, now: float, *, having: Sequence[int] = ()) -> None:
        """Have new settings, which no replica has but these. Questions wait until one does."""
        self.settings += 1
        self._is_changed = True
        for each in self.replicas:
            if each.number in having and each.health.serves:
                each.health.settings = self.settings
            else:
                each.health.outdated(now)

    def died(self, number: int, life: int, reason: str) -> list[Finished]:
        """Note that a replica died, or give it up; return the ends of questions that were moved too
        often."""
        replica = self.replicas[number]
        if life != replica.life:
            return []
        replica.health.died()
        replica.reason = reason or replica.reason
        lost, replica.work = replica.work, {}
        self._router.lost(number)
        finished: list[Finished] = []
        for request in lost:
            del self._at[request]
            if self._moves.get(request, 0) < MOST_MOVES:
                self._move(request)
                continue
            del self._moves[request]
            finished.append(Finished(request, error=_given_up(reason)))
        return finished

    def to_start(self, now: float) -> list[Replica]:
        """Return the dead replicas that are to be started again, each in a new life."""
        started = [each for each in self.replicas if each.health.restart(now)]
        for each in started:
            each.life += 1
            each.is_probed, each.renewing = False, None
        return started

    def tick(self, now: float) -> None:
        """Let time pass, in which some may have been at one thing for too long."""
        for each in self.replicas:
            lived = each.health.lives
            each.health.tick(now, busy=bool(each.work))
            if lived and not each.health.lives:
                each.reason = "it took too long"

    def has_changed(self) -> bool:
        """Return whether there may be somebody to kill, to start or to renew, since this was asked last:
        all of that follows from states and settings."""
        changed, self._is_changed = self._is_changed, False
        return changed

    def look_again(self) -> None:
        """Have ``has_changed`` say so once: who was dead may be started now."""
        self._is_changed = True

    def to_kill(self) -> list[Replica]:
        """Return the replicas that have been silent, failing, or at one thing for too long."""
        return [each for each in self.replicas if each.health.state is ReplicaState.DEAD]

    def to_probe(self) -> list[Replica]:
        """Return the replicas to be probed now; those that have not answered the last probe are a step
        nearer to their end."""
        # One that is being opened imports for seconds before it can answer: it has a bound of its own.
        probed = [each for each in self.replicas if each.health.is_open]
        for each in probed:
            if each.is_probed:
                each.health.probed()
                each.reason = "it answers nothing"
            each.is_probed = True
        return [each for each in probed if each.health.lives]

    def answered_probe(self, number: int, life: int) -> None:
        """Note that a replica has answered a probe."""
        replica = self.replicas[number]
        if replica.life == life:
            replica.is_probed = False
            replica.health.answered_probe()

    def worked(self, number: int, life: int, now: float) -> None:
        """Note that a replica's engine goes on."""
        if self.replicas[number].life == life:
            self.replicas[number].health.worked(now)

    def why_lost(self) -> EngineDied:
        """Return the error of a runtime without replicas."""
        reasons = dict.fromkeys(each.reason for each in self.replicas if each.reason)
        return EngineDied(
            f"all {len(self.replicas)} replicas died, and may not be started again: "
            f"{'; '.join(reasons) or 'no reason is known'}"
        )

    # -- how ----------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._usable, self._is_changed = None, True

    def _has_usable(self) -> bool:
        """Return whether anybody may be asked, and have the router know who."""
        if self._usable is None:
            healthy = [r.number for r in self.replicas if r.health.state is ReplicaState.HEALTHY]
            self._usable = frozenset(healthy or [each.number for each in self.serving])
            if self._usable:
                self._router.use(self._usable)
        return bool(self._usable)

    def _take_off(self, replica: Replica, request: Request) -> None:
        self._router.done(replica.number, replica.work.pop(request))
        del self._at[request]

    def _move(self, request: Request) -> None:
        self.moved += 1
        self._moves[request] = self._moves.get(request, 0) + 1
        self._waiting[request] = None

    def _is_alone(self, replica: Replica) -> bool:
        return all(each is replica or not each.health.serves for each in self.replicas)


def _is_the_engines(error: GenrtError | None) -> bool:
    """Tell whether an error is the engine's, and not of the question alone."""
    return isinstance(error, EngineFailed) and not isinstance(error, OutOfMemory | NotFinite)


def _given_up(reason: str) -> EngineFailed:
    return EngineFailed(
        f"{MOST_MOVES + 1} replicas died with this question in flight, which may be why: {reason}"
    )
