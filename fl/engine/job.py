"""What backends share: the job, its result, and one way to call the model."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

from fl.batches import Batches
from fl.data import Dataset
from fl.engine.sgd import SGD
from fl.objectives import Objective
from surgery import Stack, State


class Trained(NamedTuple):
    """What local training leaves.

    Attributes:
        states: of the K models.
        loss: each client's mean over its steps [K].
        sizes: each client's number of training samples, 0 if it was dropped from the round. `Federation.train` fills
            them in.
    """

    states: Stack
    loss: Tensor
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """One round of local training for K clients of one architecture.

    Attributes:
        model: the architecture; its own weights are neither read nor written, its mode is set to training.
        data: resident on the device that trains.
        batches: which samples each client sees at each step.
    """

    model: nn.Module
    data: Dataset
    batches: Batches
    sgd: SGD
    objective: Objective

    def trainable(self) -> list[str]:
        """Names of the parameters that are trained; the rest of the state (buffers, frozen parameters) is carried."""
        return [name for name, p in self.model.named_parameters() if p.requires_grad]

    def loss(self, params: State, rest: State, context: Any, index: Tensor) -> Tensor:
        """The objective of one client on one batch of samples, index [B]. Updates the buffers in `rest` in place."""
        dtype = next(iter(params.values())).dtype
        batch = self.data.normalise(self.data.x[index], dtype), self.data.y[index]

        def call(params: State, x: Tensor) -> Tensor:
            return functional_call(self.model, {**rest, **params}, (x,))

        return self.objective(call, params, context, batch)
