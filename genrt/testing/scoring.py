"""Checks of engines that score texts."""

from __future__ import annotations

from collections.abc import Sequence

from genrt.questions.completions import SampleRequest
from genrt.questions.contexts import Adapter
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.testing.witness import Witness, expect

__all__ = ["adapter_scores", "scores"]


def scores(witness: Witness) -> None:
    """Check that scores agree with the rows before each token, and whole rows with the rows themselves.

    Scores are mixed with rows and samples, and their texts share prefixes. A cancelled score must not
    come back.
    """
    if not witness.capabilities.scores:
        return
    most = witness.longest_prompt
    texts = [witness.context(most), witness.context(most // 2), witness.context(2)]
    texts += [(*texts[0][: most // 2], *texts[1])]
    asked = [
        ScoreRequest(LogprobsRequest(text).packed, start)
        for text in texts
        for start in sorted({1, len(text) // 2, len(text) - 1})
    ]
    text = LogprobsRequest(texts[1]).packed
    asked += [ScoreRequest(text, 2, wanted="greedy")]
    if witness.capabilities.scores_rows:
        asked += [ScoreRequest(text, 1, wanted="rows")]
    asked += [ScoreRequest(text, 2, temperature=heat) for heat in (0.4, 2.5)]
    company: list[Request] = [*witness.questions(2)]
    company.append(SampleRequest(texts[0], max_tokens=3, seed=8))
    before = witness.engine.statistics().scored_tokens
    together = witness.ask([*asked[:4], *company, *asked[4:]])
    again = witness.ask(asked[::-1])[::-1]
    counted = witness.engine.statistics().scored_tokens - before
    expect(
        counted == 2 * sum(map(len, asked)),
        f"statistics().scored_tokens grew by {counted} where scores of {2 * sum(map(len, asked))} "
        "tokens were asked for",
    )
    found = [*together[:4], *together[4 + len(company) :]]
    rows = {row: None for request in asked for row in request.rows}
    known = dict(zip(rows, witness.rows_of([*rows]), strict=True))
    for request, *results in zip(asked, found, again, strict=True):
        for result in results:
            expect(
                request.is_answer(
                    [known[row] for row in request.rows], result, tolerance=witness.tolerance
                ),
                f"{request} is answered by {result}, which is not what its rows say",
            )
    witness.submit(asked)
    witness.cancel(asked[1:])
    witness.drain()


def adapter_scores(
    witness: Witness, context: tuple[int, ...], bound: Sequence[Adapter | None]
) -> None:
    """Check that a score uses its own adapter, among scores with other adapters."""
    if len(context) < 3 or not witness.capabilities.scores:
        return
    text = LogprobsRequest(context).packed
    asked = [ScoreRequest(text, 1, adapter) for adapter in bound]
    for request, result in zip(asked, witness.ask(asked), strict=True):
        rows = witness.rows_of(request.rows)
        expect(
            request.is_answer(rows, result, tolerance=witness.tolerance),
            f"{request} among those of other adapters is answered by {result}",
        )
