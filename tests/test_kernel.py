"""A runtime on vLLM in a Jupyter kernel: the stop button in the middle of a long run, of blocking calls
and of awaits, and a restart. Nothing is timed: a cell says that it is going, and is then interrupted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests import children

pytestmark = [pytest.mark.vllm, pytest.mark.promise(number=10)]

PATIENCE_SECONDS = 120
GOING = "going"

OPEN = """
import asyncio, threading
import genrt
options = {{"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}}
lm = genrt.load({model!r}, engine_options=options, cache_bytes=0)
row = lm.next_token_logprobs_sync([1, 2, 3])
"""

RUNS = {
    "blocking": """
        print("going", flush=True)
        while True:
            lm.sample_sync([1], max_tokens=300)
            lm.batch_next_token_logprobs_sync([[n, 1] for n in range(40)])
    """,
    "awaits": """
        print("going", flush=True)
        while True:
            await asyncio.gather(
                *(lm.sample([n], max_tokens=300) for n in range(4)),
                *(lm.next_token_logprobs([n, 2]) for n in range(40)),
            )
    """,
}

CHECK = """
again = await lm.next_token_logprobs([1, 2, 3])
same = float((again - row).abs().max()) < 5e-4
same &= float((lm.next_token_logprobs_sync([1, 2, 3]) - row).abs().max()) < 5e-4
working = lm._thread.call(lambda _: len(lm._engine._in_progress)).result()
s = lm.statistics().batcher
print(same, s.queued, s.in_flight, working)
"""


class Kernel:
    """A kernel of its own, and what its cells wrote."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=children.environment(), cwd=str(children.ROOT))
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_SECONDS)

    @property
    def session(self) -> int:
        """The process session that the kernel leads."""
        provisioner: Any = self.manager.provisioner
        return int(provisioner.pid)

    def run(self, cell: str, *, interrupt: bool = False) -> tuple[str, str]:
        """Run a cell, and interrupt it once it is going; the name of its error, and what it wrote."""
        parent = self.client.execute(cell)
        error, text = "", ""
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE_SECONDS)
            if message["parent_header"].get("msg_id") != parent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return error, text
            if kind == "error":
                error = content["ename"]
            if kind == "stream" and content["name"] == "stdout":
                text += content["text"]
                if interrupt and GOING in text:
                    self.manager.interrupt_kernel()
                    interrupt = False

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(llama: Path) -> Iterator[Kernel]:
    kernel = Kernel()
    try:
        assert kernel.run(OPEN.format(model=str(llama)))[0] == ""
        yield kernel
    finally:
        kernel.close()


@pytest.mark.parametrize("name", RUNS)
def test_after_an_interrupt_the_next_cell_works(kernel: Kernel, name: str) -> None:
    for _ in range(3):
        error, _ = kernel.run(textwrap.dedent(RUNS[name]), interrupt=True)
        assert error in ("KeyboardInterrupt", "CancelledError")
        assert kernel.run(CHECK) == ("", "True 0 0 0\n")


@pytest.mark.promise(number=21)
def test_a_restart_in_a_call_leaves_no_process_behind_and_loads_again(
    kernel: Kernel, llama: Path
) -> None:
    """The kernel that the tests of this file share is as it was before, but another process."""
    asking = "threading.Thread(target=lambda: [lm.sample_sync([1], max_tokens=300) for _ in range(9**9)])"
    assert kernel.run(f"{asking}.start()") == ("", "")
    before = kernel.session
    assert children.in_session(before) != []
    kernel.manager.restart_kernel()
    kernel.client.wait_for_ready(timeout=PATIENCE_SECONDS)
    assert kernel.session != before
    assert children.in_session(before) == []
    assert kernel.run(OPEN.format(model=str(llama)))[0] == ""
    assert kernel.run(CHECK) == ("", "True 0 0 0\n")
