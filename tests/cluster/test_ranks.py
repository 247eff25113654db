"""Ranks: what one engine is told the others repeat, in the same order; and what happens when they part.

The engines are exact here, as many as there are ranks, each behind what is sent between processes.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrt import loading
from genrt.cluster.ranks import (
    Follower,
    RankedEngine,
    Ranks,
    open_ranked,
)
from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import EngineStatistics, Finished
from genrt.engines.remote.flushes import FarEnd, HandleNumbers
from genrt.engines.vllm.rank import broadcast_from_rank0
from genrt.engines.weights import TensorsIn
from genrt.errors import EngineDied, EngineUnsupported, GenrtError, InvalidAdapter, InvalidRequest
from genrt.loading import load
from genrt.questions.arguments import Adapter
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.rows import Limits
from genrt.questions.scores import ScoreRequest
from genrt.questions.sequences import Origins, Sequences
from tests.scripted import logprobs, sample
from tests.waiting import until

A, B, C = logprobs(1), logprobs(2), logprobs(3)


class Recorded:
    """An engine that writes down what it is told, and ends at each step what was asked first."""

    vocab_size, max_model_len, max_batch_size = 1000, 1000, 8
    device = torch.device("cpu")
    tokenizer, keeps_residents, scores = None, True, True

    def __init__(self, refuses: str | None = None) -> None:
        self.told: list[Any] = []
        self.asked: dict[Any, None] = {}
        self.refuses = refuses
        self.steps = 0
        self.prefixes = self.weights = self
        self.asleep: frozenset[str] = frozenset()

    def _note(self, name: str, *arguments: Any) -> None:
        self.told.append((name, *arguments))
        if name == self.refuses:
            raise InvalidAdapter("it does not fit")

    def submit(self, requests: Any) -> None:
        self._note("submit", *requests)
        self.asked |= dict.fromkeys(requests)

    def continue_population(self, population: PopulationDraw) -> bool:
        self._note(
            "continue_population",
            *map(bytes, map(population.contexts.packed, range(len(population)))),
        )
        if len(population) > 2:
            return False
        self.asked[population] = None
        return True

    def settle(self, population: PopulationDraw) -> None:
        self._note("settle", len(population))

    def release(self, asked: Any) -> None:
        self._note("release", [each.count for each in asked])

    def step(self) -> list[Finished]:
        self.steps += 1
        self._note("step")
        if not self.asked:
            return []
        first = next(iter(self.asked))
        del self.asked[first]
        return [Finished(first, torch.zeros(7))]

    def cancel(self, requests: Any) -> None:
        self._note("cancel", len(requests))
        for each in requests:
            self.asked.pop(each, None)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(steps=self.steps, requests=len(self.asked))

    def close(self) -> None:
        self._note("close")

    def load(self, tensors: TensorsIn) -> None:
        self._note("load", *map(str, tensors.files))

    def expect(self, rows: Any, tokens: torch.Tensor, told: Any) -> None:
        if self.asked.keys() >= set(rows):
            request_ids = [str(each.token_ids[0]) for each in rows]
            self.speculate(request_ids, tokens, told(request_ids))

    def speculate(self, request_ids: list[str], tokens: torch.Tensor, share: Any) -> None:
        assert share is broadcast_from_rank0
        assert tokens.is_contiguous()
        assert tokens.dtype == torch.float64
        self._note("speculate", *request_ids, len(tokens))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self._note(name, *arguments)


class _Link:
    """A pipe to a rank, which does at once what it reads."""

    def __init__(self, engine: Any) -> None:
        self.answers: list[tuple[bool, str]] = []
        self.follower = Follower(engine, lambda *answer: self.answers.append(answer))

    def send(self, message: Any) -> None:
        self.follower.take(pickle.loads(pickle.dumps(message)))  # noqa: S301

    def recv(self) -> tuple[bool, str]:
        return self.answers.pop(0)


class Here(Ranks):
    """Other ranks in this process, behind the bytes of messages."""

    def __init__(self, *engines: Any) -> None:
        self.far, self._is_closed = FarEnd(HandleNumbers()), False
        links: Any = [_Link(each) for each in engines]
        self._links = [(each, each) for each in links]
        self.answers = [each.answers for each in links]
        self.followers = [each.follower for each in links]

    def part(self) -> None:
        self._is_closed = True

    def close(self) -> None:
        self._links.clear()


def ranked(*others: Any) -> tuple[RankedEngine, Recorded]:
    first = Recorded()
    return RankedEngine(first, Here(*others)), first


def draws(count: int, origins: Origins | None = None) -> PopulationDraw:
    sequences = Sequences.of(Limits(7, 100), [[n + 1, 2] for n in range(count)])
    places = np.arange(count)
    seeds = np.arange(count, dtype=np.uint64)
    return PopulationDraw(sequences.contexts(places), None, None, 1.0, seeds, origins)


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_do_the_same_in_the_same_order(seed: int) -> None:
    rng = random.Random(seed)
    others = Recorded(), Recorded()
    engine, first = ranked(*others)
    populations: list[PopulationDraw] = []
    for number in range(1, 201):
        kind = rng.choice(
            ["submit", "step", "continue_population", "cancel", "settle", "release", "keep"]
        )
        if kind == "submit":
            rows = [logprobs(number, n) for n in range(rng.randrange(4))]
            score = ScoreRequest(logprobs(1, 2, 3, number).packed, 1)
            flush: list[Request] = [*rows, score, sample(1, number, seed=number)]
            rng.shuffle(flush)
            engine.submit(flush)
        elif kind == "step":
            engine.step()
        elif kind == "continue_population":
            populations.append(draws(rng.randrange(1, 4)))
            assert engine.continue_population(populations[-1]) == (len(populations[-1]) < 3)
        elif kind == "cancel":
            engine.cancel(rng.sample([*first.asked], min(len(first.asked), rng.randrange(3))))
        elif populations and kind == "settle":
            engine.settle(populations[-1])
        elif populations and kind == "release":
            engine.release([populations.pop(0).handle])
        elif kind == "keep":
            engine.prefixes.keep(logprobs(number))
        for other in others:
            assert other.told == first.told
            assert len(other.asked) == len(first.asked)
    assert first.steps


def test_a_step_that_runs_ahead_does_so_in_every_rank() -> None:
    others = Recorded(), Recorded()
    engine, first = ranked(*others)
    rows = [logprobs(number) for number in (3, 4)]
    tokens = torch.zeros(2, 3, dtype=torch.float64)[:, 0]
    engine.expect(rows, tokens)  # of which nothing is known
    assert not any(each.told for each in (first, *others))
    engine.submit(rows)
    engine.expect(rows, tokens)
    for each in (first, *others):
        assert each.told[-1] == ("speculate", "3", "4", 2)


def test_what_goes_on_step_after_step_is_the_same_in_every_rank() -> None:
    """Also of sequences that were resampled, of which only the last tokens are told."""
    others, first = (Recorded(), Recorded()), Recorded()
    engine = RankedEngine(first, ranks := Here(*others))
    sequences, chosen = Sequences.of(Limits(7, 200), [[1, 2], [3, 4]]), random.Random(0)
    origins, places, small = Origins.none(2), np.arange(2), 0
    for _ in range(100):
        contexts = sequences.contexts(places)
        seeds = np.zeros(2, np.uint64)
        goes_on = origins if origins.can_continue(contexts.lengths) else None
        draw = PopulationDraw(contexts, None, None, 1.0, seeds, goes_on)
        small += bool(origins.handles) and origins.handles[0] in ranks.far.held
        engine.continue_population(draw)
        engine.step()
        origins = origins.after([draw.handle], places, contexts.lengths)
        ancestors = np.array([chosen.randrange(2), chosen.randrange(2)])
        sequences, origins = sequences.take(ancestors), origins.take(ancestors)
        sequences.append(np.array([chosen.randrange(7), chosen.randrange(7)]))
    for other in others:
        assert other.told == first.told
    assert small > 90
    assert all(len(each.near.handles) <= 3 for each in ranks.followers)


@pytest.mark.parametrize("refusing", [(True, True), (True, False), (False, True), (False, False)])
def test_an_adapter_is_in_all_ranks_or_in_none_or_they_end(refusing: tuple[bool, bool]) -> None:
    here, there = ("add_adapter" if each else None for each in refusing)
    first = Recorded(refuses=here)
    engine = RankedEngine(first, Here(Recorded(refuses=there)))
    adapter, path = Adapter("a", 1), Path("somewhere")
    if refusing == (False, False):
        engine.add_adapter(adapter, path)
        return
    with pytest.raises(InvalidAdapter if all(refusing) else EngineDied):
        engine.add_adapter(adapter, path)


def test_weights_are_read_by_every_rank() -> None:
    other = Recorded()
    engine, first = ranked(other)
    engine.weights.begin()
    engine.weights.load(TensorsIn([Path("a"), Path("b")]))
    engine.weights.finish()
    assert first.told == other.told == [("begin",), ("load", "a", "b"), ("finish",)]


class Ended(ExactEngine):
    """An engine that writes down its completions."""

    def __init__(self, model: NGram) -> None:
        super().__init__(model)
        self.completions: list[Any] = []

    def step(self) -> list[Finished]:
        ends = super().step()
        for each in ends:
            text: Any = each.result
            self.completions.append((text.token_ids, text.logprobs, text.weights_spans))
        return ends


async def test_texts_go_on_with_new_weights_in_every_rank() -> None:
    """All ranks draw the same tokens, each of the same version."""
    model, other = (NGram.random(11, order=2, seed=seed, eos_token_id=0) for seed in range(2))
    ranks = [Ended(model) for _ in range(2)]
    engine = RankedEngine(ranks[0], Here(*ranks[1:]))
    options: Any = {"max_tokens": 60, "ignore_eos": True, "logprobs": 0}
    async with load(engine=lambda: engine) as lm:
        texts = [asyncio.ensure_future(lm.generate([n], seed=n, **options)) for n in range(4)]
        for table in (other.table, model.table):
            start = lm.statistics().engine.steps
            await until(lambda start=start: lm.statistics().engine.steps > start + 3, lm)  # type: ignore[misc]
            await lm.update_weights({"table": table}, pending="continue")
        found = await asyncio.gather(*texts)
    for text in found:
        context = [*text.prompt_token_ids, *text.token_ids]
        assert [each.version for each in text.weights_spans] == [0, 1, 2]
        for version, start, end in text.weights_spans:
            for place in range(start, end):
                row = (other if version == 1 else model).row(context[: place + 1])
                drawn = float(row[text.token_ids[place]])
                assert text.logprobs[place] == pytest.approx(drawn, abs=1e-5)
    assert ranks[1].completions == ranks[0].completions
    assert len(ranks[0].completions) == 4


def test_ranks_that_have_parted_end_before_they_wait_for_each_other() -> None:
    other = Recorded()
    engine, _ = ranked(other)
    engine.submit([A, B])
    engine.step()
    other.steps += 1
    with pytest.raises(RuntimeError, match="parted"):
        engine.step()


def test_a_step_that_fails_is_the_end_of_all() -> None:
    engine = RankedEngine(Recorded(refuses="step"), Here(Recorded()))
    engine.submit([A])
    with pytest.raises(EngineDied, match="every rank"):
        engine.step()


def test_a_rank_dies_with_its_parent_whatever_it_is_at() -> None:
    """Also where it waits for another rank in native code, for which a process that sleeps stands."""
    code = (
        "import os, subprocess, sys\n"
        "rank = ('from genrt.cluster.ranks import die_with; import socket, threading; '\n"
        "        'die_with(%d); own = socket.socket(fileno={fd}); own.send(b\"up\"); '\n"
        "        'threading.Event().wait()' % os.getpid())\n"
        "subprocess.Popen([sys.executable, '-c', rank], pass_fds=[{fd}])\n"
        "sys.stdin.read()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ours, theirs = socket.socketpair()  # theirs is open as long as the rank lives
    with theirs:
        fd = theirs.fileno()
        parent = subprocess.Popen(
            [sys.executable, "-c", code.format(fd=fd)], stdin=subprocess.PIPE, pass_fds=[fd]
        )
    ours.settimeout(300)
    assert ours.recv(2) == b"up"
    parent.communicate(timeout=300)
    assert parent.returncode == -9
    assert ours.recv(1) == b""
    ours.close()


@pytest.mark.parametrize(
    ("options", "given", "opened_by"),
    [
        ({}, {}, "ranks"),
        ({"async_scheduling": False, "pipeline_parallel_size": 1}, {}, "ranks"),
        ({"enable_expert_parallel": True, "enable_lora": True}, {"replicas": 2}, "ranks"),
        ({"distributed_executor_backend": "external_launcher"}, {"residency": False}, "ranks"),
        ({}, {"residency": False}, "vLLM"),
        ({}, {"engine": "transformers"}, "vLLM"),
        ({"distributed_executor_backend": "mp"}, {}, "vLLM"),
        ({"pipeline_parallel_size": 2}, {}, "vLLM"),
        ({"nnodes": 2}, {}, "vLLM"),
        ({"async_scheduling": True}, {}, "vLLM"),
        ({"scheduler_cls": "mine.Scheduler"}, {}, "vLLM"),
        ({"weight_transfer_config": {"backend": "nccl"}}, {}, "vLLM"),
        ({"tensor_parallel_size": 1}, {}, "vLLM"),
        ({"tensor_parallel_size": "2"}, {}, "vLLM"),
        ({}, {"replicas": 2, "cluster": "local"}, "ranks"),
    ],
)
def test_tensor_parallelism_alone_is_by_ranks(
    monkeypatch: pytest.MonkeyPatch, options: Any, given: Any, opened_by: str
) -> None:
    def opened(make: Any, *_: Any, **__: Any) -> Any:
        engine = make.keywords["engine"]
        raise EngineUnsupported("ranks" if engine.func is open_ranked else "vLLM")

    def by_vllm(*_: Any, **__: Any) -> Any:
        raise EngineUnsupported("vLLM")

    monkeypatch.setattr(loading, "Actors", opened)
    monkeypatch.setattr(loading, "open_engine", by_vllm)
    with pytest.raises(EngineUnsupported, match=f"^{opened_by}$"):
        load(engine_options={"tensor_parallel_size": 2} | options, **given)


def test_a_refusal_everywhere_is_raised_as_it_is_here() -> None:
    ranks = Here(Recorded())
    ranks.answers[0].append((False, "no"))
    own: GenrtError = InvalidRequest("no, here")
    with pytest.raises(InvalidRequest, match="no, here"):
        ranks.agreed(own)
    ranks.answers[0].append((False, "out of memory"))
    with pytest.raises(EngineDied, match="out of memory"):
        ranks.agreed()
