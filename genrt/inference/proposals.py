"""The next token of each text: drawn from its row under the constraint's mask, or by rejection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from genrt.constraints import CheckedState, ConstraintState, abitmasks
from genrt.constraints.together import together
from genrt.inference import awrs
from genrt.inference.ends import Ends
from genrt.inference.resampling import Floats
from genrt.lm import AsyncLM
from genrt.questions.contexts import seeds_at
from genrt.tokens import sampling

State: TypeAlias = ConstraintState | CheckedState

Proposal: TypeAlias = Literal["mask", "awrs"]

Drawn: TypeAlias = tuple[int, float]
"""A token, or ``DEAD``, and the logarithm of the mass it was drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """The law of the next tokens; the fields are the arguments of a ``TextModel``, checked."""

    lm: AsyncLM
    prompt: tuple[int, ...]
    kind: Proposal
    is_constrained: bool
    ends: Ends
    eos_token_id: int | None
    max_tokens: int
    temperature: float
    adapter: str | None

    @property
    def end_token(self) -> int:
        """The end token, which a constrained model has."""
        return cast("int", self.eos_token_id)

    async def draw(
        self, texts: Sequence[tuple[int, ...]], states: Sequence[State | None], seed: int
    ) -> list[Drawn]:
        """Draw a token after each text, whose constraint is in the state beside it: one question to the
        model for all of them, masks computed meanwhile."""
        contexts = [self.prompt + text for text in texts]
        at_last = [len(text) + 1 >= self.max_tokens for text in texts]
        if self.kind == "awrs" and self.is_constrained:
            rows = await self.lm.batch_next_token_logprobs(contexts, adapter=self.adapter)
            checked = cast("Sequence[CheckedState]", states)
            return await self._by_rejection(rows, checked, at_last, seed)
        if self.temperature != 1:
            asking = self.lm.batch_next_token_logprobs(contexts, adapter=self.adapter)
            rows, masks = await asyncio.gather(asking, self._masks(states, at_last))
            return await asyncio.to_thread(self._by_masks, rows, masks, seed)
        masks = await self._masks(states, at_last)
        found = await self.lm.batch_draw(contexts, masks=masks, seed=seed, adapter=self.adapter)
        return _drawn(found, masked=masks is not None)

    async def _masks(
        self, states: Sequence[State | None], at_last: Sequence[bool]
    ) -> Tensor | None:
        """Return the packed masks of what may follow, int32 ``[n, ceil(V / 32)]``; at the last token, the
        end alone."""
        if not self.is_constrained:
            return None
        masks = await abitmasks(cast("Sequence[State]", states))
        end = packed_tokens({self.end_token}, masks.shape[1])
        if self.ends.token_ids != {self.end_token}:
            stops = packed_tokens(self.ends.token_ids, masks.shape[1])
            may_end = (masks & end).any(dim=1)
            masks &= ~(end | stops)
            masks[may_end] |= stops
            end = stops
        if self.ends.token_ids:
            masks[torch.tensor(at_last)] &= end
        return masks

    def _by_masks(self, rows: Tensor, masks: Tensor | None, seed: int) -> list[Drawn]:
        """Draw from tempered rows, and take the masks' masses under these: as ``batch_draw`` would for a
        model whose rows they are."""
        seeds = seeds_at(seed, np.arange(len(rows)))
        found = sampling.draw(
            sampling.truncate(rows, temperature=self.temperature),
            mask=None if masks is None else masks.view(torch.uint8).to(rows.device),
            uniforms=sampling.seeded_uniforms(seeds).to(rows.device),
        )
        return _drawn(found, masked=masks is not None)

    async def _by_rejection(
        self, rows: Tensor, states: Sequence[CheckedState], at_last: Sequence[bool], seed: int
    ) -> list[Drawn]:
        weights = await asyncio.to_thread(self._weights, rows, states, at_last)
        seeds = np.random.SeedSequence(seed).spawn(len(states))
        return await together(
            awrs.draw(row, state.check, np.random.default_rng(each))
            for row, state, each in zip(weights, states, seeds, strict=True)
        )

    def _weights(
        self, rows: Tensor, states: Sequence[CheckedState], at_last: Sequence[bool]
    ) -> Floats:
        """Return the tokens' probabilities ``[n, V]``, 0 where the constraint need not be asked."""
        if self.temperature != 1:
            rows = sampling.truncate(rows, temperature=self.temperature)
        weights: Floats = rows.cpu().double().exp().numpy()
        distinct = {id(state): state for state in states}
        allowed = {key: state.mask().cpu().numpy() for key, state in distinct.items()}
        stops = sorted(self.ends.token_ids)
        for row, state, is_last in zip(weights, states, at_last, strict=True):
            ending = row[stops].sum()
            row[stops] = 0.0
            # The constraint is asked about the end token whether a text may end, by any stop token.
            row[self.end_token] = ending
            row[~allowed[id(state)]] = 0.0
            if stops and is_last:
                row[np.arange(len(row)) != self.end_token] = 0.0
        return weights


def packed_tokens(token_ids: Iterable[int], count: int) -> Tensor:
    """Return the packed mask of these tokens, int32 ``[count]``."""
    words = np.zeros(count, np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return torch.from_numpy(words.view(np.int32))


def _drawn(found: sampling.BatchDraw, *, masked: bool) -> list[Drawn]:
    token_ids = found.token_ids.tolist()
    masses = found.log_mass.double().tolist() if masked else [0.0] * len(token_ids)
    return list(zip(token_ids, masses, strict=True))
