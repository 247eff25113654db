"""Runs for what shows them: real ones of texts that are hard to show, and drawn ones of any size."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np

import genrt
from genrt.engines.exact import NGram
from genrt.inference import (
    SMC,
    Info,
    Result,
    TextModel,
    effective_sample_size,
    log_mean_exp,
    systematic,
)
from genrt.tokens.texts import Text

VOCABULARY = [
    b"<script>&",
    "\N{HEBREW LETTER SHIN}".encode(),
    b"\x1b[2J",
    "\N{RIGHT-TO-LEFT OVERRIDE}".encode(),
    "\N{CJK UNIFIED IDEOGRAPH-65E5}".encode(),
    b"\xc3",
    b"\xa9",
    b"  ",
    b"\n",
    b"a'\"$x^2$",
    b"",
]
"""Markup, directions, control characters, halves of characters, blanks, mathematics, and the end."""

MODEL = NGram.random(VOCABULARY, seed=5, eos_token_id=len(VOCABULARY) - 1)


def guide(text: Text) -> float:
    """Weights that differ, and rule out what holds an escape."""
    return -math.inf if b"\x1b" in text.bytes else 0.4 * text.bytes.count(b"a") - 0.1


def run(
    directory: Path, *, particles: int = 12, max_tokens: int = 12, seed: int = 0, **options: float
) -> Result:
    """SMC over the texts of ``MODEL``; some particles die, and there is resampling."""
    if not directory.exists():
        MODEL.save(directory)
    with genrt.load(str(directory), engine="exact") as lm:
        model = TextModel(lm, [0], max_tokens=max_tokens, twist=guide, potential=guide)
        smc = SMC(model, num_particles=particles, resample_when=options.get("resample_when", 0.9))
        return asyncio.run(smc.run(seed))


def drawn(particles: int, steps: int, *, seed: int = 0, dying: float = 0.02) -> Result:
    """A result of any size, as SMC would make it, of tokens drawn from all of ``VOCABULARY``."""
    rng = np.random.default_rng(seed)
    log_weights, infos = np.zeros(particles), []
    for step in range(steps):
        ancestors, resampled = np.arange(particles), False
        if 0 < effective_sample_size(log_weights) < particles / 2:
            ancestors, resampled = systematic(rng, log_weights), True
            log_weights = np.full(particles, log_mean_exp(log_weights))
        increments = rng.normal(0, 0.5, particles)
        increments[rng.random(particles) < dying] = -math.inf
        increments[log_weights == -math.inf] = 0.0
        token_ids = rng.integers(len(VOCABULARY) - 1, size=(particles, 1))
        token_ids[log_weights == -math.inf] = -1
        log_weights = log_weights + increments
        infos.append(
            Info(
                step=step,
                resampled=resampled,
                ancestors=ancestors,
                token_ids=token_ids,
                log_increments=increments,
                log_weights=log_weights,
                ess=effective_sample_size(log_weights),
                log_evidence=log_mean_exp(log_weights),
                unfinished=int((log_weights > -math.inf).sum()),
                moved=np.zeros(particles, bool),
            )
        )
    texts = tuple(f"{'<&日' * 2000}{index}" for index in range(particles))
    return Result(
        texts=texts,
        token_ids=((0,),) * particles,
        values=texts,
        log_weights=log_weights,
        log_evidence=log_mean_exp(log_weights),
        infos=tuple(infos),
    )
