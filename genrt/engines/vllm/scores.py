"""Computes scores: log-probabilities or rows at many positions of a text, from the forwards that run it.

A score is one vLLM request; its prompt is the text without its last token. Both runners look for vLLM's
prompt logprobs after each forward, when they have the hidden states of all computed positions. There this
file computes the wanted rows, a bounded number at a time, and keeps one entry of each row, or the row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from genrt.engines.vllm.capture import log_probabilities
from genrt.engines.vllm.requests import FIRST
from genrt.errors import EngineFailed, EngineUnsupported
from genrt.questions.scores import ScoreRequest, Wanted, score_entries
from genrt.tokens.rows import AsyncHostCopy, moved
from genrt.tokens.sampling import TeacherLogprobs, top_with_tail


class Span(NamedTuple):
    """The part of a request that a step computes: ``length`` tokens from number ``computed`` on. Their
    hidden states start at ``offset``."""

    request_id: str
    computed: int
    length: int
    offset: int


@dataclass(slots=True)
class _Score:
    """A score in progress."""

    targets: np.ndarray  # int64: the token after each wanted position
    lora: LoRARequest | None
    first: int
    next: int  # the first position that is still missing; ``end`` when all are taken
    wanted: Wanted
    temperature: float
    top: int
    # Log-probabilities on their way to the host, in order; of whole rows, the first entries.
    parts: list[tuple[AsyncHostCopy, slice]] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)  # on the device, if they are wanted

    @property
    def end(self) -> int:
        return self.first + len(self.targets)


class _ScorePart(NamedTuple):
    score: _Score  # a step computed its positions ``begin`` to ``end``
    begin: int
    end: int
    hidden_states: torch.Tensor


class Positions:
    """The scores in progress of one engine, by the ids of their vLLM requests; without a model
    ``runner``, scores are not supported."""

    def __init__(self, runner: Any = None, vocab_size: int = 1) -> None:
        self._runner = runner
        # 2**25 logits, 256 MiB at most with their float32 copy, are enough positions for a matrix product
        # that is not bound by reading the weights.
        self._at_once = max(1, 2**25 // vocab_size)
        self._device = torch.device("cpu" if runner is None else runner.device)
        self._scores: dict[str, _Score] = {}
        self.scored_tokens = self._numbers = 0

    @property
    def are_taken(self) -> bool:
        """True if the engine supports scores; otherwise callers ask for rows."""
        return self._runner is not None

    def stop(self) -> None:
        """Support no scores from now on, and drop the references to the model."""
        self._runner = None
        self._scores.clear()

    @property
    def bytes_to_host(self) -> int:
        """The number of bytes that have moved to the host, 4 for each number of a position."""
        return 0 if self._device.type == "cpu" else 4 * self._numbers

    def begin(self, request_id: str, request: ScoreRequest, lora: LoRARequest | None) -> None:
        """Start the score of a request that is sent to vLLM next."""
        if not self.are_taken:
            raise EngineFailed("this engine takes a row for every token of a score")
        targets = np.frombuffer(request.packed, np.uint32)[request.start :].astype(np.int64)
        first, how = request.start - 1, (request.wanted, request.temperature, request.top)
        self._scores[request_id] = _Score(targets, lora, first, first, *how)

    def __bool__(self) -> bool:
        return bool(self._scores)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._scores

    @torch.inference_mode()
    def put(self, hidden_states: torch.Tensor, spans: Iterable[Span]) -> None:
        """Store the wanted positions that a step computed; ignore spans of other requests."""
        # By kind, and by the number of likeliest tokens.
        groups: dict[tuple[str, int], list[_ScorePart]] = {}
        for span in spans:
            score = self._scores.get(span.request_id)
            if score is None or span.computed > score.next:  # ``take`` reports the gap
                continue
            end = min(span.computed + span.length, score.end)  # after a preemption they come again
            if end > score.next:
                start = span.offset - span.computed
                found = hidden_states[start + score.next : start + end]
                kind: str = score.wanted if score.wanted in ("rows", "top") else "entries"
                part = _ScorePart(score, score.next, end, found)
                groups.setdefault((kind, score.top), []).append(part)
        for (kind, top), group in groups.items():
            if kind == "rows":
                rows = _cat([each for _, each in self._rows(*_states(group))])
                self._put(group, AsyncHostCopy(rows[:, 0]), rows)
            else:
                self._put(group, AsyncHostCopy(self._entries(group, top)))

    def _put(
        self, group: Sequence[_ScorePart], copy: AsyncHostCopy, rows: torch.Tensor | None = None
    ) -> None:
        at = 0
        for score, begin, end, _ in group:
            part = slice(at, at + end - begin)
            if rows is not None:
                score.rows.append(rows[part])
            score.parts.append((copy, part))
            score.next, at = end, part.stop

    def _entries(self, group: Sequence[_ScorePart], top: int) -> torch.Tensor:
        counts = [each.end - each.begin for each in group]
        heats = np.repeat([float(each.score.temperature) for each in group], counts)
        is_heated = (heats != 1.0).any()
        heated = moved(torch.from_numpy(heats), self._device) if is_heated else None
        if top:
            tops = [
                top_with_tail(rows, top, None if heated is None else heated[part])
                for part, rows in self._rows(*_states(group))
            ]
            return _cat(tops)
        own = [s.targets[begin - s.first : end - s.first] for s, begin, end, _ in group]
        targets = moved(torch.from_numpy(np.concatenate(own)), self._device)
        greedy = any(each.score.wanted == "greedy" for each in group)
        wants: Wanted = "greedy" if greedy else "logprobs"
        found = [
            score_entries(rows, targets[part], wants, None if heated is None else heated[part])
            for part, rows in self._rows(*_states(group))
        ]
        return _cat(found, dim=-1)

    @torch.inference_mode()
    def entries(
        self,
        hidden_states: torch.Tensor,
        places: np.ndarray,
        token_ids: np.ndarray,
        temperature: float,
        lora: LoRARequest | None,
    ) -> torch.Tensor:
        """Return the log-probabilities of tokens after hidden states ``[m, size]`` at these places, both
        int64 ``[n]``: float32 ``[n]`` on the device, which may still be computing them."""
        count, parts = len(places), list[torch.Tensor]()
        at, targets = moved(torch.from_numpy(np.stack([places, token_ids])), self._device)
        heats = None
        if temperature != 1.0:
            heats = targets.new_full((count,), temperature, dtype=torch.float64)
        chosen = hidden_states.index_select(0, at)
        for part, rows in self._rows(chosen, [lora] * count):
            own = None if heats is None else heats[part]
            parts.append(score_entries(rows, targets[part], "logprobs", own))
        self.scored_tokens += count
        self._numbers += count
        return _cat(parts)

    def _rows(
        self, hidden_states: torch.Tensor, loras: Sequence[LoRARequest | None]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield rows for some positions at a time, with the slice of positions."""
        for start in range(0, len(hidden_states), self._at_once):
            part = slice(start, start + self._at_once)
            if self._runner.lora_config is not None:
                # Each hidden state has its own adapter here; the next step sets one per row again.
                ids = tuple(0 if lora is None else lora.lora_int_id for lora in loras[part])
                self._runner._set_active_loras(ids, ids, {*loras[part]} - {None})
            logits = self._runner.model.compute_logits(hidden_states[part])
            yield part, log_probabilities(logits, may_overwrite=True)

    def take(self, request_ids: Iterable[str]) -> dict[str, torch.Tensor | None]:
        """Remove the scores among these requests and return them; ``None`` where a row was not finite.

        Raises:
            EngineUnsupported: a score has ended without some positions, because vLLM skipped them.
        """
        taken: dict[str, torch.Tensor | None] = {}
        for request_id in request_ids:
            score = self._scores.pop(request_id, None)
            if score is None:
                continue
            if score.next < score.end:
                raise EngineUnsupported(
                    "vLLM finished a request without showing genrt all positions of its text; this "
                    "version or configuration of vLLM is not supported"
                )
            self.scored_tokens += len(score.targets)
            self._numbers += len(score.targets) * (2 * score.top + 1)
            if score.wanted == "top":
                found = torch.cat([copy.result()[part] for copy, part in score.parts])
                is_finite = not TeacherLogprobs.of(found).logprobs[:, 0].isnan().any()
                taken[request_id] = found if is_finite else None
                continue
            parts = [copy.result()[..., part] for copy, part in score.parts]
            if score.wanted != "greedy":  # a greedy score in the same step adds a second row
                parts = [part if part.ndim == 1 else part[0] for part in parts]
            answer = torch.cat(parts, dim=-1)
            if bool(answer.isnan().any()):
                taken[request_id] = None
                continue
            if score.wanted == "rows":
                answer = _cat(score.rows)
                if answer.is_cuda:  # allocated on vLLM's stream, read on this one
                    answer.record_stream(torch.cuda.current_stream(answer.device))
            taken[request_id] = answer
        return taken

    def forget(self, request_ids: Collection[str]) -> None:
        """Forget cancelled scores; ignore other requests."""
        for request_id in request_ids:
            self._scores.pop(request_id, None)


def _states(group: Sequence[_ScorePart]) -> tuple[torch.Tensor, list[LoRARequest | None]]:
    """Return the hidden states of all parts, and the adapter of each."""
    loras = [each.score.lora for each in group for _ in range(each.begin, each.end)]
    return _cat([each.hidden_states for each in group]), loras


def _cat(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def positions_of(
    config: VllmConfig, runner: Any, scheduler: Any, own_processors: bool
) -> Positions:
    """Return the ``Positions`` of an engine.

    They support no scores if the runner is in another process, prompts have other hidden states than rows
    have, a cached prefix may end anywhere, or the user's logits processors change the rows' logits.
    """
    if (
        runner is None
        or own_processors
        or config.cache_config.kv_sharing_fast_prefill
        or config.kv_transfer_config
        or config.model_config.is_encoder_decoder
    ):
        return Positions()
    limit_hits(scheduler)
    return attach(runner, int(config.model_config.get_vocab_size()))


def attach(runner: Any, vocab_size: int) -> Positions:
    """Return ``Positions`` that see every step of a runner."""
    positions = Positions(runner, vocab_size)
    # Set on the instance, so that it hides the class's method.
    if hasattr(runner, "input_batch"):
        look = runner._get_prompt_logprobs_dict

        def look_v1(hidden_states: torch.Tensor, scheduled: dict[str, int]) -> Any:
            if positions:
                positions.put(hidden_states, _spans_v1(runner, scheduled))
            return look(hidden_states, scheduled)

        runner._get_prompt_logprobs_dict = look_v1
        return positions
    worker = runner.prompt_logprobs_worker
    compute, sample = worker.compute_prompt_logprobs, runner.sample

    def compute_v2(logits_of: Any, hidden_states: torch.Tensor, batch: Any, *rest: Any) -> Any:
        if positions:
            positions.put(hidden_states, _spans_v2(batch))
        return compute(logits_of, hidden_states, batch, *rest)

    def sample_v2(hidden_states: torch.Tensor, batch: Any, grammar: Any) -> Any:
        if positions and all(each in positions for each in batch.req_ids):
            return _undrawn(runner, batch)
        return sample(hidden_states, batch, grammar)

    worker.compute_prompt_logprobs, runner.sample = compute_v2, sample_v2
    return positions


def _undrawn(runner: Any, batch: Any) -> Any:
    """Return the outputs of the V2 runner's ``sample``, with token 0 in place of each draw, because the
    tokens and last rows of scores are not read."""
    ones, lengths = batch.seq_lens.new_ones(batch.num_reqs), runner.req_states.prefill_len.gpu
    counts = get_num_sampled_and_rejected(
        ones, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, lengths
    )
    drawn = batch.idx_mapping.new_zeros(batch.num_reqs, 1)
    return SamplerOutput(drawn, None, None, *counts), *counts


def _spans_v1(runner: Any, scheduled: dict[str, int]) -> Iterator[Span]:
    starts = runner.query_start_loc.np
    for request_id, index in runner.input_batch.req_id_to_index.items():
        if request_id in scheduled:
            computed = runner.requests[request_id].num_computed_tokens
            yield Span(request_id, computed, scheduled[request_id], int(starts[index]))


def _spans_v2(batch: Any) -> Iterator[Span]:
    counts = batch.num_computed_tokens_np, batch.num_scheduled_tokens
    # ``query_start_loc_np`` has one entry more than there are requests.
    for request_id, *numbers in zip(batch.req_ids, *counts, batch.query_start_loc_np, strict=False):
        yield Span(request_id, *map(int, numbers))


def limit_hits(scheduler: Any) -> None:
    """Limit the cached prefixes of a scheduler's scores to tokens before the first wanted position:
    cached tokens have no hidden states."""
    find = scheduler._get_local_prefix_cache_hit

    def found(request: Any, *limit: Any) -> Any:
        extra = request.sampling_params.extra_args if request.sampling_params else None
        first = (extra or {}).get(FIRST)
        # vLLM always computes the last token of a request.
        return find(request if first is None else _Shortened(request, first + 1), *limit)

    scheduler._get_local_prefix_cache_hit = found


class _Shortened:
    """A vLLM request that appears to have fewer tokens."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self._request = request
        self.num_tokens = num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
