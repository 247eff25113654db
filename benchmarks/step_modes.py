"""What one step of N particles is: the particles, and every way to ask about them.

fresh, decode                                 vLLM directly, an ``LLM``'s generate
resident, batch, resample, draw, cached       genrt, a question a particle
contexts, contexts-rows, contexts-fork        genrt, a question a particle, which holds a context
programs                                      genrt, importance sampling of a program with a context
population, population-resample, populations  genrt, a question for all of them, or a quarter
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

import genrt
from genrt.inference import Execution, Program, importance_sampling

MANY = 4
"""In how many populations the particles are, where they are several."""

SHORT = 2
"""Tokens of the shorter of ``decode``'s two generations, and of a population before it is timed."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A mode in one repeat: milliseconds and engine steps a step, tokens put through the model for a
    particle and step, bytes copied to the host a step; milliseconds until ``SHORT`` steps were done, in
    the modes whose first steps are not timed with the others."""

    ms: float
    engine_steps: float | None = None
    computed_tokens: float | None = None
    host_bytes: float | None = None
    begin_ms: float | None = None


class Particles:
    """N contexts, and everything random that happens to them, decided beforehand.

    Step ``s`` appends ``tokens[s][n]`` to particle ``n``. Resampling copies the first half of
    ``orders[s]`` onto the second.
    """

    def __init__(
        self, count: int, context: int, shared: int, steps: int, vocab_size: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, vocab_size, (count, context + steps), generator=generator)
        drawn[:, :shared] = drawn[0, :shared].clone()
        self.contexts: list[list[int]] = drawn[:, :context].tolist()
        self.tokens: list[list[int]] = drawn[:, context:].T.tolist()
        self.orders = [torch.randperm(count, generator=generator).tolist() for _ in range(steps)]

    def __len__(self) -> int:
        return len(self.contexts)

    def extend(self, step: int) -> None:
        for context, token in zip(self.contexts, self.tokens[step], strict=True):
            context.append(token)

    def resample(self, step: int) -> None:
        half = len(self) // 2
        order = self.orders[step]
        for survivor, replaced in zip(order[:half], order[len(self) - half :], strict=True):
            self.contexts[replaced] = list(self.contexts[survivor])


def clock() -> float:
    """Seconds, once the device has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# -- vLLM's modes -----------------------------------------------------------------------------


def fresh(llm: Any, particles: Particles, steps: int) -> Measured:
    """What a runtime does that keeps nothing from one step to the next, with nothing around it."""
    generate(llm, particles.contexts, 1)
    gc.collect()
    computed, started = 0, clock()
    for step in range(steps):
        particles.extend(step)
        for output in generate(llm, particles.contexts, 1):
            computed += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
    ms = (clock() - started) * 1e3 / steps
    return Measured(ms, computed_tokens=computed / steps / len(particles))


def decode(llm: Any, particles: Particles, steps: int) -> Measured:
    """The untimed generation leaves the prompts in the prefix cache, alike for the two timed ones."""
    generate(llm, particles.contexts, 1)
    seconds = []
    for length in (SHORT, SHORT + steps):
        gc.collect()
        started = clock()
        generate(llm, particles.contexts, length)
        seconds.append(clock() - started)
    return Measured((seconds[1] - seconds[0]) * 1e3 / steps, begin_ms=seconds[0] * 1e3)


def generate(llm: Any, contexts: Sequence[list[int]], max_tokens: int) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": context} for context in contexts]
    return cast("list[Any]", llm.generate(prompts, params, use_tqdm=False))


# -- genrt's modes ----------------------------------------------------------------------------


async def resident(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """Particles know nothing of each other: one may be a step ahead."""

    async def run(number: int) -> None:
        context = particles.contexts[number]
        for step in range(steps):
            context.append(particles.tokens[step][number])
            await lm.next_token_logprobs(context)

    return await metered(lm, particles, steps, together(run, particles))


async def draw(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """Every mask allows about half of the vocabulary, packed as a constraint packs it."""
    masks = packed_masks(8, lm.vocab_size)

    async def run(number: int) -> None:
        context = particles.contexts[number]
        context.append(particles.tokens[0][number])
        for step in range(steps):
            drawn = await lm.draw(context, mask=masks[(number + step) % len(masks)])
            context.append(drawn.token_id)

    return await metered(lm, particles, steps, together(run, particles))


async def contexts(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """As ``draw``, and each particle holds a context."""
    masks = [*packed_masks(8, lm.vocab_size)]

    async def run(number: int, held: genrt.Context, count: int) -> None:
        for step in range(count):
            drawn = await held.draw(mask=masks[(number + step) % len(masks)])
            held.append(drawn.token_id)

    return await of_contexts(lm, particles, steps, run)


async def contexts_rows(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """As ``resident``, and each particle holds a context."""

    async def run(number: int, held: genrt.Context, count: int) -> None:
        for step in range(count):
            await held.logprobs()
            held.append(particles.tokens[step][number])

    return await of_contexts(lm, particles, steps, run)


async def contexts_fork(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """Half of the contexts are replaced by forks of the others in every step, which ends for all at
    once."""
    masks, half = [*packed_masks(8, lm.vocab_size)], len(particles) // 2
    await ask_all(lm, particles)
    began = clock()
    held = [lm.context(each) for each in particles.contexts]
    for each, token in zip(held, particles.tokens[0], strict=True):
        each.append(token)

    async def ask(number: int, step: int) -> None:
        drawn = await held[number].draw(mask=masks[(number + step) % len(masks)])
        held[number].append(drawn.token_id)

    async def run(count: int) -> None:
        for step in range(count):
            order = particles.orders[step]
            for survivor, replaced in zip(order[:half], order[len(held) - half :], strict=True):
                held[replaced] = held[survivor].fork()
            await asyncio.gather(*(ask(number, step) for number in range(len(held))))

    await run(SHORT)
    return await timed(lm, particles, steps, run(steps), began)


async def programs(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """As ``contexts``, and a particle is a program, which is never copied."""
    masks = [*packed_masks(8, lm.vocab_size)]
    numbers = itertools.count()

    async def program(p: Execution) -> None:
        number = next(numbers)
        held = p.context([*particles.contexts[number], particles.tokens[0][number]])
        for step in range(SHORT + steps):
            held.append(await p.sample(held, mask=masks[(number + step) % len(masks)]))

    await ask_all(lm, particles)
    began = clock()
    sampler = importance_sampling(Program(lm, program), num_particles=len(particles))
    state = sampler.init(0)

    async def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, _ = await sampler.step(state)

    await run(SHORT)
    return await timed(lm, particles, steps, run(steps), began)


async def of_contexts(
    lm: genrt.AsyncLM,
    particles: Particles,
    steps: int,
    run: Callable[[int, genrt.Context, int], Coroutine[Any, Any, None]],
) -> Measured:
    """Run each particle with a context for a few steps, then time it."""
    await ask_all(lm, particles)
    began = clock()
    held = [lm.context(each) for each in particles.contexts]
    for each, token in zip(held, particles.tokens[0], strict=True):
        each.append(token)

    async def all_of(count: int) -> None:
        await asyncio.gather(*(run(number, each, count) for number, each in enumerate(held)))

    await all_of(SHORT)
    return await timed(lm, particles, steps, all_of(steps), began)


async def cached(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """The contexts stay as they are, so that their rows are there from the first time on."""

    async def run(number: int) -> None:
        for _ in range(steps):
            await lm.next_token_logprobs(particles.contexts[number])

    return await metered(lm, particles, steps, together(run, particles))


async def batch(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    async def run() -> None:
        for step in range(steps):
            particles.extend(step)
            await lm.batch_next_token_logprobs(particles.contexts)

    return await metered(lm, particles, steps, run())


async def resample(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """Resampling needs the weights of all, so a step begins when the last one has ended for all."""

    async def run() -> None:
        for step in range(steps):
            particles.resample(step)
            particles.extend(step)
            await asyncio.gather(*map(lm.next_token_logprobs, particles.contexts))

    return await metered(lm, particles, steps, run())


async def population(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """Half of the vocabulary is allowed to each, as in ``draw``."""
    return await of_population(lm, particles, steps, resamples=False)


async def population_resample(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """Half of the sequences are replaced in every step."""
    return await of_population(lm, particles, steps, resamples=True)


async def populations(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """Each population goes on by itself, as runs do that are awaited together."""
    return await of_population(lm, particles, steps, parts=MANY, resamples=False)


async def of_population(
    lm: genrt.AsyncLM, particles: Particles, steps: int, *, parts: int = 1, resamples: bool
) -> Measured:
    """A draw for all particles a step, in so many populations; the only one may be resampled."""
    count, half = len(particles), len(particles) // 2
    masks = packed_masks(8, lm.vocab_size)[torch.arange(count) % 8]
    ancestors = [torch.arange(count) for _ in range(steps)]
    for order, ancestor in zip(particles.orders, ancestors, strict=True):
        ancestor[order[count - half :]] = torch.tensor(order[:half], dtype=torch.int64)
    edges = sorted({n * count // parts for n in range(parts + 1)})
    slices = [slice(*edge) for edge in itertools.pairwise(edges)]

    await ask_all(lm, particles)
    began = clock()
    with contextlib.ExitStack() as opened:
        several = [opened.enter_context(lm.population(particles.contexts[each])) for each in slices]
        for population, part in zip(several, slices, strict=True):
            population.append(particles.tokens[0][part])

        async def run(population: genrt.Population, masks: torch.Tensor, count: int) -> None:
            for ancestor in ancestors[:count]:
                draws = await population.draw(masks=masks)
                population.append(draws.token_ids)
                if resamples:
                    population.resample(ancestor)

        async def run_all(count: int) -> None:
            of_each = zip(several, slices, strict=True)
            await asyncio.gather(*(run(each, masks[part], count) for each, part in of_each))

        await run_all(SHORT)
        return await timed(lm, particles, steps, run_all(steps), began)


async def together(run: Callable[[int], Coroutine[Any, Any, None]], particles: Particles) -> None:
    await asyncio.gather(*map(run, range(len(particles))))


async def metered(
    lm: genrt.AsyncLM, particles: Particles, steps: int, work: Coroutine[Any, Any, None]
) -> Measured:
    """Ask every context once, then time the work."""
    await ask_all(lm, particles)
    return await timed(lm, particles, steps, work)


async def ask_all(lm: genrt.AsyncLM, particles: Particles) -> None:
    """Have every context be computed."""
    await asyncio.gather(*map(lm.next_token_logprobs, particles.contexts))
    gc.collect()


async def timed(
    lm: genrt.AsyncLM,
    particles: Particles,
    steps: int,
    work: Coroutine[Any, Any, None],
    began: float | None = None,
) -> Measured:
    """Time the work, whose first steps began then, and take what the engine counted meanwhile."""
    before, started = lm.statistics().engine, clock()
    await work
    ms, after = (clock() - started) * 1e3 / steps, lm.statistics().engine
    return Measured(
        ms,
        engine_steps=(after.steps - before.steps) / steps,
        computed_tokens=(after.computed_tokens - before.computed_tokens) / steps / len(particles),
        host_bytes=(after.bytes_to_host - before.bytes_to_host) / steps,
        begin_ms=None if began is None else (started - began) * 1e3,
    )


def packed_masks(count: int, vocab_size: int) -> torch.Tensor:
    """Random masks, int32 ``[count, ceil(vocab_size / 32)]``, no bit set beyond the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, math.ceil(vocab_size / 32))
    masks = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)
    masks[:, -1] &= (1 << (vocab_size - 1) % 32) - 1
    return masks


VLLM_MODES = {"fresh": fresh, "decode": decode}
GENRT_MODES = {
    "resident": resident,
    "batch": batch,
    "resample": resample,
    "draw": draw,
    "contexts": contexts,
    "contexts-rows": contexts_rows,
    "contexts-fork": contexts_fork,
    "programs": programs,
    "cached": cached,
    "population": population,
    "population-resample": population_resample,
    "populations": populations,
}
MODES = (*VLLM_MODES, *GENRT_MODES)
