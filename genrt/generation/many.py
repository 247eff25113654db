"""The completions of a stream of prompts, as they finish or in order, a bounded number at once."""

from __future__ import annotations

import warnings
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any, Literal, TypeAlias, Unpack, cast, get_args, overload

from genrt.errors import (
    Closed,
    ContextTooLong,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    TimedOut,
)
from genrt.generation.walk import Source, Walk
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_int, check_timeout, named, nearest, shown
from genrt.progress import progress_bar
from genrt.questions.completions import STRUCTURES, Completion, GenerateOptions, TurnOptions
from genrt.questions.contexts import check_seed, seed_at
from genrt.questions.token_ids import TokenIds
from genrt.runtime.concurrency import blocking_generator
from genrt.runtime.streams import Stream

__all__ = [
    "AskOptions",
    "Failed",
    "Item",
    "ManyOptions",
    "OnError",
    "Prompt",
    "generate_many",
    "generate_many_sync",
]

FULL = 2
"""How many times the requests of one step are under way if ``concurrency`` is not given: while a step
runs, those of the next wait in the engine."""

AHEAD, AHEAD_IN_ORDER = 2, 4
"""How many times ``concurrency`` items are read and not taken. In order, results wait for a longer text
before them, and the engine must have work meanwhile."""

OnError: TypeAlias = Literal["raise", "return", "warn"]
"""What becomes of an item's error: it is raised; its ``Failed`` is yielded; or that, and a warning."""


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt or a conversation, with options of its own. It is checked when it is asked.

    Attributes:
        prompt: a text or token ids, as ``AsyncLM.generate`` takes it.
        messages: a conversation, as ``AsyncLM.chat`` takes it, in place of a prompt.
        options: take precedence over the options of the call, one by one; a structure takes the place of
            the call's structure, a ``seed`` is taken as it is.
        tools: as of ``AsyncLM.chat``, for messages; by default the call's.
        chat_template_kwargs: as of ``AsyncLM.chat``, for messages; by default the call's.
    """

    prompt: str | TokenIds | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    options: GenerateOptions = field(default_factory=GenerateOptions)
    tools: Sequence[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


Prompt: TypeAlias = str | TokenIds | Sequence[Mapping[str, Any]] | Item
"""A text, token ids, a conversation, or an item with options of its own."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An item that got no completion.

    Attributes:
        error: InvalidRequest (ContextTooLong, UnknownAdapter), EngineFailed (OutOfMemory, NotFinite),
            TimedOut.
        partial: what had been drawn, with ``finish_reason="abort"``, of an item that had a timeout: those
            alone are asked as ``AsyncLM.stream`` asks.
    """

    error: Exception
    partial: Completion | None = None


class AskOptions(TurnOptions, total=False):
    """The options of all that asks many texts: those of every text, and how many are under way.

    Attributes:
        timeout: seconds for each text, from when it is asked; what waits in the engine for its first step
            has been asked.
        concurrency: how many texts are under way at once; by default twice ``lm.max_batch_size``, which
            keeps every step full, or as many as that if there is a ``timeout``.
        progress: whether a bar shows how far it is.
    """

    concurrency: int | None
    progress: bool


class ManyOptions(AskOptions, total=False):
    """The options of ``generate_many``.

    Attributes:
        seed: item ``i`` is drawn with seed ``seed + i``, whatever the order in which texts end.
        in_order: whether results come in the order of the items, and not as they finish.
        progress: whether a bar shows how many have finished, how fast, how many failed, and how long it
            will take if the length of ``items`` is known.
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

    Items come from any iterable or asynchronous iterable, endless ones too: it is read, on the loop, only
    as far as there is room, and at most four times ``concurrency`` items are read and not yet taken. So
    memory is bounded, and a loop that takes results slowly slows the reading. Everything that there is
    room for is asked at once, and enters the engine in one flush.

    An item fails alone: a wrong prompt or option, a context too long, a failed step, a timeout.
    ``on_error`` says what then happens: ``"raise"`` raises its error, with a note that names the item,
    once the results that came before it are taken; ``"return"`` yields ``Failed`` in place of the
    completion; ``"warn"`` does that and warns (RuntimeWarning) of the first error of each kind. A runtime
    that is closed or whose engine died ends everything. So does a source that raises, once the items that
    it yielded have their results.

    Leaving early cancels what is under way, and closes an asynchronous source: by ``aclose()``, by
    cancellation, or by ``break`` and exceptions in an ``async for`` that alone holds the generator. One
    that is kept in a variable is to be closed: ``async with contextlib.aclosing(generate_many(…)) as …``.

    Raises:
        InvalidRequest: ``items`` is no iterable of prompts, or an option of this call is wrong; options
            of texts raise when the first result is taken.
    """
    given: dict[str, Any] = {**options}
    in_order = check_bool("in_order", given.pop("in_order", False))
    progress = check_bool("progress", given.pop("progress", False))
    asked = Asked(lm, cast("AskOptions", given))
    if isinstance(items, str | bytes | Mapping | Item):
        raise InvalidRequest(
            f"items must be an iterable of prompts, got {shown(items)}: give [prompt]"
        )
    if not isinstance(items, Iterable | AsyncIterable) or getattr(items, "ndim", 1) == 0:
        raise InvalidRequest(f"items must be an iterable or async iterable, got {shown(items)}")
    if not isinstance(on_error, str) or on_error not in get_args(OnError):
        raise InvalidRequest(f"on_error must be 'raise', 'return' or 'warn', got {named(on_error)}")
    return _results(asked, items, on_error, in_order=in_order, progress=progress)


@overload
def generate_many_sync(
    lm: AsyncLM,
    items: Iterable[Prompt] | AsyncIterable[Prompt],
    *,
    on_error: Literal["raise"] = "raise",
    **options: Unpack[ManyOptions],
) -> Generator[tuple[int, Completion], None, None]: ...


@overload
def generate_many_sync(
    lm: AsyncLM,
    items: Iterable[Prompt] | AsyncIterable[Prompt],
    *,
    on_error: OnError,
    **options: Unpack[ManyOptions],
) -> Generator[tuple[int, Completion | Failed], None, None]: ...


def generate_many_sync(
    lm: AsyncLM,
    items: Iterable[Prompt] | AsyncIterable[Prompt],
    *,
    on_error: OnError = "raise",
    **options: Unpack[ManyOptions],
) -> Generator[tuple[int, Any], None, None]:
    """Yield what ``generate_many`` yields, blocking. It runs in another thread, where ``items`` is read
    too: give a list of what has to be read in this one. Texts are drawn while the loop's body runs. An
    interrupt, or leaving the loop, cancels what is under way."""
    return blocking_generator(cast("Any", generate_many)(lm, items, on_error=on_error, **options))


class Asked:
    """How one call asks its items: a runtime and the options of ``AskOptions``, but for the bar.

    Raises:
        InvalidRequest: ``concurrency`` or the seed is out of range.
    """

    def __init__(self, lm: AsyncLM, options: AskOptions) -> None:
        if not isinstance(lm, AsyncLM):
            raise InvalidRequest(f"lm must be an AsyncLM, as genrt.load returns, got {shown(lm)}")
        given: dict[str, Any] = {**options}
        concurrency = given.pop("concurrency", None)
        if concurrency is None:
            times = FULL if given.get("timeout") is None else 1
            concurrency = times * lm.max_batch_size
        self.concurrency = check_int("concurrency", concurrency, 1)
        self._chat = {name: given.pop(name, None) for name in ("tools", "chat_template_kwargs")}
        self._seed = check_seed(given.pop("seed", None))
        self._lm = lm
        self._given = given

    async def check(self) -> None:
        """Raise InvalidRequest if an option of the call is wrong, whatever the item; Closed if the
        runtime is."""
        check_timeout(self._given.get("timeout"))
        await self._lm.batch_generate([], **cast("Any", self._given | {"timeout": None}))

    async def probe(self) -> None:
        """Raise InvalidRequest if the engine cannot do what the options say, whatever the item: draw one
        token by them."""
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
                raise  # other failures are the first rows' to tell

    async def ask(self, number: int, item: Any) -> Completion | Failed:
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
        options, chat = self._given, self._chat
        if self._seed is not None:
            options = {**options, "seed": seed_at(self._seed, number)}
        is_chat = isinstance(item, list | tuple) and bool(item) and isinstance(item[0], Mapping)
        if isinstance(item, Item):
            options, chat = _own(options, item), _own_chat(chat, item)
            is_chat = item.messages is not None
            item = item.messages if is_chat else item.prompt
        elif isinstance(item, Mapping):
            raise InvalidRequest(
                "an item must be a prompt or a conversation: give [message] or Item(…)"
            )
        lm, given = self._lm, cast("Any", {**options, **chat} if is_chat else options)
        if options.get("timeout") is None:
            return lm.chat(item, **given) if is_chat else lm.generate(item, **given)
        return lm.stream_chat(item, **given) if is_chat else lm.stream(item, **given)


def _own(options: dict[str, Any], item: Item) -> dict[str, Any]:
    """Return the options of a call with an item's in their place."""
    if (item.prompt is None) == (item.messages is None):
        raise InvalidRequest("an Item has either a prompt or messages")
    own = item.options
    if not isinstance(own, Mapping):
        raise InvalidRequest(f"an Item's options must be a mapping, got {shown(own)}")
    if unknown := [name for name in own if name not in GenerateOptions.__annotations__]:
        near = nearest(unknown[0], GenerateOptions.__annotations__) or ": see GenerateOptions"
        raise InvalidRequest(f"an Item has no option {named(unknown[0])}{near}")
    if any(name in own for name in STRUCTURES):
        options = {name: value for name, value in options.items() if name not in STRUCTURES}
    return {**options, **own}


def _own_chat(chat: dict[str, Any], item: Item) -> dict[str, Any]:
    own = {name: getattr(item, name) for name in chat}
    if item.messages is None and any(value is not None for value in own.values()):
        raise InvalidRequest("tools and chat_template_kwargs are for an Item's messages")
    return {name: chat[name] if own[name] is None else own[name] for name in chat}


async def _results(
    asked: Asked, items: Source, on_error: OnError, *, in_order: bool, progress: bool
) -> AsyncGenerator[tuple[int, Any], None]:
    await asked.check()
    most_ahead = asked.concurrency * (AHEAD_IN_ORDER if in_order else AHEAD)
    walk: Walk[Completion | Failed] = Walk(
        items, asked.ask, concurrency=asked.concurrency, most_ahead=most_ahead, in_order=in_order
    )
    failures, warned = 0, set[type[Exception]]()
    try:
        with progress_bar("texts", length_hint(items) or None, shown=progress, unit="text") as step:
            while (taken := await walk.take()) is not None:
                number, result = taken
                if isinstance(result, Failed):
                    failures += 1
                    if on_error == "raise":
                        result.error.add_note(f"item {number} of generate_many")
                        raise result.error
                    if on_error == "warn" and type(result.error) not in warned:
                        warned.add(type(result.error))
                        _warn(number, result.error)
                step(failed=failures)
                yield taken
    finally:
        await walk.close()


def _warn(number: int, error: Exception) -> None:
    name = type(error).__name__
    warnings.warn(
        f"item {number} failed: {name}: {error} (of other items' {name} there is no warning)",
        RuntimeWarning,
        stacklevel=3,
    )
