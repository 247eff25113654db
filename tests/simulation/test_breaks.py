"""The simulator finds what is broken on purpose, one break after the other, in a few hundred runs."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import genrt.questions.draws
import genrt.runtime.answers
import genrt.runtime.batcher
import genrt.runtime.cache
import genrt.runtime.streams
import genrt.runtime.weights
from genrt import contexts
from genrt.contexts import Context
from genrt.engines.protocol import Finished
from genrt.errors import GenrtError
from genrt.questions.completions import CompletionRequest, Delta
from genrt.questions.masks import words_of_each
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


RARE = {
    "texts are handed out shared": 16,
    "what an engine could not forget is sent again": 20,
    "a_reader_cancels_for_all_readers": 36,
    "seeded draws depend on their batch": 51,
}
"""The first seeds that find the rarest breaks: the search begins there, and goes on if they change."""


def simulate_many(name: str) -> None:
    first = RARE.get(name, 0)
    for seed in range(first, first + RUNS):
        simulate(seed)
        simulate(seed, texts=False)
        simulate(seed, faults=UNFORGETTING)  # it takes two refusals in a row for one request


def simulate_updates(_: str) -> None:
    for seed in range(RUNS):
        simulate(seed, updates=True)


def simulate_contexts(_: str) -> None:
    for seed in range(RUNS):
        simulate(seed, contexts=True)


batcher, withdraw = genrt.runtime.batcher, Batcher._withdraw
put, counted = genrt.runtime.streams._put, itertools.count()
cancel, since = Batcher.cancel, Flow._since

flush, extensions = contexts._Flush, contexts._extensions

OF_UPDATES: dict[str, tuple[Any, str, Any]] = {
    "texts are drawn in the middle of an update": (Batcher, "is_drained", True),
    "rows are computed after an update that did not wait": (
        Batcher,
        "_has_drained",
        lambda self, barrier: True,
    ),
    "texts that begin are labelled as before": (
        genrt.runtime.weights,
        "set_version",
        lambda engine, version: None,
    ),
    "cached rows outlive their weights": (RowCache, "clear", lambda self: None),
}
"""The same of new weights."""

OF_CONTEXTS: dict[str, tuple[Any, str, Any]] = {
    "a cancelled question withdraws its flush": (
        contexts,
        "_Flush",
        lambda task, waiting: flush(task, 1),
    ),
    "masks go to other contexts": (
        contexts,
        "words_of_each",
        lambda masks: words_of_each(masks[::-1]),
    ),
    "answers go to other contexts": (
        contexts,
        "_extensions",
        lambda going: (going, *extensions(going)[1:]),
    ),
    "a context's adapter is ignored": (Context, "_bound", lambda self: None),
    "a row that is not finite fails its flush": (contexts, "NotFinite", ZeroDivisionError),
    "a context that is left gives nothing back": (
        Context,
        "_leave",
        lambda self: setattr(self, "_place", (None, 0, len(()))),
    ),
}
"""The same of contexts."""

REPLACED: dict[str, tuple[Any, str, Any]] = {
    "a waiter that leaves is forgotten": (Batcher, "cancel", lambda self, waiter: None),
    "rows are handed out as views": (batcher, "separate_copies", list),
    "rows are cached as views": (genrt.runtime.cache, "separate_copies", list),
    "a stack is a view": (batcher, "stacked", gather_rows),
    "an answer is set on a cancelled future": (batcher, "_IS_DONE", contextlib.nullcontext()),
    "waiters share an error": (GenrtError, "fresh", lambda self: self),
    "a quiet loop wakes nobody": (
        Batcher,
        "_end_gathering",
        lambda self, asking: self._send_gathered(asking) and 0,
    ),
    "closed loops are not swept": (
        Batcher,
        "_withdraw",
        lambda self, waiter: None if waiter.loop.is_closed() else withdraw(self, waiter),
    ),
    "what an engine could not forget is sent again": (
        AnsweringEngine,
        "_still_held",
        lambda self, new: {},
    ),
    "adapters go at once": (Batcher, "_removable", lambda self: list(self._retired)),
    "adapters never go": (Batcher, "retire", lambda self, adapter: None),
    "cached rows outlive their adapter": (RowCache, "forget", lambda self, adapter: None),
    "who asked a row that is read is forgotten": (genrt.runtime.answers._Row, "is_asked", False),
    "seeded draws depend on their batch": (
        genrt.questions.draws,
        "seeded_uniforms",
        lambda seeds: torch.rand(len(seeds), 2).double(),
    ),
    "texts are handed out shared": (CompletionRequest, "owned", lambda self, result: result),
    "a delta is lost now and then": (
        genrt.runtime.streams,
        "_put",
        lambda news: put([each for each in news if next(counted) % 3]),
    ),
    "deltas share what can be edited": (
        Flow,
        "_since",
        lambda self, start, *more: replace(
            since(self, start, *more), top_logprobs=tuple(self.top_logprobs[start:])
        ),
    ),
    "streams that are left go on": (
        Batcher,
        "cancel",
        lambda self, waiter: None if waiter.flow else cancel(self, waiter),
    ),
    "streams that have ended are still told of": (
        Streams,
        "discard",
        lambda self, request, flow: None,
    ),
}
"""What takes the place of an attribute of a class or module."""


def nothing_in_flight_is_withdrawn(patch: Patch) -> None:
    drop = Batcher._drop

    def drop_only(self: Batcher, waiter: Any) -> None:
        drop(self, waiter)
        self._withdrawn.clear()

    patch.setattr(Batcher, "_drop", drop_only)


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

    def settle_so(self: Batcher, finished: Sequence[Finished], **how: Any) -> None:
        places = [each for each in self._entries if any(each == end.request for end in finished)]
        ends = [end for end in finished if end.request in places]
        moved = zip(places, ends, strict=False)
        settle(self, [Finished(each, end.result, end.error) for each, end in moved], **how)

    patch.setattr(Batcher, "_settle", settle_so)


def the_key_lacks_the_adapter(patch: Patch) -> None:
    patch.setattr(LogprobsRequest, "__eq__", lambda self, other: self.packed == other.packed)
    patch.setattr(LogprobsRequest, "__hash__", lambda self: hash(self.packed))


def rows_are_cached_when_their_requests_have_ended(patch: Patch) -> None:
    settle, keep = Batcher._settle, RowCache.keep
    patch.setattr(RowCache, "keep", lambda self, finished: {})

    def settle_so(self: Batcher, finished: Sequence[Finished], **how: Any) -> None:
        settle(self, finished, **how)
        keep(self._cache, finished)

    patch.setattr(Batcher, "_settle", settle_so)


def the_cache_counts_rows_for_bytes(patch: Patch) -> None:
    put_all = RowCache.put_all

    def put_so(self: RowCache, rows: Any) -> Any:
        errors = put_all(self, rows)
        self._bytes = len(self._rows)
        return errors

    patch.setattr(RowCache, "put_all", put_so)


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


def one_error_fails_the_whole_step(patch: Patch) -> None:
    settle = Batcher._settle

    def settle_so(self: Batcher, finished: Sequence[Finished], **how: Any) -> None:
        errors = [end.error for end in finished if end.error is not None]
        if errors:
            finished = [Finished(end.request, error=errors[0]) for end in finished]
        settle(self, finished, **how)

    patch.setattr(Batcher, "_settle", settle_so)


def a_reader_cancels_for_all_readers(patch: Patch) -> None:
    cancel = AnsweringEngine.cancel

    def cancel_so(self: AnsweringEngine, requests: Sequence[Request]) -> None:
        cancel(self, requests)
        self.engine.cancel([each.row for each in requests if isinstance(each, ReadRequest)])

    patch.setattr(AnsweringEngine, "cancel", cancel_so)


def masks_are_dropped(patch: Patch) -> None:
    draw = genrt.questions.draws.draw_from_rows
    patch.setattr(
        genrt.questions.draws,
        "draw_from_rows",
        lambda rows, seeds, masks, *more: draw(rows, seeds, None, *more),
    )


def deltas_go_to_the_next_reader(patch: Patch) -> None:
    deliver = Streams.deliver

    def deliver_so(self: Streams, progress: Any) -> None:
        deliver(self, lambda streamed: [*(deltas := progress(streamed))[1:], *deltas[:1]])

    patch.setattr(Streams, "deliver", deliver_so)


def what_was_read_is_brought_again(patch: Patch) -> None:
    def add(self: Flow, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.text += delta.text

    patch.setattr(Flow, "_add", add)


def a_late_answer_takes_over_what_was_cut(patch: Patch) -> None:
    cut = Context.cut

    def cut_so(self: Context, length: int) -> None:
        place = self._place
        cut(self, length)
        if length >= place[2]:
            self._place = place

    patch.setattr(Context, "cut", cut_so)


def a_fork_grows_with_its_parent(patch: Patch) -> None:
    copied = Context.copied

    def copied_so(self: Context, kind: Any) -> Any:
        copy = copied(self, kind)
        copy._tail = self._tail
        return copy

    patch.setattr(Context, "copied", copied_so)


BREAKS: list[Break] = [
    nothing_in_flight_is_withdrawn,
    what_is_asked_again_stays_withdrawn,
    rows_go_by_position,
    the_key_lacks_the_adapter,
    rows_are_cached_when_their_requests_have_ended,
    the_cache_counts_rows_for_bytes,
    what_needs_no_forward_ends_the_turn,
    one_error_fails_the_whole_step,
    a_reader_cancels_for_all_readers,
    masks_are_dropped,
    what_was_read_is_brought_again,
    deltas_go_to_the_next_reader,
]


BREAKS_OF_CONTEXTS = [a_late_answer_takes_over_what_was_cut, a_fork_grows_with_its_parent]


def found(name: str, simulate: Callable[[str], None] = simulate_many) -> None:
    with pytest.raises(AssertionError, match=r"^seed \d+: .+\nreplay with simulate\(\d+, op"):
        simulate(name)


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_on_purpose_is_found(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(*REPLACED[name])
    found(name)


@pytest.mark.parametrize("name", OF_UPDATES)
def test_what_updates_do_wrong_is_found(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(*OF_UPDATES[name])
    found(name, simulate_updates)


@pytest.mark.parametrize("name", OF_CONTEXTS)
def test_what_contexts_do_wrong_is_found(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(*OF_CONTEXTS[name])
    found(name, simulate_contexts)


@pytest.mark.parametrize("broken", BREAKS_OF_CONTEXTS, ids=lambda each: each.__name__)
def test_what_is_broken_in_contexts_is_found(broken: Break, monkeypatch: Patch) -> None:
    broken(monkeypatch)
    found(broken.__name__, simulate_contexts)


@pytest.mark.parametrize("broken", BREAKS, ids=lambda each: each.__name__)
def test_what_is_broken_on_purpose_is_found(broken: Break, monkeypatch: Patch) -> None:
    broken(monkeypatch)
    found(broken.__name__)


def test_soaking_says_which_seed_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(*REPLACED["rows are handed out as views"])
    assert soak.main(["--seconds", "1e9", "--operations", "50", "--seed", "0"]) == 1
    assert re.search(r"replay with simulate\(\d+, operations=50\)", capsys.readouterr().out)
