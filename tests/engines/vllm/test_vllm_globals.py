"""vLLM's globals by engine: what one opens, clears or shuts down is never another's."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.model_executor.offloader import base as offloader
from vllm.platforms import current_platform
from vllm.v1.worker import workspace

import genrt
from genrt.engines.vllm.process import F32, Globals, heap_kept
from genrt.errors import EngineUnsupported

pytestmark = pytest.mark.vllm

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
    with first:
        assert current_platform.get_global_graph_pool() is pool
        assert kept() == "the first's"
        assert offloader._instance is offloading
    assert (PLATFORM._global_graph_pool, workspace._manager, offloader._instance) == before


def test_they_are_put_back_once_the_outermost_user_leaves_also_by_an_error() -> None:
    before, own = kept(), Globals()

    def fail() -> None:
        with own:
            setattr(workspace, "_manager", "own")  # noqa: B010
            with own:
                assert kept() == "own"
            assert kept() == "own"
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert kept() is before


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


@pytest.mark.parametrize(("dtype", "chosen"), [("float32", "ieee"), ("bfloat16", None)])
def test_an_engine_knows_its_dtype(
    dtype: str, chosen: str | None, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(F32, raising=False)
    options = {"dtype": dtype, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**26}
    with genrt.load(str(llama), engine_options=options) as lm:
        assert F32 not in os.environ
        engine: Any = lm._thread.engine
        with engine._globals:
            assert os.environ.get(F32) == chosen


def test_runtimes_that_come_and_go_leave_vllms_globals_as_they_were(llama: Path) -> None:
    options = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 2**26}
    before = PLATFORM._global_graph_pool, workspace._manager, offloader._instance
    with genrt.load(str(llama), engine_options=options) as lm:
        lm.sample_sync([1, 2], max_tokens=2)
        assert (PLATFORM._global_graph_pool, workspace._manager, offloader._instance) == before
    assert (PLATFORM._global_graph_pool, workspace._manager, offloader._instance) == before


def test_an_engine_that_cannot_be_set_up_leaves_another_as_it_was(llama: Path) -> None:
    """vLLM would shut down what all of its engines in a process use."""
    options = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 2**26}
    with genrt.load(str(llama), engine_options=options, cache_bytes=0) as lm:
        before = lm.next_token_logprobs_sync([1, 2, 3])
        with pytest.raises(EngineUnsupported):
            genrt.load(str(llama), engine_options=options | {"use_fp64_gumbel": True})
        gc.collect()
        assert torch.equal(lm.next_token_logprobs_sync([1, 2, 3]), before)
        assert lm.generate_sync([1, 2], max_tokens=3, ignore_eos=True).token_ids


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
