"""What a simulation raises where something is wrong."""

from __future__ import annotations


class Violation(BaseException):
    """A rule was broken. No ``Exception``: nothing of the runtime may take it for an engine's failure."""
