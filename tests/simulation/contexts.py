"""Clients that hold contexts, each with a coroutine of its own. Every answer is compared with the answer
by content of the sequence at the call."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from genrt.contexts import Context
from genrt.errors import Closed, GenrtError, InvalidRequest, NotFinite, TimedOut, UnknownAdapter
from genrt.questions.arguments import Adapter
from genrt.questions.draws import DrawToken, draw_from_rows
from genrt.questions.masks import packed_mask
from genrt.questions.reads import TopTokens
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import SequenceHandle
from genrt.tokens.sampling import Draw, TopLogprobs
from tests.answers import is_answer, is_row
from tests.inside import adapters_of, extended_by
from tests.simulation.engine import VOCAB_SIZE
from tests.simulation.runtime import SimulatedRuntime

_Question: TypeAlias = tuple[
    Coroutine[Any, Any, Any], list[list[int]], Callable[[list[torch.Tensor], Any, int], bool]
]
"""A question, the sequences whose rows it reads, and whether a result answers it, given these rows and
the version of the weights."""


@dataclass(slots=True, eq=False)
class Particle:
    """A context and its mirror; ``is_free`` if no coroutine has it. ``changes`` counts the changes."""

    context: Context
    mirror: list[int]
    is_free: bool = False
    changes: int = 0


class ContextClients:
    """The contexts of one runtime. Coroutines of any loop take them on, one after the other."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self._runtime, self._lm, self._random = runtime, runtime.lm, runtime.random
        self._held: dict[Particle, None] = {}
        self._extended: dict[SequenceHandle, None] = {}
        self._kind: tuple[Callable[..., _Question], float] = self._draw, 1.0
        self._made: list[weakref.ref[Context]] = []

    async def flock(self, context: list[int], name: str | None) -> None:
        """Have a few contexts live at once: forks of one, and contexts that others have left."""
        first = self._hold(self._lm.context(context, adapter=name), context)
        flock = [first, *(self._fork(first) for _ in range(self._random.randint(1, 4)))]
        flock += [each for each in self._held if each.is_free and self._random.random() < 0.5]
        tasks: list[asyncio.Task[None]] = []
        for each in flock:
            each.is_free = False
            tasks.append(asyncio.create_task(self._live(each, tasks)))
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(
                outcome, asyncio.CancelledError
            ):
                raise outcome

    def close_all(self) -> None:
        """Compare all contexts with their mirrors, and close them."""
        for each in self._held:
            self._compare(each)
        for made in self._made:  # exceptions may keep some that were dropped
            if (context := made()) is not None:
                context.close()

    def check_nothing_is_held(self) -> None:
        """Check that the engine holds no sequence that a context has extended."""
        runtime = self._runtime
        held = [each for each in self._extended if each in runtime.engine.known]
        if held and runtime.thread.alive:
            runtime.record.violated(f"no context is left, but the engine holds {len(held)} of them")

    # -- a life -------------------------------------------------------------------------------

    async def _live(self, particle: Particle, flock: list[asyncio.Task[None]]) -> None:
        """Ask and change; some questions are cancelled, and some contexts change meanwhile."""
        chance = self._random.random
        for _ in range(self._random.randint(1, 5)):
            for _ in range(self._random.choice([0, 0, 1, 2])):  # in another order than before
                await asyncio.sleep(0)
            asked = asyncio.create_task(self._ask(particle))
            for _ in range(self._random.choice([1, 1, 1, 2, 8])):
                await asyncio.sleep(0)
            if chance() < 0.2:
                self._change(particle)
            if chance() < 0.1:
                asked.cancel()
            if chance() < 0.05:
                self._random.choice(flock).cancel()
            await asyncio.wait([asked])
            if particle.context.is_closed:
                break
            self._change(particle)
        if chance() < 0.5:
            particle.is_free = not particle.context.is_closed
        else:  # dropped, if it is not closed
            self._held.pop(particle, None)

    def _hold(self, context: Context, mirror: list[int]) -> Particle:
        particle = Particle(context, [*mirror])
        self._made.append(weakref.ref(context))
        self._held[particle] = None
        return particle

    def _fork(self, particle: Particle) -> Particle:
        return self._hold(particle.context.fork(), particle.mirror)

    def _change(self, particle: Particle) -> None:
        context, mirror = particle.context, particle.mirror
        if context.is_closed:
            return
        particle.changes += 1
        what = self._random.choice([*["append"] * 9, "extend", "cut", "fork", "replace", "close"])
        more = [self._token() for _ in range(self._random.randint(0, 3))]
        if what == "append":
            context.append(token := self._token())
            mirror.append(token)
        elif what == "extend":
            context.extend(more)
            mirror += more
        elif what == "cut":
            context.cut(length := self._random.randint(1, len(mirror)))
            del mirror[length:]
        elif what == "fork":
            self._fork(particle).is_free = True
        elif what == "replace":
            particle.context = context.fork()
            self._made.append(weakref.ref(particle.context))
        else:
            context.close()
        self._compare(particle)

    def _compare(self, particle: Particle) -> None:
        if particle.context.token_ids != particle.mirror:
            self._runtime.record.violated(f"{particle.context} has other tokens than its mirror")

    def _token(self) -> int:
        return self._random.randrange(VOCAB_SIZE)

    # -- questions ----------------------------------------------------------------------------

    async def _ask(self, particle: Particle) -> None:
        """Ask one question, and judge how it ends."""
        runtime, context, ids = self._runtime, particle.context, [*particle.mirror]
        if context.is_closed:
            return
        violated, name = runtime.record.violated, context.adapter
        adapter = adapters_of(self._lm).by_name.get(name) if name is not None else None
        timeout = self._random.choice([None, None, None, 0.0, 0.01, 1.0])
        if self._random.random() < 0.1:  # else as the question before, so that both go together
            kinds = [*[self._draw] * 4, self._row, self._row, self._top, self._score]
            kinds += [self._advance, self._advance]
            self._kind = self._random.choice(kinds), self._random.choice([1.0, 1.0, 0.5, 0.0])
        question, read, is_right = self._kind[0](context, ids, timeout)
        is_advance = self._kind[0] == self._advance
        loop, version = asyncio.get_running_loop(), self._lm.weights_version
        number, changes = next(runtime.numbers), particle.changes
        due = math.inf if timeout is None else loop.time() + timeout
        runtime.unanswered[number], told = loop, len(runtime.told)
        what = f"a question about {ids} with {adapter}"
        try:
            found = await question
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                violated(f"{what} was cancelled, but not by its caller")
            raise
        except TimedOut as error:
            if loop.time() < due:
                violated(f"{what} ended too early in {error!r}")
        except UnknownAdapter as error:
            if name is None or (adapter is not None and name in self._lm.adapters):
                violated(f"{what} ended in {error!r}")
        except GenrtError as error:
            if (
                particle.changes > changes
                and is_advance
                and isinstance(error, InvalidRequest | Closed)
            ):
                return
            is_told = (type(error), str(error)) in runtime.told[told:]
            requests = [LogprobsRequest(each, adapter) for each in read]
            may_be = not isinstance(error, NotFinite)
            may_be = may_be or any(runtime.engine.explains(each, error) for each in requests)
            if not is_told or not may_be:
                violated(f"{what} ended in {error!r}, and nothing explains that")
        else:
            versions = range(version, self._lm.weights_version + 1)
            if not any(is_right(self._rows(read, adapter, each), found, each) for each in versions):
                violated(f"{what} was answered wrongly: {found}")
            if is_advance and particle.context is context:
                particle.mirror[:] = read[-1]
                self._compare(particle)
        finally:
            runtime.unanswered.pop(number, None)
        if (handle := extended_by(context)) is not None:
            self._extended[handle] = None

    def _rows(
        self, read: list[list[int]], adapter: Adapter | None, version: int
    ) -> list[torch.Tensor]:
        model, weights = self._runtime.model, self._runtime.weights[version]
        return [model.answer(LogprobsRequest(each, adapter), weights) for each in read]

    def _draw(self, context: Context, ids: list[int], timeout: float | None) -> _Question:
        mask = self._random.choice([None, [1, 2, 5], [3, 4], []])
        heat, seed = self._kind[1], self._random.choice([None, 1, 2])
        packed = None if mask is None else packed_mask(mask, VOCAB_SIZE)

        def is_right(rows: list[torch.Tensor], found: Draw, version: int) -> bool:
            masks = None if packed is None else [packed]
            own = np.array([seed or 0], np.uint64), masks, np.array([heat])
            token_id = int(draw_from_rows(rows, *own)[0, 0])
            is_decided = seed is not None or heat == 0.0
            return (
                is_answer(DrawToken(packed, heat, seed=0), rows[0], found)
                and (found.token_id == token_id or not is_decided)
                and found.weights_version == version
            )

        question = context.draw(mask=mask, temperature=heat, seed=seed, timeout=timeout)
        return question, [ids], is_right

    def _row(self, context: Context, ids: list[int], timeout: float | None) -> _Question:
        def is_right(rows: list[torch.Tensor], found: torch.Tensor, _: int) -> bool:
            return is_row(rows[0], found)

        return context.logprobs(timeout=timeout), [ids], is_right

    def _top(self, context: Context, ids: list[int], timeout: float | None) -> _Question:
        k = self._random.randint(1, VOCAB_SIZE)

        def is_right(rows: list[torch.Tensor], found: TopLogprobs, _: int) -> bool:
            return is_answer(TopTokens(k), rows[0], found)

        return context.top_logprobs(k, timeout=timeout), [ids], is_right

    def _score(self, context: Context, ids: list[int], timeout: float | None) -> _Question:
        after = [self._token() for _ in range(self._random.randint(1, 3))]

        def is_right(rows: list[torch.Tensor], found: torch.Tensor, _: int) -> bool:
            entries = [row[token] for row, token in zip(rows, after, strict=True)]
            return is_row(torch.stack(entries), found)

        read = [[*ids, *after[:count]] for count in range(len(after))]
        return context.score(after, timeout=timeout), read, is_right

    def _advance(self, context: Context, ids: list[int], timeout: float | None) -> _Question:
        block = [self._token() for _ in range(self._random.randint(1, 4))]
        heat = self._kind[1] or 2.0

        def is_right(rows: list[torch.Tensor], found: torch.Tensor, _: int) -> bool:
            several = zip(rows[:-1], block, strict=True)
            entries = [(row / heat).log_softmax(-1)[token] for row, token in several]
            return is_row(torch.stack(entries), found, tolerance=1e-5)

        read = [[*ids, *block[:count]] for count in range(len(block) + 1)]
        return context.advance(block, temperature=heat, timeout=timeout), read, is_right
