"""Clients, data, model and local-training settings: all that an algorithm composes its rounds from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import Trained
from fl.engine.objectives import Ascent, Objective, cross_entropy
from fl.federation.inference import LastState, collect, infer, infer_each, lacks_statistics
from fl.federation.population import Population
from fl.federation.training import Aim, train_cohort
from surgery import Stack, State, stack_size


@dataclass(frozen=True)
class Federation(Population):
    """A population of clients that trains, and predicts with what it has trained. Its settings: see `Population`."""

    _collected: LastState = field(init=False, default_factory=LastState, repr=False, compare=False)

    @property
    def average(self) -> Callable[..., State | Stack]:
        """What the server makes of the models that clients send: `Defence.average`."""
        return self.defence.average

    @property
    def average_submodels(self) -> Callable[..., State]:
        """The same of parts of the model: `Defence.average_submodels`."""
        return self.defence.average_submodels

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
            objective, context, ascent: see `fl.engine.objectives`; the context's tensors have a leading axis K.
            beside: [N, ...], values beside each of the data's training samples, for the objective.

        Raises:
            FLError: if all clients have to be dropped, or have models of several architectures.
        """
        if self.fleet is not None and len(self.fleet.architectures) > 1:
            raise FLError(
                f"clients have models of {len(self.fleet.architectures)} architectures, and this method trains one for "
                "all: take a method for such clients, or leave Federation(fleet=...) out"
            )
        if stack_size(starts) != len(clients):
            raise FLError(f"{stack_size(starts)} starting states for {len(clients)} clients: give one each")
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
