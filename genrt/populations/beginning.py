"""How populations begin: one prompt ``n`` times, or several prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from genrt.errors import InvalidRequest
from genrt.numbers import check_int
from genrt.populations.home import Home
from genrt.populations.population import Population
from genrt.questions.contexts import check_contexts
from genrt.questions.sequences import MOST_SEQUENCES, Sequences
from genrt.questions.token_ids import TokenIds
from genrt.tokens.encoding import encode_prompt

__all__ = ["Prompts", "begin"]

Prompts: TypeAlias = str | TokenIds | Sequence[str | TokenIds]
"""One prompt, a text or token ids, or several."""


def begin(home: Home, prompt: Prompts, n: int | None, adapter: str | None) -> Population:
    """Return a population that begins with a prompt, ``n`` times, or with prompts of its own each.

    Raises:
        InvalidRequest: no prompt or contexts, or no number for one prompt, or one for contexts;
            UnknownAdapter.
    """
    home.adapters.bound(adapter)
    given: Any = prompt
    is_one = isinstance(given, str) or _is_one(given)
    is_list = isinstance(given, Sequence) and len(given) > 0
    is_several = is_list or getattr(given, "ndim", 0) > 1
    if n is not None and is_several and not is_one:
        raise InvalidRequest("n is for one prompt; contexts begin a sequence each: leave n out")
    if n is not None:
        count = check_int("n", n, 0, MOST_SEQUENCES)
        sequences = Sequences.copies(home.limits, _encoded(home, given), count)
    elif is_one:
        raise InvalidRequest("one prompt begins n sequences: give n, or a list of contexts")
    else:
        contexts = [_encoded(home, each) for each in check_contexts(given)]
        sequences = Sequences.of(home.limits, contexts)
    return Population(home, sequences, adapter)


def _encoded(home: Home, prompt: str | TokenIds) -> TokenIds:
    return encode_prompt(home.tokenizer, prompt) if isinstance(prompt, str) else prompt


def _is_one(given: Any) -> bool:
    """Return whether this is one context, rather than several."""
    if isinstance(given, torch.Tensor | np.ndarray):
        return given.ndim == 1
    return isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], int | np.integer)
