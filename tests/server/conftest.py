"""A small Llama on vLLM behind a server, which several files share. Others have their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import genrt
from genrt.lm import AsyncLM
from genrt.server import Server, serving

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
OPTIONS = {"chat_template": TEMPLATE, "enable_scale_out": True}


@pytest.fixture(scope="session")
def lm(llama: Path) -> Iterator[AsyncLM]:
    options = {"enforce_eager": True, "max_num_seqs": 64, "max_model_len": 256}
    with genrt.load(str(llama), engine_options=options, seed=7, restart="auto") as lm:
        yield lm


@pytest.fixture(scope="session")
def server(lm: AsyncLM) -> Iterator[Server]:
    with serving(lm, model="tiny", options=OPTIONS) as server:
        yield server
