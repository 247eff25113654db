"""Fresh seeds of the simulator for a given time: ``python -m tests.simulation.soak --seconds 600``."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Sequence

from tests.simulation.simulation import simulate

REPORT_SECONDS = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seed after seed until the time is up, at least one; 1 if one of them found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default: 600)")
    parser.add_argument("--operations", type=int, default=300, help="in each run (default: 300)")
    parser.add_argument("--seed", type=int, help="where to start (default: anywhere)")
    options = parser.parse_args(arguments)
    first = random.SystemRandom().getrandbits(40) if options.seed is None else options.seed
    started = reported = time.monotonic()
    operations = 0
    for seeds in itertools.count(1):
        seed = first + seeds - 1
        try:
            held = seed % 2 == 1
            report = simulate(seed, operations=options.operations, populations=held, contexts=held)
            operations += report.operations
        except AssertionError as error:
            print(error)
            print(f"{seeds - 1:,} seeds from {first} on did not fail")
            return 1
        now = time.monotonic()
        is_over = now - started >= options.seconds
        if is_over or now - reported >= REPORT_SECONDS:
            reported = now
            print(
                f"{now - started:.0f} s: {seeds:,} seeds from {first} on, {operations:,} operations"
            )
            sys.stdout.flush()
        if is_over:
            return 0
    raise RuntimeError("there are no more seeds")


if __name__ == "__main__":
    sys.exit(main())
