"""Contexts: one request for all that ask at once, and each caller on its own. The walk in
``test_populations`` compares their answers."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt import contexts
from genrt.constraints import abitmasks, all_of, predicate, products, regex
from genrt.constraints.products import fill
from genrt.contexts import Context
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import (
    Closed,
    ContextTooLong,
    EngineFailed,
    InvalidRequest,
    NotFinite,
    TimedOut,
    UnknownAdapter,
)
from genrt.lm import AsyncLM
from genrt.questions.arguments import Adapter
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.tokens.sampling import Draw
from tests.engines.test_exact import adapter_directory
from tests.inside import asker_of, engine_of, extended_by, thread_of
from tests.keeping_engine import KeepingEngine
from tests.keeping_engine import Seen as Watched

SIZE, LONGEST = 7, 24
MODEL = NGram.random(SIZE, order=2, seed=3, zeros=0.2)


class Stop(BaseException):
    """No ``Exception``, as of some frameworks."""


class Seen(ExactEngine):
    """An exact engine that records its flushes, and fails as told.

    Attributes:
        loaded: the present adapters.
        not_finite: the last token of contexts with rows that are not finite.
        fails: whether steps fail.
    """

    def __init__(self) -> None:
        super().__init__(MODEL, max_model_len=LONGEST)
        self.flushes: list[list[Request]] = []
        self.loaded: set[Adapter] = set()
        self.not_finite: int | None = None
        self.fails = False
        logits = self._model.logits

        def answered(contexts: Any, adapter: Any) -> torch.Tensor:
            found: torch.Tensor = logits(contexts, adapter).clone()
            found[[each[-1] == self.not_finite for each in contexts]] = torch.nan
            return found

        self._model.logits = answered  # type: ignore[method-assign]

    def submit(self, requests: Any) -> None:
        self.flushes.append([*requests])
        super().submit(requests)

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        super().add_adapter(adapter, path)
        self.loaded.add(adapter)

    def remove_adapter(self, adapter: Adapter) -> None:
        super().remove_adapter(adapter)
        self.loaded.remove(adapter)

    def step(self) -> Any:
        if self.fails:
            raise RuntimeError("scripted failure")
        return super().step()


@pytest.fixture
def lm() -> Iterator[AsyncLM]:
    with genrt.load(engine=Seen, cache_bytes=0) as opened:
        yield opened


def seen(lm: AsyncLM) -> Seen:
    found = engine_of(lm)
    assert isinstance(found, Seen)
    return found


async def test_questions_of_one_turn_are_one_request(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each temperature, and one for rows, in one flush a step; also after forks and closings."""
    sent: list[list[int]] = []
    ask = asker_of(lm).ask

    async def recorded(requests: Any, **options: Any) -> Any:
        assert all(isinstance(each, PopulationDraw) for each in requests)
        sent.append([len(each) for each in requests])
        return await ask(requests, **options)

    monkeypatch.setattr(asker_of(lm), "ask", recorded)
    several = [lm.context([n % SIZE, 1]) for n in range(8)]

    async def step(heat: float = 1.0, rows: int = 0) -> None:
        questions: list[Any] = [each.draw(temperature=heat) for each in several[rows:]]
        questions += [each.logprobs() for each in several[:rows]]
        await asyncio.gather(*questions)
        for each in several:
            each.append(2)

    for _ in range(3):
        await step()
    assert sent == [[8], [8], [8]]
    several[:4] = [each.fork() for each in several[4:]]
    await step()
    await step(0.5, rows=3)
    assert sent[3:] == [[8], [5], [3]]
    flushes = seen(lm).flushes
    assert len(flushes) == 5
    # More contexts ask than were answered last.
    await asyncio.gather(*(each.draw() for each in several[:3]))
    await step()
    assert [sum(each) for each in sent[6:]] == [3, 8]


async def test_a_draw_depends_on_its_seed_and_sequence_alone(lm: AsyncLM) -> None:
    """Not on other contexts, on a mask's form, or on the loop that asks."""
    several = [lm.context([n % SIZE, 3]) for n in range(5)]
    allowed = [0, 2, 5]
    # Bits beyond the vocabulary allow nothing.
    packed = torch.tensor([sum(1 << token for token in (*allowed, SIZE, 30))], dtype=torch.int32)
    flags = torch.zeros(SIZE, dtype=torch.bool)
    flags[allowed] = True
    masks: list[Any] = [packed, flags, allowed, np.array(allowed), {*allowed}]
    together = await asyncio.gather(
        *(each.draw(mask=mask, seed=9) for each, mask in zip(several, masks, strict=True))
    )
    for each, drawn in zip(several, together, strict=True):
        assert drawn == await lm.draw(each.token_ids, mask=allowed, seed=9)
        assert drawn == await each.draw(mask=allowed, seed=9)
        assert drawn == await asyncio.to_thread(each.draw_sync, mask=allowed, seed=9)
        elsewhere = asyncio.to_thread(asyncio.run, each.draw(mask=allowed, seed=9))
        assert drawn == await elsewhere
    mixed = await asyncio.gather(several[0].draw(seed=1), several[1].draw(mask=packed, seed=1))
    assert mixed[0] == await lm.draw(several[0].token_ids, seed=1)
    assert mixed[1] == await lm.draw(several[1].token_ids, seed=1, mask=allowed)


async def test_draws_without_a_seed_are_independent(lm: AsyncLM) -> None:
    drawn = await asyncio.gather(*(lm.context([1]).draw() for _ in range(200)))
    assert len({each.token_id for each in drawn}) > 2


async def test_other_questions_are_those_of_the_runtime(lm: AsyncLM) -> None:
    context, ids = lm.context([1, 2, 3]), [1, 2, 3]
    for _ in range(2):
        assert torch.equal(await context.logprobs(), await lm.next_token_logprobs(ids))
        for found, wanted in [
            (await context.top_logprobs(3), await lm.top_logprobs(ids, 3)),
            (context.top_logprobs_sync(3), await lm.top_logprobs(ids, 3)),
        ]:
            assert found.token_ids.tolist() == wanted.token_ids.tolist()
        wanted_scores = await lm.score(ids, [4, 0])
        assert torch.equal(await context.score([4, 0]), wanted_scores)
        assert torch.equal(context.score_sync([4, 0]), wanted_scores)
        wanted_entries = await lm.token_logprobs(ids, [0, 5])
        assert torch.equal(await context.token_logprobs([0, 5]), wanted_entries)
        assert torch.equal(context.token_logprobs_sync([0, 5]), wanted_entries)
        assert torch.equal(context.logprobs_sync(), await lm.next_token_logprobs(ids))
        context.append(6)
        ids.append(6)


async def test_whole_texts_after_a_context() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        context = lm.context([1, 2, 3])
        await context.draw()
        context.append(4)
        ids = context.token_ids
        way: Any = {"max_tokens": 5, "seed": 3}
        wanted = await lm.sample(ids, **way)
        assert await context.sample(**way) == context.sample_sync(**way) == wanted
        text = await lm.generate(ids, **way)
        found = await context.generate(**way), context.generate_sync(**way)
        assert [each.token_ids for each in found] == [text.token_ids] * 2
        assert context.token_ids == ids
        with pytest.raises(InvalidRequest, match="has its adapter"):
            await context.sample(max_tokens=1, adapter=None)
        context.close()
        for question in (context.sample(max_tokens=1), context.generate(max_tokens=1)):
            with pytest.raises(Closed, match="context is closed"):
                await question


async def test_a_question_is_about_the_sequence_of_its_call(lm: AsyncLM) -> None:
    """Whatever happens to the context before the answer."""
    for change in (
        lambda c: c.append(5),
        lambda c: c.extend([5, 6]),
        lambda c: c.cut(1),
        lambda c: (c.cut(2), c.append(0)),
        lambda c: c.close(),
    ):
        context = lm.context([1, 2])
        for _ in range(2):
            await context.draw()
            context.append(3)
        before = context.token_ids
        question = asyncio.ensure_future(context.draw(seed=4))
        await asyncio.sleep(0)
        change(context)
        after = context.token_ids
        assert await question == await lm.draw(before, seed=4)
        assert context.token_ids == after
        if change(copy.copy(lm.context([1, 2]))) is None and not repr(context).endswith("closed)"):
            assert await context.draw(seed=5) == await lm.draw(after, seed=5)


async def test_one_that_leaves_is_missed_by_no_other(lm: AsyncLM) -> None:
    several = [lm.context([n % SIZE]) for n in range(6)]
    tasks = [asyncio.ensure_future(each.draw(seed=n)) for n, each in enumerate(several)]
    late = asyncio.ensure_future(lm.context([2, 2]).draw(timeout=0.0))
    for passes in (0, 1, 1, 1):
        for _ in range(passes):
            await asyncio.sleep(0)
        tasks.pop().cancel()
    with pytest.raises(TimedOut):
        await late
    for n, drawn in enumerate(await asyncio.gather(*tasks)):
        assert drawn == await lm.draw([n], seed=n)
    for each in several:
        each.append(1)
    drawn_next = await asyncio.gather(*(each.draw(seed=1) for each in several))
    for n, drawn in enumerate(drawn_next):
        assert drawn == await lm.draw([n % SIZE, 1], seed=1)


async def test_questions_that_all_leave_are_withdrawn(lm: AsyncLM) -> None:
    for passes in range(8):
        tasks = [asyncio.ensure_future(lm.context([n]).draw()) for n in range(3)]
        for _ in range(passes):
            await asyncio.sleep(0)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await lm.draw([1])
    counted = lm.statistics().batcher
    assert (counted.queued, counted.in_flight, counted.waiting) == (0, 0, 0)
    assert counted.questions == counted.answered + counted.cancelled + counted.deduplicated or (
        counted.cancelled > 0
    )


async def test_a_context_that_closes_beside_another_s_question_gives_back(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both extend sequences of one request; the engine keeps the idle one until it is given back."""
    given_back: list[Any] = []
    one, other = lm.context([1]), lm.context([2])
    await asyncio.gather(one.draw(), other.draw())
    first = extended_by(one)
    one.append(3)
    monkeypatch.setattr(thread_of(lm), "give_back", given_back.extend)
    question = asyncio.ensure_future(one.draw())
    for _ in range(4):  # it is sent, and not yet answered
        await asyncio.sleep(0)
    other.close()
    await question
    assert extended_by(one) is not first
    assert given_back == [first]


async def test_a_row_that_is_not_finite_fails_its_context_alone(lm: AsyncLM) -> None:
    seen(lm).not_finite = 4
    several = [lm.context([n]) for n in range(SIZE)]
    for ask in (lambda each: each.draw(seed=2), lambda each: each.logprobs()):
        found = await asyncio.gather(*map(ask, several), return_exceptions=True)
        assert [isinstance(each, NotFinite) for each in found] == [n == 4 for n in range(SIZE)]
    errors = await asyncio.gather(
        *(lm.context([4]).draw() for _ in range(2)), return_exceptions=True
    )
    assert errors[0] is not errors[1]
    assert all(isinstance(each, NotFinite) for each in errors)


async def test_a_step_that_fails_fails_its_questions_and_no_later_one(lm: AsyncLM) -> None:
    several = [lm.context([n]) for n in range(3)]
    await asyncio.gather(*(each.draw() for each in several))
    for each in several:
        each.append(1)
    seen(lm).fails = True
    found = await asyncio.gather(*(each.draw() for each in several), return_exceptions=True)
    assert [type(each) for each in found] == [EngineFailed] * 3
    assert len({*map(id, found)}) == 3
    seen(lm).fails = False
    for n, drawn in enumerate(await asyncio.gather(*(each.draw(seed=3) for each in several))):
        assert drawn == await lm.draw([n, 1], seed=3)


async def test_an_error_of_genrt_or_a_cancelled_flush_leaves_nobody_waiting(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("scripted")

    with monkeypatch.context() as patch:
        patch.setattr(contexts, "words_of_each", fails)
        asked = (lm.context([n]).draw() for n in range(3))
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(each) for each in found] == [EngineFailed] * 3
    question = asyncio.ensure_future(lm.context([1]).draw())
    for _ in range(3):
        await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task(), question}:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question
    assert await lm.context([1]).draw(seed=1) == await lm.draw([1], seed=1)


async def test_adapters(lm: AsyncLM, tmp_path: Path) -> None:
    table = NGram.random(SIZE, order=2, seed=9).table
    await lm.add_adapter("a", adapter_directory(tmp_path / "a", table))
    own, base = lm.context([1, 2], adapter="a"), lm.context([1, 2])
    other = lm.context(base, adapter="a")
    assert (own.adapter, base.adapter, other.adapter, own.fork().adapter) == ("a", None, "a", "a")
    for context, adapter in ((own, "a"), (base, None), (other, "a")):
        assert await context.draw(seed=3) == await lm.draw([1, 2], seed=3, adapter=adapter)
    found = await asyncio.gather(*(each.draw(seed=5) for each in (own, base, other)))
    assert found[0] == found[2] != found[1]
    lm.remove_adapter("a")
    with pytest.raises(UnknownAdapter, match="'a'"):
        await own.draw()
    with pytest.raises(UnknownAdapter, match="'b'"):
        lm.context([1], adapter="b")
    assert (await base.draw(seed=5)) == found[1]


async def test_a_question_has_the_adapter_of_its_call(lm: AsyncLM, tmp_path: Path) -> None:
    engine = engine_of(lm)
    directory = adapter_directory(tmp_path / "a", NGram.random(SIZE, order=2, seed=9).table)
    for is_cancelled in (False, True):
        await lm.add_adapter("a", directory)
        known = await lm.draw([1, 2], seed=3, adapter="a")
        context = lm.context([1, 2], adapter="a")
        asked = [asyncio.ensure_future(context.draw(seed=3)) for _ in range(2)]
        await asyncio.sleep(0)
        lm.remove_adapter("a")
        lm.draw_sync([1])  # turns of the engine, while this loop waits
        if is_cancelled:
            for each in asked:
                each.cancel()
        else:
            assert await asyncio.gather(*asked) == [known] * 2
        with pytest.raises(UnknownAdapter, match="'a'"):
            await context.draw()
        await lm.draw([1])
        assert not engine.loaded


async def test_begin_fork_cut_and_text() -> None:
    words = NGram.random([b"Hel", b"lo", b" there", b"<e>"], seed=1, eos_token_id=3)
    with genrt.load(words, engine="exact") as lm:
        context = lm.context("Hello")
        assert context.text == "Hello"
        assert context.token_ids == lm.encode("Hello") == [0, 1]
        context.extend(lm.encode(" there"))
        assert context.text == "Hello there"
        for fork in (
            context.fork(),
            copy.copy(context),
            copy.deepcopy(context),
            lm.context(context),
        ):
            fork.append(fork.token_ids[-1])
            assert len(fork) == len(context) + 1
            fork.cut(10**6)
            assert len(fork) == len(context) + 1
            fork.cut(2)
            assert fork.token_ids == context.token_ids[:2]
        assert repr(context) == f"Context({len(context)} tokens, adapter=None)"


async def test_blocks_of_one_turn_are_one_request(lm: AsyncLM) -> None:
    """Of any lengths; then a draw extends them by number."""
    several = [lm.context([1, n % SIZE]) for n in range(4)]
    await asyncio.gather(*(each.logprobs() for each in several))
    blocks: list[list[int]] = [[2], [3, 4], [], [0, 1, 2]]
    before = [each.token_ids for each in several]
    flushes = len(seen(lm).flushes)
    pairs = zip(several, blocks, strict=True)
    found = await asyncio.gather(*(each.advance(block, temperature=2.0) for each, block in pairs))
    assert len(seen(lm).flushes) == flushes + 1
    for context, old, block, logprobs in zip(several, before, blocks, found, strict=True):
        rows = await lm.batch_next_token_logprobs([[*old, *block[:n]] for n in range(len(block))])
        wanted = [
            (row / 2.0).log_softmax(-1)[token] for row, token in zip(rows, block, strict=True)
        ]
        torch.testing.assert_close(logprobs, torch.tensor(wanted))
        assert context.token_ids == [*old, *block]
        assert torch.equal(await context.logprobs(), await lm.next_token_logprobs([*old, *block]))
    alone = several[0].fork()
    torch.testing.assert_close(alone.advance_sync([3, 3]), await several[0].advance([3, 3]))
    assert alone.token_ids == several[0].token_ids


async def test_a_block_is_appended_as_a_whole_or_not_at_all(lm: AsyncLM) -> None:
    """Cancelled at any pass of the loop, or changed meanwhile."""
    ends = set()
    for passes in range(60):
        context = lm.context([1, 2])
        await context.draw()
        asked = asyncio.ensure_future(context.advance([3, 4]))
        for _ in range(passes):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        ends.add(asked.cancelled())
        assert context.token_ids == ([1, 2] if asked.cancelled() else [1, 2, 3, 4])
        row = await lm.next_token_logprobs(context.token_ids)
        assert torch.equal(await context.logprobs(), row)
    context = lm.context([1, 2])
    asked = asyncio.ensure_future(context.advance([3, 4]))
    await asyncio.sleep(0)
    context.append(5)
    with pytest.raises(InvalidRequest, match="changed while it advanced"):
        await asked
    assert context.token_ids == [1, 2, 5]
    assert True in ends
    for wrong in ({"temperature": 0.0}, {"timeout": -1}):
        with pytest.raises(InvalidRequest):
            await context.advance([1], **wrong)
    with pytest.raises(InvalidRequest):
        await context.advance([SIZE])
    with pytest.raises(ContextTooLong, match="max_model_len"):
        await context.advance([1] * LONGEST)
    await context.advance([1] * (LONGEST - 2))
    assert len(context) == LONGEST + 1


async def test_what_is_wrong_says_so_at_the_call(lm: AsyncLM) -> None:
    context = lm.context([1])
    for wrong in ([], "", 3, [SIZE], [-1], [1.5], None, [[1]], [True, "a"]):
        with pytest.raises(InvalidRequest):
            lm.context(wrong)  # type: ignore[arg-type]
    for token in (-1, SIZE, 1.0, "1", None, [1], True):
        with pytest.raises(InvalidRequest, match="token_id"):
            context.append(token)  # type: ignore[arg-type]
    for more in ([SIZE], [-1], 3, "x", None):
        with pytest.raises(InvalidRequest):
            context.extend(more)  # type: ignore[arg-type]
    for length in (0, -1, 1.0, None, "1"):
        with pytest.raises(InvalidRequest, match="length"):
            context.cut(length)  # type: ignore[arg-type]
    options: list[dict[str, Any]] = [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"seed": -1},
        {"seed": 1.5},
        {"mask": torch.zeros(3, dtype=torch.int32)},
        {"mask": [True, False]},
        {"mask": [SIZE]},
        {"timeout": -1},
        {"timeout": "soon"},
    ]
    for wrong_options in options:
        with pytest.raises(InvalidRequest):
            await context.draw(**wrong_options)
    assert context.token_ids == [1]
    context.extend([1] * (LONGEST - 1))
    await context.draw()
    context.append(1)
    for question in (context.draw, context.logprobs):
        with pytest.raises(ContextTooLong, match="max_model_len"):
            await question()
    context.cut(3)
    await context.draw()


async def test_closed(lm: AsyncLM) -> None:
    with lm.context([1, 2]) as context:
        await context.draw()
    context.close()
    assert context.token_ids == [1, 2]
    assert repr(context) == "Context(2 tokens, adapter=None, closed)"
    for question in (
        context.draw(),
        context.logprobs(),
        context.top_logprobs(1),
        context.score([1]),
        context.advance([1]),
        context.advance([]),
    ):
        with pytest.raises(Closed, match="context is closed"):
            await question
    for change in (lambda: context.append(1), lambda: context.cut(1), context.fork):
        with pytest.raises(Closed, match="context is closed"):
            change()
    other = lm.context([1])
    waiting = asyncio.ensure_future(other.draw())
    await asyncio.sleep(0)
    lm.close()
    with pytest.raises(Closed):
        await waiting
    with pytest.raises(Closed):
        await other.draw()
    with pytest.raises(Closed):
        other.draw_sync()
    with pytest.raises(Closed):
        await other.advance([])
    del other
    gc.collect()


def test_contexts_outlive_their_loops(lm: AsyncLM) -> None:
    """One loop after another, and one that is closed in the middle of a question."""
    context = lm.context([1])

    async def step() -> int:
        context.append((await context.draw(seed=2)).token_id)
        return len(context)

    assert [asyncio.run(step()) for _ in range(3)] == [2, 3, 4]
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it would log the lost task
    task = loop.create_task(context.draw())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    del task, loop
    gc.collect()
    assert asyncio.run(step()) == 5


@pytest.mark.parametrize("length", [1, 3])
async def test_over_a_connection(length: int) -> None:
    with genrt.load(MODEL, engine="exact") as served:
        async with (
            genrt.serving(served, port=0) as server,
            await AsyncLM.connect(str(server.url)) as lm,
        ):
            several = [lm.context([n] * length) for n in range(SIZE)]
            mask = torch.tensor([0b1111_1011001], dtype=torch.int32)
            for step in range(3):
                found = await asyncio.gather(*(each.draw(seed=step) for each in several))
                masked = await asyncio.gather(
                    *(each.draw(mask=mask, seed=step) for each in several)
                )
                rows = await asyncio.gather(*(each.logprobs() for each in several))
                for each, drawn, row in zip(several, found, rows, strict=True):
                    assert drawn == await served.draw(each.token_ids, seed=step)
                    assert torch.equal(row, await served.next_token_logprobs(each.token_ids))
                for each, drawn in zip(several, masked, strict=True):
                    assert drawn == await served.draw(each.token_ids, mask=[0, 3, 4, 6], seed=step)
                for each, drawn in zip(several, found, strict=True):
                    each.append(drawn.token_id)
            assert all(isinstance(each, Context) for each in several)


# -- masks of states --------------------------------------------------------------------------

BYTES = NGram.random([b"a", b"b", b"ab", b"ba", b""], seed=3, zeros=0.25, eos_token_id=4)


async def some_a(text: str) -> bool:
    """A text of at most five letters, without bb."""
    return len(text) < 6 and "bb" not in text


async def test_a_state_gives_its_mask_and_all_are_computed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of grammars and predicates, with the seeds of their masks; blocking too."""
    filled: list[int] = []

    def counted(states: Any) -> None:
        filled.append(len(states))
        fill(states)

    monkeypatch.setattr(products, "fill", counted)
    with genrt.load(BYTES, engine="exact") as lm:
        starts = [regex("(a|b)*b", lm).start(), regex("b+a", lm).start()]
        both = all_of(regex("[ab]*", lm), predicate(some_a, lm)).start()
        several = [lm.context([n]) for n in range(3)]
        await asyncio.gather(*[c.draw(mask=m) for c, m in zip(several, starts, strict=False)])
        assert filled == [2]
        first = [*starts, both]
        for states in (first, [each.advance(1) for each in first]):
            masks = await abitmasks(states)
            pairs = [*zip(several, states, strict=True)]
            found = await asyncio.gather(*[c.draw(mask=m, seed=9) for c, m in pairs])
            asked = zip(several, masks, strict=True)
            assert found == [await c.draw(mask=m, seed=9) for c, m in asked]
            assert found[:2] == [c.draw_sync(mask=m, seed=9) for c, m in pairs[:2]]
        with pytest.raises(InvalidRequest, match="token by token"):
            several[2].draw_sync(mask=both)
        assert await lm.draw([0], mask=starts[0], seed=3) == await lm.draw(
            [0], mask=starts[0].mask(), seed=3
        )


async def test_a_state_that_fails_fails_alone() -> None:
    """A predicate's exception, and a state over another vocabulary."""

    def fails(text: str) -> bool:
        raise ZeroDivisionError("scripted")

    larger = NGram.random([b"a", b"b", *[b"c"] * 40, b""], seed=3, eos_token_id=42)
    with genrt.load(BYTES, engine="exact") as lm, genrt.load(larger, engine="exact") as other:
        wrong = predicate(fails, lm).start(), regex("a+", other).start()
        several = [lm.context([0]) for _ in range(3)]
        good, raised, refused = await asyncio.gather(
            several[0].draw(mask=regex("b", lm).start()),
            several[1].draw(mask=wrong[0]),
            several[2].draw(mask=wrong[1]),
            return_exceptions=True,
        )
    assert isinstance(good, Draw)
    assert good.token_id == 1
    assert isinstance(raised, ZeroDivisionError)
    assert isinstance(refused, InvalidRequest)
    assert "another vocabulary" in str(refused)


@pytest.mark.parametrize("error", [asyncio.CancelledError, Stop])
async def test_a_state_that_stops_or_cancels_ends_its_own_draw_alone(
    error: type[BaseException],
) -> None:
    async def stops(text: str) -> bool:
        raise error

    with genrt.load(BYTES, engine="exact") as lm:
        one, other = lm.context([0]), lm.context([1])
        stopped, drawn = await asyncio.gather(
            one.draw(mask=predicate(stops, lm).start()), other.draw(seed=3), return_exceptions=True
        )
        assert isinstance(stopped, error)
        assert drawn == await lm.draw([1], seed=3)
        assert one.token_ids == [0]
        assert await one.draw(seed=4) == await lm.draw([0], seed=4)


async def test_a_late_answer_takes_over_no_context_that_changed_twice() -> None:
    """A context is cut below its answered sequence, asks, is answered otherwise and cut again. Both times
    it extends nothing, and yet the first question's sequence is not its own any more."""
    go = asyncio.Event()

    async def slow(text: str) -> bool:
        await go.wait()
        return True

    with genrt.load(BYTES, engine="exact") as lm:
        context = lm.context([0, 1, 0])
        await context.logprobs()
        context.cut(2)
        question = asyncio.create_task(context.draw(mask=predicate(slow, lm).start(), seed=1))
        for _ in range(10):  # the question is made, and waits for its mask
            await asyncio.sleep(0)
        await context.logprobs()
        context.cut(1)
        context.extend([0, 1])
        go.set()
        await question
        assert context.token_ids == [0, 0, 1]
        assert torch.equal(await context.logprobs(), await lm.next_token_logprobs([0, 0, 1]))


async def test_a_pass_of_the_loop_answers_a_bounded_number_of_contexts() -> None:
    """Three thousand contexts that ask at once are answered in parts, between which other tasks run."""
    passes, answered = 0, dict[int, int]()

    async def count() -> None:
        nonlocal passes
        while True:
            await asyncio.sleep(0)
            passes += 1

    async def ask(context: Context, number: int) -> None:
        drawn = await context.draw(seed=number)
        answered[passes] = answered.get(passes, 0) + 1
        context.append(max(0, drawn.token_id))

    with genrt.load(engine=Seen, cache_bytes=0) as lm:
        counter = asyncio.create_task(count())
        held = [lm.context([number % SIZE]) for number in range(3_000)]
        await asyncio.gather(*map(ask, held, range(3_000)))
        counter.cancel()
    assert sum(answered.values()) == 3_000
    assert max(answered.values()) <= contexts.MOST_TOGETHER


def test_a_context_is_not_pickled(lm: AsyncLM) -> None:
    with pytest.raises(TypeError, match="token_ids"):
        pickle.dumps(lm.context([1]))


@pytest.mark.proof
async def test_short_lived_contexts_leave_nothing() -> None:
    """A hundred thousand contexts that draw, are forked, cut, cancelled, closed or dropped: the engine
    keeps no sequence, and no context is alive."""
    model = NGram.random(SIZE, order=2, seed=3)
    engines: list[KeepingEngine] = []

    def opened() -> KeepingEngine:
        engines.append(KeepingEngine(model, Watched()))
        return engines[-1]

    async def live(start: Context, number: int) -> Any:
        context = start.fork()
        for _ in range(number % 4):
            context.append((await context.draw()).token_id)
        if number % 3 == 0:
            context.cut(2)
            await context.logprobs()
        if number % 5 == 0:
            context.close()
        return weakref.ref(context)

    alive: list[Any] = []
    with genrt.load(engine=opened) as lm:
        for first in range(0, 100_000, 1000):
            start = lm.context([first % SIZE, 1])
            flock = [asyncio.create_task(live(start, first + n)) for n in range(1000)]
            await asyncio.sleep(0)
            for task in flock[:: 2 + first % 7]:
                task.cancel()
            ended = await asyncio.gather(*flock, return_exceptions=True)
            alive += [each for each in ended if not isinstance(each, asyncio.CancelledError)]
        del start, flock, ended
        gc.collect()
        await lm.next_token_logprobs([0])  # the engine's thread has given back everything by now
        assert [*engines[0].known] == []
        assert len(alive) > 50_000
        assert all(each() is None for each in alive)
