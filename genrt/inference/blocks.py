r"""Blocks: tokens that another model proposed, weighed together by the model they are proposed to.

A smaller model d of the same vocabulary draws the tokens, one a step, under the constraint. The target
stays the model's own p(x) 1[x in C] exp(phi(x)), and so a token's factor of the weight is

    w <- w p(x) / q(x),        q(x) = d(x) 1[x in A] / d(A),

where A is what may follow and p the model's row without a mask: what the mask takes from p is in the
weight already, as without a proposal, where q(x) = p(x) 1[x in A] / p(A) gives p(A). By rejection
(``genrt.inference.awrs``) d(A) is replaced by its unbiased estimate. Both rows are tempered alike. Every
text that the model can write has to be one that d can write; this holds of softmaxes.

The factors p(x) of a block are one question to the model, the scores of all texts' blocks, each computed
once however many tokens it has. A block is over after ``size`` tokens, or at ``max_tokens``. A text that
ends inside of one is finished once the block is over: so all are asked about together, and the number of
a text's steps depends on its tokens alone. Until then its log-weight, its twist in it, is that of the
text before the block; it may be resampled all the same, as what it has to gain goes with it.

Chen et al. (2023), *Accelerating large language model decoding with speculative sampling* (drafts of a
smaller model, checked in one forward); the weights are those of importance sampling.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from genrt.errors import ContextTooLong, InvalidRequest
from genrt.inference.model import DEAD, Growth
from genrt.inference.proposals import ProposedTokens
from genrt.inference.trails import Trail
from genrt.lm import AsyncLM
from genrt.numbers import check_int

TOKENS = 8
"""How many tokens a block has unless the caller says."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The tokens of one text that are not weighed yet. A value, as the particle that has it.

    Attributes:
        before: the text without them.
        token_ids: them, with a stop token.
        logprob: the logarithm of the probability that all of them were drawn with.
        steps: how many steps ago it began; more than its tokens if the text has ended.
    """

    before: Trail
    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    steps: int = 0

    def after(self, drawn: tuple[int, float] | None) -> Self:
        """Return the block after one more step, which drew a token unless the text had ended."""
        if drawn is None:
            return replace(self, steps=self.steps + 1)
        token_ids, logprob = (*self.token_ids, drawn[0]), self.logprob + drawn[1]
        return replace(self, token_ids=token_ids, logprob=logprob, steps=self.steps + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Weighs blocks; the fields are the arguments of a ``TextModel``, checked."""

    lm: AsyncLM
    prompt: tuple[int, ...]
    size: int
    max_tokens: int
    temperature: float
    adapter: str | None

    def is_over(self, block: Block) -> bool:
        """Return whether it is time to weigh a block."""
        return block.steps == min(self.size, self.max_tokens - block.before.count)

    async def grown(
        self,
        particles: Sequence[Any],
        seed: int,
        longer: Callable[[Sequence[Any], int], Awaitable[tuple[ProposedTokens, list[Growth]]]],
        judged: Callable[[Sequence[Any], list[Growth]], Awaitable[list[Growth]]],
    ) -> list[Growth]:
        """Grow texts, ``TextParticle``s, that have not ended by a token that is proposed, and weigh the
        blocks that are over.

        Args:
            longer: draws a token after each text; returns these, and the texts.
            judged: adds to the growths of texts that are weighed what potential and twist give them.
        """
        going = [place for place, each in enumerate(particles) if not each.trail.finished]
        steps: list[tuple[int, float] | None] = [None] * len(particles)
        grown = [Growth(each, 0.0, DEAD) for each in particles]
        if going:
            drawn, growths = await longer([particles[place] for place in going], seed)
            own = zip(drawn.token_ids, drawn.logprobs, strict=True)
            for place, step, growth in zip(going, own, growths, strict=True):
                steps[place], grown[place] = step, growth
        over: dict[int, Block] = {}
        for place, (before, growth) in enumerate(zip(particles, grown, strict=True)):
            if growth.log_weight == -math.inf:
                continue
            block: Block = (before.block or Block(before.trail)).after(steps[place])
            if is_over := self.is_over(block):
                over[place] = block
            particle = replace(
                growth.particle, block=None if is_over else block, log_twist=before.log_twist
            )
            grown[place] = Growth(particle, 0.0, growth.token_id)
        if over:
            gained = await self.log_weights([*over.values()])
            weighed = [
                grown[place]._replace(log_weight=log_weight)
                for place, log_weight in zip(over, gained, strict=True)
            ]
            found = await judged([particles[place] for place in over], weighed)
            for place, growth in zip(over, found, strict=True):
                grown[place] = growth
        return grown

    async def log_weights(self, blocks: Sequence[Block]) -> list[float]:
        """Return what the log-weights of texts gain by their blocks: one question to the model."""
        contexts = [self.prompt + each.before.text.token_ids for each in blocks]
        population = self.lm.population(contexts, adapter=self.adapter)
        tokens = [each.token_ids for each in blocks]
        scores = await population.score(tokens, temperature=self.temperature)
        return [
            math.fsum(score.tolist()) - block.logprob
            for score, block in zip(scores, blocks, strict=True)
        ]


def block_size(lm: AsyncLM, proposal: Any, block: Any, adapter: Any, longest: int) -> int | None:
    """Return how many tokens a block has; ``None`` where no other model proposes. Contexts have up to
    ``longest`` tokens.

    Raises:
        InvalidRequest: the proposing model has another vocabulary, or there is none and a block or an
            adapter of it is given, or the block is out of range.
        ContextTooLong: contexts are too long for it.
    """
    if not isinstance(proposal, AsyncLM):
        if block is not None or adapter is not None:
            raise InvalidRequest(
                "block and proposal_adapter are for proposal=another runtime, which draws the tokens"
            )
        return None
    size = TOKENS if block is None else check_int("block", block, 1)
    if proposal is not lm and proposal.byte_vocab != lm.byte_vocab:
        raise InvalidRequest(
            f"the proposal has another vocabulary, of {proposal.vocab_size} tokens, and the model's has "
            f"{lm.vocab_size}: give a runtime whose tokens are the same ones, by number and by bytes"
        )
    if longest > proposal.max_model_len:
        raise ContextTooLong(
            f"prompt and text need a context of {longest}, and the proposal's is "
            f"{proposal.max_model_len}: shorten one of them, or give another proposal"
        )
    return size
