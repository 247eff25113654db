"""Populations: the particles of a sampler as arrays. One request a step asks about all of them."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self, SupportsIndex, TypeAlias, cast

import numpy as np
import torch

from genrt.errors import Closed, InvalidRequest, OutOfMemory
from genrt.numbers import check_int, check_timeout, shown
from genrt.questions.arguments import Table, TokenIds, check_contexts, check_seed
from genrt.questions.draws import (
    PopulationDraw,
    block_seeds,
    draw_temperature,
    merge_draws,
    population_draw,
)
from genrt.questions.masks import Masks, packed_masks
from genrt.questions.reads import HostRow, ReadRequest, checked_temperature
from genrt.questions.rows import Device, Limits, check_length, must_move
from genrt.questions.scores import joined_scores, score_requests
from genrt.questions.sequences import (
    MOST_SEQUENCES,
    Contexts,
    Flags,
    Integers,
    Origins,
    SequenceHandle,
    Sequences,
    check_block,
    check_extensions,
    check_flags,
    check_integers,
    token_counts,
)
from genrt.runtime.ask import Asker, blocking_question, seconds_left
from genrt.runtime.thread import EngineThread
from genrt.tokens.encoding import encode_prompt
from genrt.tokens.sampling import BatchDraw, Laws

__all__ = ["Ask", "Population", "PopulationRuntime", "Prompts", "begin", "draw_batch", "draw_texts"]

LAST_INT64 = 2**63 - 1

FEW = 64
"""The minimum sequences in a replica's share of a batch: half of them take about as long."""

Prompts: TypeAlias = str | TokenIds | Sequence[str | TokenIds]
"""One prompt, a text or token ids, or several."""

Ask: TypeAlias = Callable[..., Coroutine[Any, Any, list[Any]]]
"""Asks requests within ``timeout`` seconds, as ``Asker.ask`` does."""


@dataclass(slots=True, eq=False)
class PopulationRuntime:
    """The parts of a runtime that its populations use."""

    thread: EngineThread
    asker: Asker
    limits: Limits
    nonces: Iterator[int]

    def give_back(self, handles: Sequence[SequenceHandle]) -> None:
        """Make the engine free the sequences of these handles that no population extends. It
        takes no lock, because finalizers call it."""
        over = [each for each in handles if not each.users]
        if over:
            with contextlib.suppress(Closed):  # in a forked child
                self.thread.give_back(over)

    async def draws(
        self, ask: Ask, requests: list[PopulationDraw], most: int, timeout: float | None
    ) -> tuple[list[Any], list[PopulationDraw]]:
        """Return the results of the requests, and the requests as they were sent: in parts of ``most``
        sequences, or fewer if the engine runs out of memory. Raises as ``Population.draw``."""
        seconds = check_timeout(timeout)
        until = None if seconds is None else time.monotonic() + seconds
        bound, question = requests[0].adapter if requests else None, object()
        if bound is not None:
            self.thread.batcher.hold(question, bound)  # between two requests too
        try:
            while True:
                parts = [part for each in requests for part in each.parts(most)]
                try:
                    return await ask(parts, timeout=timeout), parts
                except OutOfMemory:
                    largest = max(map(len, parts))
                    if largest <= (len(parts[0].laws) or 1):
                        raise
                    # The batcher halves a flush that ran out of memory; one request is halved here.
                    most = (largest + 1) // 2
                    requests = [replace(each) for each in requests]  # each with another handle
                    timeout = seconds_left(until)
        finally:
            if bound is not None:
                self.thread.batcher.let_go(question)

    async def draw(
        self,
        ask: Ask,
        contexts: Contexts,
        adapter: str | None,
        places: np.ndarray,
        masks: Masks | None,
        origins: Origins,
        temperature: float,
        seed: int | None,
        most: int,
        timeout: float | None,
        laws: Laws = (),
    ) -> tuple[BatchDraw, list[SequenceHandle]]:
        """Return draws after the contexts, the sequences at ``places`` of all, and their handles. Raises
        as ``Population.draw``.

        Args:
            masks, origins: of all texts, of all sequences; see ``PopulationDraw``.
            most: how many sequences one request has at most.
        """
        count = len(origins.numbers)
        known, handles = _known_origins(origins, places, contexts.lengths)
        request = population_draw(
            contexts,
            self.asker.bound(adapter),
            places,
            self.nonces,
            masks,
            count,
            self.limits.vocab_size,
            temperature,
            seed,
            known,
            handles,
            laws,
        )
        requests = [] if request is None else [request]
        found, parts = await self.draws(ask, requests, most, timeout)
        return merge_draws(found, places, count), [part.handle for part in parts]


async def draw_batch(
    runtime: PopulationRuntime,
    ask: Ask,
    contexts: Sequence[TokenIds],
    masks: Masks | None,
    temperature: float,
    seed: int | None,
    adapter: str | None,
    timeout: float | None,
) -> BatchDraw:
    """Return a draw after each context, as ``AsyncLM.batch_draw`` does, by a new population."""
    runtime.asker.bound(adapter)
    sequences = Sequences.of(runtime.limits, contexts)
    count = len(sequences)
    places = np.arange(count)
    whole = _checked_contexts(runtime.limits, sequences, places)
    packed = packed_masks(masks, count, runtime.limits.vocab_size, copies=True)
    words = None if packed is None else packed.view(np.int32)
    thread = runtime.thread
    share = max(-(-count // max(1, len(thread.replicas()))), FEW)
    most, origins = min(thread.max_weight, share), sequences.origins
    own = adapter, places, words, origins, temperature, seed, most, timeout
    found, _ = await runtime.draw(ask, whole, *own)
    return found


def begin(
    runtime: PopulationRuntime, prompt: Prompts, n: int | None, adapter: str | None
) -> Population:
    """Return a population of ``n`` copies of one prompt, or of several prompts.

    Raises:
        InvalidRequest: not a prompt or contexts; one prompt without ``n``, or several with it.
        UnknownAdapter: there is no such adapter.
    """
    runtime.asker.bound(adapter)
    given: Any = prompt

    def encoded(one: str | TokenIds) -> TokenIds:
        if isinstance(one, str):
            return encode_prompt(runtime.thread.engine.tokenizer, one)
        return one

    is_list = isinstance(given, Sequence) and len(given) > 0
    if isinstance(given, torch.Tensor | np.ndarray):
        is_one = given.ndim == 1
    else:
        is_one = isinstance(given, str) or (is_list and isinstance(given[0], int | np.integer))
    if n is not None and not is_one and (is_list or getattr(given, "ndim", 0) > 1):
        raise InvalidRequest("n is for one prompt; contexts begin a sequence each: leave n out")
    if n is not None:
        count = check_int("n", n, 0, MOST_SEQUENCES)
        sequences = Sequences.copies(runtime.limits, encoded(given), count)
    elif is_one:
        raise InvalidRequest("one prompt begins n sequences: give n, or a list of contexts")
    else:
        contexts = [encoded(each) for each in check_contexts(given)]
        sequences = Sequences.of(runtime.limits, contexts)
    return Population(runtime, sequences, adapter)


class _Lease:
    """The handles that one population extends. The engine holds their sequences until the population is
    closed or collected."""

    def __init__(self, runtime: PopulationRuntime, handles: Sequence[SequenceHandle]) -> None:
        self._runtime = runtime
        self._key = object()
        self._handles: Sequence[SequenceHandle] = ()
        self.renew(handles)

    def renew(self, handles: Sequence[SequenceHandle]) -> None:
        """Replace the handles. The engine frees the old ones itself as it extends their sequences."""
        for each in handles:
            each.users.add(self._key)
        before, self._handles = self._handles, handles
        for each in before:
            if each not in handles:
                each.users.discard(self._key)

    def close(self) -> None:
        """Give the handles back. Any thread may call it, also as a finalizer."""
        before, self._handles = self._handles, ()
        for each in before:
            each.users.discard(self._key)
        self._runtime.give_back(before)


class Population:
    """Sequences that grow together, as arrays: the particles of a sampler.

    ``AsyncLM.population`` makes it. ``draw``, ``logprobs`` and ``score`` ask about all sequences at once,
    as they are at the call; ``append``, ``extend``, ``resample`` and ``cut`` change them without a
    question; ``advance`` does both. Answers, cancellation, timeouts and errors are as for every question.
    After a restart or an eviction, the engine recomputes what it lost.

    One task or thread at a time may change a population. As a context manager, it closes at the end.
    """

    def __init__(
        self, runtime: PopulationRuntime, sequences: Sequences, adapter: str | None
    ) -> None:
        self._runtime = runtime
        self._sequences = sequences
        self._adapter = adapter
        self._lease = _Lease(runtime, sequences.origins.handles)
        self._finalizer = weakref.finalize(self, self._lease.close)
        self._finalizer.atexit = False
        self._ask, self._ask_sync = runtime.asker.ask, runtime.asker.ask_sync

    # -- contents -----------------------------------------------------------------------------

    @property
    def adapter(self) -> str | None:
        """The name of the adapter that answers."""
        return self._adapter

    @property
    def lengths(self) -> torch.Tensor:
        """The number of tokens of each sequence: int64 ``[n]``, a copy."""
        return torch.from_numpy(self._sequences.lengths.copy())

    @property
    def token_ids(self) -> torch.Tensor:
        """The sequences: int64 ``[n, longest]``, with -1 after the end of each; a copy."""
        return torch.from_numpy(self._sequences.padded())

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
        closed = "" if self._finalizer.alive else ", closed"
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
        """Draw a token after each sequence, with its weight, as ``AsyncLM.batch_draw`` does; append
        nothing.

        Equal sequences share a row, or are computed in one forward.

        Args:
            masks: the allowed tokens after each sequence; ``None`` where ``where`` is false is fine. A
                packed tensor is not copied: do not change it before the draws are there.
            temperature: 0 is greedy.
            seed: sequence ``i`` is drawn with seed ``seed + i``, independent of ``where``.
            where: the sequences to draw after. The others, such as finished ones, get token -1, logprob 0
                and log mass 0, which leave a sequence and its weight unchanged.

        Raises:
            InvalidRequest: an argument of the wrong type, shape or range; ContextTooLong, UnknownAdapter.
            EngineFailed: as ``AsyncLM.next_token_logprobs``, as are TimedOut and Closed.
        """
        given: Any = {"masks": masks, "seed": seed, "where": where}
        return await draw_texts([self], (), temperature=temperature, timeout=timeout, **given)

    async def logprobs(
        self,
        *,
        where: Flags | None = None,
        device: Device | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Return the row after each sequence, or only where ``where`` is true, in order: float32
        ``[n, vocab_size]``, as ``AsyncLM.batch_next_token_logprobs`` does.

        Raises:
            InvalidRequest: an argument of the wrong type, shape or range; otherwise as ``draw``.
        """
        runtime, engine = self._runtime, self._runtime.thread.engine
        moves = must_move(device, engine.device)
        contexts = self._contexts(self._places(where))
        rows = contexts.rows(runtime.asker.bound(self._adapter))
        requests = [ReadRequest(row, HostRow()) for row in rows] if moves else rows
        found = await self._ask(requests, stacked=bool(requests), timeout=timeout)
        if found:
            return cast("torch.Tensor", found[0])
        return torch.empty(0, runtime.limits.vocab_size, device="cpu" if moves else engine.device)

    async def score(
        self,
        continuations: Sequence[TokenIds],
        *,
        temperature: float = 1.0,
        timeout: float | None = None,
    ) -> list[torch.Tensor]:
        """Return the score of a continuation after each sequence, as ``AsyncLM.batch_score`` does; append
        nothing.

        An empty continuation asks nothing. Rows are divided by the temperature, above 0, and normalized
        again.

        Raises:
            InvalidRequest: not one continuation per sequence, or bad token ids or temperature; otherwise
                as ``draw``.
        """
        runtime, bound = self._runtime, self._runtime.asker.bound(self._adapter)
        given = check_contexts(continuations, "continuations")
        own = runtime.limits, self._contexts(self._places(None)), given, bound
        in_one = runtime.thread.capabilities.scores
        requests = score_requests(*own, in_one=in_one, temperature=temperature)
        return joined_scores(await self._ask([*chain(*requests)], timeout=timeout), requests)

    async def advance(
        self,
        token_ids: Sequence[TokenIds] | Table,
        *,
        temperature: float = 1.0,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Append a block, any number of tokens to each sequence, and return their log-probabilities, each
        after the tokens before it: float32 ``[n, k]`` on the host.

        It is one forward where the sequences are resident, whatever the number of tokens, and the next
        question computes one token of each. ``cut`` drops tokens of the block. After an error or a
        cancellation, the sequences are as before.

        Args:
            token_ids: a table ``[n, k]`` with -1 after the last token of a row, or token ids for each
                sequence. The answer is 0 in places without a token, and -inf for an impossible token.
            temperature: above 0. Rows are divided by it and normalized again.

        Raises:
            InvalidRequest: an argument of the wrong type, shape or range, or the sequences were changed
                meanwhile; otherwise as ``draw``.
        """
        runtime, sequences = self._runtime, self._sequences
        bound = runtime.asker.bound(self._adapter)
        heat = checked_temperature(temperature)
        self._check_open()
        block = check_block(token_ids, len(sequences), runtime.limits.vocab_size)
        counts, before = token_counts(block), sequences.origins
        places = np.flatnonzero(counts)
        longest = sequences.lengths[places] + counts[places] - 1
        check_length(runtime.limits, int(longest.max(initial=0)))
        whole = torch.zeros(block.shape)
        if not len(places):
            await self._ask((), timeout=timeout)
            return whole
        contexts = sequences.followed_by(block)
        known, came_from = _known_origins(before, places, sequences.lengths[places])
        request = PopulationDraw(
            contexts,
            bound,
            None,
            heat,
            None,
            known,
            came_from=came_from,
            block=block[places],
        )
        most = runtime.thread.max_weight
        found, parts = await runtime.draws(self._ask, [request], most, timeout)
        is_same = self._sequences is sequences and sequences.lengthen(contexts, block)
        self._extended(is_same, before, places, contexts, parts)
        if len(places) == len(whole):
            return torch.cat(found)
        whole[torch.from_numpy(places)] = torch.cat(found)
        return whole

    async def draw_block(
        self,
        length: int,
        *,
        temperature: float = 1.0,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> BatchDraw:
        """Draw ``length`` tokens after each sequence, one after another, and append them: a block of a
        draft model, which ``advance`` of another runtime's population then weighs. Each of the tensors is
        ``[n, length]``.

        No caller decides anything between two draws, so that the engine draws the next token at once.
        ``cut`` drops tokens of the block. After an error or a cancellation, the sequences are as before.

        Args:
            length: at least 1.
            temperature: 0 is greedy.
            seed: as of ``draw`` for the first tokens; decides the later ones too.

        Raises:
            InvalidRequest: an argument of the wrong type or range, or the sequences were changed
                meanwhile. ContextTooLong: a sequence has no room for the block. Otherwise as ``draw``.
        """
        runtime, sequences = self._runtime, self._sequences
        bound, heat = runtime.asker.bound(self._adapter), draw_temperature(temperature)
        length = check_int("length", length, 1, runtime.limits.max_model_len)
        seed = check_seed(seed)
        self._check_open()
        check_length(runtime.limits, int(sequences.lengths.max(initial=1)) + length - 1)
        check_timeout(timeout)
        count, before = len(sequences), sequences.origins
        places = np.arange(count)
        contexts = sequences.contexts(places)
        known, came_from = _known_origins(before, places, contexts.lengths)
        seeds = block_seeds(runtime.nonces, seed, count, length)
        given = contexts, bound, None, heat, seeds, known
        requests = [PopulationDraw(*given, came_from=came_from)] if count else []
        most = runtime.thread.max_weight
        found, parts = await runtime.draws(self._ask, requests, most, timeout)
        if not count:
            nothing = torch.zeros(0, length)
            return BatchDraw(nothing.long(), nothing, nothing)
        columns = map(torch.cat, zip(*found, strict=True))
        draws = BatchDraw.of(columns, found[0].weights_version)
        is_same = self._sequences is sequences and sequences.are(contexts)
        if is_same:
            block = draws.token_ids.numpy()
            contexts = sequences.followed_by(block)
            sequences.lengthen(contexts, block)
        self._extended(is_same, before, places, contexts, parts)
        return draws

    def _extended(
        self,
        is_same: bool,
        before: Origins,
        places: np.ndarray,
        contexts: Contexts,
        parts: Sequence[PopulationDraw],
    ) -> None:
        """Make the sequences at these places extend the answered contexts, or raise because they were
        changed meanwhile."""
        sequences, handles = self._sequences, [part.handle for part in parts]
        if not (self._finalizer.alive and is_same):
            self._runtime.give_back(handles)
            self._check_open()
            raise InvalidRequest(
                "the sequences were changed while they advanced: await the block first"
            )
        if sequences.origins is before:
            sequences.origins = before.after(handles, places, contexts.lengths)
            self._lease.renew(sequences.origins.handles)
        else:
            self._runtime.give_back(handles)

    draw_sync = blocking_question(draw)
    advance_sync = blocking_question(advance)
    draw_block_sync = blocking_question(draw_block)
    logprobs_sync = blocking_question(logprobs)
    score_sync = blocking_question(score)

    # -- changes ------------------------------------------------------------------------------

    def append(self, token_ids: Integers) -> None:
        """Add a token to each sequence: ids ``[n]``, -1 adds no token.

        Raises:
            InvalidRequest: not integers, not one per sequence, or not in the vocabulary.
            Closed: the population is closed; the other changes raise it too.
        """
        self._check_open()
        most = self._runtime.limits.vocab_size - 1
        self._sequences.append(check_integers("token_ids", token_ids, -1, most, len(self)))

    def extend(self, token_ids: Sequence[TokenIds]) -> None:
        """Add any number of tokens to each sequence. The next question computes all in one forward.

        Raises:
            InvalidRequest: not token ids for each sequence.
        """
        self._check_open()
        size = self._runtime.limits.vocab_size
        self._sequences.extend(check_extensions(token_ids, len(self), size))

    def resample(self, ancestors: Integers) -> None:
        """Replace sequence ``i`` by a copy of sequence ``ancestors[i]``. The number of sequences may
        change.

        Raises:
            InvalidRequest: not integers, or not places of sequences.
        """
        self._sequences = self._taken("ancestors", ancestors)
        self._lease.renew(self._sequences.origins.handles)

    def cut(self, lengths: int | Integers) -> None:
        """Drop the tokens of each sequence beyond ``lengths``, at least 1: one for all, or ``[n]``.
        Shorter sequences stay as they are, as in ``text[:100]``.

        Raises:
            InvalidRequest: not integers, too small, or not one per sequence.
        """
        self._check_open()
        given: Any = lengths
        if isinstance(given, int | float | np.number | None) or getattr(given, "ndim", None) == 0:
            found = np.full(len(self), check_int("lengths", given, 1, LAST_INT64))
        else:
            found = check_integers("lengths", given, 1, LAST_INT64, len(self))
        self._sequences.cut(found)

    def take(self, indices: Integers) -> Self:
        """Return a population of copies of the sequences at these places, in any number and order.

        Raises:
            InvalidRequest: not integers, or not places of sequences.
        """
        return type(self)(self._runtime, self._taken("indices", indices), self._adapter)

    def split(self, sizes: Integers) -> list[Self]:
        """Return populations of these sizes with this one's sequences, in order.

        Raises:
            InvalidRequest: not integers, negative, or their sum is not the number of sequences.
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
        """Return a population of this one's sequences and those of others of the same runtime and
        adapter, in order.

        Raises:
            InvalidRequest: others that are not populations, or of another runtime or adapter.
        """
        several: tuple[Population, ...] = (self, *others)
        for each in several:
            given: Any = each
            if not isinstance(given, Population):
                raise InvalidRequest(f"others must be populations, got {shown(given)}")
            each._check_open()
            if each._runtime is not self._runtime or each._adapter != self._adapter:
                raise InvalidRequest("populations of different runtimes or adapters do not join")
        check_int("the number of sequences", sum(map(len, several)), 0, MOST_SEQUENCES)
        sequences = Sequences.joined([each._sequences for each in several])
        return type(self)(self._runtime, sequences, self._adapter)

    def close(self) -> None:
        """Close the population. Idempotent; collecting a population closes it too.

        Questions and changes then raise ``Closed``. The engine soon frees the sequences that no copy
        extends.
        """
        self._sequences.origins = Origins.none(len(self))  # which hold the handles
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
        if not self._finalizer.alive:
            raise Closed("this population is closed: begin another one, lm.population(…)")

    def _places(self, where: Flags | None) -> np.ndarray:
        """Return the places of the sequences to ask about."""
        self._check_open()
        count = len(self._sequences)
        if where is None:
            return np.arange(count)
        return np.flatnonzero(check_flags("where", where, count))

    def _contexts(self, places: np.ndarray) -> Contexts:
        return _checked_contexts(self._runtime.limits, self._sequences, places)

    def _taken(self, name: str, places: Integers) -> Sequences:
        self._check_open()
        found = check_integers(name, places, 0, len(self) - 1)
        check_int("the number of sequences", len(found), 0, MOST_SEQUENCES)
        return self._sequences.take(found)


async def draw_texts(
    populations: Sequence[Population],
    laws: Laws,
    *,
    masks: Masks | None,
    seed: int | None,
    where: Flags | None,
    temperature: float = 1.0,
    timeout: float | None = None,
) -> BatchDraw:
    """Draw a token after each text, a sequence of every population, as ``Population.draw`` does. The
    populations are of one runtime and adapter, with a law each, or it is one without; see
    ``PopulationDraw``."""
    first, turns = populations[0], len(populations)
    runtime, places = first._runtime, first._places(where)
    several = [each._contexts(places) for each in populations]
    before = [each._sequences.origins for each in populations]
    contexts, origins, own = several[0], before[0], places
    if turns > 1:  # sequence ``turn`` of text ``i`` is number ``turns * i + turn`` in the question
        contexts = Contexts.joined(several, _in_turn(turns, len(places)))
        origins = Origins.joined(before).take(_in_turn(turns, len(first)))
        own = (turns * places[:, None] + np.arange(turns)).ravel()
    most = runtime.thread.max_weight
    asked = contexts, first._adapter, own, masks, origins, temperature, seed, most, timeout, laws
    found, handles = await runtime.draw(first._ask, *asked)
    if handles:
        for turn, each in enumerate(populations):
            sequences = each._sequences  # neither resampled nor cut meanwhile?
            if each._finalizer.alive and sequences.origins is before[turn]:
                lengths = several[turn].lengths
                sequences.origins = before[turn].after(handles, places, lengths, turn, turns)
                each._lease.renew(sequences.origins.handles)
        if not all(each._finalizer.alive for each in populations):
            runtime.give_back(handles)
    if turns == 1:
        return found
    return BatchDraw.of([each[::turns] for each in found], found.weights_version)


def _in_turn(turns: int, count: int) -> np.ndarray:
    """Return the places of the first of each of several populations of ``count`` sequences, one after
    another, then of the second of each, and so on."""
    return np.arange(turns * count).reshape(turns, count).T.ravel()


def _known_origins(
    origins: Origins, places: np.ndarray, lengths: np.ndarray
) -> tuple[Origins | None, tuple[SequenceHandle, ...]]:
    """Return the origins of the sequences at these places, ``None`` if one of these lengths is no longer
    than its origin's, and the handles that stay known until the sequences are answered."""
    own = origins if len(places) == len(origins.numbers) else origins.take(places).needed()
    return own if own.can_continue(lengths) else None, own.handles or origins.handles


def _checked_contexts(limits: Limits, sequences: Sequences, places: np.ndarray) -> Contexts:
    """Return the sequences at these places as they are. Raises ContextTooLong for too long ones."""
    contexts = sequences.contexts(places)
    check_length(limits, int(contexts.lengths.max(initial=0)))
    return contexts
