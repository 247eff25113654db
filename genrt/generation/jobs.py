"""Jobs: a text for each row of a file, written row by row, resumable after any interruption."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self, Unpack, cast

from genrt.errors import InvalidRequest, JobRefused, OutputFailed, UnknownAdapter
from genrt.generation.concurrent_map import ConcurrentMap
from genrt.generation.journal import REMEDY, Journal, describe, directory_digest
from genrt.generation.many import Failed, Item, ItemRunner, check_lm
from genrt.generation.tables import Row, RowPrompts, check_files, max_rows, read_rows, value_of
from genrt.generation.validators import Fault, JSONSchema, RecordValidator, Validate
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_int, check_options, check_timeout, json_number, shown
from genrt.progress import BEAT_SECONDS, progress_bar
from genrt.questions.arguments import check_seed, seed_at
from genrt.questions.completions import (
    STRUCTURES,
    Completion,
    GenerateOptions,
    TurnOptions,
    completion_requests,
)
from genrt.questions.rows import Limits
from genrt.runtime.concurrency import blocking_twin, run_in_thread
from genrt.structures.guides import Guides

log = logging.getLogger("genrt.generation")

ANY_MODEL = Limits(2**31 - 1, 2**31 - 1)
"""Limits of a hypothetical model, to check options before a model is loaded."""


@dataclass(slots=True)
class JobReport:
    """The counters of one run of a job. ``print`` shows a table.

    Attributes:
        rows: rows of the input, up to ``limit``.
        done: rows with a text from this run.
        skipped: rows that were finished before; ``failed_before`` of them with an error.
        failed: rows with an error from this run, by the type of the error.
        truncated: truncated texts among the done rows.
        invalid: other invalid texts among the done rows, by the category of the fault.
        prompt_tokens: tokens of the prompts of done rows.
        completion_tokens: drawn tokens, also of invalid texts that were drawn again.
        seconds: the duration of the run.
        stopped: why the run ended before all rows, or ``None``.
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
        """True if every row is in the output, without an error."""
        return self.done + self.skipped == self.rows and not self.failed_before

    @property
    def left(self) -> int:
        """How many rows are not in the output."""
        return self.rows - self.done - self.skipped - self.failed.total()

    @property
    def tokens_per_second(self) -> float:
        """The rate of drawn tokens."""
        return self.completion_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def progress(self) -> str:
        """One line: the state of the run, with an estimate of the remaining time."""
        asked = self.done + self.failed.total()
        rest = _duration(self.seconds * self.left / asked) if asked else "unknown"
        return (
            f"{self.done + self.skipped:,} of {self.rows:,} rows, {self.failed.total():,} failed, "
            f"{self.tokens_per_second:,.0f} tokens/s, {_duration(self.seconds)} elapsed, {rest} left"
        )

    def __str__(self) -> str:
        lines = {
            "rows": self.rows,
            "  done": self.done,
            "    truncated": self.truncated,
            "    invalid": self.invalid.total(),
            **{f"      {name}": count for name, count in sorted(self.invalid.items())},
            "  finished before": self.skipped,
            "    with an error": self.failed_before,
            "  failed": self.failed.total(),
            **{f"    {name}": count for name, count in sorted(self.failed.items())},
            "  not asked": self.left,
            "prompt tokens": self.prompt_tokens,
            "completion tokens": self.completion_tokens,
            "tokens per second": round(self.tokens_per_second),
        }
        table = [f"{name:<40}{count:>14,}" for name, count in lines.items()]
        table += [f"{'elapsed':<40}{_duration(self.seconds):>14}"]
        return "\n".join(table + [f"stopped: {self.stopped}"] * (self.stopped is not None))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class Job:
    """A text for each row of a JSONL, CSV, TSV or Parquet file, as a line of a file in such a format.

    A JSONL output is the job's memory: each row has one line, written when the row is finished, in the
    order of completion. After any interruption the next run continues with the missing rows, and with
    rows that were added to the input. For other formats ``OUTPUT.jsonl`` is the memory: a run after which
    each row has a line writes OUTPUT from it, in the order of the rows.

    A line has the row's ``index`` (from 0), its columns as ``input``, ``text``, ``finish_reason``,
    ``stop_reason``, ``truncated``, ``prompt_tokens``, ``completion_tokens`` and ``seed``, or else
    ``error`` and ``error_type``; ``reasoning`` if it is split from the text. With a schema or
    ``validate`` it has the value of the text as ``output``, whether it is ``valid``, and otherwise the
    ``fault``. With ``logprobs`` it has these and the ``token_ids``.

    A file ``.job.json`` beside the memory describes how the lines are made. A run with another template,
    schema, option, model, adapter or ``weights_version`` is refused, and so is a run with another input
    in a finished row. Weights from ``update_weights`` are known to one runtime only: other runtimes are
    refused, unless ``model`` names a directory with the weights.

    Row ``i`` is drawn with seed ``seed + i``: interruptions do not change the results, if the engine
    computes the same in any batch.
    """

    def __init__(
        self,
        input: str | os.PathLike[str],
        output: str | os.PathLike[str],
        *,
        delimiter: str = ",",
        prompt_template: str | None = None,
        messages_column: str | None = None,
        system_message: str | None = None,
        chat: bool = False,
        validate: Validate | None = None,
        model: str | os.PathLike[str] | None = None,
        model_options: Mapping[str, Any] | None = None,
        limit: int | None = None,
        keep_columns: Sequence[str] | None = None,
        retry_errors: bool = False,
        overwrite: bool = False,
        num_retries_invalid: int = 0,
        concurrency: int | None = None,
        max_consecutive_failures: int = 10,
        **options: Unpack[TurnOptions],
    ) -> None:
        """
        Args:
            input: the file of rows, ``.jsonl``, ``.ndjson``, ``.csv``, ``.tsv`` or ``.parquet``. It is
                read once before the first row runs.
            output: the file of lines, of one of these formats, in an existing directory.
            delimiter: the character between the fields of ``.csv`` files.
            prompt_template: the prompt of a row, with the names of columns: ``"Summarize: {text}"``.
                ``{{`` and ``}}`` are braces; values other than str are written as JSON.
            messages_column: instead of a template, the column with a conversation: a list, or its JSON.
                By default the column ``prompt`` or ``messages`` is used.
            system_message: begins every conversation; it also turns a template into a conversation.
            chat: whether the template's text is the user's message of a conversation.
            validate: validates the texts, as for ``generate_valid``; by default ``json_schema``. Values
                are written as JSON. A function runs on the loop.
            model: identifies the model for later runs: a directory, which is compared by its content, or
                a name. By default the source of the tokenizer.
            model_options: other options that decide the model's answers. They are only compared.
            limit: use only the first rows.
            keep_columns: the columns that lines repeat as ``input``; by default all.
            retry_errors: whether rows with an error run again.
            overwrite: whether to start over if the output exists.
            num_retries_invalid: how often an invalid text is drawn again, with other seeds. The last draw
                is written.
            concurrency: the number of running rows; by default it keeps the engine's steps full.
            max_consecutive_failures: the run stops after this number of failed rows in a row; 0 is no
                bound. Rows that are themselves wrong (any InvalidRequest) do not count.
            options: the options of ``lm.chat``. ``timeout`` is for each row; ``seed`` is 0 by default,
                and with ``None`` every run draws other texts.

        Raises:
            InvalidRequest: an argument is wrong, or the input does not exist.
            ExtraNotInstalled: there is a schema, and jsonschema is missing; or a ``.parquet`` file, and
                pyarrow is missing.
        """
        known = [*TurnOptions.__annotations__, *(Job.__init__.__kwdefaults__ or ())]
        check_options("Job", options, known)
        self._input, self._output = _path("input", input), _path("output", output)
        check_files(self._input, self._output, delimiter)
        self._delimiter = delimiter
        if "json_schema" in options:
            options = {**options, "json_schema": JSONSchema(options["json_schema"]).schema}
        validator = options.get("json_schema") if validate is None else validate
        self._validator = None if validator is None else RecordValidator(validator)
        has_default = prompt_template is None and messages_column is None
        self._prompts = RowPrompts(
            prompt_template,
            messages_column,
            chat=chat,
            system_message=system_message,
            first=next(self._rows(), None) if has_default else None,
        )
        self._keep_columns = None if keep_columns is None else _names("keep_columns", keep_columns)
        self._options: dict[str, Any] = {**options}
        drawing = _drawing_parts(self._options, self._options.pop("seed", 0))
        self._seed: int | None = drawing["seed"]
        self._num_retries = check_int("num_retries_invalid", num_retries_invalid, 0, 2**20)
        if self._num_retries and (self._validator is None or drawing["temperature"] == 0):
            raise InvalidRequest(
                "num_retries_invalid needs a json_schema or validate to judge texts by, and a "
                "temperature over 0: a greedy text comes out the same again"
            )
        if not isinstance(model_options, Mapping | None):
            raise InvalidRequest(f"model_options must be a mapping, got {shown(model_options)}")
        self._parts: dict[str, Any] = {
            **drawing,
            **self._prompts.parts,
            "keep_columns": self._keep_columns and sorted(self._keep_columns),
            "num_retries_invalid": self._num_retries,
            "validate": _validator_identity(validate),
        }
        if model_options is not None:
            self._parts["model_options"] = _as_json("model_options", model_options)
        self._model = None if model is None else str(_path("model", model))
        self._limit = sys.maxsize if limit is None else check_int("limit", limit, 1, sys.maxsize)
        self._retry_errors = check_bool("retry_errors", retry_errors)
        self._overwrite = check_bool("overwrite", overwrite)
        self._options["concurrency"] = (
            None if concurrency is None else check_int("concurrency", concurrency, 1)
        )
        self._max_failures = check_int("max_consecutive_failures", max_consecutive_failures, 0)

    def __repr__(self) -> str:
        return f"Job({str(self._input)!r}, {str(self._output)!r})"

    def _rows(self, stop: int | None = None) -> Iterator[Row]:
        return itertools.islice(read_rows(self._input, self._delimiter), stop)

    async def run(self, lm: AsyncLM, *, progress: bool = False) -> JobReport:
        """Run the remaining rows, write them, and return a report. ``progress`` shows a bar.

        The run stops early after too many failures in a row; the report says so. After any other end,
        also a cancellation or an interrupt, written rows stay, and another run continues.

        Raises:
            JobRefused: another job writes the output, or the lines were made in another way. New weights
                of the runtime during the run count too: their texts are not written.
            InvalidRequest: the input cannot be read, a column is unknown (UnknownColumn), or the model
                does not support an option.
            OutputFailed: the output cannot be written.
            EngineDied, Closed: the runtime died or is closed; running rows are not written.
        """
        running = JobRun(self)
        try:
            await run_in_thread(lambda: running._open(_model_of(check_lm(lm)), lm=lm))
            return await running.run(lm, progress=progress)
        finally:
            try:
                await run_in_thread(running.close)  # it waits for the disk
            finally:
                running.close()  # after a cancellation: the output must be free

    run_sync = blocking_twin(run)

    def begin(
        self, model: str | None = None, adapter: str | os.PathLike[str] | None = None
    ) -> JobRun:
        """Prepare a run before the model (a directory or a name) and the adapter (a directory) are open:
        read and compare the input and the output, blocking. Use it in a ``with`` statement, which closes
        the run. Raises as ``run``."""
        running = JobRun(self)
        try:
            running._open(model, adapter=None if adapter is None else Path(adapter))
        except BaseException:
            running.close()
            raise
        return running

    def _description(
        self, model: str | None, adapter: Path | None, lm: AsyncLM | None
    ) -> dict[str, Any]:
        parts = self._parts | {"weights_version": 0 if lm is None else lm.weights_version}
        if lm is not None and lm.weights_version and self._model is None:
            parts["runtime"] = lm.runtime_id
        found = describe(parts)
        if adapter is not None:
            found["adapter_files"] = directory_digest(adapter, is_adapter=True)
        model = self._model or model
        if model is not None and Path(model).is_dir():
            found["model"] = directory_digest(Path(model))
        elif model is not None:
            found["model"] = model
        return found


@dataclass(frozen=True, slots=True)
class _RowResult:
    row: Row
    result: Completion | Failed
    seed: int | None = None
    tokens: int = 0  # also of invalid texts that were drawn again
    output: Any = None
    fault: Fault | None = None


class JobRun:
    """A run of a job, made by ``Job.begin``: a context manager that holds the lock of the output."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._journal = Journal(job._output, job._delimiter)
        self._report = JobReport()
        self._began = time.monotonic()
        self._opening = threading.Lock()
        self._is_closed = False
        self._weights_version = 0
        self._adapter: Path | None = None  # the runtime's copy
        self._refused: JobRefused | None = None
        self._rows: Iterable[Row] | None = None  # while it is open and has not run
        self._failures: list[str] = []  # of consecutive rows

    def _open(
        self, model: str | None, *, adapter: Path | None = None, lm: AsyncLM | None = None
    ) -> None:
        """Lock the output, read it, and compare it with the input and the options. ``close`` ends it."""
        with self._opening:
            job, journal = self._job, self._journal
            for path in (journal.output, journal.path):
                if path.exists() and os.path.samefile(job._input, path):
                    raise InvalidRequest(f"{path} is the input: name another file for the output")
            if lm is not None and (name := job._options.get("adapter")) is not None:
                adapter = lm.adapter_files(name)
            description = job._description(model, adapter, lm)
            self._weights_version = description["weights_version"]
            again = {"retry_errors": job._retry_errors, "overwrite": job._overwrite}
            journal.read(description, max_rows(job._input), **again)
            self._compare()
            if self._is_closed:
                return
            journal.start()
            self._rows = job._rows(self._report.rows)

    def _compare(self) -> None:
        """Read the input once. Finished rows must be unchanged, and all columns known."""
        job, report, digests = self._job, self._report, self._journal.digests
        known: dict[str, None] = {}
        count = 0
        for row in job._rows(max(job._limit, len(digests))):
            if self._is_closed:
                return
            count += 1
            known |= dict.fromkeys(row.columns)
            is_finished = self._journal.has(row.index)
            if is_finished and digests[row.index] != row.digest:
                raise JobRefused(
                    f"row {row.index} of {job._input} has changed since it was answered: give the input "
                    f"as it was (rows may be added at its end), name another output, or start "
                    f"{job._output} over (--overwrite, overwrite=True). A row that failed may be mended, "
                    "and is asked again with --retry-errors, retry_errors=True"
                )
            report.skipped += is_finished and row.index < job._limit
        if count < len(digests):
            raise JobRefused(
                f"{job._input} has {count} rows, and {job._output} an answer to row "
                f"{len(digests) - 1}: rows of the input may not go"
            )
        report.rows = min(count, job._limit)
        report.failed_before = min(self._journal.failed, report.skipped)
        for name in (*job._prompts.columns, *(job._keep_columns or ())) if count else ():
            value_of(known, name)

    async def run(self, lm: AsyncLM, *, progress: bool = False) -> JobReport:
        """Run the remaining rows, write them, and return a report. Raises as ``Job.run``, and
        InvalidRequest if this run has run or is closed."""
        progress = check_bool("progress", progress)
        job, rows, self._rows = self._job, self._rows, None
        if rows is None:
            raise InvalidRequest("a run runs once, and not when it is closed: begin another")
        if lm.weights_version != self._weights_version:
            self._refuse("has new weights")
        if (name := job._options.get("adapter")) is not None:
            self._adapter = lm.adapter_files(name)
        self._began = time.monotonic()
        runner = ItemRunner(lm, cast("Any", job._options))
        beats = asyncio.create_task(self._beat(logging.DEBUG if progress else logging.INFO))
        try:
            if self._report.left:
                await runner.check()
                await runner.probe()
                left = self._report.left
                with progress_bar(
                    "rows", left, shown=progress, unit="row", ends_early=False
                ) as step:
                    await self._run_rows(lm, runner, rows, step)
        finally:
            beats.cancel()
        return self.report()

    run_sync = blocking_twin(run)

    def report(self) -> JobReport:
        """Return a report of the run so far."""
        report, seconds = self._report, time.monotonic() - self._began
        counted = Counter(report.failed), Counter(report.invalid)
        return replace(report, failed=counted[0], invalid=counted[1], seconds=seconds)

    async def _run_rows(
        self, lm: AsyncLM, runner: ItemRunner, rows: Iterable[Row], step: Callable[..., None]
    ) -> None:
        answers: ConcurrentMap[_RowResult] = ConcurrentMap(
            self._remaining(rows),
            lambda number, row: self._answer(runner, number, row),
            concurrency=runner.concurrency,
            max_ahead=2 * runner.concurrency,
        )
        try:
            while not self._report.stopped and (taken := await answers.take()) is not None:
                self._settle(lm, taken[1])
                step(failed=self._report.failed.total())
        finally:
            await answers.close()
            for _, answer in answers.drain():
                self._settle(lm, answer)
        if self._refused is not None:
            raise self._refused

    async def _remaining(self, rows: Iterable[Row]) -> AsyncIterator[Row]:
        for place, row in enumerate(rows):
            if place % 256 == 0:
                await asyncio.sleep(0)  # finished rows must not block the loop
            if self._report.stopped:
                return
            if not self._journal.has(row.index):
                yield row

    async def _answer(self, runner: ItemRunner, number: int, row: Row) -> _RowResult:
        """Return the text of a row. Invalid texts are drawn again."""
        job = self._job
        try:
            prompt = job._prompts.of(row.columns)
        except InvalidRequest as error:
            return _RowResult(row, Failed(error))
        text, messages = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        options: GenerateOptions = {}
        tokens = 0
        for attempt in itertools.count():
            if job._seed is not None:
                # Seeds of repeated draws lie beyond the seeds of all rows.
                options["seed"] = seed_at(job._seed, row.index + attempt * 2**40)
            result = await runner.run(number, Item(text, messages, options))
            if isinstance(result, Failed):
                return _RowResult(row, result, tokens=tokens)
            tokens += len(result.token_ids)
            values, faults = list[Any](), list[Fault]()
            if job._validator is not None:
                await job._validator.validate(result.text, values, faults)
            if not faults or attempt == job._num_retries:
                break
        output = _as_json("the value that validate returned", values[0]) if values else None
        fault = faults[0] if faults else None
        return _RowResult(row, result, options.get("seed"), tokens, output, fault)

    def _settle(self, lm: AsyncLM, answer: _RowResult) -> None:
        """Write the line of a row, and count it."""
        report, result = self._report, answer.result
        error = result.error if isinstance(result, Failed) else None
        text = result.partial if isinstance(result, Failed) else result
        # A text without a token has no version.
        if text is not None and text.token_ids and text.weights_version != self._weights_version:
            return self._refuse("has new weights")
        name = self._job._options.get("adapter", "")
        if self._adapter is not None and lm.adapter_files(name) not in (self._adapter, None):
            return self._refuse(f"has another adapter {name!r}")
        report.completion_tokens += answer.tokens
        if error is not None and not self._count_failure(answer.row, error):
            return None
        self._journal.write(self._line(answer, text, error))
        if text is None or error is not None:
            return None
        self._failures.clear()
        report.done += 1
        report.truncated += text.truncated
        report.prompt_tokens += len(text.prompt_token_ids)
        if answer.fault is not None and not text.truncated:
            report.invalid[answer.fault.category] += 1
        return None

    def _refuse(self, change: str) -> None:
        """Stop the run: the lines before were made in another way."""
        self._refused = JobRefused(
            f"the runtime {change}, and {self._journal.path} was made before that: {REMEDY}"
        )
        self._report.stopped = str(self._refused)

    def _count_failure(self, row: Row, error: Exception) -> bool:
        """Count the error of a row, and return True; return False if the next run repeats the row."""
        job, report, name = self._job, self._report, type(error).__name__
        if not isinstance(error, InvalidRequest) or isinstance(error, UnknownAdapter):
            if report.stopped:
                return False
            self._failures.append(name)
        log.warning("row %d failed with %s", row.index, name)
        report.failed[name] += 1
        if len(self._failures) == job._max_failures > 0:
            report.stopped = (
                f"{len(self._failures)} rows failed one after another, with "
                f"{' and '.join(Counter(self._failures))}: {self._journal.path} has their errors. Once "
                "the reason is gone, ask them again with --retry-errors (retry_errors=True)"
            )
        return True

    def _line(
        self, answer: _RowResult, text: Completion | None, error: Exception | None
    ) -> dict[str, Any]:
        job, row, fault = self._job, answer.row, answer.fault
        columns = row.columns
        if job._keep_columns is not None:
            columns = {name: columns[name] for name in job._keep_columns if name in columns}
        line = {"index": row.index, "digest": f"{row.digest:016x}", "input": columns}
        if job._validator is not None:
            line |= {
                "output": answer.output,
                "valid": None if error is not None else fault is None,
                "fault": fault and f"{fault.category} ({fault.detail})",
            }
        return {
            **line,
            **_completion_fields(text),
            "seed": answer.seed,
            "error": None if error is None else str(error),
            "error_type": None if error is None else type(error).__name__,
        }

    async def _beat(self, level: int) -> None:
        """Log the progress and synchronize the output, every ``BEAT_SECONDS``."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            log.log(level, "%s: %s", self._job._output, self.report().progress)
            try:
                await run_in_thread(self._journal.sync)
            except OutputFailed as error:
                log.warning("%s", error)

    def close(self) -> None:
        """Synchronize and close the output, and release its lock. If every row has a line, write a CSV or
        Parquet output. Idempotent, from any thread."""
        self._is_closed = True
        with self._opening:
            self._rows = None
            self._journal.close(is_complete=not self._report.left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _completion_fields(text: Completion | None) -> dict[str, Any]:
    names = ("text", "finish_reason", "stop_reason", "truncated")
    fields: dict[str, Any] = {name: getattr(text, name, None) for name in names}
    fields["prompt_tokens"] = None if text is None else len(text.prompt_token_ids)
    fields["completion_tokens"] = None if text is None else len(text.token_ids)
    if text is None:
        return fields
    if text.reasoning:
        fields["reasoning"] = text.reasoning
    if text.logprobs:
        fields["token_ids"] = text.token_ids
        fields["logprobs"] = [*map(json_number, text.logprobs)]
        fields["top_logprobs"] = [
            {token: json_number(logprob) for token, logprob in each.items()}
            for each in text.top_logprobs
        ]
    return fields


def _model_of(lm: AsyncLM) -> str | None:
    """Return the checkpoint's directory or name, if the tokenizer has it."""
    try:
        name = getattr(lm.tokenizer, "name_or_path", None)
    except InvalidRequest:
        return None
    return name if isinstance(name, str) and name else None


def _path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise InvalidRequest(f"{name} must be a path, got {shown(value)}")
    try:
        path = Path(os.fsdecode(os.fspath(value))).expanduser()
        if b"\0" in os.fsencode(path):
            raise ValueError("it has a null character")
        path.exists()
    # A surrogate or a null character; an unknown home directory; too long.
    except (ValueError, RuntimeError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"{name} must be a path that a file can have: {reason}") from error
    return path


def _names(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple | set | frozenset) or not all(
        isinstance(each, str) for each in value
    ):
        raise InvalidRequest(f"{name} must be a list of names, got {shown(value)}")
    return tuple(value)


def _validator_identity(validate: Any) -> Any:
    """Return a schema, or a function's name."""
    if validate is None:
        return None
    if isinstance(validate, Mapping | str):
        return JSONSchema(validate).schema
    for of_model in ("model_json_schema", "json_schema"):  # a pydantic model, a TypeAdapter
        if callable(schema := getattr(validate, of_model, None)):
            return schema()
    return getattr(validate, "__qualname__", type(validate).__qualname__)


def _as_json(name: str, value: Any) -> Any:
    """Return a value after a round trip through JSON."""
    try:
        return json.loads(json.dumps(value, default=_json_default, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from error


def _json_default(value: Any) -> Any:
    """Return the fields of a pydantic model, the dict of a mapping, the name of a function."""
    if not isinstance(value, type) and hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(name := getattr(value, "__qualname__", None), str):
        raise TypeError(f"{shown(value)} is not JSON")
    return name


def _drawing_parts(options: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """Return the options that decide how texts are drawn, as JSON. Raises InvalidRequest."""
    chat: dict[str, Any] = {
        name: options.get(name) for name in ("adapter", "tools", "chat_template_kwargs")
    }
    given = {name: value for name, value in options.items() if name not in (*chat, "timeout")}
    check_timeout(options.get("timeout"))
    for name, (kind, noun) in {
        "adapter": (str, "a name"),
        "tools": (list | tuple, "a list"),
        "chat_template_kwargs": (Mapping, "a mapping"),
    }.items():
        if not isinstance(chat[name], kind | None):
            raise InvalidRequest(f"{name} must be {noun}, got {shown(chat[name])}")
    [request] = completion_requests(ANY_MODEL, [[0]], None, itertools.count(), seed, given)
    decoding = asdict(request.decoding)
    if given.get("max_tokens") is None:
        decoding["max_tokens"] = None
    if (structure := decoding.pop("structure")) is not None:
        Guides(None, 0).check(structure)
    return {
        **decoding,
        **dict.fromkeys(STRUCTURES),
        **dict([structure] if structure else []),
        "seed": check_seed(seed),
        **{name: _as_json(name, value) for name, value in chat.items()},
    }
