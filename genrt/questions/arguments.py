"""Checks arguments of any kind of question: contexts as callers give them, tables, seeds; adapters."""

from __future__ import annotations

import itertools
import secrets
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from genrt.errors import InvalidRequest
from genrt.numbers import check_int

Table: TypeAlias = torch.Tensor | np.ndarray
"""Numbers in a tensor, on any device, or in an array."""

TokenIds: TypeAlias = Sequence[int] | np.ndarray | torch.Tensor
"""Token ids as callers give them; a request holds them as a tuple of int."""

TOKEN_BYTES = array("I").itemsize
"""The size of a token id in a packed context."""

LAST_SEED = 2**63 - 1
"""The largest seed of a question."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as a request binds it. Every ``add_adapter`` of a name makes a new version, so that
    requests and cached rows never use earlier weights of that name."""

    name: str
    version: int


def integer_list(table: Table, name: str) -> list[int]:
    """Return the ints of a flat array or tensor. Raises InvalidRequest for other shapes and types."""
    if isinstance(table, torch.Tensor):
        dtype = table.dtype
        integers = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    else:
        integers = np.issubdtype(table.dtype, np.integer)
    if table.ndim != 1 or not (integers or len(table) == 0):
        advice = ": give one row of it" if integers and table.ndim == 2 else ""
        raise InvalidRequest(
            f"{name} must be one flat sequence of int, got {table.dtype} "
            f"of shape {list(table.shape)}{advice}"
        )
    found: list[int] = host_array(table, name).tolist() if len(table) else []
    return found


def is_plain_sequence(given: object) -> bool:
    """Return whether this is a sequence, but not text or bytes."""
    return isinstance(given, Sequence) and not isinstance(
        given, str | bytes | bytearray | memoryview
    )


def host_array(table: Table, name: str) -> np.ndarray:
    """Return a tensor or array as a plain array in the host's memory and byte order; not always a copy.

    Raises:
        InvalidRequest: it is sparse, masked or on the device "meta".
    """
    if isinstance(table, np.ndarray):
        if isinstance(table, np.ma.MaskedArray):
            raise InvalidRequest(f"{name}: a masked array says two things; give a plain array")
        return table.astype(table.dtype.newbyteorder("="), copy=False)
    if table.is_meta:
        raise InvalidRequest(
            f"{name}: a tensor on the device 'meta' holds no numbers; give another"
        )
    if table.layout != torch.strided:
        raise InvalidRequest(f"{name}: the tensor is {table.layout}; give a dense one")
    host = table if table.is_cpu else table.cpu()
    try:
        return host.numpy()
    except (TypeError, RuntimeError) as error:
        raise InvalidRequest(f"{name} cannot be read: {error}") from error


def advice_for(given: object) -> str:
    """Return advice for a message about a value that is not token ids; may be empty."""
    match given:
        case Mapping() if "input_ids" in given:
            return "; give its token ids, encoding['input_ids'], or lm.encode(text)"
        case Mapping() if "role" in given:
            return "; for a conversation, give lm.encode_chat(messages)"
        case _ if hasattr(given, "ids") and hasattr(given, "attention_mask"):
            return "; give its token ids, encoding.ids, or lm.encode(text)"
        case str() | bytes():
            return "; for text, give lm.encode(text)"
        case bool():
            return ""
        case int() | np.integer():
            return "; give one token id in a list"
    return "; give a list" if isinstance(given, Iterable) else ""


def check_contexts(
    contexts: Sequence[TokenIds] | Table, name: str = "contexts"
) -> Sequence[TokenIds]:
    """Return a sequence of contexts, without a check of each. Raises InvalidRequest for anything else."""
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


def check_seed(seed: int | None) -> int | None:
    """Return the seed of a question as an int, if there is one. Raises InvalidRequest otherwise."""
    return None if seed is None else check_int("seed", seed, 0, LAST_SEED)


def nonces_of(seed: int | None) -> Iterator[int]:
    """Return a runtime's nonces, which decide draws without a seed. They start at one of 2**62 numbers,
    so that runtimes rarely share them."""
    [first] = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    return itertools.count(int(first) >> 2)


def seed_at(seed: int, place: int) -> int:
    """Return the seed of draw number ``place``; 0 follows the last seed."""
    return (seed + place) % (LAST_SEED + 1)


def seeds_at(seed: int, places: np.ndarray) -> np.ndarray:
    """Return ``seed_at`` for several places at once, uint64 ``[n]``."""
    return (np.uint64(seed) + places.astype(np.uint64)) % np.uint64(LAST_SEED + 1)


def deciding_seed(request: Any) -> int:
    """Return the number that decides the draws of a request: its seed, else its nonce, else a random
    number of the system."""
    if request.seed is None and request.nonce is None:
        return 0 if request.temperature == 0.0 else secrets.randbits(62)
    found: int = request.nonce if request.seed is None else request.seed
    return found
