"""A policy as NeMo-RL's trainer generates with it: dictionaries of tensors in and out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.generation.rollouts import (
    RolloutBatch,
    RolloutOptions,
    is_for_each,
    rollout_samples,
    rollout_sync,
)
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, shown
from genrt.questions.contexts import check_seed, seed_at

__all__ = ["PolicyGeneration"]


class PolicyGeneration:
    """The generation of a trainer that hands over dictionaries, as NeMo-RL's does.

    What comes in has ``input_ids`` and ``input_lengths``, and may have ``stop_strings``: a list (or
    ``None``) for each sample, or a list for all. These end a sample beside those given here, and no other
    sample. Other fields are passed over. What comes out has the tensors of a ``Rollout`` by their names;
    ``BatchedDataDict(…)`` makes NeMo-RL's own dictionary of it.

    With a ``seed``, sample ``i`` of all that were asked so far is drawn with seed ``seed + i``, so
    that no two calls draw alike.

    New weights are ``lm.update_weights``'s; between two steps of training, ``finish_generation`` and
    ``prepare_for_generation`` give the GPU to the trainer and take it back."""

    def __init__(
        self, lm: AsyncLM, *, colocated: bool = False, **options: Unpack[RolloutOptions]
    ) -> None:
        """Take a runtime, and the options of ``rollout`` for all calls.

        Args:
            colocated: whether the trainer works on the same GPU.

        Raises:
            InvalidRequest: an option is wrong, or is a list for the samples of one batch.
        """
        check_bool("colocated", colocated)
        given: dict[str, Any] = {**options}
        for name in ("stop_strings", "stop_token_ids"):
            if is_for_each(given.get(name)):
                raise InvalidRequest(
                    f"{name} here are for all samples: give those of each with the batch"
                )
        ids, lengths = (torch.empty(shape, dtype=torch.int64) for shape in ((0, 0), (0,)))
        RolloutBatch(lm, ids, lengths, options, "PolicyGeneration")
        self._lm = lm
        self._is_colocated, self._is_asleep = colocated, False
        self._seed = check_seed(given.pop("seed", None))
        stops = given.pop("stop_strings", None)
        self._stops = [stops] if isinstance(stops, str) else list(stops or ())
        self._options = given

    def prepare_for_generation(self) -> None:
        """Have the GPU's memory back after ``finish_generation``, blocking; else nothing happens. Raises
        as ``AsyncLM.wake_up``."""
        if self._is_asleep:
            self._lm.wake_up_sync()
            self._is_asleep = False

    def finish_generation(self) -> None:
        """End what is under way, and forget what was computed. Where the trainer is colocated, free the
        GPU's memory: ``generate`` raises EngineFailed until ``prepare_for_generation``. Idempotent; it
        blocks, and raises as ``AsyncLM.sleep``."""
        if not self._is_colocated:
            self._lm.reset_prefix_cache()
        elif not self._is_asleep:
            self._lm.sleep_sync(asked="raise")
            self._is_asleep = True

    def generate(self, data: Mapping[str, Any], *, greedy: bool = False) -> dict[str, Tensor]:
        """Return the rollout of a batch, blocking, as ``rollout_sync`` does. ``greedy`` draws the
        likeliest tokens. Raises InvalidRequest if a field is missing or wrong; else as ``rollout``."""
        ids, lengths, options = self._asked(data, greedy)
        return rollout_sync(self._lm, ids, lengths, **options).as_dict()

    async def generate_async(
        self, data: Mapping[str, Any], *, greedy: bool = False
    ) -> AsyncGenerator[tuple[int, dict[str, Tensor]], None]:
        """Yield the number of each sample and its rollout, a batch of one, as they finish, for batches of
        any size; raises as ``generate``, leaving early as ``rollout_samples``."""
        ids, lengths, options = self._asked(data, greedy)
        async with contextlib.aclosing(
            rollout_samples(self._lm, ids, lengths, **options)
        ) as samples:
            async for number, sample in samples:
                yield number, sample.as_dict()

    def _asked(
        self, data: Mapping[str, Any], greedy: bool
    ) -> tuple[Tensor, Tensor, RolloutOptions]:
        """Return the batch and its options, and count its samples as asked."""
        check_bool("greedy", greedy)
        if not isinstance(data, Mapping):
            raise InvalidRequest(f"data must be a mapping of fields, got {shown(data)}")
        if missing := [each for each in ("input_ids", "input_lengths") if each not in data]:
            raise InvalidRequest(f"data has no {missing[0]!r}")
        ids, lengths = data["input_ids"], data["input_lengths"]
        options = {**self._options, "stop_strings": self._united(data.get("stop_strings"))}
        if greedy:
            options["temperature"] = 0.0
        if self._seed is not None:
            options["seed"] = self._seed
            self._seed = seed_at(
                self._seed, len(ids) if isinstance(ids, Tensor) and ids.dim() else 0
            )
        return ids, lengths, cast("RolloutOptions", options)

    def _united(self, stops: Any) -> Any:
        """Return stop strings with those of all batches; what is none is refused where it is asked."""
        if stops is None:
            return self._stops
        if is_for_each(stops):
            return [self._united(each) for each in stops]
        more = [stops] if isinstance(stops, str) else stops
        return [*self._stops, *more] if isinstance(more, list | tuple) else more
