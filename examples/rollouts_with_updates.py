"""A small policy loop: rollouts, a gradient step, new weights in the open engine, rollouts again.

The reward is 1 for a sentence that ends within eight tokens. The trainer is plain torch: REINFORCE with
the batch's mean reward as baseline, on the last two layers. `update_weights` replaces the weights of the
open engine, and every rollout names the version that drew it. The last column compares the engine's
log-probabilities of the drawn tokens with the trainer's: both have the same weights.
"""

import asyncio

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import genrt
from genrt import models
from genrt.generation import rollout

PROMPT, COUNT = "The sun", 32


async def main() -> None:
    """Print the reward of each version of the weights."""
    logging.disable_progress_bar()
    policy = AutoModelForCausalLM.from_pretrained(models.resolve(None), dtype=torch.float32)
    policy.requires_grad_(False)
    trained = policy.model.layers[-2:].requires_grad_(True)
    optimizer = torch.optim.SGD(trained.parameters(), lr=LR)
    # In float32 all CPUs print the same; the embedded model's own bfloat16 rounds differently on each.
    async with await genrt.aload(engine_options={"dtype": "float32"}) as lm:
        input_ids = torch.tensor([lm.encode(PROMPT)] * COUNT)
        lengths = torch.full((COUNT,), input_ids.shape[1])
        options = {"pad_value": 0, "max_new_tokens": 8, "stop_strings": ["."]}
        for step in range(3):
            if step:
                await lm.update_weights(policy.state_dict())
            drawn = await rollout(lm, input_ids, lengths, seed=COUNT * step, **options)
            rewards = 1.0 - drawn.truncated.float()
            rows = policy(drawn.output_ids).logits[:, :-1].log_softmax(-1)
            logprobs = rows.gather(-1, drawn.output_ids[:, 1:, None])[..., 0]
            mask = drawn.logprobs[:, 1:] != 0
            off = (logprobs - drawn.logprobs[:, 1:])[mask].abs().max()
            version = int(drawn.weights_versions[0])
            print(f"weights {version}: reward {rewards.mean():.2f}, agree: {bool(off < 0.01)}")
            loss = -((rewards - rewards.mean())[:, None] * logprobs * mask).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for completion in drawn.completions[:3]:
            print(PROMPT + completion.text)


asyncio.run(main())
