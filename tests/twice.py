"""The suite twice in a row in one process: ``python -m tests.twice``, with pytest's arguments. The second
run finds what the first has left behind: modules, caches, threads, engines. Threads take turns as often
as Python lets them, so that one which is interrupted at a bad moment shows."""

from __future__ import annotations

import sys

import pytest


def main(arguments: list[str]) -> int:
    sys.setswitchinterval(1e-6)
    return int(pytest.main(arguments) or pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
