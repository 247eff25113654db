"""vLLM's model runners V1 and V2, where open requests reach into them: tokens, seats, logits.

A step can be *prepared* while the device still computes the step before it: ``execute_model`` puts in
place everything that a forward needs except its tokens, and is stopped right before the forward. Once the
tokens are known, they are written into the input buffer and the forward runs, again with other tokens if
the first ones were wrong. Once the tokens are certain, the step is *confirmed*.

What this touches of vLLM is listed in ``docs/new_vllm.md``; ``self_check.py`` compares rows
that come by these ways with rows that don't.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from genrt.engines.vllm.block_copies import BlockCopies

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["NextTokens", "Prepared", "Runner", "RunnerV1", "RunnerV2", "Seat", "runner_of"]


@dataclass(slots=True)
class NextTokens:
    """The next input tokens of different requests, as columns: each follows ``positions`` others, the
    first ``prompts`` of which vLLM takes for the request's prompt."""

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.request_ids)

    def add(self, others: NextTokens) -> None:
        """Add the tokens of other requests."""
        self.request_ids += others.request_ids
        self.token_ids += others.token_ids
        self.positions += others.positions
        self.prompts += others.prompts

    def at(self, places: Sequence[int]) -> NextTokens:
        """Return those at these places."""
        return NextTokens(
            [self.request_ids[n] for n in places],
            [self.token_ids[n] for n in places],
            [self.positions[n] for n in places],
            [self.prompts[n] for n in places],
        )

    def without(self, request_ids: Collection[str]) -> NextTokens:
        """Return those of other requests than these."""
        return self.at([n for n, each in enumerate(self.request_ids) if each not in request_ids])

    def in_order_of(self, request_ids: list[str]) -> NextTokens | None:
        """Return them in the order of these requests; ``None`` if they are not of these."""
        if self.request_ids == request_ids:
            return self
        places = {request_id: n for n, request_id in enumerate(self.request_ids)}
        if len(places) != len(request_ids) or not places.keys() >= set(request_ids):
            return None
        return self.at([places[request_id] for request_id in request_ids])


class Seat(NamedTuple):
    """A request that goes on as another sequence: that one's tokens, all of them computed, its blocks,
    and the block of which the last one must become a copy; ``None`` if the last block is new."""

    request_id: str
    token_ids: list[int]
    block_ids: list[int]
    copied: int | None


class Prepared(NamedTuple):
    """A step that lacks nothing but its tokens: its requests in the order of the batch, how many tokens
    come before each one's token, and what the runner needs to launch the forward."""

    request_ids: list[str]
    positions: list[int]
    launch: Any


class Runner(Protocol):
    """A runner as open requests need it, between two steps."""

    def prepare(self, output: SchedulerOutput, before: Prepared | None = None) -> Prepared | None:
        """Prepare a step of one token for each request; return ``None`` where the forward cannot be run
        apart from its preparation. ``before`` is the prepared step that ran last, if no other step has
        run since."""
        ...

    def refresh(self, step: Prepared) -> None:
        """Refresh a prepared step after some of its requests took other seats of the batch, at
        the same position."""
        ...

    def run(self, step: Prepared, token_ids: torch.Tensor) -> torch.Tensor:
        """Run a prepared step with these tokens, numbers ``[n]`` on the device, and return its logits,
        one row a request, both in the order of the step. It can be run again with other tokens."""
        ...

    def confirm(self, step: Prepared, tokens: NextTokens) -> None:
        """Record that these are the tokens with which the step was run last."""
        ...

    def reseat(self, seats: Sequence[Seat], *, in_place: bool = False) -> None:
        """Copy blocks, and have these requests go on as other sequences: ``in_place`` if they are all as
        long as those before, of which a prepared step is refreshed then."""
        ...

    def write(self, tokens: NextTokens) -> None:
        """Put the callers' tokens where the runner keeps those it sampled for these requests."""
        ...

    def take_logits(self) -> tuple[list[str], torch.Tensor]:
        """Take the forward's logits, one row a request, in place of sampling; return the requests too."""
        ...


def runner_of(model_runner: Any) -> Runner:
    """Return the interface to vLLM's runner, whichever it is."""
    if hasattr(model_runner, "input_batch"):
        return RunnerV1(model_runner)
    return RunnerV2(model_runner)


class _Stopped(Exception):
    """Raised in place of the forward, with what it would have been given."""


def _prepared(output: SchedulerOutput, request_ids: list[str], launch: Any) -> Prepared:
    # The runner may have sorted the batch: the positions follow its order, not the scheduler's.
    scheduled = output.scheduled_cached_reqs
    positions = dict(zip(scheduled.req_ids, scheduled.num_computed_tokens, strict=True))
    return Prepared(request_ids, [positions[request_id] for request_id in request_ids], launch)


def _copies(seats: Sequence[Seat]) -> list[tuple[int, int]]:
    """Return which KV blocks these requests go on with become copies of which."""
    return [(seat.copied, seat.block_ids[-1]) for seat in seats if seat.copied is not None]


class RunnerV1:
    """Requests have a record, and a row of the persistent batch while they are in it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._blocks = BlockCopies(runner)
        if runner.device.type == "cuda" and runner.prepare_inputs_event is None:
            # A step is prepared while the copies of the one before may still read the same buffers.
            runner.prepare_inputs_event = torch.Event(runner.device)

    def prepare(self, output: SchedulerOutput, before: Prepared | None = None) -> Prepared | None:
        def stop(**inputs: Any) -> NoReturn:
            raise _Stopped(get_forward_context(), inputs)

        runner = self._runner
        runner._model_forward = stop  # on the instance, in front of the class's own
        try:
            runner.execute_model(output)
        except _Stopped as stopped:
            context, inputs = stopped.args
        finally:
            del runner._model_forward
        if inputs["inputs_embeds"] is not None:  # made from the tokens, before the forward
            return None
        return _prepared(output, list(runner.input_batch.req_ids), (context, inputs))

    def refresh(self, step: Prepared) -> None:
        runner, count = self._runner, len(step.request_ids)
        tables = runner.input_batch.block_table
        tables.commit_block_table(count)
        tables.compute_slot_mapping(
            count, runner.query_start_loc.gpu[: count + 1], runner.positions[:count]
        )

    def run(self, step: Prepared, token_ids: torch.Tensor) -> torch.Tensor:
        runner = self._runner
        context, inputs = step.launch
        runner.input_ids.gpu[: len(token_ids)].copy_(token_ids)
        with override_forward_context(context):
            hidden_states = runner._model_forward(**inputs)
        logits: torch.Tensor = runner.model.compute_logits(hidden_states[: len(token_ids)])
        return logits

    def confirm(self, step: Prepared, tokens: NextTokens) -> None:
        self.write(tokens)

    def reseat(self, seats: Sequence[Seat], *, in_place: bool = False) -> None:
        self._blocks.copy(_copies(seats))
        batch = self._runner.input_batch
        for request_id, token_ids, block_ids, _ in seats:
            record = self._runner.requests[request_id]
            record.prompt_token_ids = token_ids
            record.num_prompt_tokens = record.num_computed_tokens = len(token_ids)
            record.output_token_ids.clear()
            record.block_ids = (block_ids,)
            index = batch.req_id_to_index.get(request_id)
            if index is not None:
                batch.num_prompt_tokens[index] = len(token_ids)
                batch.block_table.add_row((block_ids,), index)

    def write(self, tokens: NextTokens) -> None:
        batch = self._runner.input_batch
        requests = self._runner.requests
        indices: list[int] = []
        positions: list[int] = []
        token_ids: list[int] = []
        columns = (tokens.request_ids, tokens.token_ids, tokens.positions, tokens.prompts)
        for request_id, token_id, position, prompt in zip(*columns, strict=True):
            output_token_ids = requests[request_id].output_token_ids
            # After a step of vLLM's own, the record ends with the token that it sampled and dropped.
            if len(output_token_ids) > position - prompt:
                output_token_ids[-1] = token_id
            else:
                output_token_ids.append(token_id)
            index = batch.req_id_to_index.get(request_id)
            if index is not None:
                indices.append(index)
                positions.append(position)
                token_ids.append(token_id)
        if indices:
            at, after = np.array(indices), np.array(positions)
            batch.token_ids_cpu[at, after] = token_ids
            batch.is_token_ids[at, after] = True
            batch.num_tokens_no_spec[at] = after + 1

    def take_logits(self) -> tuple[list[str], torch.Tensor]:
        state, self._runner.execute_model_state = self._runner.execute_model_state, None
        return list(self._runner.input_batch.req_ids), state.logits


class _Stopping:
    """A stand-in for the KV connector, which the V2 runner tells of every forward: stops it."""

    def pre_forward(self, output: SchedulerOutput, batch: Any, **_: Any) -> NoReturn:
        """Raise ``_Stopped`` with the batch that the forward is about to compute."""
        raise _Stopped(batch)


class RunnerV2:
    """Requests have a slot for as long as they are known."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._blocks = BlockCopies(runner)

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
        except _Stopped as stopped:
            [batch] = stopped.args
        finally:
            runner.kv_connector = connector
            del runner.prepare_inputs
        [graph] = graphs
        if (
            graph.cg_mode != CUDAGraphMode.FULL
        ):  # only a full graph runs without the rest of the step
            return None
        return _prepared(output, list(batch.req_ids), (graph, batch, None))

    def _is_repeated(self, output: SchedulerOutput, before: Prepared) -> bool:
        """Return whether a step is of the same batch as the one before, and nothing but positions and
        blocks have to be prepared: for a model of text alone, without adapters."""
        runner = self._runner
        return (
            output.scheduled_cached_reqs.req_ids == before.request_ids
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
        """Prepare what differs from one step to the next of the same batch: what ``execute_model`` does,
        less what is in its place already. The forward reads it from the runner's buffers."""
        runner, states = self._runner, self._runner.req_states
        graph, batch, tables = before.launch
        scheduled = output.scheduled_cached_reqs
        computed = np.array(scheduled.num_computed_tokens, np.int32)
        states.num_computed_tokens_np[batch.idx_mapping_np] = computed
        new = [n for n, ids in enumerate(scheduled.new_block_ids) if ids is not None]
        for place in new:
            slot, block_ids = batch.idx_mapping_np[place], scheduled.new_block_ids[place]
            runner.block_tables.append_block_ids(slot, block_ids, overwrite=False)
        if new:
            runner.block_tables.apply_staged_writes()
        buffers = runner.input_buffers
        prepare_pos_seq_lens(
            batch.idx_mapping,
            batch.query_start_loc,
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens,
        )
        longest = torch.zeros_like(batch.seq_lens_cpu_upper_bound)
        longest[: len(computed)] = torch.from_numpy(computed) + 1
        batch = replace(batch, seq_lens_cpu_upper_bound=longest, num_computed_tokens_np=computed)
        if new or tables is None:
            tables, slots = runner.prepare_attn(batch)
        else:  # the tables are in the forward's buffer already
            slots = runner.block_tables.compute_slot_mappings(
                batch.idx_mapping,
                batch.query_start_loc,
                batch.positions,
                num_tokens_padded=batch.num_tokens_after_padding,
            )
        runner.model_state.prepare_attn(
            batch, graph.cg_mode, tables, slots, runner.attn_groups, runner.kv_cache_config
        )
        return Prepared(before.request_ids, scheduled.num_computed_tokens, (graph, batch, tables))

    def refresh(self, step: Prepared) -> None:
        _, batch, _ = step.launch
        self._runner.block_tables.apply_staged_writes()
        self._runner.prepare_attn(batch)

    def run(self, step: Prepared, token_ids: torch.Tensor) -> torch.Tensor:
        runner = self._runner
        graph, *_ = step.launch
        runner.input_buffers.input_ids[: len(token_ids)].copy_(token_ids)
        hidden_states = runner.cudagraph_manager.run_fullgraph(graph)
        logits: torch.Tensor = runner.model.compute_logits(hidden_states[: len(token_ids)])
        return logits

    def confirm(self, step: Prepared, tokens: NextTokens) -> None:
        _, batch, _ = step.launch
        self._runner.postprocess_num_computed_tokens(batch)

    def reseat(self, seats: Sequence[Seat], *, in_place: bool = False) -> None:
        self._blocks.copy(_copies(seats))
        states = self._runner.req_states
        for request_id, token_ids, block_ids, _ in seats:
            slot, length = states.req_id_to_index[request_id], len(token_ids)
            states.prompt_len.np[slot] = states.prefill_len.np[slot] = length
            states.num_computed_prefill_tokens[slot] = length
            states.num_computed_tokens_np[slot] = length
            self._runner.block_tables.append_block_ids(slot, (block_ids,), overwrite=True)
            if not in_place:
                states.num_computed_tokens.stage_write_elem(slot, length)
                states.total_len.stage_write_elem(slot, length)
        # In place, the device counts as many computed tokens already; and what it takes for the prompt
        # is of the sequence before, which was computed too.
        if not in_place:
            states.apply_staged_writes()

    def write(self, tokens: NextTokens) -> None:
        last = self._runner.req_states.last_sampled_tokens
        slots = self._runner.req_states.req_id_to_index
        pairs = torch.tensor([[slots[each] for each in tokens.request_ids], tokens.token_ids])
        if last.is_cuda:
            pairs = pairs.pin_memory().to(last.device, non_blocking=True)
        last[pairs[0], 0] = pairs[1]

    def take_logits(self) -> tuple[list[str], torch.Tensor]:
        state, self._runner.execute_model_state = self._runner.execute_model_state, None
        batch = state.input_batch
        logits = self._runner.model.compute_logits(state.hidden_states[batch.logits_indices])
        self._runner.postprocess_num_computed_tokens(batch)
        return list(batch.req_ids), logits
