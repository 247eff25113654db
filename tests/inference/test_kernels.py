"""Kernels and recipes on one model, in so many runs that small errors show; what each kernel does to a
state; error bars.

Most recipes are in ``test_algorithms.py``, on drawn models, and in ``test_wrong_variants.py``. These join
several parts.
"""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import genrt
from genrt.constraints import regex
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference import (
    SMC,
    Law,
    Program,
    Rejection,
    Sampler,
    State,
    TextModel,
    Trace,
    beam_search,
    branch,
    chain,
    extend,
    importance_sampling,
    keep,
    log_mean_exp,
    move,
    multinomial,
    optimal,
    partial,
    repeat,
    resample,
    resample_move,
    residual,
    reweight,
    stratified,
    systematic,
    tempered,
    without_replacement,
)
from genrt.lm import AsyncLM
from genrt.testing import assert_weighted_samples_from, exact_posterior
from genrt.tokens.texts import Text

PROMPT, OTHER = [0], [1]
MODEL = NGram.random([b"a", b"b", b"ab", b"ba", b""], seed=3, zeros=0.25, eos_token_id=4)
LENGTH = 4
RUNS = 400


@pytest.fixture
async def lm() -> AsyncIterator[AsyncLM]:
    async with await genrt.aload(MODEL, engine="exact") as runtime:
        yield runtime


def likes_b(text: Text) -> float:
    return 0.8 * text.bytes.count(b"b") - 3.2


def log_probability(prompt: list[int], ids: tuple[int, ...]) -> float:
    tokens = ids if len(ids) == LENGTH else (*ids, 4)
    rows = (MODEL.row([*prompt, *tokens[:place]]) for place in range(len(tokens)))
    return sum(float(row[token]) for row, token in zip(rows, tokens, strict=True))


def exact(lm: AsyncLM, *laws: tuple[list[int], float]) -> Any:
    """The target of these prompts and powers, and of what ``model`` has beside them."""

    def rest(text: Text) -> float:
        more = [power * log_probability(prompt, text.token_ids) for prompt, power in laws]
        return likes_b(text) + sum(more) - log_probability(PROMPT, text.token_ids)

    return exact_posterior(
        MODEL, PROMPT, max_tokens=LENGTH, constraint=regex("[ab]{1,5}", lm), potential=rest
    )


def model(lm: Any, runtime: AsyncLM, **more: Any) -> TextModel:
    options: dict[str, Any] = {"twist": likes_b, "potential": likes_b} | more
    constraint = regex("[ab]{1,5}", runtime)
    return TextModel(lm, max_tokens=LENGTH, constraint=constraint, **options)


def ramped(lm: AsyncLM) -> Sampler:
    """Power-SMC, as docs/guide/recipes.md has it: the power of prefixes rises to 2."""

    def log_twist(trace: Trace) -> float:
        present = 2.0 if trace.finished else min(2.0, 1.0 + 0.4 * trace.units)
        return (present / 2.0 - 1) * math.fsum(unit.log_target for unit in trace.path())

    async def ramp(state: State) -> State:
        def gains(traces: Any) -> Any:
            return [log_twist(each) - log_twist(each.cut(state.units - 1)) for each in traces]

        return await reweight(gains)(state)

    powered = model(Law(lm, PROMPT, power=2.0), lm)
    kernel = chain(resample(below=0.9), extend(powered), ramp)
    return Sampler(powered, kernel, num_particles=16)


RECIPES: dict[str, tuple[Callable[[AsyncLM], Any], list[tuple[list[int], float]]]] = {
    "a power, moved in units of two": (
        lambda lm: resample_move(
            model(Law(lm, PROMPT, power=2.0), lm, unit=2), num_particles=8, moves=1
        ),
        [(PROMPT, 2.0)],
    ),
    "a power by degrees": (ramped, [(PROMPT, 2.0)]),
    "another prompt proposes for two": (
        lambda lm: SMC(
            model(
                [Law(lm, PROMPT), Law(lm, PROMPT, power=0.5)],
                lm,
                proposal=Law(lm, PROMPT, temperature=1.5),
                unit=2,
            ),
            num_particles=4,
        ),
        [(PROMPT, 1.5)],
    ),
}


@pytest.mark.parametrize("name", RECIPES)
async def test_a_recipe_is_unbiased(name: str, lm: AsyncLM) -> None:
    make, laws = RECIPES[name]
    sampler, posterior = make(lm), exact(lm, *laws)
    results = await asyncio.gather(*(sampler.run(seed) for seed in range(RUNS)))
    assert len({result.texts for result in results}) > 10
    ratios = np.exp([result.log_evidence - posterior.log_evidence for result in results])
    error = ratios.std() / math.sqrt(RUNS)
    assert abs(ratios.mean() - 1) < 4 * error < 0.3
    assert_weighted_samples_from(
        [(result.token_ids, result.log_weights) for result in results],
        posterior.token_ids,
        log_evidence=posterior.log_evidence,
        highest=20 * posterior.evidence,
        level=1e-7,
    )


async def test_steering_without_replacement_ends_with_as_many_particles_as_it_began(
    lm: AsyncLM,
) -> None:
    sampler = without_replacement(model(Law(lm, PROMPT), lm), num_particles=3, branches=3)
    results = [await sampler.run(seed) for seed in range(20)]
    assert {len(each.values) for each in results if each.ess > 0} == {3}


async def test_adaptive_temperatures_reach_the_target(lm: AsyncLM) -> None:
    bare = model(Law(lm, PROMPT), lm, potential=None, twist=None)
    sampler, posterior = tempered(bare, likes_b, num_particles=400), exact(lm, (PROMPT, 1.0))
    result = await sampler.run(0)
    assert result.log_evidence == pytest.approx(posterior.log_evidence, abs=0.2)
    found: Counter[Any] = Counter()
    for ids, weight in zip(result.token_ids, result.weights, strict=True):
        found[ids] += weight
    apart = sum(abs(found[ids] - share) for ids, share in posterior.token_ids.items())
    assert apart / 2 < 0.15


async def test_a_potential_that_comes_in_by_degrees_is_asked_once_about_a_text(
    lm: AsyncLM,
) -> None:
    asked: Counter[Text] = Counter()

    def counted(text: Text) -> float:
        asked[text] += 1
        return likes_b(text)

    bare = model(Law(lm, PROMPT), lm, potential=None, twist=None)
    await tempered(bare, counted, num_particles=20, temperatures=[0.2, 0.5, 1.0]).run(0)
    assert len(asked) > 5
    assert set(asked.values()) == {1}


# -- what a kernel does -------------------------------------------------------------------------


async def grown(lm: AsyncLM, *, steps: int = 3, count: int = 6) -> State:
    smc = importance_sampling(model(Law(lm, PROMPT), lm), num_particles=count)
    state = smc.init(1)
    for _ in range(steps):
        state, _ = await smc.step(state)
    return state


async def test_branches_share_the_weight_and_keep_what_is_finished(lm: AsyncLM) -> None:
    state = await grown(lm)
    after = await branch(3)(state)
    assert 0 < len(state.unfinished) < 6
    assert len(after.particles) == 6 + 2 * len(state.unfinished)
    assert after.log_evidence == pytest.approx(state.log_evidence)
    assert Counter(after.ancestors.tolist()) == {
        place: 3 if place in state.unfinished else 1 for place in range(6)
    }


async def test_the_best_are_kept_once(lm: AsyncLM) -> None:
    state = await branch(3)(await grown(lm, count=12))
    best = await keep(4)(state)
    assert len({each.token_ids for each in best.particles}) == len(best.particles) == 4
    left = [
        weight
        for each, weight in zip(state.particles, state.log_weights, strict=True)
        if each.token_ids not in {kept.token_ids for kept in best.particles}
    ]
    assert min(best.log_weights) >= max(left)
    shortest = await keep(1, by=lambda traces: np.array([-each.count for each in traces]))(state)
    assert shortest.particles[0].count == min(each.count for each in state.particles)


async def test_a_beam_is_as_wide_as_it_says(lm: AsyncLM) -> None:
    result = await beam_search(model(Law(lm, PROMPT), lm), width=3, reward=likes_b).run(0)
    assert len(result.texts) == len(set(result.texts)) == 3
    assert [len(info.ancestors) for info in result.infos][1:] == [3] * (len(result.infos) - 1)
    assert math.isnan(result.log_evidence)
    assert "log evidence" not in str(result)


def length(text: Text) -> float:
    return 2.0 * len(text.token_ids)


async def test_a_beam_ranks_whole_weights(lm: AsyncLM) -> None:
    """With more branches it finds texts that are no worse; a text that ended early has no advantage."""
    found = []
    for branches in (1, 4, 16):
        options: dict[str, Any] = dict.fromkeys(["potential", "twist"], length)
        longer = TextModel(lm, PROMPT, max_tokens=6, **options)
        results = [
            await beam_search(longer, width=3, branches=branches).run(seed) for seed in range(20)
        ]
        found.append(np.mean([max(each.log_weights) for each in results]))
        for result in results:
            for ids, weight in zip(result.token_ids, result.log_weights, strict=True):
                assert weight == pytest.approx(2.0 * len(ids))
    assert found[0] <= found[1] <= found[2]
    assert found[2] > 11

    async def pair(p: Any) -> tuple[int, int]:
        return await p.choice([0, 1, 2]), await p.choice([0, 1, 2])

    several_values = await beam_search(Program(lm, pair), width=4, branches=6).run(0)
    assert len(several_values.values) == 4


async def test_a_law_without_mass_has_weight_0_also_when_another_proposes(lm: AsyncLM) -> None:
    even = NGram.random(MODEL.vocabulary, seed=50, eos_token_id=4)
    laws = [Law(lm, PROMPT, power=1.5), Law(lm, PROMPT, power=-0.5)]
    async with await genrt.aload(even, engine="exact") as other:
        runs = [
            await importance_sampling(
                TextModel(each, max_tokens=3, proposal=Law(other, PROMPT), unit=2),
                num_particles=60,
            ).run(0)
            for each in (laws, [Law(lm, PROMPT)])
        ]
        assert -math.inf in runs[0].log_weights
        assert runs[0].log_weights == pytest.approx(runs[1].log_weights)
        contrast = TextModel(
            [Law(other, PROMPT), Law(lm, PROMPT, power=-1.0)], max_tokens=3, proposal=other
        )
        with pytest.raises(InvalidRequest, match="infinite"):
            await SMC(contrast, num_particles=64).run(0)


async def test_a_history_says_what_moves_did_not_draw(lm: AsyncLM) -> None:
    """Followed back from a particle that was not moved, the tokens of the steps are its text."""
    result = await resample_move(model(Law(lm, PROMPT), lm), num_particles=40).run(1)
    checked = 0
    for place, ids in enumerate(result.token_ids):
        tokens: list[int] = []
        at, is_whole = place, result.log_weights[place] > -math.inf
        for info in reversed(result.infos):
            drawn = [each for each in info.token_ids[at].tolist() if each >= 0]
            tokens[:0], at = drawn, int(info.ancestors[at])
        is_whole &= tuple(tokens[: len(ids)]) == ids
        checked += is_whole
        assert 4 not in tokens[:-1]
    assert 0 < checked <= 40


async def test_a_last_step_is_made_once_and_a_change_of_size_leaves_no_error_bar(
    lm: AsyncLM,
) -> None:
    bare = model(Law(lm, PROMPT), lm, potential=None, twist=None)
    sampler = tempered(bare, likes_b, num_particles=20)
    state = sampler.init(0)
    while not sampler.is_done(state):
        state, _ = await sampler.step(state)
    after, _ = await sampler.step(state)
    assert (after.log_evidence, after.step) == (state.log_evidence, state.step + 1)
    kernel = chain(extend(bare), resample(multinomial, count=50))
    grown_up = await Sampler(bare, kernel, num_particles=4).run(0)
    assert len(grown_up.values) == 50
    assert math.isnan(grown_up.evidence_error)


class Noted(Trace):
    def __init__(self, before: Trace | None = None, note: str = "") -> None:
        super().__init__(before)
        self.note = note


def test_a_copy_of_a_trace_of_ones_own_has_all_of_it() -> None:
    trace = Noted(Noted(note="first"), "second")
    for each in (copy.copy(trace), pickle.loads(pickle.dumps(trace))):  # noqa: S301
        assert [each.note, each.units] == ["second", 1]
        assert [unit.note for unit in (each.cut(0), *each.path())] == ["first", "second"]


def rules_out_two(text: Text) -> float:
    return -math.inf if len(text.token_ids) == 2 else 0.0


async def test_a_twist_without_a_constraint_kills_at_dead_ends(lm: AsyncLM) -> None:
    ruled_out = TextModel(lm, PROMPT, max_tokens=3, twist=rules_out_two)
    deaths = (await importance_sampling(ruled_out, num_particles=20).run(0)).deaths
    assert deaths.max_tokens == 0 < deaths.dead_ends


async def test_a_new_target_changes_the_weights_alone(lm: AsyncLM) -> None:
    state = await grown(lm)

    def lengths(traces: Any) -> Any:
        return np.array([-0.5 * each.count for each in traces])

    after = await reweight(lengths)(state)
    assert after.particles == state.particles
    alive = state.log_weights > -math.inf
    expected = state.log_weights[alive] + lengths(np.array(state.particles, object)[alive])
    assert after.log_weights[alive].tolist() == expected.tolist()
    with pytest.raises(InvalidRequest, match="a log-weight for each"):
        await reweight(lambda traces: np.zeros(1 + len(traces)))(state)


async def test_a_kernel_has_the_randomness_of_its_place(lm: AsyncLM) -> None:
    """The same kernel twice in one step draws twice; the same step again draws the same."""
    state = await grown(lm, count=40)
    moves = repeat(move(model(Law(lm, PROMPT), lm)), 2)
    once, twice = await chain(move(model(Law(lm, PROMPT), lm)))(state), await moves(state)
    again = await moves(state)
    texts = [[each.token_ids for each in own.particles] for own in (state, once, twice, again)]
    assert texts[0] != texts[1] != texts[2] == texts[3]
    assert twice.log_weights.tolist() == state.log_weights.tolist()


async def test_a_pinned_particle_is_its_own_ancestor_and_the_others_are_independent() -> None:
    """Of 3,000 states: the pairs of the other two's ancestors have the product of the weights."""
    weights = np.array([0.2, 0.5, 0.3])
    pairs = Counter[tuple[int, int]]()
    kernel = resample(multinomial, below=1.0, pinned=True)
    for seed in range(3000):
        after = await kernel(State((Trace(),) * 3, np.log(weights), 0, seed))
        assert after.ancestors[0] == 0
        pairs[tuple(after.ancestors[1:].tolist())] += 1
    for (first, second), count in pairs.items():
        assert count / 3000 == pytest.approx(weights[first] * weights[second], abs=0.04)


def test_no_weight_is_drawn_twice_and_all_keep_their_mean() -> None:
    rng, total = np.random.default_rng(0), np.zeros(9)
    weights = np.array([5.0, 1, 1, 0.5, 0.5, 0.2, 0.1, 0.0, 3])
    with np.errstate(divide="ignore"):
        log_weights = np.log(weights)
    for _ in range(4000):
        ancestors, kept = optimal(rng, log_weights, 4)
        assert len({*ancestors.tolist()}) == 4
        np.add.at(total, ancestors, np.exp(kept) * 9 / 4)
        assert log_mean_exp(kept) == pytest.approx(log_mean_exp(log_weights))
    assert total / 4000 == pytest.approx(weights, rel=0.1)
    few, kept = optimal(rng, np.array([0.0, -math.inf, 1.0]), 4)
    assert len(few) == 4
    assert log_mean_exp(kept) == pytest.approx(log_mean_exp(np.array([0.0, -math.inf, 1.0])))


async def wrong(p: Any) -> None:
    pass


@pytest.mark.parametrize("scheme", [multinomial, stratified, systematic, residual, optimal])
def test_any_number_of_particles_comes_of_any_other(scheme: Any) -> None:
    rng, log_weights = np.random.default_rng(0), np.log(np.array([4.0, 1.0, 2.0, 1.0]))
    for count in (2, 4, 9):
        total = np.zeros(4)
        for _ in range(1500):
            found = scheme(rng, log_weights, count)
            ancestors, kept = (
                found if isinstance(found, tuple) else (found, np.full(count, math.log(2)))
            )
            assert len(ancestors) == count
            np.add.at(total, ancestors, np.exp(kept) / count)
        assert total / 1500 == pytest.approx(np.array([1.0, 0.25, 0.5, 0.25]), rel=0.15)


async def test_wrong_kernels_say_so(lm: AsyncLM) -> None:
    own = model(Law(lm, PROMPT), lm)
    with pytest.raises(InvalidRequest, match="independent ancestors"):
        resample(systematic, pinned=True)
    with pytest.raises(InvalidRequest, match="from 0 to 1"):
        resample(below=2.0)
    with pytest.raises(InvalidRequest, match="keeps the number"):
        resample(partial, count=3)
    with pytest.raises(InvalidRequest, match="give a TextModel"):
        beam_search(Program(lm, wrong), width=2, reward=likes_b)
    with pytest.raises(InvalidRequest, match="a resampler"):
        resample("systematic")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="kernel"):
        Sampler(own, "extend", num_particles=2)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="rising"):
        tempered(own, likes_b, num_particles=2, temperatures=[0.5, 0.4, 1.0])
    with pytest.raises(InvalidRequest, match="their own prompts"):
        TextModel(Law(lm, PROMPT), PROMPT, max_tokens=2)
    with pytest.raises(InvalidRequest, match="positive power"):
        TextModel(Law(lm, PROMPT, power=-1.0), max_tokens=2)
    with pytest.raises(InvalidRequest, match="one law of power 1"):
        Rejection(model(Law(lm, PROMPT, power=2.0), lm), num_samples=1, max_texts=1)
    with pytest.raises(InvalidRequest, match="but 0"):
        Law(lm, PROMPT, power=0.0)
    for size in (1e-31, -1e31):
        with pytest.raises(InvalidRequest, match="power is"):
            Law(lm, PROMPT, power=size)
    assert (MODEL.row([3]) == -math.inf).any()
    zeros = [Law(lm, [each], power=-1.0) for each in range(5)]
    contrast = TextModel([Law(lm, PROMPT), *zeros], max_tokens=LENGTH)
    with pytest.raises(InvalidRequest, match="infinite"):
        await importance_sampling(contrast, num_particles=64).run(0)
