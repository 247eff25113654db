"""Reads and population draws, answered from rows. ``questions/`` knows how each kind is answered.

Engines compute rows and samples. ``AnsweringEngine`` adds reads to any engine.

Rules:
    All readers of one row share it: with each other, with callers that asked for the row itself, and with
    the cache, whose rows answer without the engine.
    A step's reads are answered together, kind by kind, with few copies to the host.
    A read from a cached row is answered by ``submit``, beside the step.
    An engine that raises in ``cancel`` may still hold the request. It is told again before it gets
    anything new; if it raises again, an equal new request fails, alone.
    A row that was only read from is not cached: that would copy it. One moved to the host is.
    A read's answer depends on its row and itself alone, never on its batch.
    A population that goes on by sequence numbers shares no rows, and the cache is not asked.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

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
from genrt.engines.weights import weights_of
from genrt.errors import EngineDied, EngineFailed, GenrtError, InvalidAdapter
from genrt.questions.completions import Streamed, Told
from genrt.questions.contexts import Adapter
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import Read, ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest, not_finite
from genrt.questions.sequences import SequenceHandle
from genrt.runtime.cache import RowCache
from genrt.tokens.rows import Leaving
from genrt.tokens.sampling import BatchDraw

__all__ = ["MAX_PREFIXES", "AnsweringEngine", "FoundRows", "KeptPrefixes"]

MAX_PREFIXES = 64
"""The most kept prefixes of a runtime: an engine may look at each of them after every step."""


class KeptPrefixes:
    """The prefixes that every engine of a runtime keeps. Safe from any thread."""

    def __init__(self) -> None:
        self._rows: dict[LogprobsRequest, None] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[LogprobsRequest]:
        """Yield them, the newest at the end."""
        return iter(list(self._rows))

    def add(self, prefix: LogprobsRequest) -> list[LogprobsRequest]:
        """Add one, the newest now, and return the oldest of too many, now removed."""
        with self._lock:
            self._rows.pop(prefix, None)
            self._rows[prefix] = None
            over = list(self._rows)[:-MAX_PREFIXES]
            for each in over:
                del self._rows[each]
        return over

    def discard(self, prefix: LogprobsRequest) -> None:
        """Remove one; ignore any other."""
        with self._lock:
            self._rows.pop(prefix, None)

    def bound_to(self, adapter: Adapter) -> list[LogprobsRequest]:
        """Return the prefixes of an adapter."""
        return [each for each in self if each.adapter == adapter]


@dataclass(slots=True, eq=False)
class _Row:
    """A row in progress with its readers; ``is_asked`` if a caller asked for the row itself."""

    readers: dict[ReadRequest | PopulationDraw, None] = field(default_factory=dict)
    is_asked: bool = False


class AnsweringEngine:
    """An engine that answers reads from the rows of another. What it takes otherwise passes through.

    Args:
        engine: computes rows and samples; owned by whoever made it, as ``close`` passes through too.
        cache: rows that answer without the engine; rows on their way to the host are put there.
        adapters: those that are loaded, with the copies of them that the engine is given.
        prefixes: those that the engine is to keep, if it can.
    """

    def __init__(
        self,
        engine: Engine,
        cache: RowCache,
        adapters: Adapters | None = None,
        prefixes: KeptPrefixes | None = None,
    ) -> None:
        self.engine = engine
        self.capabilities = has = capabilities_of(engine)
        self.full = cast("FullEngine", engine)  # called only as the capabilities say
        self._cache = cache
        self._adapters = Adapters() if adapters is None else adapters
        self._prefixes = KeptPrefixes() if prefixes is None else prefixes
        self._kept = self.full.prefixes if has.keeps_prefixes else None
        # Every request in the engine, but for populations by number; a row that others read has a _Row.
        self._in_progress: dict[Request, _Row | None] = {}
        self._populations = _Populations(self.full, self.expect, by_number=has.populates)
        self._unforgotten: dict[Request, GenrtError] = {}
        self._reads = 0
        self._bytes_to_host = 0

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def __repr__(self) -> str:
        readers = sum(len(row.readers) for row in self._in_progress.values() if row is not None)
        return f"AnsweringEngine({self.engine!r}, {readers} reads in progress)"

    def submit(self, requests: Sequence[Request]) -> list[Finished]:
        """Take a flush as an engine does, with reads. Return the requests that have ended without a
        forward: reads from rows in the cache, and requests that the engine cannot take."""
        populations = [each for each in requests if isinstance(each, PopulationDraw)]
        # A request to be forgotten may be a sequence that they would go on from.
        if not populations or self._unforgotten:
            return self._submit(requests)
        try:
            going_on = self._populations.go_on(populations)
            return self._submit([each for each in requests if each not in going_on])
        except BaseException:
            if given_up := self._populations.give_up(populations):
                self._cancel(given_up)
            raise

    def _submit(self, requests: Sequence[Request]) -> list[Finished]:
        new: dict[Request, _Row | None] = {}
        joined: list[tuple[Request, ReadRequest | PopulationDraw | None]] = []  # rows in progress
        cached: list[Read] = []
        found: dict[PopulationDraw, FoundRows] = {}
        for request in requests:
            if not isinstance(request, ReadRequest | PopulationDraw) or self._reads_there(request):
                if request in self._in_progress:  # a row that only reads have asked for so far
                    joined.append((request, None))
                elif (row := new.setdefault(request, None)) is not None:
                    row.is_asked = True
            elif isinstance(request, PopulationDraw):
                found[request] = rows = FoundRows(request.rows)
                for each in rows.distinct:
                    if (borrowed := self._row_for(each, request, new, joined)) is not None:
                        rows.put(each, borrowed)
            else:
                lacking = False
                if request.wanted.computes and self._kept is not None:
                    lacking = request.row.of_weights(0) not in self._kept
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
            self._populations.found |= found
            self.cancel([each.request for each in ends if each.request in found])
            ends += self._populations.ready()
        return ends + self._answered(cached) if cached else ends

    def _reads_there(self, request: ReadRequest | PopulationDraw) -> bool:
        """Return whether the engine answers this itself; from a cached row it is answered here."""
        if isinstance(request, PopulationDraw):
            return PopulationDraw in self.capabilities.reads
        there = type(request.wanted) in self.capabilities.reads
        return there and request.row not in self._cache

    def _row_for(
        self,
        row: LogprobsRequest,
        reader: ReadRequest | PopulationDraw,
        new: dict[Request, _Row | None],
        joined: list[tuple[Request, ReadRequest | PopulationDraw | None]],
        *,
        lacking: bool = False,
    ) -> Tensor | None:
        """Return a cached row, unless it is ``lacking`` in the engine; otherwise have the reader share
        the row that is in progress, or a new one."""
        if row in new:
            if (sharing := new[row]) is None:
                new[row] = sharing = _Row(is_asked=True)
            sharing.readers[reader] = None
        elif row in self._in_progress:
            joined.append((row, reader))
        elif lacking or (borrowed := self._cache.borrow(row)) is None:
            new[row] = _Row({reader: None})
        else:
            return borrowed
        return None

    def _refused(self, new: dict[Request, _Row | None]) -> list[Finished]:
        """Remove from ``new`` the requests that the engine was told to forget and may still hold; return
        their ends, and those of their readers."""
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
        """Step as the Engine protocol says, and answer the reads of the step's rows. Ends that ``tell``
        gets while the step goes on are not returned."""
        populations, going_on = self._populations, bool(self._populations.going_on)
        if self.capabilities.delivers_early:
            self.full.tell = tell and (lambda ends: tell(populations.drawn(ends)))
        try:
            ends = self.engine.step()
        except EngineDied:
            raise
        except Exception:
            self._forget()
            raise
        for end in ends if self._unforgotten else ():
            self._unforgotten.pop(end.request, None)
        ends = populations.ended(ends) if going_on else ends
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
                elif not populations.found[reader].put(
                    cast("LogprobsRequest", end.request), cast("Tensor", end.result)
                ):
                    whole.append(reader)
        if failed:
            self.cancel([*failed])
        finished += [populations.answered(each) for each in whole if each not in failed]
        return finished + self._answered(reads) if reads else finished

    def progress(self, streamed: Sequence[Streamed]) -> Sequence[Told | None]:
        """Return the deltas of each of these since the last call, if there are any."""
        if not self.capabilities.completes:
            return [None] * len(streamed)
        return self.full.progress(streamed)

    def cancel(self, requests: Sequence[Request]) -> None:
        """Cancel as the Engine protocol says; a row goes with the last request for it. Raises EngineDied
        alone: any other error of the engine concerns only equal requests that come later."""
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
                unwanted += self._populations.give_up([request])
                if (found := self._populations.found.pop(request, None)) is not None:
                    for source in found.distinct:
                        unwanted += self._without(source, request)
        if unwanted:
            self._cancel(unwanted)

    def _without(
        self, source: LogprobsRequest, reader: ReadRequest | PopulationDraw
    ) -> list[LogprobsRequest]:
        """Remove a reader from a row; return the row if it is not wanted any more."""
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
        """Have the engine forget these, and all that it has not forgotten before."""
        unforgotten = [*self._unforgotten, *unwanted]
        try:
            self.engine.cancel(unforgotten)
        except Exception as error:
            self._unforgotten = dict.fromkeys(unforgotten, survived(error))
        else:
            self._unforgotten.clear()

    def _still_held(self, new: Collection[Request]) -> dict[Request, GenrtError]:
        """Return those that the engine was told to forget and may still hold, with what it raised."""
        if self._unforgotten:
            self._cancel([])
        return {each: error for each, error in self._unforgotten.items() if each in new}

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        """Load an adapter, from a copy of its files. ``Adapters.copied`` makes it before where that must
        not hold up the engine; it is kept if this succeeds."""
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
        """Remove an adapter; one that is not loaded, as after a restart, is ignored. Its prefixes are
        kept for the one that is loaded under its name now, if there is one. Raises EngineDied alone:
        after any other error the weights may stay until the next restart."""
        if adapter not in self._adapters:
            return
        self._adapters.forget(adapter)
        named = [each for each, _ in self._adapters if each.name == adapter.name]
        for prefix in self._prefixes.bound_to(adapter):
            self.release(prefix)
            if named:
                self._keep(prefix.bound_to(named[-1]))
        try:
            self.engine.remove_adapter(adapter)
        except Exception as error:  # nobody waits for this, and no question can name the adapter
            survived(error)

    def forget_residents(self) -> None:
        """Have the engine forget what nothing in progress needs, if it keeps anything."""
        if self.capabilities.forgets_residents:
            self.full.forget_residents()

    def begin_update(self) -> None:
        """Have the engine forget what its weights have computed. Raises EngineFailed if it cannot."""
        if self._still_held(self._unforgotten):
            raise EngineFailed("the engine cannot forget what was cancelled: restart it")
        weights_of(self.engine).begin()

    def reload_adapters(self) -> dict[Adapter, GenrtError]:
        """Load the adapters of the engine before into this one, and have it keep the same prefixes. An
        adapter that it does not take is lost, with its rows and prefixes; return those, each with what
        who asks for it is told."""
        lost: dict[Adapter, GenrtError] = {}
        for adapter, copy in self._adapters:
            try:
                self.engine.add_adapter(adapter, copy)
            except EngineDied:
                raise
            except Exception as error:
                lost[adapter] = self._adapters.lose(adapter, error)
                self._cache.forget(adapter)
        for prefix in self._prefixes:
            if prefix.adapter in lost:
                self._prefixes.discard(prefix)
            elif self._kept is not None:
                self._kept.keep(prefix)
        return lost

    def statistics(self) -> EngineStatistics:
        """Return the engine's, with the reads and the bytes they moved; its ``rows`` and ``requests``
        count those computed for reads too."""
        counted = self.engine.statistics()
        return replace(
            counted,
            reads=counted.reads + self._reads + self._populations.reads,
            bytes_to_host=counted.bytes_to_host
            + self._bytes_to_host
            + self._populations.bytes_to_host,
        )

    def close(self) -> None:
        self._in_progress.clear()
        self._populations.clear()
        self._unforgotten.clear()
        self.engine.close()

    def _forget(self) -> None:
        """Forget everything after a failed step, and have the engine forget rows that only reads asked
        for."""
        unasked = [
            r for r, row in self._in_progress.items() if row is not None and not row.is_asked
        ]
        self._in_progress.clear()
        self._populations.clear()
        self._unforgotten.clear()
        if unasked:
            self._cancel(unasked)

    def expect(self, rows: Sequence[LogprobsRequest], token_ids: Tensor) -> None:
        """Tell the engine which tokens were drawn from these rows, if no two draws share one."""
        if self.capabilities.speculates:
            different = dict.fromkeys(rows)
            if len(different) == len(rows):
                self.full.expect(list(different), token_ids)

    def keep(self, read: Read) -> None:
        """Keep a copy of a read's row in the cache."""
        if read.request.row not in self._cache:
            self._cache.put(read.request.row, read.row)

    def keep_context(self, read: Read) -> None:
        """Have the engine keep what it has computed of a read's context, and every later one too."""
        self._keep(read.request.row.of_weights(0))  # whatever the weights

    def _keep(self, prefix: LogprobsRequest) -> None:
        if self._kept is None:
            return
        for over in self._prefixes.add(prefix):
            self._kept.release(over)
        self._kept.keep(prefix)

    def release(self, prefix: LogprobsRequest) -> None:
        """Have the engine keep a prefix no more; ignore one that it does not keep."""
        self._prefixes.discard(prefix)
        if self._kept is not None:
            self._kept.release(prefix)

    def give_back(self, asked: Sequence[SequenceHandle]) -> None:
        """Have the engine forget sequences that no population goes on from."""
        self._populations.release(asked)

    def _answered(self, reads: Sequence[Read]) -> list[Finished]:
        """Return the ends of reads whose rows are there. A group that fails, as when it runs out of
        memory, fails alone."""
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


def _bytes(result: object) -> int:
    """Return how much of a result came from the device: its tensors, and 8 bytes for each number."""
    if isinstance(result, Tensor):
        return int(result.nbytes)
    parts = result if isinstance(result, tuple) else (result,)
    return sum(int(part.nbytes) if isinstance(part, Tensor) else 8 for part in parts)


class FoundRows:
    """The rows that a population asks for, those that are found, and how many are missing."""

    def __init__(self, asked: Sequence[LogprobsRequest]) -> None:
        self.asked = asked
        self.distinct = dict.fromkeys(asked)
        self.missing = len(self.distinct)
        self._rows: dict[LogprobsRequest, Tensor] = {}

    def put(self, row: LogprobsRequest, found: Tensor) -> int:
        """Add a row; return how many are missing still."""
        self._rows[row] = found
        self.missing -= 1
        return self.missing

    def of_sequences(self) -> list[Tensor]:
        """Return the row of each sequence, in order."""
        return [self._rows[row] for row in self.asked]


class _Populations:
    """The populations in progress of one engine.

    Attributes:
        found: the populations whose rows are asked for one by one; ``AnsweringEngine`` puts them there.
        going_on: the others, which go on by number.
        reads, bytes_to_host: count draws, as ``EngineStatistics`` does.

    Args:
        engine: asked for populations by number if ``by_number``.
        expect: called with tokens drawn from rows that were asked for one by one.
    """

    def __init__(
        self,
        engine: FullEngine,
        expect: Callable[[Sequence[LogprobsRequest], Tensor], None],
        *,
        by_number: bool,
    ) -> None:
        self.found: dict[PopulationDraw, FoundRows] = {}
        self.going_on: dict[Request, None] = {}
        self.reads = 0
        self.bytes_to_host = 0
        self._engine = engine
        self._by_number = by_number
        self._expect = expect
        self._wrong: list[SequenceHandle] = []  # with rows that are not finite, to be released

    def go_on(self, populations: Sequence[PopulationDraw]) -> dict[Request, None]:
        """Have the engine take those of the populations that go on by number; return these."""
        if not self._by_number:
            return {}
        going_on = [each for each in populations if each.origins]
        taken: dict[Request, None] = {}
        # Of two that go on alike, each would have its rows computed for itself: they share them.
        for each, alike in zip(going_on, _times(going_on), strict=True):
            if alike == 1 and self._engine.go_on(each):
                taken[each] = self.going_on[each] = None
        return taken

    def give_up(self, requests: Iterable[Request]) -> list[Request]:
        """Forget these; return those that the engine has to forget."""
        return [each for each in requests if self.going_on.pop(each, self) is None]

    def clear(self) -> None:
        """Forget everything that is in progress."""
        self.found.clear()
        self.going_on.clear()
        self._wrong.clear()

    def release(self, asked: Sequence[SequenceHandle]) -> None:
        """Have the engine forget sequences that it knows by number."""
        if self._by_number:
            self._engine.release(asked)

    def ready(self) -> list[Finished]:
        """Return the ends of populations that lack no row."""
        whole = [each for each, found in self.found.items() if not found.missing]
        return [self.answered(each) for each in whole]

    def answered(self, population: PopulationDraw) -> Finished:
        """Return the end of a population whose rows were asked for one by one, and are there."""
        found = self.found.pop(population)
        try:
            rows = found.of_sequences()
            whole = population.draw(rows)
            on_host = Leaving(whole)
            # Before anything waits for the tokens.
            self._expect(population.rows, whole[:, 0])
            draws = self._arrived(population, on_host)
        except Exception as error:
            return Finished(population, error=survived(error))
        if self._by_number:
            self._engine.settle(population)
        return Finished(population, draws)

    def ended(self, ends: Sequence[Finished]) -> list[Finished]:
        """Return a step's ends, with draws in place of the rows of populations."""
        drawn = self.drawn(ends)
        wrong, self._wrong = self._wrong, []
        if wrong:
            self.release(wrong)
        return drawn

    def drawn(self, ends: Sequence[Finished]) -> list[Finished]:
        """Return some of the ends of a step that goes on; ``ended`` still has to be called after it."""
        return [self._drawn(end) for end in ends]

    def _drawn(self, end: Finished) -> Finished:
        population = end.request
        if not self._by_number or not isinstance(population, PopulationDraw):
            return end
        self.going_on.pop(population, None)
        if end.error is not None:
            return end
        try:
            draws = self._arrived(population, cast("Leaving", end.result))
        except Exception as error:
            return Finished(population, error=survived(error))
        if np.isnan(draws.log_mass.numpy()).any():
            self._wrong.append(population.handle)
            return Finished(population, error=not_finite())
        return Finished(population, draws)

    def _arrived(self, population: PopulationDraw, on_host: Leaving) -> BatchDraw:
        """Return draws, once they are on the host."""
        found = on_host.arrived().numpy()
        self.reads += len(population)
        if self._engine.device.type != "cpu":
            self.bytes_to_host += found.nbytes
        token_ids = torch.from_numpy(found[:, 0].astype(np.int64))
        numbers = torch.from_numpy(found[:, 1:].T.astype(np.float32))
        return BatchDraw.of((token_ids, *numbers), population.weights_version)


def _times(populations: Sequence[PopulationDraw]) -> list[int]:
    """Return how many of these go on from the same sequences by the same tokens as each of them."""
    if len(populations) == 1:
        return [1]
    ways = [
        (origins.handles, origins.numbers.tobytes(), each.contexts.last_tokens.tobytes())
        for each in populations
        if (origins := each.origins) is not None
    ]
    times = Counter(ways)
    return [times[way] for way in ways]
