"""vLLM opens in a process where other packages have been at work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import children

ROOT = Path(__file__).resolve().parents[3]

FIRST_CELL = """
import asyncio, sys
import genrt

async def main():
    lm = await genrt.aload(sys.argv[1], engine_options={"dtype": "float32", "max_num_seqs": 8})
    await lm.next_token_logprobs([1, 2])
    await lm.aclose()

asyncio.run(main())
print("done")
"""

PROGRAM = """
import json, os
import genrt
import numba
from llvmlite.binding import ffi

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
options = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
with genrt.load(model, engine_options=options) as lm:
    row = lm.next_token_logprobs_sync([1, 2])
print(json.dumps([
    len(row), os.environ["VLLM_USE_V2_MODEL_RUNNER"], isinstance(vars(ffi.lib), dict)
]))
"""

SMALL = """
import genrt

options = {"dtype": "bfloat16", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
with genrt.load(model, engine_options=options) as lm:
    print(lm.next_token_logprobs_sync([1, 2]).isfinite().all().item())
"""


CLOSED = """
import gc, sys, weakref
import genrt

options = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
with genrt.load(sys.argv[1], engine_options=options | {"enforce_eager": False}) as lm:
    lm.next_token_logprobs_sync([1, 2])
    core = lm._thread.engine._core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    assert runner.vllm_config.compilation_config.mode, "compiled"
    owned = [core, runner, *runner.model.parameters(), *runner.kv_caches]
    owned = [weakref.ref(each) for each in owned]
    engine = weakref.ref(lm._thread.engine)
    del core, runner
gc.collect()
print(len(owned) > 10, [each() for each in owned if each() is not None])
del lm
gc.collect()
print(engine())
"""


FAILED = """
import gc, sys
import genrt
import torch

options = {"dtype": "float32", "max_num_seqs": 8, "enforce_eager": False}
try:
    genrt.load(sys.argv[1], engine_options=options | {"kv_cache_memory_bytes": 2**12})
except genrt.EngineFailed as error:
    held = error
gc.collect()
print([x.shape for x in gc.get_objects() if torch.nn.Parameter in type(x).__mro__])
with genrt.load(sys.argv[1], engine_options=options | {"kv_cache_memory_bytes": 2**24}) as lm:
    print(len(lm.next_token_logprobs_sync([1, 2])), held)
"""

HALF_MADE = (
    FAILED.replace("2**12", "2**24")
    .replace(
        "try:",
        """from genrt.engines.vllm import engine

def refuses(*positional, **named):
    raise genrt.EngineFailed("no samples here")

made, engine.Samples = engine.Samples, refuses
try:""",
    )
    .replace("with genrt", "engine.Samples = made\nwith genrt")
)


def said_by(program: str, model: Path) -> list[str]:
    """Return the lines that a program about a model prints, in a process of its own: those of
    ``children`` begin with vLLM imported."""
    command = [sys.executable, "-c", program, str(model)]
    end = subprocess.run(command, capture_output=True, check=False, cwd=ROOT, text=True)
    assert end.returncode == 0, end.stderr
    return end.stdout.splitlines()


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("program", "message"),
    [
        (FAILED, "vLLM could not open .* memory for the cache blocks"),
        (HALF_MADE, "no samples here"),
    ],
    ids=["vLLM's", "genrt's"],
)
def test_an_engine_that_does_not_open_leaves_no_weights_behind(
    llama: Path, program: str, message: str
) -> None:
    """Compiled, and its error is held, as a notebook does: the next one has the memory."""
    weights, opened = said_by(program, llama)[-2:]
    assert weights == "[]"
    assert re.match(f"320 {message}", opened)


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.promise(number=23)
def test_the_first_engine_of_a_process_gives_back_all_it_has_once_closed(llama: Path) -> None:
    """Compiled, as on a GPU, where hooks keep the model; and the runtime, which is closed, is held."""
    assert said_by(CLOSED, llama)[-2:] == ["True []", "None"]


@pytest.mark.proof
@pytest.mark.vllm
def test_a_small_model_in_bfloat16_is_the_first_that_a_process_opens(llama: Path) -> None:
    end = children.run({"opens": SMALL}, model=str(llama))["opens"]
    assert end.status == 0, end.err
    assert end.out.splitlines()[-1] == "True"


@pytest.mark.proof
@pytest.mark.vllm
def test_neither_a_demand_for_the_runner_v2_nor_numba_keeps_it_from_opening(llama: Path) -> None:
    end = children.run({"opens": PROGRAM}, model=str(llama))["opens"]
    assert end.status == 0, end.err
    assert json.loads(end.out.splitlines()[-1]) == [320, "1", False]


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.parametrize("level", [{}, {"VLLM_LOGGING_LEVEL": "ERROR"}])
def test_a_process_that_opens_vllm_and_asks_it_writes_nothing_of_its_own(
    llama: Path, level: dict[str, str]
) -> None:
    """No log, no warning, no progress bar. vLLM tells where it binds memory to one of several nodes."""
    from vllm.utils.cpu_resource_utils import get_visible_memory_node

    environment = {key: value for key, value in os.environ.items() if key != "VLLM_LOGGING_LEVEL"}
    end = subprocess.run(
        [sys.executable, "-c", FIRST_CELL, str(llama)],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env=environment | level,
        text=True,
    )
    assert end.returncode == 0, end.stderr
    assert end.stdout == "done\n"
    several = "Using MEMBIND policy" if len(get_visible_memory_node()) > 1 else "none"
    assert [line for line in end.stderr.splitlines() if several not in line] == []


@pytest.mark.vllm
@pytest.mark.parametrize("nodes", [[0], [0, 1]])
def test_memory_is_bound_to_a_node_only_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch, nodes: list[int]
) -> None:
    from vllm.utils import cpu_resource_utils

    from genrt.engines.vllm.process import undisturbed

    bound: list[list[int]] = []
    monkeypatch.setattr(torch.ops._C, "init_cpu_memory_env", bound.append, raising=False)
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: nodes)
    with undisturbed():
        torch.ops._C.init_cpu_memory_env([0])
    assert bound == ([[0]] if len(nodes) > 1 else [])
    torch.ops._C.init_cpu_memory_env([1])
    assert bound[-1] == [1]


LEAVES = """
import json, logging, os, signal, subprocess, sys, threading, warnings
import torch, vllm
import genrt, genrt.engines.vllm.opening

def state():
    return {
        "environment": dict(os.environ),
        "warnings": (warnings.filters[:], warnings.showwarning),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "logging": (logging.root.level, logging.root.handlers[:]),
        "torch": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
                  torch.get_num_threads(), torch.set_num_threads, torch.get_float32_matmul_precision()),
        "processor": os.sched_getaffinity(0),
    }

def told(when):
    now = state()
    changed.extend(f"{when}: {name}" for name in now if now[name] != before[name])

os.environ["VLLM_DIST_IDENT"] = "the caller's"
before, changed = state(), []
options = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
lm = genrt.load(model, engine_options=options)
told("opened")
lm.next_token_logprobs_sync([1, 2])
lm.sample_sync([1], max_tokens=2)
told("asked")
lm.restart()
told("restarted")
lm.close()
told("closed")
print("changed:", json.dumps(changed))
"""


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.promise(number=27)
def test_opening_restarting_and_closing_leave_the_process_as_it_was(llama: Path) -> None:
    end = children.run({"leaves": LEAVES}, model=str(llama))["leaves"]
    assert end.status == 0, end.err
    [line] = [line for line in end.out.splitlines() if line.startswith("changed: ")]
    assert json.loads(line.removeprefix("changed: ")) == []
    assert "ld.so" not in end.err


@pytest.mark.vllm
def test_no_object_is_asked_for_anything_where_vllm_looks_for_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``torch.distributed.reduce_op`` is such an object: it warns whoever asks."""
    from vllm.triton_utils import dispatcher

    from genrt.engines.vllm.process import undisturbed

    class Deprecated:
        def __getattribute__(self, name: str) -> object:
            warnings.warn(f"asked for {name}", FutureWarning, stacklevel=2)
            return object.__getattribute__(self, name)

    def kernel() -> None: ...

    module = types.ModuleType("with_deprecated")
    owner = types.SimpleNamespace(kernel=kernel)
    vars(module).update(before=Deprecated(), owner=owner, copied=kernel, after=object())
    monkeypatch.setitem(sys.modules, "with_deprecated", module)
    wrapper = types.SimpleNamespace()
    with undisturbed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatcher._rebind_kernels([(kernel, wrapper)])
    assert owner.kernel is module.copied is wrapper
    assert {"vars", "hasattr"}.isdisjoint(vars(dispatcher))


@pytest.mark.vllm
@pytest.mark.promise(number=27)
def test_the_seeds_of_vllms_warm_up_are_not_drawn_from_numpys_generator() -> None:
    from vllm.v1.worker.gpu.sample import states

    from genrt.engines.vllm.process import undisturbed

    before = np.random.get_state(legacy=False)["state"]["key"].tobytes()
    low, high = states._NP_INT64_MIN, states._NP_INT64_MAX
    with undisturbed():
        drawn = {states.np.random.randint(low, high) for _ in range(1000)}
        assert states.np.full(2, 3).tolist() == [3, 3]
    assert len(drawn) == 1000
    assert np.random.get_state(legacy=False)["state"]["key"].tobytes() == before
    assert states.np is np
