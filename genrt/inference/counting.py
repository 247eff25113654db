"""The work of a run on its model's runtime, as plain data that outlives the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from genrt.inference.checks import token_bytes
from genrt.inference.model import DEAD
from genrt.inference.state import Info
from genrt.lm import AsyncLM
from genrt.runtime.statistics import Statistics


def start_counting(model: Any) -> Callable[[], Statistics | None]:
    """Begin to count: return a function that returns what the model's runtime did from now on, for any
    caller; ``None`` if the model has no runtime."""
    lm = _runtime_of(model)
    if lm is None:
        return lambda: None
    before = lm.statistics()
    return lambda: lm.statistics().since(before)


def drawn_tokens(model: Any, infos: Iterable[Info]) -> dict[int, bytes]:
    """Return the bytes of every token that was drawn, by its id; ``{}`` if the model has no runtime."""
    lm = _runtime_of(model)
    if lm is None:
        return {}
    drawn = set().union(*(np.unique(info.token_ids).tolist() for info in infos)) - {DEAD}
    vocabulary = token_bytes(lm)
    return {each: vocabulary[each] for each in sorted(drawn)}


def _runtime_of(model: Any) -> AsyncLM | None:
    lm = getattr(model, "lm", None)
    return lm if isinstance(lm, AsyncLM) else None
