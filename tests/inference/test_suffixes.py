"""What followed the ends of texts: the newest row after the longest end; draws as from whole rows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.inference.suffixes import LENGTHS, MOST, WIDTH, Law, Suffixes, chosen
from genrt.structures.tokens import packed
from genrt.tokens.sampling import draw, seeded_uniforms


def law_of(row: torch.Tensor) -> Law:
    suffixes = Suffixes()
    suffixes.put([[1, 2]], row[None])
    found = suffixes.find([1, 2])
    assert found is not None
    return found


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([3, WIDTH - 1, WIDTH]),
    sharpness=st.sampled_from([0.1, 1.0, 5.0]),
    masked=st.booleans(),
)
def test_of_rows_that_are_whole_the_token_is_the_one_that_is_drawn(
    seed: int, size: int, sharpness: float, masked: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = (sharpness * torch.randn(8, size, generator=generator)).log_softmax(-1)
    mask = torch.rand(8, size, generator=generator) < 0.4
    uniforms = seeded_uniforms(range(seed, seed + 8))
    expected = draw(rows, mask=mask if masked else None, uniforms=uniforms)
    words = [packed(each.numpy()) if masked else None for each in mask]
    found = chosen([law_of(row) for row in rows], words, uniforms.numpy())
    assert [token for token, _ in found] == expected.token_ids.tolist()
    shares = [share for token, share in found if token >= 0]
    wanted = expected.logprobs.exp()[expected.token_ids >= 0]
    np.testing.assert_allclose(shares, wanted, rtol=1e-3)


def test_of_wide_rows_it_mostly_is() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (4 * torch.randn(200, 5000, generator=generator)).log_softmax(-1)
    uniforms = seeded_uniforms(range(200))
    expected = draw(rows, uniforms=uniforms).token_ids.tolist()
    found = chosen([law_of(row) for row in rows], [None] * 200, uniforms.numpy())
    right = sum(token == wanted for (token, _), wanted in zip(found, expected, strict=True))
    assert right > 160  # what the 128 likeliest of 5,000 tokens hold, mostly


def test_the_longest_end_is_found_and_the_newest_row() -> None:
    suffixes = Suffixes()
    rows = torch.eye(9).add(1e-9).log()
    assert suffixes.find([1, 2, 3]) is None
    suffixes.put([[0, 1, 2, 3], [9, 2, 3]], rows[:2])
    found = [suffixes.find(text) for text in ([0, 1, 2, 3], [5, 1, 2, 3], [7, 2, 3], [3])]
    assert [each and (each.length, int(each.weights.argmax())) for each in found] == [
        (4, 0),
        (3, 0),
        (2, 1),
        None,
    ]
    suffixes.put([[7, 2, 3]], rows[4:5])
    newest = suffixes.find([8, 2, 3])
    assert newest is not None
    assert int(newest.weights.argmax()) == 4


def test_ends_are_forgotten_once_there_are_many() -> None:
    suffixes = Suffixes()
    row = torch.zeros(1, 4).log_softmax(-1)
    for number in range(MOST // len(LENGTHS) + 50):
        suffixes.put([[number] * LENGTHS[0]], row)
    assert len(suffixes) <= MOST
    assert suffixes.find([0] * LENGTHS[0]) is None
    assert suffixes.find([number] * LENGTHS[0]) is not None
