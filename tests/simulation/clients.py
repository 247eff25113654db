"""Callers of a simulated runtime, who ask everything that can be asked and leave in every way there is.

Each question asked, cancellation, closed loop, … is an *operation*. Which comes next, and when, the seed
decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from genrt.engines.adapters import CONFIG_NAME, WEIGHTS_NAME
from genrt.errors import EngineFailed, GenrtError, UnknownAdapter
from genrt.questions.reads import HostRow, ReadRequest
from genrt.questions.rows import LogprobsRequest
from genrt.testing.virtual_loop import VirtualLoop
from tests.answers import read_examples
from tests.inside import adapters_of
from tests.simulation.contexts import ContextClients
from tests.simulation.engine import VOCAB_SIZE, Violation
from tests.simulation.runtime import SimulatedRuntime

ADAPTERS = ("a", "b")

EXAMPLES = read_examples(VOCAB_SIZE, torch.Generator().manual_seed(0))
MOST_LOOPS = 4

_Kind: TypeAlias = Callable[[list[int], str | None], Awaitable[None]]
"""A kind of question, of a context and an adapter's name."""

_Question: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""A question that can be asked again."""


class _Broken(Exception):
    """A source of weights has failed."""


class SimulatedClients:
    """The callers of one runtime.

    Args:
        runtime: what they ask.
        operations: how many things they do.
        directory: may be loaded as an adapter.
        texts: whether they ask for completions.
        populations, contexts: whether they hold them.
        updates: whether they also replace the weights, in every possible way.
    """

    def __init__(
        self,
        runtime: SimulatedRuntime,
        operations: int,
        directory: Path,
        *,
        texts: bool = True,
        populations: bool = False,
        contexts: bool = False,
        updates: bool = False,
    ) -> None:
        self.done = self.updated = 0
        self._updates = updates
        self._texts = texts
        self._populations = populations
        self.contexts = ContextClients(runtime) if contexts else None
        self._runtime = runtime
        self._lm = runtime.lm
        self._random = runtime.random
        self._operations = operations
        self._directory = directory
        self._tasks: dict[asyncio.Task[None], VirtualLoop] = {}
        self._asked: deque[_Question] = deque(maxlen=5)
        self._kept: list[tuple[LogprobsRequest, torch.Tensor]] = []
        root = [self._token() for _ in range(20)]
        self._contexts = [[self._token()], root[:2], root[:15], root[:17], root]
        self._haste = self._random.choice([0.1, 0.3, 0.8])
        runtime.on_interrupt = self._interrupted
        self._open_loops = [runtime.open_loop() for _ in range(self._random.randint(1, 3))]

    def run(self) -> None:
        """Run all operations, and the runtime between and after them until it rests."""
        while self.done < self._operations:
            if self._random.random() >= self._haste:
                if self._runtime.step():
                    continue
                self._runtime.check_rest()
            self._do_something()
        self._runtime.settle()

    def check_kept(self) -> None:
        """Check that rows that their owners did not edit are as they were."""
        for request, row in self._kept:
            if not torch.equal(row, self._runtime.engine.model.answer(request)):
                raise Violation(f"the row of {request} has changed in its owner's hands: {row}")
        for task in [*self._tasks]:
            self._check(task)

    # -- operations ---------------------------------------------------------------------------

    def _do_something(self) -> None:
        if self._updates and self._random.random() < 0.06:
            self.done += 1
            pauses = self.contexts is not None and self._random.random() < 0.3
            self._start(self._pause() if pauses else self._update())
            return
        number = self._random.random()
        for share, operation in self._shares:
            number -= share
            if number < 0.0:
                operation()
                return

    @cached_property
    def _shares(self) -> list[tuple[float, Callable[[], None]]]:
        return [
            (0.45, self._ask),
            (0.10, self._particle),
            (0.05, self._crowd),
            (0.10, self._ask_again),
            (0.10, self._cancel),
            (0.05, self._change_mind),
            (0.03, self._load_adapter),
            (0.02, self._remove_adapter),
            (0.02, self._clear_cache),
            (0.03, self._interrupt),
            (0.02, self._leave_loop),
            (0.029, self._new_loop),
            (0.0005, self._close),
            (0.0005, self._restart),
        ]

    def _ask(self) -> None:
        self._asked.append(self._any_question(self._context()))
        self._start(self._asked[-1]())

    def _particle(self) -> None:
        """Start a caller that goes on from each answer."""
        self._start(self._grow(list(self._context()), self._random.randint(2, 6)))

    def _crowd(self) -> None:
        """Start several callers that ask the same at once."""
        question = self._any_question(self._context())
        self._start(self._together(question, self._random.randint(2, 4)))

    def _ask_again(self) -> None:
        """Ask what somebody else has just asked."""
        if self._asked:
            self._start(self._random.choice(self._asked)())

    def _cancel(self) -> None:
        self.done += 1
        pending = [task for task in self._tasks if not task.done()]
        if pending:
            self._random.choice(pending).cancel()

    def _change_mind(self) -> None:
        """Ask, cancel that after a while, and ask the same again."""
        question = self._any_question(self._context())
        loop = self._loop()
        task = self._start(question(), loop)
        for _ in range(self._random.randint(0, 20)):
            self._runtime.step()
        task.cancel()
        if not loop.is_closed():
            self._start(question(), loop)

    def _load_adapter(self) -> None:
        self._start(self._loading(self._random.choice(ADAPTERS)))

    def _remove_adapter(self) -> None:
        self.done += 1
        with contextlib.suppress(GenrtError):
            self._lm.remove_adapter(self._random.choice(ADAPTERS))

    def _clear_cache(self) -> None:
        self.done += 1
        self._lm.clear_cache()

    def _interrupt(self) -> None:
        """Interrupt a loop between two callbacks."""
        self.done += 1
        self._loop().call_soon(_interrupt)

    def _leave_loop(self) -> None:
        """Leave a loop with work on it: closed, or never taken on again."""
        self.done += 1
        loop = self._loop()
        if len(self._open_loops) == 1 or self._updates:
            return  # an update on a loop that is left alone goes on for ever
        if self._random.random() < 0.5:
            self._forsake(loop)
        else:
            self._open_loops.remove(loop)
            self._runtime.stopped.add(loop)

    def _new_loop(self) -> None:
        self.done += 1
        if len(self._open_loops) < MOST_LOOPS:
            self._open_loops.append(self._runtime.open_loop())

    def _close(self) -> None:
        """Close the runtime, perhaps as a finalizer within a question does; perhaps restart it."""
        self.done += 1
        if self._random.random() < 0.5:
            self._lm.close()
        else:
            with self._runtime.batcher.lock:
                self._random.choice([self._lm.close, self._runtime.thread.abandon])()
            for _ in range(self._random.randint(0, 20)):
                self._runtime.step()
        if self._random.random() < 0.5:
            self._reopen()

    def _restart(self) -> None:
        """Restart the runtime, whether it was closed, has died, or goes on."""
        self.done += 1
        self._reopen()

    def _reopen(self) -> None:
        for _ in range(8):
            try:
                self._lm.restart()
                return
            except EngineFailed as error:  # there is no step that takes long here
                failed = error
                if not self._updates or "could not be read again" not in str(error):
                    break  # an injected fault may meet the weights of the next engine
        raise Violation(f"the runtime cannot be restarted: {failed}") from failed

    def _interrupted(self, loop: VirtualLoop) -> None:
        """Do what may follow an interrupt: let the loop go on, as a notebook does; or cancel everything
        on it and close it, as ``asyncio.run`` does; or close it as it is."""
        what = self._random.choice(["go on", "go on", "cancel", "close"])
        if what == "go on" or self._updates:
            return
        if what == "cancel":
            for task, own in self._tasks.items():
                if own is loop:
                    task.cancel()
            while loop.has_work:
                with contextlib.suppress(KeyboardInterrupt):
                    loop.run_one()
        self._forsake(loop)
        self._open_loops.append(self._runtime.open_loop())

    def _forsake(self, loop: VirtualLoop) -> None:
        self._open_loops.remove(loop)
        self._runtime.close_loop(loop)
        self._tasks = {task: own for task, own in self._tasks.items() if own is not loop}

    # -- coroutines ---------------------------------------------------------------------------

    def _start(
        self, coroutine: Coroutine[Any, Any, None], loop: VirtualLoop | None = None
    ) -> asyncio.Task[None]:
        loop = self._loop() if loop is None else loop
        task = loop.create_task(coroutine)
        self._tasks[task] = loop
        if len(self._tasks) > 100:
            for done in [each for each in self._tasks if each.done()]:
                self._check(done)
                del self._tasks[done]
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        """Check that a client ended well, cancelled, or in an error of the runtime's."""
        if not task.done() or task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, GenrtError):
            raise Violation(f"a client ended in {error!r}") from error

    async def _grow(self, context: list[int], length: int) -> None:
        for _ in range(length):
            await self._any_question(context)()
            context.append(self._token())

    async def _together(self, question: _Question, count: int) -> None:
        asked = [question() for _ in range(count)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        for outcome in done:
            if outcome is not None and not isinstance(outcome, GenrtError):
                raise outcome

    async def _loading(self, name: str) -> None:
        self.done += 1
        await self._lm.add_adapter(name, self._directory)

    def _any_question(self, context: list[int]) -> _Question:
        """Return some question about a context, with the name of an adapter that may not be there."""
        name = self._random.choice([None, None, *ADAPTERS])
        return partial(self._question, self._random.choice(self._kinds), [*context], name)

    async def _question(self, kind: _Kind, context: list[int], name: str | None) -> None:
        self.done += 1
        is_there = name is None or name in self._lm.adapters
        try:
            await kind(context, name)
        except UnknownAdapter:
            if is_there:
                raise Violation(f"{name!r} is unknown, and had been loaded") from None

    @cached_property
    def _kinds(self) -> list[_Kind]:
        return [
            self._row,
            self._row,
            self._row,
            self._row,
            self._batch,
            self._read,
            self._draw,
            self._draw,
            self._draws,
            self._top,
            self._candidates,
            self._score,
            self._sample,
            *([self._text, self._texts_of, *[self._stream] * 4] if self._texts else []),
            *([self._population] * 4 if self._populations else []),
            *([self.contexts.flock] * 6 if self.contexts is not None else []),
            *([self._prompt_rows] if self._updates else []),
        ]

    async def _row(self, context: list[int], name: str | None) -> None:
        adapter = adapters_of(self._lm).by_name.get(name) if name is not None else None
        request = LogprobsRequest(context, adapter)
        timeout = self._random.choice([None, None, None, 0.0, 0.01, 1.0])
        row = await self._lm.next_token_logprobs(context, adapter=name, timeout=timeout)
        if self._updates:  # the runtime knows the weights
            row.fill_(5.0)
            return
        if not torch.equal(row, self._runtime.engine.model.answer(request)):
            raise Violation(f"{request} was answered with another question's row")
        self._have(request, row)

    async def _batch(self, context: list[int], name: str | None) -> None:
        contexts = [context, *(self._context() for _ in range(self._random.randint(0, 3)))]
        (await self._lm.batch_next_token_logprobs(contexts, adapter=name)).fill_(5.0)

    async def _read(self, context: list[int], name: str | None) -> None:
        """Ask for an example of a kind that there is, in turn by context."""
        row = LogprobsRequest(
            context, adapters_of(self._lm).by_name.get(name) if name is not None else None
        )
        wanted = EXAMPLES[sum(context) % len(EXAMPLES)]
        [found] = await self._lm._ask([ReadRequest(row, wanted)])
        if isinstance(wanted, HostRow) and not self._updates:
            self._have(row, found)

    async def _draw(self, context: list[int], name: str | None) -> None:
        await self._lm.draw(
            context,
            mask=self._random.choice([None, [1, 2, 5], []]),
            temperature=self._random.choice([1.0, 1.0, 0.5, 0.0]),
            seed=self._random.choice([None, 1, 2]),
            adapter=name,
        )

    async def _draws(self, context: list[int], name: str | None) -> None:
        contexts = [context, self._context(), context]
        await self._lm.batch_draw(contexts, seed=self._random.choice([None, 1]), adapter=name)

    async def _population(self, context: list[int], name: str | None) -> None:
        with self._lm.population([context, self._context(), context], adapter=name) as population:
            for step in range(self._random.randint(1, 4)):
                if step and name is not None and name not in self._lm.adapters:
                    return  # removed since the first
                masks: Any = self._random.choice([None, [[1, 2, 5], None, []]])
                draws = await population.draw(
                    masks=masks,
                    temperature=self._random.choice([1.0, 0.5, 0.0]),
                    seed=self._random.choice([None, 1]),
                    where=self._random.choice([None, [True, False, True]]),
                    timeout=self._random.choice([None, None, 0.0, 0.01, 1.0]),
                )
                population.append(draws.token_ids)
                population.resample([self._random.randrange(3) for _ in range(3)])

    async def _top(self, context: list[int], name: str | None) -> None:
        top = await self._lm.top_logprobs(context, self._random.randint(1, 8), adapter=name)
        top.logprobs.fill_(5.0)

    async def _candidates(self, context: list[int], name: str | None) -> None:
        (await self._lm.token_logprobs(context, [self._token(), 3], adapter=name)).fill_(5.0)

    async def _score(self, context: list[int], name: str | None) -> None:
        continuation = [self._token() for _ in range(self._random.randint(0, 3))]
        await self._lm.score(context, continuation, adapter=name)

    async def _prompt_rows(self, context: list[int], name: str | None) -> None:
        """Read a text's rows, or stop early, and write to them."""
        text, chunk = [*context, 1, 2], self._random.choice([None, 2])
        async for rows in self._lm.prompt_rows(text, chunk=chunk):
            rows.fill_(5.0)
            if self._random.random() < 0.2:
                break

    async def _sample(self, context: list[int], name: str | None) -> None:
        seed = self._random.choice([None, 1])
        await self._lm.sample(context, max_tokens=3, seed=seed, adapter=name)

    async def _text(self, context: list[int], name: str | None) -> None:
        """Ask for a completion, and edit it: what can be edited of it is the caller's own."""
        seed = self._random.choice([None, 1])
        text = await self._lm.generate(context, max_tokens=4, logprobs=2, seed=seed, adapter=name)
        for place in text.top_logprobs:
            place.clear()

    async def _texts_of(self, context: list[int], name: str | None) -> None:
        seed, contexts = self._random.choice([None, 1]), [context, self._context(), context]
        timeout = self._random.choice([None, None, 0.0, 0.01])
        await self._lm.batch_generate(
            contexts, max_tokens=3, temperature=0.5, seed=seed, adapter=name, timeout=timeout
        )

    async def _stream(self, context: list[int], name: str | None) -> None:
        """Read a stream to its end, or leave it early, in one of the ways there are."""
        timeout = self._random.choice([None, None, None, 0.0, 0.01])
        stream = self._lm.stream(context, max_tokens=9, logprobs=2, adapter=name, timeout=timeout)
        how = self._random.choice(["read", "read", "leave", "drop"])
        async with stream if how == "leave" else contextlib.nullcontext():
            async for delta in stream:
                for place in delta.top_logprobs:
                    place.clear()
                if how != "read" and self._random.random() < 0.5:
                    break
                await asyncio.sleep(self._random.choice([0.0, 0.0, 0.01]))

    async def _pause(self) -> None:
        await self._lm.pause()
        try:
            await asyncio.sleep(0.01)
        finally:
            self._lm.resume()

    async def _update(self) -> None:
        """Replace the weights, at once or in chunks, or fail to."""
        number = torch.tensor([self._random.randrange(1, 2**30)])
        what = self._random.choice(
            ["whole", "whole", "chunks", "slow", "broken", "lacking", "wrong"]
        )
        tensors = {"number": number, "other": torch.tensor([0])}
        if what == "lacking":
            del tensors["other"]
        elif what == "wrong":
            tensors["other"] = torch.tensor([0.5])
        chunks: Any = [{name: each} for name, each in tensors.items()]
        if what in ("slow", "broken"):
            chunks = self._chunks(chunks, breaks=what == "broken")
        try:
            await self._lm.update_weights(
                tensors if what == "whole" else chunks,
                pending=self._random.choice(["finish", "restart", "continue"]),
            )
        except _Broken:
            return
        self.updated += 1
        if what in ("broken", "lacking", "wrong"):
            raise Violation(f"weights that are {what} were taken")

    async def _chunks(
        self, chunks: list[dict[str, torch.Tensor]], *, breaks: bool
    ) -> AsyncIterator[dict[str, torch.Tensor]]:
        for chunk in chunks:
            yield chunk
            await asyncio.sleep(self._random.choice([0.0, 0.01]))
            if breaks and self._random.random() < 0.5:
                break
        if breaks:
            raise _Broken

    def _have(self, request: LogprobsRequest, row: torch.Tensor) -> None:
        """Edit a row that is one's own, or keep it to be compared in the end."""
        if self._random.random() < 0.5:
            row.fill_(5.0)
        else:
            self._kept.append((request, row))

    # -- what they ask ------------------------------------------------------------------------

    def _token(self) -> int:
        return self._random.randrange(self._runtime.engine.vocab_size)

    def _context(self) -> list[int]:
        """Return a context that was asked before, or one made of it: longer, cut back, edited."""
        context = list(self._random.choice(self._contexts))
        what = self._random.random()
        if what < 0.3:
            context.append(self._token())
        elif what < 0.4:
            del context[self._random.randint(1, len(context)) :]
        elif what < 0.45:
            context[self._random.randrange(len(context))] = self._token()
        else:
            return context
        self._contexts[self._random.randrange(len(self._contexts))] = context
        return context

    def _loop(self) -> VirtualLoop:
        return self._random.choice(self._open_loops)


def _interrupt() -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def adapter_directory() -> Iterator[Path]:
    """Make a directory that may be loaded as an adapter, with nothing in it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / CONFIG_NAME).write_text("{}", encoding="utf-8")
        (path / WEIGHTS_NAME).touch()
        yield path
