"""Verdicts on cells from stored runs: measures of a run's rows, and a word for each comparison.

The rules:

- numbers: *reproduced* if the mean of each method that was run (the paper's, and at least one rival) lies within one
  point of the paper's mean, or within the sum of the paper's standard deviation and ours if that is larger.
  *ordering reproduced* if the paper's method is ahead of, or behind, each rival as in the paper. Rivals within the
  paper's standard deviations do not count.
- ratio, drop: *reproduced* if the ratio lies in the paper's range, give or take 0.01; *ordering reproduced* if it lies
  beyond the range's better end, or on the better side of 1. A drop is *undecided* where the attack leaves neither
  method more than a tenth of its accuracy above chance (the ratio then compares what they had before it), or costs
  neither more than a tenth.
- first, above: the paper's text has an order or a direction, and no number; *ordering reproduced* if ours is the same.
- A rival's run that diverged does not count.
- Otherwise *not reproduced*; *not run* where a value is missing; *cannot be known* where the paper shows only an image.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import StatisticsError, fmean, stdev

from benchmarks.papers.cell import Arm, Cell, Comparison
from benchmarks.papers.stored import STORE, Row, Stored, is_extendable, runs
from fl import FLError
from fl.runs.metrics import find_judged

REPRODUCED, ORDERING, NOT, UNDECIDED, NOT_RUN, UNKNOWN = VERDICTS = (
    "reproduced", "ordering reproduced", "not reproduced", "undecided", "not run", "cannot be known",
)  # fmt: skip
"""All verdicts, the best first."""
DECIDED = (REPRODUCED, ORDERING, NOT)
TENTH = 0.1
"""The share of accuracy above chance that an attack must leave to one of two methods, and take from one of them."""
POINT, SLACK = 1.0, 0.01
"""How far a mean in % and a ratio may be from the paper's."""

Values = Mapping[str, Sequence[float]]
"""From an arm's name to one value per seed."""


def spread(values: Sequence[float]) -> float:
    """Return the sample standard deviation; 0 for one value."""
    return stdev(values) if len(values) > 1 else 0.0


def judge(comparison: Comparison, values: Values) -> str:
    """Return the verdict on a comparison.

    >>> ratio = Comparison("", "end", "ratio", ("fedfa", "nefl"), band=(0.95, 1.06))
    >>> judge(ratio, {"fedfa": [50.0], "nefl": [49.0]}), judge(ratio, {"fedfa": [45.0], "nefl": [50.0]})
    ('reproduced', 'not reproduced')
    """
    means = {name: fmean(values[name]) for name in comparison.arms if values.get(name)}
    if comparison.kind in ("ratio", "drop"):
        if len(means) < len(comparison.arms):
            return NOT_RUN
        if comparison.kind == "drop" and not _is_decisive(comparison, means):
            return UNDECIDED
        return _ranged(comparison, ratio_of(comparison, means))
    ours, *rivals = comparison.arms
    if ours not in means or (rivals and not any(name in means for name in rivals)):
        return NOT_RUN
    if comparison.kind == "above":
        return ORDERING if means[ours] >= comparison.band[0] else NOT
    if comparison.kind == "first":
        return ORDERING if all(_ahead(comparison, means[ours], means[n]) for n in rivals if n in means) else NOT
    return _numbers(comparison, means, values)


def ratio_of(comparison: Comparison, means: Mapping[str, float]) -> float:
    """Return the ratio that a ratio or a drop compares; infinite where only the rival drops."""
    if comparison.kind == "ratio":
        top, bottom = (means[name] for name in comparison.arms)
    else:
        rival, ours, rival_attacked, ours_attacked = (means[name] for name in comparison.arms)
        top, bottom = rival - rival_attacked, ours - ours_attacked
        if bottom <= 0:
            return math.inf if top > 0 else math.nan
    return top / bottom if bottom else math.nan


def whole(verdicts: Sequence[str]) -> str:
    """Return the verdict on a cell with several comparisons: the worst decided one.

    >>> whole(["reproduced", "not run", "ordering reproduced"])
    'ordering reproduced'
    """
    decided = [verdict for verdict in verdicts if verdict in DECIDED]
    if decided:
        return max(decided, key=VERDICTS.index)
    return UNDECIDED if UNDECIDED in verdicts else NOT_RUN if verdicts else UNKNOWN


def _ahead(comparison: Comparison, ours: float, rival: float) -> bool:
    return ours > rival if comparison.larger else ours < rival


def _ranged(comparison: Comparison, ratio: float) -> str:
    low, high = comparison.band
    if low - SLACK <= ratio <= high + SLACK:
        return REPRODUCED
    if comparison.larger:
        return ORDERING if ratio >= min(1, high) or ratio > high else NOT
    return ORDERING if ratio < low else NOT


def _is_decisive(comparison: Comparison, means: Mapping[str, float]) -> bool:
    """Return whether an attack's drops show which method withstands it."""
    above = [means[name] - comparison.chance for name in comparison.arms]
    lost = [1 - after / before if before > 0 else 1 for before, after in zip(above[:2], above[2:])]
    return max(lost) > TENTH and min(lost) < 1 - TENTH


def _numbers(comparison: Comparison, means: Mapping[str, float], values: Values) -> str:
    paper = dict(zip(comparison.arms, comparison.published))
    if all(
        abs(mean - paper[name].mean) <= max(POINT, paper[name].spread + spread(values[name]))
        for name, mean in means.items()
    ):
        return REPRODUCED
    ours, *rivals = (name for name in comparison.arms if name in means)
    distinct = [name for name in rivals if abs(_gap(paper, ours, name)) > paper[ours].spread + paper[name].spread]
    if distinct and all((means[ours] - means[name]) * _gap(paper, ours, name) > 0 for name in distinct):
        return ORDERING
    return NOT


def _gap(paper: Mapping, ours: str, rival: str) -> float:
    return paper[ours].mean - paper[rival].mean


@dataclass(frozen=True)
class Result:
    """The stored runs of a cell, at the largest number of rounds that the paper's method and a rival have done.

    Attributes:
        rounds: this number; 0 if there is none.
        asked: the cell's number of rounds.
        values: for each comparison, from an arm's name to one value per seed. A rival's runs that diverged are left
            out, unless all did.
        verdicts: one per comparison.
        stored: the runs of these seeds, also those that diverged.
        begun: whether anything was run at all.
    """

    cell: Cell
    rounds: int
    asked: int
    values: tuple[dict[str, list[float]], ...]
    verdicts: tuple[str, ...]
    stored: tuple[Stored, ...]
    begun: bool

    @property
    def is_short(self) -> bool:
        """Return whether these are fewer rounds than the cell's, so that they decide nothing."""
        return self.rounds < self.asked

    @property
    def verdict(self) -> str:
        """Return the verdict on the cell, which only complete runs decide."""
        if not self.cell.arms:
            return UNKNOWN
        return NOT_RUN if self.is_short else whole(self.verdicts)


def result(cell: Cell, store: Path = STORE) -> Result:
    """Judge a cell by its stored runs.

    Raises FLError for a stored run that is damaged or has other settings.
    """
    stored = {arm.name: runs(arm, store) for arm in cell.arms}
    asked = max((arm.config.rounds for arm in cell.arms), default=0)
    best = None
    for rounds in sorted({n for arm in cell.arms for run in stored[arm.name] for n in _ends(run, arm)}, reverse=True):
        chosen = {arm.name: _at(stored[arm.name], arm, rounds) for arm in cell.arms}
        counted = {name: _select_counted(cell, name, of_arm) for name, of_arm in chosen.items()}
        verdicts = tuple(judge(comparison, _values(comparison, counted)) for comparison in cell.comparisons)
        if whole(verdicts) != NOT_RUN:
            shown = {name: counted[name] or of_arm for name, of_arm in chosen.items()}
            values = tuple(_values(comparison, shown) for comparison in cell.comparisons)
            used = tuple(run for of_arm in chosen.values() for run in of_arm)
            best = Result(cell, rounds, asked, values, verdicts, used, True)
            break
    nothing = tuple({} for _ in cell.comparisons), (NOT_RUN,) * len(cell.comparisons)
    return best or Result(cell, 0, asked, *nothing, (), any(stored.values()))


def _select_counted(cell: Cell, name: str, stored: list[Stored]) -> list[Stored]:
    """Return the runs of an arm that count: all of the paper's method, and a rival's that did not diverge."""
    first = {comparison.arms[0] for comparison in cell.comparisons if comparison.kind in ("first", "above")}
    if name.startswith(cell.paper) or name in first:
        return stored
    return [run for run in stored if not run.failed]


def _ends(run: Stored, arm: Arm) -> set[int]:
    """Return the numbers of rounds at which a run can be judged."""
    if run.failed:
        return {run.rounds}
    if not is_extendable(arm.config):
        return {run.rounds} if run.is_over else set()
    return {run.done if run.is_over else int(run.rows[-1]["round"])}


def _at(stored: Sequence[Stored], arm: Arm, rounds: int) -> list[Stored]:
    """Return the runs of an arm at a number of rounds, one per seed; longer runs are cut where this is the same."""
    chosen: dict[int, Stored] = {}
    for run in stored:
        if rounds in _ends(run, arm):
            chosen[run.seed] = run
            continue
        rows = [row for row in run.rows if row["round"] <= rounds]
        if rows and run.done >= rounds and is_extendable(arm.config):
            chosen.setdefault(run.seed, replace(run, rows=rows))
    return [chosen[seed] for seed in sorted(chosen)]


def _values(comparison: Comparison, chosen: dict[str, list[Stored]]) -> dict[str, list[float]]:
    by_arm: dict[str, list[float]] = {}
    for name in comparison.arms:
        with suppress(FLError):  # an interrupted run may not have measured it yet
            if values := [measure(comparison.measure, run.rows) for run in chosen[name]]:
                by_arm[name] = values
    return by_arm


def _tail(column: str, count: int = 1, factor: float = 100) -> Callable[[Sequence[Row]], float]:
    """Measure the mean of the last `count` values."""

    def mean(rows: Sequence[Row]) -> float:
        return factor * fmean([row[column] for row in rows if column in row][-count:])

    return mean


def _validated(column: str) -> Callable[[Sequence[Row]], float]:
    """Measure the value in the round that validation chooses."""
    return lambda rows: 100 * find_judged(rows)[column]


def _rise(column: str) -> Callable[[Sequence[Row]], float]:
    """Measure the mean of the last tenth of the rows minus the lowest mean of a tenth in a row."""

    def rise(rows: Sequence[Row]) -> float:
        values = [row[column] for row in rows if column in row]
        count = max(1, len(values) // 10)
        means = [sum(values[at : at + count]) / count for at in range(len(values) - count + 1)]
        return means[-1] - min(means)

    return rise


def _roughness(rows: Sequence[Row]) -> float:
    """Return the mean absolute step of the accuracy between evaluations in their last half, in points."""
    values = [100 * row["accuracy"] for row in rows][len(rows) // 2 :]
    return sum(abs(b - a) for a, b in pairwise(values)) / max(1, len(values) - 1)


def _calm(rows: Sequence[Row]) -> float:
    """Return the mean accuracy in % of the last five evaluations after rounds without malicious participants."""
    return _tail("accuracy", 5)([row for row in rows if row["attackers"] == 0])


MEASURES: dict[str, Callable[[Sequence[Row]], float]] = {
    "late": _tail("accuracy", 10),  # as in fl.analysis.groups.summarise_run
    "late_loss": _tail("loss", 10, 1),
    "end": _tail("accuracy", 3),
    "end5": _tail("accuracy", 5),
    "last": _tail("accuracy"),
    "calm": _calm,
    "own": _validated("local_test_accuracy"),
    "own_f1": _validated("local_test_f1"),
    "local": _tail("models_own_accuracy"),
    "local_perplexity": _tail("models_perplexity", factor=1),
    "last_local": _tail("local_test_accuracy"),
    "megabytes": _tail("megabytes", factor=1),
    "kilobytes_up": lambda rows: rows[-1]["bytes_up"] / rows[-1]["round"] / 1e3,
    "kilobytes_down": lambda rows: rows[-1]["bytes_down"] / rows[-1]["round"] / 1e3,
    "seconds": lambda rows: rows[-1]["seconds"] / rows[-1]["round"],
    "cosine_rise": _rise("models_cosine"),
    "released_cosine_rise": _rise("models_cosine_released"),
    "roughness": _roughness,
    "rise": _tail("rise", factor=1),
    "trace": _tail("trace", factor=1),
    "rand": _tail("rand", factor=1),
    "perplexity": lambda rows: math.exp(rows[-1]["loss"]),
    "last_loss": _tail("loss", factor=1),
}
"""From a comparison's measure to its function."""


def measure(name: str, rows: Sequence[Row]) -> float:
    """Compute a measure of a run. `tmac0.7` counts operations until accuracy reaches 0.7; infinite if it never does.

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
    except (KeyError, IndexError, StatisticsError):
        raise FLError(f"the stored rows do not hold what {name!r} needs: run that cell again", code="file") from None
