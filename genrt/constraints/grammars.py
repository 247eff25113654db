"""Constraints that llguidance runs: regular expressions.

Compiling one and computing masks takes milliseconds of CPU time, off the event loop with ``amasks``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from genrt.constraints.protocols import MaskedConstraint
from genrt.constraints.tokens import Children, Tokens, Words, unpacked
from genrt.errors import InvalidConstraint

if TYPE_CHECKING:
    from genrt.lm import AsyncLM

__all__ = ["GrammarState", "regex"]

_LONGEST_TOKEN = 1024
"""Bytes; llguidance aborts on a vocabulary with longer ones."""


def regex(pattern: str, lm: AsyncLM) -> MaskedConstraint:
    r"""The texts that ``pattern`` matches from their first to their last character.

    The syntax is that of the Rust crate ``regex``, close to Python's: classes, ``\d \w \s`` and
    ``\p{..}`` over Unicode, repetition, alternation, groups, inline flags. There is no look-around,
    ``\b`` or back-reference, since what they say about a text can't be told from its prefix by a
    finite automaton; ``^`` and ``$`` may stand at the very ends; laziness (``*?``) is without effect.

    The first constraint over an ``lm`` also reads its vocabulary, about 0.1 s for 50,000 tokens.

    Raises:
        InvalidConstraint: the pattern does not compile or is too complex, or there is no end token.
    """
    if not isinstance(pattern, str):
        raise InvalidConstraint(f"the pattern is {pattern!r}; give a regular expression as str")
    # llguidance drops a last, lone backslash without a word.
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InvalidConstraint(f"the regular expression {pattern!r} ends in a lone backslash")
    from llguidance import regex_to_lark

    try:
        escaped = regex_to_lark(pattern, use_ascii="")
    except UnicodeEncodeError as error:
        raise InvalidConstraint(
            f"the regular expression {pattern!r} holds a lone surrogate, which no text has"
        ) from error
    return _Grammar(_Vocabulary.of(lm), f"start: /{escaped}/", f"regular expression {pattern!r}")


class _Vocabulary:
    """One lm's tokens as llguidance wants them, shared by all constraints over that lm.

    ``lock`` is held around every use of a matcher of this vocabulary: matchers refuse to be used by
    two threads at once, and states are shared freely.
    """

    def __init__(self, tokens: Tokens) -> None:
        from llguidance import LLExecutor, LLTokenizer

        longest = max(map(len, tokens.byte_vocab))
        if longest > _LONGEST_TOKEN:
            raise InvalidConstraint(
                f"the vocabulary has a token of {longest} bytes, and llguidance takes {_LONGEST_TOKEN} "
                "at most; use another model, or a constraint of your own"
            )
        self.tokens = tokens
        self.lock = threading.Lock()
        self.executor: Any = LLExecutor()
        self.tokenizer: Any = LLTokenizer(_Tokenizer(tokens), n_vocab=len(tokens))

    @staticmethod
    def of(lm: AsyncLM) -> _Vocabulary:
        vocabulary = _vocabularies.get(lm)
        if vocabulary is None:
            vocabulary = _vocabularies[lm] = _Vocabulary(Tokens.of(lm))
        return vocabulary

    def fill(self, states: Sequence[GrammarState]) -> None:
        """Compute the packed masks of distinct states, in parallel, and leave them there."""
        with self.lock:
            # Another thread may have been here while this one waited.
            unfilled = [state for state in states if state.words is None]
            if not unfilled:
                return
            words: Words = np.zeros((len(unfilled), len(self.tokens.open)), dtype=np.int32)
            self.executor.unsafe_compute_mask_ptr(
                [(state.matcher, row) for row, state in enumerate(unfilled)],
                words.ctypes.data,
                words.shape[1] * words.itemsize,
                len(unfilled),
            )
            for row, state in zip(words, unfilled, strict=True):
                error = state.matcher.get_error()
                # A dead end is an error state of this name, in which only the end token may pass.
                if error and not error.startswith("NoExtension"):
                    raise InvalidConstraint(
                        "the constraint is too complex to compute which tokens may follow, "
                        f"simplify it: {_brief(error)}"
                    )
                word, bit = divmod(self.tokens.eos_token_id, 32)
                end = np.uint32(1 << bit).view(np.int32)
                row[word] = row[word] | end if state.accepting else row[word] & ~end
                state.words = row.copy()


class _Tokenizer:
    """The attributes and the call by which llguidance knows a tokenizer."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = list(tokens.byte_vocab)
        self.eos_token_id = tokens.eos_token_id
        self.special_token_ids = sorted(tokens.special)

    def __call__(self, text: str | bytes) -> list[int]:
        # Asked only for the tokens of forced text, which no_forcing turns off: masks would then
        # admit one tokenization alone.
        return []


_vocabularies: weakref.WeakKeyDictionary[AsyncLM, _Vocabulary] = weakref.WeakKeyDictionary()


class _Grammar:
    """A constraint that llguidance runs, from a grammar in its Lark dialect."""

    def __init__(self, vocabulary: _Vocabulary, lark: str, name: str) -> None:
        from llguidance import LLMatcher, LLParserLimits

        grammar = LLMatcher.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\n{lark}')
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidConstraint(f"the {name} does not compile: {_brief(matcher.get_error())}")
        self.tokens = vocabulary.tokens
        self._name = name
        self._start = GrammarState(vocabulary, matcher)
        # What is too complex mostly is so from the start: say it here, not in the midst of a run.
        vocabulary.fill([self._start])

    def start(self) -> GrammarState:
        return self._start

    def __repr__(self) -> str:
        return f"<constraint: {self._name}>"


class GrammarState:
    """A matcher that is only ever copied; ``words`` is its packed mask once that is computed."""

    __slots__ = ("__weakref__", "accepting", "children", "matcher", "vocabulary", "words")

    def __init__(self, vocabulary: _Vocabulary, matcher: Any) -> None:
        self.vocabulary = vocabulary
        self.matcher = matcher
        self.accepting: bool = matcher.is_accepting()
        self.words: Words | None = None
        self.children: Children[GrammarState] = Children()

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.tokens)

    def packed(self) -> Words:
        while self.words is None:
            self.vocabulary.fill([self])
        return self.words

    def mask(self) -> Tensor:
        return unpacked(self.packed(), self.vocab_size)

    def advance(self, token_id: int) -> GrammarState:
        self.vocabulary.tokens.text(token_id)
        return self.children.get(token_id, lambda: self._advanced(token_id))

    def _advanced(self, token_id: int) -> GrammarState:
        with self.vocabulary.lock:
            matcher = self.matcher.deep_copy()
            if matcher.consume_token(token_id):
                return GrammarState(self.vocabulary, matcher)
        raise self.vocabulary.tokens.refused(token_id)


def _brief(error: str) -> str:
    """llguidance's message without its listing of the grammar and its internal state."""
    return error.split("\n   1 |")[0].split("\n<")[0].strip()
