"""Programs sent to where their rows are: the same results as here, whatever becomes of the replicas."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.constraints import all_of, json_schema, potential, predicate, regex, strings
from genrt.engines.exact import NGram
from genrt.errors import (
    Closed,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    TimedOut,
)
from genrt.inference import (
    SMC,
    BestOfN,
    MetropolisHastings,
    Program,
    Rejection,
    TextModel,
    importance_sampling,
    infilling,
)
from genrt.lm import AsyncLM
from genrt.server import serving
from tests.cluster.test_replicas import adapter_in

VOCABULARY = [b"a", b"b", b"c", b"ab", b" ", b"1", b"2", b""]
MODEL = NGram.random(VOCABULARY, order=2, seed=4, eos_token_id=7)

Runtimes = tuple[AsyncLM, AsyncLM]

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def runtimes(here: None) -> Iterator[Runtimes]:
    """One engine, and two replicas."""
    with (
        genrt.load(MODEL, engine="exact", seed=3) as one,
        genrt.load(MODEL, engine="exact", seed=3, replicas=2) as two,
    ):
        yield one, two


def _short(text: Any) -> bool:
    return len(text.token_ids) < 6


async def _letters(p: Any) -> tuple[int, ...]:
    drawn = [0]
    for _ in range(4):
        drawn.append(await p.sample(drawn))
        p.observe(-float(drawn[-1] == 3))
    return tuple(drawn)


async def _recorded(p: Any) -> tuple[Any, ...]:
    """Ask the runtime and contexts of a program for everything that is recorded, between draws."""
    context, asked = p.context([0]), list[Any]()
    for step in range(3):
        token_id = await p.sample(context, mask=range(1, 7))
        context.append(token_id)
        fork = context.fork()
        drawn = await p.lm.draw([0, token_id])
        fork.append(drawn.token_id)
        asked += [drawn.token_id, (await fork.draw()).token_id]
        asked += await p.lm.sample([token_id], max_tokens=2)
        asked.append((await p.lm.generate([token_id], max_tokens=2)).token_ids)
        asked.append(round(float((await p.lm.score([0], [token_id])).sum()), 4))
        row = await p.lm.next_token_logprobs([0, token_id])
        p.observe(float(row[step]) - await p.choice(range(2)))
        inner = await SMC(TextModel(p.lm, [token_id], max_tokens=2), num_particles=2).run(step)
        asked.append(inner.token_ids)
        inner = await p.lm.run(SMC(TextModel(p.lm, [1], max_tokens=2), num_particles=2))
        asked.append(inner.token_ids)
    return tuple(asked)


def _text(lm: AsyncLM, constraint: Any = None, **options: Any) -> TextModel:
    return TextModel(lm, [0], max_tokens=7, constraint=constraint, **options)


INFERENCES: dict[str, Callable[[AsyncLM], Any]] = {
    "smc": lambda lm: SMC(_text(lm, regex("[abc1]+ ?2", lm)), num_particles=12, resample_when=0.9),
    "importance_sampling": lambda lm: importance_sampling(
        _text(lm, strings(["a2", "b2", "ab"], lm)), num_particles=9
    ),
    "rejection": lambda lm: Rejection(
        _text(lm, strings(["a", "b", "ab"], lm)), num_samples=3, max_texts=400
    ),
    "best_of_n": lambda lm: BestOfN(_text(lm, potential=potential(regex("a.*", lm))), n=9),
    "metropolis": lambda lm: MetropolisHastings(_text(lm), num_chains=3, num_steps=5),
    "awrs": lambda lm: SMC(
        _text(lm, all_of(regex("[abc1]+ ?2", lm), predicate(_short, lm))), num_particles=8
    ),
    "json": lambda lm: SMC(_text(lm, json_schema({"enum": [1, 12, 2]}, lm)), num_particles=6),
    "program": lambda lm: SMC(Program(lm, _letters), num_particles=8),
    "records": lambda lm: SMC(Program(lm, _recorded), num_particles=8, resample_when=0.9),
    "infilling": lambda lm: SMC(
        infilling(lm, [0, 1], [2], max_tokens=3, constraint=regex("[ab]*", lm)), num_particles=6
    ),
}


@pytest.mark.promise(number=40)
@pytest.mark.parametrize("name", INFERENCES)
async def test_an_inference_has_the_same_result_where_its_rows_are(
    name: str, runtimes: Runtimes
) -> None:
    mine, theirs = [await lm.run(INFERENCES[name](lm), seed=5) for lm in runtimes]
    assert mine.token_ids == theirs.token_ids
    assert mine.values == theirs.values
    np.testing.assert_allclose(mine.log_weights, theirs.log_weights, atol=1e-6)
    for lm in runtimes:  # shipped by default
        direct = await INFERENCES[name](lm).run(5)
        assert direct.token_ids == mine.token_ids
        np.testing.assert_allclose(direct.log_weights, mine.log_weights, atol=1e-6)
    here = await INFERENCES[name](runtimes[1]).run(5, on_step=lambda *_: None)
    assert here.token_ids == mine.token_ids
    assert str(theirs)


async def test_an_inference_is_shipped_unless_its_steps_are_seen_here(runtimes: Runtimes) -> None:
    """One question over replicas; with a second runtime, connected or not, its steps are asked here."""

    def asked(lm: AsyncLM) -> int:
        return lm.statistics().batcher.questions

    one, two = runtimes
    direct = await SMC(_text(one), num_particles=4).run(1)
    before = asked(two)
    shipped = await SMC(_text(two), num_particles=4).run(1)
    assert asked(two) - before == 1
    assert shipped.token_ids == direct.token_ids
    blocking = await asyncio.to_thread(SMC(_text(two), num_particles=4).run_sync, 1)
    assert blocking.token_ids == shipped.token_ids
    seen: list[int] = []
    with serving(one) as server, await AsyncLM.connect(str(server.url)) as far:
        before = asked(two)
        await SMC(_text(two), num_particles=4).run(1, on_step=lambda _, info: seen.append(1))
        assert asked(two) - before >= len(seen) > 2
        for other in (one, far):
            before = asked(two)
            both = _text(two, proposal=other)
            found = await SMC(both, num_particles=4).run(1)
            assert asked(two) - before > 2
            expected = await SMC(_text(one, proposal=other), num_particles=4).run(1)
            assert found.token_ids == expected.token_ids
            np.testing.assert_allclose(found.log_weights, expected.log_weights, atol=1e-5)
            with pytest.raises(InvalidRequest, match="cannot be sent"):
                await two.run(SMC(both, num_particles=4), seed=1)


async def _everything(lm: AsyncLM) -> Any:
    draws = [(await lm.draw([1])).token_id for _ in range(5)]
    population = lm.population([1], 6)
    for _ in range(3):
        drawn = await population.draw()
        population.append(drawn.token_ids)
        population.resample([0, 0, 1, 2, 3, 4])
        draws += drawn.token_ids.tolist()
    population.close()
    text = await lm.generate([1], max_tokens=4)
    deltas = [delta.token_ids async for delta in lm.stream([2], max_tokens=6)]
    rows = await lm.batch_next_token_logprobs([[1], [2]])
    scores = await lm.score([1], [2, 3])
    regex("a*", lm)
    return draws, text.token_ids, sum(deltas, ()), rows.tolist(), scores.tolist(), lm.vocab_size


async def test_what_a_function_asks_without_seeds_is_drawn_from_the_programs(
    runtimes: Runtimes,
) -> None:
    for seed in (0, 1, 2**63 - 1):
        mine, theirs = [await lm.run(_everything, seed=seed) for lm in runtimes]
        assert mine == theirs


async def test_without_a_seed_a_program_takes_the_runtimes_next_one() -> None:
    found = []
    for replicas in (None, 1):
        with genrt.load(MODEL, engine="exact", seed=8, replicas=replicas) as lm:
            found.append([await lm.run(_everything) for _ in range(2)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


async def test_functions_of_any_place_travel_with_what_they_hold(runtimes: Runtimes) -> None:
    for lm in runtimes:
        bias = torch.tensor([2.0])

        async def local(given: AsyncLM, lm: AsyncLM = lm, bias: torch.Tensor = bias) -> Any:
            assert given == lm
            assert hash(given) == hash(lm)
            return bias * 2, await lm.token_logprobs([1], [2])

        found, row = await lm.run(local)
        assert float(found) == 4.0
        assert torch.allclose(row, MODEL.row([1])[[2]], atol=1e-5)
    assert runtimes[0] != runtimes[1]


def mark(path: Path) -> None:
    """Tell other processes that this is reached."""
    path.touch()


def is_marked(path: Path) -> bool:
    return path.exists()


def marks_in(folder: Path) -> int:
    return len(list(folder.iterdir()))


_WITHDRAWN: list[Path] = []


async def _waits(lm: AsyncLM, started: Path) -> None:
    mark(started)
    try:
        while True:
            await lm.draw([2])
    except asyncio.CancelledError:
        _WITHDRAWN.append(started)
        raise


async def _withdrawn(lm: AsyncLM, wanted: Sequence[Path]) -> list[Path]:
    while not {*wanted} <= {*_WITHDRAWN}:
        await lm.draw([3])
    return [each for each in _WITHDRAWN if each in wanted]


async def started(path: Path, lm: AsyncLM) -> None:
    while not is_marked(path):
        await lm.draw([4])


@pytest.mark.promise(number=1)
async def test_a_program_that_is_withdrawn_is_cancelled_where_it_runs(tmp_path: Path) -> None:
    with genrt.load(MODEL, engine="exact", replicas=1) as lm:
        task = asyncio.create_task(lm.run(partial(_waits, started=tmp_path / "a")))
        both = [tmp_path / "a", tmp_path / "b"]
        other = asyncio.create_task(lm.run(partial(_withdrawn, wanted=both)))
        await started(tmp_path / "a", lm)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seconds = 0.2
        while not is_marked(tmp_path / "b"):  # withdrawn before it has begun, it is not cancelled
            with pytest.raises(TimedOut, match="withdrawn"):
                await lm.run(partial(_waits, started=tmp_path / "b"), timeout=seconds)
            seconds *= 2
        assert await other == both
        assert lm.statistics().batcher.in_flight == 0
        assert [each.in_flight for each in lm.statistics().replicas] == [0]


async def _dies(lm: AsyncLM, lives: Path, times: int) -> int:
    count = marks_in(lives)
    if count < times:
        mark(lives / str(count))
        await lm.draw([1])
        raise EngineDied("of this program")
    return count


@pytest.mark.promise(number=39)
async def test_a_program_whose_replica_dies_is_run_again_on_another(tmp_path: Path) -> None:
    with genrt.load(MODEL, engine="exact", replicas=2) as lm:
        (tmp_path / "one").mkdir()
        assert await lm.run(partial(_dies, lives=tmp_path / "one", times=1)) == 1
        (tmp_path / "all").mkdir()
        with pytest.raises(EngineFailed, match="2 replicas died"):
            await lm.run(partial(_dies, lives=tmp_path / "all", times=9))
        assert marks_in(tmp_path / "all") == 2


class _Own(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> Any:
        return _Own, (self.code,)


class _NeedsTwo(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)


async def _raises(lm: AsyncLM, error: BaseException) -> None:
    raise error


async def _raises_two(lm: AsyncLM) -> None:
    raise _NeedsTwo(1, 2)


async def _lock(lm: AsyncLM) -> Any:
    return threading.Lock()


def _lockless(lm: AsyncLM) -> int:
    return 3


async def test_what_a_program_raises_comes_back_as_it_is(runtimes: Runtimes) -> None:
    for lm in runtimes:
        with pytest.raises(_Own) as raised:
            await lm.run(partial(_raises, error=_Own(7)))
        assert raised.value.code == 7
        for error in (TimeoutError("mine"), InvalidRequest("wrong"), SystemExit(3)):
            with pytest.raises(type(error)) as found:
                await lm.run(partial(_raises, error=error))
            assert type(found.value) is type(error)
            assert found.value.args == error.args
        with pytest.raises(InvalidRequest, match="cannot be awaited"):
            await lm.run(_lockless)
        for wrong in (None, 3, "text", [1]):
            with pytest.raises(InvalidRequest, match="give an inference"):
                await lm.run(wrong)
        with pytest.raises(InvalidRequest, match="seed"):
            await lm.run(_everything, seed=-1)
    with pytest.raises(KeyError) as noted:
        await runtimes[1].run(partial(_raises, error=KeyError(7)))
    assert "in _raises" in noted.value.__notes__[0]


async def test_what_cannot_travel_is_told(runtimes: Runtimes) -> None:
    lm = runtimes[1]
    with pytest.raises(InvalidRequest, match="returned a value of type lock, which cannot be sent"):
        await lm.run(_lock)
    with pytest.raises(InvalidRequest, match=r"raised .*, which cannot be sent back"):
        await lm.run(_raises_two)
    with pytest.raises(InvalidRequest, match="the program cannot be sent"):
        await lm.run(
            partial(_raises, error=_Own(threading.Lock()))  # type: ignore[arg-type]
        )
    with pytest.raises(InvalidRequest, match=r"cannot be sent .*cannot be copied or pickled"):
        await lm.run(SMC(_text(runtimes[0]), num_particles=2), seed=1)
    assert await lm.run(_everything, seed=1) == await runtimes[0].run(_everything, seed=1)


@pytest.mark.promise(number=20)
@pytest.mark.parametrize("replicas", [None, 1])
async def test_closing_ends_programs_and_refuses_later_ones(
    replicas: int | None, tmp_path: Path
) -> None:
    lm = genrt.load(MODEL, engine="exact", replicas=replicas)
    task = asyncio.create_task(lm.run(partial(_waits, started=tmp_path / "a")))
    await started(tmp_path / "a", lm)
    await lm.aclose()
    with pytest.raises(Closed):
        await task
    with pytest.raises(Closed):
        await lm.run(_everything)


async def _adapted(lm: AsyncLM, there: Path) -> list[float]:
    mark(there)
    while "a" not in lm.adapters:
        await lm.draw([1])
    return (await lm.next_token_logprobs([1, 2], adapter="a")).tolist()


async def _version(lm: AsyncLM) -> tuple[int, list[float]]:
    return (await lm.draw([1])).weights_version, (await lm.next_token_logprobs([1])).tolist()


async def _loads(lm: AsyncLM, path: Path) -> None:
    await lm.add_adapter("b", path)


@pytest.mark.promise(number=34)
async def test_a_program_sees_adapters_as_they_come_and_weights_that_are_whole(
    tmp_path: Path,
) -> None:
    tables = torch.randn(2, 8, 8, 8)
    folder = adapter_in(tmp_path / "a", tables[0])
    with genrt.load(MODEL, engine="exact", replicas=1) as lm:
        task = asyncio.create_task(lm.run(partial(_adapted, there=tmp_path / "there")))
        await started(tmp_path / "there", lm)
        await lm.add_adapter("a", folder)
        expected = MODEL.with_table(tables[0]).row([1, 2])
        assert torch.allclose(torch.tensor(await task), expected.float(), atol=1e-5)
        with pytest.raises(genrt.EngineUnsupported, match="before the program is run"):
            await lm.run(partial(_loads, path=folder))
        assert (await lm.run(_version))[0] == 0
        # One that is under way ends before the weights are replaced, by the old ones.
        under_way = asyncio.create_task(lm.run(partial(_slowly, there=tmp_path / "slowly")))
        await started(tmp_path / "slowly", lm)
        await lm.update_weights({"table": tables[1]})
        assert under_way.done()
        assert set(await under_way) == {0}
        version, row = await lm.run(_version)
        assert version == 1
        new = MODEL.with_table(tables[1]).row([1])
        assert torch.allclose(torch.tensor(row), new.float(), atol=1e-5)


async def _slowly(lm: AsyncLM, there: Path) -> list[int]:
    mark(there)
    return [(await lm.draw([each % 7])).weights_version for each in range(50)]
