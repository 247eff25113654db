"""A reward model filters texts: best of N beside sequential Monte Carlo with a twist.

The reward is the log-probability that a reader calls the text good. Best of N ranks whole texts: it
returns one, and cannot improve what it has drawn. SMC asks for the reward of every prefix (the twist),
and copies good prefixes before they are continued. Its particles follow the model's distribution
weighted by exp(4 reward), so that they stay different from each other.
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
    # In float32 all CPUs print the same; the embedded model's own bfloat16 rounds differently on each.
    async with await genrt.aload(engine_options={"dtype": "float32"}) as lm:
        before, after = lm.encode(READER), lm.encode('." Verdict:')
        verdict, end = lm.encode(" good"), lm.encode(".")
        rewards: dict[str, float] = {}

        async def reward(text: Text) -> float:
            [good] = await lm.token_logprobs([*before, *text.token_ids, *after], verdict)
            rewards[str(text)] = float(good)
            return 4 * float(good)

        model = TextModel(
            lm, BEGINNING, max_tokens=12, stop=end, potential=reward, twist=reward
        )
        for name, algorithm in (
            ("best of 32", BestOfN(model, n=32)),
            ("SMC, 32 particles", SMC(model, num_particles=32)),
        ):
            print(name)
            result = await algorithm.run(seed=2)
            for text, weight in result.posterior()[:5]:
                print(f"  weight {weight:.2f}  reward {rewards[text]:.1f} {text}")


asyncio.run(main())
