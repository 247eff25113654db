"""Every benchmark runs through in its quick mode and writes what it says it writes.

Nothing here bounds a time, and a difference of two times may come out negative: such numbers need
only be finite. ``benchmarks.step`` opens an ``LLM`` of vLLM's, whose end touches state that other
engines in its process use, so it gets a process of its own, which runs beside the other tests.
"""

from __future__ import annotations

import argparse
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
from benchmarks import fidelity, overheads, step
from benchmarks.step import Measured, Particles

ROOT = Path(__file__).resolve().parent.parent
STEP = "--quick --model tiny --particles 2 --context 40 --steps 8 --repeats 2"
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


@pytest.mark.vllm
def test_overheads_are_measured(
    step_run: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [result] = results_of(overheads, tmp_path / "overheads.json", monkeypatch)
    costs = {"cached_us", "deduplicated_us", "batched_us", "latency_us"}
    gaps = {"idle_gap_ms", "loop_gap_ms"}
    assert result.keys() >= {"torch"} | costs | gaps
    assert all(result[gap].keys() == {"largest", "p99", "beats"} for gap in gaps)
    assert all(0.0 < number < math.inf for number in numbers_in(result))


@pytest.mark.vllm
def test_a_step_is_measured_in_every_mode(
    step_run: tuple[subprocess.Popen[str], Path],
) -> None:
    process, file = step_run
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    results = {result["mode"]: result for result in map(json.loads, file.read_text().splitlines())}
    absent = set() if hasattr(genrt.AsyncLM, "draw") else {"draw"}
    assert list(results) == [mode for mode in step.MODES if mode not in absent]
    assert all(f"{mode} " in output for mode in step.MODES)

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
        if mode in step.GENRT_MODES:
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


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 4096])
def test_masks_allow_about_half_of_the_vocabulary_and_nothing_beyond(vocab_size: int) -> None:
    masks = step.packed_masks(8, vocab_size)
    assert masks.dtype == torch.int32
    assert masks.shape == (8, math.ceil(vocab_size / 32))
    bits = (masks[:, :, None] >> torch.arange(32)) & 1
    assert int(bits.reshape(8, -1)[:, vocab_size:].sum()) == 0
    assert 0.3 * vocab_size < float(bits.sum()) / 8 < 0.7 * vocab_size


@pytest.mark.parametrize(
    "arguments",
    [
        "--particles 0",
        "--steps 0",
        "--modes fast",
        "--shared 129",
        "--options [1]",
        "--options {",
        "--plot x.png",
    ],
)
def test_bad_arguments_end_a_run_before_anything_is_opened(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["step", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        step.parsed()
    assert arguments.split()[0].strip("-") in capsys.readouterr().err


def test_quick_defaults_give_way_to_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["step", "--quick", "--steps", "5"])
    arguments: argparse.Namespace = step.parsed()
    assert (arguments.particles, arguments.steps, arguments.repeats) == ([16, 64, 256], 5, 3)


class Drawing:
    """Stands for a figure and its axes, and records the lines."""

    def __init__(self) -> None:
        self.panels: list[str] = []
        self.lines: list[tuple[str, str, list[int], list[float]]] = []
        self.saved: list[Path] = []

    def add_subplot(self, *place: int) -> Drawing:
        return self

    def set_title(self, title: str) -> None:
        self.panels.append(title)

    def plot(self, x: list[int], y: list[float], style: str, *, label: str) -> None:
        self.lines.append((label, style, x, y))

    def set(self, **axes: str) -> None: ...

    def legend(self) -> None: ...

    def savefig(self, path: Path, **options: Any) -> None:
        self.saved.append(path)


def test_a_plot_has_a_panel_a_model_and_a_line_a_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawing = Drawing()
    module = types.SimpleNamespace(Figure=lambda **options: drawing)
    monkeypatch.setattr(importlib, "import_module", {"matplotlib.figure": module}.__getitem__)
    rows = [
        ("tiny", "resident", 64, 1.2),
        ("tiny", "resident", 16, 9.0),
        ("tiny", "resident", 16, 1.1),
        ("tiny", "draw", 16, None),
        ("embedded", "fresh", 16, 20.0),
    ]
    results: Any = [
        {
            "model": m,
            "mode": mode,
            "particles": n,
            "ratio_to_decode": r,
            "device": "d",
            "context": 8,
        }
        for m, mode, n, r in rows
    ]
    step.plot(results, tmp_path / "ratios.png")
    assert drawing.panels == ["tiny, d\ncontext 8", "embedded, d\ncontext 8"]
    assert drawing.lines == [
        ("resident", "o-", [16, 64], [1.1, 1.2]),
        ("fresh", "o-", [16], [20.0]),
    ]
    assert drawing.saved == [tmp_path / "ratios.png"]
