"""vLLM's OpenAI application over a runtime on a CPU, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import AsyncIterator, Iterator
from itertools import product
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

import openai
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

import genrt
from genrt.errors import InvalidRequest
from genrt.lm import AsyncLM
from genrt.server import Server, serving
from genrt.server import openai as front_end
from genrt.server.client import RuntimeClient
from genrt.server.openai import HONOURED, front_end_options, options_of
from tests.waiting import until

pytestmark = pytest.mark.vllm

KEY = "open-sesame-42"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% for t in tools or [] %}{{ t['function']['name'] }}\n{% endfor %}assistant:"
)
OPTIONS = {
    "chat_template": TEMPLATE,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "enable_scale_out": True,
    "enable_prompt_tokens_details": True,
}
ASKED: list[Any] = [{"role": "user", "content": "Paris is a city."}]


@pytest.fixture(scope="module")
def checkpoint(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says how it would rather be drawn from."""
    copied = shutil.copytree(llama, tmp_path_factory.mktemp("says") / "model")
    said = {"temperature": 0.1, "top_k": 2, "repetition_penalty": 1.5, "max_new_tokens": 3}
    (copied / "generation_config.json").write_text(json.dumps(said | {"do_sample": True}))
    return copied


@pytest.fixture(scope="module")
def lm(checkpoint: Path, loras: tuple[Path, Path]) -> Iterator[AsyncLM]:
    options = {"enforce_eager": True, "max_num_seqs": 8, "enable_lora": True, "max_lora_rank": 8}
    with genrt.load(str(checkpoint), engine_options=options, seed=7) as lm:
        lm.add_adapter_sync("style", loras[0])
        yield lm


@pytest.fixture(scope="module")
def server(lm: AsyncLM) -> Iterator[Server]:
    with serving(lm, api_key=KEY, model="tiny", options=OPTIONS) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=str(server.url), headers={"authorization": f"Bearer {KEY}"}, timeout=120
    ) as http:
        yield http


async def test_models_are_the_base_and_the_adapters(client: openai.AsyncOpenAI) -> None:
    found = [each async for each in client.models.list()]
    assert [each.id for each in found] == ["tiny", "style"]
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="another", prompt="a")


async def test_one_law_draws_the_texts_of_clients_and_of_the_runtime(
    lm: AsyncLM, client: openai.AsyncOpenAI
) -> None:
    """Whatever the checkpoint's ``generation_config.json`` says."""
    for seed, heat in ((0, 1.0), (1, 0.7), (2, 1.0), (None, 0.0)):
        options: Any = {"max_tokens": 9, "temperature": heat, "seed": seed}
        found = await client.completions.create(
            model="tiny", prompt="Paris is", logprobs=2, **options
        )
        own = await lm.generate("Paris is", logprobs=2, **options)
        [choice] = found.choices
        assert (choice.text, choice.finish_reason) == (own.text, own.finish_reason)
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(own.logprobs, abs=1e-4)
        assert found.usage is not None
        assert found.usage.completion_tokens == len(own.token_ids)
        assert found.usage.prompt_tokens == len(own.prompt_token_ids)
        turn = await client.chat.completions.create(model="tiny", messages=ASKED, **options)
        said = await lm.chat(ASKED, chat_template_kwargs={"chat_template": TEMPLATE}, **options)
        assert (turn.choices[0].message.content or "") == said.text


async def test_a_prompt_that_ends_inside_a_character_is_in_no_text(
    lm: AsyncLM, client: openai.AsyncOpenAI
) -> None:
    prompt = lm.encode("A red 🌶")[:-1]
    for extra in ({}, {"stop": "red"}, {"extra_body": {"bad_words": ["a", "e", " capital"]}}):
        asked: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 9, "temperature": 0, **extra}
        options: Any = {"max_tokens": 9, "temperature": 0.0, "stop": extra.get("stop", ())}
        body: Any = extra.get("extra_body", {})
        own = await lm.generate(prompt, **options, **body)
        found = await client.completions.create(**asked)
        assert found.choices[0].text == own.text
        assert "A red" not in own.text
        found = await client.completions.create(echo=True, **asked)  # the prompt, and once
        before = found.choices[0].text.removesuffix(own.text)
        assert before.rstrip("\N{REPLACEMENT CHARACTER}") == "A red "
        parts = [
            each.choices[0].text
            async for each in await client.completions.create(stream=True, **asked)
        ]
        assert "".join(parts) == own.text


async def test_several_texts_and_the_prompt_before_them(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": "Paris is", "max_tokens": 6, "n": 3, "seed": 5}
    found = await client.completions.create(**asked, echo=True)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len({choice.text for choice in found.choices}) > 1
    assert all(choice.text.startswith("Paris is") for choice in found.choices)
    streamed = {0: "Paris is", 1: "Paris is", 2: "Paris is"}
    async for part in await client.completions.create(**asked, stream=True):
        for choice in part.choices:
            streamed[choice.index] += choice.text
    assert streamed == {choice.index: choice.text for choice in found.choices}


async def test_chats_and_their_streams_are_the_same_text(client: openai.AsyncOpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": ASKED,
        "max_tokens": 30,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = await client.chat.completions.create(**asked)
    text, logprobs, reasons, usage = "", [], [], None
    async for part in await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        usage = part.usage or usage
        for choice in part.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            if choice.logprobs is not None and choice.logprobs.content is not None:
                logprobs += [each.logprob for each in choice.logprobs.content]
    [choice] = whole.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert text == choice.message.content
    assert logprobs == pytest.approx([each.logprob for each in choice.logprobs.content], abs=1e-4)
    assert reasons == [choice.finish_reason]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 30
    assert all(len(each.top_logprobs) >= 2 for each in choice.logprobs.content)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


async def test_a_tool_is_called_with_what_its_schema_admits(client: openai.AsyncOpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": ASKED,
        "tools": [TOOL],
        "max_tokens": 120,
        "seed": 2,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    name = arguments = ""
    async for part in await client.chat.completions.create(**asked, stream=True):
        for choice in part.choices:
            for each in choice.delta.tool_calls or []:
                assert each.function is not None
                name += each.function.name or ""
                arguments += each.function.arguments or ""
    message = (await client.chat.completions.create(**asked)).choices[0].message
    [call] = cast("list[Any]", message.tool_calls)
    assert call.function.name == name == "weather"
    assert json.loads(call.function.arguments) == json.loads(arguments)
    assert json.loads(arguments)["city"] in ("Paris", "Rome")


TURNS: list[Any] = [
    *ASKED,
    {"role": "assistant", "content": "12 + 30</s>", "tool_calls": None},
    {"role": "user", "content": "Rome is a city."},
]


async def test_a_chat_begins_with_the_tokens_that_the_model_drew(
    lm: AsyncLM, http: httpx.AsyncClient
) -> None:
    end = cast("Any", lm.tokenizer).eos_token_id
    text = cast("Any", lm.tokenizer).decode([end])
    turns = [TURNS[0], {"role": "assistant", "content": f"12 + 30{text}"}, TURNS[2]]
    drawn = [*lm.encode("user: Paris is a city."), 7, 7, 9]  # as no tokenizer would have it
    written = (await http.post("/tokenize", json={"messages": turns})).json()["tokens"]
    expected = [*drawn, *written[written.index(end) :]]
    marked = [turns[0], turns[1] | {"prompt_token_ids": drawn, "generation_token_ids": [end]}]
    for asked in (
        {"messages": turns, "required_prefix_token_ids": drawn},
        {"messages": turns, "required_prefix_token_ids": [*drawn, end]},
        {"messages": [*marked, turns[2]]},
    ):
        found = (await http.post("/tokenize", json=asked)).json()["tokens"]
        assert found == expected
        chat = {"max_tokens": 6, "temperature": 0.0, "return_token_ids": True}
        for is_streamed in (False, True):
            options = {"stream": is_streamed}
            answer = await http.post("/v1/chat/completions", json=asked | chat | options)
            assert answer.status_code == 200, answer.text
            if not is_streamed:
                made = answer.json()
                own = await lm.generate(expected, max_tokens=6, temperature=0.0)
                assert made["prompt_token_ids"] == expected
                assert made["choices"][0]["token_ids"] == [*own.token_ids]
    empty = {"messages": turns, "required_prefix_token_ids": []}
    assert (await http.post("/tokenize", json=empty)).json()["tokens"] == written


@pytest.mark.promise(number=35)
async def test_what_is_no_prefix_of_a_chat_is_refused(lm: AsyncLM, http: httpx.AsyncClient) -> None:
    wrong: list[Any] = ["5", 5, {"a": 1}, [5, "a"], [5, None], [True], [-1], [10**9], [10**30]]
    for prefix, path in product([*wrong, [1.5], [[5]]], ("/v1/chat/completions", "/tokenize")):
        marked = TURNS[0] | {"prompt_token_ids": prefix, "generation_token_ids": [5]}
        for asked in (
            {"messages": TURNS, "required_prefix_token_ids": prefix},
            {"messages": [marked]},
        ):
            found = await http.post(path, json={"max_tokens": 2} | asked)
            assert found.status_code == 400, found.text
    end = cast("Any", lm.tokenizer).decode([cast("Any", lm.tokenizer).eos_token_id])
    turns = [TURNS[0], {"role": "assistant", "content": f"a{end}"}, TURNS[2]]
    for messages, prefix, why in (
        (ASKED, [5, 6], "no end token"),
        (turns, [5] * lm.max_model_len, "maximum context length"),
    ):
        chat = {"messages": messages, "required_prefix_token_ids": prefix, "max_tokens": 2}
        found = await http.post("/v1/chat/completions", json=chat)
        assert found.status_code == 400, found.text
        assert why in found.text


async def test_responses_tokens_and_metrics(
    lm: AsyncLM, http: httpx.AsyncClient, client: openai.AsyncOpenAI
) -> None:
    found = await client.responses.create(
        model="tiny", input="Paris", max_output_tokens=8, temperature=0
    )
    assert found.status in ("completed", "incomplete")
    ids = (await http.post("/tokenize", json={"model": "tiny", "prompt": "Paris is"})).json()
    assert ids["tokens"] == lm.encode("Paris is")
    asked = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "temperature": 0.0}}
    drawn = (await http.post("/inference/v1/generate", json=asked)).json()
    own = await lm.generate([5, 6], max_tokens=4, temperature=0.0)
    assert drawn["choices"][0]["token_ids"] == [*own.token_ids]
    text = (await http.get("/metrics")).text
    assert "genrt_engine_sampled_tokens_total" in text
    assert "http_requests_total" in text
    for path in ("/scale_elastic_ep", "/scale_elastic_ep/", "/start_profile"):
        assert (await http.post(path)).status_code == 404


WRONG: list[dict[str, Any]] = [
    *({"max_tokens": -1}, {"max_tokens": "x"}, {"temperature": -1}, {"n": 0}, {"n": 10**6}),
    *({"prompt": [10**9]}, {"prompt": [-1]}, {"prompt": []}, {"prompt": "a " * 5000}, {"top_p": 0}),
    *({"prompt": None}, {"prompt": {"a": 1}}, {"logprobs": 10**6}, {"stop": 3}, {"seed": "x"}),
    *({"vllm_xargs": {"genrt_ticket": 1}}, {"vllm_xargs": {"genrt_text_seed": 1}}),
    {"repetition_penalty": 1e300},
    *({"structured_outputs": {"regex": "("}}, {"structured_outputs": {"json": "{"}}),
    *({"structured_outputs": {"json": {"type": "integer", "minimum": 2, "maximum": 1}}},),
    *({"structured_outputs": {"regex": r"\AParis\Z"}},),
    *({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},),
    *({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}),
    *({"logprob_token_ids": [1, 2]}, {"allowed_token_ids": [10**9]}, {"logit_bias": {"x": 1}}),
]


@pytest.mark.promise(number=35)
async def test_a_wrong_request_is_refused_and_disturbs_nobody(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI
) -> None:
    right = {"model": "tiny", "prompt": "Paris", "max_tokens": 4}
    beside: Any = {"model": "tiny", "prompt": "Rome", "max_tokens": 20, "seed": 1}
    expected = (await client.completions.create(**beside)).choices[0].text
    for wrong in WRONG:
        other = asyncio.create_task(client.completions.create(**beside))
        for is_streamed in (False, True):
            body = right | {"stream": is_streamed} | wrong
            found = await http.post("/v1/completions", json=body)
            assert found.status_code in (200, 400), (wrong, found.text)
            if found.status_code == 200:  # an error after a stream's head, or an ignored option
                assert is_streamed or "logprob_token_ids" in wrong
        assert (await other).choices[0].text == expected


NAMED = {"type": "function", "function": {"name": "f"}}
WRONG_TOOLS: list[Any] = [
    [{"type": "function"}],
    [{"function": {}}],
    [{}],
    [None],
    ["f"],
    3,
    {"a": 1},
]


@pytest.mark.parametrize("tools", WRONG_TOOLS)
async def test_tools_without_their_members_are_refused_on_each_route(
    http: httpx.AsyncClient, tools: Any
) -> None:
    chat = {"model": "tiny", "messages": ASKED, "tools": tools, "tool_choice": NAMED}
    chunk = {"request_id": "1", "choices": [{"index": 0, "token_ids": [5]}]}
    derendered = {"model": "tiny", "chat_request": chat, "stream": True, "generate_chunk": chunk}
    bodies: dict[str, Any] = {
        "/v1/chat/completions": chat,
        "/v1/chat/completions/render": chat,
        "/v1/chat/completions/derender": derendered,
        "/v1/messages": chat | {"max_tokens": 4},
        "/v1/responses": {"model": "tiny", "input": "a", "tools": tools, "tool_choice": NAMED},
    }
    for path, body in bodies.items():
        answer = await http.post(path, json=body)
        assert 400 <= answer.status_code < 500, (path, answer.text)
        assert answer.json()["error"]["message"]


async def test_a_text_that_is_aborted_ends_with_what_there_is(lm: AsyncLM) -> None:
    client = RuntimeClient(lm)
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=kind, n=2)
        outputs = client.generate(tokens_input([5, 6]), params, "one")
        first = asyncio.ensure_future(anext(outputs))
        await until(lambda: lm.statistics().batcher.in_flight == 2, lm)
        await client.abort(["one", "unknown"])
        ends = [await first, *[output async for output in outputs]]
        reasons = [each.finish_reason for output in ends for each in output.outputs]
        assert reasons.count("abort") == 2
        assert ends[-1].finished
        await until(lambda: not lm.statistics().batcher.in_flight, lm)
    client.shutdown()


@pytest.mark.parametrize(
    "name",
    [
        *("no_such", "host", "port", "api_key", "middleware", "ssl_keyfile", "uds", "headless"),
        *("api_server_count", "tool_parser_plugin", "lora_modules", "max_model_len"),
    ],
)
def test_options_that_have_no_effect_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        front_end_options({name: 1})


def test_arguments_of_vllm_serve_are_told_apart() -> None:
    given = ["--max-num-seqs", "8", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    engine, front_end = options_of(given)
    assert engine == {"max_num_seqs": 8}
    assert front_end == {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    assert options_of([]) == ({}, {})
    with pytest.raises(InvalidRequest, match="--port"):
        options_of(["--port", "1"])
    of_033 = {"reasoning_effort_map"}
    assert of_033 >= HONOURED - vars(front_end_options({})).keys()


async def test_the_levels_of_the_programs_own_log_stay(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that vLLM imports for its application changes them, once in a process."""
    root, handler = logging.getLogger(), logging.NullHandler()
    build_app = vars(front_end)["build_app"]

    def importing(*given: Any) -> Any:
        for each in (root, handler):
            each.setLevel(logging.CRITICAL)
        return build_app(*given)

    monkeypatch.setattr(front_end, "build_app", importing)
    before = root.level
    root.addHandler(handler)
    try:
        async with serving(lm, options=OPTIONS):
            assert (root.level, handler.level) == (before, logging.NOTSET)
    finally:
        root.removeHandler(handler)


async def test_prefixes_open_nothing_and_pages_of_other_sites_get_nothing(lm: AsyncLM) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    text = {"prompt": [5], "max_tokens": 1}
    options = OPTIONS | {"root_path": "/api"}
    async with (
        serving(lm, api_key=KEY, model="tiny", options=options) as server,
        httpx.AsyncClient(base_url=str(server.url), timeout=120) as http,
    ):
        paths = (await http.get("/openapi.json", headers=key)).json()["paths"]
        for path in ("/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/systemone"):
            for prefix in ("", "/api", "/api/api"):
                assert (await http.post(f"{prefix}{path}", headers=key)).status_code == 404
            assert path not in paths
        page = {"origin": "https://evil.example"}
        for path in ("/v1/completions", "/api/v1/completions"):
            found = await http.post(path, json=text, headers=key | page)
            assert found.status_code == 200
            assert "access-control-allow-origin" not in found.headers
            assert (await http.post(path, json=text)).status_code == 401
            ask = page | {"access-control-request-method": "POST"}
            assert (await http.options(path, headers=ask)).status_code == 401
