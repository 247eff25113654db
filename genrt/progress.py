"""A progress bar for a run, where one is wanted; how often a run without one logs its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from genrt.errors import ExtraNotInstalled

__all__ = ["BEAT_SECONDS", "progress_bar"]

BEAT_SECONDS = 15.0
"""The interval of log messages with the progress of a job, or of a run until enough records are valid."""


@contextmanager
def progress_bar(
    name: str, total: int | None, *, shown: bool, unit: str = "step", ends_early: bool = True
) -> Iterator[Callable[..., None]]:
    """Show a bar by tqdm, a widget in a notebook, else on stderr; yield what moves it on, by a
    step or ``advance`` steps, and shows the figures that it is given.

    The bar ends full if all went well, since there may be fewer steps than ``total``, unless
    ``ends_early`` is false. After an error or an interrupt it stays where it was.

    Raises:
        ExtraNotInstalled: a bar is wanted, and tqdm is missing.
    """
    if not shown:
        yield lambda **_: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ExtraNotInstalled("progress bars need tqdm: pip install tqdm") from error
    with tqdm(total=total, desc=name, unit=unit, dynamic_ncols=True) as bar:

        def step(advance: int = 1, **figures: object) -> None:
            bar.set_postfix(figures, refresh=False)
            bar.update(advance)

        yield step
        bar.total = bar.n if ends_early else total
        bar.refresh()
