"""vLLM leaves the process as it was, and engines of one process keep its globals apart, in turns."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import envs
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.model_executor.offloader import base as offloader
from vllm.platforms import current_platform
from vllm.v1.worker import workspace

import genrt
from genrt.engines.vllm.process import F32, Globals, ThreadTurns, heap_kept
from genrt.errors import EngineUnsupported
from genrt.lm import AsyncLM
from tests import children
from tests.inside import engine_of
from tests.scripted import PATIENCE_SECONDS

pytestmark = pytest.mark.vllm


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
options = {"dtype": "bfloat16", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
with genrt.load(model, engine_options=options) as lm:
    row = lm.next_token_logprobs_sync([1, 2])
print(json.dumps([
    len(row), row.isfinite().all().item(), os.environ["VLLM_USE_V2_MODEL_RUNNER"],
    isinstance(vars(ffi.lib), dict),
]))
"""

CLOSED = """
import gc, sys, weakref
import genrt

options = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
with genrt.load(sys.argv[1], engine_options=options | {"enforce_eager": False}) as lm:
    lm.next_token_logprobs_sync([1, 2])
    core = engine_of(lm)._core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    assert runner.vllm_config.compilation_config.mode, "compiled"
    owned = [core, runner, *runner.model.parameters(), *runner.kv_caches]
    owned = [weakref.ref(each) for each in owned]
    engine = weakref.ref(engine_of(lm))
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

made, engine.VLLMTexts = engine.VLLMTexts, refuses
try:""",
    )
    .replace("with genrt", "engine.VLLMTexts = made\nwith genrt")
)


def said_by(program: str, model: Path) -> list[str]:
    """Return the lines that a program about a model prints, in a process of its own: those of
    ``children`` begin with vLLM imported."""
    command = [sys.executable, "-c", program, str(model)]
    end = subprocess.run(command, capture_output=True, check=False, cwd=ROOT, text=True)
    assert end.returncode == 0, end.stderr
    return end.stdout.splitlines()


@pytest.mark.proof
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
@pytest.mark.promise(number=23)
def test_the_first_engine_of_a_process_gives_back_all_it_has_once_closed(llama: Path) -> None:
    """Compiled, as on a GPU, where hooks keep the model; and the runtime, which is closed, is held."""
    assert said_by(CLOSED, llama)[-2:] == ["True []", "None"]


@pytest.mark.proof
def test_neither_a_demand_for_the_runner_v2_nor_numba_nor_bfloat16_keeps_it_from_opening(
    llama: Path,
) -> None:
    end = children.run({"opens": PROGRAM}, model=str(llama))["opens"]
    assert end.status == 0, end.err
    assert json.loads(end.out.splitlines()[-1]) == [320, True, "1", False]


@pytest.mark.proof
def test_a_process_that_opens_vllm_and_asks_it_writes_nothing_of_its_own(llama: Path) -> None:
    """No log, no warning, no progress bar. vLLM tells where it binds memory to one of several nodes."""
    from vllm.utils.cpu_resource_utils import get_visible_memory_node

    environment = {key: value for key, value in os.environ.items() if key != "VLLM_LOGGING_LEVEL"}
    end = subprocess.run(
        [sys.executable, "-c", FIRST_CELL, str(llama)],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env=environment,
        text=True,
    )
    assert end.returncode == 0, end.stderr
    assert end.stdout == "done\n"
    several = "Using MEMBIND policy" if len(get_visible_memory_node()) > 1 else "none"
    assert [line for line in end.stderr.splitlines() if several not in line] == []


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
@pytest.mark.promise(number=27)
def test_opening_restarting_and_closing_leave_the_process_as_it_was(llama: Path) -> None:
    end = children.run({"leaves": LEAVES}, model=str(llama))["leaves"]
    assert end.status == 0, end.err
    [line] = [line for line in end.out.splitlines() if line.startswith("changed: ")]
    assert json.loads(line.removeprefix("changed: ")) == []
    assert "ld.so" not in end.err


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


PLATFORM = type(current_platform)


def kept() -> Any:
    """The workspace that is in place."""
    return vars(workspace)["_manager"]


def graphs_of(kind: Any, name: str) -> Any:
    """A wrapper with one captured graph, as far as vLLM's registry of wrappers goes."""
    wrapper = object.__new__(kind)
    setattr(wrapper, name, {"a batch": "its graph"})
    kind._all_instances.add(wrapper)
    return wrapper


@pytest.mark.promise(number=23)
@pytest.mark.parametrize(
    ("kind", "name"),
    [(CUDAGraphWrapper, "concrete_cudagraph_entries"), (BreakableCUDAGraphWrapper, "entries")],
)
def test_an_engine_that_measures_its_graphs_leaves_those_of_others(kind: Any, name: str) -> None:
    first, second = Globals(), Globals()
    with first:
        theirs = graphs_of(kind, name)
    with second:
        own = graphs_of(kind, name)
        kind.clear_all_graphs()  # as vLLM does when it has measured what graphs take
    assert (vars(theirs)[name], vars(own)[name]) == ({"a batch": "its graph"}, {})
    with first:
        kind.clear_all_graphs()
    assert vars(theirs)[name] == {}


@pytest.mark.parametrize("frozen", [False, True])
def test_engines_that_open_and_close_at_once_leave_the_collector_as_it_was(
    monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    """In any order, one in each thread."""
    calls: list[str] = []
    freeze, unfreeze = (partial(calls.append, each) for each in ("freeze", "unfreeze"))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: int(frozen))
    monkeypatch.setattr(gc, "freeze", freeze)
    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    first, second = heap_kept(), heap_kept()
    with ExitStack() as one, ExitStack() as other:
        one.enter_context(first)
        other.enter_context(second)
        gc.freeze()
        one.close()
        assert calls == ([] if frozen else ["freeze"]), "the other still has it"
    assert calls == ([] if frozen else ["freeze", "unfreeze"])
    assert (gc.freeze, gc.unfreeze) == (freeze, unfreeze)


def test_each_engine_has_memory_for_graphs_a_workspace_and_an_offloader_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PLATFORM, "graph_pool_handle", lambda _: object(), raising=False)
    before = PLATFORM._global_graph_pool, workspace._manager, offloader._instance
    first, second = Globals(), Globals()
    with first:
        pool = current_platform.get_global_graph_pool()
        setattr(workspace, "_manager", "the first's")  # noqa: B010
        offloader._instance = offloading = offloader.NoopOffloader()
    with second:
        assert current_platform.get_global_graph_pool() is not pool
        assert kept() is None
        workspace.reset_workspace_manager()  # as an engine does that is shut down
        offloader.set_offloader(None)

    def fail() -> None:
        with first:
            with first:
                assert current_platform.get_global_graph_pool() is pool
            assert kept() == "the first's", "until the outermost user leaves, also by an error"
            assert offloader._instance is offloading
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (PLATFORM._global_graph_pool, workspace._manager, offloader._instance) == before


def test_a_vllm_that_keeps_them_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(workspace, "_manager")
    with pytest.raises(EngineUnsupported, match=r"no vllm\.v1\.worker\.workspace\._manager"):
        Globals()


def test_only_an_engine_in_float32_has_triton_multiply_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(F32, raising=False)
    first, second = Globals(), Globals()
    with first:
        first.multiply_in_float32()
        assert os.environ[F32] == "ieee"
    assert F32 not in os.environ
    with second:
        assert F32 not in os.environ
    with first, first:
        assert os.environ[F32] == "ieee"
    assert F32 not in os.environ
    monkeypatch.setenv(F32, "tf32x3")
    with first:
        assert os.environ[F32] == "ieee"
    assert os.environ[F32] == "tf32x3"
    with second:
        second.multiply_in_float32()
        assert os.environ[F32] == "tf32x3"


def test_engines_know_their_dtype_and_leave_vllms_globals_and_each_other_as_they_were(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that cannot be set up: vLLM would shut down what all of its engines in a process use."""
    monkeypatch.delenv(F32, raising=False)
    options = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 2**26}

    def globals_of() -> tuple[Any, ...]:
        return (
            PLATFORM._global_graph_pool,
            workspace._manager,
            offloader._instance,
            os.environ.get(F32),
        )

    def chosen(lm: AsyncLM) -> str | None:
        engine = engine_of(lm)
        with engine._globals:
            return os.environ.get(F32)

    before = globals_of()
    with genrt.load(str(llama), engine_options=options, cache_bytes=0) as lm:
        row = lm.next_token_logprobs_sync([1, 2, 3])
        assert (globals_of(), chosen(lm)) == (before, "ieee")
        with genrt.load(str(llama), engine_options=options | {"dtype": "bfloat16"}) as other:
            assert (globals_of(), chosen(other), chosen(lm)) == (before, None, "ieee")
        with pytest.raises(EngineUnsupported):
            genrt.load(str(llama), engine_options=options | {"use_fp64_gumbel": True})
        gc.collect()
        assert globals_of() == before
        assert torch.equal(lm.next_token_logprobs_sync([1, 2, 3]), row)
        assert lm.generate_sync([1, 2], max_tokens=3, ignore_eos=True).token_ids
    assert globals_of() == before


def test_an_engine_heeds_what_was_set_since_another_was_opened(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "VLLM_CPU_OMP_THREADS_BIND"  # which vLLM's workers heed, and an engine in this process ignores
    options = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 2**24}
    with genrt.load(llama, engine_options=options):
        assert (before := getattr(envs, name)) != "nobind"
        monkeypatch.setenv(name, "nobind")
        assert getattr(envs, name) == before, "vLLM reads its environment once, while engines run"
        with genrt.load(llama, engine_options=options):
            assert getattr(envs, name) == "nobind"
            monkeypatch.delenv(name)
            with pytest.raises(genrt.GenrtError):
                genrt.load(llama, engine_options=options | {"max_model_len": 10**9})
            assert getattr(envs, name) == before, "also where none was opened"


def started(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def wait_for(turns: ThreadTurns, count: int) -> None:
    """Until so many threads wait."""
    enough = threading.Event()
    while len(turns._waiting) < count:
        enough.wait(0.001)


def test_threads_take_turns_in_order_and_the_holder_may_enter_again() -> None:
    turns, order = ThreadTurns(), list[str]()

    def other(name: str) -> None:
        with turns:
            order.append(name)

    threads = []
    with turns:
        with turns:
            for number in range(3):
                threads.append(started(partial(other, f"other {number}")))
                wait_for(turns, number + 1)
        order.append("still in")
    with turns:
        order.append("again")
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert order == ["still in", "other 0", "other 1", "other 2", "again"]


@pytest.mark.parametrize("let_in", [False, True])
def test_one_that_is_interrupted_while_it_waits_leaves_the_queue(
    let_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after the holder has left, with another thread behind it."""
    turns, leave = ThreadTurns(), threading.Event()
    wait, own = turns._changed.wait, threading.get_ident()

    def hold() -> None:
        with turns:
            leave.wait(PATIENCE_SECONDS)

    def interrupted(timeout: float | None = None) -> bool:
        if threading.get_ident() != own:
            return wait(timeout)
        if let_in:
            leave.set()
            wait(PATIENCE_SECONDS)
        raise KeyboardInterrupt

    holder = started(hold)
    while not turns._depth:
        leave.wait(0.001)
    monkeypatch.setattr(turns._changed, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), turns:
        raise AssertionError("it was let in")
    assert not turns._waiting
    behind = started(turns.__enter__)
    leave.set()
    for thread in (holder, behind):
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert turns._holder == behind.ident
