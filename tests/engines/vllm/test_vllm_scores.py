"""Scores in one request on the real engine: equal to transformers' rows, in chunks, after hits, beside
everything else; and the V2 runner's part against a scripted one."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.engines.vllm.scores import Positions, positions_of
from genrt.errors import NotFinite
from genrt.lm import AsyncLM
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from tests.engines.vllm.small import TOLERANCE, left_over, on_engine, preemptions, runner_of, tokens
from tests.inside import engine_of

pytestmark = pytest.mark.vllm

TIGHT: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "max_model_len": 256,
    "num_gpu_blocks_override": 20,
}
"""Room for 640 tokens, and for 48 in a step: texts come in chunks, sequences are evicted."""
Rows = Callable[[Sequence[int]], torch.Tensor]
Oracle = Callable[[Sequence[int], Sequence[int]], torch.Tensor]


@pytest.fixture(scope="module")
def lm(llama: Path) -> Iterator[AsyncLM]:
    with genrt.load(str(llama), engine_options=TIGHT, cache_bytes=0) as lm:
        yield lm


@pytest.fixture(scope="module")
def score_of(oracle_rows: Rows) -> Oracle:
    """The score by transformers' rows."""

    def score(before: Sequence[int], after: Sequence[int]) -> torch.Tensor:
        rows = oracle_rows([*before, *after])[len(before) - 1 : -1]
        return rows[torch.arange(len(after)), torch.tensor(after, dtype=torch.int64)]

    return score


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=0.0, atol=TOLERANCE)


@pytest.mark.promise(number=38)
def test_scores_are_what_the_rows_say_in_every_company(
    lm: AsyncLM, score_of: Oracle, oracle_rows: Rows
) -> None:
    """Texts of every length, some with shared prefixes, most of them longer than a step; among rows,
    draws and samples, more than there are slots or blocks for."""
    drawn = random.Random(3)
    shared = tokens(90, 4)
    texts = [
        (shared[: drawn.randint(1, 90)] + tokens(drawn.randint(0, 40), seed), tokens(n, seed + 50))
        for seed, n in enumerate([2, 3, 15, 16, 17, 33, 64, 90, 47, 48, 49, 5])
    ]
    # A last chunk of one token, where an open request could be taken for a decode step.
    texts += [(tokens(1, 7), tokens(49, 8)), (tokens(48, 9), tokens(2, 10))]

    async def rows(text: list[int]) -> None:
        found = [each.clone() async for each in lm.prompt_rows(text, chunk=60)]
        assert close(torch.cat(found), oracle_rows(text)[:-1])

    async def ask() -> list[torch.Tensor]:
        others: list[Any] = [lm.sample(tokens(20, seed), max_tokens=9) for seed in range(4)]
        others += [rows(tokens(5 + 40 * n, n)) for n in (0, 1, 3)]
        others += [lm.draw(tokens(30, seed), seed=seed) for seed in range(4)]
        others += [lm.next_token_logprobs([*shared[:50], seed]) for seed in range(4)]
        scores = asyncio.gather(*(lm.score(before, after) for before, after in texts))
        await asyncio.gather(*others)
        return await scores

    for _ in range(2):  # the second time most is in the cache, or was evicted
        before = lm.statistics().engine
        for (context, after), found in zip(texts, asyncio.run(ask()), strict=True):
            assert close(found, score_of(context, after)), len(after)
        since = lm.statistics().engine
        in_rows = 4 + 44 + 124
        wanted = in_rows + sum(len(after) for _, after in texts)
        assert since.scored_tokens - before.scored_tokens == wanted
    assert left_over(engine_of(lm)) == {}


def test_a_score_is_one_request_in_one_step(roomy: AsyncLM, score_of: Oracle) -> None:
    context, after = tokens(128, 101), tokens(256, 102)
    before = roomy.statistics()
    found = roomy.score_sync(context, after)
    since = roomy.statistics().since(before)
    assert close(found, score_of(context, after))
    assert (since.engine.requests, since.engine.steps, since.engine.rows) == (1, 1, 0)
    assert (since.engine.scored_tokens, since.engine.computed_tokens) == (256, 383)
    assert since.batcher.questions == 1
    # What was computed serves whoever goes on from there: a row of one more token.
    row = roomy.next_token_logprobs_sync([*context, *after])
    assert roomy.statistics().since(before).engine.computed_tokens == 384
    assert roomy.statistics().since(before).engine.extended == 1
    assert abs(float(row.double().logsumexp(-1))) < 1e-5
    again = roomy.prompt_logprobs_sync([*context, *after])
    assert close(again[127:], found)
    assert close(again, score_of(context[:1], [*context[1:], *after]))


def test_a_long_prefix_is_computed_once_for_all_that_follow_it(
    roomy: AsyncLM, score_of: Oracle
) -> None:
    """Also where all are asked at once: the blocks of the first are there when the second begins. Nothing
    beyond the first wanted position may be found, wherever that lies in a block."""
    prefix, options = tokens(165, 103), [tokens(4, seed) for seed in range(16)]
    before = roomy.statistics().engine
    found = roomy.batch_score_sync([prefix] * 16, options)
    computed = roomy.statistics().engine.computed_tokens - before.computed_tokens
    assert computed == 168 + 15 * (168 - 160)
    for option, score in zip(options, found, strict=True):
        assert close(score, score_of(prefix, option))
    # By now the prefix is resident, and the tokens in its last block are shared too.
    before = roomy.statistics().engine
    assert close(roomy.score_sync(prefix, [9, 9, 9]), score_of(prefix, [9, 9, 9]))
    assert roomy.statistics().engine.computed_tokens - before.computed_tokens == 3
    # All of these are in the cache, and are computed again, as their positions are wanted.
    for start in (1, 31, 32, 33, 100, 160, 161, 163):
        if start == 161:
            roomy.warm_up_sync(prefix)
        after = prefix[start:]
        assert close(roomy.score_sync(prefix[:start], after), score_of(prefix[:start], after))
    roomy.cool_down()


def test_a_preempted_score_has_all_its_positions_once(lm: AsyncLM, score_of: Oracle) -> None:
    texts = [(tokens(3, seed), tokens(150, seed + 20)) for seed in range(6)]

    async def ask() -> list[torch.Tensor]:
        samples = [lm.sample(tokens(150, seed), max_tokens=90) for seed in range(4)]
        scores = asyncio.gather(*(lm.score(before, after) for before, after in texts))
        await asyncio.gather(*samples)
        return await scores

    with preemptions(lm) as preempted:
        scores = asyncio.run(ask())
    for (before, after), found in zip(texts, scores, strict=True):
        assert close(found, score_of(before, after))
    assert preempted
    assert left_over(engine_of(lm)) == {}


def test_a_score_that_is_cancelled_at_any_step_leaves_nothing_and_disturbs_nobody(
    lm: AsyncLM, score_of: Oracle
) -> None:
    """200 tokens are five chunks: it goes before, between and after them."""
    mates = [(tokens(20, 5), tokens(30, 6)), (tokens(60, 7), tokens(60, 8))]

    def request(before: Sequence[int], after: Sequence[int]) -> ScoreRequest:
        return ScoreRequest(LogprobsRequest([*before, *after]).packed, len(before))

    def run(engine: Any, steps: int) -> dict[Any, Any]:
        unwanted = request(tokens(10, steps), tokens(190, steps + 1))
        asked = [unwanted, *(request(*mate) for mate in mates)]
        engine.submit(asked)
        ends = [end for _ in range(steps) for end in engine.step()]
        engine.cancel([unwanted])
        for _ in range(30):
            ends += engine.step()
        return {end.request: end.result for end in ends if end.request != unwanted}

    for steps in range(8):
        found = on_engine(lm, functools.partial(run, steps=steps))
        assert len(found) == 2
        for mate in mates:
            assert close(found[request(*mate)], score_of(*mate))
        assert left_over(engine_of(lm)) == {}


def test_a_row_that_is_not_finite_fails_its_score_alone(
    lm: AsyncLM, score_of: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = 7
    texts = [([1, 2], [3, 4, 5]), ([1, 2], [3, poison, 5]), ([9, 8], [7, 6])]
    model = runner_of(lm).model
    compute = model.compute_logits

    def poisoned(hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = compute(hidden_states).clone()
        logits[logits.argmax(-1) == bad] = torch.nan
        return logits

    bad = int(lm.top_logprobs_sync([1, 2, 3, poison], 1).token_ids[0])

    async def ask() -> list[Any]:
        scores = (lm.score(*text) for text in texts)
        return await asyncio.gather(*scores, return_exceptions=True)

    failed = lm.statistics().engine.failed
    with monkeypatch.context() as patch:
        patch.setattr(model, "compute_logits", poisoned)
        found = asyncio.run(ask())
    assert isinstance(found[1], NotFinite)
    assert lm.statistics().engine.failed - failed == sum(
        isinstance(each, NotFinite) for each in found
    )
    assert any(isinstance(each, torch.Tensor) for each in found)
    for text, score in zip(texts, found, strict=True):
        assert isinstance(score, NotFinite) or close(score, score_of(*text))
    assert close(lm.score_sync(*texts[1]), score_of(*texts[1]))
    assert left_over(engine_of(lm)) == {}


def test_positions_that_vllm_does_not_show_are_missed(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Positions.put

    def hide(self: Positions, hidden_states: torch.Tensor, spans: Any) -> None:
        put(self, hidden_states, [each for each in spans if each.computed != 48])

    with monkeypatch.context() as patch:
        patch.setattr(Positions, "put", hide)
        with pytest.raises(genrt.GenrtError, match="all positions of its text"):
            lm.score_sync(tokens(2, 31), tokens(140, 32))
    assert left_over(engine_of(lm)) == {}


@pytest.mark.parametrize(
    ("own_processors", "fields"),
    [
        (True, {}),
        (False, {"cache_config": SimpleNamespace(kv_sharing_fast_prefill=True)}),
        (False, {"kv_transfer_config": object()}),
        (False, {"model_config": SimpleNamespace(is_encoder_decoder=True)}),
    ],
)
def test_rows_are_asked_for_where_hidden_states_do_not_make_them(
    own_processors: bool, fields: dict[str, Any]
) -> None:
    plain: dict[str, Any] = {
        "cache_config": SimpleNamespace(kv_sharing_fast_prefill=False),
        "kv_transfer_config": None,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
    }
    config: Any = SimpleNamespace(**plain | fields)
    assert not positions_of(config, object(), None, own_processors).are_taken


# -- runner V2 ------------------------------------------------------------------------------------


def v2(**more: Any) -> tuple[Any, Any, list[Any]]:
    """A scripted runner V2, its scores, and the calls that went on to vLLM's own functions."""
    from genrt.engines.vllm.scores import attach

    calls: list[Any] = []

    def own(*args: Any) -> str:
        calls.append(args)
        return "vLLM's own"

    worker = SimpleNamespace(compute_prompt_logprobs=own)
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        lora_config=None,
        prompt_logprobs_worker=worker,
        sample=own,
        **more,
    )
    return runner, attach(runner, 2**23), calls  # at most four positions at a time


def test_runner_v2_shows_every_step_by_request() -> None:
    """Rows are sorted anew in every step; texts come in chunks, and again after a preemption."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5, 11, generator=generator)
    most: list[int] = []

    def compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
        most.append(len(hidden_states))
        return hidden_states @ weights

    model = SimpleNamespace(compute_logits=compute_logits)
    runner, positions, calls = v2(model=model)
    texts = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [9, 8, 7, 6, 5], "c": [1, 1, 1]}
    states = {name: torch.randn(len(ids), 5, generator=generator) for name, ids in texts.items()}

    def step(computed: dict[str, int], counts: Sequence[int]) -> None:
        parts = [
            states[name][begin : begin + count]
            for (name, begin), count in zip(computed.items(), counts, strict=True)
        ]
        batch = SimpleNamespace(
            req_ids=list(computed),
            num_computed_tokens_np=np.array([*computed.values()], np.int32),
            num_scheduled_tokens=np.array(counts, np.int32),
            query_start_loc_np=np.cumsum([0, *counts]).astype(np.int32),
        )
        hidden_states = torch.cat([*parts, torch.zeros(3, 5)])
        compute = runner.prompt_logprobs_worker.compute_prompt_logprobs
        assert compute(None, hidden_states, batch, "more") == "vLLM's own"

    step({"c": 0}, [3])  # with nothing to score
    wanted = {"a": 2, "b": 1}
    for name, start in wanted.items():
        positions.begin(name, ScoreRequest(LogprobsRequest(texts[name]).packed, start), None)
    step({"a": 0, "c": 0}, [4, 2])
    step({"c": 2, "b": 0, "a": 4}, [1, 4, 1])
    step({"a": 2}, [2])  # "a" was preempted, and begins from a hit
    step({"a": 4}, [2])
    assert [call[3:] for call in calls] == [("more",)] * 5
    found = positions.take(["b", "c", "a"])
    assert found.keys() == {"a", "b"}
    assert max(most) == 4
    assert sum(most) == 5 + 4
    for name, start in wanted.items():
        rows, after = (states[name] @ weights).log_softmax(-1), texts[name][start:]
        entries = rows[torch.arange(start - 1, len(rows) - 1), torch.tensor(after)]
        assert torch.allclose(found[name], entries, atol=1e-6)
    assert not positions


def test_runner_v2_draws_no_tokens_where_nobody_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of nothing but scores; how many were drawn is said all the same, none of a first part."""
    from genrt.engines.vllm import scores as module

    def counted(drawn: torch.Tensor, *columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's kernel for prompts, with its arguments."""
        seq_lens, cu_num_logits, slots, prefill_lens = columns
        assert cu_num_logits.tolist() == [*range(len(slots) + 1)]
        is_whole = seq_lens[: len(slots)] >= prefill_lens[slots]
        return drawn * is_whole, torch.zeros_like(drawn)

    monkeypatch.setattr(module, "get_num_sampled_and_rejected", counted)
    lengths = SimpleNamespace(gpu=torch.tensor([7, 5, 9], dtype=torch.int32))
    runner, positions, calls = v2(req_states=SimpleNamespace(prefill_len=lengths))

    def step(slots: dict[str, int], seq_lens: Sequence[int]) -> Any:
        batch = SimpleNamespace(
            req_ids=list(slots),
            num_reqs=len(slots),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            cu_num_logits=torch.arange(len(slots) + 1, dtype=torch.int32),
            idx_mapping=torch.tensor([*slots.values()]),
        )
        return runner.sample("hidden states", batch, None)

    def begin(name: str) -> None:
        positions.begin(name, ScoreRequest(LogprobsRequest([1, 2, 3]).packed, 1), None)

    assert step({"c": 1}, [5]) == "vLLM's own"
    begin("a")
    assert step({"a": 2, "c": 1}, [9, 5]) == "vLLM's own"
    begin("b")
    # With one more length, by which the batch is filled up.
    output, drawn, rejected = step({"b": 0, "a": 2}, [4, 9, 0])
    assert output.sampled_token_ids.tolist() == [[0], [0]]
    assert output.sampled_token_ids.dtype == torch.int64
    assert (output.num_sampled is drawn, output.num_rejected is rejected) == (True, True)
    assert (drawn.tolist(), rejected.tolist()) == ([0, 1], [0, 0])
    assert (output.logprobs_tensors, output.num_nans) == (None, None)
    positions.forget(["a", "b"])
    assert step({"a": 2}, [9]) == "vLLM's own"  # it goes on, as a row
    assert len(calls) == 3
