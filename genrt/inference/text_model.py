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
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

from genrt.constraints import CheckedState, Constraint
from genrt.constraints.products import are_quick, fill
from genrt.errors import ContextTooLong, InvalidConstraint, InvalidRequest
from genrt.inference import checks
from genrt.inference.ends import END_TOKEN, Ends, Stop, parse_stop
from genrt.inference.model import DEAD, Growth
from genrt.inference.potentials import evaluate_potential
from genrt.inference.proposals import Proposal, Proposals, ProposedTokens, State
from genrt.inference.trails import Frontier, Trail
from genrt.lm import AsyncLM
from genrt.numbers import check_int, displayed
from genrt.runtime.concurrency import together
from genrt.tokens.texts import Potential, Text, decoded


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
    """

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
        is_other = isinstance(proposal, AsyncLM)
        if not is_other and (
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
        self._lm, self._adapter = lm, checks.adapter_name(adapter)
        self._constraint, self._potential, self._twist = constraint, potential, twist
        self._byte_vocab = lm.byte_vocab
        self._proposals = Proposals(
            lm=proposal if isinstance(proposal, AsyncLM) else lm,
            prompt=ids,
            kind="awrs" if proposal == "awrs" or (is_asked and proposal != "mask") else "mask",
            is_constrained=constraint is not None,
            ends=ends,
            eos_token_id=eos_token_id,
            max_tokens=max_tokens,
            temperature=temperature,
            adapter=checks.adapter_name(proposal_adapter) if is_other else self._adapter,
            is_weighed_later=is_other,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the parts that the runtime at the other end does not have."""
        return {k: v for k, v in vars(self).items() if k not in ("_start", "_byte_vocab")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start = None if self._constraint is None else self._constraint.start()
        self._byte_vocab = self.lm.byte_vocab

    def __repr__(self) -> str:
        what = {"constraint": self._constraint, "potential": self._potential, "twist": self._twist}
        given = "".join(f", {name}={each!r}" for name, each in what.items() if each is not None)
        return f"TextModel({len(self.prompt)} tokens, max_tokens={self.max_steps}{given})"

    @property
    def lm(self) -> AsyncLM:
        """The runtime."""
        return self._lm

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self._proposals.prompt

    @property
    def constraint(self) -> Constraint | None:
        """The texts that count."""
        return self._constraint

    @property
    def potential(self) -> Potential | None:
        """The log-weights of finished texts."""
        return self._potential

    @property
    def temperature(self) -> float:
        """The temperature of the rows."""
        return self._proposals.temperature

    @property
    def adapter(self) -> str | None:
        """The name of the adapter."""
        return self._adapter

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._proposals.eos_token_id

    @property
    def ends(self) -> Ends:
        """The ways in which a text ends."""
        return self._proposals.ends

    @property
    def max_steps(self) -> int:
        """``max_tokens``: a step draws one token of every text."""
        return self._proposals.max_tokens

    def unweighted(self) -> Self:
        """Return the model of the same texts under the same constraint, without potential and twist."""
        model = copy.copy(self)
        model._potential = model._twist = None
        return model

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
        if start is not None and self._proposals.is_complete(start):
            # The empty text is the only one.
            nothing = [Growth(each, 0.0, DEAD) for each in particles]
            return await self._judged(particles, await self._ended(nothing, [True] * len(nothing)))
        if self._block is None:
            return await self._judged(particles, (await self._one_longer(particles, seed))[1])
        going = [place for place, each in enumerate(particles) if not each.trail.finished]
        grown = [Growth(each, 0.0, DEAD) for each in particles]
        steps: dict[int, tuple[int, float]] = {}
        if going:
            drawn, longer = await self._one_longer([particles[place] for place in going], seed)
            own = zip(drawn.token_ids, drawn.logprobs, strict=True)
            for place, step, growth in zip(going, own, longer, strict=True):
                steps[place], grown[place] = step, growth
        over: dict[int, Block] = {}
        for place, (particle, growth) in enumerate(zip(particles, grown, strict=True)):
            if growth.log_weight == -math.inf:
                continue
            block: Block = particle.block or Block(particle.trail)
            if place in steps:
                token_id, logprob = steps[place]
                block = replace(
                    block,
                    token_ids=(*block.token_ids, token_id),
                    logprob=block.logprob + logprob,
                )
            block = replace(block, steps=block.steps + 1)
            is_over = block.steps == min(self._block, self.max_steps - block.before.count)
            if is_over:
                over[place] = block
            grown[place] = growth._replace(
                log_weight=0.0,
                particle=replace(
                    growth.particle, block=None if is_over else block, log_twist=particle.log_twist
                ),
            )
        if over:
            places = list(over)
            gained = zip(places, await self._block_weights([*over.values()]), strict=True)
            weighed = [grown[place]._replace(log_weight=gain) for place, gain in gained]
            found = await self._judged([particles[place] for place in places], weighed)
            for place, growth in zip(places, found, strict=True):
                grown[place] = growth
        return grown

    async def _one_longer(
        self, particles: Sequence[TextParticle], seed: int
    ) -> tuple[ProposedTokens, list[Growth]]:
        """Draw a token after each text; return the tokens, and the texts, which gain the masses."""
        trails = [particle.trail for particle in particles]
        states = [particle.constraint_state for particle in particles]
        population = self._proposals.population(trails)
        drawn = await self._proposals.draw(population, trails, states, seed)
        grown = await self._grown(particles, drawn, Frontier(population))
        if self._start is not None and self.ends.never:
            complete = await asyncio.to_thread(self._proposals.complete, grown)
            grown = await self._ended(grown, complete)
        return drawn, grown

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
        self, particles: Sequence[TextParticle], drawn: ProposedTokens, frontier: Frontier
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
        self, particles: Sequence[TextParticle], token_ids: Sequence[int], frontier: Frontier
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

    async def _ended(self, grown: Sequence[Growth], complete: Sequence[bool]) -> list[Growth]:
        """Finish the complete texts; a text that the constraint does not accept is dead."""
        ending = [each.particle for each, ends in zip(grown, complete, strict=True) if ends]
        states = {id(each.constraint_state): each.constraint_state for each in ending}
        answers = await together([self._proposals.accepts(state) for state in states.values()])
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

    async def _judged(
        self, particles: Sequence[TextParticle], grown: Sequence[Growth]
    ) -> list[Growth]:
        """Weigh texts that are finished now by the potential, and the others by the twist."""
        is_weighed = self._potential is not None or self._twist is not None
        if not (is_weighed or any(each.log_twist for each in particles)):
            return list(grown)
        twists = {place: 0.0 for place, each in enumerate(grown) if each.log_weight > -math.inf}
        judges = ("potential", self._potential, True), ("twist", self._twist, False)
        for name, function, finished in judges:
            places = [place for place in twists if grown[place].particle.finished == finished]
            if function is not None and places:
                texts = [grown[place].particle.generated for place in places]
                values = await evaluate_potential(name, function, texts)
                twists.update(zip(places, values, strict=True))
        judged = list(grown)
        for place, twist in twists.items():
            particle, log_weight, token_id = grown[place]
            gained = log_weight + twist - particles[place].log_twist
            if twist != particle.log_twist:
                particle = replace(particle, log_twist=twist)
            judged[place] = Growth(particle, gained, token_id)
        return judged


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
