"""What a constraint is: a set of texts, and states that say which tokens may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeGuard, runtime_checkable

from torch import Tensor

from genrt.errors import InvalidConstraint


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
class CheckedState(Protocol):
    """The same for a constraint too dear to say it of every token: it is asked token by token.

    Immutable but for what it remembers of its answers, so that sharing one is safe, between event loops
    and threads too.
    """

    def mask(self) -> Tensor:
        """Bool ``[vocab_size]``, on the CPU: the tokens that nothing cheap rules out, the end token among
        them. Those that may follow are the ones of these that ``check`` says yes to; ``amasks`` has them.
        """
        ...

    async def check(self, token_ids: Sequence[int]) -> list[bool]:
        """Whether each of these tokens may follow; of the end token, whether the text may end here.

        Cancelling it loses no answer that had come, and takes none from others who wait for the same.

        Raises:
            InvalidRequest: a token id is out of range.
        """
        ...

    def advance(self, token_id: int) -> CheckedState:
        """The state after one more token of the text, which need not have been checked.

        Raises:
            InvalidRequest: the token is not in ``mask()``, was checked and may not follow, or is the end
                token.
        """
        ...


State: TypeAlias = ConstraintState | CheckedState


def is_checked(state: State) -> TypeGuard[CheckedState]:
    """Whether it is a checked one: ``isinstance``, a hundred times faster than with a protocol."""
    return hasattr(state, "check")


def is_masked(state: State) -> TypeGuard[ConstraintState]:
    """Whether it knows its mask, and need not be asked."""
    return not hasattr(state, "check")


@runtime_checkable
class Constraint(Protocol):
    """A set of texts. Any object with a ``start`` that returns such states can be one."""

    def start(self) -> State:
        """The state before any text. All that follow it are of its kind."""
        ...


@runtime_checkable
class MaskedConstraint(Protocol):
    """A constraint whose states know their masks."""

    def start(self) -> ConstraintState:
        """The state before any text."""
        ...


def checked_constraint(constraint: Constraint) -> Constraint:
    """The constraint. Raises InvalidConstraint if it is none."""
    if isinstance(constraint, type) or not isinstance(constraint, Constraint):
        raise InvalidConstraint(
            f"{constraint!r} is no constraint: give what regex, json_schema, predicate and the like "
            "return, or an object with a method start"
        )
    return constraint
