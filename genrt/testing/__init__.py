"""Tests for what users bring themselves: the conformance suite that any Engine must pass, a simulator
of the whole runtime for their samplers, and the laws of right samplers with the exact answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from genrt.engines.protocol import Engine
from genrt.testing import completing, conformance
from genrt.testing.enumeration import ExactPosterior, exact_posterior
from genrt.testing.laws import (
    CannotTell,
    assert_samples_from,
    assert_unbiased,
    assert_variance_bounded,
    assert_weighted_samples_from,
)
from genrt.testing.simulated_engine import Faults
from genrt.testing.simulation import Report, run_simulated, simulate
from genrt.testing.strategies import constraints, potentials, seeds, small_lms, token_sequences
from genrt.testing.witness import Witness

__all__ = [
    "CannotTell",
    "ExactPosterior",
    "Faults",
    "Report",
    "assert_samples_from",
    "assert_unbiased",
    "assert_variance_bounded",
    "assert_weighted_samples_from",
    "check_engine",
    "constraints",
    "exact_posterior",
    "potentials",
    "run_simulated",
    "seeds",
    "simulate",
    "small_lms",
    "token_sequences",
]


def check_engine(
    open_engine: Callable[[], Engine],
    *,
    adapter_paths: Sequence[Path] = (),
    tolerance: float = 5e-4,
) -> None:
    """Check an engine against the protocol of ``genrt.engines.protocol``; return if it keeps it.

    One engine is opened, asked everything in turn, and closed twice. Its model must tell contexts
    apart: on one whose rows are all alike a mix-up could not be seen, and the suite says so.

    Args:
        open_engine: opens a fresh engine of at least 16 tokens of context.
        adapter_paths: directories of adapters that fit the model, whose rows differ from the base
            model's and from each other's; two test all there is to test, none leaves adapters
            untested.
        tolerance: how far two computations of one row may be apart in any entry. The default is for
            float32; half precision on a GPU needs more.

    Raises:
        AssertionError: the engine breaks the protocol; the message says where.
    """
    engine = open_engine()
    try:
        witness = Witness(engine, tolerance)
        for check in (*conformance.CHECKS, *completing.COMPLETION_CHECKS):
            check(witness)
        conformance.adapters(witness, adapter_paths)
        conformance.idle(witness)
    finally:
        engine.close()
    engine.close()
