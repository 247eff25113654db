"""Potentials of many texts at once: plain functions off the event loop, coroutines together on it."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Sequence
from typing import Any

from genrt.constraints.together import together
from genrt.errors import InvalidRequest
from genrt.inference.checks import log_weight
from genrt.tokens.texts import Potential, Text


async def evaluated(name: str, potential: Potential, texts: Sequence[Text]) -> list[float]:
    """Return the log-weights of these texts; equal texts are judged once. ``name`` is for messages.

    A plain function is called in another thread, for one text after the other; a coroutine function on
    the running loop, for all texts at once. If one call raises, that is raised. After an error or a
    cancellation no call goes on, except a plain one under way, which ends by itself.

    Raises:
        InvalidRequest: a log-weight is not a number, NaN or +inf.
    """
    distinct = list(dict.fromkeys(texts))
    if _is_async(potential):
        answers: list[Any] = await together([_asked(potential, text) for text in distinct])
    else:
        stop = threading.Event()
        try:
            answers, error = await asyncio.to_thread(_called, potential, distinct, stop)
        finally:
            stop.set()
        if error is not None:
            raise error
        # If one answer is to be awaited, so are those of the texts that were not asked yet.
        if answers and inspect.isawaitable(answers[-1]):
            rest, first = distinct[len(answers) :], answers.pop()
            answers += await together(
                [_asked(lambda _: first, texts[0]), *(_asked(potential, text) for text in rest)]
            )
    by_text = {
        text: _log_weight(name, text, answer)
        for text, answer in zip(distinct, answers, strict=True)
    }
    return [by_text[text] for text in texts]


def _called(
    potential: Potential, texts: Sequence[Text], stop: threading.Event
) -> tuple[list[Any], BaseException | None]:
    """Return the answers up to the first that has to be awaited, and the error that ended them, if any.

    An error is handed over as a value: a future can't hold StopIteration.
    """
    answers: list[Any] = []
    for text in texts:
        if stop.is_set():
            break
        try:
            answers.append(potential(text))
        except BaseException as error:
            return answers, error
        if inspect.isawaitable(answers[-1]):
            break
    return answers, None


async def _asked(potential: Potential, text: Text) -> Any:
    answer = potential(text)
    return await answer if inspect.isawaitable(answer) else answer


def _is_async(function: Any) -> bool:
    # An object with an ``async def __call__`` is a coroutine function in all but name.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def _log_weight(name: str, text: Text, answer: Any) -> float:
    try:
        return log_weight(answer)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"the {name} gave {answer!r} for {str(text)!r}: {error}; what rules texts out can also be a "
            "constraint"
        ) from error
