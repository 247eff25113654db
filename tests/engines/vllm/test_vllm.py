"""The whole way on the real engine: ``await`` to vLLM's rows, against transformers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

import genrt
from genrt.engines.protocol import Engine
from genrt.engines.vllm.capture import RowStore
from genrt.engines.vllm.engine import VLLMEngine
from genrt.errors import (
    ContextTooLong,
    EngineFailed,
    EngineUnsupported,
    InvalidAdapter,
    InvalidRequest,
    ModelNotFound,
)
from genrt.lm import AsyncLM
from genrt.questions.completions import SampleRequest
from genrt.questions.rows import LogprobsRequest
from genrt.tokens import sampling
from tests.engines.vllm.small import TOLERANCE, Oracle, failing, tokens
from tests.inside import engine_of
from tests.waiting import a_loop_beside_each_step

pytestmark = pytest.mark.vllm

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 2**28,
}


def load(model: Path, *, cache_bytes: int = 256 * 2**20, **options: Any) -> AsyncLM:
    return genrt.load(str(model), engine_options=OPTIONS | options, cache_bytes=cache_bytes)


@pytest.fixture(scope="module")
def shared(llama: Path) -> Iterator[AsyncLM]:
    with load(llama) as lm:
        yield lm


@pytest.fixture
def lm(shared: AsyncLM) -> AsyncLM:
    """One engine for the file, with an empty cache for each test."""
    shared.clear_cache()
    return shared


def mixed_prompts(count: int, longest: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to ``longest`` tokens, both lengths included, every eighth a repetition."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = []
    for number in range(count):
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        length = {0: 1, 1: longest}.get(number, length)
        prompt = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        prompts.append(list(prompts[number // 2]) if number % 8 == 7 else prompt)
    return prompts


def worst(rows: Sequence[torch.Tensor] | torch.Tensor, expected: Sequence[torch.Tensor]) -> float:
    return max(float((row - e).abs().max()) for row, e in zip(rows, expected, strict=True))


# -- rows -----------------------------------------------------------------------------------------


@pytest.mark.promise(number=3)
@pytest.mark.promise(number=4)
async def test_128_mixed_prompts_in_one_flush_have_transformers_rows(
    lm: AsyncLM, oracle: Oracle
) -> None:
    prompts = mixed_prompts(128, 400, lm.vocab_size)
    distinct = len({tuple(p) for p in prompts})
    before = lm.statistics()
    rows = await asyncio.gather(*(lm.next_token_logprobs(p) for p in prompts))
    after = lm.statistics()
    assert worst(rows, [oracle(p) for p in prompts]) < TOLERANCE
    assert after.batcher.flushes - before.batcher.flushes == 1
    assert after.engine.rows - before.engine.rows == distinct < 128
    assert after.batcher.deduplicated - before.batcher.deduplicated == 128 - distinct
    assert after.engine.steps - before.engine.steps > 128 // 32


@pytest.mark.promise(number=13)
def test_the_longest_context_has_a_row_and_one_token_more_an_error(
    lm: AsyncLM, oracle: Oracle
) -> None:
    context = mixed_prompts(2, lm.max_model_len, lm.vocab_size, seed=4)[1]
    assert len(context) == lm.max_model_len == 512  # the checkpoint's own
    assert engine_of(lm).vllm_config.model_config.max_model_len == 512  # as front ends read it
    before = lm.statistics().batcher.questions
    for length in (lm.max_model_len - 1, lm.max_model_len):
        row = lm.next_token_logprobs_sync(context[:length])
        assert worst([row], [oracle(context[:length])]) < TOLERANCE
    with pytest.raises(ContextTooLong, match="over max_model_len=512"):
        lm.next_token_logprobs_sync([*context, 1])
    assert lm.statistics().batcher.questions - before == 2


@pytest.mark.parametrize(
    ("error", "kind", "advice"),
    [
        (ValueError("Head size 17 is not supported"), EngineUnsupported, 'engine="transformers"'),
        (RuntimeError("No valid attention backend found"), EngineUnsupported, "transformers"),
        (OSError("no such model"), ModelNotFound, "HF_HUB_OFFLINE is set"),
        (RuntimeError("it broke"), EngineFailed, ""),
    ],
)
def test_vllms_refusals_say_what_to_do(
    error: Exception, kind: type[Exception], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from genrt.engines.vllm.requests import as_genrt_error

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = as_genrt_error(error, "vLLM could not open it")
    assert isinstance(found, kind)
    assert advice in str(found)
    assert advice or "HF_HUB" not in str(found)


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.promise(number=6)
async def test_a_failed_step_fails_its_requests_and_the_next_flush_is_right(
    lm: AsyncLM, oracle: Oracle
) -> None:
    prompts = mixed_prompts(20, 300, lm.vocab_size, seed=5)
    before = lm.statistics()
    # The forward fails before it has written the keys and values of the blocks it was given: what
    # vLLM's prefix cache then says of them is not true.
    with failing(lm):
        ended = await asyncio.gather(
            *(lm.next_token_logprobs(p) for p in prompts), return_exceptions=True
        )
    assert all(isinstance(end, EngineFailed) for end in ended)
    assert len({id(end) for end in ended}) == 20
    assert "scripted failure" in str(ended[0])
    assert isinstance(ended[0].__cause__, RuntimeError)  # type: ignore[union-attr]
    assert lm.statistics().engine.failed - before.engine.failed == len({tuple(p) for p in prompts})
    rows = await asyncio.gather(*(lm.next_token_logprobs(p) for p in prompts))
    assert worst(rows, [oracle(p) for p in prompts]) < TOLERANCE


# -- loops and threads ----------------------------------------------------------------------------


@pytest.mark.promise(number=5)
@pytest.mark.promise(number=19)
async def test_the_loop_goes_on_during_a_long_sample_and_logprobs_return_before_it_ends(
    lm: AsyncLM,
) -> None:
    with a_loop_beside_each_step(lm) as ran:
        sample = asyncio.create_task(lm.sample([1, 2, 3], max_tokens=400, seed=1))
        for number in range(20):
            await lm.next_token_logprobs([4, number])
            assert not sample.done()
        assert len(await sample) == 400
    assert len(ran) >= 400
    assert all(ran)


# -- samples --------------------------------------------------------------------------------------


@pytest.mark.promise(number=18)
async def test_a_seeded_sample_does_not_depend_on_how_its_prompt_was_prefilled(
    lm: AsyncLM, tight: AsyncLM
) -> None:
    """Here at once, there 256 tokens a step, some of which others take."""
    prompt = mixed_prompts(2, 300, lm.vocab_size, seed=8)[1]
    whole = await lm.sample(prompt, max_tokens=10, seed=7)
    company = [tight.sample([n], max_tokens=30, seed=n) for n in range(3)]
    again = await asyncio.gather(tight.sample(prompt, max_tokens=10, seed=7), *company)
    assert again[0] == whole
    assert len({tuple(sample) for sample in again[1:]}) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 40.0, "top_k": 12},  # vLLM itself takes 2 at most
    ],
    ids=str,
)
async def test_frequencies_of_2000_samples_are_the_rows(
    lm: AsyncLM, options: dict[str, Any]
) -> None:
    """A G-test of first and second tokens at level 1e-4, with fixed seeds."""
    context = [11, 12]
    samples = await lm.batch_sample([context] * 2000, max_tokens=2, seed=1234, **options)
    first = sampling.truncate(await lm.next_token_logprobs(context), **options)
    likely = int(first.argmax())
    second = sampling.truncate(await lm.next_token_logprobs([*context, likely]), **options)
    seconds = [s[1] for s in samples if s[0] == likely]
    for row, drawn in ((first, [s[0] for s in samples]), (second, seconds)):
        assert len(drawn) > 100
        assert g_test(row, drawn) > 1e-4


@pytest.mark.parametrize("temperature", [1e-45, 0.99e-5])
async def test_below_a_hundred_thousandth_it_is_greedy(lm: AsyncLM, temperature: float) -> None:
    contexts = [[n] for n in range(64)]
    cold = await lm.batch_sample(contexts, max_tokens=4, temperature=temperature)
    assert cold == await lm.batch_sample(contexts, max_tokens=4, temperature=0.0)


def g_test(row: torch.Tensor, tokens: Sequence[int]) -> float:
    """The p-value of draws against a row, tokens that are expected fewer than 5 times in one bin."""
    expected = row.double().exp() * len(tokens)
    observed = torch.bincount(torch.tensor(tokens), minlength=len(row)).double()
    assert not observed[expected == 0].any()
    kept = expected >= 5
    e = [*expected[kept].tolist(), float(expected[~kept].sum())]
    o = [*observed[kept].tolist(), float(observed[~kept].sum())]
    if e[-1] < 1e-9:
        e, o = e[:-1], o[:-1]
    e = [each * sum(o) / sum(e) for each in e]  # a row sums to 1 only as far as float32 goes
    return float(stats.power_divergence(o, e, lambda_="log-likelihood").pvalue)


@pytest.fixture(scope="module")
def one_slot(llama: Path) -> Iterator[VLLMEngine]:
    """An engine with one slot for texts, and one for rows."""
    from genrt.engines.vllm.opening import open_vllm

    engine = open_vllm(str(llama), options=OPTIONS | {"max_num_seqs": 1})
    yield engine
    engine.close()


def test_samples_get_the_slots_of_cancelled_ones_and_never_those_of_rows(
    one_slot: VLLMEngine,
) -> None:
    running, last = (SampleRequest((1, n), max_tokens=4, seed=n) for n in range(2))
    row = LogprobsRequest((1, 2, 3))
    one_slot.submit([running, last])
    assert one_slot.step() == []
    one_slot.submit([row])
    ends = [end for _ in range(2) for end in one_slot.step()]
    assert [end.request for end in ends] == [row], "the samples go on"
    one_slot.cancel([running])
    ends = [end for _ in range(4) for end in one_slot.step()]
    assert [end.request for end in ends] == [last]
    assert len(ends[0].result or ()) == 4


# -- adapters -------------------------------------------------------------------------------------


async def test_a_text_in_progress_is_the_base_model_s_when_the_first_adapters_are_loaded(
    adaptable: AsyncLM, loras: tuple[Path, Path]
) -> None:
    stream_of = functools.partial(
        AsyncLM.stream, max_tokens=120, seed=3, temperature=1.0, ignore_eos=True
    )
    lm = adaptable
    alone = [token async for delta in stream_of(lm, [1, 2]) for token in delta.token_ids]
    deltas = stream_of(lm, [1, 2])
    tokens = list((await anext(deltas)).token_ids)
    for name, path in zip("ab", loras, strict=True):
        await lm.add_adapter(name, path)

    async def read() -> None:
        tokens.extend([token async for delta in deltas for token in delta.token_ids])

    reading = asyncio.create_task(read())
    beside = 0
    while not reading.done():
        await lm.next_token_logprobs([3, beside], adapter="b")
        beside += 1
    await reading
    assert beside > 5
    assert tokens == alone


@pytest.mark.promise(number=14)
async def test_two_adapters_and_the_base_in_one_flush_match_peft(
    adaptable: AsyncLM, llama: Path, loras: tuple[Path, Path]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(network, loras[0], adapter_name="a")
    adapted.load_adapter(loras[1], adapter_name="b")
    adapted.eval()

    def row(prompt: Sequence[int], name: str | None) -> torch.Tensor:
        with torch.no_grad():
            if name is None:
                with adapted.disable_adapter():
                    logits = adapted(torch.tensor([prompt])).logits[0, -1]
            else:
                adapted.set_adapter(name)
                logits = adapted(torch.tensor([prompt])).logits[0, -1]
        out: torch.Tensor = logits.log_softmax(dim=-1)
        return out

    lm = adaptable
    prompts = mixed_prompts(30, 150, lm.vocab_size, seed=6)
    base_before = await lm.next_token_logprobs([1, 2])
    for name, path in zip("ab", loras, strict=True):
        await lm.add_adapter(name, path)
    names: list[str | None] = ["a", None, "b"]
    before = lm.statistics().batcher.flushes
    rows = await asyncio.gather(
        *(lm.next_token_logprobs(p, adapter=names[n % 3]) for n, p in enumerate(prompts)),
        *(lm.next_token_logprobs(prompts[0], adapter=name) for name in names),
    )
    assert lm.statistics().batcher.flushes - before == 1
    expected = [row(p, names[n % 3]) for n, p in enumerate(prompts)]
    expected += [row(prompts[0], name) for name in names]
    assert worst(rows, expected) < TOLERANCE
    assert float((rows[-1] - rows[-3]).abs().max()) > 0.1
    assert worst([await lm.next_token_logprobs([1, 2])], [base_before]) < TOLERANCE

    # Another set of weights under a name that is in use: never a stale row.
    asked_before = asyncio.create_task(lm.next_token_logprobs(prompts[1], adapter="a"))
    await asyncio.sleep(0)
    await lm.add_adapter("a", loras[1])
    new = await lm.next_token_logprobs(prompts[1], adapter="a")
    assert worst([await asked_before, new], [row(prompts[1], "a"), row(prompts[1], "b")]) < (
        TOLERANCE
    )
    lm.remove_adapter("b")
    with pytest.raises(genrt.UnknownAdapter):
        await lm.next_token_logprobs([1], adapter="b")
    sampled = await lm.sample([1], max_tokens=4, temperature=0.0, adapter="a")
    assert sampled[0] == int(row([1], "b").argmax())


async def test_a_score_is_its_adapters(adaptable: AsyncLM, loras: tuple[Path, Path]) -> None:
    lm, before, after = adaptable, tokens(20, 1), tokens(70, 2)
    names = [None, "a", "b"]

    async def by_rows(name: str | None) -> torch.Tensor:
        contexts = [[*before, *after[:count]] for count in range(len(after))]
        rows = await lm.batch_next_token_logprobs(contexts, adapter=name)
        return rows[torch.arange(len(after)), torch.tensor(after)]

    for name, path in zip("ab", loras, strict=True):
        await lm.add_adapter(name, path)
    found = await asyncio.gather(*(lm.score(before, after, adapter=name) for name in names))
    assert worst(found, [await by_rows(name) for name in names]) < TOLERANCE
    assert float((found[1] - found[2]).abs().max()) > 0.1
    await lm.add_adapter("a", loras[1])  # other weights under the same name
    assert worst([await lm.score(before, after, adapter="a")], [found[2]]) < TOLERANCE


@pytest.mark.promise(number=25)
def test_an_engine_that_takes_no_adapters_says_how_to_load_one_that_does(
    lm: AsyncLM, loras: tuple[Path, Path]
) -> None:
    with pytest.raises(InvalidAdapter, match="enable_lora"):
        lm.add_adapter_sync("a", loras[0])


# -- opening and closing --------------------------------------------------------------------------


def test_the_conformance_suite_passes(llama: Path, loras: tuple[Path, Path]) -> None:
    from genrt.engines.vllm.opening import open_vllm
    from genrt.testing import check_engine

    options = OPTIONS | {"max_num_seqs": 4, "max_model_len": 64, "enable_lora": True}
    options |= {"max_loras": 2, "max_lora_rank": 8}

    def open_engine() -> Engine:
        return open_vllm(str(llama), options=dict(options))

    check_engine(open_engine, adapter_paths=loras)


@pytest.mark.promise(number=24)
def test_what_cannot_be_opened_is_refused_with_the_reason(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="no_such_option"):
        load(llama, no_such_option=1)
    with pytest.raises(ModelNotFound):
        load(tmp_path / "absent")
    with pytest.raises(ModelNotFound):
        genrt.load("nobody/no-such-model")
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    with pytest.raises(EngineUnsupported, match=r"0\.99\.0"):
        load(llama)


@pytest.mark.promise(number=24)
def test_the_self_test_refuses_a_vllm_that_mixes_rows_up(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = RowStore.put
    monkeypatch.setattr(
        RowStore, "put", lambda store, tickets, logits: put(store, tickets[::-1], logits)
    )
    with pytest.raises(EngineUnsupported, match="did not come back"):
        load(llama)


# -- the embedded model ---------------------------------------------------------------------------
