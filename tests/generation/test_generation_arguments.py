"""Every argument of what generates many texts, with wrong values of every kind."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
import torch

import genrt
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest, TimedOut
from genrt.generation import (
    Item,
    ManyOptions,
    PolicyGeneration,
    RolloutOptions,
    ValidOptions,
    generate_many,
    generate_valid,
    rollout_samples,
    verify_right_padding,
)
from genrt.lm import AsyncLM
from tests.test_every_argument import WRONG


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load(NGram.random(11, order=1, seed=2, zeros=0.3), engine="exact") as opened:
        yield opened


async def many(**arguments: Any) -> None:
    right: dict[str, Any] = {"items": [[1], [2]], "max_tokens": 1}
    async for _ in generate_many(**right | arguments):
        pass


async def valid(**arguments: Any) -> None:
    right: dict[str, Any] = {
        "prompts": [1],
        "validate": str,
        "target": 1,
        "max_tokens": 1,
        "max_attempts": 2,
    }
    await generate_valid(**right | arguments)


BATCH = {"input_ids": torch.tensor([[1, 2], [3, 0]]), "input_lengths": torch.tensor([2, 1])}


async def samples(**arguments: Any) -> None:
    right: dict[str, Any] = {**BATCH, "pad_value": 0, "max_new_tokens": 1}
    async for _ in rollout_samples(**right | arguments):
        pass


async def policy(lm: AsyncLM, **arguments: Any) -> None:
    await asyncio.to_thread(
        PolicyGeneration(lm, pad_value=0).generate, **{"data": BATCH} | arguments
    )


async def field(lm: AsyncLM, **arguments: Any) -> None:
    options: dict[str, Any] = {"pad_value": 0, "max_new_tokens": 1}
    async for _ in PolicyGeneration(lm, **options).generate_async({**BATCH, **arguments}):
        pass


async def padding(lm: AsyncLM, **arguments: Any) -> None:
    right: dict[str, Any] = {"data": BATCH, "pad_value": 0}
    verify_right_padding(**right | arguments)


QUESTIONS = [
    *((samples, name) for name in [*BATCH, *get_type_hints(RolloutOptions)]),
    *((policy, name) for name in ("data", "greedy")),
    *((field, name) for name in [*BATCH, "stop_strings"]),
    *((padding, name) for name in ("data", "pad_value", "raise_error")),
    *((many, name) for name in ["items", "on_error", *get_type_hints(ManyOptions)]),
    *((valid, name) for name in ["prompts", "validate", "target", *get_type_hints(ValidOptions)]),
]


@pytest.mark.parametrize(("function", "parameter"), QUESTIONS)
async def test_a_wrong_argument_is_refused_or_taken_and_disturbs_nobody(
    lm: AsyncLM, function: Any, parameter: str
) -> None:
    raw: list[str] = []
    for value in WRONG:
        try:
            await function(lm=lm, **{parameter: value})
        except (InvalidRequest, TimedOut):
            pass
        except Exception as error:
            raw.append(f"{type(value).__name__}: {type(error).__name__}: {error}"[:200])
    assert not raw, "\n".join(raw)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert len(await lm.sample([1], max_tokens=2)) == 2


@pytest.mark.parametrize("parameter", [*inspect.signature(Item).parameters])
async def test_a_wrong_item_is_refused_or_taken(lm: AsyncLM, parameter: str) -> None:
    items = [Item(**{parameter: value}) for value in WRONG]
    right: dict[str, Any] = {} if parameter in ("prompt", "messages") else {"prompt": [1]}
    items += [Item(**right | {parameter: value}) for value in WRONG]
    found = [r async for _, r in generate_many(lm, items, on_error="return", max_tokens=1)]
    errors = [each.error for each in found if isinstance(each, genrt.generation.Failed)]
    assert [repr(each) for each in errors if not isinstance(each, InvalidRequest)] == []
    assert len(found) == len(items)
