"""Rows in, answers out: who reads from which row. How a kind of read is answered, ``questions/`` knows.

Engines know rows and samples; ``AnsweringEngine`` makes of any such engine one that takes reads too.

Rules:
    All who read from one row share it: with each other, with whoever asked for the row itself, and with
    the cache, whose rows answer without the engine.
    A step's reads are answered together, kind by kind, with few copies to the host.
    What needs no forward, a read from a row in the cache, is answered beside the step, not in its place.
    An engine that raises when it is told to forget something may still hold it: it is told again before
    it gets anything new, and if it raises again, an equal request fails, alone.
    A row that was only read from is not kept: that would copy it. One that was moved to the host is.
    A read's answer depends on its row and itself alone, never on what it was batched with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from genrt.engines.adapters import Adapters, drop_copy
from genrt.engines.protocol import (
    Completing,
    Engine,
    EngineStatistics,
    Finished,
    Keeping,
    Reading,
    Replicated,
    Speculating,
    Telling,
    survived,
)
from genrt.engines.weights import weights_of
from genrt.errors import EngineDied, EngineFailed, GenrtError, InvalidAdapter
from genrt.questions.completions import Streamed, Told
from genrt.questions.contexts import Adapter
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import Read, ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import SequenceHandle
from genrt.runtime.cache import RowCache
from genrt.runtime.population_answers import FoundRows, PopulationAnswers
from genrt.runtime.prefixes import PrefixesToKeep

__all__ = ["AnsweringEngine"]


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
        prefixes: PrefixesToKeep | None = None,
    ) -> None:
        self.engine, self.device = engine, engine.device
        self.vocab_size, self.max_model_len = engine.vocab_size, engine.max_model_len
        self.max_batch_size = engine.max_batch_size
        self._adapters = Adapters() if adapters is None else adapters
        self._prefixes = PrefixesToKeep() if prefixes is None else prefixes
        self._kept = engine.prefixes if isinstance(engine, Keeping) else None
        self._speculating = engine if isinstance(engine, Speculating) else None
        self._completing = engine if isinstance(engine, Completing) else None
        self._telling = engine if isinstance(engine, Telling) else None
        self._read_there = engine.reads if isinstance(engine, Reading) else frozenset()
        self.replicated = engine if isinstance(engine, Replicated) else None
        self._cache = cache
        self._readers: dict[LogprobsRequest, dict[ReadRequest | PopulationDraw, None]] = {}
        self._asked: set[Request] = set()
        self._cached: dict[ReadRequest, Tensor] = {}
        self._populations = PopulationAnswers(engine, self.expect)
        self._refused: list[Finished] = []
        self._unforgotten: dict[Request, GenrtError] = {}
        self._reads = 0
        self._bytes_to_host = 0

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def __repr__(self) -> str:
        readers = sum(map(len, self._readers.values())) + len(self._cached)
        return f"AnsweringEngine({self.engine!r}, {readers} reads in progress)"

    def submit(self, requests: Sequence[Request]) -> None:
        """Take a flush as an engine does, with reads. ``ready`` has those that need no forward."""
        populations = [each for each in requests if isinstance(each, PopulationDraw)]
        # What is still to be forgotten may be sequences that they would go on from.
        if not populations or self._unforgotten:
            self._submit(requests)
            return
        try:
            going_on = self._populations.go_on(populations)
            self._submit([each for each in requests if each not in going_on])
        except BaseException:
            if given_up := self._populations.give_up(populations):
                self._cancel(given_up)
            raise

    def _submit(self, requests: Sequence[Request]) -> None:
        new: dict[Request, None] = {}
        asked: list[Request] = []
        readers: dict[LogprobsRequest, dict[ReadRequest | PopulationDraw, None]] = {}
        cached: dict[ReadRequest, Tensor] = {}
        populations: dict[PopulationDraw, FoundRows] = {}
        for request in requests:
            if self._read_there and self._is_read_there(request):
                asked.append(request)
                new[request] = None
            elif isinstance(request, PopulationDraw):
                populations[request] = found = FoundRows(request.rows)
                for each in found.distinct:
                    if (borrowed := self._joined(each, request, new, readers)) is not None:
                        found.put(each, borrowed)
            elif isinstance(request, ReadRequest):
                row, lacking = request.row, False
                if request.wanted.computes and self._kept is not None:
                    lacking = row.of_weights(0) not in self._kept
                borrowed = self._joined(row, request, new, readers, lacking=lacking)
                if borrowed is not None:
                    cached[request] = borrowed
            else:
                asked.append(request)
                # A row that only reads have asked for so far is in the engine already.
                if request not in self._readers or request in self._asked:
                    new[request] = None
        refused: list[Finished] = []
        for request, error in self._still_held(new).items():
            del new[request]
            concerned: list[Request] = [*readers.pop(cast("LogprobsRequest", request), ())]
            if request in asked:
                asked.remove(request)
                concerned.append(request)
            refused += [Finished(each, error=error) for each in concerned]
        if new:
            self.engine.submit(list(new))
        self._refused += refused
        self._cached |= cached
        self._populations.found |= populations
        self._asked.update(asked)
        for source, joining in readers.items():
            self._readers.setdefault(source, joining).update(joining)
        self.cancel([each.request for each in refused if each.request in populations])

    def _is_read_there(self, request: Request) -> bool:
        """Return whether the engine answers this itself; from a row in the cache it is answered here."""
        if not isinstance(request, ReadRequest):
            return type(request) in self._read_there
        return type(request.wanted) in self._read_there and request.row not in self._cache

    def _joined(
        self,
        row: LogprobsRequest,
        request: ReadRequest | PopulationDraw,
        new: dict[Request, None],
        readers: dict[LogprobsRequest, dict[ReadRequest | PopulationDraw, None]],
        *,
        lacking: bool = False,
    ) -> Tensor | None:
        """Return a row that the cache has, unless it is ``lacking`` in the engine; otherwise have the
        request join its readers, and the row asked for if it is not yet."""
        sharing = readers.get(row)
        if sharing is not None:
            sharing[request] = None
            return None
        if row not in self._readers and row not in self._asked and row not in new:
            if isinstance(row, LogprobsRequest) and not lacking:
                borrowed = self._cache.borrow(row)
                if borrowed is not None:
                    return borrowed
            new[row] = None
        readers[row] = {request: None}
        return None

    def ready(self) -> list[Finished]:
        """Return the ends of submitted requests that need no forward: reads from rows in the cache, and
        requests that the engine can't take."""
        cached, self._cached = self._cached, {}
        refused, self._refused = self._refused, []
        if self._populations.found:
            refused += self._populations.ready()
        return refused + self._answered([Read(each, row) for each, row in cached.items()])

    def step(self, tell: Callable[[Sequence[Finished]], object] | None = None) -> list[Finished]:
        """Step as the Engine protocol says, and answer the reads of the step's rows. ``tell`` may be told
        of ends while the step goes on; these are not returned."""
        populations, going_on = self._populations, bool(self._populations.going_on)
        if self._telling is not None:
            self._telling.tell = tell and (lambda ends: tell(populations.drawn(ends)))
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
        if not self._readers:
            self._asked.difference_update([end.request for end in ends])
            return ends
        finished: list[Finished] = []
        reads: list[Read] = []
        failed: dict[PopulationDraw, None] = {}
        whole: list[PopulationDraw] = []
        for end in ends:
            readers = self._readers.pop(cast("LogprobsRequest", end.request), None)
            if readers is None or end.request in self._asked:
                finished.append(end)
                self._asked.discard(end.request)
            if readers is None:
                continue
            if end.error is not None:
                for reader in readers:
                    if reader not in failed:
                        finished.append(Finished(reader, error=end.error))
                    if isinstance(reader, PopulationDraw):
                        failed[reader] = None
                continue
            row = cast("Tensor", end.result)
            for reader in readers:
                if isinstance(reader, ReadRequest):
                    reads.append(Read(reader, row))
                elif not self._populations.found[reader].put(
                    cast("LogprobsRequest", end.request), row
                ):
                    whole.append(reader)
        if failed:
            self.cancel([*failed])
        finished += [self._populations.answered(each) for each in whole if each not in failed]
        return finished + self._answered(reads)

    def progress(self, streamed: Sequence[Streamed]) -> Sequence[Told | None]:
        """Return what each of these has drawn since it was asked last, if anything."""
        if self._completing is None:
            return [None] * len(streamed)
        return self._completing.progress(streamed)

    def cancel(self, requests: Sequence[Request]) -> None:
        """Cancel as the Engine protocol says; a row goes with the last request for it. Raises EngineDied
        alone: any other error of the engine concerns only equal requests that come later."""
        unwanted: list[Request] = []
        for request in requests:
            if request in self._asked or not isinstance(request, ReadRequest | PopulationDraw):
                if request not in self._readers:
                    unwanted.append(request)
                self._asked.discard(request)
            elif isinstance(request, PopulationDraw):
                unwanted += self._populations.give_up([request])
                if (found := self._populations.found.pop(request, None)) is not None:
                    for source in found.distinct:
                        unwanted += self._left(source, request)
            elif self._cached.pop(request, None) is None:
                unwanted += self._left(request.row, request)
        if unwanted:
            self._cancel(unwanted)

    def _left(
        self, row: LogprobsRequest, reader: ReadRequest | PopulationDraw
    ) -> list[LogprobsRequest]:
        """Take a reader off a row; return the row if nobody wants it any more."""
        readers = self._readers.get(row, {})
        if reader not in readers:
            return []
        del readers[reader]
        if readers:
            return []
        del self._readers[row]
        return [] if row in self._asked else [row]

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
        getattr(self.engine, "forget_residents", lambda: None)()

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
        self._readers.clear()
        self._asked.clear()
        self._cached.clear()
        self._populations.clear()
        self._refused.clear()
        self._unforgotten.clear()
        self.engine.close()

    def _forget(self) -> None:
        """Forget everything after a failed step, and have the engine forget it."""
        unasked = [row for row in self._readers if row not in self._asked]
        self._readers.clear()
        self._populations.clear()
        self._asked.clear()
        self._unforgotten.clear()
        if unasked:
            self._cancel(unasked)

    def expect(self, rows: Sequence[LogprobsRequest], token_ids: Tensor) -> None:
        """Tell the engine which tokens were drawn from these rows, if no two draws share one."""
        if self._speculating is not None:
            different = dict.fromkeys(rows)
            if len(different) == len(rows):
                self._speculating.expect(list(different), token_ids)

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
