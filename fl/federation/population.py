"""Who the clients are: their data, their models and when they are there."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn

import surgery
from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.data import Dataset
from fl.federation.elsewhere import Elsewhere
from fl.federation.presence import Presence
from fl.models.fleet import Fleet, uniform
from fl.models.init import Start
from fl.partition import Splits
from surgery import Stack, State
from zoo import Spec


@dataclass(frozen=True)
class Population:
    """A population of clients.

    Attributes:
        model: the architecture and its initial weights, on the device of the data. Its weights are never
            changed; its mode (training, evaluation) is.
        data: the data set, on the device that trains.
        clients: each client's samples, indices on the CPU; any sequence of `Split` is accepted and packed.
        participants: K, how many clients train in a round.
        create: makes the model anew with weights drawn from a generator, for methods that need several; or None.
        spec: what makes the model; None for one that was given as a module.
        fleet: each client's architecture, for methods in which they differ; the model is then the global one, which
            contains them all. None: all clients have the model.
        presence: the rounds in which each client takes part; None: all are there in every round.
        start: the trained weights that the run begins with; None: they are drawn.
        truth: the cluster that each client's data were dealt out in, on each level: [levels, clients]; None: unknown.
        elsewhere: the way to clients on other machines, who train there; None: all clients are here.
    """

    model: nn.Module
    data: Dataset
    clients: Splits
    participants: int
    _: KW_ONLY
    create: Callable[[torch.Generator], nn.Module] | None = None
    spec: Spec | None = None
    fleet: Fleet | None = None
    presence: Presence | None = None
    start: Start | None = None
    truth: Tensor | None = None
    elsewhere: Elsewhere | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", Splits.of(self.clients))
        if self.fleet is not None and len(self.fleet) != len(self.clients):
            raise FLError(f"{len(self.fleet)} architectures for {len(self.clients)} clients: give one each")
        if not 1 <= self.participants <= len(self.clients):
            raise FLError(f"{self.participants} participants a round: there are {len(self.clients)} clients")
        if len(empty := (self.clients.train.sizes == 0).nonzero()):
            raise FLError(f"client {int(empty[0])} has no training samples ({len(empty)} such clients)")
        if not self.trainable:
            raise FLError(f"{type(self.model).__name__} has no parameter to train: all are frozen")

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The model's parameters that are trained, by name and in the model's order; frozen ones are left out."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def frozen(self) -> set[str]:
        """The names of the model's parameters that are not trained."""
        return {name for name, p in self.model.named_parameters() if not p.requires_grad}

    def keep_frozen(self, models: Stack, mean: State | Stack) -> State | Stack:
        """The mean of models, or several means, with the frozen parameters that the models have. These are equal, and
        rounding would change them: a weighted sum of equal numbers can differ from them in its last bit.
        """
        kept = {}
        for name in self.frozen.intersection(mean, models):  # which may be some layers' alone
            same = (models[name] == models[name][:1]).all(0)
            kept[name] = torch.where(same, models[name][0], mean[name])
        return mean | kept

    @property
    def fleet_or_uniform(self) -> Fleet:
        """Each client's architecture; without a fleet it is the model's for all clients."""
        return self.fleet or uniform(self.model, len(self.clients))

    def initial(self, generator: torch.Generator | None = None) -> State:
        """The state that training starts from, or another one whose weights are drawn from the generator."""
        model = self.model
        if generator is not None:
            if self.create is None:
                raise FLError(
                    "a method that starts several models from different weights needs a function that makes them: "
                    "model=MyNet in the place of a module, or Federation(create=...)"
                )
            model = self.create(generator).to(self.data.x.device, non_blocking=True)
        return {name: tensor.clone() for name, tensor in surgery.state(model).items()}

    def sample(self, rng: Rng) -> list[int]:
        """K different clients of those who are there, drawn uniformly and in random order. They are the same for every
        method in the same round with the same seed.
        """
        if self.presence is None:
            return draw(len(self.clients), self.participants, rng.torch("sample"))
        there = self.presence.at(rng.round)
        return [there[i] for i in draw(len(there), self.participants, rng.torch("sample"))]
