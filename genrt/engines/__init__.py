"""What computes: one engine a file, opened by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genrt.errors import InvalidRequest

if TYPE_CHECKING:
    from genrt.engine import Engine

__all__ = ["ENGINES", "open_by_name"]

ENGINES = ("vllm", "transformers", "exact")


def open_by_name(
    name: str, model: object, options: dict[str, Any], *, reserve_bytes: int
) -> Callable[[], Engine]:
    """A function that opens engine ``name`` over ``model``; what can be checked now raises now.

    ``reserve_bytes`` of the device's memory are left for the row cache.

    Raises:
        InvalidRequest: an unknown name, or a model that is not of the engine's kind.
        ModelNotFound: a directory that does not exist or holds no checkpoint.
    """
    if name == "exact":
        return _open_exact(model, options)
    if name not in ENGINES:
        known = ", ".join(map(repr, ENGINES))
        raise InvalidRequest(f"engine must be one of {known}, or a function, got {name!r}")
    if model is not None and not isinstance(model, str | os.PathLike):
        raise InvalidRequest(
            f"model must be a name, a directory or None for engine {name!r}, "
            f"got {type(model).__name__}"
        )

    def open_checkpoint() -> Engine:
        from genrt import models

        checkpoint = models.resolve(model)
        if name == "transformers":
            from genrt.engines.transformers import open_transformers

            return open_transformers(checkpoint, options=options)
        from genrt.engines.vllm import open_vllm

        return open_vllm(checkpoint, options=options, reserve_bytes=reserve_bytes)

    return open_checkpoint


def _open_exact(model: object, options: dict[str, Any]) -> Callable[[], Engine]:
    from genrt.engines.exact import ExactEngine, NGram

    if isinstance(model, str | os.PathLike):
        model = NGram.load(Path(model))
    if not isinstance(model, NGram):
        raise InvalidRequest(
            "the exact engine needs a model: genrt.load(NGram(...), engine='exact'), "
            f"got {type(model).__name__}"
        )
    unknown = set(options) - {"max_model_len", "max_batch_size"}
    if unknown:
        raise InvalidRequest(f"the exact engine has no options {sorted(unknown)}")
    table = model
    return lambda: ExactEngine(table, **options)
