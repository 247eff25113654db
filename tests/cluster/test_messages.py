"""Messages between processes: values come out as they went in, and rows in memory that both see."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.cluster.memory import Array
from genrt.cluster.messages import (
    LEAST_APART,
    AskedNumbers,
    dump_message,
    load_message,
    split_questions,
    unflattened,
)
from genrt.cluster.opening import _visible, environments, gpus_of
from genrt.cluster.worker import _fits
from genrt.errors import EngineUnsupported
from genrt.questions.completions import SampleRequest
from genrt.questions.contexts import Adapter, Limits
from genrt.questions.draws import DrawToken, PopulationDraw
from genrt.questions.reads import Candidates, ReadRequest, TopTokens
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.questions.sequences import Origins, Sequences

ROW = LogprobsRequest([1, 2, 3], Adapter("a", 2), weights_version=5)
REQUESTS: list[Request] = [
    ROW,
    LogprobsRequest([7]),
    ReadRequest(ROW, DrawToken(b"\x0f" * 4, 0.5, seed=3)),
    ReadRequest(ROW, DrawToken(nonce=8)),
    ReadRequest(ROW, TopTokens(3)),
    ReadRequest(ROW, Candidates((3, 1), 0.5)),
    ScoreRequest(ROW.packed, 1, Adapter("a", 2), 5, "greedy"),
    ScoreRequest(ROW.packed, 2, temperature=0.5),
    SampleRequest((1, 2), 3, seed=1),
]


def population(origins: Origins | None = None) -> PopulationDraw:
    contexts = Sequences.of(Limits(100, 100), [[1, 2], [3], [4, 5, 6]]).contexts(
        np.array([2, 0, 2])
    )
    return PopulationDraw(contexts, None, None, 1.0, np.arange(3, dtype=np.uint64), origins, 4)


def _is_flat(request: Request) -> bool:
    """Whether it is a row or a draw, of which there are mostly many."""
    return isinstance(request, LogprobsRequest) or isinstance(
        getattr(request, "wanted", None), DrawToken
    )


def test_requests_come_out_equal_whatever_their_kind() -> None:
    pairs = list(enumerate(REQUESTS))
    found = dict(unflattened(*load_message(dump_message(split_questions(pairs)))))
    assert found == dict(pairs)
    assert load_message(dump_message(REQUESTS)) == REQUESTS
    many = [*enumerate(REQUESTS * (LEAST_APART // 16))]
    arrays: list[Array] = []
    data = dump_message(split_questions(many), apart=arrays)
    assert len(arrays) == 2
    assert unflattened(*load_message(data, None, [each for [each] in arrays])) == [
        *[each for each in many if type(each[1]) is LogprobsRequest],
        *[each for each in many if isinstance(getattr(each[1], "wanted", None), DrawToken)],
        *[each for each in many if not _is_flat(each[1])],
    ]
    assert [each.weights_version for each in found.values()] == [
        each.weights_version for each in REQUESTS
    ]


def test_the_question_of_a_population_is_the_same_one_at_the_other_end() -> None:
    numbers, table = AskedNumbers(), dict[int, Any]()
    first = population()
    one = load_message(dump_message(first, numbers.of), table)
    goes_on = population(Origins((first.handle,), np.arange(3), first.contexts.lengths))
    two = load_message(dump_message(goes_on, numbers.of), table)
    assert two.origins.handles == (one.handle,)
    assert two.handle is not one.handle
    assert [two.contexts.packed(n) for n in range(3)] == [
        goes_on.contexts.packed(n) for n in range(3)
    ]
    assert two.weights_version == 4
    number = numbers.of(first.handle)
    del first, goes_on
    gc.collect()
    assert number in numbers.gone


def test_what_was_loaded_is_gone_with_its_last_user() -> None:
    """Not only once the collector comes: its memory is wanted for the next message."""
    first = population()
    goes_on = population(Origins((first.handle,), np.arange(3), first.contexts.lengths))
    data, table = dump_message(goes_on, AskedNumbers().of), dict[int, Any]()
    gc.collect()
    gc.disable()
    try:
        found = load_message(data, table)
        tokens = weakref.ref(found.contexts.table)
        del found
        assert tokens() is None
    finally:
        gc.enable()


def test_only_rows_of_one_device_travel_together() -> None:
    """A read of all tokens is on the host, a row beside it on the GPU."""
    read, row = torch.zeros(5000), torch.zeros(5000, device="meta")
    assert _fits(read, [])
    assert _fits(read, [read])
    assert not _fits(row, [read])
    assert not _fits(read[:4999], [read])


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ("3,5", ["3", "5"]),
        ("GPU-x", ["GPU-x"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("NoDevFiles", []),
    ],
)
def test_gpus_are_those_that_cuda_sees(
    monkeypatch: pytest.MonkeyPatch, chosen: str, found: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert _visible() == found


def test_gpus_are_dealt_out_evenly() -> None:
    assert environments(3, [], 1) == [{}, {}, {}]
    dealt = environments(2, ["0", "1", "GPU-x", "3"], 2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in dealt] == ["0,1", "GPU-x,3"]
    shared = environments(3, ["0", "1"], 1)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shared] == ["0", "1", "0"]
    assert gpus_of({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}) == 6
    assert gpus_of({}) == 1


@pytest.mark.parametrize(
    ("replicas", "visible", "gpus"), [(2, "0,1", 2), (1, "GPU-x", 2), (2, "4,5,6", 2)]
)
def test_replicas_of_several_gpus_do_not_share_them(
    monkeypatch: pytest.MonkeyPatch, replicas: int, visible: str, gpus: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    needed = rf"{replicas} x {gpus} GPUs .*{visible.replace(',', ', ')}"
    with pytest.raises(EngineUnsupported, match=needed):
        genrt.load(replicas=replicas, engine_options={"tensor_parallel_size": gpus})
