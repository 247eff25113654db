"""Draws after many contexts, each a question of its own: what batches and populations are compared with.

No array is asked about here, and nothing goes on by number: rows are found by their contexts alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from genrt.lm import AsyncLM
from genrt.questions.masks import Mask
from genrt.tokens.sampling import BatchDraw

__all__ = ["drawn_apart", "drawn_apart_sync"]


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
