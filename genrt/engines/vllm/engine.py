"""Runs one vLLM engine in this process: submit, step, cancel, errors, shutdown.

Rules:
    Every vLLM call happens on the thread that opened the engine, and on vLLM's own CUDA stream. Rows are
    handed over on the default stream, where all other threads read them.
    A request gets a new id each time it is submitted, so a late output of a cancelled one has no match.
    A request holds its adapter, text and positions until it ends.
    After a failed step the prefix cache is emptied, because its blocks may never have been written.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from genrt.engines.protocol import EngineStatistics, Finished
from genrt.engines.vllm.capture import FiniteCheck, RemoteStore, RowStore, connect_capture
from genrt.engines.vllm.lora import VLLMAdapters
from genrt.engines.vllm.populations import OpenPopulations
from genrt.engines.vllm.prefixes import PrefixBlocks
from genrt.engines.vllm.process import Globals, heap_kept
from genrt.engines.vllm.rank import Share, keep_local
from genrt.engines.vllm.requests import as_genrt_error, core_request, row_params
from genrt.engines.vllm.runners import RunnerV1, RunnerV2
from genrt.engines.vllm.scheduler import OpenScheduler, keep_blocks_apart
from genrt.engines.vllm.scores import positions_of
from genrt.engines.vllm.sequences import OpenRequests
from genrt.engines.vllm.steps import CoreSteps, DecodedStep, DecodeSteps, shut_down
from genrt.engines.vllm.texts import (
    VLLMTexts,
    computed_token_count,
    new_token_count,
)
from genrt.engines.vllm.weights import VLLMWeights
from genrt.errors import EngineDied, EngineFailed, GenrtError
from genrt.questions.arguments import Adapter
from genrt.questions.completions import Decoding, Streamed, TextRequest, Told
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest, not_finite
from genrt.questions.scores import ScoreRequest
from genrt.questions.sequences import SequenceHandle
from genrt.tokens.rows import AsyncHostCopy

SubmittedRequest: TypeAlias = LogprobsRequest | ScoreRequest | TextRequest
"""A request that becomes one vLLM request."""

EngineRequest: TypeAlias = SubmittedRequest | PopulationDraw
"""A request with its own vLLM request, or a population, which has several."""


class VLLMEngine:
    """Implements the Engine protocol over an ``LLMEngine`` with its scheduler in this process."""

    rows_by_number = True

    def __init__(
        self, llm_engine: LLMEngine, own: Globals, *, own_processors: bool = False
    ) -> None:
        self._llm_engine: LLMEngine | None = llm_engine
        self._core, config = llm_engine.engine_core, llm_engine.vllm_config
        self._core._finalizer.atexit = False  # the runtime closes it; a forked child must not
        self.vllm_config = without_layers(config)
        self._globals = own
        self.runner = "V2" if config.use_v2_model_runner else "V1"
        self.vocab_size = int(config.model_config.get_vocab_size())
        self.max_batch_size = int(config.scheduler_config.max_num_seqs)
        # One less than vLLM's: its scheduler reserves a place for the following token.
        self.max_model_len = int(config.model_config.max_model_len) - 1
        self.device = own.take_stream(torch.device(config.device_config.device))
        core, model_runner, sets = self._core.engine_core, None, None
        self._store: RowStore | RemoteStore
        with self._globals:
            if isinstance(llm_engine.model_executor, UniProcExecutor):
                model_runner = core.model_executor.driver_worker.worker.model_runner
                self._store, sets = connect_capture(model_runner)
            else:
                self._store = RemoteStore(self._core.collective_rpc, self.device)
        self._positions = positions_of(config, model_runner, core.scheduler, own_processors)
        on_cpu, has_loras = self.device.type == "cpu", config.lora_config is not None
        self._adapters = VLLMAdapters(self._core, enabled=has_loras, base_needs_zero=on_cpu)
        renew = self._adapters.load_zero
        self.weights = VLLMWeights(llm_engine, own, self, renew)
        self.prefixes = PrefixBlocks(core, self._adapters.request)
        self._open: OpenRequests | None = None
        is_open = config.scheduler_config.scheduler_cls is OpenScheduler
        self._steps = CoreSteps(self._core, core.scheduler if is_open else None, model_runner)
        if is_open:
            runner = (RunnerV2 if config.use_v2_model_runner else RunnerV1)(model_runner)
            steps = DecodeSteps(
                core.scheduler,
                runner,
                enabled=not own_processors,
                ahead=not on_cpu and config.speculative_config is None,  # without whole graphs
                device=self.device,
            )
            self._open = OpenRequests(core.scheduler, steps)
        weights = () if model_runner is None else model_runner.model.parameters()
        weight_bytes = sum(each.nbytes for each in weights)
        self._populations = OpenPopulations(self._open, self._adapters, weight_bytes)
        self._decoded: list[tuple[EngineRequest, str]] = []  # requests of the last decode step
        drawn_here = self.runner == "V1" and on_cpu
        self._texts = VLLMTexts(llm_engine, self.max_batch_size, sets, drawn_here=drawn_here)
        self._in_progress: dict[str, EngineRequest] = {}  # by the ids of vLLM's requests
        self._tickets = itertools.count(1)
        self._ended: list[Finished] = []  # ended without a forward; ``step`` returns them
        self.tell: Callable[[Sequence[Finished]], object] | None = None
        self._counted: dict[str, Any] = asdict(EngineStatistics())

    @property
    def keeps_residents(self) -> bool:
        """True if answered sequences stay resident, so that they can be extended and forked."""
        return self._open is not None

    @property
    def scores(self) -> bool:
        return self._positions.are_taken

    @property
    def blocks(self) -> bool:
        """True if populations take blocks by number."""
        return self.keeps_residents and self.scores

    @cached_property
    def tokenizer(self) -> Any:
        if self._llm_engine is None or self.vllm_config.model_config.skip_tokenizer_init:
            return None
        return self._llm_engine.get_tokenizer()

    def unsupported(self, decoding: Decoding) -> str | None:
        return self._texts.unsupported(decoding)

    def progress(self, streamed: Sequence[Streamed]) -> list[Told | None]:
        return self._texts.progress(streamed)

    def statistics(self) -> EngineStatistics:
        more = {} if self._open is None else self._open.counts()
        more |= {
            "kept_tokens": self.prefixes.tokens,
            "scored_tokens": self._positions.scored_tokens,
        }
        moved = self._counted["bytes_to_host"] + self._positions.bytes_to_host
        return EngineStatistics(**self._counted | more | {"bytes_to_host": moved})

    def submit(self, requests: Sequence[Request]) -> None:
        rows = [each for each in requests if isinstance(each, LogprobsRequest | ScoreRequest)]
        matched = [None] * len(rows) if self._open is None else self._open.match(rows)
        request_ids: list[str] = []
        for row, request_id in zip(rows, matched, strict=True):
            if request_id is None:
                request_id = self._add(row)
            else:
                self._begin(request_id, row)
            if request_id is not None:
                request_ids.append(request_id)
        if self._open is not None:
            self._open.remember(request_ids)
        if len(rows) < len(requests):
            self._texts.wait(requests)
        self._count(requests=len(requests))

    def _add(self, request: SubmittedRequest) -> str | None:
        """Send one request to vLLM and return its id; if vLLM refuses it, the next step returns why."""
        try:
            request_id = self._send(request)
        except GenrtError as refused:
            self._ended.append(Finished(request, error=refused))
            self._count(failed=1)
            return None
        if self._open is not None and isinstance(request, LogprobsRequest | ScoreRequest):
            self._open.share(request_id, request)
        self._begin(request_id, request)
        return request_id

    def _send(self, request: SubmittedRequest) -> str:
        """Send a request and return its vLLM id, its ticket as a decimal number. Raises GenrtError if
        vLLM refused the request, and has forgotten it."""
        ticket = next(self._tickets)
        try:
            lora = self._adapters.request(request.adapter)
            with self._globals:
                self._core.add_request(self._core_request(ticket, request, lora))
        except Exception as error:
            self._texts.forget([str(ticket)])
            self._positions.forget([str(ticket)])
            refused = as_genrt_error(error, "vLLM does not take this request")
            raise refused from refused.__cause__  # ``refused`` may be ``error`` itself
        return str(ticket)

    def _core_request(self, ticket: int, request: SubmittedRequest, lora: Any) -> EngineCoreRequest:
        if not isinstance(request, LogprobsRequest | ScoreRequest):
            return self._texts.begin(str(ticket), request, lora)
        row, first = request, None
        if isinstance(request, ScoreRequest):
            row, first = request.computed, request.start - 1
            self._positions.begin(str(ticket), request, lora)
        # An open request ends by itself only at its last possible token.
        most = None if self._open is None else self.max_model_len + 1 - len(row)
        params = row_params(ticket, open_for=most, first=first)
        return core_request(str(ticket), row.token_ids, params, lora)

    def _begin(self, request_id: str, request: SubmittedRequest) -> None:
        if request.adapter is not None:
            self._adapters.hold(request.adapter)
        self._in_progress[request_id] = request

    def _end(self, request_id: str) -> EngineRequest:
        """Remove a request and return its purpose. A population releases its adapter itself."""
        request = self._in_progress.pop(request_id)
        if isinstance(request, PopulationDraw):
            self._positions.forget([request_id])
            return request
        if isinstance(request, ScoreRequest):
            self._positions.forget([request_id])
        elif not isinstance(request, LogprobsRequest):
            self._texts.forget([request_id])
        if request.adapter is not None:
            self._adapters.release(request.adapter)
        return request

    def continue_population(self, population: PopulationDraw) -> bool:
        if self._open is None:
            return False
        try:
            found = self._populations.continue_population(population, self._send_all)
        except GenrtError:  # the caller then asks for rows one by one, and these get the error
            return False
        if found is None:
            return False
        self._in_progress |= dict.fromkeys(found, population)
        self._count(requests=len(found))
        return True

    def _send_all(self, rows: Sequence[LogprobsRequest | ScoreRequest]) -> list[str]:
        """Send these requests as ``_send`` does. If one is refused, abort the others and raise."""
        sent: list[str] = []
        try:
            sent += map(self._send, rows)
        except BaseException:
            with self._globals:
                self._core.abort_requests(sent)
            self._positions.forget(sent)
            raise
        return sent

    def settle(self, population: PopulationDraw) -> None:
        if self._open is not None:
            self._populations.settle(population)

    def release(self, asked: Sequence[SequenceHandle]) -> None:
        self._abort(self._populations.release(asked))

    def step(self) -> list[Finished]:
        for text in self._texts.admitted():
            self._add(text)
        # Return these before any forward: a failing forward would replace them by its error.
        if self._ended or not self._in_progress:
            ended, self._ended = self._ended, []
            return ended
        started = time.perf_counter()
        self._count(steps=1)  # before the step's results are delivered
        in_progress = len(self._in_progress) + len(self._texts.waiting)
        try:
            with self._globals:
                finished = None if self._steps.is_ahead else self._decode()
                if finished is None:
                    only = self._texts.running == len(self._in_progress)
                    outputs = self._steps.run(only_texts=only)
                    self.prefixes.look()
            if finished is None:
                finished = self._collect(outputs)
        except Exception as error:
            self._count(failed=in_progress, seconds=time.perf_counter() - started)
            self._recover()
            raise as_genrt_error(error, "the forward failed") from error
        self._count(seconds=time.perf_counter() - started)
        return finished

    def _decode(self) -> list[Finished] | None:
        """Run a decode step and return its results; ``None`` if the next step is vLLM's own."""
        if self._open is None:
            return None
        if blocks := self._populations.blocks:
            return self._score_blocks(sum(len(each.request_ids) for each in blocks.values()))
        if (step := self._open.steps.run()) is None:
            return None
        if isinstance(self._store, RowStore) and len(self._store):  # rows of chunked prompts
            self._store.forget(map(int, step.request_ids))
        if populations := self._populations.whole(step.request_ids):
            return self._drawn(populations, step)
        step = step.own()
        check = FiniteCheck(step.rows)
        # The device computes until ``check.wait`` below; do all other work meanwhile.
        self._open.steps.prepare_next()
        rows: list[Tensor | None] = [*step.rows.unbind()]
        # A population fails with any row, so wait for the check first.
        if self._populations:
            self._decoded = []
            for position in check.wait():
                rows[position] = None
            return self._answered(step.request_ids, rows)
        self._decoded = [(self._in_progress[each], each) for each in step.request_ids]
        finished = self._answered(step.request_ids, rows)
        for position in (bad := check.wait()):
            finished[position] = Finished(finished[position].request, error=not_finite())
        self._abort([step.request_ids[position] for position in bad])
        self._count(rows=-len(bad), failed=len(bad))
        return finished

    def _score_blocks(self, count: int) -> list[Finished] | None:
        """Run a step of the blocks in progress, which have ``count`` requests, and return their ends.
        Return ``None`` if vLLM must run its own step, or if there are other requests: ``_positions`` then
        takes the scores."""
        kept = cast("OpenRequests", self._open)
        if (step := kept.steps.run_blocks(count)) is None:
            firsts: dict[str, int] = {}
            for request_id, score in self._populations.unread_blocks():
                if request_id not in self._positions:
                    firsts[request_id] = score.start - 1
                    self._positions.begin(request_id, score, self._adapters.request(score.adapter))
            self._core.engine_core.scheduler.score_from(firsts)
            return None

        def entries(
            population: PopulationDraw, *of: *tuple[Tensor, np.ndarray, np.ndarray]
        ) -> Tensor:
            lora = self._adapters.request(population.adapter)
            return self._positions.entries(*of, population.temperature, lora)

        if isinstance(self._store, RowStore) and len(self._store):
            self._store.forget(map(int, step.request_ids))
        for request_id in step.request_ids:
            del self._in_progress[request_id]
        ends = self._populations.score(step, entries)
        kept.steps.prepare_block()
        return ends

    def _drawn(self, asked: Sequence[PopulationDraw], step: DecodedStep) -> list[Finished]:
        """Draw for populations from a step of their own, and start the next step."""
        tell = self.tell if self._populations.early_delivery.is_due(self.device) else None
        drawn = self._populations.drawn(asked, step.request_ids, step.rows, step.places)
        for request_id in step.request_ids:
            del self._in_progress[request_id]
        self._count(rows=len(step.request_ids))
        if tell is not None:
            tell(drawn.ends)
        with self._populations.early_delivery.preparing(is_early=tell is not None):
            cast("OpenRequests", self._open).steps.prepare_next(self._populations.spread(asked))
            if (next_tokens := self._populations.answer(asked, drawn)) is not None:
                self.speculate(*next_tokens)
        return drawn.ends if tell is None else []

    def _answered(
        self, request_ids: Sequence[str], rows: Sequence[Tensor | None]
    ) -> list[Finished]:
        """End these requests with rows or scores; ``None`` stands for one that is not finite."""
        finished: list[Finished] = []
        kept: list[tuple[str, LogprobsRequest]] = []  # with the context that is resident now
        over: list[str] = []
        for request_id, row in zip(request_ids, rows, strict=True):
            request = self._end(request_id)
            end: Finished | None = None
            if isinstance(request, PopulationDraw):
                end = self._populations.put(request, request_id, row)
                if end is None and request not in self._populations:
                    over.append(request_id)  # an earlier row has failed the population
                    continue
            elif row is None:
                end = Finished(request, error=not_finite())
            else:
                end = Finished(request, row)
                if isinstance(request, LogprobsRequest):
                    kept.append((request_id, request))
                elif isinstance(request, ScoreRequest):
                    kept.append((request_id, request.computed))
            if row is None:
                over.append(request_id)
            if end is not None:
                finished.append(end)
        if self._open is not None:
            self._open.keep(kept)
        self._abort(over)
        self._give_up(self._orphans_of(finished))
        failed = sum(end.error is not None for end in finished)
        self._count(rows=sum(row is not None for row in rows), failed=failed)
        return finished

    def _orphans_of(self, finished: Sequence[Finished]) -> list[str]:
        """Return the remaining vLLM requests of populations that failed by one of their rows."""
        failed = [
            end.request
            for end in finished
            if end.error is not None and isinstance(end.request, PopulationDraw)
        ]
        return [n for n, each in self._in_progress.items() if each in failed] if failed else []

    def expect(
        self,
        rows: Sequence[LogprobsRequest],
        token_ids: Tensor,
        share_of: Callable[[list[str]], Share] = lambda _: keep_local,
    ) -> None:
        """Run the prepared step with these tokens if it has these rows. ``share_of`` returns the function
        that makes these requests' tokens the same in all ranks."""
        if self._open is not None and self._open.steps.can_speculate(len(rows)):
            ids = dict(self._decoded)
            if len(found := [ids[row] for row in rows if row in ids]) == len(rows):
                self.speculate(found, token_ids, share=share_of(found))

    def speculate(
        self,
        request_ids: list[str],
        tokens: Tensor,
        on_host: AsyncHostCopy | None = None,
        share: Share = keep_local,
    ) -> None:
        """Run the prepared step with these tokens if it has these requests."""
        if self._open is None or not self._open.steps.can_speculate(len(request_ids)):
            return
        try:
            with self._globals:
                if on_host is None:  # the runtime draws on the default stream
                    self._globals.follow_default(tokens)
                share(tokens)
                self._open.steps.speculate(request_ids, tokens, on_host)
        except Exception:  # the caller's next request runs the step again and gets the error
            self._open.steps.discard()

    def _collect(self, outputs: Sequence[EngineCoreOutput]) -> list[Finished]:
        """Return the results of a step's outputs, with rows on the default stream."""
        # The outputs lack open requests, because their scheduler drops the token that ends a step.
        answered: list[str] = []
        if self._open is not None:
            answered = self._core.engine_core.scheduler.take_answered()
        computed, new = computed_token_count(outputs), new_token_count(outputs)
        ended, over, others = self._texts.take(outputs)
        finished: list[Finished] = []
        for output in others:
            request_id, reason = output.request_id, output.finish_reason
            if request_id not in self._in_progress or reason is None:
                continue
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                answered.append(request_id)
                continue
            request = self._end(request_id)
            if not isinstance(request, PopulationDraw) or self._populations.forget(request):
                failed = EngineFailed(f"vLLM ended the request with {reason}")
                finished.append(Finished(request, error=failed))
        for request_id, result in ended:
            error = result if isinstance(result, GenrtError) else None
            finished.append(Finished(self._end(request_id), None if error else result, error))
        if scores := self._positions.take(answered):  # each also has an unused row after its text
            self._store.forget(map(int, scores))
            answered = [each for each in answered if each not in scores]
        rows = self._store.take(map(int, answered)) if answered else []
        self._count(failed=sum(end.error is not None for end in finished))
        self._give_up([each for each in self._orphans_of(finished) if each not in answered])
        finished += self._answered(answered, rows)
        finished += self._answered([*scores], [*scores.values()])
        self._count(rows=-sum(score is not None for score in scores.values()))
        self._abort(over)
        if isinstance(self._store, RemoteStore):
            self._count(bytes_to_host=sum(row.nbytes for row in rows if row is not None))
        self._count(sampled_tokens=new - new_token_count(others), computed_tokens=computed)
        return finished

    def cancel(self, requests: Sequence[Request]) -> None:
        wanted = set(requests)
        gone = sum(end.request in wanted for end in self._ended) + self._texts.withdraw(wanted)
        self._ended = [end for end in self._ended if end.request not in wanted]
        here = [request_id for request_id, r in self._in_progress.items() if r in wanted]
        self._count(cancelled=gone + len(here))
        self._give_up(here)

    def _give_up(self, request_ids: Sequence[str]) -> None:
        """Forget these requests in progress, in vLLM and in this engine."""
        if not request_ids:
            return
        self._abort(request_ids)
        for request_id in request_ids:
            request = self._end(request_id)
            if isinstance(request, PopulationDraw):
                self._populations.forget(request)
        self._store.forget(map(int, request_ids))

    def _abort(self, request_ids: Sequence[str]) -> None:
        """Abort these requests in vLLM; ignore unknown ids."""
        if not request_ids:
            return
        with self._globals:
            self._core.abort_requests(list(request_ids))
        if self._open is not None:
            self._open.forget(request_ids)

    def _recover(self) -> None:
        """Forget everything after a failed step. Raises EngineDied if vLLM still holds requests or
        blocks."""
        self._texts.waiting.clear()
        self._steps.forget()
        try:
            self._abort(list(self._core.engine_core.scheduler.requests))
            self._store.forget(map(int, self._in_progress))
            self.prefixes.give_up()
            clean = self._core.reset_prefix_cache()
        except Exception as error:
            raise EngineDied(f"vLLM can't forget what was in progress: {error}") from error
        for request_id in list(self._in_progress):
            self._end(request_id)
        self._populations.clear()
        if not clean:
            raise EngineDied("vLLM still holds blocks of requests that were aborted")

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        self._adapters.check_enabled()
        if self._open is not None:  # the new one may take its adapters' slots
            self._open.steps.discard()
        try:
            with self._globals:
                self._adapters.add(adapter, path)
        except BaseException:
            self.remove_adapter(adapter)
            raise

    def remove_adapter(self, adapter: Adapter) -> None:
        if self._open is not None:  # resident sequences that no request in progress extends
            bound = self._open.residents.bound_to(adapter)
            self._abort([each for each in bound if each not in self._in_progress])
        with self._globals:
            self._adapters.remove(adapter)

    def probe(self, requests: Sequence[LogprobsRequest] | Sequence[ScoreRequest]) -> list[Tensor]:
        """Return rows or scores while nothing else is in progress; raise the first error."""
        self.submit(requests)
        ends: dict[Request, Finished] = {}
        while len(ends) < len(requests):
            ends |= {end.request: end for end in self.step()}
        for end in ends.values():
            if end.error is not None:
                raise end.error
        return [cast("Tensor", ends[request].result) for request in requests]

    def start_counting(self) -> None:
        """Reset the counters after the self-test."""
        self._counted = dict.fromkeys(self._counted, 0)
        self._positions.scored_tokens = 0
        if self._open is not None:
            self._open.start_counting()

    def forget_residents(self) -> bool:
        """Forget every sequence that no request extends, and every block; return whether vLLM did."""
        if not self._in_progress:
            with self._globals:
                self._steps.settle()
            self._populations.clear()
        if self._open is not None:
            kept = self._open.residents.request_ids()  # in the same order in every rank
            self._abort([each for each in kept if each not in self._in_progress])
        self.prefixes.give_up()
        return bool(self._core.reset_prefix_cache()) and not self._in_progress

    def forget_beside_texts(self, keeps_kv: bool) -> bool:
        """Forget every sequence and block, except the texts in progress and, if ``keeps_kv``, their
        blocks, which no other request may use; return whether vLLM did."""
        if not all(isinstance(each, TextRequest) for each in self._in_progress.values()):
            return False
        try:
            with self._globals:
                while self._steps.is_ahead:
                    self._ended += self._collect(self._steps.run(only_texts=False))
        except Exception as error:  # texts of the step have no next token
            raise EngineDied(f"the step before new weights failed: {error}") from error
        self._populations.clear()
        if self._open is not None:
            self._open.steps.discard()
            self._abort(self._open.residents.request_ids())
        self.prefixes.give_up()
        with self._globals:
            if not keeps_kv:
                return bool(self._core.reset_prefix_cache(reset_running_requests=True))
            keep_blocks_apart(self._core.engine_core.scheduler)
        return True

    def label_texts(self, version: int) -> None:
        """Label the tokens of texts that are drawn from now on."""
        self._texts.set_version(version)

    def stop_keeping(self) -> None:
        """Open a new vLLM request for every request from now on. No request may be in progress."""
        self.forget_residents()
        self._open = None

    def stop_truncating(self) -> None:
        """Refuse texts with top-k or top-p from now on."""
        self._texts.truncates = False

    def stop_scoring(self) -> None:
        """Support no scores from now on, so that callers ask for rows."""
        self._positions.stop()

    def close(self) -> None:
        """Shut down vLLM's core, except for process-wide state that other engines use."""
        if self._llm_engine is None:
            return
        if self._open is not None:
            self._open.steps.close()
        with heap_kept(), self._globals:
            shut_down(self._llm_engine)
        del self._steps, self.weights  # they refer to the core
        self._adapters.close()
        self._texts.forget([*self._in_progress])
        self._in_progress.clear()
        self._positions.stop()
        self._store = RowStore()
        self._llm_engine = self._core = None
        self._globals = Globals()  # the old globals hold device memory: graphs, a workspace
        gc.collect()
        torch.cuda.empty_cache()

    def _count(self, **more: float) -> None:
        for name, number in more.items():
            self._counted[name] += number


def changes_with_length(config: VllmConfig) -> bool:
    """Return whether the model's distribution depends on ``max_model_len``: Phi 3's long factors of
    RoPE, Llama 4's temperatures of attention."""
    text = config.model_config.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    return "longrope" in str(rope) or str(getattr(text, "model_type", "")).startswith("llama4")


def without_layers(config: VllmConfig) -> VllmConfig:
    """Return a copy of the configuration, with the model's ``max_model_len``, and without the layers of
    the open model: front ends may send it to another process."""
    found = copy(config)
    if not changes_with_length(config):
        found.model_config = copy(config.model_config)
        found.model_config.max_model_len -= 1
    found.compilation_config = copy(config.compilation_config)
    found.compilation_config.static_forward_context = {}
    return found
