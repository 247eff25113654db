"""What Hypothesis draws for users' tests: it is right, all kinds of it come, and it shrinks well."""

from __future__ import annotations

import builtins
import importlib
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import find as hypothesis_find
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

import genrt
import genrt.testing
from genrt.constraints import CheckedState, Constraint
from genrt.engines.exact import NGram
from genrt.errors import EngineNotInstalled, InvalidRequest
from genrt.testing import (
    constraints,
    exact_posterior,
    potentials,
    seeds,
    small_lms,
    token_sequences,
)
from genrt.tokens.texts import Potential, Text

SETTINGS = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def found(strategy: Any, wanted: Callable[[Any], bool]) -> Any:
    """The first value of this kind, as it comes."""
    return hypothesis_find(strategy, wanted, settings=settings(SETTINGS, phases=[Phase.generate]))


def simplest(strategy: Any, wanted: Callable[[Any], bool]) -> Any:
    """The value of this kind that a failing test would show."""
    return hypothesis_find(strategy, wanted, settings=SETTINGS)


# -- models -----------------------------------------------------------------------------------


@SETTINGS
@given(st.data(), st.booleans(), st.booleans())
def test_models_are_what_was_asked_for(data: st.DataObject, eos: bool, zeros: bool) -> None:
    model = data.draw(small_lms(max_vocab_size=5, max_order=1, eos=eos, zeros=zeros))
    assert 2 <= model.vocab_size <= 5
    assert model.order in (0, 1)
    assert model.eos_token_id == (model.vocab_size - 1 if eos else None)
    table = model.table
    assert torch.allclose(table.exp().sum(-1), torch.ones(()), atol=1e-5)
    assert zeros or bool(table.isfinite().all())
    tokens = model.vocabulary[: model.vocab_size - eos]
    assert all(tokens)
    assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("a deterministic row", lambda table: bool((table == 0).any())),
        ("a zero", lambda table: bool((table == -math.inf).any())),
        ("nearly zero", lambda table: bool(((table < -50) & (table > -90)).any())),
        ("peaked", lambda table: bool(((table > -0.05) & (table < -1e-4)).any())),
        ("uneven", lambda table: bool(((table > -3) & (table < -1.5)).any())),
        ("a second order", lambda table: table.dim() == 3),
    ],
)
def test_models_of_all_kinds_come(what: str, wanted: Callable[[torch.Tensor], bool]) -> None:
    assert wanted(found(small_lms(), lambda model: wanted(model.table)).table), what


def test_models_shrink_to_what_matters() -> None:
    few = small_lms(max_vocab_size=2, max_order=1)
    model = simplest(few, lambda model: bool((model.table[..., 1] == -math.inf).any()))
    assert model.vocab_size == 2
    assert model.order == 0
    assert model.table.tolist() == [0.0, -math.inf]
    model = simplest(small_lms(max_vocab_size=3, max_order=0), lambda model: True)
    assert (model.vocabulary, model.order) == ((b"a", b""), 0)
    assert model.table.tolist() == pytest.approx([-math.log(2)] * 2)


# -- constraints and potentials ---------------------------------------------------------------

MODEL = NGram.random([b"a", b"b", b"ab", b""], seed=1, eos_token_id=3)
SPLIT = NGram.random([b"\xc3", b"\xa9", b"x", b""], seed=1, eos_token_id=3)


def texts_of(model: NGram, constraint: Constraint) -> set[bytes]:
    return set(exact_posterior(model, [0], max_tokens=3, constraint=constraint).texts)


def test_constraints_of_all_kinds_come() -> None:
    everything = set(exact_posterior(MODEL, [0], max_tokens=2).texts)
    with genrt.load(MODEL, engine="exact") as lm:
        some = constraints(lm)
        for wanted in (
            lambda each: isinstance(each.start(), CheckedState),
            lambda each: not isinstance(each.start(), CheckedState),
            lambda each: "all of" in repr(each),
            lambda each: "asynchronous" in repr(each),
            lambda each: not texts_of(MODEL, each),
            lambda each: texts_of(MODEL, each) >= everything,
            lambda each: 0 < len(texts_of(MODEL, each)) < 3,
            lambda each: b"ab" in texts_of(MODEL, each) and b"" not in texts_of(MODEL, each),
        ):
            found(some, wanted)


def test_constraints_speak_of_characters_that_two_tokens_spell() -> None:
    with genrt.load(SPLIT, engine="exact") as lm:
        found(constraints(lm), lambda each: texts_of(SPLIT, each) == {"é".encode()})


@SETTINGS
@given(potentials(lowest=-2.0, highest=1.0), st.binary(max_size=4))
def test_potentials_are_within_their_bounds(potential: Potential, data: bytes) -> None:
    certain = NGram([data], torch.tensor([0.0]))
    log_weight = exact_posterior(certain, [0], max_tokens=1, potential=potential).log_evidence
    assert log_weight == -math.inf or -2 <= log_weight <= 1


def test_potentials_of_all_kinds_come() -> None:
    empty = Text()
    assert repr(simplest(potentials(), lambda potential: True)) == "tabled(0.0)"
    found(potentials(), lambda each: "asynchronous" not in repr(each) and each(empty) == -math.inf)
    found(potentials(), lambda each: "asynchronous" in repr(each))
    with pytest.raises(NoSuchExample):
        found(potentials(zeros=False), lambda each: "-inf" in repr(each))


# -- the rest ---------------------------------------------------------------------------------


@SETTINGS
@given(token_sequences(3, min_size=1, max_size=4), seeds())
def test_tokens_and_seeds_are_in_range(token_ids: list[int], seed: int) -> None:
    assert 1 <= len(token_ids) <= 4
    assert set(token_ids) <= {0, 1, 2}
    assert 0 <= seed < 2**32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: token_sequences(0), "vocab_size=0"),
        (lambda: token_sequences(2, min_size=3, max_size=2), "min_size=3"),
        (lambda: small_lms(min_vocab_size=0), "min_vocab_size=0"),
        (lambda: small_lms(min_vocab_size=5), "sizes in order"),
        (lambda: small_lms(max_vocab_size=99), "to 28"),
        (lambda: small_lms(min_vocab_size=1), "from 2 to 28"),
        (lambda: small_lms(max_order=-1), "max_order=-1"),
        (lambda: small_lms(max_order=9), "4096"),
        (lambda: potentials(lowest=1.0), "in order"),
        (lambda: potentials(lowest=-math.inf), "finite"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make()


def test_importing_the_tests_of_users_does_not_import_hypothesis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("genrt.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(genrt, "testing", genrt.testing)
    monkeypatch.setitem(sys.modules, "hypothesis", None)  # importing it is an ImportError now
    assert importlib.import_module("genrt.testing").seeds is not seeds


def test_without_hypothesis_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "hypothesis":
            raise ImportError(name)
        return importing(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EngineNotInstalled, match=r"genrt\[testing\]"):
        seeds()
