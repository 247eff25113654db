r"""The language model's law of a text after a prompt, constrained and weighted, as a model of particles.

The base law p is the language model's own, token by token, ended by the end token or cut at
``max_tokens`` tokens, the end token included. With a constraint C and a potential phi the target is

    pi(x) = p(x) 1[x in C] exp(phi(x)) / Z,        Z = E_p[1[x in C] exp(phi(x))].

Z is the evidence. With a constraint a text must end by the end token within ``max_tokens`` to be in C;
without one, a cut text is an outcome like any other. Without constraint and potential Z = 1.

A particle's next token is drawn from the row p(. | text) restricted to the tokens A(text) that the
constraint allows, and its weight gains the mass of A under the row:

    q(x) = p(x) 1[x in A] / p(A),        w <- w p(x) / q(x) = w p(A).

``stop`` decides how a text ends. By tokens: p(x) is the product of its tokens' probabilities, times that
of all stop tokens together at its end. By strings: tokens are drawn until they spell one; p(x) is the
probability of all drawn tokens, and the text is the part before the string, which may begin inside a
token. Without a stop (``stop=None``): a text has ``max_tokens`` tokens, or fewer if the constraint allows
no more, and p(x) is the product of its tokens' probabilities, the probability that the model continues
with x. No such text begins with another, so Z is a probability here, too.

At the last token only the end token completes a constrained text, so A is the end token alone. A text
with p(A) = 0 is dead: its weight is 0. For a constraint that judges tokens slowly, adaptive weighted
rejection draws from the same q and gains an unbiased estimate of p(A) (``genrt.inference.awrs``).

Another model d of the same vocabulary may propose. It draws tokens under the constraint, one a step, and
the target does not change: the weight of a token is

    w <- w p(x) / q(x),        q(x) = d(x) 1[x in A] / d(A),

with p and d tempered alike, and d(A) replaced by its estimate under rejection. d must be able to write
every text that the model can write, as any softmax can. The model scores a block of ``block`` tokens of
all texts in one question. A text that ends inside a block finishes when the block is complete; until then
its log-weight is that before the block. These are the weights of importance sampling; Chen et al. (2023),
*Accelerating large language model decoding with speculative sampling*, accept or reject such blocks.

A twist psi guides particles while they grow and does not change the target: a text of t tokens has gained
psi(x_1:t), which its next token replaces, and phi at its end:

    w <- w exp(psi(x_1:t) - psi(x_1:t-1)),    at the end    w <- w exp(phi(x) - psi(x_1:t-1)).

A twist pays if psi predicts phi, or the mass that the constraint will take. A particle with psi = -inf
dies, so phi must be -inf for all its continuations.

Lew et al. (2023), *Sequential Monte Carlo steering of large language models using probabilistic
programs*. Zhao, Brekelmans, Makhzani & Grosse (2024), *Probabilistic inference in language models via
twisted sequential Monte Carlo*.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from genrt.constraints import CheckedState, Constraint, ConstraintState, abitmasks
from genrt.constraints.products import are_quick, fill
from genrt.constraints.protocols import words_of
from genrt.errors import ContextTooLong, InvalidConstraint, InvalidRequest
from genrt.inference import awrs, checks
from genrt.inference.model import DEAD, Growth
from genrt.inference.resampling import Floats
from genrt.inference.texts import END_TOKEN, Ends, Stop, Trail, parse_stop
from genrt.lm import AsyncLM
from genrt.numbers import check_int, displayed
from genrt.populations import Population
from genrt.questions.arguments import seeds_at
from genrt.runtime.concurrency import gather_all
from genrt.tokens import sampling
from genrt.tokens.texts import Potential, Text, decoded

State: TypeAlias = ConstraintState | CheckedState

Proposal: TypeAlias = Literal["mask", "awrs"] | AsyncLM
"""How a ``TextModel`` draws: under masks, by rejection, or from another model."""


class ProposedTokens(NamedTuple):
    """Tokens that were drawn, one after each text.

    Attributes:
        token_ids: each is a token, or ``DEAD``.
        log_masses: the logarithms of the allowed masses, or of unbiased estimates.
        logprobs: log q of the drawn tokens, for another model's proposals; under rejection log(q / w) for
            an estimate w of the mass, so that p / q stays unbiased.
    """

    token_ids: list[int]
    log_masses: list[float]
    logprobs: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The tokens of one text that are not weighed yet.

    Attributes:
        before: the text without them.
        token_ids: the tokens, with a stop token.
        logprob: the log-probability with which all were drawn.
        steps: the steps since its beginning; more than its tokens if the text has ended.
    """

    before: Trail
    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TextParticle:
    """One text as it grows.

    Attributes:
        trail: the text, and its place in a population.
        constraint_state: the constraint's state after it, ``None`` without a constraint.
        log_twist: the part of its log-weight that is a twist's.
        block: its tokens that are not weighed yet, if another model proposes.
    """

    trail: Trail
    constraint_state: State | None
    log_twist: float = 0.0
    block: Block | None = None

    @classmethod
    def of(cls, text: Text) -> Self:
        """Return the particle of a text, without a constraint's state."""
        return cls(Trail.of(text), None)

    @property
    def generated(self) -> Text:
        """The text, without the prompt and without the end token."""
        return self.trail.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens, without the end token."""
        return self.trail.text.token_ids

    @property
    def finished(self) -> bool:
        """True once its end was drawn, or at ``max_tokens`` where a text may be cut, and weighed."""
        return self.trail.finished and self.block is None


class TextModel:
    """A language model's texts after a prompt, under a constraint, weighted by a potential.

    Many algorithms may run one model at once. Equal prefixes share one row, one mask and one call of a
    potential in every step.

    Attributes:
        lm: the runtime.
        prompt: the prompt's token ids.
        constraint: the texts that count.
        potential: the log-weights of finished texts.
        temperature: the temperature of the rows.
        adapter: the name of the adapter.
        eos_token_id: the model's own end token.
        ends: the ways in which a text ends.
        max_steps: ``max_tokens``: a step draws one token of every text.
    """

    lm: AsyncLM
    prompt: tuple[int, ...]
    constraint: Constraint | None
    potential: Potential | None
    temperature: float
    adapter: str | None
    eos_token_id: int | None
    ends: Ends
    max_steps: int

    def __init__(
        self,
        lm: AsyncLM,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        stop: Stop = END_TOKEN,
        constraint: Constraint | None = None,
        potential: Potential | None = None,
        twist: Potential | None = None,
        proposal: Proposal | None = None,
        block: int | None = None,
        proposal_adapter: str | None = None,
        temperature: float = 1.0,
        adapter: str | None = None,
    ) -> None:
        """
        Args:
            prompt: a text, or token ids.
            max_tokens: the longest text, in tokens with its end token; at least 1.
            stop: the end of a text, and not part of it: ``END_TOKEN``, token ids, strings, or several of
                these. With ``None`` a text ends at ``max_tokens``, or where its constraint allows no
                more; this is for a text in the middle of a longer one. Strings cannot be combined with a
                constraint.
            constraint: the texts that count; see ``genrt.constraints``.
            potential: log-weights of finished texts, in the target and in the evidence.
            twist: log-weights of prefixes, which guide resampling and do not change the target. It may be
                the potential itself, if that is meaningful for prefixes.
            proposal: how to draw under a constraint. ``"mask"`` checks every token, ``"awrs"`` few. The
                default is ``"awrs"`` for predicates and products with them. Or another runtime of the
                same vocabulary, of a smaller model, which draws the tokens that this one weighs.
            block: the tokens that another runtime draws before one question weighs them; 8 by default.
                Twists and resampling see their weights then.
            proposal_adapter: the adapter of another runtime's draws, by name.
            temperature: above 0. Target and evidence are those of the model with tempered rows.

        Raises:
            InvalidRequest: an argument is out of its range.
            ContextTooLong: prompt and text exceed ``lm.max_model_len``.
            UnknownAdapter: from the first step on.
        """
        ids = checks.prompt_ids(checks.check_runtime(lm), prompt)
        max_tokens = check_int("max_tokens", max_tokens, 1, 2**31)
        temperature = checks.check_temperature(temperature)
        if not isinstance(proposal, AsyncLM) and (
            not isinstance(proposal, str | None) or proposal not in (None, "mask", "awrs")
        ):
            raise InvalidRequest(
                f'proposal is {displayed(proposal)}: give "mask" or "awrs", or a runtime'
            )
        for name, function in {"the potential": potential, "the twist": twist}.items():
            checks.check_callable(name, function, "a function of a Text", optional=True)
        longest = len(ids) + max_tokens - 1
        if longest > lm.max_model_len:
            raise ContextTooLong(
                f"a prompt of {len(ids)} tokens and a text of {max_tokens} need a context of {longest}, "
                f"and the model's is {lm.max_model_len}: shorten one of them"
            )
        eos_token_id: int | None = getattr(lm.tokenizer, "eos_token_id", None)
        if constraint is not None and eos_token_id is None:
            raise InvalidRequest(
                "a constrained text ends with the end token, and the model's tokenizer names none: "
                "set its eos_token_id"
            )
        ends = parse_stop(stop, eos_token_id=eos_token_id, vocab_size=lm.vocab_size)
        if constraint is not None and ends.strings:
            raise InvalidRequest(
                "stop has strings, which may begin inside of a token, where no constraint can tell: put "
                "the string into the constraint, as in regex(r'[^\\n]*\\n', lm), and give stop=None"
            )
        self._start = None if constraint is None else checks.constraint_start(lm, constraint)
        is_asked = isinstance(self._start, CheckedState)
        if proposal == "awrs" and self._start is not None and not is_asked:
            raise InvalidRequest(
                'proposal="awrs" is for constraints that are asked token by token, such as predicate; '
                "this one has masks: leave the proposal out"
            )
        self._block = _block_size(lm, proposal, block, proposal_adapter, longest)
        self.lm, self.prompt, self.adapter = lm, ids, checks.adapter_name(adapter)
        self.constraint, self.potential, self._twist = constraint, potential, twist
        self.max_steps, self.temperature, self.ends = max_tokens, temperature, ends
        self.eos_token_id, self._byte_vocab = eos_token_id, lm.byte_vocab
        self._proposer, self._proposer_adapter = lm, self.adapter
        if isinstance(proposal, AsyncLM):
            self._proposer, self._proposer_adapter = proposal, checks.adapter_name(proposal_adapter)
        self._rejects = is_asked and proposal != "mask"
        """Whether tokens are drawn by rejection."""

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
        return f"TextModel({len(self.prompt)} tokens, max_tokens={self.max_steps}{given})"

    def start(self) -> TextParticle:
        """Return the empty text."""
        return TextParticle(Trail.of(Text()), self._start)

    def text(self, particle: TextParticle) -> str:
        """Return the text as UTF-8; other bytes show as U+FFFD and their number."""
        return decoded(particle.generated.bytes)

    def value(self, particle: TextParticle) -> str:
        """Return the text, as ``text`` does."""
        return self.text(particle)

    def extended(self, text: Text, token_id: int) -> Text:
        """Return the text after one more token, which may end it, as ``max_tokens`` may."""
        if token_id in self.ends.token_ids:
            return Text(text.token_ids, text.bytes, finished=True)
        token_ids, new = (*text.token_ids, token_id), self._byte_vocab[token_id]
        data = text.bytes + new
        if self.ends.strings and (cut := self.ends.cut(data, len(new))) is not None:
            starts = accumulate((len(self._byte_vocab[each]) for each in token_ids), initial=0)
            kept = [each for each, start in zip(token_ids, starts, strict=False) if start < cut]
            return Text(kept, data[:cut], finished=True)
        return Text(token_ids, data, self._start is None and len(token_ids) >= self.max_steps)

    async def grow(self, particles: Sequence[TextParticle], seed: int) -> list[Growth]:
        """Grow each text by one token, in one question to the proposing model; masks are computed
        meanwhile. If it is another model, this one weighs complete blocks in one question."""
        start = self._start if self.ends.never and not particles[0].trail.count else None
        if start is not None and self._is_complete(start):
            # The empty text is the only one.
            nothing = [Growth(each, 0.0, DEAD) for each in particles]
            return await self._judged(particles, await self._ended(nothing, [True] * len(nothing)))
        if self._block is None:
            return await self._judged(particles, (await self._one_longer(particles, seed))[1])
        going = [place for place, each in enumerate(particles) if not each.trail.finished]
        grown = [Growth(each, 0.0, DEAD) for each in particles]
        steps: dict[int, tuple[tuple[int, ...], float]] = {}
        if going:
            drawn, longer = await self._one_longer([particles[place] for place in going], seed)
            own = zip(drawn.token_ids, drawn.logprobs, strict=True)
            for place, (token_id, logprob), growth in zip(going, own, longer, strict=True):
                steps[place], grown[place] = ((token_id,), logprob), growth
        over: dict[int, Block] = {}
        for place, (particle, growth) in enumerate(zip(particles, grown, strict=True)):
            if growth.log_weight == -math.inf:
                continue
            old = particle.block or Block(particle.trail)
            token_ids, logprob = steps.get(place, ((), 0.0))
            block = Block(
                old.before, old.token_ids + token_ids, old.logprob + logprob, old.steps + 1
            )
            is_over = block.steps == min(self._block, self.max_steps - block.before.count)
            if is_over:
                over[place] = block
            own_block = None if is_over else block
            waiting = replace(growth.particle, block=own_block, log_twist=particle.log_twist)
            grown[place] = growth._replace(log_weight=0.0, particle=waiting)
        if over:
            gained = zip(over, await self._block_weights([*over.values()]), strict=True)
            weighed = [grown[place]._replace(log_weight=gain) for place, gain in gained]
            found = await self._judged([particles[place] for place in over], weighed)
            for place, growth in zip(over, found, strict=True):
                grown[place] = growth
        return grown

    async def _one_longer(
        self, particles: Sequence[TextParticle], seed: int
    ) -> tuple[ProposedTokens, list[Growth]]:
        """Draw a token after each text; return the tokens, and the texts, which gain the masses."""
        trails = [particle.trail for particle in particles]
        states = [particle.constraint_state for particle in particles]
        population = self._population(trails)
        drawn = await self._draw(population, trails, states, seed)
        grown = await self._grown(particles, drawn, [population])
        if self._start is not None and self.ends.never:
            grown = await self._ended(grown, await asyncio.to_thread(self._complete, grown))
        return drawn, grown

    def _population(self, trails: Sequence[Trail]) -> Population:
        """Return the population of these texts after the prompt: the previous one, extended, if all texts
        are from it and it was not taken."""
        frontier, lm, adapter = trails[0].frontier, self._proposer, self._proposer_adapter
        if frontier is not None and all(each.frontier is frontier for each in trails):
            with contextlib.suppress(IndexError):
                population = frontier.pop()
                numbers = [each.number for each in trails]
                if numbers != list(range(len(population))):
                    population.resample(numbers)
                population.append([each.token_id for each in trails])
                return population
        if not any(each.count for each in trails):
            return lm.population(self.prompt, len(trails), adapter=adapter)
        contexts = [self.prompt + each.text.token_ids for each in trails]
        return lm.population(contexts, adapter=adapter)

    async def _draw(
        self,
        population: Population,
        trails: Sequence[Trail],
        states: Sequence[State | None],
        seed: int,
    ) -> ProposedTokens:
        """Draw a token after each text of a population, in one question to the model; masks are computed
        meanwhile. ``states`` are the constraint's."""
        at_last = [each.count + 1 >= self.max_steps for each in trails]
        if self._rejects:
            rows = await population.logprobs()
            checked = cast("Sequence[CheckedState]", states)
            return await self._draw_by_rejection(rows, checked, at_last, seed)
        if self.temperature != 1 and self._block is None:
            rows, masks = await asyncio.gather(population.logprobs(), self._masks(states, at_last))
            found = await asyncio.to_thread(self._draw_tempered, rows, masks, seed)
        else:
            masks = await self._masks(states, at_last)
            found = await population.draw(masks=masks, temperature=self.temperature, seed=seed)
        log_masses = [0.0] * len(trails) if masks is None else found.log_mass.tolist()
        return ProposedTokens(found.token_ids.tolist(), log_masses, found.logprobs.tolist())

    async def _masks(
        self, states: Sequence[State | None], at_last: Sequence[bool]
    ) -> Tensor | None:
        """Return the packed masks of the allowed tokens, int32 ``[n, ceil(V / 32)]``; at the last token,
        only the end. ``None`` without a constraint."""
        if self._start is None:
            return None
        masks = await abitmasks(cast("Sequence[State]", states))
        stops = _packed_tokens(self.ends.token_ids, masks.shape[1])
        if self.ends.token_ids != {self.eos_token_id}:
            end = _packed_tokens({self.eos_token_id}, masks.shape[1])
            may_end = (masks & end).any(dim=1)
            masks &= ~(end | stops)
            masks[may_end] |= stops
        if self.ends.token_ids and any(at_last):
            masks[torch.tensor(at_last)] &= stops
        return masks

    def _draw_tempered(self, rows: Tensor, masks: Tensor | None, seed: int) -> sampling.BatchDraw:
        """Draw from tempered rows under masks, with their masses, as ``batch_draw`` does from rows."""
        seeds = seeds_at(seed, np.arange(len(rows)))
        return sampling.draw(
            sampling.truncate(rows, temperature=self.temperature),
            mask=None if masks is None else masks.view(torch.uint8).to(rows.device),
            uniforms=sampling.seeded_uniforms(seeds).to(rows.device),
        )

    async def _draw_by_rejection(
        self, rows: Tensor, states: Sequence[CheckedState], at_last: Sequence[bool], seed: int
    ) -> ProposedTokens:
        weights, endings = await asyncio.to_thread(self._weights, rows, states, at_last)
        rngs = [*map(np.random.default_rng, np.random.SeedSequence(seed).spawn(len(states)))]
        found = await gather_all(
            awrs.draw_allowed(row, state.check, rng)
            for row, state, rng in zip(weights, states, rngs, strict=True)
        )
        drawn = []
        for place, (token_id, log_mass) in enumerate(found):
            weight = weights[place, token_id]
            if self._block is not None and self.ends.token_ids and token_id == self.eos_token_id:
                # Choose one of the stop tokens, because the weighing model needs its probability.
                stop = int(rngs[place].choice(len(endings[place]), p=endings[place] / weight))
                token_id, weight = sorted(self.ends.token_ids)[stop], endings[place, stop]
            logprob = math.log(weight) - log_mass if token_id != DEAD else -math.inf
            drawn.append((token_id, log_mass, logprob))
        return ProposedTokens(*map(list, zip(*drawn, strict=True)))

    def _weights(
        self, rows: Tensor, states: Sequence[CheckedState], at_last: Sequence[bool]
    ) -> tuple[Floats, Floats]:
        """Return the tokens' probabilities ``[n, V]``, 0 where the constraint is not checked, with
        the sum of all stop tokens at the end token; and the probability of each stop token, in order."""
        if self.temperature != 1:
            rows = sampling.truncate(rows, temperature=self.temperature)
        weights: Floats = rows.cpu().double().exp().numpy()
        distinct = {id(state): state for state in states}
        allowed = {key: state.mask().cpu().numpy() for key, state in distinct.items()}
        stops = sorted(self.ends.token_ids)
        endings = weights[:, stops]
        for row, state, is_last in zip(weights, states, at_last, strict=True):
            ending = row[stops].sum()
            row[stops] = 0.0
            # The end token stands for all stop tokens in the check of the constraint.
            row[self.eos_token_id] = ending
            row[~allowed[id(state)]] = 0.0
            if stops and is_last:
                row[np.arange(len(row)) != self.eos_token_id] = 0.0
        return weights, endings

    async def _block_weights(self, blocks: Sequence[Block]) -> list[float]:
        """Return the gains of log-weights by these blocks: one question to the model."""
        contexts = [self.prompt + each.before.text.token_ids for each in blocks]
        population = self.lm.population(contexts, adapter=self.adapter)
        tokens = [each.token_ids for each in blocks]
        scores = await population.score(tokens, temperature=self.temperature)
        return [
            math.fsum(score.tolist()) - block.logprob
            for score, block in zip(scores, blocks, strict=True)
        ]

    async def _grown(
        self, particles: Sequence[TextParticle], drawn: ProposedTokens, frontier: list[Population]
    ) -> list[Growth]:
        token_ids = drawn.token_ids
        if self._start is not None and self.ends.token_ids:
            # A rejection does not tell which stop token, so it is one for all.
            stop, end = min(self.ends.token_ids), self.eos_token_id
            token_ids = [stop if each == end else each for each in token_ids]
        states = [particle.constraint_state for particle in particles]
        if self.ends.strings:  # which are looked for in texts that are put together
            trails = await asyncio.to_thread(self._longer, particles, token_ids, frontier)
        else:
            trails = self._longer(particles, token_ids, frontier)
        if self._start is not None and are_quick(states):
            states = self._advanced(states, token_ids)
        elif self._start is not None:
            states = await asyncio.to_thread(self._advanced, states, token_ids)
        return [*map(Growth, map(TextParticle, trails, states), drawn.log_masses, token_ids)]

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

    def _longer(
        self,
        particles: Sequence[TextParticle],
        token_ids: Sequence[int],
        frontier: list[Population],
    ) -> list[Trail]:
        """Return the texts as ``extended`` does, without a look at them where no string may end one."""
        ends, strings, vocab = self.ends.token_ids, self.ends.strings, self._byte_vocab
        longest = self.max_steps - 1 if self._start is None else math.inf
        trails = []
        for number, (particle, token_id) in enumerate(zip(particles, token_ids, strict=True)):
            trail = particle.trail
            if token_id in ends:
                trail = trail.ended()
            elif strings and token_id != DEAD:
                trail = Trail.of(self.extended(trail.text, token_id), frontier, number)
            elif token_id != DEAD:
                is_over = trail.count >= longest
                trail = Trail(trail, token_id, vocab[token_id], is_over, frontier, number)
            trails.append(trail)
        return trails

    def _complete(self, grown: Sequence[Growth]) -> list[bool]:
        """Return whether each text ends here, without a stop."""
        return [
            token_id != DEAD
            and (each.trail.count >= self.max_steps or self._is_complete(each.constraint_state))
            for each, _, token_id in grown
        ]

    def _is_complete(self, state: State) -> bool:
        """Return whether the constraint allows at most the end."""
        words = words_of(state)[0]
        return not (words & ~_packed_tokens({self.eos_token_id}, len(words)).numpy()).any()

    async def _ended(self, grown: Sequence[Growth], complete: Sequence[bool]) -> list[Growth]:
        """Finish the complete texts; a text that the constraint does not accept is dead."""
        ending = [each.particle for each, ends in zip(grown, complete, strict=True) if ends]
        states = {id(each.constraint_state): each.constraint_state for each in ending}
        answers = await gather_all([self._accepts(state) for state in states.values()])
        accepts = dict(zip(states, answers, strict=True))
        ended = list(grown)
        for place, (particle, log_weight, token_id) in enumerate(grown):
            if not complete[place]:
                continue
            if accepts[id(particle.constraint_state)]:
                over = replace(particle, trail=particle.trail.ended())
                ended[place] = Growth(over, log_weight, token_id)
            else:
                ended[place] = Growth(particle, -math.inf, DEAD)
        return ended

    async def _accepts(self, state: State) -> bool:
        """Return whether a text may end here."""
        if isinstance(state, CheckedState):
            return (await state.check([cast("int", self.eos_token_id)]))[0]
        return state.accepting

    async def _judged(
        self, particles: Sequence[TextParticle], grown: Sequence[Growth]
    ) -> list[Growth]:
        """Weigh texts that are finished now by the potential, and the others by the twist."""
        is_weighed = self.potential is not None or self._twist is not None
        if not (is_weighed or any(each.log_twist for each in particles)):
            return list(grown)
        twists = {place: 0.0 for place, each in enumerate(grown) if each.log_weight > -math.inf}
        judges = ("potential", self.potential, True), ("twist", self._twist, False)
        for name, function, finished in judges:
            places = [place for place in twists if grown[place].particle.finished == finished]
            if function is not None and places:
                texts = [grown[place].particle.generated for place in places]
                values = await checks.evaluate_potential(name, function, texts)
                twists.update(zip(places, values, strict=True))
        judged = list(grown)
        for place, twist in twists.items():
            particle, log_weight, token_id = grown[place]
            gained = log_weight + twist - particles[place].log_twist
            if twist != particle.log_twist:
                particle = replace(particle, log_twist=twist)
            judged[place] = Growth(particle, gained, token_id)
        return judged


def _packed_tokens(token_ids: Iterable[int | None], count: int) -> Tensor:
    """Return the packed mask of these tokens, int32 ``[count]``."""
    words = np.zeros(count, np.uint32)
    for token_id in token_ids:
        if token_id is not None:
            words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return torch.from_numpy(words.view(np.int32))


def _block_size(lm: AsyncLM, proposal: Any, block: Any, adapter: Any, longest: int) -> int | None:
    """Return the tokens of a block, ``None`` unless another runtime proposes, whose arguments are checked
    for contexts of up to ``longest`` tokens."""
    if not isinstance(proposal, AsyncLM):
        if block is not None or adapter is not None:
            raise InvalidRequest(
                "block and proposal_adapter are for proposal=another runtime, which draws the tokens"
            )
        return None
    if proposal is not lm and proposal.byte_vocab != lm.byte_vocab:
        raise InvalidRequest(
            f"the proposal has another vocabulary, of {proposal.vocab_size} tokens, and the model's has "
            f"{lm.vocab_size}: give a runtime whose tokens are the same ones, by number and by bytes"
        )
    if longest > proposal.max_model_len:
        raise ContextTooLong(
            f"prompt and text need a context of {longest}, and the proposal's is "
            f"{proposal.max_model_len}: shorten one of them, or give another proposal"
        )
    return 8 if block is None else check_int("block", block, 1)
