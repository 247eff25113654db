"""Sequential Monte Carlo over JSON records under a schema, with the posterior printed.

The prompt shows how a sentence becomes a record; the second sentence does not name the country. Each
particle writes one record, token by token. All particles together estimate the model's distribution of
records under the schema. `posterior(of=...)` is the distribution of one field. The evidence is the
probability that the model writes such a record without any constraint.
"""

import json
import math

import genrt
from genrt.constraints import json_schema
from genrt.inference import SMC, TextModel

PROMPT = """Ada was born in Athens in 1990.
{"name": "Ada", "country": "Greece", "born": 1990}
Emma was born on an island in 1984.
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,11}$"},
        "country": {"enum": ["Austria", "Cuba", "Germany", "Iceland", "Ireland", "Japan"]},
        "born": {"type": "integer", "minimum": 1900, "maximum": 2020},
    },
    "required": ["name", "country", "born"],
    "additionalProperties": False,
}

# With float32 the output hardly depends on the CPU; the model's own bfloat16 rounds more.
with genrt.load(engine_options={"dtype": "float32"}) as lm:
    # stop=None: a text ends with its record, whatever the model would write after it.
    record = json_schema(SCHEMA, lm)
    model = TextModel(lm, PROMPT, max_tokens=32, constraint=record, stop=None)
    result = SMC(model, num_particles=64).run_sync(seed=0)

for text, weight in result.posterior()[:3]:
    print(f"{weight:.2f}  {text}")
for country, weight in result.posterior(of=lambda text: json.loads(text)["country"]):
    print(f"{weight:.2f}  {country}")
print(f"evidence {math.exp(result.log_evidence):.2f}")

# Output:
# 0.46  {"name": "Emma", "country": "Ireland", "born": 1984}
# 0.15  {"name": "Emma", "country": "Germany", "born": 1984}
# 0.15  {"name": "Emma", "country": "Austria", "born": 1984}
# 0.53  Ireland
# 0.20  Germany
# 0.20  Austria
# 0.07  Japan
# evidence 0.06
