"""Code that all backends share: the job, its results, its batches and losses."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fl.data import Dataset
from fl.data.inputs import map_inputs
from fl.engine.batches import Batches, StepInput
from fl.engine.draws import Drawing, Draws
from fl.engine.objectives import Ascent, Batch, Call, Objective
from fl.engine.optimizers import Optimizer
from fl.engine.precision import Precision
from surgery import Stack, State


@dataclass(frozen=True)
class Job:
    """One round of local training for K clients of one architecture.

    Attributes:
        model: the architecture; its own weights are neither read nor written, its mode is set to training.
        data: resident on the device that trains; of data that are kept on the host the clients' samples alone.
        batches: which samples each client sees at each step, and how these are changed at random.
        ascent: how far from its parameters a client takes the gradient of a step; None: at the parameters.
        per_sample: [N, ...], a value for each training sample of these data, passed to the objective with it; or None.
    """

    model: nn.Module
    data: Dataset
    batches: Batches
    optimizer: Optimizer
    objective: Objective
    ascent: Ascent | None = None
    precision: Precision = Precision()
    per_sample: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device on which the clients train."""
        return self.data.device

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of sums of losses: the parameters' dtype, but at least float32."""
        return torch.promote_types(next(self.model.parameters()).dtype, torch.float32)

    def trainable(self) -> list[str]:
        """Return names of the parameters that are trained.

        The rest of the state (buffers, frozen parameters) is carried.
        """
        return [name for name, p in self.model.named_parameters() if p.requires_grad]

    def fetch(self, step: StepInput, dtype: torch.dtype) -> Batch:
        """Return the samples of a step, ready for the objective."""
        x, y = self.data.gather(step.index)
        x = self.data.normalise(self.batches.augment(x, step.key, step.places), dtype)
        if self.data.dense:
            y = self.batches.augment.move_masks(y, step.places)
        x = map_inputs(self.precision.lay_out, x)
        return (x, y) if self.per_sample is None else (x, y, self.per_sample[step.index])

    def loss(self, call: Call, params: State, context: Any, batch: Batch, draws: Draws | None) -> Tensor:
        """Return the objective of a client on a batch, with random numbers from `draws`.

        `draws` is None if none are needed.
        """
        with Drawing(draws) if draws else nullcontext(), self.precision.autocast(self.device):
            return self.objective(call, params, context, batch)


Group: TypeAlias = tuple[Job, Stack, Any]
"""Clients of one architecture: (job, starts, context)."""


class GroupResults(NamedTuple):
    """The results of training the K clients of a group.

    Attributes:
        states: the stack of their trained models.
        loss: each client's mean over its steps [K].
    """

    states: Stack
    loss: Tensor

    @classmethod
    def empty(cls, group: Group) -> "GroupResults":
        """Return empty results, which backends fill in one client after another."""
        job, starts, _ = group
        states = {name: torch.empty_like(tensor) for name, tensor in starts.items()}
        return cls(states, torch.empty(len(job.batches.steps), dtype=job.loss_dtype, device=job.device))


def longest_first(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Return (group, client) of all clients, the longest first.

    No long one then runs alone at the end.
    """
    every = [(g, k) for g, (job, _, _) in enumerate(groups) for k in range(len(job.batches.steps))]
    return sorted(every, key=lambda at: -groups[at[0]][0].batches.steps[at[1]])
