"""Runs of folders, in groups that differ only in seeds, and tables of results."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fl.analysis.costs import COSTS, totals, unit_for, up_to
from fl.base.columns import Column
from fl.base.errors import FLError
from fl.base.tables import wrap_columns
from fl.data import GIVEN
from fl.runs import checkpoint
from fl.runs.columns import columns, first_score
from fl.runs.folder import check_intact
from fl.runs.metrics import FILE, Row, best, find_judged, read, select_evaluated
from fl.runs.summary import in_a_line
from fl.settings import Config, Experiment

AGAINST = {"rounds": "round", "traffic": "megabytes", "macs": "tmac", "seconds": "elapsed", "simulated": "simulated"}
"""For each quantity that curves can be plotted over, its column in the rows."""
TAIL = 10
"""Number of the last evaluations that the late mean is taken of."""
_log = logging.getLogger("fl")
_COSTS = {"megabytes": COSTS["megabytes"], "seconds": COSTS["elapsed"]}


@dataclass(frozen=True)
class RecordedRun:
    """A run folder: its settings and its rows.

    Attributes:
        own: names of the data (`dataset`) and of the `model` that a user gave, for which the settings have no name.
    """

    folder: Path
    config: Config
    rows: list[Row]
    own: Mapping[str, str] = field(default_factory=dict)

    @property
    def final(self) -> Row:
        """The last row of a round that was evaluated; {} if there is none."""
        return next(reversed(select_evaluated(self.rows)), {})

    def __repr__(self) -> str:
        return in_a_line(self.config.method.name, self.config.seed, self.final, self.folder)


def folders_with(file: str, folders: Sequence[Path]) -> dict[Path, list[Path]]:
    """Map each folder to the run folders with a file: itself, or folders below it.

    Raises FLError if there are none, or if one of them is not a folder.
    """
    if not folders:
        raise FLError("give at least one run folder")
    if strange := [folder for folder in folders if not folder.is_dir()]:
        wrong = "is not a folder" if strange[0].exists() else "does not exist"
        raise FLError(f"{strange[0]} {wrong}: give a run folder, or one with several", code="folder")
    return {folder: [path.parent for path in sorted(folder.rglob(file))] for folder in folders}


def find_runs(folders: Sequence[Path], quiet: bool = False) -> list[RecordedRun]:
    """Find the runs in folders, which are run folders or contain some.

    Runs of one command are in its order of methods. Runs below a folder that were not evaluated yet are left out with
    a warning.

    Args:
        quiet: whether to leave out any that were not, without a warning.

    Raises FLError for a folder without runs, for a run folder without an evaluated round, and if no run has one.
    """
    runs: dict[Path, RecordedRun] = {}
    waiting: dict[Path, Path] = {}
    for folder, paths in folders_with(FILE, folders).items():
        if not paths:
            raise FLError(f"{folder} holds no run: there is no {FILE} in it or below it", code="folder")
        names = Experiment.read(folder).algorithms if (folder / "config.yaml").exists() else ()
        inside = []
        for path in paths:
            config = Config.read(path)
            config.check_recorded()
            rows = read(path / FILE)
            input_names = {}
            if (path / checkpoint.FILE).exists():
                check_intact(path, config)
                input_names = _name_inputs(config, checkpoint.read_header(path)["given"])
            if not select_evaluated(rows):
                if path == folder and not quiet:
                    raise FLError(f"{path} has no evaluated round yet", code="folder")
                waiting[path.resolve()] = path
                continue
            inside.append(RecordedRun(path, config, rows, input_names))
        inside.sort(key=lambda run: [*names, run.config.method.name].index(run.config.method.name))
        runs |= {run.folder.resolve(): run for run in inside}
    if not runs:
        raise FLError(
            f"no run in {', '.join(map(str, folders))} has an evaluated round yet: wait for the first one",
            code="folder",
        )
    if waiting and not quiet:
        _log.warning(f"warning: without an evaluated round yet, so left out: {', '.join(map(str, waiting.values()))}")
    return list(runs.values())


def _name_inputs(config: Config, inputs: Mapping[str, Any]) -> dict[str, str]:
    """Name a user's data and model by digests of what a checkpoint says of them.

    See `checkpoint.identify_inputs`.
    """
    names = {}
    if data := inputs.get("data"):
        names["dataset"] = f"{config.data.dataset}-{data['sha256'][:6]}"
    if model := inputs.get("model"):
        models = json.dumps([model, *inputs.get("models", [])], sort_keys=True)
        names["model"] = f"{model['class']}-{hashlib.sha256(models.encode()).hexdigest()[:6]}"
    return names


def _seeds_have_own_data(runs: Sequence[RecordedRun]) -> bool:
    """Return whether each seed has its own data, as where it makes the split."""
    pairs = {(run.config.seed, run.own.get("dataset")) for run in runs}
    seeds, data = ({pair[part] for pair in pairs} for part in (0, 1))
    return 1 < len(pairs) == len(seeds) == len(data)


def _settings(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return the settings in which runs may differ, with names of users' own inputs."""
    left_out = {"dataset"} if _seeds_have_own_data(runs) else set()
    return [
        run.config.list_comparable() | {name: value for name, value in run.own.items() if name not in left_out}
        for run in runs
    ]


def group(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Group runs by label: the method, and the settings in which runs differ.

    The seed is none of them. Data and models that a user gave differ if their digests do. If each seed has data of its
    own, they are one group.

    Raises FLError for two runs with the same label and seed.
    """
    tables = _settings(runs)
    values: dict[str, set] = {}
    for settings in tables:
        for name, value in settings.items():
            values.setdefault(name, set()).add(value)
    groups: dict[str, list[RecordedRun]] = {}
    for run, settings in zip(runs, tables):
        method = run.config.method.name
        differ = {name.removeprefix(f"{method}."): value for name, value in settings.items() if len(values[name]) > 1}
        if "participation" in differ and not settings["participation"]:  # a number was given, and no share
            del differ["participation"]
            differ["participants"] = settings["participants"]
        texts = {n: (",".join(map(str, v)) or "none") if isinstance(v, tuple) else v for n, v in differ.items()}
        label = " ".join([method, *(f"{name}={text}" for name, text in texts.items())])
        if twins := [other for other in groups.get(label, ()) if other.config.seed == run.config.seed]:
            raise FLError(f"{run.folder} and {twins[0].folder} have the same settings and seed: give one of them")
        groups.setdefault(label, []).append(run)
    return groups


def target_table(
    groups: dict[str, list[RecordedRun]],
    target: float,
    lay_out: Callable[[Sequence[Sequence[str]]], str] = wrap_columns,
) -> str:
    """Tabulate the costs of runs up to a target, a line a label (FedFA's Table 2).

    It has means over the runs that reached the target, or "-" if none did. If only some did, the column of seeds says
    how many.

    Raises FLError for a number that is neither an accuracy nor a perplexity, and for a run that has no such score.
    """
    if not 0 < target < math.inf:
        raise FLError(f"--target {target:g} is neither an accuracy in (0, 1], such as 0.7, nor a perplexity above 1")
    for run in (run for runs in groups.values() for run in runs):
        if target <= 1 and not any("accuracy" in row for row in run.rows):
            raise FLError(f"--target {target:g} is an accuracy, and {run.folder} predicts numbers: leave it out")
        if target > 1 and not any("perplexity" in row for row in run.rows):
            raise FLError(
                f"--target {target:g} is a perplexity, and {run.folder} has none: an accuracy is in (0, 1], as 0.7 is"
            )
    means: dict[str, dict[str, float]] = {}
    seeds = {}
    for label, runs in groups.items():
        spent = [up_to(target, run.config, run.rows) for run in runs]
        there = [run_costs for run_costs in spent if run_costs]
        keys = set.intersection(*map(set, there)) if there else ()
        means[label] = {key: float(np.mean([run_costs[key] for run_costs in there])) for key in keys}
        seeds[label] = f"{len(runs)}" if len(there) == len(runs) else f"{len(there)} of {len(runs)}"
    least = min((mean["tmac"] for mean in means.values() if "tmac" in mean), default=math.inf)
    most = max((mean["megabytes"] for mean in means.values() if "megabytes" in mean), default=1)
    costs = COSTS | {"tmac": _in_unit("tmac", least), "megabytes": _in_unit("megabytes", min(most, 1))}
    shown = [key for key in costs if key == "elapsed" or any(key in mean for mean in means.values())]
    lines = [["method", "seeds", "rounds", *(costs[key].heading for key in shown)]]
    for label, mean in means.items():
        cells = [f"{round(mean['round'], 1):g}"] if mean else ["-"]
        cells += [costs[key].number(mean[key]) if key in mean else "-" for key in shown]
        lines.append([label, seeds[label], *cells])
    goal = f"accuracy of {100 * target:g}% or more" if target <= 1 else f"perplexity of {target:g} or less"
    return (
        f"up to the first evaluated round with a global test {goal}; mean over the seeds that reached it\n"
        f"{costs['megabytes'].heading}: traffic of a client\n"
        "MACs: forward passes of all clients (a training step costs about three forward passes)\n"
        f"{lay_out(lines)}"
    )


def _in_unit(cost: str, value: float) -> Column:
    """Return the column of a cost in the largest unit in which a value is 0.1 or more."""
    heading, factor = unit_for(cost, value, 0.1)
    return replace(COSTS[cost], heading=heading, factor=factor)


def add_cost_column(run: RecordedRun, against: str) -> list[Row]:
    """Add the column that curves are drawn against to the rows of a run.

    Its numbers are from `fl.analysis.costs.totals`. Raises FLError if it was not counted in every round.
    """
    if against == "rounds":
        return run.rows
    spent, column = totals(run.config, run.rows), AGAINST[against]
    if column not in spent:
        lacking = {"traffic": "bytes", "simulated": "simulated seconds (--pace)"}.get(against, "macs")
        raise FLError(
            f"{run.folder / 'metrics.csv'} does not have the {lacking} of every round: compare --against rounds or "
            "seconds, or train again",
            code="file",
        )
    return [row | {column: total} for row, total in zip(run.rows, spent[column])]


def describe_common(configs: Sequence[Config]) -> str:
    """Make a title of the settings that all runs have in common.

    >>> describe_common([Config(), Config.of(model="lenet")])
    'digits, dirichlet0.5, 20 clients, 5 a round'
    """
    shared = {
        "{}": {"custom data" if config.data.dataset == GIVEN else config.data.dataset for config in configs},
        "{} ": {"custom model" if config.model.name == GIVEN else config.model.name for config in configs},
        "{}  ": {config.data.spread() for config in configs},
        "{} clients": {config.clients.number for config in configs},
        "{} a round": {config.clients.cohort() for config in configs},
    }
    return ", ".join(text.format(*values).strip() for text, values in shared.items() if len(values) == 1)


def _scores(names: Iterable[str]) -> dict[str, Column]:
    """Find the columns with scores of the global model, metrics included."""
    return {name: column for name, column in columns(names).items() if column.beside_clients}


def _client_scores(names: Iterable[str]) -> dict[str, Column]:
    """Find the columns with scores on clients' own test data, metrics included."""
    return {
        name: column for name, column in columns(names).items() if column.heading and name.startswith("local_test_")
    }


def find_other_columns(names: Iterable[str]) -> dict[str, Column]:
    """Find the columns with a heading that are neither global nor client test scores.

    Methods' columns are there if they are among the names.

    Raises FLError for one with the name of another result.

    >>> list(find_other_columns(()))
    ['models_own_accuracy', 'models_perplexity', 'epsilon']
    """
    names = list(names)
    known = {*_scores(names), *_client_scores(names)}
    further = {name: column for name, column in columns(names).items() if column.heading and name not in known}
    if taken := [name for name in further if name in {"late", "best", *_COSTS}]:
        raise FLError(
            f"a column cannot be called {taken[0]!r}, as a result of every run is: choose another name", code="name"
        )
    return further


def make_table(
    groups: dict[str, list[RecordedRun]], lay_out: Callable[[Sequence[Sequence[str]]], str] = wrap_columns
) -> str:
    """Make a table of results and costs with a line for each label.

    It has mean ± sample standard deviation over seeds of the results that `summarise_run` computes, then mean
    costs. Scores of the participants' models are there if all runs have them.

    If all runs have clients that test on samples of their own, their scores come first, and the headings of the others
    say that they are of the global model. The best accuracy is left out then, since it was not chosen by validation.

    Args:
        lay_out: makes the text of the cells, see `fl.base.tables`.
    """
    outcomes = {label: [summarise_run(run) for run in runs] for label, runs in groups.items()}
    every = [run for runs in outcomes.values() for run in runs]
    names = sorted(set().union(*every) - {"late", "best", *_COSTS})
    by_clients, first = have_client_scores(every), first_score(names)
    score, noun = columns([first])[first], "acc. %" if first == "accuracy" else "abs. error"
    late = replace(score, heading=f"last-{TAIL} {noun}", beside_clients="")
    of_clients = _client_scores(names)
    results = of_clients | {first: score, "late": late, "best": replace(late, heading=f"best {noun}")}
    most = max((run["megabytes"] for run in every if "megabytes" in run), default=1)
    costs = _COSTS | {"megabytes": _in_unit("megabytes", min(most, 1))}  # MB, or kB if all are small
    shown = {
        key: column
        for key, column in (results | _scores(names) | find_other_columns(names) | costs).items()
        if any(key in run for run in every)
        and not (key == "best" if by_clients else key in of_clients)
        and (column.due != "models" or all(key in run for run in every))
    }
    heads = [
        column.beside_clients if by_clients and column.beside_clients else column.heading for column in shown.values()
    ]
    lines = [["method", "seeds", "rounds", *heads]]
    for label, runs in outcomes.items():
        rounds = "/".join(str(n) for n in sorted({run["round"] for run in runs}))
        lines.append([label, str(len(runs)), rounds, *(_cell(key, column, runs) for key, column in shown.items())])
    note = "" if not _seeds_have_own_data([*chain(*groups.values())]) else "\nEach seed has its own data."
    return lay_out(lines) + note


def have_client_scores(results: Sequence[Mapping[str, float]]) -> bool:
    """Return whether clients have test samples of their own in all these runs."""
    return all(f"local_test_{first_score(result)}" in result for result in results)


def find_selected_round(run: RecordedRun) -> Row:
    """Find the round that a run is judged by on clients' own data.

    See `fl.runs.metrics.find_judged`.
    """
    return find_judged(run.rows, run.config.evaluation.best_by, run.config.evaluation.keep_best)


def summarise_run(run: RecordedRun) -> dict[str, float]:
    """Compute the results of a run, and the last evaluated round.

    Scores of the global model (accuracy, loss, and macro-F1 or perplexity; of numbers their error and R2; metrics that
    were asked for) are from the last evaluated round. late is the mean of the last ten accuracies (or errors), if there
    are ten, best is from the best round, see `fl.runs.metrics.best`. Scores on clients' own test data, if they have
    some, are means over clients in the round of `find_selected_round`: local_test_accuracy, local_test_f1,
    local_test_perplexity. Other columns with a heading are as in the last round that has them. Costs are of the whole
    run: megabytes of a client (as in `fl.analysis.costs.totals`), if all rounds counted them, and seconds.
    """
    measured = select_evaluated(run.rows)
    last, chosen, first = measured[-1], find_selected_round(run), first_score(measured[-1])
    reached = [row[first] for row in measured]
    scores = {key: last[key] for key in ("round", *_scores(last)) if key in last}
    late_and_best = {"late": float(np.mean(reached[-TAIL:]))} if len(reached) >= TAIL else {}
    if top := best(measured, run.config.evaluation.best_by):
        late_and_best["best"] = top[first]
    of_clients = {key: chosen[key] for key in _client_scores(chosen) if key in chosen}
    further = find_other_columns(set().union(*run.rows))
    latest = {key: row[key] for row in run.rows for key in further if key in row}
    spent = totals(run.config, run.rows)
    cost = {"megabytes": spent["megabytes"][-1]} if "megabytes" in spent else {}
    return scores | late_and_best | of_clients | latest | cost | {"seconds": spent["elapsed"][-1]}


def _cell(key: str, column: Column, runs: Sequence[Mapping[str, float]]) -> str:
    if not all(key in run for run in runs):
        return "-"
    mean, std = (
        f"{number:.{column.digits}f}" for number in mean_and_spread([column.factor * run[key] for run in runs])
    )
    return mean if len(runs) < 2 or key in _COSTS else f"{mean} ± {std}"


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and their sample standard deviation, 0 for one value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
