"""vLLM's scheduler for requests that stay open: it parks them, wakes them and shares their blocks.

A logprobs request is an *open* vLLM request. After its row, the scheduler drops the token that vLLM
sampled and *parks* the request, with its KV blocks, until the caller's token wakes it. A new request
takes the blocks that it shares with a resident one by reference. A parked request can be *reassigned*: it
continues as a fork of another one.

Rules:
    Running and waiting requests come before parked ones; the longest unused parked requests are finished.
    Scheduling is synchronous, except for steps of texts alone while ``ahead`` is set.
    Blocks are copied before anything else is done for the step that needs the copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from genrt.engines.vllm.reassignment import Fork, Reassigner, Reassignment
from genrt.engines.vllm.requests import FIRST, OPEN
from genrt.engines.vllm.runners import NextTokens

MOST_RECORDS = 65_536
"""The most open requests where KV blocks are the only bound."""


class OpenScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's ``scheduler_cls`` for engines with resident sequences.

    While ``ahead`` is True, a step is scheduled as if every request of the unfinished previous step
    continued with one token.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running: list[Request]
        self.finished_req_ids: set[str]
        self.reset_preempted_req_ids: set[str]
        self.ahead = False
        self.parked: dict[str, Request] = {}
        self.computed_tokens = self.forked = self.reassigned = 0
        self._stalled = False  # no waiting request ran: the next step assumes the blocks they need
        self._open: set[str] = set()
        self._unscored: set[str] = set()  # scores; a decode step does not show their positions
        self._donors: dict[str, tuple[str, int]] = {}
        self._waking: dict[str, Request] = {}
        self._answered: list[str] = []
        self._evicted: list[str] = []
        # The V2 runner has a slot for each request it knows; V1 has only a record.
        self._max_known = self.max_num_running_reqs if self.use_v2_model_runner else MOST_RECORDS
        groups = self.kv_cache_config.kv_cache_groups
        self._shares_blocks = (
            len(groups) == 1
            and type(groups[0].kv_cache_spec) is FullAttentionSpec
            and bool(self.cache_config.enable_prefix_caching)
        )
        if self._shares_blocks:
            manager = self.kv_cache_manager
            self._pool = manager.block_pool
            of_group = manager.coordinator.single_type_managers[0]
            self._reassigner = Reassigner(of_group, self._pool, self.hash_block_size)
        # For other models and options ``schedule`` does more than ``decode_step``.
        self._decodes_plainly = self._shares_blocks and not (
            self.connector
            or self.ec_connector
            or self.aux_output_connector
            or self.use_pp
            or self.is_encoder_decoder
            or self.num_lookahead_tokens
            or self.defer_block_free
        )

    # -- called by the engine -----------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        extra = request.sampling_params.extra_args if request.sampling_params else None
        if extra is not None and OPEN in extra:
            self._open.add(request.request_id)
            self._unscored.update([request.request_id] if FIRST in extra else ())
        super().add_request(request)

    def share(self, request_id: str, donor_id: str, tokens: int) -> None:
        """Let a waiting request start with the first ``tokens`` tokens of a resident one."""
        if self._shares_blocks:
            self._donors[request_id] = (donor_id, tokens)
            donor = self.parked.pop(donor_id, None)
            if donor is not None:  # used now, so last in line for eviction
                self.parked[donor_id] = donor

    def wake(self, request_ids: list[str], token_ids: list[int]) -> NextTokens:
        """Append a token to each of these parked requests; they run as soon as they are admitted."""
        positions: list[int] = []
        prompts: list[int] = []
        parked, waking, size = self.parked, self._waking, self.hash_block_size
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            request = parked.pop(request_id)
            # As ``Request.append_output_token_ids``, without the parts that only sampling needs.
            request._output_token_ids.append(token_id)
            tokens = request._all_token_ids
            tokens.append(token_id)
            if len(tokens) % size == 0:
                request.update_block_hashes()
            waking[request_id] = request
            positions.append(len(tokens) - 1)
            prompts.append(request.num_prompt_tokens)
        return NextTokens(request_ids, token_ids, positions, prompts)

    def lengthen(self, several: Mapping[str, list[int]]) -> list[Request]:
        """Append further tokens to these woken requests, and return the requests."""
        size, found = self.hash_block_size, list[Request]()
        for request_id, more in several.items():
            request = self._waking[request_id]
            first = len(request._all_token_ids)
            request._output_token_ids += more
            request._all_token_ids += more
            if (first + len(more)) // size > first // size:
                request.update_block_hashes()
            found.append(request)
        return found

    def score_from(self, firsts: Mapping[str, int]) -> None:
        """Have vLLM's own steps compute these requests from the first wanted position on, until they are
        answered."""
        self._unscored.update(firsts)
        for request_id, first in firsts.items():
            self.requests[request_id].sampling_params.extra_args[FIRST] = first

    def forks(
        self, request_ids: Sequence[str], donor_ids: Sequence[str], length: int | None = None
    ) -> list[Fork]:
        """Return parked requests as forks of the donors' first ``length`` tokens (default: all computed):
        one for each donor, or for the first ones, in pairs that cost little."""
        requests = [self.parked[each] for each in request_ids]
        donors = [self.requests[each] for each in donor_ids[: len(requests)]]
        if self._shares_blocks:
            requests = self._reassigner.paired(requests, donors)
        return [
            Fork(request, donor, donor.num_computed_tokens if length is None else length)
            for request, donor in zip(requests, donors, strict=False)
        ]

    def can_reassign(self, forks: Sequence[Fork], *, beside: int = 0) -> bool:
        """Return whether these can surely be reassigned and leave ``beside`` blocks free."""
        if not self._decodes_plainly:
            return False
        for request, donor, length in forks:
            if donor.num_computed_tokens < length or request.lora_request != donor.lora_request:
                return False
        return self._reassigner.have_room([fork.request for fork in forks], beside=beside)

    def reassign(self, forks: Sequence[Fork]) -> list[Reassignment]:
        """Make these requests continue from their donors' tokens and blocks. A request owns its last
        block; the runner fills it by a copy if the tokens end inside a block."""
        self.reassigned += len(forks)
        if self._donors:  # a waiting request must not start from a donor that is replaced here
            gone = {fork.request.request_id for fork in forks}
            self._donors = {each: at for each, at in self._donors.items() if at[0] not in gone}
        return self._reassigner.take(forks)

    def admit(self) -> None:
        """Move woken requests to the running ones, within ``max_num_running_reqs`` and ``max_loras``."""
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

    def decode_step(self, exactly: int | None = None) -> SchedulerOutput | None:
        """Schedule a step of all new tokens of every running request; return ``None`` if not all are
        open, or without room: then ``schedule`` must do it.

        With ``exactly``, so many requests must be running, and no other may wait.
        """
        if exactly is not None and (self._waking or len(self.running) != exactly):
            return None
        output = self._scheduled(self.running, tokens_ahead=None)
        if output is not None:
            self._begin_decode_step()
        return output

    def decode_step_ahead(
        self, parked: Sequence[str] = (), order: Sequence[str] = (), counts: Sequence[int] = ()
    ) -> SchedulerOutput | None:
        """Schedule the step after an unfinished ``decode_step``, as if each request and these parked ones
        continued, in this ``order`` if it has the same requests, by a token or by so many ``counts``.
        Return ``None`` without room.
        """
        requests = [*self.running, *(self.parked[each] for each in parked)]
        known = {request.request_id: request for request in requests}
        if known.keys() == set(order):
            requests = [known[each] for each in order]
        return self._scheduled(requests, tokens_ahead=0, counts=counts)

    def _scheduled(
        self, requests: Sequence[Request], *, tokens_ahead: int | None, counts: Sequence[int] = ()
    ) -> SchedulerOutput | None:
        """Schedule these requests' tokens, one each if they are ahead, or so many ``counts``."""
        own = max(counts, default=1) if tokens_ahead == 0 else 0
        if not self._nothing_but(requests, tokens_ahead=tokens_ahead, own=own):
            return None
        # Forks need no more room: it was checked when they were reassigned.
        if self.parked and len(requests) == len(self.running):
            self._make_room()
        counts = counts or [1] * len(requests)
        if tokens_ahead is None:
            counts = [len(each._all_token_ids) - each.num_computed_tokens for each in requests]
        if sum(counts) > self.max_num_scheduled_tokens:
            return None
        return self._some_tokens_each(requests, counts)

    def begin_prepared(self, counts: Mapping[str, int]) -> bool:
        """Start the step that ``decode_step_ahead`` scheduled, of so many tokens of each request; return
        whether it is the next step. The caller must pass the blocks of requests that were reassigned
        since then to the runner."""
        running = self.running
        if (
            len(running) != len(counts)
            or not self._nothing_but(running, tokens_ahead=None)
            or not all(
                len(each._all_token_ids) - each.num_computed_tokens == counts.get(each.request_id)
                for each in running
            )
        ):
            return False
        self._begin_decode_step()
        return True

    def _nothing_but(
        self, requests: Sequence[Request], *, tokens_ahead: int | None, own: int = 0
    ) -> bool:
        """Return whether these are all requests to schedule, open, with ``tokens_ahead`` tokens to
        compute, ``None`` is any number above 0, and with room for ``own`` further ones."""
        if (
            not requests
            or self.waiting
            or self.kv_holding_waiting
            or not self._decodes_plainly
            or self._unscored
            or requests[0].request_id not in self._open  # a cheap exit for steps of texts alone
            or len(requests) > min(self.max_num_scheduled_tokens, self.max_num_running_reqs)
            or self._pause_state != PauseState.UNPAUSED
            or not self._open.issuperset([request.request_id for request in requests])
        ):
            return False
        most = self.max_model_len - 1 - own  # a step reserves a place for vLLM's own token after it
        for request in requests:
            length = len(request._all_token_ids)
            ahead = length - request.num_computed_tokens
            if length > most or (ahead < 1 if tokens_ahead is None else ahead != tokens_ahead):
                return False
        return True

    def _some_tokens_each(
        self, requests: Sequence[Request], counts: Sequence[int]
    ) -> SchedulerOutput | None:
        """Schedule a step of so many more tokens of each request; ``None`` if blocks run out."""
        computed = [request.num_computed_tokens for request in requests]
        # The first token of a block needs the block; at the last one vLLM caches the block by its hash.
        size = self.block_size
        at_edges = [
            n
            for n, (before, count) in enumerate(zip(computed, counts, strict=True))
            if (before + count) % size <= count
        ]
        lacking = sum(
            -(-(computed[n] + counts[n]) // size) - -(-computed[n] // size) for n in at_edges
        )
        if lacking > self._pool.get_num_free_blocks():
            return None
        new_blocks: list[tuple[list[int], ...] | None] = [None] * len(requests)
        for n in at_edges:
            blocks = self.kv_cache_manager.allocate_slots(requests[n], counts[n])
            if blocks is None:
                raise RuntimeError("vLLM has no block where its pool has a free one")
            new_blocks[n] = blocks.get_block_ids(allow_none=True)
        finished, self.finished_req_ids = self.finished_req_ids, set()
        preempted, self.reset_preempted_req_ids = self.reset_preempted_req_ids, set()
        self.prev_step_scheduled_req_ids = {request.request_id for request in requests}
        request_ids = [request.request_id for request in requests]
        return SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=request_ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=new_blocks,
                num_computed_tokens=computed,
                num_output_tokens=[len(request._output_token_ids) for request in requests],
            ),
            num_scheduled_tokens=dict(zip(request_ids, counts, strict=True)),
            total_num_scheduled_tokens=sum(counts),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            preempted_req_ids=preempted,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )

    def _begin_decode_step(self) -> None:
        computed = 0
        for request in self.running:
            length = len(request._all_token_ids)
            computed += length - request.num_computed_tokens
            request.num_computed_tokens = length
        self.computed_tokens += computed
        self.current_step += 1

    def end_decode_step(self) -> None:
        """Park the requests of a ``decode_step`` that has run."""
        for request in self.running:
            self.parked[request.request_id] = request
        self.running = []
        if self._waking:
            self.admit()

    def take_answered(self) -> list[str]:
        """Return and clear the open requests that the last step answered; they are parked."""
        answered, self._answered = self._answered, []
        return answered

    def take_evicted(self) -> list[str]:
        """Return and clear the parked requests that were finished to make room."""
        evicted, self._evicted = self._evicted, []
        return evicted

    # -- called by vLLM -----------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self.parked:
            self._make_room()
        output = super().schedule(throttle_prefills)
        self._stalled = bool(self.waiting) and not output.total_num_scheduled_tokens
        self.computed_tokens += output.total_num_scheduled_tokens
        if self._donors:
            for request in output.scheduled_new_reqs:
                self._donors.pop(request.req_id, None)
        return output

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        scheduler: Any = AsyncScheduler if self.ahead else Scheduler
        scheduler._update_after_schedule(self, scheduler_output)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        # A request has a placeholder for its token only in a step that was scheduled ahead. A preemption
        # may have removed the placeholder since.
        was_ahead = request.num_output_placeholders > 0 or is_stale
        scheduler: Any = AsyncScheduler if was_ahead else Scheduler
        updated: tuple[list[int], bool] = scheduler._update_request_with_output(
            self, request, new_token_ids, is_stale
        )
        return updated

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        sampled = model_runner_output.sampled_token_ids
        answered: set[str] = set()
        for request_id in self._open.intersection(scheduler_output.num_scheduled_tokens):
            index = model_runner_output.req_id_to_index[request_id]
            if sampled and sampled[index]:
                sampled[index] = []  # without a token, vLLM keeps the request running
                answered.add(request_id)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if answered:
            for request_id in self._unscored & answered:
                self.requests[request_id].sampling_params.extra_args.pop(FIRST, None)
            self._unscored -= answered
            for request in self.running:
                if request.request_id in answered:
                    self.parked[request.request_id] = request
                    self._answered.append(request.request_id)
            self.running = [each for each in self.running if each.request_id not in answered]
        if self._waking:
            self.admit()
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        for request_id in self._open.intersection(draft_token_ids.req_ids):
            self.requests[request_id].spec_token_ids = []  # its caller chooses the next token

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self.parked.pop(request.request_id, None)
            self._open.discard(request.request_id)
            self._unscored.discard(request.request_id)
            self._donors.pop(request.request_id, None)
            self._waking.pop(request.request_id, None)
        if self._waking:
            self.admit()
        return finished

    def _get_local_prefix_cache_hit(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> Any:
        limit = () if max_cache_hit_length is None else (max_cache_hit_length,)  # new in vLLM 0.33
        found = super()._get_local_prefix_cache_hit(request, *limit)
        manager = self.kv_cache_manager
        donor_id, tokens = self._donors.get(request.request_id, ("", 0))
        donor = self.requests.get(donor_id)
        if donor is None:
            return found
        tokens = min(tokens, donor.num_computed_tokens, request.num_tokens - 1, *limit)
        if tokens <= found[1]:
            return found
        count = -(-tokens // self.block_size)
        blocks = manager.get_blocks(donor_id).blocks[0][:count]
        if len(blocks) < count:
            return found
        self.forked += 1
        return manager.create_kv_cache_blocks((list(blocks),)), tokens, 0, False

    def _make_room(self) -> None:
        """Finish parked requests, the longest unused first, until there are enough blocks and slots."""
        pool = self.kv_cache_manager.block_pool
        places = self.max_num_running_reqs - len(self.running)
        waiting = list(islice(chain(self.kv_holding_waiting, self.waiting), places))
        counts = self._shares_blocks and bool(waiting) and not self._stalled
        blocks = most_blocks(self, waiting)
        if counts and blocks > pool.get_num_free_blocks():
            blocks = needed_blocks(self, waiting, self._donors)
        slots = len(self.running) + len(self.parked) + len(self._waking) + len(waiting)
        slots -= self._max_known
        donors = {donor for donor, _ in self._donors.values()}
        unused = (each for each in [*self.parked] if each not in donors)
        while blocks > pool.get_num_free_blocks() or slots > 0:
            if (request_id := next(unused, None)) is None:
                break
            self._evict(request_id)
            slots -= 1
            # Waiting requests may share blocks that are free now, and take them from the pool.
            if counts and blocks <= pool.get_num_free_blocks() and slots <= 0:
                blocks = needed_blocks(self, waiting, self._donors)
        # Only donors remain. Waiting requests recompute their tokens rather than wait forever.
        stuck = not self.running and blocks > pool.get_num_free_blocks()
        for request_id in [*self.parked]:
            if not stuck and slots <= 0:
                return
            self._evict(request_id)
            slots -= 1

    def _evict(self, request_id: str) -> None:
        self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self._evicted.append(request_id)


def pad_no_drafts(scheduler: Any) -> None:
    """Keep vLLM from padding a new request with drafts that do not exist: its row would not be the last,
    and the CPU build accepts such drafts."""
    if scheduler.num_spec_tokens and scheduler.dynamic_sd_lookup is None:
        # The number of drafts by the number of requests in a step; with such a table vLLM does not pad.
        scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * (
            scheduler.max_num_running_reqs + 1
        )


def keep_blocks_apart(scheduler: Any) -> None:
    """Let running requests keep blocks that other weights computed, and no other request find them.

    The hashes of their tokens get a salt of their own, as with vLLM's ``cache_salt``.
    """
    pool = scheduler.kv_cache_manager.block_pool
    pool.cached_block_hash_to_block = BlockHashToBlockMap()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
    for request in scheduler.running:
        request.cache_salt = f"{request.request_id}/{request.num_tokens}"
        request.block_hashes.clear()
        request.update_block_hashes()


def most_blocks(scheduler: Any, waiting: Iterable[Request]) -> int:
    """Return an upper bound of ``needed_blocks`` without a look-up for each block, as if none were
    shared."""
    # Two blocks more than a waiting request's full ones: one for its last tokens, one for a copied block.
    size = scheduler.block_size
    running = sum(_blocks_ahead(request, size) for request in scheduler.running)
    return int(running + sum(request.num_tokens // size + 2 for request in waiting))


def _blocks_ahead(request: Request, size: int) -> int:
    """Return at least as many blocks as a running request needs for its new tokens."""
    full = request.num_tokens // size - request.num_computed_tokens // size
    return max(int(full) + 1, 1)


def needed_blocks(
    scheduler: Any, waiting: Iterable[Request], donors: Mapping[str, tuple[str, int]]
) -> int:
    """Return the number of blocks for the requests that fit into one step's tokens. Blocks that others
    hold too are not counted; cached blocks without a holder are taken from the pool."""
    size = scheduler.block_size
    blocks, tokens_left = 0, int(scheduler.max_num_scheduled_tokens)
    for request in scheduler.running:  # the rest of a prompt, or the next token
        blocks += _blocks_ahead(request, size)
        tokens_left -= 1
    for request in waiting:
        if tokens_left <= 0:
            break
        cached = scheduler.kv_cache_manager.get_computed_blocks(request)[0].blocks[0]
        held = sum(block.ref_cnt > 0 for block in cached)
        tokens = len(cached) * size
        donor_id, of_donor = donors.get(request.request_id, ("", 0))
        donor = scheduler.requests.get(donor_id)
        if donor is not None:
            of_donor = min(of_donor, donor.num_computed_tokens)
            held, tokens = max(held, of_donor // size), max(tokens, of_donor)
        blocks += request.num_tokens // size + 2 - held
        tokens_left -= max(request.num_tokens - tokens, 1)
    return blocks
