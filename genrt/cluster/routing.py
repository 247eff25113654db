"""Chooses the replica of each question.

Rules:
    A wrong route costs recomputation, never a wrong answer.
    A population goes to the replica of its sequences, and other questions by a hash of their first block,
    unless that replica has more work than the least loaded one by a margin.
    All others go to the least loaded replica, of equally loaded ones to a random one. For programs and
    new populations, kept sequences count as load.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from genrt.questions.arguments import TOKEN_BYTES
from genrt.questions.completions import CompletionRequest, SampleRequest
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.runtime.programs import ProgramRequest

BLOCK_TOKENS = 16
"""The tokens of a block of vLLM's KV cache."""

MARGIN = 64.0
"""How much more work a question's replica may have than the least loaded one."""

POPULATION_MARGIN = 8.0
"""The same for a population that goes on, in steps of its own, or of ``MARGIN`` if that is more."""

PROGRAM_WORK = 1024.0
"""The work of a program, which is unknown: about 32 particles of 32 tokens."""

MOST_BATCHES = 2**14


def work_of(request: Request) -> float:
    """Return roughly the work of a question, in tokens that are drawn one after another."""
    if isinstance(request, LogprobsRequest | ReadRequest):
        return 1.0
    if isinstance(request, PopulationDraw):
        return float(len(request))
    if isinstance(request, SampleRequest):
        return float(request.max_tokens)
    if isinstance(request, CompletionRequest):
        return float(request.decoding.max_tokens)
    if isinstance(request, ScoreRequest):
        return max(1.0, len(request) / 64)
    return PROGRAM_WORK if isinstance(request, ProgramRequest) else 1.0


class Router:
    """The work of ``count`` replicas, and the homes of populations; the seed breaks ties."""

    def __init__(self, count: int, *, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._count = count
        self._work = [0.0] * count
        self._kept = [0] * count
        self._homes: dict[int, tuple[int, int]] = {}  # a population's replica, and its size
        self._batches: dict[int, int] = {}  # of the first context of ``batch_draw``, which may grow

    def route(self, request: Request, usable: Sequence[int], extends: Sequence[int] = ()) -> int:
        """Return one of the usable replicas, and add the question to its work. ``extends`` has the
        numbers of the populations that a population extends, the largest first."""
        work, margin = work_of(request), MARGIN
        is_new = isinstance(request, ProgramRequest)
        context, home = None, next((h for n in extends if (h := self._home(n)) in usable), None)
        if home is not None:
            margin = POPULATION_MARGIN * max(work, MARGIN)
        elif isinstance(request, PopulationDraw):
            context = request.contexts.packed(0)
            home = self._batches.get(hash((context[:-TOKEN_BYTES], request.adapter)))
            is_new, home = home is None, home if home in usable else None
        elif not is_new and (block := _first_block(request)) is not None:
            place = hash((block, request.adapter))
            home = place % self._count
            home = home if home in usable else usable[place % len(usable)]
        loads = {each: self._work[each] + is_new * self._kept[each] for each in usable}
        least = min(loads.values())
        if home is None or loads[home] > least + margin:
            home = self._random.choice([each for each, load in loads.items() if load == least])
        if context is not None:
            if len(self._batches) >= MOST_BATCHES:
                self._batches.clear()
            self._batches[hash((context, request.adapter))] = home
        self._work[home] += work
        return home

    def done(self, replica: int, request: Request) -> None:
        """Take a question's work off its replica."""
        self._work[replica] = max(0.0, self._work[replica] - work_of(request))

    def stays(self, population: int, replica: int, count: int) -> None:
        """Record the replica of a population, by number."""
        self.left([population])
        self._homes[population] = replica, count
        self._kept[replica] += count

    def left(self, populations: Sequence[int]) -> None:
        """Forget populations."""
        for each in populations:
            if (known := self._homes.pop(each, None)) is not None:
                self._kept[known[0]] -= known[1]

    def lost(self, replica: int) -> None:
        """Forget the work and the populations of a replica."""
        self._homes = {n: each for n, each in self._homes.items() if each[0] != replica}
        self._batches = {n: each for n, each in self._batches.items() if each != replica}
        self._work[replica], self._kept[replica] = 0.0, 0

    def _home(self, population: int) -> int:
        return self._homes.get(population, (-1, 0))[0]


def _first_block(request: Request) -> bytes | None:
    """Return the first block of a question's tokens, if it has a whole one."""
    row = request.row if isinstance(request, ReadRequest) else request
    if isinstance(row, LogprobsRequest | ScoreRequest):
        block = row.packed[: BLOCK_TOKENS * TOKEN_BYTES]
    else:
        block = LogprobsRequest(row.token_ids[:BLOCK_TOKENS]).packed
    return block if len(block) == BLOCK_TOKENS * TOKEN_BYTES else None
