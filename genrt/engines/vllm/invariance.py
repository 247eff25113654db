"""Checks that an engine computes a row with the same bits whatever else is in the batch.

vLLM's batch-invariant mode replaces kernels of the whole process, so an environment variable turns it on
before the process starts; genrt never sets it. On CPUs vLLM has no such mode. There matrix products may
be invariant, and attention is for contexts that fit its smallest tile. A tile's size depends on the
tokens that a step computes of a sequence, so the check cuts a context at many places.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from vllm import envs

from genrt.engines.vllm.engine import VLLMEngine
from genrt.errors import EngineUnsupported
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.tokens.sampling import draw, seeded_uniforms, weighed

COMPANY = 63
"""The number of other sequences in a batch."""

CUTS = 32
"""The number of places at which the check cuts a context in two."""

LONGEST = 4096
"""The longest context of the check on a GPU, whose kernels do not divide contexts by the batch."""


def check_variables(*, deterministic: bool) -> None:
    """Raise EngineUnsupported if vLLM's environment variables do not fit the device."""
    if not torch.cuda.is_available():
        if envs.VLLM_BATCH_INVARIANT:
            raise EngineUnsupported(
                "VLLM_BATCH_INVARIANT=1 is for GPUs, and vLLM's forward fails with it on a CPU: unset it"
            )
        if deterministic and envs.VLLM_CPU_ATTN_SPLIT_KV:
            raise EngineUnsupported(
                "deterministic=True: vLLM's attention divides contexts between a CPU's threads by the "
                "batch: start the program with VLLM_CPU_ATTN_SPLIT_KV=0"
            )
    elif deterministic and not envs.VLLM_BATCH_INVARIANT:
        raise EngineUnsupported(
            "deterministic=True needs vLLM's batch-invariant kernels, which are the whole process's: "
            "start the program with VLLM_BATCH_INVARIANT=1"
        )


def check_same_bits(engine: VLLMEngine, *, block_size: int) -> None:
    """Compare rows computed alone with the same rows among 63 others, bit for bit: computed at once,
    after a prefix hit, extended and forked; then scores, and genrt's own draws.

    On a GPU, texts with top-k or top-p are refused afterwards: which kernel vLLM takes for these depends
    on the number of rows.

    Contexts have ``block_size + 4`` tokens, then powers of two up to ``max_model_len``; on a GPU at most
    ``LONGEST``.

    Raises:
        EngineUnsupported: a part differs; the message names it and says what to do.
    """
    longest = engine.max_model_len
    if engine.device.type != "cpu":
        longest = min(longest, LONGEST)
    elif not engine.keeps_residents:
        raise EngineUnsupported(
            "deterministic=True: on a CPU the self-test cuts contexts where residents end: load with "
            "residency=True, and without a scheduler or an executor of your own"
        )
    powers = [2**n for n in range(7, 32) if block_size + 4 < 2**n < longest]
    passed = 0
    for length in dict.fromkeys([min(block_size + 4, longest), *powers, longest]):
        for part, found, alone in _pairs(engine, length):
            if not torch.equal(found, alone):
                moved = float((found - alone).abs().nan_to_num().max())
                engine.forget_residents()
                raise EngineUnsupported(
                    f"deterministic=True: at {length} tokens {part} differs by {moved:.2g} from the "
                    f"same computed alone: {_advice(engine.device, passed)}"
                )
        passed = length
    engine.forget_residents()
    if engine.device.type != "cpu":
        engine.stop_truncating()


def _advice(device: torch.device, passed: int) -> str:
    if device.type != "cpu":
        # FlashAttention 3 computes heads of 64 otherwise for eight tokens or fewer of a long context.
        return (
            "load with engine_options={'attention_backend': 'TRITON_ATTN'}, and set "
            "CUBLAS_WORKSPACE_CONFIG=:16:8 and CUBLASLT_WORKSPACE_SIZE=1 too before the program starts"
        )
    if passed:
        return (
            f"load with engine_options={{'max_model_len': {passed}}}, or with engine='transformers'"
        )
    return "load with engine='transformers', which computes each sequence alone"


def _pairs(engine: VLLMEngine, length: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield a part's name, its numbers in company, and the same computed alone."""
    size = engine.vocab_size
    text = tuple((11 * n * n + 5 * n + 3) % size for n in range(length))
    fork = (*text[:-1], (text[-1] + 1) % size)
    most = max(1, min(5, engine.max_model_len - 1))
    others = [tuple((13 * k + n) % size for n in range(1 + k % most)) for k in range(COMPANY)]
    grown = [(*other, 2 % size) for other in others]

    def rows(*contexts: tuple[int, ...]) -> dict[tuple[int, ...], Tensor]:
        several = [*dict.fromkeys(contexts)]
        return dict(zip(several, engine.probe([*map(LogprobsRequest, several)]), strict=True))

    def fresh(*contexts: tuple[int, ...]) -> dict[tuple[int, ...], Tensor]:
        engine.forget_residents()
        return rows(*contexts)

    alone = {each: fresh(each)[each].clone() for each in (text, fork)}
    company = fresh(*others, text)
    yield "a row among 63 others", company[text], alone[text]
    yield "a row among 63 others", fresh(text, *reversed(others))[text], alone[text]
    if length > 2:
        fresh(text[: length // 2], *others)
        yield "a row after a prefix hit", rows(*grown, text)[text], alone[text]
        for cut in range(length - 1, 0, -max(1, length // CUTS)):
            fresh(text[:cut])
            yield f"a row after {cut} resident tokens", rows(text)[text], alone[text]
        fresh(text[:-1], *others)
        found = rows(text, *grown, fork)
        for each in (text, fork):
            yield "a forked sequence's row among 63 others", found[each], alone[each]
    if length > 2 and engine.scores:
        score = ScoreRequest(LogprobsRequest(text).packed, 1)
        several = [*(ScoreRequest(LogprobsRequest(each).packed, 1) for each in grown), score]
        before = fresh(text[:-1])[text[:-1]][text[-1]].cpu()
        engine.forget_residents()
        [apart] = engine.probe([score])
        yield "a score's last entry", apart[-1], before
        engine.forget_residents()
        yield "a score among 63 others", engine.probe([*dict.fromkeys(several)])[-1], apart
    yield from _own_pairs(torch.stack([*company.values()]))


def _own_pairs(rows: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield genrt's own parts: draws, and the sums of tempered rows."""
    numbers = seeded_uniforms(range(len(rows)))
    pairs = [*zip(torch.split(rows, 1), torch.split(numbers, 1), strict=True)]
    for heat in (1.0, 0.7):
        together = draw(rows, uniforms=numbers, temperature=heat)
        apart = [draw(row, uniforms=pair, temperature=heat) for row, pair in pairs]
        for field, several in zip(together, zip(*apart, strict=True), strict=True):
            yield f"a draw at temperature {heat}", field, torch.cat(several)
    tempered = torch.cat([weighed(row, 0.7, 1.0) for row, _ in pairs])
    yield "a tempered row", weighed(rows, 0.7, 1.0), tempered
