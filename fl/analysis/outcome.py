"""The results of runs: a table with mean and standard deviation over seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fl.analysis.costs import COSTS, totals
from fl.base.columns import Column
from fl.base.errors import FLError
from fl.base.tables import wrapped
from fl.config import Config
from fl.runs.columns import columns
from fl.runs.metrics import Row, selected

TAIL = 10
"""How many of the last evaluations the late mean is taken of."""
_LOCAL = "local_test_"  # how columns on clients' own test data begin; in results they begin with own_
_COSTS = {"megabytes": COSTS["megabytes"], "seconds": COSTS["elapsed"]}


@dataclass(frozen=True)
class Run:
    """A run folder: its settings and its rows."""

    folder: Path
    config: Config
    rows: list[Row]


def _scores() -> dict[str, Column]:
    """Columns with scores of the global model."""
    return {name: column for name, column in columns().items() if column.beside_own}


def _own() -> dict[str, str]:
    """From results on clients' own test data to their columns."""
    headed = [name for name, column in columns().items() if column.heading and name.startswith(_LOCAL)]
    return {name.replace(_LOCAL, "own_"): name for name in headed}


def others() -> dict[str, Column]:
    """All further columns that have a heading.

    Raises FLError for one with the name of another result.

    >>> list(others())
    ['models_own_accuracy', 'models_perplexity', 'attack_success']
    """
    known = {*_scores(), *_own().values()}
    found = {name: column for name, column in columns().items() if column.heading and name not in known}
    if taken := [name for name in found if name in {"late", "best", *_own(), *_COSTS}]:
        raise FLError(f"a column cannot be called {taken[0]!r}, as a result of every run is: choose another name")
    return found


def results() -> dict[str, Column]:
    """All results that a run can have, see `outcome`, in the order of the table.

    >>> list(results())[:7]
    ['own_accuracy', 'own_f1', 'own_perplexity', 'accuracy', 'late', 'best', 'loss']
    """
    every = columns()
    own = {name: every[column] for name, column in _own().items()}
    late = replace(every["accuracy"], heading=f"last-{TAIL} acc. %", beside_own="")
    best = replace(late, heading="best acc. %")
    return own | {"accuracy": every["accuracy"], "late": late, "best": best} | _scores() | others() | _COSTS


def table(groups: dict[str, list[Run]], lay_out: Callable[[Sequence[Sequence[str]]], str] = wrapped) -> str:
    """A table with a line for each label: mean ± sample standard deviation over seeds of final, late-mean and best
    accuracy, loss and macro-F1 (of text: perplexity), then mean costs: megabytes of a client (see
    `fl.analysis.costs.totals`) and seconds of training. Before the costs are all other columns that have a heading, see
    `fl.base.columns`: where all runs have them, the scores of the participants' models after local training (local
    acc., of text local perplexity); where any run has it, the success of a trigger's attack.

    If all runs have clients that test on samples of their own, their mean scores come first, in the round that
    `fl.runs.metrics.selected` gives, and the headings of the others say that they are of the global model. The best
    accuracy is left out then, since it was not chosen by validation.

    Args:
        lay_out: makes the text of the cells, see `fl.base.tables`.
    """
    found = {label: [outcome(run) for run in runs] for label, runs in groups.items()}
    every = [run for runs in found.values() for run in runs]
    own = have_own(every)
    shown = {
        key: column
        for key, column in results().items()
        if any(key in run for run in every)
        and not (key == "best" if own else key in _own())
        and (column.due != "models" or all(key in run for run in every))
    }
    heads = [column.beside_own if own and column.beside_own else column.heading for column in shown.values()]
    lines = [["method", "seeds", "rounds", *heads]]
    for label, runs in found.items():
        rounds = "/".join(str(n) for n in sorted({run["round"] for run in runs}))
        lines.append([label, str(len(runs)), rounds, *(_cell(key, column, runs) for key, column in shown.items())])
    return lay_out(lines)


def have_own(results: Sequence[Mapping[str, float]]) -> bool:
    """Whether clients have test samples of their own in all these runs."""
    return all("own_accuracy" in result for result in results)


def outcome(run: Run) -> dict[str, float]:
    """What came of a run, by the names of `results`, and the last evaluated round.

    Scores of the global model (accuracy, loss, and macro-F1 or perplexity) are those of the last evaluated round. late
    is the mean of the last accuracies, best the largest. Scores on clients' own test data, if they have some, are means
    over clients in the round that `fl.runs.metrics.selected` gives: own_accuracy, own_f1, own_perplexity. Other columns
    with a heading are as in the last round that has them. Costs are of the whole run: megabytes of a client (as in
    `fl.analysis.costs.totals`), if all rounds counted them, and seconds.
    """
    measured = [row for row in run.rows if "accuracy" in row]
    accuracy, last, chosen = [row["accuracy"] for row in measured], measured[-1], selected(run.rows)
    scores = {key: last[key] for key in ("round", *_scores()) if key in last}
    late = {"late": float(np.mean(accuracy[-TAIL:])), "best": max(accuracy)}
    own = {key: chosen[column] for key, column in _own().items() if column in chosen}
    further = others()
    latest = {key: row[key] for row in run.rows for key in further if key in row}
    spent = totals(run.config, run.rows)
    cost = {"megabytes": spent["megabytes"][-1]} if "megabytes" in spent else {}
    return scores | late | own | latest | cost | {"seconds": spent["elapsed"][-1]}


def _cell(key: str, column: Column, runs: Sequence[Mapping[str, float]]) -> str:
    if not all(key in run for run in runs):
        return "-"
    values = [column.factor * run[key] for run in runs]
    mean = f"{np.mean(values):.{column.digits}f}"
    return mean if len(values) < 2 or key in _COSTS else f"{mean} ± {np.std(values, ddof=1):.{column.digits}f}"
