"""Draw a paper's results beside ours, from stored runs: `docs/papers.py fedmr|femam|fedfa OUT.png`."""

import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers import cells
from benchmarks.papers.cell import Comparison
from benchmarks.papers.verdict import NOT, ORDERING, REPRODUCED, Result, ratio_of, result
from fl.figures.style import COLORS, dress, save

WIDE, HIGH = 7.2, 0.26  # inches, of the figure and of a row
LINE = 0.33  # of a row, for each of its methods and for the gap between rows
WORDS = {
    "fedmr": "FedMR", "fedavg": "FedAvg", "fedprox": "FedProx", "fedgen": "FedGen", "clusamp": "CluSamp",
    "fedexp": "FedExP", "fedasam": "FedASAM", "fedmut": "FedMut", "lenet": "LeNet", "iid": "IID",
    "lenet-hsu": "LeNet, split of Hsu et al.", "lenet-coarse": "LeNet, coarse labels",
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "femnist": "FEMNIST",
    "noniid": "non-IID", "dirichlet": "Fashion-MNIST, Dirichlet", "depth": "depths differ", "width": "widths differ",
    "both": "both differ", "clusters": "Fashion-MNIST, clusters", "levels": "Fashion-MNIST, clusters on two levels",
}  # fmt: skip
"""From parts of ids and names of methods to words for pictures."""
MARKS = "os^Dv"  # for readers who cannot tell the colours
VERDICTS = {REPRODUCED: ("✓", "o", "#1a7f37"), ORDERING: ("≈", "^", "#9a6700"), NOT: ("✗", "X", "#cf222e")}
"""From a verdict to its sign, marker and colour, those of the pages."""


def in_words(cell: str) -> str:
    """Describe a cell's data, model and partition.

    >>> in_words("fedmr.table1.cifar10.lenet.dir0.1")
    'CIFAR-10, LeNet, Dirichlet 0.1'
    """
    name, _, alpha = cell.split(".", 2)[2].partition(".dir")
    words = [WORDS.get(part, part) for part in name.split(".")]
    return ", ".join([*words, f"Dirichlet {alpha}"] if alpha else words)


def fedmr(figure: Figure) -> None:
    """Draw Table 1's means and deviations as bars, and each seed of ours as a point."""
    rows = list_results("fedmr.table1.")
    ends = [0.0, *accumulate(LINE * (len(row.values[0]) + 1) for row in rows)]
    middles = [(start + end) / 2 for start, end in pairwise(ends)]
    axis = make_axes(figure, [in_words(row.cell.id) for row in rows], "test accuracy in %", middles)
    for start, row in zip(ends, rows):
        comparison, values = row.cell.comparisons[0], row.values[0]
        lines = [name for name in comparison.arms if name in values]
        for number, (name, published) in enumerate(zip(comparison.arms, comparison.published)):
            if name in values:
                y = start + LINE * (lines.index(name) + 1)
                diverged = all(run.failed for run in row.stored if run.run == row.cell.arm(name).run)
                color, mark = COLORS[number % len(COLORS)], "x" if diverged else MARKS[number % len(MARKS)]
                label = f"{WORDS[name]}, {'diverged' if diverged else 'ours'}"
                axis.errorbar(published.mean, y, xerr=published.spread, fmt="|", color=color, capsize=3, alpha=0.6)
                axis.plot(values[name], [y] * len(values[name]), mark, ms=4, color=color, label=label)
    write_verdicts(axis, rows)
    add_legend(axis)
    axis.set_title("bars: the paper's mean and deviation; points: our seeds", fontsize=9)


def femam(figure: Figure) -> None:
    """Draw each seed of ours, FeMAM's in front."""
    rows = [row for row in list_results("femam.smaller.") if row.cell.comparisons[0].kind == "first"]
    axis = make_axes(figure, [in_words(row.cell.id) for row in rows], "accuracy in %")
    for at, row in enumerate(rows):
        failed = {run.run for run in row.stored if run.failed}
        for name, values in row.values[0].items():
            is_femam, diverged = name == "femam", row.cell.arm(name).run in failed
            look = {"color": COLORS[0], "zorder": 3} if is_femam else {"color": "0.2" if diverged else "0.55"}
            label = "FeMAM" if is_femam else "a rival with a diverged run" if diverged else "a rival"
            mark, size = "x" if diverged else "o", 5 if is_femam else 3.5
            axis.plot(values, [at] * len(values), mark, ms=size, label=label, **look)
    write_verdicts(axis, rows)
    add_legend(axis)
    axis.set_title("the paper's own settings were not run; points: our seeds", fontsize=9)


def fedfa(figure: Figure) -> None:
    """Draw the paper's ranges of ratios as bars, and our data sets and networks as points coloured by verdict."""
    rows: dict[str, list[tuple[Comparison, float, str, int]]] = {}
    for judged in list_results("fedfa.smaller."):
        split, differs = (WORDS[part] for part in judged.cell.id.split(".")[-2:])
        compared = zip(judged.cell.comparisons, judged.values, judged.verdicts)
        for number, (comparison, values, verdict) in enumerate(compared):
            if comparison.kind == "ratio" and len(values) == len(comparison.arms):
                ours = ratio_of(comparison, {name: fmean(numbers) for name, numbers in values.items()})
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
    """Return the results of cells whose ids begin like this and that were run."""
    results = [result(cell) for name, cell in cells().items() if name.startswith(start)]
    return [judged for judged in results if judged.rounds]


def make_axes(figure: Figure, names: list[str], label: str, places: Sequence[float] = ()) -> Axes:
    """Return axes with a row for each name, the first on top; `places` are the rows' middles, one apart by default."""
    places = places or range(len(names))
    figure.set_size_inches(WIDE, 1.3 + HIGH * (places[-1] + 1))
    axis = figure.subplots()
    dress(axis, "")
    axis.set_yticks(places, names, fontsize=8)
    axis.set_ylim(places[-1] + 0.6, places[0] - 0.6)
    axis.set_xlabel(label)
    return axis


def write_verdicts(axis: Axes, rows: list[Result]) -> None:
    """Write the sign of each row's verdict at its right end."""
    for at, row in zip(axis.get_yticks(), rows):
        sign, _, color = VERDICTS[row.verdicts[0]]
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
