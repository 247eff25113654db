"""AsyncLM: what users hold; asks its engine every kind of question and owns its lifetime.

A request's way, from here down: this file, with the part of it that is in ``reads.py``, checks the
question and makes the request; ``runtime/batcher.py`` finds it in the cache, joins it to an equal one or
queues it; ``thread.py`` there turns the crank; ``answers.py`` reads from rows; ``engines/`` compute.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeAlias, Unpack, cast

import torch

from genrt.engines.adapters import check_adapter_directory
from genrt.engines.protocol import Engine
from genrt.errors import InvalidRequest
from genrt.numbers import named
from genrt.questions.checks import (
    Limits,
    SampleOptions,
    TokenIds,
    check_contexts,
    check_options,
    must_move,
)
from genrt.questions.values import (
    Adapter,
    HostRow,
    LogprobsRequest,
    ReadRequest,
    Result,
    SampleRequest,
)
from genrt.reads import Reads
from genrt.runtime.cache import RowCache
from genrt.runtime.statistics import Statistics
from genrt.runtime.thread import EngineThread, aside
from genrt.tokens import encoding, vocabulary

__all__ = ["AsyncLM"]

Device: TypeAlias = str | torch.device
"""A device or its name, as torch takes it."""


class AsyncLM(Reads):
    """A language model that answers many concurrent questions in few engine calls.

    Made by ``load`` or ``aload``. Every ``await`` works on any event loop, in any thread, and every
    method with a ``_sync`` twin works anywhere, inside a running loop (a notebook's) too. A context
    manager both ways; leaving it closes the runtime.

    Cancelling an await withdraws that question alone: it did not happen, and nobody else notices. So
    does ``timeout=``, which every question takes: seconds, after which it raises ``TimedOut``. While the
    queue is full (``load``'s ``max_queued_requests``), a question waits for room.
    Whatever is asked after ``close`` raises ``Closed``, a batch of nothing too, and so does what was
    still waiting. Wrong arguments of a batch raise whether there is anything in it or not.
    """

    def __init__(
        self, thread: EngineThread, cache: RowCache, engine: Engine, *, seed: int | None = None
    ) -> None:
        super().__init__(thread, Limits(engine.vocab_size, engine.max_model_len), seed)
        self._cache = cache
        self._adapters_lock = threading.Lock()
        self._versions = itertools.count(1)
        self._finalizer = self._watched()

    # -- the model ----------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """The length of a row; token ids are ``0 .. vocab_size - 1``."""
        return self._limits.vocab_size

    @property
    def max_model_len(self) -> int:
        """The longest context, in tokens, that has a row."""
        return self._limits.max_model_len

    @property
    def device(self) -> torch.device:
        """Where rows are computed, cached and returned."""
        return self._engine.device

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers' for checkpoints).

        Raises:
            InvalidRequest: the model was loaded without one.
        """
        if self._engine.tokenizer is None:
            raise InvalidRequest(
                "this model has no tokenizer: ask with token ids, or load a checkpoint that has one"
            )
        return self._engine.tokenizer

    @cached_property
    def byte_vocab(self) -> list[bytes]:
        """What each token adds to a text, in bytes; ``vocab_size`` of them."""
        return vocabulary.byte_vocab(self.tokenizer, self.vocab_size)

    @cached_property
    def str_vocab(self) -> list[str]:
        """``byte_vocab`` as text; bytes that are no whole characters show as U+FFFD."""
        return [token.decode(errors="replace") for token in self.byte_vocab]

    def encode(self, text: str, *, lossy: bool = False) -> list[int]:
        """Return the token ids of a text, with no special tokens added.

        Raises:
            InvalidRequest: the tokenizer would lose or change some of the text, unless ``lossy`` lets it.
        """
        return encoding.encode(self.tokenizer, text, lossy=lossy)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lossy: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation, written by the tokenizer's own chat template.

        Args:
            messages: the conversation, such as ``[{"role": "user", "content": "Hello!"}]``.
            add_generation_prompt: whether the assistant's turn is begun, so that its answer comes next.
            tools: what the model may call, as transformers' ``apply_chat_template`` takes it.
            chat_template_kwargs: other options of the template, such as ``enable_thinking``.
            lossy: whether the tokenizer may lose or change some of the text.

        Raises:
            InvalidRequest: the tokenizer has no chat template, it does not take these messages, or the
                tokenizer would lose some of the text.
        """
        return encoding.encode_chat(
            self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            lossy=lossy,
        )

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
        """The row after ``token_ids``: float32 ``[vocab_size]``, ``logsumexp == 0``.

        It is on ``self.device``, or on the host with ``device="cpu"``: from a GPU, the rows of a step
        are moved there together, through pinned memory.

        The tensor is the caller's own. Concurrent questions are answered together, equal ones once.

        Raises:
            InvalidRequest: token ids that are no ints in range, or none; ContextTooLong, UnknownAdapter.
            EngineFailed: the engine step failed (OutOfMemory: for this request alone), or this row is not
                finite (NotFinite).
            TimedOut: there was no answer within ``timeout`` seconds.
            Closed: the runtime is closed.
        """
        request = self._row_request(token_ids, device, self._bound(adapter))
        [row] = await self._ask(timeout, (request,))
        return cast("torch.Tensor", row)

    def next_token_logprobs_sync(
        self,
        token_ids: TokenIds,
        *,
        device: Device | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """``next_token_logprobs``, blocking. An interrupt withdraws the question."""
        request = self._row_request(token_ids, device, self._bound(adapter))
        return cast("torch.Tensor", self._ask_sync(timeout, (request,))[0])

    async def batch_next_token_logprobs(
        self,
        contexts: Sequence[TokenIds],
        *,
        device: Device | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """The rows after each of ``contexts``, in order: float32 ``[len(contexts), vocab_size]``.

        One question with one future, however many contexts; raises and cancels as
        ``next_token_logprobs`` does, for the whole batch, and for one of no contexts too.
        """
        requests = self._row_requests(contexts, device, adapter)
        found = await self._ask(timeout, requests, stacked=bool(requests))
        return self._stack(found, device)

    def batch_next_token_logprobs_sync(
        self,
        contexts: Sequence[TokenIds],
        *,
        device: Device | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """``batch_next_token_logprobs``, blocking. An interrupt withdraws the question."""
        requests = self._row_requests(contexts, device, adapter)
        found = self._ask_sync(timeout, requests, stacked=bool(requests))
        return self._stack(found, device)

    # -- samples ------------------------------------------------------------------------------

    async def sample(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        stop_token_ids: Collection[int] = (),
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Up to ``max_tokens`` tokens drawn one after another, by the engine's own decode loop.

        Args:
            stop_token_ids: any of these ends the sample, and is not returned. Nothing else ends it
                early: give ``tokenizer.eos_token_id`` to stop there.
            temperature: below 1e-5 it is greedy.
            top_p: keep the likeliest tokens that have this probability together; 1.0 is off.
            top_k: keep so many of the likeliest tokens; 0 is off.
            min_p: keep tokens of at least this share of the likeliest one's probability; 0.0 is off.
            seed: makes the draws reproducible, whatever else is in the batch. Without one, equal
                calls are independent draws.

        Raises:
            InvalidRequest: a parameter is out of range; ContextTooLong when the context and
                ``max_tokens`` exceed ``max_model_len`` together; else as ``next_token_logprobs``.
        """
        request = self._sample_request(
            token_ids,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            adapter=adapter,
        )
        return _lists(await self._ask(timeout, (request,)))[0]

    def sample_sync(
        self, token_ids: TokenIds, *, timeout: float | None = None, **options: Unpack[SampleOptions]
    ) -> list[int]:
        """``sample``, blocking. An interrupt withdraws the question."""
        check_options("sample_sync", options)
        return _lists(self._ask_sync(timeout, (self._sample_request(token_ids, **options),)))[0]

    async def batch_sample(
        self,
        contexts: Sequence[TokenIds],
        *,
        timeout: float | None = None,
        **options: Unpack[SampleOptions],
    ) -> list[list[int]]:
        """One sample after each of ``contexts``, in order, as one question; options as ``sample``'s.

        With a ``seed``, context ``i`` is drawn with seed ``seed + i``: equal contexts give independent
        samples, and each equals ``sample`` with that seed.
        """
        requests = self._sample_requests("batch_sample", contexts, options)
        return _lists(await self._ask(timeout, requests))

    def batch_sample_sync(
        self,
        contexts: Sequence[TokenIds],
        *,
        timeout: float | None = None,
        **options: Unpack[SampleOptions],
    ) -> list[list[int]]:
        """``batch_sample``, blocking. An interrupt withdraws the question."""
        requests = self._sample_requests("batch_sample_sync", contexts, options)
        return _lists(self._ask_sync(timeout, requests))

    # -- adapters -----------------------------------------------------------------------------

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names that ``adapter=`` takes."""
        return self._loaded_names()

    async def add_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load the LoRA adapter in directory ``path`` (safetensors) under ``name``.

        Calls made from then on can name it. A name that is loaded already is bound to the new
        weights; questions asked before keep the old ones, and no row of theirs is ever returned for
        the new. Cancelling leaves the name as it was, or bound to the new adapter.

        Raises:
            InvalidAdapter: the directory holds no safetensors adapter, it does not fit the model, or
                the engine was opened without adapters.
        """
        await asyncio.wrap_future(self._adding(name, path))

    def add_adapter_sync(self, name: str, path: str | os.PathLike[str]) -> None:
        """``add_adapter``, blocking."""
        self._adding(name, path).result()

    def remove_adapter(self, name: str) -> None:
        """Unbind ``name``: later calls that name it raise ``UnknownAdapter``. Questions asked before
        are answered; then its weights and its cached rows go. Returns at once."""
        batcher = self._batcher
        with self._adapters_lock:
            adapter = self._bound(name)
            if adapter is None:
                raise InvalidRequest("the base model is no adapter: give the name of one")
            del self._adapters[adapter.name]
        batcher.retire(adapter)

    def _adding(self, name: str, path: str | os.PathLike[str]) -> concurrent.futures.Future[None]:
        """Loads and binds on the engine thread, so that the last call wins, and an adapter whose caller
        left meanwhile is bound or was never loaded."""
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"an adapter's name must be a non-empty str, got {named(name)}")
        if not isinstance(path, str | os.PathLike):
            raise InvalidRequest(f"an adapter's path must be a str or a Path, got {named(path)}")
        directory = Path(path).expanduser()
        check_adapter_directory(directory)
        adapter = Adapter(name, next(self._versions))

        def load_and_bind(engine: Engine) -> None:
            engine.add_adapter(adapter, directory)
            with self._adapters_lock:
                previous = self._adapters.get(name)
                self._adapters[name] = adapter
            if previous is not None and previous not in self._thread.adapters.lost:
                self._batcher.retire(previous)

        return self._thread.call(load_and_bind)

    # -- the runtime --------------------------------------------------------------------------

    def _watched(self) -> weakref.finalize[..., AsyncLM]:
        """Have the thread end when this runtime is garbage. An interpreter that exits waits for it, but
        that is for the thread to see to."""
        finalizer = weakref.finalize(self, self._thread.abandon)
        finalizer.atexit = False
        return finalizer

    @property
    def _engine(self) -> Engine:
        return self._thread.engine

    def clear_cache(self) -> None:
        """Drop every cached row; counters stay."""
        self._cache.clear()

    def statistics(self) -> Statistics:
        """Return the counters at this moment, as a frozen value; ``later.since(earlier)`` has what was
        done in between."""
        return Statistics(
            batcher=self._thread.batcher.statistics(),
            cache=self._cache.statistics(),
            engine=self._thread.statistics(),
        )

    def close(self) -> None:
        """End every waiter with ``Closed`` and free the engine. Idempotent, from any thread.

        Returns when the step in progress has ended, or after 5 seconds if it takes longer."""
        self._finalizer.detach()
        self._thread.close()

    async def aclose(self) -> None:
        """``close`` without holding up the event loop."""
        await aside(self.close)

    def restart(self) -> None:
        """Close the engine, if that has not happened, and open another one with the same options and
        adapters; this runtime then answers again. Cached rows stay, the engine's statistics start anew.

        Questions that were still waiting raise ``Closed``. With ``load(…, restart="auto")`` an engine
        that died is replaced without being asked, and no question notices.

        Raises:
            EngineFailed: a step takes longer than 5 seconds: wait for it, then try again.
            Closed: in a forked child. Else what ``load`` raises; the runtime is then closed, as it is by
                an interrupt.
        """
        try:
            opened = self._thread.restart()
            self._finalizer.detach()
            self._finalizer = self._watched()
            opened.result()
        except BaseException:
            self._thread.close(wait=False)
            raise

    async def arestart(self) -> None:
        """``restart`` without holding up the event loop."""
        await aside(self.restart)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        if not self._thread.alive:
            return f"AsyncLM(closed, {type(self._engine).__name__}, vocab_size={self.vocab_size})"
        return (
            f"AsyncLM(open, {type(self._engine).__name__}, vocab_size={self.vocab_size}, "
            f"max_model_len={self.max_model_len}, adapters={list(self._adapters)}, "
            f"{self._thread.batcher!r}, {self._cache!r})"
        )

    # -- from arguments to requests -----------------------------------------------------------

    def _row_request(
        self, token_ids: TokenIds, device: Device | None, adapter: Adapter | None
    ) -> LogprobsRequest | ReadRequest:
        row = self._limits.logprobs_request(token_ids, adapter)
        return ReadRequest(row, HostRow()) if self._leaves(device) else row

    def _row_requests(
        self, contexts: Sequence[TokenIds], device: Device | None, adapter: str | None
    ) -> list[LogprobsRequest | ReadRequest]:
        bound = self._bound(adapter)
        self._leaves(device)  # raises, where there are no contexts too
        return [self._row_request(ids, device, bound) for ids in check_contexts(contexts)]

    def _leaves(self, device: Device | None) -> bool:
        """Return whether rows for this device are moved to the host. Raises InvalidRequest if they can't
        be on it."""
        return device is not None and must_move(device, self.device)

    def _stack(self, found: list[Result], device: Device | None) -> torch.Tensor:
        """Return the stack of rows that was found for a batch; if that is empty, one of no rows."""
        if found:
            return cast("torch.Tensor", found[0])
        return torch.empty(
            0, self.vocab_size, device="cpu" if self._leaves(device) else self.device
        )

    def _sample_request(
        self, token_ids: TokenIds, *, adapter: str | None = None, **options: Any
    ) -> SampleRequest:
        return self._limits.sample_request(
            token_ids, self._bound(adapter), next(self._nonces), **options
        )

    def _sample_requests(
        self, method: str, contexts: Sequence[TokenIds], options: SampleOptions
    ) -> list[SampleRequest]:
        check_options(method, options)
        if len(check_contexts(contexts)) == 0:
            self._sample_request([0], **options)  # raises what is wrong with the options
        requests: list[SampleRequest] = []
        for number, token_ids in enumerate(contexts):
            request = self._sample_request(token_ids, **options)
            if request.seed is not None:
                request = replace(request, seed=(request.seed + number) % 2**63)
            requests.append(request)
        return requests


def _lists(samples: list[Result]) -> list[list[int]]:
    return [list(cast("tuple[int, ...]", sample)) for sample in samples]
