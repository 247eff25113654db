"""Populations: arrays that say what lists would, and questions about them that say what questions about
each sequence would."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import (
    Closed,
    ContextTooLong,
    InvalidRequest,
    OutOfMemory,
    TimedOut,
    UnknownAdapter,
)
from genrt.lm import AsyncLM
from genrt.populations import Population, draw_texts
from tests.apart import drawn_apart_sync
from tests.engines.test_exact import adapter_directory
from tests.inside import asker_of, engine_of, thread_of
from tests.keeping_engine import KeepingEngine, Seen
from tests.population_walk import EVENTS, HeldContexts, Runtime, walk
from tests.scoring_engine import ScoringEngine
from tests.test_every_argument import wrong_values

SIZE = 7
MODEL = NGram.random(SIZE, order=2, seed=3, zeros=0.2)
BEGIN: dict[str, Any] = {"populations": AsyncLM.population, "contexts": HeldContexts.begin}


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact") as opened:
        yield opened


class Broken:
    """Makes a step of an exact engine fail, or a row of it be not finite, once."""

    def __init__(self, lm: AsyncLM) -> None:
        self.lm = lm

    @contextlib.contextmanager
    def __call__(self, how: str) -> Iterator[None]:
        engine = engine_of(self.lm)
        with pytest.MonkeyPatch.context() as patch:
            model = engine._model
            logits = model.logits

            def fails() -> None:
                patch.undo()
                raise RuntimeError("scripted failure")

            def not_finite(*of: Any) -> torch.Tensor:
                patch.undo()
                found: torch.Tensor = logits(*of).clone()
                found[-1] = torch.nan
                return found

            if how == "fails":
                patch.setattr(engine, "step", fails)
            else:
                patch.setattr(model, "logits", not_finite)
            yield


@contextlib.asynccontextmanager
async def exact_runtime(kind: str, adapter: Path, holds: str) -> AsyncIterator[Runtime]:
    """A runtime over an exact engine: a plain one, one that scores, or one that goes on by number; its
    particles are populations or contexts."""
    seen = Seen()

    def opened() -> ExactEngine:
        if kind == "by number":
            return KeepingEngine(MODEL, seen)
        return (ScoringEngine if kind == "scores" else ExactEngine)(MODEL, max_model_len=48)

    tables = [MODEL.table, NGram.random(SIZE, order=2, seed=8).table]
    with (
        genrt.load(engine=opened, cache_bytes=0) as lm,
        genrt.load(
            MODEL, engine="exact", cache_bytes=0, engine_options={"max_model_len": 48}
        ) as quiet,
    ):
        for each in (lm, quiet):
            await each.add_adapter("a", adapter)

        async def update() -> None:
            tables.reverse()
            for each in (lm, quiet):
                await each.update_weights({"table": tables[0]})

        adapters = [adapter, adapter.with_name("b")]

        async def replace() -> None:
            adapters.reverse()
            for each in (lm, quiet):
                await each.add_adapter("a", adapters[0])

        yield Runtime(
            lm,
            quiet,
            EVENTS,
            tolerance=1e-5 if kind == "by number" else 0.0,
            adapters=(None, None, "a"),
            update=update,
            replace=replace,
            breaks=Broken(lm),
            begin=[begin for name, begin in BEGIN.items() if name in holds],
        )
    assert seen.wrong == []
    assert bool(seen.by_number) == (kind == "by number")


@pytest.mark.promise(number=36)
@pytest.mark.parametrize("holds", ["populations", "contexts", "populations and contexts"])
@pytest.mark.parametrize("kind", ["plain", "scores", "by number"])
@pytest.mark.parametrize(
    ("seed", "steps"),
    [(0, 60), pytest.param(2, 200, marks=pytest.mark.proof)],
)
async def test_each_draw_is_its_own_context_s_whatever_happens(
    kind: str, holds: str, seed: int, steps: int, tmp_path: Path
) -> None:
    adapter = adapter_directory(tmp_path / "a", NGram.random(SIZE, order=2, seed=9).table)
    adapter_directory(tmp_path / "b", NGram.random(SIZE, order=2, seed=10).table)
    async with exact_runtime(kind, adapter, holds) as runtime:
        made = await walk(runtime, seed, steps)
    assert {*EVENTS, "resample", "cut", "extend", "split", "join", "take"} <= {*made.counts}


async def test_a_population_has_its_adapter_while_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ran out of memory, and its adapter is removed before its parts are asked."""
    with genrt.load(MODEL, engine="exact") as lm:
        table = NGram.random(SIZE, order=2, seed=9).table
        await lm.add_adapter("a", adapter_directory(tmp_path / "a", table))
        known = [await lm.draw([1, 2], seed=3 + n, adapter="a") for n in range(2)]
        ask = asker_of(lm).ask

        async def short(requests: Any, **options: Any) -> Any:
            if len(requests[0]) == 1:
                return await ask(requests, **options)
            lm.remove_adapter("a")
            lm.clear_cache()
            lm.draw_sync([1])  # turns of the engine
            raise OutOfMemory("scripted")

        monkeypatch.setattr(asker_of(lm), "ask", short)
        draws = await lm.population([1, 2], 2, adapter="a").draw(seed=3)
        assert draws.token_ids.tolist() == [each.token_id for each in known]


async def test_equal_sequences_share_a_row_and_a_population_is_one_flush(lm: AsyncLM) -> None:
    before = lm.statistics()
    with lm.population([1, 2], 50) as population:
        draws = await population.draw(seed=3)
        assert len(set(draws.token_ids.tolist())) > 1
        now = lm.statistics().since(before)
        assert now.engine.rows <= 1
        assert now.batcher.flushes == 1
        assert (now.batcher.questions, now.batcher.answered) == (50, 50)
        assert now.batcher.largest_flush >= 50


async def test_a_question_is_about_the_sequences_as_they_were(lm: AsyncLM) -> None:
    population = lm.population([1, 2], 3)
    asked = asyncio.ensure_future(population.logprobs())
    await asyncio.sleep(0)
    population.append([0, 1, 2])
    expected = lm.batch_next_token_logprobs_sync([[1, 2]] * 3)
    assert torch.equal(await asked, expected)


async def test_populations_samples_and_single_questions_share_a_flush(lm: AsyncLM) -> None:
    lm.clear_cache()
    first, second = lm.population([1, 3], 4), lm.population([[2], [1, 3]])
    before = lm.statistics()
    row, _, several, drawn = await asyncio.gather(
        lm.next_token_logprobs([1, 3]),
        lm.sample([4], max_tokens=2),
        first.logprobs(),
        second.draw(seed=1),
    )
    assert torch.equal(several, row.expand(4, -1))
    assert drawn.token_ids[1] == (await lm.draw([1, 3], seed=2)).token_id
    assert lm.statistics().since(before).batcher.flushes == 2  # the draw after them is one


async def test_a_blocking_draw_is_gone_on_from_too(lm: AsyncLM) -> None:
    """The engine knows the sequences by the draw before, whichever way that was asked."""
    for is_blocking in (False, True):
        population = lm.population([1, 2], 3)
        for _ in range(3):
            draws = population.draw_sync(seed=1) if is_blocking else await population.draw(seed=1)
            population.append(draws.token_ids)
            origins = population._sequences.origins
            assert len(origins.handles) == 1
            assert origins.can_continue(population.lengths.numpy())


class GivenBack:
    """The questions that an engine is told to forget, as populations end."""

    def __init__(self, lm: AsyncLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        give_back = thread_of(lm).give_back

        def recorded(asked: Any) -> None:
            self.asked += asked
            give_back(asked)

        monkeypatch.setattr(thread_of(lm), "give_back", recorded)

    def number(self) -> int:
        gc.collect()
        return len(self.asked)


async def test_a_population_that_is_collected_is_closed(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine frees what no copy of it goes on from, once."""
    given_back = GivenBack(lm, monkeypatch)
    population = lm.population([1, 2], 3)
    population.append((await population.draw(seed=1)).token_ids)
    again = population.take([0, 0, 1])
    del population
    assert given_back.number() == 0
    again.append((await again.draw(seed=2)).token_ids)
    del again
    assert given_back.number() == 1
    with lm.population([1, 2], 3) as closed:
        await closed.draw()
    assert given_back.number() == 2
    del closed
    assert given_back.number() == 2


@pytest.mark.parametrize("closes", [True, False])
async def test_ending_one_of_many_populations_looks_at_no_other(lm: AsyncLM, closes: bool) -> None:
    def lines(others: int) -> int:
        kept = [lm.population([1, 2], 3) for _ in range(others)]
        [one] = [lm.population([3], 2)]
        one.draw_sync(seed=1)
        count = 0

        def counted(frame: Any, event: str, argument: Any) -> Any:
            nonlocal count
            count += event == "line"
            return counted

        sys.settrace(counted)
        try:
            if closes:
                one.close()
            del one
        finally:
            sys.settrace(None)
        assert len(kept) == others
        return count

    lines(1)
    assert lines(2) == lines(200) > 3


async def test_scores_are_those_of_the_sequences(lm: AsyncLM) -> None:
    """Of continuations of any length, in one flush; sequences that are alike are asked about once."""
    population = lm.population([[1, 2], [3], [1, 2], [4, 5, 6]])
    continuations = [[3, 4], [], [3, 4], [2]]
    lm.clear_cache()
    before = lm.statistics()
    found = await population.score(continuations)
    since = lm.statistics().since(before)
    assert (since.batcher.flushes, since.engine.requests) == (1, 3)
    wanted = await lm.batch_score([*population], continuations)
    assert all(map(torch.equal, found, wanted))
    assert [len(each) for each in found] == [2, 0, 2, 1]
    assert [*population] == [[1, 2], [3], [1, 2], [4, 5, 6]]
    assert all(map(torch.equal, population.score_sync(continuations), wanted))
    for wrong, message in (
        ([[1]], "continuations has length 1, not 4"),
        ([[1], [2], [3], [999]], "continuation must be in the"),
        ([1, 2, 3, 4], "continuations must be a sequence of"),
        ("abcd", "continuations must be a sequence of"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            await population.score(wrong)  # type: ignore[arg-type]
    population.close()
    with pytest.raises(Closed):
        await population.score(continuations)


@pytest.mark.promise(number=36)
async def test_extending_is_appending_one_by_one() -> None:
    """The same sequences and draws, by one step of the engine."""
    async with await genrt.aload(MODEL, engine="exact", cache_bytes=0) as lm:
        one, many = lm.population([1, 2], 4), lm.population([1, 2], 4)
        blocks = [[3, 4, 5], [], [3, 4, 5], [6] * 40]
        for step in range(40):
            one.append([block[step] if step < len(block) else -1 for block in blocks])
        many.extend(blocks)
        assert [*one] == [*many] == [[1, 2, *block] for block in blocks]
        before = lm.statistics().engine.steps
        drawn = await many.draw(seed=2)
        assert lm.statistics().engine.steps == before + 1
        for got, wanted in zip(await one.draw(seed=2), drawn, strict=True):
            assert torch.equal(got, wanted)


def test_a_closed_population_can_be_read_but_not_asked(lm: AsyncLM) -> None:
    with lm.population([1, 2], 2) as population:
        pass
    population.close()
    assert [*population] == [[1, 2]] * 2
    assert "closed" in repr(population)
    for use in (
        population.draw_sync,
        population.logprobs_sync,
        lambda: population.append([1, 1]),
        lambda: population.resample([0, 0]),
        lambda: population.cut(1),
        lambda: population.take([0]),
        lambda: population.split([2]),
        lambda: lm.population([1], 1).join(population),
    ):
        with pytest.raises(Closed):
            use()


def test_a_closed_runtime_answers_no_population() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        population = lm.population([1], 2)
    with pytest.raises(Closed):
        population.draw_sync()
    with pytest.raises(Closed):
        population.advance_sync([[], []])


def test_sequences_grow_to_the_models_length_and_are_refused_beyond_it() -> None:
    with genrt.load(MODEL, engine="exact", engine_options={"max_model_len": 4}) as lm:
        population = lm.population([1], 2)
        for _ in range(4):
            population.append([1, -1])
        assert population.lengths.tolist() == [5, 1]
        assert population.draw_sync(where=[False, True]).token_ids[0] == -1
        with pytest.raises(ContextTooLong):
            population.draw_sync()
        population.cut([4, 4])
        assert population.logprobs_sync().shape == (2, SIZE)


def test_what_begins_a_population(lm: AsyncLM) -> None:
    assert [*lm.population(np.array([1, 2]), 2)] == [[1, 2]] * 2
    assert [*lm.population(torch.tensor([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]
    several: list[Any] = [torch.tensor([1]), (2, 3)]
    assert [*lm.population(several)] == [[1], [2, 3]]
    assert [*lm.population([])] == []
    assert lm.population([], None).draw_sync().token_ids.tolist() == []
    wrong: list[tuple[Any, int | None, str]] = [
        ([1, 2], None, "give n"),
        ("text", None, "give n"),
        ([[1]], 1, "leave n out"),
        (torch.tensor([[1, 2], [3, 4]]), 2, "leave n out"),
        ([], 2, "."),
        (None, 2, "."),
    ]
    for prompt, n, says in wrong:
        with pytest.raises(InvalidRequest, match=says):
            lm.population(prompt, n)
    with pytest.raises(UnknownAdapter):
        lm.population([1], 1, adapter="none")
    with pytest.raises(InvalidRequest, match="do not join"):
        lm.population([1], 1).join(genrt.load(MODEL, engine="exact").population([1], 1))


async def test_a_block_is_appended_and_scored_unless_the_sequences_change_meanwhile(
    lm: AsyncLM,
) -> None:
    population = lm.population([[1], [2, 3], [4]])
    table = torch.tensor([[5, 6, -1], [-1, -1, -1], [0, 1, 2]])
    found = await population.advance(table, temperature=0.5)
    assert [*population] == [[1, 5, 6], [2, 3], [4, 0, 1, 2]]
    same = lm.population([[1], [4]])
    wanted = await same.score([[5, 6], [0, 1, 2]], temperature=0.5)
    torch.testing.assert_close(found[0, :2], wanted[0])
    torch.testing.assert_close(found[2], wanted[1])
    assert found[1].tolist() == [0.0] * 3
    assert found[0, 2] == 0.0
    assert (await population.advance([[], [], []])).shape == (3, 0)
    for wrong, says in (
        ([[1]], "not 3: give ids for each"),
        (torch.tensor([[-1, 1]] * 3), "follows -1"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            await population.advance(wrong)
    before = [*population]
    asked = asyncio.ensure_future(population.advance([[1]] * 3))
    await asyncio.sleep(0)
    population.append([6, 6, 6])
    with pytest.raises(InvalidRequest, match="await the block first"):
        await asked
    assert [*population] == [[*each, 6] for each in before]


@pytest.mark.parametrize("change", ["resample", "cut"])
async def test_a_population_that_changes_during_a_draw_goes_on_from_its_own_sequences(
    change: str,
) -> None:
    seen = Seen()
    with genrt.load(engine=lambda: KeepingEngine(MODEL, seen), cache_bytes=0) as lm:
        population = lm.population([[1, 2, 3], [4, 5, 6]])
        await population.draw()
        population.append([1, 2])
        asked = asyncio.ensure_future(population.draw())
        await asyncio.sleep(0)
        if change == "resample":
            population.resample([1, 0])
        else:
            population.cut(2)
        await asked
        population.extend([[3, 4, 5], [6, 0, 1]])
        await population.draw()
    assert seen.wrong == []


async def test_draws_in_turn_go_on_by_number_and_so_does_the_draw_after_them() -> None:
    seen = Seen()
    with genrt.load(engine=lambda: KeepingEngine(MODEL, seen), cache_bytes=0) as lm:
        population = lm.population([[1], [2]])
        population.append((await population.draw()).token_ids)
        for length in (1, 3):
            before = seen.by_number
            drawn = await population.draw_block(length)
            assert seen.by_number == before + length
            assert drawn.token_ids.tolist() == [each[-length:] for each in population]
        await population.draw()
        assert seen.by_number == before + length + 1
        empty = await lm.population([]).draw_block(2)
        assert [tuple(each.shape) for each in empty] == [(0, 2)] * 3
    assert seen.wrong == []


@pytest.mark.vllm
def test_a_text_begins_a_population_as_it_begins_a_completion(llama: Path) -> None:
    with genrt.load(llama, engine="transformers") as lm:
        prompt = lm.generate_sync("a text", max_tokens=1).prompt_token_ids
        assert [*lm.population("a text", 2)] == [[*prompt]] * 2
        mixed: list[Any] = ["a text", [1]]
        assert [*lm.population(mixed)] == [[*prompt], [1]]


METHODS: dict[str, dict[str, Any]] = {
    "draw_sync": {"masks": None, "temperature": 1.0, "seed": 1, "where": None, "timeout": None},
    "logprobs_sync": {"where": None, "device": None, "timeout": None},
    "advance_sync": {"token_ids": [[1], [1, 2]], "temperature": 1.0, "timeout": None},
    "draw_block_sync": {"length": 2, "temperature": 1.0, "seed": 1, "timeout": None},
    "append": {"token_ids": [1, 1]},
    "extend": {"token_ids": [[1], [1, 2]]},
    "resample": {"ancestors": [0, 0]},
    "cut": {"lengths": [1, 1]},
    "take": {"indices": [0]},
    "split": {"sizes": [2]},
    "join": {"others": None},
}


@pytest.mark.parametrize(
    ("method", "argument"), [(name, each) for name, given in METHODS.items() for each in given]
)
def test_a_wrong_argument_is_refused_and_changes_nothing(
    lm: AsyncLM, method: str, argument: str
) -> None:
    raw: list[str] = []
    for value in wrong_values():
        population = lm.population([1, 2], 2)
        given = {**METHODS[method], argument: value}
        try:
            if method == "join":
                population.join(value)
            else:
                getattr(population, method)(**given)
        except (InvalidRequest, TimedOut):
            assert [*population] == [[1, 2]] * 2
        except Exception as error:
            raw.append(f"{type(value).__name__}: {type(error).__name__}: {error}"[:200])
    assert not raw, "\n".join(raw)
    assert {name.removesuffix("_sync") for name in METHODS} <= {*dir(Population)}


def test_max_batch_size_bounds_the_flushes_of_a_population() -> None:
    contexts = [[token] for token in range(SIZE)]
    with genrt.load(MODEL, engine="exact", max_batch_size=2) as lm:
        draws = lm.population(contexts).draw_sync(seed=3)
        s = lm.statistics().batcher
        expected = drawn_apart_sync(lm, contexts, seed=3)
    assert (s.largest_flush, s.flushes) == (2, -(-SIZE // 2))
    for got, wanted in zip(draws, expected, strict=True):
        assert torch.equal(got, wanted)


class Small(ExactEngine):
    """Has no memory for more than so many sequences."""

    def __init__(self, most: int) -> None:
        super().__init__(MODEL)
        self.most = most
        self.asked = 0

    def submit(self, requests: Any) -> None:
        self.asked = len(requests)
        super().submit(requests)

    def step(self) -> Any:
        if self.asked > self.most:
            raise torch.OutOfMemoryError("no room")
        return super().step()


@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_question_that_is_too_large_for_the_memory_is_asked_again_in_parts(most: int) -> None:
    contexts = [[token, other] for token in range(4) for other in range(5)]
    with genrt.load(engine=lambda: Small(most), cache_bytes=0) as lm:
        draws = lm.population(contexts).draw_sync(seed=3)
        with genrt.load(MODEL, engine="exact") as large:
            expected = drawn_apart_sync(large, contexts, seed=3)
    for got, wanted in zip(draws, expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("most", [1, 2, 5])
async def test_the_sequences_of_a_text_stay_together_in_a_small_memory(most: int) -> None:
    async def drawn(lm: AsyncLM) -> Any:
        pair = [lm.population([[token, other] for token in range(4)]) for other in (0, 1)]
        laws = ((1.0, 2.0), (0.5, 1.0))
        return await draw_texts(pair, laws, masks=None, seed=3, where=None)

    async with await genrt.aload(engine=lambda: Small(most), cache_bytes=0) as lm:
        if most == 1:
            with pytest.raises(OutOfMemory):
                await drawn(lm)
            return
        async with await genrt.aload(MODEL, engine="exact") as large:
            for got, wanted in zip(await drawn(lm), await drawn(large), strict=True):
                assert torch.equal(got, wanted)


def test_the_parts_of_one_that_is_too_large_are_not_sent_together() -> None:
    sizes: list[int] = []

    class Small(ExactEngine):
        def submit(self, requests: Any) -> None:
            sizes.append(len(requests))
            super().submit(requests)

        def step(self) -> Any:
            if sizes[-1] > 7:
                raise torch.OutOfMemoryError("no room")
            return super().step()

    contexts = [[token, other] for token in range(4) for other in range(5)]
    with genrt.load(engine=lambda: Small(MODEL), cache_bytes=0) as lm:
        lm.population(contexts).draw_sync(seed=3)
        s = lm.statistics().batcher
        assert sizes == [20, 10, 5, 5, 5, 5]
        assert (s.answered, s.largest_flush) == (20, 20)
        lm.population(contexts).draw_sync(seed=3)
    assert sizes[6:] == [5, 5, 5, 5], "another one need not find out again"
