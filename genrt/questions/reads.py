"""Reads of rows that stay on the device: their entries, their likeliest tokens, or a copy on the host.

A kind of read is a frozen ``Wanted`` value with a method that answers all reads of the kind in a step.
``draws.py`` has one more kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypedDict

import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.numbers import check_float, check_int
from genrt.questions.arguments import Adapter, TokenIds, abbreviated
from genrt.questions.request import Request
from genrt.questions.rows import Limits, LogprobsRequest, moved_rows, row_request
from genrt.tokens.rows import entries_of, gather_rows, separate_copies
from genrt.tokens.sampling import (
    TopLogprobs,
    likeliest,
    rows_at_once,
    top_with_tail,
    truncate,
)


class Wanted:
    """What to read from a row: a frozen dataclass derives from this class."""

    __slots__ = ()

    computes: ClassVar[bool] = False
    """Whether the engine computes the context even if its row is known."""

    @property
    def nbytes(self) -> int:
        """The memory that this takes beside the context, if it is large."""
        return 0

    @property
    def group(self) -> Hashable:
        """Equal for reads that are answered together."""
        return (type(self),)

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterable[object]:
        """Return the results of one group of reads, in order. An error fails the whole group."""
        raise NotImplementedError

    def owned(self, result: Any) -> object:
        """Return a result that one caller may change; tensors were copied before."""
        return result


class Answering(Protocol):
    """The part of the answering engine that a kind of read may use."""

    def expect(self, rows: Sequence[LogprobsRequest], token_ids: Tensor) -> None:
        """Tell the engine which tokens, float64 ``[n]`` on its device, were drawn from these rows."""
        ...

    def keep(self, read: Read) -> None:
        """Keep a copy of a read's row in the cache."""
        ...

    def keep_context(self, read: Read) -> None:
        """Make the engine keep the computed context of a read."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class ReadRequest(Request):
    """A read of a row that stays on the device. An engine that lists the kind in ``reads`` answers it;
    for other engines, ``answers.py`` requests the row once for all reads of it."""

    row: LogprobsRequest
    wanted: Wanted
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.row, self.wanted)))

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.row.token_ids

    @property
    def adapter(self) -> Adapter | None:
        return self.row.adapter

    @property
    def weights_version(self) -> int:
        return self.row.weights_version

    @property
    def nbytes(self) -> int:
        return self.row.nbytes + self.wanted.nbytes

    def bound_to(self, adapter: Adapter | None) -> ReadRequest:
        return ReadRequest(self.row.bound_to(adapter), self.wanted)

    def of_weights(self, version: int) -> ReadRequest:
        return ReadRequest(self.row.of_weights(version), self.wanted)

    def owned(self, result: object) -> object:
        return self.wanted.owned(result)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        kind = type(self.wanted).__name__
        return f"ReadRequest({kind}, {abbreviated(self.token_ids)}, adapter={self.adapter})"


class Read(NamedTuple):
    """One read, and its row ``[vocab_size]``, which other reads may share."""

    request: ReadRequest
    row: Tensor


def wanted_of(reads: Sequence[Read]) -> list[Any]:
    """Return the ``Wanted`` values of the reads."""
    return [read.request.wanted for read in reads]


def parts_of(reads: Sequence[Read]) -> Iterator[tuple[Sequence[Read], Tensor]]:
    """Yield as many reads at a time as ``rows_at_once`` allows, with their rows ``[n, vocab_size]``; do
    not write to these."""
    size = rows_at_once(reads[0].row)
    for start in range(0, len(reads), size):
        part = reads[start : start + size]
        yield part, gather_rows([read.row for read in part])


@dataclass(frozen=True, slots=True)
class Candidates(Wanted):
    """The log-probabilities of these tokens in the row, tempered and normalized again. The answer is a
    tensor on the host."""

    token_ids: tuple[int, ...]
    temperature: float = 1.0

    @property
    def group(self) -> tuple[type, bool]:
        """At temperature 1, entries are read without the rest of their row."""
        return type(self), self.temperature == 1.0

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[Tensor]:
        """Yield the entries, read from all rows together."""
        wanted: list[Candidates] = wanted_of(reads)
        if wanted[0].temperature == 1.0:
            found = [entries_of([read.row for read in reads], [each.token_ids for each in wanted])]
        else:
            found = []
            for part, rows in parts_of(reads):
                several: list[Candidates] = wanted_of(part)
                heat = torch.tensor([each.temperature for each in several], dtype=torch.float64)
                heated = truncate(rows, temperature=heat).unbind()
                found.append(entries_of(heated, [each.token_ids for each in several]))
        whole = torch.cat(found).cpu()
        for each in torch.split(whole, [len(each.token_ids) for each in wanted]):
            yield each.clone()


def candidates_request(
    limits: Limits,
    token_ids: TokenIds,
    candidates: TokenIds,
    adapter: Adapter | None,
    temperature: float = 1.0,
) -> ReadRequest:
    """Return the request for entries of a row. Raises InvalidRequest for bad candidates or a bad
    temperature; otherwise as ``row_request``."""
    ids = limits.token_ids(candidates, allow_empty=True, name="candidates")
    wanted = Candidates(ids, checked_temperature(temperature))
    return ReadRequest(row_request(limits, token_ids, adapter), wanted)


def checked_temperature(temperature: Any) -> float:
    """Return a temperature. Raises InvalidRequest unless it is a finite number above 0."""
    number = check_float("temperature", temperature)
    if number <= 0:
        raise InvalidRequest(f"temperature is {number:g}: give a positive number")
    return number


@dataclass(frozen=True, slots=True)
class TopTokens(Wanted):
    """The ``k`` likeliest tokens, ``1 .. vocab_size``, as a ``TopLogprobs``."""

    k: int

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[TopLogprobs]:
        """Yield each read's share of the longest list. Lower ids come first among equally likely
        tokens."""
        for part, rows in parts_of(reads):
            wanted: list[TopTokens] = wanted_of(part)
            token_ids = likeliest(rows, max(each.k for each in wanted))
            logprobs = rows.gather(-1, token_ids)
            for each, ids, values in zip(wanted, token_ids.cpu(), logprobs.cpu(), strict=True):
                yield TopLogprobs(ids[: each.k].clone(), values[: each.k].clone())

    def owned(self, result: TopLogprobs) -> TopLogprobs:
        return TopLogprobs(*separate_copies(result))


def top_request(
    limits: Limits,
    token_ids: TokenIds,
    k: int,
    adapter: Adapter | None,
    temperature: float | None = None,
) -> ReadRequest:
    """Return the request for the likeliest tokens; with a temperature, also for the mass of the others.
    Raises InvalidRequest for a bad number; otherwise as ``row_request``."""
    k = check_int("k", k, 1, limits.vocab_size)
    heat = None if temperature is None else checked_temperature(temperature)
    wanted = TopTokens(k) if heat is None else TopWithTail(k, heat)
    return ReadRequest(row_request(limits, token_ids, adapter), wanted)


@dataclass(frozen=True, slots=True)
class TopWithTail(Wanted):
    """The ``k`` likeliest tokens of the row, tempered and normalized again, and the mass of the others.
    The answer is ``top_with_tail``'s for the row, int32 ``[2 * k + 1]`` on the host."""

    k: int
    temperature: float = 1.0

    @property
    def group(self) -> tuple[type, int]:
        return type(self), self.k

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[Tensor]:
        """Yield the answers, read from many rows together."""
        for part, rows in parts_of(reads):
            wanted: list[TopWithTail] = wanted_of(part)
            heats = torch.tensor([each.temperature for each in wanted], dtype=torch.float64)
            is_plain = bool((heats == 1.0).all())
            found = top_with_tail(rows, wanted[0].k, None if is_plain else heats.to(rows.device))
            yield from found.cpu().unbind()


@dataclass(frozen=True, slots=True)
class HostRow(Wanted):
    """The whole row in the host's memory. The answer is a tensor ``[vocab_size]``."""

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[Tensor]:
        """Yield the rows as views of one block, and put them into the cache; copy a row to keep it."""
        block = moved_rows([read.row for read in reads])
        for read in reads:
            engine.keep(read)
        yield from block


Prefix: TypeAlias = str | TokenIds | Sequence[Mapping[str, Any]]
"""The beginning of many questions: a text, token ids, or the first messages of a conversation."""


class PrefixOptions(TypedDict, total=False):
    """The options that belong to a prefix.

    Attributes:
        adapter: the name of the adapter to ask; by default the base model.
        tools: for a conversation, as in ``TurnOptions``.
        chat_template_kwargs: for a conversation, as in ``TurnOptions``.
    """

    adapter: str | None
    tools: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


class WarmUpOptions(PrefixOptions, total=False):
    """The options of ``AsyncLM.warm_up``: ``PrefixOptions`` and the options of every question.

    Attributes:
        timeout: the seconds until TimedOut is raised. After a timeout or a cancellation during the last
            step of the computation, the prefix may still be kept.
    """

    timeout: float | None


@dataclass(frozen=True, slots=True)
class KeptContext(Wanted):
    """Compute the context and keep it. The answer is ``True``."""

    computes: ClassVar[bool] = True

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[bool]:
        """Make the engine keep the contexts, and the cache their rows, which are likely to be read."""
        for read in reads:
            engine.keep(read)
            engine.keep_context(read)
            yield True
