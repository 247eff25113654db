"""vLLM's self-test finds what it is there to find: an engine with one fault each, on models whose rows
differ much or little, and nothing where there is only the noise of rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from genrt.engines.protocol import EngineStatistics
from genrt.engines.vllm.self_check import run_self_check
from genrt.errors import EngineUnsupported
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest

VOCAB_SIZE = 50
FLOAT32, BFLOAT16 = 2.0**-23, 2.0**-7
Ids = tuple[int, ...]
Fault = Callable[[Ids, Ids, int, int], Ids]
"""From a context, the resident sequence that it shares most with, how much that is, and the size of a
block: what the engine takes the context for."""


class Engine:
    """Rows in which each token has its say, the last one most of all; contexts stay resident.

    Args:
        scale: about how many nats lie between the rows of two contexts.
        fault: what becomes of a context of which a part is resident.
        company: the order in which rows come back to who asked together.
        scored: what becomes of the entries of a score.
        noise: so many nats lie between two rows of one context.
    """

    max_model_len = 512
    vocab_size = VOCAB_SIZE

    def __init__(
        self,
        scale: float,
        *,
        fault: Fault = lambda context, *_: context,
        company: slice = slice(None),
        scored: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores,
        noise: float = 0.0,
        block_size: int = 16,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.says = scale * torch.rand(
            self.max_model_len, VOCAB_SIZE, VOCAB_SIZE, generator=generator
        )
        self.generator, self.noise = generator, noise
        self.fault, self.company, self.block_size = fault, company, block_size
        self.residents: list[Ids] = []
        self.keeps_residents = self.scores = True
        self.scored = scored
        self.extended = 0

    def row(self, context: Ids) -> torch.Tensor:
        said = self.says[torch.arange(len(context)), torch.tensor(context)]
        said[:-1] *= 0.4
        noise = torch.rand(VOCAB_SIZE, generator=self.generator) * self.noise
        return (said.sum(dim=0) + noise).log_softmax(dim=-1)

    def probe(
        self, requests: Sequence[LogprobsRequest] | Sequence[ScoreRequest]
    ) -> list[torch.Tensor]:
        rows = []
        for request in requests:
            if isinstance(request, ScoreRequest):
                ids = request.token_ids
                pairs = [(self.row(ids[:n]), ids[n]) for n in range(request.start, len(ids))]
                rows.append(self.scored(torch.stack([row[token] for row, token in pairs])))
                continue
            context = tuple(request.token_ids)
            resident = max(self.residents, key=lambda each: shared(context, each), default=())
            known = shared(context, resident)
            self.extended += known == len(context) - 1 > 0
            taken = self.fault(context, resident, known, self.block_size) if known else context
            rows.append(self.row(taken))
        if self.keeps_residents:
            self.residents += [tuple(each.token_ids) for each in requests]
        return rows[self.company] if len(rows) > 1 and requests[-1].token_ids == (0,) else rows

    def expect(self, rows: Sequence[LogprobsRequest], token_ids: torch.Tensor) -> None: ...

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(extended=self.extended)

    def forget_residents(self) -> None:
        self.residents.clear()

    def stop_keeping(self) -> None:
        self.keeps_residents = False

    def stop_scoring(self) -> None:
        self.scores = False


def shared(context: tuple[int, ...], resident: tuple[int, ...]) -> int:
    """How many tokens of a context a resident sequence has, but for the last, which is computed."""
    most = min(len(context) - 1, len(resident))
    return next((n for n in range(most) if context[n] != resident[n]), most)


def changed(context: tuple[int, ...], place: int) -> tuple[int, ...]:
    """With another token in one place."""
    return (*context[:place], (context[place] + 1) % VOCAB_SIZE, *context[place + 1 :])


FAULTS: dict[str, Fault] = {
    "the token is not written": lambda context, *_: (*context[:-1], context[-2]),
    "the token is off by one": lambda context, *_: changed(context, len(context) - 1),
    "the token before is off by one": lambda context, *_: changed(context, len(context) - 2),
    "a token of long ago is another": lambda context, _, known, __: changed(context, known // 2),
    "a full block is another sequence's": lambda context, _, known, size: (
        tuple((token + 1) % VOCAB_SIZE for token in context[:size]) + context[size:]
        if known >= size
        else context
    ),
    "the last partial block is not copied": lambda context, _, known, size: (
        *context[: known // size * size],
        *[0] * (known % size),
        *context[known:],
    ),
    "what is cut back keeps its next token": lambda context, resident, known, _: (
        *context[:known],
        *resident[known : known + 1],
        *context[known:],
    )[: len(context)],
}


def examined(engine: Engine, rounding: float) -> tuple[bool, list[str]]:
    """Return whether residents are kept after a self-test, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_self_check(cast("Any", engine), rounding=rounding, block_size=engine.block_size)
    return engine.keeps_residents, [str(each.message) for each in caught]


MODELS = [(FLOAT32, 0.2), (FLOAT32, 2.0), (FLOAT32, 8.0), (BFLOAT16, 2.0), (BFLOAT16, 8.0)]
"""Rounding, and nats between rows: a wrong row is found in bfloat16 where rows differ by nats."""


@pytest.mark.promise(number=24)
@pytest.mark.parametrize(("rounding", "scale"), MODELS)
@pytest.mark.parametrize("name", FAULTS)
def test_each_wrong_resident_is_found(name: str, rounding: float, scale: float) -> None:
    noise = 0.2 if rounding == BFLOAT16 else 0.0
    engine = Engine(scale, fault=FAULTS[name], noise=noise)
    kept, warned = examined(engine, rounding)
    assert not kept
    assert ["resident sequences are off" in each for each in warned] == [True]


@pytest.mark.promise(number=24)
@pytest.mark.parametrize(("rounding", "scale"), MODELS)
@pytest.mark.parametrize("company", [slice(None, None, -1), slice(2, None)], ids=str)
def test_a_row_that_goes_to_another_is_found(rounding: float, scale: float, company: slice) -> None:
    with pytest.raises((EngineUnsupported, IndexError)):
        examined(Engine(scale, company=company), rounding)


SCORES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda scores: scores.roll(1),
    lambda scores: torch.cat([scores[:-1], scores[:1]]),
    lambda scores: torch.cat([scores[1:2], scores[1:]]),
    lambda scores: scores[1:],
    lambda scores: torch.full_like(scores, torch.nan),
]


@pytest.mark.promise(number=24)
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(("rounding", "scale"), [(FLOAT32, 0.2), (FLOAT32, 8.0), (BFLOAT16, 8.0)])
@pytest.mark.parametrize("fault", SCORES)
def test_a_score_of_other_positions_is_found(
    fault: Callable[[torch.Tensor], torch.Tensor], rounding: float, scale: float, block_size: int
) -> None:
    engine = Engine(scale, scored=fault, block_size=block_size)
    kept, [warning] = examined(engine, rounding)
    assert kept
    assert not engine.scores
    assert "a score takes a row for each token" in warning


@pytest.mark.parametrize("block_size", [16, 128, 1024])
@pytest.mark.parametrize("scale", [0.0, 0.01, 0.2, 2.0, 8.0])
@pytest.mark.parametrize("rounding", [FLOAT32, 2.0**-10, BFLOAT16])
def test_rounding_is_no_fault(rounding: float, scale: float, block_size: int) -> None:
    engine = Engine(scale, noise=30 * rounding, block_size=block_size)
    assert examined(engine, rounding) == (True, [])
    assert engine.scores


@pytest.mark.parametrize(("longest", "block_size", "kept"), [(24, 16, False), (25, 128, True)])
def test_a_model_of_short_contexts_keeps_no_residents_that_it_could_not_test(
    longest: int, block_size: int, kept: bool
) -> None:
    engine = Engine(2.0, block_size=block_size)
    engine.max_model_len = longest
    assert examined(engine, FLOAT32) == (kept, [])
