"""Loss landscapes around trained models: `python -m fl.landscape FOLDER... [--out FILE]` (FedMR's Fig. 7).

    python -m fl.run --algorithm fedavg,fedmr --name pair
    python -m fl.landscape runs/pair

All panels share the two random directions (up to the scale of each model's filters), the colours and the contours.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from fl.analysis.directions import grid
from fl.analysis.groups import common, find_runs
from fl.analysis.landscape import landscape, table, titles, write_grid
from fl.base.console import guarded
from fl.base.errors import FLError
from fl.base.flags import choice
from fl.figures.landscape import draw_figure
from fl.figures.style import check_file
from fl.runs.assembly import pick_device


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
        check_file(self.out)
        for path in (self.out, self.out.with_suffix(".csv")):
            if path.exists():
                raise FLError(f"{path} exists already: choose another --out")


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
    how = arguments.points, arguments.radius, arguments.part, arguments.samples, arguments.seed, arguments.together
    found = [landscape(run, title, dataset, *how, device=arguments.device) for run, title in zip(runs, titles(runs))]
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
