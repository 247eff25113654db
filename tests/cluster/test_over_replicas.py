"""What stands on a runtime, over replicas: samplers, texts, rollouts, jobs and servers, as over one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import genrt
from genrt.constraints import regex
from genrt.engines.exact import NGram
from genrt.generation import Job, generate_many, rollout
from genrt.inference import SMC, TextModel
from genrt.lm import AsyncLM
from genrt.server import serving

VOCABULARY = [b"a", b"b", b"c", b"ab", b" ", b"1", b"2", b""]
MODEL = NGram.random(VOCABULARY, order=2, seed=4, eos_token_id=7)


@pytest.fixture(scope="module")
def runtimes(here: None) -> Iterator[tuple[AsyncLM, AsyncLM]]:
    """One engine, and two replicas."""
    with (
        genrt.load(MODEL, engine="exact", seed=3) as one,
        genrt.load(MODEL, engine="exact", seed=3, replicas=2) as two,
    ):
        yield one, two


async def test_inference_of_several_prompts_at_once(runtimes: tuple[AsyncLM, AsyncLM]) -> None:
    async def run(lm: AsyncLM) -> list[Any]:
        runs = []
        for prompt in ([0], [1, 2], [3]):
            model = TextModel(lm, prompt, max_tokens=7, constraint=regex("[abc1]+ ?2", lm))
            runs.append(SMC(model, num_particles=12, resample_when=0.9).run(seed=5))
        return await asyncio.gather(*runs)

    for mine, theirs in zip(*[await run(lm) for lm in runtimes], strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.log_evidence == pytest.approx(theirs.log_evidence, abs=1e-5)
    assert len([each for each in runtimes[1].statistics().replicas if each.engine.rows]) == 2


async def test_a_model_over_replicas_weighs_what_another_proposes(
    runtimes: tuple[AsyncLM, AsyncLM],
) -> None:
    """Either way round: the same texts and weights."""
    found = []
    for lm, proposal in ((runtimes[0], runtimes[0]), runtimes, runtimes[::-1]):
        model = TextModel(
            lm, [0], max_tokens=7, constraint=regex("[abc1]+ ?2", lm), proposal=proposal, block=3
        )
        found.append(await SMC(model, num_particles=12, resample_when=0.9).run(seed=5))
    assert len({each.token_ids for each in found}) == 1
    for each in found[1:]:
        assert each.log_weights == pytest.approx(found[0].log_weights, abs=1e-5)


async def test_many_texts_and_rollouts(runtimes: tuple[AsyncLM, AsyncLM]) -> None:
    ids = torch.tensor([[0, 1, 9], [2, 9, 9], [3, 4, 5]])
    lengths = torch.tensor([2, 1, 3])
    found = []
    for lm in runtimes:
        texts = generate_many(lm, [[each % 7, 1] for each in range(20)], max_tokens=6, seed=1)
        many = {number: each.token_ids async for number, each in texts}
        rolled = await rollout(lm, ids, lengths, pad_value=9, max_new_tokens=5, seed=2)
        found.append((many, rolled))
    (many, rolled), (others, rolled_there) = found
    assert many == others
    for name, tensor in rolled.as_dict().items():
        assert torch.allclose(tensor.double(), rolled_there.as_dict()[name].double(), atol=1e-5)


async def test_a_job(runtimes: tuple[AsyncLM, AsyncLM], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "ab"[: 1 + n % 2]}) + "\n" for n in range(9)))
    written = []
    for name, lm in zip("12", runtimes, strict=True):
        job = Job(rows, tmp_path / f"{name}.jsonl", prompt_template="{text}", max_tokens=5, seed=4)
        await job.run(lm)
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        written.append(sorted(lines))  # they come as they are done
    assert written[0] == written[1]
    assert len(written[0]) == 9


def test_a_server(runtimes: tuple[AsyncLM, AsyncLM]) -> None:
    asked = {"prompts": [[0, 1], [2]], "seed": 9}
    infer = {"prompt": [0], "regex": "[abc]+2", "particles": 8, "max_tokens": 6, "seed": 1}
    answers = []
    for lm in runtimes:
        with serving(lm) as server, httpx.Client(base_url=str(server.url), timeout=60) as client:
            drawn = client.post("/v1/draw", json=asked).json()
            posterior = client.post("/v1/infer", json=infer).json()["posterior"]
            answers.append((drawn["data"], [each["text"] for each in posterior]))
            metrics = client.get("/metrics").text
            status = client.get("/v1/status").json()
    assert answers[0][1] == answers[1][1]
    for mine, theirs in zip(answers[0][0], answers[1][0], strict=True):
        assert mine["token_id"] == theirs["token_id"]
    assert '\ngenrt_replica_restarts_total{replica="1"} 0\n' in metrics
    assert [each["state"] for each in status["statistics"]["replicas"]] == ["healthy"] * 2
