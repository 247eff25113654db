"""The protocols of constraints: sets of texts, and states that tell which tokens may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeGuard, runtime_checkable

from torch import Tensor

from genrt.errors import InvalidConstraint


@runtime_checkable
class ConstraintState(Protocol):
    """A constraint's knowledge after some text. Immutable: sharing one between particles is safe."""

    @property
    def accepting(self) -> bool:
        """True if the text so far is complete, so that it may end here."""
        ...

    def mask(self) -> Tensor:
        """Return the tokens that may follow, bool ``[vocab_size]``, on the CPU; the end token if
        accepting.

        An empty mask is a dead end. ``masks`` computes those of many states at once, faster.
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
    """The state of a constraint that takes too long to judge every token: it is asked about single
    tokens.

    Immutable except that it remembers its answers, so that sharing one is safe, between event loops and
    threads too.
    """

    def mask(self) -> Tensor:
        """Return the tokens that nothing cheap rules out, the end token among them: bool
        ``[vocab_size]``, on the CPU. Those of them may follow that ``check`` says yes to; ``amasks``
        returns these."""
        ...

    async def check(self, token_ids: Sequence[int]) -> list[bool]:
        """Tell for each of these tokens whether it may follow; for the end token, whether the text may
        end here.

        Cancelling it loses no answer that has arrived, and takes none from others who wait for the same.

        Raises:
            InvalidRequest: a token id is out of range.
        """
        ...

    def advance(self, token_id: int) -> CheckedState:
        """Return the state after one more token of the text, which need not have been checked.

        Raises:
            InvalidRequest: the token is not in ``mask()``, was checked and may not follow, or is the end
                token.
        """
        ...


State: TypeAlias = ConstraintState | CheckedState


def is_checked(state: State) -> TypeGuard[CheckedState]:
    """Tell whether it is a checked one, a hundred times as fast as ``isinstance`` with a protocol."""
    return hasattr(state, "check")


@runtime_checkable
class Constraint(Protocol):
    """A set of texts: any object with a ``start`` that returns such states."""

    def start(self) -> State:
        """Return the state before any text. All that follow it are of its kind."""
        ...


@runtime_checkable
class MaskedConstraint(Protocol):
    """A constraint whose states know their masks."""

    def start(self) -> ConstraintState:
        """Return the state before any text."""
        ...


def checked_constraint(constraint: Constraint) -> Constraint:
    """Return the constraint. Raises InvalidConstraint if it is something else."""
    if isinstance(constraint, type) or not isinstance(constraint, Constraint):
        raise InvalidConstraint(
            f"{constraint!r} is no constraint: give what regex, json_schema, predicate and the like "
            "return, or an object with a method start"
        )
    return constraint


def check_count(name: str, value: object) -> None:
    """Raise InvalidConstraint unless an argument is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidConstraint(f"{name} is {value!r}: give an integer of at least 1")
