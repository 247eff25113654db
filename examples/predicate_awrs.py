"""A constraint that only a function can judge, sampled by adaptive weighted rejection (AWRS).

The model writes house numbers, and only primes count. A mask calls the function for all 49,152 tokens.
AWRS draws a token from the model's own distribution, calls the function for that token, and draws again
if the function refuses it. The weights account for the rejections: the target is the same as with masks.
Use it for slow functions: a parser, a type checker, a service.
"""

import math

import genrt
from genrt.constraints import predicate
from genrt.inference import SMC, TextModel
from genrt.tokens.texts import Text

PROMPT = "The number of my house is a prime:"


class Prime:
    """The predicate. It counts its calls."""

    calls = 0

    def __call__(self, text: Text) -> bool:
        """Return whether a finished text is a prime, or whether a prefix may become one."""
        self.calls += 1
        number = text.removeprefix(" ")
        if not text.startswith(" ") or not number:
            return text == " " and not text.finished
        if not number.isdecimal() or not text.finished:
            return number.isdecimal()
        return int(number) > 1 and all(int(number) % k for k in range(2, int(number)))


prime = Prime()
# With float32 the output hardly depends on the CPU; the model's own bfloat16 rounds more.
with genrt.load(engine_options={"dtype": "float32"}) as lm:
    constraint = predicate(prime, lm, name="a prime", max_concurrent=1)
    end = lm.encode(".")  # the text ends where the model writes a full stop
    model = TextModel(lm, PROMPT, max_tokens=5, stop=end, constraint=constraint)
    result = SMC(model, num_particles=64).run_sync(seed=0)

for text, weight in result.posterior()[:4]:
    print(f"{weight:.2f} {text}")
print(f"probability of a prime: {math.exp(result.log_evidence):.2f}")
print(f"calls of the function: {prime.calls}")

# Output:
# 0.38  11
# 0.26  5
# 0.12  43
# 0.09  2
# probability of a prime: 0.02
# calls of the function: 700
