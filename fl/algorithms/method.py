"""What everything outside a method's own file knows of it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fl.algorithms.algorithm import Algorithm
from fl.base.errors import FLError
from fl.federation import Federation
from fl.federation.population import ASKED


@dataclass(frozen=True)
class Method:
    """A federated method. Each file of this folder that has one calls it METHOD; that is all it takes to add one.

    Attributes:
        make: (federation) or (federation, options) -> the algorithm. Its name is the method's.
        options: the defaults, a frozen dataclass whose fields become flags and settings; None for a method without.
        clients: what clients have: "one" model for all, models of their "own", or models of "mixed" architectures.
        columns: what its rounds bring along as `Trained.metrics` beside the traffic, for metrics.csv: from the name to
            int or float.
        refuses: from what the method cannot do (see `fl.federation.population.ASKED`) to the reason.
    """

    make: Callable[..., Algorithm]
    options: Any = None
    clients: Literal["one", "own", "mixed"] = "one"
    columns: Mapping[str, type] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is called on the command line.

        >>> from fl.algorithms import fedavg
        >>> Method(fedavg).name
        'fedavg'
        """
        return self.make.__name__

    def __call__(self, fed: Federation, config: Any) -> Algorithm:
        """The algorithm, with the options that settings have under the method's name."""
        return self.make(fed) if self.options is None else self.make(fed, getattr(config, self.name))

    def check(self, asked: Collection[str]) -> None:
        """Raise FLError if something is asked for (see `Population.asked`) that the method refuses."""
        for what, reason in self.refuses.items():
            if what in asked:
                raise FLError(f"{self.name} {reason}: leave {ASKED[what]} out, or take another --algorithm")
