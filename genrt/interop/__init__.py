"""genrt's runtimes for users of other libraries: one file each, imported by name."""

from __future__ import annotations

__all__: list[str] = []
