"""Draws the next token of each text, under the constraint's mask or by rejection, from the row of the
model or of another model that proposes.

The texts of a step are a population, which the next step extends without a look-up by context.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from genrt.constraints import CheckedState, ConstraintState, abitmasks
from genrt.constraints.protocols import words_of
from genrt.inference import awrs
from genrt.inference.ends import Ends
from genrt.inference.model import DEAD, Growth
from genrt.inference.resampling import Floats
from genrt.inference.trails import Trail
from genrt.lm import AsyncLM
from genrt.populations import Population
from genrt.questions.contexts import seeds_at
from genrt.runtime.concurrency import together
from genrt.tokens import sampling

State: TypeAlias = ConstraintState | CheckedState

Kind: TypeAlias = Literal["mask", "awrs"]

Proposal: TypeAlias = Kind | AsyncLM
"""How a ``TextModel`` draws: under masks, by rejection, or from another model."""


class ProposedTokens(NamedTuple):
    """Tokens that were drawn, one after each text.

    Attributes:
        token_ids: each is a token, or ``DEAD``.
        log_masses: the logarithms of the allowed masses, or of unbiased estimates.
        logprobs: log q of the drawn tokens, for another model's proposals; under rejection log(q / w) for
            an estimate w of the mass, so that p / q stays unbiased.
    """

    token_ids: list[int]
    log_masses: list[float]
    logprobs: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """The law of the next tokens: checked arguments of a ``TextModel``, ``lm`` and ``adapter`` those of
    the proposing model."""

    lm: AsyncLM
    prompt: tuple[int, ...]
    kind: Kind
    is_constrained: bool
    ends: Ends
    eos_token_id: int | None
    max_tokens: int
    temperature: float
    adapter: str | None
    is_weighed_later: bool = False
    """True if another model weighs the tokens by its own probabilities."""

    @property
    def end_token(self) -> int:
        """The end token, which a constrained model has."""
        return cast("int", self.eos_token_id)

    def complete(self, grown: Sequence[Growth]) -> list[bool]:
        """Return whether each text ends here, without a stop."""
        longest, is_complete = self.max_tokens, self.is_complete
        return [
            token_id != DEAD and (each.trail.count >= longest or is_complete(each.constraint_state))
            for each, _, token_id in grown
        ]

    def is_complete(self, state: State) -> bool:
        """Return whether the constraint allows at most the end."""
        words = words_of(state)[0]
        end = packed_tokens({self.end_token}, len(words)).numpy()
        return not (words & ~end).any()

    async def accepts(self, state: State) -> bool:
        """Return whether a text may end here."""
        if isinstance(state, CheckedState):
            return (await state.check([self.end_token]))[0]
        return state.accepting

    def population(self, trails: Sequence[Trail]) -> Population:
        """Return the population of these texts after the prompt: the previous one, extended, if all texts
        are from it."""
        frontier = trails[0].frontier
        if frontier is not None and all(each.frontier is frontier for each in trails):
            population = frontier.take()
            if population is not None:
                numbers = [each.number for each in trails]
                if numbers != list(range(len(population))):
                    population.resample(numbers)
                population.append([each.token_id for each in trails])
                return population
        if not any(each.count for each in trails):
            return self.lm.population(self.prompt, len(trails), adapter=self.adapter)
        contexts = [self.prompt + each.text.token_ids for each in trails]
        return self.lm.population(contexts, adapter=self.adapter)

    async def draw(
        self,
        population: Population,
        trails: Sequence[Trail],
        states: Sequence[State | None],
        seed: int,
    ) -> ProposedTokens:
        """Draw a token after each text of a population, in one question to the model; masks are computed
        meanwhile. ``states`` are the constraint's."""
        at_last = [each.count + 1 >= self.max_tokens for each in trails]
        if self.kind == "awrs" and self.is_constrained:
            rows = await population.logprobs()
            checked = cast("Sequence[CheckedState]", states)
            return await self._by_rejection(rows, checked, at_last, seed)
        if self.temperature != 1 and not self.is_weighed_later:
            rows, masks = await asyncio.gather(population.logprobs(), self._masks(states, at_last))
            return await asyncio.to_thread(self._by_masks, rows, masks, seed)
        masks = await self._masks(states, at_last)
        found = await population.draw(masks=masks, temperature=self.temperature, seed=seed)
        return _draw_tokens(found, masked=masks is not None)

    async def _masks(
        self, states: Sequence[State | None], at_last: Sequence[bool]
    ) -> Tensor | None:
        """Return the packed masks of the allowed tokens, int32 ``[n, ceil(V / 32)]``; at the last token,
        only the end."""
        if not self.is_constrained:
            return None
        masks = await abitmasks(cast("Sequence[State]", states))
        stops = self.ends.token_ids
        if stops != {self.end_token}:
            end = packed_tokens({self.end_token}, masks.shape[1])
            may_end = (masks & end).any(dim=1)
            masks &= ~(end | packed_tokens(stops, masks.shape[1]))
            masks[may_end] |= packed_tokens(stops, masks.shape[1])
        if stops and any(at_last):
            masks[torch.tensor(at_last)] &= packed_tokens(stops, masks.shape[1])
        return masks

    def _by_masks(self, rows: Tensor, masks: Tensor | None, seed: int) -> ProposedTokens:
        """Draw from tempered rows under masks, with their masses, as ``batch_draw`` does from rows."""
        seeds = seeds_at(seed, np.arange(len(rows)))
        found = sampling.draw(
            sampling.truncate(rows, temperature=self.temperature),
            mask=None if masks is None else masks.view(torch.uint8).to(rows.device),
            uniforms=sampling.seeded_uniforms(seeds).to(rows.device),
        )
        return _draw_tokens(found, masked=masks is not None)

    async def _by_rejection(
        self, rows: Tensor, states: Sequence[CheckedState], at_last: Sequence[bool], seed: int
    ) -> ProposedTokens:
        weights, endings = await asyncio.to_thread(self._weights, rows, states, at_last)
        rngs = [*map(np.random.default_rng, np.random.SeedSequence(seed).spawn(len(states)))]
        found = await together(
            awrs.draw_allowed(row, state.check, rng)
            for row, state, rng in zip(weights, states, rngs, strict=True)
        )
        drawn = []
        for place, (token_id, log_mass) in enumerate(found):
            weight = weights[place, token_id]
            if self.is_weighed_later and self.ends.token_ids and token_id == self.end_token:
                # Choose one of the stop tokens, because the weighing model needs its probability.
                stop = int(rngs[place].choice(len(endings[place]), p=endings[place] / weight))
                token_id, weight = sorted(self.ends.token_ids)[stop], endings[place, stop]
            logprob = math.log(weight) - log_mass if token_id != DEAD else -math.inf
            drawn.append((token_id, log_mass, logprob))
        return ProposedTokens(*map(list, zip(*drawn, strict=True)))

    def _weights(
        self, rows: Tensor, states: Sequence[CheckedState], at_last: Sequence[bool]
    ) -> tuple[Floats, Floats]:
        """Return the tokens' probabilities ``[n, V]``, 0 where the constraint is not checked, with
        the sum of all stop tokens at the end token; and the probability of each stop token, in order."""
        if self.temperature != 1:
            rows = sampling.truncate(rows, temperature=self.temperature)
        weights: Floats = rows.cpu().double().exp().numpy()
        distinct = {id(state): state for state in states}
        allowed = {key: state.mask().cpu().numpy() for key, state in distinct.items()}
        stops = sorted(self.ends.token_ids)
        endings = weights[:, stops]
        for row, state, is_last in zip(weights, states, at_last, strict=True):
            ending = row[stops].sum()
            row[stops] = 0.0
            # The end token stands for all stop tokens in the check of the constraint.
            row[self.end_token] = ending
            row[~allowed[id(state)]] = 0.0
            if stops and is_last:
                row[np.arange(len(row)) != self.end_token] = 0.0
        return weights, endings


def packed_tokens(token_ids: Iterable[int], count: int) -> Tensor:
    """Return the packed mask of these tokens, int32 ``[count]``."""
    words = np.zeros(count, np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return torch.from_numpy(words.view(np.int32))


def _draw_tokens(found: sampling.BatchDraw, *, masked: bool) -> ProposedTokens:
    token_ids = found.token_ids.tolist()
    masses = found.log_mass.tolist() if masked else [0.0] * len(token_ids)
    return ProposedTokens(token_ids, masses, found.logprobs.tolist())
