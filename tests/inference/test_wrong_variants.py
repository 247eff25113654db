"""RECIPES × WRONG: each recipe passes its law, and two wrong variants of it do not.

A wrong variant is a recipe with one piece of its source exchanged. The laws come from enumeration: of the
evidence and the posterior for weighted texts, of one move from exact draws for chains, of the texts
themselves for searches. Seeds are fixed; each law fails for a right recipe with probability under 1e-5,
had the seeds been drawn.
"""

from __future__ import annotations
import __future__

import inspect
import itertools
import math
import textwrap
from collections.abc import Awaitable, Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest

import genrt
from genrt.constraints import predicate, regex, strings
from genrt.engines.exact import NGram
from genrt.inference import (
    AWRS,
    SMC,
    BestOfN,
    Execution,
    Law,
    MetropolisHastings,
    ParticleGibbs,
    Program,
    Rejection,
    State,
    TextModel,
    Trace,
    awrs,
    beam_search,
    best_first,
    evidence_bounds,
    importance_sampling,
    infilling,
    kernels,
    laws,
    metropolis,
    multinomial,
    recipes,
    resample_move,
    resampling,
    samplers,
    stochastic_beam_search,
    tempered,
    text_model,
    without_replacement,
)
from genrt.lm import AsyncLM
from genrt.testing import assert_samples_from, assert_weighted_samples_from, exact_posterior
from genrt.tokens import sampling
from genrt.tokens.texts import Text

LENGTH, END = 3, 2
NGRAM = NGram.random([b"a", b"b", b""], order=1, seed=5, eos_token_id=END)


# -- words, a model without a runtime ---------------------------------------------------------


class Words:
    """Words of up to three tokens, 2 is their end; a token has a proposal and a weight."""

    max_steps, max_tokens = LENGTH, LENGTH
    constraint, has_exact_weights = None, True

    def __init__(self, *, spread: float = 1.2, dead_ends: bool = True, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.log_q = np.log(rng.dirichlet(np.ones(3) * 2, (LENGTH, 4)))
        self.log_w = spread * rng.normal(size=(LENGTH, 4, 3))
        if dead_ends:
            self.log_w[1, 0, 1] = -math.inf

    def start(self) -> Trace:
        return Trace()

    def longer(self, trace: Trace, token: int) -> Trace:
        before = trace.tokens[0] if trace.units else 3
        place = trace.units, before, token
        finished = token == END or trace.units + 1 == LENGTH
        return Trace(trace, (token,), self.log_w[place], self.log_q[place], finished=finished)

    async def extend(self, traces: Sequence[Trace], seed: int) -> list[Trace]:
        uniforms = np.random.default_rng(seed).random(len(traces))
        found = []
        for trace, uniform in zip(traces, uniforms, strict=True):
            row = np.exp(self.log_q[trace.units, trace.tokens[0] if trace.units else 3])
            found.append(self.longer(trace, int((uniform > row.cumsum()[:2]).sum())))
        return found

    async def follow(self, traces: Sequence[Trace], tokens: Sequence[Sequence[int]]) -> list[Trace]:
        found = []
        for trace, each in zip(traces, tokens, strict=True):
            for token in each:
                if trace.is_open:
                    trace = self.longer(trace, token)
            found.append(trace)
        return found

    def text(self, trace: Trace) -> str:
        return str(trace.token_ids)

    def value(self, trace: Trace) -> tuple[int, ...]:
        return trace.token_ids

    def every(self) -> dict[tuple[int, ...], Trace]:
        """All finished traces, by their tokens."""
        found, growing = dict[tuple[int, ...], Trace](), [self.start()]
        while growing:
            longer = [self.longer(trace, token) for trace in growing for token in range(3)]
            found |= {each.token_ids: each for each in longer if each.finished}
            growing = [each for each in longer if not each.finished]
        return found

    def exact(self) -> tuple[dict[tuple[int, ...], float], float]:
        """The probabilities of the words, and the evidence."""
        targets = {
            ids: math.exp(sum(unit.log_target for unit in trace.path()))
            for ids, trace in self.every().items()
        }
        total = sum(targets.values())
        return {ids: each / total for ids, each in targets.items() if each > 0}, total


WORDS, ALIVE = Words(), Words(spread=2.5, dead_ends=False, seed=3)


def draws(model: Words, count: int) -> tuple[Trace, ...]:
    """Exact draws of the target."""
    law, _ = model.exact()
    known, every = model.every(), [*law]
    chosen = np.random.default_rng(1).choice(len(every), count, p=[law[each] for each in every])
    return tuple([known[every[place]] for place in chosen])


# -- the laws ---------------------------------------------------------------------------------


async def weighs(
    sampler: Any, law: dict[Any, float], evidence: float, runs: int, *, seed: int = 0
) -> None:
    """Raise AssertionError unless runs are properly weighted."""
    results = [await sampler.run(seed + number) for number in range(runs)]
    ratios = np.exp([each.log_evidence for each in results]) / evidence
    error = ratios.std() / math.sqrt(runs)
    assert abs(ratios.mean() - 1) <= 4.5 * error + 1e-4, "the evidence is biased"
    weighted = [(each.values, each.log_weights) for each in results]
    highest = 40.0 * evidence
    assert_weighted_samples_from(
        weighted, law, log_evidence=math.log(evidence), highest=highest, level=1e-6
    )


def of_words(make: Callable[[Words], Any], runs: int) -> Law_:
    async def check() -> None:
        law, evidence = WORDS.exact()
        await weighs(make(WORDS), law, evidence, runs)

    return check


def of_texts(
    make: Callable[[AsyncLM], Any], target: Callable[[AsyncLM], dict[str, Any]], runs: int
) -> Law_:
    """Of samplers on a runtime, with the arguments of ``exact_posterior``."""

    async def check() -> None:
        async with await genrt.aload(NGRAM, engine="exact") as lm:
            exact = exact_posterior(NGRAM, [0], **({"max_tokens": LENGTH} | target(lm)))
            law = {text.decode(): share for text, share in exact.texts.items()}
            await weighs(make(lm), law, exact.evidence, runs)

    return check


def of_one_move(make: Callable[[Words], Any], count: int, words: Words = WORDS) -> Law_:
    """A move from exact draws leaves their law as it is."""

    async def check() -> None:
        state = State(draws(words, count), np.zeros(count), 1, 7)
        state, _ = await make(words).step(state)
        law, _ = words.exact()
        assert_samples_from([each.token_ids for each in state.particles], law)

    return check


async def bounds_hold() -> None:
    (_, evidence), count = ALIVE.exact(), 300
    smc = SMC(ALIVE, num_particles=2, resample=multinomial, resample_when=1.0)
    found = await evidence_bounds(smc, draws(ALIVE, count), runs=count, seed=3)
    truth = math.log(evidence)
    assert found.lower - 4.5 * found.lower_error < truth, "the lower bound is none"
    assert truth < found.upper + 4.5 * found.upper_error, "the upper bound is none"
    assert found.upper - found.lower < 4.0


async def beam_is_right() -> None:
    """Of so many branches, every token is drawn: the beam is the one of all continuations."""
    kept, weight = [WORDS.start()], dict[tuple[int, ...], float]({(): 0.0})
    while any(each.is_open for each in kept):
        longer = [each for each in kept if not each.is_open]
        for each in kept:
            if each.is_open:
                new = [WORDS.longer(each, token) for token in range(3)]
                weight |= {each_.token_ids: weight[each.token_ids] + each_.gain for each_ in new}
                longer += new
        kept = sorted(longer, key=lambda each: -weight[each.token_ids])[:3]
    found = await beam_search(WORDS, width=3, branches=300).run(0)
    assert found.token_ids == tuple([each.token_ids for each in kept])


def length(text: Text) -> float:
    return -0.7 * len(text.token_ids)


async def search_is_right() -> None:
    async with await genrt.aload(NGRAM, engine="exact") as lm:
        exact = exact_posterior(NGRAM, [0], max_tokens=LENGTH, potential=length)
        model = TextModel(lm, [0], max_tokens=LENGTH, potential=length)
        found = await best_first(model, num_texts=5, width=1).run(0)
    assert found.token_ids == tuple([*exact.token_ids][:5])


async def gaps_are_right(runs: int = 70) -> None:
    """Gaps of up to two tokens before the token 1."""
    law = dict[Any, float]()
    for gap in [(), *((a,) for a in range(2)), *itertools.product(range(2), repeat=2)]:
        tokens = (*gap, 1)
        rows = [NGRAM.row([0, *tokens[:place]]) for place in range(len(tokens))]
        total = sum(float(row[token]) for row, token in zip(rows, tokens, strict=True))
        law["".join("ab"[token] for token in gap)] = math.exp(total)
    evidence = sum(law.values())
    async with await genrt.aload(NGRAM, engine="exact") as lm:
        sampler = SMC(infilling(lm, [0], [1], max_tokens=2), num_particles=6, resample_when=1.0)
        await weighs(sampler, {gap: each / evidence for gap, each in law.items()}, evidence, runs)


async def programs_are_right(runs: int = 150) -> None:
    """A program that draws a value by a proposal, and a text under a constraint."""
    shares, wanted = np.log([0.2, 0.8]), {"a": (0,), "ba": (1, 0), "bb": (1, 1)}
    law = dict[Any, float]()
    for first, (text, tokens) in itertools.product(range(2), wanted.items()):
        rows = [NGRAM.row([first, *tokens[:place]]) for place in range(len(tokens))]
        total = sum(float(row[token]) for row, token in zip(rows, tokens, strict=True))
        law[first, text] = math.exp(shares[first] + 1.5 * first - 1.5 + total)
    evidence = sum(law.values())

    async with await genrt.aload(NGRAM, engine="exact") as lm:
        texts = strings([*wanted], lm)

        async def spoken(p: Execution) -> tuple[int, str]:
            first = await p.choice([0, 1], log_weights=shares, proposal=[0.0, -1.0])
            p.observe(1.5 * first - 1.5)
            return first, str(await p.text([first], max_tokens=2, stop=None, constraint=texts))

        sampler = SMC(Program(lm, spoken), num_particles=4, resample_when=1.0)
        await weighs(sampler, {each: law[each] / evidence for each in law}, evidence, runs)


async def rejection_is_right(runs: int = 200) -> None:
    async with await genrt.aload(NGRAM, engine="exact") as lm:
        options: dict[str, Any] = {"max_tokens": LENGTH, "constraint": regex("(a|b){1,3}", lm)}
        exact = exact_posterior(NGRAM, [0], **options)
        model = TextModel(lm, [0], **options)
        sampler = Rejection(model, num_samples=2, max_texts=8, batch_size=8)
        results = [await sampler.run(seed) for seed in range(runs)]
    ratios = np.exp([each.log_evidence for each in results]) / exact.evidence
    assert abs(ratios.mean() - 1) < 4.5 * ratios.std() / math.sqrt(runs), "the evidence is biased"
    assert_samples_from([ids for each in results for ids in each.token_ids], exact.token_ids)


def rank(text: Text) -> float:
    """Different for every text."""
    return sum((1 + token) * 3.0**place for place, token in enumerate(text.token_ids))


async def best_is_right(count: int = 3, runs: int = 150) -> None:
    """The best of three draws under masks has the law of the largest of three."""
    async with await genrt.aload(NGRAM, engine="exact") as lm:
        constraint = regex("(a|b){1,3}", lm)
        model = TextModel(lm, [0], max_tokens=LENGTH, constraint=constraint)
        many = await importance_sampling(model, num_particles=500).run(0)
        sampler = BestOfN(model, n=count, score=rank)
        found = [(await sampler.run(seed)).posterior() for seed in range(runs)]
        exact = exact_posterior(NGRAM, [0], max_tokens=LENGTH, constraint=constraint)
        # The probability of a draw under masks is p / w, where the weight of a text is always the same.
        weights = dict(zip(many.texts, many.log_weights, strict=True))
    alive = {
        ids: share * exact.evidence / math.exp(weights[text.decode()])
        for (ids, share), text in zip(exact.token_ids.items(), exact.texts, strict=True)
        if text.decode() in weights
    }
    law, below = dict[Any, float](), 1.0 - sum(alive.values())
    law[None] = max(below, 0.0) ** count
    for ids in sorted(alive, key=lambda ids: rank(Text(ids))):
        law["".join("ab"[token] for token in ids)] = (below + alive[ids]) ** count - below**count
        below += alive[ids]
    assert_samples_from([each[0][0] if each else None for each in found], law)


async def without_order(width: int = 2, runs: int = 400) -> None:
    """The sets of a stochastic beam are samples without replacement; its evidence is 1."""
    async with await genrt.aload(NGRAM, engine="exact") as lm:
        law = dict(exact_posterior(NGRAM, [0], max_tokens=2).token_ids)
        search = stochastic_beam_search(TextModel(lm, [0], max_tokens=2), width=width)
        found = [await search.run(seed) for seed in range(runs)]
    ratios = np.exp([each.log_evidence for each in found])
    assert abs(ratios.mean() - 1) < 4.5 * ratios.std() / math.sqrt(runs), "the evidence is biased"
    sets = dict.fromkeys(map(frozenset, itertools.combinations(law, width)), 0.0)
    for order in itertools.permutations(law, width):
        shares = [law[each] for each in order]
        remaining = 1 - np.cumsum([0.0, *shares[:-1]])
        sets[frozenset(order)] += math.prod(shares) / math.prod(remaining.tolist())
    assert_samples_from([frozenset(each.token_ids) for each in found], sets)


# -- the table --------------------------------------------------------------------------------

Law_: TypeAlias = Callable[[], Awaitable[None]]


class Wrong(NamedTuple):
    """A function, a piece of its source, and the wrong piece in its place."""

    what: str
    function: Any
    right: str
    wrong: str


def short(lm: AsyncLM, **options: Any) -> TextModel:
    return TextModel(lm, [0], **({"max_tokens": LENGTH} | options))


def likes_b(text: Text) -> float:
    return 1.5 * text.bytes.count(b"b") - 3.0


def likes_a(text: Text) -> float:
    return 1.0 * text.bytes.count(b"a")


def is_even(text: Text) -> bool:
    return not text.finished or len(text.bytes) % 2 == 0


def log_p(prompt: Sequence[int], ids: tuple[int, ...]) -> float:
    tokens = ids if len(ids) == LENGTH else (*ids, END)
    rows = [NGRAM.row([*prompt, *tokens[:place]]) for place in range(len(tokens))]
    return sum(float(row[token]) for row, token in zip(rows, tokens, strict=True))


def of_powers(*powers: tuple[int, float]) -> Callable[[AsyncLM], dict[str, Any]]:
    """The target of these prompts and powers, as a potential on the law after the prompt 0."""

    def rest(text: Text) -> float:
        total = sum(power * log_p([prompt], text.token_ids) for prompt, power in powers)
        return total - log_p([0], text.token_ids)

    return lambda lm: {"potential": rest}


TARGET = "target=_target(judge, present), "
LENGTHS = "math.log(old[place].units / new[place].units)"
CHAINS: dict[str, Any] = {"num_chains": 1, "num_steps": 1}

RECIPES: dict[str, tuple[Law_, list[Wrong]]] = {
    "importance sampling": (
        of_words(lambda m: importance_sampling(m, num_particles=4), 500),
        [
            Wrong(
                "the last unit's weight alone",
                kernels._extended_by,
                "[places] += g",
                "[places] = g",
            ),
            Wrong(
                "the heaviest particle alone",
                resampling.ess_and_log_mean,
                "peak + math.log(total / len(weights))",
                "peak",
            ),
        ],
    ),
    "SMC": (
        # The runs, the particles and the twist that docs/guide/testing.md recommends.
        of_texts(
            lambda lm: SMC(short(lm, twist=likes_a), num_particles=4, resample_when=1.0),
            lambda lm: {},
            200,
        ),
        [
            Wrong(
                "weights after resampling",
                kernels._checked_ancestors,
                "np.full(count, state.log_evidence)",
                "state.log_weights[chosen]",
            ),
            Wrong(
                "by the square of the weight",
                resampling.systematic,
                "_by_strata(log_weights",
                "_by_strata(2 * log_weights",
            ),
        ],
    ),
    "resample-move": (
        of_words(lambda m: resample_move(m, num_particles=4, moves=1, below=1.0), 200),
        [
            Wrong(
                "all moves accepted", kernels._moved, "thresholds <= log_ratios", "log_ratios > -99"
            ),
            Wrong("the ratio upside down", kernels._moved, "<= log_ratios", "<= -log_ratios"),
        ],
    ),
    "without replacement": (
        of_words(lambda m: without_replacement(m, num_particles=3, branches=2), 500),
        [
            Wrong("branches with the whole weight", kernels._branched, "- np.log(times)", "+ 0.0"),
            Wrong(
                "small weights that stay small",
                resampling.optimal,
                "math.log(threshold) + total",
                "log_weights[ancestors]",
            ),
        ],
    ),
    "Metropolis-Hastings": (
        of_one_move(lambda m: MetropolisHastings(m, **CHAINS), 3000),
        [
            Wrong("without the ratio of lengths", kernels._moved, LENGTHS, "0.0"),
            Wrong(
                "all moves accepted", kernels._moved, "thresholds <= log_ratios", "log_ratios > -99"
            ),
        ],
    ),
    "particle Gibbs": (
        of_one_move(lambda m: ParticleGibbs(m, num_particles=2, **CHAINS), 1500, ALIVE),
        [
            Wrong(
                "no pinned path",
                kernels.conditional,
                "extend(model, pinned=reference)",
                "extend(model)",
            ),
            Wrong(
                "the next text without weights",
                metropolis.ParticleGibbs._next,
                "p=normalized_weights(state.log_weights)",
                "",
            ),
        ],
    ),
    "particle Gibbs, ancestors": (
        of_one_move(
            lambda m: ParticleGibbs(m, num_particles=2, ancestors=True, **CHAINS), 2000, ALIVE
        ),
        [
            Wrong(
                "pasts without the target of the future",
                kernels._with_new_past,
                "state.log_weights[place] + gained",
                "state.log_weights[place]",
            ),
            Wrong(
                "pasts without their weights",
                kernels._with_new_past,
                "state.log_weights[place] + gained",
                "gained",
            ),
        ],
    ),
    "evidence bounds": (
        bounds_hold,
        [
            Wrong(
                "runs that are not conditional",
                samplers.evidence_bounds,
                "conditional(sampler.model, trace, count=count, seed=own, below=below)",
                "sampler.run(own)",
            ),
            Wrong(
                "no pinned path",
                kernels.conditional,
                "extend(model, pinned=reference)",
                "extend(model)",
            ),
        ],
    ),
    "beam search": (
        beam_is_right,
        [
            Wrong("the worst", kernels._kept, "argsort(-scores", "argsort(scores"),
            Wrong("copies", kernels._kept, "trace.token_ids or trace", "place"),
        ],
    ),
    "best first": (
        search_is_right,
        [
            Wrong("no siblings", recipes.best_first, "offer(popped[-1][5])", "pass"),
            Wrong("the worst first", recipes._continuations, "argsort(-row", "argsort(row"),
        ],
    ),
    "stochastic beam search": (
        without_order,
        [
            Wrong(
                "keys that are moved",
                recipes._below,
                "apart = largest - keys + rest",
                "return keys - keys.max(axis=1, keepdims=True) + largest",
            ),
            Wrong(
                "a first key without noise",
                recipes.stochastic_beam_search,
                "rng.gumbel(size=1)",
                "np.zeros(1)",
            ),
        ],
    ),
    "tempered": (
        of_texts(
            lambda lm: tempered(short(lm), likes_b, num_particles=3, temperatures=[0.4, 1.0]),
            lambda lm: {"potential": likes_b},
            80,
        ),
        [
            Wrong(
                "whole steps",
                recipes.tempered,
                "(following - present) * values",
                "following * values",
            ),
            Wrong("moves by the first target", recipes.tempered, TARGET, ""),
        ],
    ),
    "a power": (
        of_texts(
            lambda lm: SMC(TextModel(Law(lm, [0], power=2.0), max_tokens=LENGTH), num_particles=3),
            of_powers((0, 2.0)),
            150,
        ),
        [
            Wrong(
                "a temperature",
                text_model.TextModel._draw,
                "(each.temperature, each.power)",
                "(each.temperature / each.power, 1.0)",
            ),
            Wrong("the base law", text_model.TextModel._draw, "each.power) for", "1.0) for"),
        ],
    ),
    "a contrast": (
        of_texts(
            lambda lm: SMC(
                TextModel([Law(lm, [0], power=1.5), Law(lm, [1], power=-0.5)], max_tokens=LENGTH),
                num_particles=3,
            ),
            of_powers((0, 1.5), (1, -0.5)),
            150,
        ),
        [
            Wrong("no powers", text_model.TextModel._draw, "each.power) for", "1.0) for"),
            Wrong(
                "the first law alone",
                sampling.product,
                "functools.reduce(torch.add, parts)",
                "parts[0]",
            ),
        ],
    ),
    "another law proposes": (
        of_texts(
            lambda lm: SMC(
                short(lm, proposal=Law(lm, [1], temperature=1.5), unit=2), num_particles=3
            ),
            lambda lm: {},
            150,
        ),
        [
            Wrong("the target's square", laws.product_of_sums, "law.power *", "2 *"),
            Wrong("the proposal's own weight", laws.product_of_sums, "return total", "return 0.0"),
        ],
    ),
    "a reward by units": (
        of_texts(
            lambda lm: SMC(short(lm, twist=likes_b, potential=likes_b, unit="b"), num_particles=3),
            lambda lm: {"potential": likes_b},
            200,
        ),
        [
            Wrong(
                "a twist that stays",
                text_model.TextModel._judge,
                "0.0 if finished else value",
                "trace.log_twist if finished else value",
            ),
            Wrong(
                "every twist counts",
                Trace.gain.fget,  # type: ignore[attr-defined]
                "(self.log_twist - before.log_twist)",
                "self.log_twist",
            ),
        ],
    ),
    "adaptive weighted rejection": (
        of_texts(
            lambda lm: importance_sampling(
                short(lm, constraint=predicate(is_even, lm), proposal=AWRS(accepts=3, rejects=2)),
                num_particles=6,
            ),
            lambda lm: {"constraint": predicate(is_even, lm)},
            100,
        ),
        [
            Wrong("k for k - 1", awrs.draw_allowed, "- (len(accepted) == how.accepts)", ""),
            Wrong(
                "one accepted token", awrs.draw_allowed, "math.log(count) + log_mean", "log_mean"
            ),
        ],
    ),
    "a program": (
        programs_are_right,
        [
            Wrong(
                "a proposal's choice as its own",
                Execution.choice,
                "log_target[index] - logs[index]",
                "0.0",
            ),
            Wrong(
                "a text without its mass",
                Program._texts_longer,
                "trace.log_weight += text.log_weight",
                "pass",
            ),
            Wrong("the last weight alone", Execution._weigh, "+= log_weight", "= log_weight"),
        ],
    ),
    "infilling": (
        gaps_are_right,
        [
            Wrong("gaps go on without the twist", infilling, "going + twist", "going"),
            Wrong("a token's mass that stays", infilling, "p.observe(-going)", "pass"),
        ],
    ),
    "rejection": (
        rejection_is_right,
        [
            Wrong(
                "the last text counts",
                recipes.acceptance_rate,
                "(kept - is_enough) / max(drawn - is_enough, 1)",
                "kept / max(drawn, 1)",
            ),
            Wrong(
                "texts that were cut",
                recipes.Rejection._log_chances,
                'if "constraint" in self._judges',
                "if False",
            ),
        ],
    ),
    "best of N": (
        best_is_right,
        [
            Wrong(
                "the worst",
                recipes.BestOfN._ranked,
                "frozen(scores)",
                "frozen(np.where(scores > -math.inf, -scores, scores))",
            ),
            Wrong(
                "no masks",
                recipes._unweighted,
                "if not constrained",
                "if True",
            ),
        ],
    ),
}


def broken(wrong: Wrong) -> Any:
    """Return the code of the function with the wrong piece."""
    function: FunctionType = wrong.function
    source = textwrap.dedent(inspect.getsource(function)).removeprefix("@property\n")
    assert source.count(wrong.right) == 1, f"{wrong.right!r} is not once in {function.__name__}"
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(wrong.right, wrong.wrong), "wrong", "exec", flags, True)
    names: dict[str, Any] = {}
    exec(code, function.__globals__, names)  # noqa: S102
    return names[function.__name__].__code__


@pytest.mark.proof
@pytest.mark.parametrize("name", RECIPES)
async def test_a_recipe_is_right_and_its_wrong_variants_are_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    law, variants = RECIPES[name]
    await law()
    assert len(variants) >= 2
    for each in variants:
        with monkeypatch.context() as patch:
            patch.setattr(each.function, "__code__", broken(each))
            try:
                await law()
            except AssertionError:
                continue
        pytest.fail(f"{name} passes with {each.what}")
