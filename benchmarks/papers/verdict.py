"""What the stored runs say of a cell: measures of their rows, and one word on each comparison, from numbers alone.

The rules:

- numbers: *reproduced* if the means of the paper's own method and of at least one other, of all that were run, lie
  within one point of the paper's, or within the sum of the paper's standard deviation and ours if that is more.
  *ordering reproduced* if the paper's own method is ahead of, or behind, each other one as in the paper; others whose
  distance to it lies within the paper's standard deviations do not count.
- ratio, drop: *reproduced* if the ratio lies within the paper's range, give or take 0.01; *ordering reproduced* if it
  lies beyond its better end or on the better side of 1. A drop is *undecided* where the attack leaves neither method
  more than a tenth of its accuracy above chance (the ratio is then of what they had before), or costs neither so much.
- first, above: the paper's text has no number, only an order or a direction; *ordering reproduced* if ours is the same.
- Runs of others that diverged are left out: no method is ahead of them, or behind.
- Otherwise *not reproduced*; *not run* where a value is missing, *cannot be known* where the paper has an image alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import StatisticsError, fmean, stdev

from benchmarks.papers.cell import Arm, Cell, Comparison
from benchmarks.papers.stored import STORE, Row, Stored, extendable, runs
from fl import FLError
from fl.runs.metrics import find_judged

REPRODUCED, ORDERING, NOT, UNDECIDED, NOT_RUN, UNKNOWN = VERDICTS = (
    "reproduced", "ordering reproduced", "not reproduced", "undecided", "not run", "cannot be known",
)  # fmt: skip
"""All that there are, the best first."""
DECIDED = (REPRODUCED, ORDERING, NOT)
TENTH = 0.1
"""The share of the accuracy above chance that an attack must leave to one of two methods, and cost one of them."""
POINT, SLACK = 1.0, 0.01
"""How far a mean in % and a ratio may lie from the paper's."""

Values = Mapping[str, Sequence[float]]
"""From an arm's name to a value for each seed."""


def spread(values: Sequence[float]) -> float:
    """The sample standard deviation; 0 of one value."""
    return stdev(values) if len(values) > 1 else 0.0


def judge(comparison: Comparison, values: Values) -> str:
    """The verdict.

    >>> ratio = Comparison("", "end", "ratio", ("fedfa", "nefl"), band=(0.95, 1.06))
    >>> judge(ratio, {"fedfa": [50.0], "nefl": [49.0]}), judge(ratio, {"fedfa": [45.0], "nefl": [50.0]})
    ('reproduced', 'not reproduced')
    """
    means = {name: fmean(values[name]) for name in comparison.arms if values.get(name)}
    if comparison.kind in ("ratio", "drop"):
        if len(means) < len(comparison.arms):
            return NOT_RUN
        if comparison.kind == "drop" and not _tells(comparison, means):
            return UNDECIDED
        return _ranged(comparison, ratio_of(comparison, means))
    own, *others = comparison.arms
    if own not in means or (others and not any(name in means for name in others)):
        return NOT_RUN
    if comparison.kind == "above":
        return ORDERING if means[own] >= comparison.band[0] else NOT
    if comparison.kind == "first":
        return ORDERING if all(_ahead(comparison, means[own], means[n]) for n in others if n in means) else NOT
    return _numbers(comparison, means, values)


def ratio_of(comparison: Comparison, means: Mapping[str, float]) -> float:
    """The ratio of a comparison of that kind; of drops, infinite where only the rival drops."""
    if comparison.kind == "ratio":
        top, bottom = (means[name] for name in comparison.arms)
    else:
        rival, own, rival_attacked, own_attacked = (means[name] for name in comparison.arms)
        top, bottom = rival - rival_attacked, own - own_attacked
        if bottom <= 0:
            return math.inf if top > 0 else math.nan
    return top / bottom if bottom else math.nan


def whole(verdicts: Sequence[str]) -> str:
    """Return the verdict on a cell with several comparisons: the worst of those that are decided.

    >>> whole(["reproduced", "not run", "ordering reproduced"])
    'ordering reproduced'
    """
    known = [one for one in verdicts if one in DECIDED]
    if known:
        return max(known, key=VERDICTS.index)
    return UNDECIDED if UNDECIDED in verdicts else NOT_RUN if verdicts else UNKNOWN


def _ahead(comparison: Comparison, own: float, other: float) -> bool:
    return own > other if comparison.larger else own < other


def _ranged(comparison: Comparison, ratio: float) -> str:
    low, high = comparison.band
    if low - SLACK <= ratio <= high + SLACK:
        return REPRODUCED
    if comparison.larger:
        return ORDERING if ratio >= min(1, high) or ratio > high else NOT
    return ORDERING if ratio < low else NOT


def _tells(comparison: Comparison, means: Mapping[str, float]) -> bool:
    """Whether an attack's drops say which method withstands it."""
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
    own, *others = (name for name in comparison.arms if name in means)
    apart = [name for name in others if abs(_gap(paper, own, name)) > paper[own].spread + paper[name].spread]
    if apart and all((means[own] - means[name]) * _gap(paper, own, name) > 0 for name in apart):
        return ORDERING
    return NOT


def _gap(paper: Mapping, own: str, other: str) -> float:
    return paper[own].mean - paper[other].mean


@dataclass(frozen=True)
class Result:
    """The stored runs of a cell, at the largest number of rounds that its own method and another one have done.

    Attributes:
        rounds: that number; 0 if there is none.
        asked: how many the cell has.
        values: for each comparison, from an arm's name to a value for each seed; of others than the paper's own method
            only those that did not diverge, unless all did.
        verdicts: for each comparison.
        stored: the runs of these seeds, with those that diverged.
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
    def short(self) -> bool:
        """Whether these are fewer rounds than the cell's, so that they decide nothing."""
        return self.rounds < self.asked

    @property
    def verdict(self) -> str:
        """That of the cell, which only whole runs decide."""
        if not self.cell.arms:
            return UNKNOWN
        return NOT_RUN if self.short else whole(self.verdicts)


def result(cell: Cell, store: Path = STORE) -> Result:
    """What the stored runs say of a cell.

    Raises FLError for a stored run that is damaged or of other settings.
    """
    found = {arm.name: runs(arm, store) for arm in cell.arms}
    asked = max((arm.config.rounds for arm in cell.arms), default=0)
    best = None
    for rounds in sorted({n for arm in cell.arms for one in found[arm.name] for n in _ends(one, arm)}, reverse=True):
        chosen = {arm.name: _at(found[arm.name], arm, rounds) for arm in cell.arms}
        counted = {name: _counted(cell, name, those) for name, those in chosen.items()}
        verdicts = tuple(judge(one, _values(one, counted)) for one in cell.comparisons)
        if whole(verdicts) != NOT_RUN:
            shown = {name: counted[name] or those for name, those in chosen.items()}
            values = tuple(_values(one, shown) for one in cell.comparisons)
            used = tuple(one for those in chosen.values() for one in those)
            best = Result(cell, rounds, asked, values, verdicts, used, True)
            break
    nothing = tuple({} for _ in cell.comparisons), (NOT_RUN,) * len(cell.comparisons)
    return best or Result(cell, 0, asked, *nothing, (), any(found.values()))


def _counted(cell: Cell, name: str, stored: list[Stored]) -> list[Stored]:
    """The runs of an arm that decide: all of the paper's own method, those of another one that did not diverge."""
    if name.startswith(cell.paper) or name in {
        one.arms[0] for one in cell.comparisons if one.kind in ("first", "above")
    }:
        return stored
    return [one for one in stored if not one.failed]


def _ends(one: Stored, arm: Arm) -> set[int]:
    """Numbers of rounds at which a run can be looked at."""
    if one.failed:
        return {one.rounds}
    if not extendable(arm.config):
        return {one.rounds} if one.over else set()
    return {one.done if one.over else int(one.rows[-1]["round"])}


def _at(stored: Sequence[Stored], arm: Arm, rounds: int) -> list[Stored]:
    """The runs of an arm at a number of rounds, one a seed; longer ones are cut where that makes shorter ones."""
    chosen: dict[int, Stored] = {}
    for one in stored:
        if rounds in _ends(one, arm):
            chosen[one.seed] = one
        elif extendable(arm.config) and one.done >= rounds and (cut := [r for r in one.rows if r["round"] <= rounds]):
            chosen.setdefault(one.seed, replace(one, rows=cut))
    return [chosen[seed] for seed in sorted(chosen)]


def _values(comparison: Comparison, chosen: dict[str, list[Stored]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name in comparison.arms:
        with suppress(FLError):  # an interrupted run may not have measured it yet
            if values := [measure(comparison.measure, one.rows) for one in chosen[name]]:
                found[name] = values
    return found


def _tail(column: str, count: int = 1, factor: float = 100) -> Callable[[Sequence[Row]], float]:
    """The mean of the last so many values."""

    def mean(rows: Sequence[Row]) -> float:
        return factor * fmean([row[column] for row in rows if column in row][-count:])

    return mean


def _own(column: str) -> Callable[[Sequence[Row]], float]:
    """In the round that validation chooses."""
    return lambda rows: 100 * find_judged(rows)[column]


def _rise(column: str) -> Callable[[Sequence[Row]], float]:
    """The mean of the last tenth of the rows less that of the lowest tenth in a row before it."""

    def rise(rows: Sequence[Row]) -> float:
        values = [row[column] for row in rows if column in row]
        count = max(1, len(values) // 10)
        means = [sum(values[at : at + count]) / count for at in range(len(values) - count + 1)]
        return means[-1] - min(means)

    return rise


def _roughness(rows: Sequence[Row]) -> float:
    """Mean absolute step of the accuracy from evaluation to evaluation, in points, in the last half of them."""
    values = [100 * row["accuracy"] for row in rows][len(rows) // 2 :]
    return sum(abs(b - a) for a, b in pairwise(values)) / max(1, len(values) - 1)


def _calm(rows: Sequence[Row]) -> float:
    """Accuracy in %, mean of the last five evaluations after rounds without malicious participants."""
    return _tail("accuracy", 5)([row for row in rows if row["attackers"] == 0])


MEASURES: dict[str, Callable[[Sequence[Row]], float]] = {
    "late": _tail("accuracy", 10),  # as in fl.analysis.groups.summarise_run
    "late_loss": _tail("loss", 10, 1),
    "end": _tail("accuracy", 3),
    "end5": _tail("accuracy", 5),
    "last": _tail("accuracy"),
    "calm": _calm,
    "own": _own("local_test_accuracy"),
    "own_f1": _own("local_test_f1"),
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
    except (KeyError, IndexError, StatisticsError):
        raise FLError(f"the stored rows do not hold what {name!r} needs: run that cell again", code="file") from None
