"""The kinds of what is read from rows: what tests an engine, or genrt, asks every one of them."""

from __future__ import annotations

from genrt.questions.candidates import Candidates
from genrt.questions.draws import DrawToken
from genrt.questions.host_rows import HostRow
from genrt.questions.prefixes import KeptContext
from genrt.questions.reads import Wanted
from genrt.questions.tops import TopTokens

__all__ = ["READ_KINDS"]

READ_KINDS: tuple[type[Wanted], ...] = (DrawToken, TopTokens, Candidates, HostRow, KeptContext)
"""Every class of a ``ReadRequest``'s ``wanted``."""
