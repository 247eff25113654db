"""Bounds of numbers in JSON schemas, where llguidance's intervals admit a bound or leave out numbers.

Its interval from 7 to 7.5 without 7 contains 7, as does every interval that begins at a whole number and
ends before the next. And up to 9.25 it leaves out ``9.2``, as every text that begins the text of a bound.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_LEAST = 1e-30
"""Used as the least number above 0: the least float has more digits than llguidance can tell apart."""

_WHOLE = 2.0**52
"""From here on floats are whole numbers."""


def mend_bounds(schema: dict[str, Any]) -> None:
    """Rewrite the bounds of a schema so that llguidance takes exactly the numbers within them."""
    types = schema.get("type", "number")
    bounds = {key: schema[key] for key in BOUNDS if key in schema}
    if "number" not in (types if isinstance(types, list) else [types]):
        return
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in bounds.values()):
        return
    missing = sorted(each for each in _beginnings(bounds) if _is_within(each, schema))
    for side, other, sign in (("Minimum", "Maximum", 1), ("Maximum", "Minimum", -1)):
        start = sign * bounds.get(f"exclusive{side}", math.inf)
        ends = [sign * bounds[key] for key in (other.lower(), f"exclusive{other}") if key in bounds]
        if 0 <= start < _WHOLE and start % 1 == 0 and ends and min(ends) < start + 1:
            first = math.nextafter(start, math.inf) if start else _LEAST
            schema[side.lower()] = sign * max(first, sign * bounds.get(side.lower(), sign * first))
            del schema[f"exclusive{side}"]
    if missing and "enum" not in schema and "const" not in schema:
        moved = {key: schema.pop(key) for key in ("type", "multipleOf", *BOUNDS) if key in schema}
        either = {"anyOf": [moved, {"enum": missing}]}
        parts = schema.get("allOf", [])
        schema |= either if "anyOf" not in schema else {"allOf": [*parts, either]}


def _beginnings(bounds: dict[str, int | float]) -> set[float]:
    """Return the numbers with a fraction whose texts begin the text of a bound, on the way to 0."""
    found = set()
    for key, bound in bounds.items():
        if (bound > 0) == key.endswith("aximum"):
            whole, _, fraction = f"{Decimal(repr(bound)):f}".partition(".")
            numbers = [float(f"{whole}.{fraction[:end]}") for end in range(1, len(fraction))]
            found |= {each for each in numbers if each % 1 and abs(each) > 1e-4}
    return found


def _is_within(number: float, schema: dict[str, Any]) -> bool:
    step = schema.get("multipleOf")
    return (
        number >= schema.get("minimum", -math.inf)
        and number <= schema.get("maximum", math.inf)
        and number > schema.get("exclusiveMinimum", -math.inf)
        and number < schema.get("exclusiveMaximum", math.inf)
        and (step is None or (Fraction(repr(number)) / Fraction(repr(step))).denominator == 1)
    )
