"""Opens vLLM so that it neither disturbs the process nor is disturbed by it.

While vLLM opens, these are replaced: the builtins ``vars`` and ``hasattr`` as
``vllm.triton_utils.dispatcher`` calls them, ``np`` as the V2 runner's sampling states call it,
``torch.cpu._init_amx``, and vLLM's operator ``init_cpu_memory_env``. All the problems were seen with vLLM
0.32. The first two occur if genlm-backend is imported before a model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from vllm.triton_utils import HAS_TRITON

__all__ = ["undisturbed"]

V2 = "VLLM_USE_V2_MODEL_RUNNER"
BIND = "init_cpu_memory_env"


@contextmanager
def undisturbed() -> Iterator[None]:
    """Open vLLM inside this context.

    The V2 runner seeds its warm-up requests from numpy's global generator, which belongs to the user.
    Here it gets another generator.

    The rest applies where there is no Triton, so on CPUs:

    - vLLM supports only its runner V1 there. An environment variable that demands V2 is set aside until
      vLLM has read it for the last time, when its engine is made.
    - vLLM looks for its kernels in every value of every module. It assumes that ``vars`` returns a
      dictionary; an object that answers to any name, as numba's library does, returns a made-up object. A
      deprecated object, such as ``torch.distributed.reduce_op``, warns on any attribute access.
    - vLLM's bfloat16 attention uses a processor's AMX tiles without requesting them from Linux. That
      kills the process, unless a large matrix product has requested them before.
    - vLLM binds the process's memory to one node and reports it on standard error. With a single node
      the binding has no effect, so it is skipped.
    """
    with _seeds_of_its_own():
        if HAS_TRITON:
            yield
        else:
            with _without_triton():
                yield


@contextmanager
def _without_triton() -> Iterator[None]:
    from vllm.triton_utils import dispatcher

    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()  # returns False without AMX
    demanded = os.environ.pop(V2, None)
    dispatcher.vars, dispatcher.hasattr = _attributes, _has
    try:
        with _unbound():
            yield
    finally:
        del dispatcher.vars, dispatcher.hasattr
        if demanded is not None:
            os.environ[V2] = demanded


class _Numpy(ModuleType):
    """numpy with another generator."""

    def __init__(self) -> None:
        super().__init__(np.__name__)
        self.random = np.random.RandomState()

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@contextmanager
def _seeds_of_its_own() -> Iterator[None]:
    """Let the V2 runner's sampling states draw seeds from their own generator."""
    from vllm.v1.worker.gpu.sample import states

    states.np = _Numpy()
    try:
        yield
    finally:
        states.np = np


@contextmanager
def _unbound() -> Iterator[None]:
    """Disable the memory binding if there is a single memory node."""
    from vllm.utils import cpu_resource_utils

    operators = torch.ops._C
    if len(cpu_resource_utils.get_visible_memory_node()) > 1 or not hasattr(operators, BIND):
        yield
        return
    bind = getattr(operators, BIND)
    setattr(operators, BIND, lambda nodes: None)
    try:
        yield
    finally:
        setattr(operators, BIND, bind)


def _has(value: Any, name: str) -> bool:
    """Return ``hasattr(value, name)``, but True for ``__dict__`` without accessing the object.
    ``_attributes`` is empty for objects that have no ``__dict__``."""
    return name == "__dict__" or hasattr(value, name)


def _attributes(value: Any) -> Mapping[str, Any]:
    """Return the object's own ``__dict__``, whatever its ``__getattr__`` answers."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found
