"""Numbers in JSON schemas with ``multipleOf``: whether any are within bounds, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import reduce
from typing import Any

from genrt.errors import InvalidConstraint
from genrt.structures.intervals import BOUNDS


def has_numbers(schemas: list[dict[str, Any]], integer: bool) -> bool:
    """Tell whether some number satisfies several schemas. With a ``multipleOf`` llguidance takes only
    numbers from 0 on."""
    multiple = common_multiple(schemas)
    step = _least_common_multiple(multiple or Fraction(1), Fraction(1)) if integer else multiple
    # Each bound with whether it is itself left out: the strictest is the greatest. Upper ones negated.
    least = -math.inf if multiple is None else Fraction(0)
    lows: list[tuple[Fraction | float, bool]] = [(least, False)]
    highs: list[tuple[Fraction | float, bool]] = [(-math.inf, False)]
    for schema in schemas:
        for key in BOUNDS:
            if (bound := _number(schema.get(key))) is not None:
                # In draft 4, exclusiveMinimum is a flag of minimum.
                is_flagged = schema.get(f"exclusive{key.capitalize()}") is True
                strict = key.startswith("exclusive") or is_flagged
                if key.endswith("inimum"):
                    lows.append((bound, strict))
                else:
                    highs.append((-bound, strict))
    (low, above), (high, below) = max(lows), max(highs)
    if step is None or low == -math.inf:
        return low < -high or (low == -high and not above and not below)
    first = step * math.ceil(low / step)
    first += step if above and first == low else 0
    return first < -high or (first == -high and not below)


def common_multiple(schemas: Iterable[dict[str, Any]]) -> Fraction | None:
    """Return the least common multiple of every ``multipleOf``; ``None`` if there is none."""
    steps = [_number(schema.get("multipleOf")) for schema in schemas]
    known = [abs(step) for step in steps if step is not None]
    if 0 in known:
        raise InvalidConstraint("the JSON schema has a multipleOf of 0: give a number above 0")
    return reduce(_least_common_multiple, known) if known else None


def _least_common_multiple(one: Fraction, other: Fraction) -> Fraction:
    numerator = math.lcm(one.numerator, other.numerator)
    return Fraction(numerator, math.gcd(one.denominator, other.denominator))


def remainders_of(step: Fraction) -> int:
    """Return how many remainders an automaton for the decimal multiples of a number has to tell apart."""
    while step.denominator != 1:
        step *= 10
    return int(str(step.numerator).rstrip("0"))


def _number(value: object) -> Fraction | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return Fraction(repr(value))
