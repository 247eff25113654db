"""Whether a result is the right one for its request, from the model's row and arithmetic of its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from genrt.questions.values import (
    Candidates,
    DrawToken,
    HostRow,
    LogprobsRequest,
    ReadRequest,
    Request,
    Result,
    SampleRequest,
    TopTokens,
)
from genrt.testing.simulated_model import Model
from genrt.tokens.sampling import Draw, TopLogprobs

TOLERANCE = 1e-4
"""How far a draw's numbers may be from those that double precision gives."""


def is_right(model: Model, request: Request, result: Result) -> bool:
    """Whether the result answers the request: rows, tops, candidates and samples bit by bit; a draw if
    its token is possible and its two numbers are those of that token."""
    if isinstance(request, SampleRequest):
        return result == model.sample(request)
    if isinstance(request, LogprobsRequest):
        return _is_row(model.row(request), result)
    row = model.row(request.row)
    match request.wanted:
        case HostRow():
            return _is_row(row, result)
        case Candidates(token_ids):
            return _is_row(row[list(token_ids)], result)
        case TopTokens(k):
            if not isinstance(result, TopLogprobs):
                return False
            best = row.topk(k)
            return _is_row(best.values, result.logprobs) and _is_row(
                row[result.token_ids], best.values
            )
        case DrawToken():
            return isinstance(result, Draw) and _is_draw(row, request.wanted, result)


def owns_storage(result: Result) -> bool:
    """Whether every tensor in this result has storage that holds nothing else."""
    parts = result if isinstance(result, TopLogprobs) else (result,)
    return all(
        part.untyped_storage().nbytes() == part.nbytes for part in parts if isinstance(part, Tensor)
    )


def is_random(request: Request) -> bool:
    """Whether the answer is a draw that nothing decides."""
    match request:
        case ReadRequest(wanted=DrawToken(seed=None, temperature=temperature)):
            return temperature > 0.0
    return False


def _is_row(row: Tensor, result: object) -> bool:
    return isinstance(result, Tensor) and result.dtype == torch.float32 and torch.equal(row, result)


def _is_draw(row: Tensor, wanted: DrawToken, drawn: Draw) -> bool:
    logprobs = [
        logprob if wanted.mask is None or wanted.mask[token // 8] >> token % 8 & 1 else -math.inf
        for token, logprob in enumerate(row.tolist())
    ]
    log_mass = _logsumexp(logprobs)
    if log_mass == -math.inf:
        return drawn == Draw(-1, -math.inf, -math.inf)
    if abs(drawn.log_mass - log_mass) > TOLERANCE or drawn.token_id < 0:
        return False
    own = logprobs[drawn.token_id]
    if wanted.temperature == 0.0:
        return own == max(logprobs) and drawn.logprob == 0.0
    if own == -math.inf:
        return False
    heated = [logprob / wanted.temperature for logprob in logprobs]
    return abs(drawn.logprob - heated[drawn.token_id] + _logsumexp(heated)) <= TOLERANCE


def _logsumexp(numbers: list[float]) -> float:
    peak = max(numbers)
    if peak == -math.inf:
        return peak
    return peak + math.log(sum(math.exp(number - peak) for number in numbers))
