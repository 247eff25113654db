"""Texts as particles: potentials, twists, prompts, proposals, and what is refused.

The laws are in ``test_algorithms.py`` and ``test_awrs.py``.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.constraints import predicate, regex
from genrt.engines.exact import NGram
from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.inference import SMC, BestOfN, TextModel, batched, importance_sampling
from genrt.tokens.texts import Text

PROMPT = [0]
MODEL = NGram.random([b"a", b"b", b"ab", b"ba", b""], seed=3, zeros=0.25, eos_token_id=4)


def likes_b(text: Text) -> float:
    """A log-weight of every text and prefix."""
    return 0.6 * text.bytes.count(b"b") - 2.0


def refuses_bb(text: Text) -> float:
    """-inf for some texts, and for all that begin with a prefix for which it is -inf."""
    return -math.inf if b"bb" in text.bytes else -0.3 * len(text.token_ids)


# -- potentials -------------------------------------------------------------------------------


async def test_a_twist_of_prefixes_ends_what_has_no_future() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=5, potential=refuses_bb, twist=refuses_bb)
        smc, early = SMC(model, num_particles=40, resample_when=0.0), 0
        async for state, _ in smc.steps(smc.init(0)):
            for particle, log_weight in zip(state.particles, state.log_weights, strict=True):
                refused = b"bb" in particle.generated.bytes
                assert (log_weight == -math.inf) == refused
                early += refused and not particle.finished
    assert early > 0


async def test_equal_texts_are_judged_once_in_a_step_and_prefixes_by_the_twist_alone() -> None:
    judged: list[tuple[str, Text]] = []

    def potential(text: Text) -> float:
        judged.append(("potential", text))
        return 0.0

    def twist(text: Text) -> float:
        judged.append(("twist", text))
        return 0.0

    with genrt.load(MODEL, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=3, potential=potential, twist=twist)
        smc = importance_sampling(model, num_particles=100)
        state = smc.init(0)
        while not state.done:
            judged.clear()
            going = state.unfinished
            state, _ = await smc.step(state)
            assert set(Counter(judged).values()) == {1}
            assert {text for _, text in judged} == {state.particles[i].generated for i in going}
            assert all((name == "potential") == text.finished for name, text in judged)
    assert state.log_weights.tolist() == [0.0] * 100


@pytest.mark.parametrize("kind", ["list", "tensor", "async"])
async def test_a_batched_potential_judges_the_different_texts_of_a_step_in_one_call(
    kind: str,
) -> None:
    calls: list[list[Text]] = []

    def together(texts: list[Text]) -> Any:
        calls.append(texts)
        values = [likes_b(text) for text in texts]
        return torch.tensor(values, dtype=torch.float64) if kind == "tensor" else values

    async def awaited(texts: list[Text]) -> Any:
        await asyncio.sleep(0)
        return together(texts)

    judge = batched(awaited if kind == "async" else together)
    with genrt.load(MODEL, engine="exact") as lm:
        one = TextModel(lm, PROMPT, max_tokens=4, potential=likes_b, twist=likes_b)
        expected = await SMC(one, num_particles=12).run(0)
        model = TextModel(lm, PROMPT, max_tokens=4, potential=judge, twist=judge)
        found = await SMC(model, num_particles=12).run(0)
        assert found.texts == expected.texts
        assert found.log_weights.tolist() == pytest.approx(expected.log_weights.tolist())
        assert len(calls) <= 2 * len(found.infos)
        assert all(len(set(texts)) == len(texts) for texts in calls)
        best = await BestOfN(TextModel(lm, PROMPT, max_tokens=4), n=8, score=judge).run(0)
        assert len(best.posterior()) == 1
        for wrong in (lambda texts: [0.0], lambda texts: 0.0, lambda texts: torch.zeros(2, 2)):
            model = TextModel(lm, PROMPT, max_tokens=4, twist=batched(wrong))
            with pytest.raises(InvalidRequest, match=r"(?s)texts gave .*: give .*log-weight"):
                await SMC(model, num_particles=8).run(0)


async def test_plain_potentials_are_called_off_the_event_loop() -> None:
    threads = set()

    def potential(text: Text) -> float:
        threads.add(threading.current_thread())
        return 0.0

    with genrt.load(MODEL, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=2, potential=potential)
        await SMC(model, num_particles=4).run(0)
    assert threads
    assert threading.current_thread() not in threads


class Broken(Exception):
    pass


def breaks(text: Text) -> float:
    raise Broken(str(text))


async def breaks_later(text: Text) -> float:
    await asyncio.sleep(0)
    raise Broken(str(text))


def stops(text: Text) -> float:
    return next(iter(()))


def breaks_as_coroutine(text: Text) -> Any:
    return breaks_later(text)


@pytest.mark.parametrize("option", ["potential", "twist"])
@pytest.mark.parametrize(
    ("function", "error"),
    [
        (breaks, Broken),
        (breaks_later, Broken),
        (breaks_as_coroutine, Broken),
        (stops, StopIteration),
        (lambda: 0.0, TypeError),
    ],
)
async def test_what_a_potential_raises_is_raised_and_the_state_stays_good(
    option: str, function: Any, error: type[Exception]
) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        steps = {"potential": 1, "twist": 2}  # the first one finishes texts, or none
        options: dict[str, Any] = {"max_tokens": steps[option], option: function}
        model = TextModel(lm, PROMPT, **options)
        smc = SMC(model, num_particles=20)
        state = smc.init(0)
        if error is StopIteration:  # which a coroutine may not raise
            error = RuntimeError
        for _ in range(2):
            with pytest.raises(error):
                await smc.step(state)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "the potential of .* gave None: give a log-weight"),
        ("0.5", "gave '0.5'"),
        (math.nan, "gave nan: .*finite, or -inf"),
        (math.inf, "gave inf"),
        (True, "gave True: .*constraint"),
        (np.False_, "gave np.False_: .*constraint"),
        (np.array(True), "for a condition 0.0 or -math.inf"),
        (torch.tensor(True), "for a condition 0.0 or -math.inf"),
        (10**400, "finite, or -inf"),
        (np.complex128(1), "a number"),
        (torch.tensor(1.0, device="meta"), "a number"),
        ([1.0, 2.0], "give a log-weight"),
    ],
)
async def test_what_is_no_log_weight_is_refused(answer: Any, message: str) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=2, potential=lambda text: answer)
        with pytest.raises(InvalidRequest, match=message):
            await SMC(model, num_particles=3).run(0)


# -- prompts, proposals, texts ----------------------------------------------------------------


async def test_a_step_leaves_the_masks_of_the_next_one() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=4, constraint=regex("(a|b)+", lm))
        smc = SMC(model, num_particles=30)
        state, _ = await smc.step(smc.init(0))
        assert not state.done
        left = [state.particles[index].constraint_state for index in state.unfinished]
        assert [each for each in left if each.words is None] == []


async def test_a_mask_that_is_too_complex_is_an_error_of_the_step_that_asks_for_it() -> None:
    model = NGram.random([b"a", b"b", b"ab" * 500, b""], seed=3, eos_token_id=3)
    with genrt.load(model, engine="exact") as lm:
        intractable = regex("((a|b)*a(a|b){400}){400}", lm)
        smc = SMC(TextModel(lm, PROMPT, max_tokens=4, constraint=intractable), num_particles=30)
        state, info = await smc.step(smc.init(0))
        assert 2 in info.token_ids
        for _ in range(2):
            with pytest.raises(InvalidConstraint, match="too complex"):
                await smc.step(state)


# -- wrong use --------------------------------------------------------------------------------


class Foreign:
    """Starts, as threads do, but has no states."""

    def start(self) -> None:
        return None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [0, True]}, "truth values"),
        ({"constraint": refuses_bb}, "predicate"),
        ({"constraint": Foreign()}, "a Foreign: give"),
    ],
)
def test_wrong_arguments_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        arguments: dict[str, Any] = {"lm": lm, "prompt": PROMPT, "max_tokens": 2} | options
        with pytest.raises(InvalidRequest, match=message):
            TextModel(arguments.pop("lm"), arguments.pop("prompt"), **arguments)


def test_masks_need_no_thrifty_proposal() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        constraint = regex("a*", lm)
        with pytest.raises(InvalidRequest, match="asked token by token"):
            TextModel(lm, PROMPT, max_tokens=2, constraint=constraint, proposal="awrs")


async def test_a_predicate_over_another_model_is_refused() -> None:
    other = NGram.random(9, eos_token_id=8)
    with genrt.load(MODEL, engine="exact") as lm, genrt.load(other, engine="exact") as its:
        for constraint in (regex("a*", its), predicate(lambda text: True, its)):
            with pytest.raises(InvalidRequest, match="another vocabulary, of 9 tokens"):
                TextModel(lm, PROMPT, max_tokens=2, constraint=constraint)
