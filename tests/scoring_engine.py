"""The exact engine, which scores too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import Finished
from genrt.questions.request import Request
from genrt.questions.scores import ScoreRequest
from genrt.tokens.rows import normalised


class ScoringEngine(ExactEngine):
    """Answers the scores in progress in one step, by their rows."""

    scores = True

    def __init__(self, model: NGram, **options: Any) -> None:
        super().__init__(model, **options)
        self._scored: dict[Request, None] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        scores = [each for each in requests if isinstance(each, ScoreRequest)]
        others = [each for each in requests if not isinstance(each, ScoreRequest)]
        if others:
            super().submit(others)
        self._counts["requests"] += len(scores)
        self._scored |= dict.fromkeys(scores)

    def step(self) -> list[Finished]:
        ends = []
        for each in self._scored:
            assert isinstance(each, ScoreRequest)
            contexts = [row.token_ids for row in each.rows]
            rows = normalised(self._model.logits(contexts, each.adapter))
            ends.append(Finished(each, each.answer([*rows])))
            self._counts["scored_tokens"] += len(each)
        self._scored.clear()
        return ends + super().step()

    def cancel(self, requests: Sequence[Request]) -> None:
        super().cancel([each for each in requests if self._scored.pop(each, self) is self])
