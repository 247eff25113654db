"""vLLM's rows by request: the injected global logits processor, for its runners V1 and V2.

Rules:
    A row is matched to its request by the ticket that travels in ``SamplingParams.extra_args``, never
    by its position in the batch: V1 tells where a request's row is by ``update_state``, V2 by slot.
    A prompt that is prefilled in several steps yields a row in each; the last one is the right one.
    Steps without a logprobs request compute nothing here.

Private to vLLM and touched here: how a worker holds its processors (``_find``). ``engines/vllm.py``
runs a self-test at start that fails when any of this has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.sample.logits_processor import MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

from genrt.errors import EngineUnsupported

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

__all__ = ["TICKET", "CaptureV1", "CaptureV2", "RemoteStore", "RowStore", "WorkerRows"]

TICKET = "genrt_ticket"
"""The key in ``extra_args`` under which a logprobs request carries its ticket, an int."""


class RowStore:
    """The rows that have been computed and not yet taken, by ticket; each one ``[vocab_size]``."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[torch.Tensor, int]] = {}

    def put(self, tickets: Sequence[int], logits: torch.Tensor) -> None:
        """Normalise ``logits`` ``[len(tickets), vocab_size]``; a ticket's later row replaces its
        earlier one."""
        rows = logits.log_softmax(dim=-1, dtype=torch.float32)
        for position, ticket in enumerate(tickets):
            self._rows[ticket] = (rows, position)

    def take(self, tickets: Iterable[int]) -> list[torch.Tensor | None]:
        """Each ticket's row in storage of its own, on the current stream, or ``None`` where the logits
        were not finite. A ticket is taken once.

        Raises:
            EngineUnsupported: a request finished without a row: vLLM skipped the processor.
        """
        finite: dict[int, list[bool]] = {}
        taken: list[torch.Tensor | None] = []
        for ticket in tickets:
            try:
                rows, position = self._rows.pop(ticket)
            except KeyError:
                raise EngineUnsupported(
                    "vLLM finished a request without passing its logits to genrt's processor; this "
                    "version or configuration of vLLM is not supported"
                ) from None
            if id(rows) not in finite:
                if rows.is_cuda:  # allocated on vLLM's stream, read on this one
                    rows.record_stream(torch.cuda.current_stream(rows.device))
                # NaN, +inf or nothing but -inf among the logits makes every entry of the row NaN
                finite[id(rows)] = (~rows[:, 0].isnan()).tolist()
            if not finite[id(rows)][position]:
                taken.append(None)
            else:
                taken.append(rows[0] if len(rows) == 1 else rows[position].clone())
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

    def is_argmax_invariant(self) -> bool:
        """False, although nothing is changed: the others are skipped for greedy batches, and see
        logits that are divided by the temperature."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        self._layout = None
        tickets = self._tickets
        for index in batch_update.removed:
            tickets.pop(index, None)
        for index, params, _, _ in batch_update.added:
            ticket = _ticket(params)
            if ticket is None:
                tickets.pop(index, None)
            else:
                tickets[index] = ticket
        for source, target, direction in batch_update.moved:
            moved, replaced = tickets.pop(source, None), tickets.pop(target, None)
            if moved is not None:
                tickets[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                tickets[source] = replaced

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
        if isinstance(_find(self), CaptureV1) and not own_processors:
            runner: Any = self.model_runner  # type: ignore[attr-defined]
            runner.input_batch.logitsprocs_need_output_token_ids = False

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
        return [next(rows).clone() if ok else None for ok in finite]

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


def _ticket(params: Any) -> int | None:
    extra = params.extra_args
    return None if extra is None else extra.get(TICKET)
