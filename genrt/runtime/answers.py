"""Answers reads and population draws from rows that an engine computes.

Rules:
    Readers of one row share it with each other, with callers of the row itself, and with the cache.
    A read of a cached row is answered by ``submit``, beside the step. A step's reads are answered
    together, kind by kind, with few copies to the host. An answer never depends on its batch.
    Rows read on the device are not cached, because that would copy them. Rows on the host are.
    An engine that raises in ``cancel`` may still hold the requests. They are cancelled again before the
    next flush; if that raises too, only new requests equal to them fail.
    A population that continues by the engine's numbers of its sequences (``Origins``) shares no rows and
    skips the cache. Of several draws in turn, each is a request of its own to the engine.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from genrt.engines.adapters import Adapters, drop_copy
from genrt.engines.protocol import (
    Engine,
    EngineStatistics,
    Finished,
    FullEngine,
    capabilities_of,
    survived,
)
from genrt.engines.weights import KVCache, continuing_weights, weights_of
from genrt.errors import EngineDied, EngineFailed, GenrtError, InvalidAdapter
from genrt.questions.arguments import Adapter
from genrt.questions.completions import Streamed, Told
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import Read, ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest, not_finite
from genrt.questions.scores import ScoreRequest
from genrt.questions.sequences import Origins, SequenceHandle
from genrt.runtime.cache import RowCache
from genrt.tokens.rows import AsyncHostCopy, separate_copies
from genrt.tokens.sampling import BatchDraw

MAX_PREFIXES = 64
"""The maximum pinned prefixes of a runtime: an engine may look at each of them after every step."""

Reader: TypeAlias = ReadRequest | PopulationDraw

Source: TypeAlias = LogprobsRequest | ScoreRequest
"""A request whose result answers readers."""


@dataclass(slots=True, eq=False)
class _Row:
    """A row in progress with its readers; ``is_asked`` if a caller wants the row itself."""

    readers: dict[Reader, None] = field(default_factory=dict)
    is_asked: bool = False


class _FoundRows:
    """The rows, or scores, of a population that have been found so far."""

    def __init__(self, wanted: Sequence[Source]) -> None:
        self.wanted = wanted
        self.distinct = dict.fromkeys(wanted)
        self.found: dict[Source, Tensor] = {}

    @property
    def are_whole(self) -> bool:
        return len(self.found) == len(self.distinct)


@dataclass(slots=True)
class _DrawsInTurn:
    """A population with several draws in turn, and its draws so far."""

    request: PopulationDraw
    found: list[BatchDraw] = field(default_factory=list)

    @property
    def whole(self) -> BatchDraw:
        """All draws, each of its tensors ``[n, k]``."""
        columns = (torch.stack(each, dim=1) for each in zip(*self.found, strict=True))
        return BatchDraw.of(columns, self.found[0].weights_version)


class AnsweringEngine:
    """An engine that answers reads from the rows of another engine, and passes other requests through.

    Args:
        engine: computes rows and samples. ``close`` closes it.
        cache: rows that answer without the engine; rows on their way to the host are stored there.
        adapters: the loaded adapters, with the copies of their files.
        prefixes: the pinned prefixes, the newest last. Other threads may remove some.
    """

    def __init__(
        self,
        engine: Engine,
        cache: RowCache,
        adapters: Adapters | None = None,
        prefixes: dict[LogprobsRequest, None] | None = None,
    ) -> None:
        self.capabilities = has = capabilities_of(engine)
        self.engine = cast("FullEngine", engine)  # optional methods only as the capabilities allow
        self._cache = cache
        self._adapters = Adapters() if adapters is None else adapters
        self._prefixes = {} if prefixes is None else prefixes
        self._pinned = self.engine.prefixes if has.keeps_prefixes else None
        # Every request in the engine, except populations by number; a row with readers has a _Row.
        self._in_progress: dict[Request, _Row | None] = {}
        self._found: dict[PopulationDraw, _FoundRows] = {}
        self._by_number: dict[Request, None] = {}  # populations that continue by sequence number
        self._not_finite: list[SequenceHandle] = []  # to be released after the step
        # Populations with several draws in turn, by the request for the present draw, and the reverse.
        self._in_turn: dict[Request, _DrawsInTurn] = {}
        self._present: dict[Request, PopulationDraw] = {}
        self._unforgotten: dict[Request, GenrtError] = {}
        self._reads = 0
        self._bytes_to_host = 0

    def __repr__(self) -> str:
        readers = sum(len(row.readers) for row in self._in_progress.values() if row is not None)
        return f"AnsweringEngine({self.engine!r}, {readers} reads in progress)"

    # -- requests -----------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> list[Finished]:
        """Take a flush with reads. Return the ends of requests that need no forward: reads of cached
        rows, requests of lost adapters, and requests that the engine refuses."""
        several = [each for each in requests if isinstance(each, PopulationDraw) and each.steps]
        if not several:
            return self._submit_all(requests)
        for each in several:
            self._begin_draw(_DrawsInTurn(each), each.step(0))
        try:
            ends = self._submit_all([self._present.get(each, each) for each in requests])
        except BaseException:
            for each in several:
                self._end_draws(each)
            raise
        return self._next_draws(ends)

    def _end_draws(self, request: Request) -> Request:
        """Forget the draws in turn of a population, if it has several; return the request in progress."""
        present = self._present.pop(request, request)
        self._in_turn.pop(present, None)
        return present

    def _begin_draw(self, draws: _DrawsInTurn, request: PopulationDraw) -> None:
        self._in_turn[request], self._present[draws.request] = draws, request

    def _next_draws(self, ends: Sequence[Finished]) -> list[Finished]:
        """Submit the next draw of populations with several in turn; return the other ends. The caller of
        these draws learns of the last one only."""
        over: list[Finished] = []
        left = deque(ends)
        while left:
            end = left.popleft()
            if (draws := self._in_turn.pop(end.request, None)) is None:
                over.append(end)
                continue
            asked, before = draws.request, self._present.pop(draws.request)
            if end.error is not None:
                over.append(Finished(asked, error=end.error))
                continue
            draws.found.append(cast("BatchDraw", end.result))
            if len(draws.found) == asked.steps:
                over.append(Finished(asked, draws.whole))
                continue
            request = asked.step(len(draws.found), before, draws.found[-1].token_ids)
            self._begin_draw(draws, request)
            try:
                left += self._submit_all([request])
                self.give_back([before.handle])
            except Exception as error:
                left.append(Finished(request, error=survived(error)))
        return over

    def _submit_all(self, requests: Sequence[Request]) -> list[Finished]:
        ends: list[Finished] = []
        if lost := self._adapters.lost:
            errors = ((each, lost.get(cast("Adapter", each.adapter))) for each in requests)
            ends = [Finished(each, error=error) for each, error in errors if error is not None]
            requests = [each for each in requests if each.adapter not in lost]
        populations = [each for each in requests if isinstance(each, PopulationDraw)]
        # An unforgotten request may be a sequence that they would continue.
        if not populations or self._unforgotten:
            return ends + self._submit(requests)
        try:
            continued = self._continue_by_number(populations)
            return ends + self._submit([each for each in requests if each not in continued])
        except BaseException:
            if given_up := [each for each in populations if self._by_number.pop(each, 0) is None]:
                self._cancel(given_up)
            raise

    def _continue_by_number(self, populations: Sequence[PopulationDraw]) -> dict[Request, None]:
        """Have the engine continue known sequences; return the populations that it takes. Populations
        that continue alike share their rows instead."""
        continued: dict[Request, None] = {}
        if self.capabilities.populates:
            known = [each for each in populations if each.origins]
            alike = Counter(map(_continuation, known)) if len(known) > 1 else None
            for each in known:
                is_alone = alike is None or alike[_continuation(each)] == 1
                is_taken = each.seeds is not None or self.capabilities.rows_by_number
                if each.block is not None:
                    is_taken = self.capabilities.blocks
                if is_alone and is_taken and self.engine.continue_population(each):
                    continued[each] = self._by_number[each] = None
        return continued

    def _submit(self, requests: Sequence[Request]) -> list[Finished]:
        new: dict[Request, _Row | None] = {}
        joined: list[tuple[Request, Reader | None]] = []  # rows in progress
        cached: list[Read] = []
        found: dict[PopulationDraw, _FoundRows] = {}
        for request in requests:
            if not isinstance(request, ReadRequest | PopulationDraw) or self._reads_there(request):
                if request in self._in_progress:  # a row with readers only
                    joined.append((request, None))
                elif (row := new.setdefault(request, None)) is not None:
                    row.is_asked = True
            elif isinstance(request, PopulationDraw):
                found[request] = rows = _FoundRows(self._sources(request))
                for each in rows.distinct:
                    if (borrowed := self._row_for(each, request, new, joined)) is not None:
                        rows.found[each] = borrowed
            else:
                lacking = False
                if request.wanted.computes and self._pinned is not None:
                    lacking = request.row.of_weights(0) not in self._pinned
                borrowed = self._row_for(request.row, request, new, joined, lacking=lacking)
                if borrowed is not None:
                    cached.append(Read(request, borrowed))
        ends = self._refused(new) if self._unforgotten else []
        if new:
            self.engine.submit([*new])
        self._in_progress |= new
        for source, reader in joined:
            row = self._in_progress[source]
            if row is None:
                self._in_progress[source] = row = _Row(is_asked=True)
            if reader is None:
                row.is_asked = True
            else:
                row.readers[reader] = None
        if found:
            self._found |= found
            self._withdraw([each.request for each in ends if each.request in found])
            whole = [each for each, rows in self._found.items() if rows.are_whole]
            ends += [self._drawn_from_rows(each) for each in whole]
        return ends + self._answered(cached) if cached else ends

    def _reads_there(self, request: Reader) -> bool:
        """Return whether the engine answers this read itself."""
        if isinstance(request, PopulationDraw):
            is_taken = request.seeds is not None
            if request.block is not None:
                is_taken = self.capabilities.blocks
            return is_taken and PopulationDraw in self.capabilities.reads
        there = type(request.wanted) in self.capabilities.reads
        return there and request.row not in self._cache

    def _sources(self, population: PopulationDraw) -> Sequence[Source]:
        return population.sources(in_one=self.capabilities.scores)

    def _row_for(
        self,
        row: Source,
        reader: Reader,
        new: dict[Request, _Row | None],
        joined: list[tuple[Request, Reader | None]],
        *,
        lacking: bool = False,
    ) -> Tensor | None:
        """Return a cached row unless the engine is ``lacking`` it; otherwise have the reader share the
        row in progress or a new one."""
        if row in new:
            if (sharing := new[row]) is None:
                new[row] = sharing = _Row(is_asked=True)
            sharing.readers[reader] = None
        elif row in self._in_progress:
            joined.append((row, reader))
        elif (
            lacking
            or isinstance(row, ScoreRequest)
            or (borrowed := self._cache.borrow(row)) is None
        ):
            new[row] = _Row({reader: None})
        else:
            return borrowed
        return None

    def _refused(self, new: dict[Request, _Row | None]) -> list[Finished]:
        """Remove from ``new`` the cancelled requests that the engine may still hold; return their ends
        and their readers' ends."""
        ends: dict[Request, Finished] = {}  # a population may read several of these rows
        for request, error in self._still_held(new).items():
            row = new.pop(request)
            concerned: list[Request] = [] if row is None else [*row.readers]
            if row is None or row.is_asked:
                concerned.append(request)
            for each in concerned:
                ends.setdefault(each, Finished(each, error=error))
        return [*ends.values()]

    def step(self, tell: Callable[[Sequence[Finished]], object] | None = None) -> list[Finished]:
        """Step the engine and answer the reads of the step's rows. Ends that ``tell`` gets during the
        step are not returned."""
        early: list[Finished] = []  # draws that others follow

        def deliver(ends: Sequence[Finished]) -> None:
            drawn = [self._with_draws(end) for end in ends]
            early.extend(end for end in drawn if end.request in self._in_turn)
            if last := [end for end in drawn if end.request not in self._in_turn]:
                cast("Callable[[Sequence[Finished]], object]", tell)(last)

        if self.capabilities.delivers_early:
            self.engine.tell = tell and deliver
        draws_by_number = bool(self._by_number)
        try:
            ends: Sequence[Finished] = self.engine.step()
        except EngineDied:
            raise
        except Exception:
            self._forget()
            raise
        for end in ends if self._unforgotten else ():
            self._unforgotten.pop(end.request, None)
        if draws_by_number:
            ends = [self._with_draws(end) for end in ends]
            if wrong := self._not_finite:
                self._not_finite = []
                self.engine.release(wrong)
        finished: list[Finished] = []
        reads: list[Read] = []
        whole: list[PopulationDraw] = []
        failed: dict[PopulationDraw, None] = {}
        for end in ends:
            row = self._in_progress.pop(end.request, None)
            if row is None or row.is_asked:
                finished.append(end)
            for reader in () if row is None else row.readers:
                if end.error is not None:
                    if reader not in failed:
                        finished.append(Finished(reader, error=end.error))
                    if isinstance(reader, PopulationDraw):
                        failed[reader] = None
                elif isinstance(reader, ReadRequest):
                    reads.append(Read(reader, cast("Tensor", end.result)))
                else:
                    rows, request = self._found[reader], cast("Source", end.request)
                    rows.found[request] = cast("Tensor", end.result)
                    if rows.are_whole:
                        whole.append(reader)
        if failed:
            self._withdraw([*failed])
        finished += [self._drawn_from_rows(each) for each in whole if each not in failed]
        finished += early
        if self._in_turn:
            finished = self._next_draws(finished)
        return finished + self._answered(reads) if reads else finished

    def progress(self, streamed: Sequence[Streamed]) -> Sequence[Told | None]:
        """Return each text's new deltas, or ``None``."""
        if not self.capabilities.completes:
            return [None] * len(streamed)
        return self.engine.progress(streamed)

    def cancel(self, requests: Sequence[Request]) -> None:
        """Cancel requests; a row goes with the last request for it. Raises only EngineDied: another error
        of the engine affects only later requests that are equal."""
        self._withdraw([self._end_draws(each) for each in requests])

    def _withdraw(self, requests: Sequence[Request]) -> None:
        unwanted: list[Request] = []
        for request in requests:
            is_read = isinstance(request, ReadRequest | PopulationDraw)
            if not is_read or request in self._in_progress:
                row = self._in_progress.get(request)
                if row is not None:
                    row.is_asked = False
                else:
                    self._in_progress.pop(request, None)
                    unwanted.append(request)
            elif isinstance(request, ReadRequest):
                unwanted += self._without(request.row, request)
            elif isinstance(request, PopulationDraw):
                if self._by_number.pop(request, 0) is None:
                    unwanted.append(request)
                if (found := self._found.pop(request, None)) is not None:
                    for source in found.distinct:
                        unwanted += self._without(source, request)
        if unwanted:
            self._cancel(unwanted)

    def _without(self, source: Source, reader: Reader) -> list[Source]:
        """Remove a reader from a row; return the row if it has no other use."""
        row = self._in_progress.get(source)
        if row is None or reader not in row.readers:
            return []
        del row.readers[reader]
        if row.readers:
            return []
        if row.is_asked:
            self._in_progress[source] = None
            return []
        del self._in_progress[source]
        return [source]

    def _cancel(self, unwanted: Sequence[Request]) -> None:
        """Have the engine forget these requests, and all that it has not forgotten before."""
        unforgotten = [*self._unforgotten, *unwanted]
        try:
            self.engine.cancel(unforgotten)
        except Exception as error:
            self._unforgotten = dict.fromkeys(unforgotten, survived(error))
        else:
            self._unforgotten.clear()

    def _still_held(self, new: Collection[Request]) -> dict[Request, GenrtError]:
        """Return the cancelled requests that the engine may still hold, with its errors."""
        if self._unforgotten:
            self._cancel([])
        return {each: error for each, error in self._unforgotten.items() if each in new}

    def _forget(self) -> None:
        """Forget everything after a failed step, and have the engine forget rows with readers only."""
        unasked = [
            r for r, row in self._in_progress.items() if row is not None and not row.is_asked
        ]
        self._clear()
        if unasked:
            self._cancel(unasked)

    def _clear(self) -> None:
        several = self._in_progress, self._found, self._by_number, self._unforgotten
        for each in (*several, self._in_turn, self._present):
            each.clear()
        self._not_finite.clear()

    # -- answers ------------------------------------------------------------------------------

    def _answered(self, reads: Sequence[Read]) -> list[Finished]:
        """Return the ends of reads whose rows are there. A failing group affects no other group."""
        groups: dict[Hashable, list[Read]] = {}
        for read in reads:
            groups.setdefault(read.request.wanted.group, []).append(read)
        finished: list[Finished] = []
        for group in groups.values():
            try:
                results = list(group[0].request.wanted.answer(group, self))
            except Exception as error:
                failed = survived(error)
                finished += [Finished(read.request, error=failed) for read in group]
                continue
            finished += [
                Finished(read.request, result) for read, result in zip(group, results, strict=True)
            ]
            self._reads += len(group)
            if group[0].row.device.type != "cpu":
                self._bytes_to_host += sum(map(_bytes, results))
        return finished

    def _drawn_from_rows(self, population: PopulationDraw) -> Finished:
        """Return the draws of a population with all of its rows found."""
        rows = self._found.pop(population)
        results = [rows.found[row] for row in rows.wanted]
        try:
            if population.block is not None:
                self._reads += len(population)
                found: Any = population.scored(results, in_one=self.capabilities.scores)
            else:
                whole = population.draw(results)
                drawn: AsyncHostCopy | Tensor = whole
                if population.seeds is not None:
                    drawn = AsyncHostCopy(whole)
                    self.expect(
                        population.rows, whole[:, 0]
                    )  # before anything waits for the tokens
                found = self._on_host(population, drawn)
        except Exception as error:
            return Finished(population, error=survived(error))
        if self.capabilities.populates:
            self.engine.settle(population)
        return Finished(population, found)

    def _with_draws(self, end: Finished) -> Finished:
        """Return the end of a population by number with its draws; any other end as it is."""
        population = end.request
        if not self.capabilities.populates or not isinstance(population, PopulationDraw):
            return end
        self._by_number.pop(population, None)
        if end.error is not None:
            return end
        try:
            drawn: Any = end.result
            found = self._on_host(population, drawn)
            # One entry is enough: NaN logits make the whole row NaN.
            if isinstance(found, BatchDraw):
                numbers = found.log_mass
            else:
                numbers = drawn[:, 0] if population.block is None else found
            is_finite = not numbers.isnan().any()
        except Exception as error:
            return Finished(population, error=survived(error))
        if not is_finite:
            self._not_finite.append(population.handle)
            return Finished(population, error=not_finite())
        return Finished(population, found)

    def _on_host(self, population: PopulationDraw, drawn: AsyncHostCopy | Tensor) -> Any:
        """Wait for draws, or for a block's log-probabilities, on their way to the host and return them;
        return rows in storages of their own."""
        self._reads += len(population)
        if isinstance(drawn, Tensor):
            return separate_copies(drawn.unbind())
        found = drawn.result().numpy()
        if self.engine.device.type != "cpu":
            self._bytes_to_host += found.nbytes
        if population.block is not None:
            return drawn.result()
        token_ids = torch.from_numpy(found[:, 0].astype(np.int64))
        numbers = torch.from_numpy(found[:, 1:].T.astype(np.float32))
        return BatchDraw.of((token_ids, *numbers), population.weights_version)

    # -- called by reads ----------------------------------------------------------------------

    def expect(self, rows: Sequence[LogprobsRequest], token_ids: Tensor) -> None:
        """Announce the tokens drawn from these rows to the engine, if no two draws share a row."""
        if self.capabilities.speculates:
            different = dict.fromkeys(rows)
            if len(different) == len(rows):
                self.engine.expect(list(different), token_ids)

    def keep(self, read: Read) -> None:
        """Store a copy of a read's row in the cache."""
        if read.request.row not in self._cache:
            self._cache.put(read.request.row, read.row)

    def keep_context(self, read: Read) -> None:
        """Pin a read's context in this engine and every later one."""
        self._pin(read.request.row.of_weights(0))  # whatever the weights

    def _pin(self, prefix: LogprobsRequest) -> None:
        if self._pinned is None:
            return
        self._prefixes.pop(prefix, None)
        self._prefixes[prefix] = None
        for oldest in [*self._prefixes][:-MAX_PREFIXES]:
            self.release(oldest)
        self._pinned.keep(prefix)

    def release(self, prefix: LogprobsRequest) -> None:
        """Unpin a prefix; ignore one that is not pinned."""
        self._prefixes.pop(prefix, None)
        if self._pinned is not None:
            self._pinned.release(prefix)

    def give_back(self, asked: Sequence[SequenceHandle]) -> None:
        """Have the engine forget sequences that no population continues."""
        if self.capabilities.populates:
            self.engine.release(asked)

    # -- adapters and weights -----------------------------------------------------------------

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        """Load an adapter from a copy of its files. ``Adapters.copied`` makes it before where that must
        not delay the engine."""
        copy = self._adapters.copied(path)
        try:
            self.engine.add_adapter(adapter, copy)
        except BaseException as error:
            if copy != path:
                drop_copy(copy)
            if isinstance(error, InvalidAdapter):
                raise InvalidAdapter(str(error).replace(str(copy), str(path))) from error
            raise
        self._adapters.keep(adapter, copy)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Remove an adapter; ignore one that is not loaded. Its prefixes move to the adapter of the same
        name, if there is one. Raises only EngineDied: after another error the weights may stay until the
        next restart."""
        if adapter not in self._adapters:
            return
        self._adapters.forget(adapter)
        named = [each for each, _ in self._adapters if each.name == adapter.name]
        for prefix in [each for each in [*self._prefixes] if each.adapter == adapter]:
            self.release(prefix)
            if named:
                self._pin(prefix.bound_to(named[-1]))
        try:
            self.engine.remove_adapter(adapter)
        except Exception as error:  # no caller waits for this, and no question can name the adapter
            survived(error)

    def reload_adapters(self) -> None:
        """Load the adapters of the engine before into this one, and pin the same prefixes. An adapter
        that it does not take is lost, with its rows and prefixes."""
        for adapter, copy in self._adapters:
            try:
                self.engine.add_adapter(adapter, copy)
            except EngineDied:
                raise
            except Exception as error:
                self._adapters.lose(adapter, error)
                self._cache.forget(adapter)
        for prefix in [*self._prefixes]:
            if prefix.adapter in self._adapters.lost:
                self._prefixes.pop(prefix, None)
            elif self._pinned is not None:
                self._pinned.keep(prefix)

    def forget_residents(self) -> None:
        """Have the engine forget everything that no request in progress needs."""
        if self.capabilities.forgets_residents:
            self.engine.forget_residents()

    def begin_update(self, *, texts: KVCache | None = None) -> None:
        """Have the engine forget all results of the present weights, except texts in progress if they
        continue. Raises EngineFailed if it cannot."""
        if self._still_held(self._unforgotten):
            raise EngineFailed("the engine cannot forget what was cancelled: restart it")
        if texts is None:
            weights_of(self.engine).begin()
        else:
            continuing_weights(self.engine).begin_beside_texts(texts == "keep")

    def statistics(self) -> EngineStatistics:
        """Return the engine's counters, with the reads answered here and the bytes that they moved."""
        counted = self.engine.statistics()
        return replace(
            counted,
            reads=counted.reads + self._reads,
            bytes_to_host=counted.bytes_to_host + self._bytes_to_host,
        )

    def close(self) -> None:
        self._clear()
        self.engine.close()


def _bytes(result: object) -> int:
    """Return the bytes of a result's tensors, and 8 for each number."""
    parts: Any = result if isinstance(result, tuple) else (result,)
    return sum(int(part.nbytes) if isinstance(part, Tensor) else 8 for part in parts)


def _continuation(population: PopulationDraw) -> Hashable:
    """Return the sequences and tokens that a population continues."""
    origins = cast("Origins", population.origins)
    last_tokens = population.contexts.last_tokens.tobytes()
    return origins.handles, origins.numbers.tobytes(), last_tokens
