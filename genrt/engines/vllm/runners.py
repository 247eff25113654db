"""vLLM's model runners V1 and V2, where open requests reach into them: tokens, seats, logits.

A step can be *held*: everything that a forward needs but its tokens is put in place, while the device
still computes the step before, by having ``execute_model`` stop right before the forward. When the tokens
are known they are written into the input buffer, and the forward is run; with other tokens again, if
need be. Once they are certain, the step is *confirmed*.

Private to vLLM and touched here: the V1 runner's ``requests``, ``input_batch``, ``input_ids``,
``execute_model_state``, ``_model_forward`` and ``prepare_inputs_event``; the V2 runner's ``req_states``,
``block_tables``, ``input_buffers``, ``execute_model_state``, ``prepare_inputs``, ``prepare_attn``,
``kv_connector``, ``cudagraph_manager`` and ``postprocess_num_computed_tokens``; the ``kv_caches`` of
both. ``self_check.py`` compares rows that come by these ways with rows that don't.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["Held", "Next", "Runner", "Seat", "runner_of"]


class Next(NamedTuple):
    """A request's next input token, which follows ``position`` others; ``prompt`` of those its prompt."""

    request_id: str
    token_id: int
    position: int
    prompt: int


class Seat(NamedTuple):
    """A request that goes on as another sequence: the tokens it has, all computed, its blocks, and which
    block the last of them is a copy of, if it is one."""

    request_id: str
    token_ids: list[int]
    block_ids: list[int]
    copied: int | None


class Held(NamedTuple):
    """A step that lacks nothing but its tokens: whose they are, in the order of the batch, how many
    tokens come before each, and what the runner needs to launch the forward."""

    request_ids: list[str]
    positions: list[int]
    launch: Any


def _held(output: SchedulerOutput, request_ids: list[str], launch: Any) -> Held:
    scheduled = output.scheduled_cached_reqs
    positions = dict(zip(scheduled.req_ids, scheduled.num_computed_tokens, strict=True))
    return Held(request_ids, [positions[name] for name in request_ids], launch)


class Runner(Protocol):
    """What open requests need of a runner, between two steps."""

    def hold(self, output: SchedulerOutput) -> Held | None:
        """Prepare a step of one token for each request; ``None`` where the forward needs the tokens
        earlier, or is not to be had apart."""
        ...

    def refresh(self, held: Held) -> None:
        """Tell a held step of requests that were reseated since, none of them to another position."""
        ...

    def run(self, held: Held, token_ids: torch.Tensor) -> torch.Tensor:
        """The logits of a held step with these tokens, int32 ``[n]`` on the device, one row a request; in
        the order of the step. Can be repeated with others."""
        ...

    def confirm(self, held: Held, tokens: Sequence[Next]) -> None:
        """These are the tokens that the step was run with last."""
        ...

    def reseat(self, seats: Sequence[Seat]) -> None:
        """Copy blocks, and have these requests go on as other sequences."""
        ...

    def write(self, tokens: Sequence[Next]) -> None:
        """Put the callers' tokens where the runner has those it sampled for these requests."""
        ...

    def take_logits(self) -> tuple[list[str], torch.Tensor]:
        """In place of sampling: whose logits the forward computed, and these, one row a request."""
        ...


def runner_of(model_runner: Any) -> Runner:
    """The interface to vLLM's runner, whichever it is."""
    return _V1(model_runner) if hasattr(model_runner, "input_batch") else _V2(model_runner)


class _Stopped(Exception):
    """Raised in place of the forward, with what it would have been given."""


class _Blocks:
    """The KV memory that both runners have."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def copy_blocks(self, seats: Sequence[Seat]) -> None:
        """Make the copies that these go on with."""
        caches, count = self._runner.kv_caches, self._runner.kv_cache_config.num_blocks
        copies = [(seat.copied, seat.block_ids[-1]) for seat in seats if seat.copied is not None]
        if caches[0].device.type != "cpu":
            copy_kv_cache_blocks_inplace(caches, count, copies)
            return
        # On a CPU, to gather blocks and scatter them takes five times as long as to copy each.
        for cache in {cache.data_ptr(): cache for cache in caches}.values():
            blocks = cache.unflatten(0, (count, -1))
            for source, copy in copies:
                blocks[copy].copy_(blocks[source])


class _V1(_Blocks):
    """Requests have a record, and a row of the persistent batch while they are in it."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        if runner.device.type == "cuda" and runner.prepare_inputs_event is None:
            # A step is prepared while the copies of the one before may still read the same buffers.
            runner.prepare_inputs_event = torch.Event(runner.device)

    def hold(self, output: SchedulerOutput) -> Held | None:
        def stop(**inputs: Any) -> NoReturn:
            raise _Stopped(get_forward_context(), inputs)

        runner = self._runner
        runner._model_forward = stop
        try:
            runner.execute_model(output)
        except _Stopped as stopped:
            context, inputs = stopped.args
        finally:
            del runner._model_forward
        if inputs["inputs_embeds"] is not None:
            return None
        return _held(output, list(runner.input_batch.req_ids), (context, inputs))

    def refresh(self, held: Held) -> None:
        runner, count = self._runner, len(held.request_ids)
        tables = runner.input_batch.block_table
        tables.commit_block_table(count)
        tables.compute_slot_mapping(
            count, runner.query_start_loc.gpu[: count + 1], runner.positions[:count]
        )

    def run(self, held: Held, token_ids: torch.Tensor) -> torch.Tensor:
        runner = self._runner
        context, inputs = held.launch
        runner.input_ids.gpu[: len(token_ids)].copy_(token_ids)
        with override_forward_context(context):
            hidden_states = runner._model_forward(**inputs)
        logits: torch.Tensor = runner.model.compute_logits(hidden_states[: len(token_ids)])
        return logits

    def confirm(self, held: Held, tokens: Sequence[Next]) -> None:
        self.write(tokens)

    def reseat(self, seats: Sequence[Seat]) -> None:
        self.copy_blocks(seats)
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

    def write(self, tokens: Sequence[Next]) -> None:
        batch = self._runner.input_batch
        requests = self._runner.requests
        indices: list[int] = []
        positions: list[int] = []
        token_ids: list[int] = []
        for request_id, token_id, position, prompt in tokens:
            output_token_ids = requests[request_id].output_token_ids
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
    """In place of a connector, which the V2 runner tells of every forward."""

    def pre_forward(self, output: SchedulerOutput, batch: Any, **_: Any) -> NoReturn:
        raise _Stopped(batch)


class _V2(_Blocks):
    """Requests have a slot for as long as they are known."""

    def hold(self, output: SchedulerOutput) -> Held | None:
        runner = self._runner
        connector, prepare_inputs = runner.kv_connector, runner.prepare_inputs
        graphs: list[Any] = []

        def prepare(output: SchedulerOutput, state: Any, graph: Any, *more: Any) -> Any:
            graphs.append(graph)
            return prepare_inputs(output, state, graph, *more)

        runner.kv_connector, runner.prepare_inputs = _Stopping(), prepare
        try:
            runner.execute_model(output)
        except _Stopped as stopped:
            [batch] = stopped.args
        finally:
            runner.kv_connector = connector
            del runner.prepare_inputs
        [graph] = graphs
        if graph.cg_mode != CUDAGraphMode.FULL:
            return None
        return _held(output, list(batch.req_ids), (graph, batch))

    def refresh(self, held: Held) -> None:
        _, batch = held.launch
        self._runner.block_tables.apply_staged_writes()
        self._runner.prepare_attn(batch)

    def run(self, held: Held, token_ids: torch.Tensor) -> torch.Tensor:
        runner = self._runner
        graph, _ = held.launch
        runner.input_buffers.input_ids[: len(token_ids)].copy_(token_ids)
        hidden_states = runner.cudagraph_manager.run_fullgraph(graph)
        logits: torch.Tensor = runner.model.compute_logits(hidden_states[: len(token_ids)])
        return logits

    def confirm(self, held: Held, tokens: Sequence[Next]) -> None:
        _, batch = held.launch
        self._runner.postprocess_num_computed_tokens(batch)

    def reseat(self, seats: Sequence[Seat]) -> None:
        self.copy_blocks(seats)
        states = self._runner.req_states
        for request_id, token_ids, block_ids, _ in seats:
            slot, length = states.req_id_to_index[request_id], len(token_ids)
            states.prompt_len.np[slot] = states.prefill_len.np[slot] = length
            states.num_computed_prefill_tokens[slot] = length
            states.num_computed_tokens_np[slot] = length
            states.num_computed_tokens.stage_write_elem(slot, length)
            states.total_len.stage_write_elem(slot, length)
            self._runner.block_tables.append_block_ids(slot, (block_ids,), overwrite=True)
        states.apply_staged_writes()

    def write(self, tokens: Sequence[Next]) -> None:
        last = self._runner.req_states.last_sampled_tokens
        slots = self._runner.req_states.req_id_to_index
        pairs = torch.tensor([(slots[entry.request_id], entry.token_id) for entry in tokens])
        if last.is_cuda:
            pairs = pairs.pin_memory().to(last.device, non_blocking=True)
        last[pairs[:, 0], 0] = pairs[:, 1]

    def take_logits(self) -> tuple[list[str], torch.Tensor]:
        state, self._runner.execute_model_state = self._runner.execute_model_state, None
        batch = state.input_batch
        logits = self._runner.model.compute_logits(state.hidden_states[batch.logits_indices])
        self._runner.postprocess_num_computed_tokens(batch)
        return list(batch.req_ids), logits
