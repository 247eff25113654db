"""Jobs: a text for each row of a file, written row by row, to be resumed after any interruption."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from genrt.errors import InvalidRequest
from genrt.generation.fingerprints import Fingerprint, fingerprint, model_of, model_part
from genrt.generation.outputs import Schema
from genrt.generation.prompts import Prompts, default_columns
from genrt.generation.reports import JobReport
from genrt.generation.runs import JobRun, JobSettings
from genrt.generation.tables import check_input, check_output, format_of, read_rows
from genrt.generation.validators import Judge, Validate
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_float, check_int, check_timeout, named, shown
from genrt.questions.completions import (
    STRUCTURES,
    CompletionOptions,
    TurnOptions,
    completion_requests,
)
from genrt.questions.contexts import Limits, check_seed
from genrt.runtime.concurrency import aside, blocking_twin
from genrt.structures.guides import Guides

__all__ = ["Job"]

ANY_MODEL = Limits(2**31 - 1, 2**31 - 1)
"""Limits that every model is within: options are checked by these before there is a model."""


class Job:
    """A text for each row of a JSONL, CSV or TSV file, as a line of a JSONL file.

    The output is the job's memory: a line is written when its row is finished, whole, and once. Run again
    after any interruption, the job goes on with the rows that are missing; after rows were added to the
    input, with these. Lines are in the order in which rows were finished. A line has the row's ``index``
    (from 0), its columns as ``input``, ``text``, ``finish_reason``, ``stop_reason``, ``truncated``,
    ``prompt_tokens``, ``completion_tokens`` and ``seed``, or else ``error`` and ``error_type``; the
    ``reasoning`` where that is told apart. With a schema or ``validate`` it has the text's value as
    ``output``, whether it is ``valid``, and the ``fault`` if it is not; with ``logprobs`` these and the
    ``token_ids``.

    ``OUTPUT.job.json`` beside it says what the lines were made from. A run with another template, schema,
    option, model or ``weights_version`` is refused, and so is one whose input has changed in a row that
    is finished. Weights that a runtime got by ``update_weights`` are those of that runtime alone, unless
    ``model`` names their directory: another runtime's may be others, and are refused.

    With ``seed``, row ``i`` is drawn with seed ``seed + i``: a finished job is the same whatever
    interrupted it, as far as the engine computes the same in any batch.
    """

    def __init__(
        self,
        input: str | os.PathLike[str],
        output: str | os.PathLike[str],
        *,
        prompt_template: str | None = None,
        messages_column: str | None = None,
        system_message: str | None = None,
        chat: bool = False,
        validate: Validate | None = None,
        model: str | os.PathLike[str] | None = None,
        model_options: Mapping[str, Any] | None = None,
        input_format: str | None = None,
        limit: int | None = None,
        keep_columns: Sequence[str] | None = None,
        retry_errors: bool | Collection[str] = False,
        overwrite: bool = False,
        num_retries_invalid: int = 0,
        sort_by_length: bool = False,
        concurrency: int | None = None,
        max_consecutive_failures: int = 10,
        heartbeat: float = 15.0,
        log_prompts: bool = False,
        **options: Unpack[TurnOptions],
    ) -> None:
        """
        Args:
            input: the file of rows; see ``input_format``. It is read once before the first row is asked.
            output: the file of lines, in a directory that is there.
            prompt_template: the prompt of a row, by the names of columns: ``"Summarise: {text}"``.
                ``{{`` and ``}}`` are braces; values that are no str are written as JSON.
            messages_column: in place of a template, the column with a conversation: a list, or its JSON.
                Without either, the rows' column ``prompt`` or ``messages`` is what is asked.
            system_message: is put in front of every conversation; makes one of a template too.
            chat: whether the template's text is a message of the user's, answered by ``lm.chat``.
            validate: says whether a text is valid, and what its value is, as of ``generate_valid``: a
                function, a schema, a pydantic model. By default ``json_schema`` does. The value is
                written as JSON; a function is called on the loop.
            model: what the model is called when another run compares: its directory, which is compared by
                what is in it, or its name. By default where the tokenizer was read from.
            model_options: what else decides the model's answers, such as its dtype: compared, not used.
            input_format: ``"jsonl"``, ``"csv"`` or ``"tsv"``; by default what the file's name says.
            limit: only so many rows from the beginning.
            keep_columns: the columns that a line repeats as ``input``; by default all of the row.
            retry_errors: whether rows with an error are asked again, or the types of such errors.
            overwrite: whether to start over, if the output is there.
            num_retries_invalid: how often a text that is not valid is drawn again, with other seeds. The
                last draw is written.
            sort_by_length: whether the longest prompts are asked first, so that the last steps are not
                left to few of them. The rows that are left are then in memory, all at once; they are
                streamed otherwise.
            concurrency: how many rows are under way at once; by default as many as keep the engine's
                steps full, with a ``timeout`` no more than a step takes.
            max_consecutive_failures: after so many rows in a row failed, the run stops. 0 is no bound.
                Rows that are themselves wrong (any InvalidRequest: too long, a column missing, a text
                that the tokenizer refuses) do not count.
            heartbeat: every so many seconds a line is logged, with the time that is left, and the output
                synchronized with the disk; 0 is never.
            log_prompts: whether warnings about failed rows have the rows and the messages of the errors,
                which may quote prompts.
            options: those of ``lm.chat``. ``timeout`` is each row's; ``seed`` is 0 unless it is
                given, and ``None`` draws anew in every run.

        Raises:
            InvalidRequest: an argument is wrong, or there is no such input.
            ExtraNotInstalled: there is a schema, and jsonschema is missing.
        """
        source = check_input(_path("input", input))
        form = format_of(source, input_format)
        if "json_schema" in options:
            options = {**options, "json_schema": Schema(options["json_schema"]).schema}
        judged = options.get("json_schema") if validate is None else validate
        if prompt_template is None and messages_column is None:
            prompt_template, messages_column = default_columns(next(read_rows(source, form), None))
        prompts = Prompts(
            prompt_template, messages_column, chat=chat, system_message=system_message
        )
        kept = None if keep_columns is None else _names("keep_columns", keep_columns)
        asked: dict[str, Any] = {**options}
        seed = asked.pop("seed", 0)
        decided = _decided(asked, seed)
        redrawn = check_int("num_retries_invalid", num_retries_invalid, 0, 2**20)
        if redrawn and (judged is None or decided["temperature"] == 0):
            raise InvalidRequest(
                "num_retries_invalid needs a json_schema or validate to judge texts by, and a "
                "temperature over 0: a greedy text comes out the same again"
            )
        self._decided = (
            decided
            | prompts.parts
            | {
                "keep_columns": kept and sorted(kept),
                "num_retries_invalid": redrawn,
                "validate": _identity(validate),
            }
        )
        self._model = None if model is None else str(_path("model", model))
        if not isinstance(model_options, Mapping | None):
            raise InvalidRequest(f"model_options must be a mapping, got {named(model_options)}")
        self._model_options = _plain("model_options", model_options)
        self._settings = JobSettings(
            input=source,
            form=form,
            output=check_output(_path("output", output)),
            prompts=prompts,
            judge=None if judged is None else Judge(judged),
            options=asked,
            seed=decided["seed"],
            limit=sys.maxsize if limit is None else check_int("limit", limit, 1, sys.maxsize),
            keep_columns=kept,
            retried=_retried(retry_errors),
            overwrite=check_bool("overwrite", overwrite),
            num_retries_invalid=redrawn,
            sort_by_length=check_bool("sort_by_length", sort_by_length),
            concurrency=None if concurrency is None else check_int("concurrency", concurrency, 1),
            max_consecutive_failures=check_int(
                "max_consecutive_failures", max_consecutive_failures, 0
            ),
            heartbeat=check_float("heartbeat", heartbeat, 0.0, threading.TIMEOUT_MAX),
            log_prompts=check_bool("log_prompts", log_prompts),
        )

    def __repr__(self) -> str:
        return f"Job({str(self._settings.input)!r}, {str(self._settings.output)!r})"

    async def run(self, lm: AsyncLM) -> JobReport:
        """Ask the rows that are left, write them, and return what was done.

        The report of a run that stopped, since too many rows failed one after another, says so. Whatever
        else ends it, cancellation and interrupts included: what was written stays, and another run goes
        on from there.

        Raises:
            JobRefused: another job writes the output, or what it was made from has changed, if only
                because the runtime takes new weights meanwhile: texts by those are not written.
            InvalidRequest: the input cannot be read, a column is unknown (UnknownColumn), or an option
                is out of the model's range.
            OutputFailed: the output cannot be written.
            EngineDied, Closed: the runtime is; rows under way are not written.
        """
        if not isinstance(lm, AsyncLM):
            raise InvalidRequest(f"lm must be an AsyncLM, as genrt.load returns, got {shown(lm)}")
        running = JobRun(self._settings)
        try:
            await aside(lambda: running.open(self._fingerprint(model_of(lm), lm)))
            return await running.run(lm)
        finally:
            try:
                await aside(running.close)  # it waits for the disk
            finally:
                running.close()  # where that was cancelled: by then the output is to be free

    run_sync = blocking_twin(run)

    def begin(self, model: str | None = None) -> JobRun:
        """Return a run that lacks nothing but the model, which is this directory or of this name.

        For those who load a model only for what is not refused, and is not finished: it is to be closed,
        best by ``with``. Raises as ``run``; reads the input and the output, blocking.
        """
        running = JobRun(self._settings)
        try:
            running.open(self._fingerprint(model))
        except BaseException:
            running.close()
            raise
        return running

    def _fingerprint(self, model: str | None, lm: AsyncLM | None = None) -> Fingerprint:
        parts = self._decided | {"weights_version": 0 if lm is None else lm.weights_version}
        if lm is not None and lm.weights_version and self._model is None:
            parts = parts | {"runtime": lm.runtime_id}
        if self._model_options is not None:
            parts = parts | {"model_options": self._model_options}
        found = fingerprint(parts)
        model = self._model or model
        return found if model is None else found | {"model": model_part(model)}


def _path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise InvalidRequest(f"{name} must be a path, got {named(value)}")
    path = os.fsdecode(os.fspath(value))
    if "\0" in path:
        raise InvalidRequest(f"{name} must be a path, got one with a null character in it")
    try:
        found = Path(path).expanduser()
        os.fsencode(found)
        found.exists()
    except (OSError, UnicodeEncodeError, RuntimeError) as error:  # the last of nobody's home
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"{name} must be a path that a file can have: {reason}") from error
    return found


def _names(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple | set | frozenset) or not all(
        isinstance(each, str) for each in value
    ):
        raise InvalidRequest(f"{name} must be a list of names, got {shown(value)}")
    return tuple(value)


def _retried(value: object) -> Callable[[str], bool]:
    if isinstance(value, bool):
        return lambda _: value
    names = frozenset(_names("retry_errors", value))
    return names.__contains__


def _identity(validate: Any) -> Any:
    """Return what tells a validator from others: a schema, or a function's name and source."""
    if validate is None or isinstance(validate, Mapping | str):
        return validate if validate is None else Schema(validate).schema
    for of_model in ("model_json_schema", "json_schema"):  # a pydantic model, a TypeAdapter
        if callable(schema := getattr(validate, of_model, None)):
            return schema()
    function = validate if hasattr(validate, "__code__") else type(validate)
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # typed at a prompt
        source = getattr(getattr(function, "__code__", None), "co_code", b"").hex()
    return f"{getattr(function, '__qualname__', '')} {source}"


def _plain(name: str, value: Any) -> Any:
    """Return a value as its JSON is read. Raises InvalidRequest if it has none."""
    try:
        return json.loads(json.dumps(value, default=_name_of))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from error


def _name_of(value: Any) -> Any:
    """Return what stands for a value that is not JSON: a mapping's dict, a function's name."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(name := getattr(value, "__qualname__", None), str):
        raise TypeError(f"{shown(value)} is not JSON")
    return name


def _decided(options: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """Return how texts are drawn, in plain types, whatever the model.

    Raises:
        InvalidRequest: an option is wrong.
    """
    others = {name: options[name] for name in TurnOptions.__annotations__ if name in options}
    for name in CompletionOptions.__annotations__:
        others.pop(name, None)
    given = {name: value for name, value in options.items() if name not in others}
    check_timeout(others.pop("timeout", None))
    adapter = others.setdefault("adapter", None)
    if not isinstance(adapter, str | None):
        raise InvalidRequest(f"adapter must be a name, got {named(adapter)}")
    if not isinstance(others.get("tools"), list | tuple | None):
        raise InvalidRequest(f"tools must be a list, got {named(others['tools'])}")
    if not isinstance(kwargs := others.get("chat_template_kwargs"), Mapping | None):
        raise InvalidRequest(f"chat_template_kwargs must be a mapping, got {named(kwargs)}")
    [request] = completion_requests(ANY_MODEL, [[0]], None, itertools.count(), seed, given)
    decoding = asdict(request.decoding)
    if given.get("max_tokens") is None:
        decoding["max_tokens"] = None
    structure = decoding.pop("structure")
    if structure is not None:
        Guides(None, 0).check(structure)
    structures = dict.fromkeys(STRUCTURES) | dict([structure] if structure else [])
    others |= {"seed": check_seed(seed), "tools": None, "chat_template_kwargs": None} | others
    return decoding | structures | {name: _plain(name, each) for name, each in others.items()}
