"""Protocols of constraints and their states, and states with packed masks."""

from __future__ import annotations

import copyreg
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeAlias, TypeGuard, TypeVar, runtime_checkable

import numpy as np
from torch import Tensor

from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.numbers import displayed, is_truth_value
from genrt.questions.arguments import advice_for
from genrt.questions.rows import id_words
from genrt.structures.matching import Tokens, Words, packed, unpacked
from genrt.tokens.encoding import encode_prompt
from genrt.tokens.vocabulary import checked_token_id

T = TypeVar("T")


class HasTokens(Protocol):
    """A runtime, as far as constraints use it."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        ...

    @property
    def byte_vocab(self) -> Sequence[bytes]:
        """The bytes of each token."""
        ...


@runtime_checkable
class ConstraintState(Protocol):
    """A constraint's state after some text. Immutable, so particles can share one."""

    @property
    def accepting(self) -> bool:
        """True if the text so far is complete and may end here."""
        ...

    def mask(self) -> Tensor:
        """Return the tokens that may follow, bool ``[vocab_size]``, on the CPU, with the end token if the
        state is accepting. An empty mask is a dead end. ``masks`` computes the masks of many states
        faster."""
        ...

    def advance(self, token_id: int) -> ConstraintState:
        """Return the state after one more token of the text.

        Raises:
            InvalidRequest: the token is not in the mask, or is the end token.
        """
        ...


@runtime_checkable
class CheckedState(Protocol):
    """The state of a constraint that is too slow to judge every token; it checks single tokens.

    It is immutable except for its cached answers, so event loops and threads can share it.
    """

    def mask(self) -> Tensor:
        """Return an upper bound of the tokens that may follow, with the end token: bool ``[vocab_size]``,
        on the CPU. ``amasks`` returns the tokens that ``check`` accepts too."""
        ...

    async def check(self, token_ids: Sequence[int]) -> list[bool]:
        """Return for each of these tokens whether it may follow; for the end token, whether the text may
        end here.

        A cancellation loses no answer that has arrived, and disturbs no other waiter.

        Raises:
            InvalidRequest: a token id is out of range.
        """
        ...

    def advance(self, token_id: int) -> CheckedState:
        """Return the state after one more token of the text, which may be unchecked.

        Raises:
            InvalidRequest: the token is not in ``mask()``, a check refused it, or it is the end token.
        """
        ...


State: TypeAlias = ConstraintState | CheckedState


def is_checked(state: State) -> TypeGuard[CheckedState]:
    """Return whether a state is a checked one, a hundred times as fast as ``isinstance``."""
    return hasattr(state, "check")


@runtime_checkable
class Constraint(Protocol):
    """A set of texts: any object with a method ``start`` that returns a state."""

    def start(self) -> State:
        """Return the state before any text. All later states are of the same kind."""
        ...


@runtime_checkable
class MaskedConstraint(Protocol):
    """A constraint with masked states."""

    def start(self) -> ConstraintState:
        """Return the state before any text."""
        ...


def checked_constraint(constraint: Constraint) -> Constraint:
    """Return the constraint. Raises InvalidConstraint if it is another kind of object."""
    is_constraint = isinstance(constraint, Constraint) and callable(constraint.start)
    if isinstance(constraint, type) or not is_constraint:
        raise InvalidConstraint(
            f"{displayed(constraint)} is no constraint: give what regex, json_schema, predicate "
            "and the like return, or an object with a method start"
        )
    return constraint


def check_positive(name: str, value: object) -> None:
    """Raise InvalidConstraint unless an argument is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidConstraint(f"{name} is {displayed(value)}: give an integer of at least 1")


def tokens_of(lm: HasTokens) -> Tokens:
    """Return the tokens of a runtime, cached after the first call.

    Raises:
        InvalidConstraint: not a runtime, or its tokenizer has no end token.
    """
    if not (hasattr(lm, "tokenizer") and hasattr(lm, "byte_vocab")):
        raise InvalidConstraint(
            f"the lm is {displayed(lm)}: give a runtime, as genrt.load returns it"
        )
    return kept_for(lm, _tokens, lambda lm: Tokens.read(lm.tokenizer, lm.byte_vocab))


def kept_for(
    lm: HasTokens, cache: weakref.WeakKeyDictionary[HasTokens, T], make: Callable[[HasTokens], T]
) -> T:
    """Return the object of a runtime in a cache, made by the first call. A program's view of a runtime
    has that of the runtime, which lives longer."""
    lm = getattr(lm, "of_program", lm)
    found = cache.get(lm)
    return cache.setdefault(lm, make(lm)) if found is None else found


def prompt_tokens(
    lm: Any,
    prompt: Any,
    *,
    name: str = "the prompt",
    begins: bool = True,
    allow_empty: bool = False,
) -> tuple[int, ...]:
    """Return the token ids of a prompt, a text or ids; messages call it ``name``. A text that begins a
    sequence has the tokenizer's special tokens, as ``lm.generate`` adds them. Raises InvalidRequest if it
    is neither, empty, or has ids outside the vocabulary."""
    is_scalar = isinstance(prompt, np.ndarray | Tensor) and prompt.ndim == 0
    if is_scalar or not isinstance(prompt, str | Sequence | np.ndarray | Tensor):
        advice = advice_for(prompt)
        raise InvalidRequest(f"{name} is {displayed(prompt)}: give a str, or token ids{advice}")
    if isinstance(prompt, str):
        prompt = encode_prompt(lm.tokenizer, prompt) if begins else lm.encode(prompt)
    elif any(map(is_truth_value, prompt)):
        raise InvalidRequest(f"{name} must be token ids, and has truth values in it")
    size = lm.vocab_size if hasattr(lm, "vocab_size") else len(lm.byte_vocab)
    ids = tuple(id_words(prompt, size, allow_empty=True, name=name))
    if not ids and not allow_empty:
        raise InvalidRequest(f"{name} is empty: give at least one token")
    return ids


def lm_of(tokens: Tokens) -> HasTokens:
    """Return the runtime that ``tokens_of`` read these tokens from. Raises InvalidConstraint if it no
    longer exists."""
    for held in _tokens.keyrefs():  # a copy, because other threads may add runtimes meanwhile
        if (lm := held()) is not None and _tokens.get(lm) is tokens:
            return lm
    raise InvalidConstraint("the runtime whose tokens these are is gone: keep it")


_tokens: weakref.WeakKeyDictionary[HasTokens, Tokens] = weakref.WeakKeyDictionary()

# In another process, an unpickled constraint uses the tokens of the runtime there.
copyreg.pickle(Tokens, lambda tokens: (tokens_of, (lm_of(tokens),)))


class PackedState:
    """The base of genrt's own states.

    The mask is computed once, in packed form. Next states are shared as long as they are referenced, so
    particles with equal texts share a state and its cached results.

    ``words`` is the mask once it is computed; do not write to it.
    """

    __slots__ = ("__weakref__", "_children", "_lock", "vocab_size", "words")

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.words: Words | None = None
        self._lock = threading.Lock()
        # No WeakValueDictionary, because one for each state costs more than the state.
        self._children: dict[int, weakref.ref[Self]] = {}

    def packed(self) -> Words:
        """Return ``mask()`` as words, computed by the first call."""
        if self.words is None:
            self.words = self._computed()
        return self.words

    def mask(self) -> Tensor:
        return unpacked(self.packed(), self.vocab_size)

    def advance(self, token_id: int) -> Self:
        index = checked_token_id(token_id, self.vocab_size)
        with self._lock:
            known = self._children.get(index)
            state = None if known is None else known()
            if state is None:
                state = self._after(index)
                self._children[index] = weakref.ref(state)
            return state

    # No ABC: its ``isinstance`` would be ten times as slow, several times per state and step.

    def _computed(self) -> Words:
        raise NotImplementedError

    def _after(self, token_id: int) -> Self:
        raise NotImplementedError


def words_of(state: State) -> tuple[Words, int]:
    """Return a state's mask as words, and its number of tokens."""
    if isinstance(state, PackedState):
        return state.packed(), state.vocab_size
    mask = state.mask().cpu().numpy()
    return packed(mask), len(mask)
