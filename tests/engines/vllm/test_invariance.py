"""The same bits whatever the batch: a deterministic vLLM against itself with other companies, the
self-test that finds an engine without that, and the refusals."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import genrt
from genrt.engines.vllm.engine import VLLMEngine
from genrt.engines.vllm.invariance import check_same_bits
from genrt.errors import EngineUnsupported, InvalidRequest
from genrt.lm import AsyncLM
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from tests.engines.vllm.small import forget, load, tokens
from tests.engines.vllm.test_self_check import Engine, Ids
from tests.inside import engine_of

pytestmark = pytest.mark.vllm

MOST = 128
TEXTS = [tokens(1 + (37 * n) % 110, n) for n in range(64)]
SPLIT_KV = "VLLM_CPU_ATTN_SPLIT_KV"


@pytest.fixture(scope="module")
def unsplit() -> Iterator[None]:
    """The environment that a deterministic vLLM needs on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SPLIT_KV, "0")
        yield


def deterministic(model: Path, **given: Any) -> AsyncLM:
    options = {"max_model_len": MOST} | given.pop("engine_options", {})
    return load(
        model, blocks=400, max_num_seqs=64, deterministic=True, engine_options=options, **given
    )


@pytest.fixture(scope="module")
def same_bits(llama: Path, unsplit: None) -> Iterator[AsyncLM]:
    with deterministic(llama) as lm:
        yield lm


async def digests(lm: AsyncLM, order: Sequence[int]) -> dict[int, str]:
    """The digest of all answers after each of these texts, when all are asked together: rows, draws,
    scores, a teacher's, texts, contexts and populations that grow and fork."""
    texts = [TEXTS[n] for n in order]
    rows = await lm.batch_next_token_logprobs(texts)
    draws, scores, generated = await asyncio.gather(
        asyncio.gather(*(lm.draw(TEXTS[n], seed=n, temperature=0.8) for n in order)),
        lm.batch_score(texts, [tokens(5, n) for n in order]),
        asyncio.gather(
            *(lm.generate(TEXTS[n], max_tokens=4, seed=n, top_p=0.9, logprobs=2) for n in order)
        ),
    )
    population = lm.population(texts)
    grown: list[Any] = [await population.logprobs()]
    for step in range(3):
        population.append([(n + step) % 320 for n in order])
        grown.append(await population.logprobs())
    forks = population.take([*range(len(order)), *range(len(order))])
    forks.append([n % 320 for n in order] + [(n + 7) % 320 for n in order])
    grown += torch.split(await forks.logprobs(), len(order))
    contexts = [lm.context(each) for each in texts]
    grown += [await asyncio.gather(*(each.logprobs() for each in contexts))]
    branches = [each.fork() for each in contexts]
    for number, context, branch in zip(order, contexts, branches, strict=True):
        context.append(number)
        branch.append(number + 1)
    both = await asyncio.gather(*(each.logprobs() for each in (*contexts, *branches)))
    grown += both[: len(order)], both[len(order) :]
    for handle in (*contexts, *branches):
        handle.close()
    population.close()
    forks.close()
    taught = await lm.batch_teacher(texts, top=8, temperature=0.9)
    found = {}
    for place, number in enumerate(order):
        text = generated[place]
        said = draws[place], text.token_ids, text.logprobs, text.top_logprobs
        answers: list[Any] = [each[place] for each in (rows, scores, *grown)]
        bits = [each.numpy().tobytes() for each in (*answers, *taught[place])]
        found[number] = hashlib.sha256(repr(said).encode() + b"".join(bits)).hexdigest()
    return found


async def test_answers_have_the_same_bits_among_1_to_64_permuted_cached_or_not(
    same_bits: AsyncLM,
) -> None:
    expected: dict[int, str] = {}
    for number in range(64):
        expected |= await digests(same_bits, [number])
    assert len(set(expected.values())) == 64
    choose = random.Random(2)
    for count in (2, 3, 5, 16, 33, 64):  # after prefix hits and residents
        order = choose.sample(range(64), count)
        assert await digests(same_bits, order) == {n: expected[n] for n in order}
    forget(same_bits)
    fresh = random.Random(1).sample(range(64), 64)
    assert await digests(same_bits, fresh) == expected


async def test_a_second_engine_replicas_a_row_cache_and_a_restart_give_the_same_bits(
    llama: Path, same_bits: AsyncLM, here: None
) -> None:
    order = [*range(0, 64, 3)]
    expected = await digests(same_bits, order)
    assert await digests(same_bits, order[::-1]) == expected
    with deterministic(llama, cache_bytes=2**20) as cached:
        for _ in range(2):
            assert await digests(cached, order) == expected
        await cached.arestart()
        assert await digests(cached, order) == expected
    with deterministic(llama, replicas=2) as several:
        assert await digests(several, order) == expected


class Batched(Engine):
    """An engine whose faults depend on the requests of a batch.

    Args:
        fault: where rows are summed in the batch's order: "rows" everywhere, "residents" where a part of
            the context is resident, "scores" in scores.
    """

    device = torch.device("cpu")

    def __init__(self, fault: str = "", max_model_len: int = 512) -> None:
        super().__init__(3.0)
        self.wrong, self.max_model_len = fault, max_model_len
        self.count, self.known = 1, 0

    def row(self, context: Ids) -> torch.Tensor:
        said = self.says[torch.arange(len(context)), torch.tensor(context)]
        is_cut = self.wrong == "residents" and self.known > 150
        if is_cut or (self.wrong == "rows" and self.count > 1):
            middle = len(said) // 2 if is_cut else self.count % len(said)
            total = said[:middle].sum(dim=0) + said[middle:].sum(dim=0)
        else:
            total = said.sum(dim=0)
        return total.log_softmax(dim=-1)

    def probe(
        self, requests: Sequence[LogprobsRequest] | Sequence[ScoreRequest]
    ) -> list[torch.Tensor]:
        found = []
        self.count = len(requests)
        for request in requests:
            context = tuple(request.token_ids)
            shared = [each for each in self.residents if each == context[: len(each)]]
            self.known = max(map(len, shared), default=0)
            [answer] = super().probe(cast("Any", [request]))
            is_wrong = self.wrong == "scores" and isinstance(request, ScoreRequest)
            found.append(answer + 1e-6 * (self.count > 1) if is_wrong else answer)
        return found


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ("rows", "36 tokens a row among 63 others"),
        ("residents", r"256 tokens a row after \d+ resident.*{'max_model_len': 128}"),
        ("scores", "20 tokens a score among 63 others"),
    ],
)
def test_the_self_test_names_the_part_that_depends_on_the_batch(fault: str, part: str) -> None:
    block_size = 16 if fault == "scores" else 32
    with pytest.raises(EngineUnsupported, match=part):
        check_same_bits(cast("VLLMEngine", Batched(fault)), block_size=block_size)


def test_the_self_test_admits_an_engine_that_computes_each_row_apart() -> None:
    engine = Batched(max_model_len=130)
    check_same_bits(cast("VLLMEngine", engine), block_size=16)
    assert not engine.residents


def test_on_a_gpu_texts_are_not_truncated(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []
    engine: Any = Batched(max_model_len=130)
    engine.stop_truncating = lambda: stopped.append(True)
    check_same_bits(engine, block_size=16)
    assert not stopped
    monkeypatch.setattr(engine, "device", torch.device("meta"))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor)
    check_same_bits(engine, block_size=16)
    assert stopped
    with load(llama, blocks=40, max_num_seqs=4) as lm:
        engine_of(lm).stop_truncating()
        for cut in ({"top_p": 0.9}, {"top_k": 3}):
            with pytest.raises(InvalidRequest, match="leave them out"):
                lm.generate_sync([1], max_tokens=2, **cast("Any", cut))
        assert len(lm.generate_sync([1], max_tokens=2, min_p=0.1, ignore_eos=True).token_ids) == 2


def test_without_residents_a_cpus_attention_cannot_be_tested() -> None:
    engine = Batched()
    engine.keeps_residents = False
    with pytest.raises(EngineUnsupported, match="load with residency=True"):
        check_same_bits(cast("VLLMEngine", engine), block_size=16)


def test_cpu_attention_over_several_tiles_is_refused(llama: Path, unsplit: None) -> None:
    # A tile for heads of 32 float32 numbers holds 32768 tokens only with 16 MiB of level-2 cache.
    from tests.small_models import make_llama

    long = make_llama(llama.parent / "long", max_position_embeddings=4096, tokenizer=False)
    options = {"max_model_len": 4096, "skip_tokenizer_init": True}
    with pytest.raises(EngineUnsupported, match=r"tokens a row .* differs by .*max_model_len"):
        deterministic(long, engine_options=options)


def test_environment_variables_of_the_wrong_device_are_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SPLIT_KV, raising=False)
    with pytest.raises(EngineUnsupported, match=f"start the program with {SPLIT_KV}=0"):
        deterministic(llama)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(EngineUnsupported, match=r"is for GPUs.*unset it"):
        deterministic(llama)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    with pytest.raises(EngineUnsupported, match="start the program with VLLM_BATCH_INVARIANT=1"):
        deterministic(llama)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "leave tensor_parallel_size"),
        ({"enable_lora": True}, "leave enable_lora out"),
    ],
)
def test_parts_without_a_self_test_are_refused(
    llama: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineUnsupported, match=message):
        deterministic(llama, engine_options=options)


async def test_transformers_computes_a_row_alone(llama: Path) -> None:
    options = {"dtype": "float32", "max_batch_size": 2}
    with pytest.raises(InvalidRequest, match="leave max_batch_size out"):
        genrt.load(str(llama), engine="transformers", deterministic=True, engine_options=options)
    given: dict[str, Any] = {"engine_options": {"dtype": "float32"}, "cache_bytes": 0}
    with genrt.load(str(llama), engine="transformers", deterministic=True, **given) as lm:
        assert lm.max_batch_size == 1
        expected: dict[int, str] = {}
        for number in (order := [*range(0, 64, 7)]):
            expected |= await digests(lm, [number])
        assert await digests(lm, order[::-1]) == expected
