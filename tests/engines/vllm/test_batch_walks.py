"""Random walks of batches of lists on vLLM: they grow, are resampled and go back, are cancelled, late,
evicted and overtaken by restarts and new weights, with others asking the same engine. The draws are those
of single questions on a second, quiet runtime. Then: what is computed, and what batches at once share."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genrt.errors import TimedOut
from genrt.lm import AsyncLM
from tests.apart import drawn_apart
from tests.engines.vllm.ahead import Runtimes, two_runtimes
from tests.small_models import make_llama

pytestmark = pytest.mark.vllm

COUNT = 8
LONGEST = 80


@pytest.fixture(scope="module", params=[False, True], ids=["at once", "ahead"])
def runtimes(llama: Path, request: pytest.FixtureRequest) -> Iterator[Runtimes]:
    with two_runtimes(llama, ahead=request.param, max_num_seqs=24) as both:
        yield both


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for ``llama``."""
    return make_llama(tmp_path_factory.mktemp("other") / "model", seed=7)


class Walk:
    """Lists of token ids, and what happens to the questions about them."""

    def __init__(self, lm: AsyncLM, quiet: AsyncLM, seed: int) -> None:
        self.lm, self.quiet, self.rng = lm, quiet, random.Random(seed)
        self.contexts = [self.ids(20) for _ in range(COUNT)]
        self.older = [self.copies()]

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(self.lm.vocab_size) for _ in range(count)]

    def copies(self) -> list[list[int]]:
        return [each.copy() for each in self.contexts]

    async def cancelled(self) -> None:
        """A draw is given up, anywhere on its way."""
        draw = asyncio.ensure_future(self.lm.batch_draw(self.contexts))
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.5:  # one that has reached the engine, whose step goes on
            await self.lm.next_token_logprobs(self.ids(1))
        draw.cancel()
        await asyncio.gather(draw, return_exceptions=True)

    async def timed_out(self) -> None:
        with contextlib.suppress(TimedOut):
            await self.lm.batch_draw(self.contexts, timeout=self.rng.choice([0.0, 0.0001, 0.002]))

    async def restarted(self) -> None:
        """In the middle of a draw, which fails or is answered."""
        draw = asyncio.ensure_future(self.lm.batch_draw(self.contexts))
        await asyncio.sleep(0)
        await asyncio.gather(self.lm.arestart(), draw, return_exceptions=True)

    async def evicted(self) -> None:
        await self.lm.batch_next_token_logprobs([self.ids(40) for _ in range(40)])

    async def asked_twice(self) -> None:
        """By another thread, and of a part in another order."""
        await asyncio.gather(
            asyncio.to_thread(self.lm.batch_draw_sync, self.contexts),
            self.lm.batch_draw(self.rng.sample(self.contexts, COUNT // 2)),
        )

    async def goes_on(self) -> None:
        """Draw, beside a question of the last context and a population, and append."""
        seed, rng = self.rng.randrange(10**6), self.rng
        beside: list[Any] = [self.lm.next_token_logprobs(self.contexts[-1])]
        if rng.random() < 0.2:
            beside.append(self.lm.population(self.contexts[:3]).draw())
        masks = [None if rng.random() < 0.7 else self.ids(9) for _ in self.contexts]
        found, wanted, row, *_ = await asyncio.gather(
            self.lm.batch_draw(self.contexts, masks=masks, seed=seed),
            drawn_apart(self.quiet, self.contexts, masks=masks, seed=seed),
            *beside,
        )
        assert found.token_ids.tolist() == wanted.token_ids.tolist()
        assert float((found.logprobs - wanted.logprobs).abs().max()) < 1e-3
        assert float((found.log_mass - wanted.log_mass).abs().max()) < 1e-3
        last = float(row[found.token_ids[-1]])
        assert abs(last - float(found.logprobs[-1] + found.log_mass[-1])) < 1e-3
        for context, token in zip(self.contexts, found.token_ids.tolist(), strict=True):
            context.append(token if rng.random() < 0.9 else rng.randrange(self.lm.vocab_size))

    def change(self) -> None:
        """Other lists of the same tokens, resampled, cut, or those of an earlier step."""
        chance = self.rng.random()
        self.older = [self.copies(), *self.older[:6]]
        if chance < 0.3:
            self.contexts = [each.copy() for each in self.rng.choices(self.contexts, k=COUNT)]
        elif chance < 0.4:
            self.contexts = self.rng.sample(self.contexts, COUNT)
        elif chance < 0.5:
            self.contexts = self.rng.choice(self.older)
            self.contexts = [[*each, self.rng.choice([1, 2])] for each in self.contexts]
        if max(map(len, self.contexts)) > LONGEST:
            for each in self.contexts:
                del each[self.rng.randrange(15, 40) :]


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(0, 40), *(pytest.param(seed, 150, marks=pytest.mark.proof) for seed in range(1, 4))],
)
async def test_whatever_happens_to_its_questions_a_batch_s_draws_are_those_of_its_contexts(
    runtimes: Runtimes, llama: Path, other: Path, seed: int, steps: int
) -> None:
    lm, quiet = runtimes
    walk = Walk(lm, quiet, seed)
    happenings = [walk.cancelled, walk.timed_out, walk.evicted, walk.asked_twice]
    for step in range(steps):
        if step == steps // 4:
            await walk.restarted()
        elif step in (steps // 3, steps // 2):  # another model, and the first one again
            for each in runtimes:
                await each.update_weights(other if step == steps // 3 else llama)
        elif walk.rng.random() < 0.4:
            await walk.rng.choice(happenings)()
        await walk.goes_on()
        walk.change()
    engine: Any = lm._thread.engine
    left = lm._thread.call(lambda _: [len(engine._in_progress), len(engine._populations)])
    assert left.result() == [0, 0]
    statistics = lm.statistics()
    assert (statistics.batcher.queued, statistics.batcher.in_flight) == (0, 0)
    assert statistics.engine.forked > 0  # since the last restart
    assert statistics.engine.extended > 0


# -- what is computed, and shared ----------------------------------------------------------------


def appended(contexts: list[list[int]], token_ids: list[int]) -> None:
    for context, token_id in zip(contexts, token_ids, strict=True):
        context.append(token_id)


async def test_a_batch_that_goes_on_computes_a_token_a_context(
    runtimes: Runtimes,
) -> None:
    """As lists that grow and as new ones, also after resampling."""
    lm, _ = runtimes
    rng = random.Random(3)
    contexts = [[n, *range(30)] for n in range(COUNT)]
    for step in range(12):
        before = lm.statistics().engine
        drawn = await lm.batch_draw(contexts, seed=step)
        after = lm.statistics().engine
        if step:
            different = len({*map(tuple, contexts)})
            assert after.computed_tokens - before.computed_tokens <= COUNT
            assert after.rows - before.rows in range(different, COUNT + 1)
            assert after.steps - before.steps == 1
        appended(contexts, drawn.token_ids.tolist())
        if step in (4, 8):
            contexts = [each.copy() for each in rng.choices(contexts, k=COUNT)]


@pytest.mark.parametrize("same", [True, False], ids=["the same lists", "equal ones"])
async def test_batches_at_once_after_the_same_contexts_share_their_rows(
    runtimes: Runtimes, same: bool
) -> None:
    lm, quiet = runtimes
    rng = random.Random(1 + same)
    contexts = [[rng.randrange(300) for _ in range(20)] for _ in range(COUNT)]
    for step in range(6):
        others = contexts if same else [[int(str(n)) for n in each] for each in contexts]
        before = lm.statistics().engine
        found = await asyncio.gather(
            lm.batch_draw(contexts, seed=step), lm.batch_draw(others, seed=100 + step)
        )
        after = lm.statistics().engine
        assert after.rows - before.rows == COUNT
        assert after.computed_tokens - before.computed_tokens == (COUNT if step else 20 * COUNT)
        for drawn, seed in zip(found, (step, 100 + step), strict=True):
            wanted = await drawn_apart(quiet, contexts, seed=seed)
            assert drawn.token_ids.tolist() == wanted.token_ids.tolist()
        appended(contexts, found[0].token_ids.tolist())


@pytest.mark.parametrize("turns", range(5))
async def test_one_that_is_given_up_takes_nothing_from_the_other(
    runtimes: Runtimes, turns: int
) -> None:
    lm, quiet = runtimes
    contexts = [[n, turns, *range(20)] for n in range(COUNT)]
    for step in range(5):
        first, second = (
            asyncio.ensure_future(lm.batch_draw(contexts, seed=seed)) for seed in (step, 100)
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        (first if step % 2 else second).cancel()
        found = await asyncio.gather(first, second, return_exceptions=True)
        drawn: Any = found[1 if step % 2 else 0]
        wanted = await drawn_apart(quiet, contexts, seed=100 if step % 2 else step)
        assert drawn.token_ids.tolist() == wanted.token_ids.tolist()
        assert float((drawn.logprobs - wanted.logprobs).abs().max()) < 1e-3
        appended(contexts, drawn.token_ids.tolist())
