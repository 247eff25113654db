"""Completions for a stream of prompts, as they finish or in order, a bounded number at once."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, Unpack, cast, get_args, overload

from genrt.errors import Closed, ContextTooLong, EngineDied, EngineFailed, InvalidRequest, TimedOut
from genrt.generation.concurrent_map import ConcurrentMap, Source
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_int, check_one_of, check_options, check_timeout, shown
from genrt.progress import progress_bar
from genrt.questions.arguments import TokenIds, check_seed, seed_at
from genrt.questions.completions import STRUCTURES, Completion, GenerateOptions, TurnOptions
from genrt.runtime.concurrency import blocking_generator, twin_of
from genrt.runtime.streams import Stream

P = ParamSpec("P")
T = TypeVar("T")

OnError: TypeAlias = Literal["raise", "return"]
"""How an item's error is reported: raised, or yielded as ``Failed``."""


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt or a conversation, with its own options. It is checked when it runs.

    Attributes:
        prompt: a text or token ids, as for ``AsyncLM.generate``.
        messages: a conversation, as for ``AsyncLM.chat``, instead of a prompt.
        options: override the options of the call, one by one. A structure replaces the call's structure.
            A ``seed`` is used as it is.
    """

    prompt: str | TokenIds | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    options: GenerateOptions = field(default_factory=GenerateOptions)


Prompt: TypeAlias = str | TokenIds | Sequence[Mapping[str, Any]] | Item
"""A text, token ids, a conversation, or an item with its own options."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An item without a completion.

    Attributes:
        error: InvalidRequest (ContextTooLong, UnknownAdapter), EngineFailed (OutOfMemory, NotFinite),
            TimedOut.
        partial: the tokens before the error, with ``finish_reason="abort"``. Only items with a timeout
            have it: they run as ``AsyncLM.stream``.
    """

    error: Exception
    partial: Completion | None = None


class AskOptions(TurnOptions, total=False):
    """The options of every function that generates many texts.

    Attributes:
        timeout: seconds for each text, from its request on. Time in the engine's queue counts.
        concurrency: the maximum number of running texts. The default is twice ``lm.max_batch_size``,
            which keeps every step full; with a ``timeout`` it is ``lm.max_batch_size``.
        progress: whether to show a progress bar.
    """

    concurrency: int | None
    progress: bool


class ManyOptions(AskOptions, total=False):
    """The options of ``generate_many``.

    Attributes:
        seed: item ``i`` is drawn with seed ``seed + i``, in any order of completion.
        in_order: whether results come in the order of the items, and not as they finish.
    """

    in_order: bool


@overload
def generate_many(
    lm: AsyncLM,
    items: Iterable[Prompt] | AsyncIterable[Prompt],
    *,
    on_error: Literal["raise"] = "raise",
    **options: Unpack[ManyOptions],
) -> AsyncGenerator[tuple[int, Completion], None]: ...


@overload
def generate_many(
    lm: AsyncLM,
    items: Iterable[Prompt] | AsyncIterable[Prompt],
    *,
    on_error: OnError,
    **options: Unpack[ManyOptions],
) -> AsyncGenerator[tuple[int, Completion | Failed], None]: ...


def generate_many(
    lm: AsyncLM,
    items: Iterable[Prompt] | AsyncIterable[Prompt],
    *,
    on_error: OnError = "raise",
    **options: Unpack[ManyOptions],
) -> AsyncGenerator[tuple[int, Any], None]:
    """Yield the number of each item, from 0, and its completion, as they finish.

    ``items`` is any iterable or asynchronous iterable, also an endless one. It is read on the loop, and
    only while there is room: at most four times ``concurrency`` items are read but not yet taken. So
    memory is bounded, and slow consumers slow the reading. All items that fit start at once and enter the
    engine in one flush.

    An item fails alone: a wrong prompt or option, a context too long, a failed step, a timeout. With
    ``on_error="raise"`` its error is raised after the results before it, with a note that names the item.
    ``"return"`` yields ``Failed`` instead of the completion. A closed runtime or a dead engine ends
    everything. A source that raises ends everything after the results of the items before.

    Leaving early cancels the running items and closes an asynchronous source: by ``aclose()``, by
    cancellation, or by ``break`` and exceptions in an ``async for`` without another reference to the
    generator. Otherwise close it: ``async with contextlib.aclosing(generate_many(…)) as …``.

    Raises:
        InvalidRequest: ``items`` is not an iterable of prompts, or an option of this call is wrong.
            Options of texts raise when the first result is taken.
    """
    check_options("generate_many", options, [*ManyOptions.__annotations__, "on_error"])
    given: dict[str, Any] = {**options}
    in_order = check_bool("in_order", given.pop("in_order", False))
    progress = check_bool("progress", given.pop("progress", False))
    runner = ItemRunner(lm, cast("AskOptions", given))
    if isinstance(items, str | bytes | Mapping | Item):
        raise InvalidRequest(
            f"items must be an iterable of prompts, got {shown(items)}: give [prompt]"
        )
    if not isinstance(items, Iterable | AsyncIterable) or getattr(items, "ndim", 1) == 0:
        raise InvalidRequest(f"items must be an iterable or async iterable, got {shown(items)}")
    check_one_of("on_error", on_error, get_args(OnError))
    return _run_many(runner, items, on_error, in_order=in_order, progress=progress)


def _blocking(
    function: Callable[P, AsyncGenerator[T, None]],
) -> Callable[P, Generator[T, None, None]]:
    @twin_of(
        function,
        interrupted="It runs in another thread, and also reads ``items`` there; texts are drawn while "
        "the body of the loop runs. An interrupt, or leaving the loop, cancels the running items.",
    )
    def twin(*args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return blocking_generator(function(*args, **kwargs))

    return twin


generate_many_sync = _blocking(generate_many)
"""``generate_many``, blocking. It runs in another thread, and also reads ``items`` there: pass a list if
the reading needs this thread. Texts are drawn while the body of the loop runs. An interrupt, or leaving
the loop, cancels the running items."""


def check_lm(lm: object) -> AsyncLM:
    """Return the runtime. Raises InvalidRequest for anything else."""
    if not isinstance(lm, AsyncLM):
        raise InvalidRequest(f"lm must be an AsyncLM, as genrt.load returns, got {shown(lm)}")
    return lm


class ItemRunner:
    """Runs the items of one call, with ``AskOptions`` without ``progress``."""

    def __init__(self, lm: AsyncLM, options: AskOptions) -> None:
        self._lm = check_lm(lm)
        given: dict[str, Any] = {**options}
        concurrency = given.pop("concurrency", None)
        if concurrency is None:
            # While a step runs, the requests of the next one wait in the engine.
            concurrency = lm.max_batch_size * (2 if given.get("timeout") is None else 1)
        self.concurrency = check_int("concurrency", concurrency, 1)
        self._chat = {name: given.pop(name, None) for name in ("tools", "chat_template_kwargs")}
        self._seed = check_seed(given.pop("seed", None))
        self._given = given

    async def check(self) -> None:
        """Raise InvalidRequest for an option that is wrong for every item; Closed."""
        check_timeout(self._given.get("timeout"))
        await self._lm.batch_generate([], **cast("Any", self._given | {"timeout": None}))

    async def probe(self) -> None:
        """Draw one token with the options. Raise InvalidRequest if the engine does not support them."""
        room = self._lm.max_model_len - 1
        if (most := self._given.get("max_tokens")) is not None and most > room:
            raise ContextTooLong(
                f"max_tokens={most} leaves no room for a prompt in max_model_len={room + 1}"
            )
        one: Any = self._given | {"timeout": None, "seed": 0, "max_tokens": 1, "min_tokens": 0}
        try:
            await self._lm.batch_generate([[0]], **one)
        except (EngineFailed, TimedOut) as error:
            if isinstance(error, EngineDied):
                raise  # the first items report other failures

    async def run(self, number: int, item: Any) -> Completion | Failed:
        """Return the completion of an item, or its error. Raises Closed, EngineDied."""
        stream: Stream | None = None
        try:
            question = self._question(number, item)
            if not isinstance(question, Stream):
                return await question
            stream = question
            async with stream:
                async for _ in stream:
                    pass
            return stream.partial
        except (Closed, EngineDied):
            raise
        except Exception as error:
            return Failed(error, None if stream is None else stream.partial)

    def _question(self, number: int, item: Any) -> Coroutine[Any, Any, Completion] | Stream:
        options = self._given
        if self._seed is not None:
            options = {**options, "seed": seed_at(self._seed, number)}
        is_chat = isinstance(item, list | tuple) and bool(item) and isinstance(item[0], Mapping)
        if isinstance(item, Item):
            options = _item_options(options, item)
            is_chat = item.messages is not None
            item = item.messages if is_chat else item.prompt
        elif isinstance(item, Mapping):
            raise InvalidRequest(
                "an item must be a prompt or a conversation: give [message] or Item(…)"
            )
        lm, given = self._lm, cast("Any", {**options, **self._chat} if is_chat else options)
        if options.get("timeout") is None:
            return lm.chat(item, **given) if is_chat else lm.generate(item, **given)
        return lm.stream_chat(item, **given) if is_chat else lm.stream(item, **given)


def _item_options(options: dict[str, Any], item: Item) -> dict[str, Any]:
    """Return the options of a call, overridden by an item's."""
    if (item.prompt is None) == (item.messages is None):
        raise InvalidRequest("an Item has either a prompt or messages")
    own = item.options
    if not isinstance(own, Mapping):
        raise InvalidRequest(f"an Item's options must be a mapping, got {shown(own)}")
    check_options("an Item", own, GenerateOptions.__annotations__)
    if any(name in own for name in STRUCTURES):
        options = {name: value for name, value in options.items() if name not in STRUCTURES}
    return {**options, **own}


async def _run_many(
    runner: ItemRunner, items: Source, on_error: OnError, *, in_order: bool, progress: bool
) -> AsyncGenerator[tuple[int, Any], None]:
    await runner.check()
    concurrency = runner.concurrency
    # In order, results wait for a longer text before them, and the engine needs work meanwhile.
    max_ahead = concurrency * (4 if in_order else 2)
    texts: ConcurrentMap[Completion | Failed] = ConcurrentMap(
        items, runner.run, concurrency=concurrency, max_ahead=max_ahead, in_order=in_order
    )
    failures = 0
    try:
        with progress_bar("texts", length_hint(items) or None, shown=progress, unit="text") as step:
            while (taken := await texts.take()) is not None:
                number, result = taken
                if isinstance(result, Failed):
                    failures += 1
                    if on_error == "raise":
                        result.error.add_note(f"item {number} of generate_many")
                        raise result.error
                step(failed=failures)
                yield taken
    finally:
        await texts.close()
