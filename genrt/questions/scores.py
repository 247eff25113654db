"""Scores: the conditional log-probabilities of a continuation's tokens, and the rows before them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.numbers import check_int, shown
from genrt.questions.arguments import TOKEN_BYTES, Adapter, TokenIds, abbreviated, check_contexts
from genrt.questions.reads import (
    Candidates,
    ReadRequest,
    TopTokens,
    TopWithTail,
    checked_temperature,
)
from genrt.questions.request import Request
from genrt.questions.rows import Limits, LogprobsRequest, check_length, id_words
from genrt.questions.sequences import Contexts
from genrt.tokens.encoding import shared_length
from genrt.tokens.rows import log_sums
from genrt.tokens.sampling import GREEDY_BELOW, TeacherLogprobs, top_with_tail

Wanted: TypeAlias = Literal["logprobs", "greedy", "rows", "top"]
"""The kinds of answers: log-probabilities; these with a flag for greedy tokens; the rows; the likeliest
tokens of the rows."""

ENTRIES = 2**24
"""The default number of entries, 4 bytes each, in the rows of one answer."""


@dataclass(frozen=True, slots=True, repr=False)
class ScoreRequest(Request):
    """The log-probabilities of a text's tokens from position ``start`` on, at least one token.

    Rows are divided by ``temperature`` and normalized again. Only an engine whose ``scores`` is true
    takes this request; it computes the text once. The answer is a float32 tensor for
    ``n = len(token_ids) - start`` tokens:

    - ``wanted="logprobs"``: ``[n]`` on the host.
    - ``wanted="greedy"``: ``[2, n]`` on the host; the second row is 1 where the token is the likeliest.
    - ``wanted="rows"``: the rows before the tokens, ``[n, vocab_size]`` on the engine's device.
    - ``wanted="top"``: ``top_with_tail`` of these rows, int32 ``[n, 2 * top + 1]`` on the host.

    Attributes:
        packed: context and continuation, packed as in ``LogprobsRequest``.
        start: the number of tokens of the context, at least one.
        top: the number of likeliest tokens of a row, if they are wanted.
    """

    packed: bytes
    start: int
    adapter: Adapter | None = None
    weights_version: int = 0
    wanted: Wanted = "logprobs"
    temperature: float = 1.0
    top: int = 0
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._key()))

    def _key(self) -> tuple[Any, ...]:
        own = self.packed, self.start, self.adapter, self.weights_version, self.wanted
        return *own, self.temperature, self.top

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._key()  # another process hashes bytes by another key

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The text; unpacked every time."""
        return tuple(array("I", self.packed))

    @property
    def rows(self) -> list[LogprobsRequest]:
        """The row before each token of the continuation."""
        most = len(self.packed)
        ends = range(TOKEN_BYTES * self.start, most, TOKEN_BYTES)
        return [self._row(end) for end in ends]

    @property
    def computed(self) -> LogprobsRequest:
        """The row after the text without its last token, the longest context that the answer needs."""
        return self._row(-TOKEN_BYTES)

    def _row(self, end: int) -> LogprobsRequest:
        return LogprobsRequest(
            packed=self.packed[:end], adapter=self.adapter, weights_version=self.weights_version
        )

    @property
    def nbytes(self) -> int:
        """The memory of the text."""
        return len(self.packed)

    @property
    def answer_bytes(self) -> int:
        """The size of the answer on the host, unless rows are wanted."""
        return 4 * len(self) * (2 * self.top + 1)

    def answer(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the answer, from the row before each token."""
        stacked, targets = torch.stack([*rows]), torch.tensor(self.token_ids[self.start :])
        if self.wanted == "rows":
            return stacked
        heats = None
        if self.temperature != 1.0:
            heats = torch.full((len(rows),), self.temperature, dtype=torch.float64)
            heats = heats.to(stacked.device)
        if self.wanted == "top":
            return top_with_tail(stacked, self.top, heats).cpu()
        return score_entries(stacked, targets.to(stacked.device), self.wanted, heats).cpu()

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES - self.start

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        text = abbreviated(self.token_ids)
        return f"ScoreRequest({text}, start={self.start}, adapter={self.adapter})"


def score_entries(
    rows: Tensor, targets: Tensor, wanted: Wanted, heats: Tensor | None = None
) -> Tensor:
    """Return the scores of targets, int64 ``[n]``, in rows ``[n, vocab_size]``. With temperatures,
    float64 ``[n]``, the rows are overwritten; below ``GREEDY_BELOW`` the distribution is greedy."""
    likeliest = None if heats is None and wanted != "greedy" else rows.argmax(-1) == targets
    if heats is None:
        found = rows.gather(1, targets[:, None])[:, 0]
    else:
        # Move the likeliest token to 0 first, so that no temperature, however small, overflows.
        is_greedy = heats < GREEDY_BELOW
        divisors = heats.masked_fill(is_greedy, 1.0).clamp(max=torch.finfo(rows.dtype).max)
        rows = rows.sub_(rows.amax(dim=-1, keepdim=True)).div_(divisors.to(rows.dtype)[:, None])
        found = (rows.gather(1, targets[:, None]) - log_sums(rows))[:, 0]
        nothing = torch.zeros_like(found).masked_fill(~cast("Tensor", likeliest), -math.inf)
        found = torch.where(is_greedy, nothing, found)
    if wanted != "greedy":
        return found
    return torch.stack([found, cast("Tensor", likeliest).float()])


def score_requests(
    limits: Limits,
    contexts: Sequence[TokenIds] | Contexts,
    continuations: Sequence[TokenIds],
    adapter: Adapter | None,
    *,
    in_one: bool,
    temperature: float = 1.0,
) -> list[list[ReadRequest | ScoreRequest]]:
    """Return, for each continuation, the requests whose ``joined_scores`` results are its score.

    With ``in_one``, a continuation of several tokens is one request. Otherwise each token is a read of
    the row before it. A single token is always a read, because the row may be cached or shared.

    Raises:
        InvalidRequest: bad token ids, not one continuation per context, or a temperature that is not
            above 0.
        ContextTooLong: a context and its continuation, less the last token, are too long together.
    """
    if isinstance(contexts, Contexts):
        packed = [contexts.packed(number) for number in range(len(contexts))]
    else:
        packed = [id_words(each, limits.vocab_size).tobytes() for each in contexts]
    if len(packed) != len(continuations):
        raise InvalidRequest(
            f"continuations has length {len(continuations)}, not {len(packed)}: give one for each context"
        )
    heat = checked_temperature(temperature)
    found: list[list[ReadRequest | ScoreRequest]] = []
    for context, continuation in zip(packed, continuations, strict=True):
        after = id_words(continuation, limits.vocab_size, allow_empty=True, name="continuation")
        start = len(context) // TOKEN_BYTES
        check_length(limits, start + max(len(after) - 1, 0))
        score = ScoreRequest(context + after.tobytes(), start, adapter, temperature=heat)
        if in_one and len(after) > 1:
            found.append([score])
        else:
            pairs = zip(score.rows, after, strict=True)
            found.append([ReadRequest(row, Candidates((each,), heat)) for row, each in pairs])
    return found


def text_score_request(
    limits: Limits,
    token_ids: TokenIds,
    start: int,
    adapter: Adapter | None,
    wanted: str,
    temperature: float,
    top: int = 0,
) -> ScoreRequest:
    """Return the request for the score of a text's tokens from position ``start`` on; ``wanted`` is not
    ``"rows"``. Raises InvalidRequest or ContextTooLong for a bad argument."""
    words = id_words(token_ids, limits.vocab_size)
    check_length(limits, len(words) - 1)
    check_int("start", start, 1, len(words) - 1)
    if wanted not in ("logprobs", "greedy", "top"):
        raise InvalidRequest('a score has "logprobs", "greedy" or "top"')
    if wanted == "top":
        check_top(limits, top, len(words) - start)
    own = words.tobytes(), start, adapter
    wants, heat = cast("Wanted", wanted), checked_temperature(temperature)
    return ScoreRequest(*own, wanted=wants, temperature=heat, top=top if wanted == "top" else 0)


def check_top(limits: Limits, top: int, positions: int) -> int:
    """Return the number of likeliest tokens of each position. Raises InvalidRequest for a wrong one, or
    if the answer would be too large."""
    top = check_int("top", top, 1, limits.vocab_size)
    if positions * top > ENTRIES:
        raise InvalidRequest(
            f"{positions} positions with top={top} are over {ENTRIES} tokens: lower top, or begin later "
            "with start"
        )
    return top


class TeacherRequests:
    """The requests for the likeliest tokens after each beginning, of ``start`` tokens or more, of a group
    of texts. A beginning that texts share is computed once.

    Args:
        in_one: whether a text is one request; otherwise each row is a read.

    Raises:
        InvalidRequest: bad token ids, a text of fewer than ``start`` tokens, or a number out of range.
        ContextTooLong: a text is too long.
    """

    def __init__(
        self,
        limits: Limits,
        texts: Sequence[TokenIds],
        adapter: Adapter | None,
        *,
        top: int,
        start: int,
        temperature: float,
        in_one: bool,
    ) -> None:
        start, heat = check_int("start", start, 1), checked_temperature(temperature)
        self._top = top = check_top(limits, top, 0)
        self._texts = [id_words(each, limits.vocab_size) for each in check_contexts(texts, "texts")]
        # For each text, in order of their tokens: the text before it, the number of rows that both have,
        # and the number of its own requests.
        self._plan: dict[int, tuple[int, int, int]] = {}
        self.requests: list[ReadRequest | ScoreRequest] = []
        rows = 0
        for each in self._texts:
            check_length(limits, len(each))
            if len(each) < start:
                raise InvalidRequest(
                    f"a text has length {len(each)}, less than start={shown(start)}"
                )
            rows += len(each) + 1 - start
        check_top(limits, top, rows)
        before, known = -1, array("I")
        for number in sorted(range(len(self._texts)), key=lambda n: self._texts[n].tolist()):
            words = self._texts[number]
            first = max(start, shared_length([words, known]) + 1)
            # The rows before the tokens of a text with one more token, which is not read.
            packed, count = words.tobytes() + bytes(TOKEN_BYTES), len(self.requests)
            score = ScoreRequest(packed, first, adapter, 0, "top", heat, top)
            if not in_one:
                self.requests += [ReadRequest(row, TopWithTail(top, heat)) for row in score.rows]
            elif len(score):
                self.requests.append(score)
            self._plan[number] = before, first - start, len(self.requests) - count
            before, known = number, words

    def joined(self, results: Sequence[Tensor]) -> list[TeacherLogprobs]:
        """Return the answer for each text, from the results of all requests in order."""
        found, whole = iter(results), dict[int, Tensor]()
        for number, (before, common, count) in self._plan.items():
            parts = [each.view(-1, 2 * self._top + 1) for each in islice(found, count)]
            whole[number] = torch.cat([*([whole[before][:common]] if common else []), *parts])
        return [TeacherLogprobs.of(whole[number]) for number in range(len(self._texts))]


def greedy_requests(
    limits: Limits,
    token_ids: TokenIds,
    continuation: TokenIds,
    adapter: Adapter | None,
    *,
    in_one: bool,
) -> list[ReadRequest | ScoreRequest]:
    """Return the requests of one score for ``greedy_joined``; raises as ``score_requests``."""
    own = [token_ids], [continuation], adapter
    [requests] = score_requests(limits, *own, in_one=in_one)
    scores = [replace(each, wanted="greedy") for each in requests if isinstance(each, ScoreRequest)]
    reads = [each for each in requests if isinstance(each, ReadRequest)]
    return [*scores, *reads, *(ReadRequest(each.row, TopTokens(1)) for each in reads)]


def greedy_joined(results: Sequence[Any], continuation: Sequence[int]) -> tuple[float, bool]:
    """Return the sum of the log-probabilities, and whether every token is the likeliest, from the results
    of ``greedy_requests``."""
    if len(results) == 1:
        logprobs, is_likeliest = results[0]
        return float(logprobs.double().sum()), bool(is_likeliest.all())
    entries, tops = results[: len(continuation)], results[len(continuation) :]
    pairs = zip(tops, continuation, strict=True)
    is_greedy = all(int(top.token_ids[0]) == token_id for top, token_id in pairs)
    return math.fsum(float(each[0]) for each in entries), is_greedy


def row_chunks(
    limits: Limits,
    token_ids: TokenIds,
    start: int,
    chunk: int | None,
    adapter: Adapter | None,
    *,
    in_one: bool,
) -> Iterator[list[LogprobsRequest] | list[ScoreRequest]]:
    """Yield requests for the rows before a text's tokens from position ``start`` on, ``chunk`` rows at a
    time.

    With ``in_one``, a chunk is one request; otherwise one request per row, to be stacked. A chunk is
    created when it is needed, because it holds its contexts; by default these take no more memory than
    its rows may.

    Raises:
        InvalidRequest: bad token ids, or numbers out of range; at the call, as ContextTooLong.
    """
    words = id_words(token_ids, limits.vocab_size)
    check_int("start", start, 1, len(words))
    default = max(1, ENTRIES // max(limits.vocab_size, 1 if in_one else len(words)))
    most = default if chunk is None else check_int("chunk", chunk, 1)
    check_length(limits, len(words) - 1)

    def chunks() -> Iterator[list[LogprobsRequest] | list[ScoreRequest]]:
        for begin in range(start, len(words), most):
            text = words[: begin + most].tobytes()
            score = ScoreRequest(text, begin, adapter, wanted="rows")
            yield [score] if in_one and len(score) > 1 else score.rows

    return chunks()


def joined_scores(results: Sequence[Tensor], requests: Sequence[Sequence[object]]) -> list[Tensor]:
    """Return the log-probabilities of each continuation's tokens, float32 ``[len(continuation)]`` on the
    host, from the results of all requests in order."""
    found = iter(results)
    return [torch.cat([torch.empty(0), *islice(found, len(each))]) for each in requests]
