"""Formats any text, number or count for display: no control characters, bounded length.

The output of a model or a program may hold terminal escapes, marks of direction, markup, or a megabyte in
one line.
"""

from __future__ import annotations

import math
from typing import Any

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


def shorten(text: str, most: int) -> str:
    """Return the text, or its beginning and end around an ellipsis, a quarter for the end: at most so
    many characters."""
    last = (most - 1) // 4
    return (
        text if len(text) <= most else text[: most - 1 - last] + ELLIPSIS + text[len(text) - last :]
    )


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
