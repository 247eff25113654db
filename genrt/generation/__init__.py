"""Many texts from one runtime: of a stream of prompts, until enough are valid, as resumable jobs."""

from __future__ import annotations

from genrt.generation.jobs import Job
from genrt.generation.many import (
    AskOptions,
    Failed,
    Item,
    ManyOptions,
    OnError,
    Prompt,
    generate_many,
    generate_many_sync,
)
from genrt.generation.records import BatchStatistics, Reason, Records, RecordStatistics
from genrt.generation.reports import JobReport
from genrt.generation.runs import JobRun
from genrt.generation.valid import (
    Prompts,
    UntilValid,
    ValidOptions,
    generate_valid,
    generate_valid_sync,
)
from genrt.generation.validators import Fault, Parse, Validate

__all__ = [
    "AskOptions",
    "BatchStatistics",
    "Failed",
    "Fault",
    "Item",
    "Job",
    "JobReport",
    "JobRun",
    "ManyOptions",
    "OnError",
    "Parse",
    "Prompt",
    "Prompts",
    "Reason",
    "RecordStatistics",
    "Records",
    "UntilValid",
    "ValidOptions",
    "Validate",
    "generate_many",
    "generate_many_sync",
    "generate_valid",
    "generate_valid_sync",
]
