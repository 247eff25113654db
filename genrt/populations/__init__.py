"""Populations: the particles of a sampler as arrays, asked about by one question a step."""

from genrt.populations.batches import Batches
from genrt.populations.beginning import Prompts, begin
from genrt.populations.home import Home
from genrt.populations.population import Population

__all__ = ["Batches", "Home", "Population", "Prompts", "begin"]
