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
    rows = [
        [float(ticket if ticket is not None else -99)] + [0.0] * (VOCAB - 1) for ticket in tickets
    ]
    return torch.tensor(rows).reshape(len(tickets), VOCAB)


def row_of(ticket: int) -> torch.Tensor:
    return normalised(logits_of(ticket)[0])


def params(ticket: int | None) -> Any:
    from genrt.engines.vllm.requests import TICKET

    return SimpleNamespace(extra_args=None if ticket is None else {TICKET: ticket}, seed=None)


def taken(store: Any, *tickets: int) -> list[int]:
    """Which tickets' rows these are, in the order in which they were taken."""
    rows = store.take(tickets)
    everyone = {ticket: row_of(ticket) for ticket in range(200)}
    return [next(t for t, row in everyone.items() if torch.equal(row, r)) for r in rows]


# -- V1: rows follow the moves of a persistent batch ------------------------------------------------


def v1() -> Any:
    from genrt.engines.vllm.capture import CaptureV1

    return CaptureV1(None, torch.device("cpu"), False)


def update(
    size: int,
    *,
    removed: list[int] | None = None,
    added: list[tuple[int, int | None]] | None = None,
    moved: list[tuple[int, int, Any]] | None = None,
) -> Any:
    from vllm.v1.sample.logits_processor import BatchUpdate

    return BatchUpdate(
        batch_size=size,
        removed=removed or [],
        added=[(index, params(ticket), [], []) for index, ticket in added or []],
        moved=moved or [],
    )


def test_v1_runs_for_greedy_batches_and_before_the_temperature() -> None:
    assert v1().is_argmax_invariant() is False


@pytest.mark.promise(number=3)
def test_v1_gives_each_ticket_its_own_row_and_leaves_the_logits_alone() -> None:
    capture = v1()
    capture.update_state(update(3, added=[(0, 7), (1, None), (2, 8)]))
    logits = logits_of(7, None, 8)
    before = logits.clone()
    assert capture.apply(logits) is logits
    assert torch.equal(logits, before)
    assert taken(capture.store, 8, 7) == [8, 7]
    assert len(capture.store) == 0


def test_v1_computes_nothing_for_a_batch_of_samples() -> None:
    capture = v1()
    capture.update_state(update(2, added=[(0, None), (1, None)]))
    capture.apply(logits_of(None, None))
    assert len(capture.store) == 0


def test_v1_completions_are_drawn_from_vllms_generator_whatever_is_discarded() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample.logits_processor import BatchUpdate

    from genrt.engines.vllm.requests import SEED

    current_platform.import_kernels()

    def drawn(discarded: int, seed: int) -> list[int]:
        capture, tokens = v1(), list[int]()
        params = SimpleNamespace(extra_args={SEED: seed}, seed=None)
        added: Any = [(0, params, [], tokens)]
        capture.update_state(BatchUpdate(batch_size=1, removed=[], added=added, moved=[]))
        for _ in range(discarded):
            capture.draw(torch.zeros(1, 10**6), {}, None, None)
        for _ in range(4):
            tokens.append(int(capture.draw(torch.zeros(1, 10**6), {}, None, None)[0]))
        return tokens

    generator = torch.Generator().manual_seed(5)
    seeds = torch.cat([torch.randint(0, 2**31, (1,), generator=generator) for _ in range(4)])
    expected = torch.ops._C.fused_gumbel_argmax(torch.zeros(4, 10**6), seeds)
    assert drawn(0, 5) == drawn(3, 5) == expected.tolist()
    assert drawn(0, 5 + 2**32) != drawn(0, 5)


@pytest.mark.promise(number=18)
def test_v1_seeded_draws_depend_on_the_seed_and_the_tokens_before_and_follow_moves() -> None:
    """Twice the same two requests, the second time chunked, moved and among others."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from genrt.engines.vllm.requests import SEED

    current_platform.import_kernels()

    def seeded(index: int, seed: int, tokens: list[int]) -> Any:
        return index, SimpleNamespace(extra_args={SEED: seed}, seed=None), [], tokens

    def draw(capture: Any, count: int) -> list[int]:
        tokens, nothing = capture.draw(torch.zeros(count, 10**6), {}, None, None)
        assert nothing is None
        return list(tokens.tolist())

    capture = v1()
    first, second = [], []  # type: ignore[var-annotated]
    added = [seeded(0, 5, first), seeded(1, 6, second)]
    capture.update_state(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))
    expected = []
    for _ in range(3):
        expected.append(draw(capture, 2))
        first.append(1)
        second.append(1)
    assert len({token for drawn in expected for token in drawn}) == 6

    capture = v1()
    first, second = [], []
    added = [seeded(0, 5, first), seeded(2, 6, second), (1, params(3), [], [])]
    capture.update_state(BatchUpdate(batch_size=3, removed=[], added=added, moved=[]))
    draw(capture, 3)  # discarded: a prompt is not whole
    swap = (0, 2, MoveDirectionality.SWAP)
    capture.update_state(BatchUpdate(batch_size=3, removed=[], added=[], moved=[swap]))
    again = []
    for _ in range(3):
        drawn = draw(capture, 3)
        again.append([drawn[2], drawn[0]])
        first.append(1)
        second.append(1)
    assert again == expected


@pytest.mark.promise(number=4)
def test_v1_the_last_row_of_a_chunked_prompt_is_the_right_one() -> None:
    capture = v1()
    capture.update_state(update(2, added=[(0, 1), (1, 2)]))
    capture.apply(logits_of(99, 2))  # ticket 1's prompt is not whole yet
    capture.update_state(None)
    capture.apply(logits_of(1, 2))
    assert taken(capture.store, 1) == [1]


@pytest.mark.promise(number=3)
@settings(deadline=None, max_examples=150)
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
            moved.append((i, j, MoveDirectionality.SWAP))
        capture.update_state(
            update(len(batch), removed=sorted(removed, reverse=True), added=added, moved=moved)
        )
        capture.apply(logits_of(*batch))
    present = [t for t in batch if t is not None]
    assert taken(capture.store, *reversed(present)) == present[::-1]


# -- V2: rows are re-sorted every step, requests keep their slot -------------------------------------


def v2() -> Any:
    from genrt.engines.vllm.capture import CaptureV2

    return CaptureV2(SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64)), None)


def context(*slots: int) -> Any:
    return SimpleNamespace(idx_mapping_np=np.array(slots, dtype=np.int32))


def test_v2_says_which_requests_it_is_for() -> None:
    capture = v2()
    assert capture.add_request(3, params(1)) is True
    assert capture.add_request(4, params(None)) is False


@pytest.mark.promise(number=4)
def test_v2_partly_prefilled_rows_are_replaced_and_absent_requests_left_alone() -> None:
    capture = v2()
    for slot, ticket in ((0, 1), (1, 2), (2, 3)):
        capture.add_request(slot, params(ticket))
    capture.apply(logits_of(150, 2), context(0, 1))  # slot 0's prompt is not whole; slot 2 waits
    assert taken(capture.store, 2) == [2]
    capture.apply(logits_of(3, 1), context(2, 0))
    assert taken(capture.store, 1, 3) == [1, 3]


def test_v2_computes_nothing_for_a_batch_of_samples() -> None:
    capture = v2()
    capture.add_request(0, params(None))
    capture.apply(logits_of(None), context(0))
    assert len(capture.store) == 0


@pytest.mark.promise(number=24)
def test_v2_refuses_more_rows_than_requests() -> None:
    capture = v2()
    capture.add_request(0, params(1))
    with pytest.raises(EngineUnsupported, match="speculative"):
        capture.apply(logits_of(1, 1), context(0))


@pytest.mark.promise(number=3)
@settings(deadline=None, max_examples=150)
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


# -- the store ------------------------------------------------------------------------------------


@pytest.mark.promise(number=8)
@pytest.mark.parametrize(
    "poison",
    [
        [float("nan"), 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, float("inf")],
        [float("-inf")] * VOCAB,
    ],
)
def test_a_row_that_is_no_distribution_is_told_and_its_neighbours_are_right(
    poison: list[float],
) -> None:
    from genrt.engines.vllm.capture import RowStore

    store = RowStore()
    logits = logits_of(1, 2, 3)
    logits[1] = torch.tensor(poison)
    store.put([1, 2, 3], logits)
    first, second, third = store.take([1, 2, 3])
    assert second is None
    assert first is not None
    assert third is not None
    assert torch.equal(first, row_of(1))
    assert torch.equal(third, row_of(3))


def test_minus_infinity_for_some_tokens_is_a_distribution() -> None:
    from genrt.engines.vllm.capture import RowStore

    store = RowStore()
    store.put([1], torch.tensor([[0.0, float("-inf"), 0.0]]))
    [row] = store.take([1])
    assert row is not None
    torch.testing.assert_close(row.exp(), torch.tensor([0.5, 0.0, 0.5]))


@pytest.mark.promise(number=17)
def test_rows_of_half_precision_logits_are_normalised_in_float32() -> None:
    from genrt.engines.vllm.capture import RowStore

    store = RowStore()
    store.put([1], torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).bfloat16())
    [row] = store.take([1])
    assert row is not None
    assert row.dtype == torch.float32
    assert abs(float(row.double().logsumexp(dim=-1))) < 1e-6


def test_forgotten_rows_are_gone_and_unknown_tickets_ignored() -> None:
    from genrt.engines.vllm.capture import RowStore

    store = RowStore()
    store.put([1, 2], logits_of(1, 2))
    store.forget([1, 77])
    assert len(store) == 1
    assert taken(store, 2) == [2]


# -- how a runner's capture is found -------------------------------------------------------------------


def test_the_store_of_a_v2_runner_is_its_captures() -> None:
    from genrt.engines.vllm.capture import install_capture

    capture = v2()
    sampler = SimpleNamespace(logits_processors=[object(), capture], sample=None, logprobs_mode="")
    assert install_capture(SimpleNamespace(sampler=sampler), own_processors=True) is capture.store


@pytest.mark.parametrize("own_processors", [True, False])
def test_the_v1_runner_lists_output_tokens_only_for_processors_of_the_users(
    own_processors: bool,
) -> None:
    from genrt.engines.vllm.capture import install_capture

    capture = v1()
    batch = SimpleNamespace(
        logitsprocs=SimpleNamespace(all=[capture]), logitsprocs_need_output_token_ids=True
    )
    draws = SimpleNamespace(forward=None)
    sampler = SimpleNamespace(topk_topp_sampler=draws, gather_logprobs=None)
    runner = SimpleNamespace(input_batch=batch, sampler=sampler, device=torch.device("cuda"))
    assert install_capture(runner, own_processors) is capture.store
    assert batch.logitsprocs_need_output_token_ids is own_processors


@pytest.mark.promise(number=24)
def test_a_runner_without_the_capture_is_refused() -> None:
    from genrt.engines.vllm.capture import install_capture

    for processors in ({"sampler": SimpleNamespace(logits_processors=[])}, {"sampler": None}):
        with pytest.raises(EngineUnsupported, match="logits processor"):
            install_capture(SimpleNamespace(**processors), own_processors=False)


# -- log-probabilities of the law ------------------------------------------------------------------


def wanting(law: bool) -> Any:
    from genrt.engines.vllm.requests import LAW

    return SimpleNamespace(extra_args={LAW: True} if law else None, seed=None)


class SamplerV1:
    """As much of vLLM's as the laws follow: draws, then gathers the first token of every row."""

    def __init__(self, capture: Any) -> None:
        from genrt.engines.vllm.capture import LawsV1

        self.topk_topp_sampler = SimpleNamespace(forward=self.draw)
        self.gather_logprobs = self.gather
        LawsV1(self, capture.law_rows)

    def draw(self, logits: torch.Tensor, *_: object) -> tuple[torch.Tensor, None]:
        return logits.argmax(-1), None

    def gather(self, logprobs: torch.Tensor, _: int, token_ids: torch.Tensor) -> torch.Tensor:
        return logprobs.gather(-1, token_ids[:, None])[:, 0]

    def told(self, logits: torch.Tensor, heat: float, k: list[int]) -> list[float]:
        """What a step tells of each row's likeliest token."""
        raw = logits.log_softmax(-1)
        heated = logits / heat
        before = heated.clone()
        drawn, _ = self.topk_topp_sampler.forward(heated, {}, torch.tensor(k), None)
        assert torch.equal(heated, before)  # the draw is from what it would have been from
        return list(self.gather_logprobs(raw, 0, drawn).tolist())


def test_v1_the_law_is_told_where_it_is_wanted_and_follows_moves() -> None:
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    capture = v1()
    sampler = SamplerV1(capture)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    raw = logits.log_softmax(-1).amax(-1).tolist()
    of_two = (logits / 0.5).topk(2).values.log_softmax(-1).amax(-1).tolist()
    assert sampler.told(logits, 0.5, [2, 2, 2]) == pytest.approx(raw)
    added: Any = [(i, wanting(law), [], []) for i, law in enumerate([True, False, True])]
    capture.update_state(BatchUpdate(batch_size=3, removed=[], added=added, moved=[]))
    for _ in range(2):
        told = sampler.told(logits, 0.5, [2, 2, 2])
        assert told == pytest.approx([of_two[0], raw[1], of_two[2]])
    swap = (0, 1, MoveDirectionality.SWAP)
    capture.update_state(BatchUpdate(batch_size=2, removed=[2], added=[], moved=[swap]))
    told = sampler.told(logits[:2], 0.5, [2, 2])
    assert told == pytest.approx([raw[0], of_two[1]])
    # A step without a draw, as a greedy one, has nothing of the step before.
    gathered = sampler.gather_logprobs(logits[:2].log_softmax(-1), 0, logits[:2].argmax(-1))
    assert gathered.tolist() == pytest.approx(raw[:2])


class SamplerV2:
    """As much of vLLM's as the laws follow: ``sample`` halves the logits in a copy of its own."""

    logprobs_mode = "raw_logprobs"

    def __init__(self, capture: Any) -> None:
        from genrt.engines.vllm.capture import LawsV2

        self.modes: list[str] = []
        self.processes = True
        LawsV2(self, capture.law_rows)

    def sample(self, logits: torch.Tensor, *_: object, **__: object) -> Any:
        self.modes.append(self.logprobs_mode)
        return logits.argmax(-1), logits / 2 if self.processes else logits


def test_v2_the_law_is_told_where_it_is_wanted_whatever_the_order_of_the_rows() -> None:
    capture = v2()
    sampler = SamplerV2(capture)
    for slot, law in ((5, True), (2, False), (9, True)):
        assert capture.add_request(slot, wanting(law)) is False
    logits = torch.randn(3, VOCAB).bfloat16()

    def told(*slots: int) -> torch.Tensor:
        given = logits[: len(slots)]
        _, logits_told = sampler.sample(given, None, None, np.array(slots), None, return_logprobs=1)
        if sampler.logprobs_mode == "raw_logprobs":
            logits_told = given  # as vLLM does in this mode
        return torch.as_tensor(logits_told).float()

    expected = torch.stack([logits[0], logits[1] / 2, logits[2] / 2]).float()
    assert torch.equal(told(2, 9, 5), expected)
    assert torch.equal(told(2), logits[:1].float())
    capture.add_request(9, wanting(False))  # the slot is another request's now
    assert torch.equal(told(9), logits[:1].float())
    assert sampler.modes == ["processed_logprobs", "raw_logprobs", "raw_logprobs"]
    sampler.processes = False
    assert torch.equal(told(5, 2), logits[:2].float())


def test_a_sampler_that_gathers_otherwise_is_refused() -> None:
    from genrt.engines.vllm.capture import LawsV1, LawsV2

    for laws in (LawsV1, LawsV2):
        with pytest.raises(EngineUnsupported, match="gathers log-probabilities otherwise"):
            laws(SimpleNamespace(), lambda *_: [])  # type: ignore[arg-type]


def test_v2s_own_sampler_tells_each_row_what_its_request_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's ``Sampler``, with its Triton kernels written in torch: the way of the logits through it."""
    from vllm.v1.worker.gpu.sample import sampler as module

    from genrt.engines.vllm.capture import LawsV2

    capture, heat, top_k = v2(), torch.tensor([0.5, 2.0, 0.7]), torch.tensor([2, VOCAB, 3])
    for slot, law in enumerate((True, False, True)):
        capture.add_request(slot, wanting(law))
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
    LawsV2(sampler, capture.law_rows)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)).bfloat16()

    def told(*slots: int) -> list[float]:
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
            seq_lens_cpu_upper_bound=rows,
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
