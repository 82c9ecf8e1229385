"""What runs came to: one line a method, with mean and standard deviation over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from fl.analysis.costs import totals
from fl.config import Config
from fl.runs.metrics import Row, selected

TAIL = 10
"""Evaluations at the end of a run that its late mean is taken of."""
WIDTH = 160
"""Characters of a table's line."""
_OWN = {
    "own_accuracy": ("own acc. %", 100, 2), "own_f1": ("own F1 %", 100, 2), "own_perplexity": ("own perplexity", 1, 2),
}  # fmt: skip
_SCORES = {
    "accuracy": ("final acc. %", 100, 2), "late": (f"mean last {TAIL} %", 100, 2), "best": ("best acc. %", 100, 2),
    "loss": ("final loss", 1, 3), "f1": ("macro-F1 %", 100, 2), "perplexity": ("perplexity", 1, 2),
}  # fmt: skip
_BESIDE_OWN = {
    "accuracy": "global acc. %", "loss": "global loss", "f1": "global F1 %", "perplexity": "global perplexity",
}  # fmt: skip
_LATEST = {
    "models_own_accuracy": ("local acc. %", 100, 2), "models_perplexity": ("local perplexity", 1, 2),
    "attack_success": ("attack %", 100, 2),
}  # fmt: skip
_COSTS = {"megabytes": ("MB", 1, 2), "seconds": ("seconds", 1, 1)}
_COLUMNS = _OWN | _SCORES | _LATEST | _COSTS  # result -> (head, factor, digits)


@dataclass(frozen=True)
class Run:
    """A run folder: its settings and its rows."""

    folder: Path
    config: Config
    rows: list[Row]


def table(groups: dict[str, list[Run]]) -> str:
    """A table of final, late-mean and best accuracy, loss and macro-F1 (of text perplexity), mean ± sample standard
    deviation over seeds, then mean costs: megabytes of a client (as in `fl.analysis.costs.totals`) and seconds of
    training. Before these, where all runs have them, how the participants' models do after local training on the
    classes that each has (local acc., of text local perplexity), and where any has it the success of a trigger's
    attack.

    Where all runs have clients that test on samples of their own, their mean scores there come first, in the round that
    `fl.runs.metrics.selected` gives, and the heads of the others say that they are the global model's. The best
    accuracy, which no validation chose, is left out then.
    """
    results = {label: [outcome(run) for run in runs] for label, runs in groups.items()}
    every = [run for runs in results.values() for run in runs]
    own = have_own(every)
    left_out = {"best"} if own else set(_OWN)
    left_out |= {key for key in ("models_own_accuracy", "models_perplexity") if not all(key in run for run in every)}
    keys = [key for key in _COLUMNS if key not in left_out and any(key in run for run in every)]
    heads = {key: head for key, (head, *_) in _COLUMNS.items()} | (_BESIDE_OWN if own else {})
    lines = [["method", "seeds", "rounds", *(heads[key] for key in keys)]]
    for label, runs in results.items():
        rounds = "/".join(str(n) for n in sorted({run["round"] for run in runs}))
        lines.append([label, str(len(runs)), rounds, *(_cell(key, runs) for key in keys)])
    return aligned(lines)


def have_own(results: Sequence[Mapping[str, float]]) -> bool:
    """Whether clients have test samples of their own in all of these outcomes of runs."""
    return all("own_accuracy" in result for result in results)


def outcome(run: Run) -> dict[str, float]:
    """What a run came to: the last evaluated round, its accuracy (also the mean of the late ones, and the best), loss,
    and of images macro-F1, of text perplexity. The same on clients' own test data, where they have some, as
    own_accuracy, own_f1 and own_perplexity: means over clients in the round that `fl.runs.metrics.selected` gives. Of
    the last round that has it: what the participants' models do after local training (models_own_accuracy, of text
    models_perplexity, see `fl.runs.evaluate.evaluate_models`) and attack_success. At last what it cost up to its end:
    megabytes of a client, as in `fl.analysis.costs.totals`, where all rounds counted them, and seconds.
    """
    measured = [row for row in run.rows if "accuracy" in row]
    accuracy, last = [row["accuracy"] for row in measured], measured[-1]
    late = {"late": float(np.mean(accuracy[-TAIL:])), "best": max(accuracy)}
    chosen = selected(run.rows)
    own = {key: chosen[column] for key in _OWN if (column := key.replace("own", "local_test")) in chosen}
    latest = {key: row[key] for row in run.rows for key in _LATEST if key in row}
    spent = totals(run.config, run.rows)
    cost = {"megabytes": spent["megabytes"][-1]} if "megabytes" in spent else {}
    cost["seconds"] = spent["elapsed"][-1]
    return {key: last[key] for key in ("round", *_SCORES) if key in last} | late | own | latest | cost


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells as text, the first column to the left and the others to the right. Columns that do not fit beside it into
    `WIDTH` follow below.

    >>> print(aligned([["method", "seeds"], ["fedavg", "2"]]))
    method    seeds
    fedavg        2
    """
    first, *widths = (max(map(len, column)) + 2 for column in zip(*lines))
    fit = max(1, sum(total <= WIDTH for total in accumulate(widths, initial=first)) - 1)
    text = "\n".join(line[0].ljust(first) + "".join(map(str.rjust, line[1 : 1 + fit], widths)) for line in lines)
    rest = [[line[0], *line[1 + fit :]] for line in lines]
    return text if fit == len(widths) else f"{text}\n\n{aligned(rest)}"


def _cell(key: str, runs: Sequence[Mapping[str, float]]) -> str:
    if not all(key in run for run in runs):
        return "-"
    _, factor, digits = _COLUMNS[key]
    values = [factor * run[key] for run in runs]
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) < 2 or key in _COSTS else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"
