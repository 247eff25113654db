"""Hypothesis strategies for testing samplers: small models, constraints, potentials, prompts, seeds."""

from __future__ import annotations

import asyncio
import math
import string
import zlib
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from genrt.constraints import Constraint, all_of, predicate, regex, strings
from genrt.engines.exact import NGram
from genrt.errors import EngineNotInstalled, InvalidRequest
from genrt.lm import AsyncLM
from genrt.tokens.texts import Potential, Text

if TYPE_CHECKING:
    from hypothesis import strategies as st
    from hypothesis.strategies import SearchStrategy
else:

    class _Strategies:
        """``hypothesis.strategies``, imported on first use."""

        def __getattr__(self, name: str) -> Any:
            try:
                from hypothesis import strategies
            except ImportError as error:
                raise EngineNotInstalled(
                    'Hypothesis is not installed: pip install "genrt[testing]"'
                ) from error
            return getattr(strategies, name)

    st = _Strategies()


LETTERS = [b"a", b"b", b"ab", b"ba"] + [letter.encode() for letter in string.ascii_lowercase[2:]]
"""Tokens in the order of preference: two letters, their combinations, and further letters."""

NEAR_ZERO = (-75.0, -55.0)
"""Log-weights of very unlikely tokens, about 1e-32 to 1e-24, which float32 can still represent."""

NOTHING, EVERYTHING = r"[^\d\D]", "(?s:.*)"
"""Patterns that match no text and every text."""


_RULES: dict[str, Callable[..., Any]] = {
    "always": lambda text: True,
    "never": lambda text: False,
    # Refuses no prefix, so a text fails only at its end.
    "never_finished": lambda text: not text.finished,
    "even_when_finished": lambda text: not text.finished or len(text.bytes) % 2 == 0,
    # Does not depend on bytes alone.
    "at_most_tokens": lambda text, most: len(text.token_ids) <= most,
    "without": lambda text, part: part.encode() not in text.bytes,
    "containing": lambda text, part: not text.finished or part.encode() in text.bytes,
    "hashed": lambda text, divisor: not text.finished or zlib.crc32(text.bytes) % divisor == 0,
    # A potential: one of these log-weights, selected by the text's bytes and not by its tokens.
    "tabled": lambda text, *weights: weights[zlib.crc32(text.bytes) % len(weights)],
}


class Judgement:
    """A function of a text: a rule's name and its further arguments."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.name = name
        self.arguments = arguments

    def __call__(self, text: Text) -> Any:
        return _RULES[self.name](text, *self.arguments)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


class Asynchronous:
    """The same judgement as a coroutine function."""

    def __init__(self, judgement: Judgement) -> None:
        self.judgement = judgement

    async def __call__(self, text: Text) -> Any:
        await asyncio.sleep(0)
        return self.judgement(text)

    def __repr__(self) -> str:
        return f"asynchronous({self.judgement})"


def seeds() -> SearchStrategy[int]:
    """Draw seeds from 0 up that every random generator accepts."""
    return st.integers(0, 2**32 - 1)


def token_sequences(
    vocab_size: int, *, min_size: int = 0, max_size: int = 8
) -> SearchStrategy[list[int]]:
    """Draw token ids below ``vocab_size``: prompts, contexts. They shrink to few tokens, and to token 0.

    Raises:
        InvalidRequest: there is no such sequence.
    """
    if vocab_size < 1 or not 0 <= min_size <= max_size:
        raise InvalidRequest(
            f"vocab_size={vocab_size}, min_size={min_size}, max_size={max_size}: give at least one "
            "token, and sizes from 0 up in order"
        )
    return st.lists(st.integers(0, vocab_size - 1), min_size=min_size, max_size=max_size)


def small_lms(
    *,
    min_vocab_size: int = 2,
    max_vocab_size: int = 4,
    max_order: int = 2,
    eos: bool = True,
    zeros: bool = True,
) -> SearchStrategy[NGram]:
    """Draw exact models of any distribution.

    ``genrt.load(model, engine="exact")`` runs them, and ``exact_posterior`` enumerates their texts. Each
    row is uniform, arbitrary, or has a single token. Models shrink to two tokens, order 0 and uniform
    rows. With few tokens and a small ``max_tokens``, enumeration takes milliseconds.

    Args:
        min_vocab_size: including the end token.
        max_order: the largest number of context tokens that count. The model's table has one dimension
            more.
        eos: whether there is an end token; it is the last one.
        zeros: whether tokens may be impossible, and so whole texts, and prefixes without a possible end.
            Without it the least probability is about 1e-30.

    Raises:
        InvalidRequest: a size or the order is out of range.
        EngineNotInstalled: Hypothesis is missing.
    """
    if not 1 + eos <= min_vocab_size <= max_vocab_size <= len(LETTERS):
        raise InvalidRequest(
            f"min_vocab_size={min_vocab_size} and max_vocab_size={max_vocab_size}: give sizes in order, "
            f"from {1 + eos} to {len(LETTERS)}"
        )
    if max_order < 0 or max_vocab_size ** (max_order + 1) > 4096:
        raise InvalidRequest(
            f"max_order={max_order}: give an order from 0 up, so low that "
            "max_vocab_size ** (max_order + 1) is at most 4096"
        )

    def model(shape: tuple[int, int]) -> SearchStrategy[NGram]:
        size, order = shape
        rows = st.lists(
            _row_weights(size, zeros=zeros),
            min_size=size**order,
            max_size=size**order,
        )
        return st.builds(
            NGram,
            _vocabularies(size, eos=eos),
            rows.map(lambda drawn: torch.tensor(drawn).view([size] * (order + 1))),
            eos_token_id=st.just(size - 1 if eos else None),
        )

    sizes = st.integers(min_vocab_size, max_vocab_size)
    return st.tuples(sizes, st.integers(0, max_order)).flatmap(model)


def constraints(lm: AsyncLM) -> SearchStrategy[Constraint]:
    """Draw constraints over this runtime's texts.

    They are finite sets of strings, regular expressions, predicates, and products of two constraints.
    Some accept no text, some accept every text, and some accept only texts that the model's tokens cannot
    spell. They shrink to few and short parts.

    The runtime must be open, so draw them in the body of a test: ``data.draw(constraints(lm))``, with
    ``data=st.data()``.

    Raises:
        EngineNotInstalled: Hypothesis is missing.
    """
    alphabet = _alphabet(lm.byte_vocab)
    texts = st.text(st.sampled_from(alphabet), max_size=4)
    each = st.one_of(
        st.lists(texts, min_size=1, max_size=5, unique=True).map(lambda some: strings(some, lm)),
        _patterns(alphabet).map(lambda pattern: regex(pattern, lm)),
        _rules(alphabet).map(lambda rule: predicate(rule, lm, name=repr(rule))),
    )
    return st.one_of(each, st.tuples(each, each).map(lambda both: all_of(*both)))


def potentials(
    *, lowest: float = -6.0, highest: float = 0.0, zeros: bool = True
) -> SearchStrategy[Potential]:
    """Draw log-weights of texts, finished or not, by their bytes: plain and coroutine functions.

    Args:
        lowest: the lower bound of finite log-weights.
        highest: their upper bound; 0 keeps weights at most 1, as ``assert_unbiased`` assumes.
        zeros: whether a text may have -inf. Use False for a twist.

    Raises:
        InvalidRequest: bounds that are not finite, or out of order.
    """
    if not -math.inf < lowest <= highest < math.inf:
        raise InvalidRequest(f"lowest={lowest} and highest={highest}: give finite numbers in order")
    value = st.one_of(st.just(highest), st.floats(lowest, highest))
    if zeros:
        value = st.one_of(value, st.just(-math.inf))
    return _also_asynchronous(
        st.lists(value, min_size=1, max_size=7).map(lambda values: Judgement("tabled", *values))
    )


def _rules(alphabet: list[str]) -> SearchStrategy[Judgement | Asynchronous]:
    """Draw predicates. A predicate that refuses a prefix refuses all texts that start with it."""
    characters = st.sampled_from(alphabet)
    rules: dict[str, list[SearchStrategy[Any]]] = {
        "always": [],
        "even_when_finished": [],
        "at_most_tokens": [st.integers(0, 3)],
        "without": [characters],
        "containing": [characters],
        "hashed": [st.integers(2, 4)],
        "never_finished": [],
        "never": [],
    }
    return _also_asynchronous(
        st.one_of([st.builds(Judgement, st.just(name), *of) for name, of in rules.items()])
    )


def _also_asynchronous(
    plain: SearchStrategy[Judgement],
) -> SearchStrategy[Judgement | Asynchronous]:
    return st.one_of(plain, plain.map(Asynchronous))


def _row_weights(size: int, *, zeros: bool) -> SearchStrategy[list[float]]:
    """Draw the log-weights of one row: uniform, arbitrary, or a single token."""
    entries = [st.just(0.0), st.floats(-8, 0, width=32), st.floats(*NEAR_ZERO, width=32)]
    if zeros:
        entries.append(st.just(-math.inf))
    rest = -math.inf if zeros else NEAR_ZERO[0]

    def alone(place: int) -> list[float]:
        return [0.0 if token == place else rest for token in range(size)]

    def possible(row: list[float]) -> list[float]:
        return row if max(row) > -math.inf else [0.0, *row[1:]]

    return st.one_of(
        st.just([0.0] * size),
        st.lists(st.one_of(entries), min_size=size, max_size=size).map(possible),
        st.integers(0, size - 1).map(alone),
    )


def _vocabularies(size: int, *, eos: bool) -> SearchStrategy[list[bytes]]:
    letters = st.sampled_from(LETTERS[: size - eos + 4])
    tokens = st.lists(letters, min_size=size - eos, max_size=size - eos, unique=True)
    if not eos:
        return tokens
    ends = st.sampled_from([b"", b"<end>"])
    return st.tuples(tokens, ends).map(lambda drawn: [*drawn[0], drawn[1]])


def _alphabet(vocabulary: list[bytes]) -> list[str]:
    """Return up to eight characters spelled by one or two tokens, earlier tokens first, and a new one."""
    found: dict[str, None] = {}
    for first, second in product(vocabulary[:32], [b"", *vocabulary[:32]]):
        try:
            found.update(dict.fromkeys((first + second).decode()))
        except UnicodeDecodeError:
            continue
    absent = next(letter for letter in "zyxwvutsrqponm§" if letter not in found)
    return [*list(found)[:8], absent]


def _patterns(alphabet: list[str]) -> SearchStrategy[str]:
    """Draw regular expressions, mostly short."""
    characters = st.sampled_from([*map(_escaped_pattern, alphabet), "(?s:.)"])

    def larger(inner: SearchStrategy[str]) -> SearchStrategy[str]:
        repeated: Callable[[tuple[str, str]], str] = lambda drawn: f"(?:{drawn[0]}){drawn[1]}"
        return st.one_of(
            st.lists(inner, min_size=2, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
            st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"])).map(repeated),
        )

    patterns = st.recursive(characters, larger, max_leaves=5)
    return st.one_of(patterns, st.sampled_from([EVERYTHING, NOTHING, ""]))


def _escaped_pattern(text: str) -> str:
    """Return the pattern that matches this text alone."""
    return "".join(f"\\{each}" if each in r"\.+*?()|[]{}^$#&-~/" else each for each in text)
