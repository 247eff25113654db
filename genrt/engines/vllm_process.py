"""What else is in the process where vLLM for CPUs is opened, and would keep it from opening.

Private to vLLM and touched here: the builtin ``vars`` as ``vllm.triton_utils.dispatcher`` calls it. Both
hindrances were seen with vLLM 0.32: whoever imports genlm-backend before loading a model meets both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.triton_utils import HAS_TRITON

__all__ = ["undisturbed"]

V2 = "VLLM_USE_V2_MODEL_RUNNER"


@contextmanager
def undisturbed() -> Iterator[None]:
    """Where there is no Triton, so on a CPU, vLLM is opened inside of this; elsewhere it does nothing.

    vLLM then has its runner V1 alone. An environment that demands V2 is put aside, until vLLM has read
    it for the last time: when its engine is made.

    And vLLM looks for its kernels in every value of every module there is. It takes for granted that
    ``vars`` is a dictionary; an object that answers to any name, as numba's library does, makes one up.
    """
    if HAS_TRITON:
        yield
        return
    from vllm.triton_utils import dispatcher

    demanded = os.environ.pop(V2, None)
    dispatcher.vars = _attributes
    try:
        yield
    finally:
        del dispatcher.vars
        if demanded is not None:
            os.environ[V2] = demanded


def _attributes(value: Any) -> Mapping[str, Any]:
    """What is in the object itself, whatever it answers when it is asked for it."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found
