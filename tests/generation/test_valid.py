"""generate_valid: how many attempts it makes, why it ends, and that nothing made is lost.

On a model whose texts are ``y``, ``yy``, … with a probability that is known, else ``n``, ``nn``, …
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import Closed, ContextTooLong, ExtraNotInstalled, InvalidRequest
from genrt.generation import (
    BatchStatistics,
    Item,
    Records,
    UntilValid,
    generate_valid,
    generate_valid_sync,
)
from genrt.lm import AsyncLM
from genrt.testing import assert_samples_from
from tests import interrupts
from tests.scripted import Gate, passes

YES, NO, END = 1, 2, 3
VOCABULARY = [b"?", b"y", b"n", b""]


def model(acceptance: float, more: float = 0.3) -> NGram:
    """Texts of y with this probability, else of n; after each token another one with probability more."""
    table = torch.zeros(4, 4)
    table[0, YES], table[0, NO] = acceptance, 1 - acceptance
    table[YES, YES], table[YES, END] = more, 1 - more
    table[NO, NO], table[NO, END] = more, 1 - more
    table[END, END] = 1.0
    return NGram(VOCABULARY, table.log(), eos_token_id=END)


def opened(acceptance: float, *, more: float = 0.3, max_batch_size: int = 256) -> AsyncLM:
    options = {"max_batch_size": max_batch_size, "max_model_len": 32}
    return genrt.load(model(acceptance, more), engine="exact", engine_options=options)


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with opened(0.3) as found:
        yield found


@pytest.fixture(scope="module")
def brief() -> Iterator[AsyncLM]:
    """A runtime whose texts take two steps."""
    with opened(0.3, more=0.0) as found:
        yield found


def is_yes(text: str) -> str:
    if not text.startswith("y"):
        raise ValueError(f"{text!r} is a no")
    return text.upper()


def untimed(records: Records) -> Records:
    """Return what does not depend on time."""
    completions = {
        number: dataclasses.replace(each, seconds=0.0, seconds_to_first_token=0.0)
        for number, each in records.completions.items()
    }
    made = dataclasses.replace(records.statistics, seconds=0.0, seconds_judging=0.0)
    return dataclasses.replace(records, completions=completions, statistics=made)


def consistent(records: Records) -> None:
    """See that a result's parts say the same."""
    made = records.statistics
    assert len(records.records) == len(records.attempts) <= records.target
    assert not records.surplus or len(records.records) == records.target
    assert list(records.attempts) == sorted(records.attempts)
    assert made.valid == len(records.records) + len(records.surplus)
    assert made.invalid == sum(made.errors.values()) == sum(map(len, records.faults.values()))
    assert made.attempts == len(records.completions) + made.failed
    assert sum(made.finish_reasons.values()) == len(records.completions)
    assert made.attempts == sum(each.attempts for each in made.batches)
    assert made.valid == sum(each.valid for each in made.batches)
    tokens = sum(len(each.token_ids) for each in records.completions.values())
    assert made.tokens_valid + made.tokens_invalid + made.tokens_truncated == tokens
    if records.reason == "complete":
        assert len(records.records) == records.target


# -- how many attempts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acceptance", "target"),
    [(0.02, 1), (0.02, 60), *itertools.product((0.3, 1.0), (1, 7, 100, 300))],
)
def test_it_makes_as_many_as_wanted_and_hardly_more(acceptance: float, target: int) -> None:
    """Surplus records are what attempts under way happen to give; with no chance of another, none."""
    with opened(acceptance) as lm:
        found = generate_valid_sync(lm, "?", is_yes, target=target, seed=1, max_tokens=20)
    consistent(found)
    assert (found.reason, len(found.records)) == ("complete", target)
    assert set(found.records) <= {"Y" * n for n in range(1, 21)}
    made = found.statistics
    assert len(found.surplus) <= target / 10 + 3
    if acceptance == 1.0:
        assert (made.attempts, made.invalid) == (target, 0)
    assert made.attempts <= 2 * target / acceptance + 60
    assert max(each.attempts for each in made.batches) <= min(max(target, 10), 100)


def test_without_a_valid_record_it_ends(lm: AsyncLM) -> None:
    with opened(0.0) as none:
        found = generate_valid_sync(none, "?", is_yes, target=50, max_tokens=20)
        assert (found.reason, found.records, found.statistics.attempts) == ("no_valid", (), 500)
        assert [each.attempts for each in found.statistics.batches] == [50] * 10
        assert found.statistics.errors == {"ValueError": 500}
        consistent(found)
        found = generate_valid_sync(
            none, "?", is_yes, target=3, max_dry_attempts=7, max_attempts=100, max_tokens=20
        )
        assert (found.reason, found.statistics.attempts) == ("no_valid", 7)
        found = generate_valid_sync(
            none, "?", is_yes, target=3, max_dry_attempts=None, max_attempts=900, max_tokens=20
        )
        assert (found.reason, found.statistics.attempts) == ("out_of_attempts", 900)


def test_what_was_cut_off_without_a_valid_record_is_told_apart() -> None:
    def is_long(text: str) -> bool:
        return len(text) > 5

    with opened(0.5, more=1.0) as lm:
        options: dict[str, Any] = {"max_tokens": 3}
        for target in (2, 50):
            found = generate_valid_sync(lm, "?", is_long, target=target, **options)
            assert (found.reason, found.statistics.attempts) == ("all_truncated", 50)
            assert found.statistics.errors == {"truncated": 50}
            assert found.statistics.tokens_truncated == 150
            assert found.statistics.finish_reasons == {"length": 50}
            consistent(found)
        for bound in ("max_attempts", "max_dry_attempts"):
            few = generate_valid_sync(lm, "?", is_long, target=2, **(options | {bound: 3}))
            assert (few.reason, few.statistics.attempts) == ("all_truncated", 3)
        none = generate_valid_sync(lm, iter(()), is_long, target=2, **options)
        assert (none.reason, none.statistics.attempts) == ("out_of_attempts", 0)


def test_what_is_cut_off_may_be_valid_and_is_then_no_reason_to_stop() -> None:
    with opened(0.02, more=1.0) as lm:
        found = generate_valid_sync(lm, "?", str, target=5, max_tokens=3)
        assert (found.reason, found.statistics.truncated) == ("complete", 5)
        answers = itertools.chain([True], itertools.repeat(False))
        options: dict[str, Any] = {"target": 5, "max_tokens": 3}
        found = generate_valid_sync(lm, "?", lambda _: next(answers), max_attempts=120, **options)
        assert (found.reason, found.statistics.attempts) == ("out_of_attempts", 120)
        answers = itertools.chain([True], itertools.repeat(False))
        found = generate_valid_sync(
            lm, "?", lambda _: next(answers), max_dry_attempts=70, **options
        )
        assert (found.reason, len(found.records)) == ("all_truncated", 1)
        consistent(found)


def test_attempts_and_prompts_may_run_out(lm: AsyncLM) -> None:
    found = generate_valid_sync(lm, "?", is_yes, target=1000, max_attempts=137, max_tokens=20)
    assert (found.reason, found.statistics.attempts) == ("out_of_attempts", 137)
    assert len(found.records) == found.statistics.valid > 10
    consistent(found)
    for prompts in (iter(["?"] * 23), (text for text in ["?"] * 23), {"?": 1}.keys()):
        found = generate_valid_sync(lm, prompts, is_yes, target=1000, max_tokens=20)  # type: ignore[arg-type]
        assert found.reason == "out_of_attempts"
        assert found.statistics.attempts in (1, 23)
        consistent(found)


def test_too_many_invalid_records_for_too_long_end_it() -> None:
    with opened(0.3) as lm:
        options: dict[str, Any] = {"target": 400, "seed": 3, "max_tokens": 20}
        never = generate_valid_sync(lm, "?", is_yes, **options, invalid_threshold=0.95, patience=2)
        assert never.reason == "complete"
        for patience in (1, 2, 3):
            found = generate_valid_sync(
                lm, "?", is_yes, **options, invalid_threshold=0.5, patience=patience
            )
            assert found.reason == "threshold"
            batches = found.statistics.batches
            assert all(each.attempts == 100 for each in batches[:patience])
            assert all(each.invalid_fraction >= 0.5 for each in batches[:patience])
            consistent(found)
        with pytest.raises(InvalidRequest, match="both"):
            generate_valid_sync(lm, "?", is_yes, target=1, patience=2)
        with pytest.raises(InvalidRequest, match="both"):
            generate_valid_sync(lm, "?", is_yes, target=1, invalid_threshold=0.2)


@pytest.mark.parametrize("concurrency", [1, 7, None])
def test_a_good_batch_restores_patience(brief: AsyncLM, concurrency: int | None) -> None:
    """Batches of 100 attempts: one bad, one good, two bad. More attempts may end meanwhile."""
    answers = itertools.chain([False] * 100, [False, True] * 50, itertools.repeat(False))
    options: dict[str, Any] = {"invalid_threshold": 1.0, "patience": 2, "max_dry_attempts": None}
    found = generate_valid_sync(
        brief, "?", lambda _: next(answers), target=100, concurrency=concurrency, **options
    )
    assert found.reason == "threshold"
    bad = [
        each.invalid_fraction == 1.0 for each in found.statistics.batches if each.attempts == 100
    ]
    assert bad[:4] == [True, False, True, True]
    assert found.statistics.attempts >= 400
    assert concurrency != 1 or found.statistics.attempts == 400


# -- which records --------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 3, 17, None])
def test_with_a_seed_records_depend_on_neither_timing_nor_concurrency(
    lm: AsyncLM, concurrency: int | None
) -> None:
    options: dict[str, Any] = {"target": 40, "seed": 2**63 - 20, "max_tokens": 20}
    found = generate_valid_sync(lm, "?", is_yes, concurrency=concurrency, **options)
    texts = lm.batch_generate_sync(
        ["?"] * found.statistics.attempts, seed=2**63 - 20, max_tokens=20
    )
    valid = [(i, each.text.upper()) for i, each in enumerate(texts) if each.text[0] == "y"]
    assert [*zip(found.attempts, found.records, strict=True)] == valid[:40]


@pytest.mark.parametrize("concurrency", [1, 5, None])
def test_a_validator_may_remember_what_it_has_seen(lm: AsyncLM, concurrency: int | None) -> None:
    """It gets the records in the order of the attempts, whatever the order in which texts end."""
    seen, order = set[str](), list[str]()

    def is_new(text: str) -> bool:
        order.append(text)
        return text not in seen and seen.add(text) is None  # type: ignore[func-returns-value]

    options: dict[str, Any] = {"target": 5, "seed": 4, "max_tokens": 20}
    found = generate_valid_sync(lm, "?", is_new, concurrency=concurrency, **options)
    assert found.reason == "complete"
    assert order == [found.completions[number].text for number in sorted(found.completions)]
    texts = lm.batch_generate_sync(["?"] * 60, seed=4, max_tokens=20)
    assert found.records == tuple(dict.fromkeys(each.text for each in texts))[:5]


def test_short_texts_are_not_favoured() -> None:
    """The records of many runs, in each of which long texts are under way when there are enough."""
    with opened(0.5, more=0.7, max_batch_size=16) as lm:
        runs = [
            generate_valid_sync(lm, "?", is_yes, target=4, seed=1000 * i, max_tokens=30)
            for i in range(150)
        ]
    lengths = [len(record) for run in runs for record in run.records]
    law = {n: 0.3 * 0.7 ** (n - 1) for n in range(1, 30)} | {30: 0.7**29}
    assert_samples_from(lengths, law)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("?", ["?"]),
        ([0], ["?"]),
        (np.array([0]), ["?"]),
        (torch.tensor([0]), ["?"]),
        (Item("?"), ["?"]),
        (["?", "?y", "?n"], ["?", "?y", "?n"]),
        ([[0], [0, 1]], ["?", "?y"]),
        (np.array([[0, 1], [0, 2]]), ["?y", "?n"]),
        ((text for text in itertools.cycle(["?", "?y"])), ["?", "?y"]),
        (lambda number: "?" + "y" * (number % 3), ["?", "?y", "?yy"]),
    ],
    ids=[
        "text",
        "ids",
        "array",
        "tensor",
        "item",
        "texts",
        "lists",
        "arrays",
        "generator",
        "function",
    ],
)
def test_prompts_are_used_in_turn(lm: AsyncLM, prompts: Any, expected: list[str]) -> None:
    found = generate_valid_sync(lm, prompts, str, target=15, max_tokens=1)
    asked = [lm.decode(found.completions[i].prompt_token_ids) for i in range(15)]
    assert asked == [expected[i % len(expected)] for i in range(15)]


async def test_prompts_may_come_asynchronously(lm: AsyncLM) -> None:
    async def prompts() -> AsyncIterator[str]:
        for _ in range(12):
            await asyncio.sleep(0)
            yield "?"

    found = await generate_valid(lm, prompts(), is_yes, target=30, max_tokens=20)
    assert (found.reason, found.statistics.attempts) == ("out_of_attempts", 12)


# -- validators -----------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "name": {"type": "string", "maxLength": 2}},
    "required": ["age"],
}


class Texts:
    """A runtime that returns given texts in turn."""

    def __init__(self, lm: AsyncLM, monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
        completion = lm.generate_sync("?", max_tokens=5, seed=0, temperature=0.0)
        cycle = itertools.cycle(texts)

        async def generate(*_: Any, **__: Any) -> Any:
            return dataclasses.replace(completion, text=next(cycle), finish_reason="stop")

        monkeypatch.setattr(AsyncLM, "generate", generate)


def test_a_schema_validates_json(lm: AsyncLM, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ['{"age": 3}', "{", '{"age": "x"}', '{"name": "ab"}', '{"age": 1, "name": "abc"}']
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        Texts(lm, monkeypatch, texts)
        found = generate_valid_sync(lm, "?", schema, target=5, max_attempts=10, concurrency=1)
        assert found.records == ({"age": 3},) * 2
        assert found.statistics.errors == dict.fromkeys(
            ["no JSON", "age: type", "required", "name: maxLength"], 2
        )
        assert "'x' is not of type 'integer'" in found.faults[2][0].detail
        assert found.faults[4][0].detail == "$.name: 'abc' is too long"
        consistent(found)


def test_a_schema_may_allow_what_is_false(lm: AsyncLM, monkeypatch: pytest.MonkeyPatch) -> None:
    Texts(lm, monkeypatch, ["null", "false", "0", "1"])
    schema = {"enum": [None, False]}
    found = generate_valid_sync(lm, "?", schema, target=2, max_attempts=4, concurrency=1)
    assert (found.records, found.reason) == ((None, False), "complete")


class Model:
    """What pydantic's models look like."""

    class Error(ValueError):
        def errors(self) -> list[dict[str, Any]]:
            return [{"loc": ("items", 3, "age"), "type": "int_parsing", "msg": "no int"}]

    @classmethod
    def model_validate_json(cls, text: str) -> str:
        if text.startswith("n"):
            raise cls.Error("1 validation error")
        return f"instance of {text[0]}"

    @classmethod
    def model_validate(cls, record: Any) -> str:
        return f"instance of {record}"


def test_a_pydantic_model_validates(lm: AsyncLM) -> None:
    found = generate_valid_sync(lm, "?", Model, target=20, max_tokens=20)
    assert set(found.records) == {"instance of y"}
    assert set(found.statistics.errors) == {"items.age: int_parsing"}
    parsed = generate_valid_sync(lm, "?", Model, target=2, parse=lambda _: [5], max_tokens=5)
    assert set(parsed.records) == {"instance of 5"}


def test_a_real_pydantic_model_validates(lm: AsyncLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pydantic = pytest.importorskip("pydantic")
    person = pydantic.create_model("Person", age=(int, ...))
    texts = ['{"age": 3}', "{", '{"age": "x"}', "{}"]
    for validate in (person, pydantic.TypeAdapter(person)):
        Texts(lm, monkeypatch, texts)
        found = generate_valid_sync(lm, "?", validate, target=5, max_attempts=8, concurrency=1)
        assert [each.age for each in found.records] == [3, 3]
        expected = ["json_invalid", "age: int_parsing", "age: missing"]
        assert found.statistics.errors == dict.fromkeys(expected, 2)


REFUSING: list[Callable[[str], Any]] = [
    lambda text: text.startswith("y"),
    lambda text: np.bool_(text.startswith("y")),
    lambda text: text if text.startswith("y") else None,
    lambda text: {"y": text}[text[0]],
]


@pytest.mark.parametrize("validate", REFUSING)
def test_predicates_and_errors_of_any_kind_are_validators(
    lm: AsyncLM, validate: Callable[[str], Any]
) -> None:
    found = generate_valid_sync(lm, "?", validate, target=15, seed=0, max_tokens=20)
    expected = generate_valid_sync(lm, "?", is_yes, target=15, seed=0, max_tokens=20)
    assert found.records == tuple(record.lower() for record in expected.records)
    [category] = found.statistics.errors
    assert category in ("refused", "KeyError")


async def test_a_validator_may_be_asynchronous(lm: AsyncLM) -> None:
    async def critic(text: str) -> bool:
        row = await lm.next_token_logprobs(lm.encode("?" + text))
        return text.startswith("y") and len(row) == 4

    found = await generate_valid(lm, "?", critic, target=20, max_tokens=20)
    assert (found.reason, len(found.records)) == ("complete", 20)
    sync = await asyncio.to_thread(generate_valid_sync, lm, "?", critic, target=20, max_tokens=20)
    assert sync.reason == "complete"


def test_a_mistake_in_a_validator_is_raised(lm: AsyncLM) -> None:
    with pytest.raises(NameError):
        generate_valid_sync(lm, "?", lambda text: missing_name, target=3)  # type: ignore[name-defined]  # noqa: F821


def test_a_text_may_have_several_records(lm: AsyncLM) -> None:
    def parse(text: str) -> Iterator[str]:
        if text == "n":
            raise LookupError("no records")
        yield from text

    found = generate_valid_sync(
        lm, "?", lambda record: record == "y", target=60, parse=parse, seed=5, max_tokens=20
    )
    consistent(found)
    assert found.records == ("y",) * 60
    made = found.statistics
    assert set(made.errors) == {"LookupError", "refused"}
    for number, completion in found.completions.items():
        faults = [each.category for each in found.faults.get(number, ())]
        if completion.text[0] == "y":
            assert faults == []
        else:
            expected = (
                ["LookupError"] if completion.text == "n" else ["refused"] * len(completion.text)
            )
            assert faults == expected


@pytest.mark.parametrize("parse", [lambda text: [], lambda text: iter(())])
def test_a_text_without_a_record_is_invalid(lm: AsyncLM, parse: Any) -> None:
    found = generate_valid_sync(lm, "?", str, target=3, parse=parse, max_attempts=20, max_tokens=20)
    assert found.statistics.errors == {"no record": 20}


@pytest.mark.parametrize("parse", [lambda text: text, lambda text: None, lambda text: {"a": 1}])
def test_a_parser_that_returns_no_records_is_refused(lm: AsyncLM, parse: Any) -> None:
    with pytest.raises(InvalidRequest, match="parse must return records"):
        generate_valid_sync(lm, "?", str, target=3, parse=parse)


# -- arguments and errors -------------------------------------------------------------------------

TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"invalid_threshold": 1.1, "patience": 1}, "invalid_threshold must be"),
    ({"invalid_threshold": 0.5, "patience": 0}, "patience must be"),
    ({"in_order": True}, "no option 'in_order'"),
    ({"prompts": ["?", [0] * 40], "target": 2}, "max_model_len"),
    ({"prompts": [{"role": "user", "content": "a"}]}, "no chat templates"),
]


@pytest.mark.parametrize(("wrong", "message"), TOGETHER, ids=str)
def test_what_does_not_go_together_is_refused(
    lm: AsyncLM, wrong: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"lm": lm, "prompts": "?", "validate": str, "target": 1, **wrong}
    with pytest.raises(InvalidRequest, match=message):
        generate_valid_sync(**arguments)


def test_without_jsonschema_a_schema_says_what_to_install(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jsonschema", None)
    with pytest.raises(ExtraNotInstalled, match=r"genrt\[validation\]"):
        generate_valid_sync(lm, "?", SCHEMA, target=1)


def test_a_timeout_costs_its_attempt_alone(lm: AsyncLM) -> None:
    items = [Item("?", options={"timeout": 0.0}), Item("?")]
    found = generate_valid_sync(lm, items, str, target=20, max_tokens=20)
    assert found.reason == "complete"
    made = found.statistics
    assert made.failed == made.errors["TimedOut"] >= 10
    consistent(found)


def test_a_prompt_that_is_too_long_is_raised_with_its_attempt(lm: AsyncLM) -> None:
    long: list[Any] = ["?", [0] * 40]
    with pytest.raises(ContextTooLong) as raised:
        generate_valid_sync(lm, long, str, target=5)
    assert raised.value.__notes__ == ["attempt 1 of generate_valid"]


# -- interrupts -----------------------------------------------------------------------------------


def whole(lm: AsyncLM) -> Records:
    return generate_valid_sync(lm, "?", is_yes, target=6, seed=9, max_tokens=20)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_error_at_any_record_loses_none_and_the_run_can_go_on(
    brief: AsyncLM, kind: type[BaseException]
) -> None:
    lm, expected = brief, whole(brief)
    for k in range(1, expected.statistics.attempts + 1):
        count = itertools.count(1)

        def validate(text: str, k: int = k, count: Iterator[int] = count) -> str:
            if next(count) == k:
                raise kind
            return is_yes(text)

        run = UntilValid(lm, "?", validate, target=6, seed=9, max_tokens=20)
        with pytest.raises(kind):
            asyncio.run(run.run())
        kept = run.result()
        consistent(kept)
        assert kept.reason == "interrupted"
        assert kept.statistics.unjudged == 0
        assert kept.statistics.attempts >= max(k, 6)  # the first 6 end in one step
        valid = [i for i, each in kept.completions.items() if each.text[0] == "y"]
        assert [*kept.attempts, *range(len(kept.surplus))][: len(kept.attempts)] == valid[:6]
        assert len(kept.records) + len(kept.surplus) == len(valid)
        resumed = asyncio.run(run.run())
        assert resumed.reason == "complete"
        assert (resumed.records, resumed.attempts) == (expected.records, expected.attempts)


async def test_a_cancellation_at_any_pass_loses_nothing_and_leaves_nothing(brief: AsyncLM) -> None:
    lm, expected = brief, await asyncio.to_thread(whole, brief)
    for k in itertools.count():
        run = UntilValid(lm, "?", is_yes, target=6, seed=9, max_tokens=20)
        task = asyncio.create_task(run.run())
        await passes(k)
        if not task.cancel():
            break
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}
        kept = run.result()
        consistent(kept)
        assert kept.reason == "interrupted"
        assert kept.statistics.unjudged == 0
        resumed = await run.run()
        assert (resumed.records, resumed.attempts) == (expected.records, expected.attempts)
        if k > 40:
            break
    counters = lm.statistics().batcher
    assert (counters.queued, counters.waiting) == (0, 0)


@pytest.mark.proof
def test_an_interrupt_at_any_line_loses_nothing_and_the_run_can_go_on(brief: AsyncLM) -> None:
    """At every 61st line of genrt on the loop's thread, as ``asyncio.run`` takes SIGINT."""
    expected, interrupted = whole(brief), 0
    for number in itertools.count(1, 61):
        run = UntilValid(brief, "?", is_yes, target=6, seed=9, max_tokens=20)
        try:
            with interrupts.at_line(number) as moment:
                asyncio.run(run.run())
        except KeyboardInterrupt:
            interrupted += 1
        if not moment.fired:
            break
        kept = run.result()
        consistent(kept)
        assert kept.statistics.unjudged == 0, moment.fired
        resumed = asyncio.run(run.run())
        assert resumed.reason == "complete", moment.fired
        assert (resumed.records, resumed.attempts) == (expected.records, expected.attempts)
    assert interrupted > 15


def test_an_interrupt_of_the_twin_returns_what_was_made() -> None:
    gate, main = Gate(), threading.main_thread().ident or 0

    class Engine(ExactEngine):
        steps = 0

        def step(self) -> Any:
            self.steps += 1
            if self.steps == 30:
                gate.go_through()
            return super().step()

    def interrupt() -> None:
        gate.wait_until_held()
        signal.pthread_kill(main, signal.SIGINT)
        gate.open()

    with genrt.load(engine=lambda: Engine(model(0.3), max_batch_size=4)) as lm:
        thread = threading.Thread(target=interrupt)
        thread.start()
        found = generate_valid_sync(lm, "?", is_yes, target=100_000, max_tokens=5)
        thread.join()
    assert found.reason == "interrupted"
    assert found.records
    consistent(found)


async def test_the_result_can_be_had_while_it_runs(lm: AsyncLM) -> None:
    run = UntilValid(lm, "?", is_yes, target=200, max_tokens=20)
    assert (run.result().reason, run.result().records) == ("interrupted", ())
    task, seen = asyncio.create_task(run.run()), [0]
    while not task.done():
        await asyncio.sleep(0)
        found = run.result()
        assert len(found.records) >= seen[-1]
        seen.append(len(found.records))
    assert (await task).reason == "complete"
    assert len({*seen}) > 3
    assert untimed(await run.run()) == untimed(run.result()) == untimed(task.result())


async def test_a_run_is_awaited_once_at_a_time(lm: AsyncLM) -> None:
    run = UntilValid(lm, "?", is_yes, target=5, max_tokens=20)
    first: Awaitable[Records] = asyncio.create_task(run.run())
    await passes(1)
    with pytest.raises(InvalidRequest, match="under way already"):
        await run.run()
    assert (await first).reason == "complete"


async def test_a_closed_runtime_ends_it_and_loses_nothing() -> None:
    lm = opened(0.3)
    count = itertools.count()

    def validate(text: str) -> str:
        if next(count) == 30:
            lm.close()
        return is_yes(text)

    run = UntilValid(lm, "?", validate, target=500, max_tokens=20)
    with pytest.raises(Closed):
        await run.run()
    kept = run.result()
    assert kept.reason == "interrupted"
    assert kept.statistics.attempts > 30
    consistent(kept)


# -- what is shown ----------------------------------------------------------------------------------


def test_a_result_reads_well(lm: AsyncLM) -> None:
    found = generate_valid_sync(lm, "?", is_yes, target=20, seed=2, max_tokens=20)
    made = dataclasses.replace(found.statistics, seconds=1.25)
    assert repr(dataclasses.replace(found, statistics=made, surplus=("Y",))) == (
        f"Records(complete: 20 of 20, 1 beyond, by {made.attempts} attempts in 1.2 s; "
        f"{made.valid / (made.valid + made.invalid):.1%} valid, 0 truncated; "
        f"invalid: ValueError {made.invalid})"
    )


def test_a_batch_without_records_has_no_invalid_ones() -> None:
    assert BatchStatistics().invalid_fraction == 0.0


def test_a_bar_shows_how_many_are_valid(lm: AsyncLM, capfd: pytest.CaptureFixture[str]) -> None:
    generate_valid_sync(lm, "?", is_yes, target=20, progress=True, max_tokens=20)
    last = capfd.readouterr().err.rstrip().rsplit("\r", 1)[-1]
    assert "valid: 100%" in last
    assert "20/20" in last
    generate_valid_sync(lm, "?", is_yes, target=2000, max_attempts=30, progress=True, max_tokens=20)
    last = capfd.readouterr().err.rstrip().rsplit("\r", 1)[-1]
    assert "/2000" in last
    assert "attempts=30" in last
    assert "100%" not in last


@settings(deadline=None, max_examples=25)
@given(
    acceptance=st.floats(0.05, 1.0),
    target=st.integers(1, 60),
    seed=st.integers(0, 2**40),
    concurrency=st.integers(1, 70),
)
def test_for_any_rate_and_target(
    acceptance: float, target: int, seed: int, concurrency: int
) -> None:
    with opened(acceptance) as lm:
        found = generate_valid_sync(
            lm, "?", is_yes, target=target, seed=seed, concurrency=concurrency, max_tokens=20
        )
    consistent(found)
    assert found.reason == "complete"
