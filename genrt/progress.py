"""A progress bar for a run, where one is wanted."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from genrt.errors import ExtraNotInstalled

__all__ = ["progress_bar"]

_IMPORTING = threading.Lock()
"""Warnings' filters are the process's: two threads must not put theirs in place, and back, crosswise."""


@contextmanager
def progress_bar(
    name: str, total: int | None, *, shown: bool, unit: str = "step", ends_early: bool = True
) -> Iterator[Callable[..., None]]:
    """Show a bar by tqdm, a widget in a notebook, else on stderr; yield what moves it on, by a
    step or ``advance`` steps, and shows the figures that it is given.

    The bar ends full if all went well, since there may be fewer steps than ``total``, unless
    ``ends_early`` is false. After an error or an interrupt it stays where it was, red in a notebook.

    Raises:
        ExtraNotInstalled: a bar is wanted, and tqdm is missing.
    """
    if not shown:
        yield lambda **_: None
        return
    try:
        with _IMPORTING, warnings.catch_warnings():
            # Where ipywidgets is missing tqdm says so, and draws with characters instead.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
    except ImportError as error:
        raise ExtraNotInstalled("progress bars need tqdm: pip install tqdm") from error
    bar: Any = tqdm(total=total, desc=name, unit=unit, dynamic_ncols=True)
    # A notebook's bar keeps a total of its own, and knows no errors before it has one.
    widget = bar.container.children[1] if hasattr(bar, "container") else None

    def step(advance: int = 1, **figures: object) -> None:
        bar.set_postfix(figures, refresh=False)
        bar.update(advance)

    try:
        yield step
        bar.total = bar.n if ends_early else total
        if widget is not None:
            widget.max = max(bar.total or 0, 1)
        bar.refresh()
    except BaseException:
        if widget is not None:
            widget.bar_style = "danger"
        raise
    finally:
        bar.close()
