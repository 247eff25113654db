"""Runs steps: vLLM's own, and decode steps of open requests, which are prepared and speculated.

A *decode step* gives one token to sequences that were extended or forked, and does no other work. While
the same sequences continue, the next step is *prepared* while the device computes: it lacks only its
tokens. If these were drawn on the device, it is *speculated*: it runs before a caller asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.request import Request

from genrt.engines.vllm.reassignment import Reassignment
from genrt.engines.vllm.runners import (
    HiddenStates,
    NextTokens,
    Prepared,
    Runner,
    new_tokens,
    read_elsewhere,
)
from genrt.engines.vllm.scheduler import OpenScheduler
from genrt.tokens.rows import AsyncHostCopy, moved

MISSES, RETRY, PATIENCE = 3, 16, 4
"""After ``MISSES`` prepared, or speculated, steps in a row that nobody used, only every ``RETRY``-th step
tries again. After a row, ``PATIENCE`` steps of texts are not scheduled ahead: more rows are likely."""


class DecodedStep(NamedTuple):
    """A launched decode step: its requests and their rows, which the device may still be computing.

    Request ``i`` has row ``i``, or row ``places[i]`` if there are more rows than requests. Rows with
    ``is_lent`` are valid until the next step is launched.
    """

    request_ids: list[str]
    rows: torch.Tensor
    places: list[int] | None = None
    is_lent: bool = False

    def own(self) -> DecodedStep:
        """Return the same step with its own rows, one for each request."""
        if not self.is_lent:
            return self
        if self.places is None:
            rows = self.rows.clone()
        else:
            rows = self.rows.index_select(0, moved(torch.tensor(self.places), self.rows.device))
        return DecodedStep(self.request_ids, read_elsewhere(rows))


class _Speculated(NamedTuple):
    """The tokens with which a prepared step ran before a caller asked for it, and its rows."""

    on_host: AsyncHostCopy  # the tokens, or draws with the tokens in their first column
    order: list[int] | None  # for each request, its token's place
    rows: torch.Tensor

    def token_ids(self) -> list[int]:
        """Wait for the tokens; return them in the order of the step."""
        drawn = self.on_host.result().numpy()
        found = (drawn if drawn.ndim == 1 else drawn[:, 0]).clip(0.0).astype(np.int64).tolist()
        return found if self.order is None else [found[place] for place in self.order]


class DecodeSteps:
    """Runs the decode steps of an engine in this process: ``extend`` and ``reassign`` set up the next,
    ``run`` launches it, ``prepare_next`` ends it while the device computes.

    Args:
        enabled: whether decode steps are correct for this engine: a row depends on the forward alone.
        ahead: whether steps are prepared and speculated.
    """

    def __init__(
        self,
        scheduler: OpenScheduler,
        runner: Runner,
        *,
        enabled: bool,
        ahead: bool,
        device: torch.device,
    ) -> None:
        self._scheduler, self._runner, self._device = scheduler, runner, device
        self._enabled, self.ahead = enabled, ahead
        # Changes that ``run`` has still to pass to the runner.
        self._reassignments: list[Reassignment] = []
        self._tokens = NextTokens()
        self._several: dict[str, Request] = {}  # requests with several tokens
        # Set by ``prepare_next`` and ``speculate``, consumed by ``run``.
        self._prepared: Prepared | None = None
        self._speculated: _Speculated | None = None
        # The prepared step that ran last, if no other step has run since.
        self._before: Prepared | None = None
        self._block: Prepared | None = None  # the same for a block
        self._next_block: Prepared | None = None  # of ``prepare_block``, for ``run_blocks``
        # The requests of the last unprepared decode step, and whether the step before had the same ones.
        self._last: list[str] = []
        self._is_steady = False
        self._steps = self._unused = self._mistaken = self.prepared = self.speculated = 0

    def extend(self, tokens: NextTokens) -> None:
        """Add these tokens to the next step."""
        self._tokens.add(tokens)

    def extend_by_several(self, requests: Iterable[Request]) -> None:
        """Add these extended requests' tokens to the next step."""
        self._several.update((each.request_id, each) for each in requests)

    def reassign(self, reassignments: Sequence[Reassignment]) -> None:
        """Make requests continue as other sequences from the next step on."""
        self._reassignments += reassignments

    def forget(self, request_ids: Set[str]) -> None:
        """Drop pending work for requests that vLLM no longer knows."""
        of_step = [] if self._prepared is None else self._prepared.request_ids
        known = self._scheduler.requests.keys()
        # A speculated step that has already run keeps valid rows for the other requests: it started
        # before another request could take the freed blocks.
        is_of_use = self._speculated is not None and not known.isdisjoint(of_step)
        of_block = [] if self._next_block is None else self._next_block.request_ids
        if not (is_of_use or request_ids.isdisjoint(of_step)):
            self.discard()
        if not request_ids.isdisjoint(of_block):
            self._next_block = None
        self._reassignments = [
            each for each in self._reassignments if each.request.request_id not in request_ids
        ]
        self._tokens = self._tokens.without(request_ids)
        for request_id in request_ids:
            self._several.pop(request_id, None)

    def discard(self) -> None:
        """Discard the step that was prepared or speculated, if there is one."""
        self._prepared = self._speculated = self._next_block = None

    def close(self) -> None:
        """Drop the runner and its device memory; no step may follow."""
        self.discard()
        self._before = self._block = None
        del self._runner

    @torch.inference_mode()
    def run_blocks(self, count: int) -> HiddenStates | None:
        """Launch the next step, of any number of tokens for each of ``count`` requests, and end it.
        Return ``None`` if vLLM must run its own step, or if there are more or fewer requests."""
        step, before = self._next_block, self._block
        if step is not None and not self._is_next(step, count):
            step, self._unused = None, self._unused + 1
        self._unused += self._prepared is not None
        self.discard()
        self._steps += 1
        self._block = None
        if step is not None:
            states, self._block = self._runner.run_prepared_block(step, self._running), step
            own = set(step.request_ids)
            self._tokens = self._tokens.without(own)
            self._several = {n: each for n, each in self._several.items() if n not in own}
            self._before, self._last, self._unused = None, [], 0
            self.prepared += 1
        else:
            if (output := self._scheduled(count)) is None:
                return None
            states, self._block = self._runner.run_block(output, self._running, before)
        self._scheduler.end_decode_step()
        return states

    def _is_next(self, step: Prepared, count: int) -> bool:
        """Begin a prepared block; return False if it is not the next step, of so many requests."""
        counts = dict(zip(step.request_ids, step.counts, strict=True))
        if len(counts) != count or self._reassignments:
            return False
        return self._scheduler.begin_prepared(counts)

    @torch.inference_mode()
    def prepare_block(self) -> None:
        """Prepare the next block while the device computes, as if all requests continued by as many
        tokens."""
        if (block := self._block) is None or not self._prepares:
            return
        ids = block.request_ids
        output = self._scheduler.decode_step_ahead(ids, ids, block.counts)
        if output is not None:
            self._reassign_runner()
            self._next_block = self._runner.prepare(output, block)

    @property
    def _running(self) -> dict[str, Request]:
        return {each.request_id: each for each in self._scheduler.running}

    def _scheduled(self, exactly: int | None = None) -> SchedulerOutput | None:
        """Schedule a step that is not prepared, and pass all changes to the runner, but for the tokens
        of a block. Return ``None``, with these too, if vLLM must run its own step."""
        self._before, self._last = None, []
        self._reassign_runner()  # first: a token's position is the new sequence's
        output = self._scheduler.decode_step(exactly) if self._enabled else None
        tokens, several = self._tokens, self._several
        self._tokens = NextTokens()
        if several and output is None:
            these = several.values()
            tokens = tokens.without(several)
            tokens.add(new_tokens(these, [each.num_computed_tokens for each in these]))
            self._several = {}
        elif several and output is not None:
            # The step's own tokens come from its requests; others of this flush may have no place in it.
            scheduled = output.num_scheduled_tokens
            self._several = {n: each for n, each in several.items() if n not in scheduled}
            tokens = tokens.without(scheduled.keys() | several.keys())
        if tokens:
            self._runner.write(tokens)
        return output

    @torch.inference_mode()
    def run(self) -> DecodedStep | None:
        """Launch the next step. Return ``None`` if vLLM must run its own step, with all changes."""
        prepared, speculated = self._prepared, self._speculated
        self._unused += self._next_block is not None
        self.discard()
        self._steps += 1
        self._block = None
        if prepared is not None:
            tokens = self._tokens_of(prepared)
            if tokens is not None:
                return self._run_prepared(prepared, tokens, speculated)
            if speculated is not None and (step := self._part_of(prepared, speculated)) is not None:
                return step
            self._unused += 1
            self._mistaken += speculated is not None
        last, is_block = self._last, bool(self._several)
        output = self._scheduled()
        if output is None:
            return None
        if is_block:
            self._runner.execute_block(output, self._running)
        else:
            self._runner.execute(output)
        self._last, rows = self._runner.take_rows()
        request_ids = self._last
        self._is_steady = len(request_ids) == len(last) and set(request_ids) == set(last)
        return DecodedStep(request_ids, rows)

    def _reassign_runner(self) -> bool:
        changed = bool(self._reassignments)
        if changed:
            self._runner.reassign(self._reassignments)
            self._reassignments.clear()
        return changed

    def _tokens_of(self, step: Prepared) -> NextTokens | None:
        """Return the tokens of a prepared step, in its order; ``None`` if it is not the next step."""
        tokens = self._tokens.in_order_of(step.request_ids)
        if tokens is None or tokens.positions != step.positions:
            return None
        counts = dict.fromkeys(step.request_ids, 1)
        return tokens if self._scheduler.begin_prepared(counts) else None

    def _run_prepared(
        self, step: Prepared, tokens: NextTokens, speculated: _Speculated | None
    ) -> DecodedStep:
        if (
            speculated is not None
            and not self._reassignments
            and speculated.token_ids() == tokens.token_ids
        ):
            rows = speculated.rows
            self._mistaken = 0
            self.speculated += 1
        else:
            self._mistaken += speculated is not None
            if self._reassign_runner():
                self._runner.refresh(step)
            # In pinned memory, from which a CUDA device copies without blocking the host.
            is_cuda = self._device.type == "cuda"
            chosen = torch.tensor(tokens.token_ids, dtype=torch.float64, pin_memory=is_cuda)
            rows = self._runner.run(step, chosen)
        self._confirmed(step, tokens)
        return DecodedStep(step.request_ids, rows, is_lent=True)

    def _part_of(self, step: Prepared, speculated: _Speculated) -> DecodedStep | None:
        """Answer the next step from a speculated step of more requests, if its tokens were right."""
        tokens, at = self._tokens, {each: n for n, each in enumerate(step.request_ids)}
        if self._reassignments or not tokens or not at.keys() >= set(tokens.request_ids):
            return None
        places, ran = [at[each] for each in tokens.request_ids], speculated.token_ids()
        if (
            len(set(places)) < len(places)
            or [step.positions[place] for place in places] != tokens.positions
            or [ran[place] for place in places] != tokens.token_ids
            or not self._scheduler.begin_prepared(dict.fromkeys(tokens.request_ids, 1))
        ):
            return None
        self._mistaken = 0
        self.speculated += 1
        self._confirmed(step, tokens)
        return DecodedStep(tokens.request_ids, speculated.rows, places, is_lent=True)

    def _confirmed(self, step: Prepared, tokens: NextTokens) -> None:
        self._runner.confirm(step, tokens)
        self._before = step
        self._tokens = NextTokens()
        self._unused = 0
        self.prepared += 1

    @property
    def foresees(self) -> bool:
        """True if the step after the running one may be prepared and speculated."""
        return self._prepares and self._is_worth_it(self._mistaken)

    @property
    def _prepares(self) -> bool:
        return self.ahead and self._is_worth_it(self._unused)

    @torch.inference_mode()
    def prepare_next(self, forks: Sequence[str] | None = None) -> None:
        """Prepare the next step while the device computes, if it is likely to be used, and park the
        requests of the running step.

        ``forks`` are parked forks of the running requests, for the prepared step; ``None`` if only past
        steps say anything about the next one.
        """
        if self._prepares and (forks is not None or self._is_steady):
            forks = forks or ()
            order = self._before.request_ids if self._before is not None else ()
            output = self._scheduler.decode_step_ahead(forks, order)
            if output is not None:
                self._reassign_runner()
                self._prepared = self._runner.prepare(output, self._before)
            self._mistaken += bool(forks) and self._prepared is None
        self._scheduler.end_decode_step()

    def can_speculate(self, count: int) -> bool:
        """Return whether a step of ``count`` requests is prepared and not speculated yet."""
        step = self._prepared
        return step is not None and len(step.request_ids) == count and self._speculated is None

    @torch.inference_mode()
    def speculate(
        self, request_ids: Sequence[str], tokens: torch.Tensor, on_host: AsyncHostCopy | None
    ) -> None:
        """Run the prepared step with these tokens, float64 ``[n]`` on the device (-1: no token), if it
        has these requests. ``on_host`` is the tokens' copy to the host, if it was started."""
        step = self._prepared
        if step is None or not self._is_worth_it(self._mistaken):
            return
        order: list[int] | None = None
        # Copy before the forward is enqueued, so that the copy does not wait for it.
        on_host = AsyncHostCopy(tokens) if on_host is None else on_host
        if request_ids != step.request_ids:
            places = {request_id: place for place, request_id in enumerate(request_ids)}
            if len(places) != len(request_ids) or places.keys() != set(step.request_ids):
                return
            order = [places[request_id] for request_id in step.request_ids]
        self._speculated = _Speculated(on_host, order, self._runner.run(step, tokens, order))

    def _is_worth_it(self, mistakes: int) -> bool:
        return mistakes < MISSES or self._steps % RETRY == 0


def shut_down(llm_engine: Any) -> None:
    """Shut an engine core down as ``EngineCore.shutdown`` does, but for state that other engines use."""
    llm_engine.engine_core._finalizer.detach()  # it would shut down the shared state too
    # Remove hooks of torch's compiler while the model exists: they would keep its weights in memory.
    getattr(llm_engine, "_finalizer", lambda: None)()
    core = llm_engine.engine_core.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()


class CoreSteps:
    """The steps of one engine's core. Steps of texts alone are scheduled while the previous step
    computes, if the core's ``scheduler`` is genrt's; ``runner`` is vLLM's, if it is in this process."""

    def __init__(
        self, client: EngineCoreClient, scheduler: OpenScheduler | None, runner: Any = None
    ) -> None:
        self._client: Any = client
        self._runner, self._scheduler = runner, scheduler
        self._core: Any = self._client.engine_core if scheduler is not None else None
        self._can_be_ahead = getattr(self._core, "batch_queue", None) is not None
        self._without_rows = 0

    def run(self, *, only_texts: bool) -> Sequence[EngineCoreOutput]:
        """Return the outputs of the step under way, or, if there is no such step, of the next one."""
        if self._scheduler is None:
            outputs: Sequence[EngineCoreOutput] = self._client.get_output().outputs
            return outputs
        self._without_rows = self._without_rows + 1 if only_texts else 0
        if self._can_be_ahead and only_texts and self._without_rows > PATIENCE:
            return _outputs_of(self._ahead(self._scheduler))
        if self.is_ahead:
            outputs = self._finished(self._scheduler)
        else:
            outputs, is_executed = self._core.step()
            if is_executed:
                self._take_drafts(self._scheduler)
        return _outputs_of(outputs)

    @property
    def is_ahead(self) -> bool:
        """True while a step is under way with unread outputs."""
        return self._can_be_ahead and bool(self._core.batch_queue)

    def settle(self) -> None:
        """Wait for the steps under way and drop their outputs."""
        while self._scheduler is not None and self.is_ahead:
            self._finished(self._scheduler)

    def forget(self) -> None:
        """Forget the steps under way, after a step that failed."""
        if self._can_be_ahead:
            self._core.batch_queue.clear()
        if self._runner is not None:
            # The state of a forward with undrawn tokens, for example because a mask failed. With it,
            # runner V2 refuses every later step.
            self._runner.execute_model_state = None

    def _ahead(self, scheduler: OpenScheduler) -> Any:
        """Schedule a step and return the outputs of the previous one, if there is one."""
        scheduler.ahead = True
        try:
            outputs, _ = self._core.step_with_batch_queue()
            if outputs is None and self.is_ahead:
                outputs, _ = self._core.step_with_batch_queue()
        finally:
            scheduler.ahead = False
        return outputs

    def _finished(self, scheduler: OpenScheduler) -> Any:
        """Wait for the step under way and return its outputs, without scheduling another step."""
        future, output, _ = self._core.batch_queue.pop()
        outputs = scheduler.update_from_output(output, future.result())
        self._take_drafts(scheduler)
        return outputs

    def _take_drafts(self, scheduler: OpenScheduler) -> None:
        """Schedule the drafts that the last step made for texts. vLLM does so itself only while no step
        may be scheduled ahead."""
        if not scheduler.num_spec_tokens:
            return
        drafts = self._core.model_executor.take_draft_token_ids()
        if drafts is not None:
            scheduler.update_draft_token_ids(drafts)


def _outputs_of(outputs: Any) -> Sequence[EngineCoreOutput]:
    """Return the outputs for the only client."""
    found: Sequence[EngineCoreOutput] = outputs[0].outputs if outputs and 0 in outputs else ()
    return found
