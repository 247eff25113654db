"""The work of a job: counted while it runs, shown as a table, told in a heartbeat."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from genrt.errors import InvalidRequest
from genrt.numbers import check_float

__all__ = ["Counting", "JobReport", "check_heartbeat", "elapsed", "heartbeat"]


@dataclass(frozen=True, slots=True)
class JobReport:
    """The work of one run of a job. ``print`` shows it as a table.

    Attributes:
        rows: of the input, as many as the job is about.
        done: rows that have got a text in this run.
        skipped: rows that were finished before; ``failed_before`` of them with an error.
        failed: rows that were written with an error in this run, by the error's type.
        kept_back: rows that failed and were not written: the next run asks them again.
        truncated: of those done, the texts that were cut off.
        invalid: of those done, the texts that are not valid though they were not cut off, by what is
            wrong with them.
        prompt_tokens: of the rows done; ``completion_tokens`` too, those of discarded draws included.
        seconds: the time that the run took.
        stopped: why it ended before all rows were asked, if it did.
    """

    rows: int
    done: int
    skipped: int
    failed_before: int
    failed: Mapping[str, int]
    kept_back: int
    truncated: int
    invalid: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    stopped: str | None

    @property
    def complete(self) -> bool:
        """True if every row is in the output, and none with an error."""
        finished = self.done + self.skipped
        return finished == self.rows and not self.failed_before

    @property
    def left(self) -> int:
        """How many rows have not been asked."""
        failed = sum(self.failed.values())
        return self.rows - self.done - self.skipped - failed - self.kept_back

    @property
    def tokens_per_second(self) -> float:
        """Drawn tokens by the seconds of the run."""
        return self.completion_tokens / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        failed = sum(self.failed.values())
        lines = [
            ("rows", self.rows),
            ("  done", self.done),
            ("    truncated", self.truncated),
            ("    invalid", sum(self.invalid.values())),
            *((f"      {name}", count) for name, count in sorted(self.invalid.items())),
            ("  finished before", self.skipped),
            ("    with an error", self.failed_before),
            ("  failed", failed),
            *((f"    {name}", count) for name, count in sorted(self.failed.items())),
            ("  kept back", self.kept_back),
            ("  not asked", self.left),
            ("prompt tokens", self.prompt_tokens),
            ("completion tokens", self.completion_tokens),
            ("tokens per second", f"{self.tokens_per_second:,.0f}"),
            ("elapsed", elapsed(self.seconds)),
        ]
        table = "\n".join(
            f"{name:<40}{number if isinstance(number, str) else format(number, ','):>14}"
            for name, number in lines
        )
        return f"{table}\nstopped: {self.stopped}" if self.stopped else table


@dataclass(slots=True)
class Counting:
    """The counters of a run; the job's task alone writes them, a heartbeat's thread reads them."""

    rows: int = 0
    skipped: int = 0
    failed_before: int = 0
    done: int = 0
    truncated: int = 0
    kept_back: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stopped: str | None = None
    failed: Counter[str] = field(default_factory=Counter)
    invalid: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)

    def restart_clock(self) -> None:
        """Count the seconds from now on."""
        self.began = time.monotonic()

    def report(self) -> JobReport:
        """Return the counters at this moment."""
        return JobReport(
            rows=self.rows,
            done=self.done,
            skipped=self.skipped,
            failed_before=self.failed_before,
            failed=MappingProxyType(dict(self.failed)),
            kept_back=self.kept_back,
            truncated=self.truncated,
            invalid=MappingProxyType(dict(self.invalid)),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            seconds=time.monotonic() - self.began,
            stopped=self.stopped,
        )

    def __str__(self) -> str:
        now = self.report()
        failed = sum(now.failed.values()) + now.kept_back
        return (
            f"{now.done + now.skipped:,} of {now.rows:,} rows, {failed:,} failed, "
            f"{now.tokens_per_second:,.0f} tokens/s, {elapsed(now.seconds)} elapsed"
        )


def elapsed(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def check_heartbeat(seconds: float) -> float:
    """Return the seconds between two heartbeats, 0 for none. Raises InvalidRequest otherwise."""
    seconds = check_float("heartbeat", seconds, 0.0)
    if seconds > threading.TIMEOUT_MAX:
        raise InvalidRequest(
            f"heartbeat must be at most {threading.TIMEOUT_MAX:g}: give 0 for none"
        )
    return seconds


@contextlib.contextmanager
def heartbeat(seconds: float, beat: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Call ``beat`` every so many seconds, in a thread of its own, until the block ends; 0 is never.

    Yields what the block's end calls: it ends the beats, and blocks until the last one is over."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            beat()

    def end() -> None:
        ended.set()
        if seconds:
            thread.join()

    thread = threading.Thread(target=run, name="genrt-heartbeat", daemon=True)
    if seconds:
        thread.start()
    try:
        yield end
    finally:
        end()
