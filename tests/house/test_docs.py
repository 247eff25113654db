"""The documents: their examples run and print what they say; pages, links and names are all there.

MkDocs is not needed for any of it: `make docs`, which takes no warning, checks the rest."""

from __future__ import annotations

import ast
import builtins
import contextlib
import filecmp
import importlib
import importlib.util
import inspect
import io
import json
import pkgutil
import re
import shutil
import types
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

import genrt
from benchmarks import evidence, plots
from genrt import demo, errors
from genrt.__main__ import main
from genrt.engines.exact import NGram
from genrt.lm import AsyncLM

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "PROMISES.md", "SECURITY.md"]
DOCUMENTS += ["CODE_OF_CONDUCT.md", "tests/README.md", "examples/README.md"]
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
GENERATED = {"promises.md", "security.md"} | {
    f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")
}
PUBLIC = ["genrt", "genrt.constraints", "genrt.generation", "genrt.inference", "genrt.testing"]
PUBLIC += ["genrt.tokens.texts"]
"""The modules that users import from: each of their names is in the reference."""


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
    namespace["__builtins__"] = builtins  # as in a script; C code that imports asks for it
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        outcome = types.FunctionType(code, namespace)()
        if inspect.iscoroutine(outcome):
            await outcome
    return printed.getvalue().splitlines()


SIMPLE = ["guide/testing.md"]
"""Pages whose examples open no model but the exact one."""

WITH_A_MODEL = [page for page in PAGES if blocks((DOCS / page).read_text("utf-8"), "python")]
SPECIAL = ("guide/adapters.md", "migration/genlm.md")
WITH_A_MODEL = [page for page in WITH_A_MODEL if page not in (*SIMPLE, *SPECIAL)]


def text_of(page: str) -> str:
    """The text of a page of docs/, or of a document."""
    return ((ROOT if page in DOCUMENTS else DOCS) / page).read_text(encoding="utf-8")


EVERYTHING = "\n".join(map(text_of, [*DOCUMENTS, *PAGES]))


async def examples_of(page: str, namespace: dict[str, Any]) -> None:
    """Run a page's examples one after another; each has to print what it says."""
    for block in blocks(text_of(page), "python"):
        assert await run_block(block, page, namespace) == promised_output(block)


@pytest.fixture(scope="module")
def embedded() -> Iterator[AsyncLM]:
    options = {"dtype": "float32", "kv_cache_memory_bytes": 2**29}
    with genrt.load(engine_options=options) as lm:
        yield lm


@pytest.mark.vllm
@pytest.mark.embedded
@pytest.mark.parametrize("page", WITH_A_MODEL)
async def test_the_examples_of_a_page_run(
    page: str, embedded: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pages share the one embedded model that each of them loads."""
    embedded.clear_cache()
    monkeypatch.setattr(genrt, "load", lambda: embedded)
    await examples_of(page, {"__name__": "docs"})


@pytest.mark.vllm
@pytest.mark.embedded
@pytest.mark.genlm
@pytest.mark.filterwarnings("ignore:Common vocabulary")
async def test_the_examples_with_genlm_run(
    embedded: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(genrt, "load", lambda: embedded)
    await examples_of("migration/genlm.md", {"__name__": "docs"})


@pytest.mark.vllm
@pytest.mark.embedded
@pytest.mark.genlm
async def test_the_examples_in_the_readme_run(
    embedded: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(genrt, "load", lambda: embedded)
    examples = blocks(text_of("README.md"), "python")
    namespace: dict[str, Any] = {"__name__": "readme"}
    printed = [await run_block(block, "README.md", namespace) for block in examples]
    assert printed == [promised_output(block) for block in examples]
    assert sum(map(len, printed)) >= 3
    texts, weights = zip(*namespace["result"].posterior(), strict=True)
    assert set(texts) <= {" Paris.", " Rome.", " Tokyo."}
    assert sum(weights) == pytest.approx(1.0)
    assert sum(weight for _, weight in namespace["numbers"]) == pytest.approx(1.0)


@pytest.mark.vllm
@pytest.mark.embedded
def test_the_demo_prints_a_table_as_in_the_readme(
    embedded: AsyncLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(genrt, "load", lambda *_, **__: contextlib.nullcontext(embedded))
    embedded.clear_cache()
    before = embedded.statistics()
    assert main(["demo", "--particles", "8", "--max-tokens", "24"]) == 0
    did = embedded.statistics().since(before)
    table = re.findall(r"(?m)^ +(\d\.\d{4})  (.*)$", capsys.readouterr().out)
    assert table
    assert all(re.fullmatch(demo.PATTERN, text) for _, text in table)
    assert sum(float(weight) for weight, _ in table) == pytest.approx(1, abs=0.01)
    assert did.engine.rows < did.batcher.questions <= 8 * 24
    assert did.engine.steps <= 24


@pytest.mark.parametrize("page", SIMPLE)
async def test_the_examples_on_the_exact_engine_run(page: str) -> None:
    await examples_of(page, {"__name__": "docs"})


@pytest.mark.vllm
async def test_the_examples_with_adapters_run(
    llama: Path, loras: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/model").symlink_to(llama)
    (tmp_path / "path/to/adapter").symlink_to(loras[0])
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "docs"}
    await examples_of("guide/adapters.md", namespace)
    assert not torch.allclose(namespace["base"], namespace["formal"], atol=0.1)


async def test_the_examples_in_contributing_run() -> None:
    examples = blocks(text_of("CONTRIBUTING.md"), "python")
    assert examples
    for block in examples:
        assert await run_block(block, "CONTRIBUTING.md", {}) == promised_output(block)


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    """Before a release, pip finds genrt in a checkout alone."""
    pages = [*map(ROOT.joinpath, DOCUMENTS), *(ROOT / "docs").rglob("*.md")]
    pages += (ROOT / "notebooks").glob("*.ipynb")
    for page in pages:
        assert not re.search(r"pip install \W*genrt", page.read_text(encoding="utf-8")), page.name


WIDEST = 104
"""Columns of code and outputs that a page has room for, in a window of 1,400 pixels."""


def test_code_and_outputs_are_no_wider_than_a_page() -> None:
    shown = {page: re.findall(r"^```\w*\n(.*?)^```", text_of(page), re.S | re.M) for page in PAGES}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        outputs = [output for cell in code for output in cell["outputs"]]
        texts = [each.get("text") or each["data"]["text/plain"] for each in outputs]
        shown[path.name] = ["".join(each) for each in [*(cell["source"] for cell in code), *texts]]
    wide = [
        (page, line)
        for page, blocks in shown.items()
        for block in blocks
        for line in block.splitlines()
        if len(line) > WIDEST
    ]
    assert wide == []


def test_the_programs_of_the_field_are_there_and_short() -> None:
    """Twelve, of at most 15 lines each, and the searches and bounds after them."""
    page = (ROOT / "docs/guide/recipes.md").read_text(encoding="utf-8")
    programs = page.partition("## JSON")[2].partition("## Fill")[0]
    programs += page.partition("## Twelve programs of the field")[2]
    for code in re.findall(r"```python\n(.*?)\n```", programs, re.DOTALL):
        assert len(code.splitlines()) <= 15, code
    wanted = (
        "json_schema", "AWRS", "proposal=", "resample_move", "tempered", "MetropolisHastings",
        "ParticleGibbs", "beam_search", "BestOfN", "Rejection", "without_replacement", "power=-0.5",
        "Program", "evidence_bounds", "stochastic_beam_search", "best_first", "ancestors=True",
    )  # fmt: skip
    assert [each for each in wanted if each not in programs] == []


def test_the_evidence_is_what_the_results_say(tmp_path: Path) -> None:
    """Drawn again, charts and tables are as committed."""
    shutil.copy(DOCS / "benchmarks/index.md", tmp_path)
    evidence.draw(evidence.RESULTS, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in evidence.PAGE.iterdir()}
    assert filecmp.cmpfiles(tmp_path, evidence.PAGE, names, shallow=False)[1:] == ([], [])


def test_a_chart_has_a_bar_for_each_number() -> None:
    bars = [plots.Bar("a & b", 2.0), plots.Bar("c", 0.5, 0.25, 1.5)]
    text = plots.chart("A <chart>", [plots.Group("both", bars)], ["a note"], one="the loop")
    drawn = list(ET.fromstring(text).iter())
    widths = [float(each.attrib["width"]) for each in drawn if each.get("class") == "bar"]
    assert widths[0] == pytest.approx(4 * widths[1]) == plots.WIDTH - plots.LEFT - plots.RIGHT
    words = {each.text for each in drawn if each.tag.endswith("text")}
    assert words >= {"A <chart>", "a & b", "2.00", "0.50", "a note", "dashed: the loop = 1"}
    with pytest.raises(ValueError, match="no results"):
        plots.chart("nothing", [])


def test_every_page_is_in_the_navigation_once() -> None:
    nav = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert sorted(nav) == sorted({*PAGES, *GENERATED})


@pytest.mark.parametrize("page", [*DOCUMENTS, *(f"docs/{page}" for page in PAGES)])
def test_links_lead_to_files(page: str) -> None:
    """On a code host too, where a page is beside its files."""
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8")):
        assert "://" in link or (ROOT / page).parent.joinpath(link).exists(), link


def test_links_of_pages_lead_to_pages(hooks: ModuleType) -> None:
    for page in PAGES:
        text = hooks.on_page_markdown(text_of(page))
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in link:
                target = (DOCS / page).parent.joinpath(link).resolve()
                assert target.is_relative_to(DOCS), (page, link)
                is_page = str(target.relative_to(DOCS)) in {*PAGES, *GENERATED}
                assert is_page or (target.suffix == ".svg" and target.is_file()), (page, link)


def test_the_links_of_notebooks_lead_to_notebooks() -> None:
    names = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    for name in names:
        cells = json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))["cells"]
        text = "".join("".join(cell["source"]) for cell in cells)
        assert set(re.findall(r"\b\w+\.ipynb", text)) <= names


SEARCHED = ["beam search", "power sampling", "particle filter", "best-of-n", "GRPO", "resume"]
SEARCHED += [
    "GPU memory",
    "troubleshooting",
    "deployment",
    "metrics",
    "support matrix",
    "precision",
]


@pytest.mark.parametrize("words", SEARCHED)
def test_a_heading_has_the_words_that_people_search_for(words: str) -> None:
    prose = "".join(re.sub(r"^```.*?^```$", "", text_of(page), flags=re.S | re.M) for page in PAGES)
    assert re.search(rf"^#+ .*\b{words}\b", prose, re.M | re.I)


def test_the_page_of_metrics_has_the_names_that_a_server_exports() -> None:
    rows = re.findall(
        r"^\| `(genrt_\w+)` \| .* \| (\w+) \|$", text_of("operations/metrics.md"), re.M
    )
    with genrt.load(NGram.random(3), engine="exact") as lm, genrt.serving(lm) as server:
        exported = httpx.get(f"{server.url}/metrics").text
    found = dict(re.findall(r"^# TYPE (genrt_\w+) (\w+)$", exported, re.M))
    with_replicas = {"genrt_replica_in_flight": "gauge", "genrt_replica_restarts_total": "counter"}
    assert dict(rows) == found | with_replicas
    queried = re.findall(r"genrt_[a-z_]+[a-z]", text_of("operations/metrics.md"))
    assert set(queried) <= {*found, *with_replicas, "genrt_engine"}


def constants() -> str:
    """All texts in the package's source; an f-string without its values."""
    trees = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "genrt").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return "\n".join(str(node.value) for node in nodes)


def test_the_messages_of_troubleshooting_are_genrts() -> None:
    """Those of vLLM say so, and statuses and errors are names."""
    cells = re.findall(r"^\| (.*?) \| ", text_of("operations/troubleshooting.md"), re.M)
    quoted = [
        m for cell in cells if "vLLM:" not in cell for m in re.findall(r"`([^`]+ [^`]+)`", cell)
    ]
    assert len(quoted) > 8
    texts = constants()
    assert [message for message in quoted if message not in texts] == []


def test_the_names_in_the_documents_are_there() -> None:
    for name in set(re.findall(r"\bgenrt(?:\.[A-Za-z_]\w*)+", EVERYTHING)):
        if not name.startswith("genrt.interop"):  # its modules import what may not be installed
            assert pkgutil.resolve_name(name) is not None, name
    methods = set(re.findall(r"\blm\.([a-z_]+)\b", EVERYTHING)) - {"py"}
    assert {"next_token_logprobs", "sample", "draw"} <= methods
    with genrt.load(NGram.random(3), engine="exact") as lm:
        assert {name for name in methods if not hasattr(lm, name)} == set()


def directives() -> dict[str, str]:
    """What the reference has the docstrings of, members of modules that are named one by one included,
    with the options of each."""
    named: dict[str, str] = {}
    for page in PAGES:
        for name, options in re.findall(r"^::: (\S+)\n((?: .*\n)*)", text_of(page) + "\n", re.M):
            members = re.search(r"members: *\[(.*?)\]", options)
            found = members[1].split(", ") if members else []
            named |= {name: options} | {f"{name}.{member}": "" for member in found}
    return named


def test_what_the_reference_names_is_there() -> None:
    named = directives()
    assert len(named) > 60
    for name in named:
        if not name.startswith("genrt.interop"):
            assert pkgutil.resolve_name(name) is not None, name


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    # An alias is another object than what it stands for; names are compared, not objects.
    documented = {name.rpartition(".")[2] for name in directives()} | {"__version__"}
    documented |= set(errors.__all__)
    there = importlib.import_module(module)
    modules = {name for name in there.__all__ if isinstance(getattr(there, name), ModuleType)}
    assert set(there.__all__) - modules - documented == set()


@pytest.mark.parametrize(
    "module",
    [
        "genrt",
        "genrt.inference",
        pytest.param("genrt.interop.genlm", marks=[pytest.mark.genlm]),
    ],
)
def test_every_blocking_twin_says_whose_it_is(module: str) -> None:
    there = importlib.import_module(module)
    classes = [value for name in there.__all__ if inspect.isclass(value := getattr(there, name))]
    twins = [
        (owner, name, twin)
        for owner in dict.fromkeys(base for each in classes for base in each.__mro__)
        for name, twin in vars(owner).items()
        if name.endswith("_sync") and not name.startswith("_")
    ]
    assert twins
    for owner, name, twin in twins:
        assert twin.__name__ == name
        assert twin.__qualname__ == f"{owner.__name__}.{name}"
        opening = str(inspect.getdoc(twin)).partition("\n\n")[0]
        assert f"``{name.removesuffix('_sync')}``" in opening
        assert "blocking" in opening
        assert hasattr(owner, name.removesuffix("_sync"))


def test_the_errors_page_has_them_all() -> None:
    assert "::: genrt.errors\n" in text_of("reference/errors.md")
    told = re.findall(r"^\| `(\w+)` \|", text_of("guide/running.md"), re.M)
    assert len(told) > 5
    assert set(told) <= set(errors.__all__)


SECTIONS = {"Args", "Attributes", "Raises", "Returns", "Warns", "Yields"}
"""Of docstrings: those that the reference makes lists of. Any other would be shown as a quotation."""


def shown() -> Iterator[tuple[str, Any]]:
    """Everything of ours that the reference shows: what it names, and the public members of classes."""
    for name, options in directives().items():
        if not name.startswith("genrt.interop"):
            found = pkgutil.resolve_name(name)
            yield name, found
            if isinstance(found, type) and "members: false" not in options:
                for member in dir(found):
                    of = getattr(found, member)
                    if not member.startswith("_") and "genrt" in (
                        getattr(of, "__module__", "") or ""
                    ):
                        yield f"{name}.{member}", of


def sections_of(docstring: str) -> dict[str, list[str]]:
    """The sections of a docstring, with what stands before the colon in each of their entries."""
    found = re.findall(r"^([A-Z]\w*):\n((?:(?:    .*)?\n)*)", docstring + "\n", re.M)
    return {title: re.findall(r"^    (\S[^:]*):", body, re.M) for title, body in found}


def signature_of(documented: Any) -> inspect.Signature:
    """The signature of a function or a class; an empty one of anything else."""
    try:
        return inspect.signature(documented)
    except (TypeError, ValueError):  # an alias, a typed dictionary, a property
        return inspect.Signature()


def names_in(documented: Any) -> set[str]:
    """The parameters of a function; the parameters and the members of a class."""
    names = set(signature_of(documented).parameters)
    if isinstance(documented, type):
        names.update(dir(documented), *map(inspect.get_annotations, documented.__mro__))
    return names


def test_docstrings_have_the_sections_and_the_names_that_the_reference_knows() -> None:
    wrong = set()
    for where, documented in shown():
        if not inspect.isroutine(documented) and not isinstance(documented, type | property):
            continue
        for title, names in sections_of(inspect.getdoc(documented) or "").items():
            if title not in SECTIONS:
                wrong.add(f"{where}: {title}")
            elif title in ("Args", "Attributes"):
                wrong |= {f"{where}: {name}" for name in set(names) - names_in(documented)}
    assert sorted(wrong) == []


def types_of_ours() -> set[str]:
    """The classes and the type aliases that the package defines at the top of its files."""
    names = set()
    for path in (ROOT / "genrt").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names |= set(re.findall(r"^class (\w+)", text, re.M))
        names |= set(re.findall(r"^(_?[A-Z]\w*[a-z]\w*)(?:: TypeAlias)? = ", text, re.M))
    return names - {"Bytes"}  # bytes, in a class that has a member of that name


def test_signatures_in_the_reference_have_no_type_that_it_leaves_out() -> None:
    options = directives()
    unknown = types_of_ours() - {name.rpartition(".")[2] for name in options} - set(errors.__all__)
    missing = set()
    for where, documented in shown():
        if "merge_init_into_class: false" not in options.get(where, ""):
            types = set(re.findall(r"[A-Za-z_]\w*", str(signature_of(documented))))
            missing |= {f"{where}: {name}" for name in types & unknown}
    assert sorted(missing) == []


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """docs/hooks.py, which MkDocs loads by its path too."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_search_works_from_files(hooks: ModuleType, tmp_path: Path) -> None:
    """There the theme reads its index as a script, and its worker runs in a frame."""
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.json").write_text('{"docs": []}')
    hooks.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
    assert (tmp_path / "search" / "search_index.js").read_text() == 'var __index = {"docs": []}'
    [shim] = re.findall(r"polyfills: \[(.*?)\]", (ROOT / "mkdocs.yml").read_text())
    assert 'location.protocol === "file:"' in (DOCS / shim).read_text()


SOUND = r"""<p id="a">See <a href="../index.html#top">there</a>, <a href="#a">here</a> and
<a href="https://example.org/x">far away</a>: <math display="inline"><mi>x</mi></math>.<br></p>
<pre><code>$HOME and \(x\)</code></pre><div class="doc-signature"><pre>f(x: int)</pre></div>"""


def test_a_sound_page_has_no_faults(hooks: ModuleType) -> None:
    pages = {"guide/a.html": SOUND, "index.html": '<h1 id="top">Top</h1>'}
    assert hooks.faults(pages, set(pages)) == []


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ('<math display="inline"><mi>x</mi></math><p>, which</p>', "outside of a paragraph"),
        ("<p>Let $x$ be</p>", r"\$x\$ is not drawn"),
        ("<p>Let \\(x\\) be</p>", "is not drawn"),
        ('<p><a href="b.html">b</a></p>', "b.html leads nowhere"),
        ('<p><a href="#b">b</a></p>', "#b leads nowhere"),
        ('<p><a href="../index.html#b">b</a></p>', "index.html#b leads nowhere"),
        ('<p><img src="picture.png"></p>', "picture.png leads nowhere"),
        ('<div class="doc-signature"><pre>f(x: _Trace)</pre></div>', "_Trace, which is private"),
    ],
)
def test_a_fault_of_a_page_is_found(hooks: ModuleType, page: str, fault: str) -> None:
    pages = {"guide/a.html": SOUND + page, "index.html": '<h1 id="top">Top</h1>'}
    [found] = hooks.faults(pages, set(pages))
    assert re.match("guide/a.html: .*" + fault, found)


def test_a_notebook_is_a_page_of_cells_and_outputs(hooks: ModuleType) -> None:
    cells: list[dict[str, Any]] = [
        {"cell_type": "markdown", "source": ["See [another](other.ipynb)\n", "and $x$."]},
        {
            "cell_type": "code",
            "source": ["1 + 1"],
            "outputs": [
                {"output_type": "stream", "text": ["2\n"]},
                {"output_type": "execute_result", "data": {"text/html": ["<b>\n", "\n", "2</b>"]}},
            ],
        },
    ]
    text = hooks.notebook_as_markdown({"cells": cells})
    assert "[another](other.md)\nand $x$." in text
    assert "```python\n1 + 1\n```" in text
    assert "``` {.text .output}\n2\n```" in text
    assert '<div class="shown">\n<b>\n2</b>\n</div>' in text


def test_a_warning_ends_the_build_of_the_docs() -> None:
    # Quiet, MkDocs does not even count them.
    [build] = re.findall(r"mkdocs build .*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert "--strict" in build
    assert "--quiet" not in build


def test_the_commands_and_extras_in_the_documents_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|\$ )make ([a-z]+)", EVERYTHING):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"\.\[([a-z,]+)\]", EVERYTHING)
    extras += re.findall(r"[Ee]xtras? `(\w+)`", EVERYTHING)
    assert extras
    for extra in ",".join(extras).split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), f"no extra {extra}"
