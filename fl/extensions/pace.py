"""Simulate the time that clients take, and drop or shorten late work."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import tyro
from torch import Tensor, nn

from fl.algorithms.extension import Extension
from fl.base.columns import Column
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.settings import Above0, AtLeast0, Bounds, OnlyWith, check_values, one_of
from fl.engine.work import flops
from fl.federation import Federation
from fl.federation.divergence import restore
from fl.federation.trainer import Stage, Trainer, Training
from fl.federation.update import ClientUpdate

SECONDS = "simulated_seconds"


@dataclass(frozen=True)
class PaceOptions:
    """Clients of unequal speed, in simulated time. The default is none."""

    spread: AtLeast0 = 0.0
    """standard deviation of the logarithms of clients' speeds, sampled once; 0: all are equally fast"""
    speed: Above0 = 1000.0
    """samples of the global model that the median client trains on in a second"""
    file: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """text file with the speed of each client, in samples a second, one per line; replaces random speeds"""
    deadline: AtLeast0 = 0.0
    """seconds after which a round ends; 0 waits for all of its clients"""
    late: Annotated[str, one_of("partial", "drop"), OnlyWith("deadline", Bounds(above=0))] = "partial"
    """clients that are not done by then: partial sends what their steps so far have made, drop leaves them out"""


class Pace(NamedTuple):
    """The middleware of the clients' speeds and of the server's deadline.

    Rounds report `simulated_seconds`, the time of the slowest client.

    Attributes:
        speeds: samples of the global model a second, float64 [clients], on the CPU.
        deadline: seconds of a round; 0: as long as it takes.
        partial: whether clients that are late send what they have.
    """

    speeds: Tensor
    deadline: float = 0.0
    partial: bool = True

    @property
    def stage(self) -> Stage:
        """Its place in the order."""
        return Stage.ARRIVAL

    @property
    def needs(self) -> dict[str, str]:
        """The capabilities that a method needs."""
        return {"one_training": "--pace"}

    @property
    def leaves_out(self) -> bool:
        """True if clients that are late send nothing."""
        return bool(self.deadline) and not self.partial

    def __call__(self, fed: Federation, train: Trainer) -> Trainer:
        """Stop clients at the deadline; late clients send what they have, or nothing."""

        def run(training: Training) -> ClientUpdate:
            starts = training.cohort.states
            clocks = self.clocks(fed, training)
            ends = [clock(steps) for clock, steps in zip(clocks, training.steps)]
            took = (min(end, self.deadline or end) for end in ends)
            fed.meter.metrics[SECONDS] = max(fed.meter.metrics.get(SECONDS, 0.0), *took)
            done = tuple(map(self.steps_done, clocks, training.steps))
            update = train(training._replace(steps=done))
            if any(missing := late(done, training.steps, self.partial)):
                sizes = tuple(0 if gone else size for gone, size in zip(missing, update.sizes))
                update = update._replace(sizes=sizes, received=restore(update.received, starts, sizes))
            return update._replace(states=restore(update.states, starts, update.sizes))

        return run

    def steps_done(self, seconds: Callable[[int], float], steps: int) -> int:
        """Count the steps that a client has made by the deadline.

        Args:
            seconds: that its first steps take, as a function of their number. steps: that it is to make.

        >>> Pace(torch.tensor([10.0]), deadline=2.0).steps_done(lambda steps: steps * 0.5, steps=9)
        4
        """
        if not self.deadline:
            return steps
        return bisect_right(range(1, steps + 1), self.deadline * (1 + 1e-9), key=seconds)

    def clocks(self, fed: Federation, training: Training) -> list[Callable[[int], float]]:
        """Return for each client the seconds that its first steps take, as a function of their number."""
        gradients, whole = 2 if training.objective.ascent else 1, flops(fed.model, fed.data)

        def clock(client: int, model: nn.Module) -> Callable[[int], float]:
            samples = len(fed.clients.train[client])
            cost = gradients * (flops(model, fed.data) / whole if whole else 1.0) / self.speeds[client].item()
            return lambda steps: cost * fed.local.samples_of_steps(steps, samples, fed.clients.train)

        return list(map(clock, training.cohort.clients, training.cohort.models))


def make_pace(options: PaceOptions, clients: int, rng: Rng) -> Pace | None:
    """Make the speeds of all clients; None for equal speeds and no deadline.

    Raises:
        FLError: for options out of their limits, and a file that does not hold a speed for each client.

    >>> make_pace(PaceOptions(spread=0.5), 3, Rng(0)).speeds.shape, make_pace(PaceOptions(), 3, Rng(0))
    (torch.Size([3]), None)
    """
    check_values(options, "pace")
    if options == PaceOptions():
        return None
    if options.file is not None:
        if (options.spread, options.speed) != (PaceOptions.spread, PaceOptions.speed):
            raise FLError("--pace.file has the speed of each client: leave --pace.spread and --pace.speed out")
        speeds = _read(Path(options.file), clients)
    else:
        draws = torch.randn(clients, generator=rng.torch("pace"), dtype=torch.float64)
        speeds = options.speed * (options.spread * draws).exp()
    return Pace(speeds, options.deadline, options.late == "partial")


def _read(path: Path, clients: int) -> Tensor:
    try:
        values = [float(line) for line in path.read_text().split()]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it has a line that is no number"
        raise FLError(f"--pace.file {path} cannot be read: {why}", code="file") from None
    speeds = torch.tensor(values, dtype=torch.float64)
    if len(values) != clients or not (speeds.isfinite() & (speeds > 0)).all():
        raise FLError(
            f"--pace.file {path} has {len(values)} speeds: give one above 0 for each of {clients} clients", code="file"
        )
    return speeds


def late(done: Sequence[int], steps: Sequence[int], partial: bool) -> list[bool]:
    """Return whether each client sends nothing, because it is late.

    That is without a step, and, unless partial work counts, without all its steps.

    >>> late([3, 1, 0], [3, 3, 3], partial=True), late([3, 1, 0], [3, 3, 3], partial=False)
    ([False, False, True], [False, True, True])
    """
    return [not count or (count < wanted and not partial) for count, wanted in zip(done, steps)]


def _pace(fed: Federation, config: Any, rng: Rng) -> Federation:
    pace = make_pace(config.extensions["pace"], len(fed.clients), rng)
    return fed if pace is None else replace(fed, training=(*fed.training, pace))


EXTENSION = Extension(
    PaceOptions(), needs=lambda options: {"one_training": "--pace"}, federation=_pace, columns={SECONDS: Column()}
)
