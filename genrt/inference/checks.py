"""Checks of arguments, and of the log-weights that users' functions give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from genrt.constraints import CheckedState, Constraint, ConstraintState
from genrt.constraints.protocols import tokens_of, words_of
from genrt.errors import InvalidRequest
from genrt.inference.model import State
from genrt.lm import AsyncLM
from genrt.numbers import check_float, displayed, is_truth_value
from genrt.questions.arguments import host_array
from genrt.runtime.concurrency import ConcurrentCalls
from genrt.structures.matching import Tokens
from genrt.tokens.texts import BatchPotential, Potential, Text


def check_runtime(lm: Any) -> AsyncLM:
    """Return ``lm``, the runtime itself for ``p.lm`` of a program. Raises InvalidRequest if it is not an
    AsyncLM."""
    lm = getattr(lm, "of_program", lm)
    if not isinstance(lm, AsyncLM):
        raise InvalidRequest(f"lm is a {type(lm).__name__}: give what genrt.load returned")
    return lm


def checked_state(state: Any) -> State:
    """Return an algorithm's state. Raises InvalidRequest if it is of another type."""
    if not isinstance(state, State):
        raise InvalidRequest(
            f"the state is {displayed(state)}: give a state, at first that of init(seed)"
        )
    return state


def check_callable(name: str, value: Any, what: str, *, optional: bool = False) -> None:
    """Raise InvalidRequest, with the advice to give ``what``, unless a value is callable, or is ``None``
    and ``optional``."""
    if not callable(value) and not (optional and value is None):
        raise InvalidRequest(f"{name} is {displayed(value)}: give {what}")


def check_temperature(temperature: Any) -> float:
    """Return the temperature. Raises InvalidRequest unless it is a positive number."""
    number = check_float("temperature", temperature)
    if number <= 0:
        raise InvalidRequest(
            f"temperature is {temperature}: give a positive number; 0 would be greedy, and no law"
        )
    return number


def check_log_weight(value: Any, about: str) -> float:
    """Return a log-weight, a number of any library, as a float. Raises InvalidRequest, which begins with
    ``about``, for a truth value, no real number, NaN or +inf."""
    number, advice = math.nan, "a log-weight is finite, or -inf"
    if is_truth_value(value):
        advice = "give a log-weight, for a condition 0.0 or -math.inf, or take a constraint"
    else:
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            # Other libraries' numbers have ``item``, which raises if they hold more than one.
            number = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError):
            advice = "give a log-weight, a number"
        except OverflowError:
            pass
    if number < math.inf:
        return number
    raise InvalidRequest(f"{about} {displayed(value)}: {advice}")


def check_log_weights(values: Any, count: int, about: str) -> NDArray[np.float64]:
    """Return ``count`` log-weights, in a tensor, an array or another sequence, as an array ``[count]``.
    Raises InvalidRequest otherwise, which begins with ``about``."""
    try:
        found = _log_weights(values.detach() if isinstance(values, torch.Tensor) else values)
    except InvalidRequest as error:
        raise InvalidRequest(f"{about} {displayed(values)}: {error}") from error
    if len(found) != count:
        raise InvalidRequest(f"{about} {displayed(values)}: give {count}, a log-weight for each")
    return found


def _log_weights(values: Any) -> NDArray[np.float64]:
    if not isinstance(values, torch.Tensor | np.ndarray):
        if isinstance(values, str | Mapping | Set) or not isinstance(values, Iterable):
            raise InvalidRequest("give log-weights in a list, a tensor or an array")
        return np.array([check_log_weight(each, "it has") for each in values], np.float64)
    if isinstance(values, torch.Tensor) and values.dtype.is_floating_point:
        values = values.double()  # NumPy has no bfloat16
    array = host_array(values, "log-weights")
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise InvalidRequest("give log-weights in one flat sequence of numbers")
    if not (array < math.inf).all():
        raise InvalidRequest("a log-weight is finite, or -inf")
    return array.astype(np.float64)


async def evaluate_potential(name: str, potential: Potential, texts: Sequence[Text]) -> list[float]:
    """Return the texts' log-weights; equal texts are one call. ``name`` is for messages. A plain function
    is called in another thread, for one text after the other; a coroutine function on the running loop,
    for all texts at once; a ``batched`` one once for all. The first exception is raised. After it, or a
    cancellation, no call continues, except a plain one that already runs. Raises InvalidRequest for a
    log-weight that is not a number, NaN or +inf."""
    distinct = list(dict.fromkeys(texts))
    answers: dict[int, Any] = {}
    if isinstance(potential, BatchPotential) and distinct:
        asked = ConcurrentCalls(potential.function, max_concurrent=1)
        await asked.about({0: distinct}, answers.__setitem__)
        about = f"the {name} of {len(distinct)} texts gave"
        answers = dict(enumerate(check_log_weights(answers[0], len(distinct), about)))
    else:
        asked = ConcurrentCalls(potential, max_concurrent=max(1, len(distinct)))
        await asked.about(dict(enumerate(distinct)), answers.__setitem__)
    by_text = {
        text: check_log_weight(answers[number], f"the {name} of {str(text)!r} gave")
        for number, text in enumerate(distinct)
    }
    return [by_text[text] for text in texts]


def constraint_start(lm: AsyncLM, constraint: Any) -> ConstraintState | CheckedState:
    """Return a constraint's state before any text. Raises InvalidRequest if it is not a constraint, or is
    one over another vocabulary than the runtime's."""
    is_one = isinstance(constraint, Constraint) and not isinstance(constraint, type)
    start = constraint.start() if is_one and callable(constraint.start) else None
    if not isinstance(start, ConstraintState | CheckedState):
        raise InvalidRequest(
            f"the constraint is a {type(constraint).__name__}: give one of genrt.constraints, such as "
            "regex(pattern, lm) or predicate(function, lm), or an object whose start() is a state"
        )
    tokens, (_, vocab_size) = getattr(constraint, "tokens", None), words_of(start)
    if vocab_size != lm.vocab_size or (isinstance(tokens, Tokens) and tokens != tokens_of(lm)):
        raise InvalidRequest(
            f"the constraint is over another vocabulary, of {vocab_size} tokens, and the model's has "
            f"{lm.vocab_size}: make it with the lm of the model"
        )
    return start
