"""Builds vLLM requests for rows and texts, marks them for genrt's hooks by keys of
``SamplingParams.extra_args``, and translates vLLM's errors."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from genrt.engines.protocol import failure
from genrt.errors import EngineDied, EngineUnsupported, GenrtError, InvalidRequest, ModelNotFound
from genrt.models import offline_advice

TICKET = "genrt_ticket"  # the number by which the capture knows a request for a row
OPEN = "genrt_open"  # of a request to keep open after its row
FIRST = "genrt_first"  # the first wanted position, counted from 0, of a score
PROCESSED = "genrt_processed"  # of a request that wants its processed log-probabilities
# Of a text that wants the sets that its tokens are drawn from: a ``Masked``.
MASKED = "genrt_masked"
# The seed of a text that draws its tokens in the capture. vLLM gets no seed then: for a prompt that is
# computed in parts, its runner V1 rewinds the request's generator, which a CPU generator cannot do.
SEED = "genrt_seed"


class Masked(NamedTuple):
    """A text that wants the sets that its tokens are drawn from: the ticket of its vLLM request, the
    length of its prompt, and its temperature, above 0."""

    ticket: int
    prompt: int
    temperature: float


NOT_COMPUTED = re.compile(r"head.?size|attention backend|architectures .* not supported", re.I)
"""The errors by which vLLM refuses a model whose layers it has no kernels for."""

_ROW = SamplingParams(  # one greedy token, which is not read
    max_tokens=1,
    temperature=0.0,
    seed=0,  # without a seed the V2 runner would draw one from numpy's global generator
    ignore_eos=True,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
)


def row_params(ticket: int, *, open_for: int | None, first: int | None = None) -> SamplingParams:
    """Return the sampling parameters of a request for the row with this ticket, or for a score from
    ``first`` on. It ends with the row, or stays open for at most ``open_for`` tokens."""
    params = copy(_ROW)
    params.extra_args = {TICKET: ticket}
    if first is not None:
        params.extra_args[FIRST] = first
    if open_for is not None:
        params.extra_args[OPEN] = True
        params.max_tokens = open_for
    return params


def as_genrt_error(error: Exception, what: str) -> GenrtError:
    """Return an error of vLLM or torch as one of genrt's, with the original as its cause."""
    if isinstance(error, GenrtError):
        return error
    kind: type[GenrtError]
    advice = ""
    if isinstance(error, VLLMValidationError):
        kind = InvalidRequest
    elif isinstance(error, EngineDeadError):
        kind = EngineDied
    elif isinstance(error, OSError) and not isinstance(error, ConnectionError):
        kind, advice = ModelNotFound, offline_advice()
    elif NOT_COMPUTED.search(str(error)):
        kind = EngineUnsupported
        advice = '. genrt.load(…, engine="transformers") computes such models, more slowly'
    else:
        return failure(error, what)
    translated = kind(f"{what}: {type(error).__name__}: {error}{advice}")
    translated.__cause__ = error
    return translated


def core_request(
    request_id: str, token_ids: Sequence[int], params: SamplingParams, lora: LoRARequest | None
) -> EngineCoreRequest:
    """Return a request in the form that vLLM's core takes."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(token_ids),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
    )
