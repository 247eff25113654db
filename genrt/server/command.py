"""``genrt serve MODEL``: a runtime behind HTTP, until it is interrupted."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from genrt.cluster.arguments import add_replica_arguments, replica_options
from genrt.cluster.opening import check_replicas
from genrt.errors import EngineNotInstalled, InvalidRequest
from genrt.loading import load
from genrt.numbers import check_float, check_int, named
from genrt.questions.contexts import check_seed
from genrt.server.gate import ServerLimits, check_key
from genrt.server.server import Server, serving

__all__ = ["add_arguments", "run"]

KEY_VARIABLE = "GENRT_API_KEY"
"""Where the key may be given without everyone on the machine seeing it."""


def add_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Add the command's arguments to a parser; return those of the command line that are for it. What
    follows ``--`` is for vLLM."""
    parser.add_argument(
        "model", nargs="?", help="a checkpoint's directory or name; the embedded one"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 is any (%(default)s)")
    parser.add_argument(
        "--api-key",
        help=f"what clients have to show; needed beside 127.0.0.1. Rather set {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--name", help="what clients call the model; by default as it is given here"
    )
    parser.add_argument(
        "--engine", default="vllm", choices=("vllm", "transformers"), help="(%(default)s)"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIRECTORY",
        help="a LoRA adapter, which clients call by its name; may be repeated",
    )
    parser.add_argument("--seed", type=int, help="of what is drawn without a seed of its own")
    parser.add_argument(
        "--no-restart", action="store_true", help="do not replace an engine that has died"
    )
    parser.add_argument(
        "--shutdown-seconds", type=float, default=10.0, help="for requests under way (%(default)s)"
    )
    parser.add_argument(
        "--trainers",
        action="store_true",
        help="let vLLM's trainers replace the weights; takes --weight-transfer-config after --",
    )
    for each in dataclasses.fields(ServerLimits):
        parser.add_argument(
            f"--max-{each.name.replace('_', '-')}",
            dest=each.name,
            type=type(each.default),
            default=each.default,
            help="see genrt.server.ServerLimits (%(default)s)",
        )
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
        GenrtError: the model cannot be loaded, or the address not be listened on.
    """
    given = {each.name: getattr(options, each.name) for each in dataclasses.fields(ServerLimits)}
    limits = ServerLimits(**given)
    adapters = [_adapter(each) for each in options.adapter]
    # All of this before the model is loaded, which may take minutes.
    api_key = check_key(options.api_key or os.environ.get(KEY_VARIABLE) or None, options.host)
    check_int("port", options.port, 0, 65535)
    check_float("shutdown_seconds", options.shutdown_seconds, 0.0, 1e6)
    check_seed(options.seed)
    replicas = replica_options(vars(options))
    check_replicas(**replicas)
    if options.trainers and replicas["replicas"] is not None:
        raise InvalidRequest(
            "--trainers sends weights to one engine: leave out --replicas. A runtime over replicas takes "
            "new weights in its own process, by lm.update_weights"
        )
    names = Counter(name for name, _ in adapters)
    if twice := [name for name, count in names.items() if count > 1]:
        raise InvalidRequest(f"--adapter: {named(twice[0])} is given twice")
    engine_options, front_end = ({}, {}) if not options.vllm else _of_vllm(options)
    if adapters and options.engine == "vllm":
        engine_options = {"enable_lora": True, "max_loras": len(adapters)} | engine_options
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        with load(
            options.model,
            engine=options.engine,
            engine_options=engine_options,
            restart=None if options.no_restart else "auto",
            seed=options.seed,
            **replicas,
        ) as lm:
            for name, path in adapters:
                lm.add_adapter_sync(name, path)
            server = serving(
                lm,
                host=options.host,
                port=options.port,
                api_key=api_key,
                model=options.name or options.model or "genrt",
                limits=limits,
                options=front_end,
                shutdown_seconds=options.shutdown_seconds,
                trainers=options.trainers,
            )
            with server:
                key = "with the key" if api_key else "without a key"
                print(f"genrt: serving {server!r}, {key}; {_clients(options, server)}", flush=True)
                with contextlib.suppress(KeyboardInterrupt):
                    ended.wait()
                print("genrt: closing", flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _clients(options: argparse.Namespace, server: Server) -> str:
    """Return who may ask, and where."""
    if options.engine == "vllm":
        return f"OpenAI clients: {server.url}/v1"
    return f"genrt's own routes, and AsyncLM.connect({server.url!r})"


def _adapter(given: str) -> tuple[str, str]:
    name, equals, path = given.partition("=")
    if not (name and equals and path):
        raise InvalidRequest(f"--adapter takes NAME=DIRECTORY, got {given!r}")
    return name, path


def _of_vllm(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return vLLM's own options that were given: of the engine, and of the front end."""
    if options.engine != "vllm":
        raise InvalidRequest(f"options after -- are vLLM's, and the engine is {options.engine}")
    try:
        from genrt.server.openai import options_of
    except ImportError as error:
        raise EngineNotInstalled(
            f"vLLM cannot be imported ({error}): install it with pip install 'genrt[cpu]', or "
            "'genrt[cuda]' on a GPU machine"
        ) from error
    return options_of(options.vllm)
