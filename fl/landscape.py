"""Loss landscapes around trained models: `python -m fl.landscape FOLDER... [--out FILE]` (FedMR's Fig. 7).

    python -m fl.run --algorithm fedavg,fedmr --name pair
    python -m fl.landscape runs/pair

All panels share the two random directions (up to the scale of each model's filters), the colours and the contours.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fl.analysis.groups import describe_common, find_runs
from fl.analysis.landscape import grid, landscape, table, titles, write_grid
from fl.base.console import guard
from fl.base.errors import FLError
from fl.base.settings import Natural, check_values, number, one_of
from fl.figures.models import draw_landscapes
from fl.figures.style import check_new
from fl.runs.assembly import pick_device
from fl.settings.help import command


@dataclass(frozen=True)
class LandscapeArguments:
    """Draw loss landscapes around the final global models of runs, side by side on the same two random directions.

    Directions are filter-normalised (Li et al., NeurIPS 2018): Gaussian, each filter scaled to the norm of the model's
    own; biases, norm layers and buffers do not move. Distances are in units of these norms: at distance 1 the model
    has moved by as much as its weights are long. The sharpness of a model is the mean rise of the loss over all grid
    points within the radius; beside it stands the trace of the loss's Hessian in all weights (adapters are folded in),
    estimated with 16 vectors of random signs, and its standard error. The grid is written as a table (.csv) beside the
    figure.
    """

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, or folders that hold some; all of one data set"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("landscape.png")
    """the figure; it and the .csv beside it must be new"""
    points: Annotated[int, number(int, least=3, most=1001)] = 21
    """points of each axis, an odd number"""
    radius: Annotated[float, number(float, above=0, most=1000)] = 1.0
    """half the side of the square, in norms of the model's own filters"""
    part: Annotated[str, one_of("test", "train")] = "test"
    """samples to compute the loss on: the common test set, or those that clients train on"""
    samples: Natural = 1000
    """how many of them, chosen by --seed, the same ones for models of the same split; 0 is all"""
    seed: Annotated[int, number(int, "INT", least=0, below=2**32)] = 0
    """chooses the directions and the samples"""
    together: Natural = 0
    """compute this many models side by side; 0 is 16 on CUDA and one on the CPU"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is a GPU if there is one"""
    data_root: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """folder of the data sets [the folder of each run]"""
    download: bool = True
    """download a data set that is missing"""


def run(arguments: LandscapeArguments) -> int:
    """Measure, draw and print."""
    check_values(arguments)
    axis = grid(arguments.points, arguments.radius)
    device = pick_device(arguments.device)
    runs = find_runs(arguments.folders)
    for run in runs:
        run.config.check_registered(run.folder)
    check_new(arguments.out)
    if (grid_file := arguments.out.with_suffix(".csv")).exists():
        raise FLError(f"{grid_file} exists already: choose another --out", code="file")
    tasks = [
        (run.config.data.dataset, run.config.data.text, run.config.model.name == "transformer_masked") for run in runs
    ]
    for run, other in zip(runs, tasks):
        if other != tasks[0]:
            raise FLError(
                f"{runs[0].folder} and {run.folder} have other data or another task ({tasks[0][0]} and {other[0]}, "
                "text cut differently, or masked), so their losses cannot be compared: give runs of one data set and "
                "task",
                code="mismatch",
            )
    wanted, root = {run.config.data.origin(): run.config for run in runs}, arguments.data_root
    loaded = {
        origin: config.data.load(root or config.execution.data_root, arguments.download).to(device)
        for origin, config in wanted.items()
    }
    how = axis, arguments.part, arguments.samples, arguments.seed, arguments.together, arguments.device
    results = [landscape(run, title, loaded[run.config.data.origin()], *how) for run, title in zip(runs, titles(runs))]
    count = f"{results[0].samples:,} {arguments.part} samples"
    task, asked_loss = loaded[runs[0].config.data.origin()].task, runs[0].config.local.loss
    plain = task == "classification" and asked_loss in ("default", "cross_entropy")
    name = "cross entropy" if plain else "loss"
    print(f"{name} of {count}, and its rise at distances up to {arguments.radius:g} from the model\n\n{table(results)}")
    chance = math.log(loaded[runs[0].config.data.origin()].classes)
    for result in results:
        if plain and not result.centre < 0.99 * chance:
            print(f"\n{result.title} is no better than chance ({chance:.3f}), so it means nothing how flat it is")
    draw_landscapes(results, describe_common([run.config for run in runs]), f"{arguments.part} loss", arguments.out)
    write_grid(results, grid_file)
    print(f"\nfigure: {arguments.out}\ngrid:   {grid_file}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns the exit code: 0, 2 for what cannot be done, 130 on Ctrl-C.
    """
    smaller = "--together (models side by side) or --samples"
    with guard(smaller) as ended:
        ended.code = run(command(LandscapeArguments, "landscape", argv))
    return ended.code


if __name__ == "__main__":
    sys.exit(main())
