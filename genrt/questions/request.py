"""One question to the model, of any kind.

A request is a frozen value and holds the whole question, so that equal requests have equal answers:
it is the key by which questions are deduplicated, rows are cached and results come back.

Its ``weight`` is what it counts as wherever requests are counted or bounded: 1, and for a population the
number of its sequences.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from genrt.questions.completions import CompletionRequest, Delta, SampleRequest
from genrt.questions.native import NativeRequest
from genrt.questions.population_draws import PopulationDraw
from genrt.questions.programs import ProgramRequest
from genrt.questions.reads import ReadRequest
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest

__all__ = ["Request", "Result", "Streamed", "Told"]

Request: TypeAlias = (
    LogprobsRequest
    | SampleRequest
    | CompletionRequest
    | NativeRequest
    | ScoreRequest
    | ReadRequest
    | PopulationDraw
    | ProgramRequest
)
"""One question to the model. An engine computes rows, samples and texts, and scores if it is ``Scoring``;
what is read from rows is answered beside it, and replicas run programs."""

Result: TypeAlias = Any
"""What answers a request; the kinds say of what type."""

Streamed: TypeAlias = CompletionRequest | NativeRequest
"""A text of which an engine can tell while it draws it."""

Told: TypeAlias = Delta | tuple[Any, ...]
"""What an engine tells of a text, or of a native one."""
