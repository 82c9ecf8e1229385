"""Draw what an attack costs FedFA and its rivals, from stored runs: `docs/fedfa_attack.py lambda|share OUT.png`.

lambda: as the amplification grows; the runs are cells of benchmarks/papers. share: as the number of malicious clients
grows; their means are stored in benchmarks/results/fedfa/attack-digits.csv.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers import find
from benchmarks.papers.fedfa import LAMBDAS
from benchmarks.papers.verdict import result, spread
from fl.figures.style import COLORS, caption, dress, save

TABLE = Path(__file__).resolve().parent.parent / "benchmarks/results/fedfa/attack-digits.csv"
PANELS = {
    "widths and depths differ": {"fedfa": "fedfa", "nefl": "nefl", "heterofl": "heterofl", "fedavg": "fedavg"},
    "depths differ": {"fedfa-depth": "fedfa", "flexifed": "flexifed", "fedavg": "fedavg"},
}
"""From a panel's title to the arms that it shows, and their methods."""
LOOKS = {"fedfa": COLORS[0], "nefl": COLORS[1], "heterofl": COLORS[2], "flexifed": COLORS[4], "fedavg": "0.45"}
MARKS = dict(zip(LOOKS, ("o-", "s--", "^-.", "D:", "v--")))  # for readers who cannot tell the colours
NAMES = {"fedfa": "FedFA", "nefl": "NeFL", "heterofl": "HeteroFL", "flexifed": "FlexiFed", "fedavg": "FedAvg"}
_HIGH = 3.2  # inches


class Point(NamedTuple):
    """Mean and standard deviation of an accuracy, as shares."""

    mean: float
    spread: float


def panel(
    axis: Axes, values: Sequence[object], lines: Mapping[str, Mapping[int, Point]], label: str, title: str
) -> None:
    """Draw a line for each method. The values stand side by side, because 0 has no place on a logarithmic axis.

    Args:
        lines: from method to its points by the index of their value.
    """
    for number, (name, points) in enumerate(lines.items()):
        mean, wide = zip(*points.values())
        places = [at + 0.04 * (number - (len(lines) - 1) / 2) for at in points]  # so that bars do not hide each other
        axis.errorbar(places, mean, wide, fmt="none", capsize=3, elinewidth=1, ecolor=LOOKS[name])
        axis.plot(places, mean, MARKS[name], ms=5, color=LOOKS[name], label=NAMES[name])
    dress(axis, "test accuracy" if axis.get_subplotspec().is_first_col() else "", percent=True)
    axis.set_ylim(0, 1)
    axis.set_xlim(-0.2, len(values) - 0.8)
    axis.set_xlabel(label)
    axis.set_xticks(range(len(values)), list(map(str, values)))
    axis.set_title(title, fontsize=10)
    axis.legend(loc="lower left", frameon=False, fontsize=8)


def draw_lambda(out: Path) -> None:
    """Draw a panel for each way in which clients differ."""
    cells = [result(find(f"fedfa.lambda.digits.{amplify}")) for amplify in LAMBDAS]
    shown = [(amplify, one.values[0]) for amplify, one in zip(LAMBDAS, cells) if one.values[0]]
    figure = Figure(figsize=(9.2, _HIGH), layout="constrained")
    for axis, (title, names) in zip(figure.subplots(1, 2, sharey=True), PANELS.items()):
        lines = {
            name: {
                at: Point(fmean(values[arm]) / 100, spread(values[arm]) / 100)
                for at, (_, values) in enumerate(shown)
                if arm in values
            }
            for arm, name in names.items()
        }
        panel(axis, [amplify for amplify, _ in shown], lines, "updates enlarged, times (0: no attack)", title)
    counts = {len(seeds) for _, values in shown for seeds in values.values()}
    seeds = "2 seeds" if counts == {2} else "1 or 2 seeds (no bar: one)"
    caption(figure, ["mean of the last five evaluations", f"bar: ± one standard deviation over {seeds}",
                     "FedAvg: everybody has the full model"])  # fmt: skip
    figure.suptitle("Digits, IID, a fifth of the clients malicious, 15 rounds", fontsize=11)
    save(figure, out)


def draw_share(out: Path) -> None:
    """One panel: the last accuracy."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    values = list(dict.fromkeys(row["attack.share"] for row in rows))
    lines: dict[str, dict[int, Point]] = {}
    for row in rows:
        point = Point(float(row["accuracy"]), float(row["accuracy_std"]))
        lines.setdefault(row["method"], {})[values.index(row["attack.share"])] = point
    figure = Figure(figsize=(5.4, _HIGH), layout="constrained")
    panel(figure.subplots(), values, lines, "share of malicious clients", "")
    caption(
        figure, ["after 20 rounds", "attackers have the largest model", "bar: ± one standard deviation over 2 seeds"]
    )
    figure.suptitle("Digits, IID, updates enlarged 5 times", fontsize=11)
    save(figure, out)


if __name__ == "__main__":
    {"lambda": draw_lambda, "share": draw_share}[sys.argv[1]](Path(sys.argv[2]))
