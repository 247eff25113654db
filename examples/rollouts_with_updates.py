"""A small policy loop: rollouts, a gradient step, new weights in the open engine, rollouts again.

The reward is 1 for a sentence that ends within eight tokens. The trainer is plain torch: REINFORCE with
the batch's mean reward as baseline, on the last two layers. `update_weights` replaces the weights of the
open engine, and every rollout has the version that drew it. The program also compares the engine's
log-probabilities of the drawn tokens with the trainer's: they are equal if the weights are.
"""

import asyncio
from functools import partial

import torch
from transformers import AutoModelForCausalLM

import genrt
from genrt import models
from genrt.generation import rollout

PROMPT, COUNT = "The sun", 32


async def main() -> None:
    """Print the reward of each version of the weights."""
    policy = AutoModelForCausalLM.from_pretrained(models.resolve(None), dtype=torch.float32)
    trained = policy.requires_grad_(False).model.layers[-2:].requires_grad_(True)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    # With float32 the output hardly depends on the CPU; the model's own bfloat16 rounds more.
    async with await genrt.aload(engine_options={"dtype": "float32"}) as lm:
        input_ids = torch.tensor([lm.encode(PROMPT)] * COUNT)
        lengths = torch.full((COUNT,), input_ids.shape[1])
        draw = partial(rollout, lm, input_ids, lengths, pad_value=0, max_new_tokens=8)
        for step in range(3):
            if step:
                await lm.update_weights(policy.state_dict())
            drawn = await draw(stop_strings=["."], seed=COUNT * step)
            rewards = 1.0 - drawn.truncated.float()
            rows = policy(drawn.output_ids).logits[:, :-1].log_softmax(-1)
            logprobs = rows.gather(-1, drawn.output_ids[:, 1:, None])[..., 0]
            mask = drawn.logprobs[:, 1:] != 0
            off = (logprobs - drawn.logprobs[:, 1:])[mask].abs().max()
            same = "the same" if off < 0.01 else "other"
            print(
                f"version {drawn.weights_versions.max()}: reward {rewards.mean():.2f}, {same} weights"
            )
            loss = -((rewards - rewards.mean())[:, None] * logprobs * mask).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(*(PROMPT + completion.text for completion in drawn.completions[:3]), sep="\n")


asyncio.run(main())

# Output:
# version 0: reward 0.19, the same weights
# version 1: reward 0.38, the same weights
# version 2: reward 0.53, the same weights
# The sun atop the dying volcano
# The sunrise, spread across the ship's decks
# The sun travels 360
