"""The base of all requests: one unit of work for the engine, of any kind.

A request is a frozen value that holds all parameters, so equal requests have equal answers. It is the key
for deduplicating requests, caching rows and matching results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

from genrt.questions.arguments import TOKEN_BYTES, Adapter

Result: TypeAlias = Any
"""The answer to a request; each kind documents its type."""


class Request:
    """A frozen dataclass derives from this class and adds the parameters of its kind. An engine computes
    rows, samples and texts, and scores if its ``scores`` is true. ``answers.py`` answers reads from rows,
    for engines that do not list them in ``reads``."""

    __slots__ = ()

    if (
        TYPE_CHECKING
    ):  # at run time, a dataclass would take these properties for its fields' defaults

        @property
        def token_ids(self) -> tuple[int, ...]:
            """The context."""

        @property
        def adapter(self) -> Adapter | None:
            """The adapter to compute with; ``None`` is the base model."""

        @property
        def weights_version(self) -> int:
            """The version of the model's weights; 0 until the batcher has the request."""

        @property
        def weight(self) -> int:
            """The number of sequences that it asks about: 1, or the size of a population."""

    else:
        weight = 1

    @property
    def nbytes(self) -> int:
        """The memory of the context, packed."""
        return len(self.token_ids) * TOKEN_BYTES

    def bound_to(self, adapter: Adapter | None) -> Self:
        """Return the same question to another adapter."""
        return cast("Self", replace(cast("Any", self), adapter=adapter))

    def of_weights(self, version: int) -> Self:
        """Return the same request for this version of the weights."""
        return cast("Self", replace(cast("Any", self), weights_version=version))

    def owned(self, result: Result) -> Result:
        """Return a result that one caller may change. ``batcher.py`` has copied tensors already."""
        return result
