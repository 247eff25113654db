"""Power sampling: texts in proportion to the model's probability to the fourth power.

A low temperature sharpens one token at a time; a power sharpens whole texts, so a likely beginning with
only unlikely continuations loses. `Law(power=4)` is the target. A step grows each text by four tokens,
resamples, and moves every text: it cuts the text at random, redraws the rest, and accepts or refuses.
"""

import genrt
from genrt.inference import (
    END_TOKEN,
    Law,
    Result,
    TextModel,
    importance_sampling,
    resample_move,
)
from genrt.inference.texts import Stop

PROMPT = "Question: Which planet is the largest?\nAnswer: The largest planet is"


def mean_log_probability(result: Result) -> float:
    """Return the posterior mean of the log-probability of a text."""
    return result.expectation(lambda text: scores[text])


# With float32 the output hardly depends on the CPU; the model's own bfloat16 rounds more.
with genrt.load(engine_options={"dtype": "float32"}) as lm:
    stop: Stop = [END_TOKEN, lm.encode("\n")[0]]
    plain = TextModel(lm, PROMPT, max_tokens=12, stop=stop)
    sharp = TextModel(Law(lm, PROMPT, power=4.0), max_tokens=12, stop=stop, unit=4)
    results = {
        "the model": importance_sampling(plain, num_particles=32).run_sync(seed=0),
        "power 4": resample_move(sharp, num_particles=32, moves=2).run_sync(seed=0),
    }
    prompt = lm.encode(PROMPT)
    scores: dict[str, float] = {}
    for result in results.values():
        rows = lm.batch_score_sync([prompt] * len(result.texts), result.token_ids)
        scores.update({t: float(r.sum()) for t, r in zip(result.texts, rows, strict=True)})

for name, result in results.items():
    print(f"{name}: mean log-probability {mean_log_probability(result):.1f}")
    for text, weight in result.posterior()[:3]:
        print(f"  {weight:.2f} {text!r}")

# Output:
# the model: mean log-probability -12.3
#   0.19 ' Jupiter.'
#   0.19 ' Neptune.'
#   0.03 ' Jupiter, orbiting the Sun at a staggering 258'
# power 4: mean log-probability -1.9
#   0.95 ' Jupiter.'
#   0.05 ' Neptune.'
