"""The virtual event loop: asyncio's order, timers that take no time, nothing that happens by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from genrt.testing.virtual_loop import VirtualClock, VirtualLoop


def run(loop: VirtualLoop, clock: VirtualClock) -> None:
    """Callbacks and, when there are none, time, until nothing is left."""
    for _ in range(1_000):
        if loop.has_work:
            loop.run_one()
        elif loop.next_timer is not None:
            clock.pass_until(loop.next_timer)
        else:
            return
    raise AssertionError("it never ends")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def loop(clock: VirtualClock) -> Iterator[VirtualLoop]:
    loop = VirtualLoop(clock)
    yield loop
    loop.close()


async def program(log: list[object]) -> None:
    """Tasks that start tasks, wait for each other, time out and are cancelled."""

    async def worker(name: int) -> int:
        log.append(("start", name))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(log.append, ("soon", name))
        for _ in range(name):
            await asyncio.sleep(0)
        log.append(("end", name))
        return name

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(worker(name)) for name in (3, 1, 2)]
        await asyncio.sleep(0)
        tasks[2].cancel()
    log.append([task.cancelled() for task in tasks])
    log.append(await asyncio.gather(worker(5), worker(4)))
    try:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    except TimeoutError:
        log.append("timeout")
    log.append(await asyncio.to_thread(len, "four"))


def test_a_program_runs_as_on_asyncios_own_loop(loop: VirtualLoop, clock: VirtualClock) -> None:
    own: list[object] = []
    virtual: list[object] = []
    asyncio.run(program(own))
    task = loop.create_task(program(virtual))
    run(loop, clock)
    assert task.done()
    assert task.exception() is None
    assert virtual == own
    assert len(own) > 10
    assert loop.reports == []
