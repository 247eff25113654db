"""Replicas with vLLM, or two ranks: answers, weights, adapters and clients as of one engine, deaths
included."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import genrt
from genrt.server import serving
from tests.cluster.ray_program import identity, started_by
from tests.cluster.two_nodes import have_ended
from tests.inside import engine_of
from tests.waiting import until as happened
from tests.waiting import until_replicas as until

pytestmark = [pytest.mark.vllm, pytest.mark.proof]

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 16,
    "enable_lora": True,
    "max_lora_rank": 8,
    "kv_cache_memory_bytes": 2**26,
}
CONTEXTS = [[3 + (n * k) % 200 for n in range(length)] for k in (1, 7) for length in (1, 5, 40)]
LONG = 150


@pytest.fixture(scope="module")
def one(llama: Path, loras: tuple[Path, Path]) -> Iterator[genrt.AsyncLM]:
    with genrt.load(llama, engine_options=OPTIONS, seed=1) as lm:
        lm.add_adapter_sync("a", loras[0])
        yield lm


@pytest.fixture(scope="module")
def two(llama: Path, loras: tuple[Path, Path], local_ray: None) -> Iterator[genrt.AsyncLM]:
    with genrt.load(llama, engine_options=OPTIONS, seed=1, replicas=2) as lm:
        lm.add_adapter_sync("a", loras[0])
        yield lm


@pytest.fixture(scope="module")
def weights(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """The checkpoint's, and another one's."""
    from tests.small_models import make_llama

    other = make_llama(tmp_path_factory.mktemp("other") / "model", seed=7)
    return [load_file(each / "model.safetensors") for each in (llama, other)]


def answers(lm: genrt.AsyncLM) -> list[torch.Tensor]:
    """Rows, scores, texts, and a population that grows, is resampled and cut, with what goes with it."""
    lm.clear_cache()
    population = lm.population(CONTEXTS[2], 8)
    drawn = []
    for step in range(8):
        draws = population.draw_sync(seed=100 * step)
        population.append(draws.token_ids)
        if step % 3 == 2:
            population.resample([0, 0, 1, 2, 2, 5, 6, 7])
        if step == 5:
            population.cut(len(CONTEXTS[2]) + 2)
        drawn.append(draws.token_ids)
    population.close()
    return [
        lm.batch_next_token_logprobs_sync(CONTEXTS),
        lm.batch_next_token_logprobs_sync(CONTEXTS, adapter="a"),
        torch.stack(drawn).float(),
        torch.cat(lm.batch_score_sync(CONTEXTS, [[7, 8, 9, 10]] * len(CONTEXTS), adapter="a")),
        torch.tensor(lm.sample_sync([5, 6], max_tokens=6, seed=4)).float(),
        torch.tensor(
            lm.generate_sync([7], max_tokens=5, regex="[a-c]{3}", seed=1).token_ids
        ).float(),
    ]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)


def ranks_of(process: int) -> list[int]:
    """Return the ranks that a replica has started."""
    commands = {each: Path(f"/proc/{each}/cmdline").read_bytes() for each in started_by(process)}
    return [each for each, command in commands.items() if b"follow(" in command]


@pytest.mark.promise(number=39)
def test_two_ranks_answer_as_one_engine_does(
    one: genrt.AsyncLM,
    llama: Path,
    loras: tuple[Path, Path],
    weights: list[dict[str, torch.Tensor]],
    tmp_path: Path,
    local_ray: None,
) -> None:
    own, other = weights

    def counted(lm: genrt.AsyncLM) -> list[int]:
        before = lm.statistics()
        answers(lm)
        since = lm.statistics().since(before).engine
        return [since.rows, since.extended, since.forked, since.computed_tokens]

    expected = answers(one)
    alone = counted(one)
    one.update_weights_sync(other)
    renewed = answers(one)
    one.update_weights_sync(own)
    ranked = OPTIONS | {"tensor_parallel_size": 2}
    with genrt.load(llama, engine_options=ranked, seed=1) as two:
        two.add_adapter_sync("a", loras[0])
        assert_equal(answers(two), expected)
        assert counted(two) == alone
        with pytest.raises(genrt.InvalidAdapter):
            two.add_adapter_sync("b", tmp_path)
        two.update_weights_sync(other)
        assert_equal(answers(two), renewed)

        # A rank dies: all do, and are started again, with the weights and adapters that there are.
        process = two.run_sync(identity)
        [rank] = ranks_of(process)
        os.kill(rank, signal.SIGKILL)
        assert_equal(answers(two), renewed)
        assert have_ended([process])
        until(two, "healthy", restarts=1)
        [last] = ranks_of(two.run_sync(identity))
    assert have_ended([last])
    assert not [*Path("/dev/shm").glob("genrt-ranks-*")]


@pytest.mark.promise(number=39)
@pytest.mark.promise(number=40)
def test_two_replicas_answer_as_one_engine_does(
    one: genrt.AsyncLM, two: genrt.AsyncLM, weights: list[dict[str, torch.Tensor]]
) -> None:
    own, other = weights
    assert_equal(answers(two), answers(one))
    for lm in (one, two):
        lm.update_weights_sync(other)
    assert_equal(answers(two), answers(one))
    text = two.generate_sync([5], max_tokens=2)
    assert [each.version for each in text.weights_spans] == [two.weights_version]
    for lm in (one, two):
        lm.update_weights_sync(own)


async def begun(client: Any, seed: int) -> tuple[Any, list[str]]:
    """A stream, and the parts that it began with."""
    stream = await client.completions.create(
        model="tiny" if seed % 2 else "a",
        prompt="Paris",
        max_tokens=LONG,
        seed=seed,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return stream, [(await anext(stream)).choices[0].text for _ in range(3)]


async def rest(stream: Any, parts: list[str]) -> str:
    async for part in stream:
        parts += [each.text for each in part.choices]
    return "".join(parts)


@pytest.mark.promise(number=39)
async def test_clients_are_served_over_replicas_as_over_one_engine(
    one: genrt.AsyncLM, two: genrt.AsyncLM, weights: list[dict[str, torch.Tensor]]
) -> None:
    """Texts go on when a replica dies, which comes back with new weights and adapters; readers may
    leave."""
    openai = pytest.importorskip("openai")
    own, other = weights
    for lm in (one, two):
        await lm.update_weights(other)
    options: Any = {"max_tokens": LONG, "ignore_eos": True}
    texts = [
        (await one.generate("Paris", seed=seed, adapter=name, **options)).text
        for seed, name in enumerate(("a", None) * 4)
    ]
    async with (
        serving(two, model="tiny") as server,
        openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600
        ) as client,
    ):
        assert [each.id async for each in client.models.list()] == ["tiny", "a"]
        # A replica is lost: its texts are drawn by the other one, and nothing is told twice.
        streams = await asyncio.gather(*(begun(client, seed) for seed in range(8)))
        os.kill(await two.run(identity), signal.SIGKILL)
        assert await asyncio.gather(*(rest(*each) for each in streams)) == texts
        await asyncio.to_thread(until, two, "healthy", restarts=1)
        assert_equal(*await asyncio.gather(*(asyncio.to_thread(answers, lm) for lm in (two, one))))

        # Readers that leave take nothing of those that stay, and leave nothing.
        streams = await asyncio.gather(*(begun(client, seed) for seed in range(8)))
        for stream, _ in streams[::2]:
            await stream.close()
        assert await asyncio.gather(*(rest(*each) for each in streams[1::2])) == texts[1::2]
        engine = engine_of(two)
        await happened(lambda: not two.statistics().batcher.in_flight and not engine.is_busy)
        assert not engine._streams
    for lm in (one, two):
        await lm.update_weights(own)


@pytest.mark.promise(number=39)
async def test_texts_over_replicas_go_on_with_new_weights(
    one: genrt.AsyncLM, two: genrt.AsyncLM, weights: list[dict[str, torch.Tensor]]
) -> None:
    """Each token's log-probability is of the weights that its span says."""
    own, other = weights
    before = two.weights_version
    options: Any = {"max_tokens": LONG, "ignore_eos": True, "logprobs": 0}
    streams = [two.stream([5, 6 + seed], seed=seed, **options) for seed in range(8)]
    for stream in streams:
        await anext(stream)
    after = await two.update_weights(other, pending="continue")
    for stream in streams:
        async for _ in stream:
            pass
    texts = [stream.completion for stream in streams]
    assert before in {span.version for text in texts if text for span in text.weights_spans}
    assert any(text and len(text.weights_spans) == 2 for text in texts)
    for version, tensors in ((before, own), (after, other)):
        await one.update_weights(tensors)
        for text in texts:
            assert text is not None
            scores = await one.score(text.prompt_token_ids, text.token_ids)
            for span in text.weights_spans:
                assert span.version in (before, after)
                if span.version == version:
                    found = torch.tensor(text.logprobs[span.start : span.end])
                    torch.testing.assert_close(
                        found, scores[span.start : span.end], rtol=0, atol=1e-3
                    )
    for lm in (one, two):
        await lm.update_weights(own)
