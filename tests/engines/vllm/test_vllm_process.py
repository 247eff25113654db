"""vLLM leaves the process as it was, and engines of one process keep its globals apart, in turns."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import envs
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.offloader import base as offloader
from vllm.platforms import current_platform
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import genrt
from genrt.engines.vllm.process import F32, Globals, ThreadTurns, heap_kept
from genrt.errors import EngineUnsupported
from tests.scripted import PATIENCE_SECONDS

pytestmark = pytest.mark.vllm


ROOT = Path(__file__).resolve().parents[3]

CLOSED = """
import gc, sys, weakref
import genrt
from tests.inside import core_of, engine_of, system_thread

options = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
# Dynamo's hooks keep the model, whatever compiles its graphs: eager takes 20 s less than inductor.
traced = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
with genrt.load(sys.argv[1], engine_options=options | traced) as lm:
    lm.next_token_logprobs_sync([1, 2])
    core = core_of(lm)
    runner = core.model_executor.driver_worker.worker.model_runner
    assert runner.vllm_config.compilation_config.mode, "compiled"
    owned = [core, runner, *runner.model.parameters(), *runner.kv_caches]
    owned = [weakref.ref(each) for each in owned]
    engine, thread = weakref.ref(engine_of(lm)), system_thread(lm)
    del core, runner
thread.join()  # close waits for it a few seconds
gc.collect()
print(len(owned) > 10, [each() for each in owned if each() is not None])
del lm, thread
gc.collect()
print(engine())
"""


FAILED = """
import torch

options = {"dtype": "float32", "max_num_seqs": 8}
try:
    genrt.load(sys.argv[1], engine_options=options | traced | {"kv_cache_memory_bytes": 2**12})
except genrt.EngineFailed as error:
    held = error
gc.collect()
print([x.shape for x in gc.get_objects() if torch.nn.Parameter in type(x).__mro__])
with genrt.load(sys.argv[1], engine_options=options | {"kv_cache_memory_bytes": 2**24}) as lm:
    print(len(lm.next_token_logprobs_sync([1, 2])), held)
"""


@pytest.mark.proof
@pytest.mark.promise(number=23)
def test_the_first_engine_of_a_process_and_one_that_does_not_open_leave_nothing(
    llama: Path,
) -> None:
    """Compiled, as on a GPU, where hooks keep the model; the runtime, which is closed, is held, and so is
    the error, as a notebook does. The children's server would have imported vLLM before."""
    command = [sys.executable, "-c", CLOSED + FAILED, str(llama)]
    end = subprocess.run(command, capture_output=True, check=False, cwd=ROOT, text=True)
    assert end.returncode == 0, end.stderr
    *closed, weights, opened = end.stdout.splitlines()
    assert closed[-2:] == ["True []", "None"]
    assert weights == "[]"
    assert re.match("320 vLLM could not open .* memory for the cache blocks", opened)


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
    with undisturbed():
        drawn = {states.np.random.randint(-(2**63), 2**63 - 1) for _ in range(1000)}
        assert states.np.full(2, 3).tolist() == [3, 3]
    assert len(drawn) == 1000
    assert np.random.get_state(legacy=False)["state"]["key"].tobytes() == before
    assert states.np is np


PLACES: list[tuple[Any, str]] = [
    (CUDAGraphWrapper, "_all_instances"),
    (BreakableCUDAGraphWrapper, "_all_instances"),
    (type(current_platform), "_global_graph_pool"),
    (workspace, "_manager"),
    (offloader, "_instance"),
    (rotary_embedding, "_ROPE_DICT"),
]
"""vLLM's globals: captured graphs and their memory, a workspace, an offloader, shared layers."""


def globals_of() -> list[Any]:
    return [getattr(owner, name) for owner, name in PLACES]


@pytest.mark.promise(number=23)
def test_each_engine_has_vllms_globals_for_itself() -> None:
    before, first, second = globals_of(), Globals(), Globals()
    own = [object() for _ in PLACES]

    def fail() -> None:
        with first:
            with first:
                assert globals_of() == own
            assert globals_of() == own, "until the outermost user leaves, also by an error"
            raise ZeroDivisionError

    with first:
        for (owner, name), value in zip(PLACES, own, strict=True):
            setattr(owner, name, value)
    with second:
        assert not any(map(own.__contains__, globals_of()))
    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(map(id, globals_of())) == list(map(id, before))


@pytest.mark.parametrize("frozen", [False, True])
def test_the_collector_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    """Also where an engine that does not open is closed while the process is kept."""
    calls: list[str] = []
    freeze, unfreeze = (partial(calls.append, each) for each in ("freeze", "unfreeze"))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: int(frozen or "freeze" in calls))
    monkeypatch.setattr(gc, "freeze", freeze)
    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    with heap_kept():
        gc.freeze()
        with heap_kept():
            gc.freeze()
    assert calls == ([] if frozen else ["freeze", "unfreeze"])
    assert (gc.freeze, gc.unfreeze) == (freeze, unfreeze)


def test_a_vllm_that_keeps_them_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(workspace, "_manager")
    with pytest.raises(EngineUnsupported, match=r"no vllm\.v1\.worker\.workspace\._manager"):
        Globals()


def test_engines_know_their_dtype_and_leave_vllms_globals_and_each_other_as_they_were(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that cannot be set up: vLLM would shut down what all of its engines in a process use."""
    monkeypatch.delenv(F32, raising=False)
    options = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 2**26}

    chosen: list[str | None] = []
    forward = GPUModelRunner.execute_model

    def executed(*arguments: Any) -> Any:
        chosen.append(os.environ.get(F32))
        return forward(*arguments)

    monkeypatch.setattr(GPUModelRunner, "execute_model", executed)
    before = globals_of()
    with genrt.load(str(llama), engine_options=options, cache_bytes=0) as lm:
        row = lm.next_token_logprobs_sync([1, 2, 3])
        assert (globals_of(), chosen.pop()) == (before, "ieee")
        name = "VLLM_CPU_OMP_THREADS_BIND"  # an engine in this process ignores it
        assert (bound := getattr(envs, name)) != "nobind"
        monkeypatch.setenv(name, "nobind")
        assert getattr(envs, name) == bound, "vLLM reads its environment once, while engines run"
        with genrt.load(str(llama), engine_options=options | {"dtype": "bfloat16"}) as other:
            assert getattr(envs, name) == "nobind"
            other.next_token_logprobs_sync([1, 2, 3])
            assert (globals_of(), chosen.pop()) == (before, None)
            lm.next_token_logprobs_sync([1, 2, 4])
            assert chosen.pop() == "ieee"
        with pytest.raises(EngineUnsupported):
            genrt.load(str(llama), engine_options=options | {"use_fp64_gumbel": True})
        gc.collect()
        assert globals_of() == before
        assert torch.equal(lm.next_token_logprobs_sync([1, 2, 3]), row)
        assert lm.generate_sync([1, 2], max_tokens=3, ignore_eos=True).token_ids
    assert globals_of() == before


def started(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


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
                while len(turns.waiting) <= number:
                    threads[0].join(0.001)
        order.append("still in")
    with turns:
        order.append("again")
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert order == ["still in", "other 0", "other 1", "other 2", "again"]
