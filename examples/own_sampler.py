"""A sampler of your own: an acrostic by sequential Monte Carlo, one coroutine a particle.

The words of the sentence begin with the letters of SNOW. A step ends with the first token of the next
word, so particles draw different numbers of tokens; concurrent draws still share engine steps. Between
the words, particles are resampled: `fork` copies a context, and no token is computed twice.
"""

import asyncio
import re

import numpy as np
import torch

import genrt
from genrt.inference import effective_sample_size, systematic

PROMPT, LETTERS, SIZE = "Everything was quiet, and", "snow", 32


def tokens(lm: genrt.AsyncLM, pattern: str) -> torch.Tensor:
    """Return the mask of the tokens that match a pattern."""
    return torch.tensor([bool(re.fullmatch(pattern.encode(), each)) for each in lm.byte_vocab])


async def next_word(
    context: genrt.Context, start: torch.Tensor, inside: torch.Tensor, chance: np.random.Generator
) -> float:
    """Draw up to the first token of the next word, four tokens at most; return their log-weight."""
    log_weight = 0.0
    for _ in range(4):
        mask = start if context.text == PROMPT else start | inside
        draw = await context.draw(mask=mask, seed=int(chance.integers(2**63)))
        log_weight += draw.log_mass
        context.append(draw.token_id)
        if start[draw.token_id]:
            return log_weight
    return -np.inf


async def main() -> None:
    """Print the sentences with the highest weights."""
    async with await genrt.aload(engine_options={"dtype": "float32"}) as lm:
        chance, prompt, inside = np.random.default_rng(0), lm.context(PROMPT), tokens(lm, "[a-z]+")
        contexts, log_weights = [prompt.fork() for _ in range(SIZE)], np.zeros(SIZE)
        for pattern in (*(f" {letter}[a-z]*" for letter in LETTERS), r"\."):
            particles = zip(contexts, chance.spawn(SIZE), strict=True)
            start = tokens(lm, pattern)
            grown = (next_word(context, start, inside, own) for context, own in particles)
            log_weights += await asyncio.gather(*grown)
            if effective_sample_size(log_weights) < SIZE / 2:
                contexts = [contexts[each].fork() for each in systematic(chance, log_weights)]
                log_weights[:] = 0.0
        weights = np.exp(log_weights - np.logaddexp.reduce(log_weights))
        for text in sorted({context.text for context in contexts}):
            same = [context.text == text for context in contexts]
            print(f"{weights[same].sum():.2f}  {text}")


asyncio.run(main())
