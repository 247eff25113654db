"""Bodies of requests: JSON within bounds. Parsing holds the interpreter lock, so values are counted
before anything is parsed, and long bodies are parsed one at a time, off the event loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from genrt.errors import ContextTooLong, InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import named
from genrt.tokens.encoding import encode_prompt

T = TypeVar("T")
B = TypeVar("B", bound="JSONBody")

TokenList: TypeAlias = Annotated[list[int], Field(fail_fast=True)]

LONG = 2**14
"""A body of so many bytes is parsed in a millisecond or two."""

SHORT_TEXT = 2**18
"""A text of so many characters is tokenized in a second."""

CHARACTERS_PER_TOKEN = 32
"""The most characters per token of a long text."""

DEEPEST = 100
"""How deep lists and objects may be nested."""

DIGITS = 100
"""The most digits of an integer: Python takes milliseconds to read one of thousands."""

LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (DIGITS + 1))

MEMBERS = 4096
"""How many members lists and objects for vLLM's front end may have, except token ids."""

ID_LISTS = frozenset({"allowed_token_ids", "prompt", "prompt_token_ids", "token_ids", "tokens"})
"""The names of members that may be long lists of token ids."""

STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""Strings of JSON, the last of them perhaps cut off; this looks at each byte once."""


class Bodies:
    """Parses the bodies that one server receives, and writes long answers.

    Args:
        values: how many values the JSON of one may have.
        text: the most characters of each text, for vLLM's front end.
        ids: the most token ids of a list, for vLLM's front end.
    """

    def __init__(self, values: int, *, text: int = SHORT_TEXT, ids: int = 2**22) -> None:
        self.values, self.text, self.ids = values, text, ids
        self._parsing = asyncio.Semaphore(1)
        self._tokenizing = asyncio.Semaphore(1)

    async def read(self, data: bytes, parse: Callable[[bytes], T]) -> T:
        """Return ``parse(data)``: in a thread, one call at a time, if the body is long."""
        return parse(data) if len(data) <= LONG else await self.aside(lambda: parse(data))

    async def aside(self, make: Callable[[], T]) -> T:
        """Return ``make()``, called in a thread, one call at a time."""
        async with self._parsing:
            return await asyncio.to_thread(make)

    async def tokenize(self, make: Callable[[], T]) -> T:
        """Return ``make()``, called in a thread, one call at a time: a tokenizer takes a hundred times
        the memory of a text."""
        async with self._tokenizing:
            return await asyncio.to_thread(make)


class JSONBody(BaseModel):
    """A JSON object of known members. Its lists fail at their first wrong member."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def parse_body(kind: type[B], data: bytes, values: int) -> B:
    """Return a body's members.

    Raises:
        InvalidRequest: it is not JSON, has more values, or is not of this kind.
    """
    check_counts(data, values)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place, message = [str(each)[:80] for each in first["loc"]], first["msg"][:300]
        if place[-1:] == ["str"]:  # the first type of several
            place, message = place[:-1], "must be a text or a list of token ids"
        raise InvalidRequest(f"{'.'.join(place) or 'the body'}: {message}") from None


def check_counts(data: bytes, values: int) -> None:
    """Raise InvalidRequest if JSON has more values than this, or over a 64th as many lists and members of
    objects, or a long integer. Where texts are full of quotes, four of them count as a value."""
    if LONG_NUMBER.search(data) and LONG_NUMBER.search(STRINGS.sub(b"", data)):
        raise InvalidRequest(f"a number of the body has over {DIGITS} digits")
    for again in (False, True):
        nested = data.count(b"[") + data.count(b"{") + data.count(b":")
        if nested <= values // 64 and nested + data.count(b",") <= values:
            return
        if again or data.count(b'"') > 4 * values:
            break
        data = STRINGS.sub(b"", data)  # commas and brackets of texts are not values
    raise InvalidRequest(
        f"the body has over {values} values, or over {values // 64} lists and members of objects: send "
        "fewer at once"
    )


def check_front_end_body(data: bytes, bodies: Bodies) -> Any:
    """Return the value of long JSON, and null for short JSON.

    Raises InvalidRequest for a body that would keep vLLM's front end busy for seconds: for each member of
    a list it collects a dozen errors. Only lists of token ids may be long."""
    check_counts(data, bodies.values)
    is_short = len(data) <= bodies.text
    if is_short and data.count(b",") < MEMBERS and data.count(b"[") + data.count(b"{") <= 32:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None  # the front end will refuse it too
    level: list[tuple[str, Any]] = [("body", found)] if isinstance(found, dict | list) else []
    for _ in range(DEEPEST):
        inner: list[tuple[str, Any]] = []
        for name, value in level:
            members = _members(name, value, bodies)
            inner += [each for each in members if isinstance(each[1], dict | list)]
        level = inner
    if level:
        raise InvalidRequest(f"lists and objects of the body are over {DEEPEST} deep: flatten it")
    return found


def _members(name: str, value: Any, bodies: Bodies) -> list[tuple[str, Any]]:
    """Return the members of a list or an object, with their names, within the bounds."""
    is_list = isinstance(value, list)
    are_ids = is_list and name in ID_LISTS and set(map(type, value)) == {int}
    most = max(MEMBERS, bodies.ids) if are_ids else MEMBERS
    if len(value) > most:
        raise InvalidRequest(f"{named(name[:80])} has over {most} members: send fewer")
    members = [(name, each) for each in value] if is_list else list(value.items())
    for its, each in members:
        if len(its) > bodies.text or (isinstance(each, str) and len(each) > bodies.text):
            raise InvalidRequest(
                f"{named(its[:80])} has over {bodies.text} characters: no context is so long"
            )
    return members


def contexts_of(
    lm: AsyncLM, given: Sequence[Any], name: str, *, begins: bool = True
) -> list[list[int]]:
    """Return texts and lists of token ids as token ids. A text that ``begins`` a context gets the tokens
    that the tokenizer puts there.

    Raises:
        InvalidRequest: the tokenizer would lose some of a text. ContextTooLong: a text is too long.
    """
    contexts: list[list[int]] = []
    for each in given:
        if not isinstance(each, str):
            contexts.append(each)
            continue
        long = f"is over max_model_len={lm.max_model_len}: shorten it"
        if len(each) > longest_text(lm):
            raise ContextTooLong(f"{name}: a text of {len(each)} characters {long}")
        contexts.append(encode_prompt(lm.tokenizer, each) if begins else lm.encode(each))
        if (count := len(contexts[-1])) > lm.max_model_len:  # before more texts are tokenized
            raise ContextTooLong(f"{name}: a text of {count} tokens {long}")
    return contexts


def longest_text(lm: AsyncLM) -> int:
    """Return how many characters a text to be tokenized may have."""
    return max(SHORT_TEXT, CHARACTERS_PER_TOKEN * lm.max_model_len)


def json_bytes(value: object) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
