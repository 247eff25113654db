"""What a run did on its model's runtime, kept as plain data that outlives the runtime."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from genrt.inference.checks import token_bytes
from genrt.inference.model import DEAD
from genrt.inference.state import Info
from genrt.lm import AsyncLM
from genrt.runtime.statistics import Statistics

__all__ = ["Counting", "drawn_tokens"]


class Counting:
    """Counts from when it is made; nothing for a model of the user's own that has no runtime."""

    def __init__(self, model: Any) -> None:
        self._lm = _runtime(model)
        self._before = None if self._lm is None else self._lm.statistics()

    def statistics(self) -> Statistics | None:
        """What the runtime did since, for whomever; ``None`` without one."""
        if self._lm is None or self._before is None:
            return None
        return self._lm.statistics().since(self._before)


def drawn_tokens(model: Any, infos: Iterable[Info]) -> dict[int, bytes]:
    """The bytes of every token that was drawn, by its id; ``{}`` if the model has no runtime."""
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
