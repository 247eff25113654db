"""Keeps the process as the user had it while vLLM opens, and keeps vLLM's globals apart for each engine.

Opening an engine would clear or replace vLLM's globals, such as CUDA graphs and a workspace. So each
engine has its own ``Globals``, and every call into vLLM happens with these in place, one engine at a
time. Warning filters that packages add when they are imported stay."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch

from genrt.errors import EngineUnsupported

F32 = "TRITON_F32_DEFAULT"
GLOO = "GLOO_SOCKET_IFNAME"
V2 = "VLLM_USE_V2_MODEL_RUNNER"
BIND = "init_cpu_memory_env"

_OPENING = threading.RLock()


@contextmanager
def process_kept() -> Iterator[None]:
    """Open an engine inside this context, on one thread, one engine at a time. Changes by other threads
    stay."""
    with _OPENING, _environment(), heap_kept(), _torch_settings():
        yield


@contextmanager
def _environment() -> Iterator[None]:
    """Restore the variables that this thread sets or removes."""
    before: dict[str, str | None] = {}
    opener = threading.get_ident()

    def noting(change: Callable[..., None]) -> Callable[..., None]:
        def noted(name: bytes, *value: bytes) -> None:
            if threading.get_ident() == opener:
                key = os.fsdecode(name)
                before.setdefault(key, os.environ.get(key))
            change(name, *value)

        return noted

    # ``os.environ`` calls these before it changes itself.
    set_, unset = os.putenv, os.unsetenv
    os.putenv, os.unsetenv = noting(set_), noting(unset)
    try:
        yield
    finally:
        os.putenv, os.unsetenv = set_, unset
        for key, value in before.items():
            if value is not None:
                os.environ[key] = value
            else:
                os.environ.pop(key, None)


@contextmanager
def heap_kept() -> Iterator[None]:
    """Preserve the frozen state of every object, in one thread at a time. vLLM freezes all objects, and
    frozen garbage would stay in memory."""
    with _OPENING:
        functions, has_frozen = (gc.freeze, gc.unfreeze), gc.get_freeze_count() > 0
        # ``gc.unfreeze`` thaws every object. If the user has frozen objects, vLLM must not freeze more;
        # else all are thawed at the end.
        if has_frozen:
            gc.freeze = gc.unfreeze = lambda: None
        try:
            yield
        finally:
            gc.freeze, gc.unfreeze = functions
            if not has_frozen:
                gc.unfreeze()


_PRECISIONS = (
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
)


@contextmanager
def _torch_settings() -> Iterator[None]:
    hook = sys.excepthook
    has_start_method = bool(multiprocessing.get_start_method(allow_none=True))
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    settings: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    ]
    for path in _PRECISIONS:
        owner, name = path.rsplit(".", 1)
        with suppress(AttributeError):  # this torch has no such setting
            backend = attrgetter(owner)(torch.backends)
            getattr(backend, name)
            settings.append((partial(getattr, backend, name), partial(setattr, backend, name)))
    before = [read() for read, _ in settings]
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            # Use another thread, because the engine's thread may keep the count that vLLM chose for it.
            other = threading.Thread(target=set_num_threads, args=(threads,))
            other.start()
            other.join()
        for (read, write), value in zip(settings, before, strict=True):
            if read() != value:
                write(value)
        if not has_start_method:
            multiprocessing.set_start_method(None, force=True)
        # torch installs a hook that writes ``[rank0]``; any other new hook is not vLLM's.
        if getattr(sys.excepthook, "__module__", "").startswith("torch"):
            sys.excepthook = hook


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Make torch's gloo, which vLLM uses for groups of one process, listen on the loopback interface,
    unless the user's environment names another one."""
    if GLOO in os.environ:
        yield
        return
    os.environ[GLOO] = "lo"
    try:
        yield
    finally:
        del os.environ[GLOO]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Open vLLM inside this context.

    The V2 runner seeds its warm-up requests from numpy's global generator; here it gets another one. The
    rest applies without Triton, so on CPUs:

    - vLLM supports only its runner V1. An environment variable that demands V2 is set aside.
    - vLLM looks for its kernels in every value of every module. Objects that answer to any name, as
      numba's library does, and deprecated objects, which warn on any access, are not asked.
    - vLLM's bfloat16 attention uses AMX tiles. That kills the process unless Linux was asked for them.
    - vLLM binds the process's memory to one node and says so. With a single node this is skipped.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.worker.gpu.sample import states

    states.np = own = ModuleType(np.__name__)
    vars(own).update(vars(np), random=np.random.RandomState())
    try:
        with nullcontext() if HAS_TRITON else _without_triton():
            yield
    finally:
        states.np = np


@contextmanager
def _without_triton() -> Iterator[None]:
    from vllm.triton_utils import dispatcher
    from vllm.utils import cpu_resource_utils

    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()  # returns False without AMX
    demanded = os.environ.pop(V2, None)
    dispatcher.vars = _attributes
    dispatcher.hasattr = lambda value, name: name == "__dict__" or hasattr(value, name)
    operators, bind = torch.ops._C, None
    if len(cpu_resource_utils.get_visible_memory_node()) < 2 and hasattr(operators, BIND):
        bind = getattr(operators, BIND)
        setattr(operators, BIND, lambda nodes: None)
    try:
        yield
    finally:
        if bind is not None:
            setattr(operators, BIND, bind)
        del dispatcher.vars, dispatcher.hasattr
        if demanded is not None:
            os.environ[V2] = demanded


def _attributes(value: Any) -> Mapping[str, Any]:
    """Return the object's own ``__dict__``, or ``{}``, without calling its ``__getattr__``."""
    with suppress(AttributeError):
        return cast("Mapping[str, Any]", object.__getattribute__(value, "__dict__"))
    return {}


class ThreadTurns:
    """A reentrant context manager that admits one thread at a time, in order of arrival. So an engine
    that steps all the time gives every other engine a step in between."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._depth = 0
        self.waiting: list[int] = []  # thread idents; the first one enters next

    def __enter__(self) -> None:
        own = threading.get_ident()
        with self._changed:
            if self._holder != own:
                if self._depth or self.waiting:
                    self.waiting.append(own)
                    try:
                        self._changed.wait_for(lambda: not self._depth and self.waiting[0] == own)
                    finally:  # also after an interrupt: then it may be the next thread's turn
                        self.waiting.remove(own)
                        self._changed.notify_all()
                self._holder = own
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._holder = None
                if self.waiting:
                    self._changed.notify_all()


_TURNS = ThreadTurns()


class Globals:
    """One engine's values of vLLM's globals; at first, the values of a process without an engine. As a
    reentrant context manager, it waits for the engine's turn and puts them, and the engine's CUDA
    ``stream``, in place. Raises EngineUnsupported if this vLLM has its globals somewhere else."""

    def __init__(self) -> None:
        from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
        from vllm.compilation.cuda_graph import CUDAGraphWrapper
        from vllm.model_executor.layers import rotary_embedding
        from vllm.model_executor.offloader import base as offloader
        from vllm.platforms import current_platform
        from vllm.v1.worker import workspace

        self._places: list[tuple[Any, str]] = [
            (CUDAGraphWrapper, "_all_instances"),
            (BreakableCUDAGraphWrapper, "_all_instances"),
            (type(current_platform), "_global_graph_pool"),
            (workspace, "_manager"),
            (offloader, "_instance"),
            # Models share these modules, which have no numbers while new weights are loaded.
            (rotary_embedding, "_ROPE_DICT"),
        ]
        for owner, name in self._places:
            if not hasattr(owner, name):
                raise EngineUnsupported(
                    f"this vLLM has no {owner.__name__}.{name}: two runtimes in a process would not be "
                    "safe; install a version that the extras genrt[cpu] and genrt[cuda] bring"
                )
        self._values: list[Any] = [
            weakref.WeakSet(),
            weakref.WeakSet(),
            None,
            None,
            offloader.NoopOffloader(),
            {},
        ]
        self._variables: dict[str, str | None] = {}
        self.stream: torch.cuda.Stream | None = None
        self._outer: torch.cuda.Stream | None = None
        self._depth = 0

    def multiply_in_float32(self) -> None:
        """Make Triton's kernels multiply float32 numbers in float32 while the globals are in place.

        With TF32, their default, a token's row depends on the rest of the batch. The user's own setting
        of the environment variable wins.
        """
        if F32 not in os.environ:
            self._variables[F32], os.environ[F32] = None, "ieee"

    def take_stream(self, device: torch.device) -> torch.device:
        """Take the device's current stream for the engine, and set the default stream for other code.
        Return the device with its index."""
        if device.type != "cuda":
            return device
        self.stream = torch.cuda.current_stream()
        torch.cuda.set_stream(torch.cuda.default_stream())
        return torch.device("cuda", torch.cuda.current_device())

    def follow_default(self, tensor: torch.Tensor) -> None:
        """Make the engine's stream wait for the default stream, which computes this tensor."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.default_stream(self.stream.device))
            tensor.record_stream(self.stream)

    def __enter__(self) -> None:
        _TURNS.__enter__()
        try:
            if self._depth == 0:
                self._exchange()
                if self.stream is not None:
                    self._outer = torch.cuda.current_stream(self.stream.device)
                    torch.cuda.set_stream(self.stream)
            self._depth += 1
        except BaseException:  # an interrupt
            _TURNS.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._depth -= 1
            if self._depth == 0:
                self._exchange()
                if self._outer is not None:
                    torch.cuda.set_stream(self._outer)
                    self._outer = None
        finally:
            _TURNS.__exit__()

    def _exchange(self) -> None:
        for index, (owner, name) in enumerate(self._places):
            before = getattr(owner, name)
            setattr(owner, name, self._values[index])
            self._values[index] = before
        for name, value in self._variables.items():
            self._variables[name] = os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
