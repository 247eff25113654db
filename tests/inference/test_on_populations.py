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
from genrt.inference.texts import TextTrace
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
    kept = {id(each.populations): each.populations or [] for each in state.particles}
    return [population for own in kept.values() for several in own for population in several]


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
def test_a_trace_is_its_text(data: st.DataObject) -> None:
    """Traces that branch, and are read, copied and pickled in any order; a copy knows no place."""
    places: list[Any] = [object()]
    begun = Text((3,), b"x")
    traces: list[tuple[TextTrace, Text]] = [
        (TextTrace(), Text()),
        (TextTrace(text=begun), begun),
    ]
    for _ in range(data.draw(st.integers(0, 20))):
        trace, text = data.draw(st.sampled_from(traces))
        what = data.draw(st.sampled_from(["grow", "grow", "grow", "read", "end", "copy", "pickle"]))
        if what == "grow":
            token_id = data.draw(st.integers(0, len(VOCABULARY) - 1))
            longer = Text((*text.token_ids, token_id), text.bytes + VOCABULARY[token_id])
            grown = TextTrace(trace, (token_id,), VOCABULARY[token_id])
            grown.populations = places
            traces.append((grown, longer))
        elif what == "read":
            assert trace.generated == text
        elif what == "end":
            ended = TextTrace(trace, (4,), finished=True, is_end=True)
            assert ended.generated == Text(text.token_ids, text.bytes, finished=True)
        else:
            copied = copy.copy(trace) if what == "copy" else pickle.loads(pickle.dumps(trace))  # noqa: S301
            assert (copied.populations, copied.units) == (None, trace.units)
            traces.append((copied, text))
    for trace, text in traces:
        assert (trace.count, trace.finished) == (len(text.token_ids), text.finished)
        assert (trace.generated, trace.token_ids) == (text, text.token_ids)
        assert trace.generated is trace.generated
        for units in range(trace.units):
            assert trace.cut(units).units == units


def test_a_long_trace_is_read_pickled_and_dropped() -> None:
    trace = TextTrace()
    for _ in range(100_000):
        trace = TextTrace(trace, (0,), b"a")
    assert len(pickle.loads(pickle.dumps(trace)).token_ids) == 100_000  # noqa: S301
    longest = TextTrace(trace, (4,), b"bc", finished=True)
    assert len(longest.generated) == 100_002
    del longest, trace


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
