"""The protocols of constraints: sets of texts, and states that say which tokens may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeGuard, runtime_checkable

from torch import Tensor

from genrt.errors import InvalidConstraint
from genrt.numbers import displayed


@runtime_checkable
class ConstraintState(Protocol):
    """A constraint's state after some text. Immutable, so particles can share one."""

    @property
    def accepting(self) -> bool:
        """True if the text so far is complete and may end here."""
        ...

    def mask(self) -> Tensor:
        """Return the tokens that may follow, bool ``[vocab_size]``, on the CPU. The end token is included
        if the state is accepting.

        An empty mask is a dead end. ``masks`` computes the masks of many states at once, faster.
        """
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

    It is immutable except for its cached answers, so sharing one is safe, also between event loops and
    threads.
    """

    def mask(self) -> Tensor:
        """Return an upper bound of the tokens that may follow: bool ``[vocab_size]``, on the CPU.

        It includes the end token. A token may follow if ``check`` accepts it too; ``amasks`` returns
        these tokens.
        """
        ...

    async def check(self, token_ids: Sequence[int]) -> list[bool]:
        """Return for each of these tokens whether it may follow; for the end token, whether the text may
        end here.

        A cancellation loses no answer that has arrived, and does not affect other waiters for the same
        answer.

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


def check_count(name: str, value: object) -> None:
    """Raise InvalidConstraint unless an argument is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidConstraint(f"{name} is {displayed(value)}: give an integer of at least 1")
