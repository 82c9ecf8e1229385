"""One word on a comparison, from numbers alone. The rules:

- numbers: *reproduced* if the means of the paper's own method and of at least one other, of all that were run, lie
  within one point of the paper's, or within the sum of the paper's standard deviation and ours if that is more.
  *ordering reproduced* if the paper's own method is ahead of, or behind, each other one as in the paper; others whose
  distance to it lies within the paper's standard deviations do not count.
- ratio, drop: *reproduced* if the ratio lies within the paper's range, give or take 0.01; *ordering reproduced* if it
  lies beyond its better end or on the better side of 1.
- first, above: the paper's text has no number, only an order or a direction; *ordering reproduced* if ours is the same.
- Otherwise *not reproduced*; *not run* where a value is missing, *cannot be known* where the paper has an image alone.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from fl.papers.cell import Comparison

REPRODUCED, ORDERING, NOT, NOT_RUN, UNKNOWN = VERDICTS = (
    "reproduced", "ordering reproduced", "not reproduced", "not run", "cannot be known",
)  # fmt: skip
"""All that there are, the best first."""
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
    """That of a cell with several comparisons: the worst of those that were run.

    >>> whole(["reproduced", "not run", "ordering reproduced"])
    'ordering reproduced'
    """
    known = [one for one in verdicts if one not in (NOT_RUN, UNKNOWN)]
    if known:
        return max(known, key=VERDICTS.index)
    return NOT_RUN if verdicts else UNKNOWN


def _ahead(comparison: Comparison, own: float, other: float) -> bool:
    return own > other if comparison.larger else own < other


def _ranged(comparison: Comparison, ratio: float) -> str:
    low, high = comparison.band
    if low - SLACK <= ratio <= high + SLACK:
        return REPRODUCED
    if comparison.larger:
        return ORDERING if ratio >= min(1, high) or ratio > high else NOT
    return ORDERING if ratio < low else NOT


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
