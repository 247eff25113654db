"""Computes the masks of many states at once: in parallel, each distinct state once, packed or not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, from_numpy

from genrt.constraints.grammars import GrammarState
from genrt.constraints.products import ProductState
from genrt.constraints.protocols import CheckedState, ConstraintState, State, is_checked
from genrt.constraints.tokens import PackedState, words_of
from genrt.errors import InvalidRequest
from genrt.runtime.concurrency import together
from genrt.structures.tokens import Words, packed, unpacked

QUICK_BYTES = 2 << 20
"""Computed masks of up to this many bytes are copied on the event loop, in about 0.2 ms."""


def masks(states: Sequence[ConstraintState]) -> Tensor:
    """Return each state's ``mask``, computed in parallel: bool ``[len(states), vocab_size]``, on the CPU.

    Raises:
        InvalidRequest: there are no states, their vocabularies have different sizes, or one is a checked
            state, which needs ``amasks``.
        InvalidConstraint: a grammar exceeded llguidance's limits on memory or work.
    """
    _refuse_checked(states)
    return unpacked(*_words(states))


def bitmasks(states: Sequence[ConstraintState]) -> Tensor:
    """Return ``masks`` packed: int32 ``[len(states), ceil(vocab_size / 32)]``.

    Token ``i`` is bit ``i % 32`` of word ``i // 32`` (llguidance's layout); bits beyond the vocabulary
    are 0. Raises as ``masks``.
    """
    _refuse_checked(states)
    return from_numpy(_words(states)[0])


async def amasks(states: Sequence[State]) -> Tensor:
    """Return ``masks``, computed off the event loop, also of checked states.

    Each checked state checks every token that its ``mask`` allows, all states concurrently. After a
    cancellation no further check starts; a mask under way in a thread is finished and cached.

    Raises:
        InvalidRequest: there are no states, or their vocabularies have different sizes.
        InvalidConstraint: a grammar exceeded llguidance's limits on memory or work.
        Exception: any exception that a predicate raised.
    """
    words, vocab_size = await _awords(states)
    return unpacked(words, vocab_size)


async def abitmasks(states: Sequence[State]) -> Tensor:
    """Return ``amasks`` packed in the layout of ``bitmasks``, which ``AsyncLM.draw`` accepts. Raises as
    ``amasks``."""
    return from_numpy((await _awords(states))[0])


def _refuse_checked(states: Sequence[State]) -> None:
    if any(map(is_checked, _checked_list(states))):
        raise InvalidRequest(
            "a state of a predicate, or of a product with one, has to be asked token by token: "
            "await amasks(states) or abitmasks(states), or its check(token_ids)"
        )


def _checked_list(states: Sequence[State]) -> Sequence[State]:
    if not isinstance(states, Sequence):
        raise InvalidRequest(f"the states are {states!r}: give a list of states")
    if not states:
        raise InvalidRequest("masks of no states have no width; give at least one state")
    for state in states:
        if not hasattr(state, "mask"):
            raise InvalidRequest(
                f"{state!r} is no state of a constraint: give constraint.start(), or what follows it"
            )
    return states


def fill(states: Iterable[State]) -> None:
    """Compute the missing masks of grammar states in parallel, including states inside products. Raises
    InvalidConstraint as ``masks``."""
    missing: dict[Any, dict[int, GrammarState]] = {}
    for state in _grammar_states(states):
        if state.words is None:
            missing.setdefault(state.vocabulary, {})[id(state)] = state
    for vocabulary, unfilled in missing.items():
        vocabulary.fill(list(unfilled.values()))


def are_quick(states: Iterable[Any]) -> bool:
    """Return whether advancing these states and computing their masks is faster than starting a thread,
    judged by the last time."""
    return all(isinstance(each, GrammarState) and each.vocabulary.is_quick for each in states)


def _words(states: Sequence[State]) -> tuple[Words, int]:
    """Return the packed masks and the vocabulary's size. A checked state's mask is an upper bound, before
    any ``check``."""
    distinct = {id(state): state for state in states}
    fill(distinct.values())
    rows = {key: words_of(state) for key, state in distinct.items()}
    sizes = {size for _, size in rows.values()}
    if len(sizes) != 1:
        raise InvalidRequest(
            f"the states are over vocabularies of {sorted(sizes)} tokens; ask for one lm's at a time"
        )
    words = np.concatenate([rows[id(state)][0] for state in states])
    return words.reshape(len(states), -1), sizes.pop()


def _known(states: Sequence[Any]) -> tuple[Words, int] | None:
    """Return the result of ``_words`` if all masks are computed, of one vocabulary, and quick to copy;
    otherwise ``None``."""
    if not all(issubclass(kind, PackedState) for kind in {*map(type, states)}):
        return None
    known = [state.words for state in states if state.words is not None]
    sizes = {state.vocab_size for state in states}
    if len(known) < len(states) or len(sizes) > 1 or known[0].nbytes * len(known) > QUICK_BYTES:
        return None
    words = np.frombuffer(bytearray().join(known), np.int32)  # faster than np.concatenate
    return words.reshape(len(known), -1), sizes.pop()


def _grammar_states(states: Iterable[Any]) -> Iterator[GrammarState]:
    for state in states:
        if isinstance(state, GrammarState):
            yield state
        elif isinstance(state, ProductState):
            yield from _grammar_states(state.factors)


async def _awords(states: Sequence[State]) -> tuple[Words, int]:
    known = _known(_checked_list(states))
    words, vocab_size = await asyncio.to_thread(_words, states) if known is None else known
    checked: dict[int, tuple[CheckedState, list[int]]] = {}
    for row, state in enumerate(states):
        if is_checked(state):
            checked.setdefault(id(state), (state, []))[1].append(row)
    if not checked:
        return words, vocab_size

    async def ask(state: CheckedState, rows: list[int]) -> None:
        mask = unpacked(words[rows[0]], vocab_size).numpy()
        (token_ids,) = mask.nonzero()
        answers = await state.check(token_ids.tolist())
        if len(answers) != len(token_ids):
            raise InvalidRequest(
                f"{state!r} gave {len(answers)} answers about {len(token_ids)} tokens: give one each"
            )
        mask[token_ids] = answers
        words[rows] = packed(mask)

    await together([ask(state, rows) for state, rows in checked.values()])
    return words, vocab_size
