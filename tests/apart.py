"""Draws after many contexts, each a question of its own: what batches and populations are compared with.

No array is asked about here, and nothing goes on by number: rows are found by their contexts alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from genrt.lm import AsyncLM
from genrt.questions.arguments import seeds_at
from genrt.questions.masks import Mask
from genrt.tokens import sampling
from genrt.tokens.sampling import BatchDraw, seeded_uniforms
from tests.tokens.draws_by_hand import multiplied

__all__ = ["drawn_apart", "drawn_apart_sync", "products_apart"]


async def drawn_apart(
    lm: AsyncLM,
    contexts: Sequence[Sequence[int]],
    *,
    masks: Sequence[Mask | None] | torch.Tensor | None = None,
    temperature: float = 1.0,
    seed: int,
    adapter: str | None = None,
) -> BatchDraw:
    """Return what ``lm.batch_draw`` is to return, by concurrent questions of ``lm.draw``."""
    each = [None] * len(contexts) if masks is None else [*masks]
    draws = await asyncio.gather(
        *[
            lm.draw(context, mask=mask, temperature=temperature, seed=own % 2**63, adapter=adapter)
            for own, (context, mask) in enumerate(zip(contexts, each, strict=True), seed)
        ]
    )
    columns = (
        torch.tensor([draw.token_id for draw in draws], dtype=torch.int64),
        torch.tensor([draw.logprob for draw in draws], dtype=torch.float32),
        torch.tensor([draw.log_mass for draw in draws], dtype=torch.float32),
    )
    return BatchDraw.of(columns, draws[0].weights_version if draws else lm.weights_version)


def drawn_apart_sync(
    lm: AsyncLM, contexts: Sequence[Sequence[int]], *, seed: int, **options: Any
) -> BatchDraw:
    """Return the same to a thread without a loop."""
    return asyncio.run(drawn_apart(lm, contexts, seed=seed, **options))


async def products_apart(
    lm: AsyncLM,
    texts: Sequence[Sequence[Sequence[int]]],
    laws: Sequence[tuple[float, float]],
    *,
    masks: Sequence[Mask | None] | None = None,
    seed: int,
    adapter: str | None = None,
) -> BatchDraw:
    """Return what ``draw_texts`` is to return for texts with a context for each law, by rows that are
    multiplied on the host in float64."""
    several = [
        await lm.batch_next_token_logprobs(contexts, adapter=adapter)
        for contexts in zip(*texts, strict=True)
    ]
    weights = multiplied([rows.cpu() for rows in several], laws)
    for row, mask in zip(weights, masks or [None] * len(texts), strict=True):
        if mask is not None:
            allowed = torch.zeros(len(row), dtype=torch.bool)
            allowed[[*mask]] = True  # type: ignore[misc]
            row[~allowed] = -math.inf
    uniforms = seeded_uniforms(seeds_at(seed, np.arange(len(texts))))
    return sampling.draw(weights, uniforms=uniforms)
