"""``benchmarks.smc`` runs through in its quick mode, and asks twice more what SMC asked: by a population,
and by draws of each particle."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

import genrt
from benchmarks import smc
from genrt.constraints import regex
from genrt.engines.exact import NGram
from genrt.inference import SMC, TextModel

BYTES = NGram.random(
    [bytes([number]) for number in range(256)] + [b""], order=0, eos_token_id=256, seed=1
)


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.embedded
def test_all_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "smc.json"
    arguments = f"smc --quick --particles 3 --repeats 2 --json {file}".split()
    monkeypatch.setattr(sys, "argv", arguments)
    smc.main()
    [result] = map(json.loads, file.read_text().splitlines())
    assert (result["model"], result["particles"]) == ("embedded", 3)
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


async def test_a_step_grew_the_resampled_and_not_the_finished() -> None:
    model = NGram.random([b"a", b"b", b""], seed=2, eos_token_id=2)
    async with await genrt.aload(model, engine="exact") as lm:
        text_model = TextModel(lm, [0], max_tokens=6, constraint=regex("(a|ab)*", lm))
        algorithm = SMC(text_model, num_particles=12, resample_when=1.0)
        state = algorithm.init(3)
        while not state.done:
            after, info = await algorithm.step(state)
            grown = smc.grown(state, info)
            assert not any(particle.finished for particle in grown)
            moved = (info.token_ids >= 0) | np.isneginf(info.log_increments)
            longer = [after.particles[index] for index in np.nonzero(moved)[0]]
            for old, new in zip(grown, longer, strict=True):
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
            state = after
        assert state.step > 1
