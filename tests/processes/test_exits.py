"""The end of a process that runs vLLM: in every state of the runtime it exits with the status it should,
says nothing of its own, and leaves no process behind; a forked child is told why it cannot go on."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests import children

pytestmark = [pytest.mark.vllm, pytest.mark.promise(number=21)]

BEFORE = """
import asyncio, atexit, contextlib, os, signal, sys, threading
import genrt
from tests.inside import engine_of, thread_of

with contextlib.suppress(ImportError):
    import tabulate  # torch does at exit, where CPython forgets an interrupt over code that is compiled
with contextlib.suppress(ImportError):
    import ray.dag.compiled_dag_node  # Ray, which vLLM imports, does at exit too

stepping = threading.Semaphore(0)

def load():
    options = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
    lm = genrt.load(model, engine_options=options)
    step = engine_of(lm).step
    def counted():
        stepping.release()
        return step()
    engine_of(lm).step = counted
    return lm

def ask_long(lm):
    try:
        while True:
            lm.sample_sync([1], max_tokens=400)
    except genrt.Closed:
        pass
"""

PROGRAMS = {
    "open and idle": "lm = load(); lm.next_token_logprobs_sync([1])",
    "a sync call in a thread that is waited for": """
        lm = load()
        said = []
        thread = threading.Thread(target=lambda: said.append(lm.sample_sync([1], max_tokens=300)))
        thread.start()
        stepping.acquire()
        atexit.register(lambda: print(len(said[0])))
    """,
    "an await pending": """
        lm = load()
        async def main():
            asyncio.create_task(lm.sample([1], max_tokens=400))
            asyncio.create_task(lm.batch_next_token_logprobs([[n] for n in range(50)]))
            await asyncio.to_thread(stepping.acquire)
        asyncio.run(main())
    """,
    "while the weights are read": """
        begun = threading.Event()
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
        load_weights = DefaultModelLoader.load_weights
        def told(*arguments, **options):
            begun.set()
            return load_weights(*arguments, **options)
        DefaultModelLoader.load_weights = told
        threading.Thread(target=load, daemon=True).start()
        begun.wait()
    """,
    "by an exception, a call pending": """
        lm = load()
        threading.Thread(target=ask_long, args=[lm], daemon=True).start()
        stepping.acquire()
        raise LookupError("the program's own")
    """,
    "by an interrupt, a call pending": """
        lm = load()
        def interrupt():
            stepping.acquire()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        threading.Thread(target=interrupt, daemon=True).start()
        ask_long(lm)
    """,
    "forked": """
        import warnings
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        lm = load()
        row = lm.next_token_logprobs_sync([1])
        child = os.fork()
        if child == 0:
            for forbidden in (
                lambda: lm.next_token_logprobs_sync([2]),
                lambda: asyncio.run(lm.next_token_logprobs([2])),
                lambda: lm.sample_sync([1], max_tokens=2),
                lambda: thread_of(lm).call(lambda engine: None),
                lambda: lm.statistics(),
            ):
                try:
                    forbidden()
                except genrt.Closed as error:
                    assert "forked child must load its own" in str(error)
                else:
                    os._exit(1)
            assert "closed" in repr(lm)
            lm.close()
            atexit._run_exitfuncs()
            os._exit(7)
        _, status = os.waitpid(child, 0)
        lm.clear_cache()
        assert abs(lm.next_token_logprobs_sync([1]) - row).max() < 1e-4
        print(os.waitstatus_to_exitcode(status))
    """,
}

STATUS = {"by an exception, a call pending": 1, "by an interrupt, a call pending": -2}
"""Of the programs that do not end well by themselves."""
PRINTED = {"a sync call in a thread that is waited for": "300\n", "forked": "7\n"}


@pytest.fixture(scope="module")
def ends(llama: Path) -> dict[str, children.End]:
    return children.run(PROGRAMS, before=BEFORE, model=str(llama))


@pytest.mark.proof
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_process_with_vllm_exits_as_it_should(ends: dict[str, children.End], name: str) -> None:
    end = ends[name]
    assert end.status == STATUS.get(name, 0), end.err
    assert end.out == PRINTED.get(name, "")
    assert end.left == []


@pytest.mark.proof
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in STATUS])
def test_it_says_nothing_of_its_own(ends: dict[str, children.End], name: str) -> None:
    assert ends[name].complaints == [], ends[name].err


@pytest.mark.proof
def test_the_only_traceback_is_the_programs(ends: dict[str, children.End]) -> None:
    tracebacks = functools.partial(str.count, ends["by an exception, a call pending"].err)
    assert tracebacks("Traceback (most recent call last)") == 1
    assert tracebacks("LookupError: the program's own") == 1
