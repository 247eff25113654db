"""One population: its sequences as arrays, its questions, its changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Self, SupportsIndex, cast

import numpy as np
import torch

from genrt.errors import Closed, InvalidRequest
from genrt.numbers import check_int, shown
from genrt.populations.drawing import Drawing
from genrt.populations.home import Home, PopulationOrigins
from genrt.questions.contexts import check_contexts
from genrt.questions.host_rows import Device, host_row, must_move
from genrt.questions.masks import Masks
from genrt.questions.origins import Origins
from genrt.questions.population_draws import joined_draws
from genrt.questions.rows import check_length
from genrt.questions.scores import after_contexts, joined
from genrt.questions.sequences import (
    MOST_SEQUENCES,
    Contexts,
    Flags,
    Integers,
    Sequences,
    check_flags,
    check_integers,
)
from genrt.questions.token_ids import TokenIds, id_words
from genrt.runtime.ask import blocking_question
from genrt.tokens.sampling import BatchDraw

__all__ = ["Population"]

LAST_INT64 = 2**63 - 1


class Population:
    """Sequences that go on together, held as arrays: the particles of a sampler.

    Made by ``AsyncLM.population``. ``draw``, ``logprobs`` and ``score`` ask about all of them at once;
    ``append``, ``extend``, ``resample`` and ``cut`` change them, and ask nobody. A question is about the
    sequences as they were when it was asked. It is answered, cancelled, timed out and refused as any
    other. What the engine loses by a restart or an eviction between two of them is computed again.

    One task or thread at a time may change a population. It is a context manager: leaving it closes it.
    """

    def __init__(
        self,
        home: Home,
        sequences: Sequences,
        adapter: str | None,
        origins: Origins | None = None,
    ) -> None:
        self._home = home
        self._sequences = sequences
        self._adapter = adapter
        # What the engine knows the sequences by; every change of the sequences is one of these too.
        self._held = PopulationOrigins(
            home, Origins.none(len(sequences)) if origins is None else origins
        )
        self._finalizer = weakref.finalize(self, self._held.close)
        self._finalizer.atexit = False
        self._is_closed = False
        self._ask, self._ask_sync = home.asker.ask, home.asker.ask_sync

    # -- what it holds ------------------------------------------------------------------------

    @property
    def adapter(self) -> str | None:
        """The adapter that questions are bound to, by its name."""
        return self._adapter

    @property
    def lengths(self) -> torch.Tensor:
        """How many tokens each sequence has: int64 ``[n]``, a copy."""
        return torch.from_numpy(self._sequences.lengths.copy())

    @property
    def token_ids(self) -> torch.Tensor:
        """The sequences: int64 ``[n, longest]``, with -1 behind each one's end; a copy."""
        return torch.from_numpy(self._sequences.padded())

    @property
    def _origins(self) -> Origins:
        return self._held.origins

    @_origins.setter
    def _origins(self, origins: Origins) -> None:
        self._held.replace(origins)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, place: SupportsIndex) -> list[int]:
        """Return the token ids of one sequence."""
        return self._sequences.token_ids(range(len(self._sequences))[place])

    def __iter__(self) -> Iterator[list[int]]:
        return map(self._sequences.token_ids, range(len(self)))

    def __repr__(self) -> str:
        lengths = self._sequences.lengths
        spread = f" of {lengths.min()} to {lengths.max()} tokens" if len(self) else ""
        closed = ", closed" if self._is_closed else ""
        return f"Population({len(self)} sequences{spread}, adapter={self._adapter}{closed})"

    # -- questions ----------------------------------------------------------------------------

    async def draw(
        self,
        *,
        masks: Masks | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        where: Flags | None = None,
        timeout: float | None = None,
    ) -> BatchDraw:
        """Draw a token after each sequence, with its weight, as ``AsyncLM.batch_draw`` does; nothing is
        appended. Equal sequences share a row, or are computed in one forward.

        Args:
            masks: what may be drawn after each sequence; those where nothing is asked may be ``None``. A
                packed tensor is not copied: leave it as it is until the draws are there.
            temperature: 0 is greedy.
            seed: sequence ``i`` is drawn with seed ``seed + i``, whatever ``where`` leaves out.
            where: after which sequences; the others, as those that have ended, get token -1, logprob 0
                and log mass 0, which leave a sequence and its weight as they are.

        Raises:
            InvalidRequest: an argument that fits nothing; ContextTooLong, UnknownAdapter.
            EngineFailed: as ``AsyncLM.next_token_logprobs``, and so are TimedOut and Closed.
        """
        home, count = self._home, len(self._sequences)
        places, before = self._places(where), self._origins
        contexts = self._contexts(places)
        drawing = Drawing(
            home=home,
            adapter=self._adapter,
            places=places,
            count=count,
            contexts=contexts,
            origins=before,
            temperature=temperature,
            seed=seed,
            most=home.most,
        )
        found, answered = await drawing.drawn(self._ask, masks, timeout)
        if answered and self._origins is before:  # nothing else was resampled or cut meanwhile
            self._origins = before.after(answered, places, contexts.lengths)
        elif self._is_closed:
            home.give_back(answered)
        return joined_draws(found, places, count)

    async def logprobs(
        self,
        *,
        where: Flags | None = None,
        device: Device | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Return the row after each sequence, or of those in ``where`` alone, in order: float32
        ``[n, vocab_size]``, as ``AsyncLM.batch_next_token_logprobs`` does.

        Raises:
            InvalidRequest: an argument that fits nothing; else as ``draw``.
        """
        moves = must_move(device, self._home.device)
        home, contexts = self._home, self._contexts(self._places(where))
        rows = contexts.rows(home.adapters.bound(self._adapter))
        requests = [host_row(row) for row in rows] if moves else rows
        found = await self._ask(requests, stacked=bool(requests), timeout=timeout)
        if found:
            return cast("torch.Tensor", found[0])
        return torch.empty(0, home.limits.vocab_size, device="cpu" if moves else home.device)

    async def score(
        self,
        continuations: Sequence[TokenIds],
        *,
        temperature: float = 1.0,
        timeout: float | None = None,
    ) -> list[torch.Tensor]:
        """Return what ``AsyncLM.batch_score`` does, of a continuation after each sequence; nothing is
        appended. An empty one asks nothing. At a temperature, above 0, the rows are divided by it and
        normalised again.

        Raises:
            InvalidRequest: not as many continuations as sequences, bad token ids or temperature; else as
                ``draw``.
        """
        home, bound = self._home, self._home.adapters.bound(self._adapter)
        contexts = [row.packed for row in self._contexts(self._places(None)).rows(bound)]
        own = home.limits, contexts, continuations, bound
        requests = after_contexts(*own, in_one=home.scores, temperature=temperature)
        return joined(await self._ask([*chain(*requests)], timeout=timeout), requests)

    draw_sync = blocking_question(draw)
    logprobs_sync = blocking_question(logprobs)
    score_sync = blocking_question(score)

    # -- changes ------------------------------------------------------------------------------

    def append(self, token_ids: Integers) -> None:
        """Add a token to each sequence: ids ``[n]``, -1 for those that stay as they are.

        Raises:
            InvalidRequest: no integers, not one for each sequence, or not in the vocabulary.
            Closed: the population is closed; so for every other change.
        """
        self._check_open()
        most = self._home.limits.vocab_size - 1
        found = check_integers("token_ids", token_ids, -1, most, len(self))
        self._sequences.append(found)

    def extend(self, token_ids: Sequence[TokenIds]) -> None:
        """Add tokens to each sequence, any number of them: the next question computes all in one forward.

        Raises:
            InvalidRequest: not token ids for each sequence.
        """
        self._check_open()
        given = check_contexts(token_ids, "token_ids")
        if len(given) != len(self):
            raise InvalidRequest(f"{len(given)} token_ids of {len(self)} sequences: give all some")
        most = self._home.limits.vocab_size
        self._sequences.extend([id_words(each, most, allow_empty=True) for each in given])

    def resample(self, ancestors: Integers) -> None:
        """Have sequence ``i`` go on as a copy of sequence ``ancestors[i]``; there may be more of them, or
        fewer, than before.

        Raises:
            InvalidRequest: no integers, or not places of sequences.
        """
        self._sequences, self._origins = self._taken("ancestors", ancestors)

    def cut(self, lengths: int | Integers) -> None:
        """Drop what each sequence has beyond ``lengths``, one for all or ``[n]``, each at least 1.
        Shorter sequences stay as they are, as in ``text[:100]``.

        Raises:
            InvalidRequest: no integers, too small, or not one for each sequence.
        """
        self._check_open()
        given: Any = lengths
        if isinstance(given, int | np.integer) or getattr(given, "ndim", None) == 0:
            found = np.full(len(self), check_int("lengths", given, 1, LAST_INT64))
        else:
            found = check_integers("lengths", given, 1, LAST_INT64, len(self))
        self._sequences.cut(found)
        self._origins = self._origins.cut(found)

    def take(self, indices: Integers) -> Self:
        """Return a population of copies of the sequences at these places, any number of times each. This
        one stays as it is.

        Raises:
            InvalidRequest: no integers, or not places of sequences.
        """
        sequences, origins = self._taken("indices", indices)
        return type(self)(self._home, sequences, self._adapter, origins)

    def split(self, sizes: Integers) -> list[Self]:
        """Return populations of these sizes, which this one's sequences make up, in order.

        Raises:
            InvalidRequest: no integers, negative, or their sum is not the number of sequences.
        """
        self._check_open()
        found = check_integers("sizes", sizes, 0, MOST_SEQUENCES)
        if found.sum() != len(self):
            raise InvalidRequest(f"sizes sum to {found.sum()}, of {len(self)} sequences")
        ends = found.cumsum().tolist()
        return [
            self.take(np.arange(end - size, end)) for size, end in zip(found, ends, strict=True)
        ]

    def join(self, *others: Population) -> Self:
        """Return a population of this one's sequences and those of others, in order, of the same runtime
        and adapter.

        Raises:
            InvalidRequest: others that are no populations, or of another runtime or adapter.
        """
        several: tuple[Population, ...] = (self, *others)
        for each in several:
            given: Any = each
            if not isinstance(given, Population):
                raise InvalidRequest(f"others must be populations, got {shown(given)}")
            each._check_open()
            if each._home is not self._home or each._adapter != self._adapter:
                raise InvalidRequest("populations of different runtimes or adapters do not join")
        _check_count(sum(map(len, several)))
        joined = Sequences.joined([each._sequences for each in several])
        origins = Origins.joined([each._origins for each in several])
        return type(self)(self._home, joined, self._adapter, origins)

    def close(self) -> None:
        """Close the population: questions and changes raise ``Closed`` from now on, and the engine soon
        keeps no sequence for it that no copy of it goes on from. Idempotent. A population that is
        collected is closed too."""
        self._is_closed = True
        self._held.origins = Origins.none(len(self))
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> Self:
        return self.take(range(len(self)))

    def __deepcopy__(self, _: object) -> Self:
        return self.__copy__()

    # -- how ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("this population is closed: take it with a new one, lm.population(…)")

    def _places(self, where: Flags | None) -> np.ndarray:
        """Return the places that are asked about."""
        self._check_open()
        count = len(self._sequences)
        if where is None:
            return np.arange(count)
        return np.flatnonzero(check_flags("where", where, count))

    def _contexts(self, places: np.ndarray) -> Contexts:
        """Return the sequences at these places as they are. Raises ContextTooLong for too long ones."""
        contexts = self._sequences.contexts(places)
        check_length(self._home.limits, int(contexts.lengths.max(initial=0)))
        return contexts

    def _taken(self, name: str, places: Integers) -> tuple[Sequences, Origins]:
        self._check_open()
        found = check_integers(name, places, 0, len(self) - 1)
        _check_count(len(found))
        return self._sequences.take(found), self._origins.take(found)


def _check_count(count: int) -> None:
    check_int("the number of sequences", count, 0, MOST_SEQUENCES)
