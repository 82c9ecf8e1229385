"""Clients, data, model and local-training settings: all that an algorithm composes its rounds from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import surgery
from fl.attack import Attack
from fl.augment import Augment
from fl.data import Dataset
from fl.defence import Defence
from fl.engine import SGD, Optimizer, Precision, Trained, check
from fl.engine.work import Meter
from fl.errors import FLError
from fl.fleet import Fleet, uniform
from fl.inference import LastState, collect, infer, infer_each, lacks_statistics
from fl.objectives import Ascent, Objective, cross_entropy
from fl.partition import Splits
from fl.presence import Presence
from fl.rng import Rng, draw
from fl.schedule import Schedule
from fl.training import Aim, train_cohort
from surgery import Stack, State, count
from surgery.transfer import upload
from zoo import Spec


@dataclass(frozen=True)
class Federation:
    """A population of clients and the way they train.

    Attributes:
        model: the architecture and its initial weights, on the device of the data. Its weights are never
            changed; its mode (training, evaluation) is.
        data: the data set, on the device that trains.
        clients: each client's samples, indices on the CPU; any sequence of `Split` is taken and packed.
        participants: K, how many clients train in a round.
        epochs, batch_size, optimizer: local training; the optimizer starts afresh every round.
        backend: see `fl.engine`.
        schedule: the learning rate's factor in each round, see `fl.schedule`.
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
        masked: whether clients train with logits of 0 for the classes that they have not (`fl.objectives.masked`).
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
    meter: Meter = field(default_factory=Meter, repr=False, compare=False)
    _held: dict[int, Tensor] = field(init=False, default_factory=dict, repr=False, compare=False)
    _collected: LastState = field(init=False, default_factory=LastState, repr=False, compare=False)

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

    @property
    def average(self) -> Callable[..., State | Stack]:
        """What the server makes of the models that clients send: `Defence.average`."""
        return self.defence.average

    @property
    def average_submodels(self) -> Callable[..., State]:
        """The same of parts of the model: `Defence.average_submodels`."""
        return self.defence.average_submodels

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

    def train(
        self,
        starts: Stack,
        clients: Sequence[int],
        rng: Rng,
        objective: Objective = cross_entropy,
        context: Any = None,
        ascent: Ascent | None = None,
        beside: Tensor | None = None,
    ) -> Trained:
        """Train the k-th of the clients from the k-th of the starts. See `fl.engine.train`.

        A client whose loss or weights are not finite any more is dropped from the round: it keeps its start, its size
        counts as 0, and a warning is logged.

        Args:
            objective, context, ascent: see `fl.objectives`; the context's tensors have a leading axis K.
            beside: [N, ...], values beside each of the data's training samples, for the objective.

        Raises:
            FLError: if all clients have to be dropped.
        """
        if count(starts) != len(clients):
            raise FLError(f"{count(starts)} starting states for {len(clients)} clients: give one each")
        aim = Aim(objective, context or {}, ascent, beside)
        return train_cohort(self, [self.model] * len(clients), starts, clients, aim, rng)

    def train_mixed(
        self,
        models: Sequence[nn.Module],
        starts: Sequence[State],
        clients: Sequence[int],
        rng: Rng,
        objective: Objective = cross_entropy,
        context: Sequence[Any] | None = None,
        ascent: Ascent | None = None,
    ) -> Trained:
        """Train the k-th of the clients with the k-th of the models, from the k-th of the starts.

        The same as training them one by one: batches and random numbers depend on the client alone.

        Args:
            models: architectures; those that are the same object train together.
            context: the objective's input for each client, without a leading axis.

        Returns:
            Trained, its states a list of K states.

        Raises:
            FLError: as `train`.
        """
        if not len(models) == len(starts) == len(clients) == len(context or clients):
            raise FLError(
                f"{len(models)} models, {len(starts)} starting states and {len(context or clients)} contexts for "
                f"{len(clients)} clients: give one each"
            )
        aim = Aim(objective, list(context or [{}] * len(clients)), ascent)
        return train_cohort(self, models, starts, clients, aim, rng)

    def predict(self, state: State, images: Tensor, model: nn.Module | None = None) -> Tensor:
        """Logits of one model in evaluation mode, for samples on the device: [N, classes] for uint8 images
        [N, C, H, W], [N, T, classes] for tokens [N, T]: take few of these at a time.

        Static batch norms are given the state's statistics over all training data first, unless it holds some.

        Args:
            model: of another architecture than the global one.
        """
        model = model or self.model
        state = {**state, **self.statistics(state, model)}
        if self.augment.mask:  # of a masked language model is asked what stands behind the masks, here always the same
            images = self.augment.masked(images, torch.zeros((), dtype=torch.int64, device=images.device))
        return infer(model, state, self.data, images, self.precision)

    def predict_each(self, models: Stack, samples: Tensor) -> Tensor:
        """Logits of K models at once, each for its own n samples [K, n, ...], as `predict` gives them up to rounding.

        Models with static batch norms bring their statistics.

        Raises:
            RuntimeError: if the model has an operation that cannot be stacked.
        """
        if self.augment.mask:
            samples = self.augment.masked(samples, torch.zeros(len(samples), dtype=torch.int64, device=samples.device))
        return infer_each(self.model, models, self.data, samples, self.precision)

    def statistics(self, state: State, model: nn.Module | None = None, samples: Tensor | None = None) -> State:
        """The running statistics of a state's static batch norms, if the model has such and the state none.

        One pass over the data for each state that is evaluated; the last one's are kept, since they are usually asked
        for again.

        Args:
            model: of another architecture than the global one.
            samples: training samples to take instead of those of all clients, indices on the CPU.
        """
        model = model or self.model
        if not lacks_statistics(model, state):
            return {}
        if samples is not None:
            return collect(model, state, self.data, samples, self.precision)
        if (known := self._collected.of(state)) is None:
            known = collect(model, state, self.data, self.clients.train.samples, self.precision)
            self._collected.keep(state, known)
        return dict(known)
