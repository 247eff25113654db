"""A grammar without what derives no text, so that no mask leads into it.

A rule is productive if one of its alternatives is, and an alternative if all that it needs is. A rule
that only goes on (``a: "x" a``) derives no finite text, and a mask would let its beginning pass: a
prefix of nothing. So what is not productive is left out here, which leaves the set of texts as it was.
Cf. Hopcroft, Motwani and Ullman, Introduction to Automata Theory, Languages, and Computation, 7.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from genrt.errors import InvalidConstraint
from genrt.structures.lark import (
    MOST_GROUPS,
    Grammar,
    NotLarkError,
    Part,
    Token,
    grammar_of,
    tokens_of,
)
from genrt.structures.matching import checked_pattern, matches_nothing

_NOTHING = r"/[^\s\S]/"
_MOST_PARTS = 200_000
_MOST_LEVELS = 1_000  # llguidance's stack overflows, which ends the process, at some 2,500
_NAMES = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|\b_?[A-Z][_A-Z0-9\-]*')
# A terminal without any of these matches something.
_MAY_BE_EMPTY = re.compile(r"\[\^|&|~|--|\\[PDSW]|\\p\{\^")


def productive(lark: str, *, inlined: Callable[[Any], str], names: Mapping[str, str]) -> str:
    """Return a grammar of the same texts in which everything that ``start`` leads to derives some text.

    Neither the longest match of terminals nor the conditions of parametric rules are considered. A text
    that is not Lark comes back as it is: llguidance's message says best where it is wrong.

    Args:
        inlined: makes the JSON text that takes the place of the schema after a ``%json``.
        names: the names of rules in messages, where they differ.

    Raises:
        InvalidConstraint: nothing derives from ``start``, or the grammar is too large.
    """
    try:
        tokens = list(tokens_of(lark))
        if len(tokens) > _MOST_PARTS:
            raise InvalidConstraint(
                f"the grammar has {len(tokens):,} parts, and {_MOST_PARTS:,} is the most: make it smaller"
            )
        for before, token in pairwise(tokens):
            _refuse_what_is_no_text(before, token)
        rules = _Rules(grammar_of(lark, tokens))
    except NotLarkError:
        return lark
    if not rules.derives("start"):
        dead = list(dict.fromkeys(repr(names.get(name, name)) for name in rules.dead))
        shown = ", ".join(dead[:4]) + (", …" if len(dead) > 4 else "")
        raise InvalidConstraint(
            f"the grammar derives no text: each alternative of {shown} leads back to such a rule, or "
            "needs what matches nothing; add one that ends"
        )
    edits = [(start, end, _NOTHING) for start, end in rules.dead_ends()]
    for token in tokens:
        if token.kind == "regex":
            checked_pattern(token.text, "grammar's regular expression")
        if token.text == "%json":
            # Keep the numbers of the lines after it, for messages.
            lines = "\n" * lark.count("\n", token.start, token.end)
            edits.append((token.start, token.end, f"%json{lines} {inlined(token.value)}"))
    parts, position = [], 0
    for start, end, part in sorted(edits):
        if start >= position:  # otherwise inside a part that is gone
            parts += [lark[position:start], part]
            position = end
    return "".join([*parts, lark[position:]])


def _refuse_what_is_no_text(before: Token, token: Token) -> None:
    if token.kind == "special" and token.text.startswith("<"):
        raise InvalidConstraint(
            f"the grammar names the special token {token.text}, and constraints are on text: "
            "write what stands for text as a string"
        )
    if token.text == "=" and before.text in ("stop", "max_tokens", "temperature"):
        raise InvalidConstraint(
            f"the grammar has the rule option {before.text}, which is not about the text: leave it out"
        )


class _Rules:
    """The rules that ``start`` leads to, and which of them derive something."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._empty: dict[str, bool] = {}
        self._nested: dict[int, _Rules] = {}
        self._reached = [x for x in self._in_order("start", self._named) if x in grammar.rules]
        for name in grammar.terminals:
            self._in_order(name, self._named_by_terminal)
        self._alive: set[str] = set()
        before = -1
        while before < len(self._alive):
            before = len(self._alive)
            # A rule comes after those that it needs, except in cycles: few rounds suffice.
            for name in self._reached:
                if name not in self._alive and self._passes(grammar.rules[name]):
                    self._alive.add(name)

    def _in_order(self, start: str, named: Callable[[str], Iterator[tuple[str, int]]]) -> list[str]:
        """Return all rules that a name leads to, each after those that it names, except in cycles.

        The search is depth first, as llguidance compiles: by recursion, on a stack that can overflow.
        """
        order: list[str] = []
        seen = {start}
        stack = [(start, 0, named(start))]
        while stack:
            name, depth, following = stack[-1]
            for after, levels in following:
                if after not in seen:
                    seen.add(after)
                    stack.append((after, depth + levels, named(after)))
                    break
            else:
                stack.pop()
                order.append(name)
            if depth > _MOST_LEVELS:
                raise InvalidConstraint(
                    f"the grammar is nested too deeply: {start!r} leads to {name!r} through more than "
                    f"{_MOST_LEVELS:,} rules and groups, each in the one before"
                )
        return order

    def _named(self, rule: str) -> Iterator[tuple[str, int]]:
        """Yield the rules that one names, and how many levels of groups deep."""
        if rule in self._grammar.rules:
            yield from self._named_in(self._grammar.rules[rule], 1)

    def _named_in(self, part: Part, level: int) -> Iterator[tuple[str, int]]:
        if part.kind == "rule" and part.name in self._grammar.rules:
            yield part.name, level
        for each in part.parts:
            yield from self._named_in(each, level + (each.kind == "any"))

    def _named_by_terminal(self, terminal: str) -> Iterator[tuple[str, int]]:
        """Yield the terminals that one names, or the source of one, and how many levels deep."""
        source = self._grammar.terminals.get(terminal, f":{terminal}").partition(":")[2]
        levels = 1 + min(source.count("("), MOST_GROUPS)
        for name in _NAMES.findall(source):
            if name in self._grammar.terminals:
                yield name, levels

    @property
    def dead(self) -> list[str]:
        """The rules that derive nothing, ``start`` first."""
        return [name for name in reversed(self._reached) if name not in self._alive]

    def derives(self, name: str) -> bool:
        """Tell whether some text derives from a rule; True for an unknown one, which does not compile."""
        return name in self._alive or name not in self._grammar.rules

    def dead_ends(self) -> Iterator[tuple[int, int]]:
        """Yield the places of parts that derive nothing, next to others that derive something."""
        for name in self._reached:
            if name in self._alive:
                yield from self._dead_in(self._grammar.rules[name])

    def _dead_in(self, part: Part) -> Iterator[tuple[int, int]]:
        if part.kind != "any" and not self._passes(part):
            yield part.start, part.end
        elif part.grammar is not None:
            yield from self._rules_in(part.grammar).dead_ends()
        else:
            for each in part.parts:
                yield from self._dead_in(each)

    def _passes(self, part: Part) -> bool:
        """Tell whether a part derives something, as far as is known."""
        if part.kind == "all":
            return all(each.optional or self._passes(each) for each in part.parts)
        if part.kind == "any":
            return any(map(self._passes, part.parts))
        if part.grammar is not None:
            return self._rules_in(part.grammar).derives("start")
        if part.kind == "terminal":
            return not self._is_empty(part.name)
        return part.kind == "text" or self.derives(part.name)

    def _rules_in(self, nested: Grammar) -> _Rules:
        rules = self._nested.get(id(nested))
        if rules is None:
            rules = self._nested[id(nested)] = _Rules(nested)
        return rules

    def _is_empty(self, terminal: str) -> bool:
        """Tell whether a terminal, or a regular expression, matches nothing."""
        if terminal not in self._empty:
            terminals = self._grammar.terminals
            needed = self._in_order(terminal, self._named_by_terminal)
            sources = [terminals[name] for name in needed if name in terminals]
            lark = ["start: _IT_", f"_IT_: {terminal}", *sources, *self._grammar.imports]
            may_be = any(map(_MAY_BE_EMPTY.search, [terminal, *sources]))
            self._empty[terminal] = may_be and matches_nothing("\n".join(lark))
        return self._empty[terminal]
