"""A runtime over replicas: the same answers, whatever becomes of the replicas."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

import genrt
from genrt.cluster import engine as engine_module
from genrt.cluster.replica import Replica, Settings, stored
from genrt.engines.adapters import CONFIG_NAME, WEIGHTS_NAME
from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.remote.flushes import FarEnd, HandleNumbers, unpacked_ends
from genrt.errors import (
    EngineDied,
    EngineFailed,
    EngineUnsupported,
    InvalidAdapter,
    InvalidRequest,
    StreamCut,
)
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion
from genrt.questions.rows import LogprobsRequest
from genrt.server import serving
from tests.cluster.here import ReplicasHere, replicas_of
from tests.inside import calls_of, thread_of
from tests.population_walk import EVENTS, HeldContexts, walk
from tests.population_walk import Runtime as Walked
from tests.runtime.test_pauses import SleepyEngine
from tests.scoring_engine import ScoringEngine
from tests.waiting import until as happened
from tests.waiting import until_replicas as until

MODEL = NGram.random(11, order=2, seed=5)

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "STALL_SECONDS", 2.0)
        yield


@pytest.fixture(scope="module")
def alone(here: None) -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", seed=7) as lm:
        yield lm


@pytest.fixture(scope="module")
def two(here: None, quick: None) -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", replicas=2) as lm:
        yield lm


def adapter_in(folder: Path, table: torch.Tensor) -> Path:
    folder.mkdir()
    save_file({"table": table}, folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_text("{}")
    return folder


@pytest.mark.promise(number=40)
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_seed_has_the_same_results_with_any_number_of_replicas(
    replicas: int, alone: AsyncLM
) -> None:
    with (
        genrt.load(MODEL, engine="exact", seed=7) as one,
        genrt.load(MODEL, engine="exact", seed=7, replicas=replicas) as several,
    ):
        contexts = [[each, 1] for each in range(11)]
        for _ in range(3):  # without seeds of their own
            a, b = one.batch_draw_sync(contexts), several.batch_draw_sync(contexts)
            assert all(map(torch.equal, a, b))
        assert one.sample_sync([1], max_tokens=9) == several.sample_sync([1], max_tokens=9)
        assert torch.equal(
            one.batch_next_token_logprobs_sync(contexts),
            several.batch_next_token_logprobs_sync(contexts),
        )
        for mine, theirs in [(one.population([1], 8), several.population([1], 8))]:
            for step in range(6):
                a, b = mine.draw_sync(seed=step * 8), theirs.draw_sync(seed=step * 8)
                assert all(map(torch.equal, a, b))
                for each, draws in ((mine, a), (theirs, b)):
                    each.append(draws.token_ids)
                    each.resample([0, 0, 1, 2, 3, 4, 5, 6])
        texts = [each.generate_sync([1], max_tokens=5) for each in (one, several)]
        assert texts[0].token_ids == texts[1].token_ids


@pytest.mark.promise(number=36)
async def test_each_draw_is_its_own_context_s_when_replicas_die(
    two: AsyncLM, alone: AsyncLM
) -> None:
    @contextlib.contextmanager
    def killed(how: str) -> Iterator[None]:
        replicas_of(two).die(0)
        yield

    without = {"evicted", "not_finite", "replaced", "restarted", "updated"}
    events = [each for each in EVENTS if each not in without]
    for begin in (AsyncLM.population, HeldContexts.begin):
        own = Walked(two, alone, events, tolerance=1e-5, breaks=killed, begin=[begin])
        await walk(own, seed=0, steps=30)


def test_a_stream_is_told_while_it_is_drawn(two: AsyncLM, alone: AsyncLM) -> None:
    options: Any = {"max_tokens": 20, "seed": 3}
    deltas = list(two.stream_sync([1], **options))
    completion = alone.generate_sync([1], **options)
    assert sum((each.token_ids for each in deltas), ()) == completion.token_ids
    assert "".join(each.text for each in deltas) == completion.text


async def test_cancelling_a_question_disturbs_no_other(two: AsyncLM, alone: AsyncLM) -> None:
    async def long() -> list[int]:
        return await two.sample([1], max_tokens=900, seed=1)

    tasks = [asyncio.create_task(long()) for _ in range(3)]
    other = asyncio.create_task(two.sample([1], max_tokens=300, seed=2))
    await asyncio.sleep(0)
    for each in tasks:
        each.cancel()
    assert await other == alone.sample_sync([1], max_tokens=300, seed=2)
    assert {type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)} == {
        asyncio.CancelledError
    }
    assert all(each.in_flight == 0 for each in two.statistics().replicas)


def test_statistics_are_a_sum_and_survive_a_death(two: AsyncLM) -> None:
    until(two, "healthy")
    before = two.statistics()
    assert before.engine.rows >= sum(each.engine.rows for each in before.replicas)
    replicas_of(two).die(0)
    until(two, "healthy", restarts=sum(each.restarts for each in before.replicas) + 1)
    two.next_token_logprobs_sync([3, 1])
    after = two.statistics()
    assert after.engine.rows > before.engine.rows
    assert after.since(before).replicas == after.replicas


def test_a_server_over_replicas(two: AsyncLM, alone: AsyncLM) -> None:
    until(two, "healthy")
    asked = {"prompts": [[0, 1], [2]], "seed": 9}
    infer = {"prompt": [0], "particles": 8, "max_tokens": 6, "seed": 1}
    answers = []
    for lm in (alone, two):
        with serving(lm) as server, httpx.Client(base_url=str(server.url), timeout=60) as client:
            drawn = client.post("/v1/draw", json=asked).json()
            posterior = client.post("/v1/infer", json=infer).json()["posterior"]
            answers.append((drawn["data"], posterior))
            metrics = client.get("/metrics").text
            status = client.get("/v1/status").json()
    assert answers[0][1] == answers[1][1]
    for mine, theirs in zip(answers[0][0], answers[1][0], strict=True):
        assert mine["token_id"] == theirs["token_id"]
    assert '\ngenrt_replica_in_flight{replica="1"} 0\n' in metrics
    assert [each["state"] for each in status["statistics"]["replicas"]] == ["healthy"] * 2


def test_what_is_wrong_with_a_question_is_told_to_its_caller_alone(
    two: AsyncLM, alone: AsyncLM
) -> None:
    for lm in (alone, two):
        with pytest.raises(InvalidRequest):
            lm.generate_sync([1], max_tokens=3, regex="[")
    assert len(two.sample_sync([1], max_tokens=3)) == 3


@pytest.mark.promise(number=34)
def test_new_weights_reach_all_replicas_and_those_that_come_later() -> None:
    table = 2 * torch.randn(11, 11, 11, generator=torch.Generator().manual_seed(1))
    new = MODEL.with_table(table)
    contexts = [[a, b] for a in range(11) for b in range(11)]
    expected = torch.stack([new.row(each) for each in contexts])
    with genrt.load(MODEL, engine="exact", replicas=3) as lm:
        old = lm.batch_next_token_logprobs_sync(contexts)
        assert lm.update_weights_sync({"table": table}) == 1
        assert torch.allclose(lm.batch_next_token_logprobs_sync(contexts), expected, atol=1e-5)
        for number in range(2):  # a question may go to both, if both die at once
            replicas_of(lm).die(number)
            until(lm, "healthy", restarts=number + 1)
        lm.clear_cache()
        assert torch.allclose(lm.batch_next_token_logprobs_sync(contexts), expected, atol=1e-5)
        with pytest.raises(genrt.InvalidWeights):
            lm.update_weights_sync({"table": table[0]})
        assert versions(lm) == {1}
        assert not torch.allclose(old, expected, atol=1e-2)
        assert lm.update_weights_sync({"table": 2 * table}) == 2
        assert versions(lm) == {2}
        lm.restart()
        assert versions(lm) == {2}


def versions(lm: AsyncLM) -> set[int]:
    """Return the versions of the weights that all kinds of answers have."""
    text = lm.generate_sync([1], max_tokens=3)
    spans = [*text.weights_spans]
    for delta in lm.stream_sync([1], max_tokens=3):
        spans += delta.weights_spans
    draws = lm.draw_sync([1]), lm.batch_draw_sync([[1]]), text
    return {*(each.version for each in spans), *(each.weights_version for each in draws)}


class _HalfLoading(ExactEngine):
    """An engine that loads zeros in place of new weights, and dies, so many times."""

    def __init__(self, marks: Path, times: int) -> None:
        super().__init__(MODEL)
        load = self.weights.load

        def half(tensors: Any) -> None:
            load([(name, torch.zeros_like(tensor)) for name, tensor in tensors])
            raise EngineDied("in the middle of new weights")

        def loaded(tensors: Any) -> None:
            for number in range(times):  # two replicas may load at once
                with contextlib.suppress(FileExistsError):
                    (marks / str(number)).touch(exist_ok=False)
                    half(tensors)
            load(tensors)

        self.weights.load = loaded


@pytest.mark.promise(number=34)
def test_a_replica_that_dies_in_the_middle_of_new_weights_comes_back_with_all_of_them(
    tmp_path: Path,
) -> None:
    table = 2 * torch.randn(11, 11, 11, generator=torch.Generator().manual_seed(2))
    contexts = [[a, b] for a in range(11) for b in range(11)]
    expected = torch.stack([MODEL.with_table(table).row(each) for each in contexts])
    with genrt.load(engine=partial(_HalfLoading, tmp_path, 1), replicas=2) as lm:
        lm.batch_next_token_logprobs_sync(contexts)
        assert lm.update_weights_sync({"table": table}) == 1
        for is_back in (False, True):  # from the one that lives, then from both
            if is_back:
                until(lm, "healthy", restarts=1)
            lm.clear_cache()
            found = lm.batch_next_token_logprobs_sync(contexts)
            assert torch.allclose(found, expected, atol=1e-5)
        assert sum(each.restarts for each in lm.statistics().replicas) == 1


def test_new_weights_that_no_replica_survives_answer_nothing(tmp_path: Path) -> None:
    with genrt.load(engine=partial(_HalfLoading, tmp_path, 99), replicas=2) as lm:
        said = "^its weights could not be replaced: in the middle of new weights$"
        with pytest.raises(EngineDied, match=said):
            lm.update_weights_sync({"table": torch.zeros(11, 11, 11)})
        with pytest.raises(EngineDied):
            lm.next_token_logprobs_sync([1])


PART = 6
"""The tokens that a text gets from one version of the weights."""


class _InParts(ExactEngine):
    """An engine whose texts wait for new weights after each part."""

    def __init__(self) -> None:
        super().__init__(MODEL)

    def step(self) -> Any:
        end, asked = PART * (self._weights_version + 1), self._in_progress
        waiting = {each: progress for each, progress in asked.items() if len(progress.drawn) >= end}
        for each in waiting:
            del asked[each]
        found = super().step() if asked else []
        asked |= waiting
        return found


def of_version(version: int) -> NGram:
    return MODEL.with_table(MODEL.table.roll(version, -1))


async def replaced(lm: AsyncLM) -> int:
    """Replace the weights beside texts."""
    table = of_version(lm.weights_version + 1).table
    return await lm.update_weights({"table": table}, pending="continue")


def assert_drawn_by(text: Completion, versions: list[int]) -> None:
    """The text has a part of each version, whose weights give its tokens' log-probabilities."""
    spans = text.weights_spans
    assert [v for v, start, end in spans for _ in range(start, end, PART)] == versions
    assert all(start % PART == 0 for _, start, _ in spans)
    context = [*text.prompt_token_ids, *text.token_ids]
    for version, start, end in spans:
        for place in range(start, end):
            row = of_version(version).row(context[: len(text.prompt_token_ids) + place])
            wanted = float(row[text.token_ids[place]])
            assert text.logprobs[place] == pytest.approx(wanted, abs=1e-5)


def paused_prepare(number: int, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have a replica get its next settings only once the event is set."""
    go, prepare, waits = threading.Event(), Replica.prepare, [number]

    def late(self: Replica, make: Any, wanted: Settings) -> Any:
        if waits and wanted.version:
            waits.pop()
            assert go.wait(60)
        return prepare(self, make, wanted)

    monkeypatch.setattr(Replica, "prepare", late)
    return go


@pytest.mark.promise(number=34)
async def test_texts_go_on_with_new_weights_on_every_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica that gets them late goes on with its own until then. A stream tells which weights drew
    each of its deltas."""
    prompts = [[each] for each in range(6)]
    options: Any = {"max_tokens": 3 * PART, "logprobs": 0}
    async with await genrt.aload(engine=_InParts, replicas=2) as lm:
        whole = asyncio.ensure_future(lm.batch_generate(prompts, seed=4, **options))
        stream = lm.stream([7, 7], seed=3, **options)
        spans = [*(await anext(stream)).weights_spans]
        for version in (1, 2):
            count = 7 * PART * version
            await happened(lambda n=count: lm.statistics().engine.sampled_tokens == n, lm)  # type: ignore[misc]
            late = paused_prepare(version, monkeypatch)
            assert await replaced(lm) == version
            row = await lm.next_token_logprobs([8, version])  # by the other replica
            assert torch.allclose(row, of_version(version).row([8, version]), atol=1e-5)
            late.set()
        async for delta in stream:
            spans += delta.weights_spans
        assert stream.completion is not None
        for text in (*await whole, stream.completion):
            assert_drawn_by(text, [0, 1, 2])
        said = {n: each.version for each in spans for n in range(each.start, each.end)}
        assert said == {n: n // PART for n in range(3 * PART)}
        assert sum(each.restarts for each in lm.statistics().replicas) == 0


@pytest.mark.promise(number=39)
async def test_a_text_whose_replica_dies_after_new_weights_is_of_these_alone() -> None:
    """A partly read stream cannot be: its tokens were drawn by the old weights."""
    options: Any = {"max_tokens": 3 * PART, "logprobs": 0, "seed": 5}
    async with await genrt.aload(engine=_InParts, replicas=1) as lm:
        text = asyncio.ensure_future(lm.generate([3], **options))
        stream = lm.stream([4], **options)
        while len(stream.partial.token_ids) < PART:
            await anext(stream)
        await happened(lambda: lm.statistics().engine.sampled_tokens == 2 * PART, lm)
        assert await replaced(lm) == 1
        await happened(lambda: lm.statistics().engine.sampled_tokens == 4 * PART, lm)
        replicas_of(lm).die(0)
        with pytest.raises(StreamCut):
            async for _ in stream:
                pass
        await happened(lambda: lm.statistics().engine.sampled_tokens >= 6 * PART, lm)
        assert await replaced(lm) == 2
        assert_drawn_by(await text, [1, 1, 2])


def test_replicas_whose_texts_cannot_go_on_say_so() -> None:
    class Weights:
        def __init__(self, own: Any) -> None:
            self.layout, self.begin, self.load, self.finish = (
                own.layout,
                own.begin,
                own.load,
                own.finish,
            )

    class Other(ExactEngine):
        def __init__(self) -> None:
            super().__init__(MODEL)
            self.weights: Any = Weights(self.weights)

    with genrt.load(engine=Other, replicas=1) as lm:
        with pytest.raises(EngineUnsupported, match='pending="finish"'):
            lm.update_weights_sync({"table": MODEL.table}, pending="continue")
        assert len(lm.sample_sync([1], max_tokens=2)) == 2


@pytest.mark.promise(number=14)
async def test_an_adapter_is_in_all_replicas_or_in_none(tmp_path: Path) -> None:
    table = torch.randn(11, 11, 11)
    good = adapter_in(tmp_path / "good", table)
    bad = adapter_in(tmp_path / "bad", table[0])
    contexts = [[each, 2] for each in range(11)]
    expected = torch.stack([MODEL.with_table(table).row(each) for each in contexts])
    with genrt.load(MODEL, engine="exact", replicas=2) as lm:
        with pytest.raises(InvalidAdapter):
            await lm.add_adapter("a", bad)
        await lm.add_adapter("a", good)
        found = await lm.batch_next_token_logprobs(contexts, adapter="a")
        assert torch.allclose(found, expected, atol=1e-5)
        replicas_of(lm).die(1)
        await asyncio.to_thread(until, lm, "healthy", 1)
        lm.clear_cache()
        found = await lm.batch_next_token_logprobs(contexts, adapter="a")
        assert torch.allclose(found, expected, atol=1e-5)
        await lm.pause()
        lm.resume()
        lm.reset_prefix_cache()
        assert len(await lm.sample([1], max_tokens=2, adapter="a")) == 2


@pytest.mark.promise(number=39)
async def test_a_call_of_an_earlier_life_takes_no_answers_of_the_next() -> None:
    """A replica dies between two calls, and the second one reaches its next life."""
    with genrt.load(MODEL, engine="exact", replicas=2) as lm:
        replicas_of(lm).die(0)
        late = asyncio.wrap_future(replicas_of(lm).call(0, "exchange", b""))
        with pytest.raises(genrt.EngineDied, match="started again"):
            await asyncio.wait_for(late, 60)
        await asyncio.to_thread(until, lm, "healthy", 1)
        contexts = [[each, 3] for each in range(11)]
        found = await lm.batch_next_token_logprobs(contexts, timeout=60)
        assert torch.allclose(found, torch.stack([*map(MODEL.row, contexts)]), atol=1e-5)


def exchanged(
    replica: Replica, number: int, *asked: LogprobsRequest, withdrawn: Sequence[int] = ()
) -> asyncio.Task[Any]:
    """Give a replica a flush, in a thread."""
    more: Any = {"number": number, "seconds": 30.0, "withdrawn": withdrawn, "forgotten": []}
    data, _ = FarEnd(HandleNumbers()).flush(asked, tickets=[7 for _ in asked], **more)
    return asyncio.create_task(asyncio.to_thread(replica.exchange, data))


@pytest.mark.parametrize("texts", [None, "recompute"])
async def test_a_replica_ends_what_was_withdrawn_before_it_takes_new_weights(texts: Any) -> None:
    """Also if both come in the middle of one step."""
    replica, go, in_step = Replica(), threading.Event(), threading.Event()

    class Held(ExactEngine):
        def step(self) -> Any:
            in_step.set()
            assert go.wait(60)
            return []

    def make() -> AsyncLM:
        return genrt.load(engine=lambda: Held(MODEL))

    replica.prepare(make, Settings())
    asked = exchanged(replica, 0, LogprobsRequest([1]))
    await happened(in_step.is_set)
    withdrawn = exchanged(replica, 1, withdrawn=[7])
    await happened(lambda: replica._taken == 2)
    tensors = ([stored("table", of_version(1).table)],)
    wanted = Settings(1, tensors, label=1, texts=texts)
    preparing = asyncio.create_task(asyncio.to_thread(replica.prepare, make, wanted))
    await happened(lambda: calls_of(thread_of(replica._lm)))
    go.set()
    assert (await preparing).vocab_size == 11
    assert replica._lm.weights_version == 1
    replica.stop()
    await asyncio.gather(asked, withdrawn, return_exceptions=True)


async def test_two_calls_wait_for_answers_and_the_first_gets_them() -> None:
    replica = Replica()
    replica.prepare(partial(genrt.load, MODEL, engine="exact"), Settings())
    exchange = partial(exchanged, replica)
    last = exchange(2, LogprobsRequest([1]))  # which waits for its turn
    first, second = exchange(0), exchange(1)
    assert await last is None  # two waited then; its answer may have ended one of them by now
    [answers], _ = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
    _, [(ticket, row)], _, _ = unpacked_ends(await answers, lambda ticket: 0)
    assert ticket == 7
    assert torch.allclose(row, MODEL.row([1]).float(), atol=1e-5)
    assert not (first.done() and second.done())
    await asyncio.to_thread(replica.stop)
    with pytest.raises(EngineDied, match="stopped"):
        await asyncio.gather(first, second)


async def test_a_replica_forgets_collected_populations_though_it_is_asked_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "STALL_SECONDS", 600.0)
    with genrt.load(MODEL, engine="exact", replicas=1) as lm:
        population = lm.population([1], 4)
        for _ in range(3):
            population.append((await population.draw()).token_ids)
        replica = replicas_of(lm)._lives[0].replica
        assert replica._near.handles
        population.close()
        del population
        await happened(lambda: not replica._near.handles)


async def storm(
    patch: pytest.MonkeyPatch, replicas: int, kills: int, seconds: float
) -> tuple[int, int]:
    """Have replicas die or hang at random under load; return how many questions were right, and how many
    were told why not."""
    right = 0
    patch.setattr(engine_module, "STALL_SECONDS", replicas / 8)
    why: list[str] = []
    chosen = random.Random(1)
    with genrt.load(MODEL, engine="exact", replicas=replicas) as lm:
        ended, answered = asyncio.Event(), asyncio.Event()

        async def client(number: int) -> None:
            nonlocal right
            own = random.Random(number)
            while not ended.is_set():
                context = [own.randrange(11) for _ in range(own.randrange(1, 30))]
                try:
                    row = await lm.token_logprobs(context, range(11), timeout=seconds)
                except EngineFailed as error:
                    why.append(str(error))
                else:
                    assert torch.allclose(row, MODEL.row(context), atol=1e-5)
                    right += 1
                answered.set()

        tasks = [asyncio.create_task(client(number)) for number in range(4 * replicas)]
        for _ in range(kills):
            before = right
            while right < before + 20:
                answered.clear()
                await asyncio.wait_for(answered.wait(), 2 * seconds)
            happen = chosen.choice([replicas_of(lm).die, replicas_of(lm).hang])
            happen(chosen.randrange(replicas))
        ended.set()
        await asyncio.gather(*tasks)
        found = lm.statistics()
        assert found.batcher.questions == right + len(why)
        assert found.batcher.answered <= right
        assert found.batcher.failed <= len(why)
        assert [each for each in why if "replicas died" not in each] == []
        assert found.batcher.in_flight == found.batcher.queued == 0
    return right, len(why)


@pytest.mark.promise(number=39)
async def test_deaths_under_load_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    right, told = await storm(monkeypatch, 4, 6, 60.0)
    assert right >= 100
    assert told <= right // 10


@pytest.mark.proof
@pytest.mark.promise(number=39)
async def test_a_hundred_deaths_of_32_replicas_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, told = await storm(monkeypatch, 32, 100, 60.0)
    assert right >= 1_900
    assert told <= right // 10


@pytest.mark.parametrize("victims", [[0], [0, 1]])
async def test_a_replica_that_dies_in_its_sleep_is_opened_when_the_runtime_wakes_up(
    victims: list[int],
) -> None:
    """Until then its memory is somebody else's."""
    with genrt.load(engine=SleepyEngine, replicas=2) as lm:
        await lm.sleep()
        for number in victims:
            replicas_of(lm).die(number)

        def dead() -> int:
            return [each.state for each in lm.statistics().replicas].count("dead")

        await happened(lambda: dead() == len(victims))
        assert [n for n, each in enumerate(replicas_of(lm).opened) if not each] == victims
        await lm.wake_up()
        await asyncio.to_thread(until, lm, "healthy", len(victims))


def _scores() -> ScoringEngine:
    return ScoringEngine(MODEL)


async def test_scores_are_one_question_whichever_replica_is_asked(alone: AsyncLM) -> None:
    """Whole rows too; a death in between is not seen."""
    contexts = [[each % 11, 3] for each in range(24)]
    after = [[each % 5, 7, each % 3] for each in range(24)]
    options: dict[str, Any] = {"replicas": 2, "cache_bytes": 0}
    with genrt.load(engine=_scores, **options) as lm:
        expected = await alone.batch_score(contexts, after)
        for _ in range(2):
            found = await lm.batch_score(contexts, after, timeout=60)
            assert all(
                torch.allclose(*each, atol=1e-5) for each in zip(found, expected, strict=True)
            )
            replicas_of(lm).die(0)
        own = lm.statistics()
        different = {(*before, *more) for before, more in zip(contexts, after, strict=True)}
        assert (own.engine.scored_tokens, own.engine.rows) == (2 * 3 * len(different), 0)
        heated = await lm.population(contexts).score(after, temperature=3.0)
        assert not torch.allclose(heated[0], expected[0], atol=1e-2)
        text = [1, 2, 3, 4, 5]
        rows = torch.cat([each async for each in lm.prompt_rows(text, chunk=3)])
        assert torch.allclose(
            rows, torch.stack([MODEL.row(text[:n]) for n in range(1, 5)]), atol=1e-5
        )


def _dies_of(token: int) -> ExactEngine:
    return _Mortal(MODEL, token)


class _Mortal(ExactEngine):
    """An engine whose replica dies of a token."""

    def __init__(self, model: NGram, token: int) -> None:
        super().__init__(model)
        self._token = token

    def submit(self, requests: Any) -> None:
        if any(self._token in each.token_ids for each in requests):
            raise EngineDied("of this token")
        super().submit(requests)


def test_a_question_that_kills_replicas_is_told_so_and_the_others_are_answered() -> None:
    engine = partial(_dies_of, 10)
    with genrt.load(engine=engine, replicas=2) as lm:
        with pytest.raises(EngineFailed, match="2 replicas died"):
            lm.next_token_logprobs_sync([10])
        assert torch.allclose(lm.next_token_logprobs_sync([1]), MODEL.row([1]), atol=1e-5)


def test_replicas_that_may_not_be_restarted_are_an_engine_that_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ReplicasHere, "restarts", 0)
    with genrt.load(engine=partial(_dies_of, 10), replicas=1, restart="auto") as lm:
        with pytest.raises(EngineDied, match="may not be started again"):
            lm.next_token_logprobs_sync([10])
        lm.restart()
        assert torch.allclose(lm.next_token_logprobs_sync([1]), MODEL.row([1]), atol=1e-5)


def _refuses() -> ExactEngine:
    raise genrt.EngineUnsupported("not on a Monday")


def test_an_engine_that_does_not_open_says_why() -> None:
    with pytest.raises(genrt.EngineUnsupported, match="Monday"):
        genrt.load(engine=_refuses, replicas=2)
    with pytest.raises(InvalidRequest, match="replicas"):
        genrt.load(MODEL, engine="exact", replicas=0)
