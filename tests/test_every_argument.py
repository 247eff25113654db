"""Every public question and each of its parameters, with wrong values: InvalidRequest, or it works.

Never an error of torch, NumPy, Python or a tokenizer; and the runtime answers whoever asks next.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

import genrt
from genrt.engines.exact import NGram
from genrt.errors import GenrtError, InvalidRequest
from genrt.lm import AsyncLM


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
    "prompt_rows": {**CONTEXT, "start": 1, "chunk": 2},
    "encode": {"text": "a"},
    "encode_chat": {"messages": [{"role": "user", "content": "a"}]},
    "decode": CONTEXT,
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
"""What asks nothing."""

WRONG: list[Any] = [
    *(None, True, 0, -1, 1.5, math.nan, math.inf, 1e39, 1e-46, 2**63, 2**70, 10**5000, 1j),
    *("", "text", "\ud800", b"bytes", bytearray(2), memoryview(b"ab"), object(), ..., type),
    *([], (), {}, set(), [[]], [None], ["a"], [-1], [2**70], [1.5], [True], [math.nan], [[1], 2]),
    *({"input_ids": [1]}, {1: 2}, {1}, {"a"}, iter([1]), (x for x in [1]), range(3), range(-3, 0)),
    *(np.array(1), np.array([1.0]), np.array([[1]]), np.array(["a"]), np.array([None])),
    *(np.zeros(3, "m8[s]"), np.zeros(2, [("a", int)]), np.float16("nan"), np.uint64(2**64 - 1)),
    *(np.longdouble("1e4000"), np.array([1], ">i8"), np.zeros((0, 3), int), np.zeros((2, 2, 2))),
    *(torch.tensor(1), torch.tensor([1.0]), torch.tensor([1j]), torch.tensor([True])),
    *(torch.tensor([[1]]), torch.tensor([1]).to_sparse(), torch.ones(2, 2).to_sparse()),
    *(torch.tensor([1], device="meta"), torch.ones(2, 2, device="meta"), torch.zeros(0, 3)),
    *(torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.bfloat16)),
    *("cuda:99", "meta", "nowhere", torch.device("meta"), [torch.tensor([1], device="meta")]),
]


@pytest.fixture(scope="module")
def exact() -> Iterator[AsyncLM]:
    with genrt.load(NGram.random(11, order=1, seed=2, zeros=0.3), engine="exact") as lm:
        yield lm


@pytest.fixture(scope="module")
def transformers(llama: Path) -> Iterator[AsyncLM]:
    with genrt.load(llama, engine="transformers") as lm:
        yield lm


def parameters(name: str) -> list[str]:
    """The parameters of a question, with options that are given together spelled out."""
    function = getattr(AsyncLM, name)
    names = [*inspect.signature(function).parameters][1:]
    if "options" in names:
        [options] = get_args(get_type_hints(function)["options"])
        names = [each for each in names if each != "options"] + [*get_type_hints(options)]
    return names


QUESTIONS = [
    (name, parameter)
    for name in RIGHT
    for parameter in parameters(name)
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


@pytest.mark.promise(number=29)
@pytest.mark.parametrize("engine", ["exact", "transformers"])
@pytest.mark.parametrize(("name", "parameter"), QUESTIONS)
def test_a_wrong_argument_is_refused_or_taken_and_disturbs_nobody(
    engine: str, name: str, parameter: str, request: pytest.FixtureRequest
) -> None:
    lm: AsyncLM = request.getfixturevalue(engine)
    raw: list[str] = []
    for value in WRONG:
        failed = lm.statistics().engine.failed
        try:
            asked(lm, name, {**RIGHT[name], parameter: value})()
        except (InvalidRequest, genrt.TimedOut):
            pass
        except GenrtError as error:
            raw.append(f"{type(value).__name__}: {type(error).__name__}: {error}"[:200])
        except Exception as error:
            raw.append(f"{type(value).__name__}: {type(error).__name__}: {error}"[:200])
        if lm.statistics().engine.failed != failed:
            raw.append(f"{type(value).__name__}: failed in the engine")
    assert not raw, "\n".join(raw)
    assert len(lm.sample_sync([1], max_tokens=2)) == 2


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
