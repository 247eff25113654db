"""Constraints that llguidance runs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self, cast

import numpy as np

from genrt.constraints.protocols import (
    HasTokens,
    MaskedConstraint,
    PackedState,
    kept_for,
    lm_of,
    tokens_of,
)
from genrt.errors import InvalidConstraint
from genrt.numbers import displayed
from genrt.structures.guides import (
    lark_of_choice,
    lark_of_grammar,
    lark_of_regex,
    lark_of_schema,
    name_of_regex,
    syntax_advice,
)
from genrt.structures.matching import (
    Tokens,
    Words,
    brief,
    compile_error,
    has_bit,
    new_matcher,
    new_tokenizer,
)
from genrt.structures.schemas import Whitespace
from genrt.tokens.vocabulary import checked_token_id

QUICK = 300e-6
"""The seconds for which masks are computed one after another, before threads compute the rest."""


def regex(pattern: str, lm: HasTokens) -> MaskedConstraint:
    r"""Return the constraint of the texts that ``pattern`` matches from their first to their last
    character.

    The dialect is a part of Python's ``re``, and means what ``re.fullmatch`` means;
    docs/guide/structures.md lists it: classes, ``\d \w \s`` over Unicode, repetition, alternation,
    groups, the flags ``i``, ``s`` and ``x``. ``^`` and ``$`` may stand at the ends of an alternative;
    laziness (``*?``) is without effect. Look-around, ``\b``, back-references and ambiguous forms are
    refused.

    The first constraint over an ``lm`` also reads its vocabulary, about 0.1 s for 50,000 tokens.

    Raises:
        InvalidConstraint: the pattern is not in the dialect or is too complex, or there is no end token.
    """
    lark = lark_of_regex(pattern)
    return _CompiledConstraint(_Vocabulary.of(lm), lark, name_of_regex(pattern))


def json_schema(
    schema: dict[str, Any] | str | bool | type, lm: HasTokens, *, whitespace: Whitespace = "spaced"
) -> MaskedConstraint:
    """Return the constraint of the JSON texts of the values that are valid under a schema, in the order
    of its properties.

    The schema is a dict, a JSON text, a pydantic model, or True for any JSON at all, of a draft from 4 to
    2020-12. Every text of the set validates, but not every spelling of a valid value is in it:

    * properties come in the order of ``$ref``, ``allOf`` and ``anyOf``, then of ``properties``, then of
      ``required``, then any others, whose names may occur twice;
    * integers are digits (not ``1.0``); numbers with bounds have no exponent, and the decimals of a bound
      (7.20 under a maximum of 7.25); constants and enums are written as in the schema;
    * a number with ``multipleOf`` is not negative;
    * where validators read a ``pattern`` differently, only strings are drawn on which they agree.

    llguidance compiles the schema. Keywords and combinations with which a text might be invalid are
    refused by name (``not``, ``if``, ``contains``, ``uniqueItems``, a ``oneOf`` whose schemas may hold
    together, …), and so are formats that are not known, keywords that look misspelt, and schemas that
    contain themselves without end; docs/guide/structures.md lists them. Check them by a predicate:
    ``all_of(json_schema(…), predicate(…))``.

    A schema that would take many seconds is refused: beyond 10,000 for ``minItems`` and ``maxItems``,
    2,000 properties or 50 patterns in one object, 100,000 for ``multipleOf`` (in units of its last
    decimal), 200 levels, or llguidance's own limits. So are numbers that would be rounded.

    Args:
        whitespace: ``"spaced"``, one space after each comma and colon, as Python's ``json.dumps`` and
            most models write; ``"compact"``, without white space; ``"flexible"``, any between the parts,
            which makes the texts of even one value infinitely many. The whole is never surrounded by
            white space. ``whitespace_flexible``, ``item_separator`` and ``key_separator``, in the schema
            under ``"x-guidance"``, take precedence.

    Raises:
        InvalidConstraint: the schema is wrong, cannot be compiled, allows no value, or is too large or
            too complex; or there is no end token.
    """
    return _CompiledConstraint(
        _Vocabulary.of(lm), lark_of_schema(schema, whitespace), "JSON schema"
    )


def grammar(
    text: str, lm: HasTokens, *, syntax: Literal["lark", "ebnf"] = "lark"
) -> MaskedConstraint:
    r"""Return the constraint of the texts that a context-free grammar derives from its rule ``start``
    (Lark) or ``root`` (EBNF).

    ``"lark"`` is llguidance's dialect of Lark: rules in lower case, terminals in upper case and as
    literals, strings in double quotes, ``/regular expressions/`` as in ``regex``, ``%import
    common.NUMBER``, ``%ignore``, inline ``%json {schema}`` as in ``json_schema``. There are no
    priorities, templates or look-around. **A terminal takes the longest match**, and a shorter one is not
    tried: ``A "a"`` with ``A: /a+/`` derives no text at all. That is fast, and right for grammars over
    words. Names of special tokens, and the rule options ``stop``, ``max_tokens`` and ``temperature``, are
    refused.

    ``"ebnf"`` is that of GBNF: ``root ::= item ("," item)*``, literals, classes ``[a-z]`` and ``[^\n]``,
    ``.`` for any character, ``? * + {2} {2,} {2,5}``, groups, ``#`` comments. It has no terminals: every
    text that can be derived is in the set, and masks cost more.

    Alternatives of an EBNF that derive no finite text (``a ::= "x" a``) are removed, and a grammar
    without others is refused. In Lark they stay, and masks may lead into them. A grammar that is nested
    through more than 1,000 rules, or has more than 200,000 parts, is refused.

    Raises:
        InvalidConstraint: the grammar does not compile, has refused options, derives no text, or is too
            large or too complex; or there is no end token.
    """
    lark = lark_of_grammar(text, syntax)
    vocabulary = _Vocabulary.of(lm)
    try:
        return _CompiledConstraint(vocabulary, lark, "grammar")
    except InvalidConstraint as error:
        raise InvalidConstraint(f"{error}{syntax_advice(text, syntax)}") from error


class _Vocabulary:
    """One lm's tokens as llguidance takes them, shared by all constraints over that lm.

    ``lock`` is held around every use of a matcher: two threads may not use one at once, and states are
    shared.

    Attributes:
        is_quick: whether the last masks took less than ``QUICK`` seconds. llguidance holds Python's lock
            while it computes, so that a thread helps only between two masks.
    """

    def __init__(self, tokens: Tokens) -> None:
        from llguidance import LLExecutor

        self.tokens = tokens
        self.lock = threading.Lock()
        self.is_quick = True
        self.executor: Any = LLExecutor()
        self.tokenizer: Any = new_tokenizer(tokens)

    @staticmethod
    def of(lm: HasTokens) -> _Vocabulary:
        tokens = tokens_of(lm)
        return kept_for(lm, _vocabularies, lambda _: _Vocabulary(tokens))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Vocabulary.of, (lm_of(self.tokens),)

    def fill(self, states: Sequence[GrammarState]) -> None:
        """Compute the packed masks of distinct states, in parallel, and store them in the states."""
        with self.lock:
            # Another thread may have been here while this one waited.
            unfilled = [(state, state.here().matcher) for state in states if state.words is None]
            if not unfilled:
                return
            words: Words = np.zeros((len(unfilled), len(self.tokens.open)), dtype=np.int32)
            self.is_quick = self._compute([matcher for _, matcher in unfilled], words)
            word, bit = divmod(self.tokens.eos_token_id, 32)
            end = np.uint32(1 << bit).view(np.int32)
            accepting = [state.accepting for state, _ in unfilled]
            words[:, word] = np.where(accepting, words[:, word] | end, words[:, word] & ~end)
            for row, (state, matcher) in zip(words, unfilled, strict=True):
                error = matcher.get_error()
                # A dead end is an error state of this name, in which only the end token may pass.
                if error and not error.startswith("NoExtension"):
                    raise state.too_complex(error)
                state.words = row.copy()

    def _compute(self, matchers: Sequence[Any], words: Words) -> bool:
        """Compute the masks of matchers one after the other, and after ``QUICK`` seconds the rest in
        parallel. Return whether all took less: most masks take less time than waking threads."""
        count, size = words.shape
        first, until = words.ctypes.data, time.perf_counter() + QUICK
        for number, matcher in enumerate(matchers):
            matcher.unsafe_compute_mask_ptr(first + 4 * size * number, 4 * size)
            if time.perf_counter() > until:
                left = [(each, n) for n, each in enumerate(matchers[number + 1 :], number + 1)]
                if left:
                    self.executor.unsafe_compute_mask_ptr(left, first, 4 * size, count)
                return False
        return True


_vocabularies: weakref.WeakKeyDictionary[HasTokens, _Vocabulary] = weakref.WeakKeyDictionary()


class _CompiledConstraint:
    """A constraint that llguidance runs, from a grammar in its Lark dialect."""

    def __init__(self, vocabulary: _Vocabulary, lark: str, name: str) -> None:
        matcher = new_matcher(vocabulary.tokenizer, lark)
        if matcher.is_error():
            raise compile_error(f"the {name}", matcher.get_error())
        self.tokens = vocabulary.tokens
        self._made_of = vocabulary, lark, name
        self._rules = _Rules(vocabulary, matcher, name)
        self._start = GrammarState(self._rules, _Walk(matcher.deep_copy(), []), b"")
        # A grammar that is too complex mostly is so from the start: raise here, not during a run.
        vocabulary.fill([self._start])

    def start(self) -> GrammarState:
        return self._start

    def __reduce__(self) -> tuple[Any, ...]:
        return _CompiledConstraint, self._made_of

    def __repr__(self) -> str:
        return f"<constraint: {self._rules.name}>"


class _Rules:
    """A constraint as its states know it.

    Attributes:
        matcher: at the start; only copied.
        name: the constraint's, for messages.
        states: weak references to states, by the bytes of their texts, which decide the next tokens. Used
            under the vocabulary's lock.
    """

    def __init__(self, vocabulary: _Vocabulary, matcher: Any, name: str) -> None:
        self.vocabulary, self.matcher, self.name = vocabulary, matcher, name
        self.vocab_size = len(vocabulary.tokens)
        self.states: dict[bytes, weakref.ref[GrammarState]] = {}
        self._most = 1024  # the size at which dead references are removed

    def keep(self, data: bytes, state: GrammarState) -> GrammarState:
        """Return a state, which is found by its bytes from now on."""
        # No WeakValueDictionary: its work at each state's end costs more than a scan of all states.
        if len(self.states) >= self._most:
            self.states = {data: held for data, held in self.states.items() if held() is not None}
            self._most = 1024 + 2 * len(self.states)
        self.states[data] = weakref.ref(state)
        return state


class _Walk:
    """A matcher and its tokens. Texts share one as long as each begins with the one before, because a
    copy costs more than all other work for a token, and grows with the text."""

    __slots__ = ("matcher", "tokens")

    def __init__(self, matcher: Any, tokens: list[int]) -> None:
        self.matcher, self.tokens = matcher, tokens


class GrammarState(PackedState):
    """A text on a matcher's walk, which may be further by now."""

    __slots__ = ("_data", "_length", "_rules", "_walk", "accepting", "vocabulary")

    def __init__(self, rules: _Rules, walk: _Walk, data: bytes) -> None:
        super().__init__(rules.vocab_size)
        self.vocabulary = rules.vocabulary
        self._rules, self._walk, self._data = rules, walk, data
        self._length = len(walk.tokens)
        self.accepting: bool = walk.matcher.is_accepting()

    def here(self) -> _Walk:
        """Return the walk whose matcher is at this text, under the vocabulary's lock. If the state's own
        has gone on, that is a copy which is rolled back."""
        walk, length = self._walk, self._length
        if len(walk.tokens) > length:
            tokens = walk.tokens[:length]
            matcher = walk.matcher.deep_copy()
            # After a dead end or a limit a matcher cannot roll back.
            if not matcher.rollback(len(walk.tokens) - length):
                matcher = self._rules.matcher.deep_copy()
                matcher.consume_tokens(tokens)
            self._walk = walk = _Walk(matcher, tokens)
        return walk

    def _computed(self) -> Words:
        self.vocabulary.fill([self])
        return self.packed()

    def advance(self, token_id: int) -> Self:
        rules, tokens = self._rules, self.vocabulary.tokens
        index = checked_token_id(token_id, self.vocab_size)
        data = self._data + tokens.text(index)
        if not tokens.is_open(index):
            raise tokens.refused(index)
        with self.vocabulary.lock:
            held = rules.states.get(data)
            if held is not None and (state := held()) is not None:
                return cast("Self", state)
            walk = self.here()
            walk.tokens.append(index)
            if walk.matcher.consume_token(index):
                return cast("Self", rules.keep(data, GrammarState(rules, walk, data)))
        # A matcher's refusal does not tell whether it met a limit; the mask does.
        if has_bit(self.packed(), index):
            raise self.too_complex(walk.matcher.get_error())
        raise tokens.refused(index)

    def too_complex(self, error: str) -> InvalidConstraint:
        """Return the error for a limit of llguidance's that the constraint reached after this text."""
        return InvalidConstraint(
            f"the {self._rules.name} is too complex to tell which tokens follow here, simplify it: "
            f"{brief(error)}"
        )


def strings(texts: Iterable[str], lm: HasTokens) -> MaskedConstraint:
    """Return the constraint of exactly these texts, in any order. One may be a prefix of another, or
    empty. Compiling takes about 0.1 s for a thousand texts.

    Raises:
        InvalidConstraint: there are no texts, one is not a str or has lone surrogates, they are too many
            for llguidance's limits, or there is no end token.
    """
    is_one = isinstance(texts, str | bytes) or getattr(texts, "ndim", 1) == 0
    if is_one or not isinstance(texts, Iterable):
        raise InvalidConstraint(f"the texts are {displayed(texts)}: give a list of str")
    wanted = sorted({_checked_text(text) for text in texts})
    if not wanted:
        raise InvalidConstraint("there are no texts: give at least one, '' for the empty text")
    shown = ", ".join(map(repr, wanted[:3]))
    more = f", … {len(wanted)} in all" if len(wanted) > 3 else ""
    vocabulary = _Vocabulary.of(lm)
    return _CompiledConstraint(vocabulary, lark_of_choice(wanted), f"strings {shown}{more}")


def _checked_text(text: str) -> str:
    if not isinstance(text, str):
        raise InvalidConstraint(f"one of the texts is {displayed(text)}: give each as str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidConstraint(
            f"the text {displayed(text)} holds a lone surrogate: remove it"
        ) from error
    return text
