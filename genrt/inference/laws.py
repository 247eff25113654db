"""Laws: distributions of the next tokens of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from genrt.constraints.protocols import prompt_tokens
from genrt.errors import ContextTooLong, InvalidRequest
from genrt.inference import checks
from genrt.inference.texts import TextTrace
from genrt.lm import AsyncLM
from genrt.numbers import check_float, named
from genrt.populations import Population
from genrt.tokens import sampling


@dataclass(frozen=True, slots=True)
class Law:
    """A language model's law of the tokens after a prompt, raised to a power.

    Several laws in a ``TextModel`` multiply: an ensemble of prompts or models, or with a negative power a
    contrast. As ``proposal=`` a law draws tokens, and others weigh them.

    Attributes:
        lm: the runtime.
        prompt: a text, tokenized as by ``lm.generate``, or token ids; ``ids`` are its token ids.
        adapter: the name of the adapter.
        temperature: above 0. The rows are divided by it and normalized.
        power: the exponent of the tempered probabilities, which are not normalized again. Its size is
            from 1e-30 to 1e30.
    """

    lm: AsyncLM
    prompt: str | Sequence[int]
    adapter: str | None = field(default=None, kw_only=True)
    temperature: float = field(default=1.0, kw_only=True)
    power: float = field(default=1.0, kw_only=True)
    ids: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lm", checks.check_runtime(self.lm))
        object.__setattr__(self, "ids", prompt_tokens(self.lm, self.prompt))
        if not isinstance(self.adapter, str | None):
            raise InvalidRequest(f"the adapter is {named(self.adapter)}: give its name")
        object.__setattr__(self, "temperature", checks.check_temperature(self.temperature))
        object.__setattr__(self, "power", check_float("power", self.power))
        if not 1e-30 <= abs(self.power) <= 1e30:
            raise InvalidRequest(
                f"power is {self.power}: give a number but 0, of a size from 1e-30 to 1e30"
            )

    def check_length(self, max_tokens: int, prompt: Sequence[int] | None = None) -> None:
        """Raise ContextTooLong if the prompt, or another one, leaves no room for so many tokens."""
        before = len(self.ids if prompt is None else prompt)
        longest = before + max_tokens - 1
        if longest > self.lm.max_model_len:
            raise ContextTooLong(
                f"a prompt of length {before} and a text of {max_tokens} tokens need a context of "
                f"{longest}, and the model's is {self.lm.max_model_len}: shorten one of them"
            )

    def check_vocabulary(self, other: Law, name: str) -> None:
        """Raise InvalidRequest if another law is over other tokens; messages call it ``name``."""
        if other.lm is not self.lm and other.lm.byte_vocab != self.lm.byte_vocab:
            raise InvalidRequest(
                f"{name} has another vocabulary, of {other.lm.vocab_size} tokens, and the model's has "
                f"{self.lm.vocab_size}: give a runtime whose tokens are the same ones, by number and by "
                "bytes"
            )

    def population(self, traces: Sequence[TextTrace]) -> Population:
        """Return a population with these texts, each after a prompt of its own or the law's."""
        if not any(each.count or each.prompt for each in traces):
            return self.lm.population(self.ids, len(traces), adapter=self.adapter)
        prompts = [self.ids if each.prompt is None else each.prompt for each in traces]
        texts = [each.token_ids if each.count else () for each in traces]
        contexts = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        return self.lm.population(contexts, adapter=self.adapter)


def are_drawn_together(laws: Sequence[Law]) -> bool:
    """Return whether the rows of the laws are multiplied where they are computed."""
    return len({(id(each.lm), each.adapter) for each in laws}) == 1


def product_of_rows(laws: Sequence[Law], rows: Sequence[Tensor]) -> Tensor:
    """Return the log-weights of tokens by several laws, as ``sampling.product`` does: ``[n, V]`` on the
    device of the first rows."""
    factors = [each.to(rows[0].device) for each in rows]
    return sampling.product(factors, [(law.temperature, law.power) for law in laws])


def check_finite(log_weights: Sequence[float] | np.ndarray) -> None:
    """Raise InvalidRequest for +inf: a law of negative power has no probability where the others have."""
    if np.isposinf(log_weights).any():
        raise InvalidRequest(
            "a law of negative power gives some tokens no probability, so their weight is infinite: give "
            "a law with a positive probability for every token"
        )


def product_of_sums(laws: Sequence[Law], log_probabilities: Sequence[float]) -> float:
    """Return the log-weight of tokens by several laws, as ``product`` does."""
    pairs = [*zip(laws, log_probabilities, strict=True)]
    if any(each == -math.inf for law, each in pairs if law.power > 0):
        return -math.inf
    total = math.fsum(law.power * each for law, each in pairs)
    check_finite([total])
    return total


def checked_laws(laws: Law | Sequence[Law]) -> tuple[Law, ...]:
    """Return one law or several. Raises InvalidRequest if one is no law, no power is positive, or
    laws are over other tokens."""
    given = (laws,) if isinstance(laws, Law) else tuple(laws)
    for each in given:
        if not isinstance(each, Law):
            raise InvalidRequest(f"{named(each)} is no Law: give Law(lm, prompt, …)")
        given[0].check_vocabulary(each, "a law")
    if not any(each.power > 0 for each in given):
        raise InvalidRequest("no law has a positive power: give one that has")
    return given
