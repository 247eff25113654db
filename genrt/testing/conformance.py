"""The promises of an engine, one check function for each, called with a ``Witness`` of the engine.

Each check starts and ends with no request in progress, so all can run on one engine in turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from genrt.questions.arguments import Adapter
from genrt.questions.completions import SampleRequest
from genrt.questions.rows import LogprobsRequest
from genrt.testing.witness import (
    Witness,
    bound_to,
    distance,
    expect,
    expect_normalised,
    row_in,
    tokens_in,
)


def idle(witness: Witness) -> None:
    """Check that a step without requests does no work."""
    before = witness.engine.statistics()
    expect(witness.step() == [], "a step with nothing in progress must return []")
    expect(
        witness.engine.statistics().steps == before.steps,
        "a step with nothing in progress runs no forward and must not be counted",
    )


def rows(witness: Witness) -> None:
    """Check that rows are float32 log-probabilities on the engine's device and are never overwritten."""
    asked = witness.questions(4)
    answers = witness.rows_of(asked)
    size = (witness.engine.vocab_size,)
    for request, row in zip(asked, answers, strict=True):
        expect(tuple(row.shape) == size, f"the row of {request} is {tuple(row.shape)}, not {size}")
        expect(row.dtype == torch.float32, f"the row of {request} is {row.dtype}, not float32")
        expect(
            row.device == witness.engine.device,
            f"the row of {request} is on {row.device}, the engine on {witness.engine.device}",
        )
        expect(not bool(row.isnan().any()), f"the row of {request} has NaN")
        expect_normalised(row, f"the row of {request}")
    before = [row.clone() for row in answers]
    again = witness.rows_of(asked)
    witness.rows_of(witness.questions(6))
    for row, other, kept in zip(answers, again, before, strict=True):
        expect(torch.equal(row, kept), "a later step has written to a row")
        witness.expect_equal(other, kept, "asked again")


def identity(witness: Witness) -> None:
    """Check that a row belongs to its request, for any batch, order and number of requests."""
    asked = witness.questions(max(16, witness.engine.max_batch_size + 3))
    together = dict(zip(asked, witness.rows_of(asked), strict=True))
    first = together[asked[0]]
    expect(
        any(distance(row, first) > 10 * witness.tolerance for row in together.values()),
        "all contexts have the same row: a mix-up could not be seen, so give a model that "
        "tells contexts apart",
    )
    order = torch.randperm(len(asked), generator=witness.random).tolist()
    witness.expect_rows([asked[index] for index in order], together, "in a shuffled flush")
    for request in asked[:12]:
        witness.expect_rows([request], together, "in a flush and alone")


def joining(witness: Witness) -> None:
    """Check that requests that join between steps are answered like all others."""
    early, late = witness.questions(witness.engine.max_batch_size + 1), witness.questions(3)
    witness.submit(early)
    first = {end.request: end.result for end in witness.step()}
    witness.submit([request for request in late if request not in witness.in_progress])
    results = {**first, **witness.drain()}
    for request in [early[0], early[-1], *late]:
        [alone] = witness.rows_of([request])
        witness.expect_equal(
            row_in(results[request]), alone, f"{request} when others joined between steps"
        )


def long_samples(witness: Witness) -> None:
    """Check that a logprobs request is answered before a longer sample that is in progress ends."""
    long = SampleRequest(witness.context(), max_tokens=witness.many_tokens, seed=1)
    witness.submit([long])
    results = {end.request: end.result for end in witness.step()}
    [short] = witness.questions(1)
    witness.submit([short])
    while short in witness.in_progress:
        expect(
            long in witness.in_progress,
            f"a sample of {witness.many_tokens} tokens held up a logprobs request that joined it",
        )
        results |= {end.request: end.result for end in witness.step()}
    results |= witness.drain()
    count = len(tokens_in(results[long]))
    expect(
        count == witness.many_tokens,
        f"a sample without stop tokens has {count} tokens, not max_tokens={witness.many_tokens}",
    )


def cancellation(witness: Witness) -> None:
    """Check that cancelled requests, queued or in progress, do not come back, are counted, and can be
    submitted again."""
    before = witness.engine.statistics().cancelled
    witness.cancel(witness.questions(2))
    expect(
        witness.engine.statistics().cancelled == before,
        "cancelling requests that were never asked must be ignored, but was counted",
    )
    queued = witness.questions(witness.engine.max_batch_size + 3)
    unwanted = [queued[0], *queued[-2:]]
    witness.submit(queued)
    witness.cancel(unwanted)
    witness.drain()
    long = SampleRequest(witness.context(), max_tokens=witness.many_tokens, seed=2)
    witness.submit([long, *witness.questions(2)])
    witness.step()
    witness.cancel([long])
    witness.drain()
    for _ in range(witness.many_tokens + 2):
        witness.step()
    counted = witness.engine.statistics().cancelled - before
    expect(counted == 4, f"4 requests were cancelled, statistics() counts {counted}")
    alone = witness.sample(long)
    witness.submit([long])
    witness.step()
    witness.cancel([long])
    expect(
        witness.sample(long) == alone,
        "a seeded sample, asked again at once after it was cancelled, came out differently",
    )


def greedy_samples(witness: Witness) -> None:
    """Check that greedy samples are the likeliest tokens, and that a stop token ends a sample before
    itself."""
    prompt, count = witness.context(), min(8, witness.many_tokens)
    greedy = SampleRequest(prompt, max_tokens=count, temperature=0.0)
    tokens = witness.sample(greedy)
    expect(len(tokens) == count, f"{greedy} gave {len(tokens)} tokens, not {count}")
    witness.expect_likeliest(prompt, tokens, "a sample at temperature 0")
    likeliest = SampleRequest(prompt, max_tokens=count, top_k=1, seed=3)
    witness.expect_likeliest(prompt, witness.sample(likeliest), "a sample with top_k=1")
    for position in (0, count // 2):
        stop = tokens[position]
        request = SampleRequest(
            prompt, max_tokens=count, temperature=0.0, stop_token_ids=frozenset({stop})
        )
        stopped, wanted = witness.sample(request), tokens[: tokens.index(stop)]
        expect(
            stopped == wanted,
            f"a sample must end before its stop token: got {stopped}, not {wanted}",
        )


def random_samples(witness: Witness) -> None:
    """Check that a seed fixes a sample in any batch, and that unseeded samples are independent."""

    def make(prompt: tuple[int, ...], seed: int | None, nonce: int = 0) -> SampleRequest:
        return SampleRequest(
            prompt, max_tokens=witness.many_tokens, temperature=2.0, seed=seed, nonce=nonce
        )

    seeded = make(prompt := witness.context(), 4)
    alone = witness.sample(seeded)
    expect(
        all(0 <= token < witness.engine.vocab_size for token in alone),
        f"{seeded} drew token ids outside 0 .. {witness.engine.vocab_size - 1}: {alone}",
    )
    expect(witness.sample(seeded) == alone, "a seeded sample came out differently when asked again")
    company = [make(witness.context(), seed) for seed in range(4)]
    results = witness.ask([*company[:2], *witness.questions(3), seeded, *company[2:]])
    found = tokens_in(results[-3])
    expect(
        found == alone,
        f"a seeded sample depends on its batch: {alone} alone, {found} in company",
    )
    # A high temperature makes equal samples unlikely even for a model that is almost certain.
    unseeded = [make(prompt, None, nonce) for nonce in range(8)]
    expect(
        len(set(map(tokens_in, witness.ask(unseeded)))) > 1,
        "eight samples without a seed are all the same: they must be independent",
    )


def longest_context(witness: Witness) -> None:
    """Check that a context of ``max_model_len`` tokens has a row."""
    request = LogprobsRequest(witness.context(witness.engine.max_model_len))
    [row] = witness.rows_of([request])
    expect_normalised(row, "the row after max_model_len tokens")


def counting(witness: Witness) -> None:
    """Check that statistics are a frozen value and count the requests."""
    before = witness.engine.statistics()
    with contextlib.suppress(AttributeError):
        before.steps = -1  # type: ignore[misc]
        raise AssertionError("statistics() must be a frozen value")
    samples = [
        SampleRequest(witness.context(), max_tokens=4, seed=seed, temperature=0.7)
        for seed in (5, 6)
    ]
    questions = witness.questions(3)
    forgotten = SampleRequest(witness.context(), max_tokens=witness.many_tokens, seed=7)
    witness.submit([forgotten])
    witness.cancel([forgotten])
    witness.ask([*questions, *samples])
    after = witness.engine.statistics()
    wanted = {
        "requests": len(questions) + 3,
        "rows": len(questions),
        "sampled_tokens": 8,
        "cancelled": 1,
        "failed": 0,
    }
    for name, growth in wanted.items():
        found = getattr(after, name) - getattr(before, name)
        expect(
            found == growth, f"statistics().{name} grew by {found} where {growth} were asked for"
        )
    for name in ("steps", "computed_tokens", "seconds"):
        expect(
            getattr(after, name) > getattr(before, name),
            f"statistics().{name} did not grow while the engine worked",
        )


def adapter_rows(witness: Witness, paths: Sequence[Path]) -> None:
    """Check that an adapter's rows are its own, alone and mixed, until it is removed and unused."""
    if not paths:
        return
    contexts = [witness.context() for _ in range(4)]
    bound: list[Adapter | None] = [None]
    base = bound_to(contexts, None)
    alone = dict(zip(base, witness.rows_of(base), strict=True))
    for index, path in enumerate(paths):
        adapter = Adapter(f"adapter-{index}", 1)
        witness.engine.add_adapter(adapter, path)
        asked = bound_to(contexts, adapter)
        found = witness.rows_of(asked)
        for other in bound:
            others = [alone[request] for request in bound_to(contexts, other)]
            expect(
                any(
                    distance(row, its) > 10 * witness.tolerance
                    for row, its in zip(found, others, strict=True)
                ),
                f"the rows with the adapter in {path} are those of {other or 'the base model'}",
            )
        alone |= dict(zip(asked, found, strict=True))
        bound.append(adapter)
    mixed = [LogprobsRequest(context, adapter) for context in contexts for adapter in bound]
    witness.expect_rows(mixed, alone, "among those of other adapters")
    greedy = [
        SampleRequest(contexts[0], max_tokens=4, temperature=0.0, adapter=adapter)
        for adapter in bound
    ]
    for sample, result in zip(greedy, witness.ask(greedy), strict=True):
        what = f"{sample} among those of other adapters"
        witness.expect_likeliest(contexts[0], tokens_in(result), what, sample.adapter)
    # Remove an adapter in use, reload its name with the last weights, and remove all.
    loaded = [adapter for adapter in bound if adapter is not None]
    old, newest = loaded[0], loaded[-1]
    asked = bound_to(contexts, old)
    witness.submit(asked)
    witness.engine.remove_adapter(old)
    results = witness.drain()
    for request in asked:
        what = f"{request}, whose adapter was removed meanwhile"
        witness.expect_equal(row_in(results[request]), alone[request], what)
    new = Adapter(old.name, old.version + 1)
    witness.engine.add_adapter(new, paths[-1])
    same = zip(bound_to(contexts, new), bound_to(contexts, newest), strict=True)
    known = {request: alone[other] for request, other in same}
    witness.expect_rows([*known], known, f"against {newest}, the same weights")
    for adapter in [*loaded[1:], new]:
        witness.engine.remove_adapter(adapter)
    witness.expect_rows(bound_to(contexts, None), alone, "after all adapters were removed")


CHECKS: tuple[Callable[[Witness], None], ...] = (
    idle,
    rows,
    identity,
    joining,
    long_samples,
    cancellation,
    greedy_samples,
    random_samples,
    longest_context,
    counting,
)
"""All checks but ``adapter_rows``, which needs directories to load."""
