"""Trails: texts that are put together when read are those that were put together token by token."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.inference.trails import Frontier, Trail
from genrt.tokens.texts import Text

VOCABULARY = [b"a", b"", b"\xc3", b"\xa9", b"bc"]


@settings(deadline=None)
@given(st.data())
def test_a_trail_is_its_text(data: st.DataObject) -> None:
    """Trails that branch, and are read, copied and pickled in any order."""
    begun = Text((3,), b"x")
    trails: list[tuple[Trail, Text]] = [(Trail.of(Text()), Text()), (Trail.of(begun), begun)]
    for _ in range(data.draw(st.integers(0, 20))):
        trail, text = data.draw(st.sampled_from(trails))
        what = data.draw(st.sampled_from(["grow", "grow", "grow", "read", "end", "copy", "pickle"]))
        if what == "grow":
            token_id = data.draw(st.integers(0, len(VOCABULARY) - 1))
            finished = data.draw(st.booleans())
            longer = Text((*text.token_ids, token_id), text.bytes + VOCABULARY[token_id], finished)
            trails.append((Trail(trail, token_id, VOCABULARY[token_id], finished), longer))
        elif what == "read":
            assert trail.text == text
        elif what == "end":
            trails.append((trail.ended(), Text(text.token_ids, text.bytes, finished=True)))
        elif what == "copy":
            trails.append((copy.deepcopy(trail), text))
        else:
            trails.append((pickle.loads(pickle.dumps(trail)), text))  # noqa: S301
    for trail, text in trails:
        assert (trail.count, trail.finished) == (len(text.token_ids), text.finished)
        assert (trail.text, str(trail.text)) == (text, str(text))
        assert trail.text is trail.text


def test_a_long_trail_is_read_and_dropped() -> None:
    trail = Trail.of(Text())
    for _ in range(100_000):
        trail = Trail(trail, 0, b"a", False)
    longest = Trail(trail, 4, b"bc", True)
    assert len(longest.text) == 100_002
    del longest, trail


def test_copies_have_no_frontier() -> None:
    population: Any = object()
    trail = Trail(Trail.of(Text()), 0, b"a", False, Frontier(population), 3)
    assert trail.frontier is not None
    for each in (copy.copy(trail), copy.deepcopy(trail), pickle.loads(pickle.dumps(trail))):  # noqa: S301
        assert (each.frontier, each.text) == (None, trail.text)
    assert trail.frontier.population is population
