"""Runs of folders, in groups that differ only in their seed."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fl.analysis.costs import target_lines, target_text, totals, up_to
from fl.analysis.outcome import Run
from fl.base.errors import FLError
from fl.base.tables import wrapped
from fl.config import Config
from fl.data import GIVEN
from fl.runs import checkpoint
from fl.runs.folder import check_intact
from fl.runs.metrics import Row, read

AGAINST = {"rounds": "round", "traffic": "megabytes", "macs": "tmac", "seconds": "elapsed"}
"""What curves can be drawn against, and the column of the rows for it."""


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in the given folders, which are run folders or contain some. Runs of one command are in its order of
    methods.

    Raises FLError for a folder without runs, and for runs that were not evaluated yet.
    """
    runs: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise FLError(f"{folder} is not a folder")
        found = [path.parent for path in sorted(folder.rglob("metrics.csv"))]
        if not found:
            raise FLError(f"{folder} holds no run: there is no metrics.csv in it or below it")
        names = Config.read(folder).algorithm if (folder / "config.yaml").exists() else ()
        mine = []
        for path in found:
            config = Config.read(path)
            config.check_recorded()
            rows = read(path / "metrics.csv")
            if (path / checkpoint.FILE).exists():
                check_intact(path, config)
            if not any("accuracy" in row for row in rows):
                raise FLError(f"{path} has no evaluated round yet")
            if len(config.runs()) != 1:
                raise FLError(f"{path / 'config.yaml'} names several methods or seeds, which one run does not have")
            mine.append(Run(path, config, rows))
        mine.sort(key=lambda run: [*names, *run.config.algorithm].index(*run.config.algorithm))
        runs |= {run.folder.resolve(): run for run in mine}
    return list(runs.values())


def group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by label: the method, and the settings other than the seed in which the runs differ.

    Raises FLError for two runs with the same label and seed.
    """
    tables = [{one.name: one.value for one in run.config.settings() if one.role.compared} for run in runs]
    values: dict[str, set] = {}
    for settings in tables:
        for name, value in settings.items():
            values.setdefault(name, set()).add(value)
    groups: dict[str, list[Run]] = {}
    for run, settings in zip(runs, tables):
        (method,) = run.config.algorithm
        differ = {name.removeprefix(f"{method}."): value for name, value in settings.items() if len(values[name]) > 1}
        label = " ".join([method, *(f"{name}={_said(value)}" for name, value in differ.items())])
        if twins := [other for other in groups.get(label, ()) if other.config.seeds == run.config.seeds]:
            raise FLError(f"{run.folder} and {twins[0].folder} have the same settings and seed: give one of them")
        groups.setdefault(label, []).append(run)
    return groups


def _said(value: object) -> str:
    """A value as its flag is written."""
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def target_table(
    groups: dict[str, list[Run]], target: float, lay_out: Callable[[Sequence[Sequence[str]]], str] = wrapped
) -> str:
    """What runs spent to reach a target, see `fl.analysis.costs.up_to`: FedFA's Table 2.

    Args:
        lay_out: makes the text of the cells, see `fl.base.tables`.

    Raises FLError if the target is a perplexity and a run has none.
    """
    for run in (run for runs in groups.values() for run in runs):
        if target > 1 and not any("perplexity" in row for row in run.rows):
            raise FLError(
                f"--target {target:g} is a perplexity, and {run.folder} has none: an accuracy is in (0, 1], such as 0.7"
            )
    results = {label: [up_to(target, run.config, run.rows) for run in runs] for label, runs in groups.items()}
    return f"{target_text(target)}\n{lay_out(target_lines(results))}"


def along(run: Run, against: str) -> list[Row]:
    """The rows of a run, with the column that curves are drawn against added from `fl.analysis.costs.totals`.

    Raises FLError if it was not counted in every round.
    """
    if against == "rounds":
        return run.rows
    spent, column = totals(run.config, run.rows), AGAINST[against]
    if column not in spent:
        lacking = "bytes" if against == "traffic" else "macs"
        raise FLError(
            f"{run.folder / 'metrics.csv'} does not have the {lacking} of every round: compare --against rounds or "
            "seconds, or train again"
        )
    return [row | {column: total} for row, total in zip(run.rows, spent[column])]


def common(configs: Sequence[Config]) -> str:
    """A title made from the settings that all runs have in common.

    >>> common([Config(), Config(model="lenet")])
    'digits, dirichlet0.5, 20 clients, 5 a round'
    """
    shared = {
        "{}": {"own data" if config.dataset == GIVEN else config.dataset for config in configs},
        "{} ": {"own model" if config.model == GIVEN else config.model for config in configs},
        "{}  ": {config.spread() for config in configs},
        "{} clients": {config.clients for config in configs},
        "{} a round": {config.cohort() for config in configs},
    }
    return ", ".join(text.format(*values).strip() for text, values in shared.items() if len(values) == 1)
