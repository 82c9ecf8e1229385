"""Who the clients are and how they train: everything that a cohort's training reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import surgery
from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.data import Dataset
from fl.engine import SGD, Optimizer, Precision, check
from fl.engine.augment import Augment
from fl.engine.schedule import Schedule
from fl.engine.work import Meter
from fl.federation.attack import Attack
from fl.federation.defence import Defence
from fl.federation.presence import Presence
from fl.models.fleet import Fleet, uniform
from fl.partition import Splits
from surgery import State
from surgery.transfer import upload
from zoo import Spec

ASKED = {
    "masked": "--masked-loss",
    "tampering": "--attack and --defence",
    "presence": "--joining and --leaving",
}
"""What not every method can do, by the flags that ask for it."""


@dataclass(frozen=True)
class Population:
    """A population of clients and the way they train.

    Attributes:
        model: the architecture and its initial weights, on the device of the data. Its weights are never
            changed; its mode (training, evaluation) is.
        data: the data set, on the device that trains.
        clients: each client's samples, indices on the CPU; any sequence of `Split` is taken and packed.
        participants: K, how many clients train in a round.
        epochs, batch_size, optimizer: local training; the optimizer starts afresh every round.
        backend: see `fl.engine`.
        schedule: the learning rate's factor in each round, see `fl.engine.schedule`.
        chunk: how many clients train at a time, to save memory; 0 is all of a round's.
        augment: what training images go through.
        precision: in which numbers and memory layout clients train.
        create: makes the model anew with weights drawn from a generator, for methods that need several; or None.
        repeats: steps that a client makes on each of its batches.
        spec: what makes the model; None for one that was given as a module.
        fleet: each client's architecture, for methods in which they differ; the model is then the global one, which
            contains them all. None: all have the model.
        attack: malicious clients and what they do; None: all are honest.
        defence: how the server averages, see `average` and `average_submodels`.
        presence: the rounds in which each client takes part; None: all are there in every round.
        masked: whether clients train with logits of 0 for the classes that they do not have
            (`fl.engine.objectives.masked`).
        truth: the cluster that each client's data were dealt out in, on each level: [levels, clients]; None: unknown.
        meter: adds up what the clients compute.
    """

    model: nn.Module
    data: Dataset
    clients: Splits
    participants: int
    epochs: int = 5
    batch_size: int = 50
    optimizer: Optimizer = SGD()
    backend: str = "auto"
    schedule: Schedule = lambda _: 1.0
    chunk: int = 0
    augment: Augment = Augment()
    precision: Precision = Precision()
    create: Callable[[torch.Generator], nn.Module] | None = None
    repeats: int = 1
    spec: Spec | None = None
    fleet: Fleet | None = None
    attack: Attack | None = None
    defence: Defence = Defence()
    presence: Presence | None = None
    masked: bool = False
    truth: Tensor | None = None
    meter: Meter = field(default_factory=Meter, repr=False, compare=False)
    _held: dict[int, Tensor] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", Splits.of(self.clients))
        if self.fleet is not None and len(self.fleet) != len(self.clients):
            raise FLError(f"{len(self.fleet)} architectures for {len(self.clients)} clients: give one each")
        if not 1 <= self.participants <= len(self.clients):
            raise FLError(f"{self.participants} participants a round: there are {len(self.clients)} clients")
        if len(empty := (self.clients.train.sizes == 0).nonzero()):
            raise FLError(f"client {int(empty[0])} has no training samples ({len(empty)} such clients)")
        if not any(p.requires_grad for p in self.model.parameters()):
            raise FLError(f"{type(self.model).__name__} has no parameter to train: all are frozen")
        check(self.backend, self.data.x.device, self.precision)
        if self.data.text and (self.augment.crop or self.augment.flip):
            raise FLError("text is not cropped or flipped: leave --crop and --flip out")
        if not self.data.text and self.augment.crop >= min(self.data.x.shape[-2:]):
            raise FLError(
                f"--crop {self.augment.crop} is as large as the images or larger: use a smaller one, such as 4"
            )

    @property
    def architectures(self) -> Fleet:
        """Each client's architecture, if it is the model's."""
        return self.fleet or uniform(self.model, len(self.clients))

    @property
    def asked(self) -> set[str]:
        """Which of `ASKED` this population asks of a method."""
        wanted = {
            "masked": self.masked,
            "tampering": self.attack is not None or self.defence != Defence(),
            "presence": self.presence is not None,
        }
        return {what for what, given in wanted.items() if given}

    def initial(self, generator: torch.Generator | None = None) -> State:
        """The state that training starts from, or another one whose weights are drawn from the generator."""
        model = self.model
        if generator is not None:
            if self.create is None:
                raise FLError("a method that starts several models needs Federation(create=...), which makes them")
            model = self.create(generator).to(self.data.x.device, non_blocking=True)
        return {name: tensor.clone() for name, tensor in surgery.state(model).items()}

    def sample(self, rng: Rng) -> list[int]:
        """K distinct clients of those who are there, uniformly and in random order, the same for every method with
        that seed and round.
        """
        if self.presence is None:
            return draw(len(self.clients), self.participants, rng.torch("sample"))
        there = self.presence.at(rng.round)
        return [there[i] for i in draw(len(there), self.participants, rng.torch("sample"))]

    def held(self, clients: Sequence[int]) -> Tensor:
        """Which classes (of text: tokens) each of the clients has in its training samples: bool [K, classes].

        Malicious clients also have those of their spoilt samples.
        """
        if fresh := [client for client in dict.fromkeys(clients) if client not in self._held]:
            table = torch.zeros(len(fresh), self.data.classes, dtype=torch.bool, device=self.data.y.device)
            self._mark(table, dict(enumerate(fresh)), self.data)
            if bad := self.attack.rows(fresh) if self.attack else []:
                self._mark(table, {row: fresh[row] for row in bad}, self.attack.data)
            self._held.update(zip(fresh, table))
        return torch.stack([self._held[client] for client in clients])

    def _mark(self, table: Tensor, clients: dict[int, int], data: Dataset) -> None:
        """Set table[row, c] where the row's client has class (or token) c in its training samples."""
        parts = [self.clients.train[client] for client in clients.values()]
        rows = torch.tensor(list(clients)).repeat_interleave(torch.tensor([len(part) for part in parts]))
        index, rows = (upload(tensor, table.device) for tensor in (torch.cat(parts), rows))
        for values in (data.y, data.x) if data.text else (data.y,):
            seen = values[index]
            places = rows.view(-1, *[1] * (seen.ndim - 1)).expand_as(seen), seen.long()
            table.index_put_(places, table.new_ones(()))
