"""``benchmarks.smc`` runs through in its quick mode, and asks twice more what SMC asked: by a population,
and by draws of each particle."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import genrt
from benchmarks import smc
from genrt.engines.exact import NGram

BYTES = NGram.random(
    [bytes([number]) for number in range(256)] + [b""], order=0, eos_token_id=256, seed=1
)


@pytest.mark.proof
@pytest.mark.vllm
def test_all_are_measured(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "smc.json"
    small = '--options {"max_num_seqs":8,"kv_cache_memory_bytes":67108864}'
    arguments = f"smc --quick --particles 3 --model {llama} {small} --json {file}".split()
    monkeypatch.setattr(sys, "argv", arguments)
    smc.main()
    [result] = map(json.loads, file.read_text().splitlines())
    assert (result["model"], result["particles"]) == (str(llama), 3)
    for ratios in (result["of_population"], result["of_draw"]):
        assert 0 < ratios[0] <= ratios[1] <= ratios[2]
    assert result["versions"]["torch"] == torch.__version__
    assert [each["particle_steps"] > 0 for each in result["repeats"]] == [True, True]


async def test_the_draws_are_of_the_runs_steps() -> None:
    async with await genrt.aload(BYTES, engine="exact", cache_bytes=0) as lm:
        before = lm.statistics()
        cost = await smc.repeated(lm, Namespace(particles=5, max_tokens=25), number=1)
        after = lm.statistics()
    asked = after.batcher.questions - before.batcher.questions
    assert asked == 3 * cost.particle_steps
    assert min(cost.smc, cost.population, cost.draw) > 0
