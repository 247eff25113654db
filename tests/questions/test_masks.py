"""masks.py: every form of a mask says the same; what could say two things, or nothing, is refused."""

from __future__ import annotations

import array
import collections
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.errors import InvalidRequest
from genrt.questions.masks import packed_mask, packed_masks

V = 41  # no multiple of 32, nor of 8


def words_of(bits: np.ndarray) -> np.ndarray:
    return np.packbits(np.pad(bits, (0, -len(bits) % 32)), bitorder="little").view(np.int32)


def wide(values: np.ndarray) -> torch.Tensor:
    """The values as every other entry of a longer tensor."""
    return torch.from_numpy(values.copy()).repeat_interleave(2)[::2]


FORMS: list[Callable[[np.ndarray], Any]] = [
    lambda bits: torch.from_numpy(bits.copy()),
    wide,
    lambda bits: bits[::-1][::-1],
    lambda bits: np.repeat(bits, 3)[::3],
    words_of,
    lambda bits: torch.from_numpy(words_of(bits)),
    lambda bits: wide(words_of(bits)),
    lambda bits: words_of(bits).astype(">i4"),
    lambda bits: np.flatnonzero(bits),
    lambda bits: np.flatnonzero(bits).astype(">i8"),
    lambda bits: torch.from_numpy(np.flatnonzero(bits)),
    lambda bits: np.flatnonzero(bits).tolist(),
    lambda bits: tuple(np.flatnonzero(bits)),
    lambda bits: list(torch.from_numpy(np.flatnonzero(bits))),
    lambda bits: set(np.flatnonzero(bits).tolist()),
    lambda bits: frozenset(np.flatnonzero(bits)),
    lambda bits: dict.fromkeys(np.flatnonzero(bits).tolist()).keys(),
    lambda bits: array.array("h", np.flatnonzero(bits).tolist()),
    lambda bits: collections.deque(np.flatnonzero(bits).tolist()),
]


@given(st.integers(1, 130).flatmap(lambda n: st.lists(st.booleans(), min_size=n, max_size=n)))
def test_every_form_of_a_mask_is_the_same_bits(allowed: list[bool]) -> None:
    bits = np.array(allowed)
    first = packed_mask(torch.from_numpy(bits), len(bits))
    assert len(first) == 4 * -(-len(bits) // 32)
    assert np.unpackbits(np.frombuffer(first, np.uint8), bitorder="little")[
        : len(bits)
    ].tolist() == (allowed)
    for form in FORMS:
        assert packed_mask(form(bits), len(bits)) == first


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 41, 64, 100])
def test_packed_masks_are_words_with_nothing_beyond_the_vocabulary(vocab_size: int) -> None:
    words = -(-vocab_size // 32)
    ones = np.full(words, -1, dtype=np.int32)
    full = packed_mask(ones, vocab_size)
    assert len(full) == 4 * words
    assert int.from_bytes(full, "little") == 2**vocab_size - 1
    strided = torch.from_numpy(np.stack([ones, 0 * ones], axis=1).copy())[:, 0]
    for same in (strided, torch.ones(vocab_size, dtype=torch.bool), range(vocab_size)):
        assert packed_mask(same, vocab_size) == full


FLAG_FORMS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    lambda flags: array.array("b", flags),
    lambda flags: [np.int64(flag) for flag in flags],
    *(lambda flags, dtype=dtype: np.array(flags, dtype) for dtype in "bBhHiIlLqQefdO"),
    *(
        lambda flags, dtype=dtype: torch.tensor(flags, dtype=dtype)
        for dtype in (
            *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
            *(torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32),
        )
    ),
]


@pytest.mark.parametrize("form", FLAG_FORMS)
@settings(max_examples=10)
@given(flags=st.lists(st.integers(0, 1), min_size=V, max_size=V))
def test_flags_for_each_token_are_refused_and_what_to_give_is_said(
    form: Callable[[list[int]], Any], flags: list[int]
) -> None:
    """They used to allow the tokens 0 and 1, whatever they said."""
    advice = r"give bool \[41\], packed int32 \[2\], or token ids as a list or int64"
    with pytest.raises(InvalidRequest, match=advice):
        packed_mask(form(flags), V)


@given(st.permutations(range(9)), st.lists(st.integers(0, 8), max_size=20))
def test_token_ids_are_taken_in_any_order_and_as_often_as_they_come(
    every: list[int], some: list[int]
) -> None:
    """Also as many as the vocabulary has, unless zeros and ones repeat."""
    assert packed_mask(every, 9) == packed_mask(np.ones(9, dtype=np.bool_), 9)
    if not (len({*some}) < len(some) and max(some) <= 1):
        assert packed_mask(some, 9) == packed_mask(set(some), 9)


def test_a_vocabulary_of_two_tokens_can_be_listed() -> None:
    assert packed_mask([0, 1], 2) == packed_mask([1, 0], 2) == packed_mask(np.ones(2, np.bool_), 2)
    assert packed_mask([0], 1) == packed_mask(np.ones(1, np.bool_), 1)
    # Zeros and ones that repeat are flags, for a vocabulary of any length.
    for flags, vocab_size in (([0, 0], 2), ([1, 1], 2), ([0, 1] * 2, V), ([0, 1] * V, V)):
        with pytest.raises(InvalidRequest, match=f"{len(flags)} entries, all of them 0 or 1"):
            packed_mask(flags, vocab_size)


masked: Any = np.ma.array
"""Not annotated by NumPy."""


class State:
    """A constraint's state."""

    def mask(self) -> torch.Tensor:
        return torch.arange(V) % 3 == 1

    def advance(self, token_id: int) -> None: ...


class CheckedState(State):
    def check(self, token_ids: object) -> None: ...


BITS = torch.ones(V, dtype=torch.bool)
FLOATS = torch.ones(V)
METAS = [(V, torch.bool), (2, torch.int32), (3, torch.int64)]
WRONG: list[tuple[Any, str]] = [
    (BITS.to_sparse(), r"torch.sparse_coo; give a dense one"),
    (torch.nested.nested_tensor([BITS], layout=torch.jagged), "bool of shape"),
    *((torch.ones(n, dtype=kind, device="meta"), "holds no numbers") for n, kind in METAS),
    (FLOATS, r"mask is torch.float32 \[41\].*of numbers that say.*mask != 0"),
    (BITS[None], r"bool of shape \[1, 41\]"),
    (BITS[:-1], r"bool of shape \[40\]"),
    (torch.zeros(V, dtype=torch.int32), r"packed int32 of shape \[41\]"),
    (torch.tensor(3), r"flat.*shape \[\]"),
    (torch.arange(3)[:, None], r"flat.*shape \[3, 1\]: give one row"),
    (torch.tensor([V]), "from 0 to 40"),
    (torch.tensor([-1]), "from 0 to 40"),
    (np.array([True] * V, dtype=object), "mask is object"),
    (np.zeros(V, dtype=[("a", "?")]), "mask is"),
    *((masked(values), "masked array") for values in (np.ones(V, np.bool_), np.arange(3))),
    (np.packbits(np.ones(V, np.bool_)), r"mask is uint8 \[6\]"),
    (words_of(np.ones(V, np.bool_)).view(np.uint32), r"mask is uint32 \[2\]"),
    (np.bool_(True), "got bool"),
    ("text", r"got str; for text, give lm.encode\(text\)"),
    *(
        (flags, "sequence of bool")
        for flags in ([True, 3], {True}, [np.True_] * V, [torch.tensor(True)] * V, [*BITS])
    ),
    ([1.0], "there is a float"),
    (CheckedState(), r"state that checks single tokens.*await abitmasks"),
]


def test_a_state_stands_for_its_mask() -> None:
    assert packed_mask(State(), V) == packed_mask(State().mask(), V)


@pytest.mark.promise(number=29)
@pytest.mark.parametrize(("mask", "message"), WRONG)
def test_what_is_no_mask_is_refused_with_what_to_give(mask: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        packed_mask(mask, V)


@pytest.mark.parametrize("empty", [[], (), set(), torch.tensor([]), np.array([]), range(0)])
def test_no_token_may_be_allowed(empty: Any) -> None:
    assert packed_mask(empty, V) == packed_mask(~BITS, V) == bytes(8)


MATRICES: list[Any] = [
    torch.ones(2, V, dtype=torch.bool),
    torch.ones(V, 2, dtype=torch.bool).T,
    np.full((2, 2), -1, np.int32),
    np.full((2, 2), -1, ">i4"),
    torch.arange(V).expand(2, V),
    [BITS, range(V)],
    (None, BITS),
]


@pytest.mark.parametrize("masks", MATRICES)
def test_a_matrix_or_a_sequence_is_a_mask_for_each_context(masks: Any) -> None:
    packed = packed_masks(masks, 2, V)
    assert packed is not None
    assert [each.tobytes() for each in packed[1:]] == [packed_mask(BITS, V)]


@settings(max_examples=50)
@given(st.integers(1, 100), st.integers(0, 5), st.randoms(use_true_random=False))
def test_masks_of_many_are_packed_as_each_of_them(
    vocab_size: int, count: int, chance: random.Random
) -> None:
    words = -(-vocab_size // 32)
    drawn = [[chance.random() < 0.5 for _ in range(vocab_size)] for _ in range(count)]
    flags = torch.tensor(drawn).bool().reshape(count, vocab_size)
    numbers = [[chance.randint(-(2**31), 2**31 - 1) for _ in range(words)] for _ in range(count)]
    bits = torch.tensor(numbers, dtype=torch.int32).reshape(count, words)
    one = torch.arange(vocab_size) % 3 == 0
    mixed = [chance.choice([None, one, [0], bits[0]]) for _ in range(count)]
    forms: list[Any] = [flags, bits, flags.numpy(), bits.numpy(), bits.T.contiguous().T, mixed]
    for masks in [*forms, one.expand(count, -1), [*flags], np.asfortranarray(flags.numpy())]:
        packed = packed_masks(masks, count, vocab_size)
        everything = b"\xff" * 4 * words
        each = [everything if m is None else packed_mask(m, vocab_size) for m in masks]
        if packed is None:
            assert all(m is None for m in masks)
        else:
            assert [row.tobytes() for row in packed] == each
    assert packed_masks(None, count, vocab_size) is None
    assert packed_masks([None] * count, count, vocab_size) is None
