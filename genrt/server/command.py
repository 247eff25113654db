"""``genrt serve MODEL``: a runtime behind HTTP, until it is interrupted."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from genrt.cluster.options import add_replica_arguments, replica_options
from genrt.engines.adapters import check_adapter_directory, least_lora_rank
from genrt.errors import EngineNotInstalled, ExtraNotInstalled, InvalidRequest
from genrt.loading import load
from genrt.numbers import check_float, check_int, named
from genrt.questions.arguments import check_seed
from genrt.server.gate import ServerLimits, check_key

NO_VLLM = "vLLM is missing: pip install 'genrt[cpu]', or 'genrt[cuda]' on a GPU machine"

KEY_VARIABLE = "GENRT_API_KEY"
"""The environment variable of the key: other users of the machine can read the command line."""


def add_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Add the command's arguments to a parser; return the part of the command line before ``--``. The
    rest is for vLLM."""
    add = parser.add_argument
    add("model", nargs="?", help="a checkpoint's directory or name; the embedded one")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=8000, help="0 is any (%(default)s)")
    about = f"key that clients must show; needed beside 127.0.0.1. Better: set {KEY_VARIABLE}"
    add("--api-key", help=about)
    add("--name", help="the model's name for clients; by default MODEL")
    add("--engine", default="vllm", choices=("vllm", "transformers"), help="(%(default)s)")
    about = "a LoRA adapter, and its name for clients; may be repeated"
    add("--adapter", action="append", default=[], metavar="NAME=DIRECTORY", help=about)
    add("--seed", type=int, help="for draws without a seed of their own")
    add("--no-restart", action="store_true", help="do not replace an engine that has died")
    about = "time for requests in progress to end (%(default)s)"
    add("--shutdown-seconds", type=float, default=10.0, help=about)
    about = "let vLLM's trainers replace the weights; takes --weight-transfer-config after --"
    add("--trainers", action="store_true", help=about)
    for each in dataclasses.fields(ServerLimits):
        option, about = each.name.replace("_", "-"), "see genrt.server.ServerLimits (%(default)s)"
        kind = type(each.default)
        add(f"--max-{option}", dest=each.name, type=kind, default=each.default, help=about)
    add_replica_arguments(parser)
    parser.epilog = (
        "What follows -- are options of `vllm serve`, of the engine and the front end, such as "
        "-- --max-model-len 4096 --enable-auto-tool-choice --tool-call-parser hermes"
    )
    given = list(arguments)
    cut = given.index("--") if "--" in given else len(given)
    parser.set_defaults(vllm=given[cut + 1 :])
    return given[:cut]


def run(options: argparse.Namespace) -> int:
    """Serve until an interrupt or SIGTERM; return the exit code.

    Raises:
        GenrtError: an argument is refused before the model is loaded, or the model cannot be loaded.
        SystemExit: on a SIGTERM during loading; a second one ends the process at once.
    """
    given = {each.name: getattr(options, each.name) for each in dataclasses.fields(ServerLimits)}
    limits = ServerLimits(**given)
    # Check everything before loading, which may take minutes.
    key = os.environ.get(KEY_VARIABLE) if options.api_key is None else options.api_key
    if key == "":
        raise InvalidRequest(
            f"the api_key is empty: give one, or neither --api-key nor {KEY_VARIABLE}"
        )
    check_key(key, options.host)
    check_int("port", options.port, 0, 65535)
    check_float("shutdown_seconds", options.shutdown_seconds, 0.0, 1e6)
    check_seed(options.seed)
    replicas = replica_options(vars(options))
    if options.trainers and replicas["replicas"] is not None:
        raise InvalidRequest(
            "--trainers sends weights to one engine: leave out --replicas. A runtime over replicas takes "
            "new weights in its own process, by lm.update_weights"
        )
    if options.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise EngineNotInstalled(NO_VLLM)
    engine_options, front_end = ({}, {}) if not options.vllm else _of_vllm(options)
    adapters = _adapter_directories(options.adapter)
    if adapters and options.engine == "vllm":
        engine_options = {
            "enable_lora": True,
            "max_loras": len(adapters),
            "max_lora_rank": least_lora_rank(*adapters.values()),
        } | engine_options
    _raise_descriptors()
    try:
        from genrt.server.server import listening_socket, serving
    except ImportError as error:
        raise ExtraNotInstalled(
            f"serving needs another package ({error}): pip install 'genrt[serve]'"
        ) from error

    listening_socket(options.host, options.port).close()  # or it would be refused after minutes
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, _end_loading)
    try:
        print(
            f"genrt: loading {options.model or 'the embedded model'}", file=sys.stderr, flush=True
        )
        with (
            load(
                options.model,
                engine=options.engine,
                engine_options=engine_options,
                restart=None if options.no_restart else "auto",
                seed=options.seed,
                **replicas,
            ) as lm,
        ):
            for name, path in adapters.items():
                lm.add_adapter_sync(name, path)
            server = serving(
                lm,
                host=options.host,
                port=options.port,
                api_key=key,
                model=options.name or options.model or "genrt",
                limits=limits,
                options=front_end,
                shutdown_seconds=options.shutdown_seconds,
                trainers=options.trainers,
            )
            with server:
                signal.signal(signal.SIGTERM, lambda *_: ended.set())
                print(_greeting(options, str(server.url), key), flush=True)
                with contextlib.suppress(KeyboardInterrupt):
                    ended.wait()
                print("genrt: closing", flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _end_loading(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(128 + signal.SIGTERM)


def _raise_descriptors() -> None:
    """Raise this process's soft limit of descriptors, for connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 2**16:
        most = 2**16 if hard == resource.RLIM_INFINITY else min(2**16, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _greeting(options: argparse.Namespace, url: str, key: str | None) -> str:
    """Return a line about the model, its address and its clients."""
    clients = f"genrt's own routes, and AsyncLM.connect({url!r})"
    if options.engine == "vllm":
        clients = f"OpenAI clients: {url}/v1"
    name = options.name or options.model or "the embedded model"
    return f"genrt: serving {name} on {url}, {'with the' if key else 'without a'} key; {clients}"


def _adapter_directories(given: Sequence[str]) -> dict[str, Path]:
    """Return the adapters' directories by their names. Raises InvalidRequest, InvalidAdapter."""
    found: dict[str, Path] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not (name and equals and path):
            raise InvalidRequest(f"--adapter takes NAME=DIRECTORY, got {each!r}")
        if name in found:
            raise InvalidRequest(f"--adapter: {named(name)} is given twice")
        found[name] = Path(path).expanduser()
    for directory in found.values():
        check_adapter_directory(directory)
    return found


def _of_vllm(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return vLLM's options: of the engine, and of the front end."""
    if options.engine != "vllm":
        raise InvalidRequest(f"options after -- are vLLM's, and the engine is {options.engine}")
    try:
        from genrt.server.openai import options_of
    except ImportError as error:
        raise EngineNotInstalled(f"{error}: {NO_VLLM}") from error
    return options_of(options.vllm)
