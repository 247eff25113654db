"""Formats any text, number or count for display: no control characters, bounded width.

The output of a model or a program may hold terminal escapes, marks of direction, markup, or a megabyte in
one line.
"""

from __future__ import annotations

import bisect
import math
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from genrt.tokens.texts import decoded

BLUE, ORANGE, GREY = "#2f7fc1", "#d55e00", "#8b929c"
"""Distinct with any kind of color vision, and visible on white and on black."""

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
MINUS = "\N{MINUS SIGN}"
LONGEST = 20_000
"""The most characters of a value that are considered at all."""


def printable(text: str) -> str:
    """Return the text in one line, with every unprintable character, marks of direction included, escaped
    as by Python."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def width(text: str) -> int:
    """Return how many columns the text takes in a font of fixed width: two for a wide character, zero
    for a mark."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def shorten(text: str, columns: int) -> str:
    """Return the text, or its beginning and end around an ellipsis, a quarter for the end."""
    if width(text) <= columns and len(text) <= 4 * columns:
        return text
    last = (columns - 1) // 4
    end = _fitting(text[::-1], last)[::-1]
    return _fitting(text, columns - 1 - last) + ELLIPSIS + end


def _fitting(text: str, columns: int) -> str:
    """Return the longest prefix of at most this many columns, and at most four characters for each."""
    longest = text[: 4 * columns]
    return longest[: bisect.bisect_right(list(accumulate(map(width, longest))), columns)]


def label(value: Any) -> str:
    """Return a value in one printable line, never empty: a text as it is, anything else as Python writes
    it."""
    if not isinstance(value, str):
        try:
            value = repr(value)
        except Exception as error:  # the user's repr must not hide the rest
            value = f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    if not value:
        return "(empty)"
    return printable(value if len(value) <= LONGEST else value[:LONGEST] + ELLIPSIS)


def fixed(value: float, *, digits: int = 3) -> str:
    """Format a number with this many digits after the point, or with an exponent if it is enormous."""
    return f"{value:.6g}" if 1e9 <= abs(value) < math.inf else f"{value:.{digits}f}"


def number(value: float, *, digits: int = 3) -> str:
    """Format a number for people: a real minus sign, infinity as a sign, NaN as a dash."""
    if value != value:
        return "\N{EN DASH}"
    return fixed(value, digits=digits).replace("inf", "\N{INFINITY}").replace("-", MINUS)


def count_of(count: int, noun: str) -> str:
    """Return ``1 particle``, ``2 particles``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def token_label(token_id: int, tokens: Mapping[int, bytes]) -> str:
    """Return a token's text, its bytes if they are no text, its number without bytes."""
    spelled = tokens.get(token_id, b"")
    if not spelled:
        return f"\N{MATHEMATICAL LEFT ANGLE BRACKET}{token_id}\N{MATHEMATICAL RIGHT ANGLE BRACKET}"
    try:
        text = printable(spelled.decode())
        return text.replace(" ", "\N{OPEN BOX}") if text.isspace() else text
    except UnicodeDecodeError:
        return repr(spelled)[2:-1]


def said(token_ids: Sequence[int], tokens: Mapping[int, bytes]) -> str:
    """Return the text of tokens, printable; unknown tokens as their numbers."""
    parts: list[str] = []
    known = bytearray()
    for token_id in token_ids:
        if tokens.get(token_id):
            known += tokens[token_id]
        else:
            parts += [decoded(bytes(known)), token_label(token_id, tokens)]
            known.clear()
    return printable("".join([*parts, decoded(bytes(known))]))
