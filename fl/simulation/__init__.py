"""Training: the rounds of a run, runs one after another, sweeps."""

from fl.runs.folder import load_model
from fl.simulation.one_run import simulate

__all__ = ["load_model", "simulate"]
