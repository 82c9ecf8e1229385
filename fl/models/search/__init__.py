"""The architectures that the server announces, and how clients choose among them (FedFA, Alg. 1)."""

from fl.models.search.budget import largest_within
from fl.models.search.evolve import evolve, exhaustive, search
from fl.models.search.space import Space, maximum
from fl.models.search.zico import zico

__all__ = ["Space", "evolve", "exhaustive", "largest_within", "maximum", "search", "zico"]
