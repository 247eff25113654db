"""The examples: each prints the comment at its end, is short, and is in the folder's README.

One model serves all that open the embedded one as it is, as for the pages of the documentation.
"""

from __future__ import annotations

import ast
import contextlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import genrt
from genrt.lm import AsyncLM

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
MOST_LINES = 60
ENGINE_OPTIONS = {"dtype": "float32"}
CHANGES_WEIGHTS = {"rollouts_with_updates.py"}
FRACTION = re.compile(r"-?\d+\.\d+")


def source_of(name: str) -> str:
    return (EXAMPLES / name).read_text(encoding="utf-8")


def promised_output(source: str) -> list[str]:
    """The lines of the comment after ``# Output:``, which ends the file."""
    _, _, comment = source.partition("\n# Output:\n")
    return [line.removeprefix("#").removeprefix(" ") for line in comment.splitlines()]


def texts_and_fractions(lines: list[str]) -> tuple[list[str], list[float]]:
    """The lines without their fractions, and the fractions. Another CPU may change a last digit, and the
    order of lines with equal weights: so the lines are sorted."""
    split = sorted((FRACTION.sub("#", line), FRACTION.findall(line)) for line in lines)
    numbers = [float(number) for _, found in split for number in found]
    return [text for text, _ in split], numbers


@pytest.fixture(scope="module")
def embedded() -> Iterator[AsyncLM]:
    with genrt.load(engine_options=ENGINE_OPTIONS) as lm:
        yield lm


@pytest.fixture
def shared(embedded: AsyncLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``genrt.load()`` and ``genrt.aload()`` of the embedded model return the one of this module."""
    load = genrt.load

    def opened(*given: Any, **options: Any) -> Any:
        if given or options != {"engine_options": ENGINE_OPTIONS}:
            return load(*given, **options)
        return contextlib.nullcontext(embedded)

    async def aopened(*given: Any, **options: Any) -> Any:
        return opened(*given, **options)

    embedded.clear_cache()
    monkeypatch.setattr(genrt, "load", opened)
    monkeypatch.setattr(genrt, "aload", aopened)


def test_there_are_examples() -> None:
    assert len(NAMES) >= 8


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_what_it_shows_and_prints(name: str) -> None:
    source = source_of(name)
    assert len(source.splitlines()) <= MOST_LINES
    assert len(ast.get_docstring(ast.parse(source)) or "") > 100
    output = source.partition("\n# Output:\n")[2].splitlines()
    assert output
    assert [line for line in output if line != "#" and not line.startswith("# ")] == []


def test_the_readme_lists_every_example_once() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", readme, re.M)) == NAMES


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.embedded
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("name", sorted({*NAMES} - CHANGES_WEIGHTS))
def test_an_example_prints_the_comment_at_its_end(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(name, capsys)


@pytest.mark.proof
@pytest.mark.vllm
@pytest.mark.embedded
@pytest.mark.parametrize("name", sorted(CHANGES_WEIGHTS))
def test_an_example_with_other_weights_prints_the_comment_at_its_end(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It opens a model of its own."""
    check(name, capsys)


def check(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed, fractions = texts_and_fractions(capsys.readouterr().out.splitlines())
    promised, expected = texts_and_fractions(promised_output(source_of(name)))
    assert printed == promised
    assert fractions == pytest.approx(expected, abs=0.02)
