"""The documents: every Python block runs and prints what it says, every link and name leads somewhere."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import pkgutil
import re
import types
from pathlib import Path
from typing import Any

import pytest

import genrt
from genrt import demo
from genrt.engines.exact import NGram

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "PROMISES.md",
    "SECURITY.md",
    "tests/README.md",
]
PYTHON_BEFORE_LINE, RESULT_BEFORE_LINE = 10, 35
LONGEST_README = 185


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language, each on the line that it has in the document."""
    fences = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, fence.start(1)) + fence[1] for fence in fences]


def promised_output(block: str) -> list[str]:
    """What the ``#>`` lines of a block say that it prints."""
    return re.findall(r"^ *#> (.*)$", block, re.MULTILINE)


async def run_block(block: str, document: str, namespace: dict[str, Any]) -> list[str]:
    """Run a block in a namespace, awaits at its top level included; the lines that it printed."""
    code = compile(block, document, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        outcome = types.FunctionType(code, namespace)()
        if inspect.iscoroutine(outcome):
            await outcome
    return printed.getvalue().splitlines()


async def test_the_examples_in_contributing_run() -> None:
    examples = blocks(text_of("CONTRIBUTING.md"), "python")
    assert examples
    for block in examples:
        assert await run_block(block, "CONTRIBUTING.md", {}) == promised_output(block)


async def test_an_example_that_fails_is_told_with_its_line() -> None:
    text = "# Title\n\n```python\nprint('a')\n#> a\n```\n\n```python\nraise LookupError\n```\n"
    first, second = blocks(text, "python")
    assert await run_block(first, "doc.md", {}) == promised_output(first) == ["a"]
    with pytest.raises(LookupError) as raised:
        await run_block(second, "doc.md", {})
    assert raised.traceback[-1].lineno == text[: text.index("raise")].count("\n")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text_of(document))
    here = (ROOT / document).parent
    assert [link for link in links if "://" not in link and not (here / link).exists()] == []


def test_the_readme_is_short_and_shows_code_and_the_demos_result_early() -> None:
    text = text_of("README.md")
    assert text[: text.index("```python")].count("\n") < PYTHON_BEFORE_LINE
    assert text.count("\n") <= LONGEST_README
    assert f"\nprompt   {demo.PROMPT}\npattern  {demo.PATTERN}\n" in text
    lines = text.splitlines()
    (weights,) = (
        number for number, line in enumerate(lines, 1) if line.split() == ["weight", "text"]
    )
    assert weights < RESULT_BEFORE_LINE
    shares = [float(line.split()[0]) for line in lines[weights:] if re.match(r" +0\.\d+ ", line)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 1.0


@pytest.mark.genlm
def test_the_names_in_the_documents_are_there() -> None:
    text = "\n".join(map(text_of, DOCUMENTS))
    methods = set(re.findall(r"\blm\.([a-z_]+)\b", text)) - {"py"}
    with genrt.load(NGram.random(3), engine="exact") as lm:
        assert {name for name in methods if not hasattr(lm, name)} == set()
    assert {"next_token_logprobs", "sample", "draw"} <= methods
    for name in set(re.findall(r"\bgenrt(?:\.[A-Za-z_]\w*)+", text)):
        assert pkgutil.resolve_name(name) is not None


def test_the_commands_in_the_readme_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|\$ )make ([a-z]+)", "\n".join(map(text_of, DOCUMENTS))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"
    extras = re.findall(r'pip install -e "\.\[([a-z,]+)\]"', text_of("README.md"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert extras
    for extra in ",".join(extras).split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), f"no extra {extra}"


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    """Before a release, pip finds genrt in a checkout alone."""
    pages = [*map(ROOT.joinpath, DOCUMENTS), *(ROOT / "docs").rglob("*.md")]
    pages += (ROOT / "notebooks").glob("*.ipynb")
    for page in pages:
        assert not re.search(r"pip install \W*genrt", page.read_text(encoding="utf-8")), page.name
