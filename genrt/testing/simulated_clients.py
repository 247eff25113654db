"""Callers of a simulated runtime that use every kind of question, concurrently, repeatedly and with
cancellations."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import torch

from genrt.errors import GenrtError
from genrt.lm import AsyncLM
from genrt.testing.record import Violation


class _Broken(Exception):
    """A source of weights has failed."""


class Clients:
    """The callers on one event loop.

    ``random`` decides their operations and ``operations`` the number. With ``updates`` some operations
    are weight updates.
    """

    def __init__(
        self, lm: AsyncLM, random: random.Random, operations: int, *, updates: bool = False
    ) -> None:
        self.done = self.updated = 0
        self._updates = updates
        self._lm = lm
        self._random = random
        self._any = random.choice
        self._operations = operations
        self._contexts = [[self._token()] for _ in range(3)]
        self._asked: list[Callable[[], Awaitable[object]]] = [lambda: self._row([0])]
        self._kinds: list[Callable[[list[int]], Awaitable[object]]] = [
            self._row,
            self._row,
            self._row,
            lambda ids: lm.batch_next_token_logprobs([ids, self._context(), ids]),
            lambda ids: lm.draw(ids, mask=self._any([None, [1, 2], []]), seed=self._any([None, 1])),
            lambda ids: lm.batch_draw([ids, ids], temperature=self._any([0.0, 0.5, 1.0])),
            lambda ids: lm.top_logprobs(ids, 3),
            lambda ids: lm.token_logprobs(ids, [1, 3]),
            lambda ids: lm.score(ids, [2, 4]),
            lambda ids: lm.batch_score([ids, ids], [[1, 3, 2], self._any([[], [5], [1, 3]])]),
            self._prompt_rows,
            self._population,
            self._population,
            lambda ids: lm.sample(ids, max_tokens=3),
            self._text,
            self._stream,
            self._stream,
            lambda ids: lm.batch_generate([ids, ids], max_tokens=3, seed=self._any([None, 1])),
        ]

    async def run(self) -> None:
        """Start all operations and wait for their results.

        Raises:
            Violation: a client ended with an error that is not the runtime's.
        """
        tasks: list[asyncio.Task[object]] = []
        while self.done < self._operations:
            self.done += 1
            what = self._random.random()
            if what < 0.15 and tasks:
                self._any(tasks).cancel()
            elif what < 0.2:
                self._lm.clear_cache()
            elif self._updates and what >= 0.94:
                tasks.append(asyncio.ensure_future(self._update()))
            else:
                if what < 0.8:
                    self._asked.append(partial(self._any(self._kinds), self._context()))
                question = self._any(self._asked[-5:])
                count = self._any([1, 1, 1, 3])
                tasks += [asyncio.ensure_future(question()) for _ in range(count)]
            await asyncio.sleep(self._any([0.0, 0.0, 0.0, 0.01]))
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, GenrtError):
                raise Violation(f"a client ended in {outcome!r}") from outcome

    async def _row(self, context: list[int]) -> None:
        """Request a row and write to it, since it belongs to the caller."""
        timeout = self._any([None, None, None, 0.0, 0.01])
        (await self._lm.next_token_logprobs(context, timeout=timeout)).fill_(5.0)

    async def _prompt_rows(self, text: list[int]) -> None:
        """Read a text's rows, or stop early, and write to them."""
        async for rows in self._lm.prompt_rows([*text, 1, 2], chunk=self._any([None, 2])):
            rows.fill_(5.0)
            if self._random.random() < 0.2:
                break

    async def _population(self, context: list[int]) -> None:
        """Draw for several sequences, step by step."""
        with self._lm.population([context, context, self._context()]) as population:
            for _ in range(self._random.randint(1, 5)):
                masks = self._any([None, [[1, 2], None, []]])
                found = await population.draw(
                    masks=masks,
                    seed=self._any([None, 1]),
                    where=self._any([None, None, [True, False, True]]),
                )
                population.append(found.token_ids)
                population.resample([self._random.randrange(3) for _ in range(3)])

    async def _text(self, context: list[int]) -> None:
        """Request a completion and change its mutable parts, since they belong to the caller."""
        timeout, seed = self._any([None, None, None, 0.0, 0.01]), self._any([None, 1, 2])
        text = await self._lm.generate(
            context, max_tokens=5, logprobs=2, seed=seed, timeout=timeout
        )
        for place in text.top_logprobs:
            place.clear()

    async def _stream(self, context: list[int]) -> None:
        """Read a stream to its end, or stop early, with or without closing it."""
        timeout, is_closed = self._any([None, None, None, 0.0, 0.01]), self._any([True, False])
        stream = self._lm.stream(context, max_tokens=9, logprobs=2, timeout=timeout)
        async with stream if is_closed else contextlib.nullcontext():
            async for delta in stream:
                for place in delta.top_logprobs:
                    place.clear()
                if self._random.random() < 0.4:
                    break
                await asyncio.sleep(self._any([0.0, 0.01]))

    async def _update(self) -> None:
        """Replace the weights, at once or in chunks, or fail to."""
        number = torch.tensor([self._random.randrange(1, 2**30)])
        what = self._any(["whole", "whole", "chunks", "slow", "broken", "lacking", "wrong"])
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
                tensors if what == "whole" else chunks, pending=self._any(["finish", "restart"])
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
            await asyncio.sleep(self._any([0.0, 0.01]))
            if breaks and self._random.random() < 0.5:
                break
        if breaks:
            raise _Broken

    def _context(self) -> list[int]:
        """Return a context that was used before, or one that is longer by a token."""
        context = self._any(self._contexts)
        if self._random.random() < 0.4:
            context = [*context, self._token()][-20:]
            self._contexts[self._random.randrange(3)] = context
        return context

    def _token(self) -> int:
        return self._random.randrange(self._lm.vocab_size)
