"""Partition a data set, and see who holds what: `python -m fl.data [--flags]`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from fl.base.console import guard
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.settings import flag_in, number
from fl.data import Dataset
from fl.partition import Partition, counts
from fl.settings import Config
from fl.settings.flags import entries, find_value, flags_class, read_given
from fl.settings.help import command
from fl.settings.places import partition_named


@dataclass(frozen=True)
class Look:
    """Deal a data set out to clients as `fl.run` does, and look at who holds what."""

    seed: Annotated[int, number(int, "INT", least=0, below=2**32)] = 0
    """of the split; `fl.run --seeds` gives the same split"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object instead: samples of each client and class (text has one class), the true clusters, and
    the owners of clients' samples by name"""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """draw clients x classes into a .png, .svg or .pdf; must be new"""


_ALSO = ("clients", "data_root", "download")
"""What the command takes beside the settings of the data."""
_LEFT_OUT = ("local_valid", "local_test")
"""Settings of the data that do not change what it shows."""


def look(argv: Sequence[str] | None) -> int:
    """Carry out the command."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-"):
        raise FLError(f"data are named by a flag: `python -m fl.data --dataset {argv[0]}`")
    partition_named(find_value(argv, "partition"))
    every = {name: entry for inside in entries(()).values() for name, entry in inside.items()}
    names = [name for name in entries(())["data"] if name not in _LEFT_OUT]
    arguments: Any = command(
        flags_class({"data": {name: every[name] for name in (*names, *_ALSO)}}, Look), "data", argv
    )
    flags = {flag_in(word) for word in argv} - {"seed", "json", "plot"}
    config = Config.of(seed=arguments.seed, **read_given(arguments, flags))
    config.check_values()
    if not config.data.pool_test_set:
        config.data.check()
    for setting in config.settings():
        if setting.unread and setting.flag in flags:
            raise FLError(setting.unread)
    dataset = config.load()
    counted = dataset.task == "classification" and not dataset.text
    if arguments.plot is not None and not counted:
        noun = "text" if dataset.text else f"data for {dataset.task}"
        raise FLError(
            f"--plot draws clients by classes, and {noun} has no classes of whole samples: leave it out or take --json",
            code="unsupported",
        )
    if arguments.plot is not None:
        from fl.figures.clients import partition_map
        from fl.figures.style import check_new, save

        check_new(arguments.plot, "--plot")
    partition = config.data.deal(dataset, config.clients.number, Rng(config.seed).numpy("partition"))
    labels, classes = (dataset.y, dataset.classes) if counted else (torch.zeros(len(dataset.y)).long(), 1)
    table = counts(partition, labels, classes)
    names = dataset.names_of_clients(partition.parts)
    if arguments.plot is not None:
        title = f"{dataset.name}, {config.data.spread()}, {config.clients.number} clients, seed {config.seed}"
        save(partition_map(partition, labels, classes, title, names), arguments.plot)
    if arguments.json:
        owners = {"owners": names} if names else {}
        print(json.dumps({"counts": table.tolist(), "structure": partition.structure.tolist(), **owners}))
    else:
        lines = describe(config, dataset, partition, table, names)
        print(f"{lines}\nfigure            {arguments.plot}" if arguments.plot is not None else lines)
    return 0


def describe(
    config: Config, dataset: Dataset, partition: Partition, table: np.ndarray, names: Sequence[str] = ()
) -> str:
    """Say in a few lines what each client got."""
    counted, moved = table.shape[1] > 1, partition.parts.moved
    lines = [
        repr(dataset),
        f"{config.data.spread()}: {config.clients.number} clients, seed {config.seed}",
        "",
        f"samples used      {table.sum():,} of {len(dataset.y):,}",
        f"samples a client  {_range(table.sum(1))}",
        *([f"classes a client  {_range((table > 0).sum(1))}"] if counted else []),
        *([f"samples moved     {moved:,}, from the largest clients"] if moved else []),
        *([f"owners            {_some(names)}"] if names else []),
        f"true clusters     {_clusters(partition.structure.numpy())}",
    ]
    return "\n".join(lines)


def _range(values: np.ndarray) -> str:
    """Summarise numbers by their range and median.

    >>> _range(np.array([1, 2, 9])), _range(np.array([3, 3]))
    ('1 to 9, median 2', '3')
    """
    low, high = values.min(), values.max()
    return f"{low:,} to {high:,}, median {np.median(values):,.0f}" if low < high else f"{low:,}"


def _some(names: Sequence[str]) -> str:
    """List the first names.

    >>> _some(["oslo", "lima"]), _some(list("abcdefghijkl"))
    ('oslo, lima', 'a, b, c, d, e, f, g, h, i, j and 2 more')
    """
    return ", ".join(names[:10]) + f" and {len(names) - 10:,} more" * (len(names) > 10)


def _clusters(structure: np.ndarray) -> str:
    """Count the true clusters of clients on each level.

    >>> _clusters(np.array([[0, 0, 1], [0, 1, 2]])), _clusters(np.zeros((1, 3)))
    ('2 on level 1, 3 on level 2', 'one: no client differs from another')
    """
    numbers = [len(np.unique(level)) for level in structure]
    if numbers == [1]:
        return "one: no client differs from another"
    if numbers == [structure.shape[1]]:
        return "none: every client differs from every other"
    return ", ".join(f"{n} on level {level}" for level, n in enumerate(numbers, start=1))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns the exit code: 0, 2 for what cannot be done, 130 on Ctrl-C.
    """
    with guard() as ended:
        ended.code = look(argv)
    return ended.code


if __name__ == "__main__":
    sys.exit(main())
