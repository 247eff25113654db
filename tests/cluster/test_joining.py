"""What comes of streams over replicas is told once, whichever replica draws the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genrt.cluster.joining import ReplicaStreams
from genrt.cluster.messages import dump_message, load_message
from genrt.engines.protocol import Finished
from genrt.errors import EngineFailed
from genrt.questions.completions import NativeRequest


@dataclass
class Asked:
    """A text whose outputs are its letters; it knows which were told."""

    text: str = "abcdefghij"
    told: str = ""

    def tell(self, outputs: Any) -> None:
        self.told += "".join(outputs)


@dataclass
class Drawing:
    """A replica that draws a text, as it was sent: from what had been told on."""

    request: NativeRequest
    at: int = field(init=False)

    def __post_init__(self) -> None:
        self.request = load_message(dump_message(self.request))
        self.at = len(self.request.asked.told)

    def some(self, count: int) -> tuple[str, ...]:
        text = self.request.asked.text
        found = tuple(text[self.at : min(self.at + count, len(text) - 1)])
        self.at += len(found)
        return found

    def end(self) -> Finished:
        return Finished(self.request, result=tuple(self.request.asked.text[self.at :]))


def native(nonce: int = 1) -> NativeRequest:
    return NativeRequest((1, 2), Asked(), nonce, streamed=True)


def test_a_native_request_is_the_same_at_the_other_end() -> None:
    request = native()
    assert load_message(dump_message(request)) == request
    assert hash(load_message(dump_message(request))) == hash(request)
    assert native(2) != request
    assert request.of_weights(1) != request


STEPS = st.lists(st.one_of(st.integers(1, 4), st.sampled_from(["read", "die"])), max_size=12)


@given(STEPS, st.sampled_from(["read", "leave"]))
def test_every_part_is_told_once_however_often_replicas_die(steps: list[Any], last: str) -> None:
    request, streams = native(), ReplicaStreams()
    assert streams.begun([request]) == []
    drawing, read = Drawing(request), ""
    assert streams.begin(request)
    for step in steps:
        if step == "read":
            read += "".join(streams.take(request) or ())  # type: ignore[arg-type]
        elif step == "die":
            assert streams.begun([request]) == [request]
            drawing = Drawing(request)
        elif came := drawing.some(step):
            streams.add(request, came)
    if last == "read":
        read += "".join(streams.take(request) or ())  # type: ignore[arg-type]
    end = streams.end(Finished(request, result=drawing.end().result))
    assert read + "".join(end.result) == request.asked.text  # type: ignore[arg-type]
    assert not streams._came


def test_an_error_and_a_withdrawal_end_a_stream() -> None:
    request, other, streams = native(), native(2), ReplicaStreams()
    for each in (request, other):
        assert streams.begin(each)
        assert not streams.begin(each)
        streams.add(each, ("a",))
    failed = Finished(request, error=EngineFailed("it failed"))
    assert streams.end(failed) is failed
    streams.forget([other, request])
    assert not streams._came
    streams.add(other, ("b",))
    assert streams.take(other) is None


def test_what_nobody_reads_is_not_kept() -> None:
    streams = ReplicaStreams()
    streams.add(None, ("a",))
    streams.add(native(), ("a",))
    assert not streams._came
    whole = Finished(native(), result=("a", "b"))
    assert streams.end(whole) is whole


@pytest.mark.parametrize("count", [1, 3])
def test_parts_of_a_stream_are_joined_in_order(count: int) -> None:
    streams, request = ReplicaStreams(), native()
    streams.begin(request)
    for letter in "abc"[:count]:
        streams.add(request, (letter,))
    assert streams.take(request) == tuple("abc"[:count])
    assert request.asked.told == "abc"[:count]
    assert streams.take(request) is None
