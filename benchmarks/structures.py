"""Do structures accept what they say? Drawn patterns against Python's ``re``, schemas against jsonschema.

    python -m benchmarks.structures --patterns 10000 --schemas 2000

It prints a table by construct and by keyword. ``agreed`` counts texts or values on which both say the
same, ``refused`` structures that genrt refuses by name, ``too wide`` and ``too narrow`` the others, which
are errors. Texts that masks lead to are drawn too, and have to be valid. Every
engine compiles a structure by ``genrt.structures``, so that one comparison stands for all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from genrt.errors import InvalidConstraint
from genrt.structures.guides import lark_of_regex, lark_of_schema
from genrt.structures.matching import brief, byte_matcher

COLUMNS = ("agreed", "refused", "too wide", "too narrow")


@dataclass
class Table:
    """Counts by what a structure contains, and the errors."""

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    drawn: int = 0
    compiled: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, names: set[str], column: str, error: str = "") -> None:
        for name in {"all", *names}:
            self.rows.setdefault(name, Counter())[column] += 1
        if column.startswith("too"):
            self.wrong.append(f"{column}: {error}")

    def __str__(self) -> str:
        head = f"{'':22}" + "".join(f"{column:>12}" for column in COLUMNS)
        lines = [f"{self.compiled:,} of {self.drawn:,} compile", head]
        lines += [
            f"{name:22}" + "".join(f"{self.rows[name][each]:12,}" for each in COLUMNS)
            for name in sorted(self.rows)
        ]
        return "\n".join([*lines, *self.wrong[:20]])


def accepts(matcher: Any, text: str) -> bool:
    """Return whether a matcher's structure has a text."""
    own = matcher.deep_copy()
    return all(own.consume_token(1 + byte) for byte in text.encode()) and own.is_accepting()


def walked(matcher: Any, random: Random, longest: int) -> str | None:
    """Return a text that masks lead to; ``None`` if it does not end in time.

    Raises:
        AssertionError: masks lead nowhere.
    """
    own, data = matcher.deep_copy(), b""
    closing = {1 + byte for byte in b'"}]0,:'}
    while len(data) < longest:
        if own.is_accepting() and random.random() < 0.3:
            break
        mask = np.unpackbits(np.frombuffer(own.compute_bitmask(), np.uint8), bitorder="little")
        following = [int(token) for token in np.flatnonzero(mask) if 0 < token < 257]
        if not following:
            if not own.is_accepting():
                raise AssertionError(f"{data!r} is the beginning of no text")
            break
        preferred = [token for token in following if token in closing]
        plain = [token for token in following if token < 128] or following
        token = random.choice(preferred if preferred and random.random() < 0.5 else plain)
        own.consume_token(token)
        data += bytes([token - 1])
    try:
        return data.decode() if own.is_accepting() else None
    except UnicodeDecodeError:
        return None


LETTERS = 'abAB01 _-.\n"\\/]é^$'
_SIGNS = r"""a b A 0 é _ - / " ] } . \d \w \s \D \W \S ^ $ \. \\ \" \/ \- \] \^ \$ \n \t \x41 \x41b
\u0061 [^ab] [ab] [a-c] [\^a] [a^] [a-] [-a] [\d_] [^\w] [\]] [a\-b] [.] (?:) () (?i:a) (?s:.) (?-i:a)
(?P<n>a)"""
_ODD = r"""\A \Z \z \b \B \1 \q \y \cA \Q \K \07 \x4 \u00 (?=a) (?!a) (?<=a) (?<!a) (?>a) (?#a) (?m:^a)
(?u) [[:alpha:]] [a&&b] [a--b] []a] [[a]] [z-a] [\d-a] [ ( ) { a{ a{2 a*+ a** a{2}{3} \\"""
ATOMS = [*_SIGNS.split(), " ", r"\ "]
ODD = [*_ODD.replace(r"\\", "\\").split()]
TIMES = ["", "", "", "", "?", "*", "+", "{2}", "{0,1}", "{1,}", "{,2}", "??", "*?", "{2}?"]
FLAGS = ["", "", "", "", "(?i)", "(?s)", "(?is)", "(?x)"]


def drawn_pattern(random: Random, depth: int = 2) -> tuple[str, set[str]]:
    """Return a pattern, and the constructs in it."""
    names: set[str] = set()

    def sequence(depth: int) -> str:
        parts = []
        for _ in range(random.randint(0 if depth < 2 else 1, 3)):
            kind = random.random()
            if kind < 0.25 and depth:
                opening = random.choice(["(", "(?:"])
                part = f"{opening}{options(depth - 1)})"
                names.add("group")
            elif kind < 0.29:
                part = random.choice(ODD)
                names.add(part)
            else:
                part = random.choice(ATOMS)
                names.add(kind_of(part))
            times = random.choice(TIMES)
            if times:
                names.add("repeated")
            parts.append(part + times)
        return "".join(parts)

    def options(depth: int) -> str:
        several = [sequence(depth) for _ in range(random.choice([1, 1, 1, 2, 3]))]
        if len(several) > 1:
            names.add("|")
        return "|".join(several)

    flags = random.choice(FLAGS)
    if flags:
        names.add(flags)
    return flags + options(depth), names


def kind_of(atom: str) -> str:
    if atom.startswith("["):
        return "class"
    if atom.startswith("\\"):
        return atom if atom[1] in "dwsDWS" else "escape"
    return atom if atom in (".", "^", "$") else "group" if atom.startswith("(") else "letter"


def check_patterns(count: int, seed: int, texts: int = 12) -> Table:
    """Compare drawn patterns with ``re.fullmatch``."""
    random, table = Random(seed), Table()
    for _ in range(count):
        pattern, names = drawn_pattern(random)
        table.drawn += 1
        try:
            matcher = byte_matcher(lark_of_regex(pattern))
        except InvalidConstraint:
            table.add(names, "refused")
            continue
        if matcher.is_error():
            table.add(names, "too narrow", f"{pattern!r}: {brief(matcher.get_error())}")
            continue
        table.compiled += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                oracle = re.compile(pattern)
        except (re.error, FutureWarning, DeprecationWarning) as error:
            table.add(names, "too wide", f"{pattern!r}: re refuses it: {error}")
            continue
        tried = [
            "",
            *("".join(random.choices(LETTERS, k=random.randint(1, 5))) for _ in range(texts)),
        ]
        try:
            tried += [text for _ in range(4) if (text := walked(matcher, random, 12)) is not None]
        except AssertionError as error:
            if not re.search(r"\[\^", lark_of_regex(pattern)):
                table.add(names, "too wide", f"{pattern!r}: {error}")
        for text in tried:
            ours, theirs = accepts(matcher, text), oracle.fullmatch(text) is not None
            column = "agreed" if ours == theirs else "too wide" if ours else "too narrow"
            table.add(names, column, f"{pattern!r} and {text!r}")
    return table


NAMES = ["a", "b", "ab", 'q"', "é"]
PATTERNS = ["^a", "b$", "^a$", "[ab]", "^[^a]*$", '"', r"\\", r"^\w+$", "a|^b", r"\d"]
SCALARS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    7,
    -1,
    0.5,
    2.5,
    "",
    "a",
    "b",
    "ab",
    "abc",
    'q"',
    "\\",
    "é",
    "1",
]
SCALARS += ["2024-02-29", "2023-02-29", "127.0.0.1", "01.1.1.1"]


class SchemaDraws:
    """Drawn schemas, with the keywords in each."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.keywords: set[str] = set()

    def schema(self, depth: int) -> Any:
        random = self.random
        if random.random() < 0.06:
            return random.choice([True, False])
        made: dict[str, Any] = {}
        if random.random() < 0.6:
            kinds = ["null", "boolean", "integer", "number", "string", "array", "object"]
            made["type"] = (
                random.choice(kinds) if random.random() < 0.8 else random.sample(kinds, 2)
            )
        choices = self._choices(depth)
        fit = [key for key in choices if self._fits(key, made.get("type"))] or [*choices]
        for key in random.sample(fit, min(len(fit), random.choice([0, 1, 1, 2, 2, 3]))):
            made |= choices[key]()
        self.keywords |= made.keys()
        return made

    def _fits(self, key: str, kind: Any) -> bool:
        kinds = {kind} if isinstance(kind, str) else {*(kind or ())}
        return not kinds or not OF.get(key, kinds).isdisjoint(kinds)

    def _choices(self, depth: int) -> dict[str, Callable[[], dict[str, Any]]]:
        random, few = self.random, self.random.randint
        inside = (lambda: self.schema(depth - 1)) if depth else (lambda: True)

        def some(least: int = 1) -> list[Any]:
            return [inside() for _ in range(few(least, 2))]

        def by_name(names: list[str]) -> dict[str, Any]:
            return {name: inside() for name in random.sample(names, few(1, 2))}

        def bound() -> float:
            return random.choice([-1, 0, 1, 2, 2.5, 7])

        choices: dict[str, Callable[[], dict[str, Any]]] = {
            "enum": lambda: {"enum": random.sample([*SCALARS, [1], {"a": 1}], few(1, 4))},
            "const": lambda: {"const": random.choice([*SCALARS, [1, "a"], {"a": 1, "b": "a"}])},
            "minimum": lambda: {"minimum": bound()},
            "maximum": lambda: {"maximum": bound()},
            "exclusiveMinimum": lambda: {"exclusiveMinimum": bound()},
            "exclusiveMaximum": lambda: {"exclusiveMaximum": bound()},
            "multipleOf": lambda: {"multipleOf": random.choice([1, 2, 0.5, 3])},
            "minLength": lambda: {"minLength": few(0, 3)},
            "maxLength": lambda: {"maxLength": few(0, 3)},
            "pattern": lambda: {"pattern": random.choice(PATTERNS)},
            "format": lambda: {"format": random.choice(["date", "ipv4"])},
            "minItems": lambda: {"minItems": few(0, 2)},
            "maxItems": lambda: {"maxItems": few(0, 3)},
            "uniqueItems": lambda: {"uniqueItems": True},
            "minProperties": lambda: {"minProperties": few(0, 2)},
            "maxProperties": lambda: {"maxProperties": few(0, 3)},
            "required": lambda: {"required": random.sample(NAMES, few(0, 2))},
            "dependentRequired": lambda: {
                "dependentRequired": {random.choice(NAMES): [random.choice(NAMES)]}
            },
        }
        if depth:
            choices |= {
                "items": lambda: {"items": inside()},
                "prefixItems": lambda: {"prefixItems": some()},
                "contains": lambda: {"contains": inside()},
                "minContains": lambda: {"contains": inside(), "minContains": few(0, 2)},
                "maxContains": lambda: {"contains": inside(), "maxContains": few(1, 2)},
                "properties": lambda: {"properties": by_name(NAMES)},
                "additionalProperties": lambda: {"additionalProperties": inside()},
                "patternProperties": lambda: {"patternProperties": by_name(PATTERNS)},
                "propertyNames": lambda: {"propertyNames": inside()},
                "dependentSchemas": lambda: {"dependentSchemas": by_name(NAMES)},
                "allOf": lambda: {"allOf": some()},
                "anyOf": lambda: {"anyOf": some()},
                "oneOf": lambda: {"oneOf": some()},
                "not": lambda: {"not": inside()},
                "if": lambda: {"if": inside(), "then": inside(), "else": inside()},
                "$ref": lambda: {"$ref": "#/$defs/d"},
            }
        return choices


KEYWORDS = {
    "integer number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
    "string": "minLength maxLength pattern format",
    "array": "minItems maxItems uniqueItems items prefixItems contains minContains maxContains",
    "object": "minProperties maxProperties required dependentRequired properties additionalProperties "
    "patternProperties propertyNames dependentSchemas",
}
OF = {key: {*kinds.split()} for kinds, keys in KEYWORDS.items() for key in keys.split()}


def drawn_schema(random: Random) -> tuple[Any, set[str]]:
    """Return a schema, and its keywords."""
    draws = SchemaDraws(random)
    schema = draws.schema(2)
    if isinstance(schema, dict) and "$ref" in draws.keywords:
        schema = {"$defs": {"d": draws.schema(1)}, **schema}
    return schema, draws.keywords


def drawn_value(random: Random, depth: int = 2) -> Any:
    kind = random.random()
    if depth and kind < 0.3:
        return [drawn_value(random, depth - 1) for _ in range(random.randint(0, 3))]
    if depth and kind < 0.65:
        return {
            name: drawn_value(random, depth - 1)
            for name in random.sample(NAMES, random.randint(0, 3))
        }
    return random.choice(SCALARS)


def spellings(value: Any, most: int = 60) -> Iterator[str]:
    """Yield the JSON texts of a value, in the orders of its properties."""

    def orders(value: Any) -> Iterator[Any]:
        if isinstance(value, list):
            for each in itertools.product(
                *(list(itertools.islice(orders(item), 6)) for item in value)
            ):
                yield [*each]
        elif isinstance(value, dict):
            for names in itertools.permutations(value):
                inside = (list(itertools.islice(orders(value[name]), 6)) for name in names)
                for each in itertools.product(*inside):
                    yield dict(zip(names, each, strict=True))
        else:
            yield value

    for each in itertools.islice(orders(value), most):
        yield json.dumps(each, ensure_ascii=False)


def is_left_out(schema: Any, value: Any) -> bool:
    """Return whether a valid value may be missing, as docs/guide/structures.md says: a negative multiple,
    or a letter that ``\\w`` matches in some languages alone."""
    said, text = json.dumps(schema), json.dumps(value, ensure_ascii=False)
    return ("multipleOf" in said and "-" in text) or ("\\w" in said and not text.isascii())


IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
"""The keywords whose schemas are about the same value; and ``dependentSchemas``."""


def is_endless(schema: Any) -> bool:
    """Return whether a drawn schema's definition refers to itself in place. jsonschema may recurse
    without end over such a schema, and its error inside of a comparison ends the process."""
    left = [schema["$defs"]["d"]] if isinstance(schema, dict) and "$defs" in schema else []
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if "$ref" in each:
                return True
            for inside in (each[key] for key in IN_PLACE if key in each):
                left += inside if isinstance(inside, list) else [inside]
            left += each.get("dependentSchemas", {}).values()
    return False


def check_schemas(count: int, seed: int, values: int = 25) -> Table:
    """Compare drawn schemas with jsonschema."""
    import jsonschema

    random, table = Random(seed), Table()
    checker = jsonschema.FormatChecker(["date", "ipv4"])
    for _ in range(count):
        schema, names = drawn_schema(random)
        if is_endless(schema):
            continue
        oracle = jsonschema.Draft202012Validator(schema, format_checker=checker)
        table.drawn += 1
        matcher = None
        try:
            made = byte_matcher(lark_of_schema(schema, "spaced"))
            problem = brief(made.get_error())
            matcher = None if problem else made
        except InvalidConstraint as error:
            problem = str(error)
        if problem and not re.search("allows no value|is false", problem):
            table.add(names, "refused")
            continue
        table.compiled += 1
        for value in (drawn_value(random) for _ in range(values)):
            theirs = oracle.is_valid(value)
            ours = matcher is not None and any(accepts(matcher, text) for text in spellings(value))
            if ours == theirs or (theirs and is_left_out(schema, value)):
                table.add(names, "agreed")
            else:
                table.add(names, "too wide" if ours else "too narrow", f"{schema} and {value!r}")
        for _ in range(3 if matcher is not None else 0):
            try:
                text = walked(matcher, random, 60)
            except AssertionError as error:
                table.add(names, "too wide", f"{schema}: {error}")
                continue
            if text is not None:
                is_valid = oracle.is_valid(json.loads(text))
                table.add(names, "agreed" if is_valid else "too wide", f"{schema} and {text}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--patterns", type=int, default=10_000)
    parser.add_argument("--schemas", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few of each")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.patterns, arguments.schemas = 300, 100
    tables = {
        "patterns": check_patterns(arguments.patterns, arguments.seed),
        "schemas": check_schemas(arguments.schemas, arguments.seed),
    }
    for name, table in tables.items():
        print(f"{name}: {table}\n")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({name: table.rows for name, table in tables.items()}, indent=1)
        )


if __name__ == "__main__":
    main()
