"""Opening engines by name: what is refused before anything is loaded, and what is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.errors import EngineNotInstalled, InvalidRequest, ModelNotFound


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "sglang"}, "must be one of 'vllm', 'transformers', 'exact'"),
        ({"engine": None}, "must be one of"),
        ({"engine": "exact"}, "needs a model"),
        ({"engine": "exact", "model": 3}, "needs a model"),
        ({"model": 3}, "must be a name, a directory or None"),
        ({"engine_options": [1]}, "must be a mapping"),
        ({"cache_bytes": -1}, "cache_bytes must be at least 0"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1"),
        ({"max_wait_seconds": float("nan")}, "max_wait_seconds must be"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        genrt.load(**arguments)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_directory_that_is_not_there(engine: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="absent"):
        genrt.load(tmp_path / "absent", engine=engine)


def test_a_saved_model_of_the_exact_engine_opens_by_its_directory(tmp_path: Path) -> None:
    from genrt.engines.exact import NGram

    model = NGram.random(4, seed=1)
    model.save(tmp_path / "saved")
    with genrt.load(tmp_path / "saved", engine="exact") as lm:
        torch.testing.assert_close(lm.next_token_logprobs_sync([2]), model.row([2]).float())


def test_vllm_that_is_not_installed_names_the_extras(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [m for m in sys.modules if m.startswith(("genrt.engines.vllm.opening", "vllm."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "genrt.engines.vllm.capture", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineNotInstalled, match=r"genrt\[cpu\].*genrt\[cuda\]"):
        genrt.load(llama)
