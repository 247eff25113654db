"""Rows in, answers out: what is read from a step's rows where they are, for all who ask at once.

Engines know rows and samples; ``AnsweringEngine`` makes of any such engine one that takes reads too.

Rules:
    All who read from one row share it: with each other, with whoever asked for the row itself, and with
    the cache, whose rows answer without the engine.
    A step's reads are answered together, kind by kind, with one copy to the host per kind, and nothing
    waits for the device before that.
    What needs no forward, a read from a row in the cache, is answered beside the step, not in its place.
    An engine that raises when it is told to forget something may still hold it: it is told again before
    it gets anything new, and if it raises again, an equal request fails, alone.
    A row that was only read from is not kept: that would copy it. One that was moved to the host is.
    A read's answer depends on its row and itself alone, never on what it was batched with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from genrt.engines.adapters import Adapters
from genrt.engines.protocol import Engine, EngineStatistics, Finished, Speculating, survived
from genrt.errors import EngineDied, GenrtError, InvalidAdapter
from genrt.questions.values import (
    Adapter,
    Candidates,
    DrawToken,
    HostRow,
    LogprobsRequest,
    ReadRequest,
    Request,
    Result,
    SampleRequest,
    TopTokens,
    seed_of,
)
from genrt.runtime.cache import RowCache
from genrt.tokens.rows import Leaving, together
from genrt.tokens.sampling import Draw, TopLogprobs, drawn, rows_at_once, seeded_uniforms

__all__ = ["AnsweringEngine"]


class _Read(NamedTuple):
    """One thing to read, and the row ``[vocab_size]`` to read it from, which others may share."""

    request: ReadRequest
    row: Tensor


_Answer: TypeAlias = Callable[[Sequence[_Read]], Iterator[Result]]
"""How one kind of read is answered: the results of reads, in their order."""


class AnsweringEngine:
    """An engine that answers reads from the rows of another. What it takes otherwise passes through.

    Args:
        engine: computes rows and samples; owned by whoever made it, as ``close`` passes through too.
        cache: rows that answer without the engine; rows on their way to the host are put there.
        adapters: those that are loaded, with the copies of them that the engine is given.
    """

    def __init__(self, engine: Engine, cache: RowCache, adapters: Adapters | None = None) -> None:
        self.engine = engine
        self._adapters = Adapters() if adapters is None else adapters
        self._speculating = engine if isinstance(engine, Speculating) else None
        self._cache = cache
        self._readers: dict[LogprobsRequest, dict[ReadRequest, None]] = {}
        self._asked: set[Request] = set()
        self._cached: dict[ReadRequest, Tensor] = {}
        self._refused: list[Finished] = []
        self._unforgotten: dict[Request, GenrtError] = {}
        self._reads = 0
        self._bytes_to_host = 0

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def max_batch_size(self) -> int:
        return self.engine.max_batch_size

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def __repr__(self) -> str:
        readers = sum(map(len, self._readers.values())) + len(self._cached)
        return f"AnsweringEngine({self.engine!r}, {readers} reads in progress)"

    def submit(self, requests: Sequence[Request]) -> None:
        """As in the Engine protocol, and reads. What needs no forward is in ``ready`` from now on."""
        new: dict[Request, None] = {}
        asked: list[Request] = []
        readers: dict[LogprobsRequest, dict[ReadRequest, None]] = {}
        cached: dict[ReadRequest, Tensor] = {}
        for request in requests:
            if not isinstance(request, ReadRequest):
                asked.append(request)
                if request not in self._readers or request in self._asked:
                    new[request] = None
                continue
            row = request.row
            sharing = readers.get(row)
            if sharing is not None:
                sharing[request] = None
                continue
            if row not in self._readers and row not in self._asked and row not in new:
                borrowed = self._cache.borrow(row)
                if borrowed is not None:
                    cached[request] = borrowed
                    continue
                new[row] = None
            readers[row] = {request: None}
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
        self._asked.update(asked)
        for row, joining in readers.items():
            self._readers.setdefault(row, joining).update(joining)

    def ready(self) -> list[Finished]:
        """The ends of what was submitted and needs no forward: reads from rows that are in the cache, and
        requests that the engine can't take."""
        cached, self._cached = self._cached, {}
        refused, self._refused = self._refused, []
        return refused + self._answered([_Read(each, row) for each, row in cached.items()])

    def step(self) -> list[Finished]:
        """As in the Engine protocol."""
        try:
            ends = self.engine.step()
        except EngineDied:
            raise
        except Exception:
            self._forget()
            raise
        for end in ends if self._unforgotten else ():
            self._unforgotten.pop(end.request, None)
        if not self._readers:
            self._asked.difference_update([end.request for end in ends])
            return ends
        finished: list[Finished] = []
        reads: list[_Read] = []
        for end in ends:
            readers = self._readers.pop(cast("LogprobsRequest", end.request), None)
            if readers is None or end.request in self._asked:
                finished.append(end)
                self._asked.discard(end.request)
            if readers is None:
                continue
            if end.error is not None:
                finished += [Finished(request, error=end.error) for request in readers]
            else:
                reads += [_Read(request, cast("Tensor", end.result)) for request in readers]
        return finished + self._answered(reads)

    def cancel(self, requests: Sequence[Request]) -> None:
        """As in the Engine protocol; a row is cancelled with the last who wants it. Raises EngineDied
        alone: any other error of the engine concerns only who asks the same again."""
        unwanted: list[Request] = []
        for request in requests:
            if isinstance(request, ReadRequest):
                readers = self._readers.get(request.row, {})
                if self._cached.pop(request, None) is None and request in readers:
                    del readers[request]
                    if not readers:
                        del self._readers[request.row]
                        if request.row not in self._asked:
                            unwanted.append(request.row)
                continue
            if isinstance(request, SampleRequest) or request not in self._readers:
                unwanted.append(request)
            self._asked.discard(request)
        if unwanted:
            self._cancel(unwanted)

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
        """Those of these that the engine was to forget and may still hold, and what it raised instead."""
        if self._unforgotten:
            self._cancel([])
        return {each: error for each, error in self._unforgotten.items() if each in new}

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        copy = self._adapters.keep(adapter, path)
        try:
            self.engine.add_adapter(adapter, copy)
        except BaseException as error:
            self._adapters.forget(adapter)
            if isinstance(error, InvalidAdapter):
                raise InvalidAdapter(str(error).replace(str(copy), str(path))) from error
            raise

    def remove_adapter(self, adapter: Adapter) -> None:
        """As in the Engine protocol; one that is not loaded, as after a restart, is ignored. Raises
        EngineDied alone: after any other error the weights may stay until the next restart."""
        if adapter not in self._adapters:
            return
        self._adapters.forget(adapter)
        try:
            self.engine.remove_adapter(adapter)
        except Exception as error:  # nobody waits for this, and no question can name the adapter
            survived(error)

    def reload_adapters(self) -> dict[Adapter, GenrtError]:
        """Load the adapters of the engine before into this one. One that it does not take is lost, with
        its rows; return those, each with what who asks for it is told."""
        lost: dict[Adapter, GenrtError] = {}
        for adapter, copy in self._adapters:
            try:
                self.engine.add_adapter(adapter, copy)
            except EngineDied:
                raise
            except Exception as error:
                lost[adapter] = self._adapters.lose(adapter, error)
                self._cache.forget(adapter)
        return lost

    def statistics(self) -> EngineStatistics:
        """The engine's, with the reads and what they moved; ``rows`` and ``requests`` count the rows that
        were computed for reads."""
        counted = self.engine.statistics()
        return replace(
            counted, reads=self._reads, bytes_to_host=counted.bytes_to_host + self._bytes_to_host
        )

    def close(self) -> None:
        self._readers.clear()
        self._asked.clear()
        self._cached.clear()
        self._refused.clear()
        self._unforgotten.clear()
        self.engine.close()

    def _forget(self) -> None:
        """After a failed step: nothing is in progress, nor may the engine think so."""
        unasked = [row for row in self._readers if row not in self._asked]
        self._readers.clear()
        self._asked.clear()
        self._unforgotten.clear()
        if unasked:
            self._cancel(unasked)

    def _answered(self, reads: Sequence[_Read]) -> list[Finished]:
        """The ends of reads whose rows are there. A kind that fails, for want of memory say, fails
        alone."""
        by_kind: dict[_Answer, list[_Read]] = {}
        for read in reads:
            by_kind.setdefault(self._answer(read.request), []).append(read)
        finished: list[Finished] = []
        for answer, group in by_kind.items():
            try:
                results = list(answer(group))
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

    def _answer(self, request: ReadRequest) -> _Answer:
        match request.wanted:
            case DrawToken(temperature=1.0):
                return self._draws
            case DrawToken():
                return self._tempered_draws
            case TopTokens():
                return _tops
            case Candidates():
                return _candidates
            case HostRow():
                return self._host_rows

    def _draws(self, reads: Sequence[_Read]) -> Iterator[Result]:
        """One draw for each, all of them at temperature 1."""
        return self._on_host(reads, [_drawn(part, None) for part in _parts(reads)])

    def _tempered_draws(self, reads: Sequence[_Read]) -> Iterator[Result]:
        """One draw for each."""
        parts = []
        for part in _parts(reads):
            row = part[0].row
            asked: list[DrawToken] = _wanted(part)
            heat = torch.tensor([[each.temperature] for each in asked], dtype=torch.float64)
            parts.append(_drawn(part, _moved(heat, row.device)))
        return self._on_host(reads, parts)

    def _on_host(self, reads: Sequence[_Read], parts: Sequence[Tensor]) -> Iterator[Draw]:
        """The draws in these, by one copy; logprob and log mass are float32 numbers. The engine is told
        before anything waits for them."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        on_host = Leaving(whole)
        if self._speculating is not None:
            rows = dict.fromkeys(read.request.row for read in reads)
            if len(rows) == len(reads):
                self._speculating.expect(list(rows), whole[:, 0])
        token_ids, logprobs, log_mass = on_host.arrived().unbind(dim=-1)
        found = zip(
            token_ids.long().tolist(),
            logprobs.float().tolist(),
            log_mass.float().tolist(),
            strict=True,
        )
        return map(Draw._make, found)

    def _host_rows(self, reads: Sequence[_Read]) -> Iterator[Result]:
        """The rows on the host, as views of one block of pinned memory: who keeps one copies it."""
        first = reads[0].row
        on_device = first.device.type != "cpu"
        block = torch.empty(len(reads), len(first), dtype=first.dtype, pin_memory=on_device)
        for part, places in zip(
            _parts(reads), torch.split(block, rows_at_once(first)), strict=True
        ):
            places.copy_(_rows(part), non_blocking=True)
        if on_device:
            torch.cuda.current_stream(first.device).synchronize()
        for read in reads:
            if read.request.row not in self._cache:
                self._cache.put(read.request.row, read.row)
        yield from block


def _parts(reads: Sequence[_Read]) -> Iterator[Sequence[_Read]]:
    """As many reads at a time as are best worked on."""
    size = rows_at_once(reads[0].row)
    for start in range(0, len(reads), size):
        yield reads[start : start + size]


def _rows(reads: Sequence[_Read]) -> Tensor:
    """``[n, vocab_size]``, not to be written to."""
    return together([read.row for read in reads])


def _wanted(reads: Sequence[_Read]) -> list[Any]:
    return [read.request.wanted for read in reads]


def _drawn(reads: Sequence[_Read], heat: Tensor | None) -> Tensor:
    """As ``sampling.drawn`` returns them. Masks and random numbers are on their way before the rows are
    touched, which may still be computed."""
    row = reads[0].row
    asked: list[DrawToken] = _wanted(reads)
    numbers = _moved(_uniforms(asked), row.device)
    return drawn(_rows(reads), numbers, mask=_masks(asked, row), heat=heat)


def _uniforms(asked: Sequence[DrawToken]) -> Tensor:
    """The random numbers of these draws, ``[n, 2]`` as ``sampling.draw`` takes them, on the host."""
    return seeded_uniforms([seed_of(each) for each in asked])


def _masks(asked: Sequence[DrawToken], row: Tensor) -> Tensor | None:
    """Packed as ``sampling.draw`` takes them, on the row's device; ``None`` if nothing is masked."""
    masks = [each.mask for each in asked]
    if not any(mask is not None for mask in masks):
        return None
    size = -(-len(row) // 32) * 4
    everything = b"\xff" * size
    packed = torch.empty(len(asked), size, dtype=torch.uint8, pin_memory=row.is_cuda)
    places = packed.view(-1).numpy().data
    for start, mask in zip(range(0, len(places), size), masks, strict=True):
        places[start : start + size] = everything if mask is None else mask
    return packed.to(row.device, non_blocking=True)


def _moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on the device, without a wait for what the device is at."""
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def _tops(reads: Sequence[_Read]) -> Iterator[Result]:
    """The likeliest tokens, each asker's share of the longest list that was asked for; of equally likely
    ones those with the lower ids first, so that a share does not depend on the list."""
    for part in _parts(reads):
        rows = _rows(part)
        asked: list[TopTokens] = _wanted(part)
        # The bits of a float as a number that orders as it does, with the token id to break ties.
        bits = rows.view(torch.int32)
        order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * 2**32
        order += torch.arange(2**32 - 1, 2**32 - 1 - rows.shape[-1], -1, device=rows.device)
        keys = order.topk(max(each.k for each in asked), dim=-1).values
        token_ids = 2**32 - 1 - (keys & (2**32 - 1))
        logprobs = rows.gather(-1, token_ids)
        for each, ids, values in zip(asked, token_ids.cpu(), logprobs.cpu(), strict=True):
            yield TopLogprobs(ids[: each.k].clone(), values[: each.k].clone())


def _candidates(reads: Sequence[_Read]) -> Iterator[Result]:
    """Entries of the rows, read with one index over all of them."""
    asked: list[Candidates] = _wanted(reads)
    counts = [len(each.token_ids) for each in asked]
    index = torch.tensor(
        [token_id for each in asked for token_id in each.token_ids], dtype=torch.int64
    )
    index = index.to(reads[0].row.device)
    parts = zip(reads, torch.split(index, counts), strict=True)
    entries = torch.cat([read.row[ids] for read, ids in parts]).cpu()
    for each in torch.split(entries, counts):
        yield each.clone()


def _bytes(result: Result) -> int:
    """How much of a result came from the device."""
    if isinstance(result, Tensor):
        return int(result.nbytes)
    return sum(int(part.nbytes) if isinstance(part, Tensor) else 8 for part in result)
