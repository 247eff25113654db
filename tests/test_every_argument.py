"""Every public call and each of its parameters, with wrong values: InvalidRequest, or it works.

Never an error of torch, NumPy, Python or a tokenizer; and the runtime answers the next question.
``refusals.json`` has the messages, which a reader checks: after a change, run
``python -m tests.test_every_argument`` and review the difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import math
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints
from unittest import mock

import numpy as np
import pytest
import torch

import genrt
from genrt import constraints, inference
from genrt.byte_lm import ByteLM
from genrt.contexts import Context
from genrt.engines.exact import NGram
from genrt.errors import EngineDied, InvalidRequest, TimedOut
from genrt.generation import (
    Conversation,
    Failed,
    Item,
    Job,
    generate_many,
    generate_valid,
    rollout,
    rollout_samples,
    splice_turn,
)
from genrt.inference import SMC, BestOfN, Law, MetropolisHastings, Program, Rejection, TextModel
from genrt.interop.nemo_rl import NemoGeneration
from genrt.lm import AsyncLM, ConnectOptions
from genrt.loading import LoadOptions
from genrt.populations import Population

GOLDEN = Path(__file__).with_name("refusals.json")


async def _draws(lm: AsyncLM) -> int:
    return (await lm.draw([1])).token_id


CONTEXTS = {"contexts": [[1], [2]]}
CONTEXT = {"token_ids": [1]}
RIGHT: dict[str, dict[str, Any]] = {
    "next_token_logprobs": CONTEXT,
    "batch_next_token_logprobs": CONTEXTS,
    "sample": {**CONTEXT, "max_tokens": 1},
    "batch_sample": {**CONTEXTS, "max_tokens": 1},
    "draw": CONTEXT,
    "batch_draw": CONTEXTS,
    "token_logprobs": {**CONTEXT, "candidates": [1]},
    "top_logprobs": {**CONTEXT, "k": 1},
    "score": {**CONTEXT, "continuation": [1]},
    "batch_score": {**CONTEXTS, "continuations": [[1], [2, 3]]},
    "prompt_logprobs": CONTEXT,
    "teacher": {**CONTEXT, "top": 2},
    "batch_teacher": {"texts": [[1], [2, 3]], "top": 2},
    "prompt_rows": {**CONTEXT, "start": 1, "chunk": 2},
    "encode": {"text": "a"},
    "encode_chat": {"messages": [{"role": "user", "content": "a"}]},
    "decode": CONTEXT,
    "context": {"prompt": [1]},
    "population": {"prompt": [1], "n": 2},
    "generate": {"prompt": [1], "max_tokens": 1},
    "batch_generate": {"prompts": [[1], [2]], "max_tokens": 1},
    "chat": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "stream": {"prompt": [1], "max_tokens": 1},
    "warm_up": {"prefix": [1]},
    "cool_down": {"prefix": [1]},
    "run": {"work": _draws},
    "stream_chat": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
"""Arguments of each question that are right; the ``_sync`` twins take the same."""

ELSEWHERE = {"add_adapter", "remove_adapter", "clear_cache", "statistics", "close", "restart"}
ELSEWHERE |= {"adapter_files", "aclose", "arestart", "connect"}
ELSEWHERE |= {"update_weights", "pause", "resume", "sleep", "wake_up", "reset_prefix_cache"}
"""What asks nothing; ``CALLS`` has those with options."""


def wrong_values() -> list[Any]:
    """Values of every kind; iterators among them are fresh."""
    return [
        *(None, True, 0, -1, 1.5, math.nan, math.inf, 1e39, 1e-46, 2**63, 2**70, 10**5000, 1j),
        *("", "text", "\ud800", b"bytes", bytearray(2), memoryview(b"ab"), object(), ..., type),
        *([], (), {}, set(), [[]], [None], ["a"], [-1], [2**70], [1.5], [True], [math.nan]),
        *([[1], 2], {"input_ids": [1]}, {1: 2}, {1}, {"a"}, range(3), range(-3, 0)),
        *(iter([1]), (x for x in [1])),
        *(np.array(1), np.array([1.0]), np.array([[1]]), np.array(["a"]), np.array([None])),
        *(np.zeros(3, "m8[s]"), np.zeros(2, [("a", int)]), np.float16("nan"), np.uint64(2**64 - 1)),
        *(np.longdouble("1e4000"), np.array([1], ">i8"), np.zeros((0, 3), int)),
        np.zeros((2, 2, 2)),
        *(torch.tensor(1), torch.tensor([1.0]), torch.tensor([1j]), torch.tensor([True])),
        *(torch.tensor([[1]]), torch.tensor([1]).to_sparse(), torch.ones(2, 2).to_sparse()),
        *(torch.tensor([1], device="meta"), torch.ones(2, 2, device="meta"), torch.zeros(0, 3)),
        *(torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.bfloat16)),
        *("cuda:99", "meta", "nowhere", torch.device("meta"), [torch.tensor([1], device="meta")]),
    ]


MODEL = NGram.random(11, order=1, seed=2, zeros=0.3)
SHORT = {"max_model_len": 32}
LETTERS = NGram.random([b"a", b"b", b"ab", b""], seed=3, eos_token_id=3)


@pytest.fixture(scope="module")
def exact() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", engine_options=SHORT) as lm:
        yield lm


@pytest.fixture(scope="module")
def letters() -> Iterator[AsyncLM]:
    with genrt.load(LETTERS, engine="exact", engine_options=SHORT) as lm:
        yield lm


@pytest.fixture(scope="module")
def transformers(llama: Path) -> Iterator[AsyncLM]:
    with genrt.load(llama, engine="transformers", engine_options=SHORT) as lm:
        yield lm


def parameters(function: Callable[..., Any]) -> list[str]:
    """The parameters of a call, with the options of its TypedDict."""
    found = inspect.signature(function).parameters.values()
    names = [
        each.name for each in found if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if any(each.kind is each.VAR_KEYWORD for each in found):
        made = vars(function)["__init__"] if isinstance(function, type) else function
        hints = get_type_hints(made)
        [options] = get_args(hints["options"])
        names += get_type_hints(options)
    return [name for name in names if name not in ("self", "lm")]


# -- questions of a runtime -------------------------------------------------------------------------

QUESTIONS = [
    (name, parameter)
    for name in RIGHT
    for parameter in parameters(getattr(AsyncLM, name))
    if not (parameter == "token_ids" and "contexts" in RIGHT[name])
]


def test_every_public_method_is_in_the_table() -> None:
    methods = {
        name.removesuffix("_sync")
        for name, member in inspect.getmembers(AsyncLM, callable)
        if not name.startswith("_")
    }
    assert methods == RIGHT.keys() | ELSEWHERE


def asked(lm: AsyncLM, name: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    method = getattr(lm, f"{name}_sync" if hasattr(lm, f"{name}_sync") else name)
    if name in ("stream", "stream_chat", "prompt_rows"):
        return lambda: list(method(**arguments))
    return lambda: method(**arguments)


REFUSALS = InvalidRequest, genrt.InvalidConstraint, genrt.ModelNotFound, genrt.InvalidWeights


def refusals(
    call: Callable[[Any], Any], raw: list[str], taken: Sequence[int] | None = None
) -> dict[int, str]:
    """The messages for all wrong values, or for those with these numbers; other errors than refusals are
    added to ``raw``."""
    found: dict[int, str] = {}
    for number, value in enumerate(wrong_values()):
        if taken is not None and number not in taken:
            continue
        try:
            call(value)
        except REFUSALS as error:
            found[number] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        except TimedOut:
            pass
        except Exception as error:
            raw.append(f"{type(value).__name__}: {type(error).__name__}: {error}"[:200])
    return found


def _plain(message: str) -> str:
    """A message without the refused value, and without parts that differ from run to run."""
    message = re.sub(r"(/tmp|/var)/[^ :,)]*", "/…", message)
    message = re.sub(r"\bgot [^;:]*", "got …", message)
    message = re.sub(
        r"(there is|is a|has|bytes) [^ ]+( of shape [^ ]*)?(?= *[;:]|$)", r"\1 …", message
    )
    message = re.sub(r": .* is no constraint", ": … is no constraint", message)
    message = re.sub(r"\b(is|are|has|was given|gave) .*?(?=( in it)?[:;] give)", r"\1 …", message)
    message = re.sub(r"(not JSON compliant): .*", r"\1", message)  # Python 3.12 says what is not
    message = re.sub(r"\d+(, \d+)*", "N", message)
    return message if len(message) <= 200 else message[:200] + "…"


@functools.cache
def golden() -> dict[str, set[str]]:
    """The messages of each call and parameter."""
    found: dict[str, set[str]] = {}
    for message, places in json.loads(GOLDEN.read_text()).items():
        for place in places.split():
            found.setdefault(place, set()).add(message)
    return found


def compare(name: str, parameter: str, found: dict[int, str]) -> None:
    assert {*map(_plain, found.values())} == golden().get(f"{name}({parameter})", set()), (
        f"a message of {name}({parameter}) has changed: run python -m tests.test_every_argument, and "
        "review the difference"
    )


@pytest.mark.promise(number=29)
@pytest.mark.parametrize("name", RIGHT)
def test_a_wrong_argument_is_refused_or_taken_and_disturbs_nobody(
    name: str, exact: AsyncLM, transformers: AsyncLM
) -> None:
    """What one engine takes, the other is asked too."""
    for parameter in (each for question, each in QUESTIONS if question == name):
        taken: list[int] | None = None
        for lm in (exact, transformers):
            raw: list[str] = []
            failed = lm.statistics().engine.failed

            def ask(value: Any, lm: AsyncLM = lm, parameter: str = parameter) -> Any:
                return asked(lm, name, {**RIGHT[name], parameter: value})()

            found = refusals(ask, raw, taken)
            assert not raw, "\n".join([parameter, *raw])
            assert lm.statistics().engine.failed == failed
            assert len(lm.sample_sync([1], max_tokens=2)) == 2
            if taken is None:
                compare(f"AsyncLM.{name}", parameter, found)
                taken = [number for number, _ in enumerate(wrong_values()) if number not in found]


@pytest.mark.parametrize("name", [name for name in RIGHT if hasattr(AsyncLM, f"{name}_sync")])
async def test_what_is_awaited_refuses_what_its_blocking_twin_refuses(
    name: str, exact: AsyncLM
) -> None:
    for parameter in RIGHT[name]:
        for value in (None, "text", 1.5, torch.tensor([1], device="meta"), {"input_ids": [1]}):
            if value is None and parameter == "max_tokens" and "sample" not in name:
                continue  # as many as there is room for
            if value is None and parameter == "chunk":
                continue  # as many as 64 MiB have
            arguments = {**RIGHT[name], parameter: value}
            with pytest.raises(InvalidRequest) as blocking:
                asked(exact, name, arguments)()
            with pytest.raises(InvalidRequest) as awaited:
                await getattr(exact, name)(**arguments)
            assert str(awaited.value) == str(blocking.value)


# -- other calls ------------------------------------------------------------------------------------

BATCH = {"input_ids": torch.tensor([[1, 2], [2, 0]]), "input_lengths": torch.tensor([2, 1])}
NEMO = {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": None, "_pad_token_id": 0}
ROLLOUT = {**BATCH, "pad_value": 0, "max_new_tokens": 1}
TURN = [{"role": "user", "content": "a"}]


def awaited(coroutine: Any) -> Any:
    """The result of a coroutine, or all values of an asynchronous generator."""

    async def main() -> Any:
        if isinstance(coroutine, AsyncGenerator):
            return [each async for each in coroutine]
        return await coroutine

    return asyncio.run(main())


@functools.cache
def a_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder with a row, for all jobs: making and removing one costs more than a job."""
    folder = tempfile.TemporaryDirectory()
    Path(folder.name, "in.jsonl").write_text('{"text": "a"}\n')
    return folder


def a_job(lm: AsyncLM, **arguments: Any) -> None:
    folder = a_folder().name
    Job(**{"input": Path(folder, "in.jsonl"), "output": Path(folder, "out.jsonl")} | arguments)


def a_model(lm: AsyncLM) -> TextModel:
    return TextModel(lm, [0], max_tokens=2)


def loaded(lm: AsyncLM, **arguments: Any) -> None:
    given: dict[str, Any] = {"model": LETTERS, "engine": "exact"}
    with mock.patch("genrt.loading.Actors", side_effect=TimedOut("taken")):
        genrt.load(**given | arguments).close()


def connected(lm: AsyncLM, **arguments: Any) -> None:
    with contextlib.suppress(EngineDied):  # there is no server
        awaited(AsyncLM.connect(**{"url": "http://127.0.0.1:1"} | arguments))


def paused(lm: AsyncLM, **arguments: Any) -> None:
    lm.pause_sync(**arguments)
    lm.resume()


def of_context(lm: AsyncLM, method: str, **arguments: Any) -> None:
    with lm.context([1, 2]) as context:
        asked(cast("Any", context), method, arguments)()


def of_population(lm: AsyncLM, method: str, **arguments: Any) -> None:
    with lm.population([[1, 2], [1]]) as population:
        asked(cast("Any", population), method, arguments)()


async def _program(p: Any) -> int:
    return int(await p.sample([0]))


Call = tuple[Callable[..., Any], dict[str, Any], Sequence[str]]
"""A call with a runtime and keyword arguments; arguments that are right; the parameters to try."""

MANY = {"items": [[1], [2]], "max_tokens": 1}
VALID = {"prompts": [1], "validate": str, "target": 1, "max_tokens": 1, "max_attempts": 2}
CALLS: dict[str, Call] = {
    "load": (
        loaded,
        {},
        [
            "model",
            *get_type_hints(LoadOptions, vars(sys.modules["genrt.loading"]) | {"NGram": NGram}),
        ],
    ),
    "generate_many": (
        lambda lm, **a: awaited(generate_many(lm, **a)),
        MANY,
        parameters(generate_many),
    ),
    "generate_valid": (
        lambda lm, **a: awaited(generate_valid(lm, **a)),
        VALID,
        parameters(generate_valid),
    ),
    "rollout": (lambda lm, **a: awaited(rollout(lm, **a)), ROLLOUT, parameters(rollout)),
    "rollout_samples": (
        lambda lm, **a: awaited(rollout_samples(lm, **a)),
        ROLLOUT,
        [*BATCH, "pad_value"],
    ),
    "NemoGeneration": (
        lambda lm, **a: NemoGeneration(lm, NEMO, **a),
        {},
        [*parameters(rollout)[2:], "server_url"],
    ),
    "NemoGeneration.generate": (
        lambda lm, **a: NemoGeneration(lm, NEMO).generate(**a),
        {"data": BATCH},
        ["data", "greedy"],
    ),
    "NemoGeneration.generate_async": (
        lambda lm, **a: awaited(NemoGeneration(lm, NEMO).generate_async(a)),
        BATCH,
        [*BATCH, "stop_strings"],
    ),
    "splice_turn": (
        lambda lm, **a: splice_turn(**a),
        {"model_ids": [1], "template_prefix_ids": [1], "template_ids": [1], "eos_token_id": 1},
        parameters(splice_turn),
    ),
    "Conversation": (
        lambda lm, **a: Conversation(lm, **a),
        {"messages": TURN, "end_token_id": 3},
        ["messages", "end_token_id", "message_of"],
    ),
    "Job": (a_job, {"prompt_template": "{text}"}, parameters(Job)),
    "TextModel": (TextModel, {"prompt": [0], "max_tokens": 2}, parameters(TextModel)),
    "SMC": (
        lambda lm, **a: SMC(**{"model": a_model(lm)} | a).run_sync(0),
        {"num_particles": 2},
        parameters(SMC),
    ),
    "SMC.init": (lambda lm, **a: SMC(a_model(lm), num_particles=2).init(**a), {}, ["seed"]),
    "MetropolisHastings": (
        lambda lm, **a: MetropolisHastings(**{"model": a_model(lm)} | a),
        {"num_chains": 2, "num_steps": 2},
        parameters(MetropolisHastings),
    ),
    "Rejection": (
        lambda lm, **a: Rejection(**{"model": a_model(lm)} | a),
        {"num_samples": 2, "max_texts": 4},
        parameters(Rejection),
    ),
    "BestOfN": (
        lambda lm, **a: BestOfN(**{"model": a_model(lm)} | a),
        {"n": 2},
        parameters(BestOfN),
    ),
    "BestOfN.init": (lambda lm, **a: BestOfN(a_model(lm), n=2).init(**a), {}, ["seed"]),
    "several_sync": (
        lambda lm, **a: inference.several_sync(
            **{"sampler": SMC(a_model(lm), num_particles=2)} | a
        ),
        {"runs": 2, "seed": 0},
        ["sampler", "seed"],
    ),
    "Program": (Program, {"function": _program}, ["function"]),
    "infilling": (
        lambda lm, **a: inference.infilling(lm, **a),
        {"prefix": [0], "suffix": [1], "max_tokens": 2},
        parameters(inference.infilling),
    ),
    "regex": (lambda lm, **a: constraints.regex(lm=lm, **a), {"pattern": "a"}, ["pattern"]),
    "json_schema": (
        lambda lm, **a: constraints.json_schema(lm=lm, **a),
        {"schema": {"type": "null"}},
        ["schema", "whitespace"],
    ),
    "grammar": (
        lambda lm, **a: constraints.grammar(lm=lm, **a),
        {"text": 'start: "a"'},
        ["text", "syntax"],
    ),
    "strings": (lambda lm, **a: constraints.strings(lm=lm, **a), {}, ["texts"]),
    "ByteLM": (
        lambda lm, **a: ByteLM(lm, **a),
        {"prompt": [1]},
        ["prompt", "beam", "adapter"],
    ),
    "heal": (lambda lm, **a: constraints.heal(lm, **a), {"prompt": [1, 2]}, ["prompt"]),
    "predicate": (
        lambda lm, **a: constraints.predicate(lm=lm, **a),
        {"function": bool},
        ["function", "name", "max_concurrent"],
    ),
    "Law": (Law, {"prompt": [0]}, parameters(Law)),
    "connect": (connected, {}, ["url", *get_type_hints(ConnectOptions)]),
    "update_weights": (
        lambda lm, **a: lm.update_weights_sync(**a),
        {"source": {"table": LETTERS.table}},
        parameters(AsyncLM.update_weights)[1:],
    ),
    "pause": (paused, {}, parameters(AsyncLM.pause)),
    "wake_up": (lambda lm, **a: lm.wake_up_sync(**a), {}, ["tags"]),
    "adapter_files": (lambda lm, **a: lm.adapter_files(**a), {}, ["name"]),
    "potential": (
        lambda lm, **a: constraints.potential(**{"constraint": constraints.regex("a", lm)} | a),
        {},
        parameters(constraints.potential),
    ),
}
CALLS |= {
    f"{kind.__name__}.{name}": (
        functools.partial(of_context if kind is Context else of_population, method=name),
        right,
        parameters(getattr(kind, name)),
    )
    for kind, name, right in (
        (Context, "draw", {}),
        (Context, "logprobs", {}),
        (Context, "top_logprobs", {"k": 1}),
        (Context, "token_logprobs", {"candidates": [1]}),
        (Context, "score", {"continuation": [1]}),
        (Context, "advance", {"token_ids": [1, 2]}),
        (Context, "append", {"token_id": 1}),
        (Context, "extend", {"token_ids": [1]}),
        (Context, "cut", {"length": 1}),
        (Population, "draw", {}),
        (Population, "logprobs", {}),
        (Population, "score", {"continuations": [[1], [2]]}),
        (Population, "advance", {"token_ids": [[1], [2]]}),
        (Population, "draw_block", {"length": 2}),
        (Population, "append", {"token_ids": [1, 1]}),
        (Population, "extend", {"token_ids": [[1], [2]]}),
        (Population, "cut", {"lengths": 1}),
        (Population, "take", {"indices": [0]}),
        (Population, "resample", {"ancestors": [0, 0]}),
        (Population, "split", {"sizes": [1, 1]}),
    )
}
EVERY_CALL = [(name, parameter) for name, (_, _, names) in CALLS.items() for parameter in names]


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_of_other_calls_is_refused_or_taken(name: str, letters: AsyncLM) -> None:
    call, right, parameters = CALLS[name]
    for parameter in parameters:
        raw: list[str] = []

        def ask(value: Any, parameter: str = parameter) -> Any:
            return call(letters, **right | {parameter: value})

        found = refusals(ask, raw)
        assert not raw, "\n".join([parameter, *raw])
        assert len(letters.sample_sync([1], max_tokens=2)) == 2
        compare(name, parameter, found)


@pytest.mark.parametrize(
    "name",
    [name for name in CALLS if name not in ("load", "splice_turn", "Job", "strings", "connect")],
)
def test_a_call_takes_a_runtime_alone(name: str) -> None:
    call, right, _ = CALLS[name]
    if "." in name or "potential" in name or hasattr(AsyncLM, name):
        return
    for wrong in (None, LETTERS, "lm"):
        with pytest.raises((InvalidRequest, genrt.InvalidConstraint), match=r"genrt\.load"):
            call(wrong, **right)


NEAREST = {
    **dict.fromkeys(("load", "connect", "Job", "generate_many", "generate_valid"), "seed"),
    **dict.fromkeys(("rollout", "rollout_samples", "sample", "batch_sample", "warm_up"), "timeout"),
    **dict.fromkeys(("generate", "batch_generate", "stream"), "adapter"),
    **dict.fromkeys(("update_weights", "pause", "sleep"), "pending"),
    **dict.fromkeys(("cool_down", "encode_chat"), "tools"),
}
"""An option of each call that takes options; those of chats need a template."""


@pytest.mark.parametrize("name", NEAREST)
def test_a_misspelled_option_is_refused_with_the_name_of_the_call_and_the_nearest(
    name: str, letters: AsyncLM
) -> None:
    """Not, as Python does, with the name of the function that takes the options in the end."""
    function, right, _ = CALLS.get(name, (None, RIGHT.get(name, {}), ()))
    given = {**right, f"{NEAREST[name]}_": None}
    with pytest.raises(InvalidRequest) as refused:
        asked(letters, name, given)() if function is None else function(letters, **given)
    of = "a completion" if name in ("generate", "batch_generate", "stream") else name
    of, near = of.removesuffix("_samples"), NEAREST[name]
    assert str(refused.value) == f"{of} has no option '{near}_': did you mean {near}?"


def test_every_method_with_options_is_among_those() -> None:
    methods = {
        name.removesuffix("_sync")
        for name, member in inspect.getmembers(AsyncLM, callable)
        if not name.startswith("_") and "options" in inspect.signature(member).parameters
    }
    assert methods <= {*NEAREST, "chat", "stream_chat"}


@pytest.mark.parametrize("parameter", [*inspect.signature(Item).parameters])
async def test_a_wrong_item_is_refused_or_taken(exact: AsyncLM, parameter: str) -> None:
    items = [Item(**{parameter: value}) for value in wrong_values()]
    right: dict[str, Any] = {} if parameter in ("prompt", "messages") else {"prompt": [1]}
    items += [Item(**right | {parameter: value}) for value in wrong_values()]
    found = [r async for _, r in generate_many(exact, items, on_error="return", max_tokens=1)]
    errors = [each.error for each in found if isinstance(each, Failed)]
    assert [repr(each) for each in errors if not isinstance(each, InvalidRequest)] == []
    assert len(found) == len(items)


def record() -> None:
    """Write every message, with the calls and parameters that give it."""
    found: dict[str, set[str]] = {}
    own: Any = {"engine": "exact", "engine_options": SHORT}
    with genrt.load(MODEL, **own) as lm, genrt.load(LETTERS, **own) as letters:
        for name, parameter in [*QUESTIONS, *EVERY_CALL]:
            function, right, _ = CALLS.get(name, (None, RIGHT.get(name, {}), ()))

            def call(value: Any, place: Any = (name, parameter, function, right)) -> Any:
                name, parameter, function, right = place
                given = {**right, parameter: value}
                return asked(lm, name, given)() if function is None else function(letters, **given)

            place = f"{'AsyncLM.' if function is None else ''}{name}({parameter})"
            raw: list[str] = []
            for message in refusals(call, raw).values():
                found.setdefault(_plain(message), set()).add(place)
            print(place, *raw, sep="\n  ") if raw else None
    written = {message: " ".join(sorted(places)) for message, places in sorted(found.items())}
    GOLDEN.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    record()
