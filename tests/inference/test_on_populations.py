"""Inference on populations: the place of a text in the population of the step before, which a history
does not hold; on vLLM each step goes on by number.

``test_samplers.py`` has the same on the exact engine, for every algorithm.
"""

from __future__ import annotations

import asyncio
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
from genrt.constraints import regex
from genrt.engines.exact import NGram
from genrt.inference import SMC, Law, State, TextModel, importance_sampling
from genrt.inference.texts import TextTrace
from genrt.lm import AsyncLM
from genrt.populations import Population, draw_texts
from genrt.tokens.texts import Text
from tests.inside import engine_of, populations_of
from tests.keeping_engine import KeepingEngine, Seen

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


LAWS: list[list[dict[str, Any]]] = [
    [{"power": 2.0}],
    [{"power": 1.5}, {"power": 0.5, "temperature": 0.7}],
    [{"temperature": 2.0}, {"power": 3.0}, {}],
    [{"power": 1.5}, {"power": -0.5}],
]


@pytest.mark.parametrize("laws", LAWS)
@pytest.mark.parametrize("is_constrained", [False, True])
async def test_laws_of_one_runtime_go_on_by_number_and_draw_as_those_of_several(
    laws: list[dict[str, Any]], is_constrained: bool
) -> None:
    """Rows of other runtimes are multiplied elsewhere. A square is a product of two equal laws."""
    seen, runs = Seen(), []
    keeping = await genrt.aload(engine=lambda: KeepingEngine(NGRAM, seen), cache_bytes=0)
    async with keeping as lm, await genrt.aload(NGRAM, engine="exact") as other:
        apart = laws if len(laws) > 1 else [{}, {}]
        for runtimes, own in (([lm] * 3, laws), ([lm, other, other], apart)):
            prompts = [[0], [0], [1, 2]]
            factors = [
                Law(each, prompt, **way)
                for each, prompt, way in zip(runtimes, prompts, own, strict=False)
            ]
            constraint = regex("[ab]{1,7}", lm) if is_constrained else None
            model = TextModel(factors, max_tokens=6, constraint=constraint)
            by_number, flushes = seen.by_number, lm.statistics().engine.steps
            runs.append(result := await SMC(model, num_particles=12, resample_when=0.7).run(5))
            if runtimes[1] is lm:
                steps = len(result.infos)
                assert (seen.by_number - by_number, steps) == (steps - 1, steps)
                assert lm.statistics().engine.steps - flushes <= steps
    assert seen.wrong == []
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].log_weights == pytest.approx(runs[1].log_weights, abs=1e-5)
    assert runs[0].log_evidence == pytest.approx(runs[1].log_evidence, abs=1e-5)


async def test_a_draw_of_laws_leaves_populations_that_changed_meanwhile() -> None:
    async with await genrt.aload(NGRAM, engine="exact") as lm:
        pair, laws = [lm.population([[0], [1]]) for _ in range(2)], ((1.0, 1.0), (1.0, 2.0))
        asked = asyncio.ensure_future(
            draw_texts(pair, laws, masks=None, seed=1, where=[False, True])
        )
        await asyncio.sleep(0)
        pair[0].close()
        found = await asked
        assert found.token_ids.tolist()[0] == -1
        row = 3 * (await lm.next_token_logprobs([1]))
        assert found.log_mass.tolist() == pytest.approx([0.0, float(row.logsumexp(0))], abs=1e-5)
        pair[1].append(found.token_ids)
        assert (await pair[1].draw(where=[False, True])).token_ids.tolist()[1] >= 0


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
@pytest.mark.parametrize("laws", [1, 2])
async def test_steps_go_on_by_number_on_vllm(lm: AsyncLM, laws: int) -> None:
    """The first step finds its prompt; later ones look for no context, while particles part and meet."""
    went_on = continued(lm)
    law = [Law(lm, PROMPT), Law(lm, PROMPT[::-1], power=0.5)][:laws]
    smc = SMC(
        TextModel(law, max_tokens=20, stop=None), num_particles=16 // (2 * laws), resample_when=1.0
    )
    state, before = smc.init(0), lm.statistics().engine
    while not state.done:
        state, _ = await smc.step(state)
    assert went_on == [True] * 19
    after = lm.statistics().engine
    assert after.computed_tokens - before.computed_tokens < len(PROMPT) + 8 * 20
    del populations_of(engine_of(lm)).continue_population
