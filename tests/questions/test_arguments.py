"""Arguments that are taken, and refusals whose advice ``test_every_argument.py`` does not show."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding

from genrt.errors import ContextTooLong, InvalidRequest
from genrt.questions.arguments import Adapter, check_contexts
from genrt.questions.completions import SampleRequest, sample_requests
from genrt.questions.rows import Limits, row_request

masked: Any = np.ma.array
"""Not annotated by NumPy."""


class Encoding:
    """What the tokenizers library returns for a text."""

    ids = (1, 2)
    attention_mask = (1, 1)


LIMITS = Limits(vocab_size=10, max_model_len=8)


class Token:
    """Stands for a token id where an index is wanted, and can't be added."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __index__(self) -> int:
        return self.token_id


SAME: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    lambda ids: range(ids[0], ids[-1] + 1),
    lambda ids: [np.int64(i) for i in ids],
    lambda ids: [torch.tensor(i) for i in ids],
    lambda ids: [Token(i) for i in ids],
    lambda ids: (*ids[:-1], np.int32(ids[-1])),
    lambda ids: array.array("q", ids),
    *(
        lambda ids, dtype=dtype: np.array(ids, dtype)
        for dtype in ("int8", "uint8", "int32", "int64", "uint64")
    ),
    *(
        lambda ids, dtype=dtype: torch.tensor(ids, dtype=dtype)
        for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
    ),
    lambda ids: torch.tensor(ids).repeat_interleave(2)[::2],
    lambda ids: np.array(ids)[::-1][::-1],
]

BAD_IDS: list[tuple[Any, str]] = [
    ("text", r"got str; for text, give lm.encode\(text\)"),
    ([1, 2.0], "position 1 there is a float"),
    ([np.float32(1)], "position 0 there is a float32"),
    ([1, -1], "from 0 to 9, but at position 1 there is -1"),
    ([1, 10**30], "position 1 there is 10{30}"),
    ([10**5000], "there is an int of 16610 bits"),
    (np.array([1, 2]).astype(">i8")[::-1] - 3, "position 0 there is -1"),
    (np.array([True]), "got bool"),
    (np.array([1, 2], object), "got object"),
    (torch.tensor([1.0], dtype=torch.bfloat16), "got torch.bfloat16"),
    (torch.tensor([11]), "position 0 there is 11"),
    (torch.tensor([[1, 2]]), r"of shape \[1, 2\]: give one row of it"),
    (masked([1, 2], mask=[0, 1]), "a masked array"),
    (BatchEncoding({"input_ids": [1]}), r"got BatchEncoding; give its.*encoding\['input_ids'\]"),
    (Encoding(), "got Encoding; give its token ids, encoding.ids"),
]


@pytest.mark.parametrize("form", SAME)
def test_token_ids_of_any_form_are_one_tuple_of_int(form: Callable[[list[int]], Any]) -> None:
    ids = LIMITS.token_ids(form([3, 4, 5]))
    assert ids == (3, 4, 5)
    assert {type(token_id) for token_id in ids} == {int}


@pytest.mark.promise(number=12)
@pytest.mark.parametrize(("token_ids", "message"), BAD_IDS)
def test_bad_token_ids_are_refused_with_what_is_wrong(token_ids: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        LIMITS.token_ids(token_ids, name="these ids")
    assert type(caught.value) is InvalidRequest
    assert str(caught.value).startswith("these ids")


@pytest.mark.promise(number=12)
@given(st.lists(st.integers(-3, 13), min_size=1), st.sampled_from([list, np.array, torch.tensor]))
def test_the_vocabulary_is_the_bound(token_ids: list[int], form: Callable[[Any], Any]) -> None:
    if all(0 <= token_id < 10 for token_id in token_ids):
        assert LIMITS.token_ids(form(token_ids)) == tuple(token_ids)
    else:
        with pytest.raises(InvalidRequest, match="from 0 to 9"):
            LIMITS.token_ids(form(token_ids))


@pytest.mark.promise(number=13)
def test_a_context_may_be_as_long_as_the_model_takes() -> None:
    adapter = Adapter("a", 1)
    request = row_request(LIMITS, [1] * 8, adapter)
    assert (request.token_ids, request.adapter) == ((1,) * 8, adapter)
    with pytest.raises(ContextTooLong, match=r"9 tokens is over max_model_len=8.*max_model_len"):
        row_request(LIMITS, [1] * 9, None)


def made(length: int = 2, **options: Any) -> SampleRequest:
    given = {"max_tokens": 3, **options}
    [request] = sample_requests(LIMITS, [[1] * length], None, iter([77]), "sample", given)
    return request


def test_a_sample_request_holds_what_was_asked_in_plain_types() -> None:
    request = made(
        max_tokens=np.int32(4),
        stop_token_ids=torch.tensor([5, 5, 6]),
        temperature=np.float32(0.5),
        top_p=1,
        top_k=np.int64(3),
        min_p=np.float64(0.25),
        seed=np.uint8(9),
    )
    assert request == SampleRequest((1, 1), 4, frozenset({5, 6}), 0.5, 1.0, 3, 0.25, 9)
    names = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"]
    assert [type(getattr(request, name)) for name in names] == [int, float, float, int, float, int]


def test_only_undecided_samples_are_set_apart() -> None:
    assert made().nonce == 77
    assert made(seed=0).nonce is None
    assert made(temperature=0, seed=1) == made(temperature=0.0, seed=2), "greedy has no seed"


def test_context_and_new_tokens_fit_together() -> None:
    assert made(max_tokens=6).max_tokens == 6
    with pytest.raises(ContextTooLong, match="max_tokens can be 6 here"):
        made(max_tokens=7)
    for length in (8, 9):
        with pytest.raises(ContextTooLong, match="shorten the context"):
            made(length, max_tokens=1)


@pytest.mark.parametrize("contexts", [[], [[1], [2]], np.array([[1]]), torch.tensor([[1], [2]])])
def test_contexts_in_any_sequence_are_taken(contexts: Any) -> None:
    assert [list(context) for context in check_contexts(contexts)] == [[1], [2]][: len(contexts)]
