"""A server on a free port, three kinds of clients, and its end.

One engine answers all: an OpenAI client draws a chat answer, plain HTTP asks for an inference under a
regular expression, and a remote runtime asks for the rows of the model, as a local one would. Closing
the server leaves the runtime open.
"""

import asyncio

import httpx
import openai

import genrt

QUESTION = "What is the capital of France?"


async def ask(url: str) -> None:
    """Ask the server at this address in three ways."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model="smol",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=8,
            temperature=0,
        )
        print("chat:", answer.choices[0].message.content)

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        question = {"prompt": "The capital of France is", "regex": " (Paris|Lyon|Rome)\\."}
        question |= {"particles": 64, "max_tokens": 8, "seed": 0}
        found = (await http.post("/v1/infer", json=question)).raise_for_status().json()
        for each in found["posterior"]:
            print(f"inference: {each['weight']:.2f} {each['text']}")

    async with await genrt.AsyncLM.connect(url) as remote:
        prompt = remote.encode("The capital of France is")
        top = await remote.top_logprobs(prompt, 3)
        for token_id, logprob in zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True):
            print(f"remote row: {logprob:.1f} {remote.decode([token_id])}")


# In float32 all CPUs print the same; the embedded model's own bfloat16 rounds differently on each.
with genrt.load(engine_options={"dtype": "float32"}) as lm:
    with genrt.serving(lm, model="smol") as server:
        asyncio.run(ask(server.url))
    print("still open:", lm.generate_sync("The capital of Italy is", max_tokens=1, temperature=0).text)
