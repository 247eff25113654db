"""What new users get wrong, beside single arguments: each is refused at once, and told what to do."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import genrt
from genrt.constraints import all_of, regex
from genrt.engines.exact import NGram
from genrt.errors import GenrtError, InvalidConstraint, InvalidRequest
from genrt.inference import (
    SMC,
    BestOfN,
    Execution,
    MetropolisHastings,
    Program,
    Rejection,
    TextModel,
    infilling,
)
from genrt.lm import AsyncLM

MODEL = NGram.random([b"a", b"b", b"ab", b""], seed=3, eos_token_id=3)
CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact") as lm:
        yield lm


def smc(lm: AsyncLM) -> SMC:
    return SMC(TextModel(lm, [0], max_tokens=3), num_particles=2)


MISTAKES: dict[str, tuple[Callable[[AsyncLM], Any], type[GenrtError], str]] = {
    "one context for a batch": (
        lambda lm: lm.batch_next_token_logprobs_sync([0, 1]),  # type: ignore[list-item]
        InvalidRequest,
        r"contexts must be.*got one of them: give \[token_ids\]",
    ),
    "one context in a tensor for a batch": (
        lambda lm: lm.batch_draw_sync(torch.tensor([0, 1])),  # type: ignore[arg-type]
        InvalidRequest,
        r"got one of them: give \[token_ids\]",
    ),
    "a conversation for a prompt": (
        lambda lm: TextModel(lm, CHAT, max_tokens=3),  # type: ignore[arg-type]
        InvalidRequest,
        r"for a conversation, give lm\.encode_chat\(messages\)",
    ),
    "a constraint for a mask": (
        lambda lm: lm.draw_sync([0], mask=regex("a", lm)),  # type: ignore[arg-type]
        InvalidRequest,
        r"mask is a constraint: give a state, at first constraint\.start\(\)",
    ),
    "a constraint for a completion": (
        lambda lm: lm.generate_sync([0], constraint=regex("a", lm)),  # type: ignore[call-arg]
        InvalidRequest,
        r"no option 'constraint': give choice=, regex=, json_schema= or grammar=, or run SMC",
    ),
    "an option with another name": (
        lambda lm: genrt.load(MODEL, engine="exact", num_replicas=2),  # type: ignore[call-arg]
        InvalidRequest,
        r"load has no option 'num_replicas': did you mean replicas\?",
    ),
    "an option with a name like no other": (
        lambda lm: genrt.load(MODEL, engine="exact", quick=True),  # type: ignore[call-arg]
        InvalidRequest,
        r"load has no option 'quick': its options are engine, engine_options, .*replicas",
    ),
    "constraints in a list": (
        lambda lm: all_of([regex("a", lm)]),  # type: ignore[call-overload]
        InvalidConstraint,
        r"give them one by one, all_of\(\*constraints\)",
    ),
    "a compiled regular expression": (
        lambda lm: regex(re.compile("a"), lm),  # type: ignore[arg-type]
        InvalidConstraint,
        r"give its text, pattern\.pattern",
    ),
    "arguments swapped": (
        lambda lm: infilling("a", "b", lm, max_tokens=2),  # type: ignore[arg-type]
        InvalidRequest,
        "lm is a str: give what genrt.load returned",
    ),
    "an expectation of what is no number": (
        lambda lm: smc(lm).run_sync(0).expectation(str),  # type: ignore[arg-type]
        InvalidRequest,
        "give a function that gives numbers: could not convert",
    ),
    "an engine that is none": (
        lambda lm: genrt.load(engine=lambda: 3),  # type: ignore[arg-type,return-value]
        InvalidRequest,
        "the function gave 3, which is no Engine: it has no .*submit",
    ),
    "a table that is no tensor": (
        lambda lm: NGram([b"a"], [[1.0]]),  # type: ignore[arg-type]
        InvalidRequest,
        "the table is a list: give a tensor",
    ),
}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_what_to_do(lm: AsyncLM, name: str) -> None:
    mistake, error, message = MISTAKES[name]
    with pytest.raises(error, match=message):
        mistake(lm)


ALGORITHMS: list[Callable[[TextModel], Any]] = [
    lambda model: SMC(model, num_particles=2),
    lambda model: MetropolisHastings(model, num_chains=2, num_steps=2),
    lambda model: Rejection(model, num_samples=2, max_texts=4),
    lambda model: BestOfN(model, n=2),
]


@pytest.mark.parametrize("make", ALGORITHMS)
def test_a_seed_in_place_of_a_state_is_refused(
    lm: AsyncLM, make: Callable[[TextModel], Any]
) -> None:
    algorithm = make(TextModel(lm, [0], max_tokens=3))
    for stepping in (lambda: anext(algorithm.steps(0)), lambda: algorithm.step(0)):

        async def main(stepping: Any = stepping) -> None:
            await stepping()

        if hasattr(algorithm, "steps") or stepping.__code__.co_names[0] == "step":
            with pytest.raises(
                InvalidRequest, match=r"give a state, at first that of init\(seed\)"
            ):
                asyncio.run(main())


@pytest.mark.parametrize("make", ALGORITHMS)
def test_what_is_printed_says_what_it_is(lm: AsyncLM, make: Callable[[TextModel], Any]) -> None:
    async def program(p: Execution) -> int:
        return await p.sample([0])

    model = TextModel(lm, [0, 1], max_tokens=3, constraint=regex("a+", lm), potential=len)
    assert repr(model).startswith("TextModel(2 tokens, max_tokens=3, constraint=<constraint: reg")
    assert repr(make(model)) == f"{type(make(model)).__name__}({model!r})"
    assert "program" in repr(SMC(Program(lm, program), num_particles=2))


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_runtime_is_not_copied_and_says_so(lm: AsyncLM, way: Callable[[Any], Any]) -> None:
    for what in (lm, TextModel(lm, [0], max_tokens=3)):
        if way is copy.copy and what is not lm:
            assert copy.copy(what) is not what  # which shares the runtime
            continue
        with pytest.raises(TypeError, match="a runtime cannot be copied or pickled"):
            way(what)
    gc.collect()
    assert lm.next_token_logprobs_sync([0]).shape == (4,)


def test_a_model_is_saved_and_loaded_by_the_name_of_its_folder(tmp_path: Any) -> None:
    MODEL.save(str(tmp_path / "new" / "model"))
    again = NGram.load(str(tmp_path / "new" / "model"))
    assert torch.equal(again.row([0]), MODEL.row([0]))
