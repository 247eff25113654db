"""Numbers in arguments: checks, and conversion to int or float; values in messages; read-only arrays."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from genrt.errors import InvalidRequest

__all__ = [
    "check_bool",
    "check_float",
    "check_int",
    "check_one_of",
    "check_options",
    "check_timeout",
    "displayed",
    "frozen",
    "is_truth_value",
    "json_number",
    "named",
    "nearest",
    "shown",
]

A = TypeVar("A", bound=NDArray[Any])

_LONG = 10**40
"""Messages describe integers from here on: Python refuses to print 4,300 digits."""

_ELSEWHERE = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_tokens": "max_new_tokens",
    "stop": "stop_strings",
    "schema": "json_schema",
}
"""Options of other libraries, with their names here."""

_INSTEAD = (
    ": give choice=, regex=, json_schema= or grammar=, or run SMC on a TextModel(constraint=…)"
)
"""Advice about ``constraint=``, for calls with structures."""


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return the value, an integer of any library, as an int.

    Raises:
        InvalidRequest: not an integer, or not from ``low`` to ``high``, both included.
    """
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # torch raises RuntimeError
        number = None
    if number is None or is_truth_value(value):
        raise InvalidRequest(f"{name} must be an int, got {shown(value)}")
    if number < low or (high is not None and number > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(f"{name} must be {bound}, got {shown(number)}")
    return number


def check_bool(name: str, value: object) -> bool:
    """Return the value. Raises InvalidRequest for anything but a bool."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False, got {shown(value)}")
    return value


def check_float(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """Return the value, a number of Python's or of NumPy's, as a float.

    Raises:
        InvalidRequest: not a number, not finite, or not from ``low`` to ``high``, both included.
    """
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        number = math.inf
    if not low <= number <= high or math.isinf(number):
        bound = f"at least {low:g} and finite" if math.isinf(high) else f"from {low:g} to {high:g}"
        bound = "finite" if math.isinf(low) else bound
        raise InvalidRequest(f"{name} must be {bound}, got {shown(value)}")
    return number


def check_timeout(seconds: float | None) -> float | None:
    """Return a timeout as a Python float, or ``None``. Raises InvalidRequest unless it is a finite number
    of at least 0."""
    if seconds is None:
        return None
    check_float("timeout", seconds, 0.0, math.inf)
    return float(seconds)  # sums with numpy's narrow floats lose precision


def check_one_of(name: str, value: Any, choices: Sequence[str | None]) -> Any:
    """Return the value. Raises InvalidRequest unless it is one of these choices, at least two."""
    if not isinstance(value, str | None) or value not in choices:
        *most, last = map(repr, choices)
        raise InvalidRequest(f"{name} must be {', '.join(most)} or {last}, got {named(value)}")
    return value


def check_options(of: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise InvalidRequest if an option is not known, with the nearest name, or else with all."""
    for name in given:
        if name not in known:
            instead = _INSTEAD if name == "constraint" and "regex" in known else ""
            advice = instead or nearest(name, known) or f": its options are {', '.join(known)}"
            raise InvalidRequest(f"{of} has no option {named(name)}{advice}")


def is_truth_value(value: object) -> bool:
    """Return whether a value is a bool of any library, or holds bools."""
    return isinstance(value, bool) or getattr(value, "dtype", None) in (np.bool_, torch.bool)


def shown(value: object) -> str:
    """Return a number, a truth value or ``None`` for a message, and only the type of other values, which
    may be private prompts."""
    if isinstance(value, int) and abs(value) >= _LONG:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, np.bool_):
        return repr(value)
    if value is None or isinstance(value, int | float | np.number):
        return str(value)
    return f"a value of type {type(value).__name__}"


def named(value: object) -> str:
    """Return a str in full for a message about a name, and other values as ``shown`` does."""
    return repr(value) if isinstance(value, str) else shown(value)


def displayed(value: object) -> str:
    """Return the first 200 characters of a value's ``repr`` for a message. Large integers are described
    instead."""
    try:
        return f"{value!r:.200}"
    except ValueError:  # Python refuses to print integers of over 4,300 digits
        return shown(value)


def frozen(array: A) -> A:
    """Make an array read-only, and return it."""
    array.flags.writeable = False
    return array


def json_number(number: float) -> float | None:
    """Return a number as JSON has it: null stands for -inf."""
    return number if math.isfinite(number) else None


def nearest(name: object, known: Iterable[str]) -> str:
    """Return a suggestion for the end of a message about an unknown name; empty if no known name is
    near."""
    if not isinstance(name, str):
        return ""
    plain, names = name.lstrip("-").replace("-", "_"), list(known)
    other = _ELSEWHERE.get(plain, plain)
    found = [each for each in names if each.lstrip("-").replace("-", "_") == other]
    found = found or difflib.get_close_matches(name, names, 1)
    return f": did you mean {found[0]}?" if found else ""
