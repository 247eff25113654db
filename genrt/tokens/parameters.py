"""The parameters of sampling: their ranges, checked, and as columns of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.numbers import shown

_RANGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "temperature": (lambda x: (x >= 0) & (x < math.inf), "a finite number of at least 0"),
    "top_k": (lambda x: x >= 0, "an integer of at least 0, where 0 is off"),
    "top_p": (lambda x: (x > 0) & (x <= 1), "a number above 0 and at most 1, where 1 is off"),
    "min_p": (lambda x: (x >= 0) & (x <= 1), "a number between 0 and 1, where 0 is off"),
}
"""For each parameter: a test whether values are in range, and the range in words."""


def check_parameters(
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
) -> None:
    """Refuse parameters of ``truncate`` that are out of their range.

    Raises:
        InvalidRequest: the first such parameter, its value and its range.
    """
    _numbers_of("temperature", temperature)
    _numbers_of("top_k", top_k)
    _numbers_of("top_p", top_p)
    _numbers_of("min_p", min_p)


def column(name: str, value: float | Tensor, batch: Tensor) -> Tensor:
    """Return a parameter, read by ``_numbers_of``, as ``[n, 1]`` on the batch's device."""
    column = _numbers_of(name, value).reshape(-1, 1)
    if len(column) not in (1, len(batch)):
        raise InvalidRequest(f"{name} has {len(column)} values for {len(batch)} rows")
    return column.to(batch.device).expand(len(batch), 1)


def _numbers_of(name: str, value: float | Tensor) -> Tensor:
    """Return a parameter's values in the type that compares them: int64 for ``top_k``, else float64.

    Raises:
        InvalidRequest: neither a number nor a tensor ``[n]`` of numbers, or out of its range.
    """
    is_sound, range_ = _RANGES[name]
    dtype = torch.int64 if name == "top_k" else torch.float64
    numbers = value.detach() if isinstance(value, Tensor) else _scalar(value, dtype)
    fitting = numbers is not None and numbers.dim() <= 1 and torch.can_cast(numbers.dtype, dtype)
    if numbers is None or not fitting or numbers.dtype == torch.bool:
        raise InvalidRequest(f"{name} is {value!r}: give {range_}, or a tensor [n] of them")
    numbers = numbers.to(dtype)
    if not bool(is_sound(numbers).all()):
        raise InvalidRequest(f"{name} is {shown(value)}: give {range_}")
    return numbers


def _scalar(value: object, dtype: torch.dtype) -> Tensor | None:
    """Return a number as a tensor, clamped to the range of the type; ``None`` if it is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    if dtype.is_floating_point:
        try:
            return torch.tensor(float(value), dtype=dtype)
        except OverflowError:  # an int beyond every float
            return torch.tensor(math.inf if value > 0 else -math.inf, dtype=dtype)
    if not isinstance(value, int | np.integer):
        return None
    return torch.tensor(max(-1, min(int(value), torch.iinfo(dtype).max)), dtype=dtype)
