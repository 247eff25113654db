"""A product of prompts: texts that are likely after both of two prompts, beside each prompt alone.

Several laws in a `TextModel` multiply. Each token is drawn from the normalized product of both rows, and
the sum of the product is the weight. With a negative power a law becomes a contrast: it prefers texts
that its prompt makes unlikely.
"""

import genrt
from genrt.constraints import strings
from genrt.inference import SMC, Law, TextModel

WARM = "A list of animals that live in hot countries:\n-"
WATER = "A list of animals that live in the water:\n-"
ANIMALS = ["camel", "crocodile", "dolphin", "hippo", "lion", "penguin", "salmon", "whale"]

# With float32 the output hardly depends on the CPU; the model's own bfloat16 rounds more.
with genrt.load(engine_options={"dtype": "float32"}) as lm:
    animal = strings([f" {each}\n" for each in ANIMALS], lm)
    hot, wet = Law(lm, WARM), Law(lm, WATER)
    targets = {
        "hot countries": [hot],
        "water": [wet],
        "both": [hot, wet],
        "water, not hot countries": [Law(lm, WATER, power=1.5), Law(lm, WARM, power=-0.5)],
    }
    for name, laws in targets.items():
        model = TextModel(laws, max_tokens=8, constraint=animal, stop=None)
        result = SMC(model, num_particles=64).run_sync(seed=0)
        likely = [f"{text.strip()} {weight:.2f}" for text, weight in result.posterior()[:4]]
        print(f"{name}: {', '.join(likely)}")

# Output:
# hot countries: camel 0.63, lion 0.36, whale 0.01
# water: whale 1.00
# both: lion 0.59, salmon 0.26, camel 0.15
# water, not hot countries: whale 0.58, salmon 0.20, dolphin 0.14, crocodile 0.08
