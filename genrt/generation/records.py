"""Records: what a run until enough are valid has made, why it ended, and its statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from genrt.generation.many import Failed
from genrt.generation.validators import Fault
from genrt.questions.completions import Completion

__all__ = ["Attempt", "BatchStatistics", "Reason", "RecordStatistics", "Records"]

Reason: TypeAlias = Literal[
    "complete", "out_of_attempts", "threshold", "no_valid", "all_truncated", "interrupted"
]
"""Why a run is over.

``complete``: there are as many valid records as wanted. ``out_of_attempts``: ``max_attempts`` were made,
or the prompts ended. ``threshold``: too many were invalid for too long. ``no_valid``: too many attempts
in a row gave nothing valid. ``all_truncated``: the same, or the first 50 attempts did, and every text of
them was cut off, which says nothing about what the model can do: raise ``max_tokens``. ``interrupted``:
an interrupt, a cancellation or an error ended it, or it has not ended yet.
"""

SHOWN = 5
"""How many categories of faults a ``repr`` names."""


@dataclass(slots=True)
class Attempt:
    """One text that was asked for, as far as it has come.

    Attributes:
        result: the completion, or why there is none.
        values: of its valid records.
        faults: of its invalid ones; of the text, if it has no record.
        judged: whether all of its records have been judged.
    """

    result: Completion | Failed
    values: list[Any] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    judged: bool = False

    @property
    def truncated(self) -> bool:
        """True if its text was cut off."""
        return isinstance(self.result, Completion) and self.result.truncated


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """One batch of attempts, counted.

    Attributes:
        attempts: texts that were asked for, and have ended.
        valid: valid records.
        invalid: invalid records, and texts without any.
        truncated: texts that were cut off.
        failed: attempts without a text, as after a timeout; they count as invalid too.
    """

    attempts: int = 0
    valid: int = 0
    invalid: int = 0
    truncated: int = 0
    failed: int = 0

    @property
    def invalid_fraction(self) -> float:
        """The share of records that are invalid; 0 without records."""
        return self.invalid / max(self.valid + self.invalid, 1)


@dataclass(frozen=True, slots=True)
class RecordStatistics(BatchStatistics):
    """All attempts of a run, counted.

    Attributes:
        errors: how many faults there were of each category, the most frequent first.
        finish_reasons: how many texts ended in each way.
        batches: each batch, in order; the last one may have been cut short.
        unjudged: texts that had ended and were not judged when the run was interrupted.
        tokens_valid: tokens of texts with a valid record.
        tokens_invalid: tokens of texts without one that came to their end.
        tokens_truncated: tokens of texts without one that were cut off.
        seconds: how long the run took.
        seconds_judging: how much of it ``parse`` and ``validate`` took.
    """

    errors: Mapping[str, int] = field(default_factory=dict)
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    batches: tuple[BatchStatistics, ...] = ()
    unjudged: int = 0
    tokens_valid: int = 0
    tokens_invalid: int = 0
    tokens_truncated: int = 0
    seconds: float = 0.0
    seconds_judging: float = 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Records:
    """The result of a run until enough are valid. Attempts are numbered from 0.

    Attributes:
        records: the values of valid records, in the order of their attempts: as many as wanted, or all
            there are.
        attempts: for each of them, the number of its attempt.
        surplus: valid records beyond those, of texts that had ended by then.
        completions: the text of each attempt that has one, by number.
        faults: what was wrong with the records of each attempt that has invalid ones, by number.
        reason: why the run is over.
        target: how many were wanted.
        statistics: of all that was made.
    """

    records: tuple[Any, ...]
    attempts: tuple[int, ...]
    surplus: tuple[Any, ...]
    completions: Mapping[int, Completion]
    faults: Mapping[int, tuple[Fault, ...]]
    reason: Reason
    target: int
    statistics: RecordStatistics

    def __repr__(self) -> str:
        made = self.statistics
        errors = [f"{name} {count}" for name, count in [*made.errors.items()][:SHOWN]]
        more = ["…"] if len(made.errors) > SHOWN else []
        faults = f"; invalid: {', '.join(errors + more)}" if errors else ""
        beyond = f", {len(self.surplus)} beyond" if self.surplus else ""
        return (
            f"Records({self.reason}: {len(self.records)} of {self.target}{beyond}, by {made.attempts} "
            f"attempts in {made.seconds:.1f} s; {1 - made.invalid_fraction:.1%} valid, "
            f"{made.truncated} truncated{faults})"
        )


def counted(attempts: Sequence[Attempt]) -> BatchStatistics:
    """Return what these attempts come to as a batch."""
    return BatchStatistics(
        attempts=len(attempts),
        valid=sum(len(each.values) for each in attempts),
        invalid=sum(len(each.faults) for each in attempts),
        truncated=sum(each.truncated for each in attempts),
        failed=sum(isinstance(each.result, Failed) for each in attempts),
    )


def made(
    attempts: Mapping[int, Attempt],
    batches: Sequence[range],
    *,
    target: int,
    reason: Reason,
    seconds: float,
    seconds_judging: float,
) -> Records:
    """Return what these attempts, by number, come to; those that are not judged count as such."""
    attempts = dict(attempts)  # in one go: the run may go on in another thread
    ordered = [(number, attempts[number]) for number in sorted(attempts)]
    pairs = [(number, value) for number, each in ordered for value in each.values]
    values, sources = [value for _, value in pairs], [number for number, _ in pairs]
    ended = [each for _, each in ordered]
    completions = {
        number: each.result for number, each in ordered if isinstance(each.result, Completion)
    }
    tokens: Counter[str] = Counter()
    for each in ended:
        if isinstance(each.result, Completion) and (each.judged or each.values):
            kind = "valid" if each.values else "truncated" if each.truncated else "invalid"
            tokens[f"tokens_{kind}"] += len(each.result.token_ids)
    total = counted(ended)
    return Records(
        records=tuple(values[:target]),
        attempts=tuple(sources[:target]),
        surplus=tuple(values[target:]),
        completions=completions,
        faults={number: tuple(each.faults) for number, each in ordered if each.faults},
        reason=reason,
        target=target,
        statistics=RecordStatistics(
            attempts=total.attempts,
            valid=total.valid,
            invalid=total.invalid,
            truncated=total.truncated,
            failed=total.failed,
            errors=_frequent(fault.category for each in ended for fault in each.faults),
            finish_reasons=_frequent(each.finish_reason for each in completions.values()),
            batches=tuple(
                counted([attempts[n] for n in numbers if n in attempts]) for numbers in [*batches]
            ),
            unjudged=sum(not each.judged for each in ended),
            seconds=seconds,
            seconds_judging=seconds_judging,
            **tokens,
        ),
    )


def _frequent(names: Iterable[str]) -> dict[str, int]:
    """Return how often each name occurs, the most frequent first."""
    return dict(Counter(names).most_common())
