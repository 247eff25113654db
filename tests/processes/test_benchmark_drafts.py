"""``benchmarks.drafts`` runs all modes after equal prompts, and divides what belongs together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import genrt
from benchmarks import drafts
from genrt.engines.exact import NGram

ROOT = Path(__file__).resolve().parents[2]
BYTES = NGram.random(
    [bytes([number]) for number in range(256)] + [b""], order=0, eos_token_id=256, seed=1
)


@pytest.mark.parametrize("texts", drafts.TEXTS)
async def test_modes_draw_the_same(texts: str) -> None:
    arguments = Namespace(modes=["off", "always", "auto"], max_tokens=20, runs=2)
    async with await genrt.aload(BYTES, engine="exact", cache_bytes=0) as lm:
        found = await drafts.asked(lm, arguments, texts, 3, 1)
    assert [each["run"] for each in found] == [0] * 3 + [1] * 3
    for run in range(2):
        of_run = {each["mode"]: each for each in found if each["run"] == run}
        assert {*of_run} == {"off", "always", "auto"}
        assert len({each["steps"] for each in of_run.values()}) == 1
        assert of_run["off"]["guessed"] == {}
        assert of_run["always"]["engine_steps"] <= of_run["off"]["engine_steps"]
    if texts == "schema":
        assert of_run["always"]["right"]["forced"] > 0


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.embedded
def test_all_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "drafts.json"
    asked = "--texts free --particles 2 --max-tokens 6 --repeats 1 --runs 2 --json"
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.drafts", *asked.split(), str(file)],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    results = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["mode"] for each in results] == [*drafts.MODES]
    assert all(each["tokens_a_second"] > 0 for each in results)
    assert results[0]["ratio_first"] == results[0]["ratio_later"] == [1.0, 1.0, 1.0]
    assert [line.split()[2] for line in ran.stdout.splitlines() if "tokens/s" in line] == [
        *drafts.MODES
    ]
