"""Frames on a socket: whole however they come apart, with arrays that nobody copies, and no file left."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.cluster.frames import Frame, Frames, Outgoing, received
from genrt.cluster.messages import LEAST_APART, dumped, loaded

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def all_of(port: socket.socket, count: int) -> list[Frame]:
    """Receive so many frames."""
    frames, found = Frames(), list[Frame]()
    while len(found) < count:
        came = received(port, frames)
        assert came is not None
        found += came
    return found


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40)), st.data())
def test_frames_are_put_together_however_they_come_apart(
    messages: list[bytes], data: st.DataObject
) -> None:
    one, other = socket.socketpair()
    with one, other:
        for each in messages:
            Outgoing(each).send_to([one])
        one.close()
        stream = b""
        while came := other.recv(1000):
            stream += came
    frames, found = Frames(), list[Frame]()
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += frames.add(stream[:size])
        stream = stream[size:]
    assert [each.data for each in found] == messages


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.lists(st.integers(0, 300_000), max_size=4), min_size=1, max_size=5),
    blocks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_arrays_arrive_with_their_frames(sizes: list[list[int]], blocks: bool, seed: int) -> None:
    """Also where a socket takes little at a time."""
    chance = np.random.default_rng(seed)
    sent = [[chance.integers(0, 256, size).astype(np.uint8) for size in each] for each in sizes]
    before = files()
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(blocks)
        texts = [bytes(chance.integers(0, 256, 200_000 * (n % 2))) for n in range(len(sent))]
        outgoing = [
            Outgoing(text, [memoryview(each.tobytes()) for each in arrays])
            for text, arrays in zip(texts, sent, strict=True)
        ]

        def send() -> None:
            for each in outgoing:
                if blocks:
                    each.send_to([one])
                else:
                    while True:
                        try:
                            assert each.flush(one)
                            break
                        except BlockingIOError:
                            pass

        sender = threading.Thread(target=send)
        sender.start()
        found = all_of(other, len(sent))
        sender.join()
    assert [each.data for each in found] == texts
    for frame, arrays in zip(found, sent, strict=True):
        assert [bytes(each) for each in frame.arrays] == [bytes(each) for each in arrays]
    del found, frame
    assert files() == before


def test_values_have_their_arrays_apart(pair: Pair) -> None:
    large = np.arange(LEAST_APART, dtype=np.int64).reshape(2, -1)
    value = {
        "large": large,
        "small": large[:, :3],
        "part": large[:, ::2],
        "rows": torch.ones(2**16),
    }
    arrays: list[memoryview] = []
    data = dumped(value, apart=arrays)
    assert [each.nbytes for each in arrays] == [large.nbytes, 4 * 2**16]
    assert len(data) < large.nbytes  # of which one half is in it, as it is not in one piece
    outgoing = Outgoing(data, arrays)
    sender = threading.Thread(target=outgoing.send_to, args=(pair[:1],))
    sender.start()
    [frame] = all_of(pair[1], 1)
    sender.join()
    found = loaded(frame.data, None, frame.arrays)
    for name in ("large", "small", "part"):
        np.testing.assert_array_equal(found[name], value[name])
    assert torch.equal(found["rows"], torch.ones(2**16))
    found["large"][0, 0] = 7  # nobody else's memory
    assert large[0, 0] == 0
    del frame, arrays
    assert found["large"][0, 1] == 1


def test_several_get_the_same_and_the_file_is_closed(pair: Pair) -> None:
    another, end = socket.socketpair()
    with another, end:
        before = files()
        numbers = np.arange(1000)
        outgoing = Outgoing(b"x", [memoryview(numbers.tobytes())])
        outgoing.send_to([pair[0], another])
        assert files() == before
        for port in (pair[1], end):
            [frame] = all_of(port, 1)
            np.testing.assert_array_equal(np.frombuffer(frame.arrays[0], np.int64), numbers)
        del frame
        assert files() == before


def test_what_is_never_sent_leaves_no_file(pair: Pair) -> None:
    before = files()
    never = Outgoing(b"", [memoryview(bytes(10))])
    never.close()
    never.close()
    assert files() == before
    pair[1].close()
    with pytest.raises(OSError, match="Broken pipe"):
        Outgoing(b"", [memoryview(bytes(10))]).send_to(pair[:1])
    assert files() == before - 1


def test_the_end_is_told(pair: Pair) -> None:
    pair[0].close()
    assert received(pair[1], Frames()) is None
