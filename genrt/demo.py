"""The demo: sequential Monte Carlo over the embedded model, with its posterior and the counters."""

from __future__ import annotations

import argparse
import math
import sys
import time

import genrt
from genrt.cluster.options import add_replica_arguments, replica_options
from genrt.constraints import regex
from genrt.engines import ENGINES
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference import SMC, Result, TextModel
from genrt.inference.formatting import printable
from genrt.runtime.statistics import Statistics

__all__ = ["add_arguments", "run"]

PROMPT = "What are the capitals of Australia and New Zealand?"
PATTERN = (
    r"The capital of Australia is [A-Z][a-z]+, and the capital of New Zealand is [A-Z][a-z]+\."
)
SHOWN = 12
"""Rows of the posterior's table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options; the defaults are the main job."""
    parser.description = (
        "Sequential Monte Carlo: texts of the model, given that they match a regular expression "
        "from their first to their last character."
    )
    option = parser.add_argument
    option("--model", help="a checkpoint directory or a model's name (default: the embedded model)")
    option("--engine", choices=ENGINES, default="vllm", help="what computes (default: vllm)")
    option("--prompt", default=PROMPT, help="the user's message, or for a base model plain text")
    option("--pattern", default=PATTERN, help="the regular expression")
    option("--particles", type=int, default=64, help="how many texts grow side by side (64)")
    option("--max-tokens", type=int, default=32, help="the longest text, in tokens (32)")
    option("--seed", type=int, default=0, help="equal seeds make equal runs (0)")
    add_replica_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo: messages and progress on stderr, the result on stdout. Return the exit code.

    Raises:
        GenrtError: an argument is wrong, usually before the model is loaded; or the engine failed.
    """
    _check_arguments(args)
    name = args.model or "the embedded model, which is unpacked the first time,"
    print(f"Loading {name} on engine {args.engine} …", file=sys.stderr, flush=True)
    with genrt.load(args.model, engine=args.engine, **replica_options(vars(args))) as lm:
        if getattr(lm.tokenizer, "chat_template", None) is None:
            prompt = lm.encode(args.prompt)
        else:
            prompt = lm.encode_chat([{"role": "user", "content": args.prompt}])
        constraint = regex(args.pattern, lm)
        model = TextModel(lm, prompt, max_tokens=args.max_tokens, constraint=constraint)
        began = time.perf_counter()
        result = SMC(model, num_particles=args.particles).run_sync(args.seed, progress=True)
        seconds = time.perf_counter() - began
    print(f"prompt   {printable(args.prompt)}\npattern  {printable(args.pattern)}\n")
    print("\n".join([*_posterior(result), "", *_figures(result), ""]))
    if result.statistics is not None:
        print("\n".join(_runtime(result.statistics, seconds)))
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    """Check the arguments as far as possible without the model. Raises InvalidRequest,
    InvalidConstraint."""
    for option, least in (("particles", 1), ("max_tokens", 1), ("seed", 0)):
        value = getattr(args, option)
        if value < least:
            name = option.replace("_", "-")
            raise InvalidRequest(f"--{name} is {value}: give an integer of at least {least}")
    if not args.prompt:
        raise InvalidRequest("--prompt is empty: give a text")
    if args.engine == "exact" and args.model is None:
        raise InvalidRequest(
            "--engine exact has no model of its own: give --model, a directory that NGram.save wrote"
        )
    replica_options(vars(args))
    with genrt.load(NGram.random(2, eos_token_id=1), engine="exact") as any_lm:
        regex(args.pattern, any_lm)


def _posterior(result: Result) -> list[str]:
    entries = result.posterior()
    if not entries:
        return ["Every particle died: none could match the pattern within the tokens it had."]
    rows = [("weight", "text")]
    rows += [(f"{weight:.4f}", printable(text)) for text, weight in entries[:SHOWN]]
    hidden = entries[SHOWN:]
    if hidden:
        rows.append((f"{sum(weight for _, weight in hidden):.4f}", f"({len(hidden)} more texts)"))
    return [f"{weight:>8}  {text}" for weight, text in rows]


def _figures(result: Result) -> list[str]:
    particles, steps = len(result.texts), len(result.infos)
    alive = sum(log_weight > -math.inf for log_weight in result.log_weights)
    probability = math.exp(result.log_evidence)
    matching = f"the model matches the pattern with probability {probability:.2g}"
    return [
        _line("log evidence", f"{result.log_evidence:.3f}", matching),
        _line("ESS", f"{result.ess:.1f}", f"of {particles} particles, {alive} of them alive"),
        _line("resampled", sum(info.resampled for info in result.infos), f"of {steps} steps"),
    ]


def _runtime(done: Statistics, seconds: float) -> list[str]:
    return [
        _line("questions", done.batcher.questions, "asked, one for each particle and token"),
        _line("deduplicated", done.batcher.deduplicated, "joined an equal question in flight"),
        _line("cache hits", done.cache.hits, "had been answered before"),
        _line("draws", done.engine.reads, "made where the rows are, equal contexts from one"),
        _line("engine rows", done.engine.rows, "were computed"),
        _line("engine steps", done.engine.steps, "computed them"),
        _line("engine time", f"{done.engine.seconds:.2f}", "seconds"),
        _line("wall time", f"{seconds:.2f}", "seconds, constraint and sampling included"),
    ]


def _line(name: str, figure: int | str, note: str) -> str:
    shown = figure if isinstance(figure, str) else f"{figure:,}"
    return f"{name:<12}  {shown:>8}  {note}"
