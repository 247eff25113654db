"""A sampler of your own: an acrostic by sequential Monte Carlo, one coroutine a particle.

The words of the sentence begin with the letters of SNOW. A step ends with the first token of the next
word, so particles draw different numbers of tokens; concurrent draws still share engine steps. Between
the words, particles are resampled: `fork` copies a context, and no token is computed twice.
"""

import asyncio
import re

import numpy as np
from torch import Tensor, tensor

import genrt
from genrt.inference import effective_sample_size, systematic

PROMPT, LETTERS, SIZE = "The night was cold, and", "snow", 32


def tokens(lm: genrt.AsyncLM, pattern: str) -> Tensor:
    """Return the mask of the tokens that match a pattern."""
    return tensor([bool(re.fullmatch(pattern.encode(), token)) for token in lm.byte_vocab])


async def next_word(context: genrt.Context, start: Tensor, inside: Tensor, seed: int) -> float:
    """Draw up to the first token of the next word, four tokens at most; return their log-weight."""
    log_weight = 0.0
    for place in range(4):
        mask = start if context.text == PROMPT else start | inside
        draw = await context.draw(mask=mask, seed=seed + place)
        log_weight += draw.log_mass
        context.append(draw.token_id)
        if start[draw.token_id]:
            return log_weight
    return -np.inf


async def main() -> None:
    """Print the sentences with their weights."""
    async with await genrt.aload(engine_options={"dtype": "float32"}) as lm:
        chance, prompt, inside = np.random.default_rng(2), lm.context(PROMPT), tokens(lm, "[a-z]+")
        contexts, log_weights = [prompt.fork() for _ in range(SIZE)], np.zeros(SIZE)
        for pattern in (*(f" {letter}[a-z]*" for letter in LETTERS), r"\."):
            start, seeds = tokens(lm, pattern), chance.integers(2**62, size=SIZE).tolist()
            words = (next_word(contexts[n], start, inside, seeds[n]) for n in range(SIZE))
            log_weights += await asyncio.gather(*words)
            if effective_sample_size(log_weights) < SIZE / 2:
                contexts = [contexts[n].fork() for n in systematic(chance, log_weights)]
                log_weights[:] = 0.0
        weights = np.exp(log_weights - np.logaddexp.reduce(log_weights))
        for text in sorted({context.text for context in contexts}):
            print(f"{weights[[each.text == text for each in contexts]].sum():.2f}  {text}")


asyncio.run(main())

# Output:
# 0.41  The night was cold, and something no one wants.
# 0.03  The night was cold, and something no one was.
# 0.56  The night was cold, and still no one was.
