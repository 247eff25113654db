"""What `make docs` makes pages of beside docs/: the notebooks with their outputs, other documents.

Formulas become MathML, which browsers draw by themselves: the site needs no script and no network.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = {"promises.md": "PROMISES.md", "security.md": "SECURITY.md"}

# A block of code, a span of code, a displayed formula, a formula in a line.
_PARTS = re.compile(
    r"(?P<code>^(?P<fence>`{3,}).*?^(?P=fence)$|`[^`\n]+`)|\$\$(?P<display>.+?)\$\$|\$(?P<inline>[^$\n]+)\$",
    re.DOTALL | re.MULTILINE,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every notebook, and for the documents that stand elsewhere."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = notebook_as_markdown(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    for page, document in DOCUMENTS.items():
        text = without_links_to_files((ROOT / document).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn formulas into MathML."""
    return _PARTS.sub(_drawn, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Drop the colons that stand before a block of code in docstrings."""
    return content.replace("<p>::</p>\n", "")


def _drawn(part: re.Match[str]) -> str:
    if part["code"]:
        return part[0]
    if part["display"]:
        return f"\n\n<div>{convert(part['display'].strip(), display='block')}</div>\n\n"
    return str(convert(part["inline"]))


def notebook_as_markdown(notebook: dict[str, Any]) -> str:
    """The cells in order; outputs as text, or as the HTML that they have."""
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        blocks.append(f"```python\n{source}\n```")
        blocks += [_output(output) for output in cell["outputs"]]
    return "\n\n".join(blocks) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output["data"]
    if "text/html" in data:
        # Markdown would take an empty line for the end of the HTML.
        lines = "".join(data["text/html"]).splitlines()
        return "<div>\n" + "\n".join(line for line in lines if line.strip()) + "\n</div>"
    if "image/png" in data:
        source = html.escape("".join(data["image/png"]).strip())
        return f'<img alt="" src="data:image/png;base64,{source}">'
    return f"```text\n{''.join(data['text/plain'])}\n```"


def without_links_to_files(markdown: str) -> str:
    """Links to files of the checkout as their names: they lead nowhere from the site."""
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", markdown)
