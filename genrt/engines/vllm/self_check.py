"""Checks a vLLM engine at start-up: each row must come back to its own request.

The check exercises every assumption about vLLM outside the public interface.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain, combinations

import torch

from genrt.engines.vllm.engine import VLLMEngine
from genrt.errors import EngineUnsupported, GenrtError, NotFinite
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest

LIKELY = -15.0  # rows are compared where a log-probability is above this value
TF32 = 2.0**-10  # the rounding with which kernels may multiply in float32


def run_self_check(engine: VLLMEngine, *, rounding: float, block_size: int) -> None:
    """Ask for a few rows alone and in a batch, then by extending, forking and backtracking, then for
    scores.

    If extended or forked rows are wrong, residency is switched off with a warning. If scores differ from
    rows, scores of many tokens at once are switched off with a warning.

    Args:
        rounding: the relative rounding error of the model's computation.
        block_size: tokens per block of the KV cache; contexts are longer where possible.

    Raises:
        EngineUnsupported: the results are not rows, or a row depends on its place in the batch.
    """
    noise = 64 * max(rounding, TF32)  # half a nat in bfloat16, 1/16 in float16 and float32
    residents = "resident sequences are off, every question opens a vLLM request"
    try:
        _check_rows(engine, noise)
        for is_on, check, without, stop in (
            (engine.keeps_residents, _check_residents, residents, engine.stop_keeping),
            (
                engine.scores,
                _check_scores,
                "a score takes a row for each token",
                engine.stop_scoring,
            ),
        ):
            if not is_on:
                continue
            try:
                is_checked = check(engine, noise, block_size)
            except NotFinite:
                raise
            except GenrtError as error:
                warnings.warn(f"{without}: {error}", RuntimeWarning, stacklevel=2)
                is_checked = False
            if not is_checked:
                stop()
            engine.forget_residents()
    except NotFinite:  # broken weights are reported to the caller's own requests
        engine.forget_residents()


def _check_rows(engine: VLLMEngine, noise: float) -> None:
    """Raise EngineUnsupported if a row in a batch differs from the same row alone by more than half of
    that row's distance to another row."""
    contexts = [(0,), (1 % engine.vocab_size,), (1 % engine.vocab_size, 0)]
    alone = []
    for context in contexts:
        alone += engine.probe([LogprobsRequest(context)])
        engine.forget_residents()
    company = engine.probe([LogprobsRequest(context) for context in reversed(contexts)])[::-1]
    total = torch.stack(alone).double().logsumexp(dim=-1)
    if alone[0].shape != (engine.vocab_size,) or not torch.allclose(
        total, torch.zeros_like(total), atol=1e-3
    ):
        raise EngineUnsupported(
            "vLLM's logits are no log-probabilities over the vocabulary: rows of shape "
            f"{tuple(alone[0].shape)} for vocab_size={engine.vocab_size}"
        )
    for mine, other in ((0, 1), (1, 2), (2, 0)):
        apart = _largest_difference(alone[mine], alone[other])
        moved = _largest_difference(alone[mine], company[mine])
        if moved > 0.5 * apart and moved > noise:
            raise EngineUnsupported(
                "vLLM's rows did not come back to the requests that asked for them: a row in company "
                f"differs by {moved:.3g} from the same row alone"
            )


def _check_residents(engine: VLLMEngine, noise: float, block_size: int) -> bool:
    """Compare rows of residents with fresh rows; return False if the model's contexts are too short."""
    # A wrong token or block yields the row of another context, which may be closer than the closest pair
    # of rows compared here: the limit is a part of that pair's distance.
    size = engine.vocab_size

    def grown(contexts: Sequence[tuple[int, ...]], *, by: int) -> list[tuple[int, ...]]:
        return [(*context, (by + n) % size) for n, context in enumerate(contexts)]

    # Three sequences, longer than a block, grow, fork and grow. Then two are edited and cut back.
    length = max(20, min(block_size + 4, engine.max_model_len - 5))
    flushes = [[tuple((7 * n + 1 + first) % size for n in range(length)) for first in (0, 1, 2)]]
    for by in (2, 3, 4):
        flushes.append(grown(flushes[-1], by=by))
    flushes.append(grown([flushes[-1][n] for n in (0, 0, 1)], by=5))
    flushes.append(grown(flushes[-1], by=6))
    flushes.append([(*flushes[-1][0][: length - 2], 5 % size), flushes[-1][1][: length + 2]])
    if max(len(context) for flush in flushes for context in flush) > engine.max_model_len:
        return False
    rows = []
    for contexts, following in zip(flushes, [*flushes[1:], []], strict=True):
        requests = [LogprobsRequest(context) for context in contexts]
        rows.append(engine.probe(requests))
        drawn = [context[-1] for context in following]  # mostly right where sequences grow
        if len(drawn) == len(requests):
            tokens = torch.tensor(drawn, dtype=torch.float64, device=rows[-1][0].device)
            engine.expect(requests, tokens)
    extended = engine.statistics().extended
    fresh: list[list[torch.Tensor]] = []
    for contexts in flushes:
        fresh.append([])
        for context in contexts:
            engine.forget_residents()
            fresh[-1] += engine.probe([LogprobsRequest(context)])
    apart = min(_largest_difference(*pair) for flush in fresh for pair in combinations(flush, 2))
    moved = max(map(_largest_difference, chain(*rows), chain(*fresh)))
    if moved > noise * max(1.0, apart / 4):
        raise EngineUnsupported(f"a row differs by {moved:.3g} from a fresh one")
    if extended == 0:
        raise EngineUnsupported("a context that grew by a token was computed anew")
    return True


def _check_scores(engine: VLLMEngine, noise: float, block_size: int) -> bool:
    """Compare scores with rows; return False if the model's contexts are too short."""
    # The text grows by its likeliest and second likeliest token in turn, so that neighbors differ. Rows
    # fill the cache with it first. Then two scores are computed together.
    length = min(block_size + 4, engine.max_model_len - 3)
    if length < 2:
        return False
    text = tuple((5 * n + 2) % engine.vocab_size for n in range(length))
    before = [engine.probe([LogprobsRequest(text[:1])])[0][text[1]]]
    for step in range(4):
        [row] = engine.probe([LogprobsRequest(text)])
        token = int(row.topk(min(2, engine.vocab_size)).indices[step % 2 - 1])
        before.append(row[token])
        text = (*text, token)
    packed = LogprobsRequest(text).packed
    expected = torch.stack(before).cpu()
    whole, last = engine.probe([ScoreRequest(packed, 1), ScoreRequest(packed, length)])
    if (len(whole), len(last)) != (length + 3, 4):
        raise EngineUnsupported(f"a score of {length + 3} tokens has {len(whole)} entries")
    moved = torch.cat([whole[:1], whole[-4:], last]) - torch.cat([expected, expected[1:]])
    # Where a row is almost certain of one token, its other entries are noise.
    likely = torch.cat([expected, expected[1:]]) > LIKELY
    if not bool((moved[likely].abs() <= noise).all()):
        raise EngineUnsupported(f"a score differs by {float(moved.abs().max()):.3g} from a row")
    return True


def _largest_difference(row: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference at tokens that are likely in either row."""
    likely = torch.maximum(row, other) > LIKELY
    return float((row - other)[likely].abs().nan_to_num(posinf=1e9).max())
