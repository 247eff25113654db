"""Normalizes, gathers and copies a step's rows with few kernels.

The rows of a step are usually views of one tensor, in the order of the requests. Here one launch handles
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import cast

import numpy as np
import torch
from torch import Tensor


def normalised(logits: Tensor) -> Tensor:
    """Return the log-probabilities of logits ``[…, V]``, float32. Their ``logsumexp`` is 0 up to the
    rounding of the entries: 3e-7 where likely tokens carry the mass, 6e-7 where 128,256 share it. -inf
    and NaN stay."""
    return corrected(logits.log_softmax(-1, dtype=torch.float32))


def corrected(rows: Tensor) -> Tensor:
    """Correct the sums of ``log_softmax``'s float32 log-probabilities ``[…, V]`` in place, and return
    them. On a CPU it adds entries one by one, with an error of 1.3e-5 at 128,256 entries. A GPU's rows
    stay unchanged."""
    if rows.device.type == "cpu":
        for part in torch.split(rows.view(-1, rows.shape[-1]), 16):  # for a cache
            part -= _at_least_two(part.exp()).sum(-1, keepdim=True).log_()[: len(part)]
    return rows


def log_sums(rows: Tensor) -> Tensor:
    """Return ``logsumexp`` of each row ``[n, V]``, as ``[n, 1]``. The bits of a row's sum do not depend
    on other rows: torch divides a single row between threads, and few rows between a GPU's blocks."""
    peak = rows.amax(-1, keepdim=True)
    if rows.device.type == "cpu":
        # A CPU takes four times as long for the exponential of -inf, and e**-80 adds nothing to a sum.
        return _at_least_two(rows.maximum(peak - 80)).logsumexp(-1, keepdim=True)[: len(rows)]
    # The kernel of ``log_softmax`` gives each row a block of its own.
    return (peak - rows.log_softmax(-1).amax(-1, keepdim=True)).masked_fill(
        peak == -math.inf, -math.inf
    )


def _at_least_two(rows: Tensor) -> Tensor:
    """Return a single row twice, as a view: a CPU's threads then do not divide it."""
    return rows.expand(2, -1) if len(rows) == 1 else rows


def gather_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return the rows, at least one, as one tensor ``[n, width]`` in their order; do not write to it.

    Rows in one storage at even distances become a view of that storage, other rows of one storage are
    gathered at once, and the rest are stacked. Raises the errors of ``torch.stack``.
    """
    offsets = _offsets(rows)
    if offsets is None:
        return torch.stack(list(rows))
    first, count, width = rows[0], len(rows), rows[0].numel()
    gap = offsets[1] - offsets[0] if count > 1 else width
    if gap > 0 and offsets == list(range(offsets[0], offsets[0] + gap * count, gap)):
        return first.as_strided((count, width), (gap, 1))
    # Cut the storage at every multiple of the gaps' common divisor: each row is then a row of that table.
    start = min(offsets)
    stride = math.gcd(*(offset - start for offset in offsets)) or width
    places = [(offset - start) // stride for offset in offsets]
    table = first.as_strided((max(places) + 1, width), (stride, 1), start)
    return table.index_select(0, moved(torch.tensor(places), first.device))


def entries_of(rows: Sequence[Tensor], token_ids: Sequence[Sequence[int]]) -> Tensor:
    """Return the entries of each row at these tokens, all in order, ``[n]`` on the rows' device. Rows in
    one storage are read at once without copies."""
    first, offsets = rows[0], _offsets(rows)
    if offsets is None and first.device.type == "cpu":
        places = [np.array(ids, np.int64) for ids in token_ids]
        read = [row.numpy()[at] for row, at in zip(rows, places, strict=True)]
        return torch.from_numpy(np.concatenate(read))
    if offsets is None:
        size = max(1, 2**25 // first.numel())
        parts = [slice(start, start + size) for start in range(0, len(rows), size)]
        return torch.cat(
            [entries_of(torch.stack([*rows[part]]).unbind(), token_ids[part]) for part in parts]
        )
    start, pairs = min(offsets), zip(offsets, token_ids, strict=True)
    index = [offset - start + each for offset, ids in pairs for each in ids]
    whole = first.as_strided((max(offsets) - start + first.numel(),), (1,), start)
    return whole.index_select(0, moved(torch.tensor(index, dtype=torch.int64), first.device))


def moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Move numbers of the host to the device. Only a copy from pinned memory does not wait for it."""
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return ``gather_rows``, copied if it is a view."""
    whole = gather_rows(rows)
    if whole.untyped_storage().data_ptr() == rows[0].untyped_storage().data_ptr():
        return whole.clone(memory_format=torch.contiguous_format)
    return whole


def separate_copies(rows: Sequence[Tensor]) -> list[Tensor]:
    """Copy each row into a new storage. Raises if there is no memory for all copies."""
    if not rows:
        return []
    copies = list(map(torch.empty_like, rows))
    torch._foreach_copy_(copies, list(rows))
    return copies


class AsyncHostCopy:
    """A tensor on its way to the host; work enqueued on the device later does not delay it."""

    def __init__(self, tensor: Tensor) -> None:
        self._on_host = tensor.to("cpu", non_blocking=True)
        self._done: torch.Event | None = None
        self._is_lent = False
        if tensor.is_cuda:
            self._done = torch.Event(tensor.device)
            self._done.record()

    @classmethod
    def lent(cls, on_host: Tensor, device: torch.device) -> AsyncHostCopy:
        """Return the tensor of a copy to ``on_host`` that is the last work of the device's current
        stream. Later copies will overwrite ``on_host``."""
        copy = cls(on_host)
        copy._is_lent = True
        if device.type != "cpu":
            copy._done = torch.Event(device)
            copy._done.record()
        return copy

    def result(self) -> Tensor:
        """Block until the copy is done and return it."""
        if self._done is not None:
            self._done.synchronize()
        if self._is_lent:
            self._on_host, self._is_lent = self._on_host.clone(), False
        return self._on_host

    def part(self, which: slice) -> AsyncHostCopy:
        """Return some of its rows; they arrive together with the whole tensor."""
        return _Part(self, which)


class _Part(AsyncHostCopy):
    """Rows of a tensor on its way."""

    def __init__(self, whole: AsyncHostCopy, which: slice) -> None:
        self._whole, self._which = whole, which

    def result(self) -> Tensor:
        return self._whole.result()[self._which]


def _offsets(rows: Sequence[Tensor]) -> list[int] | None:
    """Return the rows' offsets in their storage, in entries; ``None`` unless all are contiguous, of one
    length and type, in one storage. Views of inference mode lack ``_base``, so addresses are compared."""
    first = rows[0]
    if first.ndim != 1 or not first.numel():
        return None
    if not all(map(Tensor.is_contiguous, rows)) or len(set(map(_KIND, rows))) > 1:
        return None
    offsets = cast("list[int]", list(map(Tensor.storage_offset, rows)))
    size = first.element_size()
    origins = {
        address - size * offset
        for address, offset in zip(map(Tensor.data_ptr, rows), offsets, strict=True)
    }
    return offsets if len(origins) == 1 else None


_KIND = attrgetter("shape", "dtype")
