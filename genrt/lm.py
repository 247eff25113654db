"""AsyncLM: the language model of users. ``runtime/__init__.py`` has the way of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack, cast

import torch

from genrt.cluster.programs import run_program
from genrt.engines.protocol import Engine
from genrt.engines.remote.connection import ServerConnection
from genrt.engines.remote.engine import RemoteEngine
from genrt.errors import EngineFailed, InvalidRequest
from genrt.numbers import check_int, check_timeout, named
from genrt.populations import Population, PopulationRuntime, Prompts, begin, draw_batch
from genrt.questions.completions import Completion, GenerateOptions, SampleOptions, TurnOptions
from genrt.questions.contexts import TokenIds, check_contexts, check_seed, nonces_of
from genrt.questions.draws import draw_request
from genrt.questions.masks import Mask, Masks
from genrt.questions.reads import (
    Prefix,
    PrefixOptions,
    WarmUpOptions,
    candidates_request,
    host_row,
    top_request,
)
from genrt.questions.rows import Device, must_move, row_request
from genrt.questions.scores import (
    joined_scores,
    row_chunks,
    score_requests,
    text_requests,
)
from genrt.runtime.ask import (
    Asker,
    asked_in_turn,
    blocking_chunks,
    blocking_question,
    blocking_stream,
)
from genrt.runtime.cache import RowCache
from genrt.runtime.concurrency import blocking_twin
from genrt.runtime.owner import EngineOwner
from genrt.runtime.streams import Stream
from genrt.runtime.texts import Texts
from genrt.runtime.thread import EngineThread
from genrt.tokens.sampling import BatchDraw, Draw, TopLogprobs

__all__ = ["AsyncLM", "ConnectOptions"]


T = TypeVar("T")

MAX_QUEUED, MAX_QUEUED_BYTES = 2**16, 2**30
"""The bounds of a connected runtime's queue, as the defaults of ``genrt.load``."""


class ConnectOptions(TypedDict, total=False):
    """The options of ``AsyncLM.connect``, which returns a runtime over the runtime of a genrt server.

    Concurrent questions travel in one HTTP call for a flush, and rows are cached here. Draws, scores and
    populations are answered by the server; rows travel whole. Samples and texts are drawn here, from a
    row for each token: for long texts use the server's OpenAI routes. Adapters are the server's present
    ones; others cannot be added. The url is ``http://`` or ``https://``, with or without ``/v1``.

    Attributes:
        api_key: the server's key.
        timeout: the maximum seconds without a byte from the server; by default 600.
        cache_bytes: the bound of the row cache; by default 256 MiB; 0 disables it.
        restart: ``"auto"`` reconnects to a lost server and asks it the unanswered questions again;
            otherwise every later call raises the reason, until ``AsyncLM.restart``.
        seed: as in ``genrt.load``.
    """

    api_key: str | None
    timeout: float
    cache_bytes: int
    restart: Literal["auto"] | None
    seed: int | None


class AsyncLM(EngineOwner):
    """A language model that answers many concurrent questions in few engine calls.

    ``load``, ``aload`` and ``connect`` make it. Every ``await`` works on any event loop in any thread,
    and every ``_sync`` twin works anywhere, also inside a running loop such as a notebook's. A context
    manager both ways; leaving it closes the runtime.

    Cancelling an await withdraws only that question. So does ``timeout=``, which every question takes, in
    seconds; it raises ``TimedOut``. A question waits while the queue is full (``load``'s
    ``max_queued_requests``). After ``close`` every question raises ``Closed``, also waiting ones and
    empty batches. Wrong arguments raise for empty batches too.
    """

    def __init__(
        self, thread: EngineThread, cache: RowCache, engine: Engine, *, seed: int | None = None
    ) -> None:
        super().__init__(thread, cache, engine)
        self._asker = asker = Asker(thread, self._adapters)
        self._ask, self._ask_sync = asker.ask, asker.ask_sync
        self._stream, self._stream_sync = asker.stream, asker.stream_sync
        self._draw_from(seed)

    @classmethod
    async def connect(cls, url: str, **options: Unpack[ConnectOptions]) -> Self:
        """Return a runtime over a genrt server's at ``url``; see ``ConnectOptions``. Cancelling abandons
        the connection.

        Raises:
            TypeError: an option is unknown. InvalidRequest: an option is out of range.
            EngineDied: the server cannot be reached, or refuses the key.
            EngineUnsupported: it is not a genrt server of this version.
        """
        thread, cache = _connecting(url, **options)
        try:
            engine = await asyncio.wrap_future(thread.opened)
            return cls(thread, cache, engine, seed=options.get("seed"))
        except BaseException:
            thread.close(wait=False)
            raise

    def _draw_from(self, seed: int | None) -> None:
        """Draw questions without a seed from this one."""
        self._nonces = nonces_of(seed)
        own = self._limits, self._adapters, self._nonces
        self._texts = Texts(self._thread, *own)
        self._populations = PopulationRuntime(self._thread, self._asker, *own)

    def _of_seed(self, seed: int) -> Self:
        """Return an equal runtime with its own seed."""
        own = object.__new__(type(self))
        vars(own).update(vars(self), _whole=self)  # the whole closes when it is garbage
        own._draw_from(seed)
        return own

    # -- rows ---------------------------------------------------------------------------------

    async def next_token_logprobs(
        self,
        token_ids: TokenIds,
        *,
        device: Device | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Return the row after ``token_ids``: float32 ``[vocab_size]``, ``logsumexp == 0``.

        It is on ``self.device``, or on the host with ``device="cpu"``; the rows of a GPU's step move
        there together, through pinned memory. The caller owns the tensor. Concurrent questions are
        answered together, equal ones once.

        Raises:
            InvalidRequest: the token ids are empty or out of range; ContextTooLong, UnknownAdapter.
            EngineFailed: the engine's step failed (OutOfMemory: for this request alone), or this row is
                not finite (NotFinite).
            TimedOut: there was no answer within ``timeout`` seconds.
            Closed: the runtime is closed.
        """
        row = row_request(self._limits, token_ids, self._adapters.bound(adapter))
        moves = device is not None and must_move(device, self.device)
        [found] = await self._ask((host_row(row) if moves else row,), timeout=timeout)
        return cast("torch.Tensor", found)

    async def batch_next_token_logprobs(
        self,
        contexts: Sequence[TokenIds],
        *,
        device: Device | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Return the rows after ``contexts``, in order: float32 ``[len(contexts), vocab_size]``.

        One question for the whole batch; raises and cancels as ``next_token_logprobs``."""
        bound, moves = self._adapters.bound(adapter), must_move(device, self.device)
        rows = [row_request(self._limits, each, bound) for each in check_contexts(contexts)]
        requests = [host_row(row) for row in rows] if moves else rows
        found = await self._ask(requests, stacked=bool(requests), timeout=timeout)
        if found:
            return cast("torch.Tensor", found[0])
        return torch.empty(0, self.vocab_size, device="cpu" if moves else self.device)

    # -- reads of rows, without moving or caching them ------------------------------------------

    async def draw(
        self,
        token_ids: TokenIds,
        *,
        mask: Mask | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> Draw:
        """Draw one token from the row after ``token_ids``, restricted to ``mask``, with its weight.

        The result's ``logprob`` is the log-probability of the draw, and ``log_mass`` is
        ``logsumexp(row[mask])`` of the row itself, at any temperature: at temperature 1 the incremental
        log importance weight. At another temperature, the weight is ``row[token_id] - logprob``. A mask
        without mass is a dead end, not an error: token -1, ``log_mass`` -inf. Concurrent draws are
        batched on the engine's device; draws after equal contexts share a row, also of the cache.

        Args:
            mask: the allowed tokens: bool ``[vocab_size]``; token ids as a list, a set or int64; or a
                packed bitmask, int32 ``[ceil(vocab_size / 32)]``, as ``constraints.bitmasks`` makes. By
                default all; other integer types are refused.
            temperature: 0 is greedy.
            seed: makes the draw reproducible, whatever the batch. Draws of equal seeds share their
                randomness. Without seeds, draws are independent.

        Raises:
            InvalidRequest: a mask or parameter that does not fit; otherwise as ``next_token_logprobs``.
        """
        bound, nonce = self._adapters.bound(adapter), next(self._nonces)
        request = draw_request(self._limits, token_ids, bound, nonce, mask, temperature, seed)
        return cast("Draw", (await self._ask((request,), timeout=timeout))[0])

    async def batch_draw(
        self,
        contexts: Sequence[TokenIds],
        *,
        masks: Masks | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> BatchDraw:
        """Draw after each of ``contexts``, in order, as one question; return tensors on the host.

        ``masks`` has a mask, or ``None``, for each context: a sequence, or the rows of a bool or packed
        tensor. Context ``i`` is drawn with seed ``seed + i``. A ``population`` is faster for contexts
        that grow step by step."""
        own = contexts, masks, temperature, seed, adapter, timeout
        return await draw_batch(self._populations, self._ask, *own)

    async def token_logprobs(
        self,
        token_ids: TokenIds,
        candidates: TokenIds,
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Return the row's entries for ``candidates``: float32 ``[len(candidates)]`` on the host."""
        bound = self._adapters.bound(adapter)
        request = candidates_request(self._limits, token_ids, candidates, bound)
        return cast("torch.Tensor", (await self._ask((request,), timeout=timeout))[0])

    async def top_logprobs(
        self,
        token_ids: TokenIds,
        k: int,
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> TopLogprobs:
        """Return the ``k`` likeliest tokens, likeliest first: ``(token_ids, logprobs)``, on the host."""
        request = top_request(self._limits, token_ids, k, self._adapters.bound(adapter))
        return cast("TopLogprobs", (await self._ask((request,), timeout=timeout))[0])

    async def score(
        self,
        token_ids: TokenIds,
        continuation: TokenIds,
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Return the log-probability of each token of ``continuation`` after the tokens before it:
        float32 ``[len(continuation)]`` on the host. vLLM computes the text once; other engines, a row a
        token."""
        own = self._limits, [token_ids], [continuation], self._adapters.bound(adapter)
        requests = score_requests(*own, in_one=self._thread.capabilities.scores)
        return joined_scores(await self._ask(requests[0], timeout=timeout), requests)[0]

    async def batch_score(
        self,
        contexts: Sequence[TokenIds],
        continuations: Sequence[TokenIds],
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> list[torch.Tensor]:
        """Return the score of each continuation after its context, as one question."""
        own = self._limits, contexts, continuations, self._adapters.bound(adapter)
        requests = score_requests(*own, in_one=self._thread.capabilities.scores)
        return joined_scores(await self._ask([*chain(*requests)], timeout=timeout), requests)

    async def prompt_logprobs(
        self, token_ids: TokenIds, *, adapter: str | None = None, timeout: float | None = None
    ) -> torch.Tensor:
        """Return the score of a text after its first token: float32 ``[len(token_ids) - 1]``."""
        own = self._limits, token_ids, self._adapters.bound(adapter)
        requests = text_requests(*own, in_one=self._thread.capabilities.scores)
        return joined_scores(await self._ask(requests[0], timeout=timeout), requests)[0]

    def prompt_rows(
        self,
        token_ids: TokenIds,
        start: int = 1,
        *,
        chunk: int | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[torch.Tensor]:
        """Iterate over the rows before a text's tokens from number ``start`` on, such as a teacher's rows
        for a student: ``async for rows in …``, each float32 ``[at most chunk, vocab_size]`` on
        ``self.device``, of 64 MiB by default. vLLM computes each tensor in one forward.

        Each tensor is its own question, asked when it is wanted: ``timeout`` is for each, leaving the
        loop asks no more, and later tensors are of new weights. Wrong arguments raise here, other errors
        in the loop.
        """
        own = self._limits, token_ids, start, chunk, self._adapters.bound(adapter)
        check_timeout(timeout)
        chunks = row_chunks(*own, in_one=self._thread.capabilities.scores_rows)
        return asked_in_turn(self._ask, chunks, timeout)

    def population(
        self, prompt: Prompts, n: int | None = None, *, adapter: str | None = None
    ) -> Population:
        """Return ``n`` sequences that begin with a prompt, or one for each of several prompts, as arrays;
        computes nothing yet. Raises InvalidRequest for wrong prompts, one prompt without ``n`` or several
        with it; UnknownAdapter.
        """
        return begin(self._populations, prompt, n, adapter)

    # -- samples and texts --------------------------------------------------------------------

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        timeout: float | None = None,
        **options: Unpack[SampleOptions],
    ) -> list[int]:
        """Draw up to ``max_tokens`` tokens in the engine's own decode loop.

        ``SampleOptions`` and ``DecodingOptions`` have the options; ``max_tokens`` is required.

        Raises:
            InvalidRequest: a parameter is out of range; ContextTooLong if the context and ``max_tokens``
                together exceed ``max_model_len``; otherwise as ``next_token_logprobs``.
        """
        requests = self._texts.samples([token_ids], options, method="sample")
        return list((await self._ask(requests, timeout=timeout))[0])

    async def batch_sample(
        self,
        contexts: Sequence[TokenIds],
        *,
        timeout: float | None = None,
        **options: Unpack[SampleOptions],
    ) -> list[list[int]]:
        """Sample after each of ``contexts``, in order, as one question, with the options of ``sample``;
        context ``i`` with seed ``seed + i``."""
        requests = self._texts.samples(check_contexts(contexts), options, method="batch_sample")
        return [list(each) for each in await self._ask(requests, timeout=timeout)]

    async def generate(
        self, prompt: str | TokenIds, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Draw the text after a prompt in the engine's own decode loop.

        The prompt is a text, tokenized with the tokenizer's special tokens, or token ids as they are.
        ``GenerateOptions`` has the options.

        Raises:
            InvalidRequest: an option is out of range, or the engine lacks it; otherwise as ``sample``.
        """
        requests, timeout = self._texts.requests([prompt], options)
        return cast("Completion", (await self._ask(requests, timeout=timeout))[0])

    async def batch_generate(
        self, prompts: Sequence[str | TokenIds], **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """Draw the text after each of ``prompts``, in order, as one question, with the options of
        ``generate``; prompt ``i`` with seed ``seed + i``, so ``[prompt] * n`` gives independent texts."""
        requests, timeout = self._texts.requests(prompts, options)
        return list(await self._ask(requests, timeout=timeout))

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[TurnOptions]
    ) -> Completion:
        """Draw the assistant's next message, or the rest of its message that ends the conversation, as in
        ``encode_chat``. ``TurnOptions`` has the options."""
        requests, timeout = self._texts.turn(messages, options)
        return cast("Completion", (await self._ask(requests, timeout=timeout))[0])

    def stream(self, prompt: str | TokenIds, **options: Unpack[GenerateOptions]) -> Stream:
        """Iterate over the text after a prompt as it is drawn: ``async for delta in …``.

        After the last ``Delta``, the stream's ``completion`` is that of ``generate``. Leaving the loop,
        or cancelling, withdraws the question; ``timeout`` is for the whole text. Wrong arguments raise
        here, other errors in the loop.
        """
        request, timeout = self._texts.streamed(self._texts.requests([prompt], options))
        return self._stream(request, timeout=timeout)

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[TurnOptions]
    ) -> Stream:
        """Iterate over the assistant's next message as it is drawn: ``chat`` as a ``stream``."""
        request, timeout = self._texts.streamed(self._texts.turn(messages, options))
        return self._stream(request, timeout=timeout)

    # -- programs -----------------------------------------------------------------------------

    async def run(self, work: Any, *, seed: int | None = None, timeout: float | None = None) -> Any:
        """Run an inference or a program beside the engine, and return its result.

        ``work`` is an inference over this runtime, whose ``run(seed)`` is awaited, or an async function,
        which gets the runtime. With replicas it runs in one of them, which answers all its questions, and
        only the result comes back; otherwise here. Results are the same for a seed, up to the engine's
        numerics. Concurrent programs are spread over the replicas. A program whose replica dies starts
        again on another one, at most twice. New weights wait for its end.

        Its objects travel with it, with the replica's runtime in place of this one: functions of modules
        that the replica can import, and, where cloudpickle is installed (vLLM brings it), any function.
        Side effects stay there. Only processes that this process has started run its code.

        Args:
            seed: for the inference, and for a function's questions without seeds.

        Raises:
            InvalidRequest: ``work`` is of another kind, or it or its result cannot be sent.
            EngineFailed: three replicas died with it. TimedOut, Closed; its own errors.
        """
        own = check_seed(seed)
        given = next(self._nonces) if own is None else own
        return await run_program(self, work, given, timeout)

    run_sync = blocking_twin(run)

    # -- prefixes -----------------------------------------------------------------------------

    async def warm_up(self, prefix: Prefix, **options: Unpack[WarmUpOptions]) -> int:
        """Compute a common prefix once and pin it; return its number of tokens.

        The prefix is a text, token ids, or the first messages of a conversation, of which the common part
        of all such chats is pinned. On vLLM, rows and texts that begin with it start from there until
        ``cool_down``. A prefix that loses its memory to a question, or with an engine, is pinned again by
        the next question that computes it. The newest 64 prefixes are pinned, in half of the KV cache.
        Other engines compute the row and cache it. Cancelling before the computation pins no prefix.

        Raises:
            InvalidRequest: the prefix is empty, or chats share no tokens; otherwise as
                ``next_token_logprobs``.
        """
        request, timeout = self._texts.prefix(prefix, options)
        await self._ask((request,), timeout=timeout)
        return len(request.row)

    def cool_down(self, prefix: Prefix | None = None, **options: Unpack[PrefixOptions]) -> None:
        """Unpin a prefix of ``warm_up`` with these options, or all prefixes. Unknown ones are ignored.
        Returns at once."""
        self._texts.release(prefix, options)

    # -- the same, blocking a thread; an interrupt withdraws the question -----------------------

    next_token_logprobs_sync = blocking_question(next_token_logprobs)
    batch_next_token_logprobs_sync = blocking_question(batch_next_token_logprobs)
    draw_sync = blocking_question(draw)
    batch_draw_sync = blocking_question(batch_draw)
    token_logprobs_sync = blocking_question(token_logprobs)
    top_logprobs_sync = blocking_question(top_logprobs)
    score_sync = blocking_question(score)
    batch_score_sync = blocking_question(batch_score)
    prompt_logprobs_sync = blocking_question(prompt_logprobs)
    prompt_rows_sync = blocking_chunks(prompt_rows)
    sample_sync = blocking_question(sample)
    batch_sample_sync = blocking_question(batch_sample)
    generate_sync = blocking_question(generate)
    batch_generate_sync = blocking_question(batch_generate)
    chat_sync = blocking_question(chat)
    warm_up_sync = blocking_question(warm_up)
    stream_sync = blocking_stream(stream)
    stream_chat_sync = blocking_stream(stream_chat)


def _connecting(
    url: str,
    *,
    api_key: str | None = None,
    timeout: float = 600.0,
    cache_bytes: int = 256 * 2**20,
    restart: str | None = None,
    seed: int | None = None,
) -> tuple[EngineThread, RowCache]:
    check_int("cache_bytes", cache_bytes, 0)
    if seed is not None:
        check_int("seed", seed, 0)
    if restart not in (None, "auto"):
        raise InvalidRequest(f'restart must be "auto" or None, got {named(restart)}')
    cache = RowCache(cache_bytes)
    engines: list[RemoteEngine] = []
    lines: list[ServerConnection] = []

    def open_engine() -> RemoteEngine:
        lines.clear()
        engine = RemoteEngine(url, api_key, timeout=timeout, on_connection=lines.append)
        if engines and engine.fingerprint != engines[0].fingerprint:  # its rows are cached
            engine.close()
            raise EngineFailed(f"{url} has another model by now, or new weights: connect again")
        # The runtime's names follow the server's.
        names = engines[0].adapters if engines else engine.adapters
        for gone in names.keys() - engine.adapters.keys():
            del names[gone]
        names |= engine.adapters
        engine.adapters = names
        engines[:] = [engine]
        return engine

    def hang_up() -> None:
        for line in [*lines]:
            line.hang_up()

    thread = EngineThread(
        open_engine,
        cache,
        max_queued_requests=MAX_QUEUED,
        max_queued_bytes=MAX_QUEUED_BYTES,
        restarts=restart == "auto",
        hang_up=hang_up,
    )
    return thread, cache
