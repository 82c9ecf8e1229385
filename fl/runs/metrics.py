"""metrics.csv: one row a round."""

import csv
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fl.algorithms import ALGORITHMS
from fl.base.errors import FLError
from fl.base.files import replacing
from fl.federation import traffic

Row = dict[str, float]

_LOCAL = [f"local_{part}_{what}" for part in ("valid", "test")
          for what in ("accuracy", "std", "loss", "f1", "f1_std", "perplexity")]  # fmt: skip
_FIRST = [
    "round", "seconds", "train_loss", "dropped", "accuracy", "loss", "f1", "perplexity",
    "models_accuracy", "models_std", "models_own_accuracy", "models_perplexity", "models_cosine", *traffic.COLUMNS,
    "macs", "attack_success",
]  # fmt: skip
PART = dict.fromkeys(("models_accuracy", "models_std", "models_own_accuracy", "models_perplexity"), "models")
PART |= dict.fromkeys(("accuracy", "loss", "f1", "perplexity", "attack_success", *_LOCAL), "global")
"""Columns that are not measured in every round, and with what."""


def columns() -> dict[str, type]:
    """The columns of metrics.csv, those that methods have of their own among them, and what kind of numbers they hold.

    `macs` are the multiply-accumulates of a participant's forward passes in training, on average; a step costs about
    three times as many. `attack_success` is the share of test images that a trigger turns into its class.

    Raises FLError for a method that names one of these as its own.
    """
    mine: dict[str, type] = {}
    for name, method in ALGORITHMS.items():
        own = getattr(method, "columns", {})
        if taken := [column for column in own if column in {*_FIRST, *_LOCAL}]:
            raise FLError(f"{name} names {taken[0]!r} as a column of its own, which every run has: choose another name")
        mine |= own
    whole = dict.fromkeys(("round", "dropped"), int)
    return dict.fromkeys(_FIRST, float) | whole | mine | dict.fromkeys(_LOCAL, float)


class Metrics:
    """The rows of a run, on disk as soon as they are added; what was not measured in a round is blank.

    Args:
        path: the CSV file.
        keep: rounds of an earlier, interrupted run to keep; later rows are dropped, to be run again.
        wanted: row -> which of "global" and "models" are due in its round. What an earlier end measured beyond
            that is dropped, so that a run in pieces leaves the table of a run in one.
    """

    def __init__(self, path: Path, keep: int = 0, wanted: Callable[[Row], set[str]] | None = None) -> None:
        self.path = path
        self.rows = [row for row in read(path) if row["round"] <= keep] if path.exists() else []
        if [row["round"] for row in self.rows] != list(range(1, keep + 1)):
            raise FLError(f"{path} does not hold rounds 1 to {keep}, which the checkpoint has done: put the table back")
        if wanted is not None:
            self.rows = [{k: v for k, v in row.items() if PART.get(k, "") in {"", *wanted(row)}} for row in self.rows]
        self.columns = list(columns())
        self._check({name for row in self.rows for name in row})
        with replacing(path) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def add(self, row: Row) -> None:
        """Append the row of a round. Raises FLError for a metric that no method has a column for."""
        self._check(row)
        self.rows.append(row)
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)
            file.flush()
            os.fsync(file.fileno())  # the table must not fall behind a checkpoint that is safe on disk

    def _check(self, names: Iterable[str]) -> None:
        if strange := [name for name in names if name not in self.columns]:
            raise FLError(
                f"metrics.csv has no column {strange[0]!r}: name it in the METHOD of the method that reports it, as in "
                f"Method(..., columns={{{strange[0]!r}: float}})"
            )


def selected(rows: Sequence[Row]) -> Row:
    """The round that a run is judged by on clients' own data: the evaluated one with the smallest mean validation loss
    (the first of several), or the last evaluated one where clients do not validate. Empty if none was evaluated.

    >>> rows = [{"round": r, "accuracy": 0.5, "local_valid_loss": loss} for r, loss in ((1, 2.0), (2, 1.0), (3, 3.0))]
    >>> selected(rows)["round"]
    2
    """
    measured = [row for row in rows if "accuracy" in row]
    validated = [row for row in measured if "local_valid_loss" in row]
    if not validated:
        return measured[-1] if measured else {}
    return min(validated, key=lambda row: (math.isnan(row["local_valid_loss"]), row["local_valid_loss"]))


def read(path: Path) -> list[Row]:
    """The rows of a metrics.csv, numbers as numbers, blanks left out. A last line that was cut off is dropped.

    Raises FLError for a file that is something else.
    """
    try:
        with open(path, newline="") as file:
            table = csv.DictReader(file)
            if table.fieldnames and "round" not in table.fieldnames:
                raise ValueError
            lines = [row for row in table if None not in row.values()]
        rows = [{key: float(value) for key, value in row.items() if value} for row in lines]
        known = columns()  # those of methods that are not here any more are floats
        return [{key: known.get(key, float)(value) for key, value in row.items()} for row in rows]
    except (KeyError, ValueError, TypeError, csv.Error):
        raise FLError(f"{path} cannot be read: it is no table of rounds") from None
