"""rows.py: the same numbers as stacking and cloning, in the storage that is promised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from genrt.questions.scores import score_entries
from genrt.tokens.rows import (
    AsyncHostCopy,
    gather_rows,
    log_sums,
    normalised,
    separate_copies,
    stacked,
)
from genrt.tokens.sampling import draw, seeded_uniforms, truncate, weighed


def step(count: int = 6, width: int = 5) -> Tensor:
    """A step's rows: each entry is another number."""
    return torch.arange(float(count * width)).view(count, width)


def padded(count: int = 6, width: int = 5) -> Tensor:
    """A step whose logits were wider than the vocabulary, as padded ones are."""
    return step(count, width + 3)[:, :width]


def inferred() -> Tensor:
    with torch.inference_mode():
        return step() + 0.5


@pytest.mark.parametrize("shape", [(128_256,), (3, 128_256), (40, 999), (2, 3, 7), (1, 1), (0, 5)])
def test_rows_sum_to_one_up_to_the_rounding_of_their_entries(shape: tuple[int, ...]) -> None:
    logits = 20 + 5 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    for kind in (torch.float32, torch.bfloat16):
        rows = normalised(logits.to(kind))
        assert rows.dtype == torch.float32
        assert rows.shape == shape
        assert bool((rows.double().logsumexp(-1).abs() <= 3e-7).all())
        torch.testing.assert_close(rows, logits.to(kind).double().log_softmax(-1).float())
    assert bool((logits == before).all())


def test_what_is_not_finite_stays_in_normalised_rows() -> None:
    some, none = [0.0, -torch.inf, 0.0], [-torch.inf] * 3
    rows = normalised(torch.tensor([some, none, [0.0, torch.nan, 0.0], [0.0, torch.inf, 0.0]]))
    torch.testing.assert_close(rows[0].exp(), torch.tensor([0.5, 0.0, 0.5]))
    assert bool(rows[1:].isnan().all())


STEPS: list[Callable[[], Tensor]] = [step, padded, inferred, lambda: step(12)[1::2]]

ANY_ROWS: list[Callable[[], list[Tensor]]] = [
    lambda: [step()[0]],
    lambda: [step()[0], step()[1]],
    lambda: [step(2)[0].clone() for _ in range(3)],
    lambda: list(step().t()),
    lambda: [step()[0], step().t()[0][:5]],
    lambda: [torch.tensor(1.0).expand(4)] * 2,
    lambda: list(step().bfloat16()),
    lambda: [row[:3] for row in step()],
    lambda: [step().view(-1)[at : at + 4] for at in (7, 0, 3)],
    lambda: [step()[0].view(torch.int32), step()[1].view(torch.int32)],
    lambda: [torch.tensor([-torch.inf, -0.0, torch.nan, 1e-45])] * 3,
    lambda: [torch.empty(0), torch.empty(0)],
    lambda: [torch.tensor(3.0), torch.tensor(4.0)],
    lambda: list(torch.arange(24.0).view(2, 3, 4)),
]


def same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit, also where it is NaN or -0."""
    return (one.dtype, one.shape, one.tolist().__repr__()) == (
        other.dtype,
        other.shape,
        other.tolist().__repr__(),
    )


class Calls(TorchFunctionMode):
    """The torch functions called meanwhile, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", ANY_ROWS)
def test_gathered_rows_are_a_stack_and_stacked_ones_in_storage_of_their_own(
    rows: Callable[[], list[Tensor]],
) -> None:
    given_rows = rows()
    assert same(gather_rows(given_rows), torch.stack(given_rows))
    assert same(gather_rows(tuple(given_rows[::-1])), torch.stack(given_rows[::-1]))
    whole = stacked(given_rows)
    assert same(whole, torch.stack(given_rows))
    assert whole.untyped_storage().nbytes() == whole.nbytes
    held = {row.untyped_storage().data_ptr() for row in given_rows}
    assert whole.untyped_storage().data_ptr() not in held - {0}


@pytest.mark.parametrize("rows", ANY_ROWS)
def test_apart_are_clones_in_storage_of_their_own(rows: Callable[[], list[Tensor]]) -> None:
    given_rows = rows()
    copies = separate_copies(given_rows)
    assert len(copies) == len(given_rows)
    for copy, row in zip(copies, given_rows, strict=True):
        assert same(copy, row)
        assert copy.untyped_storage().nbytes() == row.numel() * row.element_size()
    held = [row.untyped_storage().data_ptr() for row in [*copies, *given_rows] if row.numel()]
    assert len(set(held)) == len(held) // 2 + len(set(held[len(held) // 2 :]))


@pytest.mark.parametrize("make", STEPS)
@settings(max_examples=60, deadline=None)
@given(places=st.lists(st.integers(0, 5), min_size=1, max_size=12))
@example(places=[0, 1, 3, 2])
def test_rows_of_one_step_in_any_order_are_together_what_they_are(
    make: Callable[[], Tensor], places: list[int]
) -> None:
    whole = make()
    rows = [whole[place] for place in places]
    with Calls() as calls:
        found = gather_rows(rows)
    assert same(found, whole[places])
    assert "stack" not in calls.names, "one kernel, or none"


@pytest.mark.parametrize("make", STEPS)
@pytest.mark.parametrize("places", [range(6), range(1, 4), range(0, 6, 2), [3]])
def test_evenly_spaced_rows_are_not_copied(
    make: Callable[[], Tensor], places: list[int] | range
) -> None:
    whole = make()
    found = gather_rows([whole[place] for place in places])
    assert same(found, whole[list(places)])
    assert found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_neighbours_in_memory_that_are_no_views_of_one_storage_are_stacked() -> None:
    numbers = step()
    strangers = [torch.from_numpy(row) for row in numbers.numpy()]
    with Calls() as calls:
        assert same(gather_rows(strangers), numbers)
    assert "stack" in calls.names


def test_a_steps_rows_come_apart_with_one_copy() -> None:
    with Calls() as calls:
        separate_copies(list(step()))
    assert calls.names.count("_foreach_copy_") == 1
    assert not {"clone", "copy_"} & set(calls.names)


@pytest.mark.parametrize("whole_first", [True, False])
def test_parts_of_what_was_lent_arrive_with_it_and_stay(whole_first: bool) -> None:
    memory = torch.arange(10.0).view(5, 2)
    copy = AsyncHostCopy.lent(memory, torch.device("cpu"))
    parts = [copy.part(slice(0, 2)), copy.part(slice(2, 5))]
    if whole_first:
        copy.result()
    first = parts[0].result()
    memory += 100.0
    assert first.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert parts[1].result().tolist() == [[4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]
    assert copy.result().flatten().tolist() == [*range(10)]


@pytest.mark.parametrize("width", [7, 320, 50_000])
def test_a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads(
    width: int,
) -> None:
    logits = 4 * torch.randn(16, width, generator=torch.Generator().manual_seed(3))
    targets, heats = torch.arange(16) % width, torch.full((16,), 0.7, dtype=torch.float64)

    def computed(part: slice) -> list[torch.Tensor]:
        rows = normalised(logits[part])
        numbers = seeded_uniforms(range(16))[part]
        drawn = draw(rows, uniforms=numbers, temperature=0.7)
        tempered = truncate(rows, temperature=0.7, top_p=0.9), weighed(rows, 0.7, 1.5)
        scores = score_entries(rows.clone(), targets[part], "logprobs", heats[part])
        return [rows, *drawn, *draw(rows, uniforms=numbers), *tempered, log_sums(rows), scores]

    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            together = computed(slice(None))
            for part in [*(slice(n, n + 1) for n in range(0, 16, 5)), slice(3, 5)]:
                for whole, own in zip(together, computed(part), strict=True):
                    assert torch.equal(whole[part], own)
    finally:
        torch.set_num_threads(threads)


def test_sums_of_rows_are_logsumexp_without_mass_too() -> None:
    rows = torch.tensor([[0.5, -torch.inf, 1.0], [-torch.inf] * 3])
    assert torch.equal(log_sums(rows), rows.logsumexp(-1, keepdim=True))
    assert torch.equal(log_sums(rows[1:]), rows[1:].logsumexp(-1, keepdim=True))
