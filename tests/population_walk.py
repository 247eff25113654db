"""One law: each draw is its own context's, whatever happens to its population, its questions or its
engine.

``walk`` takes populations of one runtime, or as many contexts, through random events. A list mirrors
every sequence. The draws must be those of single questions about the lists on a second, quiet runtime,
where nothing goes on by number.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from genrt.contexts import Context
from genrt.errors import EngineFailed, TimedOut
from genrt.lm import AsyncLM
from genrt.populations import Population, draw_texts
from genrt.questions.draws import batch_draw, step_seed
from genrt.runtime.concurrency import gather_all
from genrt.tokens.sampling import BatchDraw, Draw
from tests.apart import drawn_apart, products_apart

__all__ = [
    "EVENTS",
    "HeldContexts",
    "Particles",
    "Runtime",
    "Walk",
    "draw_all",
    "expect_equal",
    "walk",
]

EVENTS = (
    "advance",
    "batch",
    "beside",
    "block",
    "cancelled",
    "evicted",
    "fails",
    "not_finite",
    "paused",
    "product",
    "replaced",
    "restarted",
    "scored",
    "thread",
    "timed_out",
    "updated",
)
"""What may happen to questions and engines between two draws."""


QUIET = (
    "advance",
    "batch",
    "block",
    "cancelled",
    "evicted",
    "product",
    "scored",
    "thread",
    "timed_out",
)
"""The events that change nothing for other populations."""

MADE: list[Any] = [list, np.array, torch.tensor]
"""The forms of numbers that callers give."""


class HeldContexts:
    """A population of contexts, each asked by its own coroutine."""

    def __init__(self, contexts: Sequence[Context], vocab_size: int) -> None:
        self.contexts = [*contexts]
        self.vocab_size = vocab_size

    @classmethod
    def begin(
        cls, lm: AsyncLM, prompt: Any, n: int | None = None, *, adapter: str | None = None
    ) -> HeldContexts:
        if n is None:
            contexts = [lm.context(each, adapter=adapter) for each in prompt]
        else:
            first = lm.context(prompt, adapter=adapter)
            contexts = [lm.context(first, adapter=adapter) for _ in range(n)]
        return cls(contexts, lm.vocab_size)

    async def draw(
        self,
        *,
        masks: Any = None,
        where: Sequence[bool] | None = None,
        seed: int | None = None,
        **way: Any,
    ) -> BatchDraw:
        each_mask = [None] * len(self.contexts) if masks is None else [*masks]

        async def one(number: int) -> Draw:
            if where is not None and not where[number]:
                return Draw(-1, 0.0, 0.0)
            own = None if seed is None else seed + number
            return await self.contexts[number].draw(mask=each_mask[number], seed=own, **way)

        return batch_draw(await gather_all([one(number) for number in range(len(self.contexts))]))

    def draw_sync(self, *, seed: int) -> BatchDraw:
        return batch_draw([each.draw_sync(seed=seed + n) for n, each in enumerate(self.contexts)])

    async def logprobs(self, *, where: Sequence[bool]) -> torch.Tensor:
        asked = [each for each, is_in in zip(self.contexts, where, strict=True) if is_in]
        rows = await gather_all([each.logprobs() for each in asked])
        assert all(row.untyped_storage().nbytes() == row.nbytes for row in rows)
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    async def score(self, continuations: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        pairs = zip(self.contexts, continuations, strict=True)
        return await gather_all([context.score(after) for context, after in pairs])

    async def advance(self, blocks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Advance each context; if one is not, none is."""
        lengths = [*map(len, self.contexts)]
        try:
            pairs = zip(self.contexts, blocks, strict=True)
            found = await gather_all([context.advance(block) for context, block in pairs])
        except BaseException:
            self.cut(lengths)
            raise
        width = max(map(len, blocks), default=0)
        return torch.stack(
            [torch.nn.functional.pad(each, (0, width - len(each))) for each in found]
        )

    def append(self, token_ids: Any) -> None:
        for context, token_id in zip(self.contexts, [*map(int, token_ids)], strict=True):
            if token_id >= 0:
                context.append(token_id)

    def extend(self, token_ids: Sequence[Any]) -> None:
        for context, more in zip(self.contexts, token_ids, strict=True):
            context.extend(more)

    def cut(self, lengths: Any) -> None:
        each = [lengths] * len(self.contexts) if isinstance(lengths, int) else lengths
        for context, length in zip(self.contexts, each, strict=True):
            context.cut(int(length))

    def take(self, places: Any) -> HeldContexts:
        taken = [copy.copy(self.contexts[int(place)]) for place in places]
        return HeldContexts(taken, self.vocab_size)

    def resample(self, ancestors: Any) -> None:
        self.contexts = self.take(ancestors).contexts

    def split(self, sizes: Sequence[int]) -> list[HeldContexts]:
        first = sizes[0]
        return [self.take(range(first)), self.take(range(first, len(self.contexts)))]

    def join(self, other: HeldContexts) -> HeldContexts:
        return HeldContexts([*copy.copy(self).contexts, *other.contexts], self.vocab_size)

    def close(self) -> None:
        for each in self.contexts:
            each.close()

    def __copy__(self) -> HeldContexts:
        return self.take(range(len(self.contexts)))

    def __iter__(self) -> Iterator[list[int]]:
        return (each.token_ids for each in self.contexts)

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor([*map(len, self.contexts)], dtype=torch.int64)

    @property
    def token_ids(self) -> torch.Tensor:
        longest = max(map(len, self.contexts), default=0)
        padded = [each + [-1] * (longest - len(each)) for each in self]
        return torch.tensor(padded, dtype=torch.int64).reshape(len(padded), longest)


@dataclass(slots=True, eq=False)
class Runtime:
    """A runtime to walk on.

    Attributes:
        lm: has the populations.
        quiet: answers single questions with the same weights and adapters.
        events: the events that may happen, of ``EVENTS``.
        longest: sequences are cut from so many tokens on.
        tolerance: of log-probabilities; 0 is equality to the bit.
        adapters: the names that populations may have.
        update: gives both runtimes other weights.
        replace: gives both runtimes another adapter of the name "a".
        breaks: makes a step of ``lm`` fail, or a row of it be not finite.
        evicts: so many contexts of ``evicts`` tokens evict every sequence.
        begin: makes populations, or as many contexts: one of these at random.
    """

    lm: AsyncLM
    quiet: AsyncLM
    events: Sequence[str]
    longest: int = 38
    tolerance: float = 0.0
    adapters: Sequence[str | None] = (None,)
    update: Callable[[], Awaitable[None]] | None = None
    replace: Callable[[], Awaitable[None]] | None = None
    breaks: Callable[[str], contextlib.AbstractContextManager[None]] | None = None
    evicts: int = 40
    begin: Sequence[Callable[..., Any]] = (AsyncLM.population,)


@dataclass(slots=True, eq=False)
class Particles:
    """A population and its mirror."""

    population: Any
    lists: list[list[int]]
    adapter: str | None = None


@dataclass(slots=True, eq=False)
class Walk:
    """Populations of one runtime, and the random events that they meet.

    Attributes:
        counts: how often each event and change has happened.
    """

    runtime: Runtime
    rng: random.Random
    most: int = 3
    all: list[Particles] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    # -- draws --------------------------------------------------------------------------------

    async def draw(self, several: Sequence[Particles]) -> None:
        """Draw after some populations at once, compare with the quiet runtime, and append."""
        rng, vocab_size = self.rng, self.runtime.lm.vocab_size
        ways: list[dict[str, Any]] = []
        for each in several:
            count, way = len(each.lists), dict[str, Any](seed=rng.randrange(10**6))
            if rng.random() < 0.3:
                way["masks"] = [self.mask(vocab_size) for _ in range(count)]
            elif rng.random() < 0.1:
                generator = torch.Generator().manual_seed(way["seed"])
                way["masks"] = torch.rand(count, vocab_size, generator=generator) < 0.5
            if rng.random() < 0.2:
                way["temperature"] = rng.choice([0.0, 0.5, 2.0])
            ways.append(way)
        wheres = [
            [rng.random() < 0.7 for _ in each.lists] if rng.random() < 0.2 else None
            for each in several
        ]
        found = await asyncio.gather(
            *(
                each.population.draw(**way, where=where)
                for each, way, where in zip(several, ways, wheres, strict=True)
            )
        )
        for each, way, where, draws in zip(several, ways, wheres, found, strict=True):
            await self.check(each, draws, way, where)
            tokens = draws.token_ids.tolist()
            each.population.append(rng.choice(MADE)(tokens))
            each.lists = [
                one if token < 0 else [*one, token]
                for one, token in zip(each.lists, tokens, strict=True)
            ]
            self.same(each)

    async def check(
        self,
        particles: Particles,
        draws: BatchDraw,
        way: dict[str, Any],
        where: Sequence[bool] | None = None,
    ) -> None:
        """Compare draws with those of single questions."""
        quiet, adapter = self.runtime.quiet, particles.adapter
        wanted = await drawn_apart(quiet, particles.lists, adapter=adapter, **way)
        if where is not None:
            asked, left_out = torch.tensor(where).bool(), (-1, 0.0, 0.0)
            columns = [
                torch.where(asked, each, other)
                for each, other in zip(wanted, left_out, strict=True)
            ]
            wanted = BatchDraw.of(columns, wanted.weights_version)
        expect_equal(draws, wanted, self.runtime.tolerance)

    def mask(self, vocab_size: int) -> list[int] | None:
        """Return a few allowed tokens, or none, or every token."""
        if self.rng.random() < 0.4:
            return None
        return self.rng.sample(range(vocab_size), self.rng.randint(0, min(9, vocab_size)))

    def same(self, particles: Particles) -> None:
        """Compare a population with its mirror."""
        population, lists = particles.population, particles.lists
        assert [*population] == lists
        assert population.lengths.tolist() == [len(each) for each in lists]
        longest = max(map(len, lists), default=0)
        padded = [each + [-1] * (longest - len(each)) for each in lists]
        assert population.token_ids.tolist() == padded

    # -- events -------------------------------------------------------------------------------

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(self.runtime.lm.vocab_size) for _ in range(count)]

    async def happen(self, event: str) -> None:
        """Have an event happen to one of the populations; others may draw meanwhile."""
        self.counts[event] = self.counts.get(event, 0) + 1
        one = self.rng.choice(self.all)
        others = [each for each in self.all if each is not one]
        happening = getattr(self, f"_{event}")(one)
        if event in QUIET and others and self.rng.random() < 0.5:
            await asyncio.gather(happening, self.draw(others))
        else:
            await happening

    async def one_draw(self, particles: Particles, seed: int) -> BatchDraw:
        """Draw after each sequence, also from a product with another law; a draw may be the first of a
        block, which is cut off again."""
        population: Any = particles.population
        if isinstance(population, Population) and self.rng.random() < 0.3:
            others = self.others(particles, 1)
            laws = ((1.0, 2.0), (0.5, 1.0))
            return await draw_texts([population, *others], laws, masks=None, seed=seed, where=None)
        if not isinstance(population, Population) or self.rng.random() < 0.5:
            draws: BatchDraw = await population.draw(seed=seed)
            return draws
        lengths = [len(each) for each in particles.lists]
        block = await population.draw_block(self.rng.randint(1, 4), seed=seed)
        population.cut(lengths)
        return BatchDraw.of([each[:, 0] for each in block], block.weights_version)

    async def _cancelled(self, particles: Particles) -> None:
        """A draw is given up, anywhere on its way."""
        draw = asyncio.ensure_future(self.one_draw(particles, self.rng.randrange(99)))
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.5:  # one that has reached the engine, whose step goes on
            await self.runtime.lm.next_token_logprobs(self.ids(1))
        draw.cancel()
        await asyncio.gather(draw, return_exceptions=True)

    async def _timed_out(self, particles: Particles) -> None:
        with contextlib.suppress(TimedOut):
            await particles.population.draw(timeout=self.rng.choice([0.0, 0.0001, 0.002]))

    async def _restarted(self, particles: Particles) -> None:
        """In the middle of a draw, which fails or is answered."""
        draw = asyncio.ensure_future(self.one_draw(particles, 1))
        await asyncio.sleep(0)
        await asyncio.gather(self.runtime.lm.arestart(), draw, return_exceptions=True)

    async def _updated(self, particles: Particles) -> None:
        """Both runtimes have other weights, in the middle of a draw."""
        assert self.runtime.update is not None
        draw = asyncio.ensure_future(self.one_draw(particles, 1))
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        await self.runtime.update()
        assert (await draw).weights_version <= self.runtime.lm.weights_version

    async def _replaced(self, particles: Particles) -> None:
        """In the middle of a draw, which has one of the two adapters."""
        assert self.runtime.replace is not None
        draw = asyncio.ensure_future(self.one_draw(particles, 1))
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        await self.runtime.replace()
        await draw

    async def _paused(self, particles: Particles) -> None:
        lm = self.runtime.lm
        await lm.pause()
        draw = asyncio.ensure_future(particles.population.draw(seed=4))
        await asyncio.sleep(0)
        lm.resume()
        await self.check(particles, await draw, {"seed": 4})

    async def _evicted(self, particles: Particles) -> None:
        contexts = [self.ids(self.runtime.evicts) for _ in range(40)]
        await self.runtime.lm.batch_next_token_logprobs(contexts)

    async def _thread(self, particles: Particles) -> None:
        """Another thread asks, blocking, or on a loop of its own, which is then closed."""
        own = particles.population
        blocks = self.rng.random() < 0.5
        asked = own.draw_sync if blocks else lambda seed: asyncio.run(own.draw(seed=seed))
        draws = await asyncio.to_thread(asked, seed=3)
        await self.check(particles, draws, {"seed": 3})

    async def _beside(self, particles: Particles) -> None:
        """A row of one sequence, the rows of some, and a sample share the flush."""
        lm, seed = self.runtime.lm, self.rng.randrange(10**6)
        if not particles.lists:
            return
        where, last = [self.rng.random() < 0.7 for _ in particles.lists], particles.lists[-1]
        draws, row, rows, _ = await asyncio.gather(
            particles.population.draw(seed=seed),
            lm.next_token_logprobs(last, adapter=particles.adapter),
            particles.population.logprobs(where=where),
            lm.sample(self.ids(1), max_tokens=3),
        )
        await self.check(particles, draws, {"seed": seed})
        logprob, near = float(row[draws.token_ids[-1]]), max(self.runtime.tolerance, 1e-5)
        assert abs(logprob - float(draws.logprobs[-1] + draws.log_mass[-1])) <= near
        asked = [each for each, is_in in zip(particles.lists, where, strict=True) if is_in]
        own = self.runtime.quiet, particles.adapter
        wanted = await own[0].batch_next_token_logprobs(asked, adapter=own[1])
        torch.testing.assert_close(rows, wanted, rtol=0, atol=self.runtime.tolerance)

    async def _scored(self, particles: Particles) -> None:
        lists = particles.lists
        after = [self.ids(self.rng.randrange(3)) for _ in lists]
        found = await particles.population.score(after)
        wanted = await self.runtime.quiet.batch_score(lists, after, adapter=particles.adapter)
        near = max(self.runtime.tolerance, 1e-5)
        torch.testing.assert_close(found, wanted, rtol=0, atol=near)

    async def _advance(self, particles: Particles) -> None:
        """Blocks of any lengths; now and then a cancelled one before."""
        population, lists, near = particles.population, particles.lists, self.runtime.tolerance
        more = [self.ids(self.rng.randrange(5)) for _ in lists]
        if self.rng.random() < 0.3:
            given_up = asyncio.ensure_future(population.advance(more))
            for _ in range(self.rng.randrange(4)):
                await asyncio.sleep(0)
            if not given_up.done():
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
            if given_up.cancelled():
                self.same(particles)
            else:
                await given_up
                population.cut([len(each) for each in lists])
        found = await population.advance(more)
        particles.lists = [[*one, *two] for one, two in zip(lists, more, strict=True)]
        self.same(particles)
        wanted = await self.runtime.quiet.batch_score(lists, more, adapter=particles.adapter)
        width = max(map(len, more), default=0)
        padded = [torch.nn.functional.pad(each, (0, width - len(each))) for each in wanted]
        torch.testing.assert_close(found, torch.stack(padded).float(), rtol=0, atol=max(near, 1e-5))

    async def _block(self, particles: Particles) -> None:
        """Draws in turn, each as a single question's."""
        population, seed = particles.population, self.rng.randrange(10**6)
        if not isinstance(population, Population):
            return
        found = await population.draw_block(self.rng.randint(1, 4), seed=seed)
        for number, columns in enumerate(zip(*(each.unbind(1) for each in found), strict=True), 1):
            draws = BatchDraw.of(columns, found.weights_version)
            way = {"seed": seed if number == 1 else step_seed(seed, number)}
            await self.check(particles, draws, way)
            tokens = draws.token_ids.tolist()
            particles.lists = [
                [*one, each] for one, each in zip(particles.lists, tokens, strict=True)
            ]
        self.same(particles)

    def others(self, particles: Particles, count: int) -> list[Population]:
        """Return populations of as many sequences, new ones or copies."""
        lists, found = particles.lists, list[Population]()
        for _ in range(count):
            if self.rng.random() < 0.5:
                places = self.rng.choices(range(len(lists)), k=len(lists))
                found.append(particles.population.take(places))
            else:
                contexts = [self.ids(self.rng.randint(1, 9)) for _ in lists]
                own = self.runtime.lm.population(contexts, adapter=particles.adapter)
                found.append(own)
        return found

    async def _product(self, particles: Particles) -> None:
        """Draws from the law of a population to a power, or times those of others."""
        rng, lists = self.rng, particles.lists
        if not isinstance(particles.population, Population) or not lists:
            return
        powers = [(rng.choice([1.0, 0.5]), rng.choice([1.0, 0.4, 2.0])) for _ in range(3)]
        laws = tuple(powers[: rng.randint(1, 3)])
        others = self.others(particles, len(laws) - 1)
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.3:
                await self._cancelled(particles)
            several = [particles.population, *others]
            way: dict[str, Any] = {"seed": rng.randrange(10**6), "masks": None}
            if rng.random() < 0.5:
                way["masks"] = [self.mask(self.runtime.lm.vocab_size) for _ in lists]
            found = await draw_texts(several, laws, where=None, **way)
            texts = [*zip(*several, strict=True)]
            own = self.runtime.quiet, texts, laws
            wanted = await products_apart(*own, **way, adapter=particles.adapter)
            expect_equal(found, wanted, max(self.runtime.tolerance, 1e-5))
            tokens = found.token_ids.tolist()
            for each in several:
                each.append(tokens)
            particles.lists = [
                one if token < 0 else [*one, token]
                for one, token in zip(particles.lists, tokens, strict=True)
            ]
        self.same(particles)

    async def _batch(self, particles: Particles) -> None:
        """The same contexts as lists, in another order, also by another thread at the same time."""
        lists = self.rng.sample(particles.lists, len(particles.lists))
        lm, seed, adapter = self.runtime.lm, self.rng.randrange(10**6), particles.adapter
        several = await asyncio.gather(
            lm.batch_draw(lists, seed=seed, adapter=adapter),
            asyncio.to_thread(lm.batch_draw_sync, lists, seed=seed, adapter=adapter),
        )
        wanted = await drawn_apart(self.runtime.quiet, lists, seed=seed, adapter=adapter)
        for draws in several:
            expect_equal(draws, wanted, self.runtime.tolerance)

    async def _fails(self, particles: Particles) -> None:
        await self._broken(particles, "fails")

    async def _not_finite(self, particles: Particles) -> None:
        await self._broken(particles, "not finite")

    async def _broken(self, particles: Particles, how: str) -> None:
        """A step fails, or one of its rows does; the draw is right or fails."""
        assert self.runtime.breaks is not None
        seed, draws = self.rng.randrange(10**6), None
        with self.runtime.breaks(how), contextlib.suppress(EngineFailed):
            draws = await particles.population.draw(seed=seed)
        if draws is not None:
            await self.check(particles, draws, {"seed": seed})

    # -- changes ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have one population more, of one prompt or of several."""
        lm, rng, begin = self.runtime.lm, self.rng, self.rng.choice(self.runtime.begin)
        adapter, count = rng.choice(self.runtime.adapters), rng.randint(1, 8)
        if rng.random() < 0.5:
            prompt = self.ids(rng.randint(1, 20))
            population = begin(lm, prompt, count, adapter=adapter)
            lists = [prompt] * count
        else:
            lists = [self.ids(rng.randint(1, 20)) for _ in range(count)]
            population = begin(lm, lists, adapter=adapter)
        self.all.append(Particles(population, lists, adapter))

    def change(self) -> None:
        """Have the populations change: resampled, cut, extended, split, joined, taken or closed."""
        for each in [*self.all]:
            names = ["resample"] * 3 + ["cut", "append", "extend", "rewrite", "split", "join"]
            names += ["take", "close"]
            if self.rng.random() < 0.5 and each in self.all:
                name = self.rng.choice(names)
                self.counts[name] = self.counts.get(name, 0) + 1
                getattr(self, f"_{name}")(each)
        for each in self.all:
            if max(map(len, each.lists), default=0) > self.runtime.longest:
                self._cut(each, self.rng.randint(1, self.runtime.longest // 2))
            self.same(each)
        self.all = [each for each in self.all if each.lists]
        for each in self.all[self.most + 2 :]:
            each.population.close()
        del self.all[self.most + 2 :]
        while len(self.all) < self.most:
            self.begin()

    def _resample(self, each: Particles) -> None:
        count = len(each.lists)
        ancestors = self.rng.choices(range(count), k=max(1, count + self.rng.choice([0, 0, -1, 1])))
        each.population.resample(self.rng.choice(MADE)(ancestors))
        each.lists = [each.lists[ancestor] for ancestor in ancestors]

    def _cut(self, each: Particles, to: int | None = None) -> None:
        lengths = [max(1, len(one) - self.rng.randrange(4)) for one in each.lists]
        each.population.cut(lengths if to is None else to)
        lengths = lengths if to is None else [to] * len(each.lists)
        each.lists = [one[:length] for one, length in zip(each.lists, lengths, strict=True)]

    def _append(self, each: Particles) -> None:
        tokens = [self.rng.choice([-1, *self.ids(1)]) for _ in each.lists]
        each.population.append(tokens)
        each.lists = [
            one if token < 0 else [*one, token]
            for one, token in zip(each.lists, tokens, strict=True)
        ]

    def _extend(self, each: Particles) -> None:
        more = [self.ids(self.rng.randrange(6)) for _ in each.lists]
        each.population.extend([self.rng.choice(MADE)(one) for one in more])
        each.lists = [[*one, *two] for one, two in zip(each.lists, more, strict=True)]

    def _rewrite(self, each: Particles) -> None:
        """Some have another last token."""
        each.population.cut([max(1, len(one) - 1) for one in each.lists])
        ends = [self.rng.choice([one[-1], *self.ids(1)]) for one in each.lists]
        each.population.append(ends)
        each.lists = [
            [*one[: max(1, len(one) - 1)], end] for one, end in zip(each.lists, ends, strict=True)
        ]

    def _split(self, each: Particles) -> None:
        size = self.rng.randint(0, len(each.lists))
        first, second = each.population.split([size, len(each.lists) - size])
        if self.rng.random() < 0.5:
            each.population.close()
        each.population, rest, each.lists = second, each.lists[:size], each.lists[size:]
        self.all.append(Particles(first, rest, each.adapter))

    def _join(self, each: Particles) -> None:
        others = [
            other
            for other in self.all
            if other is not each
            and other.adapter == each.adapter
            and type(other.population) is type(each.population)
            and len(other.lists) + len(each.lists) <= 12
        ]
        if others:
            other = self.rng.choice(others)
            self.all.remove(other)
            each.population = each.population.join(other.population)
            each.lists = [*each.lists, *other.lists]

    def _take(self, each: Particles) -> None:
        places = self.rng.choices(range(len(each.lists)), k=self.rng.randrange(4))
        taken = copy.copy(each.population).take(places)
        self.all.append(Particles(taken, [each.lists[place] for place in places], each.adapter))

    def _close(self, each: Particles) -> None:
        """Closed, or collected, while a copy goes on."""
        if self.rng.random() < 0.5:
            each.population.close()
        if len(self.all) > self.most:
            self.all.remove(each)
        else:
            begin = self.rng.choice(self.runtime.begin)
            each.population = begin(self.runtime.lm, each.lists, adapter=each.adapter)


def expect_equal(draws: BatchDraw, wanted: BatchDraw, tolerance: float) -> None:
    """Compare draws: the same tokens, and numbers within the tolerance."""
    assert draws.token_ids.tolist() == wanted.token_ids.tolist()
    for got, expected in zip(draws[1:], wanted[1:], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


async def draw_all(
    populations: Sequence[Population], quiet: AsyncLM, seed: int, tolerance: float = 1e-3
) -> None:
    """Draw after all populations at once, compare with the quiet runtime, and append."""
    found = await asyncio.gather(*(each.draw(seed=seed + n) for n, each in enumerate(populations)))
    for n, (population, draws) in enumerate(zip(populations, found, strict=True)):
        wanted = await drawn_apart(quiet, [*population], seed=seed + n, adapter=population.adapter)
        expect_equal(draws, wanted, tolerance)
        population.append(draws.token_ids)


async def walk(runtime: Runtime, seed: int, steps: int, *, most: int = 3) -> Walk:
    """Take populations through so many steps, and close them; every event happens at least once."""
    rng = random.Random(seed)
    made = Walk(runtime, rng, most)
    made.change()
    due = rng.sample([*runtime.events], len(runtime.events))
    for step in range(steps):
        if (
            due
            and (step + 1) * len(runtime.events)
            >= (len(runtime.events) - len(due) + 1) * steps // 2
        ):
            await made.happen(due.pop())
        elif rng.random() < 0.3:
            often = [each for each in runtime.events if each not in ("restarted", "updated")]
            await made.happen(rng.choice(often))
        some = (
            made.all if rng.random() < 0.7 else rng.sample(made.all, rng.randint(1, len(made.all)))
        )
        await made.draw(some)
        made.change()
    assert not due
    for each in made.all:
        each.population.close()
    made.all.clear()
    gc.collect()
    batcher = runtime.lm.statistics().batcher
    assert (batcher.queued, batcher.in_flight) == (0, 0)
    return made
