"""Products of constraints: the intersection of several sets of texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import reduce
from typing import Any, Self, overload

import numpy as np

from genrt.constraints.protocols import Constraint, MaskedConstraint, checked_constraint, is_checked
from genrt.constraints.tokens import PackedState, words_of
from genrt.errors import InvalidConstraint
from genrt.structures.tokens import Tokens, Words, has_bit
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
