"""An engine of your own: a model of letter pairs, counted from a text.

`SteppedEngine` implements the engine protocol around any model that computes logits from contexts: it
batches, samples, cancels and counts. `check_engine` tests the engine against the protocol, and raises
AssertionError with the first broken promise. The runtime asks the engine as it asks vLLM.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

import genrt
from genrt.constraints import regex
from genrt.engines.stepping import SteppedEngine, SteppedModel
from genrt.inference import SMC, TextModel
from genrt.questions.arguments import Adapter
from genrt.testing import check_engine
from genrt.tokens.vocabulary import BytesTokenizer

TEXT = "the cat sat on the mat and the rat ran to the hat. that cat ate the rat in the hat. "
LETTERS = sorted(set(TEXT))


class LetterPairs(SteppedModel):
    """The probability of a letter given the one before it; the last token id ends a text."""

    device = torch.device("cpu")
    vocab_size = len(LETTERS) + 1
    tokenizer = BytesTokenizer([*map(str.encode, LETTERS), b""], eos_token_id=len(LETTERS))

    def __init__(self) -> None:
        counts = torch.full((self.vocab_size, self.vocab_size), 0.01)
        ids = self.tokenizer.encode(TEXT)
        for before, after in pairwise(ids):
            counts[before, after] += 1
        self.table = counts.log()

    def logits(self, contexts: Sequence[Sequence[int]], adapter: Adapter | None) -> torch.Tensor:
        """Return the logits after each context."""
        return self.table[[context[-1] for context in contexts]]


def open_engine() -> SteppedEngine:
    """Return a new engine; `genrt.load` and `check_engine` call this."""
    return SteppedEngine(LetterPairs(), max_model_len=64, max_batch_size=32)


check_engine(open_engine)
with genrt.load(engine=open_engine) as lm:
    print(lm.generate_sync("the ", max_tokens=24, seed=1).text)
    animals = TextModel(lm, "the ", max_tokens=8, constraint=regex("(cat|rat|hat)", lm), stop=None)
    for text, weight in SMC(animals, num_particles=200).run_sync(seed=0).posterior():
        print(f"{weight:.2f} {text}")

# Output:
# han rat ca
# 0.47 rat
# 0.40 cat
# 0.12 hat
