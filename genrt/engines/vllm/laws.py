"""Log-probabilities of drawn tokens in the law that they were drawn from, for requests that want these.

vLLM decides once an engine whether log-probabilities are the model's or that law's. Here its samplers are
followed, and each row of a step has those that its request wants; vLLM brings both to the host alike.
Greedy requests are none of these: their law is known without a row.
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
"""The key in ``extra_args`` under which a request says that it wants the law's log-probabilities."""


def wants_law(params: Any) -> bool:
    """Tell whether a request with these ``SamplingParams`` wants the law's log-probabilities."""
    return bool((params.extra_args or {}).get(LAW))


class LawsV1:
    """For runner V1's sampler: the law is computed where the sampler draws, and read where it gathers.

    Args:
        sampler: vLLM's; it calls ``draw`` and then ``gather`` from now on.
        rows: returns which rows of the step under way want the law's.

    Raises:
        EngineUnsupported: this sampler works otherwise.
    """

    def __init__(self, sampler: Any, rows: Callable[[], list[int]]) -> None:
        if not hasattr(sampler, "topk_topp_sampler") or not hasattr(sampler, "gather_logprobs"):
            raise EngineUnsupported("this vLLM's sampler gathers log-probabilities otherwise")
        self._rows = rows
        self._laws: tuple[Tensor, Tensor] | None = (
            None  # of the step: which rows, and the law of each
        )
        self._draw, self._gather = sampler.topk_topp_sampler.forward, sampler.gather_logprobs
        sampler.topk_topp_sampler.forward, sampler.gather_logprobs = self.draw, self.gather

    def draw(self, logits: Tensor, generators: object, k: Tensor | None, p: Tensor | None) -> Any:
        """Draw as the sampler does, from logits after temperature and min-p."""
        self._laws = None
        if rows := self._rows():
            index = torch.tensor(rows, device=logits.device)
            # It may be truncated in place: this indexing copies.
            kept = apply_top_k_top_p(
                logits[index], None if k is None else k[index], None if p is None else p[index]
            )
            self._laws = index, kept.log_softmax(dim=-1, dtype=torch.float32)
        return self._draw(logits, generators, k, p)

    def gather(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """Gather as the sampler does, from the law's log-probabilities where these are wanted."""
        laws, self._laws = self._laws, None
        if laws is not None:
            logprobs = logprobs.index_copy(0, *laws)
        return self._gather(logprobs, num_logprobs, token_ids)


class LawsV2:
    """For runner V2's sampler, which takes log-probabilities from the logits that ``sample`` returns
    if its mode is to.

    Args:
        sampler: vLLM's; it calls ``sample`` from now on.
        rows: returns which rows of a step want the law's, given the slots of its requests.

    Raises:
        EngineUnsupported: this sampler works otherwise.
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
        """Sample as the sampler does; return the tokens, and the logits of the law where that is wanted,
        of the model elsewhere."""
        rows = self._rows(slots)
        # With the first of these, the sampler takes no kernel that keeps the law to itself.
        self._sampler.logprobs_mode = "processed_logprobs" if len(rows) else "raw_logprobs"
        sampled, processed = self._sample(logits, expanded, mapping, slots, *rest, **named)
        if not len(rows) or processed is logits:
            return sampled, processed
        index = torch.from_numpy(rows).to(logits.device)
        return sampled, logits.float().index_copy(0, index, processed[index].float())
