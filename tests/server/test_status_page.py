"""The status page, as a browser shows it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.server import Server, serving
from genrt.server.routes import OwnRoutes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
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


def shown(server: Server, folder: Path) -> str:
    """The page's document after some seconds of its own clock."""
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={folder}", "--virtual-time-budget=3500", "--dump-dom"),
        f"{server.url}/",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


STATE = {"number": 3, "particles": 64, "max_steps": 20, "step": 5, "unfinished": 60}


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
def test_a_browser_shows_what_the_server_does(
    tmp_path: Path, running: dict[int, Any], server: Server
) -> None:
    running[3] = STATE | {"ess": 41.25, "log_evidence": -1.5}
    page = shown(server, tmp_path / "a")
    assert "&lt;b&gt;tiny&lt;/b&gt;</h1>" in page  # a name is no markup
    assert "41.3" in page or "41.2" in page
    for each in ("up for", '<dd id="largest_flush">3</dd>', "5 of 20 at most", "60 of 64", "-1.5"):
        assert each in page
    running.clear()
    assert "none is running" in shown(server, tmp_path / "b")


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
