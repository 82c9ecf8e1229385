"""The rules of the verdicts, on numbers made by hand."""

import math

import pytest
from refusals import fl_refused

from benchmarks.papers.cell import Comparison, Published
from benchmarks.papers.verdict import judge, measure, whole

NUMBERS = Comparison(
    "", "late", "numbers", ("own", "a", "b"), (Published(60.0, 0.5), Published(54.0, 0.5), Published(59.8, 0.5))
)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({"own": [60.9], "a": [53.1], "b": [59.0]}, "reproduced"),  # all within a point
        ({"own": [61.1], "a": [54.0], "b": [59.8]}, "ordering reproduced"),  # one of them is not
        ({"own": [59.0, 63.2], "a": [54.0], "b": [59.8]}, "reproduced"),  # ... but with both spreads
        ({"own": [65.0], "a": [60.0]}, "ordering reproduced"),
        ({"own": [65.0], "a": [60.0], "b": [66.0]}, "ordering reproduced"),  # the paper's own and b are level
        ({"own": [55.0], "a": [56.0], "b": [50.0]}, "not reproduced"),
        ({"own": [55.0], "b": [50.0]}, "not reproduced"),  # b's distance says nothing, and nobody else was run
        ({"own": [60.0]}, "not run"),
        ({"a": [54.0], "b": [59.8]}, "not run"),
        ({"own": [math.nan], "a": [54.0]}, "not reproduced"),
    ],
)
def test_verdict__numbers(values, verdict):
    assert judge(NUMBERS, values) == verdict


@pytest.mark.parametrize(
    ("band", "larger", "ratio", "verdict"),
    [
        ((1.00, 1.16), True, 0.991, "reproduced"),
        ((1.00, 1.16), True, 0.98, "not reproduced"),
        ((1.00, 1.16), True, 1.30, "ordering reproduced"),
        ((1.07, 4.50), True, 1.03, "ordering reproduced"),
        ((0.95, 1.06), True, 0.95, "reproduced"),
        ((0.95, 1.06), True, 0.90, "not reproduced"),
        ((0.95, 1.02), False, 0.80, "ordering reproduced"),
        ((0.95, 1.02), False, 1.10, "not reproduced"),
        ((0.95, 1.02), False, math.inf, "not reproduced"),
    ],
)
def test_verdict__ratios(band, larger, ratio, verdict):
    one = Comparison("", "end", "ratio", ("own", "rival"), band=band, larger=larger)
    assert judge(one, {"own": [100 * ratio, 100 * ratio], "rival": [100.0]}) == verdict
    assert judge(one, {"own": [1.0]}) == "not run"


def test_verdict__drops():
    one = Comparison("", "end", "drop", ("rival", "own", "rival-attacked", "own-attacked"), band=(1.01, 2.11))
    for attacked, verdict in ((41.0, "reproduced"), (82.0, "ordering reproduced"), (11.0, "not reproduced")):
        means = {"rival": 80.0, "own": 81.0, "rival-attacked": 20.0, "own-attacked": attacked}
        assert judge(one, {name: [mean] for name, mean in means.items()}) == verdict


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ((16.9, 16.9), "undecided"),  # of 70 points above chance neither keeps 7
        ((10.0, 17.1), "ordering reproduced"),
        ((9.0, 8.0), "undecided"),
        ((73.1, 74.0), "undecided"),  # neither loses 7
        ((72.9, 79.0), "ordering reproduced"),
        ((76.0, 82.0), "undecided"),
    ],
)
def test_verdict__drops_to_chance_and_drops_of_nothing_decide_nothing(after, verdict):
    names = ("rival", "own", "rival-attacked", "own-attacked")
    one = Comparison("", "end", "drop", names, band=(1.001, 1.01), chance=10.0)
    assert judge(one, {name: [mean] for name, mean in zip(names, (80.0, 80.0, *after))}) == verdict


def test_verdict__orders_and_directions():
    first = Comparison("", "late", "first", ("own", "a", "b"))
    assert judge(first, {"own": [3.0], "a": [2.0], "b": [2.9]}) == "ordering reproduced"
    assert judge(first, {"own": [3.0], "a": [2.0], "b": [3.0]}) == "not reproduced"
    assert judge(first, {"own": [3.0]}) == "not run"
    smaller = Comparison("", "late_loss", "first", ("own", "a"), larger=False)
    assert judge(smaller, {"own": [1.0], "a": [2.0]}) == "ordering reproduced"
    rise = Comparison("", "cosine_rise", "above", ("own",), band=(0.01, 2))
    assert [judge(rise, {"own": [by]}) for by in (0.02, 0.0)] == ["ordering reproduced", "not reproduced"]


def test_verdict__a_cell_is_as_good_as_its_worst_comparison():
    assert whole(["reproduced", "not reproduced", "not run"]) == "not reproduced"
    assert whole(["undecided", "ordering reproduced"]) == "ordering reproduced"
    assert whole(["undecided", "not run"]) == "undecided"
    assert whole(["not run"]) == "not run"
    assert whole([]) == "cannot be known"


def test_verdict__measures():
    rows = [
        {"round": r, "accuracy": r / 100, "loss": 1 / r, "seconds": 3.0 * r, "models_cosine": abs(r - 10) / 100}
        for r in range(1, 21)
    ]
    assert measure("late", rows) == pytest.approx(15.5)
    assert measure("end", rows) == pytest.approx(19)
    assert measure("seconds", rows) == 3
    with fl_refused("file", "'released_cosine_rise'"):  # stored before there was the column
        measure("released_cosine_rise", rows)
    assert measure("cosine_rise", rows) == pytest.approx(0.095 - 0.005)  # windows of two evaluations
    assert measure("roughness", rows) == pytest.approx(1)
    own = [{"round": r, "accuracy": 0.5, "local_valid_loss": loss, "local_test_accuracy": a}
           for r, loss, a in ((1, 2.0, 0.3), (2, 1.0, 0.4), (3, 3.0, 0.9))]  # fmt: skip
    assert measure("own", own) == pytest.approx(40)
    with fl_refused("file", "'local'"):
        measure("local", rows)
    attacked = [row | {"attackers": float(row["round"] % 2)} for row in rows]
    assert measure("calm", attacked) == pytest.approx(16)  # rounds 12, 14, ... 20
    with fl_refused("file", "'calm'"):
        measure("calm", rows)
