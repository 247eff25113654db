"""A server on a free port, three kinds of clients, and the end of the server.

One engine answers all. An OpenAI client draws a chat answer; plain HTTP asks for an inference under a
regular expression; a remote runtime asks for log-probabilities, as a local one would. Closing the
server leaves the runtime open.
"""

import asyncio

import httpx
import openai

import genrt

QUESTION, PROMPT = "What is the capital of France?", "My favourite city is"


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
        question = {"prompt": PROMPT, "regex": " (Paris|Rome|Tokyo)\\.", "max_tokens": 8}
        found = await http.post("/v1/infer", json={**question, "particles": 64, "seed": 0})
        for each in found.raise_for_status().json()["posterior"]:
            print(f"inference: {each['weight']:.2f} {each['text']}")

    async with await genrt.AsyncLM.connect(url) as remote:
        for city in (" Paris.", " Tokyo."):
            scores = await remote.score(remote.encode(PROMPT), remote.encode(city))
            print(f"remote runtime: {scores.sum():.2f} {city}")


# With float32 the output hardly depends on the CPU; the model's own bfloat16 rounds more.
with genrt.load(engine_options={"dtype": "float32"}) as lm:
    with genrt.serving(lm, model="smol") as server:
        asyncio.run(ask(str(server.url)))
    [token_id] = lm.sample_sync(lm.encode("The capital of Italy is"), max_tokens=1, temperature=0)
    print("the runtime, after the server:", lm.decode([token_id]))

# Output:
# chat: The capital of France is Paris.
# inference: 0.89  Paris.
# inference: 0.10  Rome.
# inference: 0.02  Tokyo.
# remote runtime: -4.26  Paris.
# remote runtime: -7.00  Tokyo.
# the runtime, after the server:  Rome
