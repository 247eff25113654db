"""lm.py, on the exact engine: what users hold, from wrong arguments to the end of a runtime's life."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Required, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import genrt
from genrt import loading
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import (
    Closed,
    InvalidAdapter,
    InvalidRequest,
    ModelNotFound,
    UnknownAdapter,
)
from genrt.lm import AsyncLM
from tests.inside import thread_of
from tests.scripted import Gate, ScriptedEngine

VOCAB_SIZE, MAX_MODEL_LEN = 12, 20
MODEL = NGram.random(VOCAB_SIZE, order=2, seed=1, eos_token_id=0)
ADAPTED = {
    name: NGram.random(VOCAB_SIZE, order=2, seed=seed) for name, seed in [("a", 2), ("b", 3)]
}
ENGINE_OPTIONS = {"max_model_len": MAX_MODEL_LEN}


@pytest.fixture
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", engine_options=ENGINE_OPTIONS) as lm:
        yield lm


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Path]:
    """Directories of adapters, each of which makes the model another one."""
    paths = {}
    for name, model in ADAPTED.items():
        paths[name] = path = tmp_path / name
        path.mkdir()
        save_file({"table": model.table}, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text("{}")
    return paths


def same(row: torch.Tensor, token_ids: Sequence[int], model: NGram = MODEL) -> bool:
    """The engine normalises once more, so the last bit may differ."""
    return torch.allclose(row, model.row(token_ids), atol=1e-6)


async def answered(call: Callable[[], Any]) -> Any:
    """What a method returns, or its await."""
    answer = call()
    return await answer if inspect.isawaitable(answer) else answer


# -- rows -------------------------------------------------------------------------------------


async def test_rows_are_the_models_own_in_every_way_of_asking(lm: AsyncLM) -> None:
    contexts = [[1], [2, 3], [4, 5, 6], [2, 3], [1] * MAX_MODEL_LEN]
    one = [await lm.next_token_logprobs(ids) for ids in contexts]
    sync = [lm.next_token_logprobs_sync(ids) for ids in contexts]
    for rows in (
        torch.stack(one),
        torch.stack(sync),
        await lm.batch_next_token_logprobs(contexts),
        lm.batch_next_token_logprobs_sync(contexts),
    ):
        assert rows.shape == (5, VOCAB_SIZE)
        assert (rows.dtype, rows.device) == (torch.float32, lm.device)
        assert all(same(row, ids) for row, ids in zip(rows, contexts, strict=True))
    assert lm.statistics().engine.rows == 4, "each context was computed once"


@pytest.mark.promise(number=12)
@pytest.mark.parametrize(
    "form", [tuple, np.array, torch.tensor, lambda ids: [np.int32(i) for i in ids]]
)
def test_token_ids_of_any_form_are_the_same_question(
    lm: AsyncLM, form: Callable[[list[int]], Any]
) -> None:
    row = lm.next_token_logprobs_sync([3, 4])
    assert torch.equal(lm.next_token_logprobs_sync(form([3, 4])), row)
    assert torch.equal(lm.batch_next_token_logprobs_sync([form([3, 4]), form([3, 4])])[1], row)
    assert lm.statistics().engine.rows == 1


def test_no_contexts_have_no_rows(lm: AsyncLM) -> None:
    rows = lm.batch_next_token_logprobs_sync([])
    assert (rows.shape, rows.dtype, rows.device) == ((0, VOCAB_SIZE), torch.float32, lm.device)
    assert lm.batch_sample_sync([], max_tokens=1) == []
    assert len(lm.batch_draw_sync([]).token_ids) == len(lm.score_sync([1], [])) == 0
    assert lm.batch_next_token_logprobs_sync([], device="cpu").shape == (0, VOCAB_SIZE)
    assert lm.statistics().engine.requests == 0


async def test_a_timeout_of_any_length_and_type_is_one(lm: AsyncLM) -> None:
    timeouts: list[Any] = [1e10, 1e308, 2**200, np.float32(1e38), np.float16(60.0), np.int8(100)]
    for timeout in timeouts:
        assert same(lm.next_token_logprobs_sync([3], timeout=timeout), [3])
        assert same(await lm.next_token_logprobs([4], timeout=timeout), [4])
        lm.clear_cache()


# -- wrong arguments --------------------------------------------------------------------------


WRONG_LOADS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"engine": "excat"}, InvalidRequest, "'vllm', 'transformers', 'exact', or a function"),
    ({"engine": "exact", "model": None}, InvalidRequest, "exact engine needs a model"),
    (
        {"engine": "exact", "engine_options": {"dtype": 1}},
        InvalidRequest,
        r"no options \['dtype'\]",
    ),
    ({"engine": "exact", "engine_options": {"max_model_len": 0}}, InvalidRequest, "at least 1"),
    ({"engine": "transformers", "model": 3}, InvalidRequest, "model must be a name, a directory"),
    ({"engine": "transformers"}, InvalidRequest, "got a value of type NGram"),
    ({"engine": "exact", "model": "/no/such/place"}, ModelNotFound, "NGram.save"),
    ({"engine": "transformers", "model": "/no/such/place"}, ModelNotFound, "/no/such/place"),
    ({"max_batchsize": 3}, InvalidRequest, "did you mean max_batch_size"),
    ({"engine": ScriptedEngine}, InvalidRequest, "must bring its own"),
    (
        {"engine": ScriptedEngine, "model": None, "engine_options": {"a": 1}},
        InvalidRequest,
        "must bring its own",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG_LOADS)
async def test_wrong_loads_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"model": MODEL, "engine": "exact", **arguments}
    with pytest.raises(error, match=message) as caught:
        genrt.load(**arguments)
    assert type(caught.value) is error
    with pytest.raises(error, match=message):
        await genrt.aload(**arguments)


@pytest.mark.parametrize("is_blocking", [True, False])
async def test_a_loading_that_takes_its_time_is_told_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_blocking: bool
) -> None:
    gate, told = Gate(), list[str]()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            gate.open()

    def slow() -> ScriptedEngine:
        gate.go_through()
        return ScriptedEngine()

    log, handler = logging.getLogger("genrt.loading"), Told()
    monkeypatch.setattr(loading, "PROGRESS_SECONDS", 0.001)
    caplog.set_level(logging.INFO, log.name)
    log.addHandler(handler)
    try:
        lm = genrt.load(engine=slow) if is_blocking else await genrt.aload(engine=slow)
    finally:
        log.removeHandler(handler)
    await lm.aclose()
    assert all(re.match(r"loading the embedded model on engine .*: \d+ s$", each) for each in told)


# -- samples ----------------------------------------------------------------------------------


async def test_equal_calls_without_a_seed_are_independent_draws(lm: AsyncLM) -> None:
    calls = [lm.sample([1], max_tokens=12) for _ in range(8)]
    drawn = await asyncio.gather(*calls)
    assert len(set(map(tuple, drawn))) > 1, "the same eight times has a chance far below 1e-9"
    assert lm.statistics().batcher.deduplicated == 0
    batch = await lm.batch_sample([[1]] * 8, max_tokens=12)
    assert len(set(map(tuple, batch))) > 1


async def test_a_seeded_batch_draws_each_context_with_a_seed_of_its_own(lm: AsyncLM) -> None:
    contexts = [[1], [1], [2, 3], [1]]
    batch = await lm.batch_sample(contexts, max_tokens=6, seed=40)
    each = [lm.sample_sync(ids, max_tokens=6, seed=40 + n) for n, ids in enumerate(contexts)]
    assert batch == each == lm.batch_sample_sync(contexts, max_tokens=6, seed=40)
    assert len(set(map(tuple, [batch[0], batch[1], batch[3]]))) > 1
    last = 2**63 - 1
    around = lm.batch_sample_sync([[1], [1]], max_tokens=6, seed=last)
    assert around == [lm.sample_sync([1], max_tokens=6, seed=seed) for seed in (last, 0)]


@pytest.mark.promise(number=18)
def test_all_bits_of_a_seed_count(lm: AsyncLM) -> None:
    """Of which torch's generator on a CPU takes 32: samples of others repeated each other."""
    seeds = [5 + high * 2**32 for high in (0, 1, 2, 2**20, 2**31 - 1)]
    samples = [lm.sample_sync([1], max_tokens=19, seed=seed) for seed in seeds]
    assert len(set(map(tuple, samples))) == len(seeds)
    assert samples == [lm.sample_sync([1], max_tokens=19, seed=seed) for seed in seeds]


# -- adapters ---------------------------------------------------------------------------------


@pytest.mark.promise(number=14)
async def test_adapters_never_share_a_row(lm: AsyncLM, adapters: dict[str, Path]) -> None:
    await lm.add_adapter("a", adapters["a"])
    lm.add_adapter_sync("b", str(adapters["b"]))
    assert lm.adapters == ("a", "b")
    for _ in range(2):
        rows = await asyncio.gather(
            *(lm.next_token_logprobs([n, 1], adapter=a) for n in range(4) for a in (None, "a", "b"))
        )
        for position, row in enumerate(rows):
            model = (MODEL, ADAPTED["a"], ADAPTED["b"])[position % 3]
            assert same(row, [position // 3, 1], model)
    assert lm.statistics().engine.rows == 12
    greedy = lm.sample_sync([1], max_tokens=1, temperature=0, adapter="a")
    assert greedy == [int(ADAPTED["a"].row([1]).argmax())]


class Meanwhile(Sequence[int]):
    """Token ids; something happens while they are read."""

    def __init__(self, token_ids: Sequence[int], happens: Callable[[], object]) -> None:
        self._token_ids = token_ids
        self._happens = happens

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, place: Any) -> Any:
        return self._token_ids[place]

    def __iter__(self) -> Iterator[int]:
        self._happens()
        return iter(self._token_ids)


ADAPTED_QUESTIONS: dict[str, Callable[[AsyncLM, Any], torch.Tensor]] = {
    "row": lambda lm, ids: lm.next_token_logprobs_sync(ids, adapter="x"),
    "rows": lambda lm, ids: lm.batch_next_token_logprobs_sync([[1], ids], adapter="x")[1],
    "rows in time": lambda lm, ids: lm.next_token_logprobs_sync(ids, adapter="x", timeout=60.0),
    "top": lambda lm, ids: lm.top_logprobs_sync(ids, MODEL.vocab_size, adapter="x").logprobs,
    "draw": lambda lm, ids: torch.tensor(lm.draw_sync(ids, temperature=0.0, adapter="x").token_id),
    "sample": lambda lm, ids: torch.tensor(
        lm.sample_sync(ids, max_tokens=3, temperature=0.0, adapter="x")
    ),
    "awaited": lambda lm, ids: asyncio.run(lm.next_token_logprobs(ids, adapter="x")),
    "awaited in time": lambda lm, ids: asyncio.run(
        lm.next_token_logprobs(ids, adapter="x", timeout=60.0)
    ),
}


@pytest.mark.promise(number=14)
@pytest.mark.parametrize("question", ADAPTED_QUESTIONS)
def test_an_adapter_that_another_thread_loads_while_a_question_is_made_answers_it(
    lm: AsyncLM, adapters: dict[str, Path], question: str
) -> None:
    ask = ADAPTED_QUESTIONS[question]

    def settle() -> None:
        """Return when the engine has let go of what it is to let go of."""
        for _ in range(2):
            thread_of(lm).call(lambda _: None).result()

    def load_again() -> None:
        lm.add_adapter_sync("x", adapters["b"])
        settle()

    def remove() -> None:
        lm.remove_adapter("x")
        settle()

    lm.add_adapter_sync("x", adapters["a"])
    found = ask(lm, Meanwhile([1, 2], load_again))
    assert torch.equal(found, ask(lm, [1, 2])), "as the new weights answer"
    with pytest.raises(UnknownAdapter, match="no adapter is named 'x'"):
        ask(lm, Meanwhile([1, 2], remove))
    assert lm.statistics().batcher.waiting == 0


async def test_adapters_of_one_name_loaded_at_once_are_bound_in_the_order_of_the_calls(
    lm: AsyncLM, adapters: dict[str, Path]
) -> None:
    for first, last in (("a", "b"), ("b", "a")):
        await asyncio.gather(
            lm.add_adapter("x", adapters[first]), lm.add_adapter("x", adapters[last])
        )
        assert same(await lm.next_token_logprobs([1], adapter="x"), [1], ADAPTED[last])


def test_an_adapter_that_does_not_fit_is_refused_and_not_bound(
    lm: AsyncLM, adapters: dict[str, Path]
) -> None:
    save_file({"other": torch.zeros(3)}, adapters["a"] / "adapter_model.safetensors")
    with pytest.raises(InvalidAdapter, match="does not fit"):
        lm.add_adapter_sync("x", adapters["a"])
    assert lm.adapters == ()


# -- the model --------------------------------------------------------------------------------


def test_the_size_of_steps_is_the_engines_whatever_a_flush_may_have() -> None:
    sizes = iter([3, 5])

    def engine() -> ExactEngine:
        return ExactEngine(MODEL, max_model_len=MAX_MODEL_LEN, max_batch_size=next(sizes))

    with genrt.load(engine=engine, max_batch_size=2) as lm:
        assert lm.max_batch_size == 3
        lm.restart()
        assert lm.max_batch_size == 5


def test_what_a_runtime_says_of_its_model(lm: AsyncLM) -> None:
    assert (lm.vocab_size, lm.max_model_len) == (VOCAB_SIZE, MAX_MODEL_LEN)
    assert lm.max_batch_size == 64
    assert lm.byte_vocab == list(MODEL.vocabulary)
    assert lm.str_vocab == [token.decode() for token in MODEL.vocabulary]
    text = lm.str_vocab[3] + lm.str_vocab[1]
    assert lm.encode(text) == [3, 1]
    assert lm.decode(np.array([3, 1])) == text
    assert lm.decode([]) == lm.decode(lm.encode("")) == ""


def test_a_model_without_a_tokenizer_says_so() -> None:
    with genrt.load(engine=ScriptedEngine) as lm:
        for need in (lambda: lm.tokenizer, lambda: lm.encode("a"), lambda: lm.byte_vocab):
            with pytest.raises(InvalidRequest, match="ask with token ids"):
                need()


# -- a runtime's life -------------------------------------------------------------------------


@pytest.mark.promise(number=20)
@pytest.mark.parametrize("way", ["with", "async with", "close", "aclose", "twice"])
async def test_a_closed_runtime_answers_nothing_more(way: str) -> None:
    lm = await genrt.aload(MODEL, engine="exact")
    assert repr(lm).startswith("AsyncLM(open, ExactEngine, vocab_size=12")
    await lm.next_token_logprobs([1])
    if way == "with":
        with lm as entered:
            assert entered is lm
    elif way == "async with":

        async def leave_by_an_error() -> None:
            async with lm as entered:
                assert entered is lm
                raise KeyError

        with pytest.raises(KeyError):
            await leave_by_an_error()
    elif way == "aclose":
        await lm.aclose()
    else:
        lm.close()
    if way == "twice":
        lm.close()
        await lm.aclose()
    assert repr(lm) == "AsyncLM(closed, ExactEngine, vocab_size=12)"
    asked: list[Callable[[], Any]] = [
        lambda: lm.next_token_logprobs([2]),
        lambda: lm.next_token_logprobs_sync([1]),
        lambda: lm.batch_next_token_logprobs([]),
        lambda: lm.batch_next_token_logprobs_sync([]),
        lambda: lm.batch_sample([], max_tokens=1),
        lambda: lm.batch_draw_sync([]),
        lambda: lm.score([1], []),
        lambda: lm.batch_score([], []),
        lambda: lm.prompt_logprobs([1]),
        lambda: anext(lm.prompt_rows([1, 2])),
        lambda: next(lm.prompt_rows_sync([1, 2])),
        lambda: lm.token_logprobs([1], []),
        lambda: lm.top_logprobs([1], 1),
    ]
    for ask in asked:
        with pytest.raises(Closed, match="load it again"):
            await answered(ask)
    s = lm.statistics()
    assert (s.batcher.questions, s.engine.rows) == (1, 1), "counters outlive the runtime"
    assert lm.vocab_size == VOCAB_SIZE
    lm.clear_cache()


async def test_adapters_of_a_closed_runtime(adapters: dict[str, Path]) -> None:
    lm = genrt.load(MODEL, engine="exact")
    lm.add_adapter_sync("x", adapters["a"])
    lm.close()
    with pytest.raises(Closed):
        await lm.add_adapter("y", adapters["b"])
    with pytest.raises(Closed):
        lm.add_adapter_sync("y", adapters["b"])
    lm.remove_adapter("x")
    assert lm.adapters == ()


@pytest.mark.promise(number=23)
def test_two_runtimes_know_nothing_of_each_other(lm: AsyncLM) -> None:
    with genrt.load(ADAPTED["a"], engine="exact") as other:
        assert same(lm.next_token_logprobs_sync([1]), [1])
        assert same(other.next_token_logprobs_sync([1]), [1], ADAPTED["a"])
    assert same(lm.next_token_logprobs_sync([2]), [2])


def test_statistics_are_frozen_and_add_up(lm: AsyncLM) -> None:
    lm.batch_next_token_logprobs_sync([[1], [2], [1]])
    lm.batch_next_token_logprobs_sync([[1], [3]])
    s = lm.statistics()
    for part in (s, s.batcher, s.cache, s.engine):
        name = next(iter(type(part).__dataclass_fields__))
        with pytest.raises(AttributeError):
            setattr(part, name, None)
    assert s.batcher.questions == 5
    assert s.batcher.questions == s.batcher.cached + s.batcher.deduplicated + s.engine.requests
    assert s.cache.hits == s.batcher.cached == 1
    assert s.cache.rows == s.engine.rows == 3


def test_a_runtime_and_one_with_a_seed_of_its_own_have_one_engine() -> None:
    with genrt.load(MODEL, engine="exact") as lm, genrt.load(MODEL, engine="exact") as other:
        seeded = lm._of_seed(3)
        assert seeded == lm != other
        assert {seeded, lm, other} == {lm, other}
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            pickle.dumps(lm)
        lm.close()
        with pytest.raises(Closed):
            seeded.draw_sync([1])


# -- the public signatures --------------------------------------------------------------------

TWINS = [
    "next_token_logprobs",
    "batch_next_token_logprobs",
    "sample",
    "batch_sample",
    "draw",
    "batch_draw",
    "token_logprobs",
    "top_logprobs",
    "score",
    "batch_score",
    "prompt_logprobs",
    "generate",
    "batch_generate",
    "chat",
    "add_adapter",
]


def parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, bool, bool]]:
    """By name: the annotation, whether it is keyword-only, whether it must be given; with options that
    are given together spelled out."""
    hints = get_type_hints(function)
    found: dict[str, tuple[Any, bool, bool]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            [options] = get_args(hints[name])
            for option, hint in get_type_hints(options, include_extras=True).items():
                required = get_origin(hint) is Required
                found[option] = (get_args(hint)[0] if required else hint, True, required)
        else:
            keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            found[name] = (hints.get(name), keyword, parameter.default is inspect.Parameter.empty)
    return found


@pytest.mark.parametrize("name", TWINS)
def test_a_sync_twin_takes_and_returns_what_its_twin_does(name: str) -> None:
    twin, sync = getattr(AsyncLM, name), getattr(AsyncLM, f"{name}_sync")
    assert inspect.iscoroutinefunction(twin)
    assert not inspect.iscoroutinefunction(sync)
    assert parameters(twin) == parameters(sync)
    assert get_type_hints(twin)["return"] == get_type_hints(sync)["return"]
    assert f"``{name}``" in sync.__doc__.splitlines()[0]
    assert "blocking" in sync.__doc__.splitlines()[0]


def test_load_and_aload_take_the_same() -> None:
    assert inspect.signature(genrt.load).parameters == inspect.signature(genrt.aload).parameters


def test_every_default_is_keyword_only() -> None:
    for function in (genrt.load, genrt.aload, *(getattr(AsyncLM, name) for name in TWINS)):
        for name, parameter in inspect.signature(function).parameters.items():
            keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            required = parameter.default is inspect.Parameter.empty
            assert required or keyword_only or name == "model", (function, name)
