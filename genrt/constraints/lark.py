"""llguidance's dialect of Lark, parsed just far enough to see which rules need which."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

# llguidance's lexer, which takes the longest match: a comment before a regex, a rule before an operator.
_PARTS = re.compile(
    r"""(?P<space>[ \t]+|(?:\#|//)[^\n]*)
    |(?P<newline>(?:\r?\n)+[ \t]*)
    |(?P<string>"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4})|[^"\\\x00-\x1F\x7F])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<special><[^<>\s]+>|@[a-zA-Z0-9_\-]+)
    |(?P<json>%(?:json|regex|llguidance))
    |(?P<keyword>%[a-z]+)
    |(?P<rule>!?[_?]?[a-z][_a-z0-9\-]*)
    |(?P<terminal>_?[A-Z][_A-Z0-9\-]*)
    |(?P<number>0[xX][0-9a-fA-F]+|[+-]?[0-9]+(?:\.(?!\.)[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    |(?P<sign>->|::|\.\.|[:,.(){}\[\]~|&=_+*?])""",
    re.VERBOSE,
)

MOST_GROUPS = 30
"""How deeply groups may be nested in llguidance's Lark."""


class NotLarkError(Exception):
    """A text that llguidance would not read either; its own message says best where it is wrong."""


@dataclass(frozen=True, slots=True)
class Token:
    """A part of the text; ``value`` is the JSON after ``%json`` and its like."""

    kind: str
    text: str
    start: int
    end: int
    value: Any = None


def tokens_of(lark: str) -> list[Token]:
    """Return the tokens of a text, without spaces and comments. Raises NotLarkError where there is no
    token."""
    return [token for token in _tokens(lark) if token.kind != "space"]


def _tokens(lark: str) -> Iterator[Token]:
    decoder, position = json.JSONDecoder(), 0
    while position < len(lark):
        match = _PARTS.match(lark, position)
        if match is None:
            raise NotLarkError
        kind, value, start = str(match.lastgroup), None, position
        position = match.end()
        if kind == "json":
            while lark[position : position + 1].isspace():
                position += 1
            try:
                value, position = decoder.raw_decode(lark, position)
            except (ValueError, RecursionError) as error:
                raise NotLarkError from error
        yield Token(kind, match[0], start, position, value)


@dataclass(frozen=True, slots=True)
class Item:
    """A part of an alternative, without the sign that says how often it comes.

    Attributes:
        optional: whether it may be left out.
        inside: the alternatives of a group, or a nested grammar.
        rule: the name, if it is a rule's.
        terminal: the source, if it is a terminal that could match nothing.
    """

    start: int
    end: int
    optional: bool = False
    inside: Options | Grammar | None = None
    rule: str = ""
    terminal: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """An alternative: all of its items, from the first to the last."""

    start: int
    end: int
    items: tuple[Item, ...]


Options: TypeAlias = tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """Rules by name, the source of each terminal by name, and the sources of all imports."""

    rules: dict[str, Options]
    terminals: dict[str, str]
    imports: tuple[str, ...]


def grammar_of(lark: str, tokens: Sequence[Token]) -> Grammar:
    """Return the grammar that the tokens of a text define. Raises NotLarkError if they don't parse."""
    return _Reader(lark, tokens).grammar()


class _Reader:
    """A recursive descent through the tokens."""

    def __init__(self, lark: str, tokens: Sequence[Token]) -> None:
        self._lark = lark
        self._tokens = tokens
        self._position = 0
        self._depth = 0

    def grammar(self) -> Grammar:
        rules: dict[str, Options] = {}
        terminals: dict[str, str] = {}
        imports: list[str] = []
        while (token := self._take()) is not None:
            if token.kind in ("rule", "terminal"):
                self._skip_to(":")
                options = self._options()
                if token.kind == "rule":
                    rules[token.text.removeprefix("!").removeprefix("?")] = options
                else:
                    terminals[token.text] = self._source(token.start)
            elif token.text == "%ignore":
                self._options()
            elif token.text == "%import":
                while self._kind() not in ("newline", ""):
                    self._take()
                imports.append(self._source(token.start))
            elif token.kind != "newline" and token.text != "%llguidance":
                raise NotLarkError
        return Grammar(rules, terminals, tuple(imports))

    def _kind(self, ahead: int = 0) -> str:
        index = self._position + ahead
        return self._tokens[index].kind if index < len(self._tokens) else ""

    def _sign(self, ahead: int = 0) -> str:
        """Return the text of a coming sign or keyword; ``""`` for another token."""
        if self._kind(ahead) not in ("sign", "keyword"):
            return ""
        return self._tokens[self._position + ahead].text

    def _take(self) -> Token | None:
        self._position += 1
        return self._tokens[self._position - 1] if self._position <= len(self._tokens) else None

    def _took(self, sign: str) -> bool:
        taken = self._sign() == sign
        self._position += taken
        return taken

    def _skip_to(self, sign: str) -> None:
        """Take all tokens up to a sign: a rule's parameters and attributes, the content of
        parentheses."""
        while not self._took(sign):
            token = self._take()
            if token is None or token.kind == "newline":
                raise NotLarkError

    def _source(self, start: int) -> str:
        return self._lark[start : self._tokens[self._position - 1].end]

    def _options(self) -> Options:
        self._depth += 1
        if self._depth > MOST_GROUPS:
            raise NotLarkError
        options = [self._option()]
        while self._took_bar():
            options.append(self._option())
        self._depth -= 1
        return tuple(options)

    def _took_bar(self) -> bool:
        if self._kind() == "newline" and self._sign(ahead=1) == "|":
            self._position += 1
        return self._took("|")

    def _option(self) -> Option:
        first, items, is_terminal = self._position, [], False
        while self._kind() not in ("newline", ""):
            if self._sign() in ("|", "->", ")", "]", "}", "%if"):
                break
            if self._took("&"):
                is_terminal = True
            else:
                items.append(self._item())
        start = self._tokens[first].start if items else 0
        end = self._tokens[self._position - 1].end if items else 0
        if is_terminal:
            items = [Item(start, end, terminal=self._lark[start:end])]
        if self._took("->"):
            self._take()
        if self._took("%if"):
            self._condition()
        return Option(start, end, tuple(items))

    def _condition(self) -> None:
        self._take()
        depth = 0
        while self._sign() == "(" or (depth and self._kind() not in ("newline", "")):
            depth += (self._sign() == "(") - (self._sign() == ")")
            self._take()

    def _item(self) -> Item:
        start = self._tokens[self._position].start
        if self._took("~"):
            self._item()
            source = self._source(start)
            return Item(start, start + len(source), terminal=source)
        item = self._atom()
        return replace(item, optional=item.optional or self._is_optional())

    def _is_optional(self) -> bool:
        """Take the sign that says how often an item comes, and tell whether that may be never."""
        if self._sign() in ("?", "*", "+"):
            token = self._take()
            return token is not None and token.text != "+"
        if self._sign() == "~" and self._kind(ahead=1) == "number":
            low = self._tokens[self._position + 1].text
            self._position += 2
            if self._took(".."):
                self._take()
            return low.lstrip("+0") == ""
        if self._sign() == "{":
            low = self._tokens[self._position + 1].text if self._kind(ahead=1) == "number" else ""
            self._skip_to("}")
            return low.lstrip("+0") == ""
        return False

    def _atom(self) -> Item:
        first = self._position
        token = self._take()
        if token is None:
            raise NotLarkError
        inside: Options | Grammar | None = None
        rule = terminal = ""
        if token.text in ("(", "[") and token.kind == "sign":
            inside = self._options()
            if not self._took(")" if token.text == "(" else "]"):
                raise NotLarkError
        elif token.text == "%lark":
            inside = self._nested()
        elif token.kind == "regex":
            terminal = token.text
        elif token.kind in ("rule", "terminal"):
            rule, terminal = (token.text, "") if token.kind == "rule" else ("", token.text)
            if self._took("::"):
                self._take()
                if self._sign() == "(":
                    self._skip_to(")")
        elif token.kind == "string":
            if self._took(".."):
                self._take()
        elif token.kind != "special" and token.text not in ("%json", "%regex"):
            raise NotLarkError
        end = self._tokens[self._position - 1].end
        return Item(token.start, end, self._tokens[first].text == "[", inside, rule, terminal)

    def _nested(self) -> Grammar:
        first = self._position + 1
        if not self._took("{"):
            raise NotLarkError
        depth = 1
        while depth:
            depth += (self._sign() == "{") - (self._sign() == "}")
            if self._take() is None:
                raise NotLarkError
        return grammar_of(self._lark, self._tokens[first : self._position - 1])
