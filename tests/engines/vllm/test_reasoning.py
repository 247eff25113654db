"""Reasoning told apart from texts by vLLM's parsers: of whole texts, of streams, beside structures, and
where there is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import LogprobsLists

import genrt
from genrt.engines.vllm.reasoning import Reasoning, ReasoningParsers
from genrt.errors import EngineFailed, InvalidRequest
from genrt.generation import generate_many_sync
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion, CompletionRequest, Decoding
from tests.engines.vllm.small import left_over
from tests.inside import engine_of, texts_of
from tests.small_models import make_llama, make_tokenizer

pytestmark = pytest.mark.vllm

MARKERS = ("<think>", "</think>", "<|im_start|>", "<|im_end|>")
FIRST = 310
"""The id of the first marker."""
BEGIN, END = FIRST, FIRST + 1

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinking is defined and not thinking %}<think></think>{% endif %}{% endif %}"
)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 32,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 2**26,
}
ASKED = [{"role": "user", "content": "Is it so?"}]
ENDS_SOON: dict[str, Any] = {"logit_bias": {END: 6.0}, "ignore_eos": True, "max_tokens": 24}
ENDS_LATER: dict[str, Any] = ENDS_SOON | {"logit_bias": {END: 4.0}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}

PLUGIN = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

@ReasoningParserManager.register_module("of_ones_own")
class OfOnesOwn(DeepSeekR1ReasoningParser):
    pass
"""


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_llama(tmp_path_factory.mktemp("thinker") / "model", tokenizer=False)
    tokenizer = make_tokenizer(FIRST)
    tokenizer.add_tokens([*("�" * n for n in range(2, 2 + FIRST - len(tokenizer))), *MARKERS])
    assert tokenizer.convert_tokens_to_ids("<think>") == BEGIN
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def lm(thinker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLM]:
    """With a parser that is a plugin in a file: DeepSeek's."""
    plugin = tmp_path_factory.mktemp("plugin") / "plugin.py"
    plugin.write_text(PLUGIN)
    named = {"reasoning_parser": "of_ones_own", "reasoning_parser_plugin": str(plugin)}
    with genrt.load(str(thinker), engine_options=OPTIONS | named) as opened:
        yield opened


async def test_a_chat_tells_its_reasoning_apart(lm: AsyncLM) -> None:
    async def check(seed: int) -> bool:
        written, completion = await asyncio.gather(
            lm.chat(
                ASKED, seed=seed, split_reasoning=False, skip_special_tokens=False, **ENDS_LATER
            ),
            lm.chat(ASKED, seed=seed, **ENDS_LATER),
        )
        assert written.reasoning == ""
        assert completion.token_ids == written.token_ids
        if completion.token_ids.count(END) > 1 or BEGIN in completion.token_ids:
            return False
        reasoning, _, text = written.text.partition("</think>")
        assert (completion.reasoning, completion.text) == (reasoning, text)
        assert END in completion.token_ids or completion.truncated
        return END in completion.token_ids

    assert sum(await asyncio.gather(*map(check, range(12)))) > 2


def in_pairs(take: Any) -> Any:
    """The texts' ``take``, but for outputs that come two by two, as with drafts."""
    held: dict[str, Any] = {}

    def taking(outputs: Any) -> Any:
        paired = []
        for output in outputs:
            before = held.pop(output.request_id, None)
            if before is not None:
                output.new_token_ids = before.new_token_ids + output.new_token_ids
                output.prefill_stats = before.prefill_stats
                parts = (each.new_logprobs[:3] for each in (before, output))
                several = [np.concatenate(each) for each in zip(*parts, strict=True)]
                output.new_logprobs = LogprobsLists(*several)
            elif output.finish_reason is None:
                held[output.request_id] = output
                continue
            paired.append(output)
        return take(paired)

    return taking


@pytest.mark.parametrize("drafts", [False, True], ids=["single tokens", "pairs"])
@pytest.mark.parametrize("stop", [[], ["e"], ["a", "er"]], ids=str)
async def test_a_stream_brings_what_a_chat_tells_apart(
    lm: AsyncLM, stop: list[str], drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if drafts:
        texts = texts_of(engine_of(lm))
        monkeypatch.setattr(texts, "_has_drafts", True)
        monkeypatch.setattr("genrt.engines.vllm.texts._without_drafts", lambda _: None)
        monkeypatch.setattr(texts, "take", in_pairs(texts.take))

    async def check(seed: int) -> bool:
        options: dict[str, Any] = ENDS_LATER | {"seed": seed, "stop": stop, "logprobs": 1}
        async with lm.stream_chat(ASKED, **options) as stream:
            deltas = [delta async for delta in stream]
        completion = stream.completion
        assert completion is not None
        assert "".join(delta.text for delta in deltas) == completion.text
        assert "".join(delta.reasoning for delta in deltas) == completion.reasoning
        assert tuple(t for delta in deltas for t in delta.token_ids) == completion.token_ids
        starts = [(delta.text_start, delta.reasoning_start) for delta in deltas]
        assert starts == sorted(starts)
        assert stream.partial == completion
        written = (await lm.chat(ASKED, split_reasoning=False, **options)).text
        # vLLM's two ways differ on stranger texts, such as half a character before the marker.
        if "<think>" in written or written.count("think>") > 1 or "�</think>" in written:
            return False
        whole = await lm.chat(ASKED, **options)
        assert (completion.reasoning, completion.text) == (whole.reasoning, whole.text)
        return bool(whole.reasoning)

    assert sum(await asyncio.gather(*map(check, range(16)))) > 3


def test_nothing_is_told_apart_where_the_prompt_has_ended_the_thinking(lm: AsyncLM) -> None:
    options: dict[str, Any] = {"seed": 1, "chat_template_kwargs": {"thinking": False}, **ENDS_SOON}
    expected = lm.chat_sync(ASKED, split_reasoning=False, **options)
    found = lm.chat_sync(ASKED, **options)
    assert (found.reasoning, found.text) == ("", expected.text)
    with lm.stream_chat_sync(ASKED, **options) as stream:
        assert "".join(delta.text for delta in stream) == expected.text


def test_only_chats_are_split_unless_it_is_said_otherwise(lm: AsyncLM) -> None:
    options: dict[str, Any] = {"seed": 3, **ENDS_SOON}
    ids, split = lm.encode_chat(ASKED), lm.chat_sync(ASKED, **options)
    whole = lm.generate_sync(ids, **options)
    assert whole.reasoning == ""
    assert split.reasoning
    assert lm.chat_sync(ASKED, split_reasoning=False, **options).text == whole.text
    again = lm.generate_sync(ids, split_reasoning=True, **options)
    assert (again.reasoning, again.text) == (split.reasoning, split.text)
    [(_, completion)] = generate_many_sync(lm, [ASKED], **options)
    assert isinstance(completion, Completion)
    assert (completion.reasoning, completion.text) == (split.reasoning, split.text)


@pytest.mark.parametrize("structure", [{"json_schema": SCHEMA}, {"choice": ["yes", "no"]}], ids=str)
async def test_a_structure_is_that_of_the_text_after_the_reasoning(
    lm: AsyncLM, structure: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "logit_bias": {END: 6.0}, **structure}

    def check(text: str) -> None:
        if "choice" in structure:
            assert text in ("yes", "no")
        else:
            assert json.loads(text)["a"] in (1, 22)

    thought = 0
    for completion in await asyncio.gather(
        *[lm.chat(ASKED, seed=seed, **options) for seed in range(6)]
    ):
        if not completion.truncated and END in completion.token_ids:
            check(completion.text)
            thought += bool(completion.reasoning)
    assert thought > 1
    check((await lm.chat(ASKED, seed=1, split_reasoning=False, **options)).text)
    check((await lm.generate([1, 2, 3], seed=1, **options)).text)


@pytest.mark.parametrize("method", ["split", "_parse"])
async def test_a_parser_that_fails_fails_its_own_text(
    lm: AsyncLM, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = await lm.chat(ASKED, seed=1, **ENDS_SOON)
    calls = 0

    def failing(self: Reasoning, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise EngineFailed("vLLM's reasoning parser failed: a marker nobody expects")
        return kept(self, *args, **kwargs)

    kept = getattr(Reasoning, method)
    monkeypatch.setattr(Reasoning, method, failing)
    if method == "split":
        for _ in range(2):
            assert (await lm.chat(ASKED, seed=1, **ENDS_SOON)).text == good.text
        with pytest.raises(EngineFailed, match="nobody expects"):
            await lm.chat(ASKED, seed=1, **ENDS_SOON)
    else:
        with pytest.raises(EngineFailed, match="nobody expects"):
            async for _ in lm.stream_chat(ASKED, seed=1, **ENDS_SOON):
                pass
    assert (await lm.chat(ASKED, seed=1, **ENDS_SOON)).text == good.text
    assert left_over(engine_of(lm)) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"reasoning_parser": "r1"},
            "Reasoning parser 'r1' not found. Available parsers: .*deepseek_r1",
        ),
        ({"reasoning_parser": "deepseek_r1"}, "could not locate think start/end tokens"),
        ({"reasoning_parser": "hf"}, "The hf parser requires `response_template`"),
        ({"reasoning_parser": "qwen3", "skip_tokenizer_init": True}, "needs a tokenizer"),
    ],
)
def test_a_parser_that_does_not_fit_is_refused_before_the_model_is_loaded(
    llama: Path, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from genrt.engines.vllm import opening

    monkeypatch.setattr(opening, "LLMEngine", None)
    with pytest.raises(InvalidRequest, match=message):
        genrt.load(str(llama), engine_options=OPTIONS | options)


TEXTS = (
    "<think>a b\nc</think>\n\nhello",
    "a b\nc</think>hello",
    "just text",
    "<think>no end",
    "<think></think>x",
    " spaced </think>  y  ",
)
"""What models write; vLLM's two ways to parse differ on stranger ones, with text before a beginning."""


@pytest.mark.parametrize(
    "name", ["deepseek_r1", "deepseek_v3", "qwen3", "ernie45", "glm45", "holo2"]
)
@pytest.mark.parametrize("held_back", [0, 3])
def test_token_by_token_and_at_once_are_the_same(thinker: Path, name: str, held_back: int) -> None:
    from transformers import AutoTokenizer
    from vllm.config import ModelConfig, StructuredOutputsConfig

    class Config:
        model_config = ModelConfig(str(thinker))
        structured_outputs_config = StructuredOutputsConfig(reasoning_parser=name)

    parsers, tokenizer = ReasoningParsers(Config()), AutoTokenizer.from_pretrained(thinker)
    for thinking in (True, False):
        template = (("thinking", thinking), ("enable_thinking", thinking))
        decoding = Decoding(9, is_chat=True, template=template)
        request = CompletionRequest((FIRST + 2,), decoding)
        for text in TEXTS:
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            whole = parsers.begin(request).split(token_ids, text)
            bits = parsers.begin(request)
            for place, token_id in enumerate(token_ids[:-1]):
                written = tokenizer.decode(token_ids[: place + 1])
                bits.add([token_id], written, held_back)
                assert whole[0].startswith(bits.reasoning)
            assert bits.end(token_ids, text) == whole
