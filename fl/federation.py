"""Clients, data, model and local-training settings: all that an algorithm composes its rounds from."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import surgery
from fl.batches import make_batches
from fl.data import Dataset
from fl.engine import SGD, Job, Trained, train
from fl.errors import FLError
from fl.objectives import Objective, cross_entropy
from fl.partition import Split
from fl.rng import Rng
from surgery import Stack, State
from zoo.kit import dropout_rate
from zoo.norms import StaticBatchNorm2d, collect_statistics

_CHUNK = 500  # samples of one forward pass in evaluation: small enough for the cache, large enough to be busy


_log = logging.getLogger("fl")


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
    """

    model: nn.Module
    data: Dataset
    clients: Sequence[Split]
    participants: int
    epochs: int = 5
    batch_size: int = 50
    sgd: SGD = SGD()
    backend: str = "auto"
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
        parts = [self.clients[c].train for c in clients]
        batches = make_batches(parts, clients, self.epochs, self.batch_size, rng, self.data.x.device)
        job = Job(self.model, self.data, batches, self.sgd, objective)
        trained = train(job, starts, context, self.backend)
        finite = torch.stack([trained.loss.isfinite(), *_finite_rows(trained.states)]).all(0)
        kept = finite.tolist()  # waits for the device, once a round
        sizes = tuple(n if keep else 0 for n, keep in zip(map(len, parts), kept))
        if all(kept):
            return trained._replace(sizes=sizes)
        lost = [c for c, keep in zip(clients, kept) if not keep]
        if not any(kept):
            raise FLError(
                f"training diverged: in round {rng.round} the loss of all {len(lost)} clients became infinite or not a "
                "number; use a smaller --lr. What came before is saved"
            )
        _log.warning(
            "round %d: client %s dropped: loss or weights became infinite or not a number",
            rng.round,
            ", ".join(map(str, lost)),
        )
        states = {
            name: torch.where(finite.view(-1, *[1] * (tensor.ndim - 1)), tensor, starts[name])
            for name, tensor in trained.states.items()
        }
        return Trained(states, trained.loss, sizes)

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


def _finite_rows(stack: Stack) -> Iterator[Tensor]:
    """For each floating-point tensor [K, ...] of a stack, which of its K entries are finite all over [K]."""
    for tensor in stack.values():
        if tensor.is_floating_point() and tensor.numel():
            yield tensor.flatten(1).isfinite().all(1) if tensor.ndim > 1 else tensor.isfinite()
