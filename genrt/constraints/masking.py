"""Masks of many states at once: in parallel, each distinct state once, packed or not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, from_numpy

from genrt.constraints.asking import together
from genrt.constraints.grammars import GrammarState
from genrt.constraints.products import CheckedProduct, MaskedProduct
from genrt.constraints.protocols import CheckedState, ConstraintState, State
from genrt.constraints.tokens import Words, packed, size_of, unpacked, words_of
from genrt.errors import InvalidRequest

__all__ = ["abitmasks", "amasks", "bitmasks", "masks"]


def masks(states: Sequence[ConstraintState]) -> Tensor:
    """Bool ``[len(states), vocab_size]``, on the CPU: each state's ``mask``, computed in parallel.

    Raises:
        InvalidRequest: there are no states, they are over vocabularies of different sizes, or one is a
            checked state: those are asked by ``amasks``.
        InvalidConstraint: a grammar exceeded llguidance's limits on memory or work.
    """
    _refuse_checked(states)
    return unpacked(*_words(states))


def bitmasks(states: Sequence[ConstraintState]) -> Tensor:
    """The same packed: int32 ``[len(states), ceil(vocab_size / 32)]``, token ``i`` at bit ``i % 32``
    of word ``i // 32`` (llguidance's layout); the bits beyond the vocabulary are 0. Raises as ``masks``.
    """
    _refuse_checked(states)
    return from_numpy(_words(states)[0])


async def amasks(states: Sequence[State]) -> Tensor:
    """``masks`` off the event loop, of checked states too: these are asked about every token that nothing
    cheap rules out, all states at once.

    After a cancellation nobody is asked anything more; a mask under way in a thread is finished and kept.

    Raises:
        InvalidRequest: there are no states, or they are over vocabularies of different sizes.
        InvalidConstraint: a grammar exceeded llguidance's limits on memory or work.
        Exception: whatever a predicate raised.
    """
    words, vocab_size = await _awords(states)
    return unpacked(words, vocab_size)


async def abitmasks(states: Sequence[State]) -> Tensor:
    """The same packed, as ``bitmasks`` does and ``AsyncLM.draw`` takes it. Raises as ``amasks``."""
    return from_numpy((await _awords(states))[0])


def _refuse_checked(states: Sequence[Any]) -> None:
    for state in states:
        if isinstance(state, CheckedState):
            raise InvalidRequest(
                "a state of a predicate, or of a product with one, has to be asked token by token: "
                "await amasks(states) or abitmasks(states), or its check(token_ids)"
            )


def _words(states: Sequence[State]) -> tuple[Words, int]:
    """The packed masks and the vocabulary's size; of checked states, what nothing cheap rules out."""
    if not states:
        raise InvalidRequest("masks of no states have no width; give at least one state")
    missing: dict[Any, dict[int, GrammarState]] = {}
    for state in _grammar_states(states):
        if state.words is None:
            missing.setdefault(state.vocabulary, {})[id(state)] = state
    for vocabulary, unfilled in missing.items():
        vocabulary.fill(list(unfilled.values()))
    rows: dict[int, tuple[Words, int]] = {}
    for each in states:
        if id(each) not in rows:
            rows[id(each)] = words_of(each), size_of(each)
    sizes = {size for _, size in rows.values()}
    if len(sizes) != 1:
        raise InvalidRequest(
            f"the states are over vocabularies of {sorted(sizes)} tokens; ask for one lm's at a time"
        )
    return np.stack([rows[id(state)][0] for state in states]), sizes.pop()


def _grammar_states(states: Sequence[Any]) -> Iterator[GrammarState]:
    for state in states:
        if isinstance(state, GrammarState):
            yield state
        elif isinstance(state, MaskedProduct | CheckedProduct):
            yield from _grammar_states(state.factors)


async def _awords(states: Sequence[State]) -> tuple[Words, int]:
    words, vocab_size = await asyncio.to_thread(_words, states)
    rows: dict[int, list[int]] = {}
    for row, state in enumerate(states):
        if isinstance(state, CheckedState):
            rows.setdefault(id(state), []).append(row)

    async def ask(same: list[int]) -> None:
        state = states[same[0]]
        if isinstance(state, CheckedState):
            mask = unpacked(words[same[0]], vocab_size).numpy()
            (token_ids,) = mask.nonzero()
            mask[token_ids] = await state.check(token_ids.tolist())
            words[same] = packed(mask)

    await together([ask(same) for same in rows.values()])
    return words, vocab_size
