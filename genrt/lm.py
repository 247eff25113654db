"""AsyncLM: the language model of users. ``runtime/__init__.py`` has the way of a request."""

from __future__ import annotations

import asyncio
import operator
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, TypedDict, Unpack, cast

import torch

from genrt.contexts import Context, Gatherer, begin_context
from genrt.engines.protocol import Engine, tokenizer_of
from genrt.engines.remote.connection import ServerConnection
from genrt.engines.remote.engine import RemoteEngine
from genrt.engines.weights import SleepingPart
from genrt.errors import EngineFailed
from genrt.numbers import check_int, check_one_of, check_options, check_timeout
from genrt.populations import Population, PopulationRuntime, Prompts, begin, draw_batch
from genrt.questions.arguments import TokenIds, check_contexts, check_seed, nonces_of
from genrt.questions.completions import Completion, GenerateOptions, SampleOptions, TurnOptions
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
from genrt.questions.rows import Device, Limits, id_words, must_move, row_request
from genrt.questions.scores import (
    TeacherRequests,
    joined_scores,
    row_chunks,
    score_requests,
)
from genrt.runtime.adapters import AdapterNames
from genrt.runtime.ask import (
    Asker,
    asked_in_turn,
    blocking_chunks,
    blocking_question,
    blocking_stream,
)
from genrt.runtime.cache import RowCache
from genrt.runtime.concurrency import blocking, blocking_twin, run_in_thread, twin_of
from genrt.runtime.lifecycle import PauseOptions
from genrt.runtime.programs import run_program
from genrt.runtime.statistics import Statistics
from genrt.runtime.streams import Stream
from genrt.runtime.texts import Texts
from genrt.runtime.thread import EngineThread
from genrt.runtime.weights import UpdateOptions, WeightsSource, WeightUpdates
from genrt.tokens import encoding, vocabulary
from genrt.tokens.sampling import BatchDraw, Draw, TeacherLogprobs, TopLogprobs

__all__ = ["AsyncLM", "ConnectOptions"]


INTERRUPTED = (
    "It runs in another thread; an interrupt cancels it, or undoes it if it was over already."
)

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


class AsyncLM:
    """A language model that answers many concurrent questions in few engine calls.

    ``load``, ``aload`` and ``connect`` make it. Every ``await`` works on any event loop in any thread,
    and every ``_sync`` twin works anywhere, also inside a running loop such as a notebook's. Leaving
    ``with`` or ``async with`` closes the runtime.

    Cancelling an await withdraws only that question. So does ``timeout=``, which every question takes, in
    seconds; it raises ``TimedOut``. A question waits while the queue is full (``load``'s
    ``max_queued_requests``). After ``close`` every question raises ``Closed``, also waiting ones and
    empty batches. Wrong arguments raise for empty batches too.
    """

    def __init__(
        self, thread: EngineThread, cache: RowCache, engine: Engine, *, seed: int | None = None
    ) -> None:
        self._thread = thread
        self._cache = cache
        self._limits = Limits(engine.vocab_size, engine.max_model_len)
        has_own = bool(thread.capabilities.reads)
        given = thread.answering.engine.adapters if has_own else {}  # which the engine may change
        self._weights = WeightUpdates(thread, cache)
        thread.belong_to(self)
        self._asker = asker = Asker(thread, given, thread.adapters.lost)
        self._adapters = AdapterNames(thread, asker)
        # The next stops of every question.
        self._bound = asker.bound
        self._ask, self._ask_sync = asker.ask, asker.ask_sync
        self._stream, self._stream_sync = asker.stream, asker.stream_sync
        self._draw_from(seed)

    @classmethod
    async def connect(cls, url: str, **options: Unpack[ConnectOptions]) -> Self:
        """Return a runtime over a genrt server's at ``url``; see ``ConnectOptions``. Cancelling abandons
        the connection.

        Raises:
            InvalidRequest: an option is unknown or out of range.
            EngineDied: the server cannot be reached, or refuses the key.
            EngineUnsupported: it is not a genrt server of this version.
        """
        check_options("connect", options, ConnectOptions.__annotations__)
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
        own = self._thread, self._asker, self._limits, self._nonces
        self._texts = Texts(*own)
        self._populations = PopulationRuntime(*own)
        self._contexts = Gatherer(self._populations, self._texts)

    def _of_seed(self, seed: int) -> Self:
        """Return an equal runtime with its own seed."""
        own = object.__new__(type(self))
        vars(own).update(vars(self), _whole=self)  # the whole closes when it is garbage
        own._draw_from(seed)
        return own

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncLM) and other._thread is self._thread

    def __hash__(self) -> int:
        return hash(self._thread)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a runtime cannot be copied or pickled: hand it on as it is, and load another elsewhere"
        )

    # -- the model ----------------------------------------------------------------------------

    @property
    def runtime_id(self) -> str:
        """An id that is unique among the runtimes of all processes."""
        return self._thread.nonce

    @property
    def vocab_size(self) -> int:
        """The length of a row; token ids are ``0 .. vocab_size - 1``."""
        return self._limits.vocab_size

    @property
    def max_model_len(self) -> int:
        """The maximum length of a context in tokens."""
        return self._limits.max_model_len

    @property
    def max_batch_size(self) -> int:
        """The maximum requests in one step of the engine; ``load``'s option bounds a flush."""
        return self._thread.engine.max_batch_size

    @property
    def device(self) -> torch.device:
        """The device on which rows are computed, cached and returned."""
        return self._thread.engine.device

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers' for checkpoints). Raises InvalidRequest without one."""
        return tokenizer_of(self._thread.engine)

    @cached_property
    def byte_vocab(self) -> list[bytes]:
        """The bytes that each of the ``vocab_size`` tokens adds to a text."""
        return vocabulary.byte_vocab(self.tokenizer, self.vocab_size)

    @cached_property
    def str_vocab(self) -> list[str]:
        """``byte_vocab`` as text; incomplete characters show as U+FFFD."""
        return [token.decode(errors="replace") for token in self.byte_vocab]

    def encode(self, text: str, *, lossy: bool = False) -> list[int]:
        """Return the token ids of a text, without special tokens. Raises InvalidRequest if the tokenizer
        would lose or change some of the text, unless ``lossy`` is true."""
        return encoding.encode(self.tokenizer, text, lossy=lossy)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[encoding.ChatOptions]
    ) -> list[int]:
        """Return the token ids of a conversation such as ``[{"role": "user", "content": "Hello!"}]``,
        written by the tokenizer's chat template. By default they end with the start of the assistant's
        turn; ``ChatOptions`` has the options. Raises InvalidRequest if there is no chat template, it
        refuses the messages, or text would be lost."""
        check_options("encode_chat", options, encoding.ChatOptions.__annotations__)
        return encoding.encode_chat(self.tokenizer, messages, **options)

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of token ids, special tokens included; the inverse of ``encode``."""
        return encoding.decode(self.tokenizer, self._limits.token_ids(token_ids, allow_empty=True))

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
            InvalidRequest: the token ids are empty or out of range.
            ContextTooLong: there are too many.
            UnknownAdapter: no adapter has this name.
            EngineFailed: the engine's step failed (OutOfMemory: for this request alone), or this row is
                not finite (NotFinite).
            TimedOut: there was no answer within ``timeout`` seconds.
            Closed: the runtime is closed.
        """
        row = row_request(self._limits, token_ids, self._bound(adapter))
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

        One question for the whole batch; raises and cancels as ``next_token_logprobs``."""
        bound, moves = self._bound(adapter), must_move(device, self.device)
        rows = [row_request(self._limits, each, bound) for each in check_contexts(contexts)]
        requests = [ReadRequest(row, HostRow()) for row in rows] if moves else rows
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
        bound, nonce = self._bound(adapter), next(self._nonces)
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
        bound = self._bound(adapter)
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
        request = top_request(self._limits, token_ids, k, self._bound(adapter))
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
        own = self._limits, [token_ids], [continuation], self._bound(adapter)
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
        given = check_contexts(contexts), check_contexts(continuations, "continuations")
        own = self._limits, *given, self._bound(adapter)
        requests = score_requests(*own, in_one=self._thread.capabilities.scores)
        return joined_scores(await self._ask([*chain(*requests)], timeout=timeout), requests)

    async def prompt_logprobs(
        self, token_ids: TokenIds, *, adapter: str | None = None, timeout: float | None = None
    ) -> torch.Tensor:
        """Return the score of a text after its first token: float32 ``[len(token_ids) - 1]``."""
        words = id_words(token_ids, self._limits.vocab_size)
        own = self._limits, [words[:1]], [words[1:]], self._bound(adapter)
        requests = score_requests(*own, in_one=self._thread.capabilities.scores)
        return joined_scores(await self._ask(requests[0], timeout=timeout), requests)[0]

    async def teacher(
        self,
        token_ids: TokenIds,
        *,
        top: int = 256,
        start: int = 1,
        temperature: float = 1.0,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> TeacherLogprobs:
        """Return the ``top`` likeliest tokens after each token of a text, and the mass that they leave,
        for a student: ``(token_ids, logprobs, tail)`` on the host.

        Row ``i`` is the law after ``token_ids[: start + i]``, as row ``start - 1 + i`` of the student's
        logits: ``[len(token_ids) + 1 - start, top]``. vLLM computes the text once, and finds the tokens
        on its device; other engines, a row a token.

        Args:
            top: 1 to ``vocab_size``. There are at most 2**24 tokens in an answer.
            start: the length of the first context. A prompt before it may come from the cache.
            temperature: above 0; divides the logits.
        """
        own: Any = {"top": top, "start": start, "temperature": temperature}
        own |= {"adapter": adapter, "timeout": timeout}
        words = id_words(token_ids, self._limits.vocab_size)
        [found] = await AsyncLM.batch_teacher(self, [words], **own)
        return found

    async def batch_teacher(
        self,
        texts: Sequence[TokenIds],
        *,
        top: int = 256,
        start: int = 1,
        temperature: float = 1.0,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> list[TeacherLogprobs]:
        """Return the result of ``teacher`` for each text, as one question. A beginning that several texts
        share is computed once, and sent once."""
        own: Any = {"top": top, "start": start, "temperature": temperature}
        in_one = self._thread.capabilities.scores
        group = TeacherRequests(self._limits, texts, self._bound(adapter), in_one=in_one, **own)
        return group.joined(await self._ask(group.requests, timeout=timeout))

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
        own = self._limits, token_ids, start, chunk, self._bound(adapter)
        check_timeout(timeout)
        chunks = row_chunks(*own, in_one=self._thread.capabilities.scores_rows)
        return asked_in_turn(self._ask, chunks, timeout)

    def context(self, prompt: str | TokenIds | Context, *, adapter: str | None = None) -> Context:
        """Return a sequence that begins with a prompt, for one coroutine; computes nothing yet. A context
        as the prompt is forked. Raises InvalidRequest for a wrong prompt; UnknownAdapter.
        """
        return begin_context(self._contexts, prompt, adapter, Context)

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
        which gets the runtime. With replicas it runs in one of them, as ``work.run(seed)`` does too, and
        only the result comes back; otherwise here. Results are the same for a seed, up to the engine's
        numerics. Concurrent programs are spread over the replicas. A program whose replica dies starts
        again on another one, once. New weights wait for its end.

        Its objects travel with it, with the replica's runtime in place of this one. Side effects stay
        there; the program cannot close, pause or update that runtime. Only processes that this process
        has started run its code.

        Args:
            seed: for the inference, and for a function's questions without seeds.

        Raises:
            InvalidRequest: ``work`` is of another kind, or it or its result cannot be sent.
            EngineFailed: two replicas died with it. TimedOut, Closed; its own errors.
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
        Other engines, and replicas, compute the row and cache it. Cancelling before the computation pins
        no prefix.

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

    # -- adapters -----------------------------------------------------------------------------

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters, for ``adapter=``."""
        return self._asker.loaded()

    async def add_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load the LoRA adapter in directory ``path`` (safetensors) under ``name``, for later questions.

        A loaded name is replaced; earlier questions still use the old weights. Cancelling removes the
        adapter again; a replaced name stays loaded, with the old or the new weights. The files are copied
        first, beside the engine's steps; every engine loads the copy, also after a restart.

        Raises:
            InvalidAdapter: the directory has no safetensors adapter that fits, or the engine refuses it.
        """
        await self._adapters.add(name, path)

    @twin_of(add_adapter, interrupted=INTERRUPTED)
    def add_adapter_sync(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load an adapter, blocking."""
        blocking(self._adapters.add(name, path), undo=operator.call)

    def adapter_files(self, name: str) -> Path | None:
        """Return the directory of this runtime's copy of an adapter's files, or ``None`` if the engine
        brings the adapter or the name is unknown. Loading the name again makes another copy."""
        return self._adapters.files(name)

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter: later questions raise UnknownAdapter. Earlier questions are answered before
        its weights and cached rows go. Returns at once."""
        self._adapters.remove(name)

    # -- weights ------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        """The version of the weights: 0 when the model is loaded, plus 1 for each update."""
        return self._thread.batcher.weights_version

    async def update_weights(self, source: WeightsSource, **options: Unpack[UpdateOptions]) -> int:
        """Replace the model's weights in place; return their version. ``UpdateOptions`` has the options.

        ``source`` has all tensors of the model's checkpoint by name: a mapping or pairs; the path of a
        safetensors file or of a directory of them; or an iterable, asynchronous or not, of chunks, each a
        mapping or pairs. Do not change the tensors until this returns.

        Later questions wait for the new weights. Before these answer, cached rows, resident sequences and
        the KV cache are dropped. Adapters stay. A population continues with the new weights; its draws
        have their version.

        Weights that do not fit change nothing if that can be checked first: all tensors by name, all
        files, or the first chunk. A later error or a cancellation kills the engine; with
        ``load(…, restart="auto")``, or after ``restart``, another engine has the last whole weights. No
        answer mixes two versions, except texts that go on with ``pending="continue"``. A restart ends an
        update with EngineFailed. An interrupt cannot undo ``update_weights_sync``: check
        ``weights_version`` after it.

        Raises:
            InvalidWeights: a tensor is unknown, missing or repeated, or has a wrong shape or type.
            EngineUnsupported: the engine cannot replace its weights, or does not know their names.
            EngineFailed: the engine cannot forget the results of the old weights, and keeps these; as
                EngineDied, it failed during the update. An iterator's own errors are raised as they are.
            InvalidRequest: ``source`` or an option is wrong, or the engine sleeps; Closed.
        """
        check_options("update_weights", options, UpdateOptions.__annotations__)
        return await self._weights.update(source, **options)

    async def pause(self, **options: Unpack[PauseOptions]) -> None:
        """Pause until ``resume``, ``restart`` or ``close``; return once the engine is idle. Weights may
        be replaced in a pause. Cancelling resumes. ``PauseOptions`` has the options;
        ``genrt/runtime/lifecycle.py`` has a table of pauses, sleeps, updates and restarts.

        Raises:
            InvalidRequest: the runtime is paused already, or resumed before the engine was idle, or an
                option is wrong; Closed.
        """
        await self._thread.lifecycle.pause(options)

    def resume(self) -> None:
        """End a pause, if there is one. Returns at once. Raises InvalidRequest while the engine
        sleeps."""
        self._thread.lifecycle.resume()

    async def sleep(self, level: int = 1, **options: Unpack[PauseOptions]) -> int:
        """Pause, unless paused, and free the engine's memory on its device until ``wake_up``; return the
        number of freed bytes.

        Level 1 moves the weights to the host; level 2 drops them, and ``wake_up`` reads them again. The
        KV cache goes with every resident sequence; cached rows stay. Waits for a pause to begin, for an
        update, and for an earlier ``sleep`` or ``wake_up``. Cancelling moves the memory back and ends the
        pause of this call.

        Raises:
            EngineUnsupported: the engine cannot, as vLLM on a CPU or without ``enable_sleep_mode``.
            InvalidRequest: it sleeps already, or an argument is wrong; EngineFailed, Closed.
        """
        freed, _ = await self._thread.lifecycle.sleep(level, options)
        return freed

    async def wake_up(self, tags: Collection[SleepingPart] | None = None) -> bool:
        """End a sleep; return whether the whole engine is awake. Tags ``["weights"]`` wake only the
        weights, for an update while a trainer uses the rest of the memory; the other tag is
        ``"kv_cache"``.

        Raises:
            InvalidRequest: there is no such tag.
            EngineFailed: dropped weights cannot be read again. The engine stays asleep until they are
                replaced and this is called again.
        """
        return await self._thread.lifecycle.wake_up(tags)

    def reset_prefix_cache(self) -> None:
        """Have the engine forget, between two steps, everything that no request in progress needs.
        Prefixes of ``warm_up`` are pinned again once they are computed again. Returns at once."""
        self._thread.call(lambda answering: answering.forget_residents())

    update_weights_sync = blocking_twin(update_weights)
    wake_up_sync = blocking_twin(wake_up)

    @twin_of(pause, interrupted=INTERRUPTED)
    def pause_sync(self, **options: Unpack[PauseOptions]) -> None:
        """Pause, blocking."""
        blocking(self._thread.lifecycle.pause(options), undo=operator.call)

    @twin_of(sleep, interrupted=INTERRUPTED)
    def sleep_sync(self, level: int = 1, **options: Unpack[PauseOptions]) -> int:
        """Sleep, blocking."""
        sleeping = self._thread.lifecycle.sleep(level, options)
        # One line: an interrupt between ``blocking`` and the return would leave the engine asleep.
        return blocking(sleeping, undo=lambda done: done[1]())[0]

    # -- the runtime --------------------------------------------------------------------------

    def clear_cache(self) -> None:
        """Drop every cached row."""
        self._cache.clear()

    def statistics(self) -> Statistics:
        """Return the present counters, frozen; ``later.since(earlier)`` has the differences."""
        batcher, cache = self._thread.batcher.statistics(), self._cache.statistics()
        engine, replicas = self._thread.statistics(), self._thread.replicas()
        return Statistics(batcher, cache, engine, replicas)

    def close(self) -> None:
        """End every question with ``Closed`` and free the engine. Returns when the step in progress has
        ended, or after 5 seconds; the thread then frees the engine by itself. A step waits while another
        vLLM opens in this process. Idempotent, from any thread."""
        self._thread.close()

    async def aclose(self) -> None:
        """Close without blocking the event loop."""
        await run_in_thread(self.close)

    def restart(self) -> None:
        """Close the engine, unless closed, and open another one with the same options and adapters.
        Cached rows stay; the engine's statistics start again.

        Waiting questions raise ``Closed``. With ``load(…, restart="auto")`` a dead engine is replaced
        automatically, and no question fails.

        Raises:
            EngineFailed: a step takes longer than a minute: wait for it, then try again.
            Closed: in a forked child. The errors of ``load`` and interrupts close the runtime.
        """
        try:
            opened = self._thread.restart()
            self._thread.belong_to(self)
            opened.result()
        except BaseException:
            self._thread.close(wait=False)
            raise

    async def arestart(self) -> None:
        """Restart without blocking the event loop."""
        await run_in_thread(self.restart)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        engine = f"{type(self._thread.engine).__name__}, vocab_size={self.vocab_size}"
        if not self._thread.alive:
            return f"{type(self).__name__}(closed, {engine})"
        return (
            f"{type(self).__name__}(open, {engine}, max_model_len={self.max_model_len}, "
            f"adapters={list(self._asker.adapters)}, {self._thread.batcher!r}, {self._cache!r})"
        )

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
    teacher_sync = blocking_question(teacher)
    batch_teacher_sync = blocking_question(batch_teacher)
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
    check_one_of("restart", restart, ("auto", None))
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
