"""The loss along the straight line between two networks that were trained apart, before and after they are aligned.

    python benchmarks/alignment.py mlp-digits mlp-fashion    # prints rows, adds them to results/alignment-cpu.json
    python benchmarks/alignment.py --table                   # the stored results as the page shows them
    python benchmarks/alignment.py --figure alignment.png    # the stored curves
    python benchmarks/alignment.py mlp-digits --quick        # few samples and one epoch, to see that it runs

Two networks with seeds 2s and 2s + 1 see the same data in another order. The barrier is the largest loss on the line
(11 points) over the straight line between the losses at its ends, on training and on test data: Frankle et al. (ICML
2020). `weights` and `activations` are `surgery.align`'s; the latter compares the first 512 training samples. Networks
with batch norm have their statistics repaired (Jordan et al., 2023) by the first 2,048 training samples at each point
of the line but the ends, for every row named `repaired`.

    mlp-digits, mlp-fashion  three hidden layers of 512 units, as in Ainsworth et al. (ICLR 2023), section 5
    vgg11-bn-cifar           the zoo's VGG-11 with batch norm
    vgg11-cifar              the zoo's VGG-11 with layer norm
    resnet20-cifar           the zoo's ResNet-20 with layer norm; --width multiplies its widths
"""

import argparse
import copy
import itertools
import json
import time
from pathlib import Path

import report
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from fl.data import Dataset, load
from surgery import align, repair, state
from surgery import load as load_state

POINTS = 11
OUT = Path(__file__).parent / "results"
CASES = {  # data, model of the zoo or None for the MLP, its norm, epochs
    "mlp-digits": ("digits", None, "", 100),
    "mlp-fashion": ("fashion-mnist", None, "", 10),
    "vgg11-bn-cifar": ("cifar10", "vgg11", "batch", 15),
    "vgg11-cifar": ("cifar10", "vgg11", "layer", 15),
    "resnet20-cifar": ("cifar10", "resnet20", "layer", 30),
}


def new_model(case: str, images: Tensor, classes: int, seed: int, width: float) -> nn.Module:
    """The model of a case, before it is trained."""
    _, name, norm, _ = CASES[case]
    if name is None:
        torch.manual_seed(seed)
        sizes = [images[0].numel(), *[round(512 * width)] * 3]
        hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], classes))
    generator = torch.Generator().manual_seed(seed)
    shape = {"in_channels": images.shape[1], "image_size": images.shape[2], "num_classes": classes}
    return zoo.create(name, norm=norm, width=width, generator=generator, **shape)


def train(model: nn.Module, data: Dataset, samples: int, epochs: int, seed: int) -> None:
    """Adam, a cosine from 1e-3 to 0, batches of 128."""
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * (samples // 128)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(samples, generator=generator).split(128)[: samples // 128]:
            loss = F.cross_entropy(model(data.normalise(data.x[batch])), data.y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def judged(model: nn.Module, data: Dataset, samples: int) -> dict[str, float]:
    """Losses, and the accuracy on test data."""
    result = {}
    parts = {"train": (data.x[:samples], data.y[:samples]), "test": (data.test_x, data.test_y)}
    for what, (x, y) in parts.items():
        logits = torch.cat([model(data.normalise(part)) for part in x.split(500)])
        result[what] = F.cross_entropy(logits, y).item()
    return {**result, "accuracy": (logits.argmax(1) == data.test_y).float().mean().item()}


def line(one: nn.Module, other: nn.Module, data: Dataset, samples: int, repaired: bool) -> dict[str, list[float]]:
    """What is judged along the line from one to the other."""
    curves: dict[str, list[float]] = {"train": [], "test": [], "accuracy": []}
    a, b = state(one), state(other)
    for point in range(POINTS):
        share = point / (POINTS - 1)
        between = {n: torch.lerp(a[n], b[n], share) if a[n].is_floating_point() else a[n] for n in a}
        model = load_state(copy.deepcopy(one), between)
        if repaired and 0 < share < 1:
            model = repair(model, batches=data.normalise(data.x[:2048]).split(256))
        for what, value in judged(model, data, samples).items():
            curves[what].append(value)
    return curves


def barrier(losses: list[float]) -> float:
    """How far losses on a line rise over the straight line between those at its ends."""
    last = len(losses) - 1
    return max(loss - losses[0] - (losses[-1] - losses[0]) * i / last for i, loss in enumerate(losses))


def measured(case: str, seed: int, width: float, quick: bool) -> list[dict]:
    """The rows of a case."""
    name, _, norm, epochs = CASES[case]
    data = load(name)
    train_size = 512 if quick else len(data.y)
    images = data.normalise(data.x[:512])
    classes = data.classes
    nets = [new_model(case, images, classes, 2 * seed + i, width) for i in (0, 1)]
    for i, net in enumerate(nets):
        train(net, data, train_size, 1 if quick else epochs, 2 * seed + i)
    samples = min(train_size, 10000)
    rows = []
    for by in ("", "weights", "activations"):
        begin = time.perf_counter()
        one, other = align(nets, example=images[:2], by=by, batches=[images]).models if by else nets
        seconds = time.perf_counter() - begin if by else 0.0
        for repaired in (False, True) if norm == "batch" else (False,):
            curves = line(one, other, data, samples, repaired)
            row = {"case": case, "width": width, "seed": seed, "by": by or "as trained", "repaired": repaired}
            row |= {"train": barrier(curves["train"]), "test": barrier(curves["test"]), "seconds": seconds}
            row |= {"ends": [curves["accuracy"][0], curves["accuracy"][-1]], "middle": curves["accuracy"][POINTS // 2]}
            rows.append({**row, "curves": curves})
            print(case, width, seed, row["by"], "repaired" if repaired else "", f"{row['test']:.3f}", flush=True)
    return rows


def table(rows: list[dict]) -> str:
    """The rows as Markdown; losses are the means over seeds, accuracies in percent."""
    lines = [
        "| networks | width | aligned by | barrier, train | barrier, test | accuracy at the ends | in the middle |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault((row["case"], row["width"], row["by"], row["repaired"]), []).append(row)

    def mean(same: list[dict], what) -> float:
        return sum(map(what, same)) / len(same)

    for (case, width, by, repaired), same in found.items():
        train_, test = (mean(same, lambda row, w=w: row[w]) for w in ("train", "test"))
        ends, middle = mean(same, lambda row: sum(row["ends"]) / 2), mean(same, lambda row: row["middle"])
        name = by + (", repaired" if repaired else "")
        lines.append(
            f"| {case} | {width:g} | {name} | {train_:.3f} | {test:.3f} | {100 * ends:.1f} | {100 * middle:.1f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """The test losses along the lines, a panel for each case and width."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["case"], row["width"]) for row in rows))
    figure = Figure(figsize=(3.6 * len(panels), 3.2), layout="constrained")
    colours = {"as trained": "#6b7280", "weights": "#3b6fb6", "activations": "#d9822b"}
    for axes, (case, width) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        shown = set()
        for row in rows:
            if (row["case"], row["width"]) == (case, width):
                name = row["by"] + (", repaired" if row["repaired"] else "")
                style = {"color": colours[row["by"]], "ls": "--" if row["repaired"] else "-"}
                share = [i / (POINTS - 1) for i in range(POINTS)]
                axes.plot(share, row["curves"]["test"], label=None if name in shown else name, **style)
                shown.add(name)
        axes.set_title(case if width == 1 else f"{case}, width {width:g}", fontsize=10)
        axes.set_xlabel("share of the second network", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel("test loss", fontsize=9)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--width", type=float, nargs="*", default=[1.0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    name = f"alignment-cpu{'-quick' if args.quick else ''}"
    path = args.out / f"{name}.json"
    result = json.loads(path.read_text()) if path.exists() else {"rows": []}
    for case in args.cases:
        for width in args.width:
            for seed in args.seeds:
                new = measured(case, seed, width, args.quick)
                key = (case, width, seed)
                kept = [row for row in result["rows"] if (row["case"], row["width"], row["seed"]) != key]
                result = {"torch": torch.__version__, "rows": [*kept, *new]}
                report.write(result, args.out, name)
    if args.table:
        print(table(result["rows"]))
    if args.figure:
        draw(result["rows"], args.figure)


if __name__ == "__main__":
    main()
