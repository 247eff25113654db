"""Logprobs requests as open vLLM requests: which sequences are resident, the way of each new question.

A question whose context is a resident sequence and one token more *extends* it. Of several that extend
the same one, the others *fork* it: each takes the seat of a sequence that was last asked about in the
same flush as their parent, and that this flush has passed over, as resampling does. Where there is none,
and for any other context that shares a prefix with a resident one, a new vLLM request shares its blocks.

A step of nothing but extended and forked sequences is a *decode step*: scheduled by ``OpenScheduler``
itself, run by vLLM's runner, its logits taken in place of sampling. Where the same sequences go on step
after step, the next one is *held* ready while the device computes, and lacks nothing but its tokens.
Where these were drawn on the device, the step is *foreseen*: run with them before anybody asks.

Rules:
    Tokens are written where the runner reads them before the step that needs them.
    A sequence that this flush extends, or forks, gives up its seat to nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from genrt.engines.residency import Residents
from genrt.engines.vllm.open_scheduler import OpenScheduler
from genrt.engines.vllm.runners import Held, Next, Runner, Seat
from genrt.questions.contexts import Adapter
from genrt.questions.rows import LogprobsRequest
from genrt.tokens.rows import Leaving

__all__ = ["OpenRequests"]

POPULATIONS = 64
"""How many flushes are remembered: who was asked together, and so is of one population."""


MISSES = 3
"""After so many held steps in a row that did not come, only now and then one is held; and likewise with
foreseen ones."""

RETRY = 16
"""How many flushes that is."""


class _Foreseen(NamedTuple):
    """A held step that was run with tokens that nobody has asked for yet: these, and the logits."""

    token_ids: Leaving
    logits: torch.Tensor

    def was_right(self, tokens: Sequence[Next]) -> bool:
        return [entry.token_id for entry in tokens] == self.token_ids.arrived().tolist()


class OpenRequests:
    """The engine's side of it.

    Args:
        scheduler: that of an engine in this process.
        runner: likewise.
        execute: runs the forward of a step that was scheduled.
        decodes: whether decode steps are right here: nothing but the forward makes a row.
        ahead: whether a step is prepared while the device computes the one before.
        device: where the runner computes.
    """

    def __init__(
        self,
        scheduler: OpenScheduler,
        runner: Runner,
        execute: Callable[[Any], Any],
        *,
        decodes: bool,
        ahead: bool,
        device: torch.device,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._execute = execute
        self._decodes = decodes
        self._ahead = ahead
        self._device = device
        self._held: Held | None = None
        self._foreseen: _Foreseen | None = None
        self._decoded: list[str] = []
        self._steady = False
        self._misses = 0
        self._mistaken = 0
        self._residents = Residents()
        self._seats: list[Seat] = []
        self._tokens: list[Next] = []
        self._flush = 0
        self._asked_in: dict[str, int] = {}
        self._populations: OrderedDict[int, list[str]] = OrderedDict()
        self.extended = 0
        self.evicted = 0
        self.held = 0
        self.foreseen = 0

    def __len__(self) -> int:
        return len(self._residents)

    def submit(self, requests: Sequence[LogprobsRequest]) -> list[str | None]:
        """Extend, or fork, resident sequences to these contexts where that is a matter of one token.
        For each the id of the vLLM request that now goes on as this question; ``None`` if it needs one of
        its own."""
        self._flush += 1
        names: list[str | None] = []
        forks: list[tuple[int, str]] = []
        parked, residents = self._scheduler.parked, self._residents
        # Who goes on step after step mostly asks in the same order.
        guesses = self._populations.get(self._flush - 1, ())[: len(requests)]
        for request, guess in zip_longest(requests, guesses):
            adapter, context = request.adapter, request.packed
            if guess in parked and residents.is_parent(guess, adapter, context):
                parent: str | None = guess
            else:
                parent = residents.parent(adapter, context)
            if parent in parked:
                self._wake(parent, request.last_token)
                self.extended += 1
                names.append(parent)
                continue
            if parent is not None:
                forks.append((len(names), parent))
            names.append(None)
        if forks:
            self._fork(requests, forks, names)
        self._scheduler.admit()
        asked = [name for name in names if name is not None]
        self._asked_in.update(dict.fromkeys(asked, self._flush))
        self._populations[self._flush] = asked
        if len(self._populations) > POPULATIONS:
            self._populations.popitem(last=False)
        return names

    def _wake(self, name: str, token_id: int) -> None:
        position, prompt = self._scheduler.wake(name, token_id)
        self._tokens.append(Next(name, token_id, position, prompt))

    def _fork(
        self,
        requests: Sequence[LogprobsRequest],
        forks: Sequence[tuple[int, str]],
        names: list[str | None],
    ) -> None:
        """Seat forks of these parents, as many as there are seats, and enter their names."""
        passed_over: dict[int, list[str]] = {}
        parents = {parent for _, parent in forks}
        for place, parent in forks:
            population = self._asked_in.get(parent, 0)
            if population not in passed_over:
                passed_over[population] = self._passed_over(population, parents)
            free, request = passed_over[population], requests[place]
            while free and names[place] is None:
                name = free.pop()
                seat = self._scheduler.reseat(name, parent, len(request) - 1)
                if seat is not None:
                    self._residents.remove(name)
                    self._seats.append(seat)
                    self._wake(name, request.last_token)
                    names[place] = name

    def _passed_over(self, population: int, parents: set[str]) -> list[str]:
        """Those of a population that have been asked about in no flush since, nor are in this one."""
        parked, asked_in = self._scheduler.parked, self._asked_in
        return [
            name
            for name in self._populations.get(population, ())
            if name in parked and name not in parents and asked_in.get(name) == population
        ]

    def share(self, name: str, request: LogprobsRequest) -> None:
        """Have a request that was just added start from the nearest resident one."""
        self._asked_in[name] = self._flush
        self._populations.setdefault(self._flush, []).append(name)
        parent = self._residents.parent(request.adapter, request.packed)
        if parent is not None:
            self._scheduler.share(name, parent, len(request) - 1)
            return
        found = self._residents.nearest(request.adapter, request.packed)
        if found is not None:
            self._scheduler.share(name, *found)

    @torch.inference_mode()
    def decode(self) -> tuple[list[str], torch.Tensor] | None:
        """Run the next step if it is a decode step: whose logits it computes, and these, one row a
        request. ``None`` where vLLM has more to do; then ``before_step`` has been called."""
        held, self._held = self._held, None
        foreseen, self._foreseen = self._foreseen, None
        if held is not None:
            tokens = self._tokens_of(held)
            if tokens is not None:
                return held.request_ids, self._launch(held, tokens, foreseen)
            self._misses += 1
            self._mistaken += foreseen is not None
        self.before_step()
        output = self._scheduler.decode_step() if self._decodes else None
        if output is None:
            self._decoded = []
            return None
        self._execute(output)
        names, logits = self._runner.take_logits()
        self._steady = len(names) == len(self._decoded) and set(names) == set(self._decoded)
        self._decoded = names
        return names, logits

    def _tokens_of(self, held: Held) -> list[Next] | None:
        """The tokens that a held step lacks, in its order, if it is what comes next."""
        by_name = {entry.request_id: entry for entry in self._tokens}
        tokens = [by_name[name] for name in held.request_ids if name in by_name]
        positions = [entry.position for entry in tokens]
        fits = len(tokens) == len(by_name) and positions == held.positions
        return tokens if fits and self._scheduler.begin_ahead(by_name) else None

    def _launch(
        self, held: Held, tokens: Sequence[Next], foreseen: _Foreseen | None
    ) -> torch.Tensor:
        if foreseen is not None and not self._seats and foreseen.was_right(tokens):
            logits = foreseen.logits
            self._mistaken = 0
            self.foreseen += 1
        else:
            self._mistaken += foreseen is not None
            if self._seats:
                self._runner.reseat(self._seats)
                self._runner.refresh(held)
                self._seats.clear()
            token_ids = [entry.token_id for entry in tokens]
            logits = self._runner.run(held, self._moved(token_ids, torch.int32))
        self._runner.confirm(held, tokens)
        self._tokens.clear()
        self._misses = 0
        self.held += 1
        return logits

    def _moved(self, numbers: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Numbers on the device, without a wait for what that is at."""
        on_host = torch.tensor(numbers, dtype=dtype, pin_memory=self._device.type == "cuda")
        return on_host.to(self._device, non_blocking=True)

    def holds(self, count: int) -> bool:
        """Whether a step of so many requests is held, and not foreseen yet."""
        held = self._held
        return held is not None and len(held.request_ids) == count and self._foreseen is None

    @torch.inference_mode()
    def foresee(self, names: Sequence[str], token_ids: torch.Tensor) -> torch.Tensor | None:
        """After ``decode``, run the held step with these tokens, int32 ``[n]`` on the device, if it takes
        one of each of these requests. Returns the logits that ``decode`` will, if they are asked for."""
        held = self._held
        if held is None or not self._worth_it(self._mistaken):
            return None
        places = {name: place for place, name in enumerate(names)}
        if len(places) != len(names) or places.keys() != set(held.request_ids):
            return None
        order = [places[name] for name in held.request_ids]
        if order != list(range(len(order))):
            token_ids = token_ids.index_select(0, self._moved(order, torch.int64))
        on_host = Leaving(token_ids)
        logits = self._runner.run(held, token_ids)
        self._foreseen = _Foreseen(on_host, logits)
        return logits

    def _worth_it(self, mistakes: int) -> bool:
        """Whether to try once more what went wrong so many times in a row."""
        return mistakes < MISSES or self._flush % RETRY == 0

    @torch.inference_mode()
    def end_decode(self) -> None:
        """After ``decode``, while the device computes: hold the step after it, if this one was of the
        same requests as the one before, and what was held lately mostly came."""
        if self._ahead and self._steady and self._worth_it(self._misses):
            output = self._scheduler.decode_step_ahead()
            if output is not None:
                self._held = self._runner.hold(output)
        self._scheduler.end_decode_step()
        self._forget_evicted()

    def before_step(self) -> None:
        """Tell the runner of forks and of the tokens of extended sequences."""
        if self._seats:
            self._runner.reseat(self._seats)
            self._seats.clear()
        if self._tokens:
            self._runner.write(self._tokens)
            self._tokens.clear()

    def after_step(self) -> list[str]:
        """The requests whose rows a step of vLLM's computed."""
        self._forget_evicted()
        return self._scheduler.take_answered()

    def _forget_evicted(self) -> None:
        for name in self._scheduler.take_evicted():
            self._drop(name)
            self.evicted += 1

    def keep(self, name: str, request: LogprobsRequest) -> None:
        """An answered request is resident with the context of its question."""
        self._residents.put(name, request.adapter, request.packed)

    def forget(self, names: Iterable[str]) -> None:
        """These requests are gone from vLLM, or what they are computed with may change."""
        gone = set(names)
        self._held = self._foreseen = None
        for name in gone:
            self._drop(name)
        self._seats = [seat for seat in self._seats if seat.request_id not in gone]
        self._tokens = [entry for entry in self._tokens if entry.request_id not in gone]

    def _drop(self, name: str) -> None:
        self._residents.remove(name)
        self._asked_in.pop(name, None)

    def counts(self) -> dict[str, int]:
        """For ``EngineStatistics``."""
        return {
            "computed_tokens": self._scheduler.computed_tokens,
            "extended": self.extended,
            "forked": self._scheduler.forked + self._scheduler.reseated,
            "evicted": self.evicted,
            "prepared": self.held,
            "speculated": self.foreseen,
            "resident": len(self._residents),
        }

    def start_counting(self) -> None:
        """Set the counters to 0."""
        self._scheduler.computed_tokens = self._scheduler.forked = self._scheduler.reseated = 0
        self.extended = self.evicted = self.held = self.foreseen = 0

    def names(self) -> list[str]:
        """The ids of all resident sequences, those that are being extended included."""
        return self._residents.names()

    def bound_to(self, adapter: Adapter | None) -> list[str]:
        """The ids of an adapter's resident sequences."""
        return self._residents.bound_to(adapter)
