"""A sample or a completion drawn from rows: the distribution of each token, and where the text ends.

The order is vLLM's (``v1/sample/sampler.py``): structure, bad words, least number of tokens, bias,
penalties; then temperature, min-p, top-k and top-p, as in ``tokens.sampling.truncate``.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.questions.completions import (
    Completion,
    CompletionRequest,
    Decoding,
    Delta,
    FinishReason,
    SampleRequest,
    SamplingMask,
    weights_spans,
)
from genrt.structures.guides import Guides
from genrt.tokens.detokenizing import TextStream
from genrt.tokens.rows import normalised
from genrt.tokens.sampling import GREEDY_BELOW, weighed
from genrt.tokens.sets import DrawnFrom, MaskForm, in_form, mass_of_sets, packed_sets
from genrt.tokens.spellings import Spellings

NO_TOKEN = (
    "its options leave no token to draw: structure, bad_words, logit_bias or min_tokens "
    "rule out all"
)


def unsupported(decoding: Decoding, tokenizer: Any) -> str | None:
    """Return which option an engine that draws from rows does not support, and why."""
    if decoding.split_reasoning:
        return "split_reasoning needs vLLM, which has the parsers"
    name = decoding.of_text
    if name is not None and tokenizer is None:
        return f"{name} needs a tokenizer, which this model lacks"
    if decoding.structure is not None and getattr(tokenizer, "eos_token_id", None) is None:
        return f"{name} needs an end token, which this model's tokenizer does not name"
    return None


class CompletionState:
    """One sample or completion in progress. ``drawn`` has its tokens so far.

    Args:
        tokenizer: the model's, if it has one; its end token ends a completion.
        guides: the structures that texts may have with this tokenizer.
        spellings: of words by this tokenizer.
        ends: tokens that end a completion beside the tokenizer's end token, unless it ignores that.
        version: of the weights that draw the first token.

    Raises:
        InvalidRequest: the structure is invalid, or a bad word has no tokens.
    """

    def __init__(
        self,
        request: SampleRequest | CompletionRequest,
        tokenizer: Any,
        guides: Guides,
        spellings: Spellings,
        ends: Collection[int] = (),
        version: int = 0,
    ) -> None:
        self._begins = [(version, 0)]  # each version of the weights with its first token
        self.decoding = decoding = request.decoding
        self.drawn: list[int] = []
        self._request = request
        eos = None if decoding.ignore_eos else getattr(tokenizer, "eos_token_id", None)
        self._eos = eos
        ends = () if decoding.ignore_eos else ends
        self._ends = sorted({*decoding.stop_token_ids, *ends, *([] if eos is None else [eos])})
        self._bad = spellings.of(decoding.bad_words)
        structure = decoding.structure
        self._guide = None if structure is None else guides.begin(structure, self._ends)
        # Only min_tokens may change the distribution of a token.
        self._is_plain = not (self._guide is not None or self._bad or decoding.changes_logits)
        # The last row within the structure: vLLM's log-probabilities are taken from it too.
        self._guided: Tensor | None = None
        self._logprobs: list[float] = []
        self._likeliest: list[dict[int, float]] = []
        self._places: list[DrawnFrom] = []
        self._words = 0  # of the bits of a set, once there is one
        self._text = ""
        self._stream: TextStream | None = None
        if tokenizer is not None and isinstance(request, CompletionRequest):
            skip = decoding.skip_special_tokens
            self._stream = TextStream(tokenizer, request.token_ids, skip_special_tokens=skip)
        self._delivered = self._delivered_text = 0
        self._began = self._first = time.perf_counter()

    def set_version(self, version: int) -> None:
        """Label the tokens that are drawn from now on."""
        if self._begins[-1][0] != version:
            self._begins.append((version, len(self.drawn)))

    def distribution(self, logits: Tensor) -> Tensor | None:
        """Return the log-probabilities of the next token before temperature and truncation.

        ``logits`` are the model's, float32 ``[vocab_size]``. Return ``None`` if no option changes the
        model's own row.

        Raises:
            InvalidRequest: the structure is too complex to compute the tokens that may follow.
        """
        decoding, drawn = self.decoding, self.drawn
        if self._is_plain and len(drawn) >= decoding.min_tokens:
            return None
        logits = logits.clone()
        if self._guide is not None:
            logits[~self._guide.mask().to(logits.device)] = -math.inf
            self._guided = normalised(logits)
        for *before, last in self._bad:
            if drawn[len(drawn) - len(before) :] == before:
                logits[last] = -math.inf
        if len(drawn) < decoding.min_tokens:
            held = logits[self._ends]
            logits[self._ends] = -math.inf
            if self._guide is not None and not bool((logits > -math.inf).any()):
                logits[self._ends] = held  # the structure is complete, and nothing may follow
        for token_id, bias in decoding.logit_bias:
            logits[token_id] += bias
        if decoding.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*self._request.token_ids, *drawn}), device=logits.device)
            penalty, there = decoding.repetition_penalty, logits[seen]
            logits[seen] = torch.where(there > 0, there / penalty, there * penalty)
        if decoding.frequency_penalty or decoding.presence_penalty:
            for token_id, count in Counter(drawn).items():
                penalty = decoding.frequency_penalty * count + decoding.presence_penalty
                logits[token_id] -= penalty
        return normalised(logits)

    def add(self, token_id: int, row: Tensor, drawn_from: Tensor) -> Any:
        """Append a token; return the completion, or the sample's tokens, if that ends it.

        Args:
            row: the model's row.
            drawn_from: the distribution that the token was drawn from.

        Raises:
            InvalidRequest: the token is negative, because there was no token to draw.
        """
        if token_id < 0:
            raise InvalidRequest(NO_TOKEN)
        decoding = self.decoding
        if not self.drawn:
            self._first = time.perf_counter()
        self.drawn.append(token_id)
        if self._guide is not None:
            self._guide.take(token_id)
            row = row if self._guided is None else self._guided
        if decoding.sampling_mask is not None:
            self._places.append(self._set_of(decoding.sampling_mask, token_id, row, drawn_from))
        if decoding.returns_processed:
            row = drawn_from
        if decoding.logprobs is not None:
            self._logprobs.append(float(row[token_id]))
        if decoding.logprobs:
            top = row.topk(decoding.logprobs)
            self._likeliest.append(
                dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            )
        stopped = token_id in self._ends
        before = len(self._text)
        if self._stream is not None and (not stopped or decoding.include_stop_str_in_output):
            self._text += self._stream.step(token_id)
        stop = None if stopped else self._stop(before)
        if stop is not None:
            self._text = self._text[: stop[1]]
            return self._result("stop", stop[0])
        if stopped:
            return self._result("stop", None if token_id == self._eos else token_id)
        if len(self.drawn) == decoding.max_tokens:
            return self._result("length", None)
        return None

    def progress(self) -> Delta | None:
        """Return the part that was drawn since the last call, if any."""
        start, text_start, decoding = self._delivered, self._delivered_text, self.decoding
        if start == len(self.drawn):
            return None
        stops = () if decoding.include_stop_str_in_output else decoding.stop
        held = max((len(stop) - 1 for stop in stops), default=0)  # it may begin a stop string
        self._delivered = len(self.drawn)
        self._delivered_text = max(text_start, len(self._text) - held)
        return Delta(
            self._text[text_start : self._delivered_text],
            tuple(self.drawn[start:]),
            tuple(self._logprobs[start:]),
            tuple(self._likeliest[start:]),
            start,
            text_start,
            weights_spans=weights_spans(self._begins, start, len(self.drawn)),
            sampling_mask=sampling_mask(decoding, self._places[start:], self._words),
        )

    def _set_of(self, form: MaskForm, token: int, row: Tensor, law: Tensor) -> DrawnFrom:
        heat = self.decoding.temperature
        by_model = None if heat < GREEDY_BELOW else weighed(row[None], heat, 1.0)
        mass = 0.0 if by_model is None else float(mass_of_sets(by_model, law[None]))
        packed = packed_sets(law[None])
        self._words = packed.shape[-1]
        [tokens] = in_form(packed, form)
        return float(law[token]), mass, tokens

    def _stop(self, seen: int) -> tuple[str, int] | None:
        """Return the stop string that is complete first in the text from ``seen`` on, and the length of
        the text that stays."""
        decoding = self.decoding
        if not decoding.stop or len(self.drawn) <= decoding.min_tokens:
            return None
        found = [
            (place + len(stop), place, stop)
            for stop in decoding.stop
            if (place := self._text.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        end, place, stop = min(found, key=lambda each: each[0])
        return stop, end if decoding.include_stop_str_in_output else place

    def _result(self, reason: FinishReason, stop: str | int | None) -> Any:
        if isinstance(self._request, SampleRequest):
            return self._request.result(self.drawn, reason)
        now = time.perf_counter()
        return Completion(
            text=self._text,
            token_ids=tuple(self.drawn),
            prompt_token_ids=self._request.token_ids,
            logprobs=tuple(self._logprobs),
            top_logprobs=tuple(self._likeliest),
            finish_reason=reason,
            stop_reason=stop,
            seconds=now - self._began,
            seconds_to_first_token=self._first - self._began,
            weights_version=self._begins[-1][0],
            weights_spans=weights_spans(self._begins, 0, len(self.drawn)),
            sampling_mask=sampling_mask(self.decoding, self._places, self._words),
        )


def sampling_mask(
    decoding: Decoding, places: Sequence[DrawnFrom], words: int
) -> SamplingMask | None:
    """Return the sets of these places, if they are wanted, of a vocabulary of so many words of bits."""
    form = decoding.sampling_mask
    return None if form is None else SamplingMask(form, tuple(places), words)
