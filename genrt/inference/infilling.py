r"""Texts between a prefix and a suffix.

The target is pi(g) = p(g | prefix) p(suffix | prefix g) / Z over gaps g of up to ``max_tokens`` tokens,
where Z, the evidence, is the sum of the numerator: no factor for an end. A particle carries the twist m,
the largest s(g) = p(suffix | prefix g) so far. It ends its gap with weight s(g), or draws another token
with weight p(A) m, where p(A) is the mass of the tokens that may follow. Its weight gains
(s(g) + p(A) m) / m. The twist makes both weights comparable, however improbable the suffix is: weighed by
s(g) and p(A) alone, nearly every gap would end at ``max_tokens`` only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from genrt.constraints import Constraint, amasks
from genrt.constraints.protocols import prompt_tokens, tokens_of
from genrt.inference.checks import check_runtime, constraint_start
from genrt.inference.laws import Law
from genrt.inference.programs import Execution, Program
from genrt.lm import AsyncLM
from genrt.numbers import check_int
from genrt.structures.matching import unpacked
from genrt.tokens.texts import decoded


def infilling(
    lm: AsyncLM,
    prefix: str | Sequence[int],
    suffix: str | Sequence[int],
    *,
    max_tokens: int,
    constraint: Constraint | None = None,
    adapter: str | None = None,
) -> Program:
    """Return a model of the gaps between prefix and suffix; its values are the gaps as texts. The suffix
    is scored after every prefix of a gap: keep it short.

    Args:
        max_tokens: the longest gap, in tokens.
        constraint: the gaps that count; without one, all texts without special tokens.

    Raises:
        ContextTooLong: prefix, gap and suffix exceed ``lm.max_model_len``.
    """
    before = prompt_tokens(check_runtime(lm), prefix, name="the prefix")
    after = prompt_tokens(lm, suffix, name="the suffix", begins=False)
    longest = check_int("max_tokens", max_tokens, 0, 2**31)
    Law(lm, before, adapter=adapter).check_length(longest + len(after))
    if constraint is not None:
        constraint_start(lm, constraint)
    tokens = tokens_of(lm)
    anything = unpacked(tokens.open, lm.vocab_size)

    async def gap(p: Execution) -> str:
        drawn: list[int] = []
        state, twist = None if constraint is None else constraint.start(), 0.0
        while True:
            context = [*before, *drawn]
            mask = anything.clone() if state is None else (await amasks([state]))[0]
            may_end = bool(mask[tokens.eos_token_id])
            mask[tokens.eos_token_id] = False
            scores = await p.lm.score(context, list(after), adapter=adapter)
            ending = float(scores.double().sum())
            going = -math.inf
            if len(drawn) < longest and bool(mask.any()):
                row = await p.lm.next_token_logprobs(context, device="cpu", adapter=adapter)
                going = float(torch.logsumexp(row[mask].double(), dim=0))
            highest = max(ending, twist or -math.inf)
            if highest > -math.inf:
                p.observe(highest - twist)
                twist = highest
            weights = np.array([ending if may_end else -math.inf, going + twist])
            total = float(np.logaddexp(*weights))
            p.observe(total - twist)
            if await p.choice([True, False], log_weights=weights):
                return decoded(b"".join(lm.byte_vocab[each] for each in drawn))
            token_id = await p.sample(context, mask=mask, adapter=adapter)
            p.observe(-going)
            drawn.append(token_id)
            state = None if state is None else state.advance(token_id)

    return Program(lm, gap)
