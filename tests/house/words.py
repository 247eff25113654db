"""Measure the package's words: how docstrings open, which identifiers are synonyms, how long files are.

``python -m tests.house.words [room ...]`` prints the figures, then what breaks a rule.
tests/house/test_words.py has the bounds.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "genrt"

VAGUE_OPENINGS = {
    *("a", "an", "the", "all", "each", "every", "how", "if", "in", "it", "its", "nothing", "one"),
    *(
        "that",
        "their",
        "these",
        "this",
        "those",
        "what",
        "when",
        "where",
        "whether",
        "which",
        "who",
    ),
}
"""A function's docstring opens with none of these: it says what the function does."""

RIDDLES = {"it", "its", "that", "these", "those", "what", "whether", "who"}
"""No docstring should open with these, a class's, a property's or a module's neither."""

VERBS = frozenset(
    """
    abort accept acquire add admit advance allocate allow answer append apply approximate ask
    assert attach await begin bind block bound build call cancel check choose claim clear close
    collect compare compute convert copy count cut decide declare decode describe diagnose dispatch do
    download draw drop empty encode end enter escape estimate evaluate evict expect extend fill find
    finish flush fold forget fork format free freeze gather generate give group grow guard halve
    handle hash have hold ignore import infill insert install interrupt iterate join judge keep
    kill lay leave let list load lock log look make map mark mask match measure merge move name
    normalise note notify observe offer open order pack park parse pass pause pick place plan
    play poll prepare print probe process propose prove pull push put queue raise rank read refresh
    rebuild receive record redraw refuse register reject release remember remove render repeat
    replace replay report request resample reseat reserve reset resolve restart restore resume
    retire retry return rewrite round run sample save say schedule score search see select send
    serve set settle shorten show shut simulate skip sort split spread start state stay step
    stop store submit sum summarise suppress swap take tell temper test time trace track train
    translate trim try turn unbind unpack update use verify visit wait wake warn watch weigh withdraw wrap
    write
    yield
    """.split()  # noqa: SIM905
)
"""With which the docstrings of functions open."""

SYNONYMS = {
    "ancestors": ("ancestry", "parentage"),
    "draft": ("lookahead",),
    "engine": ("backend", "backends"),
    "ess": ("neff", "n_eff"),
    "log_evidence": ("log_z", "logz", "log_marginal", "log_ml"),
    "log_weight": ("logweight", "log_w"),
    "population": ("ensemble", "swarm"),
    "request": ("query", "queries", "inquiry"),
    "resident": ("warm",),
    "speculated": ("foreseen", "bet", "bets"),
    "statistics": ("stats", "metrics"),
    "ticket": ("core_id",),
    "waiter": ("listener", "subscriber"),
}
"""Words of the word list, and what identifiers never say instead."""

FOREIGN = {
    "engines/vllm/structures.py": {"_backend", "backend"},  # vLLM's manager of structures has it
    "engines/vllm/native_texts.py": {"prefill_stats"},
    "engines/process.py": {"backend", "backends"},  # PyTorch's, as torch.backends has them
    "inference/metropolis.py": {"warm_up", "_warm_up"},
    "lm.py": {"warm_up", "warm_up_sync"},
    "questions/prefixes.py": {"WarmUpOptions"},
    "interop/genlm.py": {"add_query", "batch_evaluate_queries", "query", "reset_async_queries"},
    "interop/llamppl.py": {"backend"},
    "server/client.py": {"do_log_stats"},
    "server/openai.py": {"disable_log_stats"},
    "testing/bets.py": {"bet", "bets"},  # those of statistics: testing by betting
    "testing/laws.py": {"bet", "bets"},
}
"""Names that other packages or other fields of knowledge gave to what they mean."""


class Docstring(NamedTuple):
    """A docstring, and whether it is a function's, which has to open with a verb."""

    file: str
    line: int
    owner: str
    is_function: bool
    text: str

    @property
    def opening(self) -> str:
        """The first word, in lower case, without marks."""
        return re.sub(r"[^\w'`-]", "", (self.text.split() or [""])[0]).lower()

    @property
    def is_vague(self) -> bool:
        """Whether a word that says nothing opens it."""
        return self.opening in (VAGUE_OPENINGS if self.is_function else RIDDLES)

    @property
    def lacks_verb(self) -> bool:
        """Whether it is a function's and opens with something else than a verb."""
        headed = self.text.startswith(("Args:", "Raises:"))
        return self.is_function and not headed and self.opening not in VERBS

    def __str__(self) -> str:
        first = self.text.split("\n\n")[0].replace("\n", " ")
        return f"{self.file}:{self.line} {self.owner}: {' '.join(first.split())}"


def docstrings_of(tree: ast.Module, file: str) -> Iterator[Docstring]:
    """Yield the docstrings of a module, its classes, properties and functions, nested ones too."""
    owners: list[tuple[ast.AST, str]] = [(tree, "")]
    while owners:
        node, path = owners.pop()
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", None) if isinstance(child, ast.stmt) else None
            owners.append((child, f"{path}.{name}".strip(".") if name else path))
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (text := ast.get_docstring(node)):
            is_function = not isinstance(node, ast.Module | ast.ClassDef) and not any(
                re.search(r"\b(cached_property|property|fixture)\b", ast.unparse(each))
                for each in node.decorator_list
            )
            yield Docstring(file, getattr(node, "lineno", 1), path, is_function, text)


def identifiers_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the module's own names with their lines: classes, functions, arguments, variables, fields."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name, node.lineno
            case ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno


def words_for(name: str) -> list[str]:
    """Return the word-list words that a part of this identifier is a synonym of."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return [
        word
        for word, others in SYNONYMS.items()
        if any(re.search(rf"(^|_){other}(_|$)", snake) for other in others)
    ]


class Figures(NamedTuple):
    """What was measured over some files of the package."""

    docstrings: list[Docstring]
    synonyms: list[str]
    lines: dict[str, int]

    @property
    def vague_share(self) -> float:
        """The share of docstrings that a vague word opens."""
        return sum(each.is_vague for each in self.docstrings) / max(len(self.docstrings), 1)


def files_of(*rooms: str) -> list[str]:
    """Return the package's files in these rooms, in all of them if none is given."""
    files = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    return [file for file in files if not rooms or file.startswith(rooms)]


def measured(files: list[str]) -> Figures:
    """Measure these files, named relative to the package."""
    docstrings: list[Docstring] = []
    synonyms: list[str] = []
    lines: dict[str, int] = {}
    for file in files:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        tree = ast.parse(source, filename=file)
        lines[file] = len(source.splitlines())
        docstrings += sorted(docstrings_of(tree, file), key=lambda each: each.line)
        synonyms += [
            f"{file}:{line} {name}: the word is {' or '.join(words)}"
            for name, line in identifiers_of(tree)
            if name not in FOREIGN.get(file, ()) and (words := words_for(name))
        ]
    return Figures(docstrings, synonyms, lines)


def main(rooms: list[str]) -> None:
    """Print the figures of these rooms, or of the whole package, then what breaks a rule."""
    found = measured(files_of(*rooms))
    longest = max(found.lines, key=found.lines.__getitem__)
    print(
        f"{sum(found.lines.values()):,} lines; the longest file: {longest}, {found.lines[longest]}"
    )
    print(f"{len(found.docstrings)} docstrings; opened by a vague word: {found.vague_share:.1%}")
    print(f"without a verb: {sum(each.lacks_verb for each in found.docstrings)}")
    print(*found.synonyms, sep="\n")
    print(*(each for each in found.docstrings if each.is_vague or each.lacks_verb), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
