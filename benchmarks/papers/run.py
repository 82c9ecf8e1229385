"""Run cells, or parts of them; finished runs are kept, interrupted ones resume."""

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
    path,
    read,
    score_clusters,
    settings,
    shorten,
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
    """The part of a cell to run.

    Attributes:
        arms: names of its arms; empty for all.
        seeds: empty for the cell's.
        rounds: 0 for the cell's.
        minutes: when to stop; 0 for never.
        device: as in `python -m fl.run`.
        out: the folder of run folders, where interrupted runs resume.
        store: the folder of stored runs.
    """

    arms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    rounds: int = 0
    minutes: float = 0.0
    device: str = "auto"
    out: Path = Path("runs/papers")
    store: Path = STORE


def play(chosen: Sequence[Cell], part: Part) -> bool:
    """Run cells one after another, each seed with all arms, and store each run as far as it got.

    Returns whether the whole part is done.

    Raises:
        FLError: for a cell without runs, arms that it does not have, and as `fl.simulate` does.
        KeyboardInterrupt: on Ctrl-C, after the run was stored.
    """
    end = time.monotonic() + 60 * part.minutes if part.minutes else float("inf")
    todo = [(cell, arm, seed) for cell in chosen for arm, seed in _order(cell, part)]
    loaded: dict[Origin, Dataset] = {}
    for cell, arm, seed in todo:
        config = shorten(arm.config, part.rounds or arm.config.rounds).replace(seed=seed, device=part.device)
        file = part.store / path(arm, seed, config.rounds)
        if file.exists() and read(file).is_over and read(file).done >= config.rounds:
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
        if not stored.is_over:
            return False
    return True


def _order(cell: Cell, part: Part) -> Iterator[tuple[Arm, int]]:
    """Yield each arm with its first seed, then each with its second, ..."""
    if not cell.arms:
        raise FLError(
            f"{cell.id} is an image, and the paper's text has no number to compare with: nothing is run. To compute "
            f"the same of a run of yours: {cell.command}",
            code="unsupported",
        )
    arms = [cell.arm(name) for name in part.arms] or cell.arms
    for seeds in zip_longest(*(part.seeds or arm.experiment.seeds for arm in arms)):
        yield from ((arm, seed) for arm, seed in zip(arms, seeds) if seed is not None)


def _run(cell: Cell, arm: Arm, config: Config, file: Path, part: Part, end: float, dataset: Dataset) -> Stored:
    """Train one run until it is done or the time is up, and store it."""
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
            for probe in {PROBES[name] for name in _measures(cell, arm) if name in PROBES}:
                stored.rows[-1].update(probe(folder, dataset))
        if stored.rows and not (file.exists() and read(file).done > stored.done):  # a longer run lost its folder
            write(file, stored)
    return stored


def _measures(cell: Cell, arm: Arm) -> Iterator[str]:
    """Yield what a cell measures, and what others measure of the same run."""
    for other in (cell, *cells().values()):
        if arm.run in {shared.run for shared in other.arms}:
            yield from (comparison.measure for comparison in other.comparisons)


def _stored(cell: Cell, arm: Arm, config: Config, folder: Path, failed: str, part: Part) -> Stored:
    """Return what a run folder holds now."""
    table = folder / metrics.FILE
    rows = metrics.read(table) if table.exists() else []
    rounds = f" --rounds {part.rounds}" if part.rounds else ""
    return Stored(
        run=arm.run, seed=config.seed, rounds=config.rounds, done=len(rows),
        command=f"python -m benchmarks.papers {cell.id} --algorithm {arm.name} --seeds {config.seed}{rounds}",
        device=_device(config.execution.device), torch=torch.__version__, version=_version(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(), settings=settings(config),
        failed=failed or (failure(rows) if len(rows) == config.rounds else ""), rows=condense(config, rows),
        base=("adapters" in config.extensions and rows and checkpoint.read_header(folder)["given"].get("base")) or "",
    )  # fmt: skip


def condense(config: Config, rows: Sequence[metrics.Row]) -> list[metrics.Row]:
    """Return the evaluated rounds of metrics.csv: the stored columns, with costs added up from the first round."""
    spent = totals(config, rows) if rows else {}
    spent["seconds"] = spent.pop("elapsed", [])
    for name in ("bytes_up", "bytes_down"):
        if all(name in row for row in rows):
            spent[name] = list(accumulate(row[name] for row in rows))
    every = [row | {name: sums[k] for name, sums in spent.items()} for k, row in enumerate(rows)]
    if "attack" in config.extensions:
        every = [row | {"attackers": float(count_attackers(config, int(row["round"])))} for row in every]
    return [{name: row[name] for name in COLUMNS if name in row} for row in every if "accuracy" in row]


def _measure_landscape(folder: Path, dataset: Dataset) -> metrics.Row:
    """Measure the loss around the trained model, as `python -m fl.landscape FOLDER` does."""
    (run,), arguments = find_runs([folder]), LandscapeArguments((folder,))
    options = arguments.part, arguments.samples, arguments.seed, arguments.together, arguments.device
    around = landscape(run, folder.name, dataset, grid(arguments.points, arguments.radius), *options)
    values = {"rise": around.rise()[0], "trace": around.trace[0]}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _measure_clusters(folder: Path, _: Dataset) -> metrics.Row:
    return {"rand": score_clusters(Structure.read(folder))}


PROBES: dict[str, Callable[[Path, Dataset], metrics.Row]] = {
    "rise": _measure_landscape, "trace": _measure_landscape, "rand": _measure_clusters,
}  # fmt: skip
"""From a comparison's measure to what measures it once, in the folder of a finished run; columns of its last row."""


def count_attackers(config: Config, number: int) -> int:
    """Count a round's malicious participants, where clients are sampled uniformly.

    >>> from fl.extensions.attack import AttackOptions
    >>> config = Config.of(algorithm="fedavg", clients=20, participants=5, attack=AttackOptions(share=0.2))
    >>> [count_attackers(config, number) for number in range(1, 7)]
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
    """Return this project's version and commit."""
    head = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return f"{fl.__version__}, commit {head.stdout.strip()}"
