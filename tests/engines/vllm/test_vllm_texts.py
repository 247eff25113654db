"""Completions in vLLM: the greedy texts and the laws of the transformers engine; what stops them; and
that nothing of them is left, however they end."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from vllm.v1.engine.output_processor import OutputProcessor

import genrt
from genrt.engines.completions import CompletionState
from genrt.engines.vllm.structures import GuidedStructures
from genrt.engines.vllm.texts import check_v2
from genrt.errors import EngineFailed, InvalidRequest, TimedOut
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion, Decoding, LogprobsMode, completion_requests
from genrt.questions.rows import Limits
from genrt.structures.guides import Guides
from genrt.tokens.sampling import truncate
from genrt.tokens.spellings import Spellings
from tests.engines.vllm.small import left_over
from tests.inside import core_of, engine_of
from tests.scripted import passes

pytestmark = pytest.mark.vllm

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 2**26,
}
SECOND_END = 0
PROMPTS = [[1, 2, 3], [7, 7, 7, 7, 9], [40, 41, 42, 43, 44, 45, 46, 47, 48], [5]]

CASES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "temperature": 0.5, "top_p": 0.8},
    {"seed": 3, "top_k": 5, "logprobs": 3},
    {"seed": 4, "min_p": 0.2, "logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"seed": 5, "logit_bias": {11: 8.0, 12: -50.0}},
    {"seed": 6, "ignore_eos": True},
    {"seed": 7, "stop_token_ids": list(range(60)), "min_tokens": 3},
    {"seed": 8, "stop": ["a", "e"], "include_stop_str_in_output": True},
    {"seed": 9, "stop": ["t"], "min_tokens": 2},
    {"seed": 10, "skip_special_tokens": False},
]


@pytest.fixture(scope="module")
def checkpoint(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has a second end token, and says how it would rather be drawn from."""
    copied = shutil.copytree(llama, tmp_path_factory.mktemp("ends") / "model")
    said = {"eos_token_id": [1, SECOND_END], "temperature": 0.3, "top_k": 3, "do_sample": True}
    (copied / "generation_config.json").write_text(json.dumps(said))
    return copied


@pytest.fixture(scope="module")
def lm(checkpoint: Path) -> Iterator[AsyncLM]:
    with genrt.load(str(checkpoint), engine_options=OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Iterator[AsyncLM]:
    with genrt.load(str(checkpoint), engine="transformers") as opened:
        yield opened


def test_log_probabilities_of_the_law_are_those_of_the_transformers_engine(
    lm: AsyncLM, oracle: AsyncLM
) -> None:
    """In one flush, beside texts that want the model's, rows, and greedy ones."""
    cases: list[dict[str, Any]] = [
        {"temperature": 0.6, "top_p": 0.7},
        {"top_k": 4, "temperature": 1.7, "logprobs": 2},
        {"min_p": 0.1, "logit_bias": {11: 3.0}, "frequency_penalty": 1.4},
        {"presence_penalty": 1.0, "bad_words": ["a"], "min_tokens": 2},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.6, "logprobs_mode": "raw_logprobs"},
    ]
    told: dict[str, Any] = {"logprobs": 0, "logprobs_mode": "processed_logprobs", "max_tokens": 8}

    async def crowd() -> list[Any]:
        asked = [lm.generate(PROMPTS[0], seed=3, **(told | case)) for case in cases]
        return await asyncio.gather(*asked, lm.next_token_logprobs([1, 2, 3, 4]))

    tokenizer, limits = oracle.tokenizer, Limits(oracle.vocab_size, 256)
    guides = Guides(tokenizer, oracle.vocab_size)
    spellings = Spellings(tokenizer, oracle.vocab_size)
    for case, ours in zip(cases, asyncio.run(crowd())[:-1], strict=True):
        [request] = completion_requests(limits, [PROMPTS[0]], None, count(), 3, told | case)
        decoding, writing = (
            request.decoding,
            CompletionState(request, tokenizer, guides, spellings, [SECOND_END]),
        )
        rows = oracle.batch_next_token_logprobs_sync(
            [[*PROMPTS[0], *ours.token_ids[:place]] for place in range(len(ours.token_ids))]
        )
        for row, token, logprob in zip(rows, ours.token_ids, ours.logprobs, strict=True):
            law = writing.distribution(row)
            kept = truncate(
                row if law is None else law,
                temperature=decoding.temperature,
                top_k=decoding.top_k,
                top_p=decoding.top_p,
                min_p=decoding.min_p,
            )
            writing.add(token, row, kept)
            expected = kept[token] if decoding.returns_processed else row[token]
            assert logprob == pytest.approx(float(expected), abs=5e-4)


@pytest.mark.parametrize("lengths", [(3, 9, 6, 9), (9, 3, 9), (2, 4, 6, 8, 10)])
def test_processed_log_probabilities_stay_with_their_texts_when_others_end(
    lm: AsyncLM, lengths: tuple[int, ...]
) -> None:
    """All texts of the batch want them, and vLLM moves the last text to the place of one that ended. At
    temperature 1 without cuts they are the model's."""

    async def drawn(mode: LogprobsMode) -> list[Any]:
        own: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "logprobs": 0}
        return await asyncio.gather(
            *(
                lm.generate([5 + n, 7], seed=n, max_tokens=length, logprobs_mode=mode, **own)
                for n, length in enumerate(lengths)
            )
        )

    processed, raw = asyncio.run(drawn("processed_logprobs")), asyncio.run(drawn("raw_logprobs"))
    for ours, models in zip(processed, raw, strict=True):
        assert ours.token_ids == models.token_ids
        assert ours.logprobs == pytest.approx(models.logprobs, abs=5e-4)


@pytest.mark.parametrize(
    "case",
    [
        {"logit_bias": {11: 3.0}, "repetition_penalty": 0.7, "presence_penalty": 1.0},
        {"bad_words": ["a", "the", "on"]},
        {"bad_words": ["capital", "\n-", " weight"]},
        {"stop": ["e"], "min_tokens": 2},
        {"ignore_eos": True, "min_tokens": 3, "logit_bias": {1: 9.0}},
        {"choice": ["a"], "min_tokens": 9},
        {"regex": "(a|b{8})c?", "min_tokens": 5},
        {"stop_token_ids": list(range(100)), "min_tokens": 2, "include_stop_str_in_output": True},
        {"ignore_eos": True, "logit_bias": {1: 9.0}, "skip_special_tokens": False},
        {"logit_bias": {SECOND_END: 100.0}},
        {"logit_bias": {SECOND_END: 100.0}, "min_tokens": 3},
        {"logit_bias": {SECOND_END: 9.0}, "ignore_eos": True, "min_tokens": 3},
        {"logit_bias": {SECOND_END: 100.0}, "include_stop_str_in_output": True},
    ],
    ids=str,
)
def test_the_transformers_engine_draws_the_same_greedy_texts(
    lm: AsyncLM, oracle: AsyncLM, case: dict[str, Any]
) -> None:
    options = {"temperature": 0.0, "max_tokens": 10, "logprobs": 0} | case
    for ours, theirs in zip(
        lm.batch_generate_sync(PROMPTS, **options),
        oracle.batch_generate_sync(PROMPTS, **options),
        strict=True,
    ):
        assert ours.token_ids == theirs.token_ids
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
        assert ours.stop_reason == theirs.stop_reason
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-4)


CUT: list[dict[str, Any]] = [
    {},
    {"skip_special_tokens": False, "stop": ["A", "r"], "include_stop_str_in_output": True},
    {"logit_bias": {"last": 100.0}, "stop": "🌶", "max_tokens": 1},
]


@pytest.mark.parametrize("case", CUT, ids=str)
async def test_of_a_prompt_that_ends_inside_a_character_nothing_is_in_the_text(
    lm: AsyncLM, oracle: AsyncLM, case: dict[str, Any]
) -> None:
    *prompt, last = lm.encode("A red 🌶")
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 9} | case
    if "logit_bias" in case:
        options["logit_bias"] = {last: 100.0}
    ours, theirs = await lm.generate(prompt, **options), await oracle.generate(prompt, **options)
    assert drawn_of(ours) == drawn_of(theirs)
    assert not ours.text.startswith("A red")
    stream = lm.stream(prompt, **options)
    assert "".join(delta.text for delta in await deltas_of(stream)) == ours.text
    # As many tokens before it change nothing.
    longer = await lm.generate([*prompt * 3, *prompt], **options)
    assert "A red" not in longer.text


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}


ODD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 30},
        "s": {"type": "string", "minLength": 2, "maxLength": 3},
        "l": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
    },
    "patternProperties": {"^x": {"type": "null"}},
    "additionalProperties": False,
    "required": ["n", "s", "l"],
}


async def test_structures_of_all_kinds_have_one_backend_within_a_flush(lm: AsyncLM) -> None:
    """vLLM opens the backend that the first request names, and refuses others from 0.33 on."""

    async def is_whole(schema: dict[str, Any], seed: int) -> bool:
        text = await lm.generate([1, 2], json_schema=schema, max_tokens=150, seed=seed)
        if not text.truncated:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text.text))
        return not text.truncated

    found: Any = await asyncio.gather(
        *(is_whole(each, seed) for seed, each in enumerate([ODD, SCHEMA] * 8)),
        lm.generate([1, 2], regex="[0-9]{3}", max_tokens=20, seed=2),
        lm.generate([1, 2], choice=["yes", "no"], max_tokens=9, seed=3),
        lm.generate([1, 2], max_tokens=4, seed=4),
        lm.next_token_logprobs([1, 2]),
    )
    *whole, digits, word, plain, row = found
    assert sum(whole[::2]) > 2
    assert sum(whole[1::2]) > 2
    assert len(digits.text) == 3
    assert digits.text.isdigit()
    assert word.text in ("yes", "no")
    assert len(plain.token_ids) <= 4
    assert float(row.logsumexp(0)) == pytest.approx(0.0, abs=1e-4)
    manager = core_of(lm).structured_output_manager
    assert isinstance(manager.backend, GuidedStructures)
    assert getattr(manager, "backend_name", None) in (None, "guidance")


def test_another_backend_is_refused_before_the_weights_are_read(llama: Path) -> None:
    options = OPTIONS | {"structured_outputs_config": {"backend": "xgrammar"}}
    with pytest.raises(InvalidRequest, match="names the backend 'xgrammar': give 'auto'"):
        genrt.load(str(llama), engine_options=options)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"json_schema": {"enum": []}}, "json_schema: the JSON schema allows no value"),
        ({"json_schema": {"unevaluatedItems": False}}, "'unevaluatedItems'"),
        ({"json_schema": {"$ref": "#"}}, "json_schema: no text has this structure"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"grammar": 'root ::= root "a"'}, "grammar: the EBNF grammar derives no text"),
        ({"regex": "("}, "regex"),
        ({"regex": "\\AParis"}, "regex: the regular expression"),
        ({"regex": "[ab]{3}", "bad_words": ["a", "b"]}, "regex: no token can follow"),
        ({"logprobs": 50}, ""),
        ({"split_reasoning": True}, "split_reasoning needs the parser of the model's reasoning"),
    ],
)
async def test_what_is_refused_fails_alone(lm: AsyncLM, bad: dict[str, Any], message: str) -> None:
    before = await lm.generate([1, 2], max_tokens=2, seed=1)
    good, refused, same = await asyncio.gather(
        lm.generate([1, 2], choice=["yes"], max_tokens=9),
        lm.generate([1, 2], max_tokens=9, **bad),
        lm.generate([1, 2], max_tokens=2, seed=1),
        return_exceptions=True,
    )
    assert isinstance(refused, InvalidRequest)
    assert message in str(refused)
    assert isinstance(good, Completion)
    assert good.text == "yes"
    assert isinstance(same, Completion)
    assert drawn_of(same) == drawn_of(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {1: 1.0, 2: 1.0, 3: 1.0}}, "logit_bias, of tokens: .* 2 at most, got 3"),
        ({"stop_token_ids": [1, 2, 3], "min_tokens": 1}, "min_tokens, of tokens that end"),
        ({"bad_words": [[1], [2], [3]]}, "bad_words, of tokens"),
    ],
)
def test_what_would_fail_a_step_of_runner_v2_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    from vllm import SamplingParams, envs
    from vllm.v1.worker.gpu.sample import logit_bias

    monkeypatch.setattr(logit_bias, "MAX_NUM_LOGIT_BIAS_TOKENS", 2)
    monkeypatch.setattr(logit_bias, "MAX_NUM_STOP_TOKEN_IDS", 2)
    monkeypatch.setattr(envs, "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", 2, raising=False)
    params = SamplingParams(**{name: options[name] for name in options if name != "bad_words"})
    params._bad_words_token_ids = options.get("bad_words")
    with pytest.raises(InvalidRequest, match=message):
        check_v2(params)
    check_v2(SamplingParams(max_tokens=3))


async def test_nothing_is_left_of_texts_however_they_end(lm: AsyncLM) -> None:
    for _ in range(3):
        async for _ in lm.stream([3], max_tokens=200, ignore_eos=True):
            break
    cancelled = [asyncio.create_task(lm.generate([n], ignore_eos=True)) for n in range(1, 12)]
    await passes()
    row = await lm.next_token_logprobs([3, 3])
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    with pytest.raises(TimedOut):
        await lm.generate([1, 2], ignore_eos=True, timeout=0.0)
    stopped = await lm.batch_generate([[1], [2]], stop=list("aeiou"), max_tokens=50, seed=1)
    assert {each.finish_reason for each in stopped} <= {"stop", "length"}
    assert torch.equal(row, await lm.next_token_logprobs([3, 3]))
    assert left_over(engine_of(lm)) == {}
    assert lm.statistics().batcher.in_flight == 0


async def test_a_mask_that_cannot_be_made_fails_its_step_alone(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward has run then, and no token is drawn: runner V1 waits for that."""
    before = await lm.generate([1, 2, 3], max_tokens=5, seed=1)
    scheduler = core_of(lm).scheduler
    make = scheduler.get_grammar_bitmask

    def made(output: Any) -> Any:
        if output.total_num_scheduled_tokens:
            raise RuntimeError("scripted")
        return make(output)

    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "get_grammar_bitmask", made)
        with pytest.raises(EngineFailed, match="scripted"):
            await lm.generate([1, 2], regex="[0-9]{3}", seed=1)
    assert (await lm.generate([1, 2], regex="[0-9]{3}", seed=1)).text.isdigit()
    assert (await lm.generate([1, 2, 3], max_tokens=5, seed=1)).token_ids == before.token_ids


REFUSED = """
    n prompt_logprobs prompt_logprob_token_ids prompt_logprob_start logprob_token_ids detokenize
    output_kind stream_interval spaces_between_special_tokens structured_outputs allowed_token_ids
    extra_args thinking_token_budget repetition_detection routed_experts_prompt_start
    skip_reading_prefix_cache skip_clone trace_decode_token_ids flat_logprobs watermarking
    output_text_buffer_length
"""
"""Fields of vLLM's SamplingParams that ``generate`` has no option for: other questions answer them, or
they change the law of the row."""


def test_every_field_of_vllms_sampling_parameters_is_an_option_or_refused() -> None:
    from vllm import SamplingParams

    theirs = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    own = {"structure", "logprobs_mode", "sampling_mask", "split_reasoning", "is_chat", "template"}
    ours = {field.name for field in dataclasses.fields(Decoding)} - own | {"seed"}
    assert theirs == ours | {*REFUSED.split()}
    assert not ours & {*REFUSED.split()}


# -- streams, and steps that are scheduled ahead ----------------------------------------------------


def asked_of(place: int, case: dict[str, Any]) -> dict[str, Any]:
    seed = {"seed": case["seed"] + place} if "seed" in case else {}
    return {"max_tokens": 12} | case | seed


def drawn_of(completion: Completion) -> tuple[Any, ...]:
    """What is the same whatever else is in the batch; log-probabilities are but for rounding."""
    ended = completion.finish_reason, completion.stop_reason
    return completion.text, completion.token_ids, len(completion.logprobs), *ended


async def deltas_of(stream: Any) -> list[Any]:
    return [delta async for delta in stream]


async def test_streams_bring_the_texts_that_generate_gives(lm: AsyncLM) -> None:
    asked = [
        (prompt, asked_of(place, case))
        for case in CASES
        for place, prompt in enumerate(PROMPTS[:2])
    ]
    streams = [lm.stream(prompt, **options) for prompt, options in asked]
    found = await asyncio.gather(*map(deltas_of, streams))
    whole = await asyncio.gather(*[lm.generate(prompt, **options) for prompt, options in asked])
    for stream, deltas, completion in zip(streams, found, whole, strict=True):
        streamed = stream.completion
        assert streamed is not None
        assert drawn_of(streamed) == drawn_of(completion)
        assert "".join(delta.text for delta in deltas) == completion.text
        assert sum((delta.token_ids for delta in deltas), ()) == completion.token_ids
        assert sum((delta.logprobs for delta in deltas), ()) == streamed.logprobs
        assert sum((delta.top_logprobs for delta in deltas), ()) == streamed.top_logprobs
    assert sum(map(len, found)) > 2 * len(found), "most come in parts"


async def test_a_text_is_the_same_however_its_tokens_are_read(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many at once; a stream's as it is told; one by one where a stop string may come."""
    read, process = list[str](), OutputProcessor.process_outputs

    def counted(self: OutputProcessor, several: Any, **named: Any) -> Any:
        read.extend(output.request_id for output in several)
        return process(self, several, **named)

    monkeypatch.setattr(OutputProcessor, "process_outputs", counted)

    async def drawn(**options: Any) -> list[tuple[str, tuple[int, ...]]]:
        read.clear()
        done = await asyncio.gather(
            *[
                lm.generate(PROMPTS[n % 4], max_tokens=n, seed=n, ignore_eos=True, **options)
                for n in range(1, 30)
            ]
        )
        return [(each.text, each.token_ids) for each in done]

    async def streamed(n: int) -> tuple[str, tuple[int, ...]]:
        deltas = lm.stream(PROMPTS[n % 4], max_tokens=n, seed=n, ignore_eos=True)
        told = [delta async for delta in deltas]
        return "".join(d.text for d in told), tuple(i for d in told for i in d.token_ids)

    plain = await drawn()
    assert len(read) < 29 * 30 / 2 / 4
    assert plain == await drawn(stop=["no text has this"])
    assert len(read) == 29 * 30 / 2
    assert plain == await asyncio.gather(*map(streamed, range(1, 30)))


async def test_steps_that_are_scheduled_ahead_draw_the_same_texts(
    lm: AsyncLM, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runner V2's way, by runner V1: it schedules ahead too, but no caller's tokens, so that resident
    sequences are off here; and greedily, as it does not know how many tokens were drawn."""
    from genrt.engines.vllm import opening

    asked = [
        (prompt, asked_of(place, case) | {"max_tokens": 12 + place, "temperature": 0.0})
        for case in [*CASES, {"regex": "[a-f]{3,9}"}]
        for place, prompt in enumerate(PROMPTS[:2])
    ]
    expected = await asyncio.gather(*[lm.generate(prompt, **options) for prompt, options in asked])
    monkeypatch.setattr(opening, "can_be_ahead", lambda _: True)
    with pytest.warns(RuntimeWarning, match="resident sequences are off"):
        ahead = await genrt.aload(str(checkpoint), engine_options=OPTIONS)
    async with ahead:
        core, scheduled = core_of(ahead), 0
        update, schedule = core.scheduler.update_from_output, core.scheduler.schedule

        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal scheduled
            scheduled += bool(core.batch_queue)
            return schedule(*arguments, **named)

        monkeypatch.setattr(core.scheduler, "schedule", counted)
        texts = asyncio.gather(*[ahead.generate(prompt, **options) for prompt, options in asked])
        long = asyncio.create_task(ahead.generate([9], max_tokens=200, ignore_eos=True))
        for number in range(5):
            await passes(50)
            before = ahead.statistics().engine.steps
            row = await ahead.next_token_logprobs([number, 3, 5])
            assert ahead.statistics().engine.steps - before <= 8, "a row waits for no text"
            assert float((row - await lm.next_token_logprobs([number, 3, 5])).abs().max()) < 1e-4
        long.cancel()
        assert list(map(drawn_of, await texts)) == list(map(drawn_of, expected))
        assert scheduled > 8
        assert left_over(engine_of(ahead)) == {}
        calls = itertools.count()

        def failing(*arguments: Any) -> Any:
            if next(calls) == 2:
                raise RuntimeError("scripted")
            return update(*arguments)

        monkeypatch.setattr(core.scheduler, "update_from_output", failing)
        with pytest.raises(EngineFailed, match="scripted"):
            await ahead.batch_generate(PROMPTS, max_tokens=30, ignore_eos=True)
        monkeypatch.undo()
        again = await ahead.generate(PROMPTS[0], temperature=0.0, max_tokens=12)
        assert again.token_ids == expected[0].token_ids
