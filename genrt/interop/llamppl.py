"""llamppl's language model and its contexts over a genrt runtime: its inference runs on them unchanged.

::

    from genrt.interop.llamppl import LMContext, as_llamppl
    from llamppl import Model, smc_standard

    lm = as_llamppl(genrt.load())

Importing this file imports llamppl. Raises EngineNotInstalled without it (extra ``llamppl``).
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from genrt.errors import InvalidRequest
from genrt.interop.foreign import importing
from genrt.interop.genlm import GenrtLM, as_genlm
from genrt.lm import AsyncLM
from genrt.questions.arguments import TokenIds
from genrt.tokens.vocabulary import BytesTokenizer

with importing("llamppl"):
    from llamppl import distributions
    from llamppl.distributions.lmcontext import LMNextToken, LMTokenMask, NullMask
    from llamppl.llms import CachedCausalLM, Masks, Token
    from llamppl.util import log_softmax, logsumexp

__all__ = ["LMContext", "as_llamppl"]


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


class LMContext(distributions.LMContext):  # type: ignore[misc]
    """A ``llamppl.LMContext`` that keeps its sequence in a context of the runtime.

    A step of many particles is one request for the engine, which finds their sequences by number. A deep
    copy is a fork, which shares what is computed. Cancelled or failed, a draw or an observation of the
    next token leaves the sequence and the mask as they were. ``as_llamppl`` makes its ``lm``;
    InvalidRequest for another one.

    Attributes:
        tokens: the sequence, a copy. Assigned token ids begin another one.
    """

    @property
    def tokens(self) -> list[int]:
        return self._context.token_ids

    @tokens.setter
    def tokens(self, token_ids: TokenIds) -> None:
        if not isinstance(model := getattr(self.lm, "model", None), GenrtLM):
            raise InvalidRequest(f"LMContext takes what as_llamppl returns, got {self.lm!r:.80}")
        self._context = model.lm.context(token_ids)

    def next_token(self) -> LMNextToken:
        """Return the law of the next token, as ``llamppl.LMContext`` does."""
        return _NextToken(self)

    def mask_dist(self, mask: set[int]) -> LMTokenMask:
        """Return the law of the next token being in a mask, as ``llamppl.LMContext`` does."""
        return _TokenMask(self, mask)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.model_mask)] = self.model_mask  # nothing changes it in place
        copied: Self = super().__deepcopy__(memo)
        return copied


class _NextToken(LMNextToken):  # type: ignore[misc]
    """The law of an ``LMContext``'s next token. Draws are llamppl's own, with NumPy's global seed."""

    async def sample(self) -> tuple[Any, float]:
        lm, law = self.ctx.lm, distributions.LogCategorical(self.ctx.next_token_logprobs)
        token_id = int((await law.sample())[0])
        logprob = await self.log_prob(token_id)
        return Token(lm, token_id, lm.tokenizer.convert_ids_to_tokens(token_id)), logprob

    async def log_prob(self, token: Any) -> float:
        ctx, context, length = self.ctx, self.ctx._context, len(self.ctx._context)
        logprob = float(ctx.next_token_logprobs[int(token)])
        context.append(int(token))
        try:
            row = ctx.lm.model.fitted(await context.logprobs())
        except BaseException:
            context.cut(length)
            raise
        ctx.next_token_logprobs = log_softmax(row.cpu().numpy() / ctx.temp)
        ctx.model_mask = ctx.lm.masks.ALL_TOKENS
        return logprob


class _TokenMask(LMTokenMask):  # type: ignore[misc]
    """Whether an ``LMContext``'s next token is in a mask: llamppl's law, by arrays of token ids."""

    async def sample(self) -> tuple[bool, float]:
        _, mass = self._within(False)
        is_without, _ = await distributions.Bernoulli(np.exp(mass)).sample()
        return not is_without, await self.log_prob(not is_without)

    async def log_prob(self, value: bool) -> float:
        tokens, mass = self._within(value)
        if not tokens:
            raise NullMask(f"the mask leaves no token: mask_dist cannot be {bool(value)} here")
        masked = np.full_like(self.ctx.next_token_logprobs, -np.inf)
        kept = [*tokens]
        masked[kept] = self.ctx.next_token_logprobs[kept] - mass
        self.ctx.next_token_logprobs, self.ctx.model_mask = masked, tokens
        return mass

    def _within(self, value: bool) -> tuple[set[int], float]:
        """Return the tokens in the mask, or else the others, and the logarithm of their probability."""
        allowed = self.ctx.model_mask
        tokens = allowed & self.mask if value else allowed - self.mask
        return tokens, float(logsumexp(self.ctx.next_token_logprobs[[*tokens]]))
