"""Prefixes: contexts that many questions begin with, computed once and kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias, TypedDict

import torch
from torch import Tensor

from genrt.questions.contexts import Adapter, Limits
from genrt.questions.reads import Answering, Read, ReadRequest, Wanted
from genrt.questions.rows import row_request
from genrt.questions.token_ids import TokenIds

__all__ = ["KeptContext", "Prefix", "PrefixOptions", "WarmUpOptions", "prefix_request"]

Prefix: TypeAlias = str | TokenIds | Sequence[Mapping[str, Any]]
"""What questions begin with: a text, token ids, or the messages that begin a conversation."""


class PrefixOptions(TypedDict, total=False):
    """The options that belong to a prefix.

    Attributes:
        adapter: the name of the adapter that is asked; by default the base model.
        tools: of a conversation: what the model may call, as ``AsyncLM.chat`` takes it.
        chat_template_kwargs: of a conversation: other options of its template.
    """

    adapter: str | None
    tools: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


class WarmUpOptions(PrefixOptions, total=False):
    """The options of ``AsyncLM.warm_up``: those of ``PrefixOptions`` and of every question.

    Attributes:
        timeout: after so many seconds TimedOut is raised. Who leaves during the step that ends the
            computation, so or cancelled, may still have the prefix kept.
    """

    timeout: float | None


@dataclass(frozen=True, slots=True)
class KeptContext(Wanted):
    """Wanted of a row: that its context is computed, and stays so; the answer is ``True``."""

    computes: ClassVar[bool] = True

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[bool]:
        """Have the engine keep the contexts, and the cache their rows: they are likely to be asked."""
        for read in reads:
            engine.keep(read)
            engine.keep_context(read)
            yield True

    def is_answer(self, row: Tensor, result: object, *, tolerance: float = 0.0) -> bool:
        """Return whether this says that the context is computed."""
        return result is True

    @classmethod
    def examples(cls, vocab_size: int, generator: torch.Generator) -> list[Self]:
        """Return the only one there is."""
        return [cls()]


def prefix_request(limits: Limits, token_ids: TokenIds, adapter: Adapter | None) -> ReadRequest:
    """Return the request to compute and keep a context; raises as ``row_request``."""
    return ReadRequest(row_request(limits, token_ids, adapter), KeptContext())
