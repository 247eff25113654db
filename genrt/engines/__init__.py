"""Opens engines by name."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genrt.errors import EngineNotInstalled, InvalidRequest

if TYPE_CHECKING:
    from genrt.engines.protocol import Engine
    from genrt.engines.vllm.rank import Rank

__all__ = ["ENGINES", "check_choice", "open_engine"]

ENGINES = ("vllm", "transformers", "exact")


def check_choice(name: object, model: object, options: dict[str, Any]) -> None:
    """Raise InvalidRequest unless an engine has this name and takes this model and these options."""
    from genrt.numbers import named, shown

    if not isinstance(name, str) or name not in ENGINES:
        known = ", ".join(map(repr, ENGINES))
        raise InvalidRequest(f"engine must be one of {known}, or a function, got {named(name)}")
    if name == "exact":
        from genrt.engines.exact import NGram

        if not isinstance(model, NGram | str | os.PathLike):
            raise InvalidRequest(
                "the exact engine needs a model: genrt.load(NGram(...), engine='exact'), or the "
                f"directory of a saved one, got {type(model).__name__}"
            )
        unknown = sorted(set(options) - {"max_model_len", "max_batch_size"})
        if unknown:
            raise InvalidRequest(f"the exact engine has no options {unknown}")
    elif model is not None and not isinstance(model, str | os.PathLike):
        raise InvalidRequest(
            f"model must be a name, a directory or None for engine {name!r}, got {shown(model)}"
        )


def open_engine(
    name: str,
    model: Any,
    options: dict[str, Any],
    *,
    reserve_bytes: int = 0,
    residency: bool = True,
    deterministic: bool = False,
    rank: Rank | None = None,
) -> Engine:
    """Open an engine for a checkpoint's directory or name; the exact engine also takes an NGram.

    Args:
        reserve_bytes: the bytes of device memory that stay free for the row cache.
        deterministic: whether rows have the same bits whatever the batch. The exact engine looks rows
            up; transformers then computes one sequence a step.
        residency, rank: for vLLM alone, see ``open_vllm``.

    Raises:
        EngineNotInstalled: the engine's packages are missing; the message names the extra.
        GenrtError: the engine could not be opened.
    """
    if name == "exact":
        from genrt.engines.exact import ExactEngine, NGram

        table = model if isinstance(model, NGram) else NGram.load(Path(model))
        return ExactEngine(table, **options)
    if name == "transformers":
        from genrt.engines.transformers import open_transformers

        return open_transformers(
            model, options=options | ({"max_batch_size": 1} if deterministic else {})
        )
    from genrt.engines.vllm.process import process_kept

    with process_kept():
        logger = logging.getLogger("vllm")
        if logger.level == logging.NOTSET:
            # vLLM sets its level when it is opened, but logs already when it is imported.
            with contextlib.suppress(ValueError):  # vLLM reports unknown levels itself
                logger.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR").upper())
        try:
            from genrt.engines.vllm.opening import open_vllm
        except ImportError as error:
            raise EngineNotInstalled(
                f"vLLM cannot be imported ({error}): install it with pip install 'genrt[cpu]', or "
                "'genrt[cuda]' on a GPU machine; `genrt doctor` says what else is missing"
            ) from error
        return open_vllm(
            model,
            options=options,
            reserve_bytes=reserve_bytes,
            residency=residency,
            deterministic=deterministic,
            rank=rank,
        )
