"""The capture against scripted batches, in both of vLLM's interfaces: moves, chunks, recycled places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.errors import EngineUnsupported
from genrt.tokens.rows import normalised

pytestmark = pytest.mark.vllm

VOCAB = 5


def logits_of(*tickets: int | None) -> torch.Tensor:
    """Logits of which each row tells whose it is; a ``None`` is a request that is not a logprobs one."""
    logits = torch.zeros(len(tickets), VOCAB)
    logits[:, 0] = torch.tensor([-99.0 if ticket is None else ticket for ticket in tickets])
    return logits


def params(ticket: int | None = None, **marks: Any) -> Any:
    from genrt.engines.vllm import requests

    extra = {getattr(requests, name): value for name, value in marks.items()}
    extra |= {} if ticket is None else {requests.TICKET: ticket}
    return SimpleNamespace(extra_args=extra or None, seed=None)


def taken(store: Any, *tickets: int) -> list[int]:
    """Which tickets' rows these are, in the order in which they were taken."""
    return [round(float(row[0] - row[1])) for row in store.take(tickets)]


def v1() -> Any:
    from genrt.engines.vllm.capture import CaptureV1

    return CaptureV1(None, torch.device("cpu"), False)


def v2() -> Any:
    from genrt.engines.vllm.capture import CaptureV2

    return CaptureV2(SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64)), None)


def update(size: int, *, removed: Any = (), added: Any = (), moved: Any = ()) -> Any:
    """vLLM's ``BatchUpdate``; ``added`` has places with tickets, or with parameters and token ids."""
    from vllm.v1.sample.logits_processor import BatchUpdate

    whole: Any = [
        (place, params(of), [], [])
        if of is None or isinstance(of, int)
        else (place, of[0], [], of[1])
        for place, of in added
    ]
    return BatchUpdate(batch_size=size, removed=[*removed], added=whole, moved=[*moved])


def swap(one: int, other: int) -> Any:
    from vllm.v1.sample.logits_processor import MoveDirectionality

    return one, other, MoveDirectionality.SWAP


def context(*slots: int, offsets: list[int] | None = None) -> Any:
    return SimpleNamespace(
        idx_mapping_np=np.array(slots, dtype=np.int32),
        expanded_local_pos=torch.tensor(offsets or [0] * len(slots), dtype=torch.int32),
    )


@pytest.mark.promise(number=3)
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_v1_against_vllms_own_persistent_batch_rules(data: st.DataObject) -> None:
    """Random additions, removals, condensations and swaps, against a plain list of who is where."""
    from vllm.v1.sample.logits_processor import MoveDirectionality

    capture = v1()
    batch: list[int | None] = []
    ticket = 0
    for _ in range(data.draw(st.integers(1, 6))):
        places: dict[int, int | None] = dict(enumerate(batch))
        removed = data.draw(st.sets(st.sampled_from(range(len(batch))))) if batch else set()
        for index in removed:
            del places[index]
        holes = sorted(removed)
        added = []
        for _ in range(data.draw(st.integers(0, 3))):
            index = holes.pop(0) if holes else len(places)
            ticket += 1
            new = ticket if data.draw(st.booleans()) else None
            places[index] = new
            added.append((index, new))
        moved: list[tuple[int, int, Any]] = []
        while holes and holes[0] < max(places, default=-1):
            last, hole = max(places), holes.pop(0)
            places[hole] = places.pop(last)
            moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
        batch = [places[index] for index in range(len(places))]
        if len(batch) > 1 and data.draw(st.booleans()):
            i, j = data.draw(st.permutations(range(len(batch))))[:2]
            batch[i], batch[j] = batch[j], batch[i]
            moved.append(swap(i, j))
        capture.update_state(
            update(len(batch), removed=sorted(removed, reverse=True), added=added, moved=moved)
        )
        capture.apply(logits_of(*batch))
    present = [t for t in batch if t is not None]
    assert taken(capture.store, *reversed(present)) == present[::-1]


@pytest.mark.parametrize("slots", [[0], [0, 1, 2], [2, 0, 1], [3, 1, 0, 2]], ids=str)
def test_v2_takes_the_first_row_of_a_request_whatever_drafts_others_have(slots: list[int]) -> None:
    """The requests of slots 1 and 3 are texts with two drafts and one."""
    capture, drafts = v2(), {1: 2, 3: 1}
    for slot in range(4):
        capture.add_request(slot, params(None if slot in drafts else slot))
    rows = [slot for slot in slots for _ in range(1 + drafts.get(slot, 0))]
    offsets = [n for slot in slots for n in range(1 + drafts.get(slot, 0))]
    capture.apply(logits_of(*rows), context(*slots, offsets=offsets))
    present = [slot for slot in slots if slot not in drafts]
    assert taken(capture.store, *present[::-1]) == present[::-1]


@pytest.mark.promise(number=3)
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_v2_against_a_plain_list_of_who_is_in_which_slot(data: st.DataObject) -> None:
    capture = v2()
    slots: dict[int, int | None] = {}
    wanted: set[int] = set()
    for ticket in range(data.draw(st.integers(1, 12))):
        slot = data.draw(st.integers(0, 5))
        slots[slot] = ticket if data.draw(st.booleans()) else None
        capture.add_request(slot, params(slots[slot]))
        order = data.draw(st.permutations(sorted(slots)))[: data.draw(st.integers(1, 6))]
        capture.apply(logits_of(*(slots[s] for s in order)), context(*order))
        wanted |= {t for s in order if (t := slots[s]) is not None}
    assert taken(capture.store, *sorted(wanted)) == sorted(wanted)


NAN, INF = float("nan"), float("inf")


@pytest.mark.promise(number=8)
@pytest.mark.parametrize("poison", [[NAN, 0.0, 0.0], [0.0, 0.0, INF], [-INF] * 3], ids=str)
def test_a_row_that_is_no_distribution_is_told_and_its_neighbours_are_right(
    poison: list[float],
) -> None:
    from genrt.engines.vllm.capture import RowStore

    store, logits = RowStore(), torch.tensor([[0.0, -INF, 0.0], poison, [3.0, 0.0, 0.0]])
    store.put([1, 2, 3], logits)
    store.forget([77])
    first, second, third = store.take([1, 2, 3])
    assert second is None
    assert torch.equal(torch.stack([first, third]), normalised(logits[::2]))  # type: ignore[list-item]
    store.put([1, 2], logits_of(1, 2))
    store.forget([1])
    assert len(store) == 1
    assert taken(store, 2) == [2]
    with pytest.raises(EngineUnsupported, match="without passing its logits"):
        store.take([3])


@pytest.mark.promise(number=17)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wide_rows_are_normalised_in_float32_to_its_rounding(dtype: torch.dtype) -> None:
    from genrt.engines.vllm.capture import RowStore, log_probabilities

    store, generator = RowStore(), torch.Generator().manual_seed(0)
    logits = (20 + 5 * torch.randn(1, 128_256, generator=generator)).to(dtype)
    store.put([1], logits)
    [row] = store.take([1])
    for found in (row, log_probabilities(logits, may_overwrite=True)[0]):
        assert found is not None
        assert found.dtype == torch.float32
        assert abs(float(found.double().logsumexp(dim=-1))) <= 3e-7


@pytest.mark.promise(number=24)
def test_a_runner_without_the_capture_or_with_another_sampler_is_refused() -> None:
    from genrt.engines.vllm.capture import connect_capture

    def runner(*captures: Any, **more: Any) -> Any:
        sampler = SimpleNamespace(logits_processors=[*captures])
        return SimpleNamespace(sampler=sampler, device=torch.device("cuda"), **more)

    batch = SimpleNamespace(logitsprocs=SimpleNamespace(all=[v1()]))
    for message, wrong in (
        ("did not install genrt's logits processor", runner()),
        ("holds its logits processors elsewhere", SimpleNamespace(sampler=None)),
        ("gathers log-probabilities otherwise", runner(v2())),
        ("gathers log-probabilities otherwise", runner(input_batch=batch)),
    ):
        with pytest.raises(EngineUnsupported, match=message):
            connect_capture(wrong)


# -- processed log-probabilities --------------------------------------------------------------------


def test_v2s_own_sampler_tells_each_row_what_its_request_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's ``Sampler``, with its Triton kernels written in torch: the way of the logits through it."""
    from vllm.v1.worker.gpu.sample import sampler as module

    from genrt.engines.vllm.capture import ProcessedLogprobsV2
    from genrt.engines.vllm.requests import Masked

    capture, heat, top_k = v2(), torch.tensor([0.5, 2.0, 0.7]), torch.tensor([2, VOCAB, 3])
    for slot, processed in enumerate((True, False, True)):
        masked = None if slot == 0 else Masked(70 + slot, 10, float(heat[slot]))
        capture.add_request(slot, params(PROCESSED=processed, MASKED=masked))
    modes: list[bool] = []

    def scores(
        logits: torch.Tensor, count: int, sampled: torch.Tensor, *_: Any, **named: Any
    ) -> Any:
        modes.append(named["logits_mode"])
        return logits.float().log_softmax(-1).gather(-1, sampled[:, None])

    monkeypatch.setattr(module, "compute_topk_scores", scores)
    monkeypatch.setattr(module, "gumbel_sample", lambda logits, *_, **__: logits.argmax(-1))
    counted = lambda *_: (torch.ones(3), torch.zeros(3))
    monkeypatch.setattr(module, "get_num_sampled_and_rejected", counted)
    sampler: Any = object.__new__(module.Sampler)
    no: Any = lambda *_: False
    sampler.__dict__ |= {
        "logprobs_mode": "raw_logprobs",
        "compute_nans": False,
        "trace_replay_state": None,
        "return_sampling_mask": False,
        "use_flashinfer": False,
        "use_xpu_sampler": False,
        "use_fp64_gumbel": False,
        "logprob_token_ids_state": None,
        "get_logprobs_dims": lambda *_: (0, 0),
        "apply_sampling_params": lambda logits, _, rows, *__, **___: (
            logits.float() / heat[rows][:, None]
        ),
        "sampling_states": SimpleNamespace(
            get_top_k_top_p=lambda _, slots: (top_k[torch.from_numpy(slots).long()], None),
            any_greedy=no,
            any_explicit_seed=no,
            temperature=SimpleNamespace(gpu=None),
            seeds=SimpleNamespace(gpu=None),
        ),
        "req_states": SimpleNamespace(prefill_len=SimpleNamespace(gpu=None)),
    }
    ProcessedLogprobsV2(sampler, capture)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)).bfloat16()

    def told(*slots: int, length: int = 0) -> list[float]:
        rows = torch.tensor(slots)
        batch = SimpleNamespace(
            expanded_idx_mapping=rows,
            idx_mapping=rows,
            idx_mapping_np=np.array(slots, dtype=np.int32),
            cu_num_logits_np=np.arange(len(slots) + 1),
            cu_num_logits=None,
            expanded_local_pos=None,
            positions=rows,
            input_ids=rows,
            logits_indices=torch.arange(len(slots)),
            seq_lens=rows,
            # Padded, as a captured graph has it; a place below 0 is of a prompt's first part.
            seq_lens_cpu_upper_bound=torch.tensor([length] * len(slots) + [0]),
            num_reqs=len(slots),
        )
        return list(sampler(logits[rows], batch).logprobs_tensors[:, 0].tolist())

    raw = logits.float().log_softmax(-1)
    expected = {1: float(raw[1].max())}
    for slot in (0, 2):
        kept = (logits[slot].float() / heat[slot]).topk(int(top_k[slot])).values
        expected[slot] = float(kept.log_softmax(-1).max())
    for slots in ((0, 1, 2), (2, 1), (1,), (1, 0)):
        assert told(*slots) == pytest.approx([expected[slot] for slot in slots], abs=1e-5)
    assert modes == [False] * 4
    assert len(capture.sets) == 0
    assert told(2, 0, 1, length=12) == pytest.approx(
        [expected[each] for each in (2, 0, 1)], abs=1e-5
    )
    assert told(1, length=13) == pytest.approx([expected[1]], abs=1e-5)
    for slot, start, count in ((2, 2, 1), (1, 2, 2)):
        for logprob, log_mass, tokens in capture.sets.take(70 + slot, start, count, "ids"):
            ids, row = np.frombuffer(tokens, np.int32), logits[slot].float() / heat[slot]
            assert ids.tolist() == sorted(row.topk(int(top_k[slot])).indices.tolist())
            of_set = row[torch.from_numpy(ids.copy()).long()].logsumexp(-1)
            assert logprob == pytest.approx(float(row.max() - of_set), abs=1e-5)
            assert log_mass == pytest.approx(float(of_set - row.logsumexp(-1)), abs=1e-5)
    capture.sets.forget([71, 72])
    assert len(capture.sets) == 0
    capture.add_request(2, params())  # the slot is another request's now
    assert told(2) == pytest.approx([float(raw[2].max())], abs=1e-5)
