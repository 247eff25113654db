"""A reward model filters texts: best of N beside sequential Monte Carlo with a twist.

The reward is the log-probability that a reader, the same model with another prompt, calls the text good.
Best of N draws whole texts and returns the best one. SMC asks for the reward of every prefix (the twist)
and continues good prefixes more often. Its particles estimate a distribution, that of the model times
exp(4 reward), and not only its mode.
"""

import asyncio

import genrt
from genrt.inference import SMC, BestOfN, TextModel
from genrt.tokens.texts import Text

BEGINNING = "The food in this restaurant was"
READER = f'''Review: "I loved every minute of it." Verdict: good
Review: "It was a waste of my money." Verdict: bad
Review: "{BEGINNING}'''


async def main() -> None:
    """Print the texts of both, and the reward of each."""
    # With float32 the output hardly depends on the CPU; the model's own bfloat16 rounds more.
    async with await genrt.aload(engine_options={"dtype": "float32"}) as lm:
        before, after = lm.encode(READER), lm.encode('." Verdict:')
        verdict, end = lm.encode(" good"), lm.encode(".")
        rewards: dict[str, float] = {}

        async def reward(text: Text) -> float:
            [good] = await lm.token_logprobs([*before, *text.token_ids, *after], verdict)
            rewards[str(text)] = float(good)
            return 4 * float(good)

        model = TextModel(lm, BEGINNING, max_tokens=12, stop=end, potential=reward, twist=reward)
        for name, algorithm in (
            ("best of 32", BestOfN(model, n=32)),
            ("SMC, 32 particles", SMC(model, num_particles=32)),
        ):
            print(name)
            result = await algorithm.run(seed=2)
            for text, weight in result.posterior()[:3]:
                print(f"  weight {weight:.2f}  reward {rewards[text]:.2f} {text}")


asyncio.run(main())

# Output:
# best of 32
#   weight 1.00  reward -1.19  a healthy choice
# SMC, 32 particles
#   weight 0.13  reward -1.34  modern, delicious, and made with fresh ingredients
#   weight 0.06  reward -1.42  fantastic
#   weight 0.06  reward -1.72  locally sourced
