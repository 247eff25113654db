"""Texts until enough records of them are valid.

Attempts are numbered in the order in which they are asked, and counted in that order: the records of a
complete run are those of its first attempts, up to the one that made them enough. So a text that takes
longer is not lost to shorter ones, which would favour these, and with a seed the records depend neither
on timing nor on ``concurrency``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, TypeAlias, Unpack, cast

from genrt.errors import GenrtError, InvalidRequest
from genrt.generation.many import Asked, AskOptions, Failed, Item, Prompt
from genrt.generation.records import Attempt, Reason, Records, counted, made
from genrt.generation.validators import Fault, Judge, Parse, Validate
from genrt.generation.walk import Walk
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_float, check_int, shown
from genrt.progress import progress_bar
from genrt.questions.completions import Completion
from genrt.runtime.concurrency import blocking_twin

__all__ = ["Prompts", "UntilValid", "ValidOptions", "generate_valid", "generate_valid_sync"]

PROBE = 10
"""The most attempts of the first batch."""

CUT_OFF = 50
"""After so many attempts, all of them cut off and none with a valid record, the run ends."""

SLACK = 0.1
"""Which part of the target may be made beyond it; ``LEAST_SLACK`` records at least."""

LEAST_SLACK = 3

MAX_DRY_ATTEMPTS = 500
"""After so many attempts without a valid record fewer than 1 in 160 are valid, at a level of 95 %."""

BAR: dict[str, Any] = {"unit": "record", "ends_early": False}

Prompts: TypeAlias = (
    Prompt | Sequence[Prompt] | Iterator[Prompt] | AsyncIterable[Prompt] | Callable[[int], Prompt]
)
"""A prompt (see ``Prompt``); a list of prompts, used in turn; an iterator, which may end; or a function
of the number of the attempt."""


class ValidOptions(AskOptions, total=False):
    """The options of ``generate_valid``: those of every text, and when to stop.

    Attributes:
        seed: attempt ``i`` is drawn with seed ``seed + i``; the records of a complete run are then
            reproducible.
        progress: whether a bar shows how many records are valid, how fast they come, and how long it will
            take.
        parse: returns or yields the records of a text, each of which is validated; by default the text is
            the record.
        max_attempts: after so many texts the run ends.
        max_dry_attempts: after so many attempts in a row without a valid record the run ends; 500 if not
            given. ``None`` is no bound.
        invalid_threshold: the run ends after ``patience`` batches in a row of whose records at least this
            fraction was invalid. Batches of fewer than 10 attempts count with those after them.
        patience: how many batches. Both are given, or neither.
    """

    parse: Parse | None
    max_attempts: int | None
    max_dry_attempts: int | None
    invalid_threshold: float | None
    patience: int | None


async def generate_valid(
    lm: AsyncLM,
    prompts: Prompts,
    validate: Validate,
    *,
    target: int,
    **options: Unpack[ValidOptions],
) -> Records:
    """Draw texts until ``target`` records of them are valid, and return these with statistics.

    A first batch of up to 10 texts probes how many records are valid; the following ones are as large as
    what is missing takes, and small enough that hardly ever more than a tenth of the target, or three
    records, are made beyond it. What is under way when there are enough is cancelled.

    ``validate`` gets the records in the order of the attempts, so that it may remember them, and refuse
    what it has seen. What it raises is no error of the call, whatever it is: ``Records.faults`` has it,
    and ``Records.reason`` says why the run ended. A step that fails or a timeout costs its attempt alone.

    Whatever ends a run early, what was made is kept: for that, hold an ``UntilValid``.

    Raises:
        InvalidRequest: an argument is wrong, or a prompt.
        ExtraNotInstalled: ``validate`` is a JSON schema, and jsonschema is missing.
        Closed, EngineDied: the runtime is closed or its engine died.
        NameError, ImportError: raised by ``validate``, whose fault it is.
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
    """Return what ``generate_valid`` returns, blocking. ``validate`` runs in another thread. An interrupt
    ends the run, and what was made is returned, with the reason "interrupted"."""
    run = UntilValid(lm, prompts, validate, target=target, **options)
    try:
        return run.run_sync()
    except KeyboardInterrupt:
        return run.result()


class UntilValid:
    """A run of ``generate_valid`` whose result can be had at any moment, and that can go on later.

    After an interrupt, a cancellation or an error, ``result`` has every record of the texts that had
    ended, and ``run`` goes on where it was: its records are those of a run that was never interrupted.
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
        self._target = check_int("target", target, 1)
        self._judge = Judge(validate, given.pop("parse", None))
        self._max_attempts = _bound("max_attempts", given.pop("max_attempts", None))
        self._max_dry = _bound("max_dry_attempts", given.pop("max_dry_attempts", MAX_DRY_ATTEMPTS))
        self._threshold, self._patience = _patience(
            given.pop("invalid_threshold", None), given.pop("patience", None)
        )
        self._progress = check_bool("progress", given.pop("progress", False))
        self._asked = Asked(lm, cast("Any", given))
        self._prompts = _prompts_of(prompts)
        self._no_more_prompts = False
        self._step: Callable[..., None] = lambda **_: None
        self._is_running = False
        self._reason: Reason = "interrupted"
        self._seconds = self._seconds_judging = 0.0
        # Attempts by number: those that wait for their text, and those that have it, in any order.
        self._waiting: dict[int, Any] = {}
        self._attempts: dict[int, Attempt] = {}
        self._batches: list[range] = []
        # How many attempts, without a gap, are judged; their valid records; without one since when.
        self._counted = self._valid = self._squares = self._last_valid = 0

    async def run(self) -> Records:
        """Draw texts until the run is over, and return ``result()``. Cancelling ends it where it is.

        Raises:
            InvalidRequest: an argument or a prompt is wrong, or the run is under way already; else as
                ``generate_valid``.
        """
        if self._is_running:
            raise InvalidRequest("this run is under way already: await it once at a time")
        self._is_running, started = True, time.monotonic()
        try:
            await self._asked.check()
            with progress_bar("valid", self._target, shown=self._progress, **BAR) as step:
                self._step = step
                step(advance=min(self._valid, self._target))
                await self._count()
                while (reason := self._why_to_stop()) is None:
                    if not self._waiting:
                        await self._plan(self._next_size())
                    await self._finish_batch()
                self._reason = reason
        finally:
            self._is_running = False
            self._seconds += time.monotonic() - started
        return self.result()

    run_sync = blocking_twin(run)

    def result(self) -> Records:
        """Return what was made so far, at any moment, with all that happened up to it.

        Texts that had ended when the run was interrupted are judged now, unless ``validate`` awaits
        something.
        """
        if not self._is_running:
            for _, attempt in sorted(self._attempts.items()):
                _run_at_once(self._judge_one(attempt))
        return made(
            self._attempts,
            self._batches,
            target=self._target,
            reason=self._reason,
            seconds=self._seconds,
            seconds_judging=self._seconds_judging,
        )

    # -- batches ------------------------------------------------------------------------------

    def _why_to_stop(self) -> Reason | None:
        if self._valid >= self._target:
            return "complete"
        dry = range(self._last_valid, self._counted)
        is_dry = self._is_dry()
        if not is_dry and (self._waiting or self._counted < len(self._attempts)):
            return None  # a batch that was interrupted
        is_last = self._no_more_prompts or self._counted == self._max_attempts
        is_enough = is_dry or (not self._valid and (is_last or len(dry) >= CUT_OFF))
        if dry and is_enough and all(self._attempts[number].truncated for number in dry):
            return "all_truncated"
        if is_dry:
            return "no_valid"
        if is_last:
            return "out_of_attempts"
        return "threshold" if self._is_out_of_patience() else None

    def _is_dry(self) -> bool:
        return self._max_dry is not None and self._counted - self._last_valid >= self._max_dry

    def _is_out_of_patience(self) -> bool:
        if self._threshold is None:
            return False
        bad, joined = 0, list[Attempt]()
        for numbers in self._batches:
            joined += [self._attempts[number] for number in numbers]
            if len(joined) >= min(PROBE, self._target):
                too_many = counted(joined).invalid_fraction >= self._threshold
                bad, joined = bad + 1 if too_many else 0, []
        return bad >= self._patience

    def _next_size(self) -> int:
        """Return how many attempts the next batch has."""
        size = min(PROBE, self._target)
        if self._counted:
            size = batch_size(
                self._target - self._valid,
                slack=max(SLACK * self._target, LEAST_SLACK),
                attempts=self._counted,
                valid=self._valid,
                squares=self._squares,
            )
        if self._max_attempts is not None:
            size = min(size, self._max_attempts - self._counted)
        if not self._valid and self._counted < CUT_OFF:
            size = min(size, CUT_OFF - self._counted)
        if not self._valid and self._max_dry is not None:
            size = min(size, self._max_dry - self._counted)
        return size

    async def _plan(self, size: int) -> None:
        """Take the prompts of a batch."""
        first = self._counted
        self._batches.append(range(first, first))
        for number in range(first, first + size):
            try:
                if isinstance(self._prompts, AsyncIterator):
                    self._waiting[number] = await anext(self._prompts)
                else:
                    self._waiting[number] = next(self._prompts)
            except (StopIteration, StopAsyncIteration):
                self._no_more_prompts = True
                break
            self._batches[-1] = range(first, number + 1)
        if not self._batches[-1]:
            self._batches.pop()

    async def _finish_batch(self) -> None:
        """Ask what waits for its text and judge what has it, until that is a reason to stop."""
        walk = Walk(
            [*self._waiting.items()],
            lambda _, pair: self._ask(*pair),
            concurrency=self._asked.concurrency,
            most_ahead=2 * self._asked.concurrency,
        )
        try:
            await self._count()
            while self._valid < self._target and not self._is_dry():
                if (taken := await walk.take()) is None:
                    break
                _, (number, result) = taken
                self._keep(number, result)
                await self._count()
        finally:
            try:
                await walk.close()
            finally:
                for number, result in walk.rest():
                    self._keep(number, result)
        for _, attempt in sorted(self._attempts.items()):  # those that ended meanwhile
            await self._judge_one(attempt)

    async def _ask(self, number: int, item: Any) -> tuple[int, Completion | Failed]:
        result = await self._asked.ask(number, item)
        if isinstance(result, Failed):
            error = result.error
            if isinstance(error, InvalidRequest) or not isinstance(error, GenrtError):
                error.add_note(f"attempt {number} of generate_valid")
                raise error
        return number, result

    def _keep(self, number: int, result: Completion | Failed) -> None:
        self._attempts[number] = Attempt(result)
        self._waiting.pop(number, None)

    async def _judge_one(self, attempt: Attempt) -> None:
        """Find the valid records of an attempt, if that has not been done. If this is interrupted, those
        found so far stay."""
        if attempt.judged:
            return
        attempt.values.clear()
        attempt.faults.clear()
        if isinstance(attempt.result, Failed):
            error = attempt.result.error
            attempt.faults.append(Fault(type(error).__name__, str(error)))
        else:
            started = time.monotonic()
            try:
                await self._judge.judge(attempt.result.text, attempt.values, attempt.faults)
            finally:
                self._seconds_judging += time.monotonic() - started
            if attempt.truncated and not attempt.values:
                attempt.faults[:] = [
                    Fault("truncated", f"{fault.category}: {fault.detail}")
                    for fault in attempt.faults
                ]
        attempt.judged = True

    async def _count(self) -> None:
        """Judge and count attempts in their order, up to one without its text or enough records."""
        while self._valid < self._target and (attempt := self._attempts.get(self._counted)):
            await self._judge_one(attempt)
            self._counted += 1
            found = len(attempt.values)
            self._squares += found**2
            if found:
                self._last_valid = self._counted
            shown_before = min(self._valid, self._target)
            self._valid += found
            self._step(
                advance=min(self._valid, self._target) - shown_before,
                attempts=self._counted,
                valid=f"{self._valid / self._counted:.0%}",
            )


def batch_size(missing: int, *, slack: float, attempts: int, valid: int, squares: int) -> int:
    """Return how many attempts to make for the records that are missing.

    They are enough in five of six cases, and make more than ``missing + slack`` records in one of 700.
    The number of records of an attempt is taken to have the mean and variance of those so far, and their
    sum the variance of a prediction from so many attempts. Without a valid record so far, it is as if
    there had been one.

    Args:
        missing: valid records that are missing.
        slack: how many there may be beyond them.
        attempts: how many attempts there were.
        valid: their valid records.
        squares: the sum of the squares of their numbers of valid records.
    """
    mean = max(valid, 1) / attempts
    variance = max(max(squares, 1) / attempts - mean**2, 0.0)
    deviation = math.sqrt(variance)
    # The smallest f with f * mean - sqrt(f * variance) >= missing.
    root = (deviation + math.sqrt(variance + 4.0 * mean * missing)) / (2.0 * mean)
    enough = math.ceil(root**2 - 1e-9)
    # The largest f with f * mean + 3 * sqrt(f * variance * (1 + f / attempts)) <= missing + slack.
    most = missing + slack
    a = mean**2 - 9.0 * variance / attempts
    b = 2.0 * most * mean + 9.0 * variance
    safe = math.floor(2.0 * most**2 / (b + math.sqrt(max(b**2 - 4.0 * a * most**2, 0.0))))
    return max(1, min(enough, safe))


def _bound(name: str, value: Any) -> int | None:
    return None if value is None else check_int(name, value, 1)


def _patience(threshold: Any, patience: Any) -> tuple[float | None, int]:
    if (threshold is None) != (patience is None):
        raise InvalidRequest("give both invalid_threshold and patience, or neither")
    if threshold is None:
        return None, 0
    return (
        check_float("invalid_threshold", threshold, 0.0, 1.0),
        check_int("patience", patience, 1),
    )


def _prompts_of(prompts: Any) -> Iterator[Any] | AsyncIterator[Any]:
    """Return the prompts of attempts, one after another. No generator that the end of a loop closes."""
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


def _run_at_once(work: Any) -> None:
    """Run a coroutine as far as it goes without waiting for anything; its errors are its own."""
    with contextlib.suppress(Exception):
        work.send(None)
    work.close()
