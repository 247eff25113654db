"""vLLM opens in a process where other packages have been at work."""

from __future__ import annotations

import json
import sys
import types
import warnings
from pathlib import Path

import pytest

from tests import children

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


@pytest.mark.vllm
def test_a_small_model_in_bfloat16_is_the_first_that_a_process_opens(llama: Path) -> None:
    end = children.run({"opens": SMALL}, model=str(llama))["opens"]
    assert end.status == 0, end.err
    assert end.out.splitlines()[-1] == "True"


@pytest.mark.vllm
def test_neither_a_demand_for_the_runner_v2_nor_numba_keeps_it_from_opening(llama: Path) -> None:
    end = children.run({"opens": PROGRAM}, model=str(llama))["opens"]
    assert end.status == 0, end.err
    assert json.loads(end.out.splitlines()[-1]) == [320, "1", False]


@pytest.mark.vllm
def test_no_object_is_asked_for_anything_where_vllm_looks_for_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``torch.distributed.reduce_op`` is such an object: it warns whoever asks."""
    from vllm.triton_utils import dispatcher

    from genrt.engines.vllm_process import undisturbed

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
