"""Arguments of models and algorithms, checked; the seeds of their steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from genrt.constraints import CheckedState, Constraint, ConstraintState
from genrt.constraints.tokens import Tokens, words_of
from genrt.errors import EngineUnsupported, InvalidRequest
from genrt.lm import AsyncLM

__all__ = [
    "constraint_start",
    "finite",
    "frozen",
    "integer",
    "prompt_ids",
    "runtime",
    "seeds_of_step",
    "state_of",
    "token_bytes",
]

S = TypeVar("S")


def integer(name: str, value: Any, *, at_least: int) -> int:
    """Return ``value``, an integer of any library, as an int.

    Raises:
        InvalidRequest: it is a truth value or no integer, or too small.
    """
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
            raise TypeError("a truth value is no number")
        number = operator.index(value)
    except TypeError as error:
        raise InvalidRequest(f"{name} is {value!r}: give an integer") from error
    if number < at_least:
        raise InvalidRequest(f"{name} is {value}: give an integer of at least {at_least}")
    return number


def finite(name: str, value: Any) -> float:
    """Return ``value``, a number of Python's or of numpy's, as a float.

    Raises:
        InvalidRequest: it is a truth value or no real number, or its float is not finite.
    """
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise InvalidRequest(f"{name} is {value!r}: give a finite number")


def runtime(lm: Any) -> AsyncLM:
    """Return ``lm`` if it is a runtime.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(lm, AsyncLM):
        raise InvalidRequest(f"lm is a {type(lm).__name__}: give what genrt.load returned")
    return lm


def state_of(kind: type[S], state: S) -> S:
    """Return an algorithm's state. Raises InvalidRequest if it is none."""
    if not isinstance(state, kind):
        raise InvalidRequest(f"the state is {state!r}: give a state, at first that of init(seed)")
    return state


def token_bytes(lm: AsyncLM) -> Sequence[bytes]:
    """Return ``lm.byte_vocab``, or nothing for every token where there is no tokenizer that has one."""
    try:
        return lm.byte_vocab
    except (InvalidRequest, EngineUnsupported):
        return [b""] * lm.vocab_size


def prompt_ids(lm: AsyncLM, prompt: Any) -> tuple[int, ...]:
    """Return a prompt's token ids, given a text or ids.

    Raises:
        InvalidRequest: it is neither, empty, or has ids outside the vocabulary.
    """
    if isinstance(prompt, bytes | bytearray):
        raise InvalidRequest(f"the prompt is {prompt!r}: give a str, or token ids")
    try:
        given = lm.encode(prompt) if isinstance(prompt, str) else list(prompt)
    except TypeError as error:
        raise InvalidRequest(f"the prompt is {prompt!r}: give a str, or token ids") from error
    if given and isinstance(given[0], Mapping):
        raise InvalidRequest(
            "the prompt is a list of dicts: for a conversation, give lm.encode_chat(messages)"
        )
    ids = tuple(integer("a token id", each, at_least=0) for each in given)
    if not ids:
        raise InvalidRequest("the prompt is empty: give at least one token")
    if max(ids) >= lm.vocab_size:
        raise InvalidRequest(
            f"the prompt's token id {max(ids)} is not in 0 .. {lm.vocab_size - 1}: encode it "
            "with lm.encode"
        )
    return ids


def constraint_start(lm: AsyncLM, constraint: Any) -> ConstraintState | CheckedState:
    """Return a constraint's state before any text, if it is over the runtime's tokens.

    Raises:
        InvalidRequest: it is no constraint, or over another vocabulary.
    """
    start = None
    if isinstance(constraint, Constraint) and not isinstance(constraint, type):
        start = constraint.start()
    if not isinstance(start, ConstraintState | CheckedState):
        raise InvalidRequest(
            f"the constraint is a {type(constraint).__name__}: give one of genrt.constraints, such as "
            "regex(pattern, lm) or predicate(function, lm), or an object whose start() is a state"
        )
    tokens, (_, vocab_size) = getattr(constraint, "tokens", None), words_of(start)
    if vocab_size != lm.vocab_size or (
        isinstance(tokens, Tokens) and not tokens.same(Tokens.of(lm))
    ):
        raise InvalidRequest(
            f"the constraint is over another vocabulary, of {vocab_size} tokens, and the model's has "
            f"{lm.vocab_size}: make it with the lm of the model"
        )
    return start


def frozen(array: NDArray[np.generic]) -> Any:
    """Return the same array, read-only from now on."""
    array.flags.writeable = False
    return array


def seeds_of_step(seed: int, step: int) -> tuple[np.random.SeedSequence, int]:
    """Return the seeds of this step: for an algorithm's own choices, and for its model's, below 2^63."""
    own, models = np.random.SeedSequence(seed, spawn_key=(step,)).spawn(2)
    return own, int(models.generate_state(1, np.uint64)[0] >> 1)
