"""Records all calls between a conformance suite and an engine, and checks each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from genrt.engines.protocol import Engine, EngineStatistics, Finished
from genrt.questions.arguments import Adapter
from genrt.questions.completions import SampleRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.statistics import NO_COUNTERS
from genrt.tokens.sampling import Draw, TopLogprobs

_PATIENCE = 10_000
"""The steps in a row that may finish no request before a request counts as lost."""


def expect(condition: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)


def expect_normalised(row: Tensor, what: str) -> None:
    """Expect the probabilities of a row to add up to 1."""
    total = float(row.double().logsumexp(-1))
    expect(abs(total) <= 1e-4, f"{what} is not normalised: logsumexp is {total:.2g}")


class Witness:
    """Calls an engine and tracks the requests in progress, so it detects duplicate, late and unrequested
    answers.

    Every method raises AssertionError if the engine breaks the protocol. Contexts are random, from a
    fixed seed, and are rarely used twice.
    """

    def __init__(self, engine: Engine, tolerance: float) -> None:
        self.engine = engine
        self.tolerance = tolerance
        self.in_progress: set[Request] = set()
        self.counted = engine.statistics()
        self.random = torch.Generator().manual_seed(0)
        self.seen: set[tuple[int, ...]] = set()
        expect(engine.vocab_size > 1, f"vocab_size is {engine.vocab_size}, not 2 or more")
        expect(
            engine.max_model_len >= 16, f"max_model_len is {engine.max_model_len}, not 16 or more"
        )
        expect(
            engine.max_batch_size >= 1, f"max_batch_size is {engine.max_batch_size}, not positive"
        )
        self.longest_prompt = min(64, engine.max_model_len // 2)
        self.many_tokens = min(40, engine.max_model_len - self.longest_prompt)

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit a flush of requests that are not in progress."""
        self.in_progress |= set(requests)
        self.engine.submit(requests)

    def cancel(self, requests: Sequence[Request]) -> None:
        """Cancel these requests; from now on they must not come back."""
        self.in_progress -= set(requests)
        self.engine.cancel(requests)

    def step(self) -> list[Finished]:
        """Return the results of one step. Each must be due and without an error, and no counter may
        shrink."""
        finished = self.engine.step()
        for end in finished:
            # A message has a whole row, and would cost more than the step: it is made if it is raised.
            if end.request not in self.in_progress:
                raise AssertionError(
                    f"{end.request} came back although it was cancelled, answered before, or never asked"
                )
            self.in_progress.remove(end.request)
            if (end.result is None) == (end.error is None):
                raise AssertionError(
                    f"{end.request} must have either a result or an error, got {end}"
                )
            if end.error is not None:
                raise AssertionError(f"{end.request} failed: {end.error!r}")
        counted = self.engine.statistics()
        for counter in fields(EngineStatistics):
            if counter.name in NO_COUNTERS["engine"]:
                continue
            if getattr(counted, counter.name) < getattr(self.counted, counter.name):
                raise AssertionError(
                    f"statistics().{counter.name} has shrunk from {self.counted} to {counted}"
                )
        self.counted = counted
        return finished

    def drain(self) -> dict[Request, Result]:
        """Step until no request is in progress; return the results."""
        results: dict[Request, Result] = {}
        idle_steps = 0
        while self.in_progress:
            finished = self.step()
            results |= {end.request: end.result for end in finished if end.result is not None}
            idle_steps = 0 if finished else idle_steps + 1
            expect(
                idle_steps < _PATIENCE,
                f"{len(self.in_progress)} requests are not answered after {idle_steps} steps that "
                f"finished nothing, among them {next(iter(self.in_progress), None)}",
            )
        return results

    def ask(self, requests: Sequence[Request]) -> list[Result]:
        """Return the results of one flush, in the order of the requests."""
        self.submit(requests)
        results = self.drain()
        return [results[request] for request in requests]

    def rows_of(self, requests: Sequence[LogprobsRequest]) -> list[Tensor]:
        """Return the rows of one flush, in the order of the requests."""
        return [row_in(result) for result in self.ask(requests)]

    def sample(self, request: SampleRequest) -> tuple[int, ...]:
        """Return the tokens of one sample, computed alone."""
        return tokens_in(self.ask([request])[0])

    def context(self, length: int | None = None) -> tuple[int, ...]:
        """Return token ids that no check has used so far, as far as the vocabulary allows."""
        for _ in range(100):
            size = length or int(
                torch.randint(1, self.longest_prompt + 1, (), generator=self.random)
            )
            ids = torch.randint(self.engine.vocab_size, (size,), generator=self.random).tolist()
            if tuple(ids) not in self.seen:
                break
        self.seen.add(tuple(ids))
        return tuple(ids)

    def questions(self, count: int) -> list[LogprobsRequest]:
        """Return ``count`` distinct logprobs requests of mixed lengths."""
        made = [LogprobsRequest(self.context()) for _ in range(count)]
        return list(dict.fromkeys(made))

    def expect_equal(self, row: Tensor, other: Tensor, what: str) -> None:
        """Expect the two rows to differ by rounding only."""
        apart = distance(row, other)
        expect(
            apart <= self.tolerance, f"{what}: rows are {apart:.2g} apart, not ≤ {self.tolerance}"
        )

    def expect_rows(
        self, asked: Sequence[LogprobsRequest], known: Mapping[LogprobsRequest, Tensor], what: str
    ) -> None:
        """Expect the rows of one flush to be those that are known, but for rounding."""
        for request, row in zip(asked, self.rows_of(asked), strict=True):
            self.expect_equal(row, known[request], f"{request} {what}")

    def expect_likeliest(
        self,
        prompt: tuple[int, ...],
        tokens: tuple[int, ...],
        what: str,
        adapter: Adapter | None = None,
    ) -> None:
        """Expect each token to be as likely as the likeliest token of its row, up to rounding."""
        contexts = [prompt + tokens[:index] for index in range(len(tokens))]
        for row, token in zip(self.rows_of(bound_to(contexts, adapter)), tokens, strict=True):
            gap = float(row.max() - row[token])
            expect(
                gap <= self.tolerance,
                f"{what} drew token {token}, whose log-probability is {gap:.2g} below the likeliest's",
            )


def bound_to(contexts: Sequence[tuple[int, ...]], adapter: Adapter | None) -> list[LogprobsRequest]:
    """Return one logprobs request for each context, with this adapter."""
    return [LogprobsRequest(context, adapter) for context in contexts]


def distance(row: Tensor, other: Tensor) -> float:
    """Return the largest difference of two entries; infinite where only one of the two is -inf."""
    one, two = row.double().cpu(), other.double().cpu()
    return float((one - two).abs().masked_fill(one == two, 0.0).max())


def row_in(result: Result | None) -> Tensor:
    """Return the result of a logprobs request; raise AssertionError if it is not a row."""
    if not isinstance(result, Tensor):
        raise AssertionError(
            f"a logprobs request must end in a tensor, not {type(result).__name__}"
        )
    return result


def tokens_in(result: Result | None) -> tuple[int, ...]:
    """Return the result of a sample request; raise AssertionError if it is not a tuple of token ids."""
    if not isinstance(result, tuple) or isinstance(result, Draw | TopLogprobs):
        raise AssertionError(f"a sample must end in a tuple of ids, not {type(result).__name__}")
    return result
