"""The V2 runner's part of open requests against scripted runners, on the CPU: where a token is written,
positions, block tables, a step that is prepared, run twice and confirmed.

What is scripted has the attributes that ``docs/new_vllm.md`` lists, and no others. The V1 runner's part
runs for real, in ``test_sequences.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.vllm

VOCAB, SLOTS, BLOCKS, BLOCK, WIDTH = 7, 6, 10, 4, 5


class Staged:
    """As vLLM's ``StagedWriteTensor``: a write counts once it is applied."""

    def __init__(self, *shape: int) -> None:
        self.gpu = torch.full((SLOTS, *shape), -1, dtype=torch.int32)
        self._staged: list[tuple[Any, Any]] = []

    def stage_write_elem(self, slot: int, number: int) -> None:
        self._staged.append((slot, number))

    def stage_write(self, slot: int, start: int, numbers: list[int]) -> None:
        place = slot, slice(start, start + len(numbers))
        self._staged.append((place, torch.tensor(numbers, dtype=torch.int32)))

    def apply(self) -> None:
        for place, numbers in self._staged:
            self.gpu[place] = numbers
        self._staged.clear()


class Backed:
    """As vLLM's ``UvaBackedTensor``: the device has what was copied last."""

    def __init__(self, *shape: int) -> None:
        self.np = np.full(shape, -1)
        self.gpu = torch.from_numpy(self.np.copy())

    def copy_to_uva(self) -> None:
        self.gpu = torch.from_numpy(self.np.copy())


class States:
    """As the V2 runner's ``RequestState``: a slot for each request that is known."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.req_id_to_index = slots
        self.prompt_len = Backed(SLOTS)
        self.prefill_len = Backed(SLOTS)
        self.num_computed_prefill_tokens = np.full(SLOTS, -1)
        self.num_computed_tokens_np = np.full(SLOTS, -1)
        self.num_computed_tokens = Staged()
        self.total_len = Staged()
        self.all_token_ids = Staged(Runner.max_model_len)
        self.last_sampled_tokens = torch.full((SLOTS, 1), -1, dtype=torch.int64)

    def apply_staged_writes(self) -> None:
        for each in (self.num_computed_tokens, self.total_len, self.all_token_ids):
            each.apply()
        self.prefill_len.copy_to_uva()


class Tables:
    """As the V2 runner's ``BlockTables``: rows of blocks by slot, staged too."""

    def __init__(self) -> None:
        self.block_tables = [SimpleNamespace(gpu=torch.full((SLOTS, WIDTH), -1, dtype=torch.int32))]
        self.num_blocks = Backed(1, SLOTS)
        self._staged: list[tuple[int, int, list[int]]] = []
        self.num_blocks.np[:] = 0

    def append_block_ids(self, slot: int, groups: Any, *, overwrite: bool) -> None:
        [block_ids] = groups
        start = 0 if overwrite else int(self.num_blocks.np[0, slot])
        self._staged.append((slot, start, block_ids))
        self.num_blocks.np[0, slot] = start + len(block_ids)

    def apply_staged_writes(self) -> None:
        for slot, start, block_ids in self._staged:
            written = torch.tensor(block_ids, dtype=torch.int32)
            self.block_tables[0].gpu[slot, start : start + len(block_ids)] = written
        self._staged.clear()
        self.num_blocks.copy_to_uva()

    def put(self, slot: int, *block_ids: int) -> None:
        self.append_block_ids(slot, (list(block_ids),), overwrite=True)
        self.apply_staged_writes()

    @property
    def applied(self) -> dict[int, list[int]]:
        """The rows, as the device finds them."""
        [table], counts = self.block_tables, self.num_blocks.gpu[0].tolist()
        return {n: table.gpu[n, :count].tolist() for n, count in enumerate(counts) if count > 0}

    def compute_slot_mappings(self, slots: Any, *_: Any, num_tokens_padded: int) -> str:
        assert len(slots) <= num_tokens_padded
        return "slots"


class Graph(NamedTuple):
    """As vLLM's ``BatchExecutionDescriptor``."""

    cg_mode: Any
    max_query_len: int | None = None


@dataclass
class Batch:
    """As vLLM's ``InputBatch``, as far as a step is prepared from another."""

    req_ids: list[str]
    idx_mapping: Any
    idx_mapping_np: Any
    query_start_loc: Any = None
    query_start_loc_np: Any = None
    seq_lens_cpu_upper_bound: Any = None
    num_computed_tokens_np: Any = None
    max_query_len: int | None = None
    logits_indices: Any = None
    positions: Any = "positions"
    num_tokens_after_padding: int = 2
    num_reqs_after_padding: int = 2


class ModelState:
    """As vLLM's for models of text alone."""

    rope_state: Any = None

    def __init__(self) -> None:
        self.attended: list[Any] = []

    def prepare_attn(self, batch: Any, mode: Any, tables: Any, slots: Any, *more: Any) -> None:
        assert (tables, slots) == ("tables", "slots")
        self.attended.append(batch.seq_lens_cpu_upper_bound.tolist())


class Runner:
    """A V2 runner whose forward makes of each token the logits ``token + 1000 * position``, from the
    tokens that are in its input buffer."""

    uses_inputs_embeds = False
    fast_prefill = pcp_manager = None
    lora_config: Any = None
    execute_model_state: Any = None
    dcp_size, max_model_len = 1, 30
    kv_connector: Any = "no connector"
    kv_cache_config = SimpleNamespace(num_blocks=BLOCKS)
    model_config = SimpleNamespace(rswa_window=None)

    def __init__(self, slots: dict[str, int], *, full_graph: bool = True, **options: Any) -> None:
        from vllm.config import CUDAGraphMode

        self.req_states = States(slots)
        self.block_tables = Tables()
        self._positions = torch.zeros(SLOTS)
        self.input_buffers = SimpleNamespace(
            input_ids=torch.full((SLOTS,), -1, dtype=torch.int32),
            positions=self._positions,
            seq_lens=torch.zeros(SLOTS),
        )
        self.kv_caches = [torch.arange(BLOCKS * BLOCK, dtype=torch.float32).reshape(BLOCKS, BLOCK)]
        self.kv_caches.append(self.kv_caches[0])  # layers may share their memory
        self.graph = Graph(CUDAGraphMode.FULL if full_graph else CUDAGraphMode.PIECEWISE)
        self.cudagraph_manager = SimpleNamespace(run_fullgraph=self._forward)
        self.model = SimpleNamespace(compute_logits=logits_of)
        self.model_state: Any = ModelState()
        self.attn_groups: Any = [[SimpleNamespace(metadata_builders=["another attention's"])]]
        self.attended: list[Any] = []
        self.counted: list[list[str]] = []
        self.whole = 0
        vars(self).update(options)

    def prepare_inputs(self, output: Any, state: Any, graph: Any, *_: Any) -> Any:
        # As vLLM does, rows are sorted anew in every step: here the other way round.
        scheduled = output.scheduled_cached_reqs
        request_ids = scheduled.req_ids[::-1]
        computed = torch.tensor(scheduled.num_computed_tokens[::-1], dtype=torch.int32)
        self._positions[: len(request_ids)] = computed.float()
        slots = [self.req_states.req_id_to_index[each] for each in request_ids]
        self.req_states.num_computed_tokens.gpu[slots] = computed
        tokens = self.req_states.last_sampled_tokens[slots, 0]
        self.input_buffers.input_ids[: len(slots)] = tokens.int()
        self.whole += 1
        counts = [output.num_scheduled_tokens[each] for each in request_ids]
        return Batch(
            request_ids,
            torch.tensor(slots),
            np.array(slots),
            seq_lens_cpu_upper_bound=torch.zeros(4),
            query_start_loc_np=np.cumsum([0, *counts]),
            num_computed_tokens_np=computed.numpy(),
            logits_indices=torch.arange(len(request_ids)),
        )

    def execute_model(self, output: Any) -> None:
        batch = self.prepare_inputs(output, "state", self.graph, "more")
        if self.kv_connector != "no connector":
            self.kv_connector.pre_forward(output, batch, more="more")
        self.execute_model_state = SimpleNamespace(
            input_batch=batch, hidden_states=self._forward(self.graph)
        )

    def _forward(self, graph: Any) -> torch.Tensor:
        assert graph is self.graph
        hidden: torch.Tensor = self.input_buffers.input_ids.float() + 1000 * self._positions
        return hidden[:, None]

    def prepare_attn(self, batch: Any) -> Any:
        self.attended.append((self._in(batch), dict(self.block_tables.applied)))
        return "tables", "slots"

    def postprocess_num_computed_tokens(self, batch: Any) -> None:
        self.counted.append(self._in(batch))
        self.req_states.num_computed_tokens.gpu[batch.idx_mapping] += 1

    def _in(self, batch: Any) -> list[str]:
        """The requests of a batch, as the device knows them."""
        by_slot = {slot: each for each, slot in self.req_states.req_id_to_index.items()}
        return [by_slot.get(slot, "gone") for slot in batch.idx_mapping.tolist()]


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's kernel for positions, in torch; and what a model's state is."""
    from genrt.engines.vllm import runners

    def prepare(slots: Any, starts: Any, computed: Any, positions: Any, seq_lens: Any) -> None:
        positions[: len(slots)] = computed[slots]
        seq_lens[: len(slots)] = computed[slots] + 1

    monkeypatch.setattr(runners, "prepare_pos_seq_lens", prepare)
    monkeypatch.setattr(runners, "DefaultModelState", ModelState)


def logits_of(hidden: torch.Tensor) -> torch.Tensor:
    """Logits of which ``seen`` tells the hidden state."""
    logits = torch.zeros(len(hidden), VOCAB)
    logits[:, 0] = hidden[:, 0]
    return logits


def seen(rows: torch.Tensor) -> list[float]:
    """What the forward has made, by its rows."""
    found: list[float] = (rows[:, 0] - rows[:, 1]).tolist()
    return found


def step_of(blocks: dict[str, list[int]] | None = None, /, **computed: int) -> Any:
    """A step that computes one more token of each request, which so many come before; with new blocks."""
    new = [(blocks[each],) if blocks and each in blocks else None for each in computed]
    return SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[*computed], num_computed_tokens=[*computed.values()], new_block_ids=new
        ),
        num_scheduled_tokens=dict.fromkeys(computed, 1),
        finished_req_ids=set(),
        preempted_req_ids=set(),
        new_block_ids_to_zero=None,
    )


def over(runner: Runner) -> Any:
    from genrt.engines.vllm.runners import RunnerV2

    return RunnerV2(runner)


def tokens(**token_ids: int) -> Any:
    from genrt.engines.vllm.runners import NextTokens

    zeros = [0] * len(token_ids)
    return NextTokens([*token_ids], [*token_ids.values()], zeros, zeros)


def reassignment(
    request_id: str, length: int, block_ids: list[int], copied: int | None, kept: int = 0
) -> Any:
    from genrt.engines.vllm.reassignment import Reassignment

    request: Any = SimpleNamespace(request_id=request_id)
    return Reassignment(request, length, block_ids[kept:], copied, kept)


def test_rows_are_taken_by_request_in_the_order_of_the_batch() -> None:
    runner = Runner({"a": 4, "b": 0, "c": 2})
    shim = over(runner)
    shim.write(tokens(c=3, a=1, b=2))
    assert runner.req_states.last_sampled_tokens[:, 0].tolist() == [2, -1, 3, -1, 1, -1]
    runner.execute_model(step_of(a=10, b=20, c=30))
    request_ids, rows = shim.take_rows()
    assert request_ids == ["c", "b", "a"]
    assert rows.shape == (3, VOCAB)
    assert seen(rows) == [30003.0, 20002.0, 10001.0]
    assert runner.execute_model_state is None
    assert runner.counted == [["c", "b", "a"]]


def test_a_prepared_step_runs_with_the_tokens_it_is_given_as_often_as_it_is_asked() -> None:
    runner = Runner({"a": 4, "b": 0, "c": 2})
    shim = over(runner)
    step = shim.prepare(step_of(a=10, b=20, c=30))
    assert step.request_ids == ["c", "b", "a"]
    assert step.positions == [30, 20, 10]  # in the order of the batch, not of the scheduler
    assert runner.execute_model_state is None
    for token_ids in ([3, 2, 1], [6, 5, 4]):
        rows = shim.run(step, torch.tensor(token_ids, dtype=torch.int32))
        expected = [1000 * at + by for at, by in zip(step.positions, token_ids, strict=True)]
        assert seen(rows) == expected
    for order, put in (([2, 0, 1], [6, 4, 5]), ([2, 0, 1], [6, 4, 5]), (None, [4, 5, 6])):
        rows = shim.run(step, torch.tensor([4.0, 5.0, 6.0]), order)
        assert seen(rows) == [1000 * at + by for at, by in zip(step.positions, put, strict=True)]
    assert seen(shim.run(step, torch.tensor([-1.0, 5.0, 6.0])))[0] == 30_000.0  # none is token 0
    assert runner.counted == []
    shim.confirm(step, tokens(c=6, b=5, a=4))
    assert runner.counted == [["c", "b", "a"]]


def test_blocks_are_read_from_the_tokens_of_a_prompt_and_single_tokens_from_the_last() -> None:
    from genrt.engines.vllm.runners import NextTokens

    runner = Runner({"a": 4, "b": 0, "c": 2})
    shim, states = over(runner), runner.req_states
    states.prefill_len.np[[4, 0, 2]] = 7
    shim._overcounted.update("ac")
    several = NextTokens(
        ["a", "b", "c", "a", "a", "c"], [1, 2, 3, 4, 5, 6], [10, 20, 15, 11, 12, 16]
    )
    several.prompts = [7] * 6
    shim.write(several)
    assert states.all_token_ids.gpu[4, 9:14].tolist() == [-1, 1, 4, 5, -1]
    assert states.all_token_ids.gpu[2, 14:18].tolist() == [-1, 3, 6, -1]
    assert (states.all_token_ids.gpu[0] == -1).all()
    assert states.last_sampled_tokens[0, 0] == 2
    # A prompt ends with the block, so that the next token is read from the last one again.
    assert states.prefill_len.gpu[[4, 0, 2]].tolist() == [13, 7, 17]
    # The device counts from the first token of a block.
    assert states.num_computed_tokens.gpu[[4, 0, 2]].tolist() == [10, -1, 15]
    assert not shim._overcounted
    batch = Batch(["c", "b", "a"], torch.tensor([2, 0, 4]), np.array([2, 0, 4]))
    batch.query_start_loc_np = np.array([0, 2, 3, 6, 6], np.int32)  # padded
    hidden = torch.arange(8.0)[:, None]
    runner.execute_model_state = SimpleNamespace(input_batch=batch, hidden_states=hidden)
    request_ids, ends, found = shim.take_hidden_states()
    assert (request_ids, ends.tolist()) == (["c", "b", "a"], [2, 3, 6])
    assert found is hidden
    assert runner.execute_model_state is None
    assert runner.counted == [["c", "b", "a"]]


def test_a_block_is_put_into_the_input_in_the_order_of_the_batch() -> None:
    """With the bound of lengths for which its graph was captured; the runner prepares the next step."""
    runner = Runner({"a": 4, "b": 0, "c": 2})
    runner.graph = Graph(runner.graph.cg_mode, 8)
    shim, states = over(runner), runner.req_states
    shim._overcounted.update("ax")
    texts = {"a": [7, 7, 1, 4, 5], "b": [7, 2], "c": [7, 7, 7, 3, 6]}
    requests = {each: SimpleNamespace(_all_token_ids=text) for each, text in texts.items()}
    computed: list[Any] = []

    def execute(output: Any) -> None:
        computed.append(states.num_computed_tokens.gpu[4].item())
        batch = runner.prepare_inputs(output, "state", runner.graph, "more")
        runner.execute_model_state = SimpleNamespace(input_batch=batch)

    runner.execute_model = execute  # type: ignore[method-assign]
    shim.execute_block(step_of(a=2, b=1, c=3), requests)
    assert runner.input_buffers.input_ids.tolist() == [3, 6, 2, 1, 4, 5]
    assert runner.execute_model_state.input_batch.max_query_len == 8
    # The device's count was corrected before.
    assert (computed, shim._overcounted) == ([2], {"x"})
    assert "prepare_inputs" not in vars(runner)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_block_of_the_same_batch_runs_without_being_prepared_again(is_ahead: bool) -> None:
    """As long as no request, and no number of tokens, is another one; before its tokens are known or
    with them."""
    runner = Runner({"a": 4}, attn_groups=[])
    text = [*range(100, 130)]
    requests: Any = {"a": SimpleNamespace(_all_token_ids=text)}
    ran: list[tuple[int, list[int]]] = []

    def forward(graph: Any) -> torch.Tensor:
        ran.append((runner.whole, runner.input_buffers.input_ids[:2].tolist()))
        return torch.full((4, 1), float(len(ran)))

    runner.cudagraph_manager.run_fullgraph = runner._forward = forward  # type: ignore[method-assign]
    shim, before = over(runner), None
    for computed, count in ((5, 2), (7, 2), (9, 2), (11, 1), (12, 1)):
        del text[computed + count :]
        step = step_of(a=computed)
        step.num_scheduled_tokens = {"a": count}
        if is_ahead and before is not None and before.counts == [count]:
            before = shim.prepare(step, before)
            found = shim.run_prepared_block(before, requests)
        else:
            found, before = shim.run_block(step, requests, before)
        assert (found.request_ids, found.ends.tolist()) == (["a"], [count])
        assert found.states[0, 0] == len(ran)
        text += range(100 + len(text), 130)
    prepared, inputs = zip(*ran, strict=True)
    assert prepared == (1, 1, 1, 2, 2)
    assert [*inputs] == [[105, 106], [107, 108], [109, 110], [111, 110], [112, 110]]
    assert len(runner.counted) == 5


def test_a_block_is_prepared_with_the_bound_of_lengths_of_its_graph() -> None:
    runner = Runner({"a": 4, "b": 0})
    runner.graph = Graph(runner.graph.cg_mode, 8)
    texts = {"a": [7, 7, 1, 4, 5], "b": [7, 2]}
    requests: Any = {each: SimpleNamespace(_all_token_ids=text) for each, text in texts.items()}
    output = step_of(a=2, b=1)
    output.num_scheduled_tokens = {"a": 3, "b": 1}
    shim = over(runner)
    step = shim.prepare(output)
    assert (step.request_ids, step.positions, step.counts) == (["b", "a"], [1, 2], [1, 3])
    assert step.launch.kind.batch.max_query_len == 8
    found = shim.run_prepared_block(step, requests)
    assert runner.input_buffers.input_ids[:4].tolist() == [2, 1, 4, 5]
    assert (found.request_ids, found.ends.tolist()) == (["b", "a"], [1, 4])
    assert runner.counted == [["b", "a"]]


@pytest.mark.parametrize("lora_config", [None, "some"])
def test_logits_of_adapters_are_computed_for_the_batch_alone(lora_config: Any) -> None:
    """Without adapters they are those of the whole graph, so that its rows are the same launch."""
    runner = Runner({"a": 4, "b": 0})
    runner.lora_config = lora_config
    computed: list[int] = []

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        computed.append(len(hidden))
        return logits_of(hidden)

    runner.model.compute_logits = compute_logits
    shim = over(runner)
    step = shim.prepare(step_of(a=10, b=20))
    rows = shim.run(step, torch.tensor([2.0, 1.0]))
    assert seen(rows) == [20_002.0, 10_001.0]
    assert computed == [SLOTS if lora_config is None else 2]


@pytest.mark.parametrize("full_graph", [True, False])
def test_preparing_leaves_the_runner_as_it_was(full_graph: bool) -> None:
    runner = Runner({"a": 4}, full_graph=full_graph)
    shim = over(runner)
    step = shim.prepare(step_of(a=10))
    assert (step is not None) == full_graph  # another graph is no launch of its own
    with pytest.raises(KeyError):
        shim.prepare(step_of(unknown=10))
    assert runner.kv_connector == "no connector"
    assert "prepare_inputs" not in vars(runner)
    shim.write(tokens(a=5))
    runner.execute_model(step_of(a=10))
    assert seen(shim.take_rows()[1]) == [10005.0]


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_step_of_the_same_batch_is_prepared_from_the_one_before(is_fixed: bool) -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    builder = object.__new__(FlashAttentionMetadataBuilder) if is_fixed else "another attention's"
    groups = [[SimpleNamespace(metadata_builders=[builder])]]
    runner = Runner({"a": 4, "b": 0}, attn_groups=groups)
    shim = over(runner)
    runner.block_tables.put(4, 1)
    runner.block_tables.put(0, 2)
    before = shim.prepare(step_of(a=6, b=7))
    shim.run(before, torch.tensor([1, 2]))
    shim.confirm(before, tokens(b=1, a=2))
    step = shim.prepare(step_of({"a": [8]}, b=8, a=7), before)
    assert runner.whole == 1, "the batch is in its place"
    assert (step.request_ids, step.positions) == (["b", "a"], [8, 7])
    assert seen(shim.run(step, torch.tensor([3, 4]))) == [8003.0, 7004.0]
    assert runner.input_buffers.seq_lens[:2].tolist() == [9.0, 8.0]
    assert runner.req_states.num_computed_tokens_np[[0, 4]].tolist() == [8, 7]
    assert runner.block_tables.applied == {4: [1, 8], 0: [2]}
    # FlashAttention finds the lengths on the device, and what is launched is the same in every step.
    attended = [[30.0] * 4] if is_fixed else [[9.0, 8.0, 0.0, 0.0]]
    assert runner.model_state.attended == attended
    shim.confirm(step, tokens(b=3, a=4))
    attended = [*runner.attended]
    again = shim.prepare(step_of(b=9, a=8), step)
    assert runner.attended == attended, "the blocks are as they were"
    assert seen(shim.run(again, torch.tensor([5, 6]))) == [9005.0, 8006.0]
    shim.confirm(again, tokens(b=5, a=6))
    shim.prepare(step_of({"b": [9]}, b=10, a=9), again)
    assert runner.attended == [*attended, (["b", "a"], {4: [1, 8], 0: [2, 9]})]
    assert len(runner.attended) == 2


@pytest.mark.parametrize("again", ["its own token", "another request"])
def test_what_was_run_ahead_and_not_asked_for_does_not_count(again: str) -> None:
    from genrt.engines.vllm.runners import NextTokens

    runner = Runner({"a": 4, "b": 0, "c": 2})
    shim = over(runner)
    before = shim.prepare(step_of(a=6, b=6, c=6))
    shim.run(before, torch.tensor([1, 2, 3]))
    shim.confirm(before, tokens(c=1, a=3))
    computed = runner.req_states.num_computed_tokens.gpu
    if again == "its own token":
        shim.write(NextTokens(["b"], [5], [6], [6]))
        assert computed[[4, 0, 2]].tolist() == [7, 6, 7]
    else:
        shim.reassign([reassignment("b", 5, [0, 9], copied=1)])
        assert computed[[4, 0, 2]].tolist() == [7, 5, 7]
    computed[0] = 20
    shim.write(NextTokens(["b"], [5], [6], [6]))
    assert computed[0] == 20, "the device counts right by now"


def test_a_fork_made_ahead_is_looked_up_by_the_step_after() -> None:
    runner = Runner({"a": 4, "b": 0})
    shim = over(runner)
    before = shim.prepare(step_of(a=6, b=7))
    shim.run(before, torch.tensor([1, 2]))
    shim.confirm(before, tokens(b=1, a=2))
    step = shim.prepare(step_of(b=8, a=7), before)
    shim.confirm(step, tokens(b=1, a=2))
    shim.reassign([reassignment("b", 8, [5, 6, 9], copied=None)])
    shim.prepare(step_of(b=8, a=8), step)
    assert runner.block_tables.applied[0] == [5, 6, 9]
    assert runner.attended[-1] == (["b", "a"], {0: [5, 6, 9]})


def test_another_batch_as_large_is_launched_as_the_one_before() -> None:
    runner = Runner({"a": 4, "b": 0, "c": 2})
    shim = over(runner)
    for request_ids in (("a", "b"), ("c", "a"), ("a", "b")):
        step = shim.prepare(step_of(**dict.fromkeys(request_ids, 6)))
        for computed in (7, 8):
            shim.run(step, torch.tensor([1, 2]))
            shim.confirm(step, tokens(**dict.fromkeys(step.request_ids, 1)))
            step = shim.prepare(step_of(**dict.fromkeys(step.request_ids, computed)), step)
            assert runner._positions[:2].tolist() == [computed, computed]
            assert runner.counted[-1] == [*request_ids[::-1]]
    assert len(shim._kinds) == 1
    assert len(runner.attended) == 1, "the tables are found once for all batches of a kind"


SAME: dict[str, int] = {"b": 8, "a": 7}


@pytest.mark.parametrize(
    ("options", "computed", "fields"),
    [
        ({}, {"a": 7, "b": 8}, {}),  # in another order
        ({}, {"b": 8}, {}),
        ({}, SAME, {"finished_req_ids": {"c"}}),
        ({}, SAME, {"preempted_req_ids": {"c"}}),
        ({}, SAME, {"new_block_ids_to_zero": [3]}),
        ({"model_state": object()}, SAME, {}),
        ({"uses_inputs_embeds": True}, SAME, {}),
        ({"fast_prefill": "on"}, SAME, {}),
        ({"lora_config": "some"}, SAME, {}),
        ({"dcp_size": 2}, SAME, {}),
        ({"pcp_manager": "one"}, SAME, {}),
    ],
)
def test_any_other_step_is_prepared_as_a_whole(
    options: dict[str, Any], computed: dict[str, int], fields: dict[str, Any]
) -> None:
    runner = Runner({"a": 4, "b": 0}, **options)
    shim = over(runner)
    before = shim.prepare(step_of(a=6, b=7))
    shim.run(before, torch.tensor([1, 2]))
    shim.confirm(before, tokens(b=1, a=2))
    step = step_of(**computed)
    vars(step).update(fields)
    shim.prepare(step, before)
    assert runner.whole == 2


def test_a_reassigned_request_has_the_tokens_and_blocks_of_the_other_sequence() -> None:
    runner = Runner({"a": 4, "b": 0})
    shim = over(runner)
    runner.block_tables.put(4, 0, 1)
    runner.block_tables.put(0, 2, 3, 4)
    before = runner.kv_caches[0].clone()
    shim.reassign(
        [reassignment("b", 6, [0, 9], copied=1)]
    )  # the first 6 tokens of a: a block, and half of one
    states = runner.req_states
    for lengths in (states.prompt_len.np, states.prefill_len.np, states.num_computed_tokens_np):
        assert lengths.tolist() == [6, -1, -1, -1, -1, -1]
    assert states.num_computed_prefill_tokens.tolist() == [6, -1, -1, -1, -1, -1]
    assert states.num_computed_tokens.gpu.tolist() == [6, -1, -1, -1, -1, -1]
    assert states.total_len.gpu.tolist() == [6, -1, -1, -1, -1, -1]
    runner.block_tables.apply_staged_writes()
    assert runner.block_tables.applied == {4: [0, 1], 0: [0, 9]}
    assert torch.equal(runner.kv_caches[0][9], before[1])
    assert torch.equal(runner.kv_caches[0][:9], before[:9])


def test_several_reassignments_are_made_one_after_the_other() -> None:
    """A fork of a fork, and a request that is reassigned twice."""
    runner = Runner({"a": 4, "b": 0, "c": 2})
    runner.block_tables.put(4, 0, 1)
    runner.block_tables.put(0, 2, 3, 4)
    runner.block_tables.put(2, 2, 5)
    before, table = runner.kv_caches[0].clone(), runner.block_tables.block_tables[0].gpu
    table[2, 0] = 7  # a block that "c" keeps: it is not written
    over(runner).reassign(
        [
            reassignment("b", 6, [2, 9], copied=1, kept=1),
            reassignment("c", 6, [2, 8], copied=9, kept=1),
            reassignment("b", 11, [2, 6, 7], copied=5, kept=1),
        ]
    )
    assert runner.block_tables.applied == {4: [0, 1], 0: [2, 6, 7], 2: [7, 8]}
    copied = {9: 1, 8: 1, 7: 5}
    for block, source in copied.items():
        assert torch.equal(runner.kv_caches[0][block], before[source])
    assert runner.req_states.total_len.gpu.tolist() == [11, -1, 6, -1, -1, -1]


@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_many_reassignments_are_written_as_one_by_one(count: int) -> None:
    from genrt.engines.vllm.reassignment import ReassignedTables

    def runner() -> Any:
        states, tables = States({str(n): count - 1 - n for n in range(count)}), Tables()
        for each in (states.num_computed_tokens, states.total_len):
            each.gpu = torch.full((count,), -1, dtype=torch.int32)
        for name in ("num_computed_prefill_tokens", "num_computed_tokens_np"):
            setattr(states, name, np.full(count, -1))
        states.prompt_len, states.prefill_len = Backed(count), Backed(count)
        tables.block_tables[0].gpu = torch.full((count, WIDTH), -1, dtype=torch.int32)
        tables.num_blocks = Backed(1, count)
        return SimpleNamespace(req_states=states, block_tables=tables)

    reassignments = [
        reassignment(str(n), n + 3, [100 * n + k for k in range(1 + n % WIDTH)], None)
        for n in range(count)
    ]
    together, apart = runner(), runner()
    ReassignedTables(together).write(reassignments)
    for each in reassignments:
        ReassignedTables(apart).write([each])
    assert together.block_tables.applied == apart.block_tables.applied
    for name in ("num_computed_tokens", "total_len", "prompt_len", "prefill_len"):
        mine, theirs = (getattr(each.req_states, name).gpu for each in (together, apart))
        assert mine.tolist() == theirs.tolist() == [count + 2 - n for n in range(count)]
    assert together.block_tables.applied[count - 1] == [0]


def test_a_prepared_step_is_told_of_new_blocks() -> None:
    runner = Runner({"a": 4, "b": 0})
    shim = over(runner)
    step = shim.prepare(step_of(a=6, b=6))
    shim.reassign([reassignment("b", 6, [0, 9], copied=1)])
    shim.refresh(step)
    assert runner.attended == [(["b", "a"], {0: [0, 9]})]
    rows = shim.run(step, torch.tensor([2, 1], dtype=torch.int32))
    assert seen(rows) == [6002.0, 6001.0]


def test_rows_are_made_of_what_lies_there_now_and_for_few_sizes_at_once() -> None:
    from genrt.engines.vllm import runners

    hidden = torch.zeros(8, 1)
    rows = runners.RowLaunches(logits_of)
    for count in (4, 2, 8, 4, 6, 1, 3):
        hidden[:, 0] = torch.arange(1000.0, 1008.0) * count
        assert seen(rows.of(hidden[:count])) == (hidden[:count, 0]).tolist()
    assert [count for _, count in rows._sizes] == [4, 6, 1, 3]
