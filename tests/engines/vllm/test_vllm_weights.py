"""Weights in place, in vLLM: answers are those of a runtime that was loaded with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm.v1.engine.core_client import InprocClient

import genrt
from genrt.engines.vllm import opening
from genrt.engines.vllm.steps import CoreSteps
from genrt.errors import EngineDied, EngineFailed, EngineUnsupported, InvalidWeights
from genrt.inference import SMC, TextModel
from genrt.lm import AsyncLM
from tests.engines.vllm.small import runner_of
from tests.inside import engine_of
from tests.small_models import make_llama
from tests.waiting import a_loop_beside_each_step, until

pytestmark = pytest.mark.vllm

OPTIONS = {"max_num_seqs": 16, "enable_lora": True, "max_lora_rank": 8}
CONTEXTS = [[3 + n % 200 for n in range(length)] for length in (1, 5, 40, 100)]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def runtimes(llama: Path, other: Path, loras: tuple[Path, Path]) -> Iterator[dict[Path, AsyncLM]]:
    """Runtimes loaded with each model."""
    with ExitStack() as opened:
        found = {
            path: opened.enter_context(
                genrt.load(path, engine_options=OPTIONS, restart="auto", seed=1)
            )
            for path in (llama, other)
        }
        for each in found.values():
            each.add_adapter_sync("a", loras[0])
        yield found


@pytest.fixture(scope="module")
def answers(runtimes: dict[Path, AsyncLM]) -> dict[Path, dict[str, Any]]:
    """What these answer before they get other weights."""
    return {path: asyncio.run(answers_of(each)) for path, each in runtimes.items()}


@pytest.fixture
def lm(runtimes: dict[Path, AsyncLM], llama: Path, answers: dict[Path, dict[str, Any]]) -> AsyncLM:
    """The one that gets other weights."""
    return runtimes[llama]


async def answers_of(lm: AsyncLM) -> dict[str, Any]:
    """Rows of the model and of an adapter, draws, samples, texts, populations, an SMC run."""
    texts = {"max_tokens": 8, "seed": 2}
    population = lm.population(CONTEXTS[1], 6)
    drawn = []
    for step in range(3):
        draws = await population.draw(seed=10 * step)
        drawn.append(draws.token_ids.tolist())
        population.append(draws.token_ids)
    run = await SMC(TextModel(lm, CONTEXTS[0], max_tokens=4), num_particles=8).run(seed=3)
    return {
        "rows": await lm.batch_next_token_logprobs(CONTEXTS),
        "adapted": await lm.batch_next_token_logprobs(CONTEXTS, adapter="a"),
        "draws": (await lm.batch_draw(CONTEXTS, seed=5)).token_ids.tolist(),
        "samples": await lm.batch_sample(CONTEXTS, **texts),  # type: ignore[arg-type]
        "texts": [each.text for each in await lm.batch_generate(CONTEXTS, **texts)],  # type: ignore[arg-type]
        "populations": drawn,
        "evidence": run.log_evidence,
    }


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(found[name], value, atol=1e-3), name
        elif isinstance(value, float):
            assert found[name] == pytest.approx(value, abs=1e-3), name
        else:
            assert found[name] == value, name


def tensors_of(path: Path) -> Tensors:
    found: Tensors = load_file(path / "model.safetensors")
    return found


@pytest.mark.promise(number=34)
@pytest.mark.parametrize(("how", "pending"), [("a path", "finish"), ("a mapping", "restart")])
async def test_new_weights_are_as_if_they_had_been_loaded(
    lm: AsyncLM,
    llama: Path,
    other: Path,
    answers: dict[Path, dict[str, Any]],
    how: str,
    pending: Any,
) -> None:
    await lm.warm_up(CONTEXTS[3])
    for path in (other, llama):
        sources: dict[str, Any] = {"a path": path, "a mapping": tensors_of(path)}
        await lm.batch_next_token_logprobs([[*each, 9] for each in CONTEXTS])  # which are resident
        assert lm.statistics().engine.resident > 0
        version = lm.weights_version
        before = asyncio.ensure_future(lm.batch_generate(CONTEXTS, max_tokens=20, ignore_eos=True))
        await asyncio.sleep(0)
        assert await lm.update_weights(sources[how], pending=pending) == version + 1
        assert lm.statistics().engine.resident == 0 or pending == "restart"
        assert len({each.weights_version for each in await before}) == 1
        assert_equal(await answers_of(lm), answers[path])
    lm.cool_down()


TEXTS: Any = {"max_tokens": 60, "ignore_eos": True, "logprobs": 2}


@pytest.mark.parametrize("kv_cache", ["recompute", "keep"])
async def test_texts_go_on_with_new_weights(
    runtimes: dict[Path, AsyncLM], lm: AsyncLM, llama: Path, other: Path, kv_cache: Any
) -> None:
    """With its KV cache computed again, each token has its version's log-probability, given all tokens
    before it. Later questions never find blocks of the old weights."""
    await lm.update_weights(llama)
    paths = {lm.weights_version: llama}
    with a_loop_beside_each_step(lm):
        streams = [lm.stream(each, seed=n, **TEXTS) for n, each in enumerate(CONTEXTS)]
        for stream in streams:
            await anext(stream)
        unread = {**TEXTS, "logprobs": None}  # vLLM's output processor reads many tokens at once
        rest, plain = (
            asyncio.ensure_future(lm.batch_generate(CONTEXTS, seed=9, **each))
            for each in (TEXTS, unread)
        )
        population, context = lm.population(CONTEXTS[3], 3), lm.context(CONTEXTS[2])
        for path in (other, llama, other):
            drawn, of_context = await asyncio.gather(population.draw(), context.draw())
            population.append(drawn.token_ids)
            context.append(of_context.token_id)
            version = await lm.update_weights(path, pending="continue", kv_cache=kv_cache)
            paths[version] = path
            for stream in streams:
                await anext(stream)
            read = [
                [*stream.partial.prompt_token_ids, *stream.partial.token_ids] for stream in streams
            ]
            asked = [each[: len(each) // 16 * 16 + 1] for each in read]  # after whole blocks
            rows = await lm.batch_next_token_logprobs(asked)
            if path == other:
                wanted = await runtimes[other].batch_next_token_logprobs(asked)
                assert torch.allclose(rows, wanted, atol=1e-3)
                wanted = await runtimes[other].batch_next_token_logprobs([*population])
                assert torch.allclose(await population.logprobs(), wanted, atol=1e-3)
                row = await runtimes[other].next_token_logprobs(context.token_ids)
                assert torch.allclose(await context.logprobs(), row, atol=1e-3)
    texts = await rest
    assert [each.weights_spans for each in await plain] == [each.weights_spans for each in texts]
    for stream in streams:
        async for _ in stream:
            pass
        assert stream.completion is not None
        texts.append(stream.completion)
    read = [[*each.prompt_token_ids, *each.token_ids] for each in texts]
    asked = [each[: len(each) // 16 * 16 + 1] for each in read]
    rows = await lm.batch_next_token_logprobs(asked)
    wanted = await runtimes[other].batch_next_token_logprobs(asked)
    assert torch.allclose(rows, wanted, atol=1e-3)
    await lm.update_weights(llama)
    spans = [span for text in texts for span in text.weights_spans]
    assert len({each.version for each in spans}) > 2
    scorers = {path: runtimes[path] for path in (llama, other)}
    for text in texts:
        assert [place for _, *span in text.weights_spans for place in range(*span)] == [*range(60)]
        given, drawn_ids = text.prompt_token_ids, text.token_ids
        scores = {path: await each.score(given, drawn_ids) for path, each in scorers.items()}
        for version, start, end in text.weights_spans:
            if kv_cache == "recompute" or start == 0:
                wanted = scores[paths[version]][start:end]
                assert torch.allclose(torch.tensor(text.logprobs[start:end]), wanted, atol=5e-4)


async def some_steps(lm: AsyncLM, count: int = 8) -> None:
    steps = lm.statistics().engine.steps
    await until(lambda: lm.statistics().engine.steps > steps + count, lm)


@pytest.mark.proof
@pytest.mark.embedded
async def test_texts_of_the_embedded_model_go_on_with_new_weights() -> None:
    """Each token has the log-probability by transformers' model of its version, within 5e-4."""
    path = genrt.models.resolve(None)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    own = {name: each.detach().clone() for name, each in oracle.named_parameters()}
    normal = torch.Generator().manual_seed(1)
    changed = {
        name: each + 0.2 * each.std() * torch.randn(each.shape, generator=normal)
        if "layers.20." in name
        else each
        for name, each in own.items()
    }
    versions = [own, changed, own, changed]
    async with genrt.load(engine_options={"dtype": "float32", "max_model_len": 128}) as lm:
        prompts = [lm.encode(each) for each in ("The capital of France is", "One, two,", "Once")]
        options: Any = {"max_tokens": 32, "ignore_eos": True, "logprobs": 0, "seed": 1}
        drawing = asyncio.ensure_future(lm.batch_generate(prompts, **options))
        for tensors in versions[1:]:
            await some_steps(lm, 4)
            await lm.update_weights(tensors, pending="continue", keep=False)
        texts = await drawing
    differ = 0.0
    for place in (0, 1):
        with torch.no_grad():
            for name, each in oracle.named_parameters():
                each.copy_(versions[place][name])
        for text in texts:
            assert [each.version for each in text.weights_spans] == [0, 1, 2, 3]
            given = torch.tensor([[*text.prompt_token_ids, *text.token_ids]])
            with torch.no_grad():
                rows = oracle(given).logits[0].log_softmax(-1)[-33:-1]
            wanted = rows.gather(1, given[0, -32:, None])[:, 0]
            found = torch.tensor(text.logprobs)
            for version, start, end in text.weights_spans:
                off = float((found - wanted)[start:end].abs().max())
                if version % 2 == place:
                    assert off < 5e-4
                else:
                    differ = max(differ, off)
    assert differ > 0.05


async def test_updates_beside_steps_that_are_scheduled_ahead(
    llama: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runner V2's way, by runner V1 (see test_vllm_texts): the step under way keeps its token and its
    label. If it fails, the engine ends, and its texts begin again in the next one."""
    monkeypatch.setattr(opening, "can_be_ahead", lambda _: True)
    with pytest.warns(RuntimeWarning, match="resident sequences are off"):
        lm = await genrt.aload(llama, engine_options={"max_num_seqs": 8}, restart="auto")
    under_way = []
    finished = CoreSteps._finished

    def noted(self: CoreSteps, scheduler: Any) -> Any:
        under_way.append(scheduler)
        return finished(self, scheduler)

    monkeypatch.setattr(CoreSteps, "_finished", noted)
    async with lm:
        greedy = TEXTS | {"temperature": 0.0, "max_tokens": 300}  # longer than three updates take
        drawing = asyncio.ensure_future(lm.batch_generate(CONTEXTS, **greedy))
        for path in (other, llama, other):
            await some_steps(lm, 3)
            await lm.update_weights(path, pending="continue")
        texts = await drawing
        assert len(under_way) >= 3
        assert {len(each.weights_spans) for each in texts} == {4}
        for number, path in enumerate((llama, other)):
            await lm.update_weights(path)
            for text in texts:
                scores = await lm.score(text.prompt_token_ids, text.token_ids)
                for version, start, end in text.weights_spans:
                    if version % 2 == number:
                        found = torch.tensor(text.logprobs[start:end])
                        assert torch.allclose(found, scores[start:end], atol=5e-4)

        def fail(self: CoreSteps, scheduler: Any) -> Any:
            raise RuntimeError("the device is gone")

        version, before = lm.weights_version, engine_of(lm)
        again = asyncio.ensure_future(lm.generate(CONTEXTS[1], **greedy))
        await some_steps(lm)
        monkeypatch.undo()
        with monkeypatch.context() as failing:
            failing.setattr(CoreSteps, "_finished", fail)
            with pytest.raises(EngineDied, match="the device is gone"):
                await lm.update_weights(llama, pending="continue")
        assert [each.version for each in (await again).weights_spans] == [version]
        assert engine_of(lm) is not before


async def test_an_output_head_that_is_tied_has_the_new_weights(tmp_path: Path) -> None:
    """With vLLM's copies of it for the CPU."""
    paths = [make_llama(tmp_path / f"tied{seed}", seed=seed, tied=True) for seed in (1, 2)]
    rows = []
    for path in reversed(paths):
        async with await genrt.aload(str(path), engine_options={"max_num_seqs": 16}) as tied:
            rows.append(await tied.batch_next_token_logprobs(CONTEXTS))
            if path == paths[0]:
                await tied.update_weights(paths[1])
                rows.append(await tied.batch_next_token_logprobs(CONTEXTS))
    wanted, before, after = rows
    assert not torch.allclose(before, wanted, atol=0.5)
    assert torch.allclose(after, wanted, atol=1e-3)


NAME = "model.layers.1.mlp.down_proj.weight"
BAD: dict[str, Callable[[Tensors, torch.Tensor], Tensors]] = {
    "unknown": lambda whole, one: whole | {"model.layers.2.mlp.down_proj.weight": one},
    "missing": lambda whole, one: {name: whole[name] for name in whole if name != NAME},
    "shape": lambda whole, one: whole | {NAME: one[:-1]},
    "transposed": lambda whole, one: whole | {NAME: one.T},
    "type": lambda whole, one: whole | {NAME: one.double()},
    "integers": lambda whole, one: whole | {NAME: one.int()},
    "nan": lambda whole, one: whole | {NAME: one.index_fill(1, torch.tensor(4), torch.nan)},
    "head": lambda whole, one: whole | {"lm_head.weight": whole["lm_head.weight"][:-1]},
}


@pytest.mark.promise(number=34)
async def test_what_does_not_fit_changes_nothing(
    lm: AsyncLM, llama: Path, answers: dict[Path, dict[str, Any]]
) -> None:
    await lm.update_weights(llama)
    whole = tensors_of(llama)
    version, engine = lm.weights_version, engine_of(lm)
    for bad in BAD.values():
        with pytest.raises(InvalidWeights, match=r"lm_head|down_proj"):
            await lm.update_weights(bad(whole, whole[NAME]), check_finite=True)
        assert (lm.weights_version, engine_of(lm)) == (version, engine)
    row = await lm.next_token_logprobs(CONTEXTS[2])
    assert torch.allclose(row, answers[llama]["rows"][2], atol=1e-3)


@pytest.mark.promise(number=34)
async def test_an_error_in_the_middle_is_a_dead_engine_and_the_next_has_whole_weights(
    lm: AsyncLM, llama: Path, other: Path, answers: dict[Path, dict[str, Any]]
) -> None:
    async def broken() -> AsyncIterator[Tensors]:
        for name, tensor in list(tensors_of(other).items())[:10]:
            yield {name: tensor}
        raise OSError("the trainer has gone")

    await lm.update_weights(llama)
    engine, version = engine_of(lm), lm.weights_version
    with pytest.raises(OSError, match="the trainer"):
        await lm.update_weights(broken())
    assert_equal(await answers_of(lm), answers[llama])
    assert engine_of(lm) is not engine
    assert lm.weights_version == version


async def test_blocks_that_are_not_given_back_keep_the_old_weights(
    lm: AsyncLM,
    llama: Path,
    other: Path,
    answers: dict[Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await lm.update_weights(llama)
    version = lm.weights_version
    monkeypatch.setattr(InprocClient, "reset_prefix_cache", lambda _: False)
    with pytest.raises(EngineFailed, match="holds"):
        await lm.update_weights(other)
    monkeypatch.undo()
    assert lm.weights_version == version
    row = await lm.next_token_logprobs(CONTEXTS[2])
    assert torch.allclose(row, answers[llama]["rows"][2], atol=1e-3)


async def test_weights_stay_where_they_are_and_another_runtime_keeps_its_own(
    lm: AsyncLM,
    runtimes: dict[Path, AsyncLM],
    llama: Path,
    other: Path,
    answers: dict[Path, dict[str, Any]],
) -> None:
    """Also while the new weights come. vLLM has layers that all models of a process share."""
    await lm.update_weights(other)
    model, second = runner_of(lm).model, runtimes[other]

    async def chunks() -> AsyncIterator[Tensors]:
        for number, (name, tensor) in enumerate(tensors_of(llama).items()):
            yield {name: tensor}
            if number % 8 == 0:
                second.clear_cache()
                rows = await second.batch_next_token_logprobs(CONTEXTS)
                assert torch.allclose(rows, answers[other]["rows"], atol=1e-3)

    places = {name: each.data_ptr() for name, each in model.named_parameters()}
    await lm.update_weights(chunks())
    assert places == {name: each.data_ptr() for name, each in model.named_parameters()}
    assert (second.weights_version, lm.weights_version > 0) == (0, True)


async def test_an_engine_that_cannot_sleep_says_so(lm: AsyncLM) -> None:
    reason = "enable_sleep_mode" if torch.cuda.is_available() else "on a CPU"
    with pytest.raises(EngineUnsupported, match=reason):
        await lm.sleep()
    await lm.next_token_logprobs([1])


async def test_what_is_resident_is_forgotten_by_choice(lm: AsyncLM) -> None:
    await lm.next_token_logprobs([1, 2, 3])
    assert lm.statistics().engine.resident
    lm.reset_prefix_cache()
    await lm.pause()
    assert not lm.statistics().engine.resident
    lm.resume()
    await lm.next_token_logprobs([1, 2, 3, 4])
