"""Constraints that llguidance runs: regular expressions, JSON schemas, grammars.

Compiling one and computing masks takes milliseconds of CPU time, off the event loop with ``amasks``.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np

from genrt.constraints.protocols import MaskedConstraint
from genrt.constraints.tokens import PackedState, lm_of, tokens_of
from genrt.errors import InvalidConstraint
from genrt.structures.forms import (
    lark_of_grammar,
    lark_of_regex,
    lark_of_schema,
    name_of_regex,
    syntax_advice,
)
from genrt.structures.json_grammar import Whitespace
from genrt.structures.matching import brief, new_matcher, new_tokenizer
from genrt.structures.tokens import Tokens, Words, has_bit
from genrt.tokens.vocabulary import checked_token_id

if TYPE_CHECKING:
    from genrt.lm import AsyncLM

QUICK = 300e-6
"""For so many seconds masks are computed one after the other."""


def regex(pattern: str, lm: AsyncLM) -> MaskedConstraint:
    r"""Return the constraint of the texts that ``pattern`` matches from their first to their last
    character.

    The dialect is a part of Python's ``re``; docs/guide/structures.md lists it: classes,
    ``\d \w \s`` and ``\p{..}`` over Unicode, repetition, alternation, groups, the flags ``i``,
    ``s`` and ``x``. ``^`` and ``$`` may stand at the ends of an alternative; laziness
    (``*?``) is without effect. Look-around, ``\b``, back-references and all that
    has several readings are refused.

    The first constraint over an ``lm`` also reads its vocabulary, about 0.1 s for 50,000 tokens.

    Raises:
        InvalidConstraint: the pattern is not in the dialect or is too complex, or there is no end token.
    """
    lark = lark_of_regex(pattern)
    return _Grammar(_Vocabulary.of(lm), lark, name_of_regex(pattern))


def json_schema(
    schema: dict[str, Any] | str | bool | type, lm: AsyncLM, *, whitespace: Whitespace = "spaced"
) -> MaskedConstraint:
    """Return the constraint of the JSON texts of the values that are valid under a schema, in the order
    of its properties.

    The schema is a dict, a JSON text, a pydantic model, or True for any JSON at all, of a draft from 4 to
    2020-12. Every text of the set validates, but not every spelling of a valid value is in it:

    * properties come in the order of ``allOf`` and ``$ref``, then of ``properties``, then of
      ``required``, then any others;
    * strings and names have escapes only where JSON asks for them; integers are digits (``-0`` too, not
      ``1.0``); numbers with bounds have no exponent; constants and enums are written as in the schema;
    * a number with ``multipleOf`` is not negative.

    Names that are not in ``properties`` may occur twice. A ``pattern`` is searched for in the
    string; where validators read it differently, only strings are drawn on which they agree.

    Parts that no finite value satisfies are left out, so that masks lead only to beginnings of
    valid texts.

    A ``format`` is checked where it is known (date, time, date-time, duration, email, hostname, ipv4,
    ipv6, uuid, uri), and is an error where not. So is a keyword that looks misspelt, and one that
    cannot be compiled, as docs/guide/structures.md lists them: take it out of the schema and check
    it by a predicate, ``all_of(json_schema(…), predicate(…))``.

    A schema that would take many seconds is refused: beyond 10,000 for ``minItems`` and ``maxItems``,
    2,000 properties or 50 patterns in one object, 100,000 for ``multipleOf`` (in units of its last
    decimal), 1,000 rules each in the one before, or llguidance's own limits. So are integers that are no
    64-bit floats.

    Args:
        whitespace: ``"spaced"``, one space after each comma and colon, as Python's ``json.dumps`` and
            most models write; ``"compact"``, none at all; ``"flexible"``, any between the parts, which
            makes the texts of even one value infinitely many. There is none around the whole.
            ``whitespace_flexible``, ``item_separator`` and ``key_separator``, in the schema under
            ``"x-guidance"``, go before it.

    Raises:
        InvalidConstraint: the schema is not one, says more than can be compiled, allows nothing at all,
            or is too large or too complex; or there is no end token.
    """
    return _Grammar(_Vocabulary.of(lm), lark_of_schema(schema, whitespace), "JSON schema")


def grammar(
    text: str, lm: AsyncLM, *, syntax: Literal["lark", "ebnf"] = "lark"
) -> MaskedConstraint:
    r"""Return the constraint of the texts that a context-free grammar derives from its rule ``start``
    (Lark) or ``root`` (EBNF).

    ``"lark"`` is llguidance's dialect of Lark: rules in lower case, terminals in upper case and as
    literals, strings in double quotes, ``/regular expressions/`` as in ``regex``, ``%import
    common.NUMBER``, ``%ignore``, inline ``%json {schema}`` as in ``json_schema``. There are no
    priorities, templates or look-around. **A terminal takes the longest match**, and what could
    have matched less is not tried again: ``A "a"`` with ``A: /a+/`` derives no text at all, and
    ``("a" | "ab") "b"`` only ``abb``. That is fast, and right for grammars over words, as those of
    programming languages are. Names of special tokens, and the rule options ``stop``,
    ``max_tokens`` and ``temperature``, are refused, since what they say is not about the text.

    ``"ebnf"`` is that of GBNF: ``root ::= item ("," item)*``, literals, classes ``[a-z]`` and ``[^\n]``,
    ``.`` for any character, ``? * + {2} {2,} {2,5}``, groups, ``#`` comments. It has no terminals: every
    text that can be derived is in the set, character by character, and masks cost more.

    Alternatives of an EBNF that derive no finite text (``a ::= "x" a``) are left out, and a grammar
    without others is refused. Those of Lark are not looked for: masks may lead into them. A grammar
    that is nested through more than 1,000 rules, each in the one before, or has more than 200,000
    parts, is refused.

    Raises:
        InvalidConstraint: the grammar does not compile, asks for what is refused, derives nothing, or is
            too large or too complex; or there is no end token.
    """
    lark = lark_of_grammar(text, syntax)
    vocabulary = _Vocabulary.of(lm)
    try:
        return _Grammar(vocabulary, lark, "grammar")
    except InvalidConstraint as error:
        raise InvalidConstraint(f"{error}{syntax_advice(text, syntax)}") from error


class _Vocabulary:
    """One lm's tokens as llguidance takes them, shared by all constraints over that lm.

    ``lock`` is held around every use of a matcher of this vocabulary: matchers refuse to be used by two
    threads at once, and states are shared freely.

    Attributes:
        is_quick: whether the last masks took less than ``QUICK`` seconds. llguidance keeps Python's lock
            while it computes, so that another thread is of use only between two masks.
    """

    def __init__(self, tokens: Tokens) -> None:
        from llguidance import LLExecutor

        self.tokens = tokens
        self.lock = threading.Lock()
        self.is_quick = True
        self.executor: Any = LLExecutor()
        self.tokenizer: Any = new_tokenizer(tokens)

    @staticmethod
    def of(lm: AsyncLM) -> _Vocabulary:
        tokens = tokens_of(lm)
        vocabulary = _vocabularies.get(lm)
        if vocabulary is None:
            vocabulary = _vocabularies[lm] = _Vocabulary(tokens)
        return vocabulary

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
        """Have matchers compute their masks: one after the other, and in parallel what is left after
        ``QUICK`` seconds; return whether all took less. Most masks take some microseconds, and to wake
        threads takes longer."""
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


_vocabularies: weakref.WeakKeyDictionary[AsyncLM, _Vocabulary] = weakref.WeakKeyDictionary()


class _Grammar:
    """A constraint that llguidance runs, from a grammar in its Lark dialect."""

    def __init__(self, vocabulary: _Vocabulary, lark: str, name: str) -> None:
        matcher = new_matcher(vocabulary.tokenizer, lark)
        if matcher.is_error():
            raise InvalidConstraint(f"the {name} does not compile: {brief(matcher.get_error())}")
        self.tokens = vocabulary.tokens
        self._made_of = vocabulary, lark, name
        self._rules = _Rules(vocabulary, matcher, name)
        self._start = GrammarState(self._rules, _Walk(matcher.deep_copy(), []), b"")
        # A grammar that is too complex mostly is so from the start: raise here, not during a run.
        vocabulary.fill([self._start])

    def start(self) -> GrammarState:
        return self._start

    def __reduce__(self) -> tuple[Any, ...]:
        return _Grammar, self._made_of

    def __repr__(self) -> str:
        return f"<constraint: {self._rules.name}>"


class _Rules:
    """A constraint as its states know it.

    Attributes:
        matcher: at the start, never used but to be copied.
        name: the constraint's, for messages.
        states: those that somebody holds, and some that are gone, by the bytes of their texts, which
            alone decide what may follow, whatever tokens spell them; used under the vocabulary's lock.
    """

    def __init__(self, vocabulary: _Vocabulary, matcher: Any, name: str) -> None:
        self.vocabulary, self.matcher, self.name = vocabulary, matcher, name
        self.vocab_size = len(vocabulary.tokens)
        self.states: dict[bytes, weakref.ref[GrammarState]] = {}
        self._most = 1024  # so many are looked through for those that are gone

    def keep(self, data: bytes, state: GrammarState) -> GrammarState:
        """Return a state, which is found by its bytes from now on."""
        # No WeakValueDictionary: what it does at each state's end costs more than a look at all of them.
        if len(self.states) >= self._most:
            self.states = {data: held for data, held in self.states.items() if held() is not None}
            self._most = 1024 + 2 * len(self.states)
        self.states[data] = weakref.ref(state)
        return state


class _Walk:
    """A matcher and the tokens it took. Texts share one as long as each begins with the one before: a
    copy costs more than all else that a token takes, and grows with the text."""

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
        has gone on, that is a copy of it, taken back."""
        walk, length = self._walk, self._length
        if len(walk.tokens) > length:
            tokens = walk.tokens[:length]
            matcher = walk.matcher.deep_copy()
            # A matcher that met a dead end or a limit takes nothing back.
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
        added = tokens.texts[index]
        if added is None:
            tokens.text(index)  # which says so of the end token
            raise tokens.refused(index)
        data = self._data + added
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
