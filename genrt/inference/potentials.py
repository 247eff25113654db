"""Potentials of many texts at once: plain functions off the event loop, coroutines together on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genrt.errors import InvalidRequest
from genrt.inference.checks import check_log_weight
from genrt.runtime.concurrency import ConcurrentCalls
from genrt.tokens.texts import Potential, Text


async def evaluate_potential(name: str, potential: Potential, texts: Sequence[Text]) -> list[float]:
    """Return the log-weights of these texts; equal texts in one call. ``name`` is for messages.

    A plain function is called in another thread, for one text after the other; a coroutine function on
    the running loop, for all texts at once. The first exception is raised. After it, or a
    cancellation, no call continues, except a plain one that has begun. Raises InvalidRequest for a
    log-weight that is not a number, NaN or +inf.
    """
    distinct = list(dict.fromkeys(texts))
    answers: dict[int, Any] = {}
    asked = ConcurrentCalls(potential, max_concurrent=max(1, len(distinct)))
    await asked.about(dict(enumerate(distinct)), answers.__setitem__)
    by_text = {
        text: _checked_weight(name, text, answers[number]) for number, text in enumerate(distinct)
    }
    return [by_text[text] for text in texts]


def _checked_weight(name: str, text: Text, answer: Any) -> float:
    try:
        return check_log_weight(answer)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"the {name} gave {answer!r} for {str(text)!r}: {error}; what rules texts out can also be a "
            "constraint"
        ) from error
