"""Open vLLM undisturbed by what else is in the process, and without disturbing it.

Replaced for as long: the builtins ``vars`` and ``hasattr`` as ``vllm.triton_utils.dispatcher``
calls them, ``np`` as the V2 runner's sampling states call it, ``torch.cpu._init_amx``, vLLM's operator
``init_cpu_memory_env``. All of it was seen with vLLM 0.32: whoever imports genlm-backend before loading a
model meets the first two.
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
    """Open vLLM inside of this.

    The V2 runner gives the requests of its warm-up seeds from numpy's own generator, which is the user's:
    here it gets another one.

    The rest is for where there is no Triton, so for CPUs. vLLM has its runner V1 alone there. An
    environment that demands V2 is put aside, until vLLM has read it for the last time: when its engine is
    made.

    And vLLM looks for its kernels in every value of every module there is. It takes for granted that
    ``vars`` is a dictionary; an object that answers to any name, as numba's library does, makes one up.
    And one that is deprecated, as ``torch.distributed.reduce_op`` is, warns whoever asks it for anything.

    And its attention in bfloat16 uses a processor's AMX tiles without asking Linux for them, which kills
    the process, unless a large product of matrices has asked before.

    And it binds the process's memory to one node, and writes so to standard error. With one node that
    says nothing, so there it is left out.
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
        torch.cpu._init_amx()  # False where there are none
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
    """Have the V2 runner's sampling states draw seeds from a generator that nobody else uses."""
    from vllm.v1.worker.gpu.sample import states

    states.np = _Numpy()
    try:
        yield
    finally:
        states.np = np


@contextmanager
def _unbound() -> Iterator[None]:
    """Leave the process's memory where it is, if there is one node for all of it."""
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
    """Return ``hasattr(value, name)``, but for ``__dict__``: the object is not asked for that. Everything
    counts as having one, since ``_attributes`` is empty where there is none."""
    return name == "__dict__" or hasattr(value, name)


def _attributes(value: Any) -> Mapping[str, Any]:
    """Return what is in the object itself, whatever it answers when it is asked for it."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found
