"""An Engine over the ranks of a tensor-parallel model: rank 0 here, each other rank in its own process.

Only calls travel between the processes, over pipes: each rank schedules by itself, and all take the same
steps. Every rank computes every answer, so no rank waits for another's.

Rules:
    A call is sent to the others before it is made here, because ranks wait for each other inside.
    A rank lives no longer than rank 0's process, and that process dies with any rank: a rank that waits
    for a dead one waits forever, in native code. So rank 0 is in a replica.
    A step that fails ends all ranks, because it may have failed in one alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from genrt.engines import open_engine
from genrt.engines.folders import Folder
from genrt.engines.protocol import EngineStatistics, Finished
from genrt.engines.remote.flushes import FarEnd, Flush, HandleNumbers, NearEnd
from genrt.engines.remote.wire import Unpacking
from genrt.engines.vllm.rank import LAUNCHED, Rank, Share, broadcast_from_rank0, leave_ranks
from genrt.engines.weights import KeptWeights, NamedTensors, TensorsIn
from genrt.errors import EngineDied, EngineUnsupported, GenrtError
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import SequenceHandle

END_SECONDS = 3.0
"""How long a rank may take to end by itself before it is killed."""

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux

RANKED = MappingProxyType({"PYTHONHASHSEED": "0"})
"""The environment of a process with ranks, where all sets of strings have the same order."""

SHARED_MEMORY = Path("/dev/shm")

NOT_RANKS = (
    *("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size"),
    *("decode_context_parallel_size", "nnodes", "distributed_executor_backend", "scheduler_cls"),
    *("async_scheduling", "weight_transfer_config", "kv_transfer_config", "ec_transfer_config"),
    "kv_events_config",
)
"""vLLM's options that keep its executor: for what ranks do not do."""

PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from genrt.cluster.ranks import follow; follow({port}, {parent})"
)


def are_launched(options: Mapping[str, Any]) -> bool:
    """Return whether these options of vLLM's are for ranks that genrt launches."""
    return options.get("distributed_executor_backend") == LAUNCHED


def with_ranks(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of vLLM's with genrt's ranks, if they are of tensor parallelism alone."""
    size = options.get("tensor_parallel_size")
    others = [options.get(each) for each in NOT_RANKS]
    is_other = any(each is True or each not in (None, False, 1) for each in others)
    if not isinstance(size, int) or size < 2 or is_other:
        return options
    return options | {"distributed_executor_backend": LAUNCHED}


def open_ranked(model: str, options: dict[str, Any], *, residency: bool = True) -> RankedEngine:
    """Open a model in ranks, one on each device. The first is in this process, which dies with any rank.
    Raises GenrtError as ``open_engine``, or EngineUnsupported without a fixed order of sets."""
    if sys.flags.hash_randomization:
        raise EngineUnsupported(
            "ranks need the same order of sets: start the process with PYTHONHASHSEED=0"
        )
    ranks = Ranks(int(options.get("tensor_parallel_size", 1)))
    try:
        rank = Rank(0, ranks.store, lambda: ranks.open(model, options, residency))
        engine = open_engine("vllm", model, options, residency=residency, rank=rank)
        ranks.agreed()
        ranks.unname()
    except BaseException:
        ranks.close()
        raise
    return RankedEngine(engine, ranks)


def progress_of(counted: EngineStatistics) -> tuple[int, ...]:
    """Return the counters that all ranks share."""
    own = counted.steps, counted.requests, counted.rows, counted.resident, counted.failed
    return *own, counted.computed_tokens, counted.sampled_tokens


def die_with(parent: int) -> None:
    """Have the system kill this process as soon as its parent is gone."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def preload_vllm() -> None:
    """Import vLLM, if it is installed, and freeze all objects, in a process of one engine: vLLM collects
    garbage seven times while it opens and closes, among the million objects of its modules."""
    gc.disable()
    with contextlib.suppress(ImportError):
        importlib.import_module("genrt.engines.vllm.opening")
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # modules that are frozen at the exit complain of leaks


class Ranks:
    """The processes of all ranks but the first; ``count`` is of all."""

    def __init__(self, count: int) -> None:
        self.far = FarEnd(HandleNumbers())
        self._is_closed = False
        self._folder = Folder("ranks")
        # vLLM names shared memory after the file.
        self.store = str(self._folder.path / self._folder.path.name)
        self._links: list[tuple[Connection, subprocess.Popen[bytes]]] = []
        path = [*map(os.path.abspath, sys.path)]
        for number in range(1, count):
            own, their = Pipe()
            with their:
                port = their.fileno()
                program = PROGRAM.format(path=path, port=port, parent=os.getpid())
                command = [sys.executable, "-c", program]
                child = subprocess.Popen(command, pass_fds=[port], stdin=subprocess.DEVNULL)
            self._links.append((own, child))
            watch = threading.Thread(target=self._watch, args=(number, child), daemon=True)
            watch.start()

    def _watch(self, number: int, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        if not self._is_closed:
            _end_process(f"rank {number} ended with status {code}")

    def open(self, model: str, options: dict[str, Any], residency: bool) -> None:
        """Have each open its engine, in which it waits for the others."""
        for number, (link, _) in enumerate(self._links, 1):
            link.send((number, self.store, model, options, residency))

    def unname(self) -> None:
        """Remove the names of the memory that ranks share on a CPU, once all have it: the system frees it
        with the ranks."""
        for each in SHARED_MEMORY.glob(f"{os.path.basename(self.store)}*"):
            each.unlink(missing_ok=True)

    def tell(self, name: str, *arguments: Any) -> None:
        """Send all a message. Raises EngineDied if one is gone."""
        if gone := self.far.numbers.taken():
            self.tell("forget", gone)
        try:
            for link, _ in self._links:
                link.send((name, *arguments))
        except OSError as error:
            raise EngineDied(f"a rank is gone: {error}") from error

    def agreed(self, own: GenrtError | None = None) -> None:
        """Wait until all have done the same. Raises the error of rank 0 if all failed, or EngineDied if
        only some did."""
        for number, (link, _) in enumerate(self._links, 1):
            try:
                is_done, why = link.recv()
            except (OSError, EOFError):
                raise EngineDied(f"rank {number} is gone") from None
            if is_done != (own is None):
                how = f"rank {number}: {why or 'done'}; rank 0: {own or 'done'}"
                raise EngineDied(f"the ranks do not agree: {how}")
        if own is not None:
            raise own

    def do(self, engine: Any, name: str, *arguments: Any) -> Any:
        """Call a method of all engines, and return the result of rank 0's. Raises as ``agreed``."""
        self.tell("do", name, *arguments)
        result, refused = None, None
        try:
            result = attrgetter(name)(engine)(*arguments)
        except GenrtError as error:
            refused = error
        self.agreed(refused)
        return result

    def part(self) -> None:
        """Have all close their engines, after which they may end. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(EngineDied):
                self.tell("close")

    def close(self) -> None:
        """Wait until they have ended, or kill them. Idempotent."""
        self.part()
        for link, child in self._links:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_SECONDS)
            child.kill()
            child.wait()
            link.close()
        self._links.clear()
        self._folder.close()


def _end_process(reason: str) -> None:
    """End this process: its engine's thread may be in an endless forward."""
    sys.stderr.write(f"genrt: {reason}, and so do all others\n")
    sys.stderr.flush()
    os._exit(1)


CALLS = "add_adapter", "remove_adapter", "forget_residents"


def _passed(name: str) -> Any:
    """Return a property that rank 0's engine has."""
    return property(attrgetter(f"_engine.{name}"))


class RankedEngine:
    """The Engine protocol over rank 0's engine and the other ranks, which are open. Methods for rank 0
    alone pass through."""

    def __init__(self, engine: Any, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks
        self._is_closed = False
        self._tickets: dict[Request, int] = {}
        self._numbers = itertools.count()
        called = [partial(ranks.do, engine, each) for each in CALLS]
        self.add_adapter, self.remove_adapter, self.forget_residents = called
        self.prefixes = _RankedPrefixes(engine, ranks)
        self.weights = _RankedWeights(engine, ranks)

    vocab_size, max_model_len = _passed("vocab_size"), _passed("max_model_len")
    max_batch_size, device = _passed("max_batch_size"), _passed("device")
    tokenizer, scores = _passed("tokenizer"), _passed("scores")
    vllm_config, keeps_residents = _passed("vllm_config"), _passed("keeps_residents")
    blocks = _passed("blocks")
    unsupported, progress = _passed("unsupported"), _passed("progress")
    statistics = _passed("statistics")

    def submit(self, requests: Sequence[Request]) -> None:
        self._ranks.tell("submit", self._numbered(requests))
        self._engine.submit(requests)

    def step(self) -> list[Finished]:
        self._ranks.tell("step", progress_of(self._engine.statistics()))
        try:
            ends: list[Finished] = self._engine.step()
        except Exception as error:
            raise EngineDied(f"a step failed, and with it every rank: {error}") from error
        for each in ends:
            self._tickets.pop(each.request, None)
        return ends

    def cancel(self, requests: Sequence[Request]) -> None:
        tickets = [self._tickets.pop(each) for each in requests if each in self._tickets]
        self._ranks.tell("cancel", tickets)
        self._engine.cancel(requests)

    def continue_population(self, population: PopulationDraw) -> bool:
        self._ranks.tell("continue_population", self._numbered([population]))
        is_taken = bool(self._engine.continue_population(population))
        if not is_taken:
            del self._tickets[population]
        return is_taken

    def settle(self, population: PopulationDraw) -> None:
        self._ranks.tell("settle", self._ranks.far.flush([population]))
        self._engine.settle(population)

    def release(self, asked: Sequence[SequenceHandle]) -> None:
        self._ranks.tell("release", [self._ranks.far.number(each) for each in asked])
        self._engine.release(asked)

    def expect(self, rows: Sequence[LogprobsRequest], token_ids: torch.Tensor) -> None:
        def told(request_ids: list[str]) -> Share:
            self._ranks.tell("speculate", request_ids)
            return broadcast_from_rank0

        self._engine.expect(rows, token_ids.contiguous(), told)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._ranks.part()  # they close with this one, which may wait for them
            self._engine.close()
            leave_ranks()
            self._ranks.close()

    def _numbered(self, requests: Sequence[Request]) -> Flush:
        asked = dict(zip(requests, self._numbers, strict=False))
        self._tickets |= asked
        return self._ranks.far.flush(requests, tickets=[*asked.values()])


class _RankedPrefixes:
    """The contexts that all ranks keep."""

    def __init__(self, engine: Any, ranks: Ranks) -> None:
        self._engine = engine
        self.keep = partial(ranks.do, engine, "prefixes.keep")
        self.release = partial(ranks.do, engine, "prefixes.release")

    def __contains__(self, prefix: LogprobsRequest) -> bool:
        return prefix in self._engine.prefixes


RANKED_CALLS = "begin", "begin_beside_texts", "finish", "set_version", "sleep", "wake_up", "load"


class _RankedWeights:
    """The weights in all ranks, which each reads from files by itself."""

    def __init__(self, engine: Any, ranks: Ranks) -> None:
        self._engine, self._files = engine.weights, KeptWeights()
        called = [partial(ranks.do, engine, f"weights.{each}") for each in RANKED_CALLS]
        self.begin, self.begin_beside_texts, self.finish, self.set_version = called[:4]
        self.sleep, self.wake_up, self._load = called[4:]

    layout, checkpoint = _passed("layout"), _passed("checkpoint")
    asleep, check_sleep = _passed("asleep"), _passed("check_sleep")

    def load(self, tensors: NamedTensors) -> None:
        """Load tensors, which travel as files."""
        if isinstance(tensors, TensorsIn):
            self._load(tensors)
            return
        saved = self._files.begin()
        try:
            saved.add(tensors)
            self._load(TensorsIn(saved.files()))
        finally:
            saved.drop()


class Follower:
    """Repeats the calls of rank 0 with an engine of the same model and options. ``answer`` tells rank 0
    whether something succeeded, and why not."""

    def __init__(self, engine: Any, answer: Callable[[bool, str], object]) -> None:
        self._engine, self._answer = engine, answer
        self._tickets: dict[Request, int] = {}
        self.near = NearEnd()

    def take(self, message: tuple[Any, ...]) -> bool:
        """Repeat a call; return whether it was not the last one. Raises RuntimeError if the ranks have
        parted."""
        engine, tickets, near = self._engine, self._tickets, self.near
        match message:
            case ("submit", (data, others)):
                requests = near.requests(flush := Unpacking(data), others)
                tickets |= zip(requests, flush.header["tickets"], strict=True)
                engine.submit(requests)
            case ("continue_population", (data, others)):
                [population] = near.requests(flush := Unpacking(data), others)
                if engine.continue_population(population):
                    tickets[population] = flush.header["tickets"][0]
            case ("settle", (data, others)):
                engine.settle(*near.requests(Unpacking(data), others))
            case ("step", progress):
                if (own := progress_of(engine.statistics())) != progress:
                    raise RuntimeError(f"the ranks have parted: {own} here, {progress} in rank 0")
                for end in engine.step():
                    tickets.pop(end.request, None)
            case ("cancel", numbers):
                gone = [request for request, ticket in tickets.items() if ticket in numbers]
                for each in gone:
                    del tickets[each]
                engine.cancel(gone)
            case ("release", numbers):
                engine.release([near.handle(*each) for each in numbers])
            case ("forget", numbers):
                near.forget(numbers)
            case ("speculate", request_ids):
                tokens = torch.empty(len(request_ids), dtype=torch.float64, device=engine.device)
                engine.speculate(request_ids, tokens, share=broadcast_from_rank0)
            case ("do", name, *arguments):
                self._do(name, *arguments)
        return bool(message[0] != "close")

    def _do(self, name: str, *arguments: Any) -> None:
        try:
            attrgetter(name)(self._engine)(*arguments)
        except GenrtError as error:
            self._answer(False, str(error))
        else:
            self._answer(True, "")


def follow(port: int, parent: int) -> None:
    """Be a rank: repeat the calls of rank 0, from this file, until its other end is closed."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is the runtime's
    link = Connection(port)
    try:
        number, store, model, options, residency = link.recv()
        preload_vllm()
        rank = Rank(number, store)
        engine = open_engine("vllm", model, options, residency=residency, rank=rank)
        follower = Follower(engine, lambda *answer: link.send(answer))
        link.send((True, ""))
        while follower.take(link.recv()):
            pass
        engine.close()
        leave_ranks()
    except (BrokenPipeError, EOFError):
        pass  # rank 0 is gone
    except BaseException as error:
        with contextlib.suppress(OSError):
            link.send((False, f"{type(error).__name__}: {error}"))
        sys.exit(1)
