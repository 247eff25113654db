"""vLLM's rows by extending, forking and backtracking, under eviction, against transformers'.

The index of resident sequences alone is in ``test_residency_machine.py``.
"""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.engines.vllm.runners import RunnerV1
from genrt.engines.vllm.steps import MISSES, RETRY
from genrt.lm import AsyncLM
from genrt.tokens.sampling import BatchDraw
from genrt.tokens.texts import Text
from tests.apart import drawn_apart_sync
from tests.engines.vllm.small import (
    TOLERANCE,
    Oracle,
    begin,
    expect_rows,
    failing,
    forget,
    load,
    runner_of,
)

pytestmark = pytest.mark.vllm

SMC_TOLERANCE = 1e-3
"""Of the logarithm of a product of twelve masses."""
BOTH = pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
"""Steps are prepared ahead, as they are on GPUs, and not, as on CPUs."""
Drawing = Callable[..., BatchDraw]


def walk(seed: int, vocab_size: int, *, steps: int) -> list[list[list[int]]]:
    """The contexts of each step of particles that grow, jump, fork, are cut back and edited."""
    choose = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [choose.randrange(vocab_size) for _ in range(count)]

    population = [tokens(40) for _ in range(6)]
    flushes = []
    for _ in range(steps):
        children = []
        for parent in population:
            kind = choose.random()
            if kind < 0.6:
                children.append([*parent, *tokens(1)])
            elif kind < 0.7:
                children.append([*parent, *tokens(choose.randrange(1, 40))])
            elif kind < 0.8:
                children.append(parent[: max(1, len(parent) - choose.randrange(1, 30))])
            elif kind < 0.9:
                children.append([*parent[:-5], *tokens(5)])
            else:
                children.append([*choose.choice(population), *tokens(1)])
        if choose.random() < 0.5:
            children += [[*choose.choice(population), *tokens(1)] for _ in range(4)]
        population = [child[:380] for child in children[:12]]
        flushes.append(population)
    return flushes


def check(lm: AsyncLM, flushes: Sequence[Sequence[Sequence[int]]], oracle: Oracle) -> None:
    """Ask for each flush by questions of its own; the rows are the model's."""

    async def ask(flush: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return await asyncio.gather(*(lm.next_token_logprobs(context) for context in flush))

    for flush in flushes:
        expect_rows(oracle, flush, asyncio.run(ask(flush)))


def as_a_batch(lm: AsyncLM, contexts: Sequence[Sequence[int]], **options: Any) -> BatchDraw:
    return lm.batch_draw_sync(contexts, **options)


@pytest.mark.promise(number=3)
@pytest.mark.promise(number=4)
def test_rows_by_residents_are_right_with_room_and_under_eviction(
    roomy: AsyncLM, tight: AsyncLM, oracle: Oracle
) -> None:
    for lm, ahead in ((roomy, True), (roomy, False), (tight, True), (tight, False)):
        begin(lm, ahead=ahead)
        before = lm.statistics().engine
        check(lm, walk(5 + ahead, 320, steps=12), oracle)
        after = lm.statistics().engine
        assert after.extended - before.extended > 30
        assert after.forked - before.forked > 4
        assert (after.evicted > before.evicted) == (lm is tight)


@BOTH
def test_a_population_s_steps_are_right_and_prepared_where_they_can_be(
    roomy: AsyncLM, oracle: Oracle, ahead: bool
) -> None:
    """Twelve particles that only grow, over the edges of blocks; that are resampled; half of which stop;
    one of which is cut back, and one of which has another length than the rest when it is copied."""
    begin(roomy, ahead=ahead)
    choose, began = random.Random(7), roomy.statistics().engine

    def prepared() -> int:
        return roomy.statistics().engine.prepared - began.prepared

    def step(particles: list[list[int]]) -> list[list[int]]:
        particles = [[*particle, choose.randrange(320)] for particle in particles]
        expect_rows(oracle, particles, roomy.batch_next_token_logprobs_sync(particles))
        return particles

    particles = step([[choose.randrange(320) for _ in range(60)] for _ in range(12)])
    first = roomy.statistics().engine
    for _ in range(9):
        particles = step(particles)
    # All but three, after which it is seen to go on.
    assert prepared() == (7 if ahead else 0)
    for _ in range(4):
        particles = step([choose.choice(particles) for _ in particles])
    assert prepared() == (11 if ahead else 0)
    resampled = roomy.statistics().engine
    assert resampled.forked > began.forked
    assert resampled.resident == 12  # a fork takes over the request of one that nothing came from
    assert resampled.computed_tokens - first.computed_tokens == resampled.rows - first.rows
    assert resampled.steps - first.steps == 13
    particles = step(particles[:6]) + particles[6:]
    particles = step(particles)
    particles = step([particles[0][:-20], *particles[1:]])
    for _ in range(3):
        particles = step([particles[0], particles[0], *particles[2:]])
    for _ in range(4):
        particles = step(particles)
    assert len(particles[2]) > len(particles[0])
    # A step is prepared for the shorter one, whose request goes on as the longer one.
    particles = step([particles[2], *particles[1:]])
    assert prepared() > 11 or not ahead
    assert roomy.statistics().engine.failed == began.failed


@BOTH
@pytest.mark.parametrize("drawing", [drawn_apart_sync, as_a_batch])
def test_what_was_drawn_is_computed_before_it_is_asked_and_never_mistaken_for_something_else(
    roomy: AsyncLM, oracle: Oracle, ahead: bool, drawing: Drawing
) -> None:
    """Ten particles that go on with what they drew; with other tokens; resampled; in another order; when
    one of them has stopped; and when somebody asks for rows in between."""
    begin(roomy, ahead=ahead)
    choose, began = random.Random(11), roomy.statistics().engine

    def draw(particles: list[list[int]]) -> list[list[int]]:
        drawn = drawing(roomy, particles, seed=choose.randrange(10**6))
        token_ids = drawn.token_ids.tolist()
        for particle, token_id, logprob in zip(particles, token_ids, drawn.logprobs, strict=True):
            assert abs(float(oracle(particle)[token_id]) - float(logprob)) < TOLERANCE
        return [[*each, token_id] for each, token_id in zip(particles, token_ids, strict=True)]

    def speculated() -> int:
        return roomy.statistics().engine.speculated - began.speculated

    def altered(particle: list[int]) -> list[int]:
        return [*particle[:-1], (particle[-1] + 1) % 320]

    particles = [[choose.randrange(320) for _ in range(55)] for _ in range(10)]
    for _ in range(12):
        particles = draw(particles)
    # All but three, after which two steps are seen to be alike.
    grown = 9 if ahead else 0
    assert speculated() == grown
    particles = draw([altered(particles[0]), *particles[1:]])
    particles = draw(list(map(altered, particles)))
    assert speculated() == grown
    for _ in range(3):
        particles = draw(particles)
    assert speculated() == (grown + 3 if ahead else 0)
    for _ in range(3):
        particles = draw([choose.choice(particles) for _ in particles])
    for _ in range(4):
        particles = draw(choose.sample(particles, len(particles)))
    before = speculated()
    particles = draw(particles[:9])
    for _ in range(5):
        particles = draw(particles)
    assert speculated() > before or not ahead
    expect_rows(oracle, particles, roomy.batch_next_token_logprobs_sync(particles))
    roomy.next_token_logprobs_sync([1, 2, 3])
    for _ in range(3):
        particles = draw(particles)
    after = roomy.statistics().engine
    assert after.failed == began.failed
    assert after.prepared - began.prepared >= speculated()


def test_one_who_is_always_mistaken_is_seldom_speculated_for(
    roomy: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(roomy, ahead=True)
    runs, began, run = list[int](), roomy.statistics().engine, RunnerV1.run

    def counted(*given: Any) -> torch.Tensor:
        runs.append(1)
        return run(*given)

    monkeypatch.setattr(RunnerV1, "run", counted)
    particles, count = [[number, *range(50)] for number in range(6)], 3 * RETRY
    for step in range(count):
        drawn = drawn_apart_sync(roomy, particles, seed=10 * step).token_ids.tolist()
        particles = [[*each, (one + 1) % 320] for each, one in zip(particles, drawn, strict=True)]
    after = roomy.statistics().engine
    assert after.speculated == began.speculated
    assert len(runs) - (after.prepared - began.prepared) <= MISSES + count // RETRY


@pytest.mark.parametrize("drawing", [drawn_apart_sync, as_a_batch])
def test_a_forward_that_fails_before_anybody_asked_is_told_to_nobody(
    roomy: AsyncLM, drawing: Drawing, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(roomy, ahead=True)
    particles = [[number, *range(50)] for number in range(6)]

    def step() -> None:
        drawn = drawing(roomy, particles, temperature=0.0, seed=0)
        for particle, token_id in zip(particles, drawn.token_ids.tolist(), strict=True):
            particle.append(token_id)

    for _ in range(5):
        step()
    runner, failed = type(runner_of(roomy)), list[int]()
    forward = runner._model_forward

    def fails_once(*given: Any, **named: Any) -> Any:
        if failed:
            return forward(*given, **named)
        failed.append(1)
        raise RuntimeError("scripted failure")

    monkeypatch.setattr(runner, "_model_forward", fails_once)
    before = roomy.statistics().engine
    for _ in range(5):  # the first was computed before; the one after it fails, and is run again
        step()
    after = roomy.statistics().engine
    assert failed
    assert after.failed == before.failed
    assert after.speculated > before.speculated + 1


def test_the_runner_always_has_a_slot(
    llama: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where, as in the V2 runner, a request takes a slot for as long as it is known: contexts that share
    a prefix with one resident sequence, or each with its own, and are as many as there are slots."""
    from genrt.engines.vllm import scheduler

    monkeypatch.setattr(scheduler, "MOST_RECORDS", 9)
    with load(llama, blocks=400, max_num_seqs=8) as lm:  # 8 texts at once, and a row beside them
        runner, most = runner_of(lm), 0
        execute = runner.execute_model

        def counted(output: Any, *more: Any) -> Any:
            nonlocal most
            known = runner.requests.keys() - output.finished_req_ids
            most = max(most, len(known) + len(output.scheduled_new_reqs))
            return execute(output, *more)

        monkeypatch.setattr(runner, "execute_model", counted)
        prefix = list(range(100))
        flushes = [[[*prefix, n] for n in range(8)], [[*prefix, n, n] for n in range(8)]]
        flushes += [[[*prefix, 20 + n] for n in range(8)]]  # all from one
        flushes += [[[*prefix, 20 + n, 1, 2, 3] for n in range(8)]]  # each from its own
        flushes += [[[n, *prefix] for n in range(12)]]  # more than there are slots
        flushes += [[[n, *prefix, n] for n in range(12)]]
        check(lm, flushes, oracle)
        assert most <= 9


@BOTH
async def test_what_happens_between_two_steps_takes_a_prepared_one_back(
    adaptable: AsyncLM, oracle: Oracle, loras: tuple[Path, Path], ahead: bool
) -> None:
    """A question from elsewhere, a cancelled one, a sample, an adapter, a failing forward."""
    lm, engine_steps = adaptable, begin(adaptable, ahead=ahead)
    particles = [[n, *range(50)] for n in range(5)]

    async def steps(count: int) -> None:
        for last in range(count):
            for particle in particles:
                particle.append(last)
            expect_rows(oracle, particles, await lm.batch_next_token_logprobs(particles))
        assert engine_steps.can_speculate(5) == ahead

    await steps(4)
    await lm.next_token_logprobs([9, 9])
    await steps(4)
    waiting = asyncio.create_task(lm.batch_next_token_logprobs([[*p, 1] for p in particles]))
    for _ in range(4):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await steps(4)
    await lm.sample([1, 2, 3], max_tokens=3)
    await steps(4)
    await lm.add_adapter("a", loras[0])
    assert not engine_steps.can_speculate(5)
    await steps(4)
    for broken in ("_model_forward", "model"):
        with failing(lm, broken), pytest.raises(genrt.EngineFailed):
            await lm.batch_next_token_logprobs([[*p, 1] for p in particles])
        assert lm.statistics().engine.resident == 0
        await steps(4)


@pytest.mark.promise(number=16)
def test_a_run_of_smc_is_the_same_with_residency_and_without_it_but_with_a_cache(
    roomy: AsyncLM, bare: AsyncLM
) -> None:
    """Texts, ancestors, weights and evidence, of particles whose every token is weighted by rows: on the
    device, or by rejection on the host."""
    from genrt.constraints import predicate
    from genrt.inference import SMC, Law, Result, TextModel

    def is_plain(text: Text) -> bool:
        is_long = not text.finished or len(text.bytes) >= 3
        return is_long and set(text.bytes) <= set(b"abcdefghijklmnopqrstuvwxyz .")

    async def run(lm: AsyncLM, *, free: bool) -> Result:
        constraint = None if free else predicate(is_plain, lm)
        laws = [Law(lm, [1, 2, 3], temperature=0.7), Law(lm, [4, 5, 6], power=-0.2)]
        model = TextModel(laws, constraint=constraint, max_tokens=12)
        return await SMC(model, num_particles=12, resample_when=0.9).run(seed=3)

    begin(roomy, ahead=False)
    assert asyncio.run(run(bare, free=True)).token_ids == (
        asyncio.run(run(roomy, free=True)).token_ids
    )
    results = [asyncio.run(run(lm, free=False)) for lm in (roomy, bare, bare)]
    assert bare.statistics().engine.extended == 0
    assert bare.statistics().cache.hits > 0
    first = results[0]
    assert 0 < sum(info.resampled for info in first.infos) < len(first.infos)
    for result in results[1:]:
        assert result.token_ids == first.token_ids
        ancestors = [[i.ancestors.tolist() for i in each.infos] for each in (result, first)]
        assert ancestors[0] == ancestors[1]
        assert result.log_weights == pytest.approx(first.log_weights, abs=SMC_TOLERANCE)
        assert result.log_evidence == pytest.approx(first.log_evidence, abs=SMC_TOLERANCE)


async def test_where_nothing_stays_resident_the_engine_survives_the_end_of_populations(
    bare: AsyncLM, oracle: Oracle
) -> None:
    for _ in range(2):
        with bare.population([7, 8, 9], 3) as population, bare.context([7, 8]) as context:
            for seed in range(3):
                population.append((await population.draw(seed=seed)).token_ids)
                context.append((await context.draw(seed=seed)).token_id)
            contexts = [*population]
    expect_rows(oracle, contexts, await bare.batch_next_token_logprobs(contexts))


@pytest.mark.promise(number=14)
async def test_many_adapters_residents_stay_apart(
    adaptable: AsyncLM, loras: tuple[Path, Path]
) -> None:
    """Three adapters where a step takes two, and forks of one: rows by residents equal fresh ones."""
    lm, names = adaptable, (None, "a", "b", "c")
    for name, path in zip("abc", (*loras, loras[0]), strict=True):
        await lm.add_adapter(name, path)
    begin(lm, ahead=False)

    async def ask(asked: list[tuple[list[int], str | None]]) -> list[torch.Tensor]:
        rows = [lm.next_token_logprobs(context, adapter=name) for context, name in asked]
        return await asyncio.gather(*rows)

    prompts = [[n, *range(30)] for n in range(4)]
    flushes = [
        [([*prompt, *range(step)], name) for prompt in prompts for name in names]
        for step in range(5)
    ]
    # All go on from one, the others are passed over.
    flushes.append([([*prompts[0], *range(4), n], "a") for n in range(10)])
    warm = [await ask(flush) for flush in flushes]
    assert lm.statistics().engine.extended > 0
    for flush, rows in zip(flushes, warm, strict=True):
        forget(lm)
        for row, fresh in zip(rows, await ask(flush), strict=True):
            assert float((row - fresh).abs().max()) < TOLERANCE


@pytest.mark.promise(number=24)
def test_where_residents_rows_are_wrong_they_are_switched_off_with_one_warning(
    llama: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunnerV1, "write", lambda *_: None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        lm = load(llama, blocks=200, max_num_seqs=16)
    assert len([w for w in warned if "resident sequences are off" in str(w.message)]) == 1
    with lm:
        check(lm, walk(9, 320, steps=5), oracle)
        assert lm.statistics().engine.extended == 0
