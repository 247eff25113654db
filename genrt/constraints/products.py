"""Combines constraints: intersections, masks of many states, and potentials."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, Self, overload

import numpy as np
from cachetools import LRUCache
from torch import Tensor, from_numpy

from genrt.constraints.grammars import GrammarState
from genrt.constraints.protocols import (
    CheckedState,
    Constraint,
    ConstraintState,
    HasTokens,
    MaskedConstraint,
    PackedState,
    State,
    check_positive,
    checked_constraint,
    is_checked,
    tokens_of,
    words_of,
)
from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.runtime.concurrency import gather_all
from genrt.structures.matching import Tokens, Words, has_bit, packed, unpacked
from genrt.tokens.texts import Potential, Text
from genrt.tokens.vocabulary import checked_token_id


@overload
def all_of(*constraints: MaskedConstraint) -> MaskedConstraint: ...
@overload
def all_of(*constraints: Constraint) -> Constraint: ...
def all_of(*constraints: Constraint) -> Constraint:
    """Return the constraint of the texts that satisfy all of the constraints.

    Its states are masked if all constraints have masked states. Otherwise its states are checked ones:
    ``mask`` holds the tokens that the masked constraints allow. ``check`` then asks the checked
    constraints in argument order, each about the tokens that the previous one allowed.

    A text may be a prefix of some text in each set, but of no text in all of them. Its masks become empty
    only later, when the constraints contradict each other.

    Raises:
        InvalidConstraint: no constraints, an argument that is not a constraint, or different
            vocabularies.
    """
    if len(constraints) == 1 and isinstance(constraints[0], list | tuple):
        raise InvalidConstraint(
            "the constraints are in one list: give them one by one, all_of(*constraints)"
        )
    if not constraints:
        raise InvalidConstraint("a product needs at least one constraint")
    factors: list[Constraint] = []
    for constraint in constraints:
        checked_constraint(constraint)
        factors += constraint.factors if isinstance(constraint, _Product) else [constraint]
    return factors[0] if len(factors) == 1 else _Product(factors)


class _Product:
    """The constraint."""

    def __init__(self, factors: Sequence[Constraint]) -> None:
        vocabularies = [getattr(factor, "tokens", None) for factor in factors]
        known = [tokens for tokens in vocabularies if isinstance(tokens, Tokens)]
        starts = [factor.start() for factor in factors]
        sizes = {words_of(state)[1] for state in starts}
        if len(sizes) > 1 or any(known[0] != tokens for tokens in known[1:]):
            raise InvalidConstraint(
                "the constraints are over different vocabularies: make all of them with one lm"
            )
        self.factors = tuple(factors)
        self.tokens = known[0] if known else None
        kind = CheckedProduct if any(map(is_checked, starts)) else MaskedProduct
        self._start = kind(tuple(sorted(starts, key=is_checked)), sizes.pop())

    def start(self) -> Any:
        return self._start

    def __reduce__(self) -> tuple[Any, ...]:
        return _Product, (self.factors,)

    def __repr__(self) -> str:
        return f"<constraint: all of {', '.join(map(repr, self.factors))}>"


class ProductState(PackedState):
    """A state of each factor, with the checked ones last."""

    __slots__ = ("factors",)

    def __init__(self, factors: tuple[Any, ...], vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.factors = factors

    def _computed(self) -> Words:
        return reduce(np.bitwise_and, [words_of(state)[0] for state in self.factors])

    def _after(self, token_id: int) -> Self:
        factors = tuple(state.advance(token_id) for state in self.factors)
        return type(self)(factors, self.vocab_size)


class MaskedProduct(ProductState):
    """A product state with masked factors alone."""

    __slots__ = ()

    @property
    def accepting(self) -> bool:
        return all(state.accepting for state in self.factors)


class CheckedProduct(ProductState):
    """A product state with some checked factors."""

    __slots__ = ()

    async def check(self, token_ids: Sequence[int]) -> list[bool]:
        asked = [checked_token_id(token_id, self.vocab_size) for token_id in token_ids]
        words = self.words
        if words is None:
            words = await asyncio.to_thread(self.packed)
        left = [token_id for token_id in dict.fromkeys(asked) if has_bit(words, token_id)]
        for state in filter(is_checked, self.factors):
            if left:
                answers = await state.check(left)
                left = [i for i, answer in zip(left, answers, strict=True) if answer]
        allowed = set(left)
        return [token_id in allowed for token_id in asked]


QUICK_BYTES = 2 << 20
"""Computed masks of up to this many bytes are copied on the event loop, in about 0.2 ms."""


def masks(states: Sequence[ConstraintState]) -> Tensor:
    """Return each state's ``mask``, computed in parallel: bool ``[len(states), vocab_size]``, on the CPU.

    Raises:
        InvalidRequest: there are no states, their vocabularies have different sizes, or one is a checked
            state, which needs ``amasks``.
        InvalidConstraint: a grammar exceeded llguidance's limits on memory or work.
    """
    _refuse_checked(states)
    return unpacked(*_words(states))


def bitmasks(states: Sequence[ConstraintState]) -> Tensor:
    """Return ``masks`` packed: int32 ``[len(states), ceil(vocab_size / 32)]``.

    Token ``i`` is bit ``i % 32`` of word ``i // 32``; bits beyond the vocabulary are 0. Raises as
    ``masks``.
    """
    _refuse_checked(states)
    return from_numpy(_words(states)[0])


async def amasks(states: Sequence[State]) -> Tensor:
    """Return ``masks``, computed off the event loop, also of checked states, which check every token that
    their ``mask`` allows, concurrently. After a cancellation no further check starts.

    Raises:
        InvalidRequest: there are no states, or their vocabularies have different sizes.
        InvalidConstraint: a grammar exceeded llguidance's limits on memory or work.
        Exception: any exception that a predicate raised.
    """
    words, vocab_size = await _awords(states)
    return unpacked(words, vocab_size)


async def abitmasks(states: Sequence[State]) -> Tensor:
    """Return ``amasks`` packed in the layout of ``bitmasks``, which ``AsyncLM.draw`` accepts. Raises as
    ``amasks``."""
    return from_numpy((await _awords(states))[0])


def _refuse_checked(states: Sequence[State]) -> None:
    if any(map(is_checked, _checked_list(states))):
        raise InvalidRequest(
            "a state of a predicate, or of a product with one, has to be asked token by token: "
            "await amasks(states) or abitmasks(states), or its check(token_ids)"
        )


def _checked_list(states: Sequence[State]) -> Sequence[State]:
    if not isinstance(states, Sequence):
        raise InvalidRequest(f"the states are {states!r}: give a list of states")
    if not states:
        raise InvalidRequest("masks of no states have no width; give at least one state")
    for state in states:
        if not hasattr(state, "mask"):
            raise InvalidRequest(
                f"{state!r} is no state of a constraint: give constraint.start(), or what follows it"
            )
    return states


def fill(states: Iterable[Any]) -> None:
    """Compute the missing masks of grammar states in parallel, including states inside products. Raises
    InvalidConstraint as ``masks``."""
    missing: dict[Any, dict[int, GrammarState]] = {}
    pending = [*states]
    while pending:
        state = pending.pop()
        if isinstance(state, ProductState):
            pending += state.factors
        elif isinstance(state, GrammarState) and state.words is None:
            missing.setdefault(state.vocabulary, {})[id(state)] = state
    for vocabulary, unfilled in missing.items():
        vocabulary.fill(list(unfilled.values()))


def are_quick(states: Iterable[Any]) -> bool:
    """Return whether advancing these states and computing their masks is faster than starting a thread,
    judged by the last time."""
    return all(isinstance(each, GrammarState) and each.vocabulary.is_quick for each in states)


def _words(states: Sequence[State]) -> tuple[Words, int]:
    """Return the packed masks and the vocabulary's size. A checked state's mask is an upper bound."""
    distinct = {id(state): state for state in states}
    fill(distinct.values())
    rows = {key: words_of(state) for key, state in distinct.items()}
    sizes = {size for _, size in rows.values()}
    if len(sizes) != 1:
        raise InvalidRequest(
            f"the states are over vocabularies of {sorted(sizes)} tokens; ask for one lm's at a time"
        )
    words = np.concatenate([rows[id(state)][0] for state in states])
    return words.reshape(len(states), -1), sizes.pop()


def _known(states: Sequence[Any]) -> tuple[Words, int] | None:
    """Return the result of ``_words`` if all masks are computed, of one vocabulary, and quick to copy;
    otherwise ``None``."""
    if not all(issubclass(kind, PackedState) for kind in {*map(type, states)}):
        return None
    known = [state.words for state in states if state.words is not None]
    sizes = {state.vocab_size for state in states}
    if len(known) < len(states) or len(sizes) > 1 or known[0].nbytes * len(known) > QUICK_BYTES:
        return None
    words = np.frombuffer(bytearray().join(known), np.int32)  # faster than np.concatenate
    return words.reshape(len(known), -1), sizes.pop()


async def _awords(states: Sequence[State]) -> tuple[Words, int]:
    if are_quick(_checked_list(states)):
        fill(states)
    known = _known(states)
    words, vocab_size = await asyncio.to_thread(_words, states) if known is None else known
    checked: dict[int, tuple[CheckedState, list[int]]] = {}
    for row, state in enumerate(states):
        if is_checked(state):
            checked.setdefault(id(state), (state, []))[1].append(row)
    if not checked:
        return words, vocab_size

    async def ask(state: CheckedState, rows: list[int]) -> None:
        mask = unpacked(words[rows[0]], vocab_size).numpy()
        (token_ids,) = mask.nonzero()
        answers = await state.check(token_ids.tolist())
        if len(answers) != len(token_ids):
            raise InvalidRequest(
                f"{state!r} gave {len(answers)} of {len(token_ids)} answers: give one for each token"
            )
        mask[token_ids] = answers
        words[rows] = packed(mask)

    await gather_all([ask(state, rows) for state, rows in checked.values()])
    return words, vocab_size


def potential(
    constraint: Constraint, *, lm: HasTokens | None = None, cache_size: int = 1024
) -> Potential:
    """Return the constraint's indicator as a log-weight: 0 for a finished text of the set, and for an
    unfinished text that the masks lead to; otherwise -inf.

    The states of the last ``cache_size`` texts are cached. A text costs one step for each token after its
    longest cached prefix. A predicate judges the text itself and not its prefixes.

    The potential is a plain function, for any thread or event loop; for a constraint of checked states it
    returns an awaitable. It raises InvalidRequest for an argument that is not a Text and for a token id
    out of range, and any exception of a predicate.

    Args:
        lm: needed for your own constraint with checked states, to know the end token.

    Raises:
        InvalidConstraint: not a constraint, ``cache_size`` is under 1, or ``lm`` is needed.
    """
    checked_constraint(constraint)
    check_positive("cache_size", cache_size)
    tokens = getattr(constraint, "tokens", None) if lm is None else tokens_of(lm)
    if not is_checked(constraint.start()):
        return _Indicator(constraint, tokens, cache_size)
    if tokens is None:
        raise InvalidConstraint(
            f"the end token of {constraint!r} is not known: give the lm that it is over"
        )
    return _AskedIndicator(constraint, tokens, cache_size)


class _States:
    """Caches the states that texts lead to; ``None`` for a text outside the set."""

    def __init__(self, constraint: Constraint, tokens: Tokens | None, cache_size: int) -> None:
        self._constraint, self._start = constraint, constraint.start()
        self._tokens = tokens
        self._kept: LRUCache[tuple[int, ...], Any] = LRUCache(cache_size)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._constraint, self._tokens, self._kept.maxsize)

    def __repr__(self) -> str:
        return f"<potential of {self._constraint!r}>"

    def token_ids(self, text: Text) -> tuple[int, ...]:
        """Return the text's tokens. Raises InvalidRequest if it is not a Text over these tokens."""
        if not isinstance(text, Text):
            raise InvalidRequest(f"a potential was given {text!r}: call it with a Text")
        if self._tokens is not None:
            for token_id in text.token_ids:
                checked_token_id(token_id, len(self._tokens))
        return text.token_ids

    def after(self, token_ids: tuple[int, ...]) -> Any:
        """Return the state after these tokens."""
        with self._lock:  # find the longest cached prefix
            kept = (i for i in range(len(token_ids), 0, -1) if token_ids[:i] in self._kept)
            length = next(kept, 0)
            state = self._kept[token_ids[:length]] if length else self._start
        for token_id in token_ids[length:]:
            if state is None:
                break
            try:
                state = state.advance(token_id)
            except InvalidRequest:
                state = None
        with self._lock:
            self._kept[token_ids] = state
        return state


class _Indicator(_States):
    """The potential of a constraint with masked states."""

    def __call__(self, text: Text) -> float:
        state = self.after(self.token_ids(text))
        is_in = state is not None and (not text.finished or state.accepting)
        return 0.0 if is_in else -math.inf


class _AskedIndicator(_States):
    """The potential of a constraint with checked states."""

    async def __call__(self, text: Text) -> float:
        token_ids = self.token_ids(text)
        if text.finished and self._tokens is not None:
            token_ids = (*token_ids, self._tokens.eos_token_id)
        if not token_ids:
            return 0.0
        state = await asyncio.to_thread(self.after, token_ids[:-1])
        is_in = state is not None and (await state.check(token_ids[-1:]))[0]
        return 0.0 if is_in else -math.inf
