r"""The language model's law of a text after a prompt, constrained and weighted, as a model of particles.

The base law p is the language model's own, token by token, ended by the end token or cut at
``max_tokens`` tokens, the end token included. With a constraint C and a potential phi the target is

    pi(x) = p(x) 1[x in C] exp(phi(x)) / Z,        Z = E_p[1[x in C] exp(phi(x))].

Z is the evidence. With a constraint a text must end by the end token within ``max_tokens`` to be in C;
without one, a cut text is an outcome like any other.

A token is drawn from the row p(. | text) restricted to the tokens A that the constraint allows, and the
weight gains the mass of A under the row:

    q(x) = p(x) 1[x in A] / p(A),        w <- w p(x) / q(x) = w p(A).

``stop`` decides how a text ends. By tokens: p(x) has the probability of all stop tokens together as its
last factor. By strings: p(x) is the probability of all drawn tokens, and the text is the part before the
string, which may begin inside a token. Without a stop (``stop=None``): a text has ``max_tokens`` tokens,
or fewer if the constraint allows no more, and p(x) is the probability that the model continues with x.

At the last token of a constrained text A is the end token alone. A text with p(A) = 0 is dead: its weight
is 0. Adaptive weighted rejection draws from the same q and gains an unbiased estimate of p(A)
(``genrt.inference.awrs``). Several laws with powers multiply: the target has prod_i p_i(x)^a_i in place
of p(x), q is this product normalized on A, and the gain is its sum over A.

Another law d of the same tokens may propose: another prompt, adapter or model. It draws under the
constraint, and the target, which scores a unit of all texts in one question, does not change:

    w <- w p(x) / q(x),        q(x) = d(x) 1[x in A] / d(A),

with d(A) replaced by its estimate under rejection. d must be able to write every text that the model can
write, as any softmax can.

A twist psi guides particles while they grow and does not change the target: a text of t tokens has gained
psi(x_1:t), which its next unit replaces, and phi at its end:

    w <- w exp(psi(x_1:t) - psi(x_1:t-1)),    at the end    w <- w exp(phi(x) - psi(x_1:t-1)).

A twist pays if psi predicts phi, or the mass that the constraint will take. A particle with psi = -inf
dies, so phi must be -inf for all its continuations.

Lew, Zhi-Xuan, Grand & Mansinghka (2023), *Sequential Monte Carlo steering of large language models using
probabilistic programs*. Loula et al. (2025), *Syntactic and semantic control of large language models via
sequential Monte Carlo*. Zhao, Brekelmans, Makhzani & Grosse (2024), *Probabilistic inference in language
models via twisted sequential Monte Carlo*.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import accumulate, count
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from genrt.constraints import CheckedState, Constraint, abitmasks
from genrt.constraints.products import are_quick, fill
from genrt.constraints.protocols import State, words_of
from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.inference import checks
from genrt.inference.awrs import AWRS, draw_allowed
from genrt.inference.laws import (
    Law,
    are_drawn_together,
    check_finite,
    checked_laws,
    product_of_rows,
    product_of_sums,
)
from genrt.inference.model import DEAD
from genrt.inference.resampling import Floats
from genrt.inference.texts import END_TOKEN, Ends, Stop, TextTrace, parse_stop
from genrt.lm import AsyncLM
from genrt.numbers import check_int, named
from genrt.populations import Population, draw_texts
from genrt.questions.arguments import seeds_at
from genrt.questions.draws import step_seed
from genrt.runtime.concurrency import gather_all
from genrt.structures.matching import set_bits, unpacked
from genrt.tokens import sampling
from genrt.tokens.texts import Potential, Text, decoded
from genrt.tokens.vocabulary import checked_utf8

Proposal: TypeAlias = Literal["mask", "awrs"] | AWRS | Law | AsyncLM
"""How a ``TextModel`` draws: under masks, by rejection, or from another law."""

Unit: TypeAlias = int | str | Callable[[Text], bool]
"""By how much a text grows in a step: tokens, up to a string, or until a function of the text is true."""

Draws: TypeAlias = list[tuple[int, float, float]]
"""After each text: a token or ``DEAD``; the logarithm of the allowed mass, or of an unbiased estimate;
and log q of the token."""

NO_TOKEN = DEAD, -math.inf, 0.0
"""No token could be drawn."""


class TextModel:
    """A language model's texts after a prompt, under a constraint, weighted by a potential. Many
    algorithms may run one model at once.

    Attributes:
        laws: the factors of the target.
        lm: the first law's runtime.
        eos_token_id: the model's own end token.
        ends: the ways in which a text ends.
        has_exact_weights: whether weights are exact, as masks make them, and no estimates.
    """

    laws: tuple[Law, ...]
    eos_token_id: int | None
    ends: Ends
    has_exact_weights: bool

    def __init__(
        self,
        lm: AsyncLM | Law | Sequence[Law],
        prompt: str | Sequence[int] | None = None,
        *,
        max_tokens: int,
        unit: Unit = 1,
        stop: Stop = END_TOKEN,
        constraint: Constraint | None = None,
        potential: Potential | None = None,
        twist: Potential | None = None,
        proposal: Proposal | None = None,
        temperature: float = 1.0,
        adapter: str | None = None,
    ) -> None:
        """
        Args:
            lm: a runtime; or a law, or several laws, which multiply and have their own prompts.
            prompt: a text, or token ids.
            max_tokens: the longest text, in tokens with its end token; at least 1.
            unit: by how much a text grows in a step: so many tokens, up to a string such as ``"\\n\\n"``,
                or until a function of the text so far is true.
            stop: the end of a text, which does not include it: ``END_TOKEN``, token ids, strings, or a
                list with several. With ``None`` a text ends at ``max_tokens``, or where its constraint
                allows no more; this is for a text in the middle of a longer one. Strings cannot be
                combined with a constraint.
            constraint: the texts that count; see ``genrt.constraints``.
            potential: log-weights of finished texts, in the target and in the evidence.
            twist: log-weights of prefixes, which guide resampling and do not change the target. It may be
                the potential itself, if that is meaningful for prefixes.
            proposal: how to draw under a constraint. ``"mask"`` checks every token, ``"awrs"`` few. The
                default is ``"awrs"`` for predicates and products with them; ``AWRS(accepts=4)`` has less
                variance. Or another law of the same tokens, which draws the units that the target weighs;
                or a runtime, for its law after the prompt.
            temperature: above 0. Target and evidence belong to the model with tempered rows.
            adapter: the name of the adapter.

        Raises:
            InvalidRequest, ContextTooLong: a wrong argument; prompt and text exceed ``lm.max_model_len``.
            UnknownAdapter: from the first step on.
        """
        if isinstance(lm, Law | list | tuple):
            if prompt is not None or adapter is not None or temperature != 1:
                raise InvalidRequest(
                    "laws have their own prompts, adapters and temperatures: give these to the laws"
                )
            laws = checked_laws(lm)
        else:
            given: Any = lm, prompt
            laws = (Law(*given, adapter=adapter, temperature=temperature),)
        runtime = laws[0].lm
        self.max_tokens = check_int("max_tokens", max_tokens, 1, 2**31)
        proposer = _proposal_law(laws[0], proposal)
        checks.check_callable("the potential", potential, "a function of a Text", optional=True)
        checks.check_callable("the twist", twist, "a function of a Text", optional=True)
        for law in laws if proposer is None else (*laws, proposer):
            law.check_length(self.max_tokens)
        eos_token_id: int | None = getattr(runtime.tokenizer, "eos_token_id", None)
        if constraint is not None and eos_token_id is None:
            raise InvalidRequest(
                "a constrained text ends with the end token, and the model's tokenizer names none: "
                "set its eos_token_id"
            )
        ends = parse_stop(stop, eos_token_id=eos_token_id, vocab_size=runtime.vocab_size)
        if constraint is not None and ends.strings:
            raise InvalidRequest(
                "stop has strings, which may begin inside of a token, where no constraint can tell: put "
                "the string into the constraint, as in regex(r'[^\\n]*\\n', lm), and give stop=None"
            )
        self._start = None if constraint is None else checks.constraint_start(runtime, constraint)
        is_asked = isinstance(self._start, CheckedState)
        is_awrs = proposal == "awrs" or isinstance(proposal, AWRS)
        if is_awrs and self._start is not None and not is_asked:
            raise InvalidRequest(
                'proposal="awrs" is for constraints that are asked token by token, such as predicate; '
                "this one has masks: leave the proposal out"
            )
        if isinstance(unit, str) and unit:
            checked_utf8(unit)
        elif hasattr(unit, "__index__"):
            unit = check_int("unit", unit, 1, 2**31)
        elif not callable(unit):
            raise InvalidRequest(
                f"unit is {named(unit)}: give a number of tokens, a non-empty str or a function of a Text"
            )
        self.laws, self.lm, self._proposer, self._unit = laws, runtime, proposer, unit
        self.constraint, self.potential, self._twist = constraint, potential, twist
        self.ends, self.eos_token_id, self._byte_vocab = ends, eos_token_id, runtime.byte_vocab
        self.has_exact_weights = not is_asked or proposal == "mask"
        self._rejection = proposal if isinstance(proposal, AWRS) else AWRS()

    def __getstate__(self) -> dict[str, Any]:
        """Return the parts that the runtime at the other end does not have."""
        return {k: v for k, v in vars(self).items() if k not in ("_start", "_byte_vocab")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start = None if self.constraint is None else self.constraint.start()
        self._byte_vocab = self.lm.byte_vocab

    def __repr__(self) -> str:
        what = {"constraint": self.constraint, "potential": self.potential, "twist": self._twist}
        given = "".join(f", {name}={each!r}" for name, each in what.items() if each is not None)
        tokens = " + ".join(f"{len(each.ids)} tokens" for each in self.laws)
        return f"TextModel({tokens}, max_tokens={self.max_tokens}{given})"

    @property
    def max_steps(self) -> int:
        """The most units of a text."""
        most = self._unit if isinstance(self._unit, int) else 1
        return -(-self.max_tokens // most)

    def start(self, prompt: tuple[int, ...] | None = None) -> TextTrace:
        """Return the empty text after the laws' prompts, or after other token ids."""
        return TextTrace(constraint_state=self._start, prompt=prompt)

    def text(self, trace: TextTrace) -> str:
        """Return the text as UTF-8; other bytes show as U+FFFD and their number."""
        return decoded(trace.generated.bytes)

    value = text

    async def extend(self, traces: Sequence[TextTrace], seed: int) -> list[TextTrace]:
        """Extend each text by a unit: one question to the proposing law for every token, and one to the
        target if another law proposes. Masks are computed meanwhile."""
        if (empty := await self.only_empty(traces)) is not None:
            return empty

        populations = self._populations(traces)
        block = await self._drawn_block(traces, populations, seed)

        async def draw(populations: Any, places: Any, growing: Any, number: int) -> Draws:
            if block:
                return [block[place][number - 1] for place in places]
            own = seed if number == 1 else step_seed(seed, number)
            return await self._draw(populations, places, growing, own)

        return await self._unit_longer(traces, populations, draw, is_appended=bool(block))

    async def _drawn_block(
        self, traces: Sequence[TextTrace], populations: Sequence[Population], seed: int
    ) -> list[Draws]:
        """Return the tokens of a unit of each text in one question to a law that proposes, which appends
        them; ``[]`` if a token decides about the next: by a mask, or by the end of a longer unit."""
        law, unit = self._proposer, self._unit
        if law is None or self._start is not None or not isinstance(unit, int) or unit == 1:
            return []
        most = law.lm.max_model_len - int(populations[0].lengths.max()) + 1
        length = min(unit, self.max_tokens - min(each.count for each in traces))
        if length > most:
            return []
        found = await populations[0].draw_block(length, temperature=law.temperature, seed=seed)
        columns = zip(found.token_ids.tolist(), found.logprobs.tolist(), strict=True)
        return [[(token, 0.0, logq) for token, logq in zip(*own, strict=True)] for own in columns]

    async def follow(
        self, traces: Sequence[TextTrace], tokens: Sequence[Sequence[int]]
    ) -> list[TextTrace]:
        """Return the texts extended by these tokens, end tokens included, with the weights that the same
        tokens have if they are drawn. A text dies if the model cannot draw them, or if they stop inside a
        unit. Without a constraint this is one score of all tokens; with one, each token needs a row and a
        mask.

        Raises:
            InvalidRequest: the model draws by rejection, which estimates its weights.
        """
        if not self.has_exact_weights:
            raise InvalidRequest('rejection estimates the weights of tokens: give proposal="mask"')
        if (empty := await self.only_empty(traces)) is not None:
            return empty
        law = self.laws[0] if self._proposer is None else self._proposer
        is_scored = self._start is None and (len(self.laws) == 1 or law is self._proposer)
        is_scored &= law.power == 1
        scores: Sequence[Any] = tokens
        if is_scored:
            found = await law.population(traces).score(tokens, temperature=law.temperature)
            scores = [each.tolist() for each in found]
        queues = [deque(zip(*pair, strict=True)) for pair in zip(tokens, scores, strict=True)]
        new, take = [*traces], self._begun  # the next step of the texts has the other sequences
        while places := [i for i, each in enumerate(new) if each.is_open and queues[i]]:

            async def draw(populations: Any, at: Any, growing: Any, number: int) -> Draws:
                own = [queues[places[i]] for i in at]
                known = [each.popleft() if each else (DEAD, -math.inf) for each in own]
                drawn = [(token, 0.0, score) for token, score in known]
                if not is_scored:
                    rows = await self._log_weights(populations, at, growing)
                    masses = np.logaddexp.reduce(rows, axis=1).tolist()
                    drawn = [
                        (token, mass, float(row[token]) - mass)
                        for (token, _), mass, row in zip(known, masses, rows, strict=True)
                    ]
                return [each if each[2] > -math.inf else NO_TOKEN for each in drawn]

            growing = [new[place] for place in places]
            populations = [] if is_scored and self._proposer is None else take(growing)
            longer = await self._unit_longer(growing, populations, draw)
            take = self._populations
            for place, trace in zip(places, longer, strict=True):
                new[place] = trace
        for trace, queue in zip(new, queues, strict=True):
            if trace.finished and queue:
                trace.log_weight = -math.inf
        return new

    async def only_empty(self, traces: Sequence[TextTrace]) -> list[TextTrace] | None:
        """Return the texts at their end if the empty text is the model's only one; else ``None``."""
        start = self._start if self.ends.never and not traces[0].count else None
        if start is None or not self._is_complete(start):
            return None
        ended = [TextTrace(each, constraint_state=start) for each in traces]
        await self._end(ended)
        await self._judge(ended)
        return ended

    async def next_log_weights(self, traces: Sequence[TextTrace]) -> Floats:
        """Return the log-weights of the tokens that may follow each text, by the laws of the target and
        the constraint: float64 ``[n, V]``. One stop token has the weight of all of them. Raises
        InvalidRequest if another law proposes."""
        if self._proposer is not None:
            raise InvalidRequest("a search weighs all tokens by the target: leave the proposal out")
        populations = self._begun(traces)
        rows = await self._log_weights(populations, range(len(traces)), traces)
        if len(self.ends.token_ids) > 1:
            first, *others = sorted(self.ends.token_ids)
            rows[:, first] = np.logaddexp.reduce(rows[:, [first, *others]], axis=1)
            rows[:, others] = -math.inf
        return rows

    async def longer(
        self, traces: Sequence[TextTrace], drawn: list[tuple[int, float, float]]
    ) -> list[TextTrace]:
        """Return the texts with one more token each, a unit: token, log mass, and log q."""
        new = await self._token_longer(traces, drawn)
        await self._judge(new)
        return new

    async def _unit_longer(
        self,
        traces: Sequence[TextTrace],
        populations: Sequence[Population],
        draw: Callable[[Any, Any, Any, int], Awaitable[Draws]],
        *,
        is_appended: bool = False,
    ) -> list[TextTrace]:
        """Extend each text by a unit, whose tokens ``draw`` returns: after these texts, at these places
        of the populations, the numbered token of the unit. Its weight is that of the target. With
        ``is_appended`` the drawing population has the tokens."""
        drawing = populations if self._proposer is None else populations[:1]
        new, going = [*traces], [*range(len(traces))]
        for number in count(1):
            growing = [new[place] for place in going]
            drawn = await draw(drawing, going, growing, number)
            longer = await self._token_longer(growing, drawn)
            for place, trace in zip(going, longer, strict=True):
                new[place] = trace
            last = np.full(len(new), -1)
            for place in going:
                last[place] = new[place].tokens[-1] if new[place].is_open else -1
            for each in () if is_appended else drawing:
                each.append(last)
            going = self._inside(traces, new, going, number)
            if not going:
                break
        if number > 1:
            new = [_joined(*pair) for pair in zip(traces, new, strict=True)]
        if self._proposer is not None:
            await self._weigh(new, populations[1:])
        await self._judge(new)
        kept = [[*populations]]
        for place, trace in enumerate(new):
            if trace.is_open:
                trace.populations, trace.place = kept, place
        return new

    def _inside(
        self, before: Sequence[TextTrace], new: Sequence[TextTrace], going: list[int], number: int
    ) -> list[int]:
        """Return the places of the texts that are inside a unit after its token ``number``."""
        if self._unit == number:
            return []
        alive = [i for i in going if new[i].is_open]
        if isinstance(self._unit, int):
            return alive
        if isinstance(self._unit, str):
            end = self._unit.encode()
            return [i for i in alive if end not in _joined(before[i], new[i]).data]
        return [i for i in alive if not self._unit(new[i].generated)]

    def _populations(self, traces: Sequence[TextTrace]) -> list[Population]:
        """Return the sequences of these texts after each law's prompt, the proposing law's first: those
        from the step before, if all texts come from it and no other step took them."""
        kept = traces[0].populations
        if kept is not None and all(each.populations is kept for each in traces):
            with contextlib.suppress(IndexError):
                populations = kept.pop()
                places = [each.place for each in traces]
                if places != list(range(len(populations[0]))):
                    for each in populations:
                        each.resample(places)
                return populations
        return self._begun(traces)

    def _begun(self, traces: Sequence[TextTrace]) -> list[Population]:
        """Return new sequences of these texts, for each law."""
        return [law.population(traces) for law in (*filter(None, [self._proposer]), *self.laws)]

    async def _draw(
        self,
        populations: Sequence[Population],
        places: Sequence[int],
        traces: Sequence[TextTrace],
        seed: int,
    ) -> Draws:
        """Draw a token after each text, in one question to each law; masks are computed meanwhile."""
        laws = self._drawing_laws
        where = _flags(places, len(populations[0]))
        if not self.has_exact_weights:
            rows = await gather_all([each.logprobs(where=where) for each in populations])
            return await self._draw_by_rejection(rows, traces, seed)
        law, is_one = laws[0], len(laws) == 1 and laws[0].power == 1
        # Without a mask, or if another law's draws are weighed, the mass is not needed.
        has_mass = self._start is not None and self._proposer is None
        is_plain = is_one and (law.temperature == 1 or not has_mass)
        if is_plain or are_drawn_together(laws):
            found = await draw_texts(
                populations,
                () if is_plain else tuple([(each.temperature, each.power) for each in laws]),
                temperature=law.temperature if is_plain else 1.0,
                masks=_spread(await self._masks(traces), where),
                seed=seed,
                where=where,
            )
            if where is not None:
                found = found._replace(**{k: v[where] for k, v in found._asdict().items()})
        else:
            rows, masks = await self._rows(populations, places, traces)
            seeds = seeds_at(seed, np.array(places))
            found = await asyncio.to_thread(_draw_from_product, laws, rows, masks, seeds)
        token_ids, logprobs, log_masses = (each.tolist() for each in found)
        if not is_one:
            check_finite(log_masses)
        if is_one and not has_mass:
            log_masses = [0.0] * len(token_ids)
        return [*zip(token_ids, log_masses, logprobs, strict=True)]

    @property
    def _drawing_laws(self) -> tuple[Law, ...]:
        """The laws whose rows tokens are drawn from."""
        return self.laws if self._proposer is None else (self._proposer,)

    async def _rows(
        self, populations: Sequence[Population], places: Sequence[int], traces: Sequence[TextTrace]
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the rows of each population after these texts, and the texts' masks."""
        where = _flags(places, len(populations[0]))
        asked = [each.logprobs(where=where) for each in populations]
        *rows, masks = await gather_all([*asked, self._masks(traces)])
        return cast("list[Tensor]", rows), masks

    async def _log_weights(
        self, populations: Sequence[Population], places: Sequence[int], traces: Sequence[TextTrace]
    ) -> Floats:
        """Return the log-weights of the tokens after each text by the drawing laws, float64 ``[n, V]``:
        -inf outside of the mask."""
        rows, masks = await self._rows(populations, places, traces)

        def weigh() -> Floats:
            found: Floats = product_of_rows(self._drawing_laws, rows).cpu().double().numpy()
            if masks is not None:
                allowed = unpacked(masks.numpy().view(np.uint32), found.shape[1])
                found[~allowed.numpy()] = -math.inf
            check_finite(found)
            return found

        return await asyncio.to_thread(weigh)

    async def _masks(self, traces: Sequence[TextTrace]) -> Tensor | None:
        """Return the packed masks of the allowed tokens, int32 ``[n, ceil(V / 32)]``; at the last token,
        only the end. ``None`` without a constraint."""
        if self._start is None:
            return None
        masks = await abitmasks([each.constraint_state for each in traces])
        stops = _packed_tokens(self.ends.token_ids, masks.shape[1])
        if self.ends.token_ids != {self.eos_token_id}:
            end = _packed_tokens({self.eos_token_id}, masks.shape[1])
            may_end = (masks & end).any(dim=1)
            masks &= ~(end | stops)
            masks[may_end] |= stops
        if self.ends.token_ids:
            masks[torch.tensor([each.count + 1 >= self.max_tokens for each in traces])] &= stops
        return masks

    async def _draw_by_rejection(
        self, rows: Sequence[Tensor], traces: Sequence[TextTrace], seed: int
    ) -> Draws:
        states: list[CheckedState] = [each.constraint_state for each in traces]
        weights, endings = await asyncio.to_thread(self._weights, rows, traces)
        rngs = [*map(np.random.default_rng, np.random.SeedSequence(seed).spawn(len(states)))]
        found = await gather_all(
            draw_allowed(row, state.check, rng, self._rejection)
            for row, state, rng in zip(weights, states, rngs, strict=True)
        )
        drawn = []
        for place, (token_id, log_mass) in enumerate(found):
            weight = weights[place, token_id]
            if self._proposer is not None and self.ends.token_ids and token_id == self.eos_token_id:
                # Choose one of the stop tokens, because the weighing model needs its probability.
                stop = int(rngs[place].choice(len(endings[place]), p=endings[place] / weight))
                token_id, weight = sorted(self.ends.token_ids)[stop], endings[place, stop]
            logprob = math.log(weight) - log_mass if token_id != DEAD else 0.0
            drawn.append((token_id, log_mass, logprob))
        return drawn

    def _weights(
        self, rows: Sequence[Tensor], traces: Sequence[TextTrace]
    ) -> tuple[Floats, Floats]:
        """Return the tokens' weights ``[n, V]``, 0 where the constraint is not checked, with the sum of
        all stop tokens at the end token; and the weight of each stop token, in order."""
        log_weights = product_of_rows(self._drawing_laws, rows).cpu().double()
        check_finite(log_weights.numpy())
        weights: Floats = log_weights.exp().numpy()
        distinct = {id(each.constraint_state): each.constraint_state for each in traces}
        allowed = {key: state.mask().cpu().numpy() for key, state in distinct.items()}
        stops = sorted(self.ends.token_ids)
        endings = weights[:, stops]
        for row, ending, trace in zip(weights, endings.sum(axis=1), traces, strict=True):
            row[stops] = 0.0
            # The end token stands for all stop tokens in the check of the constraint.
            row[self.eos_token_id] = ending
            row[~allowed[id(trace.constraint_state)]] = 0.0
            if stops and trace.count + 1 >= self.max_tokens:
                row[np.arange(len(row)) != self.eos_token_id] = 0.0
        return weights, endings

    async def _weigh(self, traces: Sequence[TextTrace], populations: Sequence[Population]) -> None:
        """Weigh each text's last unit by the target: one question to each law."""
        tokens = [each.tokens if each.log_weight > -math.inf else () for each in traces]
        asked = zip(self.laws, populations, strict=True)
        found = await gather_all(
            [each.advance(tokens, temperature=law.temperature) for law, each in asked]
        )
        for place, trace in enumerate(traces):
            if trace.log_weight > -math.inf:
                sums = [math.fsum(scores[place].tolist()) for scores in found]
                trace.log_weight = product_of_sums(self.laws, sums) - trace.log_proposal

    async def _token_longer(self, traces: Sequence[TextTrace], drawn: Draws) -> list[TextTrace]:
        """Return the texts with these tokens, and the constraint's states after them. Without a stop,
        texts after which no token may follow end."""
        token_ids = [token_id for token_id, _, _ in drawn]
        if not self.has_exact_weights and self.ends.token_ids and self._proposer is None:
            # A rejection does not tell which stop token, so it is one for all.
            stop, end = min(self.ends.token_ids), self.eos_token_id
            token_ids = [stop if each == end else each for each in token_ids]
        states = [each.constraint_state for each in traces]
        may_be_complete = self._start is not None and self.ends.never

        def grow() -> tuple[list[TextTrace], list[TextTrace]]:
            after = states if self._start is None else self._advanced(states, token_ids)
            new = self._traces(traces, zip(token_ids, drawn, after, strict=True))
            alive = [each for each in new if may_be_complete and each.log_weight > -math.inf]
            return new, [
                each
                for each in alive
                if each.count >= self.max_tokens or self._is_complete(each.constraint_state)
            ]

        # Strings are looked for in texts that are put together.
        is_quick = not self.ends.strings and not may_be_complete
        if is_quick and (self._start is None or are_quick(states)):
            return grow()[0]
        new, complete = await asyncio.to_thread(grow)
        await self._end(complete)
        return new

    def _advanced(
        self, states: Sequence[State | None], token_ids: Sequence[int]
    ) -> list[State | None]:
        """Return the states after these tokens, with their masks; a state at an end stays."""
        # Equal prefixes share their constraint's state, and so its mask.
        keys = [*zip(map(id, states), token_ids, strict=True)]
        ends = self.ends.token_ids | {DEAD}
        after = {
            key: state if state is None or key[1] in ends else state.advance(key[1])
            for key, state in dict(zip(keys, states, strict=True)).items()
        }
        # The next step's masks; one that is too complex is an error for the step that asks for it.
        with contextlib.suppress(InvalidConstraint):
            fill(state for state in after.values() if state is not None)
        return [after[key] for key in keys]

    def _traces(self, traces: Sequence[TextTrace], drawn: Iterable[Any]) -> list[TextTrace]:
        """Return the texts with these tokens, draws and states; a token may end them, as ``max_tokens``
        may without a constraint."""
        longest = self.max_tokens - 1 if self._start is None else math.inf
        new = []
        for trace, (token_id, (_, log_mass, logprob), state) in zip(traces, drawn, strict=True):
            if token_id == DEAD:
                new.append(TextTrace(trace, constraint_state=state, log_weight=-math.inf))
                continue
            is_end = token_id in self.ends.token_ids
            text = None if is_end else self._cut_at_string(trace, token_id)
            longer = TextTrace(
                trace,
                (token_id,),
                b"" if is_end else self._byte_vocab[token_id],
                constraint_state=state,
                log_weight=log_mass,
                log_proposal=logprob,
                finished=is_end or text is not None or trace.count >= longest,
                is_end=is_end,
                text=text,
            )
            new.append(longer)
        return new

    def _cut_at_string(self, trace: TextTrace, token_id: int) -> Text | None:
        """Return the text before the string that this token completes; ``None`` if it completes none."""
        if not self.ends.strings:
            return None
        token_ids, new = (*trace.token_ids, token_id), self._byte_vocab[token_id]
        data = trace.generated.bytes + new
        if (cut := self.ends.cut(data, len(new))) is None:
            return None
        starts = accumulate((len(self._byte_vocab[each]) for each in token_ids), initial=0)
        kept = [each for each, start in zip(token_ids, starts, strict=False) if start < cut]
        return Text(kept, data[:cut], finished=True)

    def _is_complete(self, state: State) -> bool:
        """Return whether the constraint allows at most the end."""
        words = words_of(state)[0]
        return not (words & ~_packed_tokens({self.eos_token_id}, len(words)).numpy()).any()

    async def _end(self, traces: Sequence[TextTrace]) -> None:
        """Finish complete texts; a text that the constraint does not accept is dead."""
        states = {id(each.constraint_state): each.constraint_state for each in traces}
        answers = await gather_all([self._accepts(state) for state in states.values()])
        accepts = dict(zip(states, answers, strict=True))
        for trace in traces:
            trace.finished = accepts[id(trace.constraint_state)]
            if not trace.finished:
                trace.log_weight = -math.inf

    async def _accepts(self, state: State) -> bool:
        if isinstance(state, CheckedState):
            return (await state.check([cast("int", self.eos_token_id)]))[0]
        return state.accepting

    async def _judge(self, traces: Sequence[TextTrace]) -> None:
        """Weigh texts that are finished now by the potential, and the others by the twist."""
        if self.potential is None and self._twist is None:
            return
        alive = [each for each in traces if each.log_weight > -math.inf]
        for name, function, finished in (
            ("potential", self.potential, True),
            ("twist", self._twist, False),
        ):
            judged = [each for each in alive if each.finished == finished]
            values = [0.0] * len(judged)
            if function is not None and judged:
                texts = [each.generated for each in judged]
                values = await checks.evaluate_potential(name, function, texts)
            for trace, value in zip(judged, values, strict=True):
                trace.log_weight += value if finished else 0.0
                trace.log_twist = 0.0 if finished else value


def _flags(places: Sequence[int], count: int) -> Any:
    """Return which of ``count`` sequences are at these places; ``None`` for all of them."""
    if len(places) == count:
        return None
    where = np.zeros(count, np.bool_)
    where[[*places]] = True
    return where


def _joined(before: TextTrace, last: TextTrace) -> TextTrace:
    """Return the tokens after ``before`` as one unit."""
    parts = last.path()[before.units :]
    if len(parts) == 1:
        return last
    tokens = tuple([each for part in parts for each in part.tokens])
    return TextTrace(
        before,
        tokens,
        b"".join([part.data for part in parts]),
        constraint_state=last.constraint_state,
        log_weight=sum(part.log_weight for part in parts),
        log_proposal=sum(part.log_proposal for part in parts),
        finished=last.finished,
        is_end=before.count + len(tokens) > last.count,
        text=last._text,
    )


def _spread(masks: Tensor | None, where: Any) -> Tensor | None:
    """Return masks of the sequences at these places as masks of all."""
    if masks is None or where is None:
        return masks
    whole = torch.zeros(len(where), masks.shape[1], dtype=masks.dtype)
    whole[torch.from_numpy(where)] = masks
    return whole


def _draw_from_product(
    laws: Sequence[Law], rows: Sequence[Tensor], masks: Tensor | None, seeds: Any
) -> sampling.BatchDraw:
    """Draw from the product of laws under masks; a mass is the sum of all allowed weights."""
    mask = None if masks is None else masks.view(torch.uint8)
    uniforms = sampling.seeded_uniforms(seeds)
    return sampling.draw(product_of_rows(laws, rows), mask=mask, uniforms=uniforms)


def _packed_tokens(token_ids: Iterable[int | None], count: int) -> Tensor:
    """Return a packed mask that allows these tokens, int32 ``[count]``."""
    words = np.zeros(count, np.int32)
    set_bits(words, [each for each in token_ids if each is not None], True)
    return torch.from_numpy(words)


def checked_text_model(model: Any) -> TextModel:
    """Return the model. Raises InvalidRequest if it is not a TextModel."""
    if not isinstance(model, TextModel):
        raise InvalidRequest(f"the model is a {type(model).__name__}: give a TextModel")
    return model


def _proposal_law(law: Law, proposal: Any) -> Law | None:
    """Return the law that proposes, ``None`` if the target does. Raises InvalidRequest otherwise."""
    is_name = isinstance(proposal, str) and proposal in ("mask", "awrs")
    if proposal is None or is_name or isinstance(proposal, AWRS):
        return None
    if isinstance(proposal, AsyncLM):
        proposal = Law(proposal, law.prompt, temperature=law.temperature)
    if not isinstance(proposal, Law):
        raise InvalidRequest(
            f'proposal is {named(proposal)}: give "mask" or "awrs", or a law or a runtime'
        )
    if proposal.power != 1:
        raise InvalidRequest("a proposal has power 1: give a temperature instead")
    law.check_vocabulary(proposal, "the proposal")
    return proposal
