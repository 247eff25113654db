"""Whether a result is the right one for its request, from the model's row and arithmetic of its own."""

from __future__ import annotations

from torch import Tensor

from genrt.questions.draws import DrawToken
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest, is_row
from genrt.questions.samples import SampleRequest
from genrt.testing.simulated_model import Model
from genrt.tokens.sampling import TopLogprobs


def is_right(model: Model, request: Request, result: Result) -> bool:
    """Tell whether the result answers the request: rows and samples exactly, a read as its kind says."""
    if isinstance(request, SampleRequest):
        return bool(result == model.sample(request))
    if isinstance(request, LogprobsRequest):
        return is_row(model.row(request), result)
    return request.wanted.is_answer(model.row(request.row), result)


def owns_storage(result: Result) -> bool:
    """Return whether every tensor in this result has storage that holds nothing else."""
    parts = result if isinstance(result, TopLogprobs) else (result,)
    return all(
        part.untyped_storage().nbytes() == part.nbytes for part in parts if isinstance(part, Tensor)
    )


def is_random(request: Request) -> bool:
    """Return whether the answer is a draw that nothing decides."""
    match request:
        case ReadRequest(wanted=DrawToken(seed=None, temperature=temperature)):
            return temperature > 0.0
    return False
