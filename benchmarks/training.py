"""What trainers ask for, and its cost: sampling masks, and a teacher's likeliest tokens.

    python -m benchmarks.training --json training.json

``mask_ids`` and ``mask_bits`` draw texts at top-p 0.9 with log-probabilities and ``sampling_mask``;
``ratio`` is the time of the same texts without masks over theirs. ``teacher`` asks for the likeliest
tokens of every position of texts that no one has asked about; ``ratio`` is the time of vLLM's own
``prompt_logprobs`` over its. ``bytes_a_token`` is the size of the answer: of arrays for genrt, pickled
for vLLM. Ratios are medians over the repeats, each of two runs in turn; ``cpu_ratio`` has the
processor's time in place of the clock's, which other processes disturb. The cost of ``--deterministic``
is the difference between two runs' ``tokens_per_second``: its environment variables are the process's.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import genrt
from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.setups import append, prepared
from genrt.lm import AsyncLM

PROSE = "The river ran past the old town, and in the evening people sat on its banks and talked. "


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", help="tiny, embedded, dummy-1b, dummy-8b, or a directory")
    add("--modes", nargs="+", choices=["masks", "teacher"], default=["masks", "teacher"])
    add("--texts", type=int, help="at once; default: 16; quick: 2")
    add("--tokens", type=int, help="of each text; default: 64; quick: 8")
    add("--top", type=int, default=256)
    add("--repeats", type=int, help="default: 7; quick: 2")
    add("--quick", action="store_true", help="smaller defaults")
    add("--deterministic", action="store_true", help="genrt's engine is deterministic")
    add("--options", type=json.loads, default={}, help="options of all engines, as JSON")
    add("--json", type=Path, help="append the results to this file")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.texts = arguments.texts or (2 if quick else 16)
    arguments.tokens = arguments.tokens or (8 if quick else 64)
    arguments.repeats = arguments.repeats or (2 if quick else 7)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
        "0"  # LLM's engine in this process, as genrt's is
    )
    for result in measure(arguments):
        print(json.dumps(result), flush=True)
        append(json.dumps(result), arguments.json)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a result for each mode."""
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(1) as thread:
        model = checkpoint(arguments.model, Path(directory))
        has_tokenizer = arguments.model not in {"tiny", *SHAPES}
        given = {"skip_tokenizer_init": not has_tokenizer} | arguments.options
        setup = prepared(arguments.model, model, given, max_num_seqs=arguments.texts)
        length = 2 * arguments.tokens + 2
        setup = setup.sized(length, arguments.texts * (length // setup.block_size + 2) * 2)
        common = {"model": arguments.model, "texts": arguments.texts, "tokens": arguments.tokens}
        common |= setup.surroundings

        prose: list[int] = []

        def texts() -> list[list[int]]:
            """Return texts that begin with a random token, so that no cache has them. After prose a
            trained model's laws are narrow, as in use."""
            count, most = arguments.tokens, setup.vocab_size
            tails = [prose[:count] or chance.choices(range(most), k=count - 1)] * arguments.texts
            return [[chance.randrange(most), *tail][:count] for tail in tails]

        deterministic = arguments.deterministic
        common |= {"deterministic": deterministic} if deterministic else {}
        given = {"engine_options": setup.options, "deterministic": deterministic, "cache_bytes": 0}
        with genrt.load(model, **given) as lm:
            prose += lm.encode(PROSE * arguments.tokens) if has_tokenizer else []
            if "masks" in arguments.modes:
                modes = {
                    name: drawing(lm, texts, arguments.tokens, form)
                    for name, form in (("none", None), ("mask_ids", "ids"), ("mask_bits", "bits"))
                }
                for result in compared("none", modes, arguments.repeats):
                    yield result | common
            if "teacher" in arguments.modes:
                from vllm import LLM

                top = min(arguments.top, setup.vocab_size)
                options = setup.options | {"max_logprobs": top}
                llm = thread.submit(lambda: LLM(model, **options)).result()
                modes = {"teacher": teaching(lm, texts, top)}
                modes["vllm"] = lambda: thread.submit(of_vllm, llm, texts(), top).result()
                for result in compared("vllm", modes, arguments.repeats):
                    yield result | common | {"top": top}


def drawing(
    lm: AsyncLM, texts: Callable[[], list[list[int]]], count: int, form: Any
) -> Callable[[], tuple[int, int]]:
    """Return a function that draws texts and returns the numbers of their tokens and of bytes of sets."""
    options: dict[str, Any] = {"max_tokens": count, "top_p": 0.9, "ignore_eos": True, "logprobs": 0}

    def run() -> tuple[int, int]:
        done = lm.batch_generate_sync(texts(), seed=1, sampling_mask=form, **options)
        masks = [each.sampling_mask for each in done if each.sampling_mask is not None]
        nbytes = sum(len(tokens) + 8 for mask in masks for _, _, tokens in mask.places)
        return sum(len(each.token_ids) for each in done), nbytes

    return run


def teaching(
    lm: AsyncLM, texts: Callable[[], list[list[int]]], top: int
) -> Callable[[], tuple[int, int]]:
    """Return a function that asks for likeliest tokens and returns the numbers of positions and bytes."""

    def run() -> tuple[int, int]:
        found = lm.batch_teacher_sync(texts(), top=top)
        return sum(len(each.tail) for each in found), sum(p.nbytes for each in found for p in each)

    return run


def of_vllm(llm: Any, texts: Sequence[list[int]], top: int) -> tuple[int, int]:
    """Ask vLLM for the same, and return the same numbers."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=top, detokenize=False)
    done = llm.generate([{"prompt_token_ids": each} for each in texts], params, use_tqdm=False)
    answers = [each.prompt_logprobs for each in done]
    clock = time.perf_counter(), time.process_time()
    nbytes = len(pickle.dumps([list(each) for each in answers]))
    PICKLED[0] += time.perf_counter() - clock[0]
    PICKLED[1] += time.process_time() - clock[1]
    return sum(map(len, texts)), nbytes


PICKLED = [0.0, 0.0]
"""The seconds that vLLM's answers took to be measured, which are not of its time."""


def compared(
    base: str, modes: dict[str, Callable[[], tuple[int, int]]], repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield the speed of each mode, and the ratio of the base's time to its."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
    sizes: dict[str, float] = {}
    for repeat in range(-1, repeats):  # the first is for warming up
        order = [*modes]
        for name in order[repeat % len(order) :] + order[: repeat % len(order)]:
            PICKLED[:] = 0.0, 0.0
            began, used = time.perf_counter(), time.process_time()
            tokens, nbytes = modes[name]()
            wall = time.perf_counter() - began - PICKLED[0]
            spent = time.process_time() - used - PICKLED[1]
            sizes[name] = nbytes / tokens
            if repeat >= 0:
                samples[name].append((wall / tokens, spent / tokens))
    for name, taken in samples.items():
        pairs = [*zip(samples[base], taken, strict=True)]
        ratios, of_cpu = ([theirs[n] / own[n] for theirs, own in pairs] for n in (0, 1))
        yield {
            "mode": name,
            "tokens_per_second": round(1 / statistics.median([wall for wall, _ in taken]), 1),
            "ratio": round(statistics.median(ratios), 3),
            "cpu_ratio": round(statistics.median(of_cpu), 3),
            "bytes_a_token": round(sizes[name], 1),
        }


if __name__ == "__main__":
    main()
