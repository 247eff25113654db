"""Particle programs: the law of what users write, under replay and going on alike, and how it fails.

Statistical tests have fixed seeds and a level of 1e-6.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.constraints import predicate, regex
from genrt.constraints.protocols import kept_for
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import Closed, ContextTooLong, GenrtError, InvalidRequest, UnknownAdapter
from genrt.inference import SMC, Execution, Program, Result, TextModel, importance_sampling
from genrt.lm import AsyncLM
from genrt.questions.draws import PopulationDraw
from genrt.testing import assert_samples_from, assert_weighted_samples_from
from genrt.tokens.texts import Text

PROMPT = [0]
EOS = 4
MODEL = NGram.random([b"a", b"b", b"ab", b"ba", b""], seed=3, zeros=0.25, eos_token_id=EOS)
PATTERN = "(a|b){3,5}b"


def constrained(lm: AsyncLM, *, max_tokens: int = 5) -> Any:
    """A constrained text written by hand, as ``TextModel`` has it."""
    start = regex(PATTERN, lm).start()

    async def program(p: Execution) -> tuple[int, ...]:
        state, tokens = start, list[int]()
        while True:
            mask = state.mask()
            if len(tokens) == max_tokens - 1:
                mask &= torch.arange(5) == EOS
            token = await p.sample([*PROMPT, *tokens], mask=mask)
            if token == EOS:
                return tuple(tokens)
            tokens.append(token)
            state = state.advance(token)

    return program


def every_step(state: Any) -> bool:
    return True


def values_of(result: Result) -> list[Any]:
    return [([value], [w]) for value, w in zip(result.values, result.log_weights, strict=True)]


def same(first: Result, second: Result) -> bool:
    return (
        first.values == second.values
        and first.token_ids == second.token_ids
        and first.log_weights.tolist() == second.log_weights.tolist()
    )


class Forgetful:
    """A program whose executions never go on: every step of every particle is a replay."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.max_steps = program.max_steps
        self.start, self.text, self.value = program.start, program.text, program.value

    async def extend(self, traces: Any, seed: int) -> Any:
        for trace in traces:
            for _, coroutine in trace.live:
                coroutine.close()
            trace.live.clear()
        return await self.program.extend(traces, seed)


# -- the law ----------------------------------------------------------------------------------


async def mixed(p: Execution) -> Any:
    """Everything that an execution offers, in every order."""
    scale = await p.uniform()
    p.observe(-scale)
    kind = await p.choice(["short", "long"], log_weights=[0.0, -1.0])
    tokens = [0]
    for _ in range(1 if kind == "short" else 3):
        tokens.append(await p.sample(tokens, mask=[0, 1, 2]))
        p.observe(-0.5 * await p.choice([0, 1]))
        p.observe(-await p.uniform())
    await p.condition(tokens, [3])
    row = await p.lm.next_token_logprobs(tokens)
    last = await p.sample(tokens, temperature=2.0)
    await asyncio.sleep(0)
    p.observe(float(row[last]) / 4)
    return kind, tuple(tokens[1:]), last


async def test_going_on_and_running_again_are_the_same_to_the_last_bit() -> None:
    for resample_when in (0.0, 0.7, every_step):
        with genrt.load(MODEL, engine="exact") as lm:
            goes_on, runs_again = Program(lm, mixed), Forgetful(Program(lm, mixed))
            for seed in range(4):
                smc = SMC(goes_on, num_particles=20, resample_when=resample_when)
                replayed = SMC(runs_again, num_particles=20, resample_when=resample_when)
                assert same(await smc.run(seed), await replayed.run(seed))


async def test_the_mixed_program_has_the_evidence_that_its_observations_say() -> None:
    """E[w] by the sums that the program stands for, one factor after the other."""
    rows = MODEL.table.double().exp()
    heat = MODEL.table.double().div(2).softmax(dim=-1)
    inner = (1 - math.exp(-1)) * (1 + math.exp(-0.5)) / 2
    posterior: defaultdict[Any, float] = defaultdict(float)
    for kind, length in (("short", 1), ("long", 3)):
        prior = 1 / (1 + math.exp(-1 if kind == "short" else 1)) * (1 - math.exp(-1))
        texts: list[tuple[tuple[int, ...], int, float]] = [((), 0, prior)]
        for _ in range(length):
            texts = [
                ((*text, token), token, p * float(rows[at, token]) * inner)
                for text, at, p in texts
                for token in range(3)
            ]
        for text, at, p in texts:
            for last in range(5):
                posterior[kind, text, last] += p * float(
                    rows[at, 3] * heat[at, last] * rows[at, last] ** 0.25
                )
    evidence = sum(posterior.values())
    law = {value: weight / evidence for value, weight in posterior.items()}
    with genrt.load(MODEL, engine="exact") as lm:
        once = await importance_sampling(Program(lm, mixed), num_particles=600).run(0)
        smc = SMC(Program(lm, mixed), num_particles=6, resample_when=every_step)
        results = await asyncio.gather(*(smc.run(seed) for seed in range(60)))
    assert_weighted_samples_from(values_of(once), law, log_evidence=math.log(evidence))
    runs = [(result.values, result.log_weights) for result in results]
    assert_weighted_samples_from(runs, law, log_evidence=math.log(evidence))


async def test_chance_without_a_language_model_has_its_laws() -> None:
    async def program(p: Execution) -> tuple[int, str, str]:
        letter = await p.choice("xyz", log_weights=[0.0, -math.inf, math.log(3)])
        return int(4 * await p.uniform()), letter, await p.choice(["l", "r"])

    with genrt.load(MODEL, engine="exact") as lm:
        result = await importance_sampling(Program(lm, program), num_particles=2000).run(1)
    law = {
        (quarter, letter, side): share / 8
        for quarter in range(4)
        for letter, share in {"x": 0.25, "z": 0.75}.items()
        for side in "lr"
    }
    assert_samples_from(result.values, law)
    assert result.log_evidence == 0
    assert result.token_ids == ((),) * 2000


# -- draws from weights of one's own ----------------------------------------------------------

EXPERTS = NGram.random([b"a", b"b", b"c"], order=2, seed=1, zeros=0.4)


async def product_of_experts(p: Execution) -> tuple[int, ...]:
    """What two prompts agree on, token by token."""
    tokens: tuple[int, ...] = ()
    for _ in range(3):
        rows = await p.lm.batch_next_token_logprobs([[0, 1, *tokens], [2, 0, *tokens]])
        both = rows.sum(dim=0)
        p.observe(float(both.logsumexp(0)))
        tokens += (await p.choice(range(3), log_weights=both),)
    return tokens


def of_experts() -> dict[Any, float]:
    """The weight of every text that the product of experts can give."""
    weights = {}
    for text in itertools.product(range(3), repeat=3):
        logprobs = [
            float(EXPERTS.row([*prompt, *text[:place]])[token])
            for prompt in ([0, 1], [2, 0])
            for place, token in enumerate(text)
        ]
        weights[text] = math.exp(sum(logprobs))
    return {text: weight for text, weight in weights.items() if weight > 0}


async def halving(p: Execution) -> int:
    """Uniform numbers, weighed one by one; some particles are weighed, and others go on."""
    above = 0
    for _ in range(3):
        number = await p.uniform()
        if number < 0.5:
            p.observe(-0.7)
        above += number >= 0.5
    return above


OWN_DRAWS: dict[str, tuple[Any, dict[Any, float]]] = {
    "product of experts": (product_of_experts, of_experts()),
    "halving": (
        halving,
        {k: math.comb(3, k) * 0.5**k * (0.5 * math.exp(-0.7)) ** (3 - k) for k in range(4)},
    ),
}


@pytest.mark.parametrize("name", OWN_DRAWS)
@pytest.mark.parametrize("resample_when", [0.5, every_step])
async def test_a_weight_that_changed_is_resampled_before_the_next_draw_of_any_kind(
    name: str, resample_when: Any
) -> None:
    program, weights = OWN_DRAWS[name]
    evidence = sum(weights.values())
    with genrt.load(EXPERTS, engine="exact") as lm:
        smc = SMC(Program(lm, program), num_particles=6, resample_when=resample_when)
        replayed: Any = SMC(
            Forgetful(Program(lm, program)), num_particles=6, resample_when=resample_when
        )
        results = await asyncio.gather(*(smc.run(seed) for seed in range(60)))
        assert all([same(await replayed.run(seed), results[seed]) for seed in range(4)])
    if resample_when is every_step:
        assert max(len(result.infos) for result in results) >= 3
        assert sum(info.resampled for result in results for info in result.infos) > 0
    assert_weighted_samples_from(
        [(result.values, result.log_weights) for result in results],
        {value: weight / evidence for value, weight in weights.items()},
        log_evidence=math.log(evidence),
    )


async def test_a_choice_without_a_change_of_weight_before_it_makes_no_step() -> None:
    async def program(p: Execution) -> Any:
        p.observe(-1.0)
        drawn = [await p.choice("ab"), await p.uniform(), await p.sample([0]), await p.choice("ab")]
        p.observe(-1.0)
        await p.condition([0], [1])
        return drawn, await p.uniform(), await p.choice("ab")

    with genrt.load(EXPERTS, engine="exact") as lm:
        result = await SMC(Program(lm, program), num_particles=3).run(0)
    assert len(result.infos) == 2
    assert [info.token_ids[:, 0].tolist() for info in result.infos][1] == [-1, -1, -1]


async def test_a_particle_that_is_dead_draws_nothing_more() -> None:
    async def program(p: Execution) -> None:
        p.observe(-math.inf)
        await p.choice("ab", log_weights=[-math.inf, -math.inf])
        raise Broken

    with genrt.load(EXPERTS, engine="exact") as lm:
        result = await SMC(Program(lm, program), num_particles=3).run(0)
    assert result.log_evidence == -math.inf


# -- steps ------------------------------------------------------------------------------------


async def test_a_step_is_one_sample_and_one_flush() -> None:
    async def program(p: Execution) -> int:
        tokens = [0]
        for _ in range(3):
            tokens.append(await p.sample(tokens))
        return len(tokens)

    with genrt.load(MODEL, engine="exact") as lm:
        smc = importance_sampling(Program(lm, program), num_particles=40)
        steps, finished = 0, list[Any]()
        async for state, info in smc.steps(smc.init(0)):
            steps, finished = steps + 1, list(state.particles)
            assert all(len(each.token_ids) == steps for each in state.particles)
            assert [each.token_ids[-1] for each in state.particles] == info.token_ids[:, 0].tolist()
            assert state.done == (steps == 3)
            assert lm.statistics().batcher.flushes == steps
    assert {smc.model.value(each) for each in finished} == {4}


async def test_a_state_may_be_stepped_again_and_gives_the_same() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        smc = SMC(Program(lm, mixed), num_particles=12, resample_when=0.9)
        expected, state, infos = await smc.run(3), smc.init(3), []
        while not state.done:
            (first, info), (second, _), (third, _) = await asyncio.gather(
                smc.step(state), smc.step(state), smc.step(state)
            )
            for other in (second, third):
                assert other.log_weights.tolist() == first.log_weights.tolist()
                assert [p.token_ids for p in other.particles] == [
                    p.token_ids for p in first.particles
                ]
            infos.append(info)
            state = second
    assert same(smc.result(state, infos=infos), expected)


async def test_nothing_is_asked_again_where_a_child_runs_again() -> None:
    asked = 0

    async def program(p: Execution) -> None:
        nonlocal asked
        tokens = [0]
        for _ in range(4):
            asked += 1
            tokens.append(await p.sample(tokens))
            await p.condition(tokens, [1])

    with genrt.load(MODEL, engine="exact", cache_bytes=0) as lm:
        await SMC(Program(lm, program), num_particles=1, resample_when=0.0).run(0)
        once, calls = lm.statistics().batcher.questions, asked
        model: Any = Forgetful(Program(lm, program))
        await SMC(model, num_particles=1, resample_when=0.0).run(0)
        assert lm.statistics().batcher.questions == 2 * once
    assert asked > 2 * calls


async def test_cancelling_a_step_leaves_the_state_good() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        smc = SMC(Program(lm, mixed), num_particles=8, resample_when=0.9)
        expected = await smc.run(5)
        state, infos = smc.init(5), []
        for turns in range(200):
            if state.done:
                break
            step = asyncio.ensure_future(smc.step(state))
            for _ in range(turns % 9):
                await asyncio.sleep(0)
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
            state, info = await smc.step(state)
            infos.append(info)
        assert same(smc.result(state, infos=infos), expected)


def test_a_state_goes_on_on_another_event_loop() -> None:
    async def some(smc: SMC, count: int, state: Any) -> Any:
        for _ in range(count):
            state, _ = await smc.step(state)
        return state

    with genrt.load(MODEL, engine="exact") as lm:
        smc = SMC(Program(lm, mixed), num_particles=6)
        expected = asyncio.run(smc.run(2))
        state = smc.init(2)
        while not state.done:
            state = asyncio.run(some(smc, 1, state))
        assert same(smc.result(state), expected)


# -- ends -------------------------------------------------------------------------------------


async def test_minus_infinity_ends_a_particle_before_it_asks_anything_more() -> None:
    went_on = 0

    async def program(p: Execution) -> str:
        nonlocal went_on
        token = await p.sample([0])
        if token == 1:
            p.observe(-math.inf)
            await p.sample([0, 1])
            went_on += 1
        return "good"

    with genrt.load(MODEL, engine="exact") as lm:
        result = await importance_sampling(Program(lm, program), num_particles=60).run(0)
        assert {request for request in (lm.statistics().engine.rows,)} == {1}
    dead = result.log_weights == -math.inf
    assert 0 < dead.sum() < 60
    assert went_on == 0
    [(value, weight)] = result.posterior()
    assert value == "good"
    assert weight == pytest.approx(1)
    assert [value for value, d in zip(result.values, dead, strict=True) if d] == [None] * dead.sum()


async def test_minus_infinity_before_the_first_sample_asks_nothing() -> None:
    async def program(p: Execution) -> int:
        p.observe(-math.inf)
        return await p.sample([0])

    with genrt.load(MODEL, engine="exact") as lm:
        result = await importance_sampling(Program(lm, program), num_particles=3).run(0)
        assert lm.statistics().batcher.questions == 0
    assert result.log_evidence == -math.inf


async def test_a_mask_without_mass_is_the_end() -> None:
    [impossible] = (MODEL.row([0]) == -math.inf).nonzero()[:, 0].tolist()

    async def program(p: Execution) -> int:
        return await p.sample([0], mask=[impossible])

    with genrt.load(MODEL, engine="exact") as lm:
        result = await SMC(Program(lm, program), num_particles=3).run(0)
    assert result.log_evidence == -math.inf
    assert result.values == (None,) * 3


class Unhashable:
    """Any value that a program may return."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str) -> None:
        self.name = name


async def test_values_are_of_any_type_and_posteriors_of_what_is_hashable() -> None:
    async def program(p: Execution) -> Any:
        return Unhashable(await p.choice("ab")), {"tokens": [await p.sample([0])]}

    with genrt.load(MODEL, engine="exact") as lm:
        result = await importance_sampling(Program(lm, program), num_particles=30).run(0)
    with pytest.raises(InvalidRequest, match="give of="):
        result.posterior()
    names = result.posterior(of=lambda value: value[0].name)
    assert {name for name, _ in names} == {"a", "b"}
    assert sum(weight for _, weight in names) == pytest.approx(1)
    assert {type(value) for value in result.values} == {tuple}
    for value, token_ids, text in zip(result.values, result.token_ids, result.texts, strict=True):
        assert list(token_ids) == value[1]["tokens"]
        assert text == lm.decode(list(token_ids))


# -- errors -----------------------------------------------------------------------------------


class Broken(Exception):
    pass


async def test_an_exception_reaches_the_caller_and_cancels_the_others() -> None:
    cancelled = 0

    async def program(p: Execution) -> None:
        nonlocal cancelled
        if await p.choice([True, False]):
            await p.lm.next_token_logprobs([0])
            raise Broken("in the middle")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled += 1
            raise

    with genrt.load(MODEL, engine="exact") as lm:
        with pytest.raises(Broken, match="in the middle"):
            await SMC(Program(lm, program), num_particles=20).run(0)
        assert cancelled > 0
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_nothing_is_left_behind_when_states_are_dropped() -> None:
    closed = 0

    async def program(p: Execution) -> None:
        nonlocal closed
        try:
            await p.sample([0])
            await p.sample([0, 1])
        finally:
            closed += 1

    with genrt.load(MODEL, engine="exact") as lm:
        smc = SMC(Program(lm, program), num_particles=5)
        state, _ = await smc.step(smc.init(0))
        gc.collect()
        assert closed == 0
        del state
        await asyncio.sleep(0)
        gc.collect()
        assert closed == 5


def impure(act: Callable[[Execution, int], Any]) -> Any:
    """A program whose act before each of its draws depends on how many executions ran before."""
    runs = itertools.count()

    async def program(p: Execution) -> None:
        run = next(runs)
        for _ in range(3):
            answer = act(p, run)
            if inspect.isawaitable(answer):
                await answer
            await p.sample([0])

    return program


IMPURE: dict[str, tuple[Callable[[Execution, int], Any], str]] = {
    "kind": (lambda p, run: p.uniform() if run < 3 else p.choice("ab"), "another choice"),
    "a draw less": (lambda p, run: p.sample([0]) if run < 9 else None, "returned earlier"),
    "a draw more": (lambda p, run: p.uniform() if run >= 3 else None, "another uniform"),
    "fewer values": (lambda p, run: p.choice("ab" if run < 3 else "a"), "another choice"),
    "a question": (
        lambda p, run: p.lm.sample([1], max_tokens=1) if run < 3 else p.lm.score([1], [1]),
        "another score than before",
    ),
    "a question more": (lambda p, run: p.lm.score([1], [1]) if run >= 3 else None, "another score"),
    "a context's question": (
        lambda p, run: p.condition([0], [1]) if run < 3 else p.context([0]).top_logprobs(1),
        "another top_logprobs than before",
    ),
}


@pytest.mark.parametrize("name", IMPURE)
async def test_a_program_that_draws_or_asks_otherwise_again_is_refused(name: str) -> None:
    act, message = IMPURE[name]
    with genrt.load(MODEL, engine="exact") as lm:
        model: Any = Forgetful(Program(lm, impure(act)))
        with pytest.raises(InvalidRequest, match=message) as refused:
            await SMC(model, num_particles=3).run(1)
    assert "function of its choices" in str(refused.value)


PURE: dict[str, Callable[[Execution, int], Any]] = {
    "a mask in another form": lambda p, run: p.sample(
        [0], mask=[1, 2] if run < 3 else torch.tensor([False, True, True, False, False])
    ),
    "a context in another form": lambda p, run: p.sample([0] if run < 3 else np.array([0])),
    "rounded weights": lambda p, run: p.choice("ab", log_weights=[run * 0.01, 0.0]),
    "another text of a question": lambda p, run: p.condition([run % 2], [1]),
}


@pytest.mark.parametrize("name", PURE)
async def test_what_a_program_may_do_otherwise_when_it_runs_again(name: str) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        model: Any = Forgetful(Program(lm, impure(PURE[name])))
        result = await SMC(model, num_particles=3).run(1)
    assert len(result.infos) >= 3
    assert result.ess > 0


async def test_a_program_may_change_the_values_that_it_drew() -> None:
    async def program(p: Execution) -> int:
        drawn = await p.choice([[1], [2]])
        for _ in range(3):
            drawn.append(await p.sample([0]))
        return len(drawn)

    with genrt.load(MODEL, engine="exact") as lm:
        model: Any = Forgetful(Program(lm, program))
        result = await SMC(model, num_particles=3).run(0)
    assert result.values == (4, 4, 4)


async def in_a_task(p: Execution) -> None:
    await asyncio.gather(p.sample([0]), p.sample([1]))


async def in_one_task(p: Execution) -> None:
    await asyncio.create_task(p.sample([0]))


async def choice_in_a_task(p: Execution) -> None:
    await asyncio.gather(p.choice("ab"), p.uniform())


async def texts_in_tasks(p: Execution) -> None:
    await asyncio.gather(p.text([0], max_tokens=2), p.text([1], max_tokens=2))


@pytest.mark.parametrize("program", [in_a_task, in_one_task, choice_in_a_task, texts_in_tasks])
async def test_samples_of_other_tasks_are_refused(program: Any) -> None:
    with (
        genrt.load(MODEL, engine="exact") as lm,
        pytest.raises(InvalidRequest, match="another task"),
    ):
        await SMC(Program(lm, program), num_particles=2).run(0)


async def test_other_awaits_are_as_anywhere() -> None:
    async def program(p: Execution) -> float:
        async with asyncio.timeout(60):
            rows = await asyncio.gather(*(p.lm.next_token_logprobs([i]) for i in range(3)))
        token = await p.sample([0])
        for _ in range(3):
            await asyncio.sleep(0)
        await asyncio.gather(p.condition([token], [1]), p.condition([token], [2]))
        more = await asyncio.to_thread(lambda: float(rows[0][0]))
        await p.sample([0, token])
        return more

    with genrt.load(MODEL, engine="exact") as lm:
        result = await SMC(Program(lm, program), num_particles=6, resample_when=1.0).run(0)
        rows = MODEL.table.double()
        assert set(result.values) == {float(MODEL.row([0])[0])}
        weights = {token: float(rows[token, 1] + rows[token, 2]) for token in range(5)}
        one = await importance_sampling(Program(lm, program), num_particles=6).run(0)
    for token_ids, log_weight in zip(one.token_ids, one.log_weights, strict=True):
        assert log_weight == pytest.approx(weights[token_ids[0]], abs=1e-5)


def offering(act: Callable[[Execution], Any]) -> Any:
    async def program(p: Execution) -> None:
        answer = act(p)
        if asyncio.iscoroutine(answer):
            await answer

    return program


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda p: p.sample([0], mask=[1], temperature=2.0), InvalidRequest, "leave one out"),
        (lambda p: p.sample([0], temperature=0), InvalidRequest, "greedy"),
        (
            lambda p: p.sample([0], temperature="hot"),
            InvalidRequest,
            "temperature must be a number",
        ),
        (lambda p: p.sample([]), InvalidRequest, "empty prompt"),
        (lambda p: p.sample([9]), InvalidRequest, "vocabulary"),
        (lambda p: p.sample(["a"]), InvalidRequest, "int"),
        (lambda p: p.sample("ab"), InvalidRequest, "token ids"),
        (lambda p: p.sample(0), InvalidRequest, "sequence"),
        (lambda p: p.sample([0], mask=[9]), InvalidRequest, "mask"),
        (lambda p: p.sample([0], adapter="absent"), UnknownAdapter, "absent"),
        (lambda p: p.text([0], max_tokens=0), InvalidRequest, "max_tokens must be"),
        (lambda p: p.text([0], max_tokens=2, stop=""), InvalidRequest, "stop has ''"),
        (lambda p: p.text([0], max_tokens=2, temperature=0), InvalidRequest, "greedy"),
        (lambda p: p.text([0], max_tokens=2, constraint="a*"), InvalidRequest, "constraint"),
        (lambda p: p.text([0], max_tokens=2, adapter="absent"), UnknownAdapter, "absent"),
        (lambda p: p.text([0], max_tokens=9999), ContextTooLong, "need a context of 9999"),
        (lambda p: p.text([0] * 1020, max_tokens=9), ContextTooLong, "need a context of 1028"),
        (lambda p: p.text([9], max_tokens=2), InvalidRequest, "vocabulary"),
        (lambda p: p.text([], max_tokens=2), InvalidRequest, "is empty"),
        (lambda p: p.text(p.context([0]), max_tokens=2, adapter="x"), InvalidRequest, "has its"),
        (
            lambda p: p.text(p.lm.of_program.context([0]), max_tokens=2),
            InvalidRequest,
            "begin it by p.context",
        ),
        (lambda p: p.condition([0], [9]), InvalidRequest, "vocabulary"),
        (lambda p: p.context([9]), InvalidRequest, "vocabulary"),
        (lambda p: p.sample(p.lm.of_program.context([0])), InvalidRequest, "begin it by p.context"),
        (lambda p: p.sample(p.context([0]), adapter="x"), InvalidRequest, "has its adapter"),
        (
            lambda p: p.observe(math.nan),
            InvalidRequest,
            "given nan: a log-weight is finite",
        ),
        (lambda p: p.observe(math.inf), InvalidRequest, "observe was given inf"),
        (lambda p: p.observe("1"), InvalidRequest, "observe was given '1': give a log-weight"),
        (lambda p: p.observe(None), InvalidRequest, "observe was given None"),
        (lambda p: p.observe(True), InvalidRequest, "for a condition"),
        (lambda p: p.observe(torch.tensor(True)), InvalidRequest, "for a condition"),
        (lambda p: p.observe(np.array(False)), InvalidRequest, "for a condition"),
        (lambda p: p.observe(-(10**400)), InvalidRequest, "finite, or -inf"),
        (lambda p: p.observe(np.complex128(1)), InvalidRequest, "a number"),
        (lambda p: p.observe(torch.zeros(2)), InvalidRequest, "a number"),
        (lambda p: p.observe(torch.tensor(0.0, device="meta")), InvalidRequest, "a number"),
        (lambda p: p.choice([]), InvalidRequest, "choice got no values"),
        (lambda p: p.choice("ab", log_weights=[[0.0], [0.0]]), InvalidRequest, "a number"),
        (lambda p: p.choice("ab", log_weights=torch.zeros(2, 1)), InvalidRequest, "one flat"),
        (lambda p: p.choice("ab", log_weights=np.ones(2, bool)), InvalidRequest, "one flat"),
        (lambda p: p.choice("ab", log_weights=[True, False]), InvalidRequest, "for a condition"),
        (lambda p: p.choice("ab", log_weights=torch.zeros(())), InvalidRequest, "one flat"),
        (lambda p: p.choice("ab", log_weights=5), InvalidRequest, "in a list, a tensor"),
        (lambda p: p.choice("ab", log_weights="01"), InvalidRequest, "in a list, a tensor"),
        (
            lambda p: p.choice("ab", log_weights=torch.zeros(2, device="meta")),
            InvalidRequest,
            "holds no numbers",
        ),
        (lambda p: p.choice("ab", log_weights=[10**400, 0]), InvalidRequest, "finite, or -inf"),
        (
            lambda p: p.choice({"a", "b"}),
            InvalidRequest,
            "choice got a set: give the values in a list",
        ),
        (lambda p: p.choice({"a": 1}), InvalidRequest, "choice got a dict"),
        (lambda p: p.choice(iter("ab")), InvalidRequest, "choice got a str_ascii_iterator"),
        (
            lambda p: p.choice("ab", log_weights=[0.0]),
            InvalidRequest,
            "give 2, a log-weight for each",
        ),
        (lambda p: p.choice("ab", log_weights=[-math.inf] * 2), InvalidRequest, "above -inf"),
        (lambda p: p.choice("ab", log_weights=[0.0, math.nan]), InvalidRequest, "choice got the"),
        (lambda p: p.choice("ab", log_weights=[0.0, math.inf]), InvalidRequest, "choice got the"),
        (lambda p: p.choice("ab", log_weights=["x", "y"]), InvalidRequest, "a number"),
    ],
)
async def test_wrong_use_of_an_execution_is_refused(
    act: Any, error: type[GenrtError], message: str
) -> None:
    with genrt.load(MODEL, engine="exact") as lm, pytest.raises(error, match=message):
        await SMC(Program(lm, offering(act)), num_particles=2).run(0)


async def test_contexts_may_be_arrays_and_may_be_changed_by_the_program() -> None:
    async def program(p: Execution) -> tuple[int, ...]:
        array, tensor, tokens = np.array([0, 1]), torch.tensor([0, 1]), [0]
        first = await p.sample(array)
        second = await p.sample(tensor)
        tokens.append(await p.sample(tokens))
        tokens.append(await p.sample(tokens))
        return (first, second, *tokens)

    with genrt.load(MODEL, engine="exact") as lm:
        smc = SMC(Program(lm, program), num_particles=6, resample_when=every_step)
        result = await smc.run(0)
    assert all(
        value[:2] + value[3:] == ids
        for value, ids in zip(result.values, result.token_ids, strict=True)
    )


def test_what_is_no_program_is_refused() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        with pytest.raises(InvalidRequest, match="lm is a NGram"):
            Program(MODEL, mixed)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="the program is 'mixed'"):
            Program(lm, "mixed")  # type: ignore[arg-type]
        for function in (lambda p: 1, lambda p: None):
            with pytest.raises(InvalidRequest, match="make it an async def"):
                asyncio.run(SMC(Program(lm, function), num_particles=2).run(0))  # type: ignore[arg-type]


async def test_whatever_makes_coroutines_is_a_program() -> None:
    async def with_options(p: Execution, *, extra: int) -> int:
        return extra + (await p.sample([0])) * 0

    class Callable_:
        async def __call__(self, p: Execution) -> int:
            return await with_options(p, extra=2)

    with genrt.load(MODEL, engine="exact") as lm:
        for program in (
            functools.partial(with_options, extra=2),
            lambda p: with_options(p, extra=2),
            Callable_(),
        ):
            result = await SMC(Program(lm, program), num_particles=3).run(0)
            assert result.values == (2, 2, 2)


@pytest.mark.parametrize("when", [0.0, 0.7, every_step])
async def test_a_text_model_and_a_program_of_it_draw_alike(when: Any) -> None:
    """The same tokens and weights of a seed, by lists, by contexts and by whole texts, alone and in one
    runtime at once."""
    with genrt.load(MODEL, engine="exact") as lm:
        options: Any = {"max_tokens": 5, "constraint": regex(PATTERN, lm)}
        text, whole = TextModel(lm, PROMPT, **options), Program(lm, written(**options))
        models = text, Program(lm, constrained(lm)), Program(lm, stated(lm, 5)), whole
        samplers = [SMC(each, num_particles=9, resample_when=when) for each in models]
        together = await asyncio.gather(*(each.run(1) for each in samplers))
        alone = [await each.run(1) for each in samplers]
    assert all(map(same, together, alone))
    expected, *programs = together
    for each in programs:
        assert each.values == expected.token_ids
        np.testing.assert_allclose(each.log_weights, expected.log_weights, atol=1e-5)
    assert programs[-1].log_weights.tolist() == expected.log_weights.tolist()


# -- whole texts ------------------------------------------------------------------------------


def written(**options: Any) -> Any:
    """A program that is one text."""

    async def program(p: Execution) -> tuple[int, ...]:
        text = await p.text(p.context(PROMPT), **options)
        assert isinstance(text, Text)
        assert text.finished
        return text.token_ids

    return program


KINDS_OF_TEXTS: dict[str, Callable[[AsyncLM], dict[str, Any]]] = {
    "cut": lambda lm: {"max_tokens": 3},
    "of one token": lambda lm: {"max_tokens": 1},
    "tempered": lambda lm: {"max_tokens": 6, "temperature": 0.6, "stop": [EOS, 0]},
    "to a string": lambda lm: {"max_tokens": 6, "stop": ["ba", "bbb"]},
    "without a stop": lambda lm: {
        "max_tokens": 6,
        "stop": None,
        "constraint": regex("a{3,4}b", lm),
    },
    "by rejection": lambda lm: {
        "max_tokens": 5,
        "constraint": predicate(lambda text: not text.finished or len(text) % 2 == 0, lm),
    },
    "with dead ends": lambda lm: {"max_tokens": 4, "constraint": regex("(a|b){3}bb", lm)},
}


@pytest.mark.parametrize("kind", KINDS_OF_TEXTS)
async def test_a_text_of_a_program_is_that_of_a_text_model(kind: str) -> None:
    """To the last bit, in as many steps, whether executions go on or are replayed."""
    with genrt.load(MODEL, engine="exact") as lm:
        options = KINDS_OF_TEXTS[kind](lm)
        program, states = Program(lm, written(**options)), list[Any]()
        forgetful: Any = Forgetful(program)
        for seed in range(4):
            sampler = SMC(TextModel(lm, PROMPT, **options), num_particles=12)
            expected = await sampler.run(seed, on_step=lambda state, _: states.append(state))
            for model in (program, forgetful):
                found = await SMC(model, num_particles=12).run(seed)
                assert [each.token_ids.tolist() for each in found.infos] == [
                    each.token_ids.tolist() for each in expected.infos
                ]
                assert found.log_weights.tolist() == expected.log_weights.tolist()
                alive = expected.log_weights > -math.inf
                texts = [
                    each.generated.token_ids if lives else None
                    for each, lives in zip(states[-1].particles, alive, strict=True)
                ]
                assert [*found.values] == texts


def all_texts(after: int, max_tokens: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """All texts after a token that end within so many tokens or are cut, and their probabilities."""
    for token in range(5):
        share = float(MODEL.table[after].double().exp()[token])
        if token == EOS:
            yield (), share
        elif max_tokens == 1:
            yield (token,), share
        else:
            for rest, of_rest in all_texts(token, max_tokens - 1):
                yield (token, *rest), share * of_rest


def likes(text: tuple[int, ...]) -> float:
    return 0.5 * text.count(1) - 0.2


def two_texts(lm: AsyncLM, *, own: bool) -> Any:
    """A program of two texts, the second of which has a constraint, made in the program or before."""
    made = regex("(a|b)*b", lm)

    async def program(p: Execution) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        context = p.context([0])
        context.append(await p.sample(context, mask=[1, 2, 3]))
        first = await p.text(context, max_tokens=2, name="first")
        p.observe(likes(first.token_ids))
        block = [2, *first.token_ids]
        assert len(await context.advance(block)) == len(block)
        constraint = regex("(a|b)*b", p.lm) if own else made
        second = await p.text(context, max_tokens=3, constraint=constraint, name="second")
        p.observe(likes(second.token_ids))
        return context.token_ids[1], first.token_ids, second.token_ids

    return program


@pytest.mark.parametrize("given", [{}, {"first": [1, 2]}, {"second": "ab"}, {"first": []}], ids=str)
async def test_programs_of_texts_have_their_law(given: dict[str, Any]) -> None:
    weights: dict[Any, float] = {}
    vocabulary, row = MODEL.vocabulary, MODEL.table[0].double().exp()
    for begun in (1, 2, 3):
        for first, of_first in all_texts(begun, 2):
            last = first[-1] if first else 2
            for second, of_second in all_texts(last, 3):
                spelled = b"".join(vocabulary[each] for each in second)
                if spelled.endswith(b"b") and len(second) < 3:
                    own_weight = math.exp(likes(first) + likes(second))
                    share = float(row[begun]) * of_first * of_second * own_weight
                    weights[begun, first, second] = share
    with genrt.load(MODEL, engine="exact") as lm:
        for name, place in {"first": 1, "second": 2}.items():
            if name in given:
                value = given[name]
                ids = tuple(lm.encode(value)) if isinstance(value, str) else tuple(value)
                weights = {k: v for k, v in weights.items() if k[place] == ids}
        evidence = sum(weights.values())
        assert evidence > 0
        law = {value: weight / evidence for value, weight in weights.items() if weight > 0}
        for when in (0.0, every_step):
            program = Program(lm, two_texts(lm, own=not given), given=given)
            smc = SMC(program, num_particles=8, resample_when=when)
            runs = [
                (each.values, each.log_weights) for each in [await smc.run(i) for i in range(40)]
            ]
            assert_weighted_samples_from(runs, law, log_evidence=math.log(evidence), highest=None)


async def test_a_copy_inside_a_text_replays_at_its_end_alone() -> None:
    """All particles are drawn in one flush, and each execution begins at most twice."""
    begun = 0

    async def program(p: Execution) -> str:
        nonlocal begun
        begun += 1
        return await p.text(p.context([0]), max_tokens=9, constraint=constraint)

    with genrt.load(MODEL, engine="exact", cache_bytes=0) as lm:
        constraint = regex("(a|b){5,8}b", lm)
        smc = SMC(Program(lm, program), num_particles=16, resample_when=every_step)
        result = await smc.run(0)
        assert lm.statistics().batcher.flushes == len(result.infos)
    assert 16 < begun < 32


async def test_texts_of_several_stops_cannot_be_given() -> None:
    async def several(p: Execution) -> None:
        await p.text([0], max_tokens=2, stop=[1, EOS], name="t")

    refused = pytest.raises(InvalidRequest, match="t is given, and has several stops")
    with genrt.load(MODEL, engine="exact") as lm, refused:
        await SMC(Program(lm, several, given={"t": "a"}), num_particles=2).run(0)


# -- contexts ---------------------------------------------------------------------------------


async def on_lists(p: Execution) -> tuple[int, ...]:
    """Two texts, one of which begins with the other's first token; both are weighed."""
    first = [0, await p.sample([0], mask=[1, 2, 3])]
    second = [*first]
    for _ in range(3):
        first.append(await p.sample(first, mask=[0, 1, 2]))
        second += [await p.sample(second), 1]
        await p.condition(second, [1, 2])
    third = [*first[:2], await p.sample(first[:2])]
    return (*first, *second, *third)


async def on_contexts(p: Execution) -> tuple[int, ...]:
    """The same by contexts."""
    first = p.context([0])
    first.append(await p.sample(first, mask=[1, 2, 3]))
    second, unused = first.fork(), p.context(first)
    unused.close()
    for _ in range(3):
        first.append(await p.sample(first, mask=[0, 1, 2]))
        second.extend([await p.sample(second), 1])
        await p.condition(second, [1, 2])
    third = first.fork()
    third.cut(2)
    third.append(await p.sample(third))
    return (*first.token_ids, *second.token_ids, *third.token_ids)


def stated(lm: AsyncLM, max_tokens: int = 9) -> Any:
    """A text of ``constrained`` by a context and the constraint's states."""
    start = regex(PATTERN, lm).start()

    async def program(p: Execution) -> tuple[int, ...]:
        context, state = p.context(PROMPT), start
        allowed: Any = state
        while (token := await p.sample(context, mask=allowed)) != EOS:
            context.append(token)
            allowed = state = state.advance(token)
            if len(context) == len(PROMPT) + max_tokens - 1:
                allowed = state.mask() & (torch.arange(5) == EOS)
        return tuple(context.token_ids[len(PROMPT) :])

    return program


@pytest.mark.parametrize("kind", [Program, lambda *own: Forgetful(Program(*own))])
async def test_a_state_as_the_mask_draws_as_its_mask(kind: Any) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        masked = SMC(Program(lm, constrained(lm, max_tokens=9)), num_particles=9)
        expected = await masked.run(1)
        again = await SMC(kind(lm, stated(lm)), num_particles=9).run(1)
    assert same(again, expected)


@pytest.mark.parametrize("when", [0.0, 0.7, every_step])
async def test_contexts_draw_as_their_tokens_do(when: Any) -> None:
    """Whether particles are copied, go on, or run again."""
    with genrt.load(MODEL, engine="exact") as lm:
        expected = await SMC(Program(lm, on_lists), num_particles=12, resample_when=when).run(3)
        smc = SMC(Program(lm, on_contexts), num_particles=12, resample_when=when)
        forgetful: Any = Forgetful(Program(lm, on_contexts))
        again = SMC(forgetful, num_particles=12, resample_when=when)
        assert same(await smc.run(3), expected)
        assert same(await again.run(3), expected)


async def nothing(smc: SMC, state: Any) -> None:
    """Nothing happens."""


async def restarted(smc: SMC, state: Any) -> None:
    await smc.model.lm.arestart()  # type: ignore[attr-defined]


async def updated(smc: SMC, state: Any) -> None:
    """The weights are replaced by equal ones."""
    await smc.model.lm.update_weights({"table": MODEL.table})  # type: ignore[attr-defined]


async def cancelled(smc: SMC, state: Any) -> None:
    """A step is cancelled, anywhere on its way."""
    step = asyncio.ensure_future(smc.step(state))
    for _ in range(state.step * 5 % 9):
        await asyncio.sleep(0)
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)


async def elsewhere(smc: SMC, state: Any) -> None:
    """Another thread's loop takes the same step, and is closed."""
    await asyncio.to_thread(asyncio.run, smc.step(state))


async def interrupted_loop(smc: SMC, state: Any) -> None:
    """Another thread's loop is closed in the middle of the same step."""

    async def begin() -> None:
        step = asyncio.ensure_future(smc.step(state))
        await asyncio.sleep(0)
        assert not step.done()

    await asyncio.to_thread(asyncio.run, begin())


EVENTS = nothing, restarted, updated, cancelled, elsewhere, interrupted_loop


async def on_texts(p: Execution) -> tuple[int, ...]:
    """Texts that end at different steps, beside draws and answers."""
    context = p.context([0])
    for _ in range(2):
        text = await p.text(context, max_tokens=3)
        context.extend([*text.token_ids, await p.sample(context)])
        context.append((await p.lm.draw(context.token_ids)).token_id)
        p.observe(likes(text.token_ids))
    return tuple(context.token_ids)


@pytest.mark.parametrize("program", [on_contexts, on_texts])
@pytest.mark.parametrize("when", [0.0, every_step])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
async def test_what_happens_between_two_steps_changes_no_result(
    event: Any, when: Any, program: Any
) -> None:
    """Neither to the runtime nor to the other one, which runs at the same time."""

    async def run(lm: AsyncLM, event: Any) -> Result:
        smc = SMC(Program(lm, program), num_particles=6, resample_when=when)
        state, infos = smc.init(3), []
        while not state.done:
            await event(smc, state)
            state, info = await smc.step(state)
            infos.append(info)
        return smc.result(state, infos=infos)

    with genrt.load(MODEL, engine="exact") as lm, genrt.load(MODEL, engine="exact") as other:
        expected = await run(other, nothing)
        found = await asyncio.gather(run(lm, event), run(other, nothing))
        assert same(found[0], expected)
        assert same(found[1], expected)
        smc = SMC(Program(lm, on_contexts), num_particles=6, resample_when=when)
        state, _ = await smc.step(smc.init(0))
    with pytest.raises(Closed):
        await smc.step(state)


async def test_finished_calls_of_a_program_are_forgotten() -> None:
    calls: list[Any] = []

    async def program(p: Execution) -> None:
        context = p.context([0])
        for _ in range(30):
            call = p.sample(context)
            calls.append(weakref.ref(call))
            context.append(await call)
            del call
            assert sum(each() is not None for each in calls) <= 2

    with genrt.load(MODEL, engine="exact") as lm:
        await SMC(Program(lm, program), num_particles=1).run(0)
    assert len(calls) == 30


async def test_a_particle_may_not_sample_after_another_s_context() -> None:
    held: list[Any] = []

    async def program(p: Execution) -> None:
        held.append(p.context([0]))
        await p.sample(held[0])

    refused = pytest.raises(InvalidRequest, match="sample got a context of others")
    with genrt.load(MODEL, engine="exact") as lm, refused:
        await SMC(Program(lm, program), num_particles=2).run(0)


async def test_copied_particles_extend_what_their_parents_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every draw after the first extends a sequence by its number, also after resampling and in a copy
    that has run again; a step is one request."""
    sent: list[PopulationDraw] = []

    async def program(p: Execution) -> None:
        context = p.context([0])
        for _ in range(4):
            context.append(await p.sample(context, mask=[0, 1, 2]))

    with genrt.load(MODEL, engine="exact") as lm:
        ask = lm._asker.ask

        async def recorded(requests: Any, **options: Any) -> Any:
            sent.extend(requests)
            return await ask(requests, **options)

        monkeypatch.setattr(lm._asker, "ask", recorded)
        await SMC(Program(lm, program), num_particles=8, resample_when=every_step).run(0)
    assert [len(each) for each in sent] == [8] * 4
    assert [each.origins is None for each in sent] == [True, False, False, False]


class Mute(ExactEngine):
    """A model whose checkpoint came without a tokenizer."""

    def __init__(self, model: NGram) -> None:
        super().__init__(model)
        self.tokenizer = None


async def test_programs_run_on_a_model_without_a_tokenizer() -> None:
    async def program(p: Execution) -> tuple[int, int]:
        first = await p.sample([0])
        return first, await p.sample([0, first])

    async with await genrt.aload(engine=lambda: Mute(MODEL)) as lm:
        result = await SMC(Program(lm, program), num_particles=5).run(0)
    assert result.texts == ("",) * 5
    assert result.token_ids == result.values


async def test_a_program_may_make_its_constraint_itself() -> None:
    """A copy makes another one, whose states allow the same tokens."""
    with genrt.load(MODEL, engine="exact") as lm:

        async def own(p: Execution) -> str:
            context, state = p.context([0]), regex("[ab]{1,6}", p.lm).start()
            for _ in range(3):
                token = await p.sample(context, mask=state)
                if token == 4:
                    break
                context.append(token)
                state = state.advance(token)
            return context.text

        result = await SMC(Program(lm, own), num_particles=12, resample_when=1.0).run(0)
    assert any(info.resampled for info in result.infos)


# -- proposals, given draws, recorded answers -------------------------------------------------


async def proposed(p: Execution) -> tuple[int, int, str]:
    """Draws from other laws than those of the target."""
    context = p.context([0])
    first = await p.sample(context, mask=[0, 1, 2], proposal=[1], name="first")
    context.append(first)
    second = await p.sample([0, first], proposal=context.fork(), name="second")
    side = await p.choice("lr", log_weights=[0.0, 1.0], proposal=[1.0, 0.0], name="side")
    return first, second, side


@pytest.mark.parametrize("given", [{}, {"first": 1}, {"side": "l", "second": 2}], ids=str)
async def test_proposals_and_given_draws_leave_the_target_as_it_is(given: dict[str, Any]) -> None:
    full = NGram.random(5, seed=8)  # a proposal has to reach every token
    table = torch.where(torch.arange(5)[:, None] == 1, full.table, MODEL.table)
    with genrt.load(NGram(MODEL.vocabulary, table, eos_token_id=EOS), engine="exact") as lm:
        rows, left = table.double().exp(), 1 / (1 + math.e)
        weights = {
            (one, two, side): float(rows[0, one] * rows[one, two]) * share
            for one, two in itertools.product(range(3), range(5))
            for side, share in {"l": left, "r": 1 - left}.items()
            if given.items() <= {"first": one, "second": two, "side": side}.items()
        }
        evidence = sum(weights.values())
        law = {value: weight / evidence for value, weight in weights.items() if weight > 0}
        for when in (0.0, every_step):
            smc = SMC(Program(lm, proposed, given=given), num_particles=8, resample_when=when)
            results = [await smc.run(seed) for seed in range(40)]
            runs = [(result.values, result.log_weights) for result in results]
            assert_weighted_samples_from(runs, law, log_evidence=math.log(evidence), highest=None)


async def test_a_trace_is_read_and_replayed_by_its_names() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        smc = SMC(Program(lm, proposed), num_particles=4)
        state = smc.init(0)
        while not smc.is_done(state):
            state, _ = await smc.step(state)
        alive = [each for each in state.particles if each.finished]
        assert alive
        for trace in alive:
            again = await importance_sampling(
                Program(lm, proposed, given=trace.named), num_particles=1
            ).run(9)
            assert tuple(trace.named.values()) == trace.value == again.values[0]
            logs = sum(each.log_target for each in trace.path())
            assert again.log_evidence == pytest.approx(logs, abs=1e-5)
        with pytest.raises(InvalidRequest, match="side was given 'x', which is not one of"):
            await SMC(Program(lm, proposed, given={"side": "x"}), num_particles=1).run(0)
        with pytest.raises(InvalidRequest, match="give a dict"):
            Program(lm, proposed, given=[1])  # type: ignore[arg-type]


async def asking(p: Execution) -> tuple[Any, ...]:
    """Draws after answers of every recorded kind, which have seeds of the particle's own."""
    context, heard = p.context([0]), list[Any]()
    inner = importance_sampling(TextModel(p.lm, [1], max_tokens=2), num_particles=3)
    for _ in range(3):
        ids = context.token_ids
        one, two = await asyncio.gather(
            p.lm.sample(ids, max_tokens=2), p.lm.draw(ids, mask=torch.ones(5, dtype=torch.bool))
        )
        drawn = await context.draw()
        scores = await context.score([1, 2])
        heard += [tuple(one), two.token_id, drawn.token_id, tuple(scores.tolist())]
        scores.fill_(0.0)  # its own copy
        heard.append((await p.lm.run(inner)).token_ids)
        heard.append(tuple((await p.lm.batch_sample([ids, ids], max_tokens=2))[1]))
        p.observe(-0.5 * drawn.token_id)
        context.append(await p.sample(context))
    return *heard, *context.token_ids


async def test_answers_are_recorded_and_have_seeds_of_their_particle() -> None:
    with genrt.load(MODEL, engine="exact", cache_bytes=0) as lm:
        smc = SMC(Program(lm, asking), num_particles=12, resample_when=every_step)
        result = await smc.run(3)
        assert len(set(result.values)) > 1  # particles heard different answers
        replayed: Any = Forgetful(Program(lm, asking))
        before = lm.statistics().batcher.questions
        assert same(await SMC(replayed, num_particles=12, resample_when=every_step).run(3), result)
        of_replays = lm.statistics().batcher.questions - before
        assert same(await smc.run(3), result)
        assert lm.statistics().batcher.questions - before == 2 * of_replays


async def test_inference_in_a_program_runs_once() -> None:
    runs = 0

    class Counting:
        async def run(self, seed: int) -> int:
            nonlocal runs
            runs += 1
            return seed

    async def program(p: Execution) -> tuple[int, ...]:
        heard = list[int]()
        for _ in range(3):
            heard.append(await p.lm.run(Counting()))
            await p.sample([0])
        return tuple(heard)

    with genrt.load(MODEL, engine="exact") as lm:
        model: Any = Forgetful(Program(lm, program))
        result = await SMC(model, num_particles=4).run(0)
        assert runs == 4 * 3
        assert len({seed for value in result.values for seed in value}) == runs


# -- findings of a reader who tried to break it -------------------------------------------------


async def test_questions_that_draw_are_called_by_the_program_itself() -> None:
    """In which order tasks go on, a replay cannot know."""

    async def program(p: Execution) -> Any:
        async def one() -> Any:
            await p.lm.score([0], [1])
            return await p.lm.sample([0], max_tokens=1)

        return await asyncio.gather(one(), p.lm.sample([0], max_tokens=1))

    async def seeded(p: Execution) -> Any:
        async def one() -> Any:
            return await p.lm.sample([0], max_tokens=1, seed=7)

        found = await asyncio.gather(one(), one(), p.lm.sample([0], max_tokens=1))
        return tuple(map(tuple, found))

    with genrt.load(MODEL, engine="exact") as lm:
        with pytest.raises(InvalidRequest, match="sample was called in another task"):
            await SMC(Program(lm, program), num_particles=1).run(0)
        result = await SMC(Program(lm, seeded), num_particles=4).run(0)
        assert all(one == two for one, two, _ in result.values)


@pytest.mark.parametrize("kind", ["adapter", "text"])
async def test_an_error_that_a_program_catches_is_recorded(kind: str) -> None:
    async def program(p: Execution) -> list[str]:
        caught = []
        try:
            if kind == "adapter":
                await p.lm.score([0], [1], adapter="other")
            else:
                await p.lm.sample([0] * 5, max_tokens=10**6)
        except UnknownAdapter:
            caught.append("adapter")
        except GenrtError:
            caught.append("text")
        await p.sample([0])
        await p.sample([0])
        return caught

    with genrt.load(MODEL, engine="exact") as lm:
        model: Any = Forgetful(Program(lm, program))
        result = await SMC(model, num_particles=3).run(0)
        assert result.values == ([kind],) * 3


async def test_given_values_are_those_and_their_probabilities_together() -> None:
    first, second = object(), object()

    async def program(p: Execution) -> Any:
        drawn = await p.choice([first, second, first], name="thing")
        await p.sample([0])
        return drawn

    with genrt.load(MODEL, engine="exact") as lm:
        for thing, share in ((first, 2 / 3), (second, 1 / 3)):
            smc = SMC(Program(lm, program, given={"thing": thing}), num_particles=2)
            result = await smc.run(0)
            assert result.values == (thing, thing)
            assert result.log_evidence == pytest.approx(math.log(share))


async def test_a_given_array_is_the_one_with_equal_numbers() -> None:
    async def program(p: Execution) -> float:
        drawn = await p.choice([np.array([1.0, math.nan]), np.array([2.0])], name="row")
        await p.sample([0])
        return float(drawn[0])

    with genrt.load(MODEL, engine="exact") as lm:
        given = {"row": np.array([1.0, math.nan])}
        result = await SMC(Program(lm, program, given=given), num_particles=2).run(0)
    assert result.values == (1.0, 1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"t": 5}, "the given t must be from 0 to 4"),
        ({"t": "a"}, "the given t must be an int"),
        ({"t": 2.7}, "the given t must be an int"),
    ],
)
async def test_given_tokens_are_checked(given: Any, message: str) -> None:
    async def program(p: Execution) -> int:
        return await p.sample([0], mask=[0, 1], name="t")

    with genrt.load(MODEL, engine="exact") as lm:
        with pytest.raises(InvalidRequest, match=message):
            await SMC(Program(lm, program, given=given), num_particles=2).run(0)
        forbidden = await SMC(Program(lm, program, given={"t": 2}), num_particles=2).run(0)
        assert forbidden.ess == 0


async def test_what_is_given_without_probability_ends_the_particle_at_once() -> None:
    async def program(p: Execution) -> int:
        drawn = await p.choice("ab", log_weights=[0.0, -math.inf], name="x")
        return {"a": 1}[drawn]

    with genrt.load(MODEL, engine="exact") as lm:
        result = await SMC(Program(lm, program, given={"x": "b"}), num_particles=3).run(0)
        assert result.ess == 0


async def test_names_are_different_and_proposals_reach_every_value() -> None:
    async def twice(p: Execution) -> None:
        for _ in range(2):
            await p.choice("ab", name="x")

    async def short(p: Execution) -> None:
        await p.choice("ab", proposal=[0.0, -math.inf])

    with genrt.load(MODEL, engine="exact") as lm:
        with pytest.raises(InvalidRequest, match="two draws are called 'x'"):
            await SMC(Program(lm, twice), num_particles=1).run(0)
        with pytest.raises(InvalidRequest, match="cannot draw one of its values"):
            await SMC(Program(lm, short), num_particles=1).run(0)


async def test_answers_belong_to_the_record_and_p_lm_is_the_runtime() -> None:
    class Reporting:
        async def run(self, seed: int) -> Any:
            return {"seeds": [seed]}

    class Naming:
        async def run(self, seed: int) -> Any:
            return lm, seed

    async def program(p: Execution) -> int:
        assert p.lm == lm
        assert regex("a", p.lm).start() is not None
        found = await p.lm.run(Reporting())
        assert (await p.lm.run(Naming()))[0] is lm
        found["seeds"].append(0)
        completion = await p.lm.generate([0], max_tokens=2, logprobs=1)
        await p.sample([0])
        await p.sample([0])
        return len(found["seeds"]) + 10 * len(completion.token_ids or ())

    with genrt.load(MODEL, engine="exact") as lm:
        for _ in range(2):
            model: Any = Forgetful(Program(lm, program))
            result = await SMC(model, num_particles=3).run(0)
            assert {value % 10 for value in result.values} == {2}


async def test_what_constraints_keep_for_a_runtime_is_made_once_for_all_executions() -> None:
    made = list[Any]()
    cache: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    async def program(p: Execution) -> int:
        def make(runtime: Any) -> int:
            made.append(runtime)
            return len(made)

        found = kept_for(p.lm, cache, make)
        await p.sample([0])
        await p.sample([0])
        return found

    with genrt.load(MODEL, engine="exact") as lm:
        model: Any = Forgetful(Program(lm, program))
        result = await SMC(model, num_particles=3).run(0)
        assert result.values == (1, 1, 1)
        assert made[0] is lm


async def test_a_proposal_is_a_context_of_the_particle() -> None:
    async def program(p: Execution) -> int:
        return await p.sample([0], proposal=lm.context([1]))

    with (
        genrt.load(MODEL, engine="exact") as lm,
        pytest.raises(InvalidRequest, match=r"begin it by p\.context"),
    ):
        await SMC(Program(lm, program), num_particles=1).run(0)


async def test_a_given_name_that_no_draw_has_is_refused() -> None:
    async def program(p: Any) -> str:
        return str(await p.choice(["a", "b"], name="x"))

    async with await genrt.aload(MODEL, engine="exact") as lm:
        with pytest.raises(InvalidRequest, match="without a draw called 'X', which is given"):
            await SMC(Program(lm, program, given={"X": "a"}), num_particles=2).run(0)


@pytest.mark.parametrize("name", ["stream", "stream_chat"])
async def test_a_stream_in_a_program_is_refused(name: str) -> None:
    async def program(p: Any) -> None:
        getattr(p.lm, name)([1], max_tokens=1)

    async with await genrt.aload(MODEL, engine="exact") as lm:
        with pytest.raises(InvalidRequest, match="cannot record a stream"):
            await SMC(Program(lm, program), num_particles=2).run(0)
