"""What holds of an answer beside that it is right: whose storage it is, and whether chance decides it."""

from __future__ import annotations

from torch import Tensor

from genrt.questions.draws import DrawToken
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request, Result
from genrt.tokens.sampling import TopLogprobs


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
