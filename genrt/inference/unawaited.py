"""The questions and results that a program forgot to await: found, and reported by name and line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from types import CodeType
from typing import Any, NamedTuple, TypeVar, cast

from genrt.errors import InvalidRequest

M = TypeVar("M", bound=Callable[..., Coroutine[Any, Any, Any]])


class _Asked(NamedTuple):
    """A question, and where it was asked."""

    name: str
    coroutine: Coroutine[Any, Any, Any]
    code: CodeType
    line: int

    @property
    def is_open(self) -> bool:
        """True if nobody has begun to await it."""
        return inspect.getcoroutinestate(self.coroutine) == inspect.CORO_CREATED


class Questions:
    """The questions of one execution that may still have to be awaited."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []

    def remember(self, asked: _Asked) -> None:
        """Keep it as long as it is not awaited, so that it is not lost when the program drops it."""
        self._asked = [each for each in self._asked if each.is_open]
        self._asked.append(asked)

    def forgotten(self) -> InvalidRequest | None:
        """Return the error for the questions that nobody has awaited, and close them; ``None`` if there
        is none."""
        unawaited = [each for each in self._asked if each.is_open]
        self._asked.clear()
        for each in unawaited:
            each.coroutine.close()
        if not unawaited:
            return None
        calls = dict.fromkeys(f"p.{each.name} in line {each.line}" for each in unawaited)
        names = unawaited[0].code.co_qualname.split(".")
        program = next((name for name in reversed(names) if "<" not in name), names[-1])
        return InvalidRequest(
            f"the program {program} never awaited {', '.join(calls)}: write await in front of the call"
        )


def question(method: M) -> M:
    """Wrap a method of an object with ``_questions``: its calls are remembered until they are awaited."""

    @functools.wraps(method)
    def ask(self: Any, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        coroutine = method(self, *args, **kwargs)
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        if caller is not None:
            asked = _Asked(method.__name__, coroutine, caller.f_code, caller.f_lineno)
            self._questions.remember(asked)
        return coroutine

    return cast("M", ask)


def check_returned(value: Any) -> None:
    """Raise InvalidRequest if there is something to await in what a program returned: in the value
    itself, or in its lists, tuples, sets and dictionaries."""
    values = [value]
    seen: set[int] = set()
    left: list[Any] = []
    while values:
        each = values.pop()
        if isinstance(each, dict | list | tuple | set | frozenset):
            if id(each) not in seen:
                seen.add(id(each))
                values += [*each, *each.values()] if isinstance(each, dict) else each
        elif inspect.isawaitable(each):
            left.append(each)
    for each in filter(inspect.iscoroutine, left):
        each.close()
    if left:
        name = getattr(left[0], "__qualname__", type(left[0]).__name__)
        raise InvalidRequest(
            f"the program returned what it has not awaited, of {name}: write await in front of the call"
        )
