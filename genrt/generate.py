"""The command ``genrt generate``: a job from command-line arguments.

Heavy packages are imported after the arguments are parsed, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import genrt
from genrt.cluster.options import add_replica_arguments, replica_options
from genrt.errors import InvalidRequest

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


OPTIONS = """
what is asked
delimiter             CHARACTER  between the fields of .csv files (default: a comma)
prompt-template       TEXT       the prompt, {column} standing for a value of the row; @FILE reads a file
                                 (default: the column prompt or messages, where the rows have one)
messages-column       NAME       the column that has a conversation, as JSON
system-message        TEXT       put before every conversation (or @FILE)
chat                  flag       the template's text is a message of the user's
limit                 N          only the first N rows

the model
model                 MODEL      a checkpoint directory or a model's name (default: the embedded model)
engine                ENGINE     vllm, transformers or exact (default: vllm)
engine-options        JSON       to vLLM's EngineArgs, or transformers' from_pretrained, as they are
adapter               DIRECTORY  a LoRA adapter; turns on vLLM's enable_lora

how texts are drawn, as lm.generate takes it
max-tokens            N          (default: the rest of the context)
temperature           X
top-p                 X
min-p                 X
top-k                 N
seed                  N          row i is drawn with N + i (default: 0)
timeout               SECONDS    for each row
stop                  STOP       ends the text; may be repeated
logprobs              N          in the lines, with N likeliest tokens each
schema                FILE       a JSON schema
regex                 PATTERN
grammar               TEXT       (or @FILE)
choice                TEXT+      the text is one of these; may be repeated, which adds others
options               JSON       others of lm.chat by name, as {"min_tokens": 8, "ignore_eos": true}

the job
keep-columns          NAME*      the columns that lines repeat: none without names (default: all)
retry-errors          flag       run rows with an error again
overwrite             flag       start over
num-retries-invalid   N          redraw invalid texts, up to N times (default: 0)
concurrency           N          rows under way at once
max-consecutive-failures  N      stop after so many in a row; 0 is no bound (default: 10)
"""
"""Groups of options: name, kind, help. Names and defaults are those of ``Job`` and ``lm.chat``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Options that are not used are not set."""
    parser.description = (
        "Write a text for each row of INPUT as a line of OUTPUT. Run the command again after any "
        "interruption, or after rows were added to INPUT, and it goes on."
    )
    parser.usage = "%(prog)s INPUT OUTPUT [option ...]"
    parser.epilog = EXITS
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument("input", metavar="INPUT", help="rows: .jsonl, .csv, .tsv or .parquet")
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        help="a line for each row, in one of these formats; until the job is complete, the lines of a "
        ".csv, .tsv or .parquet file are in OUTPUT.jsonl",
    )
    add_replica_arguments(parser)
    kinds: dict[str, dict[str, Any]] = {
        "flag": {"action": "store_true"},
        "N": {"type": int},
        "X": {"type": float},
        "SECONDS": {"type": float},
        "TEXT": {"type": _text_or_file},
        "JSON": {"type": _json},
        "FILE": {"type": _file, "dest": "json_schema"},
        "STOP": {"metavar": "TEXT", "action": "append"},
        "TEXT+": {"metavar": "TEXT", "nargs": "+", "action": "extend"},
        "NAME*": {"metavar": "NAME", "nargs": "*"},
    }
    for section in OPTIONS.replace("\n    ", " ").strip().split("\n\n"):
        title, *lines = section.split("\n")
        group = parser.add_argument_group(title)
        for line in lines:
            name, kind, *words = line.split()
            given = kinds.get(kind, {})
            if "action" not in given:
                given = {"metavar": kind, **given}
            group.add_argument(f"--{name}", help=" ".join(words) or None, **given)
    parser.set_defaults(engine="vllm", engine_options={}, options={})


def run(args: argparse.Namespace) -> int:
    """Run the job: messages on stderr, the table on stdout. Return the exit code; see ``EXITS``.

    Raises:
        GenrtError: the job was refused, or an error ended it.
    """
    with _process_settings():
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
    from genrt.numbers import check_options
    from genrt.questions.completions import TurnOptions

    replicas = replica_options(given)
    for name in ("command", "run", *replicas):
        given.pop(name, None)
    engine, options = given.pop("engine"), given.pop("engine_options")
    model, adapter = given.pop("model", None), given.pop("adapter", None)
    others = given.pop("options")
    check_options("--options", others, TurnOptions.__annotations__)
    if "logit_bias" in others:  # the keys of JSON are texts
        others["logit_bias"] = _parse_bias(others["logit_bias"])
    given |= others
    if adapter is not None:
        if not Path(adapter).is_dir():
            raise InvalidRequest(f"--adapter {adapter} is not a directory")
        given["adapter"] = ADAPTER
        if engine == "vllm":
            rank = least_lora_rank(Path(adapter))
            options = {"enable_lora": True, "max_lora_rank": rank} | options
    check_choice(engine, model, options)
    found = str(model) if engine == "exact" else models.resolve(model)
    compared = {name: each for name, each in options.items() if name not in HARMLESS}
    job = Job(**given, model=found, model_options={"engine": engine, **compared})
    with job.begin(adapter=adapter) as running:
        try:
            if running.report().left:
                log, began = logging.getLogger("genrt.generation"), time.monotonic()
                log.info("loading %s on engine %s", model or "the embedded model", engine)
                opened: Any = {"engine": engine, "engine_options": options, "restart": "auto"}
                with genrt.load(model, **opened, **replicas) as lm:
                    if adapter is not None:
                        lm.add_adapter_sync(ADAPTER, adapter)
                    log.info("loaded in %.0f s", time.monotonic() - began)
                    running.run_sync(lm, progress=sys.stderr.isatty())
        finally:
            report = running.report()
            print(report, flush=True)
    return 0 if report.complete else 3


@contextlib.contextmanager
def _process_settings() -> Iterator[None]:
    """Make SIGTERM interrupt the job as Ctrl-C does, so that finished rows are written, and allow CSV
    fields of any length."""
    limit = csv.field_size_limit(2**31 - 1)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
        csv.field_size_limit(limit)


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


def _parse_bias(bias: Any) -> dict[int, float]:
    try:
        return {int(token): number for token, number in dict(bias).items()}
    except (TypeError, ValueError) as error:
        raise InvalidRequest("logit_bias in --options must map token ids to numbers") from error
