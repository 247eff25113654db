"""Many texts from one runtime: of a stream of prompts, until enough are valid, as resumable jobs."""

from __future__ import annotations

from genrt.generation.many import (
    Failed,
    Item,
    ManyOptions,
    OnError,
    Prompt,
    generate_many,
    generate_many_sync,
)

__all__ = [
    "Failed",
    "Item",
    "ManyOptions",
    "OnError",
    "Prompt",
    "generate_many",
    "generate_many_sync",
]
