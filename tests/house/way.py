"""Measure a row's way: the calls in each file of the package from a question to its answer.

``python -m tests.house.way`` prints them for the exact engine, in the order in which they are come to;
``python -m tests.house.way vllm`` for vLLM and the embedded model. The bound is in test_way.py.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import genrt
from genrt.engines.exact import NGram

PACKAGE = Path(genrt.__file__).parent


class Visited:
    """Counts the calls of functions in each file of the package, on threads that begin after it."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if self.is_on and event == "call" and path.startswith(str(PACKAGE)):
            self.calls[Path(path).relative_to(PACKAGE).as_posix()] += 1


def calls_on_a_rows_way(engine: str = "exact") -> Counter[str]:
    """Return the calls in each file for one new row, whose context has grown by a token.

    The least of five rows counts, because threads may meet once more on a busy machine.
    """
    visited, before = Visited(), threading.getprofile()
    threading.setprofile(visited)  # before the engine's thread begins
    try:
        lm = genrt.load(NGram.random(20) if engine == "exact" else None, engine=engine)
    finally:
        threading.setprofile(before)
    with lm:
        return asyncio.run(_fewest(lm, visited))


async def _fewest(lm: genrt.AsyncLM, visited: Visited) -> Counter[str]:
    context = [1, 2]
    for token in (3, 4):  # the first opens a sequence, the second prepares the step of the third
        await lm.next_token_logprobs(context)
        context.append(token)
    found = []
    for token in range(5, 10):
        visited.calls = Counter()
        before = sys.getprofile()
        sys.setprofile(visited)
        visited.is_on = True
        try:
            await lm.next_token_logprobs(context)
        finally:
            visited.is_on = False
            sys.setprofile(before)
        found.append(visited.calls)
        context.append(token)
    return min(found, key=Counter.total)


if __name__ == "__main__":
    found = calls_on_a_rows_way(*sys.argv[1:2])
    print(*(f"{count:4} {file}" for file, count in found.items()), sep="\n")
    print(found.total(), "calls in", len(found), "files")
