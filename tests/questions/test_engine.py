"""What makes two questions one, and what an exception out of an engine means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from genrt.engines.protocol import failure
from genrt.errors import EngineDied, EngineFailed, GenrtError, NotFinite, OutOfMemory
from genrt.questions.arguments import Adapter, abbreviated
from genrt.questions.completions import SampleRequest
from genrt.questions.draws import DrawToken
from genrt.questions.reads import Candidates, HostRow, ReadRequest, TopTokens
from genrt.questions.rows import LogprobsRequest

ROW = LogprobsRequest((1, 2))

ADAPTER = Adapter("a", 1)
OPTIONS = {"temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.5, "seed": 8, "nonce": 9}
FIELDS: list[tuple[Callable[..., Any], Mapping[str, Any]]] = [
    (partial(Adapter, name="a", version=1), {"name": "b", "version": 2}),
    (partial(LogprobsRequest, token_ids=(1, 2)), {"token_ids": (1, 3), "adapter": ADAPTER}),
    (
        partial(SampleRequest, token_ids=(1, 2), max_tokens=3),
        {"token_ids": (2, 1), "max_tokens": 4, "adapter": ADAPTER}
        | {"stop_token_ids": frozenset({5}), **OPTIONS},
    ),
    (DrawToken, {"mask": b"\3\0\0\0", "temperature": 0.5, "seed": 8, "nonce": 9}),
    (partial(TopTokens, k=1), {"k": 2}),
    (partial(Candidates, token_ids=(1, 2)), {"token_ids": (2, 1), "temperature": 2.0}),
    (
        partial(ReadRequest, row=ROW, wanted=HostRow()),
        {"row": LogprobsRequest((1, 2), ADAPTER), "wanted": TopTokens(1)},
    ),
]


@pytest.mark.parametrize(("make", "others"), FIELDS)
def test_every_part_of_a_question_is_part_of_its_key(
    make: Callable[..., Any], others: Mapping[str, Any]
) -> None:
    questions = [make(), *(make(**{name: other}) for name, other in others.items())]
    assert (make(), hash(make())) == (questions[0], hash(questions[0]))
    assert len(set(questions)) == len(questions)
    for number, question in enumerate(questions):
        assert [number] == [at for at, each in enumerate(questions) if each == question]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
        (MemoryError(), OutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 byte"), OutOfMemory),
        (torch.AcceleratorError("an illegal memory access was encountered"), EngineDied),
        (RuntimeError("boom"), EngineFailed),
        (ValueError("boom"), EngineFailed),
    ],
)
def test_an_exception_is_translated_by_what_can_be_done_about_it(
    error: Exception, kind: type[GenrtError]
) -> None:
    translated = failure(error, "the forward failed")
    assert type(translated) is kind
    assert translated.__cause__ is error
    assert str(translated) == f"the forward failed: {type(error).__name__}: {error}"
    own = NotFinite("NaN")
    assert failure(own) is own


def test_messages_show_little_of_a_long_prompt() -> None:
    assert abbreviated((1, 2, 3, 4)) == "[1, 2, 3, 4]"
    assert abbreviated((1, 2, 3, 4, 5)) == "[… 3 tokens, 4, 5]"
    for request in (LogprobsRequest(range(7)), SampleRequest(tuple(range(7)), 3)):
        assert "[… 5 tokens, 5, 6]" in repr(request)
