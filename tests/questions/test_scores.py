"""Scores: one law at every temperature, however many tokens; rows of long texts; entries read at once."""

from __future__ import annotations

import math
import sys
import tracemalloc
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.questions.reads import Candidates, Read, ReadRequest
from genrt.questions.rows import Limits, LogprobsRequest
from genrt.questions.scores import row_chunks
from genrt.tokens.sampling import GREEDY_BELOW, truncate
from tests.answers import is_answer
from tests.scoring_engine import ScoringEngine

MODEL = NGram.random(6, order=1, seed=3)
HEATS = [
    1e-300,
    1e-12,
    1e-6,
    math.nextafter(GREEDY_BELOW, 0),
    GREEDY_BELOW,
    2e-5,
    1e-3,
    0.5,
    3.0,
    1e30,
]


@pytest.mark.parametrize("kind", [ExactEngine, ScoringEngine])
@pytest.mark.parametrize("heat", HEATS)
def test_a_temperature_gives_a_token_one_score_alone_and_among_others(
    kind: type[ExactEngine], heat: float
) -> None:
    """That of the law that is drawn from: greedy where draws are."""
    tokens = [2, 5, 1, 0, 3, 4]
    with genrt.load(engine=lambda: kind(MODEL)) as lm:
        [together] = lm.population([1], 1).score_sync([tokens], temperature=heat)
        for place, token in enumerate(tokens):
            before = [1, *tokens[:place]]
            [alone] = lm.population(before, 1).score_sync([[token]], temperature=heat)
            right = truncate(MODEL.row(before), temperature=heat)[token]
            torch.testing.assert_close(alone, right[None], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(together[place], right, rtol=1e-5, atol=1e-5)


def test_the_contexts_of_a_long_texts_rows_are_made_as_they_are_wanted() -> None:
    limits = Limits(vocab_size=50, max_model_len=8192)
    text = [n % 50 for n in range(8000)]
    largest = rows = 0
    for questions in row_chunks(limits, text, 1, None, None, in_one=False):
        largest = max(largest, sum(sys.getsizeof(each.packed) for each in questions))
        rows += len(questions)
    assert rows == 7999
    assert largest < 70 * 2**20  # as much as its rows may take, where all of them take 128 MB
    tracemalloc.start()
    for _ in row_chunks(limits, text, 1, 100, None, in_one=False):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**25  # of the last chunks
    with pytest.raises(genrt.InvalidRequest, match="chunk"):  # at the call
        row_chunks(limits, text, 1, 0, None, in_one=False)
    first = next(row_chunks(limits, text, 1, 2, None, in_one=False))
    assert [len(each.token_ids) for each in first] == [1, 2]


class Gathers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that read entries."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("index", "index_select", "gather")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("heat", [1.0, 0.5])
@pytest.mark.parametrize("apart", [False, True])
def test_candidates_of_a_steps_rows_are_read_at_once(heat: float, apart: bool) -> None:
    rows = torch.randn(32, 9).log_softmax(-1)
    taken = [row.clone() if apart else row for row in rows.flip(0)]
    wanted = [Candidates(tuple(range(n % 5)), heat) for n in range(32)]
    reads = [
        Read(ReadRequest(LogprobsRequest([n]), each), row)
        for n, (each, row) in enumerate(zip(wanted, taken, strict=True))
    ]
    engine: Any = None
    with Gathers() as gathers:  # type: ignore[no-untyped-call]
        found = [*Candidates.answer(reads, engine)]
    for each, row, result in zip(wanted, taken, found, strict=True):
        assert is_answer(each, row, result, tolerance=1e-6)
        assert result.untyped_storage().nbytes() == 4 * len(each.token_ids)
    assert gathers.count <= (2 if not apart or heat != 1.0 else 32)
