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
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import numpy as np
import pydantic
import pytest
import torch

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import ContextTooLong, ExtraNotInstalled, InvalidRequest
from genrt.generation import Item, Records, UntilValid, generate_valid_sync
from genrt.generation.validators import RecordValidator
from genrt.lm import AsyncLM
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


def is_long(text: str) -> bool:
    return len(text) > 5


def untimed(records: Records) -> Records:
    """Return what does not depend on time."""
    completions = {
        number: dataclasses.replace(each, seconds=0.0, seconds_to_first_token=0.0)
        for number, each in records.completions.items()
    }
    made = dataclasses.replace(records.statistics, seconds=0.0)
    return dataclasses.replace(records, completions=completions, statistics=made)


def consistent(records: Records) -> None:
    """See that a result's parts say the same."""
    made = records.statistics
    assert len(records.records) == len(records.attempts) <= records.target
    assert not records.surplus or len(records.records) == records.target
    assert list(records.attempts) == sorted(records.attempts)
    assert [*records.completions] == sorted(records.completions)
    assert made.valid == len(records.records) + len(records.surplus)
    assert made.invalid == sum(made.errors.values()) == sum(map(len, records.faults.values()))
    assert made.attempts == len(records.completions) + made.failed
    assert made.tokens == sum(len(each.token_ids) for each in records.completions.values())
    if records.reason == "complete":
        assert len(records.records) == records.target


# -- how many attempts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acceptance", "target"),
    [(0.02, 1), (0.05, 60), *itertools.product((0.3, 1.0), (1, 100))],
)
def test_it_makes_as_many_as_wanted_and_hardly_more(acceptance: float, target: int) -> None:
    with opened(acceptance) as lm:
        found = generate_valid_sync(lm, "?", is_yes, target=target, seed=1, max_tokens=20)
        # Attempts under way when there are enough: with no chance of another record, none.
        texts = lm.statistics().batcher.questions
    consistent(found)
    assert (found.reason, len(found.records), found.surplus) == ("complete", target, ())
    assert set(found.records) <= {"Y" * n for n in range(1, 21)}
    made = found.statistics
    if acceptance == 1.0:
        assert (made.attempts, made.invalid, texts) == (target, 0, target)
    assert made.attempts <= texts <= 2 * target / acceptance + 60


@pytest.mark.parametrize(
    ("acceptance", "more", "validate", "options", "ending"),
    [
        (0.0, 0.3, is_yes, {"target": 50}, ("no_valid", 500)),
        (0.0, 0.3, is_yes, {"max_dry_attempts": 7, "max_attempts": 100}, ("no_valid", 7)),
        (
            0.0,
            0.3,
            is_yes,
            {"max_dry_attempts": None, "max_attempts": 900},
            ("out_of_attempts", 900),
        ),
        (0.3, 0.3, is_yes, {"target": 1000, "max_attempts": 137}, ("out_of_attempts", 137)),
        (0.3, 0.3, is_yes, {"prompts": iter(["?"] * 23), "target": 1000}, ("out_of_attempts", 23)),
        (0.3, 0.3, is_yes, {"prompts": {"?": 1}.keys(), "target": 1000}, ("out_of_attempts", 1)),
        # Texts that are cut off are told apart, unless one of them was valid.
        (0.5, 1.0, is_long, {}, ("all_truncated", 50)),
        (0.5, 1.0, is_long, {"target": 50}, ("all_truncated", 50)),
        (0.5, 1.0, is_long, {"max_attempts": 3}, ("all_truncated", 3)),
        (0.5, 1.0, is_long, {"max_dry_attempts": 3}, ("all_truncated", 3)),
        (0.5, 1.0, is_long, {"prompts": iter(())}, ("out_of_attempts", 0)),
        (0.02, 1.0, str, {"target": 5}, ("complete", 5)),
        (0.02, 1.0, None, {"target": 5, "max_attempts": 120}, ("out_of_attempts", 120)),
        (0.02, 1.0, None, {"target": 5, "max_dry_attempts": 70}, ("all_truncated", 71)),
    ],
)
def test_it_ends_for_a_reason_after_so_many_attempts(
    acceptance: float, more: float, validate: Any, options: dict[str, Any], ending: tuple[str, int]
) -> None:
    given: dict[str, Any] = {"prompts": "?", "target": 3, "max_tokens": 3 if more == 1.0 else 20}
    answers = itertools.chain([True], itertools.repeat(False))  # only the first text is valid
    with opened(acceptance, more=more) as lm:
        found = generate_valid_sync(
            lm, validate=validate or (lambda _: next(answers)), **(given | options)
        )
    consistent(found)
    made = found.statistics
    assert (found.reason, made.attempts) == ending
    if found.reason == "all_truncated":
        assert made.errors == {"truncated": made.invalid}
    elif acceptance == 0.0:
        assert made.errors == {"ValueError": made.attempts}


@pytest.mark.parametrize("concurrency", [7, None])
def test_a_good_batch_restores_patience(brief: AsyncLM, concurrency: int | None) -> None:
    """Batches of 100 attempts: one bad, one good, two bad."""
    answers = itertools.chain([False] * 100, [False, True] * 50, itertools.repeat(False))
    options: dict[str, Any] = {"invalid_threshold": 1.0, "patience": 2, "max_dry_attempts": None}
    found = generate_valid_sync(
        brief, "?", lambda _: next(answers), target=100, concurrency=concurrency, **options
    )
    assert (found.reason, found.statistics.attempts) == ("threshold", 400)


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


async def asynchronous(texts: list[str]) -> AsyncIterator[str]:
    for text in itertools.cycle(texts):
        await asyncio.sleep(0)
        yield text


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
        (asynchronous(["?", "?y"]), ["?", "?y"]),
    ],
)
def test_prompts_are_used_in_turn(lm: AsyncLM, prompts: Any, expected: list[str]) -> None:
    found = generate_valid_sync(lm, prompts, str, target=15, max_tokens=1)
    asked = [lm.decode(found.completions[i].prompt_token_ids) for i in range(15)]
    assert asked == [expected[i % len(expected)] for i in range(15)]


# -- validators -----------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "name": {"type": "string", "maxLength": 2}},
    "required": ["age"],
}


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


def letters(text: str) -> Iterator[str]:
    if text == "n":
        raise LookupError("no records")
    yield from text


def starts_with_y(text: str) -> bool:
    return text.startswith("y")


async def critic(text: str) -> bool:
    await asyncio.sleep(0)
    return starts_with_y(text)


PERSON = pydantic.create_model("Person", age=(int, ...))

JUDGED: list[tuple[Any, Any, str, list[Any], list[str]]] = [
    *(
        (schema, None, text, values, faults)
        for schema in (SCHEMA, json.dumps(SCHEMA))
        for text, values, faults in (
            ('{"age": 3}', [{"age": 3}], []),
            ("{", [], ["no JSON"]),
            ('{"age": "x"}', [], ["age: type"]),
            ('{"name": "ab"}', [], ["required"]),
            ('{"age": 1, "name": "abc"}', [], ["name: maxLength"]),
        )
    ),
    ({"enum": [None, False]}, None, "null", [None], []),
    ({"enum": [None, False]}, None, "false", [False], []),
    ({"enum": [None, False]}, None, "0", [], ["enum"]),
    (Model, None, "yes", ["instance of y"], []),
    (Model, None, "no", [], ["items.age: int_parsing"]),
    (Model, lambda text: [5], "yes", ["instance of 5"], []),
    *(
        (validate, None, text, values, faults)
        for validate in (PERSON, pydantic.TypeAdapter(PERSON))
        for text, values, faults in (
            ('{"age": 3}', [PERSON(age=3)], []),
            ("{", [], ["json_invalid"]),
            ('{"age": "x"}', [], ["age: int_parsing"]),
            ("{}", [], ["age: missing"]),
        )
    ),
    *(
        (validate, None, text, ["y"] if text == "y" else [], [] if text == "y" else faults)
        for validate, faults in (
            (starts_with_y, ["refused"]),
            (critic, ["refused"]),
            (lambda text: np.bool_(starts_with_y(text)), ["refused"]),
            (lambda text: text if starts_with_y(text) else None, ["refused"]),
            (lambda text: {"y": text}[text[0]], ["KeyError"]),
        )
        for text in ("y", "n")
    ),
    (starts_with_y, letters, "yy", ["y", "y"], []),
    (starts_with_y, letters, "yn", ["y"], ["refused"]),
    (starts_with_y, letters, "n", [], ["LookupError"]),
    (starts_with_y, letters, "", [], ["no record"]),
    (str, lambda text: iter(()), "y", [], ["no record"]),
]


@pytest.mark.parametrize(("validate", "parse", "text", "values", "faults"), JUDGED)
async def test_records_are_valid_or_have_faults(
    validate: Any, parse: Any, text: str, values: list[Any], faults: list[str]
) -> None:
    found, wrong = list[Any](), list[Any]()
    await RecordValidator(validate, parse).validate(text, found, wrong)
    assert (found, [each.category for each in wrong]) == (values, faults)


def test_a_mistake_in_a_validator_is_raised(lm: AsyncLM) -> None:
    with pytest.raises(NameError):
        generate_valid_sync(lm, "?", lambda text: missing_name, target=3)  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("parse", [lambda text: text, lambda text: None, lambda text: {"a": 1}])
def test_a_parser_that_returns_no_records_is_refused(lm: AsyncLM, parse: Any) -> None:
    with pytest.raises(InvalidRequest, match="parse must return records"):
        generate_valid_sync(lm, "?", str, target=3, parse=parse)


# -- arguments and errors -------------------------------------------------------------------------

TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"patience": 2}, "both"),
    ({"invalid_threshold": 0.2}, "both"),
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


def interrupted(run: UntilValid, attempts: int = 0) -> None:
    """The result of a run that was interrupted after at least so many attempts."""
    kept = run.result()
    consistent(kept)
    assert kept.reason == "interrupted"
    assert kept.statistics.attempts >= attempts


def assert_same_records(resumed: Records, expected: Records) -> None:
    assert resumed.reason == "complete"
    assert (resumed.records, resumed.attempts) == (expected.records, expected.attempts)


async def test_a_cancellation_at_any_pass_loses_nothing_and_leaves_nothing(brief: AsyncLM) -> None:
    lm, expected = brief, await asyncio.to_thread(whole, brief)
    for k in range(42):
        run = UntilValid(lm, "?", is_yes, target=6, seed=9, max_tokens=20)
        task = asyncio.create_task(run.run())
        await passes(k)
        if not task.cancel():
            break
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}
        interrupted(run)
        assert_same_records(await run.run(), expected)
    counters = lm.statistics().batcher
    assert (counters.queued, counters.waiting) == (0, 0)


@pytest.mark.proof
def test_an_interrupt_at_any_line_loses_nothing_and_the_run_can_go_on(brief: AsyncLM) -> None:
    """At every 61st line of genrt on the loop's thread, as ``asyncio.run`` takes SIGINT."""
    expected, interrupts_seen = whole(brief), 0
    for number in itertools.count(1, 61):
        run = UntilValid(brief, "?", is_yes, target=6, seed=9, max_tokens=20)
        try:
            with interrupts.at_line(number) as moment:
                asyncio.run(run.run())
        except KeyboardInterrupt:
            interrupts_seen += 1
        if not moment.fired:
            break
        consistent(run.result())
        assert_same_records(asyncio.run(run.run()), expected)
    assert interrupts_seen > 15


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
    seen = [0]

    def look(text: str) -> str:
        found = run.result()
        assert found.reason == "interrupted"
        assert len(found.records) >= seen[-1]
        seen.append(len(found.records))
        return is_yes(text)

    run = UntilValid(lm, "?", look, target=60, max_tokens=20)
    assert (run.result().reason, run.result().records) == ("interrupted", ())
    found = await run.run()
    assert found.reason == "complete"
    assert len({*seen}) > 3
    assert untimed(await run.run()) == untimed(run.result()) == untimed(found)


async def test_a_run_is_awaited_once_at_a_time(lm: AsyncLM) -> None:
    run = UntilValid(lm, "?", is_yes, target=5, max_tokens=20)
    first: Awaitable[Records] = asyncio.create_task(run.run())
    await passes(1)
    with pytest.raises(InvalidRequest, match="under way already"):
        await run.run()
    assert (await first).reason == "complete"


# -- what is shown ----------------------------------------------------------------------------------


def test_a_result_reads_well(lm: AsyncLM) -> None:
    found = generate_valid_sync(lm, "?", is_yes, target=20, seed=2, max_tokens=20)
    made = dataclasses.replace(found.statistics, seconds=1.25)
    assert repr(dataclasses.replace(found, statistics=made, surplus=("Y",))) == (
        f"Records(complete: 20 of 20, 1 beyond, by {made.attempts} attempts in 1.2 s; "
        f"{made.valid / (made.valid + made.invalid):.1%} valid, 0 truncated; "
        f"invalid: ValueError {made.invalid})"
    )


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
