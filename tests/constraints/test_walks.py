"""Grammar states share matchers: whatever is done with other states, each says what it would alone."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.constraints import grammar, json_schema, products, regex
from genrt.errors import InvalidRequest
from tests.vocabularies import EOS, allowed, lm_over

LM = lm_over(
    b"a", b"b", b"ab", b"ba", b"aab", b"{", b"}", b'{"', b'"', b":", b": ", b"1", b"12", b" "
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["b", "ab"]}, "b": {"type": "integer", "maximum": 112}},
    "required": ["a"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "regex": regex("(ab|ba|a{3,5}b)*(1|12)?", LM),
    "ends early": regex("ab|abab", LM),
    "schema": json_schema(SCHEMA, LM, whitespace="flexible"),
    "lark": grammar('start: word (" " word)*\nword: "a"+ "b" | "b" word "a"', LM),
}


def alone(name: str, token_ids: tuple[int, ...]) -> tuple[list[int], bool]:
    """What a matcher of its own says after these tokens."""
    vocabulary = cast(Any, CONSTRAINTS[name])._rules.vocabulary
    matcher = cast(Any, CONSTRAINTS[name])._rules.matcher.deep_copy()
    assert all(map(matcher.consume_token, token_ids))
    is_accepting = matcher.is_accepting()
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    following = {i for i in range(1, len(vocabulary.tokens)) if bits >> i & 1}
    return sorted(following | ({EOS} if is_accepting else set())), is_accepting


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(CONSTRAINTS)), data=st.data())
def test_a_state_says_what_it_would_alone(name: str, data: st.DataObject) -> None:
    """States are advanced, advanced again, looked at and forgotten in any order."""
    held: list[tuple[tuple[int, ...], Any]] = [((), CONSTRAINTS[name].start())]
    for _ in range(data.draw(st.integers(1, 25))):
        place = data.draw(st.integers(0, len(held) - 1))
        token_ids, state = held[place]
        following, is_accepting = alone(name, token_ids)
        what = data.draw(
            st.sampled_from(["advance", "advance", "advance", "fill", "refuse", "forget"])
        )
        if what == "advance" and set(following) > {EOS}:
            token_id = data.draw(st.sampled_from([each for each in following if each != EOS]))
            held.append(((*token_ids, token_id), state.advance(token_id)))
        elif what == "fill":
            products.fill([each for _, each in held[place:]])
        elif what == "refuse":
            refused = data.draw(
                st.sampled_from(sorted({*range(LM.vocab_size)} - {*following} | {EOS}))
            )
            with pytest.raises(InvalidRequest):
                state.advance(refused)
        elif what == "forget" and place:
            del held[place]
        assert state.accepting == is_accepting
        assert (what == "forget") or allowed(state) == following
    for token_ids, state in held:
        assert (allowed(state), state.accepting) == alone(name, token_ids)


def test_a_text_that_only_grows_copies_no_matcher() -> None:
    states: list[Any] = [regex("[ab]*", LM).start()]
    for _ in range(20):
        states.append(states[-1].advance(1))
        products.fill(states[-1:])
    assert {state._walk for state in states} == {states[0]._walk}
    fork = states[7].advance(2)
    assert fork._walk is not states[0]._walk
    assert states[20].advance(1)._walk is states[20]._walk


def test_a_constraint_forgets_the_states_that_are_gone() -> None:
    start: Any = regex("[ab]*", LM).start()
    rules, held, state = start._rules, start.advance(1), start
    for _ in range(100):
        rules._most = 8
        state = state.advance(2)
        assert len(rules.states) <= 8
    assert start.advance(1) is held
    assert rules.states[b"a"]() is held


def test_threads_share_walks() -> None:
    """Each takes its own way from states that all hold, at once."""
    start = regex("[ab]{0,60}", LM).start()
    chain: list[Any] = [start]
    for _ in range(30):
        chain.append(chain[-1].advance(1))
    everyone, found = threading.Barrier(4), [list[Any]() for _ in range(4)]

    def use(own: list[Any], first: int) -> None:
        everyone.wait()
        for state in chain[first:]:
            after = state.advance(2)
            own += [allowed(after), allowed(after.advance(1 + first % 2))]

    threads = [threading.Thread(target=use, args=(own, i)) for i, own in enumerate(found)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(own) for own in found] == [62, 60, 58, 56]
    # a, b, ab, ba, aab, as far as there is room for them; the text may end.
    assert {tuple(each) for own in found for each in own} == {(EOS, 1, 2, 3, 4, 5)}
