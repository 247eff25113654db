"""Which replica is asked: where the sequence is, else where few are waited for. Data in, decisions out.

Rules:
    A wrong route costs recomputation, never a wrong answer.
    A question goes where the context that it goes on from was asked about, a score where its context was;
    else where contexts that begin alike were; a population, where its sequences are.
    That is left once the replica has more work than the least loaded one by a margin. It is wider for a
    population, whose sequences would all be computed again.
    New populations are spread by how many sequences of others a replica keeps, beside its work.
    A program goes to the least loaded replica, wherever its rows may be: it asks for thousands.
    Of equally loaded replicas one is taken at random, by a generator of the router's own.
    A question costs the same however many replicas there are: ``Loads`` knows the least loaded ones.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence, Set

from genrt.cluster.loads import Loads
from genrt.cluster.programs import ProgramRequest
from genrt.questions.completions import CompletionRequest, SampleRequest
from genrt.questions.contexts import TOKEN_BYTES
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest

__all__ = ["Router", "work_of"]

FAMILY_TOKENS = 16
"""How many tokens two contexts share that are one family: a block of vLLM's KV cache."""

MOST_KNOWN = 2**16
"""How many contexts, and families, are remembered: the last that were asked about."""

MARGIN = 64.0
"""By how much work a replica may exceed the least loaded one and still be asked for what it has."""

POPULATION_MARGIN = 8.0
"""The same for a population that goes on, in steps of its own: sixteen times the work of one at least."""

PROGRAM_WORK = 1024.0
"""The work of a program, of which only it knows more: about 32 particles of 32 tokens."""

PREFILL = 1 / 64
"""The work of a token of a context that is not resident; that of a drawn token is 1."""


def work_of(request: Request) -> float:
    """Return about how much work a question is, in tokens drawn one after another."""
    if isinstance(request, PopulationDraw):
        return float(len(request))
    if isinstance(request, SampleRequest):
        return float(request.max_tokens)
    if isinstance(request, CompletionRequest):
        return float(request.decoding.max_tokens)
    if isinstance(request, ScoreRequest):
        return max(1.0, PREFILL * len(request))
    return PROGRAM_WORK if isinstance(request, ProgramRequest) else 1.0


class Router:
    """Remembers what each of ``count`` replicas was asked about.

    Args:
        seed: of the generator that breaks ties; with ``None`` one of the system's.
    """

    def __init__(self, count: int, *, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._usable: Set[int] = frozenset(range(count))
        self._work = Loads(count)
        self._crowd = Loads(
            count
        )  # the work, and the sequences of populations that a replica keeps
        self._contexts: OrderedDict[int, int] = OrderedDict()
        self._families: OrderedDict[int, int] = OrderedDict()
        self._populations: dict[int, tuple[int, int]] = {}

    def use(self, usable: Set[int]) -> None:
        """Ask only these replicas from now on, at least one."""
        if usable != self._usable:
            self._usable = usable
            self._work.compare(usable)
            self._crowd.compare(usable)

    def route(self, request: Request, *, goes_on: Sequence[int] = ()) -> tuple[int, float]:
        """Return which of the usable replicas is asked, and how much work that is, which is the replica's
        until ``done``.

        Args:
            goes_on: the numbers of the populations that one goes on from.
        """
        home, work = self._chosen(request, goes_on)
        self._add(home, work, 0)
        return home, work

    def done(self, replica: int, work: float) -> None:
        """Take a question's work off a replica: it is answered, withdrawn, or was lost."""
        self._add(replica, -min(work, self._work[replica]), 0)

    def stays(self, population: int, replica: int, count: int) -> None:
        """Note where the sequences of a population are, by the number of its question."""
        self.left([population])
        self._populations[population] = replica, count
        self._add(replica, 0.0, count)

    def left(self, populations: Sequence[int]) -> None:
        """Forget populations that nobody goes on from."""
        for each in populations:
            if (known := self._populations.pop(each, None)) is not None:
                self._add(known[0], 0.0, -known[1])

    def lost(self, replica: int) -> None:
        """Forget what a replica kept: it is another one now."""
        for each in [n for n, (place, _) in self._populations.items() if place == replica]:
            del self._populations[each]
        self._work.put(replica, 0.0)
        self._crowd.put(replica, 0.0)

    def work(self, replica: int) -> float:
        """Return how much a replica has to do."""
        return self._work[replica]

    def _chosen(self, request: Request, goes_on: Sequence[int]) -> tuple[int, float]:
        work = work_of(request)
        if len(self._usable) == 1:  # whoever comes later computes anew what it is asked about
            return next(iter(self._usable)), work
        if isinstance(request, ProgramRequest):
            return self._crowd.any_least(self._random), work
        known, own, family, length = self._places(request)
        home = next((place for place in map(self._home, goes_on) if place in self._usable), None)
        margin = MARGIN
        if home is not None:
            margin = POPULATION_MARGIN * max(work, MARGIN)
        elif (place := self._contexts.get(known, -1)) in self._usable:
            # Populations that begin alike are spread; a batch that has grown stays with its contexts.
            begins = isinstance(request, PopulationDraw) and known == own
            home = None if begins and self._is_full(place, request.weight) else place
        if home is None or self._is_beyond(home, margin):
            is_new = isinstance(request, PopulationDraw)
            work += PREFILL * length
            home = self._families.get(family, -1)
            if home not in self._usable or is_new or self._is_beyond(home, MARGIN):
                home = (self._crowd if is_new else self._work).any_least(self._random)
        _remember(self._contexts, own, home)
        _remember(self._families, family, home)
        return home, work

    def _add(self, replica: int, work: float, kept: int) -> None:
        if work:
            self._work.put(replica, self._work[replica] + work)
        self._crowd.put(replica, self._crowd[replica] + work + kept)

    def _home(self, population: int) -> int:
        return self._populations.get(population, (-1, 0))[0]

    def _is_beyond(self, home: int, margin: float) -> bool:
        return self._work[home] > self._work.least() + margin

    def _is_full(self, home: int, count: int) -> bool:
        """Return whether others have room for a population of so many, which nobody keeps yet."""
        return self._crowd[home] > self._crowd.least() + count

    def _places(self, request: Request) -> tuple[int, int, int, int]:
        """Return keys of the context that a request goes on from, of its own and of its family, and how
        many tokens it has. Keys that are equal by chance cost a wrong route."""
        adapter = request.adapter
        if isinstance(request, PopulationDraw):
            packed, length = request.contexts.packed(0), request.nbytes
        else:
            row = request.row if isinstance(request, ReadRequest) else request
            if not isinstance(row, LogprobsRequest):
                row = LogprobsRequest(row.token_ids, row.adapter)
            packed, length = row.packed, row.nbytes
        own = hash((packed, adapter))
        before = request.start * TOKEN_BYTES if isinstance(request, ScoreRequest) else -TOKEN_BYTES
        known = own if own in self._contexts else hash((packed[:before], adapter))
        family = hash((packed[: FAMILY_TOKENS * TOKEN_BYTES], adapter))
        return known, own, family, length // TOKEN_BYTES


def _remember(known: OrderedDict[int, int], key: int, replica: int) -> None:
    known[key] = replica
    known.move_to_end(key)
    if len(known) > MOST_KNOWN:
        known.popitem(last=False)
