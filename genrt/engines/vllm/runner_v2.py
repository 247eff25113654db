"""Drives vLLM's model runner V2 for open requests; see ``runners.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from cachetools import LRUCache
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from genrt.engines.vllm.block_copies import BlockCopies
from genrt.engines.vllm.runners import NextTokens, Prepared, Runner, Stopped, prepared
from genrt.engines.vllm.seat_tables import SeatTables
from genrt.engines.vllm.seats import Seat, copies, last_seats
from genrt.engines.vllm.step_launches import InputTokens, Rows, rows_of
from genrt.launches import Repeated

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["RunnerV2"]


MOST_KINDS = 16
"""The most kinds of batches with cached launches."""


@dataclass(slots=True)
class _Kind:
    """The launches for steps of all batches with one CUDA graph and one number of requests. Their inputs
    and outputs have the same addresses for each of these batches.

    Attributes:
        batch: vLLM's description of such a step, with its own tensor ``idx_mapping`` of request slots.
        slots: the slots that ``idx_mapping`` has now.
        count: counts the step's tokens as computed.
        look_up: finds blocks and slots after blocks have changed. vLLM alternates between two buffers for
            the numbers of blocks, so there is one launch for each address.
        tables: the block tables in the forward's buffer, once they are there.
        place: finds positions and slots, if its launch is the same in every step.
    """

    batch: Any
    slots: np.ndarray
    count: Repeated
    look_up: dict[int, Repeated] = field(default_factory=dict)
    tables: Any = None
    place: Repeated | None = None


class _Batch(NamedTuple):
    """The batch of a step and of the steps after it.

    Attributes:
        graph: vLLM's description of the forward's CUDA graph.
        slots: of the requests, on the host.
    """

    graph: Any
    slots: np.ndarray
    kind: _Kind


class _Stopping:
    """A stand-in for the KV connector, which the V2 runner calls before every forward: it stops it."""

    def pre_forward(self, output: SchedulerOutput, batch: Any, **_: Any) -> NoReturn:
        """Raise ``Stopped`` with the batch that the forward is about to compute."""
        raise Stopped(batch)


class RunnerV2(Runner):
    """A request has a slot as long as the runner knows it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._blocks = BlockCopies(runner)
        self._seats = SeatTables(runner)
        self._inputs = InputTokens(runner.input_buffers.input_ids)
        self._rows = Rows(lambda hidden_states: runner.model.compute_logits(hidden_states))
        self._kinds: LRUCache[tuple[Any, int], _Kind] = LRUCache(MOST_KINDS)
        self._is_moved = False  # blocks have changed since a forward looked them up
        # Requests with a speculated token that no caller asked for.
        self._overcounted: set[str] = set()

    def prepare(self, output: SchedulerOutput, before: Prepared | None = None) -> Prepared | None:
        if before is not None and self._is_repeated(output, before):
            return self._repeated(output, before)
        runner = self._runner
        connector, prepare_inputs = runner.kv_connector, runner.prepare_inputs
        graphs: list[Any] = []

        def keep_graph(output: SchedulerOutput, state: Any, graph: Any, *more: Any) -> Any:
            graphs.append(graph)
            return prepare_inputs(output, state, graph, *more)

        runner.kv_connector, runner.prepare_inputs = _Stopping(), keep_graph
        try:
            runner.execute_model(output)
        except Stopped as stopped:
            [batch] = stopped.args
        finally:
            runner.kv_connector = connector
            del runner.prepare_inputs
        self._is_moved = False
        [graph] = graphs
        if (
            graph.cg_mode != CUDAGraphMode.FULL
        ):  # only a full graph can run without the rest of the step
            return None
        launch = _Batch(graph, batch.idx_mapping_np, self._kind(graph, batch))
        return prepared(output, list(batch.req_ids), launch)

    def _kind(self, graph: Any, batch: Any) -> _Kind:
        """Return the launches for the steps of a batch."""
        key, slots = (graph, len(batch.req_ids)), batch.idx_mapping_np
        kind = self._kinds.get(key)
        if kind is None:
            own = replace(batch, idx_mapping=torch.empty_like(batch.idx_mapping))
            count = Repeated(lambda: self._runner.postprocess_num_computed_tokens(own))
            kind = self._kinds[key] = _Kind(own, slots, count)
        kind.batch.idx_mapping.copy_(batch.idx_mapping)
        kind.slots = slots
        return kind

    def _has_fixed_metadata(self) -> bool:
        """Return whether the attention reads everything that changes between steps from the device."""
        return all(
            type(builder) is FlashAttentionMetadataBuilder
            for groups in self._runner.attn_groups
            for group in groups
            for builder in group.metadata_builders
        )

    def _is_repeated(self, output: SchedulerOutput, before: Prepared) -> bool:
        """Return whether a step has the batch of the previous one and needs only positions and blocks.
        The model must be a text model without adapters."""
        runner = self._runner
        return (
            output.scheduled_cached_reqs.req_ids == before.request_ids
            and before.launch.kind.slots is before.launch.slots
            and not output.finished_req_ids
            and not output.preempted_req_ids
            and not output.new_block_ids_to_zero
            and type(runner.model_state) is DefaultModelState
            and runner.model_state.rope_state is None
            and not runner.uses_inputs_embeds
            and runner.fast_prefill is None
            and runner.lora_config is None
            and runner.dcp_size == 1
            and runner.pcp_manager is None
            and runner.model_config.rswa_window is None
        )

    def _repeated(self, output: SchedulerOutput, before: Prepared) -> Prepared:
        """Prepare the parts that differ between steps of the same batch. The forward reads them from the
        runner's buffers."""
        runner, states, launch = self._runner, self._runner.req_states, before.launch
        scheduled, kind, slots = output.scheduled_cached_reqs, launch.kind, launch.slots
        computed = np.array(scheduled.num_computed_tokens, np.int32)
        states.num_computed_tokens_np[slots] = computed
        new = [n for n, ids in enumerate(scheduled.new_block_ids) if ids is not None]
        for n in new:
            block_ids = scheduled.new_block_ids[n]
            runner.block_tables.append_block_ids(slots[n], block_ids, overwrite=False)
        if new:
            runner.block_tables.apply_staged_writes()
        batch = kind.batch
        if kind.tables is None:
            kind.tables, _ = runner.prepare_attn(batch)
        elif new or self._is_moved:
            self._look_up(kind)
        self._is_moved = False
        if kind.place is None and self._has_fixed_metadata():
            # vLLM captures its forward in this way: the bounds of the longest sequence fit every step.
            longest = torch.full_like(batch.seq_lens_cpu_upper_bound, runner.max_model_len)
            fixed = launch.graph, replace(batch, seq_lens_cpu_upper_bound=longest), kind.tables
            kind.place = Repeated(lambda: self._place(*fixed))
        if kind.place is not None:
            kind.place()
        else:
            longest = torch.zeros_like(batch.seq_lens_cpu_upper_bound)
            longest[: len(computed)] = torch.from_numpy(computed) + 1
            now = replace(batch, seq_lens_cpu_upper_bound=longest, num_computed_tokens_np=computed)
            self._place(launch.graph, now, kind.tables)
        return Prepared(before.request_ids, scheduled.num_computed_tokens, launch)

    def _place(self, graph: Any, batch: Any, tables: Any) -> None:
        """Compute the positions and slots of a step, and set up the attention with them."""
        runner = self._runner
        prepare_pos_seq_lens(
            batch.idx_mapping,
            batch.query_start_loc,
            runner.req_states.num_computed_tokens.gpu,
            runner.input_buffers.positions,
            runner.input_buffers.seq_lens,
        )
        slots = runner.block_tables.compute_slot_mappings(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            num_tokens_padded=batch.num_tokens_after_padding,
        )
        runner.model_state.prepare_attn(
            batch, graph.cg_mode, tables, slots, runner.attn_groups, runner.kv_cache_config
        )

    def _look_up(self, kind: _Kind) -> None:
        """Look up a step's changed blocks, and the slots of the positions in the input buffer."""
        place = self._runner.block_tables.num_blocks.gpu.data_ptr()
        if place not in kind.look_up:
            kind.look_up[place] = Repeated(lambda: self._runner.prepare_attn(kind.batch))
        kind.look_up[place]()

    def refresh(self, step: Prepared) -> None:
        self._look_up(step.launch.kind)
        self._is_moved = False

    def run(
        self, step: Prepared, token_ids: torch.Tensor, order: Sequence[int] | None = None
    ) -> torch.Tensor:
        self._inputs.put(token_ids, order)
        runner, count = self._runner, len(token_ids)
        hidden_states = runner.cudagraph_manager.run_fullgraph(step.launch.graph)
        if runner.lora_config is not None:  # an adapter's logits depend on the batch's requests
            return rows_of(runner.model.compute_logits(hidden_states[:count]))
        # The graph pads the batch, so there are rows of padding too.
        return self._rows.of(hidden_states)[:count]

    def confirm(self, step: Prepared, tokens: NextTokens) -> None:
        step.launch.kind.count()
        if len(tokens) < len(step.request_ids):
            # The other requests count as not computed; ``write`` corrects the device when they continue.
            self._overcounted.update(set(step.request_ids).difference(tokens.request_ids))
            self._overcounted &= self._runner.req_states.req_id_to_index.keys()

    def execute(self, output: SchedulerOutput) -> None:
        self._runner.execute_model(output)

    def reseat(self, seats: Sequence[Seat]) -> None:
        self._blocks.copy(copies(seats))
        last = last_seats(seats)
        self._seats.write(last)
        self._overcounted.difference_update(seat.request.request_id for seat in last)
        self._is_moved = True

    def write(self, tokens: NextTokens) -> None:
        states = self._runner.req_states
        last, slots = states.last_sampled_tokens, states.req_id_to_index
        if over := self._overcounted.intersection(tokens.request_ids):
            for request_id, position in zip(tokens.request_ids, tokens.positions, strict=True):
                if request_id in over:
                    states.num_computed_tokens.stage_write_elem(slots[request_id], position)
            states.apply_staged_writes()
            self._overcounted -= over
        pairs = torch.tensor([[slots[each] for each in tokens.request_ids], tokens.token_ids])
        if last.is_cuda:
            pairs = pairs.pin_memory().to(last.device, non_blocking=True)
        last[pairs[0], 0] = pairs[1]

    def take_rows(self) -> tuple[list[str], torch.Tensor]:
        state, self._runner.execute_model_state = self._runner.execute_model_state, None
        batch = state.input_batch
        logits = self._runner.model.compute_logits(state.hidden_states[batch.logits_indices])
        self._runner.postprocess_num_computed_tokens(batch)
        return list(batch.req_ids), rows_of(logits)
