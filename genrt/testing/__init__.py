"""Tests for users' own parts: a conformance suite for engines; for samplers a simulation, assertions and
exact posteriors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from genrt.engines.protocol import Engine
from genrt.testing import conformance
from genrt.testing.assertions import (
    CannotTell,
    assert_samples_from,
    assert_unbiased,
    assert_variance_bounded,
    assert_weighted_samples_from,
)
from genrt.testing.enumeration import ExactPosterior, exact_posterior
from genrt.testing.simulation import Faults, run_simulated
from genrt.testing.strategies import constraints, potentials, seeds, small_lms, token_sequences
from genrt.testing.witness import Witness

__all__ = [
    "CannotTell",
    "ExactPosterior",
    "Faults",
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
    "small_lms",
    "token_sequences",
]


def check_engine(
    open_engine: Callable[[], Engine],
    *,
    adapter_paths: Sequence[Path] = (),
    tolerance: float = 5e-4,
) -> None:
    """Check that an engine implements the protocol ``genrt.engines.protocol.Engine``.

    The suite opens one engine, runs all checks on it in turn and closes it twice. It fails for a model
    with equal rows for all contexts, because a mix-up would be invisible. Optional methods, those of
    ``FullEngine``, are not tested.

    Args:
        open_engine: opens a fresh engine with at least 16 tokens of context.
        adapter_paths: directories of adapters that fit the model. Their rows must differ from the base
            model's and from each other's. Two adapters test everything; without any, adapters are not
            tested.
        tolerance: the largest difference of two computations of a row, in any entry. The default is for
            float32; half precision on a GPU needs more.

    Raises:
        AssertionError: the engine breaks the protocol; the message says where.
    """
    engine = open_engine()
    try:
        witness = Witness(engine, tolerance)
        for check in conformance.CHECKS:
            check(witness)
        conformance.adapter_rows(witness, adapter_paths)
        conformance.idle(witness)
    finally:
        engine.close()
    engine.close()
