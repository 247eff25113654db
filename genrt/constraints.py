"""Which tokens may follow: constraints on the generated text, as token masks.

A constraint is a set of texts. Its states are values: ``advance`` makes a new one and leaves the old
one as it was, so particles fork by sharing a state. A mask holds every token that keeps the *bytes* of
the text a prefix of some text of the set; tokens may straddle characters, and any tokenization of a
text is as good as any other. Such a prefix need not be completable with the tokens there are: then a
later mask is empty, which is a dead end and not an error.

The end token is in a mask exactly where the text so far is complete; it ends a text and is no part of
it. Other special tokens, and tokens without bytes, are in no mask.

Grammars are run by llguidance. Compiling one and computing masks takes milliseconds of CPU time: in an
asyncio program, call ``masks`` and ``advance`` in a thread (``asyncio.to_thread``).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.vocabulary import special_token_ids

if TYPE_CHECKING:
    from genrt.lm import AsyncLM

__all__ = ["Constraint", "ConstraintState", "bitmasks", "masks", "regex"]

_LONGEST_TOKEN = 1024
"""Bytes; llguidance aborts on a vocabulary with longer ones."""


@runtime_checkable
class ConstraintState(Protocol):
    """What a constraint knows after some text. Immutable: sharing one between particles is safe."""

    @property
    def accepting(self) -> bool:
        """Whether the text so far is complete, so that it may end here."""
        ...

    def mask(self) -> Tensor:
        """Bool ``[vocab_size]``, on the CPU: the tokens that may follow; the end token if accepting.

        Nothing at all is a dead end. ``masks`` computes those of many states at once, faster.
        """
        ...

    def advance(self, token_id: int) -> ConstraintState:
        """The state after one more token of the text.

        Raises:
            InvalidRequest: the token is not in the mask, or is the end token.
        """
        ...


@runtime_checkable
class Constraint(Protocol):
    """A set of texts. Any object with a ``start`` that returns such states can be one."""

    def start(self) -> ConstraintState:
        """The state before any text."""
        ...


def regex(pattern: str, lm: AsyncLM) -> Constraint:
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
    return _Grammar(_vocabulary(lm), f"start: /{escaped}/", f"regular expression {pattern!r}")


def masks(states: Sequence[ConstraintState]) -> Tensor:
    """Bool ``[len(states), vocab_size]``, on the CPU: each state's ``mask``, computed in parallel.

    Raises:
        InvalidRequest: there are no states, or they are over vocabularies of different sizes.
        InvalidConstraint: a grammar exceeded llguidance's limits on memory or work.
    """
    words, vocab_size = _words(states)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(bits[:, :vocab_size]).view(np.bool_))


def bitmasks(states: Sequence[ConstraintState]) -> Tensor:
    """The same packed: int32 ``[len(states), ceil(vocab_size / 32)]``, token ``i`` at bit ``i % 32``
    of word ``i // 32`` (llguidance's layout); the bits beyond the vocabulary are 0.

    Raises:
        InvalidRequest: there are no states, or they are over vocabularies of different sizes.
        InvalidConstraint: a grammar exceeded llguidance's limits on memory or work.
    """
    return torch.from_numpy(_words(states)[0])


# Masks are made with NumPy: torch would start its own team of threads in every thread that asks.
_Words: TypeAlias = NDArray[np.int32]


def _words(states: Sequence[ConstraintState]) -> tuple[_Words, int]:
    """The packed masks and the vocabulary's size."""
    if not states:
        raise InvalidRequest("masks of no states have no width; give at least one state")
    missing: dict[_Vocabulary, dict[int, _GrammarState]] = {}
    for state in states:
        if isinstance(state, _GrammarState) and not len(state.words):
            missing.setdefault(state.vocabulary, {})[id(state)] = state
    for vocabulary, unfilled in missing.items():
        vocabulary.fill(list(unfilled.values()))
    rows, sizes = [], set()
    for state in states:
        if isinstance(state, _GrammarState):
            rows.append(state.words)
            sizes.add(len(state.vocabulary.tokens))
        else:
            mask = state.mask()
            rows.append(_packed(mask))
            sizes.add(len(mask))
    if len(sizes) != 1:
        raise InvalidRequest(
            f"the states are over vocabularies of {sorted(sizes)} tokens; ask for one lm's at a time"
        )
    return np.stack(rows), sizes.pop()


def _packed(mask: Tensor) -> _Words:
    padded = np.zeros(-(-len(mask) // 32) * 32, dtype=np.bool_)
    padded[: len(mask)] = mask.cpu().numpy()
    return np.packbits(padded, bitorder="little").view(np.int32)


class _Vocabulary:
    """One lm's tokens as llguidance wants them, shared by all constraints over that lm.

    ``lock`` is held around every use of a matcher of this vocabulary: matchers refuse to be used by
    two threads at once, and states are shared freely.
    """

    def __init__(self, tokens: list[bytes], eos_token_id: int, special: frozenset[int]) -> None:
        from llguidance import LLExecutor, LLTokenizer

        longest = max(map(len, tokens))
        if longest > _LONGEST_TOKEN:
            raise InvalidConstraint(
                f"the vocabulary has a token of {longest} bytes, and llguidance takes {_LONGEST_TOKEN} "
                "at most; use another model, or a constraint of your own"
            )
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.lock = threading.Lock()
        self.executor: Any = LLExecutor()
        self.tokenizer: Any = LLTokenizer(
            _Tokens(tokens, eos_token_id, special), n_vocab=len(tokens)
        )

    def fill(self, states: Sequence[_GrammarState]) -> None:
        """Compute the packed masks of distinct states, in parallel, and leave them there."""
        with self.lock:
            # Another thread may have been here while this one waited.
            unfilled = [state for state in states if not len(state.words)]
            if not unfilled:
                return
            words: _Words = np.zeros((len(unfilled), -(-len(self.tokens) // 32)), dtype=np.int32)
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
                word, bit = divmod(self.eos_token_id, 32)
                end = np.uint32(1 << bit).view(np.int32)
                row[word] = row[word] | end if state.accepting else row[word] & ~end
                state.words = row.copy()


class _Tokens:
    """The attributes and the call by which llguidance knows a tokenizer."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokens: list[bytes], eos_token_id: int, special: frozenset[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = sorted(special | {eos_token_id})

    def __call__(self, text: str | bytes) -> list[int]:
        # Asked only for the tokens of forced text, which no_forcing turns off: masks would then
        # admit one tokenization alone.
        return []


_vocabularies: weakref.WeakKeyDictionary[AsyncLM, _Vocabulary] = weakref.WeakKeyDictionary()


def _vocabulary(lm: AsyncLM) -> _Vocabulary:
    vocabulary = _vocabularies.get(lm)
    if vocabulary is None:
        eos_token_id = getattr(lm.tokenizer, "eos_token_id", None)
        if eos_token_id is None:
            raise InvalidConstraint(
                "a constraint ends texts with the end token, and the model's tokenizer names none: "
                "set its eos_token_id"
            )
        vocabulary = _Vocabulary(lm.byte_vocab, eos_token_id, special_token_ids(lm.tokenizer))
        _vocabularies[lm] = vocabulary
    return vocabulary


class _Grammar:
    """A constraint that llguidance runs, from a grammar in its Lark dialect."""

    def __init__(self, vocabulary: _Vocabulary, lark: str, name: str) -> None:
        from llguidance import LLMatcher, LLParserLimits

        grammar = LLMatcher.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\n{lark}')
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidConstraint(f"the {name} does not compile: {_brief(matcher.get_error())}")
        self._name = name
        self._start = _GrammarState(vocabulary, matcher)
        # What is too complex mostly is so from the start: say it here, not in the midst of a run.
        vocabulary.fill([self._start])

    def start(self) -> ConstraintState:
        return self._start

    def __repr__(self) -> str:
        return f"<constraint: {self._name}>"


class _GrammarState:
    """A matcher that is only ever copied; ``words`` is its packed mask, empty until computed."""

    __slots__ = ("accepting", "matcher", "vocabulary", "words")

    def __init__(self, vocabulary: _Vocabulary, matcher: Any) -> None:
        self.vocabulary = vocabulary
        self.matcher = matcher
        self.accepting: bool = matcher.is_accepting()
        self.words: _Words = np.empty(0, dtype=np.int32)

    def mask(self) -> Tensor:
        return masks([self])[0]

    def advance(self, token_id: int) -> ConstraintState:
        tokens = self.vocabulary.tokens
        if not 0 <= token_id < len(tokens):
            raise InvalidRequest(f"token id {token_id} is not in 0 .. {len(tokens) - 1}")
        if token_id == self.vocabulary.eos_token_id:
            raise InvalidRequest(
                f"token {token_id} is the end token: it ends the text, and nothing comes after it"
            )
        with self.vocabulary.lock:
            matcher = self.matcher.deep_copy()
            if matcher.consume_token(token_id):
                return _GrammarState(self.vocabulary, matcher)
        raise InvalidRequest(
            f"token {token_id} ({tokens[token_id]!r}) may not follow here: "
            "advance only by tokens of the state's mask"
        )


def _brief(error: str) -> str:
    """llguidance's message without its listing of the grammar and its internal state."""
    return error.split("\n   1 |")[0].split("\n<")[0].strip()
