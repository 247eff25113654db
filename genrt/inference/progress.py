"""A progress bar for a run, where one is wanted."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any

from genrt.errors import ExtraNotInstalled


class Progress:
    """A context whose ``step`` moves a bar on, by tqdm: a widget in a notebook, else on stderr.

    The bar ends full if all went well. After an error or an interrupt it stays where it was, red in a
    notebook.

    Raises:
        ExtraNotInstalled: a bar is wanted, and tqdm is missing.
    """

    def __init__(self, name: str, total: int | None, *, shown: bool) -> None:
        self._bar: Any = None
        if shown:
            try:
                with warnings.catch_warnings():
                    # Where ipywidgets is missing tqdm says so, and draws with characters instead.
                    warnings.simplefilter("ignore")
                    from tqdm.auto import tqdm
            except ImportError as error:
                raise ExtraNotInstalled("progress bars need tqdm: pip install tqdm") from error
            self._bar = tqdm(total=total, desc=name, unit="step", dynamic_ncols=True)

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
        # A notebook's bar keeps a total of its own, and knows no errors before it has one.
        widget = getattr(self._bar, "container", None)
        if kind is None:
            self._bar.total = self._bar.n  # texts may end before max_tokens
            if widget is not None:
                widget.children[1].max = max(self._bar.n, 1)
            self._bar.refresh()
        elif widget is not None:
            widget.children[1].bar_style = "danger"
        self._bar.close()

    def step(self, **figures: object) -> None:
        """Move on by one step and show these figures."""
        if self._bar is not None:
            self._bar.set_postfix(figures, refresh=False)
            self._bar.update()
