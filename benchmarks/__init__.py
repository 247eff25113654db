"""Measurements: figures and ratios of one run on one machine. Tests never time anything."""
