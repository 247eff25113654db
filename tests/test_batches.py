"""Batches of contexts that are given again, a token longer: they go on by number, as draws do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from genrt.populations.batches import Batches
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest, TimedOut
from genrt.lm import AsyncLM
from genrt.populations import batches
from genrt.questions.draws import PopulationDraw
from genrt.questions.sequences import SequenceHandle, Sequences
from tests.apart import drawn_apart
from tests.engines.test_exact import adapter_directory

SIZE = 1000
MODEL = NGram.random(SIZE, order=1, seed=5)


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact") as opened:
        yield opened


class Asking:
    """Batches of a runtime that are answered, each question checked for what it goes on from."""

    def __init__(self, lm: AsyncLM) -> None:
        self.lm, self.batches = lm, Batches(lm._home)
        self.contexts: dict[SequenceHandle, list[tuple[str | None, bytes]]] = {}
        self.parts: list[PopulationDraw] = []

    async def ask(self, parts: Sequence[Any], *, timeout: float | None = None) -> list[Any]:
        self.parts = [*parts]
        for part in parts:
            name = part.adapter and part.adapter.name
            own = [(name, part.contexts.packed(n)) for n in range(len(part))]
            if part.origins is not None:
                before = [each for asked in part.origins.handles for each in self.contexts[asked]]
                wanted = [(name, packed[:-4]) for _, packed in own]
                assert [before[n] for n in part.origins.numbers.tolist()] == wanted
            self.contexts[part.handle] = own
        return await self.lm._ask(parts, timeout=timeout)

    async def draw(
        self,
        contexts: Any,
        seed: int | None = 0,
        masks: list[list[int]] | None = None,
        adapter: str | None = None,
    ) -> list[int]:
        given = [] if seed is None else [list(map(int, each)) for each in contexts]
        found = await self.batches.draw(self.ask, contexts, masks, 1.0, seed, adapter, None)
        if seed is not None:
            wanted = await drawn_apart(self.lm, given, masks=masks, seed=seed, adapter=adapter)
            assert all(map(torch.equal, found, wanted))
        return found.token_ids.tolist()

    @property
    def goes_on(self) -> bool:
        return bool(self.parts) and all(part.origins is not None for part in self.parts)


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it be an error to read contexts."""

    def never(*_: object) -> Any:
        raise AssertionError("contexts were read")

    monkeypatch.setattr(Sequences, "of", never)


async def test_lists_that_have_grown_are_not_read_and_go_on_by_number(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, contexts = Asking(lm), [[900 + n, 7] for n in range(20)]
    tokens = await asking.draw(contexts)
    assert not asking.goes_on
    unread(monkeypatch)
    for step in range(40):
        for context, token in zip(contexts, tokens, strict=True):
            context.append(token)
        if step % 2:  # other lists of the same objects
            contexts = [[*each] for each in contexts]
        tokens = await asking.draw(contexts, seed=step)
        assert asking.goes_on


@pytest.mark.parametrize(
    "form", [tuple, np.array, torch.tensor, lambda each: [int(str(x)) for x in each]]
)
async def test_contexts_in_any_form_go_on_by_number(lm: AsyncLM, form: Any) -> None:
    asking, contexts = Asking(lm), [[900, n % 3, n] for n in range(12)]
    for step in range(4):
        tokens = await asking.draw([form(each) for each in contexts], seed=step)
        assert asking.goes_on == (step > 0)
        contexts = [[*each, token] for each, token in zip(contexts, tokens, strict=True)]
        ancestors = random.Random(step).choices(range(12), k=12)
        contexts = [contexts[n] for n in ancestors]


@pytest.mark.parametrize("table", [np.array, torch.tensor])
async def test_a_table_of_contexts_is_as_good_as_lists(lm: AsyncLM, table: Any) -> None:
    asking, contexts = Asking(lm), [[n, 5] for n in range(6)]
    for step in range(3):
        tokens = await asking.draw(table(contexts), seed=step)
        assert asking.goes_on == (step > 0)
        contexts = [[*each, token] for each, token in zip(contexts, tokens, strict=True)]
    with pytest.raises(InvalidRequest, match="from 0 to 999"):
        await asking.draw(table([[1, SIZE]]), seed=None)
    with pytest.raises(InvalidRequest, match="must be"):
        await asking.draw(table([[1.0, 2.0]]), seed=None)


CHANGES = [
    "none",
    "anew",
    "resample",
    "permute",
    "drop",
    "add",
    "inside",
    "alike",
    "back",
    "twice",
    "two",
]


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_whatever_is_given_again_draws_are_those_of_single_questions(
    changes: list[str], seed: int
) -> None:
    """What an ``Origins`` says is looked at for every question."""
    chance = random.Random(seed)

    async def run(lm: AsyncLM) -> None:
        asking = Asking(lm)
        contexts = [
            [chance.randrange(990, SIZE) for _ in range(chance.randint(1, 4))] for _ in range(5)
        ]
        older = [[*each] for each in contexts]
        for step, change in enumerate(changes):
            tokens = await asking.draw(contexts, seed=step)
            if change == "two":  # at once, after the same contexts
                await asyncio.gather(asking.draw(contexts, seed=7), asking.draw(contexts, seed=8))
            for context, token in zip(contexts, tokens, strict=True):
                context.append(token)
            if change == "anew":
                contexts = [[int(str(x)) for x in each] for each in contexts]
            elif change == "resample":
                contexts = [[*each] for each in chance.choices(contexts, k=len(contexts))]
            elif change == "permute":
                chance.shuffle(contexts)
            elif change == "drop" and len(contexts) > 1:
                del contexts[chance.randrange(len(contexts))]
            elif change == "add":
                contexts.append([chance.randrange(SIZE)])
            elif change == "inside":
                one = chance.choice(contexts)
                one[chance.randrange(len(one))] = chance.randrange(SIZE)
            elif change == "alike":
                contexts = [[*contexts[0]] for _ in contexts]
            elif change == "twice":
                contexts = [contexts[0], contexts[0], *[[*each] for each in contexts[2:]]]
                contexts = [[*each] for each in contexts] if step % 2 else contexts
                if step % 2 == 0:  # one list at two places grows once for each
                    contexts = [[*each] if n else each for n, each in enumerate(contexts)]
            elif change == "back":
                contexts, older = [[*each] for each in older], [[*each] for each in contexts]

    with genrt.load(MODEL, engine="exact") as lm:
        asyncio.run(run(lm))


async def test_what_is_wrong_is_refused_and_a_failed_question_costs_no_later_one_its_answer(
    lm: AsyncLM,
) -> None:
    asking, contexts = Asking(lm), [[900 + n] for n in range(4)]
    for step in range(3):
        tokens = await asking.draw(contexts, seed=step)
        for wrong in (SIZE, -1, "x", 1.5, None):
            with pytest.raises(InvalidRequest):
                await asking.draw(
                    [*contexts[:3], [*contexts[3], wrong]] if wrong != "x" else "x", None
                )
        for context, token in zip(contexts, tokens, strict=True):
            context.append(token)
        with pytest.raises(InvalidRequest):
            await asking.batches.draw(asking.ask, contexts, [[1]], 1.0, 0, None, None)
        with pytest.raises(TimedOut):
            await asking.batches.draw(asking.ask, contexts, None, 1.0, 0, None, 0.0)
        task = asyncio.ensure_future(asking.draw(contexts, seed=step))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "wrong", [None, 3, {1: 2, 3: 4}, np.array(3), torch.tensor(3), iter([[1]])]
)
async def test_what_are_no_contexts_is_refused_after_a_batch_too(lm: AsyncLM, wrong: Any) -> None:
    asking = Asking(lm)
    await asking.draw([[1], [2]])
    with pytest.raises(InvalidRequest):
        await asking.draw(wrong, None)


async def test_an_id_that_becomes_another_number_is_drawn_after_as_it_is(lm: AsyncLM) -> None:
    asking, changes = Asking(lm), torch.tensor(4)
    contexts: list[list[Any]] = [[1, 2, changes], [2, 3, 4]]
    await asking.draw(contexts)
    changes.fill_(5)
    for each in contexts:
        each.append(3)  # of all tokens the model sees the last one alone
    await asking.draw(contexts)
    asked = np.frombuffer(asking.parts[0].contexts.packed(0), np.uint32)
    assert asked.tolist() == [1, 2, 5, 3]


async def test_an_array_among_the_numbers_is_refused(lm: AsyncLM) -> None:
    asking = Asking(lm)
    context: list[Any] = [1] * 20
    await asking.draw([context])
    context[3] = np.array([1, 2])  # whether it equals a number has no one answer
    context.append(3)
    with pytest.raises(InvalidRequest):
        await asking.draw([context], None)


async def test_keys_that_are_equal_by_chance_decide_nothing(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_factors", lambda count: np.ones(count, np.uint64))
    asking = Asking(lm)
    await asking.draw([[901, 902], [903, 904]])
    await asking.draw([[902, 901, 5], [903, 904, 5]])
    assert not asking.goes_on
    await asking.draw([[902, 901, 5, 6], [903, 904, 5, 6]])
    assert asking.goes_on


@pytest.mark.parametrize("anew", [False, True])
async def test_a_batch_goes_on_from_one_of_its_own_adapter_alone(
    lm: AsyncLM, tmp_path: Path, anew: bool
) -> None:
    """The lists grow, or are read."""
    for seed, name in enumerate(["a", "b"]):
        table = NGram.random(SIZE, order=1, seed=seed).table
        await lm.add_adapter(name, adapter_directory(tmp_path / name, table))
    asking, contexts = Asking(lm), [[900 + n, 7] for n in range(6)]
    steps: list[dict[str | None, bool]] = [
        {None: False},
        {"a": False, None: True},
        {"b": False, "a": True, None: True},
    ]
    for step in steps:
        for adapter, goes_on in step.items():
            await asking.draw(contexts, adapter=adapter)
            assert asking.goes_on == goes_on
        for n, context in enumerate(contexts):
            context.append(300 + n)
        if anew:
            contexts = [[int(str(token)) for token in each] for each in contexts]


async def test_masks_are_the_callers_again_once_they_were_given(lm: AsyncLM) -> None:
    masks = torch.zeros(3, -(-SIZE // 32), dtype=torch.int32)
    masks[:, 0] = 8  # token 3
    asked = asyncio.ensure_future(lm.batch_draw([[1], [2], [3]], masks=masks))
    await asyncio.sleep(0)
    masks[:, 0] = 16
    assert (await asked).token_ids.tolist() == [3, 3, 3]


async def test_what_is_remembered_is_bounded(lm: AsyncLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Asking(lm)
    for step in range(batches.MOST_BATCHES + 9):
        await asking.draw([[step, n] for n in range(3)])
    assert len(asking.batches._last) == batches.MOST_BATCHES
    monkeypatch.setattr(batches, "MOST_BYTES", 4_000)
    await asking.draw([[1] * 100, [2] * 100])
    assert sum(each.nbytes for each in asking.batches._last) <= 4_000
    monkeypatch.setattr(batches, "MOST_BYTES", 10)
    asking = Asking(lm)
    await asking.draw([[1] * 100, [2] * 100])
    assert not asking.batches._last


async def test_threads_that_go_on_from_one_batch_are_each_answered(lm: AsyncLM) -> None:
    asking, contexts = Asking(lm), [[900 + n, 3] for n in range(8)]
    await asking.draw(contexts)
    grown = [[[*each, n] for each in contexts] for n in range(6)]

    def ask(own: list[list[int]]) -> list[int]:
        return asyncio.run(asking.draw(own, seed=4))

    await asyncio.gather(*[asyncio.to_thread(ask, own) for own in grown])


async def test_a_part_is_asked_where_most_of_it_was_answered(lm: AsyncLM) -> None:
    """One context of the first replica's among those of the second's takes them nowhere."""
    asking = Asking(lm)
    asking.batches._home = type(
        "Two", (), {"__getattr__": lambda _, name: getattr(lm._home, name)}
    )()
    asking.batches._home.most_of = lambda count: -(-count // 2)  # type: ignore[method-assign]
    contexts = [[900 + n, 5] for n in range(10)]
    tokens = await asking.draw(contexts)
    first, second = (part.handle for part in asking.parts)
    longer = [[*each, token] for each, token in zip(contexts, tokens, strict=True)]
    contexts = [longer[n] for n in (9, 1, 2, 3, 4, 4, 6, 7, 8, 0)]
    masks = [[100 + n, 200 + n] for n in range(10)]
    tokens = await asking.draw(contexts, seed=1, masks=masks)
    assert [part.came_from for part in asking.parts] == [(first,), (second, first)]
    longer = [[*each, token] for each, token in zip(contexts, tokens, strict=True)]
    await asking.draw(longer, seed=2)
    assert asking.goes_on
