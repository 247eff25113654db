"""A runtime on vLLM in a Jupyter kernel: the stop button in the middle of a long run, of blocking calls
and of awaits; it and a restart in the middle of a notebook's SMC, which then runs again.
Nothing is timed: a cell says that it is going, and is then interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests import children

pytestmark = [pytest.mark.proof, pytest.mark.vllm, pytest.mark.promise(number=10)]

PATIENCE_SECONDS = 120
BARE_ERRORS = ["--InteractiveShell.xmode=Minimal"]
"""Errors by their names alone: an interrupt may end a loop at an instruction that has no line (in CPython
3.11), and of such a traceback IPython shows nothing, not even that there was an error."""
GOING = "going"

OPEN = """
import asyncio, threading
import genrt
from tests.inside import engine_of, in_progress, thread_of
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
working = thread_of(lm).call(lambda _: len(in_progress(engine_of(lm)))).result()
s = lm.statistics().batcher
print(same, s.queued, s.in_flight, working)
"""


class Kernel:
    """A kernel of its own, and what its cells wrote."""

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary
        self.manager = KernelManager(kernel_name="python3")
        environment = children.environment() | {"TMPDIR": str(temporary)}
        self.manager.start_kernel(
            env=environment, cwd=str(children.ROOT), extra_arguments=BARE_ERRORS
        )
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_SECONDS)

    @property
    def session(self) -> int:
        """The process session that the kernel leads."""
        provisioner: Any = self.manager.provisioner
        return int(provisioner.pid)

    def run(self, cell: str, *, interrupt: bool = False, leave: bool = False) -> tuple[str, str]:
        """Run a cell, and interrupt or leave it once it is going; the name of its error, and what it
        wrote."""
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
                if leave and GOING in text:
                    return error, text
                if interrupt and GOING in text:
                    self.manager.interrupt_kernel()
                    interrupt = False

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for all tests: a new one imports vLLM, which takes longer than any of them."""
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    try:
        yield kernel
    finally:
        kernel.close()


@pytest.mark.parametrize("name", RUNS)
def test_after_an_interrupt_the_next_cell_works(kernel: Kernel, llama: Path, name: str) -> None:
    assert kernel.run(OPEN.format(model=str(llama)))[0] == ""
    for _ in range(3):
        error, _ = kernel.run(textwrap.dedent(RUNS[name]), interrupt=True)
        assert error in ("KeyboardInterrupt", "CancelledError")
        assert kernel.run(CHECK) == ("", "True 0 0 0\n")
    assert kernel.run("lm.close(); del lm") == ("", "")


ENDLESS = """
def going(state, info):
    print("going", flush=True)

while True:
    await smc.run(seed=0, on_step=going)
"""

NOTHING_LEFT = """
from tests.inside import engine_of, in_progress, thread_of
# What was given up is in flight until the turn after the step that was under way.
for _ in range(2):
    working = thread_of(lm).call(lambda _: len(in_progress(engine_of(lm)))).result()
s = lm.statistics()
print(s.batcher.queued, s.batcher.in_flight, working)
"""


LITTLE_MEMORY = """
from genrt.engines.vllm import opening
opening.CPU_DEFAULTS["kv_cache_memory_bytes"] = 2**29
"""


def cells_of(notebook: str) -> list[str]:
    """The code of a notebook, cell by cell."""
    path = children.ROOT / "notebooks" / notebook
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def shared_memory() -> set[str]:
    """Return the segments that no living process maps: tests beside this one have theirs."""
    left = set(os.listdir("/dev/shm"))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            left -= set(re.findall(r" /dev/shm/(.+)", maps.read_text()))
    return left


@pytest.mark.embedded
@pytest.mark.promise(number=21)
def test_a_notebook_interrupted_and_restarted_in_its_smc_leaves_nothing_and_runs_again(
    kernel: Kernel,
) -> None:
    """The cells up to the one that runs SMC, that one over and over until the stop button, once more
    until the kernel is restarted, and then the cells again."""
    cells = cells_of("first_smc.ipynb")
    [first] = [number for number, cell in enumerate(cells) if "smc = SMC(" in cell]
    cells[first + 1 :], cells[:0] = [], [LITTLE_MEMORY]
    shared = shared_memory()
    for cell in cells:
        assert kernel.run(cell)[0] == ""
    error, _ = kernel.run(ENDLESS, interrupt=True)
    assert error in ("KeyboardInterrupt", "CancelledError")
    assert kernel.run(NOTHING_LEFT) == ("", "0 0 0\n")
    kernel.run(ENDLESS, leave=True)
    before = kernel.session
    kernel.manager.restart_kernel()
    kernel.client.wait_for_ready(timeout=PATIENCE_SECONDS)
    assert kernel.session != before
    assert children.in_session(before) == []
    # A killed process cannot delete vLLM's note to itself of how to meet other workers, nor does
    # torch the folder it would keep compiled kernels in. There is nothing else, and no weights.
    left = list(kernel.temporary.rglob("*"))
    assert {path.name.rpartition("_")[0] for path in left} <= {"vllm_dist", "torchinductor"}
    assert sum(path.stat().st_size for path in left if path.is_file()) < 2**14
    assert shared_memory() <= shared
    for cell in cells:
        assert kernel.run(cell)[0] == ""
