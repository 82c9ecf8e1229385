"""The population, how a cohort of it trains, and what reaches the server."""

from fl.federation.federation import Federation

__all__ = ["Federation"]
