"""Pairs of tokens that byte-pair encoding leaves side by side, against the tokenizers library."""

from __future__ import annotations

import itertools
import random

import pytest
from tokenizers.models import BPE

from genrt.errors import InvalidConstraint
from genrt.tokens.merges import Merges


def drawn(seed: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A random vocabulary of merges, each after those that make its parts."""
    rng = random.Random(seed)
    pieces = [*"abc"[: rng.randint(1, 3)]]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    merges: list[tuple[str, str]] = []
    for _ in range(rng.randint(1, 9)):
        pair = rng.choice(pieces), rng.choice(pieces)
        whole = "".join(pair)
        early = any(whole in other for other in merges)
        if pair not in merges and len(whole) <= 8 and not early:
            merges.append(pair)
            if whole not in vocab:
                vocab[whole] = len(vocab)
                pieces.append(whole)
    return vocab, merges


@pytest.mark.parametrize("seed", range(40))
def test_a_sequence_stays_as_it_is_exactly_if_each_token_and_each_pair_does(seed: int) -> None:
    vocab, merges = drawn(seed)
    pieces, known, judge = (
        {token: piece for piece, token in vocab.items()},
        Merges(vocab, merges),
        BPE(vocab, merges),
    )

    def stays(*tokens: int) -> bool:
        text = "".join(map(pieces.__getitem__, tokens))
        return [each.id for each in judge.tokenize(text)] == [*tokens]

    assert known.whole == {token for token in pieces if stays(token)}
    for left in known.whole:
        apart = {right for right in known.whole if not stays(left, right)}
        assert {*known.apart(left).tolist()} == apart
        assert {right for right in known.whole if not known.side_by_side(left, right)} == apart
    for tokens in itertools.islice(itertools.product(sorted(known.whole), repeat=4), 500):
        pairs = itertools.pairwise(tokens)
        assert stays(*tokens) == all(known.side_by_side(*pair) for pair in pairs)


def test_merges_before_those_that_make_their_parts_are_refused() -> None:
    vocab = {piece: token for token, piece in enumerate(["a", "b", "ab", "aba"])}
    with pytest.raises(InvalidConstraint, match="before it is made"):
        Merges(vocab, [("ab", "a"), ("a", "b")])
