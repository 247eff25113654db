"""What `make docs` makes pages of beside docs/: the notebooks with their outputs, other documents.

Formulas become MathML, which browsers draw by themselves: the site needs no script and no network. The
finished pages are searched for faults that MkDocs does not find; each is a warning.
"""

from __future__ import annotations

import html
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = {"promises.md": "PROMISES.md", "security.md": "SECURITY.md"}

log = logging.getLogger("mkdocs.hooks.genrt")

# What pymdownx.arithmatex makes of $…$ and of $$…$$.
_FORMULA = re.compile(
    r'<span class="arithmatex">\\\((?P<inline>.*?)\\\)</span>'
    r'|<div class="arithmatex">\\\[(?P<display>.*?)\\\]</div>',
    re.DOTALL,
)

_EMPTY_HEADER = re.compile(r"<th([^>]*)></th>")
_EMPTY_HEAD = re.compile(r"<thead>\s*<tr>\s*(?:<th[^>]*></th>\s*)+</tr>\s*</thead>\s*")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every notebook, and for the documents that stand elsewhere."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = notebook_as_markdown(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    for page, document in DOCUMENTS.items():
        text = without_links_to_files((ROOT / document).read_text(encoding="utf-8"))
        if document == "PROMISES.md":
            text += "\n" + tests_of_promises()
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to notebooks and documents of the checkout to the pages that are made of them."""
    return re.sub(
        r"\]\(\.\./((?:\.\./)*)(?:(notebooks/\w+)\.ipynb|(PROMISES|SECURITY)\.md)",
        lambda link: f"]({link[1]}{link[2] or link[3].lower()}.md",
        markdown,
    )


def tests_of_promises() -> str:
    """Return the list of the tests that prove each promise."""
    listing = [sys.executable, "-m", "tests.promises"]
    return subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def on_page_content(content: str, **_: Any) -> str:
    """Draw the formulas, drop the colons that stand before a block of code in docstrings, and let no
    table have a header without words."""
    content = _FORMULA.sub(_drawn, content).replace("<p>::</p>\n", "")
    return _EMPTY_HEADER.sub(r"<td\1></td>", _EMPTY_HEAD.sub("", content))


def on_post_build(config: MkDocsConfig) -> None:
    """Write the search's index as a script for file://. Warn of every fault in the finished pages,
    which ends a strict build."""
    site = Path(config.site_dir)
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    (site / "search" / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
    pages = {
        str(path.relative_to(site)): path.read_text(encoding="utf-8")
        for path in site.rglob("*.html")
        if path.name != "404.html"  # its links are those of a server's root
    }
    files = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    for fault in faults(pages, files):
        log.warning("%s", fault)


def _drawn(formula: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    if formula["display"] is not None:
        drawn = convert(html.unescape(formula["display"]).strip(), display="block")
        return f'<div class="formula">{drawn}</div>'
    return str(convert(html.unescape(formula["inline"])))


def notebook_as_markdown(notebook: dict[str, Any]) -> str:
    """Return the cells in order; outputs as text, or as the HTML that they have."""
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", source))
            continue
        blocks.append(f"```python\n{source}\n```")
        blocks += [_output(output) for output in cell["outputs"]]
    return "\n\n".join(blocks) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"``` {{.text .output}}\n{''.join(output['text']).rstrip()}\n```"
    data = output["data"]
    if "text/html" in data:
        # Markdown would take an empty line for the end of the HTML.
        lines = "".join(data["text/html"]).splitlines()
        return (
            '<div class="shown">\n' + "\n".join(line for line in lines if line.strip()) + "\n</div>"
        )
    if "image/png" in data:
        source = html.escape("".join(data["image/png"]).strip())
        return f'<img alt="the figure that this cell draws" src="data:image/png;base64,{source}">'
    return f"``` {{.text .output}}\n{''.join(data['text/plain'])}\n```"


def without_links_to_files(markdown: str) -> str:
    """Return the text with links to files of the checkout as their names: the site has no such files."""
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", markdown)


class _Page(HTMLParser):
    """What is looked at in a page: its anchors and links, and what formulas and signatures are in."""

    VOID = frozenset({"br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"})
    TEXT = frozenset({"p", "li", "td", "th", "dd", "dt", "h1", "h2", "h3", "h4", "summary"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loose_formulas = 0
        self.raw_formulas: list[str] = []
        self.signatures: list[str] = []
        self._open: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.links += [values[name] for name in ("href", "src") if name in values]
        if tag == "math" and values.get("display") == "inline":
            self.loose_formulas += not self._within(self.TEXT)
        if "doc-signature" in values.get("class", ""):
            self.signatures.append("")
        if tag not in self.VOID:
            self._open.append((tag, values.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if any("doc-signature" in classes for _, classes in self._open):
            self.signatures[-1] += data
        if not self._within({"code", "pre", "script", "style", "math"}):
            self.raw_formulas += re.findall(r"\$[^$\n]+\$|\\[(\[].*?\\[)\]]", data)

    def _within(self, tags: Iterable[str]) -> bool:
        return any(tag in tags for tag, _ in self._open)


def faults(pages: dict[str, str], files: set[str]) -> list[str]:
    """Return what is wrong with finished pages, in words.

    Links and anchors that lead nowhere; a formula beside its paragraph, or not drawn; a signature with a
    name that is private.

    Args:
        pages: the HTML of each page, by its path in the site.
        files: the paths of all files in the site.
    """
    parsed = {path: _Page(text) for path, text in pages.items()}
    found = []
    for path, page in sorted(parsed.items()):
        if page.loose_formulas:
            found.append(f"{path}: {page.loose_formulas} formulas stand outside of a paragraph")
        found += [f"{path}: {formula} is not drawn" for formula in page.raw_formulas]
        for signature in page.signatures:
            private = re.findall(r"\b_[A-Za-z]\w*", signature)
            if private:
                found.append(
                    f"{path}: {signature.strip()[:60]} … shows {private[0]}, which is private"
                )
        found += [
            f"{path}: {link} leads nowhere"
            for link in page.links
            if _is_dead(link, path, parsed, files)
        ]
    return found


def _is_dead(link: str, path: str, pages: dict[str, _Page], files: set[str]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return False
    here = (Path("/") / path).parent
    target = path
    if parts.path:
        target = str((here / unquote(parts.path)).resolve().relative_to("/"))
    if target in ("", "."):
        target = "index.html"
    if target not in files:
        return True
    return (
        bool(parts.fragment)
        and target in pages
        and unquote(parts.fragment) not in pages[target].anchors
    )
