"""The work of a job: counted while it runs, shown as a table and as a line of progress."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["JobReport", "elapsed"]


@dataclass(slots=True)
class JobReport:
    """The work of one run of a job. ``print`` shows it as a table.

    Attributes:
        rows: of the input, as many as the job is about.
        done: rows that have got a text in this run.
        skipped: rows that were finished before; ``failed_before`` of them with an error.
        failed: rows that were written with an error in this run, by the error's type.
        truncated: of those done, the texts that were cut off.
        invalid: of those done, the texts that are not valid though they were not cut off, by what is
            wrong with them.
        prompt_tokens: of the rows done; ``completion_tokens`` too, those of discarded draws included.
        seconds: the time that the run took.
        stopped: why it ended before all rows were asked, if it did.
    """

    rows: int = 0
    done: int = 0
    skipped: int = 0
    failed_before: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    stopped: str | None = None

    @property
    def complete(self) -> bool:
        """True if every row is in the output, and none with an error."""
        finished = self.done + self.skipped
        return finished == self.rows and not self.failed_before

    @property
    def left(self) -> int:
        """How many rows are not in the output."""
        return self.rows - self.done - self.skipped - self.failed.total()

    @property
    def tokens_per_second(self) -> float:
        """Drawn tokens by the seconds of the run."""
        return self.completion_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def progress(self) -> str:
        """The state of the run in one line, with the time that the rest takes at this pace."""
        asked = self.done + self.failed.total()
        rest = elapsed(self.seconds * self.left / asked) if asked else "unknown"
        return (
            f"{self.done + self.skipped:,} of {self.rows:,} rows, {self.failed.total():,} failed, "
            f"{self.tokens_per_second:,.0f} tokens/s, {elapsed(self.seconds)} elapsed, {rest} left"
        )

    def __str__(self) -> str:
        lines = [
            ("rows", self.rows),
            ("  done", self.done),
            ("    truncated", self.truncated),
            ("    invalid", self.invalid.total()),
            *((f"      {name}", count) for name, count in sorted(self.invalid.items())),
            ("  finished before", self.skipped),
            ("    with an error", self.failed_before),
            ("  failed", self.failed.total()),
            *((f"    {name}", count) for name, count in sorted(self.failed.items())),
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


def elapsed(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
