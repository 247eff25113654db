"""Progress bars: silent unless asked for, whole at the end, where they were after an interrupt."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

import genrt
from genrt.errors import ExtraNotInstalled
from genrt.inference import SMC, TextModel
from genrt.progress import progress_bar
from tests import runs


def smc_of(directory: Path) -> SMC:
    runs.MODEL.save(directory)
    lm = genrt.load(str(directory), engine="exact")
    return SMC(TextModel(lm, [0], max_tokens=30), num_particles=4)


def test_a_run_is_silent_unless_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asyncio.run(smc_of(tmp_path / "model").run(0))
    assert capfd.readouterr() == ("", "")


def test_a_bar_ends_full_with_the_figures_of_the_last_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = asyncio.run(smc_of(tmp_path / "model").run(0, progress=True))
    steps = len(result.infos)
    assert 0 < steps < 30
    out, err = capfd.readouterr()
    assert out == ""
    last = err.rstrip().rsplit("\r", 1)[-1]
    assert "SMC: 100%" in last
    assert f"{steps}/{steps}" in last
    assert f"going=0/4, ESS={result.ess:.1f}" in last
    assert err.endswith("\n")


def test_an_interrupt_leaves_the_bar_where_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(state: Any, info: Any) -> None:
        if info.step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(smc_of(tmp_path / "model").run(0, progress=True, on_step=interrupt))
    err = capfd.readouterr().err
    assert "2/30" in err.rstrip().rsplit("\r", 1)[-1]
    assert "100%" not in err
    assert err.endswith("\n")


def test_a_bar_without_tqdm_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    bar = progress_bar("SMC", 1, shown=True)
    with pytest.raises(ExtraNotInstalled, match="pip install tqdm"), bar:
        pass
    with progress_bar("SMC", 1, shown=False) as show:
        show(ESS=1)
