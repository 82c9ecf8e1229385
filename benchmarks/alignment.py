"""The loss along the straight line between two networks that were trained apart, before and after they are aligned.

    python benchmarks/alignment.py mlp-digits mlp-fashion    # prints rows, adds them to results/alignment-cpu.json
    python benchmarks/alignment.py --table                   # the stored results as the page shows them
    python benchmarks/alignment.py --figure alignment.png    # the stored curves
    python benchmarks/alignment.py mlp-digits --quick        # few samples and one epoch, to see that it runs

Two networks with seeds 2s and 2s + 1 see the same data in another order. The barrier is the largest loss on the line
(11 points) over the straight line between the losses at its ends, on training and on test data: Frankle et al. (ICML
2020). `weights` and `activations` are `surgery.symmetry.align`'s; the latter compares the first 512 training samples.
Networks with batch norm have their statistics repaired (Jordan et al., 2023) by the first 2,048 training samples at
each point of the line but the ends, for every row named `repaired`; those without any norm have each channel rescaled
to statistics between those of the ends. Losses are those of the first `--judged` samples.

One CPU thread does all of it, and `seconds` is the processor's time for `align` alone. Trainings are kept in
`--kept` after every epoch, and rows are written as they come: run the same command again to go on.

    mlp-digits, mlp-fashion  three hidden layers of 512 units, as in Ainsworth et al. (ICLR 2023), section 5
    vgg11-bn-cifar           the zoo's VGG-11 with batch norm; --width multiplies the widths of all of these
    vgg11-cifar              the zoo's VGG-11 with layer norm
    vgg11-plain-cifar        the zoo's VGG-11 without norm
    resnet20-cifar           the zoo's ResNet-20 with layer norm
    resnet20-bn-cifar        the zoo's ResNet-20 with batch norm
    vit-digits               timm's Vision Transformer, 4 blocks of width 64, patches of 2 by 2 pixels
    gpt-pydoc                a causal Transformer on bytes, 3 blocks of width 64; its accuracy is that of the next byte
"""

import argparse
import copy
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import report
import scipy.optimize  # noqa: F401 -- align imports it in its first call, which takes a second
import torch
import torch.nn.functional as F
from alignment_training import CASES, data_of, new_model, trained
from torch import nn

from fl.data import Dataset
from fl.figures.style import COLORS
from surgery import load as load_state
from surgery import state
from surgery.symmetry import align, repair

POINTS = 11
OUT = Path(__file__).parent / "results"


@torch.no_grad()
def judged(model: nn.Module, data: Dataset, samples: int) -> dict[str, float]:
    """Losses, and the accuracy on test data."""
    result = {}
    parts = {"train": (data.x[:samples], data.y[:samples]), "test": (data.test_x[:samples], data.test_y[:samples])}
    for what, (x, y) in parts.items():
        logits = torch.cat([model(data.normalise(part)) for part in x.split(500)])
        result[what] = F.cross_entropy(logits.flatten(0, -2), y.flatten()).item()
    return {**result, "accuracy": (logits.argmax(-1) == y).float().mean().item()}


def line(
    one: nn.Module, other: nn.Module, data: Dataset, samples: int, repaired: bool, norm: str
) -> dict[str, list[float]]:
    """Return the measurements along the line from one to the other."""
    curves: dict[str, list[float]] = {"train": [], "test": [], "accuracy": []}
    a, b = state(one), state(other)
    for point in range(POINTS):
        share = point / (POINTS - 1)
        between = {n: torch.lerp(a[n], b[n], share) if a[n].is_floating_point() else a[n] for n in a}
        model = load_state(copy.deepcopy(one), between)
        if repaired and 0 < share < 1:
            given = {"ends": (one, other), "weights": (1 - share, share)} if norm == "none" else {}
            model = repair(model, batches=data.normalise(data.x[:2048]).split(256), **given)
        for what, value in judged(model, data, samples).items():
            curves[what].append(value)
    return curves


def barrier(losses: list[float]) -> float:
    """How far losses on a line rise over the straight line between those at its ends."""
    last = len(losses) - 1
    return max(loss - losses[0] - (losses[-1] - losses[0]) * i / last for i, loss in enumerate(losses))


def measured(settings: dict, kept: Path, stored: list[dict]) -> Iterator[dict]:
    """Yield the rows of a case that are not stored yet."""
    name, width, seed = (settings[what] for what in ("case", "width", "seed"))
    case, samples, epochs = CASES[name], settings["samples"], settings["epochs"]
    kinds = [
        (by, fix)
        for by in ("", "weights", *["activations"] * (case.model != "pre-norm"))
        for fix in ((False, True) if case.norm in ("batch", "none") else (False,))
    ]
    todo = [{**settings, "by": by or "as trained", "repaired": fix} for by, fix in kinds]
    todo = [(row, by) for row, (by, _) in zip(todo, kinds) if not any(row.items() <= old.items() for old in stored)]
    if not todo:
        return
    data = data_of(case)
    images = data.normalise(data.x[:512])
    nets = []
    for net_seed in (2 * seed, 2 * seed + 1):
        net = new_model(case, images, data.classes, net_seed, width)
        path = kept / f"{name}-width{width:g}-samples{samples}-epochs{epochs}-seed{net_seed}.pt"
        nets.append(trained(net, data, samples, epochs, net_seed, path))
    found = {"": (nets, 0.0)}
    for row, by in todo:
        if by not in found:
            begin = time.process_time()
            models = align(nets, example=images[:2], by=by, batches=[images]).models
            found[by] = models, time.process_time() - begin
        (one, other), seconds = found[by]
        curves = line(one, other, data, settings["judged"], row["repaired"], case.norm)
        row |= {"train": barrier(curves["train"]), "test": barrier(curves["test"]), "seconds": seconds}
        row |= {"ends": [curves["accuracy"][0], curves["accuracy"][-1]], "middle": curves["accuracy"][POINTS // 2]}
        print(name, width, seed, row["by"], "repaired" if row["repaired"] else "", f"{row['test']:.3f}", flush=True)
        yield {**row, "curves": curves}


def table(rows: list[dict]) -> str:
    """Return the rows as Markdown, a line for each training; means over seeds."""
    ways = ("as trained", "weights", "activations")
    headings = ["networks", "width", "trained on", "ends", "barrier: " + ", ".join(ways), "middle: " + ", ".join(ways)]
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    groups: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        settings = tuple(row[setting] for setting in ("case", "width", "samples", "epochs", "repaired"))
        groups.setdefault(settings, {}).setdefault(row["by"], []).append(row)

    def mean(same: list[dict], value: Callable[[dict], float]) -> float:
        return sum(map(value, same)) / len(same)

    for (case, width, samples, epochs, repaired), by in groups.items():
        ends = mean(by["as trained"], lambda row: sum(row["ends"]) / 2)
        barriers = (f"{mean(by[way], lambda row: row['test']):.2f}" if way in by else "-" for way in ways)
        middles = (f"{100 * mean(by[way], lambda row: row['middle']):.1f}" if way in by else "-" for way in ways)
        cells = [case + (", repaired" if repaired else ""), f"{width:g}", f"{samples:,} x {epochs}"]
        cells += [f"{100 * ends:.1f}", ", ".join(barriers), ", ".join(middles)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """Draw the test losses along the lines, a panel for each case, width and training, four in a row."""
    from matplotlib.figure import Figure

    panels: dict[tuple, list[dict]] = {}
    for row in rows:
        panels.setdefault((row["case"], row["width"], row["epochs"]), []).append(row)
    several = Counter(case for case, _, _ in panels)
    figure = Figure(figsize=(10, 2.8 * math.ceil(len(panels) / 4)), layout="constrained")
    looks = {"as trained": ("0.45", "-"), "weights": (COLORS[0], "--"), "activations": (COLORS[1], ":")}
    for number, ((case, width, epochs), same) in enumerate(panels.items()):
        axes = figure.add_subplot(math.ceil(len(panels) / 4), 4, number + 1)
        shown = set()
        for row in same:
            name = row["by"] + (", repaired" if row["repaired"] else "")
            style = dict(zip(("color", "ls"), looks[row["by"]])) | {"marker": "o" * row["repaired"], "ms": 3}
            share = [i / (POINTS - 1) for i in range(POINTS)]
            axes.plot(share, row["curves"]["test"], label=None if name in shown else name, **style)
            shown.add(name)
        parts = [case, *[f"width {width:g}"] * (width != 1), *[f"{epochs} epochs"] * (several[case] > 1)]
        axes.set_title(", ".join(parts), fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines if line.get_label()[0] != "_"}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    for axes in figure.axes[-4:]:
        axes.set_xlabel("share of the second network", fontsize=9)
    for axes in figure.axes[::4]:
        axes.set_ylabel("test loss", fontsize=9)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--width", type=float, nargs="*", default=[1.0])
    parser.add_argument("--samples", type=int, help="learned from; else as the case says")
    parser.add_argument("--epochs", type=int, help="else as the case says")
    parser.add_argument("--judged", type=int, default=10000, help="training and test samples that losses are taken of")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--kept", type=Path, default=Path("runs/alignment"), help="where trainings are kept")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    name = f"alignment-cpu{'-quick' if args.quick else ''}"
    path = args.out / f"{name}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for case, width, seed in itertools.product(args.cases, args.width, args.seeds):
        there = len(data_of(CASES[case]).y)
        samples = min(512 if args.quick else args.samples or CASES[case].samples or there, there)
        epochs = 1 if args.quick else args.epochs or CASES[case].epochs
        settings = {"case": case, "width": width, "seed": seed, "samples": samples, "epochs": epochs}
        settings["judged"] = min(args.judged, samples)
        for row in measured(settings, args.kept, rows):
            rows.append(row)
            report.write({"torch": torch.__version__, "rows": rows}, args.out, name, done=False)
        report.write({"torch": torch.__version__, "rows": rows}, args.out, name)
    if args.table:
        print(table(rows))
    if args.figure:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
