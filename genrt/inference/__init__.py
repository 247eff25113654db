r"""Inference over texts and programs: a model grows traces, kernels change weighted ones, samplers run.

``TextModel`` and ``Program`` are the models. ``SMC`` and the other algorithms have ``init(seed)``,
``step(state)``, ``run(seed)`` and ``run_sync(seed)``.
``run`` returns a ``Result``: weighted texts, the evidence, and the records of the steps. An argument
that is out of range raises InvalidRequest.
"""

from __future__ import annotations

from genrt.inference.awrs import AWRS
from genrt.inference.estimates import ChainStatistics, Diagnosis
from genrt.inference.infilling import infilling
from genrt.inference.kernels import branch, chain, extend, keep, move, repeat, resample, reweight
from genrt.inference.laws import Law
from genrt.inference.metropolis import MetropolisHastings, ParticleGibbs
from genrt.inference.model import Deaths, Info, Model, State, Trace
from genrt.inference.programs import Execution, Program, ProgramTrace
from genrt.inference.recipes import (
    BestOfN,
    Rejection,
    beam_search,
    best_first,
    resample_move,
    stochastic_beam_search,
    tempered,
    without_replacement,
)
from genrt.inference.resampling import (
    Resampler,
    effective_sample_size,
    log_mean_exp,
    multinomial,
    optimal,
    partial,
    residual,
    stratified,
    systematic,
)
from genrt.inference.result import Result
from genrt.inference.samplers import (
    SMC,
    Bounds,
    Comparison,
    Sampler,
    Several,
    compare,
    compare_sync,
    evidence_bounds,
    evidence_bounds_sync,
    importance_sampling,
    several,
    several_sync,
)
from genrt.inference.text_model import TextModel
from genrt.inference.texts import END_TOKEN, TextTrace
from genrt.tokens.texts import batched

__all__ = [
    "AWRS",
    "END_TOKEN",
    "SMC",
    "BestOfN",
    "Bounds",
    "ChainStatistics",
    "Comparison",
    "Deaths",
    "Diagnosis",
    "Execution",
    "Info",
    "Law",
    "MetropolisHastings",
    "Model",
    "ParticleGibbs",
    "Program",
    "ProgramTrace",
    "Rejection",
    "Resampler",
    "Result",
    "Sampler",
    "Several",
    "State",
    "TextModel",
    "TextTrace",
    "Trace",
    "batched",
    "beam_search",
    "best_first",
    "branch",
    "chain",
    "compare",
    "compare_sync",
    "effective_sample_size",
    "evidence_bounds",
    "evidence_bounds_sync",
    "extend",
    "importance_sampling",
    "infilling",
    "keep",
    "log_mean_exp",
    "move",
    "multinomial",
    "optimal",
    "partial",
    "repeat",
    "resample",
    "resample_move",
    "residual",
    "reweight",
    "several",
    "several_sync",
    "stochastic_beam_search",
    "stratified",
    "systematic",
    "tempered",
    "without_replacement",
]
