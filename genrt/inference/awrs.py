r"""Adaptive weighted rejection sampling: a constrained draw that checks few tokens.

The task: draw a token x from a row p restricted to the tokens A that a constraint allows, with a weight w
such that E[w | x] = p(A), in place of a masked draw and its mass. Tokens are drawn from p and checked,
and rejected ones are removed from p, until k draws were accepted, two by default. The first accepted one
is x.

The weight. Let every token i arrive at the times of a Poisson process of rate p(i). Tokens of A then
arrive at rate Z = p(A), the k-th at a time T ~ Gamma(k, Z), independent of the first token,
and E[(k - 1) / T] = Z. A rejected token's later arrivals need not be seen: after the rejected
ones R the next arrival of interest takes an exponential time of rate l = p(V) - p(R). So draws 1 .. n
took T = sum_j E_j / l_j with independent standard exponentials E_j, and conditionally on the draws

    w = (k - 1) E[1 / T | l_1 .. l_n] = (k - 1) int_0^inf prod_j l_j / (l_j + u) du,

which integrates out all randomness except the draws. Z = 0 is known only once every token of positive
probability was rejected.

Two dials. More accepted draws have less variance: over 300 tokens, relative to Z^2, 0.39, 0.23, 0.16 and
0.10 for k = 2, 3, 4, 6 at Z = 0.5, with 5, 8, 11, 19 checks; 1.4, 0.7, 0.4, 0.2 at Z = 0.1. A bound on
rejections stops a draw at the r-th rejected token instead, r at least 2: with j accepted before it
w = j E[1 / T | ...], by the same argument, and the draw is dead for j = 0. At Z = 0.1, k = 4 and r = 8
ask 10 tokens for a variance of 1.0, where k = 2 alone asks 28 for 1.4.

Lipkin et al. (2025), *Fast controlled generation from language models with adaptive weighted rejection
sampling*, has the idea and another weight. We know no paper with Rao-Blackwellised Poisson arrivals;
``tests/inference/test_awrs.py`` proves the law by enumeration.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from genrt.inference.model import DEAD
from genrt.inference.resampling import Floats
from genrt.numbers import check_int

STEP = 0.25
"""The trapezium rule's step, in log u. The integrand is analytic within pi of the real line, so the
rule's error is about exp(-2 pi^2 / STEP): far below the precision of a float."""

TAIL = 40.0
"""How far beyond the smallest and largest rate, in logarithms, the integrand still counts."""

AT_ONCE = 1024
"""How many rates have their terms in memory together: there may be as many rates as tokens."""


@dataclass(frozen=True, slots=True)
class AWRS:
    """Rejection as the ``proposal=`` of a ``TextModel``.

    Attributes:
        accepts: the accepted draws after which a draw stops, at least 2. More have less variance.
        rejects: the rejected tokens after which it stops, at least 2; unbounded by default. Fewer ask
            less, and more particles die.
    """

    accepts: int = 2
    rejects: int | None = None

    def __post_init__(self) -> None:
        check_int("accepts", self.accepts, 2, 2**31)
        if self.rejects is not None:
            check_int("rejects", self.rejects, 2, 2**31)


async def draw_allowed(
    weights: Floats,
    check: Callable[[list[int]], Awaitable[list[bool]]],
    rng: np.random.Generator,
    how: AWRS = AWRS(),
) -> tuple[int, float]:
    """Draw a token in proportion to ``weights`` among the tokens that ``check`` allows. Return it with
    the logarithm of an estimate of their total weight, unbiased conditionally on the token, if a draw
    that dies counts as 0. ``(DEAD, -inf)`` if all are refused, or too many before the first accepted one.

    Draws are made ahead, as if all were rejected, and checked together: one at first, then as many as
    were rejected so far. Draws after an accepted one are redrawn, so the law is that of single draws. The
    number of rounds is about the logarithm of the number of draws. For each of the accepted tokens, the
    wasted checks are at most the rejections before it.

    Args:
        weights: ``[V]``, at least 0, normalized or not; a token of weight 0 is never checked.
        check: called with a token at most once.
    """
    remaining = weights.copy()
    answers: dict[int, bool] = {}
    rates: list[float] = []
    accepted: list[int] = []
    rejected = 0
    most = math.inf if how.rejects is None else how.rejects
    while len(accepted) < how.accepts and rejected < most:
        ahead = _ahead(remaining, answers, int(min(max(1, rejected), most - rejected)), rng)
        if not ahead:
            return DEAD, -math.inf
        unknown = [token_id for token_id, _ in ahead if token_id not in answers]
        if unknown:
            answers.update(zip(unknown, await check(unknown), strict=True))
        for token_id, rate in ahead:
            rates.append(rate)
            if answers[token_id]:
                accepted.append(token_id)
                break
            remaining[token_id] = 0.0
            rejected += 1
    count = len(accepted) - (len(accepted) == how.accepts)  # before the draw that stopped
    if not count:
        return DEAD, -math.inf
    return accepted[0], math.log(count) + log_mean_rate(np.array(rates))


def _ahead(
    remaining: Floats, answers: dict[int, bool], most: int, rng: np.random.Generator
) -> list[tuple[int, float]]:
    """Return the next draws and their rates, taking every token of unknown answer for rejected: up to
    ``most`` unknown ones, or up to one that is known to be accepted."""
    left = remaining.copy()
    ahead: list[tuple[int, float]] = []
    unknown = 0
    cumulative = np.cumsum(left)
    total = rate = float(cumulative[-1])
    while total > 0 and unknown < most:
        below = min(rng.random() * total, np.nextafter(total, 0.0))
        token_id = int(np.searchsorted(cumulative, below, side="right"))
        if left[token_id] == 0:  # rejected since the sums were made: skip its arrival
            continue
        ahead.append((token_id, rate))
        if answers.get(token_id, False):
            break
        unknown += token_id not in answers
        rate -= float(left[token_id])
        left[token_id] = 0.0
        if rate < 0.5 * total:  # too little of the sums remains: recompute them
            cumulative = np.cumsum(left)
            total = rate = float(cumulative[-1])
    return ahead


def log_mean_rate(rates: Floats) -> float:
    """Return log E[1 / T] for T a sum of independent exponential times of these rates, at least two, all
    positive."""
    logarithms = np.log(rates)
    peak = logarithms.max()
    relative = logarithms - peak
    u = np.arange(relative.min() - TAIL, TAIL, STEP)
    # log of u prod_j l_j / (l_j + u), the u from du = u d(log u)
    terms = u.copy()
    for start in range(0, len(relative), AT_ONCE):
        terms -= np.logaddexp(0.0, u[:, None] - relative[start : start + AT_ONCE]).sum(axis=1)
    top = terms.max()
    return float(peak + top + math.log(np.exp(terms - top).sum() * STEP))
