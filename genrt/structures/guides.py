"""Structures compiled for a vocabulary: which tokens continue a text, and which may end it.

What a text must be is vLLM's (``v1/structured_output/``): a JSON text has any whitespace between its
parts, and objects only the properties that the schema names, unless it says more of them; a grammar is
EBNF if a line has ``::=``, else Lark. The tokens that end a text are admitted where it is complete, and
only there; after one of them anything may follow.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor

from genrt.errors import EngineUnsupported, InvalidConstraint, InvalidRequest
from genrt.structures.forms import (
    lark_of_choice,
    lark_of_grammar,
    lark_of_regex,
    lark_of_schema,
    syntax_of,
)
from genrt.structures.matching import brief, check_begins, new_matcher, new_tokenizer
from genrt.structures.tags import lark_of_tags
from genrt.structures.tokens import Tokens, set_bits, unpacked
from genrt.tokens.vocabulary import byte_vocab

__all__ = ["Guide", "Guides", "Structure"]

Structure: TypeAlias = tuple[str, str | tuple[str, ...]]
"""An option's name and its value: ``json_schema`` (a JSON text), ``regex``, ``grammar``, ``choice``;
from vLLM's front ends also ``structural_tag`` (a JSON text)."""

MOST_KEPT = 64
"""How many structures stay compiled, the last ones that were asked for."""


class Guides:
    """The structures of one engine's texts, for any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._larks: LRUCache[Structure, str] = LRUCache(MOST_KEPT)
        self._lock = threading.Lock()  # of ``_larks``
        self._compiling = threading.Lock()  # of what follows
        self._starts: LRUCache[Structure, Any] = LRUCache(MOST_KEPT)
        self._vocabulary: Any = None

    def check(self, structure: Structure) -> str:
        """Return a structure as llguidance's Lark, without reading the vocabulary.

        Raises:
            InvalidRequest: it does not compile, no text has it, or it is too large.
        """
        with self._lock:
            lark = self._larks.get(structure)
        if lark is None:
            try:
                lark = _lark_of(*structure)
                check_begins(lark)
            except InvalidConstraint as error:
                raise InvalidRequest(f"{structure[0]}: {error}") from error
            with self._lock:
                self._larks[structure] = lark
        return lark

    def begin(self, structure: Structure, ends: Iterable[int]) -> Guide:
        """Return the guide of a new text, which any of the tokens ``ends`` and the end token end.

        Raises:
            InvalidRequest: as ``check``; or the vocabulary's bytes cannot be told.
        """
        with self._compiling:
            start = self._starts.get(structure)
            if start is None:
                lark = self.check(structure)
                start = new_matcher(self._llguidances(), lark)
                if start.is_error():
                    error = brief(start.get_error())
                    raise InvalidRequest(f"{structure[0]} does not compile: {error}")
                self._starts[structure] = start
            matcher = start.deep_copy()
        every = {each for each in (*ends, self._tokenizer.eos_token_id) if each < self._vocab_size}
        return Guide(structure[0], matcher, self._vocab_size, every)

    def _llguidances(self) -> Any:
        """Return the vocabulary as llguidance has it, read once: some 0.1 s for 50,000 tokens."""
        if self._vocabulary is None:
            try:
                spelt = byte_vocab(self._tokenizer, self._vocab_size)
                self._vocabulary = new_tokenizer(Tokens.read(self._tokenizer, spelt))
            except (EngineUnsupported, InvalidConstraint) as error:
                raise InvalidRequest(
                    f"structures need the vocabulary's bytes and its end token: {error}"
                ) from error
        return self._vocabulary


class Guide:
    """One text's place in its structure."""

    def __init__(self, name: str, matcher: Any, vocab_size: int, ends: Collection[int]) -> None:
        self._name = name
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._after = 0  # how many tokens came with the one that ended the text, and after it

    @property
    def is_over(self) -> bool:
        """True if a token has ended the text."""
        return self._after > 0

    def mask(self) -> Tensor:
        """Return which tokens may follow: bool ``[vocab_size]``, on the CPU.

        Raises:
            InvalidRequest: the structure is too complex to tell.
        """
        return unpacked(self.words().numpy(), self._vocab_size)

    def words(self) -> Tensor:
        """Return which tokens may follow, as a packed mask: int32 ``[⌈vocab_size / 32⌉]``; raises as
        ``mask``."""
        count = -(-self._vocab_size // 32)
        if self.is_over:
            return torch.full((count,), -1, dtype=torch.int32)
        accepting = self._matcher.is_accepting()
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[:count].copy()
        error = self._matcher.get_error()
        # A dead end is an error of this name.
        if error and not error.startswith("NoExtension"):
            raise self._too_complex(error)
        set_bits(words, self._ends, accepting)
        return torch.from_numpy(words)

    def take(self, token_id: int) -> None:
        """Append a token of the mask."""
        if not self.took(token_id):
            raise self._too_complex(self._matcher.get_error())

    def took(self, token_id: int) -> bool:
        """Append a token; return whether it may follow."""
        if self.is_over:
            self._after += 1
            return True
        if token_id in self._ends:
            self._after = int(self._matcher.is_accepting())
            return self.is_over
        return bool(self._matcher.consume_token(token_id))

    def take_back(self, count: int) -> None:
        """Remove the last tokens."""
        after = min(count, self._after)
        self._after -= after
        if count > after:
            self._matcher.rollback(count - after)

    def begin_again(self) -> None:
        """Remove all tokens."""
        self._after = 0
        self._matcher.reset()

    def _too_complex(self, error: str) -> InvalidRequest:
        return InvalidRequest(
            f"{self._name} is too complex to tell which tokens follow, simplify it: {brief(error)}"
        )


def _lark_of(name: str, value: Any) -> str:
    match name:
        case "json_schema":
            return lark_of_schema(value, "flexible", closed=True)
        case "regex":
            return lark_of_regex(value)
        case "choice":
            return lark_of_choice(value)
        case "structural_tag":
            return lark_of_tags(value)
        case _:
            return lark_of_grammar(value, syntax_of(value))
