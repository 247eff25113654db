"""Every benchmark runs through in its quick mode and writes what it says it writes.

Nothing here bounds a time, and a difference of two times may come out negative: such numbers need
only be finite. ``benchmarks.step`` opens an ``LLM`` of vLLM's, whose end touches state that other
engines in its process use, so it gets a process of its own, which runs beside the other tests.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    blocks,
    evidence,
    fidelity,
    overheads,
    papers,
    pressure,
    replicas,
    rewards,
    sharing,
    smc,
    step,
    two_runtimes,
)
from benchmarks.step_modes import GENRT_MODES, MODES
from genrt import loading
from tests.cluster.here import ReplicasHere

ROOT = Path(__file__).resolve().parents[2]
STEP = "--quick --model tiny --particles 2 --context 40 --steps 8 --repeats 2"
BEGUN = {
    mode for mode in MODES if mode.startswith(("decode", "contexts", "population", "programs"))
}
NEEDS_OTHERS = {"ratio_to_decode", "ratio_quartiles", "speedup_over_fresh"}


@pytest.fixture(scope="module")
def step_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """The running ``benchmarks.step`` and the file that it will write."""
    file = tmp_path_factory.mktemp("step") / "step.json"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL"}
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.step", *STEP.split(), "--json", str(file)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process, file
        process.kill()


def results_of(
    benchmark: types.ModuleType, file: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> list[dict[str, Any]]:
    """What the benchmark appends to a file that holds a line already."""
    file.write_text('{"earlier": 1}\n')
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, "--quick", "--json", str(file), *more])
    benchmark.main()
    earlier, *lines = map(json.loads, file.read_text().splitlines())
    assert earlier == {"earlier": 1}
    return lines


def numbers_in(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers_in(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


@pytest.mark.proof
@pytest.mark.vllm
def test_fidelity_finds_that_the_rows_are_the_models(
    step_run: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--longest", "100", "--options", '{"kv_cache_memory_bytes": 67108864}']
    [result] = results_of(fidelity, tmp_path / "fidelity.json", monkeypatch, *small)
    keys = "model device runner dtype prompts worst typical crossed ms_per_flush sample_ratio torch"
    assert result.keys() >= set(keys.split())
    assert result["prompts"] == 32
    assert result["crossed"] == 0
    assert 0.0 <= result["typical"] <= result["worst"] < 1e-3
    assert 0.0 < result["ms_per_flush"] < math.inf
    assert 0.0 < result["sample_ratio"] < math.inf


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.promise(number=23)
def test_two_runtimes_answer_as_each_does_alone(
    step_run: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--dtype", "float32", "--options", '{"kv_cache_memory_bytes": 67108864}']
    [result] = results_of(two_runtimes, tmp_path / "two.json", monkeypatch, *small)
    assert len(result["phases"]) == 5
    for phase in result["phases"].values():
        assert phase["worst_row"] < 1e-4
        assert phase["other_draws"] == phase["other_samples"] == 0.0


@pytest.mark.proof
@pytest.mark.vllm
def test_a_samplers_share_is_measured_beside_streams(
    step_run: object, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--model", str(llama), "--options", '{"enforce_eager": true}', "--tokens", "400"]
    [result] = results_of(sharing, tmp_path / "sharing.json", monkeypatch, *small)
    assert (result["streams"], result["draws"]) == (8, 10)
    assert all(0.0 < number < math.inf for number in numbers_in(result))
    for kind in ("waiting", "not_waiting"):
        assert all(share <= 1.0 for share in result[kind]["share"])


@pytest.mark.proof
@pytest.mark.vllm
def test_overheads_are_measured(
    step_run: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [result] = results_of(overheads, tmp_path / "overheads.json", monkeypatch)
    costs = {"cached_us", "deduplicated_us", "batched_us", "latency_us"}
    costs |= {"vllm_cached_us", "vllm_latency_us", "vllm_step_us"}
    gaps = {"idle_gap_ms", "loop_gap_ms", "contexts_gap_ms"}
    assert result.keys() >= {"torch"} | costs | gaps
    assert all(result[gap].keys() == {"largest", "p99", "busy", "beats"} for gap in gaps)
    assert all(0.0 < number < math.inf for number in numbers_in(result))


@pytest.mark.proof
@pytest.mark.vllm
def test_a_step_is_measured_in_every_mode(
    step_run: tuple[subprocess.Popen[str], Path],
) -> None:
    process, file = step_run
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    results = {result["mode"]: result for result in map(json.loads, file.read_text().splitlines())}
    assert list(results) == list(MODES)
    assert all(f"{mode} " in output for mode in MODES)

    for mode, result in results.items():
        assert result.keys() == step.Result.__annotations__.keys()
        assert (result["model"], result["particles"], result["context"]) == ("tiny", 2, 40)
        assert result["runner"] in ("V1", "V2")
        assert result["versions"].keys() == {"torch", "vllm", "genrt"}
        assert result["options"]["dtype"] == "float32"
        assert all(map(math.isfinite, numbers_in(result)))
        assert not [key for key in NEEDS_OTHERS if result[key] is None]
        if mode != "decode":
            assert 0.0 < result["quartiles"][0] <= result["ms_per_step"] <= result["quartiles"][1]
            assert result["speedup_over_fresh"] > 0.0
        assert (result["ms_to_begin"] is not None) == (mode in BEGUN)
        if mode in GENRT_MODES:
            counted = result["engine_steps_per_step"], result["computed_tokens_per_particle_step"]
            assert counted == (0.0, 0.0) if mode == "cached" else min(counted) > 0.0
            assert result["host_bytes_per_step"] >= 0.0
        else:
            assert result["engine_steps_per_step"] is result["host_bytes_per_step"] is None
    assert results["decode"]["ratio_to_decode"] == 1.0
    assert results["fresh"]["speedup_over_fresh"] == 1.0
    assert results["fresh"]["computed_tokens_per_particle_step"] >= 1.0


@pytest.mark.proof
def test_what_replicas_cost_and_give_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "Actors", ReplicasHere)
    contexts = "--contexts", "16", "24"
    [result] = results_of(replicas, tmp_path / "replicas.json", monkeypatch, *contexts)
    assert [*result["flush"]] == ["1 draw", "64 draws", "64 rows", "64 rows on the host"]
    for each in result["flush"].values():
        assert each["adds"] == each["one"] - each["alone"]
        assert min(each["one"], each["alone"]) > 0
    assert [*result["draws"]] == ["16", "24"]
    for each in (*result["draws"].values(), result["texts"]):
        assert each["several_ratio"] == each["several"] / each["alone"] > 0
    assert result["smc"]["shipped_ratio"] > 0


@pytest.mark.proof
@pytest.mark.vllm
def test_a_small_kv_memory_is_survived(
    step_run: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    small = "--particles 24 --contexts 40 --max-num-seqs 4 --context 40 --rounds 3"
    whole = ["--options", '{"block_size": 128}']  # a sequence a block: none is shared
    results = results_of(pressure, tmp_path / "pressure.json", monkeypatch, *small.split(), *whole)
    assert [result["case"] for result in results] == ["particles", "alternating"]
    assert [result["contexts"] for result in results] == [24, 40]
    for result in results:
        assert (result["missing"], result["finished"], result["flat"]) == (0, True, True)
        assert result["questions"] == result["contexts"] * (1 + 3 * result["steps"])
        assert result["resident"] <= result["fits"] == 12
        assert result["evicted"] > 0
        assert result["engine_steps"] >= result["contexts"] * 3 / 4
        assert result["compared"] == 16
        assert result["largest_difference"] < 1e-3 < result["between_contexts"]


@pytest.mark.proof
@pytest.mark.vllm
def test_smc_is_measured_beside_the_questions_that_it_asks(
    step_run: object, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--options", '{"max_num_seqs": 8, "kv_cache_memory_bytes": 67108864}']
    few = ["--particles", "3", "--model", str(llama)]
    [result] = results_of(smc, tmp_path / "smc.json", monkeypatch, *few, *small)
    for ratios in (result["of_population"], result["of_draw"]):
        assert 0 < ratios[0] <= ratios[1] <= ratios[2]
    assert [each["particle_steps"] > 0 for each in result["repeats"]] == [True, True]


@pytest.mark.proof
@pytest.mark.vllm
def test_rewards_are_measured_beside_calls_that_draw_as_much(
    step_run: object, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--options", '{"max_num_seqs": 8, "kv_cache_memory_bytes": 67108864}']
    few = ["--particles", "4", "--branches", "2", "--unit", "3", "--model", str(llama)]
    [result] = results_of(rewards, tmp_path / "rewards.json", monkeypatch, *few, *small)
    for name in ("filter", "beam"):
        for way in rewards.WAYS:
            low, middle, high = result[f"{name}_of_{way}"]
            assert 0 < low <= middle <= high
    assert len(result["repeats"]) == 2


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.embedded
def test_the_algorithms_of_papers_are_measured(
    step_run: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = results_of(papers, tmp_path / "papers.json", monkeypatch)
    runs = {result["method"]: result["runs"] for result in results}
    masking, rejection = (runs[name] for name in ("masking", "AWRS, 2 accepted"))
    assert min(run["checks"] for run in masking) > 1000
    assert max(run["checks"] for run in rejection) < 100
    assert all(run["log_evidence"] < 0 for run in masking)
    for cold, warm in zip(runs["temperature 1/4"], runs["the model"], strict=True):
        assert 0 < cold["nats"] < warm["nats"]
        assert 0 < cold["pairs"] <= 1 <= cold["texts"] <= papers.TEXTS
    for paper, titles in (("rejection", evidence.REJECTION), ("power", evidence.POWER)):
        own = [result for result in results if result["paper"] == paper]
        for group in evidence.of_paper(own, titles):
            assert [bar.label for bar in group.bars] == [result["method"] for result in own]
            assert all(bar.low <= bar.value for bar in group.bars)  # type: ignore[operator]


@pytest.mark.proof
@pytest.mark.vllm
def test_masks_and_teachers_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "training.json"
    command = [sys.executable, "-m", "benchmarks.training", "--quick", "--json", str(file)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    results = [*map(json.loads, file.read_text().splitlines())]
    assert [each["mode"] for each in results] == [
        "none",
        "mask_ids",
        "mask_bits",
        "teacher",
        "vllm",
    ]
    assert all(0.0 < each["tokens_per_second"] < math.inf for each in results)
    assert results[3]["bytes_a_token"] == 8 * results[3]["top"] + 4
    assert results[2]["bytes_a_token"] == 4096 // 8 + 8  # the vocabulary of the small model


@pytest.mark.proof
@pytest.mark.vllm
def test_blocks_are_measured(
    step_run: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as it sets itself, for this test
    [result] = results_of(blocks, tmp_path / "blocks.json", monkeypatch, "--without-decode")
    assert (result["particles"], result["k"], result["advance_steps"]) == (3, 2, 1)
    for name in ("draw", "draft", "advance", "score", "block", "of_draw", "gain"):
        assert 0 < result[name] < math.inf
