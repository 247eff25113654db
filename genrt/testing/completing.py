"""Checks of engines that draw completions, one function for each promise, as in ``conformance``. For
other engines the checks pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch

from genrt.questions.completions import Completion, CompletionRequest, Decoding, Delta
from genrt.questions.request import Result
from genrt.testing.witness import Witness, bound_to, expect
from genrt.tokens.encoding import encode
from genrt.tokens.sampling import truncate


def options(witness: Witness) -> None:
    """Check that the engine reports which options it supports, and supports the options without text."""
    if witness.capabilities.completes:
        plain = Decoding(4, top_k=3, min_tokens=2, logit_bias=((1, 1.0),), logprobs=1)
        reason = witness.full.unsupported(plain)
        expect(reason is None, f"completions with {plain} must be drawn: {reason}")
        for decoding in (Decoding(4, stop=("a",)), Decoding(4, structure=("regex", "a"))):
            reason = witness.full.unsupported(decoding)
            name = decoding.of_text or ""
            expect(reason is None or name in reason, f"{reason!r} does not say that it is {name!r}")


def greedy_completions(witness: Witness) -> None:
    """Check that greedy draws are the likeliest tokens and that log-probabilities agree with the rows."""
    if not witness.capabilities.completes:
        return
    prompt, count = witness.context(), min(8, witness.many_tokens)
    drawn = Decoding(count, temperature=0.0, ignore_eos=True, logprobs=2)
    request = CompletionRequest(prompt, drawn)
    whole = _completion(witness, request)
    expect(
        (len(whole.token_ids), whole.finish_reason) == (count, "length") and whole.truncated,
        f"{request} must have {count} tokens, and end by its length: got {whole}",
    )
    expect(whole.prompt_token_ids == prompt, f"{request} is answered with the prompt of {whole}")
    witness.expect_likeliest(prompt, whole.token_ids, "a completion at temperature 0")
    rows = [(*prompt, *whole.token_ids[:place]) for place in range(count)]
    for place, row in enumerate(witness.rows_of(bound_to(rows, None))):
        token, likeliest = whole.token_ids[place], whole.top_logprobs[place]
        apart = max(
            abs(float(row[each]) - logprob)
            for each, logprob in [(token, whole.logprobs[place]), *likeliest.items()]
        )
        expect(
            apart <= witness.tolerance and len(likeliest) == 2,
            f"the log-probabilities of {request} at {place} are {apart:.2g} off its row's",
        )
    stop = whole.token_ids[count // 2]
    first = whole.token_ids.index(stop)
    stopped = _completion(
        witness, replace(request, decoding=replace(drawn, stop_token_ids=(stop,)))
    )
    wanted = (whole.token_ids[: first + 1], "stop", stop)
    found = (stopped.token_ids, stopped.finish_reason, stopped.stop_reason)
    expect(found == wanted, f"a completion must end with its stop token: got {found}, not {wanted}")
    later = replace(drawn, stop_token_ids=(stop,), min_tokens=first + 1)
    least = _completion(witness, replace(request, decoding=later))
    expect(
        len(least.token_ids) > first and stop not in least.token_ids[: first + 1],
        f"{later} must not draw the stop token before its time: got {least.token_ids}",
    )
    forced = replace(drawn, logit_bias=((stop, 100.0),))
    biased = _completion(witness, replace(request, decoding=forced))
    expect(set(biased.token_ids) == {stop}, f"{forced} must force {stop}: got {biased.token_ids}")


def laws(witness: Witness) -> None:
    """Check that requests for the law's log-probabilities get them, also when mixed with others."""
    if not witness.capabilities.completes:
        return
    prompt, count = witness.context(), min(6, witness.many_tokens)
    drawn = Decoding(count, ignore_eos=True, logprobs=0)
    told = replace(drawn, logprobs_mode="processed_logprobs")
    changes: list[dict[str, float]] = [{"temperature": 0.5}, {"top_k": 3, "temperature": 1.5}]
    changes += [{"min_p": 0.2, "top_p": 0.7}, {"temperature": 0.0}, {}]
    asked = [
        CompletionRequest(prompt, replace(decoding, **change), seed=2 * seed + decoding.tells_law)  # type: ignore[arg-type]
        for seed, change in enumerate(changes)
        for decoding in (told, drawn)
    ]
    for request, result in zip(asked, witness.ask(asked), strict=True):
        whole, law = _whole(result), request.decoding
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


def random_completions(witness: Witness) -> None:
    """Check that a seed fixes a completion in any batch, that unseeded completions are independent, and
    that a cancelled one does not come back."""
    if not witness.capabilities.completes:
        return
    prompt = witness.context()
    drawn = Decoding(min(12, witness.many_tokens), temperature=2.0, ignore_eos=True)
    seeded = CompletionRequest(prompt, drawn, seed=4)
    alone = _completion(witness, seeded)
    others = [
        CompletionRequest(witness.context(), replace(drawn, presence_penalty=1.0), seed=seed)
        for seed in range(3)
    ]
    forgotten = CompletionRequest(witness.context(), drawn, seed=9)
    witness.submit([*others[:2], forgotten, *witness.questions(3), seeded, *others[2:]])
    witness.step()
    witness.cancel([forgotten])
    among = _whole(witness.drain()[seeded])
    expect(
        among.token_ids == alone.token_ids,
        f"a seeded completion depends on its batch: {alone.token_ids} alone, {among.token_ids} among "
        "others",
    )
    unseeded = [CompletionRequest(prompt, drawn, nonce=nonce) for nonce in range(8)]
    found = {_whole(each).token_ids for each in witness.ask(unseeded)}
    expect(len(found) > 1, "eight completions without a seed are all the same")


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


def _completion(witness: Witness, request: CompletionRequest) -> Completion:
    """Return one completion, computed alone."""
    return _whole(witness.ask([request])[0])


def _whole(result: Result | None) -> Completion:
    if not isinstance(result, Completion):
        raise AssertionError(f"a completion must end in one, not in a {type(result).__name__}")
    return result


COMPLETION_CHECKS: tuple[Callable[[Witness], None], ...] = (
    options,
    greedy_completions,
    laws,
    random_completions,
    streams,
    structures,
)
