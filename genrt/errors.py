"""Everything genrt raises.

::

    GenrtError
    ├── InvalidRequest (ValueError)      the question itself is wrong; no engine was asked
    │   ├── ContextTooLong               more tokens than the engine's max_model_len allows
    │   ├── UnknownAdapter (LookupError) no adapter of that name is loaded
    │   └── UnknownColumn (LookupError)  a job's prompts need a column that a row lacks
    ├── InvalidAdapter (ValueError)      a directory that is not a safe LoRA adapter
    ├── InvalidWeights (ValueError)      new weights that do not fit the model; nothing has changed
    ├── InvalidConstraint (ValueError)   a constraint that does not compile
    ├── ModelNotFound (FileNotFoundError)  no such checkpoint directory or model name
    ├── ExtraNotInstalled (ImportError)  a package of an optional extra is missing
    │   └── EngineNotInstalled           … without which this engine cannot run
    ├── EngineUnsupported (RuntimeError) this version or set-up of the engine is refused at start
    ├── EngineFailed (RuntimeError)      the engine raised; the requests of that step got this
    │   ├── EngineDied                   … and can't go on: restart it, or load again
    │   ├── Paused                       … or its owner paused it: ask again later
    │   ├── StreamCut                    … or it cannot continue a partly delivered text: ask again
    │   ├── OutOfMemory                  … because the device's memory ran out, for this request alone
    │   └── NotFinite                    the model's logits were NaN, +inf or all -inf
    ├── JobRefused (RuntimeError)        a job's output is not its own, or was made from something else
    ├── OutputFailed (OSError)           a job's output cannot be written; written lines stay
    ├── TimedOut (TimeoutError)          the answer took longer than the caller would wait
    └── Closed (RuntimeError)            the runtime was closed before the answer came

Messages say what to do. An error of another library is translated once, where it enters genrt, and
stays reachable as ``__cause__``.
"""

from __future__ import annotations

__all__ = [
    "Closed",
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
    "StreamCut",
    "TimedOut",
    "UnknownAdapter",
    "UnknownColumn",
]

WAS_CLOSED = "the runtime was closed: restart it, or load it again"
"""The message for questions after the runtime was closed, or still waiting then."""


class GenrtError(Exception):
    """Base of every error that genrt raises; its only argument is the message."""

    def fresh(self) -> GenrtError:
        """Return an equal error with a traceback of its own, so that every waiter can raise one."""
        again = type(self)(*self.args)
        again.__cause__ = self.__cause__
        return again

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InvalidRequest(GenrtError, ValueError):
    """The question is wrong in itself: token ids, types, ranges, parameters."""


class ContextTooLong(InvalidRequest):
    """The token ids and the tokens to generate exceed the engine's ``max_model_len``."""


class UnknownAdapter(InvalidRequest, LookupError):
    """No adapter of that name is loaded: it never was, or it has been removed."""


class UnknownColumn(InvalidRequest, LookupError):
    """A job's template or its column of messages is not among a row's columns."""


class InvalidAdapter(GenrtError, ValueError):
    """The directory does not hold a LoRA adapter in safetensors form, or it does not fit the model."""


class InvalidWeights(GenrtError, ValueError):
    """New weights do not fit the model: a tensor is missing, unknown, or of another shape or type."""


class InvalidConstraint(GenrtError, ValueError):
    """A regular expression, schema or grammar does not compile, or an argument of a constraint is
    wrong."""


class ModelNotFound(GenrtError, FileNotFoundError):
    """No checkpoint directory, and no model name that can be loaded."""


class ExtraNotInstalled(GenrtError, ImportError):
    """A package of an optional extra is missing; the message names the extra."""


class EngineNotInstalled(ExtraNotInstalled):
    """The engine's packages are not installed; the message names the extra that brings them."""


class EngineUnsupported(GenrtError, RuntimeError):
    """The engine works in a way that genrt does not know, and is refused at start."""


class EngineFailed(GenrtError, RuntimeError):
    """The engine raised while it computed; the original error is ``__cause__``."""


class EngineDied(EngineFailed):
    """The engine can't go on, and was closed: ``AsyncLM.restart`` opens another one."""


class Paused(EngineFailed):
    """The runtime is paused or asleep, and refuses questions meanwhile: ask again later."""


class StreamCut(EngineFailed):
    """A stream delivered a part of a text, and the weights or the engine changed, so that the rest would
    not fit. Ask again."""


class OutOfMemory(EngineFailed):
    """The engine's device ran out of memory, with this request alone in flight."""


class NotFinite(EngineFailed):
    """The model's logits hold NaN or +inf, or only -inf: there is no row."""


class JobRefused(GenrtError, RuntimeError):
    """A job's output belongs to something else, or its inputs have changed since."""


class OutputFailed(GenrtError, OSError):
    """A job's output cannot be written: the disk is full, for example. A resume goes on from there."""


class TimedOut(GenrtError, TimeoutError):
    """The answer took longer than the caller would wait; the question was withdrawn."""


class Closed(GenrtError, RuntimeError):
    """The runtime was closed; it answers no more questions."""
