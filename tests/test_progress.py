"""Progress bars: silent unless asked for, whole at the end, where they were after an interrupt."""

from __future__ import annotations

import asyncio
import builtins
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest

import genrt
from genrt import progress
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


class NotebookBar:
    """tqdm's bar in a notebook, whose widget has a total and a style of its own."""

    made: ClassVar[list[NotebookBar]] = []

    def __init__(self, *, total: int | None, **_: Any) -> None:
        self.made.append(self)
        self.total, self.n, self.closed = total, 0, False
        bar = types.SimpleNamespace(max=total or 1, bar_style="")
        self.container = types.SimpleNamespace(children=(None, bar, None))

    def set_postfix(self, *_: Any, **__: Any) -> None: ...

    def refresh(self) -> None: ...

    def update(self, n: int = 1) -> None:
        self.n += n

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("total", [None, 10])
def test_a_notebooks_bar_is_full_at_the_end_and_red_after_an_error(
    total: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=NotebookBar))
    with progress_bar("SMC", total, shown=True) as show:
        show(ESS=1)
        show(ESS=2)
    bar = NotebookBar.made.pop()
    widget = bar.container.children[1]
    assert (bar.total, widget.max, widget.bar_style, bar.closed) == (2, 2, "", True)

    def interrupted() -> None:
        with progress_bar("SMC", total, shown=True) as show:
            show()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    bar = NotebookBar.made.pop()
    widget = bar.container.children[1]
    assert (bar.total, widget.max, widget.bar_style, bar.closed) == (
        total,
        total or 1,
        "danger",
        True,
    )


def test_that_widgets_are_missing_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Warning_(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name == "tqdm":
                warnings.warn("IProgress not found", UserWarning, stacklevel=2)
                return NotebookBar
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "tqdm.auto", Warning_("tqdm.auto"))
    with progress_bar("SMC", 1, shown=True) as show:
        show()
    assert NotebookBar.made.pop().closed


def test_a_bar_without_tqdm_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    bar = progress_bar("SMC", 1, shown=True)
    with pytest.raises(ExtraNotInstalled, match="pip install tqdm"), bar:
        pass
    with progress_bar("SMC", 1, shown=False) as show:
        show(ESS=1)


def test_bars_that_begin_at_once_leave_the_filters_of_warnings_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The filters are the process's: a bar that begins within another's import waits for that."""
    original, lock = builtins.__import__, threading.Lock()
    is_there, has_left = threading.Event(), threading.Event()
    threads = list[threading.Thread]()

    class Told:
        def __enter__(self) -> None:
            if lock.locked():
                is_there.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def begin() -> None:
        with progress_bar("a", 1, shown=True):
            pass

    def import_(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "tqdm.auto" and not threads:
            threads.append(threading.Thread(target=begin))
            threads[0].start()
            assert is_there.wait(60)
        elif name == "tqdm.auto":
            is_there.set()
            assert has_left.wait(60)
        return original(name, *arguments, **named)

    before = list(warnings.filters)
    with monkeypatch.context() as patched:
        patched.setattr(progress, "_IMPORTING", Told())
        patched.setattr(builtins, "__import__", import_)
        begin()
        has_left.set()
        threads[0].join()
    assert list(warnings.filters) == before
