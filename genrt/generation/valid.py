"""Texts until enough of their records are valid."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
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
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, Unpack, cast

from genrt.errors import GenrtError, InvalidRequest
from genrt.generation.many import AskOptions, Failed, Item, ItemRunner, Prompt, generate_many
from genrt.generation.validators import Fault, Parse, RecordValidator, Validate
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_float, check_int, check_options, shown
from genrt.progress import BEAT_SECONDS, progress_bar
from genrt.questions.arguments import check_seed, seed_at
from genrt.questions.completions import Completion
from genrt.runtime.concurrency import blocking_twin

log = logging.getLogger("genrt.generation")

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
prompts ended. ``threshold``: see ``invalid_threshold``. ``no_valid``: see ``max_dry_attempts``.
``all_truncated``: the same, or the first 50 attempts had no valid record, and all their texts were
truncated: raise ``max_tokens``. ``interrupted``: by an interrupt, a cancellation or an error.
"""


class ValidOptions(AskOptions, total=False):
    """The options of ``generate_valid``.

    Attributes:
        seed: attempt ``i`` is drawn with seed ``seed + i``: the records are then reproducible.
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
class RecordStatistics:
    """The counters of a run.

    Attributes:
        attempts: validated texts, and attempts without a text.
        valid: valid records.
        invalid: invalid records, and texts without a record.
        truncated: truncated texts.
        failed: attempts without a text, as after a timeout. They also count as invalid.
        errors: the number of faults by category, the most frequent first.
        tokens: tokens of all texts.
        seconds: the duration of the run.
    """

    attempts: int = 0
    valid: int = 0
    invalid: int = 0
    truncated: int = 0
    failed: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def invalid_fraction(self) -> float:
        """The share of invalid records; 0 without records."""
        return self.invalid / max(self.valid + self.invalid, 1)


@dataclass(frozen=True, slots=True, repr=False)
class Records:
    """The result of ``generate_valid``. Attempts have numbers from 0.

    Attributes:
        records: the values of valid records, in the order of their attempts, ``target`` at most.
        attempts: for each record, the number of its attempt.
        surplus: further valid records of the last attempt.
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

    The records are those of the first attempts, by number. So a run does not prefer short texts, which
    finish early, and with a seed the records depend neither on timing nor on ``concurrency``.

    At first at most ten texts run, or ``target`` if that is fewer. Then as many run at once as the
    missing records need at the rate of valid records so far. Running texts are cancelled when there are
    enough records.

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


@dataclass(frozen=True, slots=True)
class _Attempt:
    result: Completion | Failed
    values: list[Any]
    faults: list[Fault]

    @property
    def truncated(self) -> bool:
        return isinstance(self.result, Completion) and self.result.truncated


class UntilValid:
    """A run of ``generate_valid`` that gives its results at any moment, and can be continued.

    After an interrupt, a cancellation or an error, ``result`` has the records of all attempts before the
    first unfinished one. ``run`` then continues: its records are the records of an uninterrupted run.
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
        self._batch_size = min(max(self._target, 10), 100)
        self._validator = RecordValidator(validate, given.pop("parse", None))
        bounds = {"max_attempts": None, "max_dry_attempts": MAX_DRY_ATTEMPTS, "patience": None}
        self._max_attempts, self._max_dry, self._patience = (
            None if value is None else check_int(name, value, 1)
            for name, value in ((name, given.pop(name, bounds[name])) for name in bounds)
        )
        threshold = given.pop("invalid_threshold", None)
        if (threshold is None) != (self._patience is None):
            raise InvalidRequest("give both invalid_threshold and patience, or neither")
        self._threshold = (
            1.0 if threshold is None else check_float("invalid_threshold", threshold, 0.0, 1.0)
        )
        self._progress = check_bool("progress", given.pop("progress", False))
        check_options("generate_valid", given, ValidOptions.__annotations__)
        ItemRunner(lm, cast("Any", given))  # checks its options
        self._lm, self._options = lm, given
        self._seed = check_seed(given.pop("seed", None))
        self._source = _prompt_iterator(prompts)
        self._prompts: list[Any] = []  # by the number of the attempt
        self._has_all_prompts = False
        self._attempts: list[_Attempt] = []
        # The valid records; the number of attempts up to the last valid one; the truncated ones after it;
        # bad batches in a row.
        self._valid = self._last_valid = self._dry_truncated = self._bad = 0
        self._news = asyncio.Event()
        self._is_running = False
        self._reason: Reason = "interrupted"
        self._seconds = 0.0

    async def run(self) -> Records:
        """Draw texts until the run ends, and return ``result()``. Cancelling interrupts the run.

        Raises as ``generate_valid``, and InvalidRequest while another ``run`` is awaited."""
        if self._is_running:
            raise InvalidRequest("this run is under way already: await it once at a time")
        self._is_running, started = True, time.monotonic()
        beats = asyncio.create_task(self._beat(started))
        try:
            bar: Any = {"unit": "record", "ends_early": False}
            with progress_bar("valid", self._target, shown=self._progress, **bar) as step:
                step(advance=min(self._valid, self._target))
                if self._why_to_stop() is None:
                    await self._draw(step)
                self._reason = self._why_to_stop() or "interrupted"
        finally:
            beats.cancel()
            self._is_running = False
            self._seconds += time.monotonic() - started
        return self.result()

    run_sync = blocking_twin(run)

    def result(self) -> Records:
        """Return the results so far, at any moment."""
        attempts = self._attempts[:]  # one operation: the run may go on in another thread
        pairs = [(number, value) for number, each in enumerate(attempts) for value in each.values]
        values, numbers = [value for _, value in pairs], [number for number, _ in pairs]
        completions = {
            n: each.result for n, each in enumerate(attempts) if isinstance(each.result, Completion)
        }
        categories = Counter(fault.category for each in attempts for fault in each.faults)
        statistics = RecordStatistics(
            attempts=len(attempts),
            valid=len(values),
            invalid=categories.total(),
            truncated=sum(each.truncated for each in completions.values()),
            failed=len(attempts) - len(completions),
            errors=dict(categories.most_common()),
            tokens=sum(len(each.token_ids) for each in completions.values()),
            seconds=self._seconds,
        )
        return Records(
            records=tuple(values[: self._target]),
            attempts=tuple(numbers[: self._target]),
            surplus=tuple(values[self._target :]),
            completions=completions,
            faults={n: tuple(each.faults) for n, each in enumerate(attempts) if each.faults},
            reason=self._reason,
            target=self._target,
            statistics=statistics,
        )

    def _why_to_stop(self) -> Reason | None:
        """Return why the run ends after the counted attempts, ``None`` if it goes on."""
        if self._valid >= self._target:
            return "complete"
        counted = len(self._attempts)
        dry = counted - self._last_valid
        is_dry = self._max_dry is not None and dry >= self._max_dry
        is_last = counted == self._max_attempts or (
            self._has_all_prompts and counted == len(self._prompts)
        )
        is_enough = is_dry or (not self._valid and (is_last or dry >= CUT_OFF))
        if is_enough and 0 < dry == self._dry_truncated:
            return "all_truncated"
        if is_dry:
            return "no_valid"
        if is_last:
            return "out_of_attempts"
        return "threshold" if self._bad == self._patience else None

    def _limit(self) -> int:
        """Return how many attempts may have started by now."""
        # The missing records need so many attempts at the rate so far, with one more valid attempt.
        counted = len(self._attempts)
        rate = (self._valid + 1) / (counted + 1)
        room = math.ceil((self._target - self._valid) / rate)
        limit = counted + (room if counted else min(10, self._target))
        if self._max_dry is not None:
            limit = min(limit, self._last_valid + self._max_dry)
        if not self._valid and counted < CUT_OFF:
            limit = min(limit, CUT_OFF)
        return limit if self._max_attempts is None else min(limit, self._max_attempts)

    async def _items(self) -> AsyncIterator[Any]:
        """Yield the prompts as their limit grows, first the unfinished ones of an interrupted run."""
        for number in itertools.count(len(self._attempts)):
            while number >= self._limit():
                self._news.clear()
                await self._news.wait()
            if number == len(self._prompts):
                try:
                    if isinstance(self._source, AsyncIterator):
                        self._prompts.append(await anext(self._source))
                    else:
                        self._prompts.append(next(self._source))
                except (StopIteration, StopAsyncIteration):
                    self._has_all_prompts = True
                    return
            yield self._prompts[number]

    async def _draw(self, step: Callable[..., None]) -> None:
        """Run attempts until there is a reason to stop."""
        self._news = asyncio.Event()  # of this loop
        if self._seed is not None:
            self._options["seed"] = seed_at(self._seed, len(self._attempts))
        texts = generate_many(
            self._lm, self._items(), on_error="return", in_order=True, **self._options
        )
        async with contextlib.aclosing(texts):
            async for _, result in texts:
                before = min(self._valid, self._target)
                await self._count(result)
                self._news.set()
                step(
                    advance=min(self._valid, self._target) - before,
                    attempts=len(self._attempts),
                    valid=f"{self._valid / len(self._attempts):.0%}",
                )
                if self._why_to_stop() is not None:
                    return

    async def _beat(self, started: float) -> None:
        """Log the progress, every ``BEAT_SECONDS``."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            log.log(
                logging.DEBUG if self._progress else logging.INFO,
                "%d of %d records are valid, after %d attempts and %.0f seconds",
                *(self._valid, self._target, len(self._attempts)),
                self._seconds + time.monotonic() - started,
            )

    async def _count(self, result: Completion | Failed) -> None:
        """Validate the records of the next attempt, and count it."""
        values, faults = list[Any](), list[Fault]()
        if isinstance(result, Failed):
            error = result.error
            if isinstance(error, InvalidRequest) or not isinstance(error, GenrtError):
                error.add_note(f"attempt {len(self._attempts)} of generate_valid")
                raise error
            faults.append(Fault(type(error).__name__, str(error)))
        else:
            await self._validator.validate(result.text, values, faults)
            if result.truncated and not values:
                faults = [Fault("truncated", f"{each.category}: {each.detail}") for each in faults]
        attempt = _Attempt(result, values, faults)
        self._attempts.append(attempt)
        self._valid += len(values)
        if values:
            self._last_valid, self._dry_truncated = len(self._attempts), 0
        else:
            self._dry_truncated += attempt.truncated
        if self._patience is not None and len(self._attempts) % self._batch_size == 0:
            batch = self._attempts[-self._batch_size :]
            invalid = sum(len(each.faults) for each in batch)
            records = invalid + sum(len(each.values) for each in batch)
            self._bad = self._bad + 1 if invalid >= self._threshold * records else 0


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
