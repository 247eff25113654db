"""Sets of numbers in JSON schemas, as regular expressions of their texts.

Numbers are written in decimals: an integer without a fraction, a number with bounds without an exponent.
Numbers with ``multipleOf`` are not negative, and their fraction has no last zero: so llguidance's
automaton takes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from genrt.structures.regexes import Both, Node, OneOf, Raw, literal
from genrt.structures.schemas import undone

__all__ = ["Numbers", "fraction_of"]

MOST_REMAINDERS = 100_000
MOST_LISTED = 2_000

_INTEGER = "-?(?:0|[1-9][0-9]*)"
_ANY_FRACTION = r"(?:\.[0-9]+)?"


def fraction_of(value: int | float) -> Fraction:
    """Return the number that a JSON text means, as it is written."""
    return Fraction(repr(value))


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers within bounds, of a kind, and among those listed.

    Attributes:
        is_integer: whether all are integers; ``False``: none is; ``None``: both.
        low, high: the bounds, each with whether it is itself left out; ``None`` without a bound.
        multiple: of which all are multiples.
        listed: the texts of the only numbers; ``None``: all.
        unlisted: numbers that are left out.
    """

    is_integer: bool | None = None
    low: tuple[Fraction, bool] | None = None
    high: tuple[Fraction, bool] | None = None
    multiple: Fraction | None = None
    listed: tuple[str, ...] | None = None
    unlisted: frozenset[Fraction] = frozenset()

    def __and__(self, other: Numbers) -> Numbers | None:
        """Return the numbers of both; ``None`` if there are none, as far as is seen."""
        if None not in (self.is_integer, other.is_integer) and self.is_integer != other.is_integer:
            return None
        lows = [each for each in (self.low, other.low) if each]
        highs = [each for each in (self.high, other.high) if each]
        multiples = [each for each in (self.multiple, other.multiple) if each]
        lists = [each for each in (self.listed, other.listed) if each is not None]
        found = Numbers(
            self.is_integer if other.is_integer is None else other.is_integer,
            max(lows, default=None),
            min(highs, key=lambda each: (each[0], not each[1]), default=None),
            _least_common_multiple(multiples) if multiples else None,
            None if not lists else tuple(text for text in lists[0] if text in lists[-1]),
            self.unlisted | other.unlisted,
        )
        return found if found._is_possible() else None

    def has(self, number: Fraction) -> bool:
        """Return whether a number is among these, but for ``listed``."""
        low, high = self.low, self.high
        return (
            (self.is_integer is None or (number.denominator == 1) == self.is_integer)
            and (low is None or number > low[0] or (number == low[0] and not low[1]))
            and (high is None or number < high[0] or (number == high[0] and not high[1]))
            and (self.multiple is None or (number / self.multiple).denominator == 1)
            and number not in self.unlisted
        )

    def _is_possible(self) -> bool:
        if self.listed is not None:
            return bool(self.kept())
        low, high = self.low, self.high
        if low is None or high is None:
            return True
        return low[0] < high[0] or (low[0] == high[0] and self.has(low[0]))

    def kept(self) -> list[str]:
        """Return the texts of the listed numbers that are among these."""
        return [text for text in self.listed or () if self.has(Fraction(text))]

    def finite(self) -> list[str] | None:
        """Return the texts of all numbers if they are few, each once; else ``None``."""
        if self.listed is not None:
            by_value = {Fraction(text): text for text in reversed(self.kept())}
            return list(reversed(by_value.values()))
        if self.low and self.high and self.is_integer:
            first, last = math.ceil(self.low[0]), math.floor(self.high[0])
            if last - first < 16:
                return [str(n) for n in range(first, last + 1) if self.has(Fraction(n))]
        return None

    def forms(self) -> tuple[list[Node], list[str]]:
        """Return the regular expressions of these numbers, and JSON schemas for llguidance."""
        if self.listed is not None:
            return [OneOf(tuple(map(literal, self.kept())))], []
        parts = [self]
        for hole in sorted(self.unlisted):
            parts = [
                piece
                for part in parts
                for side in (Numbers(high=(hole, True)), Numbers(low=(hole, True)))
                if (piece := part & side) is not None
            ]
        nodes: list[Node] = []
        schemas: list[str] = []
        for part in parts:
            if part.multiple is not None:
                part._add_multiples(part.multiple, nodes, schemas)
            else:
                nodes += part._nodes()
        return nodes, schemas

    def _nodes(self) -> list[Node]:
        """Return the regular expressions of numbers within bounds, positive and negative ones."""
        shape = {
            True: "[0-9]+",
            False: r"[0-9]+\.[0-9]*[1-9][0-9]*",
            None: f"[0-9]+{_ANY_FRACTION}",
        }
        if self.low is None and self.high is None:
            if self.is_integer is None:
                return [Raw(f"{_INTEGER}{_ANY_FRACTION}(?:[eE][+-]?[0-9]+)?")]
            if self.is_integer:
                return [Raw(_INTEGER)]
        nodes: list[Node] = []
        for sign in (1, -1):
            low, high = (
                (self.low, self.high) if sign > 0 else (_negated(self.high), _negated(self.low))
            )
            if high is not None and (high[0] < 0 or high == (Fraction(0), True)):
                continue
            parts = [Raw(rf"(?:0|[1-9][0-9]*){_ANY_FRACTION}"), Raw(shape[self.is_integer])]
            if low is not None and (low[0] > 0 or low == (Fraction(0), True)):
                parts.append(Raw(_at_least(*low)))
            if high is not None:
                parts.append(Raw(_at_most(*high)))
            # A reader of floats rounds more digits to what the bound, or an integer, leaves out.
            if self.is_integer is False or any(each and each[1] for each in (low, high)):
                parts.append(Raw("(?:[0-9]*|[0-9.]{1,16})"))
            nodes.append(Both(tuple(_signed(part, sign) for part in parts)))
        return nodes

    def _add_multiples(self, step: Fraction, nodes: list[Node], schemas: list[str]) -> None:
        if self.is_integer is False:
            raise undone("a multipleOf of numbers that are not integers")
        if self.is_integer:
            step = _least_common_multiple([step, Fraction(1)])
        remainders = _remainders_of(step)
        if remainders > MOST_REMAINDERS:
            raise undone(
                f"a multipleOf that needs {remainders:,} remainders to be told apart, and "
                f"{MOST_REMAINDERS:,} is the most"
            )
        first = Fraction(0)
        if self.low is not None:
            first = max(first, step * math.ceil(self.low[0] / step))
            first += step if self.low == (first, True) else 0
        if self.high is None:
            last = None
        else:
            last = step * math.floor(self.high[0] / step)
            last -= step if self.high == (last, True) else 0
            if last < first:
                return
        # llguidance's bounds are right for integers; the multiples up to these are listed.
        start = math.ceil(first)
        end = None if last is None else math.floor(last)
        if last is not None and (last - first) / step < MOST_LISTED:
            listed = _multiples(first, last, step)
            start, end = 1, 0
        else:
            listed = _multiples(first, start - step / 2, step)
            listed += [] if last is None else _multiples(Fraction(math.floor(last)), last, step)
            if len(listed) > 2 * MOST_LISTED:
                raise undone("a multipleOf with too many multiples within a fraction of 1")
        if listed:
            nodes.append(OneOf(tuple(literal(_decimal(each)) for each in listed)))
        if end is None or start <= end:
            schema: dict[str, int | float | str] = {
                "type": "integer" if self.is_integer else "number",
                "minimum": start,
                "multipleOf": int(step) if step.denominator == 1 else float(step),
            }
            if end is not None:
                schema["maximum"] = end
            schemas.append(json.dumps(schema))


def _signed(part: Raw, sign: int) -> Raw:
    return part if sign > 0 else Raw(f"-(?:{part.text})")


def _negated(bound: tuple[Fraction, bool] | None) -> tuple[Fraction, bool] | None:
    return None if bound is None else (-bound[0], bound[1])


def _multiples(first: Fraction, last: Fraction, step: Fraction) -> list[Fraction]:
    count = math.ceil(first / step)
    return [step * n for n in range(count, math.floor(last / step) + 1)]


def _least_common_multiple(steps: Iterable[Fraction]) -> Fraction:
    found, *others = steps
    for other in others:
        numerator = math.lcm(found.numerator, other.numerator)
        found = Fraction(numerator, math.gcd(found.denominator, other.denominator))
    return found


def _remainders_of(step: Fraction) -> int:
    """Return how many remainders an automaton for the decimal multiples of a number tells apart."""
    while step.denominator != 1:
        step *= 10
    return int(str(step.numerator).rstrip("0"))


def _decimal(number: Fraction) -> str:
    """Return a number from 0 on in decimals, exactly, without a last zero."""
    places = 0
    while number.denominator != 1:
        number *= 10
        places += 1
    digits = str(number.numerator).rjust(places + 1, "0")
    return f"{digits[: len(digits) - places]}.{digits[len(digits) - places :]}".rstrip(".")


def _at_least(bound: Fraction, strict: bool) -> str:
    """Return the decimals from a bound on, which is not negative; or those above it."""
    whole, _, part = _decimal(bound).partition(".")
    greater = [f"[1-9][0-9]{{{len(whole)},}}"]
    greater += [
        f"{whole[:i]}[{chr(ord(digit) + 1)}-9][0-9]{{{len(whole) - i - 1}}}"
        for i, digit in enumerate(whole)
        if digit < "9"
    ]
    fractions = [
        f"{part[:i]}[{chr(ord(digit) + 1)}-9][0-9]*" for i, digit in enumerate(part) if digit < "9"
    ]
    fractions.append(f"{part}0*[1-9][0-9]*" if strict else f"{part}[0-9]*" if part else "[0-9]+")
    same = rf"{whole}\.(?:{'|'.join(fractions)})"
    if not part and not strict:
        same = f"{whole}(?:{same[len(whole) :]})?"
    return f"(?:{'|'.join(greater)}){_ANY_FRACTION}|{same}"


def _at_most(bound: Fraction, strict: bool) -> str:
    """Return the decimals up to a bound, which is not negative; or those below it."""
    whole, _, part = _decimal(bound).partition(".")
    less = [f"[1-9][0-9]{{0,{len(whole) - 2}}}"] if len(whole) > 1 else []
    less += ["0"] if whole != "0" else []
    for i, digit in enumerate(whole):
        first = "1" if i == 0 else "0"
        if digit > first and not (len(whole) == 1 and digit == "1"):
            below = f"[{first}-{chr(ord(digit) - 1)}]"
            less.append(f"{whole[:i]}{below}[0-9]{{{len(whole) - i - 1}}}")
    texts = [f"(?:{'|'.join(less)}){_ANY_FRACTION}"] if less else []
    if part:
        fractions = [
            f"{part[:i]}[0-{chr(ord(digit) - 1)}][0-9]*"
            for i, digit in enumerate(part)
            if digit > "0"
        ]
        fractions += [part[:i] for i in range(1, len(part))]
        fractions += [] if strict else [f"{part}0*"]
        texts.append(rf"{whole}(?:\.(?:{'|'.join(fractions)}))?")
    elif not strict:
        texts.append(rf"{whole}(?:\.0+)?")
    return "|".join(texts) or r"[^\s\S]"
