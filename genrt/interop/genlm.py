"""genlm-backend's AsyncLM over a genrt runtime: genlm-control and genlm-bytes run on it unchanged.

::

    from genrt.interop.genlm import as_genlm
    from genlm.control import AWRS, BoolFSA, PromptedLLM

    llm = PromptedLLM(as_genlm(genrt.load()))

The interface is that of genlm-backend 0.3. Importing this file imports genlm-backend and restores the
environment variables that it sets for its own vLLM; if genlm-control was imported first, they stay set.
Raises EngineNotInstalled without genlm-control (extra ``genlm``).
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.nn.functional import pad

from genrt.errors import InvalidRequest
from genrt.interop.foreign import importing
from genrt.lm import AsyncLM
from genrt.questions.arguments import TokenIds
from genrt.tokens import vocabulary
from genrt.tokens.rows import normalised

with importing("genlm"):
    from genlm.backend.llm import AsyncLM as GenlmLM
    from genlm.backend.tokenization import Token
    from genlm.backend.tokenization.vocab import bytes_to_strs

__all__ = ["GenrtLM", "as_genlm"]


def as_genlm(lm: AsyncLM) -> GenrtLM:
    """Return the runtime as a ``genlm.backend.llm.AsyncLM``, for ``PromptedLLM`` and other users of that
    class.

    Any number of them share the runtime, its cache and its adapters, and do not close it.

    Raises:
        InvalidRequest: ``lm`` is not a runtime, or has no tokenizer.
        EngineUnsupported: the bytes of its tokenizer's tokens are not known.
    """
    if not isinstance(lm, AsyncLM):
        raise InvalidRequest(
            f"as_genlm takes what genrt.load returns, got {type(lm).__name__}: {lm!r:.80}"
        )
    tokenizer = lm.tokenizer
    tokens = vocabulary.all_tokens(tokenizer)
    fallback = "tokenizer" if hasattr(tokenizer, "convert_ids_to_tokens") else "replace"
    return GenrtLM(
        lm,
        byte_vocab=[Token(token_id, token) for token_id, token in enumerate(tokens)],
        str_vocab=bytes_to_strs(tokenizer, tokens, fallback),
    )


@GenlmLM.register
class GenrtLM:
    """A genrt runtime with the methods of ``genlm.backend.llm.AsyncLM``, made by ``as_genlm``. It counts
    as an instance of that class.

    The runtime batches, deduplicates and caches questions, on any event loop and in any thread. The
    ``_sync`` methods also work inside a running loop. A wrong question raises a ``ValueError``, and a
    failed or closed engine a ``RuntimeError``, as with genlm-backend.

    Rows are float32 on the runtime's device, with an entry for each token of ``byte_vocab``. A model's
    further entries, which pad its matrices, are cut, and the rest is normalized again. Entries that
    a model lacks are -inf.

    Attributes:
        lm: the runtime.
        byte_vocab: genlm's ``Token`` for each id of the tokenizer.
        str_vocab: the same as text; a token of incomplete characters as the tokenizer writes it.
        tokenizer: the runtime's.
    """

    def __init__(self, lm: AsyncLM, *, byte_vocab: list[Any], str_vocab: list[str]) -> None:
        self.lm = lm
        self.tokenizer = lm.tokenizer
        self.byte_vocab = byte_vocab
        self.str_vocab = str_vocab

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.lm!r})"

    async def next_token_logprobs(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> Tensor:
        """Return the row after ``token_ids``: ``[len(byte_vocab)]``, the caller's own."""
        return self.fitted(await self.lm.next_token_logprobs(token_ids, adapter=lora_name))

    def next_token_logprobs_sync(self, token_ids: TokenIds, lora_name: str | None = None) -> Tensor:
        """Return the result of ``next_token_logprobs``, blocking."""
        return self.fitted(self.lm.next_token_logprobs_sync(token_ids, adapter=lora_name))

    async def batch_next_token_logprobs(
        self, token_ids_list: Sequence[TokenIds], lora_name: str | None = None
    ) -> Tensor:
        """Return the rows after each of the contexts: ``[len(token_ids_list), len(byte_vocab)]``."""
        rows = await self.lm.batch_next_token_logprobs(token_ids_list, adapter=lora_name)
        return self.fitted(rows)

    def batch_next_token_logprobs_sync(
        self, token_ids_list: Sequence[TokenIds], lora_name: str | None = None
    ) -> Tensor:
        """Return the result of ``batch_next_token_logprobs``, blocking."""
        rows = self.lm.batch_next_token_logprobs_sync(token_ids_list, adapter=lora_name)
        return self.fitted(rows)

    def fitted(self, rows: Tensor) -> Tensor:
        """Return rows of the runtime with an entry for each token of ``byte_vocab``."""
        missing = len(self.byte_vocab) - rows.shape[-1]
        if missing > 0:
            return pad(rows, (0, missing), value=-math.inf)
        return normalised(rows[..., :missing]) if missing < 0 else rows

    async def sample(
        self,
        prompt_token_ids: TokenIds,
        max_tokens: int,
        eos_token_ids: Collection[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """Sample up to ``max_tokens`` tokens by the engine's own decode loop, without the end token. A
        seed reproduces a sample of genrt, not of another backend."""
        return await self.lm.sample(
            prompt_token_ids,
            max_tokens=max_tokens,
            stop_token_ids=eos_token_ids,
            temperature=temperature,
            seed=seed,
            adapter=lora_name,
        )

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[TokenIds],
        max_tokens: int,
        eos_token_ids: Collection[int],
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[list[int]]:
        """Sample after each of the prompts. As in genlm-backend, equal prompts with a ``seed`` have equal
        samples; without one they are independent."""
        own = max_tokens, eos_token_ids, temperature, seed, lora_name
        samples = (self.sample(prompt, *own) for prompt in prompt_token_ids_list)
        return list(await asyncio.gather(*samples))

    def add_new_lora(self, lora_path: str | os.PathLike[str], lora_name: str = "lora_1") -> None:
        """Load the LoRA adapter in directory ``lora_path`` under ``lora_name``, a new or a known name.
        The runtime must have been opened with ``enable_lora``. Raises InvalidAdapter for other files;
        names on a hub are not fetched."""
        self.lm.add_adapter_sync(lora_name, lora_path)

    def remove_lora(self, lora_name: str) -> None:
        """Unbind ``lora_name``; earlier questions are still answered."""
        self.lm.remove_adapter(lora_name)

    def set_lora(self, lora_path: object = None, lora_name: object = None) -> NoReturn:
        """Raise InvalidRequest: not supported, as in genlm-backend since 0.3."""
        raise InvalidRequest("add_new_lora(path, name), then pass lora_name= in each call")

    def clear_lora(self) -> NoReturn:
        """Raise InvalidRequest: not supported, as in genlm-backend since 0.3."""
        raise InvalidRequest("leave lora_name out of a call for the base model")

    def clear_cache(self) -> None:
        """Drop the runtime's cached rows."""
        self.lm.clear_cache()

    def cleanup(self) -> None:
        """Has no effect: the runtime's owner closes it, with ``lm.close()`` or ``with``."""
