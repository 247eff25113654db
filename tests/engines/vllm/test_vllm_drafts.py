"""Texts under vLLM's speculative decoding, next to an engine without it: the same texts and laws, and
rows, draws, scores and sequences that do not notice."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import genrt
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.lm import AsyncLM
from tests import children
from tests.engines.vllm.small import TOLERANCE, forget, left_over, load
from tests.inside import engine_of

pytestmark = [
    pytest.mark.vllm,
    # vLLM looks for n-grams with numba, and gives it a list.
    pytest.mark.filterwarnings(r"ignore:[\s\S]*reflected list:PendingDeprecationWarning"),
]

DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
SIZE: dict[str, Any] = {"blocks": 40, "max_num_seqs": 8}
PROMPTS = [[1, 2, 3], [7, 7, 7, 9], [40, 41, 42, 43, 44], [5]]


def looping(model: Path, directory: Path) -> Path:
    """The model with little attention: its texts run in loops, so that drafts are often right."""
    shutil.copytree(model, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("o_proj.weight"):
            tensor *= 0.02
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def checkpoints(llama: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("loops")
    return [looping(llama, root / "one"), looping(other, root / "other")]


@pytest.fixture(scope="module")
def opened(checkpoints: list[Path]) -> Iterator[AsyncLM]:
    options = {"speculative_config": DRAFTS}
    with load(checkpoints[0], engine_options=options, **SIZE) as lm:
        yield lm


@pytest.fixture(scope="module")
def opened_plain(checkpoints: list[Path]) -> Iterator[AsyncLM]:
    with load(checkpoints[0], **SIZE) as lm:
        yield lm


@pytest.fixture
def lm(opened: AsyncLM) -> Iterator[AsyncLM]:
    """An engine whose texts have drafts."""
    forget(opened)
    yield opened
    assert left_over(engine_of(opened)) == {}


@pytest.fixture
def plain(opened_plain: AsyncLM) -> AsyncLM:
    """The same engine without drafts."""
    forget(opened_plain)
    return opened_plain


def drawn(completion: Any) -> tuple[Any, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason


async def texts(lm: AsyncLM, **options: Any) -> list[Any]:
    return await lm.batch_generate(PROMPTS, **{"max_tokens": 60, "temperature": 0.0} | options)


async def questions(lm: AsyncLM, steps: int = 12) -> list[torch.Tensor]:
    """Rows, draws, scores, a context and a population, one token further every time."""
    found: list[torch.Tensor] = []
    contexts = [[*range(n, n + 34)] for n in range(5)]
    context, population = lm.context([9, 8, 7]), lm.population([3, 1, 4], 5)
    with context, population:
        for step in range(steps):
            rows = await lm.batch_next_token_logprobs(contexts)
            tokens = [int(row.argmax()) for row in rows]
            draws = await lm.batch_draw(contexts, seed=step)
            scores = await lm.batch_score(
                [each[:9] for each in contexts], [[*each[9:]] for each in contexts]
            )
            of_context, of_population = await asyncio.gather(
                context.draw(seed=step), population.draw(seed=step)
            )
            found += [*rows, draws.logprobs, *scores, torch.tensor(of_context.logprob)]
            found += [torch.as_tensor(of_population.logprobs)]
            context.append(of_context.token_id)
            if step % 4 == 3:
                population.resample([0, 0, 1, 3, 3])
            else:
                population.append(of_population.token_ids)
            contexts = [[*each, token] for each, token in zip(contexts, tokens, strict=True)]
    return found


async def test_rows_and_sequences_do_not_notice_drafts(lm: AsyncLM, plain: AsyncLM) -> None:
    """Blocks are too few for all, so sequences are evicted meanwhile."""
    before = lm.statistics().engine
    found, with_drafts, more = await asyncio.gather(
        questions(lm), texts(lm, ignore_eos=True), texts(lm, ignore_eos=True, max_tokens=120)
    )
    after = lm.statistics().engine
    assert after.evicted > before.evicted
    for ours, theirs in zip(found, await questions(plain), strict=True):
        assert torch.allclose(ours, theirs, atol=TOLERANCE)
    assert list(map(drawn, with_drafts)) == list(map(drawn, await texts(plain, ignore_eos=True)))
    assert [each.token_ids[:60] for each in more] == [each.token_ids for each in with_drafts]


THREADS = f"""
import torch, warnings
from pathlib import Path
from tests.engines.vllm.small import load, on_engine

warnings.simplefilter("ignore")
with load(Path(model), engine_options={{"speculative_config": {DRAFTS}}}, **{SIZE}) as lm:
    lm.generate_sync([7, 7, 7, 9], max_tokens=8, ignore_eos=True)
    print("threads", on_engine(lm, lambda _: torch.get_num_threads()))
"""


@pytest.mark.proof
def test_the_thread_of_the_engine_keeps_its_number_of_threads(checkpoints: list[Path]) -> None:
    """numba sets its own number, of all cores, in the thread that first needs its threads. A process of
    its own, in which no engine has needed them before."""
    end = children.run({"drafts": THREADS}, model=str(checkpoints[0]))["drafts"]
    assert "threads 1" in end.out.splitlines(), end.err[-2000:]


async def test_drafts_save_steps(lm: AsyncLM) -> None:
    [loop] = await lm.batch_generate([[1, 2]], max_tokens=150, ignore_eos=True, temperature=0.0)
    before = lm.statistics().engine
    await lm.generate(loop.token_ids, max_tokens=100, ignore_eos=True, temperature=0.0)
    after = lm.statistics().engine
    assert after.sampled_tokens - before.sampled_tokens == 100
    assert after.steps - before.steps < 50


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 2},
        {"stop": ["e", "a"], "logprobs": 0},
        {"stop": ["in"], "include_stop_str_in_output": True, "min_tokens": 9},
        {"stop_token_ids": list(range(60)), "min_tokens": 5},
        {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
        {"bad_words": ["a", "the"], "ignore_eos": True},
        {"regex": "((abc|de f)+\n)+"},
        {"json_schema": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 9}},
    ],
    ids=str,
)
async def test_greedy_texts_and_their_streams_are_the_same(
    lm: AsyncLM, plain: AsyncLM, options: dict[str, Any]
) -> None:
    expected = await texts(plain, **options)
    streams = [lm.stream(prompt, max_tokens=60, temperature=0.0, **options) for prompt in PROMPTS]

    async def read(stream: Any) -> list[Any]:
        return [delta async for delta in stream]

    whole, *deltas = await asyncio.gather(texts(lm, **options), *map(read, streams))
    assert list(map(drawn, whole)) == list(map(drawn, expected))
    for ours, theirs, told in zip(whole, expected, deltas, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)
        assert [*map(set, ours.top_logprobs)] == [*map(set, theirs.top_logprobs)]
        assert sum((each.token_ids for each in told), ()) == theirs.token_ids
        assert "".join(each.text for each in told) == theirs.text
        assert sum((each.logprobs for each in told), ()) == ours.logprobs
    assert options.get("logprobs") != 2 or any(
        len(e.token_ids) > 1 for told in deltas for e in told
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6, "logprobs": 1},
        {"temperature": 1.5, "top_k": 4},
        {"temperature": 0.8, "top_p": 0.7, "repetition_penalty": 1.05, "logprobs": 0},
        {"temperature": 1.5, "regex": "([a-f]{3} )+"},
    ],
    ids=str,
)
async def test_a_seed_draws_the_text_that_it_draws_without_drafts(
    lm: AsyncLM, plain: AsyncLM, options: dict[str, Any]
) -> None:
    """Beside greedy texts and rows; the process's own generator is left alone."""
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 3} | options
    state = torch.get_rng_state()
    found, _, greedy = await asyncio.gather(texts(lm, **asked), questions(lm, 3), texts(lm))
    assert torch.equal(torch.get_rng_state(), state)
    expected = await texts(plain, **asked)
    assert list(map(drawn, found)) == list(map(drawn, expected))
    assert list(map(drawn, greedy)) == list(map(drawn, await texts(plain)))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)
    assert list(map(drawn, await texts(lm, **asked | {"seed": 4}))) != list(map(drawn, found))


async def test_texts_that_are_cancelled_leave_nothing(lm: AsyncLM, plain: AsyncLM) -> None:
    [expected] = await plain.batch_next_token_logprobs([[3, 3]])
    going = asyncio.ensure_future(texts(lm, ignore_eos=True))
    for prompt in PROMPTS:
        async for _ in lm.stream(prompt, max_tokens=200, ignore_eos=True, temperature=0.0):
            break
    cancelled = [asyncio.ensure_future(lm.generate(each, ignore_eos=True)) for each in PROMPTS]
    row = await lm.next_token_logprobs([3, 3])
    for each in cancelled:
        each.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    assert torch.allclose(row, expected, atol=TOLERANCE)
    assert list(map(drawn, await going)) == list(map(drawn, await texts(plain, ignore_eos=True)))


@pytest.mark.parametrize("pending", ["finish", "continue"])
async def test_new_weights_are_those_of_drafts_too(
    lm: AsyncLM, plain: AsyncLM, checkpoints: list[Path], pending: Any
) -> None:
    for path in (checkpoints[1], checkpoints[0]):
        stream = lm.stream(PROMPTS[0], max_tokens=100, ignore_eos=True, temperature=0.0)
        await anext(stream)
        await lm.update_weights(path, pending=pending)
        await plain.update_weights(path)
        rest = [delta async for delta in stream]
        assert rest or pending == "finish"
        found, expected = await asyncio.gather(texts(lm), texts(plain))
        assert list(map(drawn, found)) == list(map(drawn, expected))
        for ours, theirs in zip(await questions(lm, 2), await questions(plain, 2), strict=True):
            assert torch.allclose(ours, theirs, atol=TOLERANCE)


@pytest.mark.parametrize(
    "option",
    [
        {"min_p": 0.1},
        {"logit_bias": {3: 1.0}},
        {"sampling_mask": "bits"},
        {"logprobs": 0, "logprobs_mode": "processed_logprobs"},
    ],
    ids=str,
)
async def test_options_that_need_every_draw_are_refused(
    lm: AsyncLM, option: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match=f"{[*option][-1]}.*speculative_config"):
        await lm.generate(PROMPTS[0], **option)


def test_engines_that_cannot_have_drafts_say_so(llama: Path) -> None:
    exact = NGram.random(5, order=1)
    with pytest.raises(InvalidRequest, match=r"no options.*speculative_config"):
        genrt.load(exact, engine="exact", engine_options={"speculative_config": DRAFTS})
    lossy = DRAFTS | {"rejection_sample_method": "synthetic"}
    with pytest.raises(InvalidRequest, match=r"synthetic.*distribution"):
        load(llama, engine_options={"speculative_config": lossy}, **SIZE)
    with pytest.raises(InvalidRequest, match="deterministic"):
        load(llama, engine_options={"speculative_config": DRAFTS}, deterministic=True, **SIZE)
