"""Bodies of requests: JSON within bounds, and objects whose members are taken and checked one by one.

Rules:
    Parsing keeps the interpreter to itself: nothing else runs meanwhile, in no thread. So values are
    counted before anything is parsed, and long bodies are parsed one at a time, off the event loop.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from genrt.errors import ContextTooLong, InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import check_int, named, shown
from genrt.tokens.encoding import encode_prompt

__all__ = ["Bodies", "Body", "check_front_end_body", "contexts_of", "finite", "json_bytes"]

T = TypeVar("T")

REQUIRED: Any = object()
"""Says that a member has no default."""

LONGEST_TOKEN = 256
"""How many characters of a prompt a token may stand for; a longer prompt cannot fit any context."""

LONG = 2**14
"""So many bytes are parsed in a millisecond or two."""

DEEPEST = 100
"""How deep lists and objects may be within one another."""

MANY = 2**22
"""How many values a body may have whose client has the model's weights in hand."""

MEMBERS = 4096
"""How many members lists and objects for vLLM's front end may have, but for token ids."""

FEW = 32
"""How many lists and objects are quickly checked, however wrong they are."""

OF_IDS = ("token_ids", "tokens", "prompt")
"""How the names of members end that are token ids."""

STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""Strings of JSON, the last of them perhaps cut off; this takes no second look at any byte."""


class Bodies:
    """Reads the bodies that one server gets, and writes long answers.

    Args:
        values: how many values the JSON of one may have.
    """

    def __init__(self, values: int) -> None:
        self.values = values
        self._turn = asyncio.Semaphore(1)
        self._texts = asyncio.Semaphore(1)

    async def read(self, data: bytes, make: Callable[[bytes, int], T]) -> T:
        """Return ``make(data, values)``, called off the event loop, in its turn, if the body is long."""
        if len(data) <= LONG:
            return make(data, self.values)
        return await self.aside(lambda: make(data, self.values))

    async def aside(self, make: Callable[[], T]) -> T:
        """Return ``make()``, called off the event loop, in its turn."""
        async with self._turn:
            return await asyncio.to_thread(make)

    async def tokenize(self, make: Callable[[], T]) -> T:
        """Return ``make()``, called off the event loop, in the turn of texts that are long: a tokenizer
        takes some hundred times their memory."""
        async with self._texts:
            return await asyncio.to_thread(make)


def check_counts(data: bytes, values: int) -> None:
    """Raise InvalidRequest if JSON has more values than this, or over a 64th as many lists and objects.
    Where texts are full of quotes, four of them count as a value."""
    for again in (False, True):
        nested = data.count(b"[") + data.count(b"{")
        if nested <= values // 64 and nested + data.count(b",") <= values:
            return
        if again or data.count(b'"') > 4 * values:
            break
        data = STRINGS.sub(b"", data)  # commas and brackets of texts are no values
    raise InvalidRequest(
        f"the body has over {values} values, or over {values // 64} lists and objects: send fewer at once"
    )


def check_depth(value: object) -> None:
    """Raise InvalidRequest if lists and objects are too deep within one another."""
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for members in inner for each in members if isinstance(each, dict | list)]
        if not level:
            return
    raise InvalidRequest(f"lists and objects of the body are over {DEEPEST} deep: flatten it")


def check_front_end_body(data: bytes, values: int) -> Any:
    """Return what JSON says, if it is long. Raises InvalidRequest for what vLLM's front end would be busy
    with for seconds: it says for each member of a list what is wrong with it, a dozen times. Only lists
    of token ids may be long."""
    check_counts(data, values)
    if data.count(b",") < MEMBERS and data.count(b"[") + data.count(b"{") <= FEW:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None  # which the front end finds at once too
    if not isinstance(found, dict | list):
        return None
    check_depth(found)
    level: list[tuple[str, Any]] = [("body", found)]
    while level:
        inner: list[tuple[str, Any]] = []
        for name, value in level:
            is_list = isinstance(value, list)
            if len(value) > MEMBERS and not (
                is_list and name.endswith(OF_IDS) and set(map(type, value)) == {int}
            ):
                raise InvalidRequest(f"{named(name[:80])} has over {MEMBERS} members: send fewer")
            members = zip([name] * len(value), value, strict=True) if is_list else value.items()
            inner += [each for each in members if isinstance(each[1], dict | list)]
        level = inner
    return found


class Body:
    """A JSON object of at most so many ``values``. ``end`` says what was not asked for.

    Raises:
        InvalidRequest: the data is no JSON object, or has too many values, or is too deep.
    """

    def __init__(self, data: bytes, values: int = MANY) -> None:
        check_counts(data, values)
        try:
            found: Any = json.loads(data, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the body is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise InvalidRequest(f"the body must be a JSON object, got {_kind(found)}")
        check_depth(found)
        self._left: dict[str, Any] = found

    def __contains__(self, name: str) -> bool:
        return self._left.get(name) is not None

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a member of any kind, and ``default`` for one that is missing or null.

        Raises:
            InvalidRequest: it is missing, and has no default.
        """
        found = self._left.pop(name, None)
        if found is not None:
            return found
        if default is REQUIRED:
            raise InvalidRequest(f"{name} is missing")
        return default

    def listed(self, name: str, most: int) -> list[Any]:
        """Return a list of at least one and at most ``most`` members; raises as ``take``."""
        found = self.take(name)
        if not isinstance(found, list):
            raise InvalidRequest(f"{name} must be a list, got {_kind(found)}")
        if not 1 <= len(found) <= most:
            raise InvalidRequest(f"{name} must have 1 to {most} members, got {len(found)}")
        return found

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a text, or ``default``; raises as ``take``."""
        found = self.take(name, default)
        if found is not default and not isinstance(found, str):
            raise InvalidRequest(f"{name} must be a text, got {_kind(found)}")
        return found

    def members(self, name: str) -> dict[str, Any]:
        """Return an object's members; raises as ``take``."""
        found = self.take(name)
        if not isinstance(found, dict):
            raise InvalidRequest(f"{name} must be an object, got {_kind(found)}")
        return found

    def flag(self, name: str) -> bool:
        """Return whether a member is true; without one it is not."""
        found = self.take(name, False)
        if not isinstance(found, bool):
            raise InvalidRequest(f"{name} must be true or false, got {_kind(found)}")
        return found

    def integer(self, name: str, low: int, high: int, default: Any = REQUIRED) -> Any:
        """Return an integer from ``low`` to ``high``, or ``default``; raises as ``take``."""
        found = self.take(name, default)
        return found if found is default else check_int(name, found, low, high)

    def end(self) -> None:
        """Raise InvalidRequest for members that nobody took."""
        for name in self._left:
            raise InvalidRequest(f"unknown member {named(name[:80])}")


def contexts_of(
    lm: AsyncLM, given: Sequence[Any], name: str, *, begins: bool = True
) -> list[list[int]]:
    """Return contexts, which are texts or lists of token ids, as token ids, still to be checked. A
    text that ``begins`` a context has what the tokenizer puts there.

    Raises:
        InvalidRequest: one is neither, or the tokenizer would lose some of it; ContextTooLong.
    """
    contexts: list[list[int]] = []
    for each in given:
        if isinstance(each, str):
            if len(each) > LONGEST_TOKEN * (lm.max_model_len + 1):
                raise ContextTooLong(
                    f"{name}: a text of {len(each)} characters is longer than any context of "
                    f"max_model_len={lm.max_model_len}"
                )
            contexts.append(encode_prompt(lm.tokenizer, each) if begins else lm.encode(each))
        elif isinstance(each, list) and all(type(token) is int for token in each):
            contexts.append(each)
        else:
            raise InvalidRequest(f"{name} must be texts or lists of token ids, got {_kind(each)}")
    return contexts


def finite(number: float) -> float | None:
    """Return a number as JSON has it: null stands for -inf."""
    return number if math.isfinite(number) else None


def json_bytes(value: object) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _kind(value: object) -> str:
    if isinstance(value, str):
        return "a text"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return shown(value)
