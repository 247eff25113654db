"""Bodies of requests to genrt's own routes: JSON objects, taken member by member, every one checked."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from genrt.errors import ContextTooLong, InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import check_int, named, shown
from genrt.tokens.encoding import encode_prompt

__all__ = ["Body", "contexts_of", "finite", "json_bytes"]

REQUIRED: Any = object()
"""Says that a member has no default."""

LONGEST_TOKEN = 256
"""How many characters of a prompt a token may stand for; a longer prompt cannot fit any context."""


class Body:
    """A JSON object. ``end`` says what was not asked for.

    Raises:
        InvalidRequest: the data is no JSON object.
    """

    def __init__(self, data: bytes) -> None:
        try:
            found: Any = json.loads(data, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the body is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise InvalidRequest(f"the body must be a JSON object, got {_kind(found)}")
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
