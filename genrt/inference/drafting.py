"""Drafts for a population of texts: what each will likely go on with, where from, and whether it pays.

The row after each token of a draft is computed in the forward that computes the text's own, and kept. The
tokens are drawn later, step by step, each from its own row under its own mask and seed: drafts change no
draw, no weight and no evidence. A right one saves forwards, a wrong one costs what was computed for it.
All texts of a population take their next step together, but their rows need not come from one forward:
each runs ahead as far as its draft goes.

Whether to draft is decided by the time that steps take (``pace.py``), how far by how often guesses of a
kind were right (``guesses.py``).

Leviathan, Kalman & Matias (2023), *Fast inference from transformers via speculative decoding* (rows of
drafted tokens in one forward). He et al. (2024), *REST: retrieval-based speculative decoding*.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, cast, runtime_checkable

from torch import Tensor, device

from genrt.constraints.protocols import State
from genrt.errors import InvalidRequest
from genrt.inference.guesses import ENDS, Guesses
from genrt.inference.pace import FIRST, PATIENT, Pace
from genrt.numbers import shown
from genrt.populations import Population
from genrt.tokens.sampling import BatchDraw

__all__ = ["DraftStatistics", "Drafter", "Drafting", "Drafts", "drafting"]

LEAST = 0.1
"""How likely all of a draft has to be right."""


@runtime_checkable
class Drafter(Protocol):
    """A source of drafts of your own, such as a small resident model."""

    async def draft(self, texts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return tokens that each text, with the prompt, may go on with, any number of them."""


Drafts: TypeAlias = Literal["auto", "off"] | Drafter
"""Where drafts come from."""


@dataclass(frozen=True, slots=True)
class DraftStatistics:
    """The worth of drafts.

    Attributes:
        steps: how many there were with drafts, of one population each.
        forwards: those that had rows computed.
        guessed: tokens of drafts whose place was drawn, by source: ``"forced"`` by the constraint,
            ``"texts"`` before or beside, ``"drafter"``.
        right: those of them that were drawn.
    """

    steps: int = 0
    forwards: int = 0
    guessed: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)


class Drafting:
    """Drafts for the texts of one model, of all its runs. Any threads and loops may use it at once.

    Args:
        drafter: where drafts come from; ``None``: from guesses, where they pay.
        ends: the tokens that end a text.
        first: how many steps go without drafts before they are tried.
    """

    def __init__(self, drafter: Drafter | None, ends: frozenset[int], first: int = FIRST) -> None:
        self._drafter = drafter
        self._ends, self._first = ends, first
        self._pace = Pace(first)
        self._guesses = Guesses(ends)
        self._steps = self._forwards = 0
        self._lock = threading.Lock()  # around guesses and counters

    def __reduce__(self) -> tuple[Any, ...]:
        return Drafting, (self._drafter, self._ends, self._first)

    @property
    def statistics(self) -> DraftStatistics:
        """The worth of drafts so far."""
        with self._lock:
            guesses = self._guesses
            counters = Counter(guesses.guessed), Counter(guesses.right)
            return DraftStatistics(self._steps, self._forwards, *counters)

    async def draw(
        self,
        population: Population,
        states: Sequence[State | None],
        masks: Tensor | None,
        seed: int,
        left: int,
    ) -> BatchDraw:
        """Draw a token after each text of a population as ``population.draw`` does, drafting for those
        that lack a row. The states are the constraint's after the texts, which may have ``left`` more
        tokens. Raises what a ``Drafter`` raises, and InvalidRequest for what is no draft."""
        began, count = time.perf_counter(), len(population)
        if self._drafter is None and not self._pace.is_ahead(count):
            found = await population.draw(masks=masks, seed=seed)
        else:
            texts, before = population.ends(ENDS), population.rows_ahead
            drafts: Sequence[Sequence[int]] | None = None
            if left > 1 and not all(before):
                drafts = await self._drafts(population, texts, states, seed, left - 1)
            found = await population.draw(masks=masks, seed=seed, drafts=drafts)
            after, drawn = population.rows_ahead, found.token_ids.tolist()

            def learn() -> None:
                with self._lock:
                    if drafts is not None and self._drafter is not None:
                        self._guesses.tell(texts, drafts, ("drafter", 0, 0))
                    self._guesses.check(texts, after, drawn)
                    self._steps += 1
                    self._forwards += self._guesses.learn(texts, before, after)

            await asyncio.to_thread(learn)
        self._pace.took(count, time.perf_counter() - began)
        return found

    async def _drafts(
        self,
        population: Population,
        texts: Sequence[list[int]],
        states: Sequence[State | None],
        seed: int,
        most: int,
    ) -> Sequence[Sequence[int]]:
        """Return drafts of at most ``most`` tokens."""
        if self._drafter is not None:
            given: Any = await self._drafter.draft([*population])
            if given is None:
                raise InvalidRequest("the Drafter gave None: give token ids for each text, or []")
            return cast("Sequence[Sequence[int]]", given)
        later = getattr(seed, "later", lambda _: None)

        def guess() -> list[list[int]]:
            seed_of = lambda step: later(step) if step else seed
            with self._lock:
                return self._guesses.after(texts, states, seed_of, most, LEAST)

        return await asyncio.to_thread(guess)


def drafting(drafts: Drafts, ends: Collection[int | None], where: device) -> Drafting | None:
    """Return the drafting of texts that these tokens end, and whose rows are there; ``None`` for none.
    Raises InvalidRequest for what makes no drafts."""
    if drafts == "off":
        return None
    if drafts != "auto" and (isinstance(drafts, type) or not isinstance(drafts, Drafter)):
        raise InvalidRequest(f'drafts is {shown(drafts)}: give "auto", "off" or a Drafter')
    drafter = None if drafts == "auto" else drafts
    # A GPU runs steps of one token ahead, as graphs; of several, launched one by one, few pay.
    first = FIRST if where.type == "cpu" else PATIENT
    return Drafting(drafter, frozenset(each for each in ends if each is not None), first)
