"""genrt: an asyncio auto-batching language-model runtime for probabilistic programming, on vLLM.

    import genrt

    with genrt.load() as lm:
        row = lm.next_token_logprobs_sync(lm.encode("The capital of France is"))

Importing this package imports neither torch nor vllm; the names below are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from genrt.errors import (
    Closed,
    ContextTooLong,
    EngineDied,
    EngineFailed,
    EngineNotInstalled,
    EngineUnsupported,
    ExtraNotInstalled,
    GenrtError,
    InvalidAdapter,
    InvalidConstraint,
    InvalidRequest,
    InvalidWeights,
    JobRefused,
    ModelNotFound,
    NotFinite,
    OutOfMemory,
    OutputFailed,
    Paused,
    StreamCut,
    TimedOut,
    UnknownAdapter,
    UnknownColumn,
)

if TYPE_CHECKING:
    from genrt.contexts import Context
    from genrt.lm import AsyncLM
    from genrt.loading import aload, load
    from genrt.populations import Population
    from genrt.runtime.statistics import Statistics
    from genrt.server.server import serving

__version__ = "0.1.0"

__all__ = [
    "AsyncLM",
    "Closed",
    "Context",
    "ContextTooLong",
    "EngineDied",
    "EngineFailed",
    "EngineNotInstalled",
    "EngineUnsupported",
    "ExtraNotInstalled",
    "GenrtError",
    "InvalidAdapter",
    "InvalidConstraint",
    "InvalidRequest",
    "InvalidWeights",
    "JobRefused",
    "ModelNotFound",
    "NotFinite",
    "OutOfMemory",
    "OutputFailed",
    "Paused",
    "Population",
    "Statistics",
    "StreamCut",
    "TimedOut",
    "UnknownAdapter",
    "UnknownColumn",
    "__version__",
    "aload",
    "constraints",
    "inference",
    "load",
    "serving",
    "testing",
]

_MODULES = frozenset({"constraints", "inference", "testing"})
_FROM = {
    "AsyncLM": "genrt.lm",
    "Context": "genrt.contexts",
    "Population": "genrt.populations",
    "Statistics": "genrt.runtime.statistics",
    "aload": "genrt.loading",
    "load": "genrt.loading",
    "serving": "genrt.server",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"genrt.{name}")
    if name in _FROM:
        return getattr(importlib.import_module(_FROM[name]), name)
    raise AttributeError(f"module 'genrt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
