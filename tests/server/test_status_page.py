"""The status page, as a browser shows it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.server import Server, serving
from genrt.server.routes import Inferences, Running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MODEL = NGram.random(11, seed=1)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> dict[int, Running]:
    """What every server says is under way."""
    found: dict[int, Running] = {}
    before = Inferences.__init__

    def made(self: Inferences, *arguments: object) -> None:
        before(self, *arguments)  # type: ignore[arg-type]
        self.running = found

    monkeypatch.setattr(Inferences, "__init__", made)
    return found


def shown(server: Server, folder: Path) -> str:
    """The page's document after some seconds of its own clock."""
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={folder}", "--virtual-time-budget=3500", "--dump-dom"),
        f"{server.url}/",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
def test_a_browser_shows_what_the_server_does(tmp_path: Path, running: dict[int, Running]) -> None:
    running[3] = Running(3, 64, 20, step=5, ess=41.25, unfinished=60, log_evidence=-1.5)
    with (
        genrt.load(engine=lambda: ExactEngine(MODEL, max_model_len=32)) as lm,
        serving(lm, model="<b>tiny</b>") as server,
    ):
        lm.batch_next_token_logprobs_sync([[1], [2], [3]])
        page = shown(server, tmp_path / "a")
        assert "&lt;b&gt;tiny&lt;/b&gt;</h1>" in page  # a name is no markup
        assert "up for" in page
        assert '<dd id="largest_flush">3</dd>' in page
        assert "5 of 20 at most" in page
        assert "60 of 64" in page
        assert "41.3" in page or "41.2" in page
        assert "-1.5" in page
        running.clear()
        assert "none is running" in shown(server, tmp_path / "b")


def test_the_page_and_its_numbers_without_a_browser(running: dict[int, Running]) -> None:
    running[1] = Running(1, 8, 4, log_evidence=-math.inf)  # as where every particle has died
    with (
        genrt.load(engine=lambda: ExactEngine(MODEL, max_model_len=32)) as lm,
        serving(lm, model="tiny") as server,
    ):
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
        assert found["model"] == "tiny"
        assert found["inferences"] == [
            {
                "number": 1,
                "particles": 8,
                "max_steps": 4,
                "step": 0,
                "ess": 0.0,
                "unfinished": 0,
                "log_evidence": None,
            }
        ]
        # What the script shows is there: elements of the page, members of the numbers.
        for name in ("tokens", "rows", "serving", "queued", "in_flight", "flush", "inferences"):
            assert f'id="{name}"' in page.text
            assert f'"{name}"' in script
        for name in ("queued", "in_flight", "largest_flush", "cached", "flushes"):
            assert name in found["statistics"]["batcher"]
        assert {"sampled_tokens", "rows", "requests"} <= set(found["statistics"]["engine"])


def test_a_minus_infinity_is_json_on_the_way() -> None:
    with (
        genrt.load(engine=lambda: ExactEngine(MODEL, max_model_len=32)) as lm,
        serving(lm) as server,
    ):
        asked = {"prompts": [[1]], "masks": [[]], "seed": 1}
        found = httpx.post(f"{server.url}/v1/draw", json=asked)
        dead = {"token_id": -1, "logprob": None, "log_mass": None}
        assert json.loads(found.text)["data"] == [dead]
