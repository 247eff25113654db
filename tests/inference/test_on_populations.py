"""Inference on populations: the place of a text in the population of the step before, which a history
does not hold; on vLLM each step goes on by number.

``test_samplers.py`` has the same on the exact engine, for every algorithm.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import NGram
from genrt.inference import SMC, State, TextModel, importance_sampling
from genrt.inference.texts import Trail
from genrt.lm import AsyncLM
from genrt.populations import Population
from genrt.tokens.texts import Text
from tests.inside import engine_of, populations_of

NGRAM = NGram.random([b"a", b"b", b"ab", b"ba", b""], seed=3, zeros=0.1, eos_token_id=4)
PROMPT = [5, 6, 7, 8]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 2**25,
}


@pytest.fixture(scope="module")
def lm(llama: Path) -> Iterator[AsyncLM]:
    with genrt.load(str(llama), engine_options=OPTIONS, cache_bytes=0) as runtime:
        yield runtime


def populations_in(state: State) -> list[Population]:
    """The populations that a state's particles go on from."""
    frontiers = {id(each.trail.frontier): each.trail.frontier or [] for each in state.particles}
    return [population for frontier in frontiers.values() for population in frontier]


def told(state: State) -> tuple[list[tuple[int, ...]], list[float]]:
    return [each.token_ids for each in state.particles], state.log_weights.tolist()


async def test_a_history_holds_no_arrays() -> None:
    """Of all the states of a run only the last has a population; nor do particles that ended or died."""
    async with await genrt.aload(NGRAM, engine="exact") as lm:
        smc = importance_sampling(TextModel(lm, [0], max_tokens=12), num_particles=32)
        states, populations = [smc.init(0)], []
        async for state, _ in smc.steps(states[0]):
            states.append(state)
            populations += [weakref.ref(each) for each in populations_in(state)]
    gc.collect()
    assert len(populations) > 4
    assert len({id(each()) for each in populations} - {id(None)}) <= 1
    assert [len(populations_in(state)) for state in states[:-1]] == [0] * (len(states) - 1)


VOCABULARY = [b"a", b"", b"\xc3", b"\xa9", b"bc"]


@settings(deadline=None)
@given(st.data())
def test_a_trail_is_its_text(data: st.DataObject) -> None:
    """Trails that branch, and are read, copied and pickled in any order; a copy knows no place."""
    places: list[Any] = [object()]
    begun = Text((3,), b"x")
    trails: list[tuple[Trail, Text]] = [(Trail.of(Text()), Text()), (Trail.of(begun), begun)]
    for _ in range(data.draw(st.integers(0, 20))):
        trail, text = data.draw(st.sampled_from(trails))
        what = data.draw(st.sampled_from(["grow", "grow", "grow", "read", "end", "copy", "pickle"]))
        if what == "grow":
            token_id = data.draw(st.integers(0, len(VOCABULARY) - 1))
            finished = data.draw(st.booleans())
            longer = Text((*text.token_ids, token_id), text.bytes + VOCABULARY[token_id], finished)
            trails.append((Trail(trail, token_id, VOCABULARY[token_id], finished, places), longer))
        elif what == "read":
            assert trail.text == text
        elif what == "end":
            trails.append((trail.ended(), Text(text.token_ids, text.bytes, finished=True)))
        elif what == "copy":
            trails.append((copy.deepcopy(trail), text))
            assert trails[-1][0].frontier is None
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


# -- on vLLM ------------------------------------------------------------------------------------


def continued(lm: AsyncLM) -> list[bool]:
    """Which populations that were asked from now on went on by number."""
    engine = engine_of(lm)
    inner, found = populations_of(engine), []
    take = inner.continue_population

    def continue_population(*arguments: Any) -> Any:
        taken = take(*arguments)
        found.append(taken is not None)
        return taken

    inner.continue_population = continue_population
    return found


@pytest.mark.vllm
async def test_steps_go_on_by_number_on_vllm(lm: AsyncLM) -> None:
    """The first step finds its prompt; later ones look for no context, while particles part and meet."""
    went_on = continued(lm)
    smc = SMC(TextModel(lm, PROMPT, max_tokens=20, stop=None), num_particles=8, resample_when=1.0)
    state, before = smc.init(0), lm.statistics().engine
    while not state.done:
        state, _ = await smc.step(state)
    assert went_on == [True] * 19
    after = lm.statistics().engine
    assert after.computed_tokens - before.computed_tokens < len(PROMPT) + 8 * 20
    del populations_of(engine_of(lm)).continue_population
