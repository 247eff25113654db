"""Measure a row's way: the files of the package in which something runs from a question to its answer.

``python -m tests.house.way`` prints them for the exact engine, in the order in which they are come to;
``python -m tests.house.way vllm`` for vLLM and the embedded model. The bound is in test_way.py.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType

import genrt
from genrt.engines.exact import NGram

PACKAGE = Path(genrt.__file__).parent


class Visited:
    """Notes the files of the package in which functions are called, on threads that begin after it."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if self.is_on and event == "call" and path.startswith(str(PACKAGE)):
            self.files[Path(path).relative_to(PACKAGE).as_posix()] = None


def files_on_a_rows_way(engine: str = "exact") -> list[str]:
    """Return the files that run for one new row, whose context has grown by a token."""
    visited, before = Visited(), threading.getprofile()
    threading.setprofile(visited)  # before the engine's thread begins
    try:
        lm = genrt.load(NGram.random(20) if engine == "exact" else None, engine=engine)
    finally:
        threading.setprofile(before)
    with lm:
        asyncio.run(_asked(lm, visited))
    return [*visited.files]


async def _asked(lm: genrt.AsyncLM, visited: Visited) -> None:
    context = [1, 2]
    for token in (3, 4):  # the first opens a sequence, the second prepares the step of the third
        await lm.next_token_logprobs(context)
        context.append(token)
    before = sys.getprofile()
    sys.setprofile(visited)
    visited.is_on = True
    try:
        await lm.next_token_logprobs(context)
    finally:
        visited.is_on = False
        sys.setprofile(before)


if __name__ == "__main__":
    found = files_on_a_rows_way(*sys.argv[1:2])
    print("\n".join(found))
    print(len(found), "files")
