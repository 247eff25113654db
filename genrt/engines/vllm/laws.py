"""Gives requests the log-probabilities of drawn tokens under the law that the tokens were drawn from.

vLLM decides once per engine whether log-probabilities are the model's or the sampling law's. Here each
row of a step gets the kind that its request wants; vLLM copies both kinds to the host alike. Greedy
requests are not included, because their law is known without a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from genrt.errors import EngineUnsupported

__all__ = ["LAW", "LawsV1", "LawsV2", "wants_law"]

LAW = "genrt_law"
"""The key in ``extra_args`` by which a request asks for the law's log-probabilities."""


def wants_law(params: Any) -> bool:
    """Return whether a request with these ``SamplingParams`` wants the law's log-probabilities."""
    return bool((params.extra_args or {}).get(LAW))


class LawsV1:
    """Wraps runner V1's sampler: computes the law when the sampler draws, and reads it when it gathers.

    Args:
        sampler: vLLM's; from now on it calls ``draw`` and then ``gather``.
        rows: returns the rows of the current step that want the law's log-probabilities.

    Raises:
        EngineUnsupported: this vLLM's sampler works differently.
    """

    def __init__(self, sampler: Any, rows: Callable[[], list[int]]) -> None:
        if not hasattr(sampler, "topk_topp_sampler") or not hasattr(sampler, "gather_logprobs"):
            raise EngineUnsupported("this vLLM's sampler gathers log-probabilities otherwise")
        self._rows = rows
        # Of the current step: the row indices, and the law of each row.
        self._laws: tuple[Tensor, Tensor] | None = None
        self._draw, self._gather = sampler.topk_topp_sampler.forward, sampler.gather_logprobs
        sampler.topk_topp_sampler.forward, sampler.gather_logprobs = self.draw, self.gather

    def draw(self, logits: Tensor, generators: object, k: Tensor | None, p: Tensor | None) -> Any:
        """Draw as the sampler does, from logits after temperature and min-p."""
        self._laws = None
        if rows := self._rows():
            index = torch.tensor(rows, device=logits.device)
            # ``apply_top_k_top_p`` may truncate in place; this indexing copies.
            kept = apply_top_k_top_p(
                logits[index], None if k is None else k[index], None if p is None else p[index]
            )
            self._laws = index, kept.log_softmax(dim=-1, dtype=torch.float32)
        return self._draw(logits, generators, k, p)

    def gather(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """Gather as the sampler does, with the law's log-probabilities in the rows that want them."""
        laws, self._laws = self._laws, None
        if laws is not None:
            logprobs = logprobs.index_copy(0, *laws)
        return self._gather(logprobs, num_logprobs, token_ids)


class LawsV2:
    """Wraps runner V2's sampler, which takes log-probabilities from the logits that ``sample`` returns if
    its ``logprobs_mode`` says so.

    Args:
        sampler: vLLM's; from now on it calls ``sample``.
        rows: returns the rows of a step that want the law's log-probabilities, from its requests' slots.

    Raises:
        EngineUnsupported: this vLLM's sampler works differently.
    """

    def __init__(self, sampler: Any, rows: Callable[[np.ndarray], np.ndarray]) -> None:
        if not hasattr(sampler, "sample") or not hasattr(sampler, "logprobs_mode"):
            raise EngineUnsupported("this vLLM's sampler gathers log-probabilities otherwise")
        self._rows = rows
        self._sampler, self._sample = sampler, sampler.sample
        sampler.sample = self.sample

    def sample(
        self,
        logits: Tensor,
        expanded: Tensor,
        mapping: Tensor,
        slots: np.ndarray,
        *rest: Any,
        **named: Any,
    ) -> tuple[Tensor, Tensor]:
        """Sample as the sampler does.

        Return the tokens, and the logits: the law's in the rows that want them, the model's elsewhere.
        """
        rows = self._rows(slots)
        # With "processed_logprobs" the sampler uses no kernel that hides the processed logits.
        self._sampler.logprobs_mode = "processed_logprobs" if len(rows) else "raw_logprobs"
        sampled, processed = self._sample(logits, expanded, mapping, slots, *rest, **named)
        if not len(rows) or processed is logits:
            return sampled, processed
        index = torch.from_numpy(rows).to(logits.device)
        return sampled, logits.float().index_copy(0, index, processed[index].float())
