"""Guesses of the tokens to come: from what followed the same tokens before, and from what must follow.

A token is guessed with the seed that will draw it, from the row that last followed the same tokens, in
whatever text (``suffixes.py``): where rows are alike, so are draws by the same numbers. Or it is the only
one that the constraint lets follow. Guesses go on while all of them are likely right, by how often those
of their kind were.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from genrt.constraints.masking import fill
from genrt.constraints.protocols import State
from genrt.constraints.tokens import words_of
from genrt.inference.suffixes import LENGTHS, Law, Suffixes, chosen
from genrt.questions.contexts import seeds_at
from genrt.questions.rows_ahead import RowsAhead
from genrt.tokens.sampling import seeded_uniforms

__all__ = ["ENDS", "Guesses", "Kind"]

ENDS = LENGTHS[0]
"""How many of a text's last tokens are looked at."""

MOST_TOKENS = 12
"""How many tokens are guessed after a text at most."""

ROOM = 16
"""How many tokens are guessed at most, those of equal texts once: one for each text, and so many more."""

EXPECTED = 2
"""How many guesses an expectation of a kind of guess counts for, beside those that were measured."""

MOST_GUESSES = 2**14
"""How many guesses are remembered until it is known whether they were right."""

Text: TypeAlias = list[int]

Kind: TypeAlias = tuple[str, int, int]
"""A kind of guess: its source, how many tokens were looked at, and its probability in tenths."""

FORCED: Kind = ("forced", 0, 0)


@dataclass(slots=True)
class _Chain:
    """A text with guesses behind it.

    Attributes:
        text: its last tokens, and the guesses.
        state: the constraint's after these.
        chance: how likely all guesses are right.
    """

    text: Text
    state: State | None
    guesses: list[int] = field(default_factory=list)
    chance: float = 1.0
    goes_on: bool = True


class Guesses:
    """Knowledge of texts' next tokens, and of how good guesses are; for one thread at a time.

    ``guessed`` and ``right`` count guesses whose place was drawn, and those that were drawn, by source.

    Args:
        ends: the tokens that end a text.
    """

    def __init__(self, ends: frozenset[int]) -> None:
        self.guessed: Counter[str] = Counter()
        self.right: Counter[str] = Counter()
        self._ends = ends
        self._suffixes = Suffixes()
        self._measured: dict[Kind, tuple[int, int]] = {}
        self._told: OrderedDict[tuple[tuple[int, ...], int], Kind] = OrderedDict()

    def after(
        self,
        texts: Sequence[Text],
        states: Sequence[State | None],
        seed_of: Callable[[int], int | None],
        most: int,
        least: float,
    ) -> list[list[int]]:
        """Return guesses after each text, all of which are right with probability ``least`` or more.

        Args:
            texts: their last ``ENDS`` tokens.
            states: the constraint's after the texts.
            seed_of: the seed of the draws so many steps later; ``None`` for the likeliest tokens.
            most: how many tokens a text may have yet.
        """
        chains = [_Chain([*text], state) for text, state in zip(texts, states, strict=True)]
        room = ROOM + len(chains)
        for step in range(min(most, MOST_TOKENS)):
            going = [place for place, chain in enumerate(chains) if chain.goes_on]
            room -= len({tuple(chains[place].text) for place in going})
            if not going or room < 0:
                break
            seed = seed_of(step)
            uniforms = np.full((len(going), 2), 0.5)
            if seed is not None:
                uniforms = seeded_uniforms(seeds_at(seed, np.array(going))).numpy()
            self._lengthen([chains[place] for place in going], uniforms, least)
        return [chain.guesses for chain in chains]

    def _lengthen(self, chains: Sequence[_Chain], uniforms: np.ndarray, least: float) -> None:
        """Add a token to each of these, or end them."""
        with suppress(Exception):  # each is asked by itself, too
            fill([chain.state for chain in chains if chain.state is not None])
        laws: dict[int, Law] = {}
        masks: dict[int, np.ndarray | None] = {}
        for place, chain in enumerate(chains):
            chain.goes_on = False
            # A state that nobody is in yet may raise what nobody is ever told.
            with suppress(Exception):
                masks[place] = None if chain.state is None else words_of(chain.state)[0]
                only = _only(masks[place])
                if only is not None:
                    self._add(chain, only, FORCED, 1.0, least)
                elif (law := self._suffixes.find(chain.text)) is not None:
                    laws[place] = law
        if not laws:
            return
        found = chosen([*laws.values()], [masks[place] for place in laws], uniforms[[*laws]])
        for (place, law), (token, share) in zip(laws.items(), found, strict=True):
            kind = "texts", law.length, int(10 * share)
            expected = (0.25 + 0.75 * share) * (1 - 0.5 / law.length)
            with suppress(Exception):
                self._add(chains[place], token, kind, expected, least)

    def _add(self, chain: _Chain, token: int, kind: Kind, expected: float, least: float) -> None:
        """Add a guess to a chain, if all of that is likely right still."""
        right, guessed = self._measured.get(kind, (0, 0))
        chain.chance *= (right + EXPECTED * expected) / (guessed + EXPECTED)
        if token < 0 or token in self._ends or chain.chance < least:
            return
        if chain.state is not None:
            chain.state = chain.state.advance(token)
        self._tell(chain.text, token, kind)
        chain.guesses.append(token)
        chain.text.append(token)
        chain.goes_on = True

    def tell(self, texts: Sequence[Text], drafts: Sequence[Sequence[int]], kind: Kind) -> None:
        """Remember what others have guessed after texts."""
        for text, draft in zip(texts, drafts, strict=True):
            for count, token in enumerate(draft):
                self._tell([*text, *draft[:count]], token, kind)

    def _tell(self, text: Text, token: int, kind: Kind) -> None:
        self._told[tuple(text[-ENDS:]), token] = kind
        if len(self._told) > MOST_GUESSES:
            self._told.popitem(last=False)

    def learn(
        self,
        texts: Sequence[Text],
        before: Sequence[RowsAhead | None],
        after: Sequence[RowsAhead | None],
    ) -> bool:
        """Remember the rows after texts that are there since a draw; return whether there are any."""
        ends: list[Text] = []
        rows: list[torch.Tensor] = []
        seen: set[int] = set()
        for text, old, new in zip(texts, before, after, strict=True):
            if new is None or new is old or id(new) in seen:
                continue
            seen.add(id(new))
            first = 0 if old is None else old.in_common(new.draft)
            rows.append(new.rows[first:])
            ends += [[*text, *new.draft[:count]] for count in range(first, len(new.rows))]
        if ends:
            self._suffixes.put(ends, torch.cat(rows))
        return bool(ends)

    def check(
        self, texts: Sequence[Text], drafted: Sequence[RowsAhead | None], drawn: Sequence[int]
    ) -> None:
        """Count which guesses were right, now that these tokens were drawn after texts with drafts."""
        for text, ahead, token in zip(texts, drafted, drawn, strict=True):
            if ahead is None or not ahead.draft:
                continue
            kind = self._told.get((tuple(text[-ENDS:]), ahead.draft[0]))
            if kind is not None:
                is_right = ahead.draft[0] == token
                right, guessed = self._measured.get(kind, (0, 0))
                self._measured[kind] = right + is_right, guessed + 1
                self.guessed[kind[0]] += 1
                self.right[kind[0]] += is_right


def _only(words: np.ndarray | None) -> int | None:
    """Return the only token that a packed mask allows; ``None`` if there are several, or none."""
    if words is None:
        return None
    [places] = np.nonzero(words)
    if len(places) != 1:
        return None
    word = int(words[places[0]]) & 0xFFFFFFFF
    return None if word & word - 1 else int(places[0]) * 32 + word.bit_length() - 1
