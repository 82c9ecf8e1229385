"""What is compared of a run: functions of the rows that are stored of it, in %, points, seconds or as the name says."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from fl.base.errors import FLError
from fl.runs.metrics import selected

Row = dict[str, float]
TAIL = 10
"""Evaluations of the late mean, as in `fl.analysis.outcome`."""


def _tail(rows: Sequence[Row], column: str, count: int, factor: float = 1.0) -> float:
    values = [row[column] for row in rows if column in row][-count:]
    return factor * sum(values) / len(values)


def _last(column: str, factor: float = 1.0) -> Callable[[Sequence[Row]], float]:
    return lambda rows: _tail(rows, column, 1, factor)


def _own(column: str) -> Callable[[Sequence[Row]], float]:
    """In the round that validation chooses."""
    return lambda rows: 100 * selected(rows)[column]


def _cosine_rise(rows: Sequence[Row]) -> float:
    """Mean cosine of the last tenth of the rows less that of the lowest tenth in a row before it."""
    values = [row["models_cosine"] for row in rows if "models_cosine" in row]
    count = max(1, len(values) // 10)
    means = [sum(values[at : at + count]) / count for at in range(len(values) - count + 1)]
    return means[-1] - min(means)


def _roughness(rows: Sequence[Row]) -> float:
    """Mean absolute step of the accuracy from evaluation to evaluation, in points, in the last half of them."""
    values = [100 * row["accuracy"] for row in rows][len(rows) // 2 :]
    return sum(abs(b - a) for a, b in pairwise(values)) / max(1, len(values) - 1)


def _calm(rows: Sequence[Row]) -> float:
    """Accuracy in %, mean of the last five evaluations after rounds without malicious participants."""
    return _tail([row for row in rows if row["attackers"] == 0], "accuracy", 5, 100)


MEASURES: dict[str, Callable[[Sequence[Row]], float]] = {
    "late": lambda rows: _tail(rows, "accuracy", TAIL, 100),
    "late_loss": lambda rows: _tail(rows, "loss", TAIL),
    "end": lambda rows: _tail(rows, "accuracy", 3, 100),
    "end5": lambda rows: _tail(rows, "accuracy", 5, 100),
    "calm": _calm,
    "own": _own("local_test_accuracy"),
    "own_f1": _own("local_test_f1"),
    "local": _last("models_own_accuracy", 100),
    "local_perplexity": _last("models_perplexity"),
    "megabytes": _last("megabytes"),
    "seconds": lambda rows: rows[-1]["seconds"] / rows[-1]["round"],
    "cosine_rise": _cosine_rise,
    "roughness": _roughness,
}
"""From a comparison's measure to how it is computed."""


def measure(name: str, rows: Sequence[Row]) -> float:
    """A measure of a run. `tmac0.7` is what was computed until the accuracy was 0.7: infinite if it never was.

    Raises FLError for rows without the columns that it needs.

    >>> measure("end", [{"round": r, "accuracy": r / 10} for r in (1, 2, 3, 4)])
    30.0
    >>> measure("tmac0.3", [{"round": r, "accuracy": r / 10, "tmac": 2.0 * r} for r in (2, 4)])
    8.0
    """
    try:
        if name.startswith("tmac"):
            reached = [row["tmac"] for row in rows if row["accuracy"] >= float(name[4:])]
            return min(reached, default=float("inf"))
        return MEASURES[name](rows)
    except (KeyError, ZeroDivisionError, IndexError):
        raise FLError(f"the stored rows do not hold what {name!r} needs: run that cell again") from None
