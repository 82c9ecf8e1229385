"""Draw the front page's picture, a network cut, pruned and recombined: `python docs/hero.py FILE`.

The first panel is computed here; the others are drawn from stored results: benchmarks/importance.py on Fashion-MNIST,
and the runs of FedMR's Table 1.
"""

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
import timm
import torch
from matplotlib.axes import Axes
from torch import nn

import surgery

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results"
OURS, OTHER, PALE = "#0072b2", "#d55e00", "#a5d2ff"


def cut(axis: Axes) -> None:
    """Draw the widths of a ResNet-50 before and after it was cut in half, block by block."""
    net = timm.create_model("resnet50")
    small, _ = surgery.narrow(net, 0.5, torch.zeros(1, 3, 224, 224))
    before, after = ([m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)] for model in (net, small))
    axis.bar(range(len(before)), before, width=1, color=PALE)
    axis.bar(range(len(after)), after, width=1, color=OURS)
    full, left = (sum(p.numel() for p in model.parameters()) / 1e6 for model in (net, small))
    axis.set_title("Cut by half")
    axis.text(0.04, 0.93, f"ResNet-50\n{full:.1f} → {left:.1f} M\nparameters", transform=axis.transAxes, va="top")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel("layers")
    axis.set_ylabel("channels")


def prune(axis: Axes) -> None:
    """Draw the accuracy after pruning by magnitude and tuning, against what is left of the operations."""
    stored = json.loads((RESULTS / "importance-cpu.json").read_text())
    sides: dict[str, dict[float, list]] = defaultdict(lambda: defaultdict(list))
    for row in stored["rows"]:
        if row["by"] == "l1":
            sides[row["side"]][row["share"]].append((row["macs"], row["tuned"]))
    whole = mean(stored["full"].values())
    looks = {"surgery": {"color": OURS, "marker": "o", "ms": 9}, "torch-pruning": {"color": OTHER, "marker": "x"}}
    for side, shares in sides.items():
        points = [*((mean(m for m, _ in at), mean(a for _, a in at)) for at in shares.values()), (1, whole)]
        _line(axis, points, label=side, ls="-" if side == "surgery" else ":", **looks[side])
    axis.set_title("Prune and tune")
    axis.set_xlabel("share of MACs")
    axis.set_ylabel("accuracy (%)")
    axis.set_xticks([0.25, 0.5, 1], ["¼", "½", "1"])
    axis.set_ylim(bottom=84.2)  # room for the legend
    axis.set_yticks([86, 88, 90])


def recombine(axis: Axes) -> None:
    """Draw the accuracy of FedMR and FedAvg against rounds, the mean of three seeds."""
    for method, name, color, style in (("fedmr", "FedMR", OURS, "-"), ("fedavg", "FedAvg", OTHER, ":")):
        found: dict[int, list[float]] = defaultdict(list)
        for file in sorted((RESULTS / "papers/fedmr.table1.cifar10.lenet.dir0.5").glob(f"{method}-seed?.csv")):
            rows = csv.DictReader(line for line in file.open() if not line.startswith("#"))
            for row in (row for row in rows if row["accuracy"]):
                found[int(row["round"])].append(float(row["accuracy"]))
        points = [(round, mean(several)) for round, several in found.items()]
        _line(axis, points, label=name, color=color, ls=style, lw=2)
    axis.set_title("Train federated")
    axis.set_xlabel("CIFAR-10, rounds")
    axis.set_ylabel("accuracy (%)")


def _line(axis: Axes, points: Iterable[tuple[float, float]], **looks) -> None:
    x, y = zip(*sorted(points))
    axis.plot(x, [100 * value for value in y], **looks)
    axis.legend(loc="lower right", frameon=False, handlelength=1.2, borderpad=0)


def main(file: str) -> None:
    plt.rcParams.update({"font.size": 14, "axes.titlesize": 15, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 3, figsize=(7.2, 3.2), layout="constrained")
    for panel, axis in zip((cut, prune, recombine), axes):
        panel(axis)
    figure.savefig(file, dpi=200)


if __name__ == "__main__":
    main(sys.argv[1])
