"""EngineOwner: an engine is described, given weights, paused and closed, whatever it is asked."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import Closed, InvalidRequest, UnknownAdapter
from genrt.lm import AsyncLM
from genrt.runtime.cache import RowCache
from genrt.runtime.owner import EngineOwner
from genrt.runtime.thread import EngineThread
from tests.scripted import PATIENCE_SECONDS

MODEL, OTHER = NGram.random(5, order=1, seed=1), NGram.random(5, order=1, seed=2)


class Opened:
    """An owner that asks nothing, and the engines that it has had."""

    def __init__(self) -> None:
        self.engines: list[ExactEngine] = []
        cache = RowCache(2**20)
        thread = EngineThread(self._open, cache)
        self.owner = EngineOwner(thread, cache, thread.opened.result(PATIENCE_SECONDS))

    def _open(self) -> ExactEngine:
        self.engines.append(ExactEngine(MODEL, max_model_len=16))
        self.engines[-1].tokenizer = None  # as of checkpoints without one
        return self.engines[-1]


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened()
    with opened.owner:
        yield opened


def test_it_tells_what_its_engine_is(opened: Opened) -> None:
    owner, [engine] = opened.owner, opened.engines
    assert (owner.vocab_size, owner.max_model_len) == (5, 16)
    assert (owner.max_batch_size, owner.device) == (engine.max_batch_size, engine.device)
    assert (owner.adapters, owner.weights_version) == ((), 0)
    assert repr(owner).startswith("EngineOwner(open, ExactEngine, vocab_size=5, max_model_len=16")
    assert owner.statistics().batcher.questions == owner.statistics().engine.rows == 0


def test_a_model_without_a_tokenizer_is_described_and_has_no_texts(opened: Opened) -> None:
    ways: list[Callable[[], Any]] = [
        lambda: opened.owner.tokenizer,
        lambda: opened.owner.byte_vocab,
        lambda: opened.owner.str_vocab,
        lambda: opened.owner.encode("a"),
        lambda: opened.owner.decode([1]),
    ]
    for way in ways:
        with pytest.raises(InvalidRequest, match="this model has no tokenizer"):
            way()


def test_it_pauses_takes_weights_and_goes_on_with_another_engine(opened: Opened) -> None:
    owner = opened.owner
    owner.pause_sync()
    assert owner.update_weights_sync({"table": OTHER.table}) == owner.weights_version == 1
    owner.resume()
    owner.restart()
    assert len(opened.engines) == 2
    assert owner.weights_version == 1
    with pytest.raises(UnknownAdapter):
        owner.remove_adapter("nobody")


def test_it_is_closed_once_and_for_all(opened: Opened) -> None:
    opened.owner.close()
    opened.owner.close()
    assert repr(opened.owner) == "EngineOwner(closed, ExactEngine, vocab_size=5)"
    with pytest.raises(Closed):
        opened.owner.update_weights_sync({"table": OTHER.table})


def test_it_equals_who_owns_the_same_thread_and_is_not_copied(opened: Opened) -> None:
    other = Opened()
    with other.owner:
        assert opened.owner != other.owner
        assert {opened.owner, opened.owner, other.owner} == {opened.owner, other.owner}
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            pickle.dumps(opened.owner)


def test_a_runtime_says_of_every_member_what_it_does_wherever_it_is_written() -> None:
    members = [name for name in dir(AsyncLM) if not name.startswith("_")]
    assert {"draw", "draw_sync", "pause", "pause_sync", "close", "device"} <= {*members}
    silent = [name for name in members if not inspect.getdoc(inspect.getattr_static(AsyncLM, name))]
    assert silent == []


def test_a_runtime_and_one_with_a_seed_of_its_own_have_one_engine() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        seeded = lm._of_seed(3)
        assert isinstance(seeded, EngineOwner)
        assert seeded == lm
        lm.close()
        with pytest.raises(Closed):
            seeded.draw_sync([1])
