"""The status page, as a browser shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.server import Server, serving
from genrt.server.routes import OwnRoutes

MODEL = NGram.random(11, seed=1)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """What every server says is under way."""
    found: dict[int, dict[str, Any]] = {}
    before = OwnRoutes.__init__

    def made(self: OwnRoutes, *arguments: Any) -> None:
        before(self, *arguments)
        self.running = found

    monkeypatch.setattr(OwnRoutes, "__init__", made)
    return found


@pytest.fixture
def server() -> Iterator[Server]:
    with (
        genrt.load(engine=lambda: ExactEngine(MODEL, max_model_len=32)) as lm,
        serving(lm, model="<b>tiny</b>") as server,
    ):
        lm.batch_next_token_logprobs_sync([[1], [2], [3]])
        yield server


STATE = {"number": 3, "particles": 64, "max_steps": 20, "step": 5, "unfinished": 60}


def test_the_page_and_its_numbers_without_a_browser(
    running: dict[int, Any], server: Server
) -> None:
    running[1] = STATE | {"ess": 0.0, "log_evidence": None}  # as where every particle has died
    page = httpx.get(f"{server.url}/")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["content-type"].startswith("text/html")
    script = httpx.get(f"{server.url}/status.js").text
    style = httpx.get(f"{server.url}/status.css")
    assert style.headers["content-type"].startswith("text/css")
    # A phone's window is no narrower than the table: 390 pixels, where it took 446.
    narrow = style.text.partition("@media (max-width: 40rem)")[2]
    assert "table-layout: fixed" in narrow
    assert "overflow-wrap: anywhere" in narrow
    found = httpx.get(f"{server.url}/v1/status").json()
    assert found["model"] == "<b>tiny</b>"
    assert found["inferences"] == [running[1]]
    # What the script shows is there: elements of the page, members of the numbers.
    for name in ("tokens", "rows", "serving", "queued", "in_flight", "flush", "inferences"):
        assert f'id="{name}"' in page.text
        assert f'"{name}"' in script
    for name in ("queued", "in_flight", "largest_flush", "cached", "flushes"):
        assert name in found["statistics"]["batcher"]
    assert {"sampled_tokens", "rows", "requests"} <= set(found["statistics"]["engine"])


def test_a_minus_infinity_is_json_on_the_way(server: Server) -> None:
    asked = {"prompts": [[1]], "masks": [[]], "seed": 1}
    found = httpx.post(f"{server.url}/v1/draw", json=asked)
    dead = {"token_id": -1, "logprob": None, "log_mass": None}
    assert json.loads(found.text)["data"] == [dead]
