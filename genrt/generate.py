"""The command ``genrt generate``: a job by its arguments, from the first check to the table.

What it needs is imported once its arguments are understood, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import genrt
from genrt.cluster.arguments import ReplicaOptions, add_replica_arguments, replica_options
from genrt.errors import InvalidRequest

if TYPE_CHECKING:
    from genrt.generation.reports import JobReport
    from genrt.lm import AsyncLM

__all__ = ["add_arguments", "run"]

ADAPTER = "adapter"
"""The name by which the runtime knows the adapter."""

EXITS = """\
exit codes: 0 all rows are in the output, none with an error; 1 an error ended the job; 2 it was refused
before it began; 3 rows failed, or too many one after another; 130 it was interrupted. Run it again to go
on from there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Those that are not given are not set."""
    parser.description = (
        "Write a text for each row of INPUT as a line of OUTPUT. OUTPUT is the job's memory: run the "
        "command again after any interruption, or after rows were added to INPUT, and it goes on."
    )
    parser.usage = "%(prog)s INPUT OUTPUT [option ...]"
    parser.epilog = EXITS
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument("input", metavar="INPUT", help="rows: .jsonl, .ndjson, .csv or .tsv")
    parser.add_argument("output", metavar="OUTPUT", help="lines of JSON, one for each row")
    _what_is_asked(parser.add_argument_group("what is asked"))
    _model(parser.add_argument_group("the model"))
    add_replica_arguments(parser)
    _drawing(parser.add_argument_group("how texts are drawn, as lm.generate takes it"))
    _job(parser.add_argument_group("the job"))


def _what_is_asked(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option(
        "--prompt-template",
        metavar="TEXT",
        type=_text,
        help="the prompt, {column} standing for a row's value; @FILE reads it from a file (default: "
        "the column prompt or messages, where the rows have one)",
    )
    option("--messages-column", metavar="NAME", help="the column that has a conversation, as JSON")
    option(
        "--system-message",
        metavar="TEXT",
        type=_text,
        help="put before every conversation (or @FILE)",
    )
    option("--chat", action="store_true", help="the template's text is a message of the user's")
    option("--chat-template-kwargs", metavar="JSON", type=_json, help="for the chat template")
    option("--input-format", metavar="FORMAT", help="jsonl, csv or tsv (default: by INPUT's name)")
    option("--limit", metavar="N", type=int, help="only the first N rows")


def _model(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--model", help="a checkpoint directory or a model's name (default: the embedded model)")
    option("--engine", default="vllm", help="vllm, transformers or exact (default: vllm)")
    option(
        "--engine-options",
        metavar="JSON",
        type=_json,
        default={},
        help="to vLLM's EngineArgs, or transformers' from_pretrained, as they are",
    )
    option("--adapter", metavar="DIRECTORY", help="a LoRA adapter; turns on vLLM's enable_lora")


def _drawing(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option(
        "--max-tokens", metavar="N", type=int, help="(default: what the context leaves room for)"
    )
    for name in ("temperature", "top-p", "min-p"):
        option(f"--{name}", metavar="X", type=float)
    option("--top-k", metavar="N", type=int)
    option("--seed", metavar="N", type=int, help="row i is drawn with N + i (default: 0)")
    option("--timeout", metavar="SECONDS", type=float, help="for each row")
    option("--stop", metavar="TEXT", action="append", help="ends the text; may be repeated")
    option("--stop-token-ids", metavar="ID", type=int, nargs="+")
    option("--min-tokens", metavar="N", type=int)
    option("--bad-words", metavar="TEXT", nargs="+")
    option("--logit-bias", metavar="JSON", type=_bias, help="what is added, by token id")
    option("--logprobs", metavar="N", type=int, help="in the lines, with N likeliest tokens each")
    option("--logprobs-mode", metavar="MODE", help="raw_logprobs (default) or processed_logprobs")
    for name in ("presence", "frequency", "repetition"):
        option(f"--{name}-penalty", metavar="X", type=float)
    option("--ignore-eos", action="store_true")
    option("--include-stop-str-in-output", action="store_true")
    option("--skip-special-tokens", action=argparse.BooleanOptionalAction)
    option("--schema", metavar="FILE", dest="json_schema", type=_file, help="a JSON schema")
    option("--regex", metavar="PATTERN")
    option("--grammar", metavar="TEXT", type=_text, help="(or @FILE)")
    option("--choice", metavar="TEXT", nargs="+")
    option(
        "--split-reasoning",
        action=argparse.BooleanOptionalAction,
        help="apart from the text; needs vLLM's option reasoning_parser (default: in chats, with that)",
    )


def _job(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option(
        "--keep-columns",
        metavar="NAME",
        nargs="*",
        help="the columns that lines repeat: none without names (default: all)",
    )
    option(
        "--retry-errors",
        metavar="TYPE",
        nargs="*",
        help="ask rows with an error again, or only with these types of errors",
    )
    option("--overwrite", action="store_true", help="start over")
    option(
        "--num-retries-invalid",
        metavar="N",
        type=int,
        help="draw a text that has not its schema again, up to N times (default: 0)",
    )
    option(
        "--sort-by-length",
        action="store_true",
        help="ask the longest prompts first; all rows that are left are then in memory",
    )
    option("--concurrency", metavar="N", type=int, help="rows under way at once")
    option(
        "--max-consecutive-failures",
        metavar="N",
        type=int,
        help="stop after so many in a row; 0 is no bound (default: 10)",
    )
    option(
        "--heartbeat",
        metavar="SECONDS",
        type=float,
        help="between two lines of progress; 0 is none (default: 15)",
    )
    option(
        "--log-prompts",
        action="store_true",
        help="log failed rows with their prompts and the messages of their errors",
    )


def run(args: argparse.Namespace) -> int:
    """Run the job: messages on stderr, the table on stdout. Return the exit code; ``EXITS`` has them.

    Raises:
        GenrtError: it was refused before it began, or an error ended it.
    """
    with _terminable(), _long_fields():
        try:
            return _run(vars(args))
        except KeyboardInterrupt:
            print("genrt generate: interrupted; run it again to go on", file=sys.stderr)
            return 130


def _run(given: dict[str, Any]) -> int:
    from genrt import models
    from genrt.cluster.opening import check_replicas
    from genrt.engines import check_choice
    from genrt.generation.jobs import Job

    replicas = replica_options(given)
    check_replicas(**replicas)
    for name in ("command", "run", *replicas):
        given.pop(name, None)
    engine, engine_options = given.pop("engine"), given.pop("engine_options")
    model, adapter = given.pop("model", None), given.pop("adapter", None)
    if given.get("retry_errors") == []:
        given["retry_errors"] = True
    if adapter is not None:
        if not Path(adapter).is_dir():
            raise InvalidRequest(f"--adapter {adapter} is not a directory")
        given["adapter"] = ADAPTER
        if engine == "vllm":
            engine_options = {"enable_lora": True, "max_lora_rank": _rank(adapter)} | engine_options
    check_choice(engine, model, engine_options)
    found = str(model) if engine == "exact" else models.resolve(model)
    job = Job(**given, model=found, model_options=_decisive(engine, engine_options, adapter))
    with job.begin() as running:
        try:
            if running.report().left:
                options = engine_options, replicas
                with _loaded(model, engine, *options, adapter) as lm:
                    running.run_sync(lm)
        finally:
            report = running.report()
            _show(report)
    return 0 if report.complete else 3


def _show(report: JobReport) -> None:
    """Print the table. What it is printed to may be full, or gone: the job's end is another's to tell."""
    try:
        print(report, flush=True)
    except OSError as error:
        print(f"genrt generate: no table: {error.strerror or error}", file=sys.stderr)
        # What is not written is written at the interpreter's end, and would fail again.
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())


def _decisive(engine: str, options: dict[str, Any], adapter: str | None) -> dict[str, Any]:
    """Return what else decides the model's answers."""
    from genrt.generation.fingerprints import HARMLESS, model_part

    decisive = {name: value for name, value in options.items() if name not in HARMLESS}
    weights = None if adapter is None else model_part(adapter)["digest"]
    return {"engine": engine, **decisive, "adapter": weights}


@contextlib.contextmanager
def _loaded(
    model: str | None,
    engine: str,
    options: dict[str, Any],
    replicas: ReplicaOptions,
    adapter: str | None,
) -> Iterator[AsyncLM]:
    log, began = logging.getLogger("genrt.generation"), time.monotonic()
    log.info("loading %s on engine %s", model or "the embedded model", engine)
    with genrt.load(model, engine=engine, engine_options=options, restart="auto", **replicas) as lm:
        if adapter is not None:
            lm.add_adapter_sync(ADAPTER, adapter)
        log.info("loaded in %.0f s", time.monotonic() - began)
        yield lm


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Have SIGTERM interrupt the job as Ctrl-C does, so that what has ended is written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    """Have CSV's fields be of any length: this process is the command's own."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _rank(adapter: str) -> int:
    """Return the least ``max_lora_rank`` of vLLM that an adapter fits in."""
    try:
        config = json.loads(Path(adapter, "adapter_config.json").read_bytes())
        rank = int(config["r"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidRequest(
            f"{adapter} is not a LoRA adapter: there is no adapter_config.json with a rank in it"
        ) from error
    return next((each for each in (8, 16, 32, 64, 128, 256, 320, 512) if each >= rank), rank)


def _text(value: str) -> str:
    return _file(value[1:]) if value.startswith("@") else value


def _file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be read: {error}") from error


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("it must be a JSON object")
    return value


def _bias(text: str) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in _json(text).items()}
    except ValueError as error:
        raise argparse.ArgumentTypeError("its keys must be token ids") from error
