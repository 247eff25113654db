"""The work of a run on its model's runtime, as plain data that outlives the runtime."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from genrt.inference.checks import token_bytes
from genrt.inference.model import DEAD
from genrt.inference.state import Info
from genrt.lm import AsyncLM
from genrt.runtime.statistics import Statistics


class Counting:
    """A count of the runtime's work since it was made; of none if the model has no runtime."""

    def __init__(self, model: Any) -> None:
        self._lm = _runtime(model)
        self._before = None if self._lm is None else self._lm.statistics()

    def statistics(self) -> Statistics | None:
        """Return what the runtime did since then, for any caller; ``None`` without a runtime."""
        if self._lm is None or self._before is None:
            return None
        return self._lm.statistics().since(self._before)


def drawn_tokens(model: Any, infos: Iterable[Info]) -> dict[int, bytes]:
    """Return the bytes of every token that was drawn, by its id; ``{}`` if the model has no runtime."""
    lm = _runtime(model)
    if lm is None:
        return {}
    drawn: set[int] = set()
    for info in infos:
        drawn.update(np.unique(info.token_ids).tolist())
    vocabulary = token_bytes(lm)
    return {each: vocabulary[each] for each in sorted(drawn - {DEAD})}


def _runtime(model: Any) -> AsyncLM | None:
    lm = getattr(model, "lm", None)
    return lm if isinstance(lm, AsyncLM) else None
