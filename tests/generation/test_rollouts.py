"""Rollouts: batches as tensors, against the same questions asked one by one; what leaving leaves."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import genrt
from genrt.engines.exact import NGram
from genrt.errors import Closed, InvalidRequest, TimedOut
from genrt.generation import (
    Failed,
    Rollout,
    many,
    rollout,
    rollout_samples,
    rollout_sync,
)
from genrt.lm import AsyncLM
from tests.generation.test_many import EOS, MODEL, ROOM, Engine, nothing_left

SHORT = 12
"""The context of the runtime on which batches are drawn: prompts fill it."""


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", engine_options={"max_model_len": SHORT}) as opened:
        yield opened


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def held(engine: Engine) -> Iterator[AsyncLM]:
    """A runtime whose engine can be held."""
    with genrt.load(engine=lambda: engine) as opened:
        yield opened


def padded(
    prompts: Sequence[Sequence[int]], pad: int = 0, width: int = 0, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor]:
    """A batch of prompts and its lengths."""
    width = max([width, *map(len, prompts)])
    rows = [[*prompt, *[pad] * (width - len(prompt))] for prompt in prompts]
    ids = torch.tensor(rows, dtype=dtype).reshape(len(prompts), width)
    return ids, torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)


def check(found: Rollout, before: Tensor, lengths: Tensor, pad: int) -> None:
    """See that a rollout's fields have their shapes, and agree with each other and with the batch."""
    batch, width = found.output_ids.shape
    assert found.output_ids.dtype == before.dtype
    assert found.logprobs.dtype == torch.float32
    assert found.truncated.dtype == torch.bool
    assert found.logprobs.shape == (batch, width)
    assert found.truncated.shape == found.generation_lengths.shape == (batch,)
    assert torch.equal(found.unpadded_sequence_lengths, lengths + found.generation_lengths)
    after = torch.arange(width) >= found.unpadded_sequence_lengths[:, None]
    assert (found.output_ids[after] == pad).all()
    for row, completion in enumerate(found.completions):
        length, end = int(lengths[row]), int(found.unpadded_sequence_lengths[row])
        assert torch.equal(found.output_ids[row, :length], before[row, :length])
        assert found.output_ids[row, length:end].tolist() == list(completion.token_ids)
        assert found.logprobs[row, length:end].tolist() == pytest.approx(completion.logprobs)
        assert not found.logprobs[row, :length].any()
        assert not found.logprobs[row, end:].any()
        assert bool(found.truncated[row]) == (completion.finish_reason == "length")


prompts_of = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=SHORT), max_size=5)
stops_of_one = st.none() | st.lists(st.sampled_from(["a", "b", "ab", "cd", " c"]), max_size=2)


@settings(deadline=None, max_examples=40)
@given(
    prompts=prompts_of,
    pad=st.sampled_from([-1, 0, EOS, 2**31 - 1]),
    extra=st.integers(0, 3),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    most=st.none() | st.integers(1, SHORT + 3),
    seed=st.none() | st.integers(0, 2**63 - 1),
    options=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.5, 2.0]),
            "top_k": st.integers(1, 3),
            "min_tokens": st.just(1),
            "stop_token_ids": st.lists(st.integers(0, 3), max_size=2),
            "logprobs_mode": st.sampled_from(["raw_logprobs", "processed_logprobs"]),
            "concurrency": st.integers(1, 3),
        },
    ),
    data=st.data(),
)
def test_a_batch_is_what_its_prompts_are_one_by_one(
    lm: AsyncLM,
    prompts: list[list[int]],
    pad: int,
    extra: int,
    dtype: torch.dtype,
    most: int | None,
    seed: int | None,
    options: dict[str, Any],
    data: st.DataObject,
) -> None:
    count = len(prompts)
    ids, lengths = padded(prompts, pad, extra, dtype)
    stops = data.draw(st.lists(stops_of_one, min_size=count, max_size=count))
    own = {} if seed is None else {"seed": seed}
    asked: dict[str, Any] = {"pad_value": pad, "max_new_tokens": most, **options, **own}
    found = rollout_sync(lm, ids, lengths, stop_strings=stops, **asked)
    check(found, ids, lengths, pad)
    assert len(found.completions) == count
    longest = max(found.generation_lengths.tolist(), default=0)
    assert found.output_ids.shape == (count, ids.shape[1] + longest)
    for row, prompt in enumerate(prompts):
        drawn, room = found.completions[row].token_ids, SHORT - len(prompt)
        assert len(drawn) <= min(room, SHORT if most is None else most)
        if not room:
            assert bool(found.truncated[row])  # it had no chance to end
            continue
        if options.get("logprobs_mode") != "processed_logprobs":
            scores = lm.score_sync(prompt, drawn)
            assert found.completions[row].logprobs == pytest.approx(scores.tolist(), abs=5e-4)
        if seed is None:
            continue
        alone: dict[str, Any] = {"max_tokens": room if most is None else min(room, most)}
        alone |= {"stop": stops[row]} if stops[row] is not None else {}
        alone |= {name: each for name, each in options.items() if name != "concurrency"}
        expected = lm.generate_sync(prompt, seed=(seed + row) % 2**63, logprobs=0, **alone)
        assert drawn == expected.token_ids
        assert found.completions[row].logprobs == expected.logprobs
        assert found.completions[row].stop_reason == expected.stop_reason


async def test_samples_come_as_they_finish_each_of_its_own_length(lm: AsyncLM) -> None:
    prompts = [[0, 1], [2] * SHORT, [3], [1, 1, 1]]
    ids, lengths = padded(prompts, -1, 20)
    options: dict[str, Any] = {"pad_value": -1, "seed": 5}
    whole = await rollout(lm, ids, lengths, **options)
    found = {number: each async for number, each in rollout_samples(lm, ids, lengths, **options)}
    assert sorted(found) == [0, 1, 2, 3]
    for number, sample in found.items():
        check(sample, ids[number : number + 1], lengths[number : number + 1], -1)
        end = int(whole.unpadded_sequence_lengths[number])
        assert sample.output_ids.shape == (1, end)
        assert torch.equal(sample.output_ids[0], whole.output_ids[number, :end])
        assert torch.equal(sample.logprobs[0], whole.logprobs[number, :end])
        assert torch.equal(sample.truncated, whole.truncated[number : number + 1])


# -- what is refused -------------------------------------------------------------------------------

BATCH, LENGTHS = padded([[0, 1, 2], [3]])
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": BATCH[0]}, r"integers \[batch, time\], got torch.int64 of shape \[3\]"),
    ({"input_lengths": torch.tensor([3])}, "input_lengths has length 1, not 2: one for each row"),
    ({"input_lengths": torch.tensor([3, 4])}, "row 1: input_lengths says 4, and input_ids is 3"),
    ({"input_lengths": torch.tensor([-1, 1])}, "row 0: input_lengths says -1"),
    ({"input_lengths": torch.tensor([3, 0]), "input_ids": BATCH * (BATCH < 3)}, "row 1 is empty"),
    ({"input_lengths": torch.tensor([1, 1])}, "row 0, position 1 of input_ids: there is 1 behind"),
    ({"input_ids": BATCH.flip(1)}, "row 1, position 2 .* there is 3 .* padded on the left"),
    ({"input_ids": BATCH + 9}, "row 1, position 1 of input_ids: there is 9"),
    ({"input_ids": BATCH + 9, "pad_value": 9}, "token ids of row 0 must be in the vocabulary"),
    ({"pad_value": 2**40, "input_ids": BATCH.int()}, "does not fit torch.int32"),
    ({"stop_strings": [["a"]]}, "stop_strings has length 1, not 2: give one for each sample"),
    ({"stop_strings": [["a"], 5]}, "stop must be a list of texts, got 5"),
    ({"stop_token_ids": [[1], [2]]}, "stop_token_ids must be int"),
    ({"seed": [1]}, "seed must be an int"),
    ({"max_new_tokens": 2, "min_tokens": 3}, "min_tokens must be from 0 to 2"),
    ({"pad_value": None}, "pad_value must be an int, got None"),
    ({"max_tokens": 2}, "no option 'max_tokens': did you mean max_new_tokens"),
    ({"logprobs": 1}, "no option 'logprobs'"),
    (
        {"input_ids": torch.ones(2, 13).int(), "input_lengths": torch.tensor([13, 13])},
        "row 0 has 13 tokens, over",
    ),
    ({"beams": 2}, "no option 'beams'"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=str)
async def test_a_mistake_is_told(lm: AsyncLM, mistake: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"lm": lm, "input_ids": BATCH, "input_lengths": LENGTHS, "pad_value": 0}
    with pytest.raises(InvalidRequest, match=message):
        await rollout(**(right | mistake))
    with pytest.raises(InvalidRequest, match=message):
        async for _ in rollout_samples(**(right | mistake)):
            pass
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_types_must_hold_the_vocabulary(lm: AsyncLM) -> None:
    found = await rollout(lm, BATCH.to(torch.uint8), LENGTHS, pad_value=0, seed=1)
    assert found.output_ids.dtype == torch.uint8
    async with await genrt.aload(NGram.random(300, order=1), engine="exact") as wide:
        with pytest.raises(InvalidRequest, match=r"torch.uint8: not every token id fits"):
            await rollout(wide, BATCH.to(torch.uint8), LENGTHS, pad_value=0)


async def test_an_empty_batch_has_every_field_and_its_options_are_checked() -> None:
    async with await genrt.aload(MODEL, engine="exact") as lm:
        ids, lengths = torch.empty(0, 7, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
        found = await rollout(lm, ids, lengths, pad_value=0, stop_strings=[], seed=1)
        check(found, ids, lengths, 0)
        assert found.output_ids.shape == (0, 7)
        assert [each async for each in rollout_samples(lm, ids, lengths, pad_value=0)] == []
        assert lm.statistics().batcher.questions == 0
        mistakes: list[Any] = [{"temperature": -1}, {"stop_strings": [""]}, {"adapter": "none"}]
        for wrong in mistakes:
            with pytest.raises(InvalidRequest):
                await rollout(lm, ids, lengths, pad_value=0, **wrong)
    with pytest.raises(Closed):
        await rollout(lm, ids, lengths, pad_value=0)


@settings(deadline=None, max_examples=100)
@given(
    prompts=st.lists(st.lists(st.integers(-3, 3), max_size=5), min_size=1, max_size=4),
    pad=st.integers(-3, 3),
    extra=st.integers(0, 7),
    data=st.data(),
)
def test_wrong_padding_is_told_by_row_position_and_value(
    lm: AsyncLM, prompts: list[list[int]], pad: int, extra: int, data: st.DataObject
) -> None:
    ids, lengths = padded(prompts, pad, extra)
    places = (torch.arange(ids.shape[1]) >= lengths[:, None]).nonzero().tolist()
    if not places:
        return
    row, position = data.draw(st.sampled_from(places))
    value = data.draw(st.integers(-3, 3).filter(lambda each: each != pad))
    ids[row, position] = value
    message = f"row {row}, position {position} of input_ids: there is {value}"
    with pytest.raises(InvalidRequest, match=message):
        rollout_sync(lm, ids, lengths, pad_value=pad)


# -- errors, cancellation, restart -----------------------------------------------------------------


async def test_an_error_names_its_sample_and_cancels_the_others(
    held: AsyncLM, engine: Engine
) -> None:
    ids, lengths = padded([[0], [1] * ROOM, [0]])
    with pytest.raises(TimedOut) as raised:
        await rollout(held, ids, lengths, pad_value=0, timeout=0)
    assert raised.value.__notes__ == ["sample 0 of rollout"]
    await nothing_left(held, engine)


async def test_samples_that_take_too_long_are_truncated_if_that_is_wanted(
    held: AsyncLM, engine: Engine
) -> None:
    ids, lengths = padded([[0, 1], [1] * ROOM, [2]])
    options: Any = {"pad_value": 0, "timeout": 0, "on_timeout": "truncate"}
    found = await rollout(held, ids, lengths, **options)
    assert found.truncated.tolist() == [True] * 3
    assert found.generation_lengths.tolist() == [0] * 3
    assert [each.finish_reason for each in found.completions] == ["abort", "length", "abort"]
    assert torch.equal(found.output_ids, ids)
    assert not found.logprobs.any()
    await nothing_left(held, engine)


async def test_what_was_drawn_in_time_is_kept_beside_texts_that_are_whole(
    held: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, lengths = padded([[0, 1], [1], [2]])
    options: Any = {"pad_value": 0, "seed": 5, "max_new_tokens": 6, "ignore_eos": True}
    whole = await rollout(held, ids, lengths, **options)
    [_, late, _] = whole.completions
    partial = dataclasses.replace(
        late, token_ids=late.token_ids[:2], logprobs=late.logprobs[:2], finish_reason="abort"
    )
    ask = many.ItemRunner.run

    async def late_for_one(asked: Any, number: int, item: Any) -> Any:
        return Failed(TimedOut("late"), partial) if number == 1 else await ask(asked, number, item)

    monkeypatch.setattr(many.ItemRunner, "run", late_for_one)
    found = await rollout(held, ids, lengths, **options, on_timeout="truncate", timeout=60)
    assert found.generation_lengths.tolist() == [6, 2, 6]
    assert found.truncated.tolist() == [True] * 3
    assert torch.equal(found.output_ids[[0, 2]], whole.output_ids[[0, 2]])
    assert found.output_ids[1].tolist() == [1, *late.token_ids[:2], 0, 0, 0, 0, 0]
    assert torch.equal(found.logprobs[1, 1:3], whole.logprobs[1, 1:3])
    assert not found.logprobs[1, 3:].any()
    with pytest.raises(TimedOut):
        await rollout(held, ids, lengths, **options, timeout=60)


async def test_a_rollout_tells_with_which_weights_each_text_was_drawn() -> None:
    async with await genrt.aload(engine=Engine) as lm:
        whole = padded([[EOS - 1]] * 8)
        options: Any = {"pad_value": 0, "seed": 1, "max_new_tokens": 2}
        samples = rollout_samples(lm, *whole, concurrency=1, **options)
        _, first = await anext(samples)
        assert await lm.update_weights({"table": MODEL.table.flip(0)}) == 1
        versions = [int(each.weights_versions.max()) async for _, each in samples]
        drawn = first.weights_versions >= 0
        assert first.weights_versions[drawn].tolist() == [0] * int(first.generation_lengths)
        assert not drawn[:, : -int(first.generation_lengths)].any()
        assert versions == sorted(versions)
        assert versions[-1] == 1
        full = await rollout(lm, *padded([[0] * lm.max_model_len]), **options)
        assert (full.weights_versions == -1).all()
        assert full.generation_lengths.tolist() == [0]


async def test_a_rollout_tells_which_weights_drew_each_token() -> None:
    async with await genrt.aload(engine=Engine) as lm:
        of = {0: MODEL}
        options: Any = {"pad_value": 0, "seed": 1, "max_new_tokens": 60, "ignore_eos": True}
        drawing = asyncio.ensure_future(rollout(lm, *padded([[1], [2, 1], [3]]), **options))
        await asyncio.sleep(0)
        while not drawing.done():
            table = MODEL.table.roll(lm.weights_version + 1, -1)
            version = await lm.update_weights({"table": table}, pending="continue")
            of[version] = NGram(MODEL.vocabulary, table)
        found = await drawing
        ends = found.unpadded_sequence_lengths
        starts = ends - found.generation_lengths
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            versions, ids = found.weights_versions[row].tolist(), found.output_ids[row].tolist()
            assert set(versions[:start] + versions[end:]) <= {-1}
            assert len(set(versions[start:end])) > 3
            for place in range(start, end):
                wanted = of[versions[place]].row(ids[:place])[ids[place]]
                assert float(found.logprobs[row, place]) == pytest.approx(float(wanted), abs=1e-5)
