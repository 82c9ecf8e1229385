"""Loss landscapes around trained models: `python -m fl.landscape FOLDER... [--out FILE]` (FedMR's Fig. 7).

    python -m fl.run --algorithm fedavg,fedmr --name pair
    python -m fl.landscape runs/pair

All panels share the two random directions (up to the scale of each model's filters), the colours and the contours.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.func import functional_call

from fl import plot
from fl.assembly import build, pick_device
from fl.compare import Run, common, find_runs, group
from fl.console import guarded
from fl.data import Dataset
from fl.directions import grid, random_direction, rise, surface
from fl.engine.precision import arithmetic
from fl.errors import FLError
from fl.federation import Federation
from fl.landscape_figure import Landscape, draw_figure, table, write_grid
from fl.rng import Rng, draw
from fl.settings import choice
from fl.simulation import load_model
from surgery import State, state

_CHUNK = 500  # samples of one forward pass, as in evaluation
_LOGITS = 2**24  # held at a time
_ON_CUDA = 16  # models side by side; on the CPU one alone is faster, since vmap makes convolutions grouped ones


@dataclass(frozen=True)
class Arguments:
    """Loss landscapes around the final global models of runs, side by side on the same two random directions.

    Directions are filter-normalised (Li et al., NeurIPS 2018): Gaussian, each filter scaled to the norm of the model's
    own; biases, norm layers and buffers do not move. Distances are in these norms: 1 is as far as the weights are
    long. How sharp a model lies is told as the mean rise of the loss over all grid points within the radius. The
    figure is written, and beside it the grid as a table (.csv).
    """

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, or folders that hold some; all of one data set"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("landscape.png")
    """the figure; it and the .csv beside it must be new"""
    points: int = 21
    """points of each axis, odd"""
    radius: float = 1.0
    """half the side of the square, in norms of the model's own filters"""
    part: str = "test"
    """samples of the loss: test (the common test set) or train (those that all clients train on)"""
    samples: int = 1000
    """how many of them, drawn by --seed, the same for models of the same split; 0: all"""
    seed: int = 0
    """of the directions and the samples"""
    together: int = 0
    """models computed side by side; 0: 16 on CUDA, one on the CPU"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one"""
    data_root: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """where data sets lie [as each run had it]"""
    download: bool = True
    """fetch a data set that is missing"""

    def check(self) -> None:
        """Raise FLError for what cannot be done, before anything is computed."""
        if not self.folders:
            raise FLError("give at least one run folder")
        grid(self.points, self.radius)
        if not 0 < self.radius < math.inf:
            raise FLError(f"--radius must be a finite number above 0, got {self.radius}")
        choice("--part", [self.part], ("test", "train"))
        for flag in ("samples", "together"):
            if getattr(self, flag) < 0:
                raise FLError(f"--{flag} must be 0 or more, got {getattr(self, flag)}")
        if not 0 <= self.seed < 2**32:
            raise FLError(f"--seed must be at least 0 and below 2^32, got {self.seed}")
        plot.check_file(self.out)
        for path in (self.out, self.out.with_suffix(".csv")):
            if path.exists():
                raise FLError(f"{path} exists already: choose another --out")


def landscape(run: Run, title: str, arguments: Arguments, dataset: Dataset) -> Landscape:
    """Measure the loss around the global model of a run."""
    fed, _ = build(replace(run.config, device=arguments.device), dataset)
    device = fed.data.x.device
    model = load_model(run.folder).to(device)
    rng = Rng(arguments.seed)
    directions = [random_direction(model, rng.torch("direction", number)) for number in (0, 1)]
    x, y = samples(fed, arguments.part, arguments.samples, rng)
    together = arguments.together or (_ON_CUDA if device.type == "cuda" else 1)
    axis = grid(arguments.points, arguments.radius)
    with arithmetic(fed.precision, device):
        values = surface(mean_loss(model, fed.data, x, y, together), state(model), directions, axis, together, title)
    return Landscape(title, run.folder, axis, values, len(y), *rise(values, axis, arguments.radius))


def samples(fed: Federation, part: str, number: int, rng: Rng) -> tuple[Tensor, Tensor]:
    """Samples, with masks where the model is to see such, and their labels: all, or as many as asked for."""
    data = fed.data
    if part == "test":
        x, y = data.test_x, data.test_y
    else:
        index = fed.clients.train.samples.to(data.x.device)
        x, y = data.x[index], data.y[index]
    if 0 < number < len(y):
        index = torch.tensor(draw(len(y), number, rng.torch("samples"))).sort().values.to(x.device)
        x, y = x[index], y[index]
    if fed.augment.mask:
        x = fed.augment(x, torch.zeros((), dtype=torch.int32, device=x.device))
    return x, y


def mean_loss(model: nn.Module, data: Dataset, x: Tensor, y: Tensor, together: int = 1) -> Callable[[State], Tensor]:
    """A function of some of a model's tensors: the mean cross entropy, float64, of all samples (of text, all tokens)
    in evaluation mode, the other tensors being the model's own.

    >>> from fl.data import load
    >>> data = load("digits")
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> mean_loss(net, data, data.test_x, data.test_y)({"1.weight": torch.zeros(10, 64), "1.bias": torch.zeros(10)})
    tensor(2.3026, dtype=torch.float64)
    """
    model.eval()
    dtype = next(model.parameters()).dtype
    size = min(_CHUNK, max(1, _LOGITS // (data.classes * y[0].numel() * together)))

    def loss(values: State) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=y.device)
        for some, labels in zip(x.split(size), y.split(size)):
            logits = functional_call(model, values, (data.normalise(some, dtype),)).flatten(0, -2)
            total = total + F.cross_entropy(logits.double(), labels.flatten(), reduction="sum")
        return total / y.numel()

    return loss


def titles(runs: Sequence[Run]) -> list[str]:
    """What tells each run from the others: the method, settings that differ, and the seed if there are several."""
    labels = {id(run): label for label, members in group(runs).items() for run in members}
    several = len({run.config.seeds for run in runs}) > 1
    return [labels[id(run)] + (f", seed {run.config.seeds[0]}" if several else "") for run in runs]


def run(arguments: Arguments) -> int:
    """Measure, draw and print."""
    arguments.check()
    device = pick_device(arguments.device)
    runs = find_runs(arguments.folders)
    settings = [
        replace(run.config, data_root=arguments.data_root or run.config.data_root, download=arguments.download)
        for run in runs
    ]
    asked = [(one.dataset, one.text, one.model == "transformer_masked") for one in settings]
    for run, what in zip(runs, asked):
        if what != asked[0]:
            raise FLError(
                f"{runs[0].folder} and {run.folder} are asked for other things ({asked[0][0]} and {what[0]}, text cut "
                "otherwise, or masked): such losses do not compare; give runs of one data set and task"
            )
    dataset = settings[0].load().to(device)
    found = [landscape(run, title, arguments, dataset) for run, title in zip(runs, titles(runs))]
    what = f"{found[0].samples:,} {arguments.part} samples"
    print(f"cross entropy of {what}, and how it rises within {arguments.radius:g} of the model\n\n{table(found)}")
    chance = math.log(dataset.classes)
    for one in found:
        if not one.centre < 0.99 * chance:
            print(f"\n{one.title} is no better than chance ({chance:.3f}): that it is flat says nothing")
    draw_figure(found, common([run.config for run in runs]), f"{arguments.part} loss", arguments.out)
    write_grid(found, arguments.out.with_suffix(".csv"))
    print(f"\nfigure: {arguments.out}\ngrid:   {arguments.out.with_suffix('.csv')}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for what cannot be done, 130 on Ctrl-C."""
    return guarded(lambda: run(tyro.cli(Arguments, prog="python -m fl.landscape", args=argv)))


if __name__ == "__main__":
    sys.exit(main())
