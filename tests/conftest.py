"""What several test files share: small checkpoints on disk, made once a session."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

from tests import promises

# Under python -O too, what these assert is asserted.
pytest.register_assert_rewrite("tests.scripted", "tests.engines.vllm.small")

# No example has a deadline: a machine may be busy. Continuous integration runs the same examples every
# time; everyone else's runs go on looking. Of a mutant it is enough that a test fails: no smaller example
# is looked for.
settings.register_profile("genrt", deadline=None)
settings.load_profile("genrt")
settings.register_profile("ci", derandomize=True)
settings.register_profile("mutants", derandomize=True, phases=[Phase.explicit, Phase.generate])
if profile := os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else None):
    settings.load_profile(profile)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

KV_CACHE_BYTES = 2**29
"""Of an engine on a CPU without ``kv_cache_memory_bytes``: room for one longest text of the embedded
model."""


def pytest_configure() -> None:
    """Take interrupts, which tests send, where a shell started this in the background without them. What
    tests start inherits that. Imports make a million objects that last, so nothing is collected before
    they are frozen."""
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import vLLM where tests need it, then freeze what there is. vLLM fills the memory of its KV cache
    with zeros: 2 GiB by genrt's default, which takes seconds. vLLM collects garbage seven times while it
    opens and closes, and looked at a million objects of imported modules each time: most of what an
    engine of these tests cost. Where objects are frozen, genrt keeps vLLM from thawing them."""
    if any(item.get_closest_marker("vllm") for item in session.items):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opening = importlib.import_module("genrt.engines.vllm.opening")
            importlib.import_module("vllm.v1.worker.cpu_worker")
        opening.CPU_DEFAULTS["kv_cache_memory_bytes"] = KV_CACHE_BYTES
        if not torch.cuda.is_available():  # vLLM compiles a helper of its samplers, eager or not
            torch.compiler.set_stance("force_eager")
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _frozen_before() -> None:
    """Freeze what tests before have imported too: tests that collect garbage look at their own alone."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Thaw it: frozen modules do not end, of which their bindings would complain at the exit."""
    gc.unfreeze()


PRELOADED = os.environ.get("LD_PRELOAD")


def _put_back_what_is_preloaded() -> None:
    """Forget what vLLM has had preloaded where a test opened it by itself, or a peer did: the loader of
    every later child would complain of a path with a space in it."""
    if PRELOADED is None:
        os.environ.pop("LD_PRELOAD", None)
    else:
        os.environ["LD_PRELOAD"] = PRELOADED


def pytest_runtest_setup() -> None:
    _put_back_what_is_preloaded()


def pytest_runtest_call() -> None:
    _put_back_what_is_preloaded()  # a fixture may have opened one


def pytest_itemcollected(item: pytest.Item) -> None:
    item.user_properties += [("promise", number) for number in promises.numbers_of(item)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where promises were asked for, a line for each: kept or broken."""
    if "promise" not in terminalreporter.config.option.markexpr:
        return
    terminalreporter.section("promises")
    outcomes = [
        (int(str(number)), report.outcome)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and (report.when == "call" or report.failed)
        for name, number in report.user_properties
        if name == "promise"
    ]
    names = promises.promised(promises.DOCUMENT.read_text(encoding="utf-8"))
    for line in promises.summary(outcomes, names):
        terminalreporter.line(line)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with a tokenizer; float32, 512 positions."""
    from tests.small_models import make_llama

    return make_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def loras(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two random LoRA adapters of ``llama``."""
    from tests.small_models import make_lora

    root = tmp_path_factory.mktemp("loras")
    return make_lora(root / "a", llama, seed=1), make_lora(root / "b", llama, seed=2)


@pytest.fixture(scope="module")
def here() -> Iterator[None]:
    """Have ``genrt.load(…, replicas=N)`` open replicas in this process."""
    from genrt import loading
    from tests.cluster.here import ReplicasHere

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "Actors", ReplicasHere)
        yield


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A local Ray, which all runtimes of this process with replicas share. Its replicas compile as little
    as engines of this process do."""
    from genrt.cluster.actors import connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        connection.join("local", 2)
    yield
    connection.leave()


@pytest.fixture(scope="session")
def oracle_rows(llama: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """transformers' float32 rows of ``llama`` after each of the token ids."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()

    @functools.lru_cache(maxsize=100)
    def rows(token_ids: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = network(torch.tensor([token_ids])).logits[0]
        return logits.log_softmax(dim=-1)

    return lambda token_ids: rows(tuple(token_ids))


@pytest.fixture(scope="session")
def oracle(
    oracle_rows: Callable[[Sequence[int]], torch.Tensor],
) -> Callable[[Sequence[int]], torch.Tensor]:
    """transformers' float32 row of ``llama`` after token ids."""

    @functools.lru_cache(maxsize=20_000)
    def row(token_ids: tuple[int, ...]) -> torch.Tensor:
        return oracle_rows(token_ids)[-1].clone()

    return lambda token_ids: row(tuple(token_ids))
