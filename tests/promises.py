"""Which test proves which promise: the markers ``promise(number=…)``, and their table in PROMISES.md.

``python -m tests.promises`` writes the table's last column anew, from the markers of the tests there are.
The promises themselves, and their order, are what the table says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "PROMISES.md"
ROW = re.compile(r"^\| (\d+) \| (.*?) \| (.*?) \|$", re.MULTILINE)

Proofs = dict[str, list[str]]
"""By file: the names of its tests, in the order of the file."""


def numbers_of(item: pytest.Item) -> Iterator[int]:
    """The promises that a test says it proves."""
    for mark in item.iter_markers("promise"):
        yield mark.kwargs["number"]


def promised(text: str) -> dict[int, str]:
    """The promises of the table, by number."""
    return {int(number): promise for number, promise, _ in ROW.findall(text)}


def collected() -> dict[int, Proofs]:
    """By promise: the tests that carry its marker, of all that this interpreter can collect."""
    found: dict[int, Proofs] = {}

    class Collector:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            for item in session.items:
                file, name, *_ = item.nodeid.split("[")[0].split("::")
                for number in numbers_of(item):
                    names = found.setdefault(number, {}).setdefault(file, [])
                    if name not in names:
                        names.append(name)

    quietly = ["--collect-only", "-qq", "--no-summary", "-p", "no:randomly"]
    code = pytest.main([*quietly, str(ROOT / "tests")], plugins=[Collector()])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"the tests cannot be collected: {code!r}")
    return found


def written(text: str, proofs: Mapping[int, Proofs]) -> str:
    """The document with these proofs in its table."""

    def row(found: re.Match[str]) -> str:
        number, promise, _ = found.groups()
        cells = [
            f"[{file}]({file}): {', '.join(f'`{name}`' for name in names)}"
            for file, names in sorted(proofs.get(int(number), {}).items())
        ]
        return f"| {number} | {promise} | {'<br>'.join(cells)} |"

    return ROW.sub(row, text)


def summary(outcomes: Iterable[tuple[int, str]], promises: Mapping[int, str]) -> Iterator[str]:
    """A line for each promise: what became of the tests that prove it."""
    by_number: dict[int, list[str]] = {}
    for number, outcome in outcomes:
        by_number.setdefault(number, []).append(outcome)
    for number, each in sorted(by_number.items()):
        kept = all(outcome == "passed" for outcome in each)
        counts = ", ".join(f"{each.count(outcome)} {outcome}" for outcome in sorted(set(each)))
        yield f"{number:2}  {'kept  ' if kept else 'BROKEN'}  {promises.get(number, '?')}  ({counts})"


def main() -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(written(text, collected()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
