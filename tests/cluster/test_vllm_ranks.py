"""A tensor-parallel model of two ranks, each with vLLM's engine: answers, residents, losses as of one."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import genrt
from tests.cluster.ray_program import identity
from tests.cluster.test_replicas import until
from tests.cluster.test_vllm_replicas import OPTIONS, answers, assert_equal
from tests.scripted import PATIENCE_SECONDS

pytestmark = [pytest.mark.vllm, pytest.mark.proof]

RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
LAUNCHED: dict[str, Any] = {"distributed_executor_backend": "external_launcher"}


def ranks_of(process: int) -> list[int]:
    """The processes that a replica has started."""
    children = [each.read_text() for each in Path(f"/proc/{process}/task").glob("*/children")]
    commands = {
        each: Path(f"/proc/{each}/cmdline").read_bytes() for each in " ".join(children).split()
    }
    return [int(each) for each, command in commands.items() if b"follow(" in command]


def has_ended(process: int) -> bool:
    """Wait until there is no such process, for as long as patience lasts."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], PATIENCE_SECONDS)[0])
    finally:
        os.close(handle)


@pytest.mark.promise(number=39)
def test_two_ranks_answer_as_one_engine_does(
    llama: Path, loras: tuple[Path, Path], tmp_path: Path, local_ray: None
) -> None:
    from tests.small_models import make_llama

    other = make_llama(tmp_path / "other", seed=7)
    with genrt.load(llama, engine_options=OPTIONS, seed=1) as one:
        one.add_adapter_sync("a", loras[0])
        unseeded = one.sample_sync([5, 6], max_tokens=6)
        expected = answers(one)
        before = one.statistics()
        answers(one)
        alone = one.statistics().since(before).engine
        one.update_weights_sync(load_file(other / "model.safetensors"))
        renewed = answers(one)
    with genrt.load(llama, engine_options=OPTIONS | RANKS, seed=1) as two:
        two.add_adapter_sync("a", loras[0])
        assert two.sample_sync([5, 6], max_tokens=6) == unseeded
        assert_equal(answers(two), expected)
        before = two.statistics()
        answers(two)
        since = two.statistics().since(before).engine
        names = ("rows", "extended", "forked", "computed_tokens", "sampled_tokens")
        assert {name: getattr(since, name) for name in names} == {
            name: getattr(alone, name) for name in names
        }
        with pytest.raises(genrt.InvalidAdapter):
            two.add_adapter_sync("b", tmp_path)
        two.update_weights_sync(load_file(other / "model.safetensors"))
        assert_equal(answers(two), renewed)

        # A rank dies: all do, and are started again, with the weights and adapters that there are.
        process = two.run_sync(identity)
        [rank] = ranks_of(process)
        os.kill(rank, signal.SIGKILL)
        assert_equal(answers(two), renewed)
        assert has_ended(process)
        until(two, "healthy", restarts=1)
        [last] = ranks_of(two.run_sync(identity))
    assert has_ended(last)
    assert not [*Path("/dev/shm").glob("genrt-ranks-*")]


def test_what_ranks_cannot_do_is_said_at_once(llama: Path, local_ray: None) -> None:
    wrong = {"pipeline_parallel_size": 2}
    with pytest.raises(genrt.GenrtError, match="tensor parallelism alone"):
        genrt.load(llama, engine_options=OPTIONS | RANKS | LAUNCHED | wrong)
