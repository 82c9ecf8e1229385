"""The background of results: progress, commands, settings, clients' classes."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fl.algorithms import SOURCES
from fl.analysis.groups import RecordedRun
from fl.base.console import program
from fl.base.errors import FLError
from fl.base.files import reading, write_text
from fl.base.rng import Rng
from fl.base.settings import write_value
from fl.data import GIVEN, Dataset
from fl.partition import counts
from fl.runs.folder import run_name
from fl.runs.lock import SETTINGS
from fl.runs.metrics import FILE
from fl.runs.state import RunState
from fl.runs.summary import words
from fl.settings import Experiment
from fl.settings.data import DataSettings

PARTITION = "partition.json"
"""The file of a run folder that says who holds what, of data that were given from Python."""
_NONE = "-"


def progress(run: RecordedRun) -> str:
    """Say how far a run is.

    It is "finished", "round 3 of 40", "stopped early in round 7", or says why it failed.
    """
    done, path = int(run.rows[-1]["round"]), run.folder / "summary.json"
    summary = {}
    if path.exists():
        with reading(path):
            summary = json.loads(path.read_text())
    if summary.get("rounds") == done:  # else it is from before the run was resumed
        if "failed" in summary:
            return f"failed: {summary['failed']}"
        if "stopped" in summary:
            return f"stopped early in round {done}"
        if summary["complete"]:
            return "finished"
    return "finished" if done >= run.config.rounds else f"round {done} of {run.config.rounds}"


def not_begun(folders: Sequence[Path], runs: Sequence[RecordedRun]) -> list[Path]:
    """List the folders of runs that experiments still have to begin or evaluate first."""
    several = [folder for folder in folders if (folder / SETTINGS).exists() and not (folder / FILE).exists()]
    planned = [folder / run_name(config) for folder in several for config in Experiment.read(folder).runs()]
    there = {run.folder.resolve() for run in runs}
    return [folder for folder in planned if len(planned) > 1 and folder.resolve() not in there]


def are_left(folders: Sequence[Path], runs: Sequence[RecordedRun]) -> bool:
    """Return whether rounds are left of the runs in folders."""
    return bool(not_begun(folders, runs)) or any(progress(run).startswith("round ") for run in runs)


def write_command(runs: Sequence[RecordedRun]) -> str:
    """Write the command that trains runs which differ in their seed alone.

    It is Python if the runs took data or a model.

    >>> from fl.settings import Config
    >>> config = Config.of(algorithm="fedavg", lr=0.05)
    >>> print(write_command([RecordedRun(Path(), config.replace(seed=seed), []) for seed in (0, 1)]))
    python -m fl.run --algorithm fedavg --seeds 0,1 --lr 0.05
    """
    config, seeds = runs[0].config, [run.config.seed for run in runs]
    names = [name for name, used in (("dataset", config.data.dataset), ("model", config.model.name)) if _is_given(used)]
    if names:
        arguments = ", ".join(f"{name}=..." for name in names)
        return f"config = fl.{config.replace(seed=0)!r}\n" + "\n".join(
            f'fl.simulate(config.replace(seed={seed}), "{run_name(run.config)}", {arguments})'
            for seed, run in zip(seeds, runs)
        )
    method = SOURCES.get(config.method.name, config.method.name)
    changed = [
        setting for setting in config.list_changed() if not setting.unread and setting.name not in ("algorithm", "seed")
    ]
    return " ".join([program("run"), "--algorithm", method, "--seeds", ",".join(map(str, seeds)), *words(changed)])


def _is_given(name: str) -> bool:
    return name.partition(":")[0] == GIVEN


def settings_table(groups: Mapping[str, Sequence[RecordedRun]]) -> tuple[list[list[str]], list[list[str]]]:
    """Tabulate the settings that differ, a column for each label, and those alike.

    The second table has no settings with their default value.
    """
    configs = {label: runs[0].config for label, runs in groups.items()}
    read = {label: config.list_comparable() for label, config in configs.items()}
    names = dict.fromkeys(name for settings in read.values() for name in settings)
    changed = {
        setting.name: setting.value
        for config in configs.values()
        for setting in config.list_changed()
        if not setting.unread
    }
    # A method's own options, which other methods lack, are shown where they are not the defaults.
    shown = [name for name in names if name in changed or all(name in settings for settings in read.values())]
    differ = [name for name in shown if len({settings.get(name, _NONE) for settings in read.values()}) > 1]
    alike = [name for name in changed if name not in (*differ, "algorithm", "seed")]
    rows = [[name, *(_text(settings.get(name, _NONE)) for settings in read.values())] for name in differ]
    return [["setting", *configs], *rows], [["setting", "value"], *([name, _text(changed[name])] for name in alike)]


def _text(value: object) -> str:
    return write_value(value) or "none"


class Holdings(NamedTuple):
    """The number of samples of each class that every client has, of runs with the same data and seed.

    Attributes:
        table: int64 [clients, classes]; one column for data without classes of whole samples.
        clients, classes: their names, or numbers.
        missing: why nothing is known, "" if it is.
    """

    title: str
    table: np.ndarray
    clients: Sequence[str] = ()
    classes: Sequence[str] = ()
    missing: str = ""


def holdings(runs: Sequence[RecordedRun]) -> list[Holdings]:
    """Partition the data of runs as they did, once for all runs that share them."""
    distinct: dict[tuple, tuple] = {}
    for run in runs:
        data, number = run.config.data, run.config.clients.number
        arguments = data, run.config.execution.data_root, number, run.config.seed
        distinct.setdefault((*arguments, run.own.get("dataset")), (*arguments, data.dataset == GIVEN and run.folder))
    return [_holdings(*arguments) for arguments in distinct.values()]


@lru_cache(maxsize=64)  # a page is written repeatedly while runs continue
def _holdings(data: DataSettings, root: str | None, number: int, seed: int, folder: Path | bool = False) -> Holdings:
    """Partition again, or read what the run's folder keeps of data that were given from Python."""
    title = f"{'custom data' if data.dataset == GIVEN else data.dataset}, {data.spread()}, seed {seed}"
    try:
        if folder:
            return _read_holdings(title, folder / PARTITION)
        return _count_holdings(title, data, data.load(root, download=False), number, seed)
    except FLError as error:
        return Holdings(title, np.zeros((0, 0)), missing=str(error))


def _count_holdings(title: str, data: DataSettings, dataset: Dataset, number: int, seed: int) -> Holdings:
    partition = data.deal(dataset, number, Rng(seed).numpy("partition"))
    counted = dataset.task == "classification" and not dataset.text
    labels, classes = (dataset.y, dataset.classes) if counted else (torch.zeros(len(dataset.y)).long(), 1)
    clients = dataset.names_of_clients(partition.parts)
    names = dataset.names or tuple(map(str, range(classes)))
    return Holdings(
        title,
        counts(partition, labels, classes),
        clients or [*map(str, range(number))],
        names if counted else ("samples",),
    )


def leave_partition(run: RunState) -> None:
    """Keep in the run's folder who holds how many samples of each class, of data that nobody can load again."""
    config = run.config
    if config.data.dataset == GIVEN and run.fed.transport.splits is None:
        held = _count_holdings("", config.data, run.fed.data, config.clients.number, config.seed)
        content = {"clients": [*held.clients], "classes": [*held.classes], "samples": held.table.tolist()}
        write_text(run.folder / PARTITION, json.dumps(content))


def _read_holdings(title: str, file: Path) -> Holdings:
    if not file.exists():
        raise FLError("the data were given from Python, and the run folder does not keep them", code="data")
    try:
        with reading(file):
            content = json.loads(file.read_text())
        return Holdings(title, np.array(content["samples"]), content["clients"], content["classes"])
    except (ValueError, KeyError, TypeError):
        raise FLError(f"{file} is damaged: the partition is not known", code="file") from None


def colour_share(count: float, most: float) -> float:
    """Return how strongly a count is coloured: by its square root, to show small ones.

    >>> colour_share(0, 9), colour_share(1, 4), colour_share(9, 9)
    (0.0, 0.5, 1.0)
    """
    return round(math.sqrt(count / most), 3) if most else 0.0
