"""Rules by which the server averages the models that clients send."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

import surgery
from surgery import Plan, Stack, State


class Aggregator(Protocol):
    """A rule by which the server averages, see `Federation.average`.

    Attributes:
        chooses: whether it chooses among whole models.
    """

    @property
    def chooses(self) -> bool:
        """True if it chooses among whole models."""

    def average(
        self,
        models: Stack | Sequence[State],
        weights: Any = None,
        fallback: Mapping[str, Tensor] | None = None,
        names: Container[str] = (),
        *,
        plans: Sequence[Plan] | None = None,
        factors: Mapping[str, Tensor] | None = None,
    ) -> State | Stack:
        """Average models, or parts of models; `names` are the trained parameters' names.

        A rule without a method of its own averages as `surgery.average` does.
        """
        return surgery.average(models, plans, weights, fallback, factors=factors)


@dataclass(frozen=True)
class WeightedMean(Aggregator):
    """The mean, weighted by the clients' numbers of samples."""

    chooses: bool = False
