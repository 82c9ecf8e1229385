"""All that the rest of the project knows about a method."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Literal

import torch

from fl.algorithms.algorithm import Algorithm, Server
from fl.algorithms.parts.private import private
from fl.base.columns import Column
from fl.base.errors import FLError
from fl.base.settings import check_types, check_values
from fl.federation import Federation
from fl.federation.client_models import ClientModels
from fl.federation.compression import UNSENT
from fl.federation.requirements import REQUIREMENTS

KINDS = ("global", "personalized", "heterogeneous")


@dataclass(frozen=True)
class Method:
    """A federated method. To add one, add a file to this folder that calls it METHOD.

    Attributes:
        make: (federation) or (federation, options) -> the algorithm. The function's name is the name of the method.
        options: the defaults, a frozen dataclass whose fields become flags and settings; None for a method without
            options.
        clients: which models clients have: the "global" one, "personalized" ones, or parts of the global one, of
            "heterogeneous" architectures.
        columns: the metrics that its rounds report beside the traffic (the server function returns them), columns of
            metrics.csv: from the name to int or float, or to a whole `fl.base.columns.Column` if tables and figures are
            to show it.
        refuses: from what the method cannot do (see `fl.federation.requirements.REQUIREMENTS`) to the reason. A method
            whose clients are not "heterogeneous" refuses several architectures by itself, and one whose clients are
            refuses rules that choose among whole models, and differential privacy.
        sees: what its server function needs of the updates: "each", or no more than their "mean". Only then can they be
            private or masked: each of them is the mean there.
        pathways: (options, server) -> (what each level holds, see `Levels.names`; the models that clients add up).
            `fl.Pathways` reads the levels of a run folder with it, without the data. None for methods without levels.
        labels: options -> whether the server has to know how many samples of each class every client has. Clients on
            other machines are asked only then.
        base_changes: whether the server changes the weights that adapters are beside. States then have them, which are
            constants of the model otherwise; clients on other machines, to whom no base is sent, refuse the method.
        validates: options -> whether clients need samples to validate on. Runs hold some out for it.
    """

    make: Callable[..., Algorithm]
    options: Any = None
    clients: Literal["global", "personalized", "heterogeneous"] = "global"
    columns: Mapping[str, type | Column] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    sees: Literal["each", "mean"] = "each"
    base_changes: bool = False
    pathways: Callable[[Any, Server], tuple[Sequence[str], ClientModels]] | None = None
    validates: Callable[[Any], bool] = lambda options: False
    labels: Callable[[Any], bool] = lambda options: False

    def __post_init__(self) -> None:
        name = getattr(self.make, "__name__", "")
        if not callable(self.make) or not name.isidentifier():
            raise FLError(f"not a method: make is a function with a name, got {self.make!r}")
        frozen = is_dataclass(self.options) and type(self.options).__hash__ is not None
        for wrong, what in (
            (
                self.options is not None and (not frozen or isinstance(self.options, type)),
                f"options are a frozen dataclass with its defaults, such as FedProxOptions(), got {self.options!r}",
            ),
            (self.clients not in KINDS, f"clients is one of {', '.join(KINDS)}, got {self.clients!r}"),
            (self.sees not in ("each", "mean"), f"sees is each or mean, got {self.sees!r}"),
            (
                [one for one in self.columns.values() if one not in (int, float) and not isinstance(one, Column)],
                f"columns are int or float, or a Column, got {dict(self.columns)}",
            ),
            (
                set(self.refuses) - set(REQUIREMENTS),
                f"refuses names some of {', '.join(REQUIREMENTS)}, got {dict(self.refuses)}",
            ),
        ):
            if wrong:
                raise FLError(f"not a method, {name}: {what}")
        if self.options is not None:
            check_types(self.options)

    @property
    def name(self) -> str:
        """What it is called on the command line.

        >>> from fl.algorithms import fedavg
        >>> fedavg.name
        'fedavg'
        """
        return self.make.__name__

    def __call__(self, fed: Federation, options: Any = None) -> Algorithm:
        """The algorithm, with these options, or with the defaults. Raises FLError as `check` does."""
        options = self.options if options is None else options
        self.check(fed, options)
        algorithm = self.make(fed) if self.options is None else self.make(fed, options)
        algorithm = _remembering(algorithm) if fed.compression.feedback else algorithm
        return private(algorithm) if fed.privacy.clip else algorithm

    def check(self, fed: Federation, options: Any = None) -> None:
        """Raise FLError if the federation asks for what the method refuses, or an option is out of its limits."""
        self.refuse(fed.requirements)
        if options is not None:
            if not isinstance(options, type(self.options)):
                raise FLError(f"{self.name} takes {type(self.options).__name__}, got {type(options).__name__}")
            check_values(options, self.name)

    def refuse(self, requirements: Collection[str]) -> None:
        """Raise FLError if a requirement (see `Federation.requirements`) is one that the method does not meet."""
        by_kind = {"architectures": "gives all clients one architecture"}
        if self.clients == "heterogeneous":
            by_kind = {
                "choosing": "averages parts of models, whose distances say nothing",
                "feedback": "gives clients parts of models, and what is left unsent is of another part's",
                "privacy": "averages parts of models, by how many have each",
            }
        if self.clients == "personalized":
            by_kind["pace"] = "has models that stay with clients, and --pace counts the steps of one that travels"
        reasons = {**by_kind, **self.refuses}
        if self.sees != "mean":  # which is all that noise leaves
            reasons.setdefault("privacy", "may look at single updates (Method(..., sees='mean') says that it does not)")
        for what, reason in reasons.items():
            if what in requirements:
                raise FLError(
                    f"{self.name} {reason}: leave {REQUIREMENTS[what].flags} out, or take another --algorithm"
                )


def _remembering(algorithm: Algorithm) -> Algorithm:
    """The method whose server keeps beside the rest what compression leaves unsent, nothing at first."""
    fed = algorithm.fed

    def init() -> Server:
        nothing = {name: torch.zeros_like(p, requires_grad=False) for name, p in fed.trainable.items()}
        return {**algorithm.init(), UNSENT: fed.client_states(nothing)}

    return replace(algorithm, init=init)
