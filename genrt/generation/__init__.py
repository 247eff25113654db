"""Many texts from one runtime: of a stream of prompts, until enough are valid, as resumable jobs."""

from __future__ import annotations

from genrt.generation.jobs import Job
from genrt.generation.many import (
    Failed,
    Item,
    ManyOptions,
    OnError,
    Prompt,
    generate_many,
    generate_many_sync,
)
from genrt.generation.reports import JobReport
from genrt.generation.runs import JobRun

__all__ = [
    "Failed",
    "Item",
    "Job",
    "JobReport",
    "JobRun",
    "ManyOptions",
    "OnError",
    "Prompt",
    "generate_many",
    "generate_many_sync",
]
