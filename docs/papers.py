"""Draw a paper's results beside ours, from stored runs: `docs/papers.py fedmr|femam|fedfa OUT.png`."""

import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers import cells
from benchmarks.papers.cell import Comparison
from benchmarks.papers.verdict import NOT, ORDERING, REPRODUCED, Result, ratio_of, result
from fl.figures.style import COLORS, dress, save

WIDE, HIGH = 7.2, 0.26  # inches, of the figure and of a row
WORDS = {
    "fedmr": "FedMR", "fedavg": "FedAvg", "fedmut": "FedMut", "lenet": "LeNet", "iid": "IID",
    "lenet-hsu": "LeNet, split of Hsu et al.", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "femnist": "FEMNIST",
    "noniid": "non-IID", "dirichlet": "Fashion-MNIST, Dirichlet", "depth": "depths differ", "width": "widths differ",
    "both": "both differ", "clusters": "Fashion-MNIST, clusters", "levels": "Fashion-MNIST, clusters on two levels",
}  # fmt: skip
"""What parts of a cell's id, and methods, are called in a picture."""
MARKS = "os^Dv"  # for readers who cannot tell the colours
VERDICTS = {REPRODUCED: ("✓", "o", "#1a7f37"), ORDERING: ("≈", "^", "#9a6700"), NOT: ("✗", "X", "#cf222e")}
"""From a verdict to its sign, marker and colour, those of the pages."""


def in_words(cell: str) -> str:
    """Return what a cell compares on.

    >>> in_words("fedmr.table1.cifar10.lenet.dir0.1")
    'CIFAR-10, LeNet, Dirichlet 0.1'
    """
    name, _, alpha = cell.split(".", 2)[2].partition(".dir")
    words = [WORDS.get(part, part) for part in name.split(".")]
    return ", ".join([*words, f"Dirichlet {alpha}"] if alpha else words)


def fedmr(figure: Figure) -> None:
    """Table 1's means and deviations as bars, each seed of ours as a point."""
    rows = list_results("fedmr.table1.")
    axis = make_axes(figure, [in_words(one.cell.id) for one in rows], "test accuracy in %")
    for at, one in enumerate(rows):
        comparison, values = one.cell.comparisons[0], one.values[0]
        names = [name for name in comparison.arms if name in values]
        for name, published in zip(comparison.arms, comparison.published):
            if name in values:
                number, y = comparison.arms.index(name), at + 0.22 * (names.index(name) - 1)
                color, label = COLORS[number], f"{WORDS.get(name, name)}, ours"
                axis.errorbar(published.mean, y, xerr=published.spread, fmt="|", color=color, capsize=3, alpha=0.6)
                axis.plot(values[name], [y] * len(values[name]), MARKS[number % 5], ms=4, color=color, label=label)
    write_verdicts(axis, rows)
    add_legend(axis)
    axis.set_title("bars: the paper's mean and deviation; points: our seeds", fontsize=9)


def femam(figure: Figure) -> None:
    """Draw each seed of ours, FeMAM's in front."""
    rows = [one for one in list_results("femam.smaller.") if one.cell.comparisons[0].kind == "first"]
    axis = make_axes(figure, [in_words(one.cell.id) for one in rows], "accuracy in %")
    for at, one in enumerate(rows):
        failed = {run.run for run in one.stored if run.failed}
        for name, values in one.values[0].items():
            own, lost = name == "femam", one.cell.arm(name).run in failed
            look = {"color": COLORS[0], "zorder": 3} if own else {"color": "0.2" if lost else "0.55"}
            label = "FeMAM" if own else "a rival with a diverged run" if lost else "a rival"
            axis.plot(values, [at] * len(values), "x" if lost else "o", ms=5 if own else 3.5, label=label, **look)
    write_verdicts(axis, rows)
    add_legend(axis)
    axis.set_title("the paper's own settings were not run; points: our seeds", fontsize=9)


def fedfa(figure: Figure) -> None:
    """Draw the paper's ranges of ratios as bars, and our data sets and networks as points coloured by verdict."""
    rows: dict[str, list[tuple[Comparison, float, str, int]]] = {}
    for one in list_results("fedfa.smaller."):
        split, differs = (WORDS[part] for part in one.cell.id.split(".")[-2:])
        for number, (comparison, values, verdict) in enumerate(zip(one.cell.comparisons, one.values, one.verdicts)):
            if comparison.kind == "ratio" and len(values) == len(comparison.arms):
                ours = ratio_of(comparison, {name: fmean(those) for name, those in values.items()})
                row = rows.setdefault(f"{split}, {differs}: {('test', 'local')[number]} accuracy", [])
                row.append((comparison, ours, verdict, min(map(len, values.values()))))
    axis = make_axes(figure, list(rows), "FedFA's accuracy divided by the rival's")
    for at, points in enumerate(rows.values()):
        axis.plot(points[0][0].band, [at, at], lw=11, alpha=0.3, color=COLORS[0], solid_capstyle="butt")
        for place, (_, ours, verdict, seeds) in enumerate(points):
            _, marker, color = VERDICTS[verdict]
            y = at + 0.5 * (place / max(len(points) - 1, 1) - 0.5)
            axis.plot([ours], [y], marker, ms=2.5 + 1.2 * seeds, color=color, mew=0, label=verdict)
    axis.axvline(1, color="0.6", lw=0.8, zorder=0)
    axis.set_xticks([0.8, 1, 1.2, 1.4, 1.6, 1.8])
    add_legend(axis, VERDICTS)
    axis.set_title("bars: the paper's range; points: ours, larger with more seeds", fontsize=9)


def list_results(start: str) -> list[Result]:
    """Return the cells of this beginning that were run."""
    results = [result(cell) for name, cell in cells().items() if name.startswith(start)]
    return [one for one in results if one.rounds]


def make_axes(figure: Figure, names: list[str], label: str) -> Axes:
    """Return axes with a row for each cell, the first on top."""
    figure.set_size_inches(WIDE, 1.3 + HIGH * len(names))
    axis = figure.subplots()
    dress(axis, "")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlabel(label)
    return axis


def write_verdicts(axis: Axes, rows: list[Result]) -> None:
    """Write the sign of each row's verdict at its right end."""
    for at, one in enumerate(rows):
        sign, _, color = VERDICTS[one.verdicts[0]]
        axis.text(1.02, at, sign, color=color, weight="bold", va="center", transform=axis.get_yaxis_transform())


def add_legend(axis: Axes, order: Iterable[str] = ()) -> None:
    """Add a legend with each label once, in this order if it is given."""
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    shown = [name for name in order or unique if name in unique]
    axis.legend([unique[name] for name in shown], shown, fontsize=8, frameon=False, loc="best")


def main(paper: str, out: str) -> None:
    """Draw the picture of a paper into a file."""
    figure = Figure(layout="constrained")
    {"fedmr": fedmr, "femam": femam, "fedfa": fedfa}[paper](figure)
    save(figure, Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
