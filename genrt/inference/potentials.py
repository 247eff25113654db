"""Potentials of many texts at once: plain functions off the event loop, coroutines together on it."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Sequence
from typing import Any

from genrt.errors import InvalidRequest
from genrt.texts import Potential, Text

__all__ = ["evaluated"]


async def evaluated(name: str, potential: Potential, texts: Sequence[Text]) -> list[float]:
    """The log-weights of these texts; equal texts are judged once. ``name`` is for messages.

    A plain function is called in another thread, for all texts in turn, a coroutine function on the
    running loop, for all at once; whatever one of them raises is raised, and the others are cancelled.

    Raises:
        InvalidRequest: a log-weight is not a number, NaN or +inf.
    """
    distinct = list(dict.fromkeys(texts))
    if _is_async(potential):
        answers: list[Any] = [potential(text) for text in distinct]
    else:
        answers = await asyncio.to_thread(lambda: [potential(text) for text in distinct])
    if any(map(inspect.isawaitable, answers)):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(answer)) for answer in answers]
        answers = [task.result() for task in tasks]
    by_text = {
        text: _log_weight(name, text, answer)
        for text, answer in zip(distinct, answers, strict=True)
    }
    return [by_text[text] for text in texts]


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


async def _awaited(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def _log_weight(name: str, text: Text, answer: Any) -> float:
    try:
        log_weight = float(answer)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"the {name} gave {answer!r} for {str(text)!r}: give a log-weight, a number"
        ) from error
    if math.isnan(log_weight) or log_weight == math.inf:
        raise InvalidRequest(
            f"the {name} gave {log_weight} for {str(text)!r}: a log-weight is finite, or -inf"
        )
    return log_weight
