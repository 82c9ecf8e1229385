"""Clients, data, model and local-training settings: all that an algorithm composes its rounds from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

import surgery
from fl import traffic
from fl.augment import Augment
from fl.batches import make_batches
from fl.data import Dataset
from fl.engine import SGD, Group, Job, Optimizer, Precision, Trained, check, train
from fl.engine.precision import products
from fl.errors import FLError
from fl.failure import drop_failed
from fl.objectives import Ascent, Objective, cross_entropy
from fl.partition import Splits
from fl.rng import Rng, draw
from fl.schedule import Schedule
from surgery import Stack, State, count, stack, unstack
from zoo.norms import StaticBatchNorm2d, collect_statistics

_CHUNK = 500  # samples of one forward pass in evaluation: small enough for the cache, large enough to be busy


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
    _collected: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", Splits.of(self.clients))
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

    def initial(self, generator: torch.Generator | None = None) -> State:
        """The state that training starts from, or another one whose weights are drawn from the generator."""
        model = self.model
        if generator is not None:
            if self.create is None:
                raise FLError("a method that starts several models needs Federation(create=...), which makes them")
            model = self.create(generator).to(self.data.x.device)
        return {name: tensor.clone() for name, tensor in surgery.state(model).items()}

    def sample(self, rng: Rng) -> list[int]:
        """K distinct clients, uniformly and in random order, the same for every method with that seed and round."""
        return draw(len(self.clients), self.participants, rng.torch("sample"))

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
        pieces = []
        for some in self._chunks(clients):
            mine, extra = tree_map(lambda t, some=some: t[some], (starts, context or {}))
            group = self._group(self.model, clients[some], mine, extra, rng, objective, ascent, beside)
            pieces += train([group], self.backend)
        trained = pieces[0]
        if len(pieces) > 1:
            trained = Trained(*tree_map(lambda *parts: torch.cat(parts), *[(p.states, p.loss) for p in pieces]))
        return self._closed(trained, starts, clients, rng.round)

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
        states, losses = [{}] * len(clients), [torch.empty(0)] * len(clients)
        for some in self._chunks(clients):
            alike: dict[int, list[int]] = {}
            for k in range(len(clients))[some]:
                alike.setdefault(id(models[k]), []).append(k)
            groups = []
            for members in alike.values():
                mine = stack([starts[k] for k in members])
                extra = tree_map(lambda *t: torch.stack(t), *[context[k] for k in members]) if context else None
                theirs = [clients[k] for k in members]
                groups.append(self._group(models[members[0]], theirs, mine, extra, rng, objective, ascent))
            for members, trained in zip(alike.values(), train(groups, self.backend)):
                for k, state, loss in zip(members, unstack(trained.states), trained.loss):
                    states[k], losses[k] = state, loss
        return self._closed(Trained(states, torch.stack(losses)), starts, clients, rng.round)

    def _closed(self, trained: Trained, starts: Stack | Sequence[State], clients: Sequence[int], round: int) -> Trained:
        """What all training ends with: clients that failed are dropped, the traffic is counted."""
        sizes = [len(self.clients.train[c]) for c in clients]
        trained = drop_failed(trained, starts, clients, sizes, round)
        return trained._replace(metrics=traffic.count(starts, trained.sizes))

    def _chunks(self, clients: Sequence[int]) -> list[slice]:
        size = self.chunk or len(clients)
        return [slice(first, first + size) for first in range(0, len(clients), size)]

    def _group(
        self,
        model: nn.Module,
        clients: Sequence[int],
        starts: Stack,
        context: Any,
        rng: Rng,
        objective: Objective,
        ascent: Ascent | None = None,
        beside: Tensor | None = None,
    ) -> Group:
        """Clients of one architecture, as the engine takes them."""
        parts = [self.clients.train[c] for c in clients]
        batches = make_batches(parts, clients, self.epochs, self.batch_size, rng, self.data.x.device, self.repeats)
        optimizer = self.optimizer._replace(lr=self.optimizer.lr * self.schedule(rng.round))
        job = Job(model, self.data, batches, optimizer, objective, ascent, self.augment, self.precision, beside)
        return job, starts, context

    @torch.no_grad()
    def predict(self, state: State, images: Tensor) -> Tensor:
        """Logits of one model in evaluation mode, for samples on the device: [N, classes] for uint8 images
        [N, C, H, W], [N, T, classes] for tokens [N, T]: take few of these at a time.

        Static batch norms are given the state's statistics over all training data first.
        """
        state = {**state, **self.statistics(state)}
        self.model.eval()
        dtype = next(t.dtype for t in state.values() if t.is_floating_point())
        if self.augment.mask:  # of a masked language model is asked what stands behind the masks, here always the same
            images = self.augment(images, torch.zeros((), dtype=torch.int32, device=images.device))
        chunks = images.split(_CHUNK)
        with products(self.precision, self.data.x.device):
            return torch.cat([functional_call(self.model, state, self.data.normalise(x, dtype)) for x in chunks])

    @torch.no_grad()
    def statistics(self, state: State) -> State:
        """The running statistics of a state's static batch norms, if the model has such, over all training samples.

        One pass over the data for each state that is evaluated; the last one's are kept, since they are usually asked
        for again. Whoever evaluates all participants' models with such norms pays for it (`--models-every`).
        """
        if not any(isinstance(m, StaticBatchNorm2d) for m in self.model.modules()):
            return {}
        fixed = any(tensor.is_inference() for tensor in state.values())  # these have no version to compare
        key = [] if fixed else [(name, tensor, tensor._version) for name, tensor in state.items()]
        seen, result = self._collected.get("last", ([], {}))
        same = (m == n and a is b and v == w for (m, a, v), (n, b, w) in zip(seen, key))
        if key and len(seen) == len(key) and all(same):
            return dict(result)
        index = self.clients.train.samples
        dtype = next(t.dtype for t in state.values() if t.is_floating_point())
        batches = index.to(self.data.x.device).tensor_split(math.ceil(len(index) / _CHUNK))
        images = (self.data.normalise(self.data.x[batch], dtype) for batch in batches)
        with products(self.precision, self.data.x.device):
            result = collect_statistics(self.model, images, state)
        self._collected["last"] = key, result
        return dict(result)
