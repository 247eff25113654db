"""llguidance's dialect of Lark, parsed just far enough to see which rules need which."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

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


def tokens_of(lark: str) -> Iterator[Token]:
    """Yield the tokens of a text, without spaces and comments. Raises NotLarkError where none fits."""
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
        if kind != "space":
            yield Token(kind, match[0], start, position, value)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a rule, without the sign that says how often it comes.

    Attributes:
        kind: what has to derive a text for the part to do so: all of its ``parts``, any of them, a rule
            or a terminal, a nested grammar; or nothing, in a ``text``.
        optional: whether it may be left out.
        name: a rule's name, or a terminal's source.
    """

    kind: Literal["all", "any", "rule", "terminal", "grammar", "text"]
    start: int
    end: int
    optional: bool = False
    name: str = ""
    parts: tuple[Part, ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """Rules by name, the source of each terminal by name, and the sources of all imports."""

    rules: dict[str, Part]
    terminals: dict[str, str]
    imports: list[str]


def grammar_of(lark: str, tokens: Sequence[Token]) -> Grammar:
    """Return the grammar that the tokens of a text define. Raises NotLarkError if they don't parse."""
    return _Reader(lark, tokens).grammar()


class _Reader:
    """A recursive descent through the tokens, which end with one of no kind."""

    def __init__(self, lark: str, tokens: Sequence[Token]) -> None:
        self._lark = lark
        self._tokens = [*tokens, Token("", "", len(lark), len(lark))]
        self._next = 0
        self._depth = 0

    def grammar(self) -> Grammar:
        grammar = Grammar({}, {}, [])
        while self._kind():
            first, token = self._next, self._take()
            if token.kind in ("rule", "terminal"):
                self._skip_to(":")
                options = self._options()
                if token.kind == "rule":
                    grammar.rules[token.text.removeprefix("!").removeprefix("?")] = options
                else:
                    grammar.terminals[token.text] = self._source(first)
            elif token.text == "%ignore":
                self._options()
            elif token.text == "%import":
                while self._kind() not in ("newline", ""):
                    self._take()
                grammar.imports.append(self._source(first))
            elif token.kind != "newline" and token.text != "%llguidance":
                raise NotLarkError
        return grammar

    def _kind(self, ahead: int = 0) -> str:
        return self._tokens[self._next + ahead].kind

    def _sign(self, ahead: int = 0) -> str:
        """Return the text of a coming sign or keyword; ``""`` for another token."""
        is_sign = self._kind(ahead) in ("sign", "keyword")
        return self._tokens[self._next + ahead].text if is_sign else ""

    def _take(self) -> Token:
        if not self._kind():
            raise NotLarkError
        self._next += 1
        return self._tokens[self._next - 1]

    def _took(self, sign: str) -> bool:
        taken = self._sign() == sign
        self._next += taken
        return taken

    def _skip_to(self, sign: str) -> None:
        """Take all tokens of this line up to a sign: a rule's parameters and attributes, a range."""
        while not self._took(sign):
            if self._take().kind == "newline":
                raise NotLarkError

    def _skip_group(self, opening: str, closing: str) -> None:
        """Take what is in parentheses, with them, if any come."""
        depth = 0
        while depth or self._sign() == opening:
            depth += (self._sign() == opening) - (self._sign() == closing)
            self._take()

    def _part(self, kind: Any, first: int, **more: Any) -> Part:
        """Return the part from the first token to the last that was taken."""
        return Part(kind, self._tokens[first].start, self._tokens[self._next - 1].end, **more)

    def _source(self, first: int) -> str:
        return self._lark[self._tokens[first].start : self._tokens[self._next - 1].end]

    def _terminal(self, first: int) -> Part:
        return self._part("terminal", first, name=self._source(first))

    def _options(self) -> Part:
        self._depth += 1
        if self._depth > MOST_GROUPS:
            raise NotLarkError
        first, options = self._next, [self._option()]
        while self._took_bar():
            options.append(self._option())
        self._depth -= 1
        return self._part("any", first, parts=tuple(options))

    def _took_bar(self) -> bool:
        if self._kind() == "newline" and self._sign(ahead=1) == "|":
            self._next += 1
        return self._took("|")

    def _option(self) -> Part:
        first, items, is_terminal = self._next, [], False
        while self._kind() not in ("newline", ""):
            if self._sign() in ("|", "->", ")", "]", "}", "%if"):
                break
            if self._took("&"):
                is_terminal = True
            else:
                items.append(self._item())
        option = self._part("all", first, parts=tuple(items))
        if is_terminal:
            option = replace(option, parts=(self._terminal(first),))
        if self._took("->"):
            self._take()
        if self._took("%if"):
            self._take()
            self._skip_group("(", ")")
        return option

    def _item(self) -> Part:
        first = self._next
        if self._took("~"):
            self._item()
            return self._terminal(first)
        item = self._atom()
        return replace(item, optional=item.optional or self._is_optional())

    def _is_optional(self) -> bool:
        """Take the sign that says how often an item comes, and tell whether that may be never."""
        sign, low = self._sign(), ""
        if sign in ("~", "{") and self._kind(ahead=1) == "number":
            low = self._tokens[self._next + 1].text
        if sign in ("?", "*", "+"):
            return self._take().text != "+"
        if sign == "~" and low:
            self._next += 2
            if self._took(".."):
                self._take()
        elif sign == "{":
            self._skip_to("}")
        else:
            return False
        return low.lstrip("+0") == ""

    def _atom(self) -> Part:
        first, token = self._next, self._take()
        if token.kind == "sign" and token.text in ("(", "["):
            options = self._options()
            if not self._took(")" if token.text == "(" else "]"):
                raise NotLarkError
            return replace(options, optional=token.text == "[")
        if token.text == "%lark":
            return self._part("grammar", first, grammar=self._nested())
        if token.kind == "regex":
            return self._terminal(first)
        if token.kind in ("rule", "terminal"):
            if self._took("::"):
                self._take()
                self._skip_group("(", ")")
            return self._part(token.kind, first, name=token.text)
        if token.kind == "string":
            if self._took(".."):
                self._take()
        elif token.kind != "special" and token.text not in ("%json", "%regex"):
            raise NotLarkError
        return self._part("text", first)

    def _nested(self) -> Grammar:
        first = self._next
        self._skip_group("{", "}")
        if first == self._next:
            raise NotLarkError
        return grammar_of(self._lark, self._tokens[first + 1 : self._next - 1])
