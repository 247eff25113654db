"""Many texts from one runtime: of a stream of prompts, until enough are valid, as resumable jobs, and as
rollouts and conversations for training."""

from __future__ import annotations

from genrt.generation.conversations import Conversation, Message, Trajectory, splice_turn
from genrt.generation.jobs import Job, JobReport, JobRun
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
from genrt.generation.rollouts import (
    Rollout,
    RolloutOptions,
    StopStrings,
    rollout,
    rollout_samples,
    rollout_sync,
)
from genrt.generation.valid import (
    Prompts,
    Reason,
    Records,
    RecordStatistics,
    UntilValid,
    ValidOptions,
    generate_valid,
    generate_valid_sync,
)
from genrt.generation.validators import Fault, Parse, Validate

__all__ = [
    "AskOptions",
    "Conversation",
    "Failed",
    "Fault",
    "Item",
    "Job",
    "JobReport",
    "JobRun",
    "ManyOptions",
    "Message",
    "OnError",
    "Parse",
    "Prompt",
    "Prompts",
    "Reason",
    "RecordStatistics",
    "Records",
    "Rollout",
    "RolloutOptions",
    "StopStrings",
    "Trajectory",
    "UntilValid",
    "ValidOptions",
    "Validate",
    "generate_many",
    "generate_many_sync",
    "generate_valid",
    "generate_valid_sync",
    "rollout",
    "rollout_samples",
    "rollout_sync",
    "splice_turn",
]
