"""Clients, data, model and local-training settings: all that an algorithm composes its rounds from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

import surgery
from fl.batches import make_batches
from fl.data import Dataset
from fl.engine import SGD, Job, Trained, train
from fl.errors import FLError
from fl.failure import drop_failed
from fl.objectives import Objective, cross_entropy
from fl.partition import Split
from fl.rng import Rng
from fl.schedule import Schedule
from surgery import Stack, State, count
from zoo.kit import dropout_rate
from zoo.norms import StaticBatchNorm2d, collect_statistics

_CHUNK = 500  # samples of one forward pass in evaluation: small enough for the cache, large enough to be busy


@dataclass(frozen=True)
class Federation:
    """A population of clients and the way they train.

    Attributes:
        model: the architecture and its initial weights, on the device of the data. Its weights are never
            changed; its mode (training, evaluation) is.
        data: the data set, on the device that trains.
        clients: each client's samples, index tensors on the CPU.
        participants: K, how many clients train in a round.
        epochs, batch_size, sgd: local training.
        backend: see `fl.engine`.
        schedule: the learning rate's factor in each round, see `fl.schedule`.
        chunk: how many clients train at a time, to save memory; 0 is all of a round's.
    """

    model: nn.Module
    data: Dataset
    clients: Sequence[Split]
    participants: int
    epochs: int = 5
    batch_size: int = 50
    sgd: SGD = SGD()
    backend: str = "auto"
    schedule: Schedule = lambda _: 1.0
    chunk: int = 0
    _collected: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.participants <= len(self.clients):
            raise FLError(f"{self.participants} participants a round: there are {len(self.clients)} clients")
        if empty := [k for k, split in enumerate(self.clients) if not len(split.train)]:
            raise FLError(f"client {empty[0]} has no training samples ({len(empty)} such clients)")
        if not any(p.requires_grad for p in self.model.parameters()):
            raise FLError(f"{type(self.model).__name__} has no parameter to train: all are frozen")
        if any((rate := dropout_rate(m)) and getattr(m, rate) for m in self.model.modules()):
            raise FLError("dropout draws from torch's global generator, so runs could not be repeated: set p=0")

    def initial(self) -> State:
        """The state that training starts from."""
        return {name: tensor.clone() for name, tensor in surgery.state(self.model).items()}

    def sample(self, rng: Rng) -> list[int]:
        """K distinct clients, uniformly and in random order, the same for every method with that seed and round."""
        return torch.randperm(len(self.clients), generator=rng.torch("sample"))[: self.participants].tolist()

    def train(
        self,
        starts: Stack,
        clients: Sequence[int],
        rng: Rng,
        objective: Objective = cross_entropy,
        context: Any = None,
    ) -> Trained:
        """Train the k-th of the clients from the k-th of the starts. See `fl.engine.train`.

        A client whose loss or weights are not finite any more is dropped from the round: it keeps its start, its size
        counts as 0, and a warning is logged.

        Raises:
            FLError: if all clients have to be dropped.
        """
        if count(starts) != len(clients):
            raise FLError(f"{count(starts)} starting states for {len(clients)} clients: give one each")
        parts = [self.clients[c].train for c in clients]
        sgd = self.sgd._replace(lr=self.sgd.lr * self.schedule(rng.round))
        size, pieces = self.chunk or len(clients), []
        for first in range(0, len(clients), size):
            some = slice(first, first + size)
            batches = make_batches(parts[some], clients[some], self.epochs, self.batch_size, rng, self.data.x.device)
            mine, extra = tree_map(lambda t, some=some: t[some], (starts, context or {}))
            pieces.append(train(Job(self.model, self.data, batches, sgd, objective), mine, extra, self.backend))
        trained = tree_map(lambda *parts: torch.cat(parts), *pieces) if len(pieces) > 1 else pieces[0]
        return drop_failed(trained, starts, clients, list(map(len, parts)), rng.round)

    @torch.no_grad()
    def predict(self, state: State, images: Tensor) -> Tensor:
        """Logits [N, classes] of one model in evaluation mode, for uint8 images [N, C, H, W] on the device.

        Static batch norms are given the state's statistics over all training data first.
        """
        state = {**state, **self.statistics(state)}
        self.model.eval()
        dtype = next(t.dtype for t in state.values() if t.is_floating_point())
        chunks = images.split(_CHUNK)
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
        index = torch.cat([split.train for split in self.clients])
        dtype = next(t.dtype for t in state.values() if t.is_floating_point())
        batches = index.to(self.data.x.device).tensor_split(math.ceil(len(index) / _CHUNK))
        images = (self.data.normalise(self.data.x[batch], dtype) for batch in batches)
        result = collect_statistics(self.model, images, state)
        self._collected["last"] = key, result
        return dict(result)
