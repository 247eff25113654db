"""vLLM requests that stay open: a scheduler that parks them, wakes them, and shares their blocks.

A logprobs request is an *open* vLLM request: when its row has been computed, the token that vLLM
sampled is dropped, and the request stays, its KV blocks with it, outside the running queue (*parked*).
Appending the caller's token wakes it: it is scheduled as a plain decode of one token. A new request that
shares a prefix with a resident one takes that one's blocks by reference; vLLM copies the last, partly
shared block itself, as it does for its own sub-block prefix hits.

Rules:
    Nothing is parked that a running or waiting request needs the room of: before every step the parked
    requests that were used longest ago are finished until the step's blocks and slots are there.
    Tokens are written where the runner reads them before the step that needs them.
    Scheduling is synchronous: a step's tokens are known before the next one is scheduled.

Private to vLLM and touched here: ``Scheduler._get_local_prefix_cache_hit``, its queues, the block pool's
count of free blocks; the V1 runner's ``requests`` and ``input_batch``, the V2 runner's ``req_states``.
``VLLMEngine.self_test`` compares rows that come by these ways with rows that don't.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from genrt.engine import Adapter, LogprobsRequest
from genrt.engines.residency import Residents

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

__all__ = ["OPEN", "OpenRequests", "OpenScheduler"]

MOST_RECORDS = 65_536
"""The most requests that are kept open where nothing but KV blocks sets a bound."""

OPEN = "genrt_open"
"""The key in ``extra_args`` that marks a request as one to keep open."""


class OpenScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's ``scheduler_cls`` for engines with resident sequences."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running: list[Request]
        self.parked: dict[str, Request] = {}
        self.computed_tokens = 0
        self.forked = 0
        self._open: set[str] = set()
        self._donors: dict[str, tuple[str, int]] = {}
        self._waking: dict[str, Request] = {}
        self._answered: list[str] = []
        self._evicted: list[str] = []
        # The V2 runner has a slot for each request it knows; V1 only keeps a record.
        self._max_held = self.max_num_running_reqs if self.use_v2_model_runner else MOST_RECORDS
        groups = self.kv_cache_config.kv_cache_groups
        self._shares_blocks = (
            len(groups) == 1
            and type(groups[0].kv_cache_spec) is FullAttentionSpec
            and bool(self.cache_config.enable_prefix_caching)
        )

    # -- what the engine calls ----------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        extra = request.sampling_params.extra_args if request.sampling_params else None
        if extra is not None and OPEN in extra:
            self._open.add(request.request_id)
        super().add_request(request)

    def share(self, request_id: str, donor_id: str, tokens: int) -> None:
        """Have a request that waits start with the first ``tokens`` tokens of a resident one."""
        if self._shares_blocks:
            self._donors[request_id] = (donor_id, tokens)
            donor = self.parked.pop(donor_id, None)
            if donor is not None:  # used now: among the last to go
                self.parked[donor_id] = donor

    def wake(self, request_id: str, token_id: int) -> None:
        """Append a token to a parked request, and have it run as soon as there is a place."""
        request = self.parked.pop(request_id)
        request.append_output_token_ids(token_id)
        self._waking[request_id] = request
        self._admit()

    def _admit(self) -> None:
        """Move what was woken to the running requests, within their number and ``max_loras``."""
        loras: set[int] = set()
        if self.lora_config is not None:
            loras = {r.lora_request.lora_int_id for r in self.running if r.lora_request}
        for request_id, request in [*self._waking.items()]:
            if len(self.running) >= self.max_num_running_reqs:
                break
            if request.lora_request is not None and self.lora_config is not None:
                wanted = loras | {request.lora_request.lora_int_id}
                if len(wanted) > self.lora_config.max_loras:
                    continue
                loras = wanted
            del self._waking[request_id]
            self.running.append(request)

    def take_answered(self) -> list[str]:
        """The open requests whose row the last step computed; they are parked now."""
        answered, self._answered = self._answered, []
        return answered

    def take_evicted(self) -> list[str]:
        """The parked requests that were finished for want of room."""
        evicted, self._evicted = self._evicted, []
        return evicted

    # -- what vLLM calls ----------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self.parked:
            self._make_room()
        output = super().schedule(throttle_prefills)
        self.computed_tokens += output.total_num_scheduled_tokens
        if self._donors:
            for request in output.scheduled_new_reqs:
                self._donors.pop(request.req_id, None)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        sampled = model_runner_output.sampled_token_ids
        answered: dict[str, None] = {}
        for request_id in scheduler_output.num_scheduled_tokens:
            if request_id in self._open:
                index = model_runner_output.req_id_to_index[request_id]
                if sampled and sampled[index]:
                    sampled[index] = []
                    answered[request_id] = None
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if answered:
            running: list[Request] = []
            for request in self.running:
                if request.request_id in answered:
                    self.parked[request.request_id] = request
                    self._answered.append(request.request_id)
                else:
                    running.append(request)
            self.running = running
        if self._waking:
            self._admit()
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self.parked.pop(request.request_id, None)
            self._open.discard(request.request_id)
            self._donors.pop(request.request_id, None)
            self._waking.pop(request.request_id, None)
        if self._waking:
            self._admit()
        return finished

    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        found = super()._get_local_prefix_cache_hit(request)
        donor_id, tokens = self._donors.get(request.request_id, ("", 0))
        donor = self.requests.get(donor_id)
        if donor is None:
            return found
        tokens = min(tokens, donor.num_computed_tokens, request.num_tokens - 1)
        if tokens <= found[1]:
            return found
        manager = self.kv_cache_manager
        count = -(-tokens // self.block_size)
        blocks = manager.get_blocks(donor_id).blocks[0][:count]
        if len(blocks) < count:
            return found
        self.forked += 1
        return manager.create_kv_cache_blocks((list(blocks),)), tokens, 0, False

    def _make_room(self) -> None:
        """Finish parked requests, those first that were used longest ago, until what is to run has its
        blocks (an upper bound: as if nothing were shared) and its slots in the runner."""
        pool = self.kv_cache_manager.block_pool
        places = self.max_num_running_reqs - len(self.running)
        waiting = list(islice(chain(self.kv_holding_waiting, self.waiting), places))
        blocks = len(self.running) + sum(r.num_tokens // self.block_size + 2 for r in waiting)
        held = len(self.running) + len(self.parked) + len(self._waking)
        slots = held + len(waiting) - self._max_held
        if blocks <= pool.get_num_free_blocks() and slots <= 0:
            return
        needed = {donor for donor, _ in self._donors.values()}
        for request_id in [*self.parked]:
            if blocks <= pool.get_num_free_blocks() and slots <= 0:
                break
            if request_id not in needed:
                self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
                self._evicted.append(request_id)
                slots -= 1
        if self.parked and not self.running and blocks > pool.get_num_free_blocks():
            # Only donors are left: what waits recomputes rather than waits for ever.
            for request_id in [*self.parked]:
                self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
                self._evicted.append(request_id)


class OpenRequests:
    """The engine's side of it: which sequences are resident, and the way of each new question.

    ``scheduler`` and ``runner`` are those of an engine in this process.
    """

    def __init__(self, scheduler: OpenScheduler, runner: Any) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._residents = Residents()
        self._tokens: list[tuple[str, int]] = []
        self.extended = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._residents)

    def wake(self, request: LogprobsRequest) -> str | None:
        """The id of the parked request that has just been extended to this question's context, if
        there is one."""
        name = self._residents.parent(request.adapter, request.token_ids)
        if name is None or name not in self._scheduler.parked:
            return None
        self._tokens.append((name, request.token_ids[-1]))
        self._scheduler.wake(name, request.token_ids[-1])
        self.extended += 1
        return name

    def share(self, name: str, request: LogprobsRequest) -> None:
        """Have a request that was just added start from the nearest resident one."""
        parent = self._residents.parent(request.adapter, request.token_ids)
        if parent is not None:
            self._scheduler.share(name, parent, len(request.token_ids) - 1)
            return
        found = self._residents.nearest(request.adapter, request.token_ids)
        if found is not None:
            self._scheduler.share(name, *found)

    def before_step(self) -> None:
        """Put the tokens of the extended requests where the runner reads them."""
        if self._tokens:
            _write_tokens(self._runner, self._tokens)
            self._tokens.clear()

    def after_step(self) -> list[str]:
        """The requests whose rows the step computed; what it evicted is forgotten."""
        for name in self._scheduler.take_evicted():
            self._residents.remove(name)
            self.evicted += 1
        return self._scheduler.take_answered()

    def keep(self, name: str, request: LogprobsRequest) -> None:
        """An answered request is resident with the context of its question."""
        self._residents.put(name, request.adapter, request.token_ids)

    def forget(self, names: Iterable[str]) -> None:
        """These requests are gone from vLLM."""
        gone = set(names)
        for name in gone:
            self._residents.remove(name)
        self._tokens = [entry for entry in self._tokens if entry[0] not in gone]

    def counts(self) -> dict[str, int]:
        """For ``EngineStatistics``."""
        return {
            "computed_tokens": self._scheduler.computed_tokens,
            "extended": self.extended,
            "forked": self._scheduler.forked,
            "evicted": self.evicted,
            "resident": len(self._residents),
        }

    def start_counting(self) -> None:
        """Set the counters to 0."""
        self._scheduler.computed_tokens = self._scheduler.forked = 0
        self.extended = self.evicted = 0

    def names(self) -> list[str]:
        """The ids of all resident sequences, those that are being extended included."""
        return self._residents.names()

    def bound_to(self, adapter: Adapter | None) -> list[str]:
        """The ids of an adapter's resident sequences."""
        return self._residents.bound_to(adapter)


def _write_tokens(runner: Any, tokens: Sequence[tuple[str, int]]) -> None:
    """Put the callers' tokens where the runner has the ones it sampled for these requests."""
    if not hasattr(runner, "input_batch"):
        states = runner.req_states
        slots = torch.tensor([states.req_id_to_index[request_id] for request_id, _ in tokens])
        values = torch.tensor([token_id for _, token_id in tokens])
        device = states.last_sampled_tokens.device
        states.last_sampled_tokens[slots.to(device), 0] = values.to(device)
        return
    batch = runner.input_batch
    for request_id, token_id in tokens:
        runner.requests[request_id].output_token_ids[-1] = token_id
        index = batch.req_id_to_index.get(request_id)
        if index is not None:
            batch.token_ids_cpu[index, batch.num_tokens_no_spec[index] - 1] = token_id
