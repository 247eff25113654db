"""What else is in the process where vLLM is opened: what would keep it from opening, and what it changes.

Private and touched here: the builtins ``vars`` and ``hasattr`` as ``vllm.triton_utils.dispatcher``
calls them, ``torch.cpu._init_amx``, and vLLM's operator ``init_cpu_memory_env``. All hindrances were
seen with vLLM 0.32: whoever imports genlm-backend before loading a model meets the first two.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.triton_utils import HAS_TRITON

__all__ = ["left_alone", "undisturbed"]

V2 = "VLLM_USE_V2_MODEL_RUNNER"
BIND = "init_cpu_memory_env"


@contextmanager
def left_alone() -> Iterator[Callable[[str], None]]:
    """Keep the environment, ``sys.excepthook`` and ``torch.set_num_threads`` as they are. vLLM is opened
    inside of this, which yields what restores one variable before the end.

    vLLM sets some ten variables, for its workers and for what it imports later; ``LD_PRELOAD`` among
    them, about which every program complains that is started from a folder with a space in its path.
    torch's process groups have exceptions printed with a rank, and vLLM's worker for CPUs puts a warning
    in the place of ``torch.set_num_threads``.
    """
    environment, hook, set_num_threads = dict(os.environ), sys.excepthook, torch.set_num_threads

    def restore(name: str) -> None:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            os.environ.pop(name, None)

    try:
        yield restore
    finally:
        for name in {*environment, *os.environ}:
            if os.environ.get(name) != environment.get(name):
                restore(name)
        sys.excepthook, torch.set_num_threads = hook, set_num_threads


@contextmanager
def undisturbed() -> Iterator[None]:
    """Where there is no Triton, so on a CPU, vLLM is opened inside of this; elsewhere it does nothing.

    vLLM then has its runner V1 alone. An environment that demands V2 is put aside, until vLLM has read
    it for the last time: when its engine is made.

    And vLLM looks for its kernels in every value of every module there is. It takes for granted that
    ``vars`` is a dictionary; an object that answers to any name, as numba's library does, makes one up.
    And one that is deprecated, as ``torch.distributed.reduce_op`` is, warns whoever asks it for anything.

    And its attention in bfloat16 uses a processor's AMX tiles without asking Linux for them, which kills
    the process, unless a large product of matrices has asked before.

    And it binds the process's memory to one node, and writes so to standard error. With one node that
    says nothing, so there it is left out.
    """
    if HAS_TRITON:
        yield
        return
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
