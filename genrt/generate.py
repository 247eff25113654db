"""The command ``genrt generate``: a job from command-line arguments.

Heavy packages are imported after the arguments are parsed, so that ``--help`` is quick.
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
from genrt.cluster.options import (
    ReplicaOptions,
    add_replica_arguments,
    check_replicas,
    replica_options,
)
from genrt.errors import InvalidRequest

if TYPE_CHECKING:
    from genrt.generation.jobs import JobReport
    from genrt.lm import AsyncLM

__all__ = ["add_arguments", "run"]

ADAPTER = "adapter"
"""The name of the adapter in the runtime."""

HARMLESS = frozenset(
    """
    block_size cpu_offload_gb disable_log_stats distributed_executor_backend download_dir
    enable_chunked_prefill enable_prefix_caching enforce_eager gpu_memory_utilization
    kv_cache_memory_bytes load_format max_batch_size max_loras max_lora_rank max_num_batched_tokens
    max_num_seqs max_parallel_loading_workers num_gpu_blocks_override pipeline_parallel_size
    scheduling_policy swap_space tensor_parallel_size use_tqdm_on_load
    """.split()  # noqa: SIM905
)
"""Engine options that may change between two runs of a job: they do not change the model's answers."""

EXITS = """\
exit codes: 0 all rows are in the output, none with an error; 1 an error ended the job; 2 it was refused
before it began; 3 rows failed, or too many one after another; 130 it was interrupted. Run it again to go
on from there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Options that are not used are not set."""
    parser.description = (
        "Write a text for each row of INPUT as a line of OUTPUT. OUTPUT is the job's memory: run the "
        "command again after any interruption, or after rows were added to INPUT, and it goes on."
    )
    parser.usage = "%(prog)s INPUT OUTPUT [option ...]"
    parser.epilog = EXITS
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument("input", metavar="INPUT", help="rows: .jsonl, .ndjson, .csv or .tsv")
    parser.add_argument("output", metavar="OUTPUT", help="lines of JSON, one for each row")
    add_replica_arguments(parser)
    for title, options in _options().items():
        group = parser.add_argument_group(title)
        for name, kind, text in options:
            group.add_argument(f"--{name}", help=text or None, **kind)


def _options() -> dict[str, list[tuple[str, dict[str, Any], str]]]:
    """Return the options by group: name, arguments of argparse, help. Names and defaults are those of
    ``Job`` and ``lm.chat``."""
    integer: dict[str, Any] = {"metavar": "N", "type": int}
    number: dict[str, Any] = {"metavar": "X", "type": float}
    seconds: dict[str, Any] = {"metavar": "SECONDS", "type": float}
    text: dict[str, Any] = {"metavar": "TEXT", "type": _text_or_file}
    texts: dict[str, Any] = {"metavar": "TEXT", "nargs": "+"}
    mapping: dict[str, Any] = {"metavar": "JSON", "type": _json}
    flag: dict[str, Any] = {"action": "store_true"}
    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    name: dict[str, Any] = {"metavar": "NAME"}
    return {
        "what is asked": [
            (
                "prompt-template",
                text,
                "the prompt, {column} standing for a row's value; @FILE reads it from a file (default: "
                "the column prompt or messages, where the rows have one)",
            ),
            ("messages-column", name, "the column that has a conversation, as JSON"),
            ("system-message", text, "put before every conversation (or @FILE)"),
            ("chat", flag, "the template's text is a message of the user's"),
            ("chat-template-kwargs", mapping, "for the chat template"),
            ("input-format", name, "jsonl, csv or tsv (default: by INPUT's name)"),
            ("limit", integer, "only the first N rows"),
        ],
        "the model": [
            ("model", {}, "a checkpoint directory or a model's name (default: the embedded model)"),
            ("engine", {"default": "vllm"}, "vllm, transformers or exact (default: vllm)"),
            (
                "engine-options",
                mapping | {"default": {}},
                "to vLLM's EngineArgs, or transformers' from_pretrained, as they are",
            ),
            ("adapter", {"metavar": "DIRECTORY"}, "a LoRA adapter; turns on vLLM's enable_lora"),
        ],
        "how texts are drawn, as lm.generate takes it": [
            ("max-tokens", integer, "(default: the rest of the context)"),
            ("temperature", number, ""),
            ("top-p", number, ""),
            ("min-p", number, ""),
            ("top-k", integer, ""),
            ("seed", integer, "row i is drawn with N + i (default: 0)"),
            ("timeout", seconds, "for each row"),
            ("stop", {"metavar": "TEXT", "action": "append"}, "ends the text; may be repeated"),
            ("stop-token-ids", {"metavar": "ID", "type": int, "nargs": "+"}, ""),
            ("min-tokens", integer, ""),
            ("bad-words", texts, ""),
            (
                "logit-bias",
                {"metavar": "JSON", "type": _parse_bias},
                "added to logits, by token id",
            ),
            ("logprobs", integer, "in the lines, with N likeliest tokens each"),
            ("logprobs-mode", name, "raw_logprobs (default) or processed_logprobs"),
            ("presence-penalty", number, ""),
            ("frequency-penalty", number, ""),
            ("repetition-penalty", number, ""),
            ("ignore-eos", flag, ""),
            ("include-stop-str-in-output", flag, ""),
            ("skip-special-tokens", switch, ""),
            (
                "schema",
                {"metavar": "FILE", "dest": "json_schema", "type": _file},
                "a JSON schema",
            ),
            ("regex", {"metavar": "PATTERN"}, ""),
            ("grammar", text, "(or @FILE)"),
            ("choice", texts, ""),
            (
                "split-reasoning",
                switch,
                "needs vLLM's option reasoning_parser (default: in chats, with that)",
            ),
        ],
        "the job": [
            (
                "keep-columns",
                name | {"nargs": "*"},
                "the columns that lines repeat: none without names (default: all)",
            ),
            (
                "retry-errors",
                {"metavar": "TYPE", "nargs": "*"},
                "run rows with an error again, or only with these types of errors",
            ),
            ("overwrite", flag, "start over"),
            ("num-retries-invalid", integer, "redraw invalid texts, up to N times (default: 0)"),
            (
                "sort-by-length",
                flag,
                "longest prompts first; the remaining rows are then in memory",
            ),
            ("concurrency", integer, "rows under way at once"),
            (
                "max-consecutive-failures",
                integer,
                "stop after so many in a row; 0 is no bound (default: 10)",
            ),
            ("heartbeat", seconds, "between two lines of progress; 0 is never (default: 15)"),
            ("log-prompts", flag, "log failed rows with their prompts and error messages"),
        ],
    }


def run(args: argparse.Namespace) -> int:
    """Run the job: messages on stderr, the table on stdout. Return the exit code; see ``EXITS``.

    Raises:
        GenrtError: the job was refused, or an error ended it.
    """
    with _terminable(), _long_fields():
        try:
            return _run(vars(args))
        except KeyboardInterrupt:
            print("genrt generate: interrupted; run it again to go on", file=sys.stderr)
            return 130


def _run(given: dict[str, Any]) -> int:
    from genrt import models
    from genrt.engines import check_choice
    from genrt.engines.adapters import least_lora_rank
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
            lora = {"enable_lora": True, "max_lora_rank": least_lora_rank(Path(adapter))}
            engine_options = lora | engine_options
    check_choice(engine, model, engine_options)
    found = str(model) if engine == "exact" else models.resolve(model)
    compared = {name: each for name, each in engine_options.items() if name not in HARMLESS}
    job = Job(**given, model=found, model_options={"engine": engine, **compared})
    with job.begin(adapter=adapter) as running:
        try:
            if running.report().left:
                options = engine_options, replicas
                with _open_runtime(model, engine, *options, adapter) as lm:
                    running.run_sync(lm)
        finally:
            report = running.report()
            _show(report)
    return 0 if report.complete else 3


def _show(report: JobReport) -> None:
    """Print the table. A full or closed stdout does not fail the job."""
    try:
        print(report, flush=True)
    except OSError as error:
        print(f"genrt generate: no table: {error.strerror or error}", file=sys.stderr)
        # The interpreter flushes stdout at its end, which would fail again.
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def _open_runtime(
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
    """Make SIGTERM interrupt the job as Ctrl-C does, so that finished rows are written."""
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
    """Allow CSV fields of any length; the limit belongs to the process."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _text_or_file(value: str) -> str:
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


def _parse_bias(text: str) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in _json(text).items()}
    except ValueError as error:
        raise argparse.ArgumentTypeError("its keys must be token ids") from error
