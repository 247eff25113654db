"""vLLM opens in a process where other packages have been at work."""

from __future__ import annotations

import json
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
