"""Genealogies: the tree is the one of the ancestors, and the picture holds it whole and legible."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from genrt.errors import InvalidRequest
from genrt.inference import Result
from genrt.inference.display.formatting import printable
from genrt.inference.display.genealogy import Branch, Tree, tree_of
from tests import runs

EVERYTHING = 10_000
SVG = "{http://www.w3.org/2000/svg}"


def nodes(branch: Branch) -> list[tuple[int, int]]:
    return list(enumerate(branch.particles, start=branch.first))


def expected_leaves(result: Result) -> dict[tuple[int, int], str]:
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


def edges(tree: Tree) -> dict[tuple[int, int], tuple[int, int] | None]:
    """The parent of every node."""
    found: dict[tuple[int, int], tuple[int, int] | None] = {}
    for branch in tree.branches:
        above = None if branch.parent is None else nodes(tree.branches[branch.parent])[-1]
        for node in nodes(branch):
            assert node not in found
            found[node], above = above, node
    return found


RESULTS = [
    runs.drawn(8, 30, seed=1),
    runs.drawn(64, 12, seed=2, dying=0.2),
    runs.drawn(5, 1, seed=3),
    runs.drawn(1, 6, seed=4, dying=0.0),
    runs.drawn(6, 8, seed=5, dying=0.9),
]


IDS = ["narrow", "wide", "one step", "one particle", "mostly dead"]


@pytest.mark.parametrize("result", RESULTS, ids=IDS)
def test_the_whole_tree_is_that_of_the_ancestors_and_no_lines_cross(result: Result) -> None:
    tree = tree_of(result.infos, lineages=EVERYTHING)
    for (step, particle), parent in edges(tree).items():
        ancestor = int(result.infos[step].ancestors[particle])
        assert parent == ((step - 1, ancestor) if step else None)
    leaves = {nodes(branch)[-1]: branch.end for branch in tree.branches if branch.end != "forked"}
    assert leaves == expected_leaves(result)
    assert tree.shown == tree.total
    places = set()
    for index, branch in enumerate(tree.branches):
        for (step, particle), token_id in zip(nodes(branch), branch.token_ids, strict=True):
            assert token_id == result.infos[step].token_ids[particle]
            assert (branch.row, step) not in places
            places.add((branch.row, step))
        if branch.end == "survived":
            assert branch.share == pytest.approx(result.weights[branch.particles[-1]])
        children = [each for each in tree.branches if each.parent == index]
        if children:
            assert len(children) > 1
            assert branch.share == pytest.approx(sum(each.share for each in children))
            assert min(each.row for each in children) == branch.row
    for step in range(len(result.infos)):
        rows = sorted(
            (branch.row, -1 if branch.parent is None else tree.branches[branch.parent].row)
            for branch in tree.branches
            if branch.first == step
        )
        parents = [parent for _, parent in rows]
        assert parents == sorted(parents)


@pytest.mark.parametrize("result", RESULTS, ids=IDS)
@pytest.mark.parametrize("lineages", [1, 2, 3, 7])
def test_a_choice_of_lineages_is_a_part_of_the_whole_tree(result: Result, lineages: int) -> None:
    whole = edges(tree_of(result.infos, lineages=EVERYTHING))
    tree = tree_of(result.infos, lineages=lineages)
    assert edges(tree).items() <= whole.items()
    shown = [branch for branch in tree.branches if branch.end != "forked"]
    assert len(shown) == min(lineages, sum(tree.total.values())) == sum(tree.shown.values())
    assert len({branch.row for branch in shown}) == len(shown)
    assert (tree.shown["survived"] > 0) == (tree.total["survived"] > 0)
    others = tree.total["died"] + tree.total["dropped"]
    assert lineages < 3 or not others or tree.shown["died"] + tree.shown["dropped"]


def test_distinct_texts_come_before_equal_ones() -> None:
    result = runs.drawn(6, 1, dying=0.0)
    [info] = result.infos
    object.__setattr__(info, "token_ids", np.array([0, 0, 0, 1, 0, 2]))
    object.__setattr__(info, "log_weights", np.array([0.0, -0.1, -0.2, -3.0, -0.3, -4.0]))
    tree = tree_of(result.infos, lineages=4)
    assert sorted(branch.particles[0] for branch in tree.branches) == [0, 1, 3, 5]


def test_a_lineage_is_what_its_particle_drew(tmp_path: Path) -> None:
    result = runs.run(tmp_path / "model")
    tree = tree_of(result.infos, lineages=EVERYTHING)
    survivors = {
        branch.particles[-1]: tree.lineage(index)
        for index, branch in enumerate(tree.branches)
        if branch.end == "survived"
    }
    assert len(survivors) == np.isfinite(result.log_weights).sum() > 0
    end = len(runs.VOCABULARY) - 1
    for particle, token_ids in survivors.items():
        assert tuple(each for each in token_ids if each != end) == result.token_ids[particle]


def drawing(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def test_the_picture_has_every_token_in_its_column_and_every_text_in_a_title(
    tmp_path: Path,
) -> None:
    result = runs.run(tmp_path / "model")
    genealogy = result.genealogy(lineages=EVERYTHING)
    root = drawing(genealogy.svg)
    shown = sorted(span.text or "" for span in root.iter(f"{SVG}tspan"))
    drawn = [
        token_id
        for branch in genealogy.tree.branches
        for token_id in branch.token_ids
        if token_id != -1
    ]
    assert len(shown) == len(drawn)
    assert {"<script>&", r"\x1b[2J", r"\u202e", r"\xc3", "\N{OPEN BOX}" * 2, r"\n"} <= set(shown)
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    for text, log_weight in zip(result.texts, result.log_weights, strict=True):
        if log_weight > -math.inf:
            assert any(printable(text) in title for title in titles), text
    ends = [group.get("class") for group in root.iter(f"{SVG}g")]
    for end, count in genealogy.tree.total.items():
        assert ends.count(end) == count
    marks = [path.get("class") for path in root.iter(f"{SVG}path")]
    assert marks.count("resampling") == sum(info.resampled for info in result.infos) > 0


def test_the_picture_of_a_long_run_is_of_bounded_width() -> None:
    root = drawing(runs.drawn(4, 2000, dying=0.0).genealogy().svg)
    assert float(root.get("width", "nan")) < 9000
    assert next(root.iter(f"{SVG}tspan"), None) is None  # no column has room for a token


@pytest.mark.parametrize("result", RESULTS, ids=IDS)
def test_everything_is_inside_the_picture(result: Result) -> None:
    svg = result.genealogy().svg
    root = drawing(svg)
    wide, high = float(root.get("width", "nan")), float(root.get("height", "nan"))
    for element in root.iter():
        for name, limit in (("x", wide), ("cx", wide), ("y", high), ("cy", high)):
            assert 0 <= float(element.attrib.get(name, 0)) <= limit
    for x, y in re.findall(r"[MC ]([\d.]+) ([\d.]+)", " ".join(re.findall(r' d="([^"]*)"', svg))):
        assert float(x) <= wide
        assert float(y) <= high


def test_a_genealogy_is_saved_as_a_document_and_shown_in_the_colours_of_the_page(
    tmp_path: Path,
) -> None:
    genealogy = RESULTS[0].genealogy()
    genealogy.save(tmp_path / "run.svg")
    assert (tmp_path / "run.svg").read_text(encoding="utf-8") == genealogy._repr_svg_()
    assert 'fill="#fff"' in genealogy.svg
    assert 'fill="#fff"' not in genealogy._repr_html_()
    assert 'color="currentColor"' in genealogy._repr_html_()
    assert repr(genealogy).startswith("Genealogy(8 particles, 30 steps, ")
    with pytest.raises(InvalidRequest, match=r"end in \.svg"):
        genealogy.save(tmp_path / "run.png")


def test_tokens_that_nobody_spelled_are_their_numbers() -> None:
    result = runs.drawn(3, 2, dying=0.0)
    object.__setattr__(result, "_tokens", {})
    first = int(result.infos[0].token_ids[0])
    assert f"⟨{first}⟩" in result.genealogy().svg


def test_without_steps_there_is_no_genealogy() -> None:
    with pytest.raises(InvalidRequest, match="no steps"):
        Result(("a",), ((0,),), ("a",), np.zeros(1), math.nan).genealogy()
