"""Engines that several files share; each test begins with what ``forget`` leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genrt.lm import AsyncLM
from tests.engines.vllm.ahead import Runtimes, two_runtimes
from tests.engines.vllm.small import LORA, TIGHT_BLOCKS, forget, load
from tests.small_models import make_llama


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second random Llama of the same shape as ``llama``."""
    return make_llama(tmp_path_factory.mktemp("other") / "model", seed=7)


@pytest.fixture(scope="session")
def shared_roomy(llama: Path) -> Iterator[AsyncLM]:
    options = {"max_num_batched_tokens": 512}
    with load(llama, blocks=400, max_num_seqs=16, engine_options=options) as lm:
        yield lm


@pytest.fixture(scope="session")
def shared_adaptable(llama: Path) -> Iterator[AsyncLM]:
    with load(llama, blocks=400, max_num_seqs=16, engine_options=LORA) as lm:
        yield lm


@pytest.fixture(scope="session")
def shared_tight(llama: Path) -> Iterator[AsyncLM]:
    with load(llama, blocks=TIGHT_BLOCKS, max_num_seqs=8) as lm:
        yield lm


@pytest.fixture(scope="session")
def ahead(llama: Path) -> Iterator[Runtimes]:
    """A runtime whose steps run ahead, and a quiet one. A restart is one of ``running_ahead``."""
    with two_runtimes(llama, max_num_seqs=24) as both:
        yield both


@pytest.fixture(scope="session")
def bare(llama: Path) -> Iterator[AsyncLM]:
    """A runtime without resident sequences and vLLM's prefix cache, but with a cache of rows."""
    options = {"enable_prefix_caching": False}
    given: dict[str, Any] = {"residency": False, "cache_bytes": 2**20, "engine_options": options}
    with load(llama, blocks=200, max_num_seqs=16, **given) as lm:
        yield lm


@pytest.fixture
def roomy(shared_roomy: AsyncLM) -> AsyncLM:
    """A runtime with blocks for all that tests ask about."""
    forget(shared_roomy)
    return shared_roomy


@pytest.fixture
def adaptable(shared_adaptable: AsyncLM) -> Iterator[AsyncLM]:
    """A roomy runtime that takes adapters, two in a step, and has none."""
    forget(shared_adaptable)
    yield shared_adaptable
    for name in shared_adaptable.adapters:
        shared_adaptable.remove_adapter(name)


@pytest.fixture
def tight(shared_tight: AsyncLM) -> AsyncLM:
    """A runtime with 24 blocks of 32 tokens, the first of which vLLM takes for itself; it keeps no
    prefix."""
    shared_tight.cool_down()
    forget(shared_tight)
    return shared_tight
