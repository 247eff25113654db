"""EngineOwner: what a runtime does with its engine, whatever it is asked. ``lm.py`` asks."""

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
from genrt.runtime.pauses import PauseOptions, Pauses
from genrt.runtime.statistics import Statistics
from genrt.runtime.thread import EngineThread
from genrt.runtime.weights import UpdateOptions, WeightsSource, WeightUpdates
from genrt.tokens import encoding, vocabulary

__all__ = ["EngineOwner"]

INTERRUPTED = (
    "It runs in another thread; an interrupt cancels it, or undoes it if it was over already."
)


class EngineOwner:
    """An engine on its thread, and what can be done with it besides asking: its model is described,
    adapters and weights are loaded, it pauses, sleeps, is counted, restarted and closed.

    Every ``AsyncLM`` is one. Safe from any thread and any event loop. A context manager both ways;
    leaving it closes the engine, and so does the end of the last reference to it.
    """

    def __init__(self, thread: EngineThread, cache: RowCache, engine: Engine) -> None:
        self._thread = thread
        self._cache = cache
        self._limits = Limits(engine.vocab_size, engine.max_model_len)
        has_own = bool(thread.capabilities.reads)
        self._adapters = AdapterNames(thread, thread.answering.full.adapters if has_own else {})
        self._pauses = Pauses(thread)
        self._weights = WeightUpdates(thread, cache, self._pauses)
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
        """An id that no other runtime has, of any process."""
        return self._thread.nonce

    @property
    def vocab_size(self) -> int:
        """The length of a row; token ids are ``0 .. vocab_size - 1``."""
        return self._limits.vocab_size

    @property
    def max_model_len(self) -> int:
        """The longest context, in tokens, that has a row."""
        return self._limits.max_model_len

    @property
    def max_batch_size(self) -> int:
        """How many requests the engine takes to one step at most, however many a flush has."""
        return self._thread.engine.max_batch_size

    @property
    def device(self) -> torch.device:
        """Where rows are computed, cached and returned."""
        return self._thread.engine.device

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (transformers' for checkpoints). Raises InvalidRequest if it has none."""
        return tokenizer_of(self._thread.engine)

    @cached_property
    def byte_vocab(self) -> list[bytes]:
        """The bytes that each token adds to a text; ``vocab_size`` of them."""
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
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[encoding.ChatOptions]
    ) -> list[int]:
        """Return the token ids of a conversation such as ``[{"role": "user", "content": "Hello!"}]``,
        written by the tokenizer's own chat template. By default the assistant's turn is begun;
        ``ChatOptions`` has the options.

        Raises:
            InvalidRequest: there is no chat template, it refuses the messages, or text would be lost.
        """
        return encoding.encode_chat(self.tokenizer, messages, **options)

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of token ids, special tokens included; the inverse of ``encode``."""
        return encoding.decode(self.tokenizer, self._limits.token_ids(token_ids, allow_empty=True))

    # -- adapters -----------------------------------------------------------------------------

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names that ``adapter=`` takes."""
        return self._adapters.loaded()

    async def add_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load the LoRA adapter in directory ``path`` (safetensors) under ``name``.

        Calls made from then on can name it. A name that is loaded already is bound to the new weights;
        questions asked before keep the old ones. Cancelling removes it again; a name that was loaded
        before stays bound, to the old weights or to the new ones. The adapter's files are copied first,
        while the engine goes on: engines load it from the copy, also after a restart.

        Raises:
            InvalidAdapter: there is no safetensors adapter that fits, or the engine takes none.
        """
        await self._adapters.add(name, path)

    @twin_of(add_adapter, interrupted=INTERRUPTED)
    def add_adapter_sync(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load an adapter as ``add_adapter`` does, blocking."""
        blocking(self._adapters.add(name, path), undo=operator.call)

    def adapter_files(self, name: str) -> Path | None:
        """Return the directory with this runtime's copy of an adapter's files: another one for each
        loading of the name. ``None`` if the engine brings the adapter, or the name is not bound."""
        return self._adapters.files(name)

    def remove_adapter(self, name: str) -> None:
        """Unbind ``name``: later calls that name it raise ``UnknownAdapter``. Questions asked before
        are answered; then its weights and its cached rows go. Returns at once."""
        self._adapters.remove(name)

    # -- weights ------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        """Which weights answer: 0 are those of the model that was loaded, and each update adds 1."""
        return self._thread.batcher.weights_version

    async def update_weights(self, source: WeightsSource, **options: Unpack[UpdateOptions]) -> int:
        """Replace the model's weights in place; return their version. ``UpdateOptions`` has the options.

        ``source`` has all tensors of the model's checkpoint, by its names: a mapping or pairs; the path
        of a safetensors file, or of a directory of them; or an iterable, asynchronous or not, of chunks,
        each a mapping or pairs. Leave tensors as they are until this returns.

        Questions asked from now on wait for the new weights. Before these answer, cached rows, resident
        sequences and the KV cache are dropped. Adapters stay. A population goes on, each step with the
        weights that there are: its draws tell which.

        What does not fit changes nothing, where it can be known beforehand: of tensors by name and of
        files all of it, of chunks the first. An error after that, or leaving in the middle, is the
        engine's death; with ``load(…, restart="auto")``, or by ``restart``, another one has the last
        weights that were whole. Nothing is ever answered by a mixture. A restart ends an update that is
        under way with EngineFailed. ``update_weights_sync`` cannot take new weights back: after an
        interrupt, ``weights_version`` tells whether they were whole before it.

        Raises:
            InvalidWeights: a tensor is unknown, missing, given twice, or of a wrong shape or type.
            EngineUnsupported: the engine cannot replace its weights, or does not know their names.
            EngineFailed: it cannot forget what the old weights computed, and keeps these; or, as
                EngineDied, it failed with a part of the new ones. What an iterator raises is raised.
            InvalidRequest: ``source`` or an option is none of these, or the engine sleeps; Closed.
        """
        return await self._weights.update(source, **options)

    async def pause(self, **options: Unpack[PauseOptions]) -> None:
        """Stop until ``resume``, a restart or the end; return once nothing runs. Weights may be replaced
        meanwhile. Cancelling resumes. ``PauseOptions`` has the options; ``genrt/runtime/lifecycle.py``
        has a table of what pauses, sleep, updates and restarts do to each other.

        Raises:
            InvalidRequest: the runtime is paused already, or resumed before nothing runs, or an option is
                wrong; Closed.
        """
        await self._pauses.pause(**options)

    def resume(self) -> None:
        """Resume after ``pause``; ignored if nothing is paused. Raises InvalidRequest while the engine
        sleeps. Returns at once."""
        self._pauses.resume()

    async def sleep(self, level: int = 1, **options: Unpack[PauseOptions]) -> int:
        """Pause, if that has not happened, and free the engine's memory on its device until ``wake_up``;
        return how many bytes became free.

        Level 1 moves the weights to the host; level 2 drops them, and ``wake_up`` reads them again. The
        KV cache goes with every resident sequence; cached rows stay. It waits for a pause that has not
        begun yet, for an update, and for an earlier ``sleep`` or ``wake_up``. Cancelling moves the memory
        back, and ends a pause that this call has made.

        Raises:
            EngineUnsupported: the engine cannot, as vLLM on a CPU or without ``enable_sleep_mode``.
            InvalidRequest: it sleeps already, or an argument is wrong; EngineFailed, Closed.
        """
        freed, _ = await self._pauses.sleep(level, **options)
        return freed

    async def wake_up(self, tags: Collection[SleepingPart] | None = None) -> bool:
        """Have the engine's memory back, and answer again; return whether all of it is awake. Tags
        ``["weights"]`` have the weights' back alone, for an update while a trainer still has the rest.
        Raises InvalidRequest for other tags than these and ``"kv_cache"``, EngineFailed if weights that
        were dropped, and not replaced, cannot be read again: the engine then stays asleep until they are
        replaced and this is called again."""
        return await self._pauses.wake_up(tags)

    def reset_prefix_cache(self) -> None:
        """Have the engine forget, between two steps, what it has computed and nothing in progress needs.
        Prefixes of ``warm_up`` are kept again once they are computed again. Returns at once."""
        self._thread.call(lambda answering: answering.forget_residents())

    update_weights_sync = blocking_twin(update_weights)
    wake_up_sync = blocking_twin(wake_up)

    @twin_of(pause, interrupted=INTERRUPTED)
    def pause_sync(self, **options: Unpack[PauseOptions]) -> None:
        """Pause as ``pause`` does, blocking."""
        blocking(self._pauses.pause(**options), undo=operator.call)

    @twin_of(sleep, interrupted=INTERRUPTED)
    def sleep_sync(self, level: int = 1, **options: Unpack[PauseOptions]) -> int:
        """Have the engine sleep as ``sleep`` does, blocking."""
        return blocking(self._pauses.sleep(level, **options), undo=lambda done: done[1]())[0]

    # -- the runtime --------------------------------------------------------------------------

    def clear_cache(self) -> None:
        """Drop every cached row."""
        self._cache.clear()

    def statistics(self) -> Statistics:
        """Return the counters at this moment, as a frozen value; ``later.since(earlier)`` has what was
        done in between."""
        batcher, cache = self._thread.batcher.statistics(), self._cache.statistics()
        engine, replicas = self._thread.statistics(), self._thread.replicas()
        return Statistics(batcher, cache, engine, replicas)

    def close(self) -> None:
        """End every waiter with ``Closed`` and free the engine; return when the step in progress has
        ended, or after 5 seconds: the thread then frees the engine by itself. A step waits while another
        vLLM opens in this process. Idempotent, from any thread."""
        self._thread.close()

    async def aclose(self) -> None:
        """Close without holding up the event loop."""
        await aside(self.close)

    def restart(self) -> None:
        """Close the engine, if that has not happened, and open another one with the same options and
        adapters; this runtime then answers again. Cached rows stay, the engine's statistics start anew.

        Questions that were still waiting raise ``Closed``. With ``load(…, restart="auto")`` an engine
        that died is replaced without being asked, and no question notices.

        Raises:
            EngineFailed: a step takes longer than a minute: wait for it, then try again.
            Closed: in a forked child. Else what ``load`` raises; the runtime is then closed, as it is by
                an interrupt.
        """
        try:
            opened = self._thread.restart()
            self._thread.belong_to(self)
            opened.result()
        except BaseException:
            self._thread.close(wait=False)
            raise

    async def arestart(self) -> None:
        """Restart without holding up the event loop."""
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
