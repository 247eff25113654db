"""The law of a completion's every token, under combinations of options and structures, against one that
is written out here in float64; where a text ends; and whole texts of a runtime, against enumeration."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jsonschema
import pytest
import torch
from hypothesis import assume, event, given, reject, settings
from hypothesis import strategies as st

import genrt
from benchmarks.structures import drawn_schema
from genrt.engines.completions import CompletionState
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.lm import AsyncLM
from genrt.questions.completions import completion_requests
from genrt.questions.rows import Limits
from genrt.structures.guides import Guides
from genrt.testing import assert_samples_from
from genrt.tokens.sampling import truncate
from genrt.tokens.spellings import Spellings

EOS = 5
MODEL = NGram.random([b"a", b"b", b" c", b"d", b"ab", b""], order=1, seed=7, eos_token_id=EOS)
LETTERS = b'{}[]",:0123456789-. abtruefalsn'
TYPIST = NGram.random(
    [*(bytes([each]) for each in LETTERS), b'{"a":', b"true", b"null", b'"a"', b""],
    order=1,
    seed=2,
    eos_token_id=len(LETTERS) + 4,
)


class Form(NamedTuple):
    """A structure, and all the texts that have it."""

    option: dict[str, Any]
    language: frozenset[str]


class Pattern(NamedTuple):
    """A regular expression, the same in EBNF, and the texts that match."""

    regex: str
    ebnf: str
    language: frozenset[str]


def joined(one: Pattern, other: Pattern) -> Pattern:
    pairs = itertools.product(one.language, other.language)
    return Pattern(
        f"{one.regex}{other.regex}", f"{one.ebnf} {other.ebnf}", frozenset(map("".join, pairs))
    )


def either(one: Pattern, other: Pattern) -> Pattern:
    return Pattern(
        f"({one.regex}|{other.regex})",
        f"({one.ebnf} | {other.ebnf})",
        one.language | other.language,
    )


def perhaps(one: Pattern) -> Pattern:
    return Pattern(f"({one.regex})?", f"({one.ebnf})?", one.language | {""})


literals = st.sampled_from(["a", "b", "ab", " c", "d"]).map(
    lambda text: Pattern(text, f'"{text}"', frozenset([text]))
)
patterns = st.recursive(
    literals,
    lambda inside: st.one_of(
        st.builds(joined, inside, inside), st.builds(either, inside, inside), inside.map(perhaps)
    ),
    max_leaves=6,
)
choices = st.lists(st.text("abd", min_size=1, max_size=4), min_size=1, max_size=4)
forms = st.one_of(
    patterns.map(lambda each: Form({"regex": each.regex}, each.language)),
    patterns.map(lambda each: Form({"grammar": f"root ::= {each.ebnf}"}, each.language)),
    choices.map(lambda texts: Form({"choice": texts}, frozenset(texts))),
    choices.map(
        lambda texts: Form(
            {"grammar": "start: " + " | ".join(f'"{text}"' for text in set(texts))},
            frozenset(texts),
        )
    ).filter(lambda form: not starts_another(form.language)),
)


def starts_another(texts: frozenset[str]) -> bool:
    """Whether one of the texts begins with another: of Lark's terminals the longest match is taken."""
    return any(one != other and other.startswith(one) for one in texts for other in texts)


shares = st.sampled_from([0.05, 0.3, 0.6, 0.9, 1.0])
options_of_laws = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 5)},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5]),
        "top_p": shares,
        "top_k": st.integers(0, 7),
        "min_p": shares,
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 3.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.25, 2.0]),
        "logit_bias": st.dictionaries(
            st.integers(0, 5), st.sampled_from([-100.0, -1.0, 3.0]), max_size=3
        ),
        "bad_words": st.lists(st.sampled_from(["a", "ab", "b c", "dd", "dad"]), max_size=2),
        "min_tokens": st.integers(0, 3),
        "stop": st.lists(st.sampled_from(["a", "ba", "b c", "dd", "ab"]), max_size=2),
        "stop_token_ids": st.lists(st.integers(0, 4), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
    },
).map(lambda options: in_order({**options}))


def in_order(options: dict[str, Any]) -> dict[str, Any]:
    """Options of which ``min_tokens`` is at most ``max_tokens``."""
    options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
    return options


# -- the law, written out ------------------------------------------------------------------------


def text_of(model: NGram, drawn: tuple[int, ...]) -> str:
    kept = [model.vocabulary[token] for token in drawn if token != model.eos_token_id]
    return b"".join(kept).decode()


def ends_of(model: NGram, options: Mapping[str, Any], form: Form | None) -> set[int | None]:
    own = set() if options.get("ignore_eos") and form is None else {model.eos_token_id}
    return own | {*options.get("stop_token_ids", ())}


def follows(
    model: NGram, drawn: tuple[int, ...], token: int, form: Form | None, ends: set[int | None]
) -> bool:
    """Whether the structure lets a token follow: some text begins so, or is complete."""
    closing = ends | {model.eos_token_id}
    if form is None or closing & {*drawn}:
        return True
    if token in closing:
        return text_of(model, drawn) in form.language
    added = text_of(model, (*drawn, token))
    return any(each.startswith(added) for each in form.language)


def law(
    model: NGram,
    prompt: list[int],
    drawn: tuple[int, ...],
    options: Mapping[str, Any],
    form: Form | None,
) -> dict[int, float]:
    """The probability of each token that may be drawn next. A structure that is complete and cannot go on
    ends, however few tokens there are."""
    found = law_from(model, prompt, drawn, options, form)
    if found or form is None or not options.get("min_tokens"):
        return found
    return law_from(model, prompt, drawn, {**options, "min_tokens": 0}, form)


def law_from(
    model: NGram,
    prompt: list[int],
    drawn: tuple[int, ...],
    options: Mapping[str, Any],
    form: Form | None,
) -> dict[int, float]:
    ends = ends_of(model, options, form)
    logits = {}
    for token, logprob in enumerate(model.row([*prompt, *drawn]).tolist()):
        banned = any(
            (*drawn, token)[-len(word) :] == tuple(word)
            for word in map(model.tokenizer.encode, options.get("bad_words", ()))
        )
        early = token in ends and len(drawn) < options.get("min_tokens", 0)
        if banned or early or not follows(model, drawn, token, form, ends):
            continue
        logit = logprob + options.get("logit_bias", {}).get(token, 0.0)
        if token in (*prompt, *drawn):
            penalty = options.get("repetition_penalty", 1.0)
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= options.get("frequency_penalty", 0.0) * drawn.count(token)
        logit -= options.get("presence_penalty", 0.0) * (token in drawn)
        if logit > -math.inf:
            logits[token] = logit
    return truncated(logits, options)


def truncated(logits: dict[int, float], options: Mapping[str, Any]) -> dict[int, float]:
    """Temperature, then min-p, top-k and top-p."""
    heat = options.get("temperature", 1.0)
    if not logits:
        return {}
    if heat == 0.0:
        return {max(logits, key=lambda token: (logits[token], -token)): 1.0}
    kept = softmax({token: logit / heat for token, logit in logits.items()})
    least = options.get("min_p", 0.0) * max(kept.values())
    kept = {token: share for token, share in kept.items() if share >= least * (1 - 1e-9)}
    ranked = sorted(kept, key=lambda token: -kept[token])
    count = options.get("top_k", 0) or len(ranked)
    kept = normalised({token: kept[token] for token in ranked[:count]})
    dropped = 0.0
    for token in reversed([*kept][1:]):
        dropped += kept[token]
        if dropped > 1 - options.get("top_p", 1.0):
            break
        del kept[token]
    return normalised(kept)


def softmax(logits: dict[int, float]) -> dict[int, float]:
    highest = max(logits.values())
    return normalised({token: math.exp(logit - highest) for token, logit in logits.items()})


def normalised(shares: dict[int, float]) -> dict[int, float]:
    total = sum(shares.values())
    return {token: share / total for token, share in shares.items()}


def ended(
    model: NGram, drawn: tuple[int, ...], options: Mapping[str, Any], form: Form | None
) -> tuple[str, str, str | int | None] | None:
    """The text, finish reason and stop reason of what has ended with its last token."""
    least, keep = options.get("min_tokens", 0), options.get("include_stop_str_in_output", False)
    before, text = text_of(model, drawn[:-1]), text_of(model, drawn)
    last = drawn[-1]
    if last in ends_of(model, options, form):
        reason = None if last == model.eos_token_id else last
        return (text if keep else before), "stop", reason
    found = [
        (place + len(stop), -len(stop), stop)
        for stop in options.get("stop", ())
        for place in range(len(text))
        if text.startswith(stop, place) and place + len(stop) > len(before)
    ]
    if found and len(drawn) > least:
        # The first in the list of those that are complete first: as vLLM.
        end = min(found)[0]
        stop = next(s for s in options["stop"] if (end, -len(s), s) in found)
        return text[: end if keep else end - len(stop)], "stop", stop
    if len(drawn) == options["max_tokens"]:
        return text, "length", None
    return None


# -- each token ------------------------------------------------------------------------------------


def begun(model: NGram, prompt: list[int], options: dict[str, Any]) -> tuple[CompletionState, Any]:
    limits = Limits(model.vocab_size, 64)
    [request] = completion_requests(limits, [prompt], None, itertools.count(), 1, options)
    guides = Guides(model.tokenizer, model.vocab_size)
    spellings = Spellings(model.tokenizer, model.vocab_size)
    return CompletionState(request, model.tokenizer, guides, spellings), request.decoding


def next_law(writing: CompletionState, decoding: Any, row: torch.Tensor) -> dict[int, float]:
    law = writing.distribution(row)
    kept = truncate(
        row.log_softmax(-1) if law is None else law,
        temperature=decoding.temperature,
        top_k=decoding.top_k,
        top_p=decoding.top_p,
        min_p=decoding.min_p,
    )
    shares = kept.double().exp().tolist()
    return {token: share for token, share in enumerate(shares) if share > 0}


@settings(deadline=None, max_examples=200)
@given(
    options=options_of_laws,
    form=st.none() | forms,
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    data=st.data(),
)
def test_every_token_has_the_law_of_all_options_together(
    options: dict[str, Any], form: Form | None, prompt: list[int], data: st.DataObject
) -> None:
    writing, decoding = begun(MODEL, prompt, options | (form.option if form else {}))
    drawn: tuple[int, ...] = ()
    while True:
        row = MODEL.row([*prompt, *drawn])
        expected = law(MODEL, prompt, drawn, options, form)
        found = next_law(writing, decoding, row)
        assert found == pytest.approx(expected, abs=1e-5)
        if not expected:
            event("no token is left")
            with pytest.raises(InvalidRequest, match="leave no token to draw"):
                writing.add(-1, row, row)
            return
        token = data.draw(st.sampled_from(sorted(expected)))
        drawn = (*drawn, token)
        completion = writing.add(token, row, row)
        end = ended(MODEL, drawn, options, form)
        if completion is None or end is None:
            assert completion is None
            assert end is None
            continue
        assert (completion.text, completion.finish_reason, completion.stop_reason) == end
        assert completion.token_ids == drawn
        event(f"ended: {completion.finish_reason}")
        if form is not None and end[1:] == ("stop", None):
            assert completion.text in form.language
        return


# -- whole texts -----------------------------------------------------------------------------------


def enumerated(
    model: NGram, prompt: list[int], options: Mapping[str, Any], form: Form | None
) -> dict[tuple[int, ...], float]:
    """The probability of every completion."""
    whole: dict[tuple[int, ...], float] = {}
    begun: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while begun:
        drawn, probability = begun.pop()
        for token, share in law(model, prompt, drawn, options, form).items():
            longer = (*drawn, token)
            if ended(model, longer, options, form) is None:
                begun.append((longer, probability * share))
            else:
                whole[longer] = probability * share
    return whole


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", engine_options={"max_model_len": 64}) as opened:
        yield opened


@settings(deadline=None, max_examples=15)
@given(options=options_of_laws, form=st.none() | forms, seed=st.integers(0, 2**40))
def test_texts_are_drawn_from_the_law_of_all_options_together(
    lm: AsyncLM, options: dict[str, Any], form: Form | None, seed: int
) -> None:
    expected = enumerated(MODEL, [0, 1], options, form)
    assume(sum(expected.values()) > 1 - 1e-9)  # else some texts fail, for no token is left
    given: dict[str, Any] = options | (form.option if form else {})
    drawn = lm.batch_generate_sync([[0, 1]] * 300, seed=seed, **given)
    assert_samples_from([each.token_ids for each in drawn], expected)


@settings(deadline=None, max_examples=40)
@given(options=options_of_laws, form=st.none() | forms, seed=st.integers(0, 2**40))
def test_log_probabilities_are_those_of_the_law_where_they_are_asked_for(
    lm: AsyncLM, options: dict[str, Any], form: Form | None, seed: int
) -> None:
    given: dict[str, Any] = {"seed": seed, "logprobs": 2, "logprobs_mode": "processed_logprobs"}
    try:
        drawn = lm.generate_sync([0, 1], **given, **options, **(form.option if form else {}))
    except InvalidRequest:
        reject()  # no token was left
    for place, (token, own) in enumerate(zip(drawn.token_ids, drawn.logprobs, strict=True)):
        expected = law(MODEL, [0, 1], drawn.token_ids[:place], options, form)
        assert own == pytest.approx(math.log(expected[token]), abs=1e-4)
        for other, logprob in drawn.top_logprobs[place].items():
            assert math.exp(logprob) == pytest.approx(expected.get(other, 0.0), abs=1e-5)


# -- JSON ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def typist() -> Iterator[AsyncLM]:
    with genrt.load(TYPIST, engine="exact", engine_options={"max_model_len": 128}) as opened:
        yield opened


COMPACT = {"x-guidance": {"whitespace_flexible": False}}
VALUES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"enum": [1, "a", None, True]}, [1, "a", None, True]),
    ({"type": "integer", "minimum": -1, "maximum": 12}, [*range(-1, 13)]),
    ({"type": ["boolean", "null"]}, [True, False, None]),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}},
            "required": ["a"],
        },
        [{"a": a} | b for a in (True, False) for b in ({}, {"b": 1}, {"b": 2})],
    ),
    (
        {"type": "array", "items": {"const": "a"}, "maxItems": 2},
        [["a"] * count for count in range(3)],
    ),
]


@pytest.mark.parametrize(("schema", "values"), VALUES, ids=str)
def test_json_texts_are_drawn_from_their_law(
    typist: AsyncLM, schema: dict[str, Any], values: list[Any]
) -> None:
    texts = frozenset(json.dumps(value, separators=(",", ":")) for value in values)
    texts |= {"-0"} if 0 in values and schema.get("type") == "integer" else set()
    form, options = Form({"json_schema": schema | COMPACT}, texts), dict[str, Any](max_tokens=16)
    expected = enumerated(TYPIST, [3], options, form)
    assert sum(expected.values()) == pytest.approx(1.0)
    drawn = typist.batch_generate_sync([[3]] * 800, seed=5, **options, **form.option)
    assert_samples_from([each.token_ids for each in drawn], expected)


def test_any_whitespace_may_stand_between_the_parts_of_a_json_text(typist: AsyncLM) -> None:
    schema = VALUES[3][0]
    texts = typist.batch_generate_sync(
        [[3]] * 60, json_schema=schema, max_tokens=60, seed=1, logit_bias={LETTERS.index(b" "): 2.0}
    )
    whole = [each.text for each in texts if not each.truncated]
    assert any(" " in each for each in whole)
    assert all(json.loads(each) in VALUES[3][1] for each in whole)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**40))
def test_texts_of_a_drawn_schema_validate_unless_they_are_truncated(
    typist: AsyncLM, seed: int
) -> None:
    rules, _ = drawn_schema(random.Random(seed))
    options: dict[str, Any] = {"max_tokens": 100, "logit_bias": {LETTERS.index(b" "): -9.0}}
    try:
        completion = typist.generate_sync([3], json_schema=rules, seed=seed, **options)
    except InvalidRequest:
        reject()  # no value is valid, or none that these letters spell
    event("truncated" if completion.truncated else "whole")
    if not completion.truncated:
        try:
            jsonschema.Draft202012Validator(rules).validate(json.loads(completion.text))
        except OverflowError:
            reject()  # a number beyond all floats, of which jsonschema takes no multiple
