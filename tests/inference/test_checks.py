"""Every number that inference takes: integers and finite numbers, of Python and numpy, no others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference import (
    SMC,
    BestOfN,
    Execution,
    Growth,
    MetropolisHastings,
    Program,
    Rejection,
    TextModel,
    importance_sampling,
)
from genrt.lm import AsyncLM
from genrt.numbers import check_float, check_int
from genrt.testing import exact_posterior

MODEL = NGram.random([b"a", b"b", b""], seed=2, eos_token_id=2)
SURE = NGram.random([b"a"], seed=0)

NEVER: list[Any] = [
    True, False, np.True_, np.array(True), torch.tensor(True), "3", b"3", None, [3], (), 1 + 0j,
    np.complex128(1), Decimal(1), math.nan, math.inf, -math.inf, np.float32("nan"), "nan",
]  # fmt: skip
"""Neither an integer nor a finite number."""

Take = Callable[[AsyncLM, Any], Any]


def model_of(lm: AsyncLM) -> TextModel:
    return TextModel(lm, [0], max_tokens=2)


def ran(lm: AsyncLM) -> Any:
    return asyncio.run(SMC(model_of(lm), num_particles=2).run(0))


def sampled_at(lm: AsyncLM, temperature: Any) -> None:
    async def program(p: Execution) -> int:
        return await p.sample([0], temperature=temperature)

    asyncio.run(SMC(Program(lm, program), num_particles=2).run(0))


INTEGERS: dict[str, Take] = {
    "SMC(num_particles)": lambda lm, n: SMC(model_of(lm), num_particles=n),
    "SMC.init(seed)": lambda lm, n: SMC(model_of(lm), num_particles=1).init(n),
    "SMC.run(seed)": lambda lm, n: asyncio.run(SMC(model_of(lm), num_particles=1).run(n)),
    "importance_sampling(num_particles)": lambda lm, n: importance_sampling(
        model_of(lm), num_particles=n
    ),
    "MetropolisHastings(num_chains)": lambda lm, n: MetropolisHastings(
        model_of(lm), num_chains=n, num_steps=9
    ),
    "MetropolisHastings(num_steps)": lambda lm, n: MetropolisHastings(
        model_of(lm), num_chains=9, num_steps=n
    ),
    "MetropolisHastings(warm_up)": lambda lm, n: MetropolisHastings(
        model_of(lm), num_chains=9, num_steps=9, warm_up=n
    ),
    "MetropolisHastings(attempts)": lambda lm, n: MetropolisHastings(
        model_of(lm), num_chains=9, num_steps=9, attempts=n
    ),
    "MetropolisHastings.init(seed)": lambda lm, n: MetropolisHastings(
        model_of(lm), num_chains=1, num_steps=1
    ).init(n),
    "Rejection(num_samples)": lambda lm, n: Rejection(model_of(lm), num_samples=n, max_texts=9),
    "Rejection(max_texts)": lambda lm, n: Rejection(model_of(lm), num_samples=9, max_texts=n),
    "Rejection(batch_size)": lambda lm, n: Rejection(
        model_of(lm), num_samples=9, max_texts=9, batch_size=n
    ),
    "Rejection.init(seed)": lambda lm, n: Rejection(model_of(lm), num_samples=9, max_texts=9).init(
        n
    ),
    "BestOfN(n)": lambda lm, n: BestOfN(model_of(lm), n=n),
    "BestOfN.init(seed)": lambda lm, n: BestOfN(model_of(lm), n=1).init(n),
    "TextModel(max_tokens)": lambda lm, n: TextModel(lm, [0], max_tokens=n),
    "TextModel(prompt)": lambda lm, n: TextModel(lm, [0, n], max_tokens=2),
    "Result.sample(count)": lambda lm, n: ran(lm).sample(n, seed=0),
    "Result.sample(seed)": lambda lm, n: ran(lm).sample(1, seed=n),
    "Result.genealogy(lineages)": lambda lm, n: ran(lm).genealogy(lineages=n),
    "exact_posterior(prompt)": lambda lm, n: exact_posterior(MODEL, [n], max_tokens=2),
    "exact_posterior(max_tokens)": lambda lm, n: exact_posterior(MODEL, [0], max_tokens=n),
    "exact_posterior(max_texts)": lambda lm, n: exact_posterior(
        SURE, [0], max_tokens=1, max_texts=n
    ),
}

NUMBERS: dict[str, Take] = {
    "SMC(resample_when)": lambda lm, x: SMC(model_of(lm), num_particles=2, resample_when=x),
    "Rejection(bound)": lambda lm, x: Rejection(model_of(lm), num_samples=2, max_texts=2, bound=x),
    "TextModel(temperature)": lambda lm, x: TextModel(lm, [0], max_tokens=2, temperature=x),
    "exact_posterior(temperature)": lambda lm, x: exact_posterior(
        MODEL, [0], max_tokens=2, temperature=x
    ),
    "Execution.sample(temperature)": sampled_at,
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_numpy_and_torch_are_taken_and_nothing_else(name: str) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        for value in (1, np.int64(1), np.uint8(1), np.array(1), torch.tensor(1)):
            INTEGERS[name](lm, value)
        for value in (*NEVER, 2.0, np.float64(2), -1):
            with pytest.raises(InvalidRequest):
                INTEGERS[name](lm, value)


@pytest.mark.parametrize("name", NUMBERS)
def test_finite_numbers_of_numpy_are_taken_and_nothing_else(name: str) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        for value in (1, 0.5, np.float32(0.5), np.float64(0.5), np.int64(1)):
            NUMBERS[name](lm, value)
        for value in (*NEVER, 10**400, -(10**400)):
            with pytest.raises(InvalidRequest):
                NUMBERS[name](lm, value)


async def promised(state: Any) -> bool:
    return False


@pytest.mark.parametrize(
    "rule", [promised, lambda state: None, lambda state: "no", lambda state: np.array([1, 0])]
)
def test_a_rule_that_gives_no_truth_value_is_refused(rule: Any) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        smc = SMC(model_of(lm), num_particles=2, resample_when=rule)
        with pytest.raises(
            InvalidRequest, match=r"resample_when gave a .*: give a rule that returns"
        ):
            smc.run_sync(0)


@pytest.mark.parametrize("chosen", [[[0], [0, 1]], ([0, 1], "ab"), ([0, 1], [None, 0]), None, {}])
def test_a_resampler_that_gives_no_ancestors_is_refused(chosen: Any) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        smc = SMC(
            model_of(lm),
            num_particles=2,
            resample_when=lambda state: True,
            resample=lambda rng, log_weights: chosen,
        )
        with pytest.raises(InvalidRequest, match="the resampler gave"):
            smc.run_sync(0)


class Wrong:
    """A model that says something else of its first growth than it should."""

    max_steps = 2

    def __init__(self, lm: AsyncLM, gain: float | None) -> None:
        self._model, self._gain = model_of(lm), gain

    def start(self) -> Any:
        return self._model.start()

    async def grow(self, particles: Sequence[Any], seed: int) -> list[Growth]:
        first, *others = await self._model.grow(particles, seed)
        return others if self._gain is None else [first._replace(log_weight=self._gain), *others]

    def text(self, particle: Any) -> str:
        return self._model.text(particle)

    def value(self, particle: Any) -> Any:
        return self._model.value(particle)


@pytest.mark.parametrize(
    ("gain", "message"),
    [(math.nan, "gained nan"), (math.inf, "gained inf"), (None, "gave 2 growths of 3 particles")],
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


def test_numbers_come_back_as_pythons() -> None:
    assert type(check_int("n", np.int32(4), 0)) is int
    assert type(check_float("x", np.float32(4))) is float
    assert check_int("seed", 10**30, 0) == 10**30
