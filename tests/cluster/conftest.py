"""Replicas of this process in the place of Ray's actors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from genrt.cluster import engine
from tests.cluster.here import ReplicasHere


@pytest.fixture(scope="module")
def here() -> Iterator[None]:
    """Have ``genrt.load(…, replicas=N)`` open replicas in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "Actors", ReplicasHere)
        yield
