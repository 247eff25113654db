"""Small vocabularies for constraints, and what a constraint's masks lead to beside trying every text."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, cast

from hypothesis import strategies as st
from torch import Tensor

from genrt.constraints import CheckedState, Constraint, ConstraintState, amasks
from genrt.lm import AsyncLM
from genrt.tokens.texts import Potential, Text
from genrt.tokens.vocabulary import BytesTokenizer

EOS = 0

State = ConstraintState | CheckedState
Sequences = set[tuple[int, ...]]


class Tokens:
    """The part of a runtime that constraints read."""

    def __init__(self, *tokens: bytes, eos_token_id: int | None = EOS) -> None:
        self.byte_vocab = [b"<eos>", *tokens]
        self.vocab_size = len(self.byte_vocab)
        self.tokenizer: Any = BytesTokenizer(self.byte_vocab, eos_token_id=eos_token_id)


def lm_over(*tokens: bytes, eos_token_id: int | None = EOS) -> AsyncLM:
    return cast(AsyncLM, Tokens(*tokens, eos_token_id=eos_token_id))


def spelt(lm: AsyncLM, token_ids: Sequence[int]) -> bytes:
    return b"".join(lm.byte_vocab[token_id] for token_id in token_ids)


def marked(mask: Tensor) -> list[int]:
    """The tokens in a mask."""
    return mask.nonzero()[:, 0].tolist()


def allowed(state: ConstraintState) -> list[int]:
    return marked(state.mask())


async def led_to(constraint: Constraint, longest: int) -> tuple[Sequences, Sequences]:
    """The token sequences up to ``longest`` that the masks lead to, and those of them that may end."""
    prefixes: Sequences = set()
    whole: Sequences = set()
    frontier: list[tuple[tuple[int, ...], State]] = [((), constraint.start())]
    while frontier:
        prefixes |= {token_ids for token_ids, _ in frontier}
        grown: list[tuple[tuple[int, ...], State]] = []
        masks = await amasks([state for _, state in frontier])
        for (token_ids, state), mask in zip(frontier, masks, strict=True):
            for token_id in marked(mask):
                if token_id == EOS:
                    whole.add(token_ids)
                elif len(token_ids) < longest:
                    grown.append(((*token_ids, token_id), state.advance(token_id)))
        frontier = grown
    return prefixes, whole


def accepted(constraint: Constraint, longest: int) -> Sequences:
    """All token sequences up to ``longest`` that the masks lead to and let end."""
    return asyncio.run(led_to(constraint, longest))[1]


def sequences(lm: AsyncLM, longest: int) -> Iterator[tuple[int, ...]]:
    """All sequences of tokens that stand for text."""
    tokens = [token_id for token_id in range(lm.vocab_size) if token_id != EOS]
    tokens = [token_id for token_id in tokens if lm.byte_vocab[token_id]]
    for length in range(longest + 1):
        yield from itertools.product(tokens, repeat=length)


def of_texts(wanted: Callable[[str], bool]) -> Callable[[bytes], bool]:
    """The same of bytes: what is not UTF-8 is not wanted."""

    def judge(data: bytes) -> bool:
        try:
            return wanted(data.decode())
        except UnicodeDecodeError:
            return False

    return judge


def matching(wanted: Callable[[bytes], bool], lm: AsyncLM, longest: int) -> Sequences:
    """The sequences whose bytes are wanted, by trying every one."""
    return {ids for ids in sequences(lm, longest) if wanted(spelt(lm, ids))}


PIECES = [b"a", b"b", b"aa", b"ab", b"ba", b"\xc3", b"\xa9", b"\xc3\xa9", b"a\xc3", b"\xa9b", b""]
PIECES += [b'"', b'"a', b'b"']

vocabularies = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map(
    lambda tokens: lm_over(*tokens)
)
"""Runtimes over up to five tokens: parts of characters, tokens of equal bytes, tokens without bytes."""


async def weighed(potential: Potential, text: Text) -> float:
    """What a potential says, whether it has to be awaited or not."""
    answer = potential(text)
    return await answer if isinstance(answer, Awaitable) else answer
