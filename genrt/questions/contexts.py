"""The context and the adapter of a question, the limits of a model, and seeds.

Nothing here touches an engine. A request that is made in this folder can be computed.
"""

from __future__ import annotations

import itertools
import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from genrt.errors import InvalidRequest
from genrt.numbers import check_int
from genrt.questions.token_ids import Table, TokenIds, advice_for, host_array, id_words

__all__ = [
    "LAST_SEED",
    "TOKEN_BYTES",
    "Adapter",
    "Drawn",
    "Limits",
    "abbreviated",
    "check_contexts",
    "check_seed",
    "nonces_of",
    "seed_at",
    "seed_of",
    "seeds_at",
]

TOKEN_BYTES = array("I").itemsize
"""What a token id takes in a packed context."""

LAST_SEED = 2**63 - 1
"""The largest seed of a question."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as a request binds it: its name and which loading of that name.

    ``version`` grows with every ``add_adapter`` of the name, so a request never meets, and a cache
    never returns, the weights that the name stood for before.
    """

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a model: token ids below ``vocab_size``, contexts up to ``max_model_len``."""

    vocab_size: int
    max_model_len: int

    def token_ids(
        self, token_ids: TokenIds, *, allow_empty: bool = False, name: str = "token ids"
    ) -> tuple[int, ...]:
        """Return token ids as a tuple of int; messages call them ``name``.

        Raises:
            InvalidRequest: they are no flat sequence of ints in the vocabulary, or empty.
        """
        return tuple(id_words(token_ids, self.vocab_size, allow_empty=allow_empty, name=name))


def check_contexts(
    contexts: Sequence[TokenIds] | Table, name: str = "contexts"
) -> Sequence[TokenIds]:
    """Return the contexts, each of which is still to be checked. Raises InvalidRequest, whose message
    calls them ``name``, if these are no contexts in a sequence."""
    given: object = contexts
    if isinstance(given, np.ndarray | torch.Tensor) and given.ndim:
        given = list(host_array(given, name))
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise InvalidRequest(
            f"{name} must be a sequence of token-id sequences, "
            f"got {type(contexts).__name__}{advice_for(given)}"
        )
    if len(given) and isinstance(given[0], int | np.number):
        raise InvalidRequest(
            f"{name} must be a sequence of token-id sequences, got one of them: give [token_ids]"
        )
    return given


def abbreviated(token_ids: Sequence[int]) -> str:
    """Return token ids for messages: their number and the last few, since prompts may be private."""
    if len(token_ids) <= 4:
        return repr(list(token_ids))
    return f"[… {len(token_ids) - 2} tokens, {token_ids[-2]}, {token_ids[-1]}]"


class Drawn(Protocol):
    """A question whose answer is drawn."""

    @property
    def seed(self) -> int | None:
        """The number that fixes the draws, whatever else is in the batch."""
        ...

    @property
    def nonce(self) -> int | None:
        """The number that sets apart equal questions without a seed, whose answers are independent."""
        ...

    @property
    def temperature(self) -> float:
        """The temperature; 0 is greedy."""
        ...


def check_seed(seed: int | None) -> int | None:
    """Return the seed of a question as an int, if there is one. Raises InvalidRequest otherwise."""
    return None if seed is None else check_int("seed", seed, 0, LAST_SEED)


def nonces_of(seed: int | None) -> Iterator[int]:
    """Return the nonces of a runtime with this seed, from which is drawn what is asked without a seed.
    They begin somewhere among 2**62 numbers, so that no two runtimes share them, nor are they the seeds
    that users give."""
    [first] = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    return itertools.count(int(first) >> 2)


def seed_at(seed: int, place: int) -> int:
    """Return the seed of number ``place`` of what is drawn with ``seed``; after the last comes 0."""
    return (seed + place) % (LAST_SEED + 1)


def seeds_at(seed: int, places: np.ndarray) -> np.ndarray:
    """Return ``seed_at`` for several places at once, uint64 ``[n]``."""
    return (np.uint64(seed) + places.astype(np.uint64)) % np.uint64(LAST_SEED + 1)


def seed_of(asked: Drawn) -> int:
    """Return what decides the draws: the seed; without one the nonce; with neither a number from the
    system."""
    if asked.seed is not None:
        return asked.seed
    if asked.nonce is not None:
        return asked.nonce
    return 0 if asked.temperature == 0.0 else secrets.randbits(62)
