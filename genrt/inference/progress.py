"""A progress bar for a run, where one is wanted."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from genrt.errors import ExtraNotInstalled

__all__ = ["Progress"]


class Progress:
    """A context in which ``step`` moves a bar on, by tqdm: in a notebook a widget, else on stderr.

    Raises:
        ExtraNotInstalled: it is to be shown, and tqdm is missing.
    """

    def __init__(self, name: str, total: int | None, *, shown: bool) -> None:
        self._bar: Any = None
        if shown:
            try:
                from tqdm.auto import tqdm
            except ImportError as error:
                raise ExtraNotInstalled("progress bars need tqdm: pip install tqdm") from error
            self._bar = tqdm(total=total, desc=name, unit="step")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is None:
            return
        if kind is None:
            self._bar.total = self._bar.n  # texts may end before they have to
            self._bar.refresh()
        self._bar.close()

    def step(self, **figures: object) -> None:
        """One step more, after which these hold."""
        if self._bar is not None:
            self._bar.set_postfix(figures, refresh=False)
            self._bar.update()
