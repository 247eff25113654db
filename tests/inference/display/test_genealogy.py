"""Genealogies: the tree is the one of the ancestors, and the picture holds it whole and legible."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from genrt.errors import InvalidRequest
from genrt.inference import Result
from genrt.inference.display.formatting import printable
from genrt.inference.display.genealogy import Lineage, Node, leaves_of, lineages_of
from tests import runs

EVERYTHING = 10_000
SVG = "{http://www.w3.org/2000/svg}"

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


def lineages(result: Result, most: int) -> list[Lineage]:
    leaves = leaves_of(result.infos)
    return lineages_of(result.infos, result.genealogy(lineages=most)._shown(leaves))


@pytest.mark.parametrize("name", RESULTS)
def test_the_lineages_are_those_of_the_ancestors_and_no_lines_cross(name: str) -> None:
    result = RESULTS[name]
    found = lineages(result, EVERYTHING)
    assert {each.path[-1]: each.end for each in found} == expected_leaves(result)
    owner: dict[Node, int] = {}
    for row, lineage in enumerate(found):
        assert [step for step, _ in lineage.path] == list(range(len(lineage.path)))
        for (_, before), (step, particle) in pairwise(lineage.path):
            assert before == result.infos[step].ancestors[particle]
        known, own = lineage.path[: -lineage.own], lineage.path[-lineage.own :]
        assert not set(own) & owner.keys()
        assert set(known) <= owner.keys()
        assert lineage.parent == (owner[known[-1]] if known else None)
        # Between a line and its parent's are lines that leave the same stem, there or later.
        for other in found[row if lineage.parent is None else lineage.parent : row]:
            assert other.path[: len(known)] == known
        owner |= dict.fromkeys(own, row)


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_choice_of_lineages_is_a_part_of_all(name: str, most: int) -> None:
    result = RESULTS[name]
    found, everything = lineages(result, most), lineages(result, EVERYTHING)
    assert {each.path for each in found} <= {each.path for each in everything}
    total = Counter(expected_leaves(result).values())
    shown = Counter(each.end for each in found)
    assert shown.total() == min(most, total.total())
    assert (shown["survived"] > 0) == (total["survived"] > 0)
    others = total["died"] + total["dropped"]
    assert most < 3 or not others or shown["died"] + shown["dropped"]


def test_distinct_texts_come_before_equal_ones() -> None:
    result = runs.drawn(6, 1, dying=0.0)
    [info] = result.infos
    object.__setattr__(info, "token_ids", np.array([[0], [0], [0], [1], [0], [2]]))
    object.__setattr__(info, "log_weights", np.array([0.0, -0.1, -0.2, -3.0, -0.3, -4.0]))
    assert [particle for _, particle in leaves_of(result.infos)["survived"]] == [0, 3, 5, 1, 2, 4]


def drawing(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def test_the_picture_has_every_token_in_its_column_and_every_text_in_a_title(
    tmp_path: Path,
) -> None:
    result = runs.run(tmp_path / "model")
    root = drawing(result.genealogy(lineages=EVERYTHING).svg)
    shown = sorted(span.text or "" for span in root.iter(f"{SVG}tspan"))
    nodes = {node for each in lineages(result, EVERYTHING) for node in each.path}
    drawn = [result.infos[step].token_ids[particle] for step, particle in nodes]
    assert len(shown) == sum((tokens != -1).any() for tokens in drawn)
    assert {"<script>&", r"\x1b[2J", r"\u202e", r"\xc3", "\N{OPEN BOX}" * 2, r"\n"} <= set(shown)
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    for text, log_weight in zip(result.texts, result.log_weights, strict=True):
        if log_weight > -math.inf:
            assert any(printable(text) in title for title in titles), text
    ends = Counter(group.get("class") for group in root.iter(f"{SVG}g"))
    for end, count in Counter(expected_leaves(result).values()).items():
        assert ends[end] == count
    marks = [path.get("class") for path in root.iter(f"{SVG}path")]
    assert marks.count("resampling") == sum(info.resampled for info in result.infos) > 0


def test_the_picture_of_a_long_run_is_of_bounded_width() -> None:
    root = drawing(runs.drawn(4, 2000, dying=0.0).genealogy().svg)
    assert float(root.get("width", "nan")) < 9000
    assert next(root.iter(f"{SVG}tspan"), None) is None  # no column has room for a token


@pytest.mark.parametrize("name", RESULTS)
def test_everything_is_inside_the_picture(name: str) -> None:
    genealogy = RESULTS[name].genealogy()
    root = drawing(genealogy.svg)
    wide, high = float(root.get("width", "nan")), float(root.get("height", "nan"))
    for element in root.iter():
        for key, limit in (("x", wide), ("cx", wide), ("y", high), ("cy", high)):
            assert 0 <= float(element.attrib.get(key, 0)) <= limit
    paths = " ".join(re.findall(r' d="([^"]*)"', genealogy.svg))
    for x, y in re.findall(r"[MC ]([\d.]+) ([\d.]+)", paths):
        assert float(x) <= wide
        assert float(y) <= high
    assert 'fill="#fff"' in genealogy.svg
    assert 'fill="#fff"' not in genealogy._repr_html_()
    assert 'color="currentColor"' in genealogy._repr_html_()
    assert re.fullmatch(r"Genealogy\(\d+ particles?, \d+ steps?, \d+ resampled\)", repr(genealogy))


def test_tokens_without_a_spelling_are_their_numbers() -> None:
    result = runs.drawn(3, 2, dying=0.0)
    object.__setattr__(result, "_tokens", {})
    first = int(result.infos[0].token_ids[0, 0])
    assert f"⟨{first}⟩" in result.genealogy().svg


def test_without_steps_there_is_no_genealogy_and_no_table_of_steps() -> None:
    result = Result(("a",), ((0,),), ("a",), np.zeros(1), math.nan)
    for show in (result.genealogy, lambda: result.to_pandas(steps=True)):
        with pytest.raises(InvalidRequest, match="no steps"):
            show()
