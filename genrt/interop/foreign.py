"""Imports packages that change the process, and restores their changes."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from genrt.errors import EngineNotInstalled

__all__ = ["importing"]

PREFIX = "VLLM_"
"""The prefix of the environment variables that vLLM reads; genlm-backend sets three of them."""


@contextmanager
def importing(extra: str) -> Iterator[None]:
    """Guard the import of packages that ``genrt[extra]`` brings: restore vLLM's environment variables and
    the level of its logger afterwards, and show no warnings.

    Raises:
        EngineNotInstalled: a package is missing, or is not a version that genrt knows.
    """
    before = _settings()
    logger = logging.getLogger("vllm")
    level = logger.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImportError as error:
        raise EngineNotInstalled(
            f"{extra} cannot be imported ({error}): install it with pip install 'genrt[{extra}]'"
        ) from error
    finally:
        logger.setLevel(level)
        for name in _settings().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
