"""A runtime over HTTP: vLLM's OpenAI routes, genrt's own, and a status page (extra ``serve``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from genrt.errors import ExtraNotInstalled

if TYPE_CHECKING:
    from genrt.server.gate import ServerLimits
    from genrt.server.server import Server, serving

__all__ = ["Server", "ServerLimits", "serving"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'genrt.server' has no attribute {name!r}")
    try:
        from genrt.server import gate, server
    except ImportError as error:
        raise ExtraNotInstalled(
            f"serving needs another package ({error}): pip install 'genrt[serve]'"
        ) from error
    return getattr(gate if name == "ServerLimits" else server, name)
