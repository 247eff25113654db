"""Grammars in EBNF with rules that derive nothing: no mask leads to a prefix of no text.

The oracle, ``Derivations``, says of a text by the definition whether it is one of the grammar's or the
beginning of one: least sets of where a derivation that starts somewhere in the text can end.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from genrt.constraints import grammar
from genrt.errors import InvalidConstraint
from tests.vocabularies import led_to, lm_over, spelt

Node: TypeAlias = tuple[Any, ...]
Rules: TypeAlias = list[Node]

NAMES = ["root", "b-b", "C", "d"]
BEYOND = -1
"""Where a derivation is that has gone past the end of the text."""


class Derivations:
    """What derives from rules, of a text and of whatever may follow it."""

    def __init__(self, rules: Rules, text: str) -> None:
        self.rules = rules
        self.text = text
        self.ends: dict[tuple[int, int], set[int]] = {}
        grown = True
        while grown:
            before = sum(map(len, self.ends.values()))
            for rule, body in enumerate(rules):
                for start in (*range(len(text) + 1), BEYOND):
                    self.ends.setdefault((rule, start), set()).update(self.after(body, start))
            grown = before < sum(map(len, self.ends.values()))

    def after(self, node: Node, start: int) -> set[int]:
        match node:
            case ("letter", letter):
                if letter == "":
                    return set()
                if start in (BEYOND, len(self.text)):
                    return {BEYOND}
                return {start + 1} if self.text[start] == letter else set()
            case ("rule", rule):
                return self.ends.get((rule, start), set())
            case ("one of", *nodes):
                return {end for each in nodes for end in self.after(each, start)}
            case ("all of", *nodes):
                return self.through(nodes, {start})
            case ("times", inner, low, high):
                ends = reached = self.through([inner] * low, {start})
                for _ in range(len(self.text) + 2 if high is None else high - low):
                    reached = self.through([inner], reached)
                    ends = ends | reached
                return ends
        raise AssertionError(node)

    def through(self, nodes: list[Node], starts: set[int]) -> set[int]:
        for node in nodes:
            starts = {end for start in starts for end in self.after(node, start)}
        return starts

    @property
    def is_text(self) -> bool:
        return len(self.text) in self.ends[0, 0]

    @property
    def is_prefix(self) -> bool:
        return self.is_text or BEYOND in self.ends[0, 0]


TIMES = {
    (0, 1): "?",
    (0, None): "*",
    (1, None): "+",
    (2, 2): "{2}",
    (0, 2): "{0,2}",
    (1, 3): "{1,3}",
}


def written(node: Node) -> str:
    match node:
        case ("letter", ""):
            return "[^\\x00-\\U0010FFFF]"
        case ("letter", letter):
            return f'"{letter}"'
        case ("rule", rule):
            return NAMES[rule]
        case ("one of", *nodes):
            return f"({' | '.join(map(written, nodes))})"
        case ("all of", *nodes):
            return f"({' '.join(map(written, nodes))})" if nodes else '""'
        case ("times", inner, low, high):
            return f"({written(inner)}){TIMES[low, high]}"
    raise AssertionError(node)


def text_of(rules: Rules) -> str:
    return "\n".join(
        f"{head} ::= {written(body)[1:-1] if body[0] == 'one of' else written(body)}"
        for head, body in zip(NAMES, rules, strict=False)
    )


def nodes(number: int) -> st.SearchStrategy[Node]:
    leaf = st.sampled_from(
        [
            *(("letter", letter) for letter in ("a", "b", "")),
            *(("rule", i) for i in range(number)),
            *(("all of", ("letter", "a"), ("rule", i)) for i in range(number)),
        ]
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda each: ("one of", *each)),
            st.lists(inner, max_size=3).map(lambda each: ("all of", *each)),
            st.tuples(inner, st.sampled_from(sorted(TIMES, key=str))).map(
                lambda each: ("times", each[0], *each[1])
            ),
        ),
        max_leaves=5,
    )


grammars = st.integers(1, 4).flatmap(lambda n: st.lists(nodes(n), min_size=n, max_size=n))


@settings(deadline=None, max_examples=120)
@given(rules=grammars)
@example([("one of", ("letter", "b"), ("all of", ("letter", "a"), ("rule", 0)))])
@example([("one of", ("letter", "b"), ("rule", 1)), ("all of", ("letter", "a"), ("rule", 1))])
def test_masks_lead_to_the_prefixes_of_texts_and_nowhere_else(rules: Rules) -> None:
    lm = lm_over(b"a", b"b")
    text = text_of(rules)
    if not Derivations(rules, "").is_prefix:
        with pytest.raises(InvalidConstraint, match="derives no text"):
            grammar(text, lm, syntax="ebnf")
        return
    prefixes, whole = asyncio.run(led_to(grammar(text, lm, syntax="ebnf"), 4))
    texts = {""} | {spelt(lm, ids).decode() for ids in prefixes}
    every = {shorter + letter for shorter in texts if len(shorter) < 4 for letter in "ab"} | {""}
    derivations = {text: Derivations(rules, text) for text in every}
    assert texts == {text for text in every if derivations[text].is_prefix}
    assert {spelt(lm, ids).decode() for ids in whole} == {
        text for text in every if derivations[text].is_text
    }


def test_a_grammar_of_nothing_is_refused_by_the_names_of_its_rules() -> None:
    lm = lm_over(b"a")
    for text in (
        'root ::= "a" Item-x\nItem-x ::= "b" Item-x',
        "root ::= root Item-x\nItem-x ::= Item-x",
    ):
        with pytest.raises(
            InvalidConstraint, match=r"each alternative of 'root', 'Item-x' leads back"
        ):
            grammar(text, lm, syntax="ebnf")
    with pytest.raises(InvalidConstraint, match=r"'root', 'a', 'b', 'c', … leads back"):
        grammar("root ::= a\na ::= b\nb ::= c\nc ::= d\nd ::= a", lm, syntax="ebnf")


def test_a_grammar_beyond_the_limits_is_refused_at_the_call() -> None:
    lm = lm_over(b"a")
    words = " | ".join(f'"{i:06}"' for i in range(12_000))
    with pytest.raises(InvalidConstraint, match="more than 65,000 rules, groups and terminals"):
        grammar(f"root ::= {words}", lm, syntax="ebnf")
    with pytest.raises(InvalidConstraint, match=r"has 200,\d+ parts, and 200,000 is the most"):
        grammar("start: " + '"a" ' * 200_000, lm)
    deep = "(" * 40 + '"a"' + ")" * 40
    with pytest.raises(InvalidConstraint, match="too deeply nested"):
        grammar(f"start: {deep}", lm)
    with pytest.raises(InvalidConstraint, match="too deeply nested"):
        grammar(f"root ::= {'(' * 40_000}{')' * 40_000}", lm, syntax="ebnf")
