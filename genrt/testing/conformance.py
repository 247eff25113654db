"""The promises of an engine, one check function for each, called with a ``Witness`` of the engine.

Each check starts and ends with no request in progress, so all can run on one engine in turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from genrt.questions.completions import (
    Completion,
    CompletionRequest,
    Decoding,
    Delta,
    SampleRequest,
)
from genrt.questions.contexts import Adapter
from genrt.questions.draws import DrawToken
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.cache import RowCache
from genrt.testing.answers import is_answer, is_score, read_examples
from genrt.testing.witness import (
    Witness,
    bound_to,
    distance,
    expect,
    expect_normalised,
    row_in,
    tokens_in,
)
from genrt.tokens.encoding import encode
from genrt.tokens.sampling import truncate


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
    truncated = {
        "top_k=1": SampleRequest(prompt, max_tokens=count, top_k=1, seed=3),
        "top_p=1e-6": SampleRequest(prompt, max_tokens=count, top_p=1e-6, seed=3),
        "min_p=1": SampleRequest(prompt, max_tokens=count, min_p=1.0, seed=3),
    }
    for what, result in zip(truncated, witness.ask(list(truncated.values())), strict=True):
        witness.expect_likeliest(prompt, tokens_in(result), f"a sample with {what}")
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


def random_texts(witness: Witness) -> None:
    """Check that a seed fixes a sample or a completion in any batch, and that unseeded ones are
    independent."""

    def sample(prompt: tuple[int, ...], seed: int | None, nonce: int = 0) -> SampleRequest:
        return SampleRequest(prompt, max_tokens=most, temperature=2.0, seed=seed, nonce=nonce)

    def completion(prompt: tuple[int, ...], seed: int | None, nonce: int = 0) -> CompletionRequest:
        drawn = Decoding(most, temperature=2.0, ignore_eos=True)
        return CompletionRequest(prompt, drawn, seed=seed, nonce=nonce)

    prompt, most = witness.context(), witness.many_tokens
    for make in (sample, completion) if witness.capabilities.completes else (sample,):
        seeded = make(prompt, 4)
        alone = _tokens(witness.ask([seeded])[0])
        expect(
            all(0 <= token < witness.engine.vocab_size for token in alone),
            f"{seeded} drew token ids outside 0 .. {witness.engine.vocab_size - 1}: {alone}",
        )
        again = _tokens(witness.ask([seeded])[0])
        expect(again == alone, f"a seeded {make.__name__} came out differently when asked again")
        company = [make(witness.context(), seed) for seed in range(4)]
        results = witness.ask([*company[:2], *witness.questions(3), seeded, *company[2:]])
        found = _tokens(results[-3])
        expect(
            found == alone,
            f"a seeded {make.__name__} depends on its batch: {alone} alone, {found} in company",
        )
        # A high temperature makes equal texts unlikely even for a model that is almost certain.
        unseeded = [make(prompt, None, nonce) for nonce in range(8)]
        expect(
            len(set(map(_tokens, witness.ask(unseeded)))) > 1,
            f"eight {make.__name__}s without a seed are all the same: they must be independent",
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


def reads(witness: Witness) -> None:
    """Check that reads of rows on the engine's device agree with the rows, and share the rows."""
    requests = witness.questions(3)
    rows = dict(zip(requests, witness.rows_of(requests), strict=True))
    examples = read_examples(witness.engine.vocab_size, witness.random)
    asked = [ReadRequest(row, wanted) for row in requests for wanted in examples]
    before = witness.engine.statistics().rows
    together = _read_answers(witness, asked)
    computed = witness.engine.statistics().rows - before
    expect(
        computed == len(requests),
        f"{len(asked)} reads from {len(requests)} rows made the engine compute {computed}",
    )
    for request, result in together.items():
        expect(
            is_answer(request.wanted, rows[request.row], result, tolerance=witness.tolerance),
            f"{request} is answered by {result}, which is not what its row says",
        )
    # A recomputed row may differ by rounding, which changes only a few draws in 10,000.
    again = _read_answers(
        witness, [read for read in asked if isinstance(read.wanted, DrawToken)][::-1]
    )
    changed = sum(together[read].token_id != draw.token_id for read, draw in again.items())
    expect(changed <= 1, f"{changed} of {len(again)} draws changed with a fixed seed, asked again")


def _read_answers(witness: Witness, asked: Sequence[ReadRequest]) -> dict[ReadRequest, Result]:
    """Return the answers of one flush of reads, from the engine's rows without a cache."""
    engine = AnsweringEngine(witness.engine, RowCache(0))
    engine.submit(asked)
    results: dict[ReadRequest, Result] = {}
    while len(results) < len(asked):
        for end in engine.step():
            expect(end.error is None, f"{end.request} failed: {end.error!r}")
            results[cast("ReadRequest", end.request)] = end.result
    return results


def prefixes(witness: Witness) -> None:
    """Check that ``prefixes`` contains a context from ``keep`` to ``release``, and that rows of contexts
    that start with it do not change."""
    if not witness.capabilities.keeps_prefixes:
        return
    kept = witness.full.prefixes
    prefix = LogprobsRequest(witness.context(witness.longest_prompt))
    asked = [LogprobsRequest((*prefix.token_ids, token)) for token in (0, 1)]
    before = dict(zip([prefix, *asked], witness.rows_of([prefix, *asked]), strict=True))
    expect(prefix not in kept, f"{prefix} is said to be kept before it is to be")
    for again in (False, True):
        kept.keep(prefix)
        expect(prefix in kept, f"{prefix}, computed and to be kept, is not (again: {again})")
        witness.expect_rows([*before], before, "after a context that it begins with was kept")
    for _ in range(2):
        kept.release(prefix)
        expect(prefix not in kept, f"{prefix} was released, and is said to be kept")
    witness.expect_rows(asked, before, "after a release")


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
    adapter_scores(witness, contexts[0], bound)
    greedy = [
        SampleRequest(contexts[0], max_tokens=4, temperature=0.0, adapter=adapter)
        for adapter in bound
    ]
    for sample, result in zip(greedy, witness.ask(greedy), strict=True):
        what = f"{sample} among those of other adapters"
        witness.expect_likeliest(contexts[0], tokens_in(result), what, sample.adapter)
    _adapter_removal(witness, contexts, bound, alone, paths[-1])


def _adapter_removal(
    witness: Witness,
    contexts: Sequence[tuple[int, ...]],
    bound: Sequence[Adapter | None],
    alone: dict[LogprobsRequest, Tensor],
    path: Path,
) -> None:
    """Remove an adapter in use, reload its name with the weights in ``path``, and remove all."""
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
    witness.engine.add_adapter(new, path)
    same = zip(bound_to(contexts, new), bound_to(contexts, newest), strict=True)
    known = {request: alone[other] for request, other in same}
    witness.expect_rows([*known], known, f"against {newest}, the same weights")
    for adapter in [*loaded[1:], new]:
        witness.engine.remove_adapter(adapter)
    witness.expect_rows(bound_to(contexts, None), alone, "after all adapters were removed")


# -- scores -----------------------------------------------------------------------------------


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
                is_score(
                    request,
                    [known[row] for row in request.rows],
                    result,
                    tolerance=witness.tolerance,
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
            is_score(request, rows, result, tolerance=witness.tolerance),
            f"{request} among those of other adapters is answered by {result}",
        )


# -- completions: other engines pass ----------------------------------------------------------


def completion_options(witness: Witness) -> None:
    """Check that the engine reports which options it supports, and supports the options without text."""
    if witness.capabilities.completes:
        plain = Decoding(4, top_k=3, min_tokens=2, logit_bias=((1, 1.0),), logprobs=1)
        reason = witness.full.unsupported(plain)
        expect(reason is None, f"completions with {plain} must be drawn: {reason}")
        for decoding in (Decoding(4, stop=("a",)), Decoding(4, structure=("regex", "a"))):
            reason = witness.full.unsupported(decoding)
            name = decoding.of_text or ""
            expect(reason is None or name in reason, f"{reason!r} does not say that it is {name!r}")


def completions(witness: Witness) -> None:
    """Check the log-probabilities of completions, of the model and of the law; greedy draws; and that a
    stop token ends a completion."""
    if not witness.capabilities.completes:
        return
    prompt, count = witness.context(), min(8, witness.many_tokens)
    drawn = Decoding(count, ignore_eos=True, logprobs=0)
    changes: list[dict[str, float]] = [{"temperature": 0.0}, {}, {"temperature": 0.5}]
    changes += [{"top_k": 3, "temperature": 1.5}, {"min_p": 0.2, "top_p": 0.7}]
    asked = [
        CompletionRequest(prompt, replace(drawn, logprobs_mode=mode, **change), seed=seed + second)  # type: ignore[arg-type]
        for seed, change in enumerate(changes)
        for second, mode in ((0, "raw_logprobs"), (9, "processed_logprobs"))
    ]
    results = [_whole(each) for each in witness.ask(asked)]
    for request, whole in zip(asked, results, strict=True):
        expect(
            (len(whole.token_ids), whole.finish_reason, whole.prompt_token_ids)
            == (count, "length", prompt)
            and whole.truncated,
            f"{request} must have {count} tokens, and end by its length: got {whole}",
        )
        law = request.decoding
        contexts = [(*prompt, *whole.token_ids[:place]) for place in range(count)]
        rows = torch.stack(witness.rows_of(bound_to(contexts, None)))
        if law.tells_law:
            rows = truncate(
                rows, temperature=law.temperature, top_k=law.top_k, top_p=law.top_p, min_p=law.min_p
            )
        own = rows[range(count), list(whole.token_ids)].tolist()
        apart = max(abs(one - other) for one, other in zip(own, whole.logprobs, strict=True))
        most = witness.tolerance * max(1.0, 2.0 / max(law.temperature, 0.1))
        expect(apart <= most, f"the log-probabilities of {request} are {apart:.2g} off their law's")
    tokens = results[0].token_ids
    witness.expect_likeliest(prompt, tokens, "a completion at temperature 0")
    stop = tokens[count // 2]
    stopping = replace(asked[0].decoding, stop_token_ids=(stop,))
    stopped = _whole(witness.ask([replace(asked[0], decoding=stopping)])[0])
    wanted = (tokens[: tokens.index(stop) + 1], "stop", stop)
    found = (stopped.token_ids, stopped.finish_reason, stopped.stop_reason)
    expect(found == wanted, f"a completion must end with its stop token: got {found}, not {wanted}")


def streams(witness: Witness) -> None:
    """Check that streamed deltas are consecutive parts of the completion, each delivered once, and that
    cancelled or finished completions have no further deltas."""
    if not witness.capabilities.completes:
        return
    drawn = Decoding(witness.many_tokens, temperature=2.0, ignore_eos=True, logprobs=0)
    asked = [
        CompletionRequest(witness.context(), drawn, seed=seed, nonce=seed, streamed=True)
        for seed in range(4)
    ]
    cancelled, read = asked[0], asked[1:]
    told: dict[CompletionRequest, list[Delta]] = {request: [] for request in asked}
    results: dict[CompletionRequest, Completion] = {}
    witness.submit([*asked, *witness.questions(2)])
    steps = 0
    while any(request in witness.in_progress for request in asked):
        for end in witness.step():
            if isinstance(end.request, CompletionRequest):
                results[end.request] = _whole(end.result)
        for request, delta in zip(asked, witness.full.progress(asked), strict=True):
            if delta is not None:
                expect(
                    request in witness.in_progress,
                    f"{request} is over or cancelled, and the engine tells {delta}",
                )
                told[request].append(cast("Delta", delta))
        steps += 1
        if steps == 2:
            witness.cancel([cancelled])
    witness.drain()
    for request in read:
        _expect_beginning(results[request], told[request])


def _expect_beginning(whole: Completion, deltas: Sequence[Delta]) -> None:
    """Expect these deltas to be the start of a completion, without gaps."""
    expect(bool(deltas), f"nothing was told of {whole} before its end")
    count = letters = 0
    for delta in deltas:
        end, text_end = count + len(delta.token_ids), letters + len(delta.text)
        expect(
            (delta.start, delta.text_start) == (count, letters)
            and delta.token_ids == whole.token_ids[count:end]
            and delta.text == whole.text[letters:text_end]
            and len(delta.logprobs) == len(delta.token_ids),
            f"{delta} is not what follows {count} tokens and {letters} letters of {whole}",
        )
        count, letters = end, text_end


def structures(witness: Witness) -> None:
    """Check that a text has its structure unless it is truncated, if the engine supports structures."""
    texts = Decoding(16, structure=("choice", ("ab", "ba")))
    engine = witness.engine
    if not witness.capabilities.completes or witness.full.unsupported(texts) is not None:
        return
    # After tokens that are part of a character, a text may start with the rest of that character.
    prompt = tuple(encode(engine.tokenizer, "abba"))
    asked = [CompletionRequest(prompt, texts, seed=seed) for seed in range(6)]
    for result in witness.ask(asked):
        text = _whole(result)
        expect(
            text.text in ("ab", "ba") or text.truncated, f"{texts} is answered with {text.text!r}"
        )


def _tokens(result: Result) -> tuple[int, ...]:
    return result.token_ids if isinstance(result, Completion) else tokens_in(result)


def _whole(result: Result | None) -> Completion:
    if not isinstance(result, Completion):
        raise AssertionError(f"a completion must end in one, not in a {type(result).__name__}")
    return result


CHECKS: tuple[Callable[[Witness], None], ...] = (
    idle,
    rows,
    identity,
    joining,
    long_samples,
    cancellation,
    greedy_samples,
    random_texts,
    longest_context,
    counting,
    reads,
    prefixes,
    scores,
    completion_options,
    completions,
    streams,
    structures,
)
"""All checks but ``adapter_rows``, which needs directories to load."""
