"""Frames on a socket: whole however they come apart, with arrays that nobody copies, and no file left."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from genrt.cluster import memory as memory_module
from genrt.cluster.frames import Frame, Frames, Outgoing, received
from genrt.cluster.memory import Array, Memory, ReceivedPieces
from genrt.cluster.messages import LEAST_APART, dump_message, load_message, outgoing

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def in_parts(arrays: Sequence[np.ndarray]) -> list[Array]:
    """The arrays as bytes, each in two parts."""
    halves = [(each.tobytes(), each.nbytes // 2) for each in arrays]
    return [[memoryview(data)[:half], memoryview(data)[half:]] for data, half in halves]


def all_of(port: socket.socket, count: int, frames: Frames | None = None) -> list[Frame]:
    """Receive so many frames."""
    frames, found = frames or Frames(), list[Frame]()
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
        memory = Memory()
        frames = [
            Outgoing(text, in_parts(arrays), memory)
            for text, arrays in zip(texts, sent, strict=True)
        ]

        def send() -> None:
            for each in frames:
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
    del found, frame, memory
    assert files() == before


def test_values_have_their_arrays_apart(pair: Pair) -> None:
    large = np.arange(LEAST_APART, dtype=np.int64).reshape(2, -1)
    value = {
        "large": large,
        "small": large[:, :3],
        "part": large[:, ::2],
        "rows": torch.ones(2**16),
    }
    arrays: list[Array] = []
    data = dump_message(value, apart=arrays)
    assert [each.nbytes for [each] in arrays] == [large.nbytes, 4 * 2**16]
    assert len(data) < large.nbytes  # of which one half is in it, as it is not in one piece
    frame = Outgoing(data, arrays, Memory())
    sender = threading.Thread(target=frame.send_to, args=(pair[:1],))
    sender.start()
    [came] = all_of(pair[1], 1)
    sender.join()
    found = load_message(came.data, None, came.arrays)
    for name in ("large", "small", "part"):
        np.testing.assert_array_equal(found[name], value[name])
    assert torch.equal(found["rows"], torch.ones(2**16))
    found["large"][0, 0] = 7  # nobody else's memory
    assert large[0, 0] == 0
    del came, arrays
    assert found["large"][0, 1] == 1


def test_several_get_the_same_and_the_file_is_closed(pair: Pair) -> None:
    another, end = socket.socketpair()
    with another, end:
        before = files()
        memory, numbers = Memory(2), np.arange(1000)
        receivers = [(Frames(number), port) for number, port in enumerate((pair[1], end))]
        for start in (0, 7):  # the second time in the same memory, whose file does not travel again
            Outgoing(b"x", in_parts([numbers + start]), memory).send_to([pair[0], another])
            for frames, port in receivers:
                [frame] = all_of(port, 1, frames)
                found = np.frombuffer(frame.arrays[0], np.int64)
                np.testing.assert_array_equal(found, numbers + start)
                del frame, found
            assert files() == before + 3
        del memory, receivers, frames
        assert files() == before


def test_what_is_never_sent_leaves_no_file(pair: Pair) -> None:
    before, memory = files(), Memory()
    never = Outgoing(b"", in_parts([np.arange(10)]), memory)
    never.close()
    never.close()
    pair[1].close()
    with pytest.raises(OSError, match="Broken pipe"):
        Outgoing(b"", in_parts([np.arange(10)]), memory).send_to(pair[:1])
    del memory
    assert files() == before - 1


def test_rows_are_read_in_place_and_their_memory_is_used_again_once_they_are_gone(
    pair: Pair,
) -> None:
    memory, frames = Memory(), Frames()
    rows = [torch.randn(5000) for _ in range(3)]
    made = 0

    def sent(number: float) -> torch.Tensor:
        nonlocal made
        frame = outgoing(None, memory, rows=[row + number for row in rows])
        made += frame._file is not None
        frame.send_to(pair[:1])
        [came] = all_of(pair[1], 1, frames)
        return torch.frombuffer(came.arrays[-1], dtype=torch.float32).view(3, -1)

    found = sent(0.0)
    assert torch.equal(found, torch.stack(rows))
    last = found[2]
    del found
    gc.collect()
    other = sent(1.0)
    assert torch.equal(last, rows[2])
    assert made == 2
    del last
    gc.collect()
    assert torch.equal(sent(2.0), torch.stack(rows) + 2)
    assert made == 2
    assert torch.equal(other, torch.stack(rows) + 1)


def test_a_forked_child_frees_nothing(pair: Pair) -> None:
    memory, kept = Memory(), ReceivedPieces()
    piece, file, sizes = memory.put(in_parts([np.arange(100)]))
    assert file is not None
    kept.add(piece, file)
    arrays = kept.arrays(piece, sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which the child does without
        child = os.fork()
    if not child:
        signal.alarm(60)  # whatever lock another thread of the parent held stays locked here
        del arrays
        os._exit(gc.collect() * 0)
    assert os.waitpid(child, 0)[1] == 0
    assert memory.put(in_parts([np.arange(100) + 1])).piece != piece
    np.testing.assert_array_equal(np.frombuffer(arrays[0], np.int64), np.arange(100))


class Sharing(RuleBasedStateMachine):
    """A sender and its receivers, each of which keeps some of what comes, for as long as it likes."""

    @initialize(receivers=st.integers(1, 3), most=st.sampled_from([0, 2**14, 2**20]))
    def begin(self, receivers: int, most: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(memory_module, "MOST_KEPT", most)
        self.before = files()
        self.memory = Memory(receivers)
        self.receivers = [ReceivedPieces(number) for number in range(receivers)]
        self.held: list[tuple[int, memoryview, bytes]] = []
        self.count = 0

    @rule(sizes=st.lists(st.sampled_from([0, 1, 64, 5000, 20_000]), min_size=1, max_size=3))
    def send(self, sizes: list[int]) -> None:
        self.count += 1
        arrays = [np.full(size, self.count % 256, np.uint8) for size in sizes]
        piece, file, told = self.memory.put(in_parts(arrays))
        assert told == sizes
        for number, receiver in enumerate(self.receivers):
            if file is not None:
                receiver.add(piece, os.dup(file))
            came = receiver.arrays(piece, told)
            self.held += [(number, each, a.tobytes()) for each, a in zip(came, arrays, strict=True)]
        if file is not None:
            os.close(file)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.held:
            self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @rule()
    def leave_all(self) -> None:
        self.held.clear()

    @rule()
    def send_once_all_have_left(self) -> None:
        """What fits is free, and is taken."""
        self.held.clear()
        count = len(self.memory._pieces)
        self.send([1])
        assert len(self.memory._pieces) == max(1, count)

    @invariant()
    def everything_is_as_it_came(self) -> None:
        for _, array, data in getattr(self, "held", ()):
            assert bytes(array) == data

    @invariant()
    def little_is_kept(self) -> None:
        if hasattr(self, "memory"):
            pieces = self.memory._pieces
            assert len(pieces) <= memory_module.MOST_PIECES
            assert len({each.number for each in pieces}) == len(pieces)
            kept = sum(len(each.memory) for each in pieces)
            assert len(pieces) <= memory_module.LEAST_KEPT or kept <= memory_module.MOST_KEPT

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.held.clear()
            del self.memory, self.receivers
            assert files() == self.before
            self.patch.undo()


Sharing.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
TestSharing = Sharing.TestCase


def test_the_end_is_told(pair: Pair) -> None:
    pair[0].close()
    assert received(pair[1], Frames()) is None


class Driver:
    """What ``torch.cuda.cudart`` returns, without a GPU: notes what is registered."""

    def __init__(self, refuses: bool) -> None:
        self.registered: dict[int, int] = {}
        self._refuses = refuses

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        if not self._refuses:
            self.registered[address] = size
        return int(self._refuses)

    def launch(self, *_: object, **__: object) -> None:
        """Raise what the device was left with, as torch does."""
        raise RuntimeError("CUDA error: operation not supported")

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.mark.parametrize("refuses", [False, True])
def test_memory_that_a_gpu_writes_to_is_pinned_until_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    driver, pieces = Driver(refuses), memory_module.LEAST_KEPT
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch, "zeros", driver.launch)
    monkeypatch.setattr(memory_module, "MOST_KEPT", 0)
    memory, kept, arrays = Memory(), ReceivedPieces(), list[memoryview]()
    for number in range(pieces + 3):
        piece, file, sizes = memory.put([], [torch.full((1000,), float(number))] * 4)
        for _ in range(2):
            memory._pieces[-1].pin()
        assert file is not None
        kept.add(piece, file)
        arrays += kept.arrays(piece, sizes)
        assert len(memory._pieces) == min(number + 1, pieces)
        here = {each.address: len(each.memory) for each in memory._pieces}
        assert driver.registered == ({} if refuses else here)
    for number, rows in enumerate(arrays):
        assert torch.frombuffer(rows, dtype=torch.float32).tolist() == [number] * 4000
