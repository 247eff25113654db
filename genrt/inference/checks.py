"""Arguments of algorithms, checked; the seeds of their steps."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrt.errors import InvalidRequest

__all__ = ["frozen", "integer", "seeds_of_step"]


def integer(name: str, value: Any, *, at_least: int) -> int:
    """It as an int.

    Raises:
        InvalidRequest: it is none, or too small.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise InvalidRequest(f"{name} is {value!r}: give an integer") from error
    if number < at_least:
        raise InvalidRequest(f"{name} is {value}: give an integer of at least {at_least}")
    return number


def frozen(array: NDArray[np.generic]) -> Any:
    """The same array, read-only from now on."""
    array.flags.writeable = False
    return array


def seeds_of_step(seed: int, step: int) -> tuple[np.random.SeedSequence, int]:
    """For an algorithm's own choices in this step, and for the model's, below 2^63."""
    own, models = np.random.SeedSequence(seed, spawn_key=(step,)).spawn(2)
    return own, int(models.generate_state(1, np.uint64)[0] >> 1)
