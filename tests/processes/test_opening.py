"""Opening, restarting and closing a runtime changes nothing of the process, and no randomness repeats."""

from __future__ import annotations

import asyncio
import operator
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

import genrt
from genrt.engines.exact import NGram
from genrt.lm import AsyncLM
from tests import children

MODEL = NGram.random(50, seed=1)
PROMPT = [1, 2]
VLLM_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 2**26,
}

Load: TypeAlias = Callable[..., AsyncLM]
Answers: TypeAlias = list[Any]


@pytest.fixture(
    params=[
        "exact",
        pytest.param("transformers", marks=pytest.mark.vllm),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ]
)
def load(request: pytest.FixtureRequest) -> Iterator[Load]:
    """Opens a runtime over one engine or the other; closed at the end."""
    llama: Path | None = None if request.param == "exact" else request.getfixturevalue("llama")
    with ExitStack() as opened:

        def one(**arguments: Any) -> AsyncLM:
            if llama is None:
                return opened.enter_context(genrt.load(MODEL, engine="exact", **arguments))
            options = VLLM_OPTIONS if request.param == "vllm" else {}
            return opened.enter_context(
                genrt.load(llama, engine=request.param, engine_options=options, **arguments)
            )

        yield one


def unseeded(lm: AsyncLM) -> Answers:
    """Draws and samples of every kind, without a seed."""

    async def ask() -> Answers:
        return [
            *await asyncio.gather(*(lm.draw(PROMPT) for _ in range(8))),
            (await lm.batch_draw([PROMPT] * 8, temperature=2.0)).token_ids.tolist(),
            *await asyncio.gather(*(lm.sample(PROMPT, max_tokens=12) for _ in range(4))),
            *await lm.batch_sample([PROMPT] * 4, max_tokens=12, temperature=1.5, top_p=0.9),
        ]

    return asyncio.run(ask())


def seeded(lm: AsyncLM) -> Answers:
    """The same with seeds."""
    return [
        [each.token_id for each in (lm.draw_sync(PROMPT, seed=seed) for seed in range(8))],
        lm.batch_sample_sync([PROMPT] * 4, max_tokens=12, seed=3),
    ]


def states() -> dict[str, int]:
    """Of the generators that a process has, in short."""
    numpy: dict[str, Any] = dict(np.random.get_state(legacy=False))
    return {
        "random": hash(random.getstate()),
        "numpy": hash((numpy["state"]["key"].tobytes(), numpy["state"]["pos"], numpy["gauss"])),
        "torch": hash(torch.get_rng_state().numpy().tobytes()),
    }


@pytest.mark.promise(number=23)
@pytest.mark.promise(number=27)
@pytest.mark.parametrize("seeds", [(None, None), (7, 8)])
def test_two_runtimes_draw_independently(seeds: tuple[int | None, int | None]) -> None:
    """Fifty tokens, eight draws and more: equal ones have a chance far below 1e-9."""
    runtimes = [genrt.load(MODEL, engine="exact", seed=seed) for seed in seeds]
    assert have_nothing_in_common(*map(unseeded, runtimes))
    for runtime in runtimes:
        runtime.close()


def have_nothing_in_common(first: Answers, second: Answers) -> bool:
    """Whether the draws differ together, and each of the longer texts."""
    return first[:8] != second[:8] and all(map(operator.ne, first[8:], second[8:]))


@pytest.mark.promise(number=27)
def test_a_seed_decides_all_draws_and_the_generators_of_the_process_are_left_alone(
    load: Load,
) -> None:
    """A restarted runtime repeats nothing that has no seed; another one of its seed does all of it."""
    random.seed(3)
    np.random.seed(3)  # the process's own
    torch.manual_seed(3)
    before = states()
    lm = load(seed=7)
    assert states() == before
    first, of_seeds = unseeded(lm), seeded(lm)
    lm.next_token_logprobs_sync(PROMPT)
    assert states() == before
    lm.restart()
    assert states() == before
    assert have_nothing_in_common(first, unseeded(lm))
    assert seeded(lm) == of_seeds
    lm.close()
    assert states() == before
    assert unseeded(load(seed=7)) == first


@pytest.mark.promise(number=27)
def test_what_questions_without_a_seed_draw_does_not_depend_on_their_company() -> None:
    with genrt.load(MODEL, engine="exact", seed=5) as lm:
        together = asyncio.run(_together(lm))
    with genrt.load(MODEL, engine="exact", seed=5, max_batch_size=1, cache_bytes=0) as lm:
        alone = [lm.sample_sync(PROMPT, max_tokens=9) for _ in range(20)]
    assert together == alone


async def _together(lm: AsyncLM) -> Answers:
    return await asyncio.gather(*(lm.sample(PROMPT, max_tokens=9) for _ in range(20)))


PROCESS = """
import gc, logging, multiprocessing, os, signal, sys, threading, warnings
import numpy, torch
import genrt

torch.backends.cuda.matmul.fp32_precision = "tf32"
gc.set_threshold(701, 11, 9)
warnings.filterwarnings("ignore", message="mine")

def seen():
    matmul = torch.backends.cuda.matmul
    return {
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "processor": os.sched_getaffinity(0),
        "signals": [signal.getsignal(each) for each in signal.valid_signals()],
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "processes": multiprocessing.get_start_method(allow_none=True),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks)),
        "frozen": gc.get_freeze_count() > 0,
        "torch": (
            torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
            torch.set_num_threads, matmul.fp32_precision, torch.is_inference_mode_enabled(),
        ),
        "interpreter": (sys.getswitchinterval(), sys.getrecursionlimit(), os.getcwd()),
        "numpy": (numpy.geterr(), numpy.get_printoptions()),
    }

def compare(when):
    for name, value in seen().items():
        if value != before[name]:
            print(when, "changed", name, "from", before[name], "to", value)

options = {"dtype": "bfloat16", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
os.environ["VLLM_DIST_IDENT"] = "the caller's"
before = seen()
try:
    genrt.load(model, engine_options=options | {"max_model_len": 10**6})
except genrt.GenrtError:
    compare("an opening that failed")
lm = genrt.load(model, engine_options=options)
compare("opening")
lm.restart()
compare("a restart")
lm.sample_sync([1, 2], max_tokens=2)
compare("a sample")
lm.close()
compare("closing")
print("end")
"""


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.promise(number=27)
def test_opening_restarting_and_closing_vllm_changes_nothing_of_the_process(llama: Path) -> None:
    """In processes that have imported vLLM, whether they froze their objects or not."""
    programs = {"thawed": "import gc; gc.unfreeze()" + PROCESS, "frozen": PROCESS}
    for end in children.run(programs, model=str(llama)).values():
        assert end.status == 0, end.err
        assert end.out.splitlines() == ["end"]
        assert "ld.so" not in end.err


FRESH = """
import asyncio, os, sys, genrt

before = dict(os.environ)

async def main():
    lm = await genrt.aload(sys.argv[1], engine_options={"max_num_seqs": 8})
    print({name: value for name, value in os.environ.items() if before.get(name) != value})
    await lm.next_token_logprobs([1, 2])
    await lm.aclose()

asyncio.run(main())
"""


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.promise(number=27)
def test_a_process_that_imports_vllm_and_asks_it_keeps_its_environment_and_writes_nothing(
    llama: Path,
) -> None:
    """vLLM sets ``LD_LIBRARY_PATH`` among others, which every child would inherit, and it logs, warns and
    shows progress. It says where it binds memory to one of several nodes."""
    from vllm.utils.cpu_resource_utils import get_visible_memory_node

    environment = children.environment()
    environment.pop("VLLM_LOGGING_LEVEL", None)
    ended = subprocess.run(
        [sys.executable, "-c", FRESH, str(llama)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert (ended.returncode, ended.stdout) == (0, "{}\n"), ended.stderr
    several = "Using MEMBIND policy" if len(get_visible_memory_node()) > 1 else "none"
    assert [line for line in ended.stderr.splitlines() if several not in line] == []


def test_what_another_thread_changes_while_an_engine_opens_stays_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from genrt.engines.vllm.process import process_kept

    monkeypatch.setenv("GENRT_TEST_KEPT", "before")
    monkeypatch.setenv("GENRT_TEST_MINE", "before")
    monkeypatch.delenv("GENRT_TEST_NEW", raising=False)
    with process_kept():
        os.environ["GENRT_TEST_KEPT"] = "meanwhile"
        os.environ["GENRT_TEST_NEW"] = "meanwhile"
        mine = threading.Thread(target=os.environ.update, args=({"GENRT_TEST_MINE": "after"},))
        mine.start()
        mine.join()
    assert os.environ["GENRT_TEST_KEPT"] == "before"
    assert os.environ["GENRT_TEST_MINE"] == "after"
    assert "GENRT_TEST_NEW" not in os.environ
