"""AsyncLM: what users hold. ``runtime/__init__.py`` tells a request's way from here down."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn, Self, Unpack, cast

import torch

from genrt.cluster.programs import run_program
from genrt.engines.protocol import Engine, Reading
from genrt.engines.weights import SleepingPart
from genrt.populations import Population, Populations, Prompts
from genrt.questions.candidates import candidates_request
from genrt.questions.completions import Completion, GenerateOptions, TurnOptions
from genrt.questions.contexts import Limits, check_contexts, check_seed, nonces_of
from genrt.questions.draws import batch_draw, draw_request, draw_requests
from genrt.questions.host_rows import Device, host_row, must_move
from genrt.questions.masks import Mask, Masks
from genrt.questions.prefixes import Prefix, PrefixOptions, WarmUpOptions
from genrt.questions.rows import row_request
from genrt.questions.samples import SampleOptions
from genrt.questions.scores import (
    batch_score_requests,
    joined,
    row_chunks,
    score_requests,
    text_requests,
)
from genrt.questions.token_ids import TokenIds
from genrt.questions.tops import top_request
from genrt.runtime.adapter_names import AdapterNames
from genrt.runtime.ask import Asker, blocking_chunks, blocking_question, blocking_stream
from genrt.runtime.blocking import blocking_twin
from genrt.runtime.cache import RowCache
from genrt.runtime.connecting import ConnectOptions, connected
from genrt.runtime.pauses import PauseOptions, Pauses
from genrt.runtime.statistics import Statistics
from genrt.runtime.streams import Stream
from genrt.runtime.texts import Texts
from genrt.runtime.thread import EngineThread, aside
from genrt.runtime.weights import UpdateOptions, WeightsSource, WeightUpdates
from genrt.tokens import encoding, vocabulary
from genrt.tokens.sampling import BatchDraw, Draw, TopLogprobs

__all__ = ["AsyncLM"]


class AsyncLM:
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
        self._thread = thread
        self._limits = Limits(engine.vocab_size, engine.max_model_len)
        self._adapters = AdapterNames(
            thread, engine.adapters if isinstance(engine, Reading) else {}
        )
        self._asker = asker = Asker(lambda: thread.batcher, self._adapters)
        self._ask, self._ask_sync = asker.ask, asker.ask_sync
        self._stream, self._stream_sync = asker.stream, asker.stream_sync
        self._chunks, self._chunks_sync = asker.chunks, asker.chunks_sync
        self._draw_from(seed)
        self._cache = cache
        self._pauses = Pauses(thread)
        self._weights = WeightUpdates(thread, cache, self._pauses)
        thread.belong_to(self)

    @classmethod
    async def connect(cls, url: str, **options: Unpack[ConnectOptions]) -> Self:
        """Return a runtime over the one that a genrt server serves at ``url``; see ``ConnectOptions``.
        Raises EngineDied if it cannot be reached, EngineUnsupported if it is none; InvalidRequest."""
        return await connected(cls, url, options)

    def _draw_from(self, seed: int | None) -> None:
        """Have what is asked without a seed be drawn from this one."""
        self._nonces = nonces_of(seed)
        own = self._limits, self._adapters, self._nonces
        self._texts = Texts(self._thread, *own)
        self._populations = Populations(self._thread, self._asker, *own)

    def _of_seed(self, seed: int) -> Self:
        """Return this runtime, equal to itself, with a seed of its own."""
        own = object.__new__(type(self))
        vars(own).update(vars(self), _whole=self)  # which closes when it is garbage
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
        return self._texts.tokenizer

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

        One question with one future, however many contexts; raises and cancels as
        ``next_token_logprobs`` does, for the whole batch, and for one of no contexts too."""
        bound, moves = self._adapters.bound(adapter), must_move(device, self.device)
        rows = [row_request(self._limits, each, bound) for each in check_contexts(contexts)]
        requests = [host_row(row) for row in rows] if moves else rows
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
        tensor. With a ``seed``, context ``i`` is drawn with seed ``seed + i``."""
        bound, nonces = self._adapters.bound(adapter), self._nonces
        requests = draw_requests(self._limits, contexts, bound, nonces, masks, temperature, seed)
        return batch_draw(await self._ask(requests, timeout=timeout))

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
        own = self._limits, token_ids, continuation, self._adapters.bound(adapter)
        requests = score_requests(*own, in_one=self._thread.scores)
        return joined(await self._ask(requests, timeout=timeout), [requests])[0]

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
        requests = batch_score_requests(*own, in_one=self._thread.scores)
        return joined(await self._ask([*chain(*requests)], timeout=timeout), requests)

    async def prompt_logprobs(
        self, token_ids: TokenIds, *, adapter: str | None = None, timeout: float | None = None
    ) -> torch.Tensor:
        """Return the score of a text's tokens after its first: float32 ``[len(token_ids) - 1]``."""
        own = self._limits, token_ids, self._adapters.bound(adapter)
        requests = text_requests(*own, in_one=self._thread.scores)
        return joined(await self._ask(requests, timeout=timeout), [requests])[0]

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
        return self._chunks(row_chunks(*own, in_one=self._thread.scores_rows), timeout=timeout)

    def population(
        self, prompt: Prompts, n: int | None = None, *, adapter: str | None = None
    ) -> Population:
        """Return ``n`` sequences that begin with a prompt, or one for each of several prompts, to go on
        together as arrays; nothing is computed yet. Raises InvalidRequest if these are no prompts, or
        ``n`` is missing for one or given for several; UnknownAdapter.
        """
        return self._populations.begin(prompt, n, adapter)

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
        is run again from its beginning on another, at most twice. New weights wait until it has ended.

        What it holds travels with it, but for the runtime, in whose place is the replica's: functions of
        modules that can be imported there, and, where cloudpickle is installed (vLLM brings it), any. Its
        side effects stay there. It runs code: of this process, in processes that this one has started.

        Args:
            seed: for the inference. What a function asks without seeds is drawn from it too.

        Raises:
            InvalidRequest: ``work`` is neither, cannot be sent, or its result cannot be sent back.
            EngineFailed: three replicas died with it. TimedOut, Closed; else whatever it raises.
        """
        own = check_seed(seed)
        given = next(self._nonces) if own is None else own
        return await run_program(self, work, given, timeout)

    # -- prefixes -----------------------------------------------------------------------------

    async def warm_up(self, prefix: Prefix, **options: Unpack[WarmUpOptions]) -> int:
        """Compute what many questions begin with, once, and keep it; return how many tokens that is.

        It is a text or token ids, or the messages that begin a conversation: then what all such chats
        share. With vLLM, rows and texts that begin with it start from there until ``cool_down``, whatever
        else is asked. What is given up, because a question could not go on without its memory, or lost
        with an engine, is kept again once a question that begins with it has computed it. The newest 64
        prefixes are kept, in half of the KV cache. Other engines compute the row, and keep only that.

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

    # -- adapters -----------------------------------------------------------------------------

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names that ``adapter=`` takes."""
        return self._adapters.loaded()

    async def add_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load the LoRA adapter in directory ``path`` (safetensors) under ``name``.

        Calls made from then on can name it. A name that is loaded already is bound to the new weights;
        questions asked before keep the old ones. Cancelling leaves the name as it was, or bound to these.

        Raises:
            InvalidAdapter: there is no safetensors adapter that fits, or the engine takes none.
        """
        await asyncio.wrap_future(self._adapters.add(name, path))

    def add_adapter_sync(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load an adapter as ``add_adapter`` does, blocking."""
        self._adapters.add(name, path).result()

    def remove_adapter(self, name: str) -> None:
        """Unbind ``name``: later calls that name it raise ``UnknownAdapter``. Questions asked before
        are answered; then its weights and its cached rows go. Returns at once."""
        self._adapters.remove(name)

    # -- weights ------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        """Which weights answer: 0 are those of the model that was loaded, and each update adds 1."""
        return self._thread.weights_version

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
        weights that were whole. Nothing is ever answered by a mixture.

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
        meanwhile. Cancelling resumes. ``PauseOptions`` has the options.

        Raises:
            InvalidRequest: the runtime is paused already, or an option is wrong; Closed.
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
        KV cache goes with every resident sequence; cached rows stay.

        Raises:
            EngineUnsupported: the engine cannot, as vLLM on a CPU or without ``enable_sleep_mode``.
            InvalidRequest: it sleeps already, or an argument is wrong; EngineFailed, Closed.
        """
        return await self._pauses.sleep(level, **options)

    async def wake_up(self, tags: Collection[SleepingPart] | None = None) -> bool:
        """Have the engine's memory back, and answer again; return whether all of it is awake. Tags
        ``["weights"]`` have the weights' back alone, for an update while a trainer still has the rest.
        Raises InvalidRequest for other tags than these and ``"kv_cache"``, EngineFailed if weights that
        were dropped, and not replaced, cannot be read again."""
        return await self._pauses.wake_up(tags)

    def reset_prefix_cache(self) -> None:
        """Have the engine forget, between two steps, what it has computed and nothing in progress needs.
        Prefixes of ``warm_up`` are kept again once they are computed again. Returns at once."""
        self._thread.call_alone(lambda answering: answering.forget_residents())

    run_sync = blocking_twin(run)
    update_weights_sync = blocking_twin(update_weights)
    pause_sync = blocking_twin(pause)
    sleep_sync = blocking_twin(sleep)
    wake_up_sync = blocking_twin(wake_up)

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
        ended, or after 5 seconds. Idempotent, from any thread."""
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
        self._thread.restart_for(self)

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
            return f"AsyncLM(closed, {engine})"
        return (
            f"AsyncLM(open, {engine}, max_model_len={self.max_model_len}, "
            f"adapters={list(self._adapters.by_name)}, {self._thread.batcher!r}, {self._cache!r})"
        )
