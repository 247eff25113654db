"""Products of constraints: the texts that are in every one of several sets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np
from torch import Tensor

from genrt.constraints.protocols import (
    CheckedState,
    Constraint,
    ConstraintState,
    MaskedConstraint,
    State,
    checked_constraint,
    is_checked,
    is_masked,
)
from genrt.constraints.tokens import Children, Tokens, Words, checked_token_id, unpacked, words_of
from genrt.errors import InvalidConstraint


@overload
def all_of(*constraints: MaskedConstraint) -> MaskedConstraint: ...
@overload
def all_of(*constraints: Constraint) -> Constraint: ...
def all_of(*constraints: Constraint) -> Constraint:
    """Return the constraint of the texts that satisfy every one of the constraints.

    Its states know their masks if those of all constraints do. Otherwise they are checked ones: their
    ``mask`` holds what the masked constraints allow, and ``check`` asks the others about these tokens
    only, in the order in which they are given, each about the tokens that the one before allowed.

    A text may be a prefix of one text in each set, and of none that is in all: its masks get empty only
    later, when the constraints come to contradict each other.

    Raises:
        InvalidConstraint: no constraints, something that is not a constraint, or different vocabularies.
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
        if len(sizes) > 1 or any(not known[0].same(tokens) for tokens in known[1:]):
            raise InvalidConstraint(
                "the constraints are over different vocabularies: make all of them with one lm"
            )
        self.factors = tuple(factors)
        self.tokens = known[0] if known else None
        masked = tuple(state for state in starts if is_masked(state))
        checked = tuple(state for state in starts if is_checked(state))
        self._start: MaskedProduct | CheckedProduct = (
            CheckedProduct(masked, checked, sizes.pop())
            if checked
            else MaskedProduct(masked, sizes.pop())
        )

    def start(self) -> Any:
        return self._start

    def __repr__(self) -> str:
        return f"<constraint: all of {', '.join(map(repr, self.factors))}>"


class MaskedProduct:
    """A state whose factors all know their masks."""

    __slots__ = ("__weakref__", "_children", "_words", "factors", "vocab_size")

    def __init__(self, factors: tuple[ConstraintState, ...], vocab_size: int) -> None:
        self.factors = factors
        self.vocab_size = vocab_size
        self._words: Words | None = None
        self._children: Children[MaskedProduct] = Children()

    @property
    def accepting(self) -> bool:
        return all(state.accepting for state in self.factors)

    def packed(self) -> Words:
        if self._words is None:
            self._words = _meet(self.factors)
        return self._words

    def mask(self) -> Tensor:
        return unpacked(self.packed(), self.vocab_size)

    def advance(self, token_id: int) -> MaskedProduct:
        return self._children.get(
            token_id, lambda: MaskedProduct(_advanced(self.factors, token_id), self.vocab_size)
        )


class CheckedProduct:
    """A state some of whose factors have to be asked; ``masked`` may be empty, ``checked`` is not."""

    __slots__ = ("__weakref__", "_children", "_words", "checked", "masked", "vocab_size")

    def __init__(
        self,
        masked: tuple[ConstraintState, ...],
        checked: tuple[CheckedState, ...],
        vocab_size: int,
    ) -> None:
        self.masked = masked
        self.checked = checked
        self.vocab_size = vocab_size
        self._words: Words | None = None
        self._children: Children[CheckedProduct] = Children()

    @property
    def factors(self) -> tuple[State, ...]:
        """The masked states, then the checked ones."""
        return (*self.masked, *self.checked)

    def packed(self) -> Words:
        if self._words is None:
            self._words = _meet(self.factors)
        return self._words

    def mask(self) -> Tensor:
        return unpacked(self.packed(), self.vocab_size)

    async def check(self, token_ids: Sequence[int]) -> list[bool]:
        asked = [checked_token_id(token_id, self.vocab_size) for token_id in token_ids]
        words = self._words
        if words is None:
            words = await asyncio.to_thread(self.packed)
        left = [i for i in dict.fromkeys(asked) if words[i // 32] >> (i % 32) & 1]
        for state in self.checked:
            if left:
                answers = await state.check(left)
                left = [i for i, answer in zip(left, answers, strict=True) if answer]
        allowed = set(left)
        return [token_id in allowed for token_id in asked]

    def advance(self, token_id: int) -> CheckedProduct:
        return self._children.get(
            token_id,
            lambda: CheckedProduct(
                _advanced(self.masked, token_id),
                _advanced(self.checked, token_id),
                self.vocab_size,
            ),
        )


def _meet(states: Sequence[State]) -> Words:
    words, _ = words_of(states[0])
    for state in states[1:]:
        words = np.bitwise_and(words, words_of(state)[0])
    return words


S = TypeVar("S", ConstraintState, CheckedState)


def _advanced(states: tuple[S, ...], token_id: int) -> tuple[S, ...]:
    return tuple(state.advance(token_id) for state in states)
