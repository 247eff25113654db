"""An Engine over the ranks of a tensor-parallel model: rank 0's, here, and one in the process of each
other rank, which repeats every call.

Nothing but calls goes between the processes: each schedules by itself, and all come to the same steps.
What an answer needs, rows and draws, is computed in each, so none waits for another's.

Rules:
    A call is told to the others before it is done here, since ranks wait for each other inside of it.
    A process of this host holds one such engine, and dies with any of its ranks: a rank that waits for
    one that is gone waits for ever, in native code. So the engine is a replica's.
    A step that fails is the end of all ranks, since it may have failed in one alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from genrt.cluster.follower import progress_of
from genrt.cluster.frames import Frames, Outgoing, received
from genrt.cluster.memory import Memory
from genrt.cluster.messages import (
    AskedNumbers,
    RemotePopulations,
    dump_message,
    load_message,
    outgoing,
    split_questions,
)
from genrt.engines import open_engine
from genrt.engines.folders import Folder
from genrt.engines.protocol import EngineStatistics, Finished
from genrt.engines.vllm.rank import LAUNCHED, Rank, Share, broadcast_from_rank0, leave_ranks
from genrt.engines.weights import Layout, SleepingPart, TensorsIn
from genrt.errors import EngineDied, EngineUnsupported, GenrtError
from genrt.questions.completions import Decoding, Streamed, Told
from genrt.questions.contexts import Adapter
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import SequenceHandle

__all__ = ["RANKED", "RankedEngine", "are_launched", "open_ranked", "with_ranks"]

END_SECONDS = 3.0
"""How long a rank may take to end by itself before it is killed."""

RANKED = MappingProxyType({"PYTHONHASHSEED": "0"})
"""The environment of a process with ranks, in which all sets of strings have the same order."""

SHARED_MEMORY = Path("/dev/shm")

OTHER_SIZES = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "nnodes",
)
"""vLLM's options for what ranks do not do."""

OTHER_WAYS = (
    "distributed_executor_backend",
    "scheduler_cls",
    "async_scheduling",
    "weight_transfer_config",
    "kv_transfer_config",
    "ec_transfer_config",
    "kv_events_config",
)
"""vLLM's options that keep its executor, if they are given."""

PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from genrt.cluster.follower import main; main({port}, {parent}, {receiver})"
)


def are_launched(options: Mapping[str, Any]) -> bool:
    """Tell whether these options of vLLM's are for ranks that genrt launches."""
    return options.get("distributed_executor_backend") == LAUNCHED


def with_ranks(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of vLLM's that have genrt launch ranks, if they are of tensor parallelism alone."""
    size = options.get("tensor_parallel_size")
    if not isinstance(size, int) or size < 2 or any(options.get(each) for each in OTHER_WAYS):
        return options
    if any(options.get(each, 1) != 1 for each in OTHER_SIZES):
        return options
    return options | {"distributed_executor_backend": LAUNCHED}


def open_ranked(model: str, options: dict[str, Any], *, residency: bool = True) -> RankedEngine:
    """Open a model in ranks: the first in this process, which has to be one that dies with any of them,
    each on a device of its own.

    Raises:
        GenrtError: as ``open_engine``; EngineUnsupported if sets of strings are in an order of this
            process's own, as they would be in no other rank.
    """
    if sys.flags.hash_randomization:
        raise EngineUnsupported(
            "ranks need the same order of sets: start the process with PYTHONHASHSEED=0"
        )
    ranks = Ranks(int(options.get("tensor_parallel_size", 1)))
    try:
        begin = lambda: ranks.open(model, options, residency)
        rank = Rank(0, ranks.store, begin)
        engine = open_engine("vllm", model, options, residency=residency, rank=rank)
        ranks.agreed()
        ranks.unname()
    except BaseException:
        ranks.close()
        raise
    return RankedEngine(engine, ranks)


class Ranks:
    """The processes of all ranks but the first, started at once.

    Args:
        count: of all ranks.
        lost: is called with the reason, on a thread of its own, when one of them ends by itself.
    """

    def __init__(self, count: int, lost: Callable[[str], object] | None = None) -> None:
        self._lost = lost or _end_process
        self._numbers, self._held = AskedNumbers(), RemotePopulations()
        self._is_closed = False
        self._folder = Folder("ranks")
        # vLLM names shared memory by the file.
        self.store = str(self._folder.path / self._folder.path.name)
        self._links: list[tuple[socket.socket, subprocess.Popen[bytes], Frames]] = []
        self._memory = Memory(count - 1)
        for _ in range(1, count):
            self._start()

    def _start(self) -> None:
        own, their = socket.socketpair()
        path = [*map(os.path.abspath, sys.path)]
        program = PROGRAM.format(
            path=path, port=their.fileno(), parent=os.getpid(), receiver=len(self._links)
        )
        with their:
            child = subprocess.Popen(
                [sys.executable, "-c", program], pass_fds=[their.fileno()], stdin=subprocess.DEVNULL
            )
        self._links.append((own, child, Frames()))
        threading.Thread(
            target=self._watch, args=(len(self._links), child), name="genrt-rank", daemon=True
        ).start()

    def _watch(self, number: int, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        if not self._is_closed:
            self._lost(f"rank {number} ended with status {code}")

    def open(self, model: str, options: dict[str, Any], residency: bool) -> None:
        """Have each open its engine, in which it waits for the others."""
        for number, (link, _, _) in enumerate(self._links, 1):
            message = number, self.store, model, options, residency
            Outgoing(dump_message(message)).send_to([link])

    def unname(self) -> None:
        """Take away the names of the memory that the ranks share on a CPU, once all have it: it goes with
        them then, however they end."""
        for each in SHARED_MEMORY.glob(f"{os.path.basename(self.store)}*"):
            each.unlink(missing_ok=True)

    def tell(self, *message: Any) -> None:
        """Send all a message. Raises EngineDied if one is gone."""
        gone = [self._numbers.gone.popleft() for _ in range(len(self._numbers.gone))]
        links = [link for link, _, _ in self._links]
        told = outgoing(message, self._memory, self._numbers.of, self._held)
        try:
            if gone:
                Outgoing(dump_message(("forget", gone))).send_to(links)
            told.send_to(links)
        except OSError as error:
            raise EngineDied(f"a rank is gone: {error}") from error

    def number_of(self, asked: SequenceHandle) -> int:
        """Return the number by which they know a population's question."""
        return self._numbers.of(asked)

    def agreed(self, own: GenrtError | None = None) -> None:
        """Wait until all have done what they were told to agree on; raise the error that it ended with
        here, if it did so everywhere.

        Raises:
            EngineDied: it went otherwise in another rank.
        """
        for number, (link, _, frames) in enumerate(self._links, 1):
            kind, *why = self._answer(number, link, frames)
            if kind == "failed" or (kind == "refused") != (own is not None):
                how = f"rank {number}: {why[0] if why else 'done'}; rank 0: {own or 'done'}"
                raise EngineDied(f"the ranks do not agree: {how}")
        if own is not None:
            raise own

    def _answer(self, number: int, link: socket.socket, frames: Frames) -> Any:
        while (came := received(link, frames)) is not None:
            for each in came:
                return load_message(each.data)
        raise EngineDied(f"rank {number} is gone")

    def part(self) -> None:
        """Have them close their engines, as is done here next. From now on they may end. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(EngineDied):
                self.tell("close")

    def close(self) -> None:
        """Wait until they have ended; kill those that do not soon. Idempotent."""
        self.part()
        for link, child, _ in self._links:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_SECONDS)
            child.kill()
            child.wait()
            link.close()
        self._links.clear()
        self._folder.close()


def _end_process(reason: str) -> None:
    """End this process: the engine's thread may be in a forward, and then nothing else ends that."""
    sys.stderr.write(f"genrt: {reason}, and so do all others\n")
    sys.stderr.flush()
    os._exit(1)


class RankedEngine:
    """The Engine protocol over rank 0's engine, with the others behind it.

    Args:
        engine: rank 0's, a ``VLLMEngine``.
        ranks: the others, open.
    """

    def __init__(self, engine: Any, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks
        self._is_closed = False
        self.vocab_size: int = engine.vocab_size
        self.max_model_len: int = engine.max_model_len
        self.max_batch_size: int = engine.max_batch_size
        self.device: torch.device = engine.device
        self.keeps_residents: bool = engine.keeps_residents
        self.prefixes = RankedPrefixes(engine.prefixes, ranks)
        self.weights = RankedWeights(engine.weights, ranks)

    @property
    def vllm_config(self) -> Any:
        return self._engine.vllm_config

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def scores(self) -> bool:
        """True if it takes score requests."""
        return bool(self._engine.scores)

    def submit(self, requests: Sequence[Request]) -> None:
        rows, draws, others = split_questions([(0, each) for each in requests])
        self._ranks.tell("submit", rows, draws, others)
        # In the order in which the others find them.
        are_rows = [type(each) is LogprobsRequest for each in requests]
        first = [each for each, is_row in zip(requests, are_rows, strict=True) if is_row]
        last = [each for each, is_row in zip(requests, are_rows, strict=True) if not is_row]
        self._engine.submit([*first, *last])

    def step(self) -> list[Finished]:
        self._ranks.tell("step", progress_of(self._engine.statistics()))
        try:
            ends: list[Finished] = self._engine.step()
        except Exception as error:
            raise EngineDied(f"a step failed, and with it every rank: {error}") from error
        return ends

    def cancel(self, requests: Sequence[Request]) -> None:
        others = [each for each in requests if not isinstance(each, PopulationDraw)]
        draws = [
            self._ranks.number_of(each.handle)
            for each in requests
            if isinstance(each, PopulationDraw)
        ]
        self._ranks.tell("cancel", others, draws)
        self._engine.cancel(requests)

    def go_on(self, population: PopulationDraw) -> bool:
        self._ranks.tell("go_on", self._ranks.number_of(population.handle), population)
        return bool(self._engine.go_on(population))

    def settle(self, population: PopulationDraw) -> None:
        self._ranks.tell("settle", population)
        self._engine.settle(population)

    def release(self, asked: Sequence[SequenceHandle]) -> None:
        self._ranks.tell("release", [self._ranks.number_of(each) for each in asked])
        self._engine.release(asked)

    def expect(self, rows: Sequence[LogprobsRequest], token_ids: torch.Tensor) -> None:
        def told(request_ids: list[str]) -> Share:
            self._ranks.tell("speculate", request_ids)
            return broadcast_from_rank0

        self._engine.expect(rows, token_ids.contiguous(), told)

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        self._agree("add_adapter", adapter, path)

    def remove_adapter(self, adapter: Adapter) -> None:
        self._agree("remove_adapter", adapter)

    def forget_residents(self) -> bool:
        """Have all forget what nothing in progress needs; return whether rank 0 has."""
        return bool(self._agree("forget_residents"))

    def unsupported(self, decoding: Decoding) -> str | None:
        found: str | None = self._engine.unsupported(decoding)
        return found

    def progress(self, streamed: Sequence[Streamed]) -> Sequence[Told | None]:
        found: Sequence[Told | None] = self._engine.progress(streamed)
        return found

    def statistics(self) -> EngineStatistics:
        found: EngineStatistics = self._engine.statistics()
        return found

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._ranks.part()  # they close with this one: what they share may be waited for
            self._engine.close()
            leave_ranks()
            self._ranks.close()

    def _agree(self, name: str, *arguments: Any) -> Any:
        return agreed(self._ranks, name, getattr(self._engine, name), *arguments)


def agreed(ranks: Ranks, name: str, do: Callable[..., Any], *arguments: Any) -> Any:
    """Do something in all ranks, and return what it returns here.

    Raises:
        GenrtError: what it raises here, if it does so in all; EngineDied, if it went otherwise in one.
    """
    ranks.tell("do", name, *arguments)
    return _here(ranks, do, *arguments)


def _here(ranks: Ranks, do: Callable[..., Any], *arguments: Any) -> Any:
    result, refused = None, None
    try:
        result = do(*arguments)
    except GenrtError as error:
        refused = error
    ranks.agreed(refused)
    return result


class RankedPrefixes:
    """The contexts that all ranks keep."""

    def __init__(self, prefixes: Any, ranks: Ranks) -> None:
        self._prefixes, self._ranks = prefixes, ranks

    def __contains__(self, prefix: LogprobsRequest) -> bool:
        return prefix in self._prefixes

    def keep(self, prefix: LogprobsRequest) -> None:
        self._ranks.tell("tell", "prefixes.keep", prefix)
        self._prefixes.keep(prefix)

    def release(self, prefix: LogprobsRequest) -> None:
        self._ranks.tell("tell", "prefixes.release", prefix)
        self._prefixes.release(prefix)


class RankedWeights:
    """The weights in all ranks, which each reads from files by itself."""

    def __init__(self, weights: Any, ranks: Ranks) -> None:
        self._weights, self._ranks = weights, ranks

    def layout(self) -> Layout:
        """Return what every tensor has to be like."""
        found: Layout = self._weights.layout()
        return found

    def checkpoint(self) -> list[Path]:
        """Return the files that the model was opened with."""
        found: list[Path] = self._weights.checkpoint()
        return found

    def begin(self) -> None:
        """Forget, in all ranks, what the old weights have computed."""
        self._agree("begin")

    def load(self, tensors: TensorsIn) -> None:
        """Load the tensors of files."""
        self._ranks.tell("load", [str(each) for each in tensors.files])
        _here(self._ranks, self._weights.load, tensors)

    def finish(self) -> None:
        """Have all ranks compute by the new weights."""
        self._agree("finish")

    @property
    def asleep(self) -> frozenset[SleepingPart]:
        """The parts of the memory that are given back."""
        found: frozenset[SleepingPart] = self._weights.asleep
        return found

    def check_sleep(self) -> None:
        """Raise EngineUnsupported if the memory cannot be given back."""
        self._weights.check_sleep()

    def sleep(self, level: int) -> int:
        """Give back the memory of all ranks; return how many bytes became free at rank 0."""
        return int(self._agree("sleep", level))

    def wake_up(self, parts: Collection[SleepingPart]) -> None:
        """Have these parts of the memory back, in all ranks."""
        self._agree("wake_up", frozenset(parts))

    def _agree(self, name: str, *arguments: Any) -> Any:
        return agreed(self._ranks, f"weights.{name}", getattr(self._weights, name), *arguments)
