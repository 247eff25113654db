"""Texts that are asked for, and answered, in the engine's own words: for its own front ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from genrt.questions.contexts import TOKEN_BYTES, Adapter, abbreviated

__all__ = ["NativeRequest", "Telling"]


class Telling(Protocol):
    """Takes note of what the reader of a native text's stream has been told."""

    def tell(self, outputs: Iterable[Any]) -> None:
        """Keep in mind that the reader of a stream has been told this, and is not to be told it again."""


@dataclass(frozen=True, slots=True, repr=False)
class NativeRequest:
    """A text after ``token_ids``. The answer is a tuple of outputs as the engine makes them. Two such
    requests are one if their nonces are, which no runtime uses twice.

    Attributes:
        asked: how the text is drawn, and what of it was told, as the engine takes it: a ``Telling``.
        nonce: decides the draws, where ``asked`` has no seed.
        streamed: whether the engine tells of outputs meanwhile; the answer has the rest then.
    """

    token_ids: tuple[int, ...] = field(compare=False)
    asked: Any = field(compare=False)
    nonce: int
    adapter: Adapter | None = None
    streamed: bool = False
    weights_version: int = 0
    weight: ClassVar[int] = 1

    @property
    def nbytes(self) -> int:
        """The memory that the context takes, packed."""
        return len(self.token_ids) * TOKEN_BYTES

    def bound_to(self, adapter: Adapter | None) -> NativeRequest:
        """Return the same question to another adapter."""
        return replace(self, adapter=adapter)

    def of_weights(self, version: int) -> NativeRequest:
        """Return the same question to this version of the weights."""
        return replace(self, weights_version=version)

    def owned(self, result: object) -> object:
        """Return the outputs, which only one caller waits for."""
        return result

    def __repr__(self) -> str:
        return f"NativeRequest({abbreviated(self.token_ids)}, adapter={self.adapter})"
