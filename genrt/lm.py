"""AsyncLM: a language model that users ask. ``runtime/__init__.py`` has the way of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack, cast

import torch

from genrt.cluster.programs import run_program
from genrt.engines.protocol import Engine
from genrt.engines.remote.connection import ServerConnection
from genrt.engines.remote.engine import RemoteEngine
from genrt.errors import EngineFailed, InvalidRequest
from genrt.numbers import check_int, named
from genrt.populations import Population, PopulationRuntime, Prompts, begin, draw_batch
from genrt.questions.completions import Completion, GenerateOptions, SampleOptions, TurnOptions
from genrt.questions.contexts import TokenIds, check_contexts, check_seed, id_words, nonces_of
from genrt.questions.draws import draw_request
from genrt.questions.masks import Mask, Masks
from genrt.questions.reads import (
    HostRow,
    Prefix,
    PrefixOptions,
    ReadRequest,
    WarmUpOptions,
    candidates_request,
    top_request,
)
from genrt.questions.rows import Device, must_move, row_request
from genrt.questions.scores import (
    joined_scores,
    row_chunks,
    score_requests,
)
from genrt.runtime.ask import Asker, blocking_chunks, blocking_question, blocking_stream
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
"""The bounds of the queue of a connected runtime, as ``genrt.load`` has them by default."""


class ConnectOptions(TypedDict, total=False):
    """The options of ``AsyncLM.connect``, which returns a runtime over one that a genrt server serves.

    It answers as one that was loaded: what is asked concurrently is sent together, one HTTP call for a
    flush, and rows are cached here. Draws, scores and populations are answered over there, and little
    travels; rows travel whole. Samples and texts are drawn here, from a row for each token: for long ones
    use the server's OpenAI routes. Its adapters are those of the server at this moment; others cannot be
    added from here. The url is ``http://`` or ``https://``, with nothing or ``/v1`` at its end.

    Attributes:
        api_key: the server's key.
        timeout: seconds without a byte from the server after which it counts as dead; by default 600.
        cache_bytes: the bound of the row cache; by default 256 MiB, and 0 is no cache.
        restart: ``"auto"`` connects once more to a server that was lost, and asks it the unanswered
            questions; without it every later call raises the reason, until ``AsyncLM.restart``.
        seed: as ``genrt.load`` has it.
    """

    api_key: str | None
    timeout: float
    cache_bytes: int
    restart: Literal["auto"] | None
    seed: int | None


class AsyncLM(EngineOwner):
    """A language model that answers many concurrent questions in few engine calls.

    Made by ``load``, ``aload`` or ``connect``. Every ``await`` works on any event loop, in any thread,
    and every method with a ``_sync`` twin works anywhere, inside a running loop (a notebook's) too. A
    context manager both ways; leaving it closes the runtime.

    Cancelling an await withdraws that question alone: it did not happen, and nobody else notices. So
    does ``timeout=``, which every question takes: seconds, after which it raises ``TimedOut``. While the
    queue is full (``load``'s ``max_queued_requests``), a question waits for room.
    Whatever is asked after ``close`` raises ``Closed``, a batch of nothing too, and so does what was
    still waiting. Wrong arguments of a batch raise whether there is anything in it or not.
    """

    def __init__(
        self, thread: EngineThread, cache: RowCache, engine: Engine, *, seed: int | None = None
    ) -> None:
        super().__init__(thread, cache, engine)
        self._asker = asker = Asker(thread, self._adapters)
        self._ask, self._ask_sync = asker.ask, asker.ask_sync
        self._stream, self._stream_sync = asker.stream, asker.stream_sync
        self._chunks, self._chunks_sync = asker.chunks, asker.chunks_sync
        self._draw_from(seed)

    @classmethod
    async def connect(cls, url: str, **options: Unpack[ConnectOptions]) -> Self:
        """Return a runtime over the one that a genrt server serves at ``url``; see ``ConnectOptions``.
        Raises EngineDied if it cannot be reached, EngineUnsupported if it is none; InvalidRequest."""
        return await _connected(cls, url, options)

    def _draw_from(self, seed: int | None) -> None:
        """Have what is asked without a seed be drawn from this one."""
        self._nonces = nonces_of(seed)
        own = self._limits, self._adapters, self._nonces
        self._texts = Texts(self._thread, *own)
        self._populations = PopulationRuntime(self._thread, self._asker, *own)

    def _of_seed(self, seed: int) -> Self:
        """Return this runtime, equal to itself, with a seed of its own."""
        own = object.__new__(type(self))
        vars(own).update(vars(self), _whole=self)  # which closes when it is garbage
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

        It is on ``self.device``, or on the host with ``device="cpu"``: from a GPU, the rows of a step
        are moved there together, through pinned memory. The tensor is the caller's own. Concurrent
        questions are answered together, equal ones once.

        Raises:
            InvalidRequest: token ids that are no ints in range, or none; ContextTooLong, UnknownAdapter.
            EngineFailed: the engine step failed (OutOfMemory: for this request alone), or this row is not
                finite (NotFinite).
            TimedOut: there was no answer within ``timeout`` seconds.
            Closed: the runtime is closed.
        """
        row = row_request(self._limits, token_ids, self._adapters.bound(adapter))
        moves = device is not None and must_move(device, self.device)
        request = ReadRequest(row, HostRow()) if moves else row
        [found] = await self._ask((request,), timeout=timeout)
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

        One question with one future, however many contexts; raises and cancels as
        ``next_token_logprobs`` does, for the whole batch, and for one of no contexts too."""
        bound, moves = self._adapters.bound(adapter), must_move(device, self.device)
        rows = [row_request(self._limits, each, bound) for each in check_contexts(contexts)]
        requests = [ReadRequest(row, HostRow()) for row in rows] if moves else rows
        found = await self._ask(requests, stacked=bool(requests), timeout=timeout)
        if found:
            return cast("torch.Tensor", found[0])
        return torch.empty(0, self.vocab_size, device="cpu" if moves else self.device)

    # -- what is read from rows, without moving or keeping them -------------------------------

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

        The result's ``logprob`` is the log-probability with which the token was drawn, and ``log_mass``
        is ``logsumexp(row[mask])``, of the row itself whatever the temperature: at temperature 1 the
        incremental log importance weight. At another, the weight is ``row[token_id] - logprob``. No mass
        under the mask is a dead end and no error: token -1, ``log_mass`` -inf. Concurrent draws are
        batched, on the engine's device; those after equal contexts share a row, which may be the cache's.

        Args:
            mask: what may be drawn: bool ``[vocab_size]``; token ids as a list, a set or int64; or a
                packed bitmask, int32 ``[ceil(vocab_size / 32)]``, as ``constraints.bitmasks`` makes.
                ``None`` is all, and integers of any other type are refused.
            temperature: 0 is greedy.
            seed: makes the draw reproducible, whatever else is in the batch; draws of equal seeds share
                their randomness, so give each one of its own. Without one, calls are independent.

        Raises:
            InvalidRequest: a mask or parameter that fits nothing; else as ``next_token_logprobs``.
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
        tensor. With a ``seed``, context ``i`` is drawn with seed ``seed + i``. A sampler that grows
        the same contexts step by step is faster as a ``population``."""
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
        """Return each token's log-probability in ``continuation``, given those before it: float32
        ``[len(continuation)]`` on the host. vLLM computes the text once; others, a row for each token."""
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
        """Return what ``score`` does of each continuation after its context, all as one question."""
        own = self._limits, contexts, continuations, self._adapters.bound(adapter)
        requests = score_requests(*own, in_one=self._thread.capabilities.scores)
        return joined_scores(await self._ask([*chain(*requests)], timeout=timeout), requests)

    async def prompt_logprobs(
        self, token_ids: TokenIds, *, adapter: str | None = None, timeout: float | None = None
    ) -> torch.Tensor:
        """Return the score of a text's tokens after its first: float32 ``[len(token_ids) - 1]``."""
        words = id_words(token_ids, self._limits.vocab_size)
        own = self._limits, [words[:1]], [words[1:]], self._adapters.bound(adapter)
        requests = score_requests(*own, in_one=self._thread.capabilities.scores)
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
        """Return the rows before a text's tokens from number ``start`` on, to be iterated, as a teacher
        has them for a student: ``async for rows in …``, each float32 ``[at most chunk, vocab_size]`` on
        ``self.device``, of 64 MiB by default. On vLLM one is computed in one forward, after those before.

        Each tensor is a question of its own, asked when it is wanted: ``timeout`` is for each, leaving
        the loop leaves the rest unasked, and new weights answer those that follow. Wrong arguments raise
        here, all else on the way.
        """
        own = self._limits, token_ids, start, chunk, self._adapters.bound(adapter)
        return self._chunks(
            row_chunks(*own, in_one=self._thread.capabilities.scores_rows), timeout=timeout
        )

    def population(
        self, prompt: Prompts, n: int | None = None, *, adapter: str | None = None
    ) -> Population:
        """Return ``n`` sequences that begin with a prompt, or one for each of several prompts, to go on
        together as arrays; nothing is computed yet. Raises InvalidRequest if these are no prompts, or
        ``n`` is missing for one or given for several; UnknownAdapter.
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
        """Draw up to ``max_tokens`` tokens one after another, by the engine's own decode loop.

        ``SampleOptions`` and ``DecodingOptions`` have the options; ``max_tokens`` must be given.

        Raises:
            InvalidRequest: a parameter is out of range; ContextTooLong when the context and
                ``max_tokens`` exceed ``max_model_len`` together; else as ``next_token_logprobs``.
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
        """Sample after each of ``contexts``, in order, as one question; options as ``sample``'s. With a
        ``seed``, context ``i`` is drawn with seed ``seed + i``, as ``sample`` would with that seed."""
        requests = self._texts.samples(check_contexts(contexts), options, method="batch_sample")
        return [list(each) for each in await self._ask(requests, timeout=timeout)]

    async def generate(
        self, prompt: str | TokenIds, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Draw the text after a prompt, by the engine's own decode loop.

        The prompt is a text, tokenized with the special tokens that the tokenizer puts around it, or
        token ids as they are. ``GenerateOptions`` has the options.

        Raises:
            InvalidRequest: an option is out of range, or the engine cannot do it; else as ``sample``.
        """
        requests, timeout = self._texts.requests([prompt], options)
        return cast("Completion", (await self._ask(requests, timeout=timeout))[0])

    async def batch_generate(
        self, prompts: Sequence[str | TokenIds], **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """Draw the text after each of ``prompts``, in order, as one question; options as ``generate``'s.
        With a ``seed``, prompt ``i`` is drawn with seed ``seed + i``: ``[prompt] * n`` gives ``n``
        independent texts."""
        requests, timeout = self._texts.requests(prompts, options)
        return list(await self._ask(requests, timeout=timeout))

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[TurnOptions]
    ) -> Completion:
        """Draw the assistant's next message, or the rest of one that ends the conversation; see
        ``encode_chat`` for that, ``TurnOptions`` for the options."""
        requests, timeout = self._texts.turn(messages, options)
        return cast("Completion", (await self._ask(requests, timeout=timeout))[0])

    def stream(self, prompt: str | TokenIds, **options: Unpack[GenerateOptions]) -> Stream:
        """Return the text after a prompt as it is drawn, to be iterated: ``async for delta in …``.

        With the last ``Delta``, the stream's ``completion`` is there, the same as ``generate``'s. Leaving
        the loop, or cancelling, withdraws the question; ``timeout`` is for all of it. Wrong arguments
        raise here, all else on the way.
        """
        request, timeout = self._texts.streamed(self._texts.requests([prompt], options))
        return self._stream(request, timeout=timeout)

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[TurnOptions]
    ) -> Stream:
        """Return the assistant's next message as it is drawn: ``chat``, as a ``stream``."""
        request, timeout = self._texts.streamed(self._texts.turn(messages, options))
        return self._stream(request, timeout=timeout)

    # -- programs -----------------------------------------------------------------------------

    async def run(self, work: Any, *, seed: int | None = None, timeout: float | None = None) -> Any:
        """Run a whole inference, or a program of yours, where its rows are, and return what it returns.

        ``work`` is an inference over this runtime, whose ``run(seed)`` is awaited, or an async function,
        which is given the runtime. With replicas it is sent to one of them, which all its questions ask,
        and only the result comes back; else it runs here. Results are the same for a seed, up to the
        engine's numerics. Programs that run at once are spread over the replicas. One whose replica dies
        is run again from its beginning on another, once. New weights wait until it has ended.

        What it holds travels with it, but for the runtime, in whose place is the replica's. Its side
        effects stay there, and it cannot close, pause or update that runtime. It runs code: of this
        process, in processes that this one has started.

        Args:
            seed: for the inference. What a function asks without seeds is drawn from it too.

        Raises:
            InvalidRequest: ``work`` is neither, cannot be sent, or its result cannot be sent back.
            EngineFailed: two replicas died with it. TimedOut, Closed; else whatever it raises.
        """
        own = check_seed(seed)
        given = next(self._nonces) if own is None else own
        return await run_program(self, work, given, timeout)

    run_sync = blocking_twin(run)

    # -- prefixes -----------------------------------------------------------------------------

    async def warm_up(self, prefix: Prefix, **options: Unpack[WarmUpOptions]) -> int:
        """Compute what many questions begin with, once, and keep it; return how many tokens that is.

        It is a text or token ids, or the messages that begin a conversation: then what all such chats
        share. With vLLM, rows and texts that begin with it start from there until ``cool_down``, whatever
        else is asked. What is given up, because a question could not go on without its memory, or lost
        with an engine, is kept again once a question that begins with it has computed it. The newest 64
        prefixes are kept, in half of the KV cache. Other engines compute the row, and keep only that.
        Cancelling before it is computed keeps nothing.

        Raises:
            InvalidRequest: the prefix is empty, or chats share nothing; else as ``next_token_logprobs``.
        """
        request, timeout = self._texts.prefix(prefix, options)
        await self._ask((request,), timeout=timeout)
        return len(request.row)

    def cool_down(self, prefix: Prefix | None = None, **options: Unpack[PrefixOptions]) -> None:
        """Keep a prefix no more that was given to ``warm_up`` with these options; without one, none at
        all. Other prefixes are ignored. Returns at once."""
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


async def _connected(make: Callable[..., T], url: str, options: ConnectOptions) -> T:
    """Return the runtime that ``make`` makes of a thread, a cache, an engine and a seed. Cancelling
    abandons the connecting.

    Raises:
        TypeError: an option is unknown. InvalidRequest: one is out of range.
        EngineDied: the server cannot be reached, or does not take the key.
        EngineUnsupported: it is no genrt server, or one of another version.
    """
    thread, cache = _started(url, **options)
    try:
        engine = await asyncio.wrap_future(thread.opened)
        return make(thread, cache, engine, seed=options.get("seed"))
    except BaseException:
        thread.close(wait=False)
        raise


def _started(
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
        if engines and engine.fingerprint != engines[0].fingerprint:  # whose rows are cached
            engine.close()
            raise EngineFailed(f"{url} has another model by now, or new weights: connect again")
        # The names that the runtime knows are those of the server now.
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
