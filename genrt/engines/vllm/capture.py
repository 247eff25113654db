"""vLLM's rows by request: the injected global logits processor, for its runners V1 and V2.

Rules:
    A row is matched to its request by the ticket that travels in ``SamplingParams.extra_args``, never
    by its position in the batch: V1 tells where a request's row is by ``update_state``, V2 by slot.
    A prompt that is prefilled in several steps yields a row in each; the last one is the right one.
    Steps without a logprobs request compute nothing here.

On a CPU, the V1 runner's samples are drawn here too: every token from ``(seed, how many came before)``.
vLLM's sampler draws from the process's own generator there, whoever has a seed, and a seeded request's
generator goes on from step to step, the discarded draws of a chunked prompt included.

Private to vLLM and touched here: how a worker holds its processors (``_find``), and on a CPU the V1
runner's ``sampler.topk_topp_sampler``. ``self_check.py`` runs at start and fails when any of this has
changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.sample.logits_processor import MoveDirectionality
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

from genrt.errors import EngineUnsupported
from genrt.tokens.rows import Leaving
from genrt.tokens.sampling import mixed

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

__all__ = [
    "SEED",
    "TICKET",
    "CaptureV1",
    "CaptureV2",
    "FiniteCheck",
    "RemoteStore",
    "RowStore",
    "WorkerRows",
    "log_probabilities",
]

TICKET = "genrt_ticket"
"""The key in ``extra_args`` under which a logprobs request carries its ticket, an int."""

SEED = "genrt_seed"
"""The key under which a sample request carries its seed, where its tokens are drawn here."""


@torch.inference_mode()
def log_probabilities(logits: torch.Tensor, *, may_overwrite: bool = False) -> torch.Tensor:
    """Rows ``[n, vocab_size]`` of ``logits``; in their place, if they may be overwritten and are wide
    enough, and with no second tensor as wide in any case."""
    if not may_overwrite:
        return logits.log_softmax(dim=-1, dtype=torch.float32)
    wide = logits.float()
    return torch.log_softmax(wide, dim=-1, out=wide)


class FiniteCheck:
    """Which of the rows ``[n, vocab_size]`` come from logits that are not finite: asked of the device,
    while the host goes on."""

    def __init__(self, rows: torch.Tensor) -> None:
        # NaN, +inf or nothing but -inf among the logits makes every entry of the row NaN
        self._first = rows[:, 0]
        self._sum = Leaving(self._first.sum())

    def wait(self) -> set[int]:
        """The positions of such rows, once the device has computed them all."""
        if not math.isnan(self._sum.arrived().item()):
            return set()
        return set(self._first.isnan().nonzero()[:, 0].tolist())


class RowStore:
    """The rows that have been computed and not yet taken, by ticket; each one ``[vocab_size]``."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[torch.Tensor, int]] = {}

    def put(self, tickets: Sequence[int], logits: torch.Tensor) -> None:
        """Normalise ``logits`` ``[len(tickets), vocab_size]``; a ticket's later row replaces its
        earlier one."""
        rows = log_probabilities(logits)
        for position, ticket in enumerate(tickets):
            self._rows[ticket] = (rows, position)

    def take(self, tickets: Iterable[int]) -> list[torch.Tensor | None]:
        """Each ticket's row, a view of its step's, for the current stream; ``None`` where the logits were
        not finite. A ticket is taken once.

        Raises:
            EngineUnsupported: a request finished without a row: vLLM skipped the processor.
        """
        not_finite: dict[int, set[int]] = {}
        taken: list[torch.Tensor | None] = []
        for ticket in tickets:
            try:
                rows, position = self._rows.pop(ticket)
            except KeyError:
                raise EngineUnsupported(
                    "vLLM finished a request without passing its logits to genrt's processor; this "
                    "version or configuration of vLLM is not supported"
                ) from None
            if id(rows) not in not_finite:
                if rows.is_cuda:  # allocated on vLLM's stream, read on this one
                    rows.record_stream(torch.cuda.current_stream(rows.device))
                not_finite[id(rows)] = FiniteCheck(rows).wait()
            taken.append(None if position in not_finite[id(rows)] else rows[position])
        return taken

    def forget(self, tickets: Iterable[int]) -> None:
        """Drop the rows of requests that were cancelled, if there are any."""
        for ticket in tickets:
            self._rows.pop(ticket, None)

    def __len__(self) -> int:
        return len(self._rows)


class CaptureV1(V1LogitsProcessor):  # type: ignore[misc]
    """For the V1 runner: rows are tracked through the moves of its persistent batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.store = RowStore()
        self._tickets: dict[int, int] = {}
        self._layout: tuple[list[int], torch.Tensor | None] | None = None
        self._seeded: dict[int, _SeededRequest] = {}

    def is_argmax_invariant(self) -> bool:
        """False, although nothing is changed: the others are skipped for greedy batches, and see
        logits that are divided by the temperature."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        self._layout = None
        added = batch_update.added
        _follow(self._tickets, batch_update, {i: _ticket(params) for i, params, _, _ in added})
        _follow(
            self._seeded, batch_update, {i: _seeded(params, ids) for i, params, _, ids in added}
        )

    def draw(
        self,
        logits: torch.Tensor,
        _generators: object,
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, None]:
        """As the ``forward`` of vLLM's sampler on a CPU, with each request's own randomness: token ids
        ``[n]``. Those of requests that are not sampled are not read."""
        seeds = torch.zeros(len(logits), dtype=torch.int64)
        for index, request in self._seeded.items():
            seeds[index] = request.number()
        logits = apply_top_k_top_p(logits, k, p)
        return torch.ops._C.fused_gumbel_argmax(logits.float(), seeds), None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._tickets:
            return logits
        if self._layout is None:
            indices = sorted(self._tickets)
            self._layout = (
                [self._tickets[index] for index in indices],
                None
                if indices == list(range(len(logits)))
                else torch.tensor(indices, device=logits.device),
            )
        tickets, rows = self._layout
        self.store.put(tickets, logits if rows is None else logits[rows])
        return logits


T = TypeVar("T")


def _follow(places: dict[int, T], update: BatchUpdate, added: dict[int, T | None]) -> None:
    """Keep what is known of places in the batch where it belongs; the order is vLLM's."""
    for index in update.removed:
        places.pop(index, None)
    for index, new in added.items():
        if new is None:
            places.pop(index, None)
        else:
            places[index] = new
    for source, target, direction in update.moved:
        moved, replaced = places.pop(source, None), places.pop(target, None)
        if moved is not None:
            places[target] = moved
        if replaced is not None and direction == MoveDirectionality.SWAP:
            places[source] = replaced


@dataclass(slots=True)
class _SeededRequest:
    """``output_token_ids`` is vLLM's own list, which grows as the request does."""

    seed: int
    output_token_ids: list[int]

    def number(self) -> int:
        """What its next token is drawn from: 31 bits."""
        generator = torch.Generator().manual_seed(mixed(self.seed, len(self.output_token_ids)))
        return int(torch.randint(0, 2**31, (1,), generator=generator))


def _seeded(params: Any, output_token_ids: list[int]) -> _SeededRequest | None:
    seed = (params.extra_args or {}).get(SEED)
    return None if seed is None else _SeededRequest(seed, output_token_ids)


class CaptureV2(V2LogitsProcessor):  # type: ignore[misc]
    """For the V2 runner: rows are re-sorted every step, requests keep their slot."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.store = RowStore()
        self._tickets: dict[int, int] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        ticket = _ticket(sampling_params)
        if ticket is None:
            self._tickets.pop(req_idx, None)
            return False
        self._tickets[req_idx] = ticket
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots = ctx.idx_mapping_np.tolist()
        if len(slots) != len(logits):
            raise EngineUnsupported(
                f"vLLM gave {len(logits)} rows for {len(slots)} requests; speculative decoding is not "
                "supported"
            )
        tickets: list[int] = []
        rows: list[int] = []
        for row, slot in enumerate(slots):
            ticket = self._tickets.get(slot)
            if ticket is not None:
                tickets.append(ticket)
                rows.append(row)
        if tickets:
            every = len(tickets) == len(slots)
            self.store.put(
                tickets, logits if every else logits[torch.tensor(rows).to(logits.device)]
            )
        return logits


class WorkerRows:
    """vLLM's ``worker_extension_cls``: what a worker does for its store, in whichever process it is."""

    def genrt_prepare(self, own_processors: bool) -> None:
        """Check that the capture is installed. Where it is the only processor (``own_processors`` is
        False), tell the V1 runner that it needs no list of output tokens: that costs every step."""
        capture = _find(self)
        if not isinstance(capture, CaptureV1):
            return
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if not own_processors:
            runner.input_batch.logitsprocs_need_output_token_ids = False
        if runner.device.type == "cpu":
            _take_draws(runner.sampler, capture)

    def genrt_store(self) -> RowStore:
        """The store itself, for an engine in this process."""
        return _find(self).store

    def genrt_take(self, tickets: list[int]) -> tuple[np.ndarray, list[bool]] | None:
        """For an engine in another process: which rows are finite, and those, ``[n, vocab_size]``, on
        the host. One worker answers; those with the same logits, or none, drop theirs."""
        store = _find(self).store
        if get_tensor_model_parallel_rank() != 0 or not len(store):
            store.forget(tickets)
            return None
        rows = store.take(tickets)
        finite = [row for row in rows if row is not None]
        stacked = torch.stack(finite).cpu().numpy() if finite else np.empty((0, 0), np.float32)
        return stacked, [row is not None for row in rows]

    def genrt_forget(self, tickets: list[int]) -> None:
        """Drop rows that nobody will take."""
        _find(self).store.forget(tickets)


class RemoteStore:
    """``RowStore``'s ``take`` and ``forget`` where the workers are processes of their own.

    ``call`` is the engine's ``collective_rpc``; rows come over the host to ``device``.
    """

    def __init__(self, call: Callable[..., list[Any]], device: torch.device) -> None:
        self._call = call
        self._device = device

    def take(self, tickets: Iterable[int]) -> list[torch.Tensor | None]:
        wanted = list(tickets)
        replies = [r for r in self._call("genrt_take", args=(wanted,)) if r is not None]
        if len(replies) != 1:
            raise EngineUnsupported(
                f"{len(replies)} of vLLM's workers have the rows, not one: this parallel set-up is not "
                "supported"
            )
        stacked, finite = replies[0]
        rows = iter(torch.from_numpy(stacked).to(self._device))
        return [next(rows) if ok else None for ok in finite]

    def forget(self, tickets: Iterable[int]) -> None:
        self._call("genrt_forget", args=(list(tickets),))


def _find(worker: Any) -> CaptureV1 | CaptureV2:
    runner = worker.model_runner
    try:
        if hasattr(runner, "input_batch"):
            processors = list(runner.input_batch.logitsprocs.all)
        else:
            processors = list(runner.sampler.logits_processors)
    except AttributeError as error:
        raise EngineUnsupported(
            f"this vLLM holds its logits processors elsewhere: {error}"
        ) from error
    for processor in processors:
        if isinstance(processor, CaptureV1 | CaptureV2):
            return processor
    raise EngineUnsupported("this vLLM did not install genrt's logits processor")


def _take_draws(sampler: Any, capture: CaptureV1) -> None:
    """Have ``capture`` draw in place of vLLM's sampler for CPUs."""
    if not hasattr(torch.ops._C, "fused_gumbel_argmax") or not hasattr(
        sampler, "topk_topp_sampler"
    ):
        raise EngineUnsupported("this vLLM samples otherwise on a CPU, and would ignore seeds")
    if sampler.topk_topp_sampler.use_fp64_gumbel:
        raise EngineUnsupported("on a CPU genrt draws samples itself: leave use_fp64_gumbel out")
    sampler.topk_topp_sampler.forward = capture.draw


def _ticket(params: Any) -> int | None:
    extra = params.extra_args
    return None if extra is None else extra.get(TICKET)
