"""The simulator: the runtime stands up to it, a seed is a run, and what is broken is found.

The fixed seeds are the same every time; a few fresh ones are tried in addition, and named in the output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch

import genrt
import genrt.runtime.admission
import genrt.runtime.answers
import genrt.runtime.cache
import genrt.runtime.waiters
from genrt.engines.exact import NGram
from genrt.engines.protocol import Finished
from genrt.engines.residency import Residents
from genrt.errors import EngineDied, EngineFailed, GenrtError
from genrt.lm import AsyncLM
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Batcher
from genrt.runtime.bindings import Bindings
from genrt.runtime.cache import RowCache
from genrt.runtime.gathering import Gatherings
from genrt.testing import Faults, Report, run_simulated
from genrt.tokens.rows import together
from tests.simulation import soak
from tests.simulation.simulation import simulate

SEEDS = 1_000
PARTS = 10
OPERATIONS = 100
FRESH_SEEDS = 20
SEEDS_TO_FIND_A_BREAK = 300

DIED = r"closed (the engine can't go on|the simulated engine died)"


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_found_in_fixed_seeds(part: int) -> None:
    """A tenth of a thousand runs, a hundred thousand operations in all."""
    seeds = range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS)
    done = sum(simulate(seed, operations=OPERATIONS).operations for seed in seeds)
    assert done >= OPERATIONS * SEEDS // PARTS


def test_nothing_is_found_in_fresh_seeds() -> None:
    seeds = [random.SystemRandom().getrandbits(32) for _ in range(FRESH_SEEDS)]
    print("fresh seeds:", *seeds)
    for seed in seeds:
        assert simulate(seed, operations=OPERATIONS).operations >= OPERATIONS


def test_a_request_that_is_withdrawn_and_asked_anew_goes_behind_the_others() -> None:
    """In this run one loses its last waiter, and gets another, between two looks at what is ready."""
    assert simulate(1018367613380, operations=300).operations >= 300


def test_a_seed_is_a_run() -> None:
    assert simulate(3) == simulate(3)
    assert simulate(3).trace != simulate(4).trace


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_is_the_same_run_in_another_process(hash_seed: str) -> None:
    code = "from tests.simulation.simulation import simulate; print(*simulate(5).trace, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    assert tuple(done.stdout.splitlines()) == simulate(5).trace


def test_a_run_leaves_no_trace_on_torch() -> None:
    before = torch.get_rng_state()
    simulate(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_runs_come_to_every_corner() -> None:
    """Everything that can happen to a question and in an engine has happened in some run."""
    events: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for seed in range(60):
        report = simulate(seed)
        for line in report.trace:
            events.update(re.findall(r"^[A-Za-z ]+?(?= |$)", line))
            events.update(
                re.findall(r"step failed|submit failed|SampleRequest|[A-Z]\w+(?=, \[)", line)
            )
        for part in (report.statistics.batcher, report.statistics.cache, report.statistics.engine):
            counted.update({field.name: getattr(part, field.name) for field in fields(part)})
    ends = {"answered", "CancelledError", "TimedOut", "Closed"}
    ends |= {"EngineFailed", "EngineDied", "OutOfMemory", "NotFinite"}
    asked = {"DrawToken", "TopTokens", "Candidates", "HostRow", "SampleRequest"}
    others = {"withdrawn", "closed", "restarted", "reopened", "step failed", "submit failed"}
    assert ends | asked | others <= set(events)
    of_other_engines = {"sampled_tokens", "computed_tokens", "bytes_to_host", "seconds"}
    of_other_engines |= {"prepared", "speculated"}
    of_this_moment = {"queued", "in_flight", "waiting", "resident"}
    never = {name for name, count in counted.items() if not count}
    assert never <= of_other_engines | of_this_moment


# -- faults, one by one -------------------------------------------------------------------------------


def simulate_many(faults: Faults | None = None) -> None:
    """As many runs as a break may take to be found."""
    for seed in range(SEEDS_TO_FIND_A_BREAK):
        simulate(seed, faults=faults)


def told(report: Report, event: str) -> int:
    return sum(re.match(event, line) is not None for line in report.trace)


@pytest.mark.parametrize(
    ("call", "calls", "event"),
    [
        ("submit", 30, "submit failed"),
        ("step", 30, "step failed"),
        ("cancel", 4, "cancel failed"),
    ],
)
def test_a_fault_at_any_call_reaches_those_it_concerns(call: str, calls: int, event: str) -> None:
    """The k-th call fails, for every k: the ledger knows whom that concerns, and that the next works."""
    for number in range(1, calls + 1):
        runs = (simulate(seed, faults=Faults(at_call={call: number})) for seed in range(100))
        assert next(told(report, event) for report in runs if told(report, event)) > 0


@pytest.mark.parametrize("fitting", range(5))
def test_a_step_above_any_size_runs_out_of_memory(fitting: int) -> None:
    reports = [
        simulate(seed, operations=60, faults=Faults(out_of_memory_above=fitting))
        for seed in range(15)
    ]
    assert sum(told(report, "step failed") for report in reports) > 0
    assert sum(told(report, "answered") for report in reports) > 0 or fitting == 0


def test_an_engine_that_dies_ends_everyone() -> None:
    reports = [simulate(seed, operations=60, faults=Faults(death=0.1)) for seed in range(20)]
    died = [told(report, DIED) for report in reports]
    restarted = [told(report, "restarted") for report in reports]
    assert sum(died) > 2
    assert max(restarted) > 1
    assert all(
        told(report, "EngineDied") for report, ended in zip(reports, died, strict=True) if ended
    )


def test_poisoned_contexts_fail_alone() -> None:
    reports = [simulate(seed, operations=60, faults=Faults(not_finite=0.5)) for seed in range(20)]
    assert sum(told(report, "NotFinite") for report in reports) > 0
    assert sum(told(report, "answered") for report in reports) > 0
    assert sum(report.statistics.batcher.failed for report in reports) > 0


# -- samplers of one's own ----------------------------------------------------------------------------


MODEL = NGram.random(5, seed=0)


async def particles(lm: AsyncLM, *, count: int = 6, length: int = 4) -> list[list[int]]:
    """Texts that grow side by side, each with draws of its own."""

    async def particle(number: int) -> list[int]:
        tokens = [0]
        for step in range(length):
            row = await lm.next_token_logprobs(tokens)
            generator = torch.Generator().manual_seed(100 * number + step)
            tokens.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
            row.zero_()
        return tokens

    return await asyncio.gather(*(particle(number) for number in range(count)))


@pytest.mark.parametrize("cache_bytes", [0, 60, 2**20])
@pytest.mark.parametrize("max_batch_size", [None, 2])
def test_a_sampler_gets_the_same_in_every_order(
    cache_bytes: int, max_batch_size: int | None
) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        expected = asyncio.run(particles(lm))
    for seed in range(10):
        found = run_simulated(
            particles,
            seed=seed,
            model=MODEL,
            cache_bytes=cache_bytes,
            max_batch_size=max_batch_size,
        )
        assert found == expected


def test_a_samplers_chance_is_the_seeds() -> None:
    async def draws(lm: AsyncLM) -> list[int]:
        return [(await lm.draw([0])).token_id for _ in range(20)]

    runs = [run_simulated(draws, seed=seed, model=MODEL) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_sampler_can_be_cancelled_at_every_moment() -> None:
    ended = cancelled = 0
    for moment in range(120):
        try:
            run_simulated(particles, seed=4, model=MODEL, cancel_after=moment)
            ended += 1
        except asyncio.CancelledError:
            cancelled += 1
    assert ended > 0
    assert cancelled > 50


def test_a_sampler_meets_every_fault() -> None:
    async def retrying(lm: AsyncLM) -> int:
        failures = 0
        for number in range(20):
            try:
                await lm.next_token_logprobs([number % 5, 1])
            except EngineFailed:
                failures += 1
        return failures

    failures = [run_simulated(retrying, seed=s, faults=Faults(step=0.3)) for s in range(10)]
    assert min(failures) >= 0
    assert max(failures) > 2
    with pytest.raises(EngineDied):
        run_simulated(particles, seed=0, faults=Faults(death=1.0))


def test_blocking_calls_work_in_a_simulation() -> None:
    async def both(lm: AsyncLM) -> bool:
        waiting = asyncio.ensure_future(lm.next_token_logprobs([1, 2]))
        blocking = lm.batch_next_token_logprobs_sync([[1, 2], [2]])
        return torch.equal(await waiting, blocking[0])

    assert all(run_simulated(both, seed=seed, model=MODEL) for seed in range(10))


def test_sleeping_takes_no_time() -> None:
    async def patient(lm: AsyncLM) -> float:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await asyncio.sleep(10_000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10_000):
                await asyncio.Event().wait()
        await lm.next_token_logprobs([1])
        return loop.time() - before

    assert 20_000 <= run_simulated(patient, seed=0) < 20_001


def test_a_sampler_may_close_its_runtime() -> None:
    async def closing(lm: AsyncLM) -> None:
        waiting = asyncio.ensure_future(lm.next_token_logprobs([1]))
        await asyncio.sleep(0)
        async with lm:
            pass
        with pytest.raises(genrt.Closed):
            await waiting
        with pytest.raises(genrt.Closed):
            await lm.next_token_logprobs([1])

    for seed in range(5):
        run_simulated(closing, seed=seed)


def test_a_sampler_that_waits_for_ever_is_found() -> None:
    async def waiting(lm: AsyncLM) -> None:
        await asyncio.Event().wait()

    with pytest.raises(
        AssertionError, match=r"^seed 7: nothing can happen any more, and the sampler"
    ):
        run_simulated(waiting, seed=7)


def test_a_sampler_that_leaves_a_task_behind_is_found() -> None:
    async def leaving(lm: AsyncLM) -> None:
        leaving.task = asyncio.ensure_future(asyncio.Event().wait())  # type: ignore[attr-defined]

    with pytest.raises(AssertionError, match=r"^seed 7: the sampler has ended and left"):
        run_simulated(leaving, seed=7)


def test_a_sampler_that_forgets_an_error_is_found() -> None:
    async def forgetful(lm: AsyncLM) -> None:
        task = asyncio.ensure_future(lm.next_token_logprobs([1]))
        await asyncio.wait([task])

    with pytest.raises(AssertionError, match="was never retrieved"):
        run_simulated(forgetful, seed=0, faults=Faults(not_finite=1.0))


def test_what_a_sampler_raises_comes_out() -> None:
    async def wrong(lm: AsyncLM) -> None:
        await lm.next_token_logprobs([99])

    with pytest.raises(genrt.InvalidRequest, match="99"):
        run_simulated(wrong, seed=0)


# -- soaking --------------------------------------------------------------------------------------------


def test_soaking_goes_on_until_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--seconds", "0", "--operations", "20", "--seed", "5"]) == 0
    assert re.search(r"1 seeds from 5 on, \d+ operations", capsys.readouterr().out)


def test_soaking_says_which_seed_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_are_handed_out_as_views(monkeypatch)
    assert soak.main(["--seconds", "1e9", "--operations", "50", "--seed", "0"]) == 1
    assert re.search(r"replay with simulate\(\d+, operations=50\)", capsys.readouterr().out)


# -- what is broken on purpose ------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
Break = Callable[[Patch], None]


def a_waiter_that_leaves_is_forgotten(patch: Patch) -> None:
    patch.setattr(Batcher, "_leave", lambda self, waiter: None)


def nothing_in_flight_is_withdrawn(patch: Patch) -> None:
    drop = Batcher._drop

    def drop_only(self: Batcher, waiter: Any) -> None:
        drop(self, waiter)
        self._flight._withdrawn.clear()

    patch.setattr(Batcher, "_drop", drop_only)


def a_request_dies_with_its_first_waiter(patch: Patch) -> None:
    drop = Batcher._drop

    def drop_all(self: Batcher, waiter: Any) -> None:
        for request in waiter.found:
            if request in self._entries and not self._entries[request].in_flight:
                self._ready.discard(self._entries[request])
        drop(self, waiter)

    patch.setattr(Batcher, "_drop", drop_all)


def what_is_asked_again_stays_withdrawn(patch: Patch) -> None:
    class Kept(dict[Any, Any]):
        def pop(self, *args: Any) -> Any:
            return None

    start = Batcher.__init__

    def start_so(self: Batcher, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self._flight._withdrawn = Kept()

    patch.setattr(Batcher, "__init__", start_so)


def rows_go_by_position(patch: Patch) -> None:
    settle = Batcher._settle

    def settle_so(self: Batcher, finished: Sequence[Finished]) -> None:
        places = [each for each in self._entries if any(each == end.request for end in finished)]
        ends = [end for end in finished if end.request in places]
        moved = zip(places, ends, strict=False)
        settle(self, [Finished(each, end.result, end.error) for each, end in moved])

    patch.setattr(Batcher, "_settle", settle_so)


def rows_are_handed_out_as_views(patch: Patch) -> None:
    patch.setattr(genrt.runtime.waiters, "apart", list)


def rows_are_cached_as_views(patch: Patch) -> None:
    patch.setattr(genrt.runtime.cache, "apart", list)


def a_stack_is_a_view(patch: Patch) -> None:
    patch.setattr(genrt.runtime.waiters, "stacked", together)


def the_key_lacks_the_adapter(patch: Patch) -> None:
    patch.setattr(LogprobsRequest, "__eq__", lambda self, other: self.packed == other.packed)
    patch.setattr(LogprobsRequest, "__hash__", lambda self: hash(self.packed))


def an_answer_is_set_on_a_cancelled_future(patch: Patch) -> None:
    patch.setattr(genrt.runtime.waiters, "_DONE", contextlib.nullcontext())


def closed_loops_are_delivered_to(patch: Patch) -> None:
    def deliver(done: Any) -> None:
        for waiter, outcome in done:
            resolved = deque([(waiter.future, outcome)])
            waiter.loop.call_soon_threadsafe(genrt.runtime.waiters._resolve, waiter.loop, resolved)

    patch.setattr(genrt.runtime.waiters, "deliver", deliver)


def rows_are_cached_when_their_requests_have_ended(patch: Patch) -> None:
    settle, keep = Batcher._settle, RowCache.keep
    patch.setattr(RowCache, "keep", lambda self, finished: {})

    def settle_so(self: Batcher, finished: Sequence[Finished]) -> None:
        settle(self, finished)
        keep(self._cache, finished)

    patch.setattr(Batcher, "_settle", settle_so)


def waiters_share_an_error(patch: Patch) -> None:
    patch.setattr(GenrtError, "fresh", lambda self: self)


def the_youngest_go_first(patch: Patch) -> None:
    class Reversed(OrderedDict[Any, Any]):
        def popitem(self, last: bool = True) -> tuple[Any, Any]:
            return super().popitem(last=not last)

    patch.setattr(genrt.runtime.admission, "OrderedDict", Reversed)


def a_quiet_loop_wakes_nobody(patch: Patch) -> None:
    quiet = Gatherings._quiet

    def quiet_so(self: Gatherings, *args: Any) -> None:
        patch.setattr(self, "_wake", lambda: None)
        quiet(self, *args)

    patch.setattr(Gatherings, "_quiet", quiet_so)


def closed_loops_are_not_swept(patch: Patch) -> None:
    patch.setattr(Batcher, "_sweep", lambda self: [])


def answers_without_a_forward_take_the_place_of_a_step(patch: Patch) -> None:
    ready, step = AnsweringEngine.ready, AnsweringEngine.step
    waits: set[int] = set()

    def ready_so(self: AnsweringEngine) -> list[Finished]:
        ends = ready(self)
        waits.update([id(self)] if ends else [])
        return ends

    def step_so(self: AnsweringEngine) -> list[Finished]:
        if id(self) in waits:
            waits.remove(id(self))
            return []
        return step(self)

    patch.setattr(AnsweringEngine, "ready", ready_so)
    patch.setattr(AnsweringEngine, "step", step_so)


def what_needs_no_forward_ends_the_turn(patch: Patch) -> None:
    turn, sent = Batcher.turn, Batcher._sent

    class Over(Exception):
        """The turn."""

    def sent_so(self: Batcher, engine: Any, flush: Sequence[Request]) -> list[Finished]:
        if ends := sent(self, engine, flush):
            self._settle(ends)
            raise Over
        return ends

    def turn_so(self: Batcher, engine: Any) -> None:
        with contextlib.suppress(Over):
            turn(self, engine)

    patch.setattr(Batcher, "_sent", sent_so)
    patch.setattr(Batcher, "turn", turn_so)


def what_an_engine_could_not_forget_is_sent_again(patch: Patch) -> None:
    patch.setattr(AnsweringEngine, "_still_held", lambda self, new: {})


def closing_tells_nobody(patch: Patch) -> None:
    def close(self: Batcher, reason: GenrtError | None = None) -> None:
        self._closed = reason or genrt.errors.Closed("closed")
        self._entries.clear()
        self._flight.clear()

    patch.setattr(Batcher, "close", close)


def a_failing_step_fails_nobody(patch: Patch) -> None:
    turn = Batcher.turn

    def turn_so(self: Batcher, engine: Any) -> None:
        settle = self._settle
        patch.setattr(
            self, "_settle", lambda ends: settle([end for end in ends if end.error is None])
        )
        turn(self, engine)

    patch.setattr(Batcher, "turn", turn_so)


def one_error_fails_the_whole_step(patch: Patch) -> None:
    settle = Batcher._settle

    def settle_so(self: Batcher, finished: Sequence[Finished]) -> None:
        errors = [end.error for end in finished if end.error is not None]
        if errors:
            finished = [Finished(end.request, error=errors[0]) for end in finished]
        settle(self, finished)

    patch.setattr(Batcher, "_settle", settle_so)


def adapters_go_at_once(patch: Patch) -> None:
    patch.setattr(Bindings, "free", lambda self: list(self._retired))


def adapters_never_go(patch: Patch) -> None:
    patch.setattr(Batcher, "retire", lambda self, adapter: None)


def cached_rows_outlive_their_adapter(patch: Patch) -> None:
    patch.setattr(RowCache, "forget", lambda self, adapter: None)


def the_cache_counts_rows_for_bytes(patch: Patch) -> None:
    patch.setattr(genrt.runtime.cache, "_storage_bytes", lambda row: 1)


def questions_in_the_cache_are_not_counted(patch: Patch) -> None:
    register = Batcher._register

    def register_so(self: Batcher, waiter: Any) -> list[Any]:
        cached = self._counted["cached"]
        queued = register(self, waiter)
        self._counted["cached"] = cached
        return queued

    patch.setattr(Batcher, "_register", register_so)


def a_reader_cancels_for_all_readers(patch: Patch) -> None:
    cancel = AnsweringEngine.cancel

    def cancel_so(self: AnsweringEngine, requests: Sequence[Request]) -> None:
        cancel(self, requests)
        self.engine.cancel([each.row for each in requests if isinstance(each, ReadRequest)])

    patch.setattr(AnsweringEngine, "cancel", cancel_so)


def who_asked_a_row_that_is_read_is_forgotten(patch: Patch) -> None:
    class Empty(set[Request]):
        def update(self, *others: Any) -> None:
            pass

    start = AnsweringEngine.__init__

    def start_so(self: AnsweringEngine, *args: Any) -> None:
        start(self, *args)
        self._asked = Empty()

    patch.setattr(AnsweringEngine, "__init__", start_so)


def masks_are_dropped(patch: Patch) -> None:
    patch.setattr(genrt.runtime.answers, "_masks", lambda asked, row: None)


def seeded_draws_depend_on_their_batch(patch: Patch) -> None:
    patch.setattr(
        genrt.runtime.answers, "seeded_uniforms", lambda seeds: torch.rand(len(seeds), 2).double()
    )


def residents_of_all_adapters_are_parents(patch: Patch) -> None:
    put = Residents.put
    patch.setattr(
        Residents, "put", lambda self, name, adapter, context: put(self, name, None, context)
    )


def removed_residents_are_found(patch: Patch) -> None:
    remove = Residents.remove

    def remove_every_other(self: Residents, name: str) -> None:
        if int(name) % 2:
            remove(self, name)

    patch.setattr(Residents, "remove", remove_every_other)


BREAKS: list[Break] = [
    a_waiter_that_leaves_is_forgotten,
    nothing_in_flight_is_withdrawn,
    a_request_dies_with_its_first_waiter,
    what_is_asked_again_stays_withdrawn,
    rows_go_by_position,
    rows_are_handed_out_as_views,
    rows_are_cached_as_views,
    a_stack_is_a_view,
    the_key_lacks_the_adapter,
    an_answer_is_set_on_a_cancelled_future,
    closed_loops_are_delivered_to,
    rows_are_cached_when_their_requests_have_ended,
    waiters_share_an_error,
    the_youngest_go_first,
    a_quiet_loop_wakes_nobody,
    closed_loops_are_not_swept,
    answers_without_a_forward_take_the_place_of_a_step,
    what_needs_no_forward_ends_the_turn,
    what_an_engine_could_not_forget_is_sent_again,
    closing_tells_nobody,
    a_failing_step_fails_nobody,
    one_error_fails_the_whole_step,
    adapters_go_at_once,
    adapters_never_go,
    cached_rows_outlive_their_adapter,
    the_cache_counts_rows_for_bytes,
    questions_in_the_cache_are_not_counted,
    a_reader_cancels_for_all_readers,
    who_asked_a_row_that_is_read_is_forgotten,
    masks_are_dropped,
    seeded_draws_depend_on_their_batch,
    residents_of_all_adapters_are_parents,
    removed_residents_are_found,
]


@pytest.mark.parametrize("broken", BREAKS, ids=lambda each: each.__name__)
def test_what_is_broken_on_purpose_is_found(broken: Break, monkeypatch: Patch) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=r"^seed \d+: .+\nreplay with simulate\(\d+, op"):
        simulate_many()
