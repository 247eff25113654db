"""vLLM's rows by extending, forking and backtracking, under eviction, against transformers'.

The index of resident sequences alone is in ``test_residency_machine.py``.
"""

from __future__ import annotations

import asyncio
import random
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.engines.vllm.runners import RunnerV1
from genrt.engines.vllm.steps import MISSES, RETRY, DecodeSteps
from genrt.lm import AsyncLM
from genrt.tokens.sampling import BatchDraw
from tests.apart import drawn_apart_sync

TOLERANCE = 5e-4
SMC_TOLERANCE = 1e-3
"""Of the logarithm of a product of twenty masses."""
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 256,
    "block_size": 32,
    "max_model_len": 400,
}
BLOCK = 2 * 2 * 32 * 2 * 4 * 32  # layers, KV heads, head size, K and V, bytes, tokens: of one block


def load(llama: Path, *, blocks: int, max_num_seqs: int, **arguments: Any) -> AsyncLM:
    options = OPTIONS | {"kv_cache_memory_bytes": blocks * BLOCK, "max_num_seqs": max_num_seqs}
    return genrt.load(str(llama), engine_options=options, **{"cache_bytes": 0} | arguments)


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


def rows_of(lm: AsyncLM, flushes: Sequence[Sequence[Sequence[int]]]) -> list[list[torch.Tensor]]:
    async def ask(flush: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return await asyncio.gather(*(lm.next_token_logprobs(context) for context in flush))

    return [asyncio.run(ask(flush)) for flush in flushes]


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways: steps are prepared ahead, as they are on GPUs, and not, as on CPUs."""
    original = DecodeSteps.__init__

    def init(self: DecodeSteps, *positional: Any, **named: Any) -> None:
        original(self, *positional, **named | {"ahead": request.param})

    monkeypatch.setattr(DecodeSteps, "__init__", init)
    return bool(request.param)


@pytest.fixture(params=["apart", "as a batch"])
def drawing(request: pytest.FixtureRequest) -> Callable[..., BatchDraw]:
    """Draws after many contexts, each of them a question of its own, or all as one."""

    def as_a_batch(lm: AsyncLM, contexts: Sequence[Sequence[int]], **options: Any) -> BatchDraw:
        return lm.batch_draw_sync(contexts, **options)

    return drawn_apart_sync if request.param == "apart" else as_a_batch


@pytest.mark.promise(number=3)
@pytest.mark.promise(number=4)
@pytest.mark.vllm
@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(
    ("blocks", "max_num_seqs", "seed"),
    [(400, 16, 1), (60, 8, 2), (40, 8, 3), (30, 4, 4), (16, 3, 5)],
)
def test_rows_by_residents_are_right_with_room_and_under_eviction(
    llama: Path,
    oracle: Callable[[Sequence[int]], torch.Tensor],
    blocks: int,
    max_num_seqs: int,
    seed: int,
) -> None:
    flushes = walk(seed, 320, steps=20)
    with load(llama, blocks=blocks, max_num_seqs=max_num_seqs) as lm:
        rows = rows_of(lm, flushes)
        did = lm.statistics().engine
    for flush, answers in zip(flushes, rows, strict=True):
        for context, row in zip(flush, answers, strict=True):
            assert float((oracle(context) - row).abs().max()) < TOLERANCE
    assert did.extended > 50
    assert did.forked > 5
    assert (did.evicted > 0) == (blocks < 400)


@pytest.mark.vllm
@pytest.mark.usefixtures("ahead")
def test_a_particle_step_computes_one_token_also_after_resampling(llama: Path) -> None:
    """Sixteen particles of 100 tokens; before every step half of them become copies of the others."""
    choose = random.Random(0)
    with load(llama, blocks=400, max_num_seqs=32) as lm:
        particles = [[choose.randrange(320) for _ in range(100)] for _ in range(16)]
        lm.batch_next_token_logprobs_sync(particles)
        before = lm.statistics().engine
        for _ in range(10):
            particles = [[*particles[n // 2], choose.randrange(320)] for n in range(16)]
            lm.batch_next_token_logprobs_sync(particles)
        after = lm.statistics().engine
    rows = after.rows - before.rows
    assert rows >= 150
    assert (after.computed_tokens - before.computed_tokens) / rows <= 1.05
    assert after.forked - before.forked >= 70
    assert after.steps - before.steps == 10


@pytest.mark.vllm
def test_a_population_s_steps_are_right_and_prepared_where_they_can_be(
    llama: Path, oracle: Callable[[Sequence[int]], torch.Tensor], ahead: bool
) -> None:
    """Twelve particles that only grow, over the edges of blocks; that are resampled; half of which stop;
    one of which is cut back, and one of which has another length than the rest when it is copied."""
    choose = random.Random(7)

    def token() -> int:
        return choose.randrange(320)

    with load(llama, blocks=400, max_num_seqs=16) as lm:

        def step(particles: list[list[int]]) -> list[list[int]]:
            particles = [[*particle, token()] for particle in particles]
            for particle, row in zip(
                particles, lm.batch_next_token_logprobs_sync(particles), strict=True
            ):
                assert float((oracle(particle) - row).abs().max()) < TOLERANCE
            return particles

        particles = [[token() for _ in range(60)] for _ in range(12)]
        for _ in range(10):
            particles = step(particles)
        grown = lm.statistics().engine
        assert grown.prepared == (
            7 if ahead else 0
        )  # all but three, after which it is seen to go on
        for _ in range(4):
            particles = step([choose.choice(particles) for _ in particles])
        resampled = lm.statistics().engine
        assert resampled.prepared - grown.prepared == (4 if ahead else 0)
        assert resampled.forked > 0
        assert resampled.resident == 12  # a fork takes the seat of one that nothing came from
        particles = step(particles[:6]) + particles[6:]
        particles = step(particles)
        particles = step([particles[0][:-20], *particles[1:]])
        for _ in range(3):
            particles = step([particles[0], particles[0], *particles[2:]])
        for _ in range(4):
            particles = step(particles)
        assert len(particles[2]) > len(particles[0])
        # A step is prepared for the shorter one, whose seat goes on as the longer one.
        particles = step([particles[2], *particles[1:]])
        assert lm.statistics().engine.prepared > resampled.prepared or not ahead
        assert lm.statistics().engine.failed == 0


@pytest.mark.vllm
def test_what_was_drawn_is_computed_before_it_is_asked_and_never_mistaken_for_something_else(
    llama: Path,
    oracle: Callable[[Sequence[int]], torch.Tensor],
    ahead: bool,
    drawing: Callable[..., BatchDraw],
) -> None:
    """Ten particles that go on with what they drew; with other tokens; resampled; in another order; when
    one of them has stopped; and when somebody asks for rows in between."""
    choose = random.Random(11)
    with load(llama, blocks=400, max_num_seqs=16) as lm:

        def draw(particles: list[list[int]]) -> list[list[int]]:
            drawn = drawing(lm, particles, seed=choose.randrange(10**6))
            for particle, token_id, logprob in zip(
                particles, drawn.token_ids.tolist(), drawn.logprobs.tolist(), strict=True
            ):
                assert abs(float(oracle(particle)[token_id]) - logprob) < TOLERANCE
            return [
                [*particle, token_id]
                for particle, token_id in zip(particles, drawn.token_ids.tolist(), strict=True)
            ]

        def speculated() -> int:
            return lm.statistics().engine.speculated

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
        for particle, row in zip(
            particles, lm.batch_next_token_logprobs_sync(particles), strict=True
        ):
            assert float((oracle(particle) - row).abs().max()) < TOLERANCE
        lm.next_token_logprobs_sync([1, 2, 3])
        for _ in range(3):
            particles = draw(particles)
        statistics = lm.statistics().engine
        assert statistics.failed == 0
        assert statistics.prepared >= statistics.speculated


@pytest.mark.vllm
def test_one_who_is_always_mistaken_is_seldom_speculated_for(
    llama: Path, monkeypatch: pytest.MonkeyPatch, drawing: Callable[..., BatchDraw]
) -> None:
    original = DecodeSteps.__init__

    def init(self: DecodeSteps, *positional: Any, **named: Any) -> None:
        original(self, *positional, **named | {"ahead": True})

    monkeypatch.setattr(DecodeSteps, "__init__", init)
    with load(llama, blocks=400, max_num_seqs=16) as lm:
        engine: Any = lm._thread.engine
        runs = 0
        run = engine._open.steps._runner.run

        def counted(*given: Any) -> torch.Tensor:
            nonlocal runs
            runs += 1
            logits: torch.Tensor = run(*given)
            return logits

        monkeypatch.setattr(engine._open.steps._runner, "run", counted)
        particles = [[number, *range(50)] for number in range(6)]
        steps = 3 * RETRY
        for step in range(steps):
            drawn = drawing(lm, particles, seed=10 * step).token_ids.tolist()
            particles = [
                [*particle, (token_id + 1) % 320]
                for particle, token_id in zip(particles, drawn, strict=True)
            ]
        assert lm.statistics().engine.speculated == 0
        assert runs - lm.statistics().engine.prepared <= MISSES + steps // RETRY


@pytest.mark.vllm
def test_a_forward_that_fails_before_anybody_asked_is_told_to_who_asks(
    llama: Path,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
    drawing: Callable[..., BatchDraw],
) -> None:
    with load(llama, blocks=400, max_num_seqs=16) as lm:
        engine: Any = lm._thread.engine
        particles = [[number, *range(50)] for number in range(6)]
        drawn = drawing(lm, particles, temperature=0.0, seed=0)

        def step() -> None:
            nonlocal drawn
            for particle, token_id in zip(particles, drawn.token_ids.tolist(), strict=True):
                particle.append(token_id)
            drawn = drawing(lm, particles, temperature=0.0, seed=0)

        for _ in range(4):
            step()
        runner = engine._core.engine_core.model_executor.driver_worker.worker.model_runner
        forward, failed = type(runner)._model_forward, threading.Event()

        def fails_once(*given: Any, **named: Any) -> Any:
            if failed.is_set():
                return forward(*given, **named)
            failed.set()
            raise RuntimeError("scripted failure")

        monkeypatch.setattr(type(runner), "_model_forward", fails_once)
        before = lm.statistics().engine
        if ahead:
            step()  # was computed before; the one after it fails, which nobody has asked for
        else:
            with pytest.raises(genrt.EngineFailed, match="scripted failure"):
                step()
        assert failed.is_set()
        for _ in range(4):
            step()
        after = lm.statistics().engine
        assert (after.failed > before.failed) == (not ahead)
        assert (after.speculated > before.speculated + 1) == ahead


@pytest.mark.vllm
def test_the_runner_always_has_a_slot(
    llama: Path,
    oracle: Callable[[Sequence[int]], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where, as in the V2 runner, a request takes a slot for as long as it is known: contexts that share
    a prefix with one resident sequence, or each with its own, and are as many as there are slots."""
    from genrt.engines.vllm import scheduler

    monkeypatch.setattr(scheduler, "MOST_RECORDS", 9)
    with load(llama, blocks=400, max_num_seqs=8) as lm:  # 8 texts at once, and a row beside them
        runner: Any = lm._thread.engine
        runner = runner._core.engine_core.model_executor.driver_worker.worker.model_runner
        execute, most = runner.execute_model, 0

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
        for flush, rows in zip(flushes, rows_of(lm, flushes), strict=True):
            for context, row in zip(flush, rows, strict=True):
                assert float((oracle(context) - row).abs().max()) < TOLERANCE
        assert most <= 9


@pytest.mark.vllm
async def test_what_happens_between_two_steps_takes_a_prepared_one_back(
    llama: Path,
    oracle: Callable[[Sequence[int]], torch.Tensor],
    loras: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
) -> None:
    """A question from elsewhere, a cancelled one, a sample, an adapter, a failing forward."""
    options = OPTIONS | {"kv_cache_memory_bytes": 400 * BLOCK, "max_num_seqs": 16}
    options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    async with await genrt.aload(str(llama), engine_options=options, cache_bytes=0) as lm:
        engine: Any = lm._thread.engine
        particles = [[n, *range(50)] for n in range(5)]

        async def steps(count: int) -> None:
            for last in range(count):
                for particle in particles:
                    particle.append(last)
                rows = await lm.batch_next_token_logprobs(particles)
                for particle, row in zip(particles, rows, strict=True):
                    assert float((oracle(particle) - row).abs().max()) < TOLERANCE
            assert (engine._open.steps._prepared is not None) == ahead

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
        assert engine._open.steps._prepared is None
        await steps(4)
        runner = engine._core.engine_core.model_executor.driver_worker.worker.model_runner
        for broken in ("_model_forward", "model"):

            def fails(*_: Any, **__: Any) -> None:
                raise RuntimeError("scripted failure")

            with monkeypatch.context() as patch:
                patch.setattr(runner, broken, fails)
                with pytest.raises(genrt.EngineFailed):
                    await lm.batch_next_token_logprobs([[*p, 1] for p in particles])
            await steps(4)


@pytest.mark.promise(number=16)
@pytest.mark.vllm
def test_a_run_of_smc_is_the_same_with_residency_and_without_and_with_a_cache(llama: Path) -> None:
    """Texts, ancestors, weights and evidence, of particles whose every token is weighted by the
    constraint's mass."""
    from genrt.constraints import regex
    from genrt.inference import SMC, Result, TextModel

    async def run(lm: AsyncLM, *, free: bool) -> Result:
        constraint = None if free else regex("[a-z .]{3,}", lm)
        model = TextModel(lm, [1, 2, 3], constraint=constraint, max_tokens=20, temperature=0.7)
        return await SMC(model, num_particles=12, resample_when=0.9).run(seed=3)

    results: list[Result] = []
    all_free: dict[str, Any] = {}
    for residency, cache_bytes in ((True, 0), (False, 0), (True, 2**20), (False, 2**20)):
        options = {"residency": residency, "cache_bytes": cache_bytes}
        with load(llama, blocks=200, max_num_seqs=16, **options) as lm:
            free = asyncio.run(run(lm, free=True)).token_ids
            assert all_free.setdefault("tokens", free) == free
            results += [asyncio.run(run(lm, free=False)), asyncio.run(run(lm, free=False))]
            assert (lm.statistics().engine.extended > 0) == residency
            assert (lm.statistics().cache.hits > 0) == (cache_bytes > 0)
    first = results[0]
    assert 0 < sum(info.resampled for info in first.infos) < len(first.infos)
    for result in results[1:]:
        assert result.token_ids == first.token_ids
        assert [a.tolist() for a in result.ancestors] == [a.tolist() for a in first.ancestors]
        assert result.log_weights == pytest.approx(first.log_weights, abs=SMC_TOLERANCE)
        assert result.log_evidence == pytest.approx(first.log_evidence, abs=SMC_TOLERANCE)


@pytest.mark.promise(number=4)
@pytest.mark.vllm
async def test_samples_and_rows_share_the_blocks_there_are(
    llama: Path, oracle: Callable[[Sequence[int]], torch.Tensor]
) -> None:
    """Long samples that need the room of parked sequences, and sequences that come back after."""
    with load(llama, blocks=40, max_num_seqs=8) as lm:
        contexts = [[n, *range(60)] for n in range(10)]
        await lm.batch_next_token_logprobs(contexts)
        samples = asyncio.create_task(
            lm.batch_sample([[n] for n in range(6)], max_tokens=150, temperature=0.0)
        )
        for token in range(20):
            contexts = [[*context, token] for context in contexts]
            rows = await lm.batch_next_token_logprobs(contexts)
            for context, row in zip(contexts[::5], rows[::5], strict=True):
                assert float((oracle(context) - row).abs().max()) < TOLERANCE
        for number, sample in enumerate(await samples):
            greedy = oracle([number, *sample[:149]])
            assert float(greedy.max() - greedy[sample[149]]) < TOLERANCE


@pytest.mark.vllm
def test_a_step_of_the_same_batch_finds_lengths_and_blocks_alone(
    llama: Path, oracle: Callable[[Sequence[int]], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of different lengths, in any order, over the edges of blocks, with forks; a sample and a
    new sequence are vLLM's own steps."""
    choose, repeated, repeat = random.Random(3), [], RunnerV1._repeat

    def counted(self: RunnerV1, *arguments: Any) -> None:
        repeated.append(arguments[1])
        repeat(self, *arguments)

    monkeypatch.setattr(RunnerV1, "_repeat", counted)
    with load(llama, blocks=400, max_num_seqs=16) as lm:
        repeated.clear()  # by the self-test

        def step(contexts: list[list[int]]) -> list[list[int]]:
            contexts = [[*context, choose.randrange(320)] for context in contexts]
            choose.shuffle(contexts)
            for context, row in zip(contexts, rows_of(lm, [contexts])[0], strict=True):
                assert float((oracle(context) - row).abs().max()) < TOLERANCE
            return contexts

        contexts = step([[choose.randrange(320) for _ in range(50 + n)] for n in range(8)])
        for _ in range(20):
            contexts = step(contexts)
        assert repeated == [8] * 19  # the first was found whole
        lm.sample_sync([1, 2, 3], max_tokens=3)
        contexts = step(step(contexts))
        contexts = step([*contexts[:4], *contexts[:4]])
        contexts = step([*contexts, [5, 6, 7]])
        for _ in range(3):
            contexts = step(contexts)
    assert repeated[19:] == [8, 8, 9, 9]


@pytest.mark.vllm
async def test_a_cancelled_extension_and_a_failed_step_leave_no_wrong_residents(
    llama: Path,
    oracle: Callable[[Sequence[int]], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with load(llama, blocks=200, max_num_seqs=16) as lm:
        engine: Any = lm._thread.engine
        contexts = [[n, *range(40)] for n in range(8)]
        await lm.batch_next_token_logprobs(contexts)
        tasks = [asyncio.create_task(lm.next_token_logprobs([*c, 7])) for c in contexts]
        for _ in range(6):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for last in (7, 8):
            rows = await lm.batch_next_token_logprobs([[*c, last] for c in contexts])
            for context, row in zip(contexts, rows, strict=True):
                assert float((oracle([*context, last]) - row).abs().max()) < TOLERANCE
        runner = engine._core.engine_core.model_executor.driver_worker.worker.model_runner

        def fails(*_: Any, **__: Any) -> None:
            raise RuntimeError("scripted failure")

        with monkeypatch.context() as patch:
            patch.setattr(runner, "_model_forward", fails)
            with pytest.raises(genrt.EngineFailed):
                await lm.batch_next_token_logprobs([[*c, 8, 9] for c in contexts])
        assert lm.statistics().engine.resident == 0
        rows = await lm.batch_next_token_logprobs([[*c, 8, 9] for c in contexts])
        for context, row in zip(contexts, rows, strict=True):
            assert float((oracle([*context, 8, 9]) - row).abs().max()) < TOLERANCE


@pytest.mark.promise(number=14)
@pytest.mark.vllm
def test_many_adapters_residents_stay_apart(llama: Path, loras: tuple[Path, Path]) -> None:
    """Three adapters where a step takes two, and forks of one: rows with residency equal those
    without."""
    prompts = [[n, *range(30)] for n in range(4)]
    results = []
    for residency in (True, False):
        options = OPTIONS | {"kv_cache_memory_bytes": 300 * BLOCK, "max_num_seqs": 16}
        options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4}
        with genrt.load(
            str(llama), engine_options=options, cache_bytes=0, residency=residency
        ) as lm:
            for name, path in zip("abc", (*loras, loras[0]), strict=True):
                lm.add_adapter_sync(name, path)

            async def grow(lm: AsyncLM = lm) -> list[torch.Tensor]:
                rows: list[torch.Tensor] = []
                for step in range(6):
                    rows += await asyncio.gather(
                        *(
                            lm.next_token_logprobs([*prompt, *range(step)], adapter=name)
                            for prompt in prompts
                            for name in (None, "a", "b", "c")
                        )
                    )
                before = [*prompts[0], *range(5)]  # all go on from one, the others are passed over
                return rows + await asyncio.gather(
                    *(lm.next_token_logprobs([*before, n], adapter="a") for n in range(10))
                )

            results.append(asyncio.run(grow()))
            assert (lm.statistics().engine.extended > 0) == residency
    for warm, fresh in zip(*results, strict=True):
        assert float((warm - fresh).abs().max()) < TOLERANCE


@pytest.mark.promise(number=24)
@pytest.mark.vllm
def test_where_residents_rows_are_wrong_they_are_switched_off_with_one_warning(
    llama: Path, oracle: Callable[[Sequence[int]], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from genrt.engines.vllm import runners as runner_v1

    monkeypatch.setattr(runner_v1.RunnerV1, "write", lambda *_: None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        lm = load(llama, blocks=200, max_num_seqs=16)
    assert len([w for w in warned if "resident sequences are off" in str(w.message)]) == 1
    with lm:
        flushes = walk(9, 320, steps=5)
        for flush, rows in zip(flushes, rows_of(lm, flushes), strict=True):
            for context, row in zip(flush, rows, strict=True):
                assert float((oracle(context) - row).abs().max()) < TOLERANCE
        assert lm.statistics().engine.extended == 0
