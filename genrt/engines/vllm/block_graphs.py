"""Has runner V2 capture CUDA graphs for blocks: steps of a few tokens for every request.

vLLM captures whole forwards for steps of one token a request. It runs longer steps in pieces, with
Python in between, which takes as long as the forward of a small batch. The attention of its own graphs
for adaptive speculation takes any numbers of tokens up to a bound, and so do the graphs here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

MOST_TOKENS = 8
"""The most tokens of a request in a captured step."""

FEWEST_TOKENS = 2
"""The fewest tokens of a request on average, without padding: a graph has a place for each request."""

SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""The tokens of the captured steps, which are padded to the next of these numbers."""


@contextmanager
def capturing_blocks() -> Iterator[None]:
    """Let an engine that is opened in this context capture graphs for blocks."""
    plain = CudaGraphManager._init_candidates

    def with_blocks(manager: Any) -> None:
        plain(manager)
        _add(manager)

    CudaGraphManager._init_candidates = with_blocks
    try:
        yield
    finally:
        CudaGraphManager._init_candidates = plain


def _add(manager: Any) -> None:
    """Add the steps of blocks to the graphs that vLLM's own model is about to capture."""
    mode, captured = manager.cudagraph_mode, manager._capture_descs.get(CUDAGraphMode.FULL)
    whole = captured and mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL
    if not whole or manager.decode_query_len != 1 or not _takes_any_lengths(manager.vllm_config):
        return
    most = min(
        manager.compilation_config.max_cudagraph_capture_size, MOST_TOKENS * manager.max_num_reqs
    )
    added = [
        BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.FULL,
            num_tokens=size,
            num_reqs=min(size // FEWEST_TOKENS, manager.max_num_reqs),
            max_query_len=MOST_TOKENS,
        )
        for size in SIZES
        if size <= most
    ]
    # The largest step comes first: its hidden states make the buffer of all.
    captured += added
    captured.sort(key=lambda each: -each.num_tokens)
    for count in range(1, max(each.num_tokens for each in added) + 1 if added else 1):
        found = manager._candidates.setdefault((count, 0), [])
        # After vLLM's whole steps, which hold one token a request, and before its pieces.
        at = sum(each.cg_mode == CUDAGraphMode.FULL for each in found)
        found[at:at] = [each for each in added if each.num_tokens >= count]


def _takes_any_lengths(config: VllmConfig) -> bool:
    """Return whether all attention of the model can be captured for any numbers of tokens."""
    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    for layer in layers:
        builder = layer.get_attn_backend().get_builder_cls()
        spec = layer.get_kv_cache_spec(config)
        if spec is not None and (
            builder.get_cudagraph_support(config, spec) != AttentionCGSupport.ALWAYS
        ):
            return False
    return bool(layers)
