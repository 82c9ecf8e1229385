"""Run cells, or parts of them; what was done before is kept."""

import datetime
import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path

import torch

import fl
from benchmarks.papers import cells
from benchmarks.papers.cell import Arm, Cell
from benchmarks.papers.stored import (
    COLUMNS,
    ROOT,
    STORE,
    Stored,
    found_clusters,
    path,
    read,
    settings,
    shortened,
    write,
)
from fl import Config, Dataset, FLError, Rng, simulate
from fl.analysis.costs import totals
from fl.analysis.groups import find_runs
from fl.analysis.landscape import grid, landscape
from fl.analysis.structure import Structure
from fl.base.errors import Diverged
from fl.base.rng import draw
from fl.data import Origin
from fl.extensions.attack import draw_malicious
from fl.landscape import LandscapeArguments
from fl.runs import checkpoint, metrics
from fl.runs.assembly import pick_device
from fl.runs.lock import SETTINGS
from fl.runs.summary import failure


@dataclass(frozen=True)
class Part:
    """What of a cell is run.

    Attributes:
        arms: names of its arms; none stands for all of them.
        seeds: none stands for those of the paper.
        rounds: 0 stands for the cell's.
        minutes: when to stop; 0 is never.
        device: as in `python -m fl.run`.
        out: where run folders are made, which interrupted runs are resumed in.
        store: where stored runs lie.
    """

    arms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    rounds: int = 0
    minutes: float = 0.0
    device: str = "auto"
    out: Path = Path("runs/papers")
    store: Path = STORE


def play(chosen: Sequence[Cell], part: Part) -> bool:
    """Run cells one after another, seed by seed, each seed with all arms, and store each run as far as it got. Finished
    runs are kept, interrupted ones are resumed. Returns whether all of the part is done.

    Raises:
        FLError: for a cell without runs, arms that it does not have, and as `fl.simulate` does.
        KeyboardInterrupt: on Ctrl-C, after what is done was stored.
    """
    end = time.monotonic() + 60 * part.minutes if part.minutes else float("inf")
    todo = [(cell, arm, seed) for cell in chosen for arm, seed in _order(cell, part)]
    loaded: dict[Origin, Dataset] = {}
    for cell, arm, seed in todo:
        config = shortened(arm.config, part.rounds or arm.config.rounds).replace(seed=seed, device=part.device)
        file = part.store / path(arm, seed, config.rounds)
        if file.exists() and read(file).over and read(file).done >= config.rounds:
            continue
        if time.monotonic() >= end:
            return False
        config.check()
        origin = config.data.origin()
        if origin not in loaded:
            loaded = {origin: config.load().to(pick_device(config.execution.device))}
        stored = _run(cell, arm, config, file, part, end, loaded[origin])
        failed = f", {stored.failed}" if stored.failed else ""
        print(f"{arm.run} seed {seed}: {stored.done} of {stored.rounds} rounds{failed}")
        if not stored.over:
            return False
    return True


def _order(cell: Cell, part: Part) -> Iterator[tuple[Arm, int]]:
    """Each arm with its first seed, then each with its second, ..."""
    if not cell.arms:
        raise FLError(
            f"{cell.id} is an image, and the paper's text has no number to compare with: nothing is run. What computes "
            f"the like of a run of yours is: {cell.command}",
            code="unsupported",
        )
    arms = [cell.arm(name) for name in part.arms] or cell.arms
    for seeds in zip_longest(*(part.seeds or arm.experiment.seeds for arm in arms)):
        yield from ((arm, seed) for arm, seed in zip(arms, seeds) if seed is not None)


def _run(cell: Cell, arm: Arm, config: Config, file: Path, part: Part, end: float, dataset: Dataset) -> Stored:
    """Train one run until it is done or the time is over, and store it."""
    folder = part.out / Path(arm.run).parent / file.stem
    there, failed = (folder / SETTINGS).exists(), ""
    try:
        summary = simulate(config, folder, there, dataset, on_round=lambda _: time.monotonic() >= end)
        failed = summary.get("failed", "") if summary["rounds"] == config.rounds else ""
    except Diverged as error:
        failed = str(error)
    finally:
        stored = _stored(cell, arm, config, folder, failed, part)
        if stored.done == config.rounds and not stored.failed:
            for probe in {PROBES[one] for one in _measures(cell, arm) if one in PROBES}:
                stored.rows[-1].update(probe(folder, dataset))
        if stored.rows and not (file.exists() and read(file).done > stored.done):  # whose run folder is gone
            write(file, stored)
    return stored


def _measures(cell: Cell, arm: Arm) -> Iterator[str]:
    """What a cell compares, and others of which the arm is one, too."""
    for one in (cell, *cells().values()):
        if arm.run in {other.run for other in one.arms}:
            yield from (comparison.measure for comparison in one.comparisons)


def _stored(cell: Cell, arm: Arm, config: Config, folder: Path, failed: str, part: Part) -> Stored:
    """What a run folder holds now."""
    table = folder / metrics.FILE
    rows = metrics.read(table) if table.exists() else []
    rounds = f" --rounds {part.rounds}" if part.rounds else ""
    return Stored(
        run=arm.run, seed=config.seed, rounds=config.rounds, done=len(rows),
        command=f"python -m benchmarks.papers {cell.id} --algorithm {arm.name} --seeds {config.seed}{rounds}",
        device=_device(config.execution.device), torch=torch.__version__, version=_version(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(), settings=settings(config),
        failed=failed or (failure(rows) if len(rows) == config.rounds else ""), rows=condensed(config, rows),
        base=("adapters" in config.extensions and rows and checkpoint.read_header(folder)["given"].get("base")) or "",
    )  # fmt: skip


def condensed(config: Config, rows: Sequence[metrics.Row]) -> list[metrics.Row]:
    """The evaluated rounds of metrics.csv, with the columns that are stored, and costs summed up from the start."""
    spent = totals(config, rows) if rows else {}
    spent["seconds"] = spent.pop("elapsed", [])
    for name in ("bytes_up", "bytes_down"):
        if all(name in row for row in rows):
            spent[name] = list(accumulate(row[name] for row in rows))
    every = [row | {name: sums[k] for name, sums in spent.items()} for k, row in enumerate(rows)]
    if "attack" in config.extensions:
        every = [row | {"attackers": float(attackers(config, int(row["round"])))} for row in every]
    return [{name: row[name] for name in COLUMNS if name in row} for row in every if "accuracy" in row]


def _around(folder: Path, dataset: Dataset) -> metrics.Row:
    """How the loss rises around the trained model, as `python -m fl.landscape FOLDER` prints it."""
    (run,), asked = find_runs([folder]), LandscapeArguments((folder,))
    how = asked.part, asked.samples, asked.seed, asked.together, asked.device
    found = landscape(run, folder.name, dataset, grid(asked.points, asked.radius), *how)
    values = {"rise": found.rise()[0], "trace": found.trace[0]}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _found(folder: Path, _: Dataset) -> metrics.Row:
    return {"rand": found_clusters(Structure.read(folder))}


PROBES: dict[str, Callable[[Path, Dataset], metrics.Row]] = {"rise": _around, "trace": _around, "rand": _found}
"""From a comparison's measure to what measures it: columns of the last row alone, of the folder of a run that is over
where its cell compares them."""


def attackers(config: Config, number: int) -> int:
    """How many of a round's participants are malicious, where clients are drawn uniformly.

    >>> from fl.extensions.attack import AttackOptions
    >>> config = Config.of(algorithm="fedavg", clients=20, participants=5, attack=AttackOptions(share=0.2))
    >>> [attackers(config, number) for number in range(1, 7)]
    [1, 0, 1, 1, 1, 1]
    """
    seed, clients = config.seed, config.clients
    malicious = draw_malicious(config.extensions["attack"], clients.number, Rng(seed))
    return len(malicious.intersection(draw(clients.number, clients.cohort(), Rng(seed, number).torch("sample"))))


def _device(asked: str) -> str:
    device = pick_device(asked)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU ({platform.machine()}, {threads} thread{'s' * (threads > 1)})"


def _version() -> str:
    """Of this project: number and commit."""
    found = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return f"{fl.__version__}, commit {found.stdout.strip()}"
