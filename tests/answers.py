"""Right answers of reads, draws and scores, computed independently of the engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from genrt.questions.draws import DrawToken, PopulationDraw
from genrt.questions.masks import packed_mask
from genrt.questions.reads import (
    Candidates,
    HostRow,
    KeptContext,
    ReadRequest,
    TopTokens,
    TopWithTail,
    Wanted,
)
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.runtime.answers import AnsweringEngine
from genrt.tokens.sampling import BatchDraw, Draw, TeacherLogprobs, TopLogprobs, truncate

TOLERANCE = 1e-4
"""The distance of a draw's numbers from those of double precision."""


class ReadOracle(NamedTuple):
    """The test data of one kind of read.

    Attributes:
        examples: makes a few reads from the size of the vocabulary and a generator.
        is_answer: returns whether a result answers a read, from the row and a tolerance.
    """

    examples: Callable[[int, torch.Generator], Sequence[Wanted]]
    is_answer: Callable[[Any, Tensor, object, float], bool]


def is_row(row: Tensor, result: object, *, tolerance: float = 0.0) -> bool:
    """Return whether a result is this row: float32, of the same length, with the same entries."""
    if not isinstance(result, Tensor) or result.dtype != torch.float32:
        return False
    if result.shape != row.shape:
        return False
    return torch.allclose(row.to(result.device), result, rtol=0.0, atol=tolerance)


def is_answer(wanted: Wanted, row: Tensor, result: object, *, tolerance: float = 0.0) -> bool:
    """Return whether a result answers a read of the row."""
    return READS[type(wanted)].is_answer(wanted, row, result, tolerance)


def read_examples(vocab_size: int, generator: torch.Generator) -> list[Wanted]:
    """Return a few reads of every kind."""
    return [each for kind in READS.values() for each in kind.examples(vocab_size, generator)]


def are_draws(request: PopulationDraw, rows: Sequence[Tensor], result: object) -> bool:
    """Return whether each draw of a population is possible after its row, or whether it got the rows."""
    if request.seeds is None and isinstance(result, list):
        return len(result) == len(rows) and all(map(is_row, rows, result))
    if not isinstance(result, BatchDraw) or len(result.token_ids) != len(rows):
        return False
    draws = map(Draw, *[numbers.tolist() for numbers in result])
    table = request.mask_table
    masks = [None] * len(rows) if table is None else [mask.tobytes() for mask in table]
    return all(
        _is_possible_draw(DrawToken(mask, request.temperature, seed=0), row, draw)
        for row, mask, draw in zip(rows, masks, draws, strict=True)
    )


def is_score(
    request: ScoreRequest, rows: Sequence[Tensor], result: object, *, tolerance: float = 0.0
) -> bool:
    """Return whether a result answers a score, given the row before each token."""
    return is_row(request.answer(rows), result, tolerance=tolerance)


def _draws(vocab_size: int, generator: torch.Generator) -> list[Wanted]:
    """Return draws with and without a mask, greedy and tempered draws."""
    allowed = torch.randperm(vocab_size, generator=generator)[: max(1, vocab_size // 3)]
    mask = packed_mask(allowed, vocab_size)
    free = DrawToken(seed=9)
    return [DrawToken(mask, seed=8), free, DrawToken(mask, 0.0), DrawToken(mask, 2.0, seed=10)]


def _is_possible_draw(
    wanted: DrawToken, row: Tensor, result: object, tolerance: float = 0.0
) -> bool:
    """Return whether the token of a draw is possible and its two numbers are correct."""
    if not isinstance(result, Draw):
        return False
    tolerance = max(tolerance, TOLERANCE)
    masked = row.double().cpu()
    if wanted.mask is not None:
        bits = torch.frombuffer(bytearray(wanted.mask), dtype=torch.uint8)
        allowed = bits[:, None] >> torch.arange(8) & 1
        masked = masked.masked_fill(allowed.reshape(-1)[: len(row)] == 0, -math.inf)
    log_mass = float(masked.logsumexp(-1))
    if log_mass == -math.inf:
        return result == Draw(-1, -math.inf, -math.inf)
    if not 0 <= result.token_id < len(row) or abs(result.log_mass - log_mass) > tolerance:
        return False
    own = float(masked[result.token_id])
    if wanted.temperature == 0.0:
        return own >= float(masked.max()) - tolerance and result.logprob == 0.0
    if own == -math.inf:
        return False
    heated = masked / wanted.temperature
    expected = float(heated[result.token_id] - heated.logsumexp(-1))
    return abs(result.logprob - expected) <= tolerance * max(1.0, 1.0 / wanted.temperature)


def _is_top(wanted: TopTokens, row: Tensor, result: object, tolerance: float) -> bool:
    """Return whether a result has the ``k`` likeliest tokens in order, with their entries."""
    if not isinstance(result, TopLogprobs) or len(set(result.token_ids.tolist())) != wanted.k:
        return False
    several = row.topk(wanted.k).values, row[result.token_ids.to(row.device)]
    return all(is_row(each, result.logprobs, tolerance=tolerance) for each in several)


def _is_top_with_tail(wanted: TopWithTail, row: Tensor, result: object, tolerance: float) -> bool:
    """Return whether a result has the ``k`` likeliest tokens, and the mass of the others."""
    if not isinstance(result, Tensor) or result.dtype != torch.int32:
        return False
    found = TeacherLogprobs.of(result)
    law = truncate(row.cpu(), temperature=wanted.temperature)
    ids, wide = found.token_ids.long(), max(tolerance, TOLERANCE)
    if len(set(ids.tolist())) != wanted.k or not is_row(law[ids], found.logprobs, tolerance=wide):
        return False
    tail = law.double().scatter(0, ids, -math.inf).logsumexp(-1)
    is_there = is_row(tail.float(), found.tail, tolerance=wide)
    return is_there and is_row(law.topk(wanted.k).values, found.logprobs, tolerance=wide)


def _candidates(vocab_size: int, generator: torch.Generator) -> list[Wanted]:
    """Return a few tokens with a repetition, and no token."""
    ids = tuple(torch.randperm(vocab_size, generator=generator)[:5].tolist())
    ways = [Candidates((*ids, ids[0])), Candidates(()), Candidates(ids, 0.5), Candidates(ids, 3.0)]
    return [*ways]


def _are_candidates(wanted: Candidates, row: Tensor, result: object, tolerance: float) -> bool:
    """Return whether a result has the row's entries."""
    if wanted.temperature != 1.0:
        row = truncate(row, temperature=wanted.temperature)
    return is_row(row[list(wanted.token_ids)], result, tolerance=tolerance)


def _is_on_host(_: HostRow, row: Tensor, result: object, tolerance: float) -> bool:
    is_there = isinstance(result, Tensor) and result.device.type == "cpu"
    return is_there and is_row(row, result, tolerance=tolerance)


READS: dict[type[Wanted], ReadOracle] = {
    DrawToken: ReadOracle(_draws, _is_possible_draw),
    TopTokens: ReadOracle(lambda size, _: [TopTokens(1), TopTokens(min(5, size))], _is_top),
    Candidates: ReadOracle(_candidates, _are_candidates),
    TopWithTail: ReadOracle(
        lambda size, _: [TopWithTail(1), TopWithTail(min(5, size), 0.5)], _is_top_with_tail
    ),
    HostRow: ReadOracle(lambda *_: [HostRow()], _is_on_host),
    KeptContext: ReadOracle(lambda *_: [KeptContext()], lambda *given: given[2] is True),
}
"""Every kind of read."""


def check_reads(engine: AnsweringEngine, vocab_size: int) -> None:
    """Check every kind of read: against its row, with one row for all reads of a context, and that a seed
    fixes a draw."""
    generator = torch.Generator().manual_seed(0)

    def ask(requests: Sequence[Request]) -> dict[Request, Result | None]:
        ends = [*engine.submit(requests)]
        while len(ends) < len(requests):
            ends += engine.step()
        assert [end.error for end in ends if end.error] == []
        return {end.request: end.result for end in ends}

    contexts = [LogprobsRequest(ids) for ids in ([1], [2, 1], [0, 2, 2])]
    rows = ask(contexts)
    before = engine.statistics().rows
    examples = read_examples(vocab_size, generator)
    together = ask([ReadRequest(row, wanted) for row in contexts for wanted in examples])
    assert engine.statistics().rows - before == len(contexts), "a row is computed once"
    for request, result in together.items():
        assert isinstance(request, ReadRequest)
        row = rows[request.row]
        assert isinstance(row, Tensor)
        assert is_answer(request.wanted, row, result), f"{request} is answered by {result}"
    draws = [r for r in together if isinstance(r, ReadRequest) and isinstance(r.wanted, DrawToken)]
    again = ask(draws[::-1])
    assert again == {draw: together[draw] for draw in draws}, "a seed fixes a draw"
