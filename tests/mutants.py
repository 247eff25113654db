"""The mutation list: ways to break genrt, each of which a test must catch.

Each is a mistake that somebody could make, and another kind of mistake than the rest. ``mutate.py``
applies them, one at a time; ``test_mutants.py`` sees that they still apply. Where the source that one
breaks has changed, break the new source the same way; the tests that are named are few and quick, and
vLLM's only where nothing else can see it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A break: its name says what goes wrong; ``old``, which occurs once in ``file``, becomes ``new``;
    one of ``tests``, or of those in them that ``only`` selects as ``pytest -k``, fails then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    only: str = ""

    def applied(self, source: str) -> str:
        """The source, broken. Raises ValueError unless ``old`` is in it exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file}: {self.name}: found {count} times: {self.old!r}")
        return source.replace(self.old, self.new)


def breaks(
    file: str, tests: str, *mutants: tuple[str, str, str], only: str = ""
) -> tuple[Mutant, ...]:
    """Breaks of one file of the package that are caught by the same test files, named with spaces
    between: name, old text, new text of each."""
    paths = tuple(f"tests/{name}" for name in tests.split())
    return tuple(Mutant(name, f"genrt/{file}", old, new, paths, only) for name, old, new in mutants)


MUTANTS: tuple[Mutant, ...] = (
    *breaks(
        "batcher.py",
        "test_batcher.py",
        (
            "a cancelled waiter takes its request from the others",
            "entry.waiters.pop(waiter, self) is self or entry.waiters:",
            "entry.waiters.pop(waiter, self) is self:",
        ),
        (
            "a request that was withdrawn stays so when it is asked again",
            "            self._withdrawn.pop(entry, None)\n",
            "",
        ),
        (
            "what was cancelled in the queue is sent all the same",
            "                self._ready.pop(entry, None)\n",
            "",
        ),
        (
            "a question with a failed request goes on waiting for its others",
            "                        self._drop(waiter)\n",
            "",
        ),
        (
            "waiters of one failed request share an exception object",
            "failed.append((waiter, error.fresh()))",
            "failed.append((waiter, error))",
        ),
        (
            "an adapter is removed while requests are bound to it",
            "return [adapter for adapter in self._retired if adapter not in bound]",
            "return list(self._retired)",
        ),
        (
            "rows of a removed adapter stay in the cache",
            "            self._cache.forget(adapter)\n",
            "",
        ),
        (
            "a flush may be larger than it may",
            "most = min(self._max_batch_size, self._window.room(self._in_flight))",
            "most = self._window.room(self._in_flight)",
        ),
        (
            "the newest requests go first",
            "in list(islice(self._ready, most)):",
            "in list(reversed(self._ready))[:most]:",
        ),
        (
            "who waits for room is not told of the close",
            "waiters = waiting | {w: None",
            "waiters = {w: None",
        ),
        (
            "what a closed loop left behind is sent",
            "self._sweep(self._gathering.pop(other).entries)",
            "self._gathering.pop(other)",
        ),
        (
            "a loop that never goes quiet is waited for without end",
            "if gathering.questions != seen and gathering.passes < PATIENCE:",
            "if gathering.questions != seen:",
        ),
        (
            "a loop's third pass is not waited for",
            "if gathering.questions != seen and gathering.passes < PATIENCE:",
            "if gathering.questions != seen and gathering.passes < 2:",
        ),
        (
            "every newcomer puts the flush off",
            "if added and not self._ready:",
            "if added:",
        ),
        (
            "the engine is not told of a withdrawn request",
            "wake = bool(self._withdrawn or self._retired or self._ready)",
            "wake = bool(self._retired or self._ready)",
        ),
        (
            "the rest of a failed step is not withdrawn from the engine",
            "            engine.cancel(failed)\n",
            "",
        ),
        (
            "an equal question does not join one in flight",
            "            if entry is None:\n                entries[request] =",
            "            if entry is None or entry.in_flight:\n                entries[request] =",
        ),
    ),
)
