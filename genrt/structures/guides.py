"""Structures compiled for a vocabulary: the tokens that continue a text, and the tokens that end it.

The forms are those of vLLM (``v1/structured_output/``). End tokens are admitted where a text is complete,
and only there. Any token may follow an end token.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor

from genrt.errors import EngineUnsupported, InvalidConstraint, InvalidRequest
from genrt.numbers import displayed
from genrt.structures.grammars import checked_lark, lark_of_ebnf
from genrt.structures.matching import (
    Tokens,
    brief,
    check_begins,
    new_matcher,
    new_tokenizer,
    set_bits,
    unpacked,
)
from genrt.structures.regexes import character_code, whole
from genrt.structures.schemas import Whitespace, schema_source
from genrt.tokens.vocabulary import byte_vocab

Syntax = Literal["lark", "ebnf"]

_WHITESPACE = ("compact", "spaced", "flexible")

_FIRST_RULE = {
    "lark": re.compile(
        r"^[ \t]*[?!]?_?[A-Za-z][\w-]*[ \t]*(?:\[[^\]\n]*\][ \t]*)?:(?![:=])", re.MULTILINE
    ),
    "ebnf": re.compile(r"^[ \t]*[A-Za-z_][\w-]*\s*::=", re.MULTILINE),
}


def name_of_regex(pattern: str) -> str:
    """Return the name of a regular expression in messages."""
    return f"regular expression {pattern[:60]!r}{'…' if len(pattern) > 60 else ''}"


def lark_of_regex(pattern: str) -> str:
    """Return the grammar of the texts that a regular expression matches as a whole. Raises
    InvalidConstraint if the pattern is no str, or not in genrt's dialect."""
    given: object = pattern
    if not isinstance(given, str):
        advice = (
            "its text, pattern.pattern"
            if isinstance(given, re.Pattern)
            else "a regular expression as str"
        )
        raise InvalidConstraint(f"the pattern is {displayed(given)}; give {advice}")
    return f"start: /{whole(pattern, name_of_regex(pattern))}/"


def lark_of_choice(texts: Sequence[str]) -> str:
    """Return the grammar of exactly these texts, at least one. Raises InvalidConstraint if one holds
    a lone surrogate."""
    _check_text("".join(texts), "choice")
    return f"start: /{'|'.join(''.join(map(character_code, text)) for text in texts)}/"


def lark_of_schema(schema: object, whitespace: Whitespace, *, closed: bool = False) -> str:
    """Return the grammar of the JSON texts of the values that are valid under a schema.

    With ``closed``, objects have only named properties, unless a schema describes other properties.

    Raises:
        InvalidConstraint: the schema is not one, or says more than can be compiled; or no such
            whitespace.
    """
    if not isinstance(whitespace, str) or whitespace not in _WHITESPACE:
        raise InvalidConstraint(
            f"whitespace is {displayed(whitespace)}: give one of {', '.join(map(repr, _WHITESPACE))}"
        )
    return f"start: %json {schema_source(schema, whitespace, closed=closed)}"


def compact_schema(text: str) -> str:
    """Return a schema, as a JSON text, with the option that forbids white space between parts."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return text  # which is refused with the reason
    if isinstance(schema, dict):
        own = {"whitespace_flexible": False, **schema.get("x-guidance", {})}
        return json.dumps(schema | {"x-guidance": own})
    return json.dumps({"x-guidance": {"whitespace_flexible": False}}) if schema is True else text


def texts_of_choice(text: str) -> tuple[str, ...]:
    """Return the texts of a choice that is written as a JSON list."""
    return tuple(map(str, json.loads(text)))


def syntax_of(grammar: str) -> Syntax:
    """Return the syntax of a grammar: EBNF if a line has ``::=``, else Lark, as in vLLM."""
    lines = (re.sub(r"(#|//).*$", "", line) for line in grammar.split("\n"))
    return "ebnf" if any("::=" in line for line in lines) else "lark"


def lark_of_grammar(text: str, syntax: Syntax) -> str:
    """Return a grammar for llguidance. Raises InvalidConstraint if it does not parse, an EBNF derives
    no text, it is too large, or there is no such syntax."""
    if not isinstance(text, str):
        raise InvalidConstraint(f"the grammar is {displayed(text)}: give its text as str")
    _check_text(text, "grammar")
    if not isinstance(syntax, str) or syntax not in _FIRST_RULE:
        raise InvalidConstraint(f"syntax is {displayed(syntax)}: give 'lark' or 'ebnf'")
    try:
        if syntax == "ebnf":
            return lark_of_ebnf(text)
        return checked_lark(text, lambda schema: schema_source(schema, "spaced"))
    except InvalidConstraint as error:
        raise InvalidConstraint(f"{error}{syntax_advice(text, syntax)}") from error


def syntax_advice(text: str, syntax: Syntax) -> str:
    """Return advice for the error of a grammar that seems to be in the other syntax."""
    other = "lark" if syntax == "ebnf" else "ebnf"
    if not _FIRST_RULE[other].search(text) or _FIRST_RULE[syntax].search(text):
        return ""
    return f'\nIt looks like {"Lark" if other == "lark" else "EBNF"}: give syntax="{other}"'


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidConstraint(f"the {name} holds a lone surrogate, which no text has") from error


_ANY = "/(?s:.*)/"


def lark_of_tags(text: str) -> str:
    """Return the grammar of the texts that a structural tag describes. Raises InvalidConstraint if it
    is not one, or has a format that is not known."""
    try:
        given = json.loads(text)
        if "structures" in given:
            tags = [
                {
                    "begin": each["begin"],
                    "content": {"type": "json_schema", "json_schema": each["schema"]},
                    "end": each["end"],
                }
                for each in given["structures"]
            ]
            form = {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}
        else:
            form = given["format"]
        return _Tags().lark(form)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, InvalidConstraint):
            raise
        kind = type(error).__name__
        raise InvalidConstraint(f"the structural tag cannot be read: {kind}: {error}") from error


class _Tags:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def lark(self, form: Any) -> str:
        start = self._form(form, is_last=True)
        return "\n".join([f"start: {start}", *self._lines])

    def _form(self, form: Any, *, is_last: bool = False) -> str:
        """Return a part of a rule; ``is_last``: the text ends after it."""
        made: dict[str, Callable[[], str]] = {
            "const_string": lambda: _text_terminal(form["value"]),
            "json_schema": lambda: self._schema(form),
            "regex": lambda: f"/{whole(form['pattern'], 'structural tag')}/",
            "sequence": lambda: self._sequence(form["elements"], is_last),
            "or": lambda: self._rule(
                *(self._form(each, is_last=is_last) for each in form["elements"])
            ),
            "tag": lambda: self._tag(form, ""),
            "optional": lambda: self._repeated(form, "?"),
            "plus": lambda: self._repeated(form, "+"),
            "star": lambda: self._repeated(form, "*"),
            "repeat": lambda: self._repeated(
                form, f"{{{form['min']},{form['max']}}}".replace("-1", "")
            ),
            "tags_with_separator": lambda: self._separated(form),
            "triggered_tags": lambda: self._triggered(form, is_last),
            "any_text": lambda: self._any_text(form, is_last),
        }
        if form["type"] not in made:
            raise _wrong_tag(
                f"has the format {form['type']!r}, which genrt cannot compile: give one of "
                f"{', '.join(made)}; vLLM's tool parsers ask for it unless "
                "VLLM_ENFORCE_STRICT_TOOL_CALLING=0"
            )
        return made[form["type"]]()

    def _repeated(self, form: Any, sign: str) -> str:
        return f"({self._form(form['content'])}){sign}"

    def _rule(self, *options: str) -> str:
        name = f"g{len(self._lines)}"
        self._lines.append(f"{name}: {' | '.join(options)}")
        return name

    def _schema(self, form: Any) -> str:
        if form.get("style", "json") != "json" or form.get("excludes"):
            raise _wrong_tag(
                f"has a schema in the style {form.get('style')!r}, or that excludes texts: genrt "
                "compiles JSON alone; unset by VLLM_ENFORCE_STRICT_TOOL_CALLING=0"
            )
        return self._rule(f"%json {schema_source(form['json_schema'], 'flexible', closed=True)}")

    def _sequence(self, elements: list[Any], is_last: bool) -> str:
        last = len(elements) - 1
        return (
            " ".join(
                self._form(each, is_last=is_last and index == last)
                for index, each in enumerate(elements)
            )
            or '""'
        )

    def _any_text(self, form: Any, is_last: bool) -> str:
        if not is_last or form.get("max_chars") or form.get("max_tokens"):
            raise _wrong_tag("has any_text that something follows: give it an end")
        return self._text(form.get("excludes", ()))

    def _text(self, excluded: Any) -> str:
        """Return the terminal of any text without some texts."""
        name = f"G{len(self._lines)}"
        found = "|".join(map(_codes, excluded))
        body = f"{_ANY} & ~/(?s:.*)(?:{found})(?s:.*)/" if excluded else _ANY
        self._lines.append(f"{name}: {body}")
        return name

    def _tag(self, tag: Any, trigger: str) -> str:
        """Return a tag, without the trigger with which it begins."""
        content, ends = tag["content"], tag["end"]
        ends = [ends] if isinstance(ends, str) else ends
        begin = _text_terminal(tag["begin"][len(trigger) :])
        if content["type"] == "any_text":
            options = []
            for end in ends:
                if not end:
                    raise _wrong_tag("has any_text without an end: give it one")
                text = self._text(content.get("excludes", ()))
                name = f"g{len(self._lines)}"
                self._lines.append(f"{name}[lazy]: {text} {_text_terminal(end)}")
                options.append(f"{begin} {name}")
            return self._rule(*options)
        inside = self._form(content)
        return self._rule(*(f"{begin} {inside} {_text_terminal(end)}" for end in ends))

    def _separated(self, form: Any) -> str:
        tag = self._rule(*(self._tag(each, "") for each in form["tags"]))
        more = (
            "" if form.get("stop_after_first") else f" ({_text_terminal(form['separator'])} {tag})*"
        )
        return self._rule(f"{tag}{more}", *([] if form.get("at_least_one") else ['""']))

    def _triggered(self, form: Any, is_last: bool) -> str:
        if not is_last:
            raise _wrong_tag("has triggered_tags that something follows: make it last")
        text = self._text(form.get("excludes", ()))
        later, first = [], []
        for tag in form["tags"]:
            triggers = [each for each in form["triggers"] if tag["begin"].startswith(each)]
            trigger = next(filter(None, triggers), None)
            if trigger is None:
                raise _wrong_tag(f"{tag['begin']!r} begins with none of the triggers")
            name = f"g{len(self._lines)}"
            self._lines.append(f"{name}[lazy]: {text} {_text_terminal(trigger)}")
            later.append(f"{name} {self._tag(tag, trigger)}")
            first.append(self._tag(tag, ""))
        some = self._rule(*later)
        if form.get("at_least_one"):
            one = self._rule(*first)
            return one if form.get("stop_after_first") else self._rule(f"{one} {some}* {text}")
        end = text if not form.get("stop_after_first") else None
        return self._rule(f"{some}* {end}") if end else self._rule(some, text)


def _wrong_tag(what: str) -> InvalidConstraint:
    return InvalidConstraint(f"the structural tag {what}")


def _codes(text: str) -> str:
    return "".join(map(character_code, text))


def _text_terminal(text: str) -> str:
    return f"/{_codes(text)}/" if text else '""'


Structure: TypeAlias = tuple[str, str | tuple[str, ...]]
"""An option's name and its value: ``json_schema`` (a JSON text), ``regex``, ``grammar``, ``choice``;
from vLLM's front ends also ``structural_tag`` (a JSON text)."""

MOST_KEPT = 64
"""The number of structures that stay compiled, the most recently used."""


class Guides:
    """The structures of one engine's texts, for any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._larks: LRUCache[Structure, str] = LRUCache(MOST_KEPT)
        self._lock = threading.Lock()  # of ``_larks``
        self._compiling = threading.Lock()  # of the next two
        self._starts: LRUCache[Structure, Any] = LRUCache(MOST_KEPT)
        self._vocabulary: Any = None

    def check(self, structure: Structure) -> str:
        """Return a structure as llguidance's Lark, without reading the vocabulary. Raises
        InvalidRequest if it does not compile, no text has it, or it is too large."""
        with self._lock:
            lark = self._larks.get(structure)
        if lark is None:
            try:
                lark = _lark_of(*structure)
                check_begins(lark)
            except InvalidConstraint as error:
                raise InvalidRequest(f"{structure[0]}: {error}") from error
            with self._lock:
                self._larks[structure] = lark
        return lark

    def begin(self, structure: Structure, ends: Iterable[int]) -> Guide:
        """Return the guide of a new text, which any of the tokens ``ends`` and the end token end.
        Raises InvalidRequest as ``check``, or if the vocabulary's bytes are not known."""
        with self._compiling:
            start = self._starts.get(structure)
            if start is None:
                lark = self.check(structure)
                start = new_matcher(self._llguidances(), lark)
                if start.is_error():
                    error = brief(start.get_error())
                    raise InvalidRequest(f"{structure[0]} does not compile: {error}")
                self._starts[structure] = start
            matcher = start.deep_copy()
        every = {each for each in (*ends, self._tokenizer.eos_token_id) if each < self._vocab_size}
        return Guide(structure[0], matcher, self._vocab_size, every)

    def _llguidances(self) -> Any:
        """Return the vocabulary as llguidance has it, read once: some 0.1 s for 50,000 tokens."""
        if self._vocabulary is None:
            try:
                spelt = byte_vocab(self._tokenizer, self._vocab_size)
                self._vocabulary = new_tokenizer(Tokens.read(self._tokenizer, spelt))
            except (EngineUnsupported, InvalidConstraint) as error:
                raise InvalidRequest(
                    f"structures need the vocabulary's bytes and its end token: {error}"
                ) from error
        return self._vocabulary


class Guide:
    """One text's place in its structure."""

    def __init__(self, name: str, matcher: Any, vocab_size: int, ends: Collection[int]) -> None:
        self._name = name
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._after = 0  # how many tokens came with the one that ended the text, and after it

    @property
    def is_over(self) -> bool:
        """True if a token has ended the text."""
        return self._after > 0

    def mask(self) -> Tensor:
        """Return which tokens may follow: bool ``[vocab_size]``, on the CPU. Raises
        InvalidRequest if the structure is too complex to tell."""
        return unpacked(self.words().numpy(), self._vocab_size)

    def words(self) -> Tensor:
        """Return which tokens may follow, as a packed mask: int32 ``[⌈vocab_size / 32⌉]``; raises as
        ``mask``."""
        count = -(-self._vocab_size // 32)
        if self.is_over:
            return torch.full((count,), -1, dtype=torch.int32)
        accepting = self._matcher.is_accepting()
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[:count].copy()
        error = self._matcher.get_error()
        # A dead end is an error of this name.
        if error and not error.startswith("NoExtension"):
            raise self._too_complex(error)
        set_bits(words, self._ends, accepting)
        return torch.from_numpy(words)

    def take(self, token_id: int) -> None:
        """Append a token of the mask."""
        if not self.took(token_id):
            raise self._too_complex(self._matcher.get_error())

    def took(self, token_id: int) -> bool:
        """Append a token; return whether it may follow."""
        if self.is_over:
            self._after += 1
            return True
        if token_id in self._ends:
            self._after = int(self._matcher.is_accepting())
            return self.is_over
        return bool(self._matcher.consume_token(token_id))

    def take_back(self, count: int) -> None:
        """Remove the last tokens."""
        after = min(count, self._after)
        self._after -= after
        if count > after:
            self._matcher.rollback(count - after)

    def begin_again(self) -> None:
        """Remove all tokens."""
        self._after = 0
        self._matcher.reset()

    def _too_complex(self, error: str) -> InvalidRequest:
        return InvalidRequest(
            f"{self._name} is too complex to tell which tokens follow, simplify it: {brief(error)}"
        )


def _lark_of(name: str, value: Any) -> str:
    match name:
        case "json_schema":
            return lark_of_schema(value, "flexible", closed=True)
        case "regex":
            return lark_of_regex(value)
        case "choice":
            return lark_of_choice(value)
        case "structural_tag":
            return lark_of_tags(value)
        case _:
            return lark_of_grammar(value, syntax_of(value))
