"""The mutation list still applies to the source, and what replays it tells the outcomes apart."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, Change, Drop, Instead, Mutant, Swap
from tests.mutate import ROOT, judge, main, mutate


def named(mutant: Mutant) -> str:
    return mutant.name.replace(" ", "_")


@pytest.mark.parametrize("mutant", MUTANTS, ids=named)
def test_a_mutant_applies_and_compiles(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    broken = mutant.applied(source)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source))
    compile(broken, mutant.file, "exec")
    assert mutant.tests
    assert [tests for tests in mutant.tests if not (ROOT / tests).is_file()] == []


def test_they_are_few_of_many_kinds() -> None:
    assert 50 <= len(MUTANTS) <= 80
    names = Counter(mutant.name for mutant in MUTANTS)
    assert [name for name, count in names.items() if count > 1] == []
    files = {mutant.file for mutant in MUTANTS}
    most = (
        "runtime/batcher",
        "runtime/cache",
        "inference/smc",
        "engines/residency",
        "engines/vllm/capture",
    )
    assert {f"genrt/{name}.py" for name in most} <= files


SUMS = """
class Sum:
    def of(self, a, b):
        # Both.
        checked(a, b)
        return (a
            + b)

def of(a, b):
    if a + b: return a + b
"""


def broken_sum(symbol: str, change: Change) -> str:
    return Mutant("adds otherwise", f"sums:{symbol}", change, ()).applied(SUMS)


def test_a_break_changes_its_symbol_alone_however_that_is_laid_out() -> None:
    laid_out = ast.unparse(ast.parse(SUMS)) + "\n"
    for change, old, new in (
        (Swap("a + b", "a + 2 * b"), "a + b", "a + 2 * b"),
        (Drop("checked"), "checked(a, b)", "pass"),
        (Swap("checked(a, b)", "return checked(a, b)"), "checked(a, b)", "return checked(a, b)"),
        (Instead("return 0"), "checked(a, b)\n        return a + b", "return 0"),
    ):
        assert broken_sum("Sum.of", change) == laid_out.replace(old, new, 1) != laid_out


@pytest.mark.parametrize(
    ("symbol", "change", "message"),
    [
        ("of", Swap("a + b", "a"), "of is defined 2 times"),
        ("Sum.off", Swap("a + b", "a"), "off is defined 0 times"),
        ("Sum.of", Swap("a - b", "a"), "found 0 times: Swap"),
        ("Sum.of", Drop("sum"), "found 0 times: Drop"),
        ("Sum", Swap("a", "b"), "found 2 times: Swap"),
    ],
)
def test_what_is_not_there_once_is_an_error(symbol: str, change: Change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        broken_sum(symbol, change)


SOURCE = "def add(a, b):\n    return a + b\n\n\nclass Sums:\n    none = 0\n"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a module, and its test."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "sums.py").write_text(SOURCE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from sums import add\n\n\ndef test_two_and_two():\n    assert add(2, 2) == 4\n"
    )
    return tmp_path


def of_sums(name: str, body: str) -> Mutant:
    return Mutant(name, "sums:add", Instead(body), ("tests/test_sums.py",))


def test_killed_survived_and_broken_are_told_apart(small: Path) -> None:
    mutants = [
        of_sums("subtracts", "return a - b"),
        of_sums("multiplies", "return a * b"),
        Mutant("cannot be imported", "sums:Sums", Swap("0", "0 / 0"), ("tests/test_sums.py",)),
    ]
    lines: list[str] = []
    assert mutate(small, mutants, report=lines.append) == 1
    assert lines[0] == "selections of tests that pass on unbroken source: 1"
    assert lines[-1] == "1 killed, 1 survived, 1 broken"
    [killed] = [line for line in lines if line.startswith("killed ")]
    assert killed.endswith("sums.py: subtracts: test_sums.py::test_two_and_two")
    [survived] = [line for line in lines if line.startswith("SURVIVED ")]
    assert survived.endswith("sums.py: multiplies: every test passed")
    [broken] = [line for line in lines if line.startswith("BROKEN ")]
    assert "sums.py: cannot be imported: pytest exited with 2: " in broken
    assert "a + b" in (small / "sums.py").read_text(), "the checkout itself is left alone"


def test_all_killed_is_success_and_tests_that_fail_as_it_is_show_nothing(small: Path) -> None:
    lines: list[str] = []
    endless = of_sums("never ends", "while True:\n        pass")
    verdict = judge(endless, small, 0.5)
    assert (verdict.kind, verdict.why) == ("killed", "the tests did not end")
    assert (small / "sums.py").read_text() == SOURCE
    assert mutate(small, [of_sums("subtracts", "return a - b")], report=lines.append) == 0
    assert lines.pop() == "1 killed, 0 survived, 0 broken"
    (small / "sums.py").write_text(SOURCE.replace("a + b", "a + b + 1"))
    assert mutate(small, [of_sums("subtracts", "return a - b")], report=lines.append) == 2
    assert lines.pop().startswith("tests/test_sums.py  does not pass on unbroken source:\n")


def test_mutants_are_chosen_by_the_words_in_their_files_and_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["--list", "go all that have its name", "inference/resampling.py: a weight of 0"]) == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        "genrt/runtime/cache.py: with an adapter go all that have its name",
        "genrt/inference/resampling.py: a weight of 0 has children",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["--list", "no such mutant"])
    assert ended.value.code == 2
