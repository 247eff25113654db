"""EngineOwner: the part of ``AsyncLM`` that manages the engine. ``lm.py`` has the questions."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self, Unpack

import torch

from genrt.engines.protocol import Engine, tokenizer_of
from genrt.engines.weights import SleepingPart
from genrt.questions.contexts import Limits, TokenIds
from genrt.runtime.adapters import AdapterNames
from genrt.runtime.cache import RowCache
from genrt.runtime.concurrency import aside, blocking, blocking_twin, twin_of
from genrt.runtime.lifecycle import PauseOptions
from genrt.runtime.statistics import Statistics
from genrt.runtime.thread import EngineThread
from genrt.runtime.weights import UpdateOptions, WeightsSource, WeightUpdates
from genrt.tokens import encoding, vocabulary

__all__ = ["EngineOwner"]

INTERRUPTED = (
    "It runs in another thread; an interrupt cancels it, or undoes it if it was over already."
)


class EngineOwner:
    """Describes the model of an engine, loads adapters and weights, pauses, restarts and closes it.

    Every ``AsyncLM`` is an ``EngineOwner``. Safe from any thread and event loop. A context manager both
    ways; leaving it closes the engine, and so does losing the last reference.
    """

    def __init__(self, thread: EngineThread, cache: RowCache, engine: Engine) -> None:
        self._thread = thread
        self._cache = cache
        self._limits = Limits(engine.vocab_size, engine.max_model_len)
        has_own = bool(thread.capabilities.reads)
        self._adapters = AdapterNames(thread, thread.answering.full.adapters if has_own else {})
        self._weights = WeightUpdates(thread, cache)
        thread.belong_to(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineOwner) and other._thread is self._thread

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
        """The maximum requests in one step of the engine, however large a flush is."""
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
        return encoding.encode_chat(self.tokenizer, messages, **options)

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of token ids, special tokens included; the inverse of ``encode``."""
        return encoding.decode(self.tokenizer, self._limits.token_ids(token_ids, allow_empty=True))

    # -- adapters -----------------------------------------------------------------------------

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters, for ``adapter=``."""
        return self._adapters.loaded()

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
        answer ever mixes two versions. A restart ends an update with EngineFailed. An interrupt cannot
        undo ``update_weights_sync``: check ``weights_version`` after it.

        Raises:
            InvalidWeights: a tensor is unknown, missing or repeated, or has a wrong shape or type.
            EngineUnsupported: the engine cannot replace its weights, or does not know their names.
            EngineFailed: the engine cannot forget the results of the old weights, and keeps these; as
                EngineDied, it failed during the update. An iterator's own errors are raised as they are.
            InvalidRequest: ``source`` or an option is wrong, or the engine sleeps; Closed.
        """
        return await self._weights.update(source, **options)

    async def pause(self, **options: Unpack[PauseOptions]) -> None:
        """Pause until ``resume``, ``restart`` or ``close``; return once the engine is idle. Weights may
        be replaced in a pause. Cancelling resumes. ``PauseOptions`` has the options;
        ``genrt/runtime/lifecycle.py`` has a table of pauses, sleeps, updates and restarts.

        Raises:
            InvalidRequest: the runtime is paused already, or resumed before the engine was idle, or an
                option is wrong; Closed.
        """
        await self._thread.lifecycle.pause(**options)

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
        freed, _ = await self._thread.lifecycle.sleep(level, **options)
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
        blocking(self._thread.lifecycle.pause(**options), undo=operator.call)

    @twin_of(sleep, interrupted=INTERRUPTED)
    def sleep_sync(self, level: int = 1, **options: Unpack[PauseOptions]) -> int:
        """Sleep, blocking."""
        return blocking(
            self._thread.lifecycle.sleep(level, **options), undo=lambda done: done[1]()
        )[0]

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
        await aside(self.close)

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
        engine = f"{type(self._thread.engine).__name__}, vocab_size={self.vocab_size}"
        if not self._thread.alive:
            return f"{type(self).__name__}(closed, {engine})"
        return (
            f"{type(self).__name__}(open, {engine}, max_model_len={self.max_model_len}, "
            f"adapters={list(self._adapters.by_name)}, {self._thread.batcher!r}, {self._cache!r})"
        )
