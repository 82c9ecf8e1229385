"""All that the rest of the project knows about a method."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Literal

from fl.algorithms.algorithm import Algorithm, Server
from fl.base.columns import Column
from fl.base.errors import FLError
from fl.base.plugins import check_takes
from fl.base.settings import check_types, check_values
from fl.federation import Federation, capabilities
from fl.federation.capabilities import CAPABILITIES, LACKING
from fl.federation.client_models import ClientModels

KINDS = ("global", "personalized", "heterogeneous")
_TAKES = {
    "init": "",
    "client": "message, client_states, clients, rng",
    "aggregate": "server, clients, update, rng",
    "send": "server, clients, rng",
    "models": "server",
}
"""The arguments of an algorithm's functions that most methods have."""


@dataclass(frozen=True)
class Method:
    """A federated method, with its options and capabilities.

    To add one, add a file to this folder that calls it METHOD, or give its import path.

    Attributes:
        make: (federation) or (federation, options) -> the algorithm. The function's name is the name of the method.
        options: the defaults, a frozen dataclass. Its fields become flags and settings. None for a method without
            options.
        clients: which models clients have: the "global" one, "personalized" ones, or parts of the global one, of
            "heterogeneous" architectures.
        columns: the metrics that its rounds report beside the traffic (the server function returns them), columns of
            metrics.csv: from the name to int or float, or to a whole `fl.base.columns.Column` if tables and figures are
            to show it.
        lacks: what the method cannot do of `fl.federation.capabilities.CAPABILITIES`, beside what all methods with such
            `clients` lack.
        mean_only: whether its server function needs no more than the mean of the updates. Only then can they be
            private: each of them is the mean there.
        own_architectures: whether clients may have models of any architectures, since no weights are combined: see
            `fl.algorithms.parts.own_models`.
        pathways: (options, server) -> (what each level holds, see `Levels.names`; the models that clients add up).
            `fl.Pathways` reads the levels of a run folder with it, without the data. None for methods without levels.
        labels: options -> whether the server has to know how many samples of each class every client has. Clients on
            other machines are asked only then.
        base_changes: whether the server changes the weights that an extension makes constant (`ModelChange`). States
            then have them; clients on other machines, to whom no constants are sent, refuse the method.
        validates: options -> whether clients need samples to validate on. Runs hold some out for it.
    """

    make: Callable[..., Algorithm]
    options: Any = None
    clients: Literal["global", "personalized", "heterogeneous"] = "global"
    columns: Mapping[str, type | Column] = field(default_factory=dict)
    lacks: Collection[str] = frozenset()
    mean_only: bool = False
    own_architectures: bool = False
    base_changes: bool = False
    pathways: Callable[[Any, Server], tuple[Sequence[str], ClientModels]] | None = None
    validates: Callable[[Any], bool] = lambda options: False
    labels: Callable[[Any], bool] = lambda options: False

    def __post_init__(self) -> None:
        name = getattr(self.make, "__name__", "")
        if not callable(self.make) or not name.isidentifier():
            raise FLError(f"not a method: make is a function with a name, got {self.make!r}")
        frozen = is_dataclass(self.options) and type(self.options).__hash__ is not None
        for wrong, rule in (
            (
                self.options is not None and (not frozen or isinstance(self.options, type)),
                f"options are a frozen dataclass with its defaults, such as FedProxOptions(), got {self.options!r}",
            ),
            (self.clients not in KINDS, f"clients is one of {', '.join(KINDS)}, got {self.clients!r}"),
            (
                [kind for kind in self.columns.values() if kind not in (int, float) and not isinstance(kind, Column)],
                f"columns are int or float, or a Column, got {dict(self.columns)}",
            ),
            (
                isinstance(self.lacks, str) or set(self.lacks) - set(CAPABILITIES),
                f"lacks names some of {', '.join(CAPABILITIES)}, got {self.lacks!r}",
            ),
        ):
            if wrong:
                raise FLError(f"not a method, {name}: {rule}")
        if self.options is not None:
            check_types(self.options)

    @property
    def name(self) -> str:
        """The name on the command line.

        >>> from fl.algorithms.fedavg import METHOD as fedavg
        >>> fedavg.name
        'fedavg'
        """
        return self.make.__name__

    def __call__(self, fed: Federation, options: Any = None) -> Algorithm:
        """Make the algorithm, with options or defaults; raises FLError as `check` does."""
        options = self.options if options is None else options
        self.check(fed, options)
        unnamed = self.make(fed) if self.options is None else self.make(fed, options)
        for name, arguments in _TAKES.items():
            if function := getattr(unnamed, name):
                check_takes(f"{name} of {self.name}", function, arguments)
        algorithm = replace(unnamed, name=self.name, lacks=unnamed.lacks | self.all_lacks)
        algorithm.check(fed.needs())
        return algorithm

    @property
    def all_lacks(self) -> frozenset[str]:
        """The capabilities that it lacks, or that every method with such clients lacks."""
        lacking = LACKING[self.clients].union(self.lacks, () if self.mean_only else {"mean_only"})
        return lacking - {"architectures"} if self.own_architectures else lacking | {"own_architectures"}

    def check(self, fed: Federation, options: Any = None) -> None:
        """Raise FLError for a need that the method lacks, or an option out of limits."""
        self.refuse(fed.needs())
        if options is not None:
            if not isinstance(options, type(self.options)):
                raise FLError(f"{self.name} takes {type(self.options).__name__}, got {type(options).__name__}")
            check_values(options, self.name)

    def refuse(self, needs: Mapping[str, str]) -> None:
        """Raise FLError if the method lacks something needed, see `Algorithm.check`."""
        capabilities.check(self.name, self.all_lacks, needs)
