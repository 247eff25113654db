"""Numbers in JSON schemas with ``multipleOf``: whether any are within bounds, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from genrt.constraints.intervals import BOUNDS
from genrt.errors import InvalidConstraint


def has_numbers(schemas: list[dict[str, Any]], integer: bool) -> bool:
    """Tell whether some number satisfies several schemas. Without a ``multipleOf`` llguidance finds that
    itself; with one it takes only numbers from 0 on."""
    step = common_multiple(schemas)
    if step is None:
        return True
    step = _least_common_multiple(step, Fraction(1)) if integer else step
    low, high = Fraction(0), None
    above = below = False
    for schema in schemas:
        for key in BOUNDS:
            bound, strict = _number(schema.get(key)), key.startswith("exclusive")
            if bound is None:
                continue
            # In draft 4, exclusiveMinimum is a flag of minimum.
            strict = strict or schema.get(f"exclusive{key.capitalize()}") is True
            if key.endswith("inimum") and (bound, strict) > (low, above):
                low, above = bound, strict
            if key.endswith("aximum") and (high is None or (-bound, strict) > (-high, below)):
                high, below = bound, strict
    first = step * math.ceil(low / step)
    first += step if above and first == low else 0
    return high is None or first < high or (first == high and not below)


def common_multiple(schemas: Iterable[dict[str, Any]]) -> Fraction | None:
    """Return the least common multiple of every ``multipleOf``; ``None`` if there is none."""
    common: Fraction | None = None
    for schema in schemas:
        step = _number(schema.get("multipleOf"))
        if step == 0:
            raise InvalidConstraint("the JSON schema has a multipleOf of 0: give a number above 0")
        if step is not None:
            common = abs(step) if common is None else _least_common_multiple(common, abs(step))
    return common


def _least_common_multiple(one: Fraction, other: Fraction) -> Fraction:
    scale = math.lcm(one.denominator, other.denominator)
    return Fraction(math.lcm(int(one * scale), int(other * scale)), scale)


def remainders_of(step: Fraction | None) -> int:
    """Return how many remainders an automaton for the decimal multiples of a number has to tell apart."""
    if step is None:
        return 1
    while step.denominator != 1:
        step *= 10
    count = step.numerator
    while count % 10 == 0:
        count //= 10
    return count


def _number(value: object) -> Fraction | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return Fraction(repr(value))
