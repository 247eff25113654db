"""Drives vLLM's model runner V1 for open requests; see ``runners.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
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
    """A request has a record, and a row of the persistent batch while it is in the batch."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._blocks = BlockCopies(runner)
        self._inputs = InputTokens(runner.input_ids.gpu)
        self._rows = Rows(lambda hidden_states: runner.model.compute_logits(hidden_states))
        if runner.device.type == "cuda" and runner.prepare_inputs_event is None:
            # A step is prepared while the previous step's copies may still read the same buffers.
            runner.prepare_inputs_event = torch.Event(runner.device)
        # On a CPU no running forward hides the cost of preparing a step. So the launch is found once for
        # all steps with the same number of requests, which differ in tokens and lengths alone.
        self._launch: tuple[int, Any, Any] | None = None
        self._numbers = np.arange(runner.max_num_reqs)
        differs = runner.uses_mrope or runner.lora_config or runner.speculative_config
        self._repeats = runner.device.type == "cpu" and not differs

    def prepare(self, output: SchedulerOutput, before: Prepared | None = None) -> Prepared | None:
        def stop(**inputs: Any) -> NoReturn:
            raise Stopped(get_forward_context(), inputs)

        runner = self._runner
        runner._model_forward = stop  # set on the instance, so that it hides the class's method
        try:
            runner.execute_model(output)
        except Stopped as stopped:
            context, inputs = stopped.args
        finally:
            del runner._model_forward
        # Embeddings are made from the tokens before the forward.
        if inputs["inputs_embeds"] is not None:
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
        # A full graph reuses the memory of its hidden states. An adapter's logits depend on the batch.
        is_graph = context.cudagraph_runtime_mode == CUDAGraphMode.FULL
        if is_graph and runner.lora_config is None:
            return self._rows.of(hidden_states)[: len(token_ids)]
        return rows_of(runner.model.compute_logits(hidden_states[: len(token_ids)]))

    def confirm(self, step: Prepared, tokens: NextTokens) -> None:
        self.write(tokens)

    def execute(self, output: SchedulerOutput) -> None:
        if self._launch is not None and self._is_alike(output, self._launch[0]):
            return self._repeat(output, *self._launch)
        self._launch = None
        if not self._repeats:
            return self._runner.execute_model(output)  # type: ignore[no-any-return]

        def keep(_: object, __: object, inputs: dict[str, Any]) -> None:
            given = {name for name, each in inputs.items() if each is not None}
            if given == {"input_ids", "positions"}:  # both are the runner's buffers
                context = replace(get_forward_context())  # the forward may change the original
                self._launch = len(output.num_scheduled_tokens), context, inputs

        hook = self._runner.model.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            self._runner.execute_model(output)
        finally:
            hook.remove()

    def _is_alike(self, output: SchedulerOutput, count: int) -> bool:
        """Return whether a step has ``count`` requests, and these are the whole batch."""
        scheduled, batch = output.scheduled_cached_reqs.req_ids, self._runner.input_batch
        is_whole = len(scheduled) == count and batch.req_id_to_index.keys() == {*scheduled}
        gone = output.finished_req_ids or output.preempted_req_ids
        others_tokens = batch.prev_sampled_token_ids is not None
        return is_whole and not (gone or output.new_block_ids_to_zero or others_tokens)

    def _repeat(self, output: SchedulerOutput, count: int, context: Any, inputs: Any) -> None:
        """Do the work of ``execute_model`` that differs between steps and that genrt needs."""
        runner, batch = self._runner, self._runner.input_batch
        scheduled = output.scheduled_cached_reqs
        at = [batch.req_id_to_index[each] for each in scheduled.req_ids]
        batch.num_computed_tokens_cpu[at] = scheduled.num_computed_tokens
        for place, new in enumerate(scheduled.new_block_ids):
            if new is not None:
                runner.requests[scheduled.req_ids[place]].block_ids[0].extend(new[0])
                batch.block_table.append_row(new, at[place])
        slots = {0: self._put_inputs(batch, self._numbers[:count])}
        metadata, _ = runner._build_attention_metadata(count, count, 1, slot_mappings=slots)
        with override_forward_context(replace(context, attn_metadata=metadata)):
            hidden_states = runner._model_forward(**inputs)
        logits = runner.model.compute_logits(hidden_states[:count])
        runner.execute_model_state = SimpleNamespace(logits=logits)

    def _put_inputs(self, batch: Any, places: np.ndarray) -> torch.Tensor:
        """Write one token for each place to the input buffers; return the tokens' slots."""
        runner, table, count = self._runner, batch.block_table[0], len(places)
        computed, starts = batch.num_computed_tokens_cpu[:count], runner.query_start_loc.np
        starts[:count], starts[count:] = places, count
        runner.positions.numpy()[:count] = runner.num_computed_tokens.numpy()[:count] = computed
        for lengths in (runner.seq_lens.numpy(), runner.optimistic_seq_lens_cpu.numpy()):
            lengths[:count], lengths[count:] = computed + 1, 0
        runner.input_ids.np[:count] = batch.token_ids_cpu[places, computed]
        blocks, within = np.divmod(computed, table.block_size)
        first = table.block_table.np[places, blocks].astype(np.int64) * table.block_size
        table.slot_mapping.np[:count] = first + within
        return table.slot_mapping.gpu[:count]  # type: ignore[no-any-return]

    def reseat(self, seats: Sequence[Seat]) -> None:
        self._blocks.copy(copies(seats))
        batch = self._runner.input_batch
        for request, length, new, _, kept in last_seats(seats):
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
        batch, requests = self._runner.input_batch, self._runner.requests
        columns = (tokens.request_ids, tokens.token_ids, tokens.positions, tokens.prompts)
        for request_id, token_id, position, prompt in zip(*columns, strict=True):
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
        state, self._runner.execute_model_state = self._runner.execute_model_state, None
        return list(self._runner.input_batch.req_ids), rows_of(state.logits)
