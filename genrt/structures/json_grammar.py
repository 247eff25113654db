"""A JSON schema as a grammar in llguidance's Lark, with one rule for each place in a value.

Every text of the grammar is the JSON text of a valid value. Strings are spelt in one way: escapes
only where JSON requires them. Rules without a finite text are removed, and the rules that need them,
so that masks lead only to prefixes of valid texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias

from genrt.errors import InvalidConstraint
from genrt.structures.grammars import check_rule_depth, productive_rules
from genrt.structures.regexes import (
    Both,
    Node,
    Not,
    OneOf,
    Raw,
    Seq,
    Terminals,
    in_json,
    intersection,
    literal,
)
from genrt.structures.schemas import (
    ANYTHING,
    KINDS,
    NOTHING,
    Arrays,
    Claims,
    Document,
    Literals,
    Numbers,
    Objects,
    Place,
    Strings,
    is_nothing,
    object_of,
    undone,
)

Whitespace: TypeAlias = Literal["compact", "spaced", "flexible"]
"""The spaces between the parts of a JSON text: none, those of ``json.dumps``, or any."""

MOST_STATES = 20_000
MOST_CLASSES = 200
MOST_UNIQUE = 8

_BLANKS = r"[\x{20}\n\r\t]*"


@dataclass(frozen=True, slots=True)
class _Repeat:
    """Symbols that come from ``low`` to ``high`` times."""

    symbols: tuple[_Symbol, ...]
    low: int
    high: int | None


_Symbol: TypeAlias = str | _Repeat
_Option: TypeAlias = tuple[_Symbol, ...]


def schema_rules(
    schema: object, whitespace: Whitespace, *, closed: bool = False, prefix: str = "j"
) -> list[str]:
    """Return the lines of a grammar of the JSON texts that are valid under a schema.

    Args:
        whitespace: see ``Whitespace``; llguidance's options under ``x-guidance`` go before it.
        closed: whether objects have only named properties, unless a schema describes other properties.
        prefix: the prefix of the names of rules, in lower case; the first line defines the rule
            ``prefix``.

    Raises:
        InvalidConstraint: the schema is wrong, too large, cannot be compiled, or allows no value.
    """
    root = object_of(schema)
    try:
        compiler = _Compiler(Document(root), _signs(root, whitespace), prefix, closed=closed)
        return compiler.lines(root)
    except RecursionError as error:
        raise InvalidConstraint("the JSON schema is nested too deeply: make it flatter") from error


def _signs(root: dict[str, Any], whitespace: Whitespace) -> dict[str, Node]:
    """Return the regular expressions of the signs between values."""
    own = root.pop("x-guidance", {})
    known = {"whitespace_flexible", "item_separator", "key_separator"}
    if not isinstance(own, dict) or not own.keys() <= known:
        raise InvalidConstraint(
            f'the schema\'s "x-guidance" is {own!r}: give an object of {", ".join(sorted(known))}'
        )
    if own.get("whitespace_flexible", whitespace == "flexible"):
        around = {
            "[": "{}{}",
            "]": "{1}{0}",
            "{": "{}{}",
            "}": "{1}{0}",
            ",": "{1}{0}{1}",
            ":": "{1}{0}{1}",
        }
        code = {sign: f"\\x{{{ord(sign):X}}}" for sign in around}
        return {sign: Raw(form.format(code[sign], _BLANKS)) for sign, form in around.items()}
    space = " " if whitespace == "spaced" else ""
    given = {
        ",": own.get("item_separator", f",{space}"),
        ":": own.get("key_separator", f":{space}"),
    }
    for sign, written in given.items():
        if not isinstance(written, str) or written.strip(" \t\r\n") != sign:
            raise InvalidConstraint(
                f"the schema's separator is {written!r}: give {sign!r} and white space"
            )
    return {sign: literal(given.get(sign, sign)) for sign in "[]{},:"}


class _Compiler:
    """The rules of one schema, made place by place."""

    def __init__(
        self, document: Document, signs: dict[str, Node], prefix: str, *, closed: bool
    ) -> None:
        self._claims = Claims(document)
        self._prefix = prefix
        self._closed = closed
        self._terminals = Terminals(f"{prefix.upper()}_")
        self._sign = {sign: self._terminals.name(node) for sign, node in signs.items()}
        self._rules: dict[str, list[_Option]] = {}
        self._places: dict[Place, str] = {}
        self._left: list[Place] = []
        self._never: set[str] = set()  # terminals without a match

    def lines(self, root: Any) -> list[str]:
        start = self._place(self._claims.place(root))
        while self._left:
            place = self._left.pop()
            self._rules[self._places[place]] = [
                option
                for kind in KINDS
                for facts in self._claims.cases(place, kind)
                for option in self._options(facts)
            ]
        alive = productive_rules(
            self._rules,
            lambda name, found: any(
                self._kept(each, found) is not None for each in self._rules[name]
            ),
        )
        if start not in alive:
            raise InvalidConstraint(
                "the JSON schema allows no value: none satisfies it, or only such as contain one more "
                "without end; change it"
            )
        kept = {
            name: list(
                dict.fromkeys(
                    kept for option in options if (kept := self._kept(option, alive)) is not None
                )
            )
            for name, options in self._rules.items()
            if name in alive
        }
        check_rule_depth(start, lambda name: _flat(kept.get(name, ())), "JSON schema")
        lines = [f"{self._prefix}: {start}"]
        lines += [
            f"{name}: {' | '.join(map(_option_text, options))}" for name, options in kept.items()
        ]
        return lines + self._terminals.lines(
            {each for used in kept.values() for each in _flat(used)}
        )

    def _kept(self, option: _Option, alive: Collection[str]) -> _Option | None:
        """Return an option without its optional dead parts, or ``None`` if it needs a dead part."""
        kept: list[_Symbol] = []
        for symbol in option:
            if isinstance(symbol, _Repeat):
                inside = self._kept(symbol.symbols, alive)
                if inside is not None:
                    kept.append(_Repeat(inside, symbol.low, symbol.high))
                elif symbol.low:
                    return None
            elif symbol in self._never or (symbol in self._rules and symbol not in alive):
                return None
            else:
                kept.append(symbol)
        return tuple(kept)

    def _checked(self, node: Node) -> str:
        """Return the terminal of a node, and note whether it has no match."""
        name = self._terminals.name(node)
        if self._terminals.may_be_empty(name) and is_nothing(node):
            self._never.add(name)
        return name

    def _rule(self, options: Iterable[_Option] = ()) -> str:
        name = f"{self._prefix}_{len(self._rules)}"
        self._rules[name] = [*options]
        return name

    def _place(self, place: Place) -> str:
        """Return the rule of a place."""
        name = self._places.get(place)
        if name is None:
            name = self._places[place] = self._rule()
            if place >= NOTHING:
                return name
            self._left.append(place)
        return name

    def _options(self, facts: Any) -> Iterable[_Option]:
        match facts:
            case Literals(texts):
                return [(self._terminals.name(literal(text)),) for text in sorted(texts)]
            case Strings():
                return [(self._string(facts.node()),)]
            case Numbers():
                nodes, schemas = facts.forms()
                return [
                    *((self._checked(node),) for node in nodes),
                    *((f"%json {schema}",) for schema in schemas),
                ]
            case Arrays():
                between = [self._sign["["], "\0", self._sign["]"]]
                bodies = self._array(facts)
            case _:
                between = [self._sign["{"], "\0", self._sign["}"]]
                bodies = self._object(facts)
        return [(between[0], *body, between[2]) for body in bodies]

    def _string(self, node: Node) -> str:
        quote = literal('"')
        return self._checked(Seq((quote, in_json(node), quote)))

    def _array(self, arrays: Arrays) -> Iterable[_Option]:
        low, high = arrays.low, arrays.high
        if arrays.are_unique and (high is None or high > 1):
            return self._unique(arrays)
        if arrays.contained:
            return self._counted_array(arrays)
        comma, first = self._sign[","], arrays.named
        if high is not None:
            first = min(first, high)
        items = [self._place(arrays.place(index)) for index in range(first)]
        rest = self._place(arrays.place(first))
        bodies: list[_Option] = [()] if low == 0 else []
        if first > low or (first == low and first):
            bodies.append((self._beginnings(items, max(low, 1)),))
        if high is not None and high <= first:
            return bodies
        more = None if high is None else high - first
        least = max(low - first, 1)
        if items:
            whole = self._rule([_with_commas(items, comma)])
            bodies.append((whole, _Repeat((comma, rest), least, more)))
        else:
            bodies.append(
                (rest, _Repeat((comma, rest), least - 1, None if more is None else more - 1))
            )
        return bodies

    def _beginnings(self, items: Sequence[str], low: int) -> str:
        """Return the rule of the first ``low`` items or more."""
        comma = self._sign[","]
        if len(items) == 1:
            return items[0]
        middle = len(items) // 2
        start, end = items[:middle], items[middle:]
        whole = self._rule([_with_commas(start, comma)])
        options: list[_Option] = []
        if low <= middle:
            options.append((self._beginnings(start, low),))
        options.append((whole, comma, self._beginnings(end, max(low - middle, 1))))
        return self._rule(options)

    def _machine(self, start: Any, options: Callable[[Any, Callable[[Any], str]], Any]) -> str:
        """Return the rule of a state. ``options`` returns the options of a state's rule, which it may
        make of the rules of other states."""
        rules: dict[Any, str] = {}
        left: list[Any] = []

        def rule(state: Any) -> str:
            if state not in rules:
                rules[state] = self._rule()
                left.append(state)
            return rules[state]

        begun = rule(start)
        while left:
            state = left.pop()
            self._rules[rules[state]] = [*options(state, rule)]
        return begun

    def _counted_array(self, arrays: Arrays) -> Iterable[_Option]:
        """Return arrays with counted items, by a rule for each length and counts."""
        contained, most = arrays.contained, arrays.high
        last = max([arrays.named, arrays.low, most or 0, *(each[1] for each in contained)])
        tops = [low if high is None else high + 1 for _, _, low, high in contained]
        if (last + 1) * math.prod(top + 1 for top in tops) > MOST_STATES or len(contained) > 4:
            raise undone("contains that counts too far")
        comma = self._sign[","]

        def is_end(length: int, counts: tuple[int, ...]) -> bool:
            return length >= arrays.low and all(
                count >= low for count, (_, _, low, _) in zip(counts, contained, strict=True)
            )

        def steps(length: int, counts: tuple[int, ...]) -> Iterable[tuple[Place, tuple[int, ...]]]:
            """Return the places that the next item may have, each with the counts after it."""
            found = [(arrays.place(length), counts)]
            for index, (place, start, _, high) in enumerate(contained):
                if length < start:
                    continue
                counted = [
                    (
                        said | place,
                        (*now[:index], min(now[index] + 1, tops[index]), *now[index + 1 :]),
                    )
                    for said, now in found
                    if high is None or now[index] < high
                ]
                if high is not None:  # an item that is not counted must fail
                    found = [(said | self._negated(place), now) for said, now in found]
                found = [*counted, *found]
            return found

        def options(state: tuple[int, tuple[int, ...]], rule: Callable[[Any], str]) -> Any:
            length, counts = state
            after = min(length + 1, last + (most is None))
            for place, now in steps(length, counts) if most is None or length < most else ():
                item = self._place(place)
                if is_end(length + 1, now):
                    yield (item,)
                if most is None or length + 1 < most:
                    yield item, comma, rule((after, now))

        zero = (0,) * len(contained)
        empty: list[_Option] = [()] if is_end(0, zero) else []
        return [*empty, (self._machine((0, zero), options),)]

    def _negated(self, place: Place) -> Place:
        """Return the complement of a place with a single claim."""
        if place in (ANYTHING, NOTHING):
            return NOTHING if place == ANYTHING else ANYTHING
        [(number, holds)] = place
        return frozenset({(number, not holds)})

    def _unique(self, arrays: Arrays) -> Iterable[_Option]:
        if arrays.contained or arrays.named:
            raise undone("'uniqueItems' beside contains or prefixItems")
        values = self._finite(arrays.place(0))
        if values is None or len(values) > MOST_UNIQUE:
            raise undone(f"'uniqueItems' of items that are not {MOST_UNIQUE} listed values at most")
        comma = self._sign[","]

        def options(used: frozenset[str], rule: Callable[[Any], str]) -> Any:
            """Return the values after these, in any order."""
            if len(used) >= arrays.low:
                yield ()
            if arrays.high is None or len(used) < arrays.high:
                for value in values:
                    if value not in used:
                        yield *(comma,) * bool(used), value, rule(used | {value})

        return [(self._machine(frozenset(), options),)]

    def _finite(self, place: Place) -> list[str] | None:
        """Return the terminals of all values of a place, each once, if the place lists its values."""
        found: dict[str, None] = {}
        for kind in KINDS:
            for facts in self._claims.cases(place, kind):
                match facts:
                    case Literals():
                        nodes: list[Node] | None = [literal(text) for text in sorted(facts.texts)]
                    case Strings(listed, regexes) if listed is not None:
                        quote = literal('"')
                        kept = [
                            text
                            for text in listed
                            if not (regexes and is_nothing(Both((literal(text), *regexes))))
                        ]
                        nodes = [Seq((quote, in_json(literal(text)), quote)) for text in kept]
                    case Numbers():
                        few = facts.finite()
                        nodes = None if few is None else [*map(literal, few)]
                    case _:
                        nodes = None
                if nodes is None:
                    return None
                found |= dict.fromkeys(map(self._terminals.name, nodes))
        return [*found]

    def _object(self, objects: Objects) -> Iterable[_Option]:
        comma, colon = self._sign[","], self._sign[":"]
        named = dict.fromkeys(name for each in objects.names for name, _ in each.properties)
        required = {*objects.required}
        is_closed = (
            self._closed
            and any(each.properties for each in objects.names)
            and all(each.others is None and not each.patterns for each in objects.names)
            and named.keys() >= required
        )
        pairs: list[tuple[_Symbol, bool]] = []
        for name in dict.fromkeys((*named, *objects.required)):
            place = self._claims.of_name(objects, name)
            if not place >= NOTHING:
                pairs.append((self._pair(literal(name), place, colon), name in required))
            elif name in required:
                return []
        extras = [] if is_closed else self._extras(objects, [*named, *objects.required], colon)
        if objects.low > len(required) or objects.high is not None:
            return self._counted_object(objects, pairs, extras)
        bodies: list[_Option] = [] if required else [()]
        more: _Option = ()
        if extras:
            extra = self._rule([(each,) for each in extras])
            more = (_Repeat((comma, extra), 0, None),)
            bodies += [] if required else [(extra, *more)]
        if pairs:
            bodies.append((self._some(pairs), *more))
        return bodies

    def _pair(self, name: Node, place: Place, colon: str) -> str:
        value = self._place(place)
        return self._rule([(self._string(name), colon, value)])

    def _some(self, pairs: Sequence[tuple[_Symbol, bool]]) -> str:
        """Return the rule of a subset of these pairs, in order, with all required pairs.

        It is made of halves, so that its depth is the logarithm of their number.
        """
        if len(pairs) == 1:
            return str(pairs[0][0])
        start, end = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        options: list[_Option] = [(self._some(start), self._after(end))]
        if not any(is_required for _, is_required in start):
            options.append((self._some(end),))
        return self._rule(options)

    def _after(self, pairs: Sequence[tuple[_Symbol, bool]]) -> str:
        """Return the rule of these pairs, each after a comma."""
        if len(pairs) <= 16:
            comma = self._sign[","]
            return self._rule(
                [tuple(_Repeat((comma, pair), int(is_required), 1) for pair, is_required in pairs)]
            )
        middle = len(pairs) // 2
        return self._rule([(self._after(pairs[:middle]), self._after(pairs[middle:]))])

    def _counted_object(
        self, objects: Objects, pairs: list[tuple[_Symbol, bool]], extras: list[str]
    ) -> Iterable[_Option]:
        """Return objects of a number of properties, by a rule for each pair and count."""
        needed = sum(is_required for _, is_required in pairs)
        if extras and objects.low > needed + 1:
            # A name that is not spelt out may come twice.
            raise undone(f"minProperties {objects.low} and requires {needed} by name")
        comma = self._sign[","]
        top = max(objects.low, 0 if objects.high is None else objects.high + 1)
        if (len(pairs) + 1) * min(len(pairs) + 1, top + 1) > MOST_STATES or len(pairs) > 300:
            raise undone("minProperties or maxProperties of very many properties")
        extra = self._rule([(each,) for each in extras]) if extras else None
        high = objects.high

        def options(state: tuple[int, int], rule: Callable[[Any], str]) -> Any:
            """Return the rest of an object after some of the pairs and so many properties."""
            place, count = state
            lead = (comma,) * (count > 0)
            most = None if high is None else high - count
            if place < len(pairs):
                pair, is_required = pairs[place]
                if not is_required:
                    yield (rule((place + 1, count)),)
                if most != 0:
                    yield *lead, pair, rule((place + 1, min(count + 1, top)))
            else:
                if count >= objects.low:
                    yield ()
                if extra is not None and most != 0 and count + 1 >= objects.low:
                    rest = None if most is None else most - 1
                    yield *lead, extra, _Repeat((comma, extra), 0, rest)

        return [(self._machine((0, 0), options),)]

    def _extras(self, objects: Objects, named: list[str], colon: str) -> list[str]:
        """Return the pairs of other names, one for each set of patterns that a name can match."""
        regexes: list[Node] = []
        if named:
            regexes.append(Not(OneOf(tuple(map(literal, dict.fromkeys(named))))))
        for allowed in objects.allowed:
            strings = tuple(each.node() for each in self._claims.cases(allowed, "string"))
            regexes.append(strings[0] if len(strings) == 1 else OneOf(strings))
        patterns = dict.fromkeys(pattern for each in objects.names for pattern, _ in each.patterns)
        classes: list[tuple[tuple[Node, ...], frozenset[str]]] = [(tuple(regexes), frozenset())]
        for pattern in patterns:
            narrow, wide = self._claims.pattern(pattern)
            split = []
            for nodes, matched in classes:
                if any(is_nothing(Both((self._claims.pattern(each)[0], wide))) for each in matched):
                    split.append((nodes, matched))  # no name of this class matches
                    continue
                for more, now in ((narrow, matched | {pattern}), (Not(wide), matched)):
                    if not is_nothing(intersection((*nodes, more))):
                        split.append(((*nodes, more), now))
            classes = split
            if len(classes) > MOST_CLASSES:
                raise undone("patternProperties that overlap in too many ways")
        pairs = []
        for nodes, matched in classes:
            place = objects.place(matched, matched)
            if not place >= NOTHING:
                pairs.append(self._pair(intersection(nodes), place, colon))
        return pairs


def _with_commas(items: Sequence[_Symbol], comma: str) -> _Option:
    return tuple(symbol for item in items for symbol in (comma, item))[1:]


def _flat(options: Iterable[_Option]) -> Iterable[str]:
    for symbol in chain.from_iterable(options):
        if isinstance(symbol, _Repeat):
            yield from _flat([symbol.symbols])
        else:
            yield symbol


def _option_text(option: _Option) -> str:
    return " ".join(map(_symbol_text, option)) or '""'


def _symbol_text(symbol: _Symbol) -> str:
    if isinstance(symbol, str):
        return symbol
    inside = _option_text(symbol.symbols)
    low, high = symbol.low, symbol.high
    if high == 0:
        return '""'
    end = "" if high is None else high
    signs = {(0, 1): "?", (0, None): "*", (1, None): "+", (1, 1): ""}
    return f"({inside}){signs.get((low, high), f'{{{low},{end}}}')}"
