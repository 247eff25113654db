"""Seeded draws, samples and inferences give what they gave before: values kept in ``golden.json``.

``python -m tests.test_golden`` writes the file anew. A change to it is a change of what a seed means:
say so in CHANGELOG.md. Token ids and texts are compared as they are, numbers to a relative 1e-4.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.constraints import predicate, regex, strings
from genrt.engines.exact import NGram
from genrt.inference import (
    SMC,
    BestOfN,
    Execution,
    MetropolisHastings,
    Program,
    Rejection,
    Result,
    TextModel,
    importance_sampling,
    multinomial,
    partial,
    stratified,
    systematic,
)
from genrt.lm import AsyncLM
from genrt.tokens.sampling import draw, seeded_uniforms

VALUES = Path(__file__).with_name("golden.json")

VOCABULARY = [b"a", b"b", b"ab", b"ba", b"c", b" ", b""]
EOS = 6
MODEL = NGram.random(VOCABULARY, seed=5, zeros=0.1, eos_token_id=EOS)
PATTERN = "(a|b){2,6}( c)?"
VLLM_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 2**27,
}


def rows(count: int, width: int) -> torch.Tensor:
    """Rows that no generator has made."""
    numbers = torch.arange(count * width, dtype=torch.float64).reshape(count, width)
    return (5 * torch.sin(numbers * 12.9898) + 2 * torch.cos(numbers * 0.7)).float().log_softmax(-1)


def of_sampling() -> Any:
    """What ``genrt.tokens.sampling.draw`` makes of seeds: plain, masked, tempered, greedy."""
    batch = rows(24, 777)
    mask = (torch.arange(24 * 777).reshape(24, 777) * 7919) % 3 != 0
    uniforms = seeded_uniforms(range(24))
    found = {}
    for name, options in {
        "plain": {},
        "masked": {"mask": mask},
        "cold": {"mask": mask, "temperature": 0.3},
        "hot": {"temperature": 3.0},
        "greedy": {"temperature": 0.0},
    }.items():
        drawn: Any = draw(batch, uniforms=uniforms, **options)  # type: ignore[arg-type]
        found[name] = {
            "token_ids": drawn.token_ids.tolist(),
            "logprobs": drawn.logprobs.tolist(),
            "log_mass": drawn.log_mass.tolist(),
        }
    return {"uniforms": uniforms[:4].tolist(), **found}


def questions(lm: AsyncLM) -> Any:
    """Seeded draws and samples of a runtime."""
    size = lm.vocab_size
    contexts = [[n % size, (3 * n + 1) % size] for n in range(12)]
    half = torch.arange(size) % 2 == 0
    drawn = [lm.draw_sync(context, seed=n) for n, context in enumerate(contexts)]
    masked = lm.batch_draw_sync(contexts, masks=[half] * 12, seed=100, temperature=0.7)
    return {
        "draws": [[each.token_id, each.logprob, each.log_mass] for each in drawn],
        "batch_draw": [masked.token_ids.tolist(), masked.log_mass.tolist()],
        "samples": lm.batch_sample_sync(contexts, max_tokens=6, seed=7),
        "hot": lm.batch_sample_sync(contexts, max_tokens=6, seed=7, temperature=1.7),
        "truncated": lm.batch_sample_sync(
            contexts, max_tokens=6, seed=9, top_p=0.8, top_k=5, min_p=0.02
        ),
        "greedy": lm.sample_sync([1, 2], max_tokens=6, temperature=0.0),
        "stopped": lm.sample_sync([1, 2], max_tokens=8, seed=3, stop_token_ids=[0, 4]),
    }


def shown(result: Result) -> Any:
    """What is kept of a result."""
    return {
        "values": list(map(str, result.values)),
        "log_weights": result.log_weights.tolist(),
        "log_evidence": result.log_evidence,
        "resampled": [bool(info.resampled) for info in result.infos],
    }


async def halves(p: Execution) -> str:
    """A program that samples under a mask, observes and conditions."""
    tokens: list[int] = []
    for place in range(5):
        token = await p.sample([0, *tokens], mask=torch.arange(7) != place % 2)
        if token == EOS:
            break
        tokens.append(token)
        p.observe(-0.25 * (token == 2))
    await p.condition([0, *tokens], [0])
    return "".join(VOCABULARY[token].decode() for token in tokens)


def few_spaces(text: Any) -> bool:
    return str(text).count(" ") < 2 and not str(text).startswith("c")


def favours_c(text: Any) -> float:
    return 0.5 * str(text).count("c") - 0.1 * len(text.token_ids)


def inferences(lm: AsyncLM) -> Any:
    """Every algorithm with a few options, by seed."""
    plain = TextModel(lm, [0], max_tokens=6)
    constrained = functools.partial(TextModel, lm, [0], max_tokens=6, constraint=regex(PATTERN, lm))
    twisted = constrained(potential=favours_c, twist=favours_c)
    listed = TextModel(lm, [0], max_tokens=5, constraint=strings(["abab", "ba", "aab"], lm))
    rejecting = TextModel(lm, [0], max_tokens=5, constraint=predicate(few_spaces, lm))
    runs: dict[str, Any] = {
        "smc": SMC(constrained(), num_particles=16),
        "smc always": SMC(constrained(), num_particles=16, resample_when=1.0),
        "smc multinomial": SMC(twisted, num_particles=12, resample=multinomial, resample_when=0.9),
        "smc stratified": SMC(twisted, num_particles=12, resample=stratified, resample_when=0.9),
        "smc systematic": SMC(twisted, num_particles=12, resample=systematic, resample_when=0.9),
        "smc partial": SMC(twisted, num_particles=12, resample=partial, resample_when=0.9),
        "smc tempered": SMC(constrained(temperature=1.5), num_particles=12),
        "smc awrs": SMC(rejecting, num_particles=12),
        "smc strings": SMC(listed, num_particles=12),
        "importance": importance_sampling(twisted, num_particles=12),
        "metropolis": MetropolisHastings(twisted, num_chains=4, num_steps=8, warm_up=2),
        "rejection": Rejection(constrained(), num_samples=8, max_texts=400),
        "best of n": BestOfN(plain, n=8, score=favours_c),
        "program": SMC(Program(lm, halves), num_particles=12, resample_when=0.9),
    }
    return {
        name: [shown(asyncio.run(run.run(seed=seed))) for seed in (0, 1)]
        for name, run in runs.items()
    }


def of_exact() -> Any:
    with genrt.load(MODEL, engine="exact") as lm:
        return {"questions": questions(lm), "inferences": inferences(lm)}


def of_transformers(llama: Path) -> Any:
    with genrt.load(str(llama), engine="transformers") as lm:
        return questions(lm)


def of_vllm(llama: Path) -> Any:
    with genrt.load(str(llama), engine_options=VLLM_OPTIONS) as lm:
        return questions(lm)


def assert_same(found: Any, kept: Any, *, at: str = "") -> None:
    """Compare nested lists and dictionaries; say where the first difference is."""
    if isinstance(kept, dict):
        assert set(found) == set(kept), at
        for name in kept:
            assert_same(found[name], kept[name], at=f"{at}/{name}")
    elif isinstance(kept, list):
        assert len(found) == len(kept), f"{at}: {found} was {kept}"
        for place, (one, other) in enumerate(zip(found, kept, strict=True)):
            assert_same(one, other, at=f"{at}/{place}")
    elif isinstance(kept, float):
        same = found == kept or (math.isnan(found) and math.isnan(kept))
        assert same or math.isclose(found, kept, rel_tol=1e-4, abs_tol=1e-4), (
            f"{at}: {found} was {kept}"
        )
    else:
        assert found == kept, f"{at}: {found!r} was {kept!r}"


def kept(name: str) -> Any:
    return json.loads(VALUES.read_text(encoding="utf-8"))[name]


def test_seeds_draw_what_they_drew() -> None:
    assert_same(of_sampling(), kept("sampling"))


def test_seeds_decide_the_same_on_the_exact_engine() -> None:
    assert_same(of_exact(), kept("exact"))


def test_seeds_decide_the_same_on_transformers(llama: Path) -> None:
    assert_same(of_transformers(llama), kept("transformers"))


@pytest.mark.vllm
def test_seeds_decide_the_same_on_vllm(llama: Path) -> None:
    assert_same(of_vllm(llama), kept("vllm"))


@pytest.mark.parametrize(
    ("found", "expected"),
    [([1, 2], [1, 3]), ({"a": 1.0}, {"a": 1.1}), ([1], [1, 1]), ({"a": 1}, {}), ("x", "y")],
)
def test_a_difference_is_found(found: Any, expected: Any) -> None:
    with pytest.raises(AssertionError):
        assert_same(found, expected)


def _main() -> None:
    from tests.small_models import make_llama

    with tempfile.TemporaryDirectory() as directory:
        llama = make_llama(Path(directory) / "model")
        makers: dict[str, Callable[[], Any]] = {
            "sampling": of_sampling,
            "exact": of_exact,
            "transformers": lambda: of_transformers(llama),
            "vllm": lambda: of_vllm(llama),
        }
        values = {name: make() for name, make in makers.items()}
    VALUES.write_text(json.dumps(values) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _main()
