"""SMC: deaths, states and infos, questions, posteriors.

The laws of all algorithms are in ``test_algorithms.py`` and ``test_samplers.py``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.constraints import ConstraintState, predicate, regex
from genrt.engines.exact import NGram
from genrt.errors import ContextTooLong, InvalidRequest
from genrt.inference import (
    SMC,
    BestOfN,
    Deaths,
    Execution,
    MetropolisHastings,
    Program,
    Result,
    State,
    TextModel,
    effective_sample_size,
    log_mean_exp,
)
from genrt.lm import AsyncLM
from tests.inference.test_samplers import figures

PROMPT = [0]
EOS = 4
MODEL = NGram.random([b"a", b"b", b"ab", b"ba", b""], seed=3, zeros=0.25, eos_token_id=EOS)
"""Several tokenizations of one text, tokens that never follow others, and so dead ends."""


def smc_of(lm: AsyncLM, prompt: Any, **options: Any) -> SMC:
    """SMC for a text model, with the options of both."""
    names = ("num_particles", "resample_when", "resample")
    algorithm = {name: options.pop(name) for name in names if name in options}
    return SMC(TextModel(lm, prompt, **options), **algorithm)


# -- dead ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["x", "(ab){9,}", r"[^\d\D]"])
@pytest.mark.parametrize("resample_when", [0.0, 1.0])
async def test_a_run_whose_particles_all_die_says_so(pattern: str, resample_when: float) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        smc = smc_of(
            lm,
            PROMPT,
            num_particles=5,
            max_tokens=4,
            constraint=regex(pattern, lm),
            resample_when=resample_when,
        )
        result = await smc.run(0)
        assert result.log_evidence == -math.inf
        assert result.ess == 0
        assert result.posterior() == []
        assert result.log_weights.tolist() == [-math.inf] * 5
        dead = State(smc.init(0).particles, result.log_weights, 1, 0)
        asked = lm.statistics().batcher.questions
        after, info = await smc.step(dead)
        assert dead.done
        assert after.log_weights.tolist() == dead.log_weights.tolist()
        assert (info.unfinished, info.resampled) == (0, False)
        assert lm.statistics().batcher.questions == asked


def one_token_and_no_end(text: Any) -> bool:
    return len(text.token_ids) < 2 and not text.finished


async def observed(p: Execution) -> None:
    await p.sample([0])
    p.observe(-math.inf)
    await p.sample([0])


DEATHS: dict[str, tuple[Callable[[AsyncLM], Any], tuple[int, int, int], str]] = {
    "too long": (
        lambda lm: {"max_tokens": 4, "constraint": regex("[ab]{9,}", lm)},
        (6, 0, 0),
        "Every particle died: 6 at max_tokens (raise it, or see stop=)",
    ),
    "a dead end": (
        lambda lm: {"max_tokens": 4, "constraint": regex(r"[^\d\D]", lm)},
        (0, 6, 0),
        "Every particle died: 6 at dead ends",
    ),
    "a late dead end": (
        lambda lm: {"max_tokens": 6, "constraint": predicate(one_token_and_no_end, lm)},
        (0, 6, 0),
        "Every particle died: 6 at dead ends",
    ),
    "too long, without an end token": (
        lambda lm: {"max_tokens": 4, "constraint": regex("[ab]{9,}", lm), "stop": None},
        (6, 0, 0),
        "Every particle died: 6 at max_tokens (raise it, or see stop=)",
    ),
    "a potential": (
        lambda lm: {"max_tokens": 2, "potential": lambda text: -math.inf},
        (0, 0, 6),
        "Every particle died: 6 by the potential",
    ),
    "alive": (lambda lm: {"max_tokens": 2}, (0, 0, 0), "  value\n"),
}


@pytest.mark.parametrize("sampler", [SMC, BestOfN])
@pytest.mark.parametrize("name", DEATHS)
async def test_a_result_counts_why_particles_died(name: str, sampler: Any) -> None:
    make, deaths, message = DEATHS[name]
    with genrt.load(MODEL, engine="exact") as lm:
        model = TextModel(lm, PROMPT, **make(lm))
        count = {"n": 6} if sampler is BestOfN else {"num_particles": 6}
        result = await sampler(model, **count).run(0)
    assert (result.deaths.max_tokens, result.deaths.dead_ends, result.deaths.potential) == deaths
    assert sum(deaths) in (0, 6)
    assert message in str(result)


async def test_a_program_dies_at_dead_ends_and_some_deaths_are_no_end() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        result = await SMC(Program(lm, observed), num_particles=6).run(0)
        some = await smc_of(
            lm, PROMPT, num_particles=40, max_tokens=4, constraint=regex("(a|b)*b", lm)
        ).run(0)
    assert result.deaths == Deaths(dead_ends=6)
    dead = int((some.log_weights == -math.inf).sum())
    assert 0 < dead < 40
    assert some.deaths == Deaths(max_tokens=dead)
    assert f"{40 - dead} of them alive; died: {dead} at max_tokens" in str(some)


@pytest.mark.parametrize("resample_when", [0.0, 1.0])
async def test_the_dead_are_not_asked_about_and_have_no_children(resample_when: float) -> None:
    after_any = [0.3, 0.3, 0.3, 0.1]
    model = NGram(
        [b"a", b"b", b"c", b""],
        torch.tensor([after_any, after_any, [0.0, 0.0, 1.0, 0.0], after_any]).log(),
        eos_token_id=3,
    )
    with genrt.load(model, engine="exact") as lm:
        smc = smc_of(
            lm,
            PROMPT,
            num_particles=32,
            max_tokens=7,
            constraint=regex("(a|b|c[ab]){3,5}", lm),
            resample_when=resample_when,
        )
        state, died = smc.init(0), 0
        while not state.done:
            before, asked = state, lm.statistics().batcher.questions
            state, info = await smc.step(state)
            dead = np.flatnonzero(before.log_weights == -math.inf)
            died += len(dead)
            assert info.resampled == (before.ess < resample_when * 32)
            assert not (info.resampled and set(info.ancestors) & set(dead))
            extended = sum(
                not before.particles[ancestor].finished and before.log_weights[ancestor] > -math.inf
                for ancestor in info.ancestors
            )
            assert lm.statistics().batcher.questions - asked == extended
        assert died > 0
        assert state.log_evidence > -math.inf


# -- what a run promises ----------------------------------------------------------------------


def an_smc(lm: AsyncLM, **options: Any) -> SMC:
    options = {"num_particles": 16, "max_tokens": 6, "resample_when": 0.9} | options
    return smc_of(lm, PROMPT, constraint=regex("(a|b){3,5}b", lm), **options)


async def test_states_and_infos_tell_what_happened() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        smc = an_smc(lm)
        before = smc.init(5)
        resampled = 0
        async for state, info in smc.steps(smc.init(5)):
            resampled += info.resampled
            assert info.resampled == (before.ess < 0.9 * 16)
            assert info.step == before.step == state.step - 1
            assert info.unfinished == len(state.unfinished)
            assert info.ess == state.ess == effective_sample_size(state.log_weights)
            assert info.log_evidence == state.log_evidence == log_mean_exp(state.log_weights)
            base = np.full(16, before.log_evidence) if info.resampled else before.log_weights
            assert state.log_weights.tolist() == (base + info.log_increments).tolist()
            if not info.resampled:
                assert info.ancestors.tolist() == list(range(16))
            for particle, ancestor in zip(state.particles, info.ancestors, strict=True):
                parent = before.particles[ancestor]
                assert particle.token_ids[: len(parent.token_ids)] == parent.token_ids
                assert len(particle.token_ids) - len(parent.token_ids) in (0, 1)
                assert particle.finished >= parent.finished
            before = state
        assert resampled > 0
        assert before.done


@pytest.mark.parametrize(("count", "is_due"), [(4, False), (32, True)])
async def test_resampling_is_due_by_the_number_of_particles_that_there_are(
    count: int, is_due: bool
) -> None:
    """Not by the number that the run began with: a caller may keep fewer, or branch."""
    with genrt.load(MODEL, engine="exact") as lm:
        smc = SMC(TextModel(lm, PROMPT, max_tokens=4), num_particles=16)
        state, _ = await smc.step(smc.init(0))
        weights = np.zeros(count)
        weights[12:] = -50.0
        other = State((state.particles * 2)[:count], weights, state.step, state.seed)
        assert other.ess == pytest.approx(min(count, 12))
        _, info = await smc.step(other)
    assert info.resampled == is_due
    assert len(info.ancestors) == count


async def test_a_step_is_one_question_for_each_distinct_prefix() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        smc = smc_of(lm, PROMPT, num_particles=64, max_tokens=4)
        prefixes = set()
        state = smc.init(0)
        while not state.done:
            prefixes |= {state.particles[index].token_ids for index in state.unfinished}
            state, _ = await smc.step(state)
        statistics = lm.statistics()
    assert statistics.engine.rows == len(prefixes)
    assert statistics.batcher.flushes == state.step


class Failing:
    """A constraint that breaks at its third token."""

    accepting = False

    def __init__(self, left: int = 3) -> None:
        self.left = left

    def start(self) -> Failing:
        return self

    def mask(self) -> torch.Tensor:
        if not self.left:
            raise InvalidRequest("the third token")
        return torch.tensor([True, True, True, True, False])

    def advance(self, token_id: int) -> ConstraintState:
        return Failing(self.left - 1)


async def test_a_failing_constraint_fails_its_run_alone() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        failing = smc_of(lm, PROMPT, num_particles=4, max_tokens=6, constraint=Failing())
        expected = await an_smc(lm).run(0)
        failed, ran = await asyncio.gather(
            failing.run(0), an_smc(lm).run(0), return_exceptions=True
        )
        assert isinstance(failed, InvalidRequest)
        assert str(failed) == "the third token"
        assert isinstance(ran, Result)
        assert figures(ran) == figures(expected)


def test_a_posterior_adds_up_equal_texts_and_leaves_out_the_dead() -> None:
    result = Result(
        texts=("b", "a", "c", "a", "d"),
        token_ids=((),) * 5,
        values=("b", "a", "c", "a", "d"),
        log_weights=np.log([2.0, 1.0, 4.0, 3.0, 1.0]) - np.array([900.0] * 4 + [math.inf]),
        log_evidence=-900.0,
    )
    texts, weights = zip(*result.posterior(), strict=True)
    assert texts == ("a", "c", "b")
    assert weights == pytest.approx((0.4, 0.4, 0.2))
    for distinct in (1, 2, 7, 1000):  # sums are exact, so that weights add up to 1
        log_weights = np.random.default_rng(distinct).normal(size=1000) * 2 - 800
        values = tuple(f"{place % distinct}" for place in range(1000))
        posterior = Result(values, ((),) * 1000, values, log_weights, -800.0).posterior()
        assert len(posterior) == distinct
        assert math.fsum(weight for _, weight in posterior) == pytest.approx(1, abs=2**-52, rel=0)


# -- wrong use --------------------------------------------------------------------------------


async def test_the_longest_context_is_the_models() -> None:
    with genrt.load(MODEL, engine="exact", engine_options={"max_model_len": 8}) as lm:
        assert len((await smc_of(lm, [0] * 5, num_particles=2, max_tokens=4).run(0)).texts) == 2
        with pytest.raises(ContextTooLong, match="context of 9"):
            smc_of(lm, [0] * 5, num_particles=2, max_tokens=5)


async def test_a_constraint_needs_an_end_token() -> None:
    endless = NGram.random([b"a", b"b"])
    with genrt.load(endless, engine="exact") as lm:
        with pytest.raises(InvalidRequest, match="end token"):
            smc_of(lm, PROMPT, num_particles=2, max_tokens=2, constraint=Failing())
        result = await smc_of(lm, PROMPT, num_particles=2, max_tokens=3).run(0)
    assert [len(token_ids) for token_ids in result.token_ids] == [3, 3]


@pytest.mark.parametrize(
    "rule", [lambda state: None, lambda state: "no", lambda state: np.array([1, 0])]
)
def test_a_rule_that_gives_no_truth_value_is_refused(rule: Any) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        smc = SMC(TextModel(lm, PROMPT, max_tokens=2), num_particles=2, resample_when=rule)
        with pytest.raises(InvalidRequest, match=r"the rule gave a .*: give a rule that returns"):
            smc.run_sync(0)


@pytest.mark.parametrize("chosen", [[[0], [0, 1]], ([0, 1], "ab"), ([0, 1], [None, 0]), None, {}])
def test_a_resampler_that_gives_no_ancestors_is_refused(chosen: Any) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        smc = SMC(
            TextModel(lm, PROMPT, max_tokens=2),
            num_particles=2,
            resample_when=lambda state: True,
            resample=lambda rng, log_weights: chosen,
        )
        with pytest.raises(InvalidRequest, match="the resampler gave"):
            smc.run_sync(0)


class Wrong:
    """A model that says something else of its first trace than it should."""

    max_steps = 2

    def __init__(self, lm: AsyncLM, gain: float | None) -> None:
        self._model, self._gain = TextModel(lm, PROMPT, max_tokens=2), gain

    def start(self) -> Any:
        return self._model.start()

    async def extend(self, traces: Sequence[Any], seed: int) -> list[Any]:
        first, *others = await self._model.extend(traces, seed)
        if self._gain is None:
            return others
        first.log_weight = self._gain
        return [first, *others]

    def text(self, trace: Any) -> str:
        return self._model.text(trace)

    def value(self, trace: Any) -> Any:
        return self._model.value(trace)


@pytest.mark.parametrize(
    ("gain", "message"),
    [(math.nan, "gained nan"), (math.inf, "gained inf"), (None, "made 2 of 3 traces")],
)
@pytest.mark.parametrize("name", ["SMC", "Metropolis-Hastings"])
def test_every_algorithm_refuses_what_a_wrong_model_gives(
    name: str, gain: float | None, message: str
) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        wrong = Wrong(lm, gain)
        algorithm: Any = SMC(wrong, num_particles=3)
        if name != "SMC":
            algorithm = MetropolisHastings(wrong, num_chains=3, num_steps=2)
        with pytest.raises(InvalidRequest, match=message):
            algorithm.run_sync(0)


def test_a_model_without_a_runtime_has_no_statistics() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        result = SMC(Wrong(lm, 0.0), num_particles=3).run_sync(0)
    assert result.statistics is None
