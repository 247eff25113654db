"""vLLM's model runner V1 as open requests need it; see ``runners.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context

from genrt.engines.vllm.block_copies import BlockCopies
from genrt.engines.vllm.runners import NextTokens, Prepared, Runner, Stopped, prepared
from genrt.engines.vllm.seats import Seat, copies, last_seats
from genrt.engines.vllm.step_launches import InputTokens, Rows, rows_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["RunnerV1"]


class RunnerV1(Runner):
    """Requests have a record, and a row of the persistent batch while they are in it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._blocks = BlockCopies(runner)
        self._inputs = InputTokens(runner.input_ids.gpu)
        self._rows = Rows(lambda hidden_states: runner.model.compute_logits(hidden_states))
        if runner.device.type == "cuda" and runner.prepare_inputs_event is None:
            # A step is prepared while the copies of the one before may still read the same buffers.
            runner.prepare_inputs_event = torch.Event(runner.device)

    def prepare(self, output: SchedulerOutput, before: Prepared | None = None) -> Prepared | None:
        def stop(**inputs: Any) -> NoReturn:
            raise Stopped(get_forward_context(), inputs)

        runner = self._runner
        runner._model_forward = stop  # on the instance, in front of the class's own
        try:
            runner.execute_model(output)
        except Stopped as stopped:
            context, inputs = stopped.args
        finally:
            del runner._model_forward
        if inputs["inputs_embeds"] is not None:  # made from the tokens, before the forward
            return None
        return prepared(output, list(runner.input_batch.req_ids), (context, inputs))

    def refresh(self, step: Prepared) -> None:
        runner, count = self._runner, len(step.request_ids)
        tables = runner.input_batch.block_table
        tables.commit_block_table(count)
        tables.compute_slot_mapping(
            count, runner.query_start_loc.gpu[: count + 1], runner.positions[:count]
        )

    def run(
        self, step: Prepared, token_ids: torch.Tensor, order: Sequence[int] | None = None
    ) -> torch.Tensor:
        runner = self._runner
        context, inputs = step.launch
        self._inputs.put(token_ids, order)
        with override_forward_context(context):
            hidden_states = runner._model_forward(**inputs)
        is_graph = context.cudagraph_runtime_mode == CUDAGraphMode.FULL  # whose own they are
        # An adapter's logits depend on who is in the batch.
        if is_graph and runner.lora_config is None:
            return self._rows.of(hidden_states)[: len(token_ids)]
        return rows_of(runner.model.compute_logits(hidden_states[: len(token_ids)]))

    def confirm(self, step: Prepared, tokens: NextTokens) -> None:
        self.write(tokens)

    def reseat(self, seats: Sequence[Seat]) -> None:
        self._blocks.copy(copies(seats))
        batch = self._runner.input_batch
        for request, length, new, _, kept in last_seats(seats):
            record = self._runner.requests[request.request_id]
            block_ids = [*record.block_ids[0][:kept], *new]
            record.prompt_token_ids = request.prompt_token_ids
            record.num_prompt_tokens, record.num_computed_tokens = request.num_prompt_tokens, length
            outputs = request._output_token_ids[: length - request.num_prompt_tokens]
            record.output_token_ids[:] = outputs  # not a token that follows and was appended since
            record.block_ids = (block_ids,)
            index = batch.req_id_to_index.get(request.request_id)
            if index is not None:
                batch.num_prompt_tokens[index] = request.num_prompt_tokens
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

    def take_rows(self) -> tuple[list[str], torch.Tensor]:
        state, self._runner.execute_model_state = self._runner.execute_model_state, None
        return list(self._runner.input_batch.req_ids), rows_of(state.logits)
