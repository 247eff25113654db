"""Every benchmark runs through in its quick mode and writes what it says it writes.

Nothing here bounds a time, and a difference of two times may come out negative: such numbers need
only be finite. ``benchmarks.step`` opens an ``LLM`` of vLLM's, whose end touches state that other
engines in its process use, so it gets a process of its own, which runs beside the other tests.
"""

from __future__ import annotations

import importlib.util
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
import torch

import genrt
from benchmarks import fidelity, overheads, plots, pressure, replicas, sharing, step, two_runtimes
from benchmarks.step_modes import GENRT_MODES, MODES, Measured, Particles
from genrt.cluster import engine
from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import Finished
from genrt.questions.request import Request
from tests.cluster.here import ReplicasHere

ROOT = Path(__file__).resolve().parents[2]
STEP = "--quick --model tiny --particles 2 --context 40 --steps 8 --repeats 2"
BEGUN = {mode for mode in MODES if mode.startswith(("decode", "contexts", "population"))}
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
        assert all(0.3 < share <= 1.0 for share in result[kind]["share"])


@pytest.mark.proof
@pytest.mark.vllm
def test_overheads_are_measured(
    step_run: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [result] = results_of(overheads, tmp_path / "overheads.json", monkeypatch)
    costs = {"cached_us", "deduplicated_us", "batched_us", "latency_us"}
    costs |= {"vllm_cached_us", "vllm_latency_us", "vllm_step_us"}
    gaps = {"idle_gap_ms", "loop_gap_ms"}
    assert result.keys() >= {"torch"} | costs | gaps
    assert all(result[gap].keys() == {"largest", "p99", "beats"} for gap in gaps)
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


def test_a_summary_compares_modes_within_a_repeat() -> None:
    samples = {
        "fresh": {0: Measured(40.0, computed_tokens=8.0), 2: Measured(90.0, computed_tokens=9.0)},
        "decode": {0: Measured(2.0), 1: Measured(4.0), 2: Measured(6.0)},
        "resident": {
            0: Measured(2.0, 1.0, 1.0, 64.0),
            1: Measured(8.0, 1.0, 1.5, 64.0),
            2: Measured(9.0, 2.0, 2.0, 64.0),
        },
    }
    assert step.summary("resident", samples) == {
        "mode": "resident",
        "ms_per_step": 8.0,
        "quartiles": [5.0, 8.5],
        "ratio_to_decode": 1.5,
        "ratio_quartiles": [1.25, 1.75],
        "speedup_over_fresh": 15.0,
        "engine_steps_per_step": 1.0,
        "computed_tokens_per_particle_step": 1.5,
        "host_bytes_per_step": 64.0,
        "ms_to_begin": None,
    }
    alone = step.summary("resident", {"resident": {0: Measured(3.0)}})
    assert alone["ms_per_step"] == 3.0
    assert alone["quartiles"] == [3.0, 3.0]
    assert [alone[key] for key in NEEDS_OTHERS] == [None, None, None]
    assert alone["engine_steps_per_step"] is None


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_resampled_particles_share_all_but_their_last_token(count: int) -> None:
    particles = Particles(count, 20, 7, 3, vocab_size=10**9, seed=0)
    assert len({tuple(context[:7]) for context in particles.contexts}) == 1
    assert len({tuple(context) for context in particles.contexts}) == count
    for number in range(3):
        before = [list(context) for context in particles.contexts]
        particles.resample(number)
        survivors = {tuple(context) for context in particles.contexts}
        assert len(survivors) == count - count // 2
        assert survivors <= set(map(tuple, before))
        particles.extend(number)
        assert len({tuple(context) for context in particles.contexts}) == count
        assert {len(context) for context in particles.contexts} == {21 + number}


@pytest.mark.parametrize(
    ("benchmark", "mistakes"),
    [
        (step, "particles 0|steps 0|modes fast|shared 129|options [1]|options {|plot x.png"),
        (pressure, "rounds 2|kv-share 1|particles -1|options [1]"),
    ],
)
def test_bad_arguments_end_a_run_before_anything_is_opened(
    benchmark: types.ModuleType,
    mistakes: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for mistake in [*mistakes.split("|"), "json /no/such/directory/x.json"]:
        option, value = mistake.split()
        monkeypatch.setattr(sys, "argv", ["benchmark", f"--{option}", value])
        with pytest.raises(SystemExit, match="2"):
            benchmark.parsed()
        said = capsys.readouterr().err.splitlines()[-1]
        assert "error: " in said
        assert benchmark is pressure or option in said or value in said


def test_a_plot_wants_the_mode_that_its_ratios_are_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["step", "--plot", "x.png", "--modes", "draw", "cached"])
    with pytest.raises(SystemExit, match="2"):
        step.parsed()
    assert "add it to --modes" in capsys.readouterr().err


# -- plots ------------------------------------------------------------------------------------


def result_of(mode: str, particles: int, ratio: float | None, **more: Any) -> dict[str, Any]:
    """A result of ``benchmarks.step``, as far as plots read it."""
    return {
        "mode": mode,
        "particles": particles,
        "ms_per_step": 2.0 * (ratio or 1.0),
        "ratio_to_decode": ratio,
        "ratio_quartiles": ratio and [ratio * 0.9, ratio * 1.1],
        "model": "tiny",
        "device": "d",
        "runner": "V1",
        "context": 8,
        "shared": 0,
    } | more


RESULTS = [
    result_of("decode", 16, 1.0),
    result_of("resident", 64, 1.25),
    result_of("resident", 16, 9.0),
    result_of("resident", 16, 0.75),
    result_of("draw", 16, None),
    result_of("batch", 16, -3.0),
    result_of("cached", 16, 0.01),
    result_of("fresh", 16, 20.0, model="embedded", runner="V2", shared=4),
    {"worst": 0.1, "model": "of another benchmark"},
]


def test_a_panel_is_a_model_on_a_device_and_the_last_result_counts() -> None:
    tiny, embedded = plots.panels(RESULTS)
    assert tiny.title == "tiny, context 8\nd, runner V1"
    assert embedded.title == "embedded, context 8, 4 of them shared\nd, runner V2"
    assert tiny.counts == [16, 64]
    assert tiny.decode == {16: 2.0}
    assert {mode: sorted(bars) for mode, bars in tiny.bars.items()} == {"resident": [16, 64]}
    assert tiny.bars["resident"][16] == pytest.approx((0.75, 0.675, 0.825))


@pytest.mark.parametrize("installed", [False, True])
def test_plots_are_drawn_where_matplotlib_is_and_refused_where_it_is_not(
    installed: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results, png = tmp_path / "results.jsonl", tmp_path / "ratios.png"
    results.write_text("".join(json.dumps(result) + "\n" for result in RESULTS))
    monkeypatch.setattr(plots, "available", lambda: installed)
    monkeypatch.setattr(sys, "argv", ["plots", str(results), "--png", str(png)])
    if installed:
        plots.main()
        assert png.read_bytes().startswith(b"\x89PNG")
    else:
        with pytest.raises(SystemExit, match="2"):
            plots.main()
        assert 'pip install "genrt[plot]"' in capsys.readouterr().err
        assert not png.exists()


# -- pressure ---------------------------------------------------------------------------------


class Forgetful(ExactEngine):
    """Breaks every ``k``-th of its rows; ``k = 0`` breaks none."""

    def __init__(self, k: int, shape: int) -> None:
        super().__init__(NGram.random(8, seed=0))
        self._k, self._shape, self._rows = k, shape, 0

    def step(self) -> list[Finished]:
        return [self._broken(end) for end in super().step()]

    def _broken(self, end: Finished) -> Finished:
        self._rows += 1
        if not self._k or self._rows % self._k:
            return end
        if self._shape:
            return Finished(end.request, torch.zeros(self._shape))
        return Finished(end.request, error=genrt.EngineFailed("forgotten"))


class Silent(ExactEngine):
    """Takes questions and answers none."""

    def __init__(self) -> None:
        super().__init__(NGram.random(8, seed=0))
        self._asked: list[Request] = []

    def submit(self, requests: Any) -> None:
        self._asked += requests

    def cancel(self, requests: Any) -> None:
        self._asked = [request for request in self._asked if request not in requests]


async def under_pressure(engine: Any, *, patience: float = 60.0) -> dict[str, Any]:
    """Three groups of at most 8 particles, 4 rounds of 2 steps."""
    particles = Particles(20, 5, 0, 8, vocab_size=8, seed=0)
    async with await genrt.aload(engine=engine, cache_bytes=0) as lm:
        result, asked = await pressure.run(
            lm, particles, group=8, rounds=4, steps=2, patience=patience
        )
        return result | pressure.compared(lm, asked)


async def test_under_pressure_every_question_is_counted_and_compared() -> None:
    result = await under_pressure(lambda: Forgetful(0, 0))
    assert (result["questions"], result["missing"]) == (20 * (1 + 4 * 2), 0)
    assert (result["finished"], result["error"]) == (True, None)
    assert result["flat"] is True
    assert len(result["resident_mib"]) == 5
    assert result["engine_steps"] >= 4 * 3 * 2
    assert (result["compared"], result["largest_difference"]) == (16, 0.0)


async def test_a_round_that_hangs_ends_the_case() -> None:
    result = await under_pressure(Silent, patience=0.01)
    assert (result["questions"], result["missing"], result["finished"]) == (8, 8, False)
    assert "was not over" in result["error"]
    assert result["flat"] is False


@pytest.mark.parametrize(
    ("samples", "grown", "flat"),
    [
        ([0.0, 900.0, 1000.0, 1063.0], 63.0, True),
        ([0.0, 900.0, 1000.0, 1064.0], 64.0, False),
        ([0.0, 900.0, 10_000.0, 10_001.0, 10_099.0], 99.0, True),
        ([0.0, 900.0, 10_000.0, 10_001.0, 10_100.0], 100.0, False),
        ([0.0, 900.0, 800.0, 700.0], -100.0, True),
        ([0.0, 900.0, 800.0], None, False),
        ([], None, False),
    ],
)
def test_flat_is_within_a_percent_or_64_mib_after_the_second_round(
    samples: list[float], grown: float | None, flat: bool
) -> None:
    assert pressure.growth(samples) == grown
    assert pressure.is_flat(samples) is flat


@pytest.mark.parametrize(
    ("verdict", "status"), [({}, 0), ({"flat": False}, 1), ({"missing": 1, "error": "why"}, 1)]
)
def test_the_exit_status_is_the_verdict(
    verdict: dict[str, Any],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = "case questions contexts fits ms_per_question computed_tokens_per_question"
    names += " engine_steps extended forked evicted resident compared largest_difference"
    names += " between_contexts resident_growth_mib"
    result = dict.fromkeys(names.split(), 1) | {
        "missing": 0,
        "error": None,
        "flat": True,
        "resident_mib": [1.0, 2.0],
        "device_mib": None,
    }
    file = tmp_path / "pressure.json"
    results = [result | verdict, result]
    monkeypatch.setattr(pressure, "measure", lambda arguments: iter(results))
    monkeypatch.setattr(sys, "argv", ["pressure", "--json", str(file)])
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    if status:
        with pytest.raises(SystemExit, match="1"):
            pressure.main()
    else:
        pressure.main()
    assert [json.loads(line) for line in file.read_text().splitlines()] == results
    output = capsys.readouterr().out
    assert ("NOT FLAT" in output) is ("flat" in verdict)
    assert ("why" in output) is ("error" in verdict)


@pytest.mark.proof
def test_what_replicas_cost_and_give_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "Actors", ReplicasHere)
    contexts = "--contexts", "16", "24"
    [result] = results_of(replicas, tmp_path / "replicas.json", monkeypatch, *contexts)
    assert [*result["flush"]] == ["1 draw", "64 draws", "64 rows", "64 rows on the host"]
    for each in result["flush"].values():
        assert each["adds"] == each["one"] - each["alone"]
        assert min(each["one"], each["alone"]) > 0
    assert [*result["draws"]] == ["16", "24"]
    for each in (*result["draws"].values(), result["texts"]):
        assert each["several_ratio"] == each["several"] / each["alone"] > 0


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
