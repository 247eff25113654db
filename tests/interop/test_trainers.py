"""vLLM's trainers refit a runtime through its client: nothing is answered by a mixture, nobody hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.weights import Layout, NamedTensors
from genrt.errors import (
    Closed,
    EngineDied,
    EngineFailed,
    EngineUnsupported,
    InvalidRequest,
)
from genrt.interop.trainers import WeightSyncClient
from genrt.lm import AsyncLM
from genrt.runtime.weights import Transfers
from tests.inside import engine_of
from tests.waiting import until

MODEL, OTHER = NGram.random(6, order=1, seed=1), NGram.random(6, order=1, seed=2)
SENT: dict[str, NamedTensors] = {}
"""What trainers send, by name."""


class Received:
    """The weights of an exact engine, to which a trainer sends tables."""

    def __init__(self, own: Any) -> None:
        self._own, self.set_version = own, own.set_version
        self.met: list[Mapping[str, Any]] = []
        self.is_met = False
        self.keeps_kv: list[bool] = []

    def layout(self) -> Layout:
        found: Layout = self._own.layout()
        return found

    def checkpoint(self) -> list[Path]:
        return []

    def begin(self) -> None:
        self._own.begin()

    def begin_beside_texts(self, keeps_kv: bool) -> None:
        self.keeps_kv.append(keeps_kv)
        self._own.begin_beside_texts(keeps_kv)

    def load(self, tensors: NamedTensors) -> None:
        self._own.load(tensors)

    def finish(self) -> None:
        self._own.finish()

    def check_receives(self) -> None:
        pass

    def connect(self, init_info: Mapping[str, Any]) -> None:
        self.met.append(init_info)
        self.is_met = True

    def disconnect(self) -> None:
        self.is_met = False

    def receive(self, update_info: Any) -> None:
        self._own.load([("table", update_info["table"])])


class Engine(ExactEngine):
    def __init__(self) -> None:
        super().__init__(MODEL)
        self.weights: Any = Received(self.weights)


@pytest.fixture
def lm() -> Iterator[AsyncLM]:
    with genrt.load(engine=Engine) as runtime:
        yield runtime


def row(lm: AsyncLM) -> torch.Tensor:
    return lm.next_token_logprobs_sync([1])


def refit(client: WeightSyncClient, table: torch.Tensor) -> None:
    client.start_weight_update()
    client.update_weights({"table": table})
    client.finish_weight_update("the trainer's name")


def test_a_trainer_refits_a_runtime_again_and_again(lm: AsyncLM) -> None:
    client = WeightSyncClient(lm)
    client.init_weight_transfer_engine({"port": 1})
    population = lm.population([1], 2)
    population.append(population.draw_sync(seed=1).token_ids)
    for version, model in enumerate((OTHER, MODEL, OTHER), 1):
        refit(client, model.table)
        assert lm.weights_version == version
        assert torch.allclose(row(lm), model.row([1]), atol=1e-6)
        assert population.draw_sync(seed=1).weights_version == version
    weights: Any = engine_of(lm).weights
    assert weights.met == [{"port": 1}]
    client.shutdown_weight_transfer_engine()
    assert not weights.is_met


async def test_questions_wait_for_an_update_and_the_next_update_too(lm: AsyncLM) -> None:
    client = WeightSyncClient(lm)
    await lm.next_token_logprobs([1])
    client.start_weight_update()
    asked = asyncio.create_task(lm.next_token_logprobs([1]))
    following = asyncio.create_task(lm.update_weights({"table": MODEL.table}))
    await asyncio.sleep(0)
    client.update_weights({"table": OTHER.table})
    assert not asked.done()
    client.finish_weight_update()
    found = await asked
    assert await following == 2
    assert any(torch.allclose(found, each.row([1]), atol=1e-6) for each in (OTHER, MODEL))
    assert torch.allclose(await lm.next_token_logprobs([1]), MODEL.row([1]), atol=1e-6)


async def test_texts_go_on_beside_a_trainers_update(lm: AsyncLM) -> None:
    """None gets a token between its parts. Their KV cache is kept or computed again, as asked."""
    of = {0: MODEL, 1: OTHER, 2: MODEL}
    options: Any = {"max_tokens": 500, "ignore_eos": True, "logprobs": 0, "seed": 1}
    text = asyncio.ensure_future(lm.generate([1], **options))
    await until(lambda: lm.statistics().engine.sampled_tokens, lm)
    for kv_cache in ("keep", None):
        client = WeightSyncClient(lm, pending="continue", kv_cache=kv_cache)
        await asyncio.to_thread(client.start_weight_update)
        steps = lm.statistics().engine.steps
        for _ in range(2):
            table = {"table": of[lm.weights_version + 1].table}
            await asyncio.to_thread(client.update_weights, table)
        assert lm.statistics().engine.steps == steps
        await asyncio.to_thread(client.finish_weight_update)
        await until(lambda steps=steps: lm.statistics().engine.steps > steps, lm)  # type: ignore[misc]
    found = await text
    weights: Any = engine_of(lm).weights
    assert weights.keeps_kv == [True, False]
    assert [each.version for each in found.weights_spans] == [0, 1, 2]
    context = [1, *found.token_ids]
    for version, start, end in found.weights_spans:
        for place in range(start, end):
            drawn = float(of[version].row(context[: place + 1])[context[place + 1]])
            assert found.logprobs[place] == pytest.approx(drawn, abs=1e-5)


def test_an_update_that_is_given_up_changes_nothing_or_is_the_engines_death(lm: AsyncLM) -> None:
    before = row(lm)
    with WeightSyncClient(lm) as client:
        client.start_weight_update()
        with pytest.raises(InvalidRequest, match="nothing was sent"):
            client.finish_weight_update()
    client.close()
    assert torch.equal(row(lm), before)
    with client:
        client.start_weight_update()
        client.update_weights({"table": OTHER.table})
    with pytest.raises(EngineDied, match="given up in the middle"):
        lm.next_token_logprobs_sync([2])
    lm.restart()
    assert torch.equal(row(lm), before)
    refit(client, OTHER.table)
    assert lm.weights_version == 1


@pytest.mark.parametrize("passes", range(1, 5))
async def test_a_part_that_is_cancelled_ends_the_update(lm: AsyncLM, passes: int) -> None:
    """The trainer would send the rest, and the weights would be a mixture."""
    transfers, before = Transfers(lm._weights), await lm.next_token_logprobs([1])
    await transfers.start("finish")
    sent = asyncio.ensure_future(transfers.take({"table": OTHER.table}))
    for _ in range(passes):
        await asyncio.sleep(0)
    sent.cancel()
    await asyncio.wait([sent])
    if not sent.cancelled():
        await transfers.finish()
        return
    with pytest.raises(InvalidRequest, match="no update is under way"):
        await transfers.take({"table": OTHER.table})
    [row] = await asyncio.gather(lm.next_token_logprobs([1]), return_exceptions=True)
    assert isinstance(row, EngineDied) or torch.equal(row, before)  # type: ignore[arg-type]


def test_an_error_of_the_workers_is_the_engines_death_and_no_trainer_hangs(lm: AsyncLM) -> None:
    client = WeightSyncClient(lm)
    client.start_weight_update()
    with pytest.raises(EngineDied, match="could not be replaced"):
        client.update_weights({"tables": OTHER.table})
    with pytest.raises(InvalidRequest, match="start_weight_update first"):
        client.finish_weight_update()
    with pytest.raises(InvalidRequest, match="start_weight_update first"):
        client.update_weights({})
    lm.restart()
    refit(client, OTHER.table)
    assert torch.allclose(row(lm), OTHER.row([1]), atol=1e-6)
    with pytest.raises(EngineFailed, match="no copy was kept"):  # of what the trainer sent
        lm.restart()


@pytest.mark.parametrize("sent", [0, 1])
def test_an_update_ends_when_its_engine_is_restarted(lm: AsyncLM, sent: int) -> None:
    before = row(lm)
    client = WeightSyncClient(lm)
    client.init_weight_transfer_engine({"port": 1})
    client.start_weight_update()
    for _ in range(sent):
        client.update_weights({"table": OTHER.table})
    lm.restart()
    assert torch.equal(row(lm), before)
    with pytest.raises(EngineFailed, match="restarted"):
        client.update_weights({"table": OTHER.table})
    assert torch.equal(lm.next_token_logprobs_sync([2]), MODEL.row([2]))
    assert lm.weights_version == 0
    # The workers that met the trainer are gone.
    with pytest.raises(EngineFailed, match="init_weight_transfer_engine again"):
        client.start_weight_update()
    client.init_weight_transfer_engine({"port": 2})
    refit(client, OTHER.table)
    assert torch.allclose(row(lm), OTHER.row([1]), atol=1e-6)


def test_mistakes_are_told(lm: AsyncLM) -> None:
    wrong: Any = "no"
    with pytest.raises(InvalidRequest, match="lm must be an AsyncLM"):
        WeightSyncClient(wrong)
    with pytest.raises(InvalidRequest, match="pending"):
        WeightSyncClient(lm, pending=wrong)
    with pytest.raises(InvalidRequest, match='give pending="continue" too'):
        WeightSyncClient(lm, kv_cache="keep")
    client = WeightSyncClient(lm)
    with pytest.raises(InvalidRequest, match="init_info must be a mapping"):
        client.init_weight_transfer_engine(wrong)
    with pytest.raises(InvalidRequest, match="start_weight_update first"):
        client.update_weights({})
    client.start_weight_update()
    with pytest.raises(InvalidRequest, match="under way already"):
        client.start_weight_update()
    with pytest.raises(InvalidRequest, match="a dict or a list"):
        client.update_weights(wrong)
    with pytest.raises(InvalidRequest, match="finish it first"):
        client.shutdown_weight_transfer_engine()
    client.close()
    lm.close()
    with pytest.raises(Closed):
        client.start_weight_update()


def test_an_engine_that_receives_nothing_says_so() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        client = WeightSyncClient(lm)
        for call in (client.start_weight_update, lambda: client.init_weight_transfer_engine({})):
            with pytest.raises(EngineUnsupported, match=r"lm\.update_weights"):
                call()
        assert row(lm).isfinite().all()


# -- vLLM ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second random Llama of the same shape as ``llama``."""
    from tests.small_models import make_llama

    return make_llama(tmp_path_factory.mktemp("other") / "model", seed=7)


@pytest.fixture(scope="module")
def transfer_backend() -> str:
    """A backend of vLLM's weight transfer that finds in ``SENT`` what is sent."""
    from dataclasses import dataclass

    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class Init(WeightTransferInitInfo):  # type: ignore[misc]
        port: int

    @dataclass
    class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
        key: str

    class Sent(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = Init, Update

        def init_transfer_engine(self, init_info: Init) -> None: ...

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        @torch.no_grad()
        def receive_weights(self, update_info: Update) -> None:
            self.model.load_weights(iter(SENT[update_info.key]))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None: ...

    WeightTransferEngineFactory.register_engine("sent", Sent)
    return "sent"


@pytest.mark.vllm
def test_vllm_is_refitted_as_by_its_own_trainers(
    llama: Path, other: Path, transfer_backend: str
) -> None:
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

    contexts = [[3 + n for n in range(length)] for length in (1, 5, 40, 100)]
    with genrt.load(other) as loaded:
        client = WeightSyncClient(loaded)
        for call in (
            client.start_weight_update,
            lambda: client.init_weight_transfer_engine({"port": 1}),
        ):
            with pytest.raises(EngineUnsupported, match="weight_transfer_config"):
                call()
        expected = loaded.batch_next_token_logprobs_sync(contexts)
    options = {"weight_transfer_config": {"backend": transfer_backend}}
    with genrt.load(llama, engine_options=options) as lm:
        before = lm.batch_next_token_logprobs_sync(contexts)
        client = WeightSyncClient(lm)
        assert isinstance(client, VLLMWeightSyncClient)
        with pytest.raises(EngineFailed, match="do not meet the trainer"):
            client.init_weight_transfer_engine({"gate": 1})
        assert torch.equal(lm.batch_next_token_logprobs_sync(contexts), before)
        client.init_weight_transfer_engine({"port": 1})
        tensors = [*load_file(other / "model.safetensors").items()]
        half = len(tensors) // 2
        SENT.update(first=tensors[:half], second=tensors[half:])

        async def refitted() -> Any:
            """In two parts, beside a text that goes on."""
            beside = WeightSyncClient(lm, pending="continue")
            options: Any = {"max_tokens": 400, "ignore_eos": True, "logprobs": 0, "seed": 1}
            text = asyncio.ensure_future(lm.generate(contexts[2], **options))
            await until(lambda: lm.statistics().engine.sampled_tokens, lm)
            await asyncio.to_thread(beside.start_weight_update)
            for part in ("first", "second"):
                await asyncio.to_thread(beside.update_weights, {"key": part})
            await asyncio.to_thread(beside.finish_weight_update, "2")
            return await text

        text = asyncio.run(refitted())
        assert lm.weights_version == 1
        assert [each.version for each in text.weights_spans] == [0, 1]
        _, start, _ = text.weights_spans[1]
        scores = lm.score_sync(contexts[2], text.token_ids)[start:]
        assert torch.allclose(torch.tensor(text.logprobs[start:]), scores, atol=5e-4)
        after = lm.batch_next_token_logprobs_sync(contexts)
        assert torch.allclose(after, expected, atol=1e-5)
        assert not torch.allclose(after, before, atol=1e-2)
        client.start_weight_update()
        with pytest.raises(EngineDied):
            client.update_weights({"key": "nothing"})
        with pytest.raises(EngineDied):
            lm.next_token_logprobs_sync([4])
