"""Training of clients on their own data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from fl.base.errors import FLError
from fl.data import Dataset
from fl.data.inputs import map_inputs
from fl.engine import SGD, Optimizer, Precision, check, losses
from fl.engine.augment import Augment
from fl.engine.batches import LAST_BATCHES, count_filled
from fl.engine.losses import Loss
from fl.engine.objectives import Ascent, Objective, cross_entropy, mean_of
from fl.engine.optimizers import Schedule
from fl.federation.cohort import select
from fl.partition.split import Parts


@dataclass(frozen=True)
class LocalTraining:
    """The settings of the clients' training.

    Attributes:
        epochs: passes of a client over its samples in a round.
        batch_size: samples of a step; see `size_of_batches` for more than any client has.
        optimizer: what makes the steps; it starts afresh every round.
        loss: what clients minimise the mean of, and the column `loss` measures, see `fl.engine.losses`.
        schedule: the factor of the learning rate in each round, see `fl.engine.optimizers.schedule`.
        repeats: steps that a client makes on each of its batches.
        augment: how training samples are changed at random.
        masked: whether clients train with logits of 0 for the classes that they do not have
            (`fl.engine.objectives.mask_absent_classes`).
        backend: what runs the clients, see `fl.engine`.
        max_parallel_clients: how many clients train at a time, to save memory; 0: all clients of the round.
        precision: the numbers and the memory layout in which clients train.
        last_batch: what the last batch of an epoch holds, one of `fl.engine.batches.LAST_BATCHES`.
        rounds: of the run, which bound the time that `auto` may take to try backends on a GPU.
        chosen: the backends that `auto` has chosen, by what they hold for; a checkpoint keeps them.

    >>> LocalTraining(epochs=1, optimizer=SGD(0.1)).optimizer.lr
    0.1
    """

    epochs: int = 5
    batch_size: int = 50
    optimizer: Optimizer = SGD()
    loss: Loss = losses.cross_entropy
    schedule: Schedule = lambda _: 1.0
    repeats: int = 1
    augment: Augment = Augment()
    masked: bool = False
    backend: str = "auto"
    max_parallel_clients: int = 0
    precision: Precision = Precision()
    last_batch: str = "filled"
    rounds: int = 100
    chosen: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def objective(self) -> Objective:
        """The mean of the loss over a batch, which methods add terms to."""
        return mean_of(self.loss)

    def size_of_batches(self, parts: Parts) -> int:
        """Return the samples of a step: `batch_size`, at most the largest client's.

        All clients have batches of one size, so that they can train side by side, and it depends on the population
        alone, not on who takes part: a client learns the same whoever trains beside it.

        >>> from torch import arange
        >>> LocalTraining(batch_size=100).size_of_batches(Parts.of([arange(30), arange(20)]))
        30
        """
        return min(self.batch_size, parts.largest)

    def count_steps(self, samples: int, parts: Parts) -> int:
        """Count the steps of a round of a client with so many samples, if nothing stops it."""
        size = self.size_of_batches(parts)
        return count_filled(samples, size) // size * self.repeats * self.epochs

    def samples_of_steps(self, steps: int, samples: int, parts: Parts) -> int:
        """Count the samples that pass through the model in the first steps of a client with so many samples.

        >>> from torch import arange
        >>> LocalTraining(batch_size=20, last_batch="partial").samples_of_steps(3, 30, Parts.of([arange(30)]))
        50
        """
        size = self.size_of_batches(parts)
        if self.last_batch != "partial" or not samples:
            return steps * size
        filled = count_filled(samples, size)
        epochs, rest = divmod(steps, filled // size * self.repeats)
        short = epochs * self.repeats + max(0, rest - (filled // size - 1) * self.repeats)  # steps on last batches
        return steps * size - short * (filled - samples)

    def check(self, data: Dataset) -> None:
        """Raise FLError if clients cannot train like this on such data or their device."""
        for name, least in (("epochs", 1), ("batch_size", 1), ("repeats", 1), ("max_parallel_clients", 0)):
            if getattr(self, name) < least:
                raise FLError(f"LocalTraining({name}={getattr(self, name)}): give {least} or more")
        if self.last_batch not in LAST_BATCHES:
            raise FLError(f"LocalTraining(last_batch={self.last_batch!r}): there are {', '.join(LAST_BATCHES)}")
        if self.masked and data.task != "classification":
            raise FLError(
                f"--masked-loss hides classes, and the data are for {data.task}: leave it out", code="unsupported"
            )
        check(self.backend, data.device, self.precision, self.last_batch == "partial")
        if data.on_host and self.backend == "graphs":
            raise FLError(
                "--backend graphs reads samples from fixed places in the device's memory, and these are kept on the "
                "host: use vmap or loop",
                code="unsupported",
            )
        if data.text and (self.augment.crop or self.augment.flip):
            raise FLError("text is not cropped or flipped: leave --crop and --flip out", code="unsupported")
        if not (data.text or data.images) and (self.augment.crop or self.augment.flip):
            raise FLError(
                f"--crop and --flip are for images, and samples are {map_inputs(list, data.shape)}: leave them out",
                code="unsupported",
            )
        if data.images and self.augment.crop >= min(data.x.shape[-2:]):
            raise FLError(
                f"--crop {self.augment.crop} is as large as the images or larger: use a smaller one, such as 4"
            )


class LocalObjective(NamedTuple):
    """The objective that clients minimise, and the way.

    Attributes:
        objective, ascent: see `fl.engine.objectives`.
        context: the objective's input: tensors with a leading axis K, or for a list of states a list of K contexts.
        per_sample: [N, ...], values for each of the training samples.
    """

    objective: Objective = cross_entropy
    context: Any = None
    ascent: Ascent | None = None
    per_sample: Tensor | None = None

    def select(self, rows: Sequence[int], stacked: bool = False) -> "LocalObjective":
        """Return the objective of some clients, see `fl.federation.cohort.select`."""
        return self._replace(context=select(self.context, rows, stacked))
