"""Serves logprobs requests as open vLLM requests: tracks resident sequences, extends and forks them.

A request whose context is a resident sequence plus one token *extends* it. Further requests *fork* it:
they take over the vLLM requests of sequences without further requests, as after resampling. Any
other request opens a new vLLM request, which shares the blocks of the nearest resident sequence. A
sequence that this flush extends or forks keeps its vLLM request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from genrt.engines.residency import Residents
from genrt.engines.vllm.reassignment import Fork
from genrt.engines.vllm.scheduler import OpenScheduler
from genrt.engines.vllm.steps import DecodeSteps
from genrt.questions.arguments import Adapter
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest


class OpenRequests:
    """The open requests of an engine with its scheduler in this process. ``steps`` computes them;
    ``residents`` are the sequences that can be extended or forked; ``flush`` numbers the last flush."""

    def __init__(self, scheduler: OpenScheduler, steps: DecodeSteps) -> None:
        self.steps = steps
        self._scheduler = scheduler
        self.residents = Residents()
        self.flush = 0
        self._asked_in: dict[str, int] = {}  # the last flush of each request
        self._order: list[str] = []  # of the last population that was extended
        self._guesses: list[str] = []  # the vLLM requests of the last flush by content
        self._extended = 0
        self._evicted = 0

    def match(self, requests: Sequence[LogprobsRequest | ScoreRequest]) -> list[str | None]:
        """Extend or fork resident sequences that lack only the last token of these contexts. Return the
        vLLM request of each; ``None`` if it needs a new one."""
        self.flush += 1
        matched: list[str | None] = []
        forks: list[tuple[int, str, LogprobsRequest]] = []
        extended: dict[str, int] = {}
        parked, residents = self._scheduler.parked, self.residents
        # Sequences that are extended step after step mostly come in the same order.
        for request, guess in zip_longest(requests, self._guesses[: len(requests)]):
            if isinstance(request, ScoreRequest):
                matched.append(None)
                continue
            adapter, context = request.adapter, request.packed
            is_free = guess in parked and guess not in extended
            if is_free and residents.is_parent(guess, adapter, context):
                parent: str | None = guess
            else:
                parent = residents.parent(adapter, context)
            if parent in parked and parent not in extended:
                extended[parent] = request.last_token
                matched.append(parent)
                continue
            if parent is not None:
                forks.append((len(matched), parent, request))
            matched.append(None)
        self._wake([*extended], [*extended.values()])
        self._extended += len(extended)
        if forks:
            self._fork(forks, matched)
        self._scheduler.admit()
        return matched

    def _wake(self, request_ids: list[str], token_ids: list[int]) -> None:
        self.steps.extend(self._scheduler.wake(request_ids, token_ids))

    def _fork(
        self, forks: Sequence[tuple[int, str, LogprobsRequest]], matched: list[str | None]
    ) -> None:
        """Reassign unused vLLM requests to forks of these parents, at their places in ``matched``."""
        parked, parents = self._scheduler.parked, {parent for _, parent, _ in forks}
        # The requests that no later flush has used, this one included, by the flush of a parent.
        unused: dict[int, list[str]] = {self._asked_in.get(parent, 0): [] for parent in parents}
        for request_id, flush in self._asked_in.items():
            if flush in unused and request_id in parked and request_id not in parents:
                unused[flush].append(request_id)
        for place, parent, request in forks:
            free = unused[self._asked_in.get(parent, 0)]
            while free and matched[place] is None:
                request_id = free.pop()
                fork = self._scheduler.forks([request_id], [parent], len(request) - 1)
                if self._scheduler.can_reassign(fork):
                    self._reassign(fork)
                    self._wake([request_id], [request.last_token])
                    matched[place] = request_id

    def _reassign(self, forks: Sequence[Fork]) -> None:
        """Make parked requests continue as forks. There must be room for them."""
        for fork in forks:
            self.residents.remove(fork.request.request_id)
        self.steps.reassign(self._scheduler.reassign(forks))

    def continue_requests(
        self,
        parents: Sequence[str],
        token_ids: list[int],
        free: Iterable[str],
        begin: Callable[[Sequence[int]], list[str]],
        further: Sequence[list[int]] = (),
    ) -> list[str] | None:
        """Extend each of these parked sequences by one token, and by its ``further`` ones, and fork the
        sequences that repeat.

        A fork takes a parked request of ``free``, or a new one that ``begin`` makes for its place. Return
        the vLLM request of each sequence; ``None`` if there are too few blocks for the forks. After
        ``None``, or an error of ``begin``, no state has changed.
        """
        scheduler, request_ids = self._scheduler, [*parents]
        forked = repeated(parents)
        forks = scheduler.forks([*free], [parents[place] for place in forked]) if forked else []
        if forks and not scheduler.can_reassign(forks):
            return None
        others = forked[len(forks) :]
        added = dict(zip(others, begin(others) if others else (), strict=True))
        for place, request_id in added.items():
            donor = parents[place]
            scheduler.share(request_id, donor, scheduler.requests[donor].num_computed_tokens)
        if forks:
            self._reassign(forks)
        for place, fork in zip(forked, forks, strict=False):
            request_ids[place] = fork.request.request_id
        if added:  # new requests run without being woken
            woken = [place for place in range(len(parents)) if place not in added]
            self._wake_in_order([request_ids[n] for n in woken], [token_ids[n] for n in woken])
        else:
            self._wake_in_order(request_ids, token_ids)
        if further:
            longer = zip(request_ids, further, strict=True)
            more = {each: rest for n, (each, rest) in enumerate(longer) if rest and n not in added}
            self.steps.extend_by_several(scheduler.lengthen(more))
        scheduler.admit()
        self._extended += len(parents) - len(forked)
        for place, request_id in added.items():
            request_ids[place] = request_id
        self.flush += 1
        self._asked_in.update(dict.fromkeys(request_ids, self.flush))
        return request_ids

    def spread(
        self, several: Sequence[tuple[Sequence[str], Sequence[str]]]
    ) -> list[list[str]] | None:
        """Make parked requests continue as forks of requests of the step under way, with all tokens.

        Each pair has parents and the parked requests that may become their forks; pairs may share these.
        Return the forks of each pair by parent; ``None``, without a change, if that is impossible.
        """
        scheduler = self._scheduler
        taken, found = set[str](), list[list[Fork]]()
        for parents, free in several:
            each = scheduler.forks([n for n in free if n not in taken], parents)
            if len(each) < len(parents):
                return None
            taken.update(fork.request.request_id for fork in each)
            found.append(each)
        forks = [fork for each in found for fork in each]
        # Each fork and each running request may need another block for the next token.
        if not scheduler.can_reassign(forks, beside=len(forks) + len(scheduler.running)):
            return None
        self._reassign(forks)
        self._asked_in.update((fork.request.request_id, self.flush) for fork in forks)
        return [[fork.request.request_id for fork in each] for each in found]

    def _wake_in_order(self, request_ids: list[str], token_ids: list[int]) -> None:
        """Wake these in last time's order if they are the same: a prepared step has that order."""
        if request_ids != self._order:
            tokens = dict(zip(request_ids, token_ids, strict=True))
            if len(tokens) == len(self._order) and tokens.keys() == set(self._order):
                request_ids = self._order
                token_ids = [tokens[each] for each in request_ids]
            self._order = [*request_ids]
        self._wake([*request_ids], token_ids)

    def share(self, request_id: str, request: LogprobsRequest | ScoreRequest) -> None:
        """Let a request that was just added start from the nearest resident sequence."""
        if isinstance(request, ScoreRequest):
            request = request.computed
        nearest: tuple[str, int] | None
        if (parent := self.residents.parent(request.adapter, request.packed)) is not None:
            nearest = parent, len(request) - 1
        else:
            nearest = self.residents.nearest(request.adapter, request.packed)
        if nearest is not None:
            self._scheduler.share(request_id, *nearest)

    def remember(self, request_ids: list[str]) -> None:
        """Record the vLLM requests that serve the last ``match``."""
        self._asked_in.update(dict.fromkeys(request_ids, self.flush))
        self._guesses = request_ids

    def keep(self, answered: Iterable[tuple[str, LogprobsRequest]]) -> None:
        """After a step, record each answered vLLM request as resident with its context, and forget
        the evicted sequences."""
        for request_id in self._scheduler.take_evicted():
            self._forget(request_id)
            self._evicted += 1
        for request_id, request in answered:
            self.residents.put(request_id, request.adapter, request.packed)

    def left(self, requests: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return the pairs of request and flush that are parked and that no later flush has used."""
        parked, asked_in = self._scheduler.parked, self._asked_in
        return [(n, flush) for n, flush in requests if n in parked and asked_in.get(n) == flush]

    def resident(self, adapter: Adapter | None, context: bytes) -> tuple[str, int] | None:
        """Return the parked request with this context, and its last flush."""
        request_id = self.residents.of_context(adapter, context)
        # A request under way may be growing beyond the context that it is known by.
        if request_id is None or request_id not in self._scheduler.parked:
            return None
        return request_id, self._asked_in[request_id]

    @property
    def most(self) -> int:
        """The most sequences of a step."""
        return int(self._scheduler.max_num_running_reqs)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that vLLM no longer knows."""
        gone = set(request_ids)
        for request_id in gone:
            self._forget(request_id)
        self.steps.forget(gone)

    def _forget(self, request_id: str) -> None:
        self.residents.remove(request_id)
        self._asked_in.pop(request_id, None)

    def counts(self) -> dict[str, int]:
        """Return the counters of resident sequences for ``EngineStatistics``."""
        return {
            "computed_tokens": self._scheduler.computed_tokens,
            "extended": self._extended,
            "forked": self._scheduler.forked + self._scheduler.reassigned,
            "evicted": self._evicted,
            "prepared": self.steps.prepared,
            "speculated": self.steps.speculated,
            "resident": len(self.residents),
        }

    def start_counting(self) -> None:
        """Set the counters to 0."""
        self._scheduler.computed_tokens = self._scheduler.forked = self._scheduler.reassigned = 0
        self.steps.prepared = self.steps.speculated = 0
        self._extended = self._evicted = 0


def repeated(request_ids: Sequence[str]) -> list[int]:
    """Return the places of repeated ids, without the first of each."""
    if len(set(request_ids)) == len(request_ids):
        return []
    seen: set[str] = set()
    return [n for n, each in enumerate(request_ids) if each in seen or seen.add(each)]  # type: ignore[func-returns-value]
