"""Completions: their options, and their law on the exact engine, where every probability is known."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion, CompletionRequest, Decoding
from tests.scripted import ScriptedEngine

EOS = 4
MODEL = NGram.random([b"a", b"b", b" c", b"d", b"<end>"], order=1, seed=3, eos_token_id=EOS)


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", engine_options={"max_model_len": 64}) as opened:
        yield opened


def untimed(completion: Completion) -> Completion:
    return dataclasses.replace(completion, seconds=0.0, seconds_to_first_token=0.0)


class Counted(tuple[int, ...]):
    """Token ids that count how often they are hashed."""

    hashed = 0

    def __hash__(self) -> int:
        type(self).hashed += 1
        return super().__hash__()


def test_a_request_hashes_its_context_once() -> None:
    Counted.hashed = 0
    request = CompletionRequest(Counted(range(100)), Decoding(3), nonce=1)
    assert len({request, request}) == 1
    assert request in {request: None}
    assert Counted.hashed == 1
    same = CompletionRequest(tuple(range(100)), Decoding(3), nonce=1)
    assert (request, hash(request)) == (same, hash(same))
    assert request.of_weights(2) != request.of_weights(1)
    assert len({request, request.of_weights(1), copy.copy(same)}) == 2


@settings(deadline=None, max_examples=10)  # each opens a runtime
@given(seed=st.integers(0, 2**63 - 1), prompt=st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_a_seeded_completion_does_not_depend_on_its_company(seed: int, prompt: list[int]) -> None:
    async def asked() -> None:
        async with await genrt.aload(MODEL, engine="exact") as own:
            options: dict[str, Any] = {"max_tokens": 6, "seed": seed}
            alone = await own.generate(prompt, **options)
            crowd = await asyncio.gather(
                own.generate(prompt, **options),
                own.generate(prompt, max_tokens=6),
                own.sample(prompt, max_tokens=3),
                own.next_token_logprobs(prompt),
            )
            assert untimed(crowd[0]) == untimed(alone)

    asyncio.run(asked())


# -- where it ends --------------------------------------------------------------------------------


def test_a_completion_says_how_it_ended(lm: AsyncLM) -> None:
    forced: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
    ended = lm.generate_sync("ab", logit_bias={EOS: 100.0}, **forced)
    assert (ended.finish_reason, ended.stop_reason, ended.text) == ("stop", None, "")
    assert ended.token_ids == (EOS,)
    assert not ended.truncated
    stopped = lm.generate_sync("ab", logit_bias={3: 100.0}, stop_token_ids=[3], **forced)
    assert (stopped.finish_reason, stopped.stop_reason, stopped.text) == ("stop", 3, "")
    kept = lm.generate_sync(
        "ab",
        logit_bias={3: 100.0},
        stop_token_ids=[3],
        include_stop_str_in_output=True,
        **forced,
    )
    assert kept.text == "d"
    full = lm.generate_sync("ab", logit_bias={0: 100.0}, **forced)
    assert (full.finish_reason, full.text, full.truncated) == ("length", "aaaa", True)


def test_a_character_that_is_not_complete_is_left_out() -> None:
    model = NGram.random([b"a", b"\xc3", b"\xa9"], order=1, seed=1)
    with genrt.load(model, engine="exact") as own:
        texts = own.batch_generate_sync([[0]] * 60, max_tokens=4, seed=1)
    for each in texts:
        data = b"".join(model.vocabulary[token] for token in each.token_ids)
        whole = data.decode(errors="replace")
        assert whole.startswith(each.text)
        assert not each.text.endswith("\ufffd")
    assert any("\xe9" in each.text for each in texts)
    assert any(len(each.text) < 4 for each in texts)


def test_logprobs_are_the_models_before_any_option(lm: AsyncLM) -> None:
    found = lm.generate_sync("ab", max_tokens=6, seed=1, temperature=3.0, logprobs=2)
    scores = lm.score_sync([0, 1], found.token_ids)
    assert torch.allclose(torch.tensor(found.logprobs), scores, atol=1e-5)
    for place, likeliest in enumerate(found.top_logprobs):
        top = lm.top_logprobs_sync([0, 1, *found.token_ids[:place]], 2)
        assert list(likeliest) == top.token_ids.tolist()
    assert lm.generate_sync("ab", max_tokens=3, seed=1).logprobs == ()
    plain = lm.generate_sync("ab", max_tokens=3, seed=1, logprobs=0)
    assert len(plain.logprobs) == len(plain.token_ids)
    assert plain.top_logprobs == ()


async def test_a_text_for_which_no_token_is_left_fails_alone(lm: AsyncLM) -> None:
    every = ["a", "b", " c", "d"]
    good, bad = await asyncio.gather(
        lm.generate("ab", max_tokens=2, seed=1),
        lm.generate("ab", max_tokens=2, seed=1, bad_words=every, min_tokens=1),
        return_exceptions=True,
    )
    assert isinstance(good, Completion)
    assert isinstance(bad, InvalidRequest)
    assert "leave no token to draw" in str(bad)


# -- what is refused ------------------------------------------------------------------------------

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 1}, "no option 'max_new_tokens': did you mean max_tokens"),
    ({"stop": ["a", "\ud800"]}, "stop: .* lone surrogate at character 0"),
    ({"bad_words": ["a\udfff"]}, "bad_words: .* lone surrogate at character 1"),
    ({"logit_bias": {9: 1.0}}, "logit_bias"),
    ({"logit_bias": {1: 101.0}}, "from -100 to 100"),
    ({"regex": "a", "choice": ["b"]}, "one of regex, choice"),
    ({"json_schema": {"x": {1, 2}}}, "json_schema is not JSON"),
    ({"json_schema": {"minimum": math.nan}}, "json_schema is not JSON"),
]
LATE: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": 4, "max_tokens": 3}, "min_tokens must be from 0 to 3"),
    ({"json_schema": {"type": "nothing"}}, "json_schema: the JSON schema has the type 'nothing'"),
    ({"json_schema": False}, "json_schema: the JSON schema is false"),
    ({"json_schema": "{"}, "json_schema: the JSON schema is not a JSON text"),
    ({"json_schema": {"type": "integer", "minimum": 1, "maximum": 0}}, "json_schema: "),
    ({"regex": "a("}, "regex: .* does not compile: missing \\), unterminated"),
    ({"regex": r"[^\s\S]"}, "regex: no text has this structure"),
    ({"grammar": "root ::= a"}, "grammar: the EBNF grammar does not parse.*no rule 'a'"),
    ({"grammar": "start: a"}, "grammar: "),
    ({"grammar": "root ::= root"}, "grammar: "),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES + LATE, ids=str)
def test_wrong_options_are_refused_by_name(
    lm: AsyncLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s){message}"):
        lm.generate_sync("ab", **options)
    with pytest.raises(InvalidRequest, match=f"(?s){message}"):
        lm.batch_generate_sync(["ab"] if (options, message) in LATE else [], **options)


def test_an_engine_that_draws_no_completions_says_so() -> None:
    with (
        genrt.load(engine=ScriptedEngine) as own,
        pytest.raises(InvalidRequest, match="ScriptedEngine cannot do this: it draws no"),
    ):
        own.generate_sync([1], max_tokens=1)


def test_by_default_a_text_may_fill_the_context(lm: AsyncLM) -> None:
    found = lm.generate_sync("ab", ignore_eos=True, seed=1)
    assert len(found.token_ids) == lm.max_model_len - 2
