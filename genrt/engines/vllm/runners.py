"""Drives vLLM's model runners V1 and V2 for open requests: tokens in, rows out.

A step is *prepared* while the device computes the previous one: ``execute_model`` is stopped before the
forward. With the tokens in the input buffer the forward *runs*, and again if they were wrong. When they
are certain, the step is *confirmed*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from cachetools import LRUCache
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from genrt.engines.vllm.capture import log_probabilities
from genrt.engines.vllm.reassignment import (
    BlockCopies,
    ReassignedTables,
    Reassignment,
    copies,
    last_reassignments,
)
from genrt.launches import Graphs, Repeated, Staged
from genrt.tokens.rows import moved

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class NextTokens:
    """The next input tokens of requests, as columns; one request's are in order. Each token follows
    ``positions`` others; vLLM counts the first ``prompts`` as the prompt."""

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def columns(self) -> tuple[list[Any], ...]:
        """The request ids, tokens, positions and prompts."""
        return self.request_ids, self.token_ids, self.positions, self.prompts

    def add(self, others: NextTokens) -> None:
        """Add the tokens of other requests."""
        for column, more in zip(self.columns, others.columns, strict=True):
            column += more

    def at(self, places: Sequence[int]) -> NextTokens:
        """Return the tokens at these places."""
        return NextTokens(*([column[n] for n in places] for column in self.columns))

    def without(self, request_ids: Collection[str]) -> NextTokens:
        """Return the tokens of all other requests."""
        return self.at([n for n, each in enumerate(self.request_ids) if each not in request_ids])

    def in_order_of(self, request_ids: list[str]) -> NextTokens | None:
        """Return the tokens in this order of requests; ``None`` if the requests differ."""
        if self.request_ids == request_ids:
            return self
        places = {request_id: n for n, request_id in enumerate(self.request_ids)}
        if len(places) != len(request_ids) or not places.keys() >= set(request_ids):
            return None
        return self.at([places[request_id] for request_id in request_ids])


class Prepared(NamedTuple):
    """A step that lacks only its tokens: its requests in the order of the batch, the number of tokens
    before each request's tokens, how many tokens it has, and the runner's data for the forward."""

    request_ids: list[str]
    positions: list[int]
    counts: list[int]
    launch: Any


def new_tokens(requests: Iterable[Request], computed: Iterable[int]) -> NextTokens:
    """Return all tokens of vLLM's requests after so many computed ones."""
    found = NextTokens()
    for request, first in zip(requests, computed, strict=True):
        more = request._all_token_ids[first:]
        own = [request.request_id] * len(more), more, [*range(first, first + len(more))]
        found.add(NextTokens(*own, [request.num_prompt_tokens] * len(more)))
    return found


class HiddenStates(NamedTuple):
    """The hidden states of a step's tokens, ``[m, size]``, request by request; request ``i``'s end
    before number ``ends[i]``."""

    request_ids: list[str]
    ends: np.ndarray
    states: torch.Tensor


class _Stopped(Exception):
    """Raised in place of the forward, with the forward's inputs."""


def _prepared(output: SchedulerOutput, request_ids: list[str], launch: Any) -> Prepared:
    """Return the ``Prepared`` of a step with these requests, in the order of the batch."""
    # The runner may have sorted the batch: the positions follow its order, not the scheduler's.
    scheduled = output.scheduled_cached_reqs
    positions = dict(zip(scheduled.req_ids, scheduled.num_computed_tokens, strict=True))
    counts = [output.num_scheduled_tokens[request_id] for request_id in request_ids]
    return Prepared(request_ids, [positions[each] for each in request_ids], counts, launch)


def step_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return the rows of a step's logits, without synchronizing with the device."""
    return read_elsewhere(log_probabilities(logits, may_overwrite=True))


def read_elsewhere(rows: torch.Tensor) -> torch.Tensor:
    """Mark rows of vLLM's stream as read on the default stream, and return them."""
    if rows.is_cuda:
        rows.record_stream(torch.cuda.default_stream(rows.device))
    return rows


class RowLaunches:
    """Makes rows from hidden states that have the same address whenever there are as many."""

    def __init__(self, compute_logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._compute_logits = compute_logits
        self._graphs = Graphs()
        # The launch for hidden states of one address and number, and its rows.
        self._sizes: LRUCache[tuple[int, int], tuple[Repeated, list[torch.Tensor]]]
        self._sizes = LRUCache(4)

    def of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the rows. They are valid until rows of the same size are made again."""
        key = hidden_states.data_ptr(), len(hidden_states)
        if key not in self._sizes:
            compute_logits, made = self._compute_logits, [hidden_states]

            def make() -> None:
                made[0] = step_rows(compute_logits(hidden_states))

            self._sizes[key] = Repeated(make, graphs=self._graphs), made
        launch, rows = self._sizes[key]
        launch()
        return rows[0]


class _InputTokens:
    """Writes the tokens of prepared steps to the runner's input buffer, int32."""

    def __init__(self, input_ids: torch.Tensor) -> None:
        self._input_ids = input_ids
        self._several: dict[int, _SizedInput] = {}

    def put(self, token_ids: torch.Tensor, order: Sequence[int] | None) -> None:
        """Write token ``order[i]``, or ``i``, at place ``i``; a negative number becomes token 0."""
        count = len(token_ids)
        if count not in self._several:
            self._several[count] = _SizedInput(self._input_ids[:count])
        self._several[count].put(token_ids, order)


class _SizedInput:
    """``_InputTokens`` for one number of tokens."""

    def __init__(self, input_ids: torch.Tensor) -> None:
        given, taken = torch.zeros(2, len(input_ids), dtype=torch.float64, device=input_ids.device)
        self._given = given

        def take(order: torch.Tensor) -> None:
            torch.index_select(given, 0, order, out=taken)
            input_ids.copy_(taken.clamp_(min=0.0))

        self._take = Staged((len(input_ids),), input_ids.device, take)
        self._order: Sequence[int] | None = ()

    def put(self, token_ids: torch.Tensor, order: Sequence[int] | None) -> None:
        self._given.copy_(token_ids, non_blocking=True)
        if order != self._order:
            self._take.free()[:] = range(len(token_ids)) if order is None else order
            self._order = order
        self._take.launch()


class RunnerV1:
    """Runner V1 between two steps: a request has a record, and a row of the persistent batch while it is
    in the batch."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._blocks = BlockCopies(runner)
        self._inputs = _InputTokens(runner.input_ids.gpu)
        self._rows = RowLaunches(lambda hidden_states: runner.model.compute_logits(hidden_states))
        if runner.device.type == "cuda" and runner.prepare_inputs_event is None:
            # A step is prepared while the previous step's copies may still read the same buffers.
            runner.prepare_inputs_event = torch.Event(runner.device)

    def prepare(self, output: SchedulerOutput, before: Prepared | None = None) -> Prepared | None:
        """Prepare a step of one token for each request, or of a block as ``before``; ``None`` if its
        forward cannot run by itself. ``before`` is the step of this kind that ran last, if no other step
        has run since."""

        def stop(**inputs: Any) -> NoReturn:
            raise _Stopped(get_forward_context(), inputs)

        runner = self._runner
        runner._model_forward = stop  # set on the instance, so that it hides the class's method
        try:
            runner.execute_model(output)
        except _Stopped as stopped:
            context, inputs = stopped.args
        finally:
            del runner._model_forward
        # Embeddings are made from the tokens before the forward.
        if inputs["inputs_embeds"] is not None:
            return None
        return _prepared(output, list(runner.input_batch.req_ids), (context, inputs))

    def refresh(self, step: Prepared) -> None:
        """Update a prepared step after some requests were reassigned at the same position."""
        runner, count = self._runner, len(step.request_ids)
        tables = runner.input_batch.block_table
        tables.commit_block_table(count)
        tables.compute_slot_mapping(
            count, runner.query_start_loc.gpu[: count + 1], runner.positions[:count]
        )

    def run(
        self, step: Prepared, token_ids: torch.Tensor, order: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run a prepared step, perhaps again, and return its rows in the order of its requests, valid
        until a step runs. Request ``i`` gets token ``i``, or ``order[i]``, of ``token_ids`` ``[n]``, on
        the device or in pinned memory; a negative number is token 0."""
        runner = self._runner
        context, inputs = step.launch
        self._inputs.put(token_ids, order)
        with override_forward_context(context):
            hidden_states = runner._model_forward(**inputs)
        # A full graph reuses the memory for hidden states. An adapter's logits depend on the batch.
        is_graph = context.cudagraph_runtime_mode == CUDAGraphMode.FULL
        if is_graph and runner.lora_config is None:
            return self._rows.of(hidden_states)[: len(token_ids)]
        return step_rows(runner.model.compute_logits(hidden_states[: len(token_ids)]))

    def confirm(self, step: Prepared, tokens: NextTokens) -> None:
        """Record that the step ran last with the right tokens for these requests; the results of its
        other requests do not count."""
        self.write(tokens)

    def execute(self, output: SchedulerOutput) -> None:
        """Run the forward of a step of one token for each request."""
        self._runner.execute_model(output)

    def run_block(
        self, output: SchedulerOutput, requests: Mapping[str, Request], before: Prepared | None
    ) -> tuple[HiddenStates, Prepared | None]:
        """Run a step as ``execute_block`` does. Return its hidden states, valid until the next forward,
        and ``before`` for the next block, if no other step runs until then."""
        self.execute_block(output, requests)
        states = self.take_hidden_states()
        return states, _prepared(output, states.request_ids, None)

    def run_prepared_block(self, step: Prepared, requests: Mapping[str, Request]) -> HiddenStates:
        """Run a prepared step with all tokens of these requests, as ``run_block`` does."""
        runner, these = self._runner, (requests[each] for each in step.request_ids)
        tokens = new_tokens(these, step.positions)
        self.write(tokens)
        runner.input_ids.gpu[: len(tokens)].copy_(torch.tensor(tokens.token_ids))
        context, inputs = step.launch
        with override_forward_context(context):
            states = runner._model_forward(**inputs)
        return HiddenStates(step.request_ids, np.cumsum(step.counts), states)

    def execute_block(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Run the forward of a step of any number of tokens for each request, which vLLM's requests
        have; no other code writes them."""
        scheduled = output.scheduled_cached_reqs
        these = [requests[each] for each in scheduled.req_ids]
        self.write(new_tokens(these, scheduled.num_computed_tokens))
        self._runner.execute_model(output)

    def reassign(self, reassignments: Sequence[Reassignment]) -> None:
        """Copy blocks, and make these requests continue as other sequences, one after the other."""
        self._blocks.copy(copies(reassignments))
        batch = self._runner.input_batch
        for request, length, new, _, kept in last_reassignments(reassignments):
            record = self._runner.requests[request.request_id]
            block_ids = [*record.block_ids[0][:kept], *new]
            record.prompt_token_ids = request.prompt_token_ids
            record.num_prompt_tokens, record.num_computed_tokens = request.num_prompt_tokens, length
            outputs = request._output_token_ids[: length - request.num_prompt_tokens]
            record.output_token_ids[:] = outputs  # without a later token that was appended since
            record.block_ids = (block_ids,)
            index = batch.req_id_to_index.get(request.request_id)
            if index is not None:
                batch.num_prompt_tokens[index] = request.num_prompt_tokens
                batch.block_table.add_row((block_ids,), index)

    def write(self, tokens: NextTokens) -> None:
        """Write the callers' tokens to the place of the runner's sampled tokens."""
        batch, requests = self._runner.input_batch, self._runner.requests
        for request_id, token_id, position, prompt in zip(*tokens.columns, strict=True):
            output_token_ids = requests[request_id].output_token_ids
            # After one of vLLM's own steps, the record ends with the sampled token that was dropped.
            if len(output_token_ids) > position - prompt:
                output_token_ids[-1] = token_id
            else:
                output_token_ids.append(token_id)
        indices = np.array([batch.req_id_to_index.get(each, -1) for each in tokens.request_ids])
        present = indices >= 0
        at, after = indices[present], np.array(tokens.positions)[present]
        batch.token_ids_cpu[at, after] = np.array(tokens.token_ids)[present]
        batch.is_token_ids[at, after] = True
        batch.num_tokens_no_spec[at] = after + 1

    def take_rows(self) -> tuple[list[str], torch.Tensor]:
        """Return the forward's requests and their rows, in place of sampling."""
        state, self._runner.execute_model_state = self._runner.execute_model_state, None
        return list(self._runner.input_batch.req_ids), step_rows(state.logits)

    def take_hidden_states(self) -> HiddenStates:
        """Return the forward's hidden states, valid until the next forward, in place of sampling."""
        state, self._runner.execute_model_state = self._runner.execute_model_state, None
        request_ids = list(self._runner.input_batch.req_ids)
        ends = self._runner.query_start_loc.np[1 : len(request_ids) + 1].astype(np.int64)
        return HiddenStates(request_ids, ends, state.hidden_states)


@dataclass(slots=True)
class _StepKind:
    """The launches for steps of all batches with one CUDA graph and one number of requests. Their inputs
    and outputs have the same addresses for each of these batches."""

    batch: Any  # vLLM's description of such a step, with its own tensor ``idx_mapping`` of slots
    slots: np.ndarray  # that ``idx_mapping`` has now
    count: Repeated  # counts the step's tokens as computed
    # Finds blocks and slots after blocks have changed. vLLM alternates between two buffers for the
    # numbers of blocks, so there is one launch for each address.
    look_up: dict[int, Repeated] = field(default_factory=dict)
    tables: Any = None  # the block tables in the forward's buffer, once they are there
    place: Repeated | None = None  # finds positions and slots, if it is the same in every step


class _StepLaunch(NamedTuple):
    """The batch of a step and of the steps after it."""

    graph: Any  # vLLM's description of the forward's CUDA graph
    slots: np.ndarray  # of the requests, on the host
    kind: _StepKind


class _StopsForward:
    """A stand-in for the KV connector, which the V2 runner calls before every forward: it stops it."""

    def pre_forward(self, output: SchedulerOutput, batch: Any, **_: Any) -> NoReturn:
        """Raise ``_Stopped`` with the batch that the forward is about to compute."""
        raise _Stopped(batch)


class RunnerV2:
    """Runner V2 with the methods of ``RunnerV1``: a request has a slot as long as the runner knows it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._blocks = BlockCopies(runner)
        self._reassigned_tables = ReassignedTables(runner)
        self._inputs = _InputTokens(runner.input_buffers.input_ids)
        self._rows = RowLaunches(lambda hidden_states: runner.model.compute_logits(hidden_states))
        # By the graph and the number of tokens of each request.
        self._kinds: LRUCache[tuple[Any, ...], _StepKind] = LRUCache(16)
        self._is_moved = False  # blocks have changed since a forward looked them up
        # Requests with a speculated token that no caller wanted.
        self._overcounted: set[str] = set()

    def prepare(self, output: SchedulerOutput, before: Prepared | None = None) -> Prepared | None:
        if before is not None and self._is_repeated(output, before):
            return self._repeated(output, before)
        runner = self._runner
        connector, prepare_inputs = runner.kv_connector, runner.prepare_inputs
        graphs: list[Any] = []

        def keep_graph(output: SchedulerOutput, state: Any, graph: Any, *more: Any) -> Any:
            graphs.append(graph)
            batch = prepare_inputs(output, state, graph, *more)
            if max(output.num_scheduled_tokens.values()) > 1:
                batch.max_query_len = graph.max_query_len  # as the graph was captured
            return batch

        runner.kv_connector, runner.prepare_inputs = _StopsForward(), keep_graph
        try:
            runner.execute_model(output)
        except _Stopped as stopped:
            [batch] = stopped.args
        finally:
            runner.kv_connector = connector
            del runner.prepare_inputs
        self._is_moved = False
        [graph] = graphs
        if graph.cg_mode != CUDAGraphMode.FULL:  # no other graph runs without the rest of the step
            return None
        return self._launched(output, graph, batch)

    def _launched(self, output: SchedulerOutput, graph: Any, batch: Any) -> Prepared:
        step = _prepared(output, list(batch.req_ids), None)
        kind = self._kind(graph, batch, step.counts)
        return Prepared(*step[:-1], _StepLaunch(graph, batch.idx_mapping_np, kind))

    def _kind(self, graph: Any, batch: Any, counts: list[int]) -> _StepKind:
        key, slots = (graph, *counts), batch.idx_mapping_np
        kind = self._kinds.get(key)
        if kind is None:
            own = replace(batch, idx_mapping=torch.empty_like(batch.idx_mapping))
            count = Repeated(lambda: self._runner.postprocess_num_computed_tokens(own))
            kind = self._kinds[key] = _StepKind(own, slots, count)
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
        """Return whether a step of a text model has the previous batch: it needs positions and blocks."""
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
        """Prepare the parts that differ between steps of the same batch, in the runner's buffers."""
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
            longest[: len(computed)] = torch.from_numpy(computed + np.array(before.counts))
            now = replace(batch, seq_lens_cpu_upper_bound=longest, num_computed_tokens_np=computed)
            self._place(launch.graph, now, kind.tables)
        return Prepared(before.request_ids, scheduled.num_computed_tokens, before.counts, launch)

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

    def _look_up(self, kind: _StepKind) -> None:
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
            return step_rows(runner.model.compute_logits(hidden_states[:count]))
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

    def run_block(
        self, output: SchedulerOutput, requests: Mapping[str, Request], before: Prepared | None
    ) -> tuple[HiddenStates, Prepared | None]:
        counts = [*output.num_scheduled_tokens.values()]
        if before is not None and before.counts == counts and self._is_repeated(output, before):
            self._correct_for(output)
            step = self._repeated(output, before)
            return self.run_prepared_block(step, requests), step
        graph = self.execute_block(output, requests)
        self._is_moved = False
        batch, scheduled = (
            self._runner.execute_model_state.input_batch,
            output.scheduled_cached_reqs,
        )
        request_ids = list(batch.req_ids)
        following = None
        if graph.cg_mode == CUDAGraphMode.FULL and request_ids == scheduled.req_ids:
            following = self._launched(output, graph, batch)
        return self.take_hidden_states(), following

    def run_prepared_block(self, step: Prepared, requests: Mapping[str, Request]) -> HiddenStates:
        self._put(requests, step.request_ids, step.positions)
        states = self._runner.cudagraph_manager.run_fullgraph(step.launch.graph)
        step.launch.kind.count()
        return HiddenStates(step.request_ids, np.cumsum(step.counts), states)

    def execute_block(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> Any:
        runner, graphs = self._runner, list[Any]()
        self._correct_for(output)
        prepare_inputs = runner.prepare_inputs

        def with_tokens(output: SchedulerOutput, state: Any, graph: Any, *more: Any) -> Any:
            batch = prepare_inputs(output, state, graph, *more)
            batch.max_query_len = graph.max_query_len  # as the graph was captured
            self._put(requests, batch.req_ids, batch.num_computed_tokens_np.tolist())
            graphs.append(graph)
            return batch

        runner.prepare_inputs = with_tokens
        try:
            runner.execute_model(output)
        finally:
            del runner.prepare_inputs
        return graphs[-1]

    def _correct_for(self, output: SchedulerOutput) -> None:
        scheduled = output.scheduled_cached_reqs
        pairs = zip(scheduled.req_ids, scheduled.num_computed_tokens, strict=True)
        if self._overcounted and self._corrected(dict(pairs)):
            self._runner.req_states.apply_staged_writes()

    def _put(
        self, requests: Mapping[str, Request], request_ids: Sequence[str], computed: Sequence[int]
    ) -> None:
        """Write all tokens after the computed ones to the input buffer, request by request."""
        inputs = self._runner.input_buffers.input_ids
        pairs = zip(request_ids, computed, strict=True)
        own = (requests[request_id]._all_token_ids[at:] for request_id, at in pairs)
        token_ids = torch.tensor([*chain(*own)], dtype=inputs.dtype)
        if inputs.is_cuda:
            token_ids = token_ids.pin_memory()
        inputs[: len(token_ids)].copy_(token_ids, non_blocking=True)

    def reassign(self, reassignments: Sequence[Reassignment]) -> None:
        self._blocks.copy(copies(reassignments))
        last = last_reassignments(reassignments)
        self._reassigned_tables.write(last)
        self._overcounted.difference_update(each.request.request_id for each in last)
        self._is_moved = True

    def write(self, tokens: NextTokens) -> None:
        states = self._runner.req_states
        last, slots = states.last_sampled_tokens, states.req_id_to_index
        firsts = dict(zip(tokens.request_ids[::-1], tokens.positions[::-1], strict=True))
        is_changed = self._corrected(firsts)
        if is_block := len(firsts) < len(tokens):
            self._stage_blocks(tokens, firsts)
        if is_changed or is_block:
            states.apply_staged_writes()
        pairs = torch.tensor([[slots[each] for each in tokens.request_ids], tokens.token_ids])
        at, token_ids = moved(pairs, last.device)
        last[at, 0] = token_ids

    def _corrected(self, computed: Mapping[str, int]) -> bool:
        """Stage the computed tokens of requests that were overcounted; return whether there are some."""
        over, states = self._overcounted.intersection(computed), self._runner.req_states
        for request_id in over:
            slot = states.req_id_to_index[request_id]
            states.num_computed_tokens.stage_write_elem(slot, computed[request_id])
        self._overcounted -= over
        return bool(over)

    def _stage_blocks(self, tokens: NextTokens, firsts: dict[str, int]) -> None:
        """Stage several tokens of a request as the rest of a prompt, which vLLM reads from its tokens."""
        states = self._runner.req_states
        several: dict[str, list[int]] = {each: [] for each in firsts}
        for request_id, token_id in zip(tokens.request_ids, tokens.token_ids, strict=True):
            several[request_id].append(token_id)
        for request_id, more in several.items():
            if len(more) > 1:
                slot, first = states.req_id_to_index[request_id], firsts[request_id]
                states.all_token_ids.stage_write(slot, first, more)
                states.prefill_len.np[slot] = first + len(more)

    def take_rows(self) -> tuple[list[str], torch.Tensor]:
        state, self._runner.execute_model_state = self._runner.execute_model_state, None
        batch = state.input_batch
        logits = self._runner.model.compute_logits(state.hidden_states[batch.logits_indices])
        self._runner.postprocess_num_computed_tokens(batch)
        return list(batch.req_ids), step_rows(logits)

    def take_hidden_states(self) -> HiddenStates:
        state, self._runner.execute_model_state = self._runner.execute_model_state, None
        batch = state.input_batch
        self._runner.postprocess_num_computed_tokens(batch)
        ends = batch.query_start_loc_np[1 : len(batch.req_ids) + 1].astype(np.int64)
        return HiddenStates(list(batch.req_ids), ends, state.hidden_states)


Runner: TypeAlias = RunnerV1 | RunnerV2
"""A model runner as open requests use it between two steps."""
