"""Genealogies: the tree is the one of the ancestors, and the table holds it whole and legible."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from genrt.errors import InvalidRequest
from genrt.inference import Result
from genrt.inference.display import genealogy
from genrt.inference.display.formatting import printable, said
from genrt.inference.display.genealogy import Node, drawn, leaves_of, path_to
from tests import runs

EVERYTHING = 10_000

RESULTS = {
    "narrow": runs.drawn(8, 30, seed=1),
    "wide": runs.drawn(64, 12, seed=2, dying=0.2),
    "one step": runs.drawn(5, 1, seed=3),
    "one particle": runs.drawn(1, 6, seed=4, dying=0.0),
    "mostly dead": runs.drawn(6, 8, seed=5, dying=0.9),
}


def expected_leaves(result: Result) -> dict[Node, str]:
    """By the definitions, one particle after another."""
    leaves, infos = {}, result.infos
    for step, info in enumerate(infos):
        for particle, log_weight in enumerate(info.log_weights):
            if info.log_increments[particle] == -math.inf:
                leaves[step, particle] = "died"
            elif log_weight == -math.inf:
                continue
            elif step == len(infos) - 1:
                leaves[step, particle] = "survived"
            elif particle not in infos[step + 1].ancestors:
                leaves[step, particle] = "dropped"
    return leaves


def table(result: Result, lineages: int = EVERYTHING) -> list[tuple[str, str, list[str]]]:
    """The rows of the table: how each ends, its figure, and its cells, shared ones too."""
    root = ET.fromstring(result.genealogy(lineages=lineages)._repr_html_())
    found, above = [], list[list[ET.Element]]()
    for row in root.iter("tr"):
        [figure, *own] = row.iter("td")
        above.append(own)
        # A cell is also in the rows below that it is as high as.
        cells = [
            "".join(cell.itertext())
            for distance, its in sorted(enumerate(reversed(above)), reverse=True)
            for cell in its
            if int(cell.get("rowspan", 0)) > distance
        ]
        found.append((row.get("class", ""), figure.text or "", cells))
    return found


@pytest.mark.parametrize("name", RESULTS)
def test_every_row_reads_as_its_lineage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(genealogy, "CELL", 10_000)
    result = replace(RESULTS[name], _tokens={})
    infos, expected = result.infos, expected_leaves(result)
    paths = {leaf: path_to(leaf, infos) for leaf in expected}
    order = sorted(paths, key=lambda leaf: [particle for _, particle in paths[leaf]])
    for (end, figure, cells), leaf in zip(table(result), order, strict=True):
        step, particle = leaf
        assert end == expected[leaf]
        number = f"{result.weights[particle]:.4f}" if end == "survived" else infos[step].step
        assert figure.split()[-1] == str(number)
        assert "".join(cells) == said(drawn(paths[leaf], infos), {})
        for before, after in zip(paths[leaf], paths[leaf][1:], strict=False):
            assert before == (after[0] - 1, infos[after[0]].ancestors[after[1]])


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_choice_of_lineages_is_a_part_of_all(name: str, most: int) -> None:
    result = RESULTS[name]
    total = Counter(expected_leaves(result).values())
    shown = Counter(end for end, _, _ in table(result, most))
    assert shown.total() == min(most, total.total())
    assert (shown["survived"] > 0) == (total["survived"] > 0)
    others = total["died"] + total["dropped"]
    assert most < 3 or not others or shown["died"] + shown["dropped"]


def test_cells_are_as_high_as_the_lineages_that_share_them() -> None:
    result = runs.drawn(3, 3, dying=0.0)
    for info, ancestors in zip(result.infos, ([0, 1, 2], [0, 0, 1], [0, 1, 1]), strict=True):
        object.__setattr__(info, "ancestors", np.array(ancestors))
        object.__setattr__(info, "token_ids", np.array([[0], [1], [2]]))
    object.__setattr__(result, "_tokens", {0: b"a", 1: b"b", 2: b"c"})
    shown = result.genealogy()
    root = ET.fromstring(shown._repr_html_())
    rows = [
        [(cell.text, int(cell.get("rowspan", 0))) for cell in row.iter("td")][1:]
        for row in root.iter("tr")
    ]
    # Step 0 has a, b, c. Step 1: aa, ab, bc. Step 2: aaa, abb, abc; bc and c are without children.
    assert rows == [
        [("a", 3), ("aa", 1)],
        [("b", 2), ("b", 1)],
        [("c", 1)],
        [("bc", 1)],
        [("c", 1)],
    ]
    assert (
        repr(shown)
        == f"Genealogy(3 particles, 3 steps, {sum(i.resampled for i in result.infos)} resampled)"
    )


def test_distinct_texts_come_before_equal_ones() -> None:
    result = runs.drawn(6, 1, dying=0.0)
    [info] = result.infos
    object.__setattr__(info, "token_ids", np.array([[0], [0], [0], [1], [0], [2]]))
    object.__setattr__(info, "log_weights", np.array([0.0, -0.1, -0.2, -3.0, -0.3, -4.0]))
    assert [particle for _, particle in leaves_of(result.infos)["survived"]] == [0, 3, 5, 1, 2, 4]


def test_the_table_has_every_text_as_text(tmp_path: Path) -> None:
    result = runs.run(tmp_path / "model")
    html = result.genealogy(lineages=EVERYTHING)._repr_html_()
    assert "<script" not in html
    shown = "".join(cell for _, _, cells in table(result) for cell in cells)
    for each in ("<script>&", r"\x1b[2J", r"\u202e", r"\xc3", r"\n"):
        assert each in shown
    texts = [
        "".join(cells).removesuffix("⟨10⟩") for end, _, cells in table(result) if end == "survived"
    ]
    alive = [text for text, weight in zip(result.texts, result.weights, strict=True) if weight]
    assert {printable(text) for text in alive if "\ufffd" not in text} <= {*texts}


def test_the_table_of_a_long_run_is_bounded() -> None:
    html = runs.drawn(4, 2000, dying=0.0).genealogy()._repr_html_()
    assert len(html) < 20_000


def test_tokens_without_a_spelling_are_their_numbers() -> None:
    result = runs.drawn(3, 2, dying=0.0)
    object.__setattr__(result, "_tokens", {})
    first = int(result.infos[0].token_ids[0, 0])
    assert f"⟨{first}⟩" in result.genealogy()._repr_html_()


def test_without_steps_there_is_no_genealogy_and_no_table_of_steps() -> None:
    result = Result(("a",), ((0,),), ("a",), np.zeros(1), math.nan)
    for show in (result.genealogy, lambda: result.to_pandas(steps=True)):
        with pytest.raises(InvalidRequest, match="no steps"):
            show()
