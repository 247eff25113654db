"""What sequential Monte Carlo costs beside the draws it is made of, in one run.

    python -m benchmarks.smc --particles 64 --json smc.json

A JSON schema with enumerations, integers and arrays constrains texts of a model; SMC runs them, constraint
and resampling included. Beside it the same number of particles draws as many tokens, each by
``await lm.draw(token_ids, mask=...)`` under masks that were made before. What is compared is the wall time
of a particle's step:

smc     one run, divided by the particle-steps it took
draw    the same contexts and masks as in that run, step by step, without constraint and resampling

Both take turns, and each repeat has a seed of its own, so that no row was asked for before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import genrt
from benchmarks.setups import machine, model_path
from genrt.constraints import ConstraintState, bitmasks, json_schema
from genrt.inference import SMC, State, TextModel, TextParticle
from genrt.lm import AsyncLM
