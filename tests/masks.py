"""The sets of a ``SamplingMask`` against the filters of draws, written out in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from genrt.questions.completions import Completion, SamplingMask

NEAR = 1e-5
"""How near to a boundary float32 may decide otherwise than float64."""


def sets_in(mask: SamplingMask | None) -> list[set[int]]:
    """The set of each place."""
    assert mask is not None
    if mask.form == "bits":
        bits = np.unpackbits(mask.bits.view(np.uint8), axis=1, bitorder="little")
        return [set(np.flatnonzero(row).tolist()) for row in bits]
    parts = np.split(mask.token_ids, mask.offsets[1:-1])
    return [set(part.tolist()) for part in parts[: len(mask)]]


def support(row: np.ndarray, options: Mapping[str, Any]) -> tuple[set[int], set[int]]:
    """The tokens that these options must leave of a row of log-probabilities, and those that they may:
    in float64, a little apart."""
    heat = options.get("temperature", 1.0)
    row = row.astype(np.float64)
    if heat < 1e-5:
        return {int(row.argmax())}, set(np.flatnonzero(row >= row.max() - NEAR).tolist())
    law = np.exp((row - row.max()) / heat)
    law /= law.sum()
    found = []
    for slack in (-NEAR, NEAR):
        kept = row > -math.inf  # ``law`` is 0 where float64 ends
        if floor := options.get("min_p", 0.0):
            kept &= law >= floor * law.max() * (1 - slack)
            kept[law.argmax()] = True
        if 0 < (most := options.get("top_k", 0)) < len(row):
            kept &= row >= np.sort(row)[-most]
        if (share := options.get("top_p", 1.0)) < 1:
            left = np.where(kept, law, 0.0) / law[kept].sum()
            order = np.argsort(left, kind="stable")
            below = left[order].cumsum() <= 1 - share - slack
            below[-1] = False
            kept[order[below]] = False
        found.append(set(np.flatnonzero(kept).tolist()))
    return found[0], found[1]


def check_places(
    drawn: Completion,
    options: Mapping[str, Any],
    row_after: Callable[[Sequence[int]], np.ndarray],
    *,
    tolerance: float,
) -> None:
    """See that each set is the filters', and that the row, divided by the temperature and normalized over
    the set, is the reported log-probability; and that its mass is the reported one."""
    mask, heat = drawn.sampling_mask, options.get("temperature", 1.0)
    assert mask is not None
    assert len(mask) == len(drawn.token_ids) == len(mask.logprobs) == len(mask.log_mass)
    for place, (token, ids) in enumerate(zip(drawn.token_ids, sets_in(mask), strict=True)):
        row = row_after([*drawn.prompt_token_ids, *drawn.token_ids[:place]])
        must, may = support(row, options)
        assert token in ids
        assert must <= ids <= may
        if heat < 1e-5:
            assert (mask.logprobs[place], mask.log_mass[place]) == (0.0, 0.0)
            continue
        logits = (row.astype(np.float64) - row.max()) / heat
        of_set = math.log(np.exp(logits[sorted(ids)]).sum())
        assert mask.logprobs[place] == pytest.approx(logits[token] - of_set, abs=tolerance)
        mass = of_set - math.log(np.exp(logits).sum())
        assert mask.log_mass[place] == pytest.approx(mass, abs=tolerance)
