"""A step's rows: normalised; together and apart, with few kernels.

An engine answers a step with a row for each request. Mostly these are views of one tensor, the step's
``[n, vocab_size]``, in the order of the requests. Stacking or copying them one by one costs a kernel
launch each; here one launch handles all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import cast

import numpy as np
import torch
from torch import Tensor

STACKED = 2**25
"""The most entries of rows that are stacked at a time."""

AT_ONCE = 16
"""So many rows are corrected at once: they stay in a processor's cache, and little memory is taken."""


def normalised(logits: Tensor) -> Tensor:
    """Return the log-probabilities of logits ``[…, V]``, float32. Their ``logsumexp`` is 0 up to the
    rounding of the entries: 3e-7 where likely tokens carry the mass, 6e-7 where 128,256 share it.

    ``log_softmax`` alone adds up one after another in float32 on a CPU, and is off by 1.3e-5 at 128,256
    entries. ``sum`` adds up in a tree, so that its total corrects that. -inf and NaN stay.
    """
    return corrected(logits.log_softmax(-1, dtype=torch.float32))


def corrected(rows: Tensor) -> Tensor:
    """Return float32 log-probabilities ``[…, V]`` that ``log_softmax`` made, summing to 1 as closely as
    ``normalised`` says. They are changed in place. A GPU adds up in a tree: its rows stay as they are."""
    if rows.device.type == "cpu":
        for part in torch.split(rows.view(-1, rows.shape[-1]), AT_ONCE):
            part -= part.exp().sum(-1, keepdim=True).log_()
    return rows


def together(rows: Sequence[Tensor]) -> Tensor:
    """Return the rows, at least one, as one tensor ``[n, width]`` in their order.

    Rows that lie in one storage at even distances, as a step's do in their own order, are not copied:
    the result is a view of that storage, and not to be written to. Others that lie in one storage are
    gathered at once; the rest are stacked. Rows of several lengths or devices raise what ``torch.stack``
    raises.
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
    # A copy from pageable memory would wait for the device.
    index = torch.tensor(places, pin_memory=first.is_cuda)
    return table.index_select(0, index.to(first.device, non_blocking=True))


def entries_of(rows: Sequence[Tensor], token_ids: Sequence[Sequence[int]]) -> Tensor:
    """Return the entries of each row at these tokens, all in order, ``[n]`` on the rows' device.

    Rows in one storage are read at once without copies. On a GPU, other rows are stacked, a part at a
    time; a CPU reads them in place.
    """
    first, offsets = rows[0], _offsets(rows)
    if offsets is None and first.device.type == "cpu":
        places = [np.array(ids, np.int64) for ids in token_ids]
        read = [row.numpy()[at] for row, at in zip(rows, places, strict=True)]
        return torch.from_numpy(np.concatenate(read))
    if offsets is None:
        size = max(1, STACKED // first.numel())
        parts = [slice(start, start + size) for start in range(0, len(rows), size)]
        return torch.cat(
            [entries_of(torch.stack([*rows[part]]).unbind(), token_ids[part]) for part in parts]
        )
    start, pairs = min(offsets), zip(offsets, token_ids, strict=True)
    index = [offset - start + each for offset, ids in pairs for each in ids]
    whole = first.as_strided((max(offsets) - start + first.numel(),), (1,), start)
    return whole.index_select(0, moved(torch.tensor(index, dtype=torch.int64), first.device))


def moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Move numbers of the host to the device, without synchronizing with it."""
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return ``together`` in storage of its own that holds nothing else."""
    whole = together(rows)
    if whole.untyped_storage().data_ptr() == rows[0].untyped_storage().data_ptr():
        return whole.clone(memory_format=torch.contiguous_format)
    return whole


def apart(rows: Sequence[Tensor]) -> list[Tensor]:
    """Copy each row into storage of its own that holds nothing else. All or none: it raises when memory
    is short for one of them."""
    if not rows:
        return []
    copies = list(map(torch.empty_like, rows))
    torch._foreach_copy_(copies, list(rows))
    return copies


class Leaving:
    """A tensor on its way to the host; work enqueued on the device later does not delay it."""

    def __init__(self, tensor: Tensor) -> None:
        self._on_host = tensor.to("cpu", non_blocking=True)
        self._done: torch.Event | None = None
        self._is_lent = False
        if tensor.is_cuda:
            self._done = torch.Event(tensor.device)
            self._done.record()

    @classmethod
    def lent(cls, on_host: Tensor, device: torch.device) -> Leaving:
        """Return one whose copy to ``on_host``, which others will be copied to after it, the device's
        current stream was given last."""
        leaving = cls(on_host)
        leaving._is_lent = True
        if device.type != "cpu":
            leaving._done = torch.Event(device)
            leaving._done.record()
        return leaving

    def arrived(self) -> Tensor:
        """Block until the copy is done and return it."""
        if self._done is not None:
            self._done.synchronize()
        if self._is_lent:
            self._on_host, self._is_lent = self._on_host.clone(), False
        return self._on_host

    def part(self, which: slice) -> Leaving:
        """Return some of its rows, which arrive with the others."""
        return _Part(self, which)


class _Part(Leaving):
    """Rows of a tensor on its way."""

    def __init__(self, whole: Leaving, which: slice) -> None:
        self._whole, self._which = whole, which

    def arrived(self) -> Tensor:
        return self._whole.arrived()[self._which]


def _offsets(rows: Sequence[Tensor]) -> list[int] | None:
    """Return where in their storage the rows begin, in entries; ``None`` unless they lie in one storage,
    as unbroken stretches of one length and type.

    This compares addresses and not ``_base``, which views that were made in inference mode lack.
    """
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
