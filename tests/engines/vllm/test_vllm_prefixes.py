"""Prefixes that vLLM keeps: what questions compute that begin with one, counted in tokens, through
everything that drops the rest. Every row is held against transformers'."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.engines.vllm.prefixes import most_kept
from genrt.errors import EngineFailed
from genrt.lm import AsyncLM
from tests.engines.vllm import small
from tests.engines.vllm.small import BLOCK, LORA, TIGHT_BLOCKS, TOLERANCE, Oracle, failing, tokens
from tests.inside import core_of

pytestmark = pytest.mark.vllm


def load(model: Path, **arguments: Any) -> AsyncLM:
    return small.load(model, blocks=TIGHT_BLOCKS, max_num_seqs=8, **arguments)


@pytest.fixture
def lm(tight: AsyncLM) -> AsyncLM:
    assert kept(tight) == 0
    return tight


PREFIX = tokens(100, seed=1)
KEPT = 96
"""How many of its tokens fill blocks."""


def work(lm: AsyncLM, seed: int = 0) -> None:
    """Put three times as many tokens through the KV cache as it holds, by rows and by texts."""
    for n in range(3):
        lm.next_token_logprobs_sync(tokens(350, seed=1000 * (seed + 1) + n))
        lm.generate_sync(tokens(350, seed=2000 * (seed + 1) + n), max_tokens=3, ignore_eos=True)


def computed(lm: AsyncLM, ask: Callable[[], object]) -> int:
    """How many tokens go through the model for a question."""
    before = lm.statistics().engine.computed_tokens
    ask()
    return lm.statistics().engine.computed_tokens - before


def right(row: torch.Tensor, context: Sequence[int], oracle: Oracle) -> bool:
    return float((oracle(context) - row).abs().max()) < TOLERANCE


def kept(lm: AsyncLM) -> int:
    return lm.statistics().engine.kept_tokens


def test_rows_and_texts_begin_after_the_prefix_whatever_else_was_computed(
    lm: AsyncLM, oracle: Oracle
) -> None:
    assert core_of(lm).scheduler.kv_cache_manager.block_pool.num_gpu_blocks == TIGHT_BLOCKS
    assert computed(lm, lambda: lm.warm_up_sync(PREFIX)) == len(PREFIX)
    assert kept(lm) == KEPT
    for seed in range(2):
        work(lm, seed)
        context, prompt = [*PREFIX, 5, seed], [*PREFIX, 6, seed]
        assert computed(lm, partial(lm.next_token_logprobs_sync, context)) == 6
        assert right(lm.next_token_logprobs_sync(context), context, oracle)
        draw = partial(lm.generate_sync, prompt, max_tokens=4, ignore_eos=True)
        assert computed(lm, draw) == 6 + 3
    lm.cool_down()
    work(lm)
    assert computed(lm, lambda: lm.next_token_logprobs_sync([*PREFIX, 7])) == 101


def test_a_prefix_is_computed_once_however_often_it_is_warmed_up(lm: AsyncLM) -> None:
    assert lm.warm_up_sync(PREFIX) == len(PREFIX)
    assert computed(lm, lambda: lm.warm_up_sync(PREFIX)) <= len(PREFIX) - KEPT
    assert kept(lm) == KEPT

    async def at_once() -> list[int]:
        return await asyncio.gather(*[lm.warm_up(tokens(100, seed=2)) for _ in range(5)])

    assert computed(lm, lambda: asyncio.run(at_once())) == 100
    assert kept(lm) == 2 * KEPT


def test_one_that_is_given_up_is_there_until_its_memory_is_wanted(lm: AsyncLM) -> None:
    other = tokens(100, seed=3)
    lm.warm_up_sync(PREFIX)
    lm.warm_up_sync(other)
    lm.cool_down(PREFIX)
    lm.cool_down([1, 2, 3])
    work(lm)
    assert kept(lm) == KEPT
    assert computed(lm, lambda: lm.next_token_logprobs_sync([*other, 1])) == 5
    assert computed(lm, lambda: lm.next_token_logprobs_sync([*PREFIX, 1])) == 101


@pytest.mark.parametrize(("blocks", "longest", "most"), [(1001, 13, 500), (24, 13, 9), (14, 13, 0)])
def test_prefixes_leave_half_of_the_memory_and_room_for_the_longest_context(
    blocks: int, longest: int, most: int
) -> None:
    assert most_kept(blocks, longest) == most


def test_the_oldest_make_room_and_the_longest_context_fits_beside_them(
    lm: AsyncLM, oracle: Oracle
) -> None:
    """A context of 399 tokens has 13 of the 24 blocks."""
    prefixes = [tokens(4 * BLOCK, seed=10 + n) for n in range(4)]
    for prefix in prefixes:
        lm.warm_up_sync(prefix)
    assert kept(lm) == 2 * 4 * BLOCK
    long = tokens(399, seed=40)
    row = lm.next_token_logprobs_sync(long, timeout=60.0)  # or it would wait for ever
    assert right(row, long, oracle)
    work(lm)
    assert kept(lm) == 9 * BLOCK  # the last two, and the first block of the first one
    assert computed(lm, lambda: lm.next_token_logprobs_sync([*prefixes[3], 1])) == 1
    assert computed(lm, lambda: lm.next_token_logprobs_sync([*prefixes[0], 1])) == 3 * BLOCK + 1
    assert computed(lm, lambda: lm.next_token_logprobs_sync([*prefixes[1], 1])) == 4 * BLOCK + 1
    lm.warm_up_sync(tokens(399, seed=20))  # as much of it as there is room for
    assert kept(lm) == 9 * BLOCK
    lm.cool_down()
    lm.next_token_logprobs_sync([1])
    assert kept(lm) == 0


def test_a_failed_step_loses_it_until_it_is_computed_again(lm: AsyncLM, oracle: Oracle) -> None:
    lm.warm_up_sync(PREFIX)
    for error, raised in ((RuntimeError("no"), EngineFailed), (MemoryError(), genrt.OutOfMemory)):
        with failing(lm, "execute_model", error):
            with pytest.raises(raised):
                lm.next_token_logprobs_sync([1, 2, 3])
            with pytest.raises(raised):
                lm.warm_up_sync(tokens(50, seed=4))
        assert kept(lm) == 0
        row = [*PREFIX, 9]
        assert right(lm.next_token_logprobs_sync(row), row, oracle)
        assert kept(lm) == KEPT
    work(lm)
    assert computed(lm, lambda: lm.next_token_logprobs_sync([*PREFIX, 1])) == 5


def test_without_vllms_prefix_cache_rows_are_right_and_nothing_is_kept(
    bare: AsyncLM, oracle: Oracle
) -> None:
    assert bare.warm_up_sync(PREFIX) == len(PREFIX)
    assert kept(bare) == 0
    assert right(bare.next_token_logprobs_sync([*PREFIX, 1]), [*PREFIX, 1], oracle)


def test_adapters_have_prefixes_of_their_own_and_another_engine_keeps_them(
    llama: Path, loras: tuple[Path, Path], oracle: Oracle
) -> None:
    """Once a question has computed them, after ``restart``."""
    with load(llama, engine_options=LORA) as lm:
        lm.warm_up_sync(PREFIX)
        lm.add_adapter_sync("a", loras[0])
        assert lm.warm_up_sync(PREFIX, adapter="a") == len(PREFIX)
        lm.add_adapter_sync("b", loras[1])
        assert kept(lm) == 2 * KEPT
        work(lm)
        base = computed(lm, lambda: lm.next_token_logprobs_sync([*PREFIX, 2]))
        adapted = computed(lm, lambda: lm.next_token_logprobs_sync([*PREFIX, 2], adapter="a"))
        assert (base, adapted) == (5, 5)

        lm.add_adapter_sync("a", loras[1])  # other weights: computed anew, and kept again
        rows = [lm.next_token_logprobs_sync([*PREFIX, 3], adapter=name) for name in "ab"]
        assert float((rows[0] - rows[1]).abs().max()) < TOLERANCE
        assert not right(rows[0], [*PREFIX, 3], oracle)
        assert kept(lm) == 2 * KEPT
        work(lm)
        assert computed(lm, lambda: lm.next_token_logprobs_sync([*PREFIX, 4], adapter="a")) == 5

        lm.remove_adapter("a")
        lm.next_token_logprobs_sync([4])
        assert kept(lm) == KEPT
        lm.restart()
        lm.next_token_logprobs_sync([*PREFIX, 5], adapter="b")
        lm.next_token_logprobs_sync([*PREFIX, 5])
        assert kept(lm) == KEPT
        work(lm)
        assert computed(lm, lambda: lm.next_token_logprobs_sync([*PREFIX, 3])) == 5
    assert lm.cool_down(PREFIX) is None  # type: ignore[func-returns-value]
    with pytest.raises(genrt.Closed):
        lm.warm_up_sync(PREFIX)
