"""The columns of metrics.csv: of every run, and of methods."""

import math
from collections.abc import Container, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from fl.algorithms import ALGORITHMS
from fl.base.columns import Column
from fl.base.errors import FLError
from fl.federation import Federation, traffic
from fl.runs import evaluate
from fl.settings.extensions import EXTENSIONS


def _score(noun: str, heading: str = "", **more: Any) -> Column:
    """Make the column of a score of the global model.

    Tables call it by its name, alone or beside clients' scores.
    """
    return Column(due="global", heading=heading or noun, beside_clients=f"global {noun}", **more)


_loss = partial(_score, digits=3, falls=True, limits=(0, math.inf))
_FIRST: dict[str, Column] = {
    "round": Column(int),
    "seconds": Column(),
    "train_loss": Column(),
    "dropped": Column(int),
    "accuracy": _score("acc. %", "final acc. %", factor=100, label="test accuracy"),
    "loss": _loss("loss", "final loss", label="test loss"),
    "mae": _loss("abs. error", "mean abs. error", label="test mean absolute error"),
    "r2": _score("R2", digits=3, label="test R2"),
    "f1": _score("F1 %", "macro-F1 %", factor=100),
    "mean_iou": _score("IoU %", "mean IoU %", factor=100, label="test mean IoU"),
    "dice": _score("Dice %", "mean Dice %", factor=100),
    "perplexity": _score("perplexity", label="test perplexity", log=True, span=0.1, falls=True, limits=(1, math.inf)),
    "models_accuracy": Column(due="models", factor=100),
    "models_std": Column(due="models", factor=100),
    "models_own_accuracy": Column(due="models", heading="local acc. %", factor=100),
    "models_perplexity": Column(due="models", heading="local perplexity"),
    "models_cosine": Column(label="mean pairwise cosine\nof the models", span=0.01, limits=(-1, 1)),
    "models_cosine_released": Column(due="models", limits=(-1, 1)),
    **dict.fromkeys(traffic.COLUMNS, Column()),
    "macs": Column(),
}
"""Those that a round and its evaluation fill. `macs` are the multiply-accumulates of a participant's forward passes in
training, on average; a step costs about three times as many."""

for _one in EXTENSIONS.values():
    _FIRST |= _one.columns

_percent = partial(Column, due="global", factor=100)
_error = partial(Column, due="global", digits=3, falls=True)
_CLIENT_SCORES = {
    "accuracy": _percent(heading="clients' acc. %", label="mean test accuracy\non clients' own data"),
    "accuracy_by_samples": _percent(),
    "std": _percent(falls=True),
    "worst_tenth": _percent(heading="worst tenth %"),
    "loss": _error(),
    "f1": _percent(heading="clients' F1 %"),
    "f1_std": _percent(falls=True),
    "mean_iou": _percent(heading="clients' IoU %"),
    "dice": _percent(heading="clients' Dice %"),
    "perplexity": Column(due="global", heading="clients' perplexity", falls=True),
    "mae": _error(heading="clients' abs. error"),
    "mae_by_samples": _error(),
    "mae_std": _error(),
    "mae_worst_tenth": _error(heading="worst tenth's error"),
    "r2": Column(due="global", heading="clients' R2", digits=3),
}

_LAST = {f"local_valid_{name}": replace(column, heading="", label="") for name, column in _CLIENT_SCORES.items()}
_LAST |= {f"local_test_{name}": column for name, column in _CLIENT_SCORES.items()}
"""Means and spreads over clients of the scores on their own samples. All clients count alike, but in those that end in
`_by_samples`, where they count by how many samples of the part they have."""

_OF_SITES = {
    f"test_{name}_": replace(_FIRST[name], heading=heading, beside_clients=heading, label="")
    for name, heading in (("accuracy", "acc. %"), ("mae", "abs. error"))
}
"""The global model's score at each owner of the test set, by what the column's name has before the owner's."""

_ASKED = ("test_", "local_valid_", "local_test_")
"""What the names of columns of metrics begin with that were asked for (`fl.federation.scores.Metric`)."""


def columns(names: Iterable[str] = (), method: str = "") -> dict[str, Column]:
    """Return the columns of metrics.csv by name, in order, methods' before `_LAST`.

    Args:
        names: of columns, such as the keys of a table's rows; metrics that were asked for among them come last. All
            methods are looked through where one of them is no column of every run, or of `method`.
        method: the method whose columns are among them, whatever the names are.

    Raises FLError for a method that names one of the others as its own.

    >>> columns()["accuracy"].heading, columns(["round", "test_roc_auc_ovr"])["test_roc_auc_ovr"].heading
    ('final acc. %', 'roc_auc_ovr')
    """
    strange = [name for name in names if name not in _FIRST and name not in _LAST]
    metrics = [name for name in strange if name.startswith(_ASKED)]
    of_run = [method] if method else []
    known = {*metrics, *(column for name in of_run for column in ALGORITHMS[name].columns)}
    methods = ALGORITHMS if set(strange) - known else of_run
    extra: dict[str, Column] = {}
    for name in methods:
        of_method = ALGORITHMS[name].columns
        if taken := [column for column in of_method if column in _FIRST or column in _LAST]:
            raise FLError(
                f"{name} names {taken[0]!r} as a column of its own, which every run has: choose another name",
                code="name",
            )
        extra |= {key: Column(column) if isinstance(column, type) else column for key, column in of_method.items()}
    return _FIRST | extra | _LAST | {name: _find_column(name) for name in metrics if name not in extra}


def _find_column(name: str) -> Column:
    column = Column(due="global", digits=3)
    for first, more in _OF_SITES.items():
        if name.startswith(first):
            site = name.removeprefix(first)
            return replace(more, heading=f"{more.heading} {site}", beside_clients=f"{more.beside_clients} {site}")
    if name.startswith("test_"):
        heading = name.removeprefix("test_")
        return replace(column, heading=heading, beside_clients=f"global {heading}", label=heading)
    if name.startswith("local_test_"):
        return replace(column, heading=f"clients' {name.removeprefix('local_test_')}")
    return column


def list_columns(fed: Federation) -> list[str]:
    """List the columns of a federation's metrics, and of each test site."""
    parts = ["test", *(f"local_{part}" for part in evaluate.list_held_out(fed))] if fed.metrics else []
    metric_columns = [f"{part}_{name}" for part in parts for metric in fed.metrics for name in metric.names]
    return [*metric_columns, *evaluate.site_columns(fed)]


def first_score(names: Container[str]) -> str:
    """Return which score stands for a run: accuracy, or the error of numbers.

    >>> first_score(["loss", "mae", "r2"])
    'mae'
    """
    return "accuracy" if "accuracy" in names else "mae"
