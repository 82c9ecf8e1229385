"""The population, how a cohort of it trains, and what reaches the server."""

from fl.federation.federation import Federation
from fl.federation.local_training import LocalTraining

__all__ = ["Federation", "LocalTraining"]
