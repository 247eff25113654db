"""One run of a job: what is left of its input is asked, and each row written as it is finished."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

from genrt.errors import (
    Closed,
    EngineDied,
    InvalidRequest,
    JobRefused,
    OutputFailed,
    UnknownAdapter,
)
from genrt.generation.journal import REMEDY, Journal
from genrt.generation.many import AHEAD, Asked, Failed, Item
from genrt.generation.prompts import Prompt, Prompts, value_of
from genrt.generation.reports import JobReport
from genrt.generation.tables import Row, read_rows
from genrt.generation.validators import Fault, Judge
from genrt.generation.walk import Walk
from genrt.lm import AsyncLM
from genrt.numbers import shown
from genrt.questions.completions import Completion, GenerateOptions
from genrt.questions.contexts import seed_at
from genrt.runtime.concurrency import aside, blocking_twin

__all__ = ["JobRun", "JobSettings"]

log = logging.getLogger("genrt.generation")

REDRAWN = 2**40
"""What a seed grows by when a row is drawn again: more than there are rows."""

ROWS_AT_ONCE = 256
"""After so many rows that are not asked, the loop goes round once."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """A job's arguments, checked; ``Job`` documents them."""

    input: Path
    form: str
    output: Path
    prompts: Prompts
    judge: Judge | None
    options: Mapping[str, Any]
    seed: int | None
    limit: int
    keep_columns: tuple[str, ...] | None
    retried: Callable[[str], bool]
    overwrite: bool
    num_retries_invalid: int
    sort_by_length: bool
    concurrency: int | None
    max_consecutive_failures: int
    heartbeat: float
    log_prompts: bool


@dataclass(frozen=True, slots=True)
class _Asked:
    """A row that is left: what is asked, or why nothing can be, and how often it was drawn again."""

    row: Row
    prompt: Prompt | InvalidRequest
    again: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    """A row's result, its text's value, and what is wrong with it."""

    result: Completion | Failed
    output: Any
    faults: list[Fault]


class JobRun:
    """A run of a job, from taking the output's lock to leaving it: a context manager, made by
    ``Job.begin``."""

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings
        self._journal = Journal(settings.output)
        self._report = JobReport()
        self._began = time.monotonic()
        self._opening = threading.Lock()
        self._closed = self._is_ready = False
        self._weights_version = 0  # which all lines are made with
        self._refused: JobRefused | None = None
        self._sorted: deque[_Asked] | None = None
        # Rows under way by their number in the stream of items, and those to be asked again.
        self._under_way: dict[int, _Asked] = {}
        self._started = 0
        self._again: deque[_Asked] = deque()
        self._news = asyncio.Event()
        self._failures: list[Exception] = []  # of rows that failed one after another

    # -- before there is a model ----------------------------------------------------------------

    def open(self, now: dict[str, dict[str, Any]]) -> None:
        """Take the output, read what is finished, and compare it with the input, and its fingerprint with
        ``now``.

        Raises:
            InvalidRequest: the input cannot be read, or lacks columns (UnknownColumn).
            JobRefused: another job writes the output, or what it was made from has changed.
            OutputFailed: the output cannot be written.
        """
        with self._opening:
            if self._closed:
                return
            at = self._settings
            if at.output.exists() and os.path.samefile(at.input, at.output):
                raise InvalidRequest(f"{at.output} is the input: name another file for the output")
            self._journal.lock()
            most_rows = at.input.stat().st_size
            self._weights_version = now["weights_version"]["value"]
            self._journal.recover(now, most_rows, at.retried, overwrite=at.overwrite)
            if not self._compare():
                return
            self._journal.begin()
            self._is_ready = True
            if at.sort_by_length:
                todo = [asked for asked in self._todo() if asked is not None]
                self._sorted = deque(sorted(todo, key=_length, reverse=True))

    def _compare(self) -> bool:
        """Read the input once: rows that are finished have to be as they were, columns to be known.

        Return False if the run was closed meanwhile."""
        at, report, digests = self._settings, self._report, self._journal.digests
        known: dict[str, None] = {}
        read = 0
        for row in itertools.islice(read_rows(at.input, at.form), max(at.limit, len(digests))):
            if self._closed:
                return False
            read += 1
            known |= dict.fromkeys(row.columns)
            was = digests[row.index] if row.index < len(digests) else 0
            if was not in (0, row.digest):
                raise JobRefused(
                    f"row {row.index} of {at.input} has changed since it was answered: give the input as "
                    f"it was (rows may be added at its end), name another output, or start {at.output} "
                    "over (--overwrite, overwrite=True). A row that failed may be mended, and is asked "
                    "again with --retry-errors, retry_errors=True"
                )
            report.skipped += was != 0 and row.index < at.limit
        if read < len(digests):
            raise JobRefused(
                f"{at.input} has {read} rows, and {at.output} an answer to row {len(digests) - 1}: rows "
                "of the input may not go"
            )
        report.rows = min(read, at.limit)
        report.failed_before = min(self._journal.failed, report.skipped)
        for name in (*at.prompts.columns, *(at.keep_columns or ())) if read else ():
            value_of(known, name)
        return True

    def _todo(self) -> Iterator[_Asked | None]:
        """Yield the rows that are left, and ``None`` for each that is not."""
        at, digests = self._settings, self._journal.digests
        for row in itertools.islice(read_rows(at.input, at.form), self._report.rows):
            if row.index < len(digests) and digests[row.index]:
                yield None
                continue
            try:
                yield _Asked(row, at.prompts.of(row.columns))
            except InvalidRequest as error:
                yield _Asked(row, error)

    # -- with a model ---------------------------------------------------------------------------

    async def run(self, lm: AsyncLM) -> JobReport:
        """Ask the rows that are left, write them, and return what was done; as ``Job.run``.

        Raises:
            InvalidRequest: an option is wrong, or nothing the engine can do.
            OutputFailed: the output cannot be written.
            JobRefused: the runtime has, or gets meanwhile, other weights than the lines were made with.
            EngineDied, Closed: the runtime is.
        """
        at = self._settings
        if not self._is_ready:
            raise InvalidRequest("a run runs once, and not when it is closed: begin another")
        self._is_ready = False
        if lm.weights_version != self._weights_version:
            self._refuse()
        self._began = time.monotonic()
        options: Any = {**at.options, "concurrency": at.concurrency}
        asked = Asked(lm, options)
        beats = asyncio.create_task(self._beat(at.heartbeat)) if at.heartbeat else None
        try:
            if self._report.left:
                await asked.check()
                await asked.probe()
                await self._ask_all(asked)
        finally:
            if beats is not None:
                beats.cancel()
        return self.report()

    run_sync = blocking_twin(run)

    def report(self) -> JobReport:
        """Return what has been done so far."""
        report, seconds = self._report, time.monotonic() - self._began
        counted = Counter(report.failed), Counter(report.invalid)
        return replace(report, failed=counted[0], invalid=counted[1], seconds=seconds)

    async def _ask_all(self, asked: Asked) -> None:
        async def answer(number: int, item: Item) -> _Answer:
            return await self._judged(await asked.ask(number, item))

        walk: Walk[_Answer] = Walk(
            self._items(),
            answer,
            concurrency=asked.concurrency,
            most_ahead=AHEAD * asked.concurrency,
        )
        try:
            while not self._report.stopped and (taken := await walk.take()) is not None:
                self._settle(*taken)
        except OutputFailed:
            await walk.close()
            raise
        except BaseException:
            await self._end(walk)
            raise
        await self._end(walk)
        if self._refused is not None:
            raise self._refused

    def _refuse(self) -> None:
        """Stop: the runtime has other weights than the lines were made with."""
        made = f"{self._journal.path} was made with version {self._weights_version} of them"
        self._refused = JobRefused(f"the runtime has new weights, and {made}: {REMEDY}")
        self._report.stopped = str(self._refused)

    async def _judged(self, result: Completion | Failed) -> _Answer:
        judge, values, faults = self._settings.judge, list[Any](), list[Fault]()
        if judge is not None and isinstance(result, Completion):
            await judge.judge(result.text, values, faults)
        return _Answer(result, plain(values[0]) if values else None, faults)

    async def _end(self, walk: Walk[_Answer]) -> None:
        """Cancel what is under way, and write what has ended nevertheless."""
        await walk.close()
        while True:
            with contextlib.suppress(Closed, EngineDied):
                if (taken := walk.take_ended()) is None:
                    return
                self._settle(*taken)

    async def _items(self) -> AsyncIterator[Item]:
        rows = self._todo() if self._sorted is None else _drained(self._sorted)
        for place, asked in enumerate(rows):
            if self._report.stopped:
                return
            while self._again:
                yield self._start(self._again.popleft())
            if asked is not None and not isinstance(asked.prompt, InvalidRequest):
                yield self._start(asked)
                continue
            if asked is not None:
                self._fail(asked.row, cast("InvalidRequest", asked.prompt))
            if place % ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        while self._again or (self._under_way and self._settings.num_retries_invalid):
            if self._again:
                yield self._start(self._again.popleft())
            else:
                self._news.clear()
                await self._news.wait()

    def _start(self, asked: _Asked) -> Item:
        self._under_way[self._started] = asked
        self._started += 1
        options: GenerateOptions = {}
        if (seed := self._seed(asked)) is not None:
            options["seed"] = seed
        if isinstance(asked.prompt, str):
            return Item(asked.prompt, options=options)
        return Item(messages=cast("Any", asked.prompt), options=options)

    def _seed(self, asked: _Asked) -> int | None:
        """Return the seed that a row has in whichever order and however often rows are asked."""
        seed = self._settings.seed
        return None if seed is None else seed_at(seed, asked.row.index + asked.again * REDRAWN)

    def _settle(self, number: int, answer: _Answer) -> None:
        asked, result, faults = self._under_way.pop(number), answer.result, answer.faults
        self._news.set()
        at, report = self._settings, self._report
        text = result.partial if isinstance(result, Failed) else result
        was = self._weights_version  # a text that nobody began has none
        if text is not None and text.token_ids and text.weights_version != was:
            self._refuse()
            return
        if isinstance(result, Failed):
            self._fail(asked.row, result.error, result.partial)
            return
        report.completion_tokens += len(result.token_ids)
        entry = self._entry(asked.row) | answer_of(result) | {"seed": self._seed(asked)}
        if faults and asked.again < at.num_retries_invalid:
            self._again.append(replace(asked, again=asked.again + 1))
            return
        if at.judge is not None:
            entry |= {"output": answer.output, "valid": not faults}
            entry["fault"] = f"{faults[0].category} ({faults[0].detail})" if faults else None
        if faults and not result.truncated:
            report.invalid[faults[0].category] += 1
        self._journal.write(entry)
        self._failures.clear()
        report.done += 1
        report.truncated += result.truncated
        report.prompt_tokens += len(result.prompt_token_ids)

    def _fail(self, row: Row, error: Exception, partial: Completion | None = None) -> None:
        """Write a row's error, whatever its kind; stop if too many rows in a row failed, and none by a
        fault of its own."""
        at, report, name = self._settings, self._report, type(error).__name__
        if not isinstance(error, InvalidRequest) or isinstance(error, UnknownAdapter):
            if report.stopped:
                return  # the next run asks it
            self._failures.append(error)
        told = f": {error}; the row is {row.columns}" if at.log_prompts else ""
        log.warning("row %d failed with %s%s", row.index, name, told)
        entry = self._entry(row) | answer_of(partial) | {"error": str(error), "error_type": name}
        self._journal.write(entry)
        report.failed[name] += 1
        if len(self._failures) == at.max_consecutive_failures > 0:
            report.stopped = self._stopped()

    def _stopped(self) -> str:
        kinds = Counter(type(error).__name__ for error in self._failures)
        messages = {str(error) for error in self._failures}
        # What is said of one row alone may quote its prompt; what is said of all does not.
        shown = len(messages) == 1 < len(self._failures) or self._settings.log_prompts
        told = messages.pop() if shown else "log_prompts (--log-prompts) shows their messages"
        return (
            f"{len(self._failures)} rows failed one after another, with {' and '.join(kinds)}: {told}. "
            "They are written with their errors: once the reason is gone, ask them again with "
            "--retry-errors (retry_errors=True)"
        )

    def _entry(self, row: Row) -> dict[str, Any]:
        at, columns = self._settings, row.columns
        if at.keep_columns is not None:
            columns = {name: columns[name] for name in at.keep_columns if name in columns}
        judged = {} if at.judge is None else {"output": None, "valid": None, "fault": None}
        return {"index": row.index, "digest": f"{row.digest:016x}", "input": columns} | judged

    async def _beat(self, seconds: float) -> None:
        """Log how far the run is, and write the output to the disk, every so many seconds."""
        while True:
            await asyncio.sleep(seconds)
            log.info("%s: %s", self._settings.output, self.report().progress)
            try:
                await aside(self._journal.sync)
            except OutputFailed as error:
                log.warning("%s", error)

    def close(self) -> None:
        """Close the output once it is on the disk, and let others write it. Idempotent, from any thread;
        ends ``open`` early."""
        self._closed, self._is_ready = True, False
        with self._opening:
            self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer_of(completion: Completion | None) -> dict[str, Any]:
    """Return what a line says of a completion, or of its lack."""
    entry: dict[str, Any] = dict.fromkeys(
        ("text", "finish_reason", "stop_reason", "truncated", "prompt_tokens", "completion_tokens")
    )
    if completion is not None:
        entry = {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "truncated": completion.truncated,
            "prompt_tokens": len(completion.prompt_token_ids),
            "completion_tokens": len(completion.token_ids),
        }
        if completion.reasoning:
            entry["reasoning"] = completion.reasoning
        if completion.logprobs:
            entry["token_ids"] = completion.token_ids
            entry["logprobs"] = [_finite(each) for each in completion.logprobs]
            entry["top_logprobs"] = [
                {token: _finite(logprob) for token, logprob in each.items()}
                for each in completion.top_logprobs
            ]
    return entry | {"seed": None, "error": None, "error_type": None}


def plain(value: Any) -> Any:
    """Return a validator's value as JSON has it, a pydantic model's fields. Raises InvalidRequest if it
    cannot be written."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"validate returned {shown(value)}, which cannot be written as JSON"
        ) from error


def _finite(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None


def _length(asked: _Asked) -> int:
    prompt = asked.prompt
    return len(prompt) if isinstance(prompt, str) else len(str(prompt))


def _drained(rows: deque[_Asked]) -> Iterator[_Asked]:
    while rows:
        yield rows.popleft()
