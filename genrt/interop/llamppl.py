"""llamppl's language model over a genrt runtime: its models and its inference run on it unchanged.

::

    from genrt.interop.llamppl import as_llamppl
    from llamppl import LMContext, Model, smc_standard

    lm = as_llamppl(genrt.load())

Importing this file imports llamppl. Raises EngineNotInstalled without it (extra ``llamppl``).
"""

from __future__ import annotations

from typing import Any

from genrt.errors import InvalidRequest
from genrt.interop.foreign import importing
from genrt.interop.genlm import as_genlm
from genrt.lm import AsyncLM
from genrt.tokens.vocabulary import BytesTokenizer

with importing("llamppl"):
    from llamppl.llms import CachedCausalLM, Masks

__all__ = ["as_llamppl"]


def as_llamppl(lm: AsyncLM) -> Any:
    """Return the runtime as a ``llamppl.CachedCausalLM``, whose ``model`` is ``as_genlm(lm)``.

    ``next_token_logprobs`` returns NumPy rows of ``len(str_vocab)`` entries. Calls about a KV cache
    only warn, as with llamppl's vLLM backend. The runtime's owner closes it.

    Raises:
        InvalidRequest: ``lm`` is not a runtime, or its tokenizer is not one of transformers'.
    """
    model = as_genlm(lm)
    if isinstance(model.tokenizer, BytesTokenizer):
        raise InvalidRequest(
            "llamppl calls methods that transformers' tokenizers have: load a checkpoint that has one"
        )
    # The constructor only accepts four classes of backends; it does no more than the lines below.
    made = CachedCausalLM.__new__(CachedCausalLM)
    made.backend = "vllm"
    made.model = model
    made.tokenizer = model.tokenizer
    made.byte_vocab = model.byte_vocab
    # llamppl's masks look at a token's first character, which an id without text lacks.
    made.str_vocab = [text or "\N{REPLACEMENT CHARACTER}" for text in model.str_vocab]
    made.masks = Masks(made)
    return made
