"""Tracks an engine's populations: the vLLM requests of their sequences, and how populations continue.

A sequence is found by its index in an earlier population request, so that no context is read for it, if
its vLLM request is unchanged since then: parked, and in no flush. Otherwise the rows are requested one
by one and the population is *settled*: its sequences are found by their contexts once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch

from genrt.engines.protocol import Finished, survived
from genrt.engines.vllm.lora import VLLMAdapters
from genrt.engines.vllm.runners import HiddenStates
from genrt.engines.vllm.sequences import OpenRequests, repeated
from genrt.questions.arguments import Adapter
from genrt.questions.draws import PopulationDraw, launch_draws
from genrt.questions.rows import LogprobsRequest, not_finite
from genrt.questions.scores import ScoreRequest
from genrt.questions.sequences import Contexts, SequenceHandle, token_counts
from genrt.tokens.rows import AsyncHostCopy, gather_rows, moved
from genrt.tokens.sampling import DrawGraphs

FEWEST_FORKS = 64
"""So many forks are always made for sequences before the next request, while the forward runs."""

FORKS_A_GIB = 16
"""How many forks a forward hides for each GiB of weights. A GPU reads a GiB in 0.3 ms or more; a fork
takes 10 to 30 µs of Python."""


RowOrScore: TypeAlias = LogprobsRequest | ScoreRequest
"""A request for one sequence of a population."""

Entries: TypeAlias = Callable[[PopulationDraw, torch.Tensor, np.ndarray, np.ndarray], torch.Tensor]
"""Returns log-probabilities of a population, as ``Positions.entries`` does."""


@dataclass(slots=True)
class _Requests:
    """The vLLM requests of a population's sequences, with the last flush of each request."""

    request_ids: list[str]  # of the distinct sequences
    flushes: np.ndarray
    places: np.ndarray | None  # of each sequence's request; None if sequence i has request i
    adapter: Adapter | None
    spare: dict[str, int] = field(default_factory=dict)  # unused, of earlier populations
    # Requests that became forks for sequences that shared a request, and each sequence's own one then.
    forks: dict[str, int] = field(default_factory=dict)
    own: list[str] | None = None
    # While it is in progress: new requests, which become resident with their rows; rows or scores of
    # earlier steps; of a block, the number of each request's first sequence.
    added: dict[str, LogprobsRequest] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: np.ndarray | None = None

    def pairs(self) -> Iterator[tuple[str, int]]:
        """Yield every request with its flush."""
        yield from zip(self.request_ids, self.flushes.tolist(), strict=True)
        yield from self.forks.items()
        yield from self.spare.items()


class LaunchedDraws(NamedTuple):
    """The launched draws of populations.

    Attributes:
        ends: the result of each population.
        draws: of all populations in order, float64 ``[n, 3]`` on the device; ``None`` after an error,
            or if one asks for rows.
        on_host: the same draws, on their way to the host.
    """

    ends: list[Finished]
    draws: torch.Tensor | None = None
    on_host: AsyncHostCopy | None = None


class EarlyDelivery:
    """Decides whether a population's draws are delivered before or after the next step is prepared.

    Both run on the engine's thread. Early delivery pays if the device is idle and the caller asks again
    before the step is prepared. Other callers are served while the device computes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._delivered_at = 0.0
        self._absence = self._preparation = float("inf")

    def requested(self) -> None:
        """Record the time since the last draws were delivered."""
        self._absence = self._clock() - self._delivered_at

    def is_due(self, device: torch.device) -> bool:
        """Return whether the draws are delivered before the next step is prepared."""
        if device.type != "cuda":
            return False
        # Two busy threads slow each other down, so a caller may take twice as long as the preparation.
        if not self._absence <= 2.0 * self._preparation < float("inf"):
            return False
        return bool(torch.cuda.current_stream(device).query())

    @contextlib.contextmanager
    def preparing(self, *, is_early: bool) -> Iterator[None]:
        """Measure the preparation of the next step; with ``is_early`` the draws are delivered before."""
        began = self._clock()
        yield
        ended = self._clock()
        self._preparation, self._delivered_at = ended - began, began if is_early else ended


class OpenPopulations:
    """An engine's populations; there are no populations without ``open_requests``."""

    def __init__(
        self, open_requests: OpenRequests | None, adapters: VLLMAdapters, weight_bytes: int
    ) -> None:
        self._most_forks = max(FEWEST_FORKS, FORKS_A_GIB * weight_bytes >> 30)
        self._open = cast("OpenRequests", open_requests)
        self._adapters = adapters
        # The vLLM requests of each handle; for a settled one, a function that finds them when needed.
        self._known: WeakKeyDictionary[
            SequenceHandle, _Requests | Callable[[], _Requests | None]
        ] = WeakKeyDictionary()
        self._under_way: dict[PopulationDraw, _Requests] = {}
        self._graphs = DrawGraphs()
        self.early_delivery = EarlyDelivery()

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, population: PopulationDraw) -> bool:
        return population in self._under_way

    def continue_population(
        self, population: PopulationDraw, begin: Callable[[Sequence[RowOrScore]], list[str]]
    ) -> list[str] | None:
        """Extend and fork sequences to this population's sequences.

        Return the vLLM requests; ``None`` if that is impossible. ``begin`` makes the requests of forks
        that find no unused request. After ``None``, or an error of ``begin``, no state has changed.
        """
        self.early_delivery.requested()
        origins, adapter, kept = population.origins, population.adapter, self._open
        known = [] if origins is None else [self._requests_of(asked) for asked in origins.handles]
        requests = [each for each in known if each is not None and each.adapter == adapter]
        if origins is None or len(requests) < len(known) or not requests:
            return None
        request_ids, flushes, rows = _joined_requests(requests, origins.handles)
        numbers, contexts, block = origins.numbers, population.contexts, population.block
        rows, further = rows[numbers], list[list[int]]()
        if block is None and np.array_equal(contexts.lengths, origins.lengths + 1):
            tokens = contexts.last_tokens
            firsts, places = _different(rows << 32 | tokens)
        else:
            several = contexts.after(origins.lengths)
            tokens, counts = several[:, 0], token_counts(several).tolist()
            further = [each[1:n] for each, n in zip(several.tolist(), counts, strict=True)]
            last = several[:, :0] if block is None else block
            firsts, places = _different_rows(np.column_stack([rows, several, last]))
        if firsts is not None and self._one_request_each(requests, rows):
            firsts = places = None
        if firsts is not None:
            numbers, tokens, rows = numbers[firsts], tokens[firsts], rows[firsts]
            further = [further[n] for n in firsts.tolist()] if further else further
        parents = [request_ids[row] for row in rows.tolist()]
        # Joined populations may share a request, so it may come twice here with different flushes.
        pairs = [*zip(parents, flushes[rows].tolist(), strict=True)]
        if len(requests) == 1 and (own := requests[0].own) is not None:
            parents, forks = [own[number] for number in numbers.tolist()], requests[0].forks
            pairs = [
                (each, forks.get(each, flush))
                for each, (_, flush) in zip(parents, pairs, strict=True)
            ]
        if len(kept.left(pairs)) < len(pairs):
            return None
        used = set(parents)
        unused = [each for each, of in zip(requests, origins.handles, strict=True) if not of.idle]
        free = _free(kept, unused, used) if _count(unused) > len(used) else {}

        def packed(number: int) -> bytes:
            return contexts.packed(number if firsts is None else int(firsts[number]))

        added: dict[str, LogprobsRequest] = {}

        def add(numbers: Sequence[int]) -> list[str]:
            version = population.weights_version
            asked = [
                LogprobsRequest(packed=packed(n), adapter=adapter, weights_version=version)
                for n in numbers
            ]
            sent: Sequence[RowOrScore] = asked
            if block is not None:
                sent = [population.score(n if firsts is None else int(firsts[n])) for n in numbers]
            added.update(zip(begin(sent), asked, strict=True))
            return [*added]

        found = kept.continue_requests(parents, tokens.tolist(), free, add, further)
        if found is None:
            return None
        for request_id in found if free else ():
            free.pop(request_id, None)
        now = np.full(len(found), kept.flush)
        self._under_way[population] = mine = _Requests(
            found, now, places, adapter, free, added=added
        )
        if block is not None:
            mine.numbers = np.arange(len(found)) if firsts is None else firsts
        later = {each: n for n, each in enumerate(found) if each not in added}
        kept.residents.put_later(later, adapter, packed)
        if adapter is not None:
            self._adapters.hold(adapter)
        return found

    def _one_request_each(self, several: Sequence[_Requests], rows: np.ndarray) -> bool:
        """Return whether each sequence that continues gets its own request, even if equal to another:
        where steps run ahead and there are fewer requests than sequences (see ``spread``)."""
        kept, wanted = self._open, len(rows)
        if not (kept.steps.ahead and _count(several) < wanted):
            return False
        return wanted <= min(kept.most, len(np.unique(rows)) + self._most_forks)

    @property
    def blocks(self) -> dict[PopulationDraw, _Requests]:
        """The populations in progress that have a block."""
        return {p: each for p, each in self._under_way.items() if p.block is not None}

    def unread_blocks(self) -> Iterator[tuple[str, ScoreRequest]]:
        """Yield the requests of blocks in progress, each with the score that answers it."""
        for population, requests in self.blocks.items():
            numbers = cast("np.ndarray", requests.numbers).tolist()
            for request_id, number in zip(requests.request_ids, numbers, strict=True):
                if request_id not in requests.rows:
                    yield request_id, population.score(number)

    def score(self, step: HiddenStates, entries: Entries) -> list[Finished]:
        """Launch the scores of all blocks in progress from a step of their requests, and end these
        populations, so that others can continue from them."""
        ends = list[Finished]()
        at = dict(zip(step.request_ids, step.ends.tolist(), strict=True))
        for population, requests in self.blocks.items():
            block = cast("np.ndarray", population.block)[requests.numbers]
            counts, is_token = token_counts(block), block >= 0
            starts = np.array([at[each] for each in requests.request_ids]) - counts
            places = (starts[:, None] + np.arange(block.shape[1]))[is_token]
            try:
                found = entries(population, step.states, places, block[is_token])
                whole = AsyncHostCopy(_spread(found, is_token, requests.places))
                ends.append(Finished(population, whole))
            except Exception as error:
                ends.append(Finished(population, error=survived(error)))
            self._known[population.handle] = self._ended(population)
        self._open.keep(())
        return ends

    def whole(self, request_ids: list[str]) -> list[PopulationDraw]:
        """Return the populations that consist of exactly these requests; ``[]`` if some belong to
        others, or if a population is incomplete."""
        wanted, count = set(request_ids), 0
        found: list[PopulationDraw] = []
        for population, requests in self._under_way.items():
            mine = requests.request_ids
            if mine[0] in wanted:
                if requests.rows or not wanted.issuperset(mine):
                    return []
                found.append(population)
                count += len(mine)
        return found if count == len(wanted) else []

    def spread(self, several: Sequence[PopulationDraw]) -> list[str] | None:
        """Give every sequence of these populations its own request; return the new requests; ``None`` if
        some sequences still share requests.

        The new requests are forks of requests of the step under way. So each sequence can be computed
        with its drawn token before the caller says which sequences continue.
        """
        kept, left = self._open, self._most_forks
        # Populations whose sequences share requests, each with the request of each sequence, with the
        # sequences that repeat an earlier one's request, and with parked requests that could serve these.
        shared: list[tuple[PopulationDraw, list[str], list[int], list[str]]] = []
        for population in several:
            requests = self._under_way[population]
            if requests.places is None:
                continue
            if requests.added or not kept.steps.foresees:
                return None
            own = [requests.request_ids[row] for row in requests.places.tolist()]
            numbers = repeated(own)
            left -= len(numbers)
            free = [each for each, _ in kept.left(requests.spare.items())]
            if left < 0:
                return None
            shared.append((population, own, numbers, free))
        if not shared:
            return []
        found = kept.spread([([own[n] for n in ns], free) for _, own, ns, free in shared])
        if found is None:
            return None
        for (population, own, numbers, _), forks in zip(shared, found, strict=True):
            requests = self._under_way[population]
            for number, fork in zip(numbers, forks, strict=True):
                own[number] = fork
                requests.forks[fork] = kept.flush
                del requests.spare[fork]
            requests.own = own
            of_forks = dict(zip(forks, numbers, strict=True))
            kept.residents.put_later(of_forks, population.adapter, population.contexts.packed)
        return [fork for forks in found for fork in forks]

    def drawn(
        self,
        several: Sequence[PopulationDraw],
        request_ids: list[str],
        rows: torch.Tensor,
        at_rows: Sequence[int] | None = None,
    ) -> LaunchedDraws:
        """Launch the draws of populations from the rows ``[m, vocab_size]`` of their vLLM requests:
        request ``i`` has row ``i``, or row ``at_rows[i]``. ``answer`` must follow."""
        places: list[np.ndarray | None] = []
        at: dict[str, int] = {}
        for requests in (self._under_way[each] for each in several):
            places.append(requests.places)
            if requests.request_ids != request_ids or at_rows is not None:
                at = at or dict(zip(request_ids, at_rows or range(len(rows)), strict=True))
                order = np.array([at[each] for each in requests.request_ids])
                places[-1] = order if requests.places is None else order[requests.places]
        try:
            if any(each.seeds is None for each in several):
                return LaunchedDraws(_rows_and_draws(several, rows, places))
            draws, on_host = launch_draws(several, rows, places, self._graphs)
        except Exception as error:
            failed = survived(error)
            return LaunchedDraws([Finished(each, error=failed) for each in several])
        ends, first = list[Finished](), 0
        for each in several:
            part = slice(first, first := first + len(each))
            ends.append(Finished(each, on_host.part(part)))
        return LaunchedDraws(ends, draws, on_host)

    def answer(
        self, several: Sequence[PopulationDraw], drawn: LaunchedDraws
    ) -> tuple[list[str], torch.Tensor, AsyncHostCopy | None] | None:
        """End populations that were drawn, so that others can continue from them.

        Return the requests of all sequences, their tokens (float64 ``[n]`` on the device) and the copy
        to the host; ``None`` if sequences share requests, or if the draws failed.
        """
        request_ids: list[str] = []
        are_shared = False
        for population in several:
            requests = self._known[population.handle] = self._ended(population)
            are_shared = are_shared or (requests.places is not None and requests.own is None)
            request_ids += requests.own or requests.request_ids
        self._open.keep(())
        if are_shared or drawn.draws is None:
            return None
        return request_ids, drawn.draws[:, 0], drawn.on_host

    def put(
        self, population: PopulationDraw, request_id: str, row: torch.Tensor | None
    ) -> Finished | None:
        """Add the row of one request, ``None`` if it is not finite. Return the population's result if
        this was the last row, or if the row failed it."""
        requests = self._under_way.get(population)
        if requests is None:  # an earlier row has failed the population
            return None
        if row is None:
            self.forget(population)
            return Finished(population, error=not_finite())
        requests.rows[request_id] = row
        if (asked := requests.added.pop(request_id, None)) is not None:
            self._open.keep([(request_id, asked)])
        mine = requests.request_ids
        if len(requests.rows) < len(mine):
            return None
        if population.block is not None:
            is_token = population.block[requests.numbers] >= 0
            found = torch.cat([requests.rows[each] for each in mine])
            end = Finished(population, AsyncHostCopy(_spread(found, is_token, requests.places)))
            self._known[population.handle] = self._ended(population)
            return end
        rows = gather_rows([requests.rows[each] for each in mine])
        drawn = self.drawn([population], mine, rows)
        self.answer([population], drawn)
        return drawn.ends[0]

    def settle(self, population: PopulationDraw) -> None:
        """Remember a population that was computed by single rows. Its sequences are looked up by their
        contexts when they are needed, if all are resident then."""
        contexts, adapter, kept = population.contexts, population.adapter, self._open
        self._known[population.handle] = lambda: _settled(kept, contexts, adapter)

    def _requests_of(self, asked: SequenceHandle) -> _Requests | None:
        known = self._known.get(asked)
        if known is None or isinstance(known, _Requests):
            return known
        requests = known()
        if requests is None:
            del self._known[asked]
        else:
            self._known[asked] = requests
        return requests

    def release(self, several: Sequence[SequenceHandle]) -> list[str]:
        """Forget these handles; return their vLLM requests that no other has used since."""
        free: list[str] = []
        for asked in several:
            requests = self._requests_of(asked)
            self._known.pop(asked, None)
            if requests is not None:
                free += _free(self._open, [requests], set())
        return free

    def forget(self, population: PopulationDraw) -> bool:
        """Forget a population; return whether it was in progress."""
        if population not in self._under_way:
            return False
        self._ended(population)
        return True

    def clear(self) -> None:
        """Forget all populations."""
        for population in [*self._under_way]:
            self._ended(population)
        self._known.clear()

    def _ended(self, population: PopulationDraw) -> _Requests:
        if population.adapter is not None:
            self._adapters.release(population.adapter)
        requests = self._under_way.pop(population)
        requests.rows.clear()
        requests.added.clear()
        return requests


def _rows_and_draws(
    several: Sequence[PopulationDraw], rows: torch.Tensor, places: Sequence[np.ndarray | None]
) -> list[Finished]:
    """Return the results of populations that ask for rows, and of others beside them."""
    found = [each.draw(rows, at) for each, at in zip(several, places, strict=True)]
    return [
        Finished(each, one if each.seeds is None else AsyncHostCopy(one))
        for each, one in zip(several, found, strict=True)
    ]


def _free(kept: OpenRequests, several: Sequence[_Requests], used: set[str]) -> dict[str, int]:
    """Return the requests that are not used and can be reused, with their flushes."""
    pairs = [pair for requests in several for pair in requests.pairs()]
    return dict(kept.left(pair for pair in pairs if pair[0] not in used))


def _settled(kept: OpenRequests, contexts: Contexts, adapter: Adapter | None) -> _Requests | None:
    """Return the requests that are resident with these contexts; ``None`` if one is not resident."""
    found: dict[bytes, int] = {}
    places = [found.setdefault(contexts.packed(n), len(found)) for n in range(len(contexts))]
    pairs = [kept.resident(adapter, context) for context in found]
    here = [pair for pair in pairs if pair is not None]
    if len(here) < len(pairs):
        return None
    request_ids, flushes = zip(*here, strict=True)
    return _Requests([*request_ids], np.array(flushes), np.array(places), adapter)


def _joined_requests(
    several: Sequence[_Requests], handles: Sequence[SequenceHandle]
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the requests of several handles, their flushes, and the request index of each sequence."""
    request_ids: list[str] = []
    rows: list[np.ndarray] = []
    for requests, handle in zip(several, handles, strict=True):
        places = np.arange(handle.count) if requests.places is None else requests.places
        rows.append(places + len(request_ids))
        request_ids += requests.request_ids
    return request_ids, np.concatenate([each.flushes for each in several]), np.concatenate(rows)


def _different(keys: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the first place of each distinct key, and the distinct key of each place; twice ``None`` if
    all keys are distinct, so that they keep their order."""
    if (keys[1:] > keys[:-1]).all():
        return None, None
    unique, firsts, places = np.unique(keys, return_index=True, return_inverse=True)
    return (None, None) if len(unique) == len(keys) else (firsts, places)


def _different_rows(keys: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the same for rows of numbers, int64 ``[n, m]``, in the order of the first places."""
    packed, width, numbers = keys.tobytes(), keys.itemsize * keys.shape[1], dict[bytes, int]()
    ends = range(width, len(packed) + 1, width)
    # For few rows, numpy's ``unique`` takes ten times as long.
    places = np.array([numbers.setdefault(packed[n - width : n], len(numbers)) for n in ends])
    if len(numbers) == len(keys):
        return None, None
    firsts = np.empty(len(numbers), np.int64)
    firsts[places[::-1]] = np.arange(len(keys))[::-1]
    return firsts, places


def _spread(found: torch.Tensor, is_token: np.ndarray, places: np.ndarray | None) -> torch.Tensor:
    """Return a block's log-probabilities, float32 ``[n, k]``, from the distinct sequences', flat,
    which have a token where ``is_token``; 0 elsewhere."""
    if places is None and is_token.all():
        return found.view(is_token.shape)
    at = np.where(is_token, np.cumsum(is_token).reshape(is_token.shape) - 1, len(found))
    at = at if places is None else at[places]
    padded = torch.cat([found, found.new_zeros(1)])
    index = moved(torch.from_numpy(at.ravel()), found.device)
    return padded.index_select(0, index).view(at.shape)


def _count(several: Sequence[_Requests]) -> int:
    """Return an upper bound of the number of requests."""
    return sum(len(each.request_ids) + len(each.forks) + len(each.spare) for each in several)
