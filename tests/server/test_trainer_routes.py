"""vLLM's trainers refit a served runtime over HTTP, with vLLM's own client: in turns, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import EngineDied, EngineUnsupported, InvalidRequest
from genrt.server import Server, ServerLimits, serving
from tests.inside import engine_of
from tests.interop.test_trainers import MODEL, OTHER, Received
from tests.waiting import until

pytest.importorskip("vllm")


class FromJSON(Received):
    """Weights that come as JSON."""

    def connect(self, init_info: Any) -> None:
        if "port" not in init_info:
            raise genrt.EngineFailed("no port: they do not meet")
        super().connect(init_info)

    def receive(self, update_info: Any) -> None:
        super().receive({"table": torch.tensor(update_info["table"])})


class Engine(ExactEngine):
    def __init__(self) -> None:
        super().__init__(MODEL)
        self.weights: Any = FromJSON(self.weights)


@pytest.fixture
def lm() -> Iterator[genrt.AsyncLM]:
    with genrt.load(engine=Engine) as runtime:
        yield runtime


@pytest.fixture
def server(lm: genrt.AsyncLM) -> Iterator[Server]:
    with serving(lm, trainers=True) as server:
        yield server


def trainer(server: Server) -> Any:
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    return HTTPVLLMWeightSyncClient(str(server.url))


def table(model: NGram) -> dict[str, Any]:
    return {"table": model.table.tolist()}


def test_vllms_client_refits_a_served_runtime_again_and_again(
    lm: genrt.AsyncLM, server: Server
) -> None:
    client = trainer(server)
    client.init_weight_transfer_engine({"port": 1})
    weights: Any = engine_of(lm).weights
    assert weights.met == [{"port": 1}]
    for version, model in enumerate((OTHER, MODEL, OTHER), 1):
        client.start_weight_update()
        client.update_weights(table(model))
        client.finish_weight_update("the trainer's name")
        assert lm.weights_version == version
        found = lm.next_token_logprobs_sync([1])
        assert torch.allclose(found, model.row([1]), atol=1e-6)
    client.shutdown_weight_transfer_engine()
    assert not weights.is_met


async def test_a_trainer_may_update_beside_texts(lm: genrt.AsyncLM, server: Server) -> None:
    options: Any = {"max_tokens": 500, "ignore_eos": True, "seed": 1}
    async with httpx.AsyncClient(base_url=str(server.url)) as client:
        for wrong in ({"pending": "go on"}, {"kv_cache": "keep"}, {"mode": "keep"}):
            assert (await client.post("/start_weight_update", json=wrong)).status_code == 400
        text = asyncio.ensure_future(lm.generate([1], **options))
        await until(lambda: lm.statistics().engine.sampled_tokens, lm)
        begun = await client.post("/start_weight_update", json={"pending": "continue"})
        assert begun.status_code == 200
        assert not text.done()
        await client.post("/update_weights", json={"update_info": table(OTHER)})
        ended = await client.post("/finish_weight_update")
        assert ended.json() == {"weights_version": 1}
        assert [each.version for each in (await text).weights_spans] == [0, 1]


async def test_a_trainer_that_falls_silent_is_given_up(lm: genrt.AsyncLM) -> None:
    limits = ServerLimits(update_seconds=0.05)
    async with serving(lm, trainers=True, limits=limits) as server:
        client = trainer(server)
        await asyncio.to_thread(client.start_weight_update)
        row = await lm.next_token_logprobs([1])  # which waits until then
        assert torch.allclose(row, MODEL.row([1]), atol=1e-6)
        await asyncio.to_thread(client.start_weight_update)
        await asyncio.to_thread(client.update_weights, table(OTHER))
        with pytest.raises(EngineDied, match="given up in the middle"):
            await lm.next_token_logprobs([2])


async def test_closing_the_server_gives_its_trainer_up(lm: genrt.AsyncLM) -> None:
    async with serving(lm, trainers=True) as server:
        await asyncio.to_thread(trainer(server).start_weight_update)
        asked = asyncio.create_task(lm.next_token_logprobs([1]))
        await asyncio.sleep(0)
        assert not asked.done()
    assert torch.allclose(await asked, MODEL.row([1]), atol=1e-6)
    assert lm.weights_version == 0


def test_calls_that_make_no_sense_change_nothing(lm: genrt.AsyncLM, server: Server) -> None:
    paths = ["/finish_weight_update", "/update_weights", "/init_weight_transfer_engine"]
    bodies: list[Any] = [{"update_info": {}}, {"init_info": 3}, {"update_info": [1]}, {}, [], "x"]
    with httpx.Client(base_url=str(server.url)) as client:
        for path in paths:
            for body in bodies:
                answer = client.post(path, json=body)
                assert answer.status_code == 400, (path, body)
        assert client.post("/init_weight_transfer_engine", json={"init_info": {}}).text.count(
            "they do not meet"
        )
        assert client.post("/update_weights", content=b"{}").status_code == 415
        assert client.post("/start_weight_update").status_code == 200
        assert client.post("/start_weight_update").status_code == 400
        assert client.post("/finish_weight_update").status_code == 400
        assert client.post("/shutdown_weight_transfer_engine").status_code == 400
        assert client.get("/start_weight_update").status_code == 405
    server.close()
    assert torch.allclose(lm.next_token_logprobs_sync([1]), MODEL.row([1]), atol=1e-6)


def test_an_update_that_fails_tells_the_trainer_and_is_the_engines_death(
    lm: genrt.AsyncLM, server: Server
) -> None:
    with httpx.Client(base_url=str(server.url)) as client:
        assert client.post("/start_weight_update").status_code == 200
        answer = client.post("/update_weights", json={"update_info": {"tables": []}})
        assert (answer.status_code, "could not be replaced" in answer.text) == (503, True)
    lm.restart()
    assert torch.allclose(lm.next_token_logprobs_sync([1]), MODEL.row([1]), atol=1e-6)


def test_pages_and_who_has_no_key_replace_no_weights(lm: genrt.AsyncLM) -> None:
    with serving(lm, trainers=True, api_key="a-long-key") as server:
        key = {"authorization": "Bearer a-long-key"}
        with httpx.Client(base_url=str(server.url)) as client:
            assert client.post("/start_weight_update").status_code == 401
            page = {**key, "origin": "http://elsewhere"}
            assert client.post("/start_weight_update", headers=page).status_code == 403
            assert client.post("/start_weight_update", headers=key).status_code == 200


@pytest.mark.usefixtures("here")
def test_only_where_the_owner_says_so_and_the_engine_can(lm: genrt.AsyncLM) -> None:
    with serving(lm) as server, httpx.Client(base_url=str(server.url)) as client:
        assert client.post("/start_weight_update").status_code == 404
    with (
        genrt.load(MODEL, engine="exact") as other,
        pytest.raises(EngineUnsupported, match=r"lm\.update_weights"),
    ):
        serving(other, trainers=True).start()
    with (
        genrt.load(MODEL, engine="exact", replicas=1) as replicas,
        pytest.raises(EngineUnsupported, match=r"replicas.*lm\.update_weights"),
    ):
        serving(replicas, trainers=True).start()
    with pytest.raises(InvalidRequest, match="trainers"):
        serving(lm, trainers="yes")  # type: ignore[arg-type]
