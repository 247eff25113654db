"""The simulator finds what is broken on purpose, one break after the other, in a few hundred runs."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import genrt
import genrt.questions.draws
import genrt.runtime.batcher
import genrt.runtime.cache
import genrt.runtime.streams
from genrt.engines.protocol import Finished
from genrt.engines.residency import Residents
from genrt.errors import GenrtError
from genrt.questions.completions import Completion, CompletionRequest, Delta
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Batcher
from genrt.runtime.cache import RowCache
from genrt.runtime.streams import Flow, Streams
from genrt.tokens.rows import gather_rows
from tests.simulation import soak
from tests.simulation.engine import Faults
from tests.simulation.simulation import simulate

RUNS = 300
"""How many runs a break may take to be found."""

UNFORGETTING = Faults(cancel=0.6)
"""An engine that refuses to forget more often than ``any_faults`` has it."""

Patch = pytest.MonkeyPatch
Break = Callable[[Patch], None]


def simulate_many() -> None:
    for seed in range(RUNS):
        simulate(seed)
        simulate(seed, texts=False)
        simulate(seed, faults=UNFORGETTING)  # it takes two refusals in a row for one request


def a_waiter_that_leaves_is_forgotten(patch: Patch) -> None:
    patch.setattr(Batcher, "leave", lambda self, waiter: None)


def nothing_in_flight_is_withdrawn(patch: Patch) -> None:
    drop = Batcher._drop

    def drop_only(self: Batcher, waiter: Any) -> None:
        drop(self, waiter)
        self._withdrawn.clear()

    patch.setattr(Batcher, "_drop", drop_only)


def a_request_dies_with_its_first_waiter(patch: Patch) -> None:
    drop = Batcher._drop

    def drop_all(self: Batcher, waiter: Any) -> None:
        for request in waiter.requests:
            if request in self._entries and not self._entries[request].in_flight:
                self._ready.pop(self._entries[request], None)
        drop(self, waiter)

    patch.setattr(Batcher, "_drop", drop_all)


def what_is_asked_again_stays_withdrawn(patch: Patch) -> None:
    class Kept(dict[Any, Any]):
        def pop(self, *args: Any) -> Any:
            return None

    start = Batcher.__init__

    def start_so(self: Batcher, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self._withdrawn = Kept()

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
    patch.setattr(genrt.runtime.batcher, "separate_copies", list)


def rows_are_cached_as_views(patch: Patch) -> None:
    patch.setattr(genrt.runtime.cache, "separate_copies", list)


def a_stack_is_a_view(patch: Patch) -> None:
    patch.setattr(genrt.runtime.batcher, "stacked", gather_rows)


def the_key_lacks_the_adapter(patch: Patch) -> None:
    patch.setattr(LogprobsRequest, "__eq__", lambda self, other: self.packed == other.packed)
    patch.setattr(LogprobsRequest, "__hash__", lambda self: hash(self.packed))


def an_answer_is_set_on_a_cancelled_future(patch: Patch) -> None:
    patch.setattr(genrt.runtime.batcher, "_IS_DONE", contextlib.nullcontext())


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

    patch.setattr(genrt.runtime.batcher, "OrderedDict", Reversed)


def a_quiet_loop_wakes_nobody(patch: Patch) -> None:
    patch.setattr(Batcher, "_end_gathering", lambda self, asking: self._send_gathered(asking) and 0)


def closed_loops_are_not_swept(patch: Patch) -> None:
    cancel = Batcher._cancel
    patch.setattr(
        Batcher,
        "_cancel",
        lambda self, waiter: None if waiter.loop.is_closed() else cancel(self, waiter),
    )


def answers_without_a_forward_take_the_place_of_a_step(patch: Patch) -> None:
    submit, step = AnsweringEngine.submit, AnsweringEngine.step
    waits: set[int] = set()

    def submit_so(self: AnsweringEngine, requests: Sequence[Request]) -> list[Finished]:
        ends = submit(self, requests)
        waits.update([id(self)] if ends else [])
        return ends

    def step_so(self: AnsweringEngine) -> list[Finished]:
        if id(self) in waits:
            waits.remove(id(self))
            return []
        return step(self)

    patch.setattr(AnsweringEngine, "submit", submit_so)
    patch.setattr(AnsweringEngine, "step", step_so)


def what_needs_no_forward_ends_the_turn(patch: Patch) -> None:
    turn, settle = Batcher.turn, Batcher._settle

    class Over(Exception):
        """The turn."""

    def settle_so(self: Batcher, ends: Sequence[Finished], *, stepped: bool = False) -> None:
        settle(self, ends, stepped=stepped)
        if ends and not stepped:
            raise Over

    def turn_so(self: Batcher, engine: Any) -> None:
        with contextlib.suppress(Over):
            turn(self, engine)

    patch.setattr(Batcher, "_settle", settle_so)
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
    patch.setattr(Batcher, "_removable", lambda self: list(self._retired))


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
    patch.setattr(genrt.runtime.answers._Row, "is_asked", False)


def masks_are_dropped(patch: Patch) -> None:
    draw = genrt.questions.draws.draw_from_rows
    patch.setattr(
        genrt.questions.draws,
        "draw_from_rows",
        lambda rows, seeds, masks, *more: draw(rows, seeds, None, *more),
    )


def seeded_draws_depend_on_their_batch(patch: Patch) -> None:
    patch.setattr(
        genrt.questions.draws, "seeded_uniforms", lambda seeds: torch.rand(len(seeds), 2).double()
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


def texts_are_handed_out_shared(patch: Patch) -> None:
    patch.setattr(CompletionRequest, "owned", lambda self, result: result)


def texts_without_a_seed_share_one_draw(patch: Patch) -> None:
    patch.setattr(CompletionRequest, "__hash__", lambda self: hash((self.token_ids, self.adapter)))
    patch.setattr(
        CompletionRequest,
        "__eq__",
        lambda self, other: repr(self) == repr(other) and self.streamed == other.streamed,
    )


def deltas_go_to_the_next_reader(patch: Patch) -> None:
    deliver = Streams.deliver

    def deliver_so(self: Streams, progress: Any) -> None:
        deliver(self, lambda streamed: [*(deltas := progress(streamed))[1:], *deltas[:1]])

    patch.setattr(Streams, "deliver", deliver_so)


def a_delta_is_lost_now_and_then(patch: Patch) -> None:
    put = genrt.runtime.streams._put
    count = itertools.count()
    patch.setattr(
        genrt.runtime.streams,
        "_put",
        lambda news: put([each for each in news if next(count) % 3]),
    )


def what_was_read_is_brought_again(patch: Patch) -> None:
    def add(self: Flow, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.text += delta.text

    patch.setattr(Flow, "_add", add)


def the_last_delta_lacks_what_is_left(patch: Patch) -> None:
    end = Flow.end

    def end_so(self: Flow, completion: Completion) -> Delta:
        return replace(end(self, completion), text="", token_ids=())

    patch.setattr(Flow, "end", end_so)


def deltas_share_what_can_be_edited(patch: Patch) -> None:
    since = Flow._since

    def since_so(self: Flow, start: int, text_start: int, reasoning_start: int) -> Delta:
        return replace(
            since(self, start, text_start, reasoning_start),
            top_logprobs=tuple(self.top_logprobs[start:]),
        )

    patch.setattr(Flow, "_since", since_so)


def streams_that_are_left_go_on(patch: Patch) -> None:
    leave = Batcher.leave
    patch.setattr(
        Batcher, "leave", lambda self, waiter: None if waiter.flow else leave(self, waiter)
    )


def streams_that_have_ended_are_still_told_of(patch: Patch) -> None:
    patch.setattr(Streams, "discard", lambda self, request, flow: None)


BREAKS: list[Break] = [
    texts_are_handed_out_shared,
    texts_without_a_seed_share_one_draw,
    deltas_go_to_the_next_reader,
    a_delta_is_lost_now_and_then,
    what_was_read_is_brought_again,
    the_last_delta_lacks_what_is_left,
    deltas_share_what_can_be_edited,
    streams_that_are_left_go_on,
    streams_that_have_ended_are_still_told_of,
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


def test_soaking_says_which_seed_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    rows_are_handed_out_as_views(monkeypatch)
    assert soak.main(["--seconds", "1e9", "--operations", "50", "--seed", "0"]) == 1
    assert re.search(r"replay with simulate\(\d+, operations=50\)", capsys.readouterr().out)
