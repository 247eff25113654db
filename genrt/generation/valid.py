"""Texts until enough of their records are valid.

Attempts have numbers and count in this order: the records of a complete run are the records of its first
attempts. So long texts are not lost to short ones, and with a seed the records depend neither on timing
nor on ``concurrency``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, Unpack, cast

from genrt.errors import GenrtError, InvalidRequest
from genrt.generation.concurrent_map import ConcurrentMap
from genrt.generation.many import AskOptions, Failed, Item, ItemRunner, Prompt
from genrt.generation.validators import Fault, Parse, RecordValidator, Validate
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_float, check_int, shown
from genrt.progress import progress_bar
from genrt.questions.completions import Completion
from genrt.runtime.concurrency import blocking_twin

__all__ = [
    "BatchStatistics",
    "Prompts",
    "Reason",
    "RecordStatistics",
    "Records",
    "UntilValid",
    "ValidOptions",
    "generate_valid",
    "generate_valid_sync",
]

PROBE = 10
"""The most attempts before the first result is known, and the fewest of a batch."""

CUT_OFF = 50
"""The run ends after this number of attempts if all are truncated and none is valid."""

MAX_DRY_ATTEMPTS = 500
"""After so many attempts without a valid record fewer than 1 in 160 are valid, at a level of 95 %."""

Prompts: TypeAlias = (
    Prompt | Sequence[Prompt] | Iterator[Prompt] | AsyncIterable[Prompt] | Callable[[int], Prompt]
)
"""A prompt (see ``Prompt``); a list of prompts, used in turn; an iterator, which may end; or a function
of the number of the attempt."""

Reason: TypeAlias = Literal[
    "complete", "out_of_attempts", "threshold", "no_valid", "all_truncated", "interrupted"
]
"""Why a run ended.

``complete``: it has ``target`` valid records. ``out_of_attempts``: ``max_attempts`` were made, or the
prompts ended. ``threshold``: too many records were invalid for too long. ``no_valid``: too many
attempts in a row had no valid record. ``all_truncated``: the same, or the first 50 attempts had none,
and all their texts were truncated: raise ``max_tokens``. ``interrupted``: by an interrupt, a
cancellation or an error; or the run goes on.
"""


class ValidOptions(AskOptions, total=False):
    """The options of ``generate_valid``.

    Attributes:
        seed: attempt ``i`` is drawn with seed ``seed + i``: the records are then reproducible.
        progress: whether to show a bar with the number of valid records, their rate and the remaining
            time.
        parse: returns or yields the records of a text; by default the text is the record.
        max_attempts: the maximum number of texts.
        max_dry_attempts: the run ends after this number of attempts in a row without a valid record; by
            default 500. ``None`` is no bound.
        invalid_threshold: the run ends after ``patience`` batches in a row in which at least this
            fraction of the records was invalid. A batch has as many attempts as ``target``, but from 10
            to 100.
        patience: the number of batches. Give both options, or neither.
    """

    parse: Parse | None
    max_attempts: int | None
    max_dry_attempts: int | None
    invalid_threshold: float | None
    patience: int | None


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """The counters of one batch of attempts.

    Attributes:
        attempts: finished texts.
        valid: valid records.
        invalid: invalid records, and texts without a record.
        truncated: truncated texts.
        failed: attempts without a text, as after a timeout. They also count as invalid.
    """

    attempts: int = 0
    valid: int = 0
    invalid: int = 0
    truncated: int = 0
    failed: int = 0

    @property
    def invalid_fraction(self) -> float:
        """The share of invalid records; 0 without records."""
        return self.invalid / max(self.valid + self.invalid, 1)


@dataclass(frozen=True, slots=True)
class RecordStatistics(BatchStatistics):
    """The counters of a run.

    Attributes:
        errors: the number of faults by category, the most frequent first.
        finish_reasons: the number of texts by finish reason.
        batches: the counters of each batch, in order; the last one may be incomplete.
        unjudged: finished texts that an interrupt left without validation.
        tokens_valid: tokens of texts with a valid record.
        tokens_invalid: tokens of other texts that are not truncated.
        tokens_truncated: tokens of other texts that are truncated.
        seconds: the duration of the run.
        seconds_judging: the part of it in ``parse`` and ``validate``.
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
    """The result of ``generate_valid``. Attempts have numbers from 0.

    Attributes:
        records: the values of valid records, in the order of their attempts, ``target`` at most.
        attempts: for each record, the number of its attempt.
        surplus: further valid records, of texts that finished before the run ended.
        completions: the completions by the number of their attempt.
        faults: the faults by the number of their attempt.
        reason: why the run ended.
        target: the requested number of records.
        statistics: the counters of the run.
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
        errors = [f"{name} {count}" for name, count in [*made.errors.items()][:5]]
        more = ["…"] if len(made.errors) > 5 else []
        faults = f"; invalid: {', '.join(errors + more)}" if errors else ""
        beyond = f", {len(self.surplus)} beyond" if self.surplus else ""
        return (
            f"Records({self.reason}: {len(self.records)} of {self.target}{beyond}, by {made.attempts} "
            f"attempts in {made.seconds:.1f} s; {1 - made.invalid_fraction:.1%} valid, "
            f"{made.truncated} truncated{faults})"
        )


async def generate_valid(
    lm: AsyncLM,
    prompts: Prompts,
    validate: Validate,
    *,
    target: int,
    **options: Unpack[ValidOptions],
) -> Records:
    """Draw texts until ``target`` of their records are valid. Return the records, with statistics.

    Ten texts run first. Then as many run at once as the missing records need at the rate of valid records
    so far. Running texts are cancelled when there are enough records.

    ``validate`` gets the records in the order of the attempts, so it may refuse repeated records. Its
    errors are not raised: they are in ``Records.faults``, and ``Records.reason`` says why the run
    ended. A failed step or a timeout costs one attempt. To keep the results of a run that raises, use
    ``UntilValid``.

    Raises:
        InvalidRequest: an argument or a prompt is wrong.
        ExtraNotInstalled: ``validate`` is a JSON schema, and jsonschema is missing.
        Closed, EngineDied: the runtime is closed or its engine died.
        NameError, ImportError: raised by ``validate``, which is faulty.
    """
    return await UntilValid(lm, prompts, validate, target=target, **options).run()


def generate_valid_sync(
    lm: AsyncLM,
    prompts: Prompts,
    validate: Validate,
    *,
    target: int,
    **options: Unpack[ValidOptions],
) -> Records:
    """Return the result of ``generate_valid``, blocking. ``validate`` runs in another thread. An
    interrupt ends the run and returns the results so far, with the reason "interrupted"."""
    run = UntilValid(lm, prompts, validate, target=target, **options)
    try:
        return run.run_sync()
    except KeyboardInterrupt:
        return run.result()


@dataclass(slots=True)
class _Attempt:
    result: Completion | Failed
    values: list[Any] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    is_judged: bool = False

    @property
    def truncated(self) -> bool:
        return isinstance(self.result, Completion) and self.result.truncated


class UntilValid:
    """A run of ``generate_valid`` that gives its results at any moment, and can be continued.

    After an interrupt, a cancellation or an error, ``result`` has the records of all finished texts.
    ``run`` then continues: its records are the records of an uninterrupted run.
    """

    def __init__(
        self,
        lm: AsyncLM,
        prompts: Prompts,
        validate: Validate,
        *,
        target: int,
        **options: Unpack[ValidOptions],
    ) -> None:
        given: dict[str, Any] = {**options}
        self._target = check_int("target", target, 1, 2**53)
        self._batch_size = min(max(self._target, PROBE), 100)
        self._validator = RecordValidator(validate, given.pop("parse", None))
        self._max_attempts = _check_bound("max_attempts", given.pop("max_attempts", None))
        self._max_dry = _check_bound(
            "max_dry_attempts", given.pop("max_dry_attempts", MAX_DRY_ATTEMPTS)
        )
        self._threshold, self._patience = _check_patience(
            given.pop("invalid_threshold", None), given.pop("patience", None)
        )
        self._progress = check_bool("progress", given.pop("progress", False))
        self._runner = ItemRunner(lm, cast("Any", given))
        self._source = _prompt_iterator(prompts)
        self._prompts: list[Any] = []  # by the number of the attempt
        self._has_all_prompts = False
        self._attempts: dict[int, _Attempt] = {}  # finished ones, by number
        # The number of judged attempts in order; the valid records of these; the number of attempts up
        # to the last valid one; the truncated ones after it; bad batches in a row.
        self._counted = self._valid = self._last_valid = self._dry_truncated = self._bad = 0
        self._news = asyncio.Event()
        self._step: Callable[..., None] = lambda **_: None
        self._is_running = False
        self._reason: Reason = "interrupted"
        self._seconds = self._seconds_judging = 0.0

    async def run(self) -> Records:
        """Draw texts until the run ends, and return ``result()``. Cancelling interrupts the run.

        Raises:
            InvalidRequest: an argument or a prompt is wrong, or another ``run`` is awaited; else as
                ``generate_valid``.
        """
        if self._is_running:
            raise InvalidRequest("this run is under way already: await it once at a time")
        self._is_running, started = True, time.monotonic()
        try:
            await self._runner.check()
            bar: Any = {"unit": "record", "ends_early": False}
            with progress_bar("valid", self._target, shown=self._progress, **bar) as step:
                self._step = step
                step(advance=min(self._valid, self._target))
                await self._count()
                if self._why_to_stop() is None:
                    await self._draw()
                for _, attempt in sorted(self._attempts.items()):  # finished meanwhile
                    await self._judge(attempt)
                self._reason = self._why_to_stop() or "interrupted"
        finally:
            self._is_running = False
            self._seconds += time.monotonic() - started
        return self.result()

    run_sync = blocking_twin(run)

    def result(self) -> Records:
        """Return the results so far, at any moment. After an interrupt, finished texts are validated now,
        unless ``validate`` awaits something."""
        if not self._is_running:
            for _, attempt in sorted(self._attempts.items()):
                _run_without_waiting(self._judge(attempt))
        attempts = dict(self._attempts)  # one operation: the run may go on in another thread
        ordered = [(number, attempts[number]) for number in sorted(attempts)]
        pairs = [(number, value) for number, each in ordered for value in [*each.values]]
        values, numbers = [value for _, value in pairs], [number for number, _ in pairs]
        completions = {n: each.result for n, each in ordered if isinstance(each.result, Completion)}
        tokens: Counter[str] = Counter()
        for each in attempts.values():
            if isinstance(each.result, Completion) and (each.is_judged or each.values):
                kind = "valid" if each.values else "truncated" if each.truncated else "invalid"
                tokens[f"tokens_{kind}"] += len(each.result.token_ids)
        categories = Counter(fault.category for _, each in ordered for fault in each.faults)
        reasons = Counter(each.finish_reason for each in completions.values())
        batches = itertools.groupby(ordered, lambda pair: pair[0] // self._batch_size)
        statistics = RecordStatistics(
            **asdict(_statistics(attempts.values())),
            errors=dict(categories.most_common()),
            finish_reasons=dict(reasons.most_common()),
            batches=tuple(_statistics([each for _, each in batch]) for _, batch in batches),
            unjudged=sum(not each.is_judged for each in attempts.values()),
            seconds=self._seconds,
            seconds_judging=self._seconds_judging,
            **tokens,
        )
        return Records(
            records=tuple(values[: self._target]),
            attempts=tuple(numbers[: self._target]),
            surplus=tuple(values[self._target :]),
            completions=completions,
            faults={number: tuple(each.faults) for number, each in ordered if each.faults},
            reason=self._reason,
            target=self._target,
            statistics=statistics,
        )

    def _why_to_stop(self) -> Reason | None:
        """Return why the run ends after the counted attempts, ``None`` if it goes on."""
        if self._valid >= self._target:
            return "complete"
        dry = self._counted - self._last_valid
        is_dry = self._max_dry is not None and dry >= self._max_dry
        is_last = self._counted == self._max_attempts or (
            self._has_all_prompts and self._counted == len(self._prompts)
        )
        is_enough = is_dry or (not self._valid and (is_last or dry >= CUT_OFF))
        if is_enough and 0 < dry == self._dry_truncated:
            return "all_truncated"
        if is_dry:
            return "no_valid"
        if is_last:
            return "out_of_attempts"
        return "threshold" if self._threshold is not None and self._bad >= self._patience else None

    def _limit(self) -> int:
        """Return how many attempts may have started by now."""
        # The missing records need so many attempts at the rate so far, with one more valid attempt.
        rate = (self._valid + 1) / (self._counted + 1)
        room = math.ceil((self._target - self._valid) / rate)
        limit = self._counted + (room if self._counted else min(PROBE, self._target))
        if self._max_dry is not None:
            limit = min(limit, self._last_valid + self._max_dry)
        if not self._valid and self._counted < CUT_OFF:
            limit = min(limit, CUT_OFF)
        return limit if self._max_attempts is None else min(limit, self._max_attempts)

    async def _items(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield attempts as their limit grows, first the unfinished ones of an interrupted run."""
        for number in [n for n in range(len(self._prompts)) if n not in self._attempts]:
            yield number, self._prompts[number]
        while True:
            while (number := len(self._prompts)) >= self._limit():
                self._news.clear()
                await self._news.wait()
            try:
                if isinstance(self._source, AsyncIterator):
                    self._prompts.append(await anext(self._source))
                else:
                    self._prompts.append(next(self._source))
            except (StopIteration, StopAsyncIteration):
                self._has_all_prompts = True
                return
            yield number, self._prompts[number]

    async def _draw(self) -> None:
        """Run attempts until there is a reason to stop."""
        self._news = asyncio.Event()  # of this loop
        concurrency = self._runner.concurrency
        texts = ConcurrentMap(
            self._items(), self._run, concurrency=concurrency, max_ahead=2 * concurrency
        )
        try:
            while self._why_to_stop() is None:
                if (taken := await texts.take()) is not None:
                    self._attempts[taken[1][0]] = _Attempt(taken[1][1])
                    await self._count()
        finally:
            try:
                await texts.close()
            finally:
                for _, (number, result) in texts.drain():
                    self._attempts[number] = _Attempt(result)

    async def _run(self, _: int, item: tuple[int, Any]) -> tuple[int, Completion | Failed]:
        number, prompt = item
        result = await self._runner.run(number, prompt)
        if isinstance(result, Failed):
            error = result.error
            if isinstance(error, InvalidRequest) or not isinstance(error, GenrtError):
                error.add_note(f"attempt {number} of generate_valid")
                raise error
        return number, result

    async def _judge(self, attempt: _Attempt) -> None:
        """Validate the records of an attempt once. An interrupt keeps the records found so far."""
        if attempt.is_judged:
            return
        attempt.values.clear()
        attempt.faults.clear()
        if isinstance(attempt.result, Failed):
            error = attempt.result.error
            attempt.faults.append(Fault(type(error).__name__, str(error)))
        else:
            started = time.monotonic()
            try:
                await self._validator.validate(attempt.result.text, attempt.values, attempt.faults)
            finally:
                self._seconds_judging += time.monotonic() - started
            if attempt.truncated and not attempt.values:
                attempt.faults[:] = [
                    Fault("truncated", f"{fault.category}: {fault.detail}")
                    for fault in attempt.faults
                ]
        attempt.is_judged = True

    async def _count(self) -> None:
        """Judge and count finished attempts in order, up to a reason to stop."""
        while self._why_to_stop() is None and (attempt := self._attempts.get(self._counted)):
            await self._judge(attempt)
            self._counted += 1
            if attempt.values:
                self._last_valid, self._dry_truncated = self._counted, 0
            else:
                self._dry_truncated += attempt.truncated
            shown_before = min(self._valid, self._target)
            self._valid += len(attempt.values)
            if self._threshold is not None and self._counted % self._batch_size == 0:
                numbers = range(self._counted - self._batch_size, self._counted)
                batch = _statistics([self._attempts[number] for number in numbers])
                self._bad = self._bad + 1 if batch.invalid_fraction >= self._threshold else 0
            self._news.set()
            self._step(
                advance=min(self._valid, self._target) - shown_before,
                attempts=self._counted,
                valid=f"{self._valid / self._counted:.0%}",
            )


def _statistics(attempts: Iterable[_Attempt]) -> BatchStatistics:
    attempts = list(attempts)
    return BatchStatistics(
        attempts=len(attempts),
        valid=sum(len(each.values) for each in attempts),
        invalid=sum(len(each.faults) for each in attempts),
        truncated=sum(each.truncated for each in attempts),
        failed=sum(isinstance(each.result, Failed) for each in attempts),
    )


def _check_bound(name: str, value: Any) -> int | None:
    return None if value is None else check_int(name, value, 1)


def _check_patience(threshold: Any, patience: Any) -> tuple[float | None, int]:
    if (threshold is None) != (patience is None):
        raise InvalidRequest("give both invalid_threshold and patience, or neither")
    if threshold is None:
        return None, 0
    return (
        check_float("invalid_threshold", threshold, 0.0, 1.0),
        check_int("patience", patience, 1),
    )


def _prompt_iterator(prompts: Any) -> Iterator[Any] | AsyncIterator[Any]:
    """Return the prompts of attempts, one after another. The end of a loop must not close it, so it is
    not a generator."""
    if callable(prompts):
        return map(prompts, itertools.count())
    if isinstance(prompts, AsyncIterable):
        return aiter(prompts)
    if isinstance(prompts, str | Item):
        return itertools.repeat(prompts)
    no_prompts = isinstance(prompts, bytes | Mapping) or getattr(prompts, "ndim", 1) == 0
    if no_prompts or not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts must be a prompt, or several, got {shown(prompts)}")
    if not isinstance(prompts, Sequence) and not hasattr(prompts, "ndim"):
        return iter(prompts)
    several = list(prompts)
    if not several:
        raise InvalidRequest("prompts must have at least one prompt, or token id")
    is_one = all(
        isinstance(each, Mapping | int) or getattr(each, "ndim", None) == 0 for each in several
    )
    return itertools.repeat(prompts) if is_one else itertools.cycle(several)


def _run_without_waiting(work: Any) -> None:
    """Run a coroutine up to its first wait. Errors are dropped."""
    with contextlib.suppress(Exception):
        work.send(None)
    work.close()
