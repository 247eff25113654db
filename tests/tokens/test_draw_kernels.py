"""Which draws the fused kernels answer, and that their answers are those of torch.

The kernels run in Triton's interpreter, in a process of its own, where Triton is installed. How they are
compared with torch is in draws_by_hand.py, and tested here without them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import genrt.tokens
from genrt.tokens import sampling
from genrt.tokens.sampling import draw, draw_chunk, seeded_uniforms
from tests.tokens.draws_by_hand import by_torch, cases, disagreements, packed

ROOT = Path(__file__).resolve().parents[2]


class OnGPU(Tensor):
    """A tensor on the CPU that says otherwise."""

    is_cuda = True


class Kernels:
    """Stands in for the module of kernels: notes its calls and answers with ones."""

    def __init__(self, *, works: bool = True) -> None:
        self.calls: list[dict[str, Any]] = []
        self.works = lambda: works

    def draw_fused(self, batch: Tensor, numbers: Tensor, **how: Any) -> Tensor:
        self.calls.append(how)
        return torch.ones(len(numbers), 3, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _found_anew() -> Iterator[None]:
    sampling._fused.cache_clear()
    yield
    sampling._fused.cache_clear()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    stand_in = Kernels()
    monkeypatch.setattr(genrt.tokens, "draw_kernels", stand_in, raising=False)
    return stand_in


def on_gpu(rows: Tensor) -> Tensor:
    return rows.as_subclass(OnGPU)


NUMBERS = seeded_uniforms(range(3))
ROWS = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
BOOLS = torch.arange(40).expand(3, -1) % 3 > 0


def test_float32_rows_on_a_gpu_are_drawn_from_by_the_kernels(kernels: Kernels) -> None:
    places, heat = torch.tensor([2, 0, 1]), torch.full((3, 1), 0.5, dtype=torch.float64)
    mask = packed(BOOLS)
    gapped = torch.randn(3, 90)[:, :40]
    assert bool((draw_chunk(on_gpu(ROWS), NUMBERS) == 1).all())
    draw_chunk(on_gpu(gapped), NUMBERS, mask=mask, heat=heat, places=places)
    plain, full = kernels.calls
    assert plain["mask"] is plain["heat"] is plain["places"] is None
    assert (full["mask"], full["heat"], full["places"]) == (mask, heat, places)
    assert draw(on_gpu(ROWS), uniforms=NUMBERS).token_ids.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("rows", "mask"),
    [
        (ROWS, None),
        (ROWS, packed(BOOLS)),
        (on_gpu(ROWS.double()), None),
        (on_gpu(ROWS.t().contiguous().t()), None),
        (on_gpu(ROWS), BOOLS),
    ],
    ids=["CPU", "CPU, packed", "float64", "by columns", "bools"],
)
def test_torch_draws_from_everything_else(
    kernels: Kernels, rows: Tensor, mask: Tensor | None
) -> None:
    found = draw_chunk(rows, NUMBERS, mask=mask)
    assert kernels.calls == []
    expected = draw_chunk(torch.Tensor(ROWS), NUMBERS, mask=mask)
    torch.testing.assert_close(found.as_subclass(Tensor), expected)


def test_without_triton_torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "genrt.tokens.draw_kernels", raising=False)
    monkeypatch.delattr(genrt.tokens, "draw_kernels", raising=False)
    assert torch.equal(draw_chunk(on_gpu(ROWS), NUMBERS), draw_chunk(ROWS, NUMBERS))


def test_without_a_compiler_torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Kernels(works=False)
    monkeypatch.setattr(genrt.tokens, "draw_kernels", stand_in, raising=False)
    assert torch.equal(draw_chunk(on_gpu(ROWS), NUMBERS), draw_chunk(ROWS, NUMBERS))
    assert stand_in.calls == []


@pytest.mark.parametrize("width", [5, 129])
def test_torch_agrees_with_the_law(width: int) -> None:
    for case in cases(width):
        found = by_torch(case)
        assert disagreements(case, found, found) == []


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the kernels run in Triton's interpreter, and Triton is not installed",
)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_kernels_do_not_work() -> None:
    from genrt.tokens import draw_kernels

    assert not draw_kernels.works()
    assert sampling._fused() is None


@needs_triton
@pytest.mark.proof
def test_the_kernels_agree_with_torch_and_with_the_law() -> None:
    """At every width, one narrow enough for a single block included."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tokens.draws_by_hand"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
