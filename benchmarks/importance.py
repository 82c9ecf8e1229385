"""Accuracy of a narrowed ResNet by each criterion of importance, beside torch-pruning's with the same criterion.

    python benchmarks/importance.py                  # prints the table, writes benchmarks/results/importance-cpu.json
    python benchmarks/importance.py --quick          # few samples, to see that it runs
    python benchmarks/importance.py --table          # the stored results as the page shows them

A pre-activation ResNet-20 of the zoo (torch-pruning cannot cut `resnet20`, whose shortcuts pad with zero channels) is
trained on the first 12,800 images of Fashion-MNIST for 8 epochs. Both sides then cut it to a share of its
multiply-accumulates, all widths competing: `surgery.narrow(target=..., keep_top=...)`, and torch-pruning's BasePruner
with `global_pruning`, whose pruning ratio is searched until its model is the largest that has no more of them.
Accuracies are those on the 10,000 test images, as it was cut and after one epoch on the images that it was trained on;
both sides have the same batches in the same order. `first` keeps the first positions of all widths, one share of each.

torch-pruning's classes for the same criteria: GroupMagnitudeImportance (p = 1, 2), BNScaleImportance,
GroupTaylorImportance, GroupHessianImportance. Gradients are those of 10 batches, and for `fisher` of 256 single images.

`slower` is the time of torch-pruning's model over ours for one forward pass of 100 images, in turns: the median and the
range of the repetitions.
"""

import argparse
import copy
import json
import statistics
from pathlib import Path

import report
import torch
import torch.nn.functional as F
import torch_pruning as tp
from torch import Tensor, nn

import zoo
from fl.data import Dataset, load
from surgery import Target, importance, narrow
from surgery.inspect.report import count_macs

MODEL = "preresnet20"
SAMPLES, BATCH, EPOCHS = 12800, 128, 8
SHARES = (0.75, 0.5, 0.25)
EXAMPLE = torch.zeros(1, 1, 28, 28)
THEIRS = {
    "l1": lambda: tp.importance.GroupMagnitudeImportance(p=1),
    "l2": lambda: tp.importance.GroupMagnitudeImportance(p=2),
    "bn_scale": tp.importance.BNScaleImportance,
    "taylor": tp.importance.GroupTaylorImportance,
    "fisher": tp.importance.GroupHessianImportance,
}


def new_model(seed: int) -> nn.Module:
    """The model before it is trained."""
    generator = torch.Generator().manual_seed(seed)
    net = zoo.create(MODEL, generator=generator, num_classes=10, in_channels=1, image_size=28, norm="batch")
    return net.to(memory_format=torch.channels_last)


def train(model: nn.Module, data: Dataset, samples: int, *, epochs: int, lr: float, seed: int) -> None:
    """Train with SGD, momentum 0.9, weight decay 5e-4, the learning rate going down to zero as a cosine does."""
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * (samples // BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(samples, generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss(model, (data.normalise(data.x[rows]), data.y[rows])).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset) -> float:
    """The share of right answers on the test set."""
    model.eval()
    pairs = zip(data.test_x.split(500), data.test_y.split(500))
    right = sum((model(data.normalise(x)).argmax(1) == y).sum().item() for x, y in pairs)
    return right / len(data.test_y)


def trained(seed: int, data: Dataset, samples: int, folder: Path) -> nn.Module:
    """The trained model, from the folder if it is there."""
    model, path = new_model(seed), folder / f"{MODEL}-{samples}-{seed}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    train(model, data, samples, epochs=EPOCHS, lr=0.1, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def batches_for(by: str, data: Dataset, samples: int) -> list:
    """What a criterion sees, from the training images."""
    rows = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    parts = rows[:256].split(1) if by == "fisher" else rows[: 10 * BATCH].split(BATCH)
    pairs = [(data.normalise(data.x[part]), data.y[part]) for part in parts]
    return [x for x, _ in pairs] if by == "activation" else pairs


def ours(model: nn.Module, by: str, share: float, data: Dataset, samples: int) -> nn.Module:
    """The model narrowed by `surgery`."""
    scores = None
    if by != "first":
        scores = importance(model, example=EXAMPLE, by=by, batches=batches_for(by, data, samples), loss=loss)
    return narrow(model, example=EXAMPLE, target=Target(macs=share), keep_top=scores)[0]


def theirs(model: nn.Module, by: str, share: float, data: Dataset, samples: int) -> nn.Module:
    """The model cut by torch-pruning: its largest that has no more than this share of the MACs."""
    full = count_macs(model, EXAMPLE)

    def pruned(ratio: float) -> nn.Module:
        net, criterion = copy.deepcopy(model), THEIRS[by]()
        batches = batches_for(by, data, samples)
        if by == "taylor":
            for batch in batches:
                (loss(net, batch) / len(batches)).backward()
        elif by == "fisher":
            for batch in batches:
                net.zero_grad()
                loss(net, batch).backward()
                criterion.accumulate_grad(net)
        options = {
            "importance": criterion,
            "global_pruning": True,
            "pruning_ratio": ratio,
            "ignored_layers": [net.head],
        }
        tp.pruner.BasePruner(net, EXAMPLE, **options).step()
        net.zero_grad()
        return net

    low, high = 0.0, 1.0  # `high` is small enough, `low` is not
    best = None
    for _ in range(9):
        middle = (low + high) / 2
        net = pruned(middle)
        if count_macs(net, EXAMPLE) <= share * full:
            high, best = middle, net
        else:
            low = middle
    return best


def judged(model: nn.Module, full: nn.Module, data: Dataset, samples: int, seed: int) -> dict:
    """What became of the model: its size and its accuracies."""
    row = {
        "macs": round(count_macs(model, EXAMPLE) / count_macs(full, EXAMPLE), 4),
        "parameters": round(sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in full.parameters()), 4),
        "cut": accuracy(model, data),
    }
    tuned = copy.deepcopy(model)
    train(tuned, data, samples, epochs=1, lr=0.02, seed=seed)
    return row | {"tuned": accuracy(tuned, data)}


def slower(a: nn.Module, b: nn.Module, images: Tensor, repetitions: int) -> list[float]:
    """The time of b over that of a: median, least, most."""
    ratios = []
    with torch.no_grad():
        for number in range(repetitions + 1):
            times = {
                side: report.seconds(lambda side=side: side(images), "cpu") for side in ((a, b), (b, a))[number % 2]
            }
            ratios.append(times[b] / times[a])
    return [round(f(ratios[1:]), 3) for f in (statistics.median, min, max)]  # the first round warms up


def table(result: dict) -> str:
    """The rows as Markdown, the mean over seeds in percent: ours / torch-pruning's."""
    shares = sorted({row["share"] for row in result["rows"]}, reverse=True)
    found: dict[tuple, list[dict]] = {}
    for row in result["rows"]:
        found.setdefault((row["by"], row["share"], row["side"]), []).append(row)

    def cell(by: str, share: float, what: str) -> str:
        sides = [found.get((by, share, side), []) for side in ("surgery", "torch-pruning")]
        return " / ".join(f"{100 * statistics.mean(row[what] for row in rows):.1f}" for rows in sides if rows)

    heads = [f"{what}, {share:g} of MACs" for share in shares for what in ("as cut", "one epoch")]
    lines = [f"| by | {' | '.join(heads)} |", f"|{'---|' * (len(heads) + 1)}"]
    for by in dict.fromkeys(row["by"] for row in result["rows"]):
        cells = [cell(by, share, what) for share in shares for what in ("cut", "tuned")]
        lines.append(f"| {by} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--models", type=Path, default=Path.home() / ".cache/layer-surgery/importance")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads((args.out / "importance-cpu.json").read_text())))
        return
    data = load("fashion-mnist")
    samples, shares = (4 * BATCH, SHARES[1:2]) if args.quick else (SAMPLES, SHARES)
    name = f"importance-cpu{'-quick' if args.quick else ''}"
    result = {"model": MODEL, "torch": torch.__version__, "torch_pruning": tp.__version__, "full": {}, "rows": []}
    print(f"{'seed':4} {'by':11}{'side':14}{'MACs':>7}{'params':>8}{'cut':>8}{'tuned':>8}  slower")
    for seed in args.seeds:
        full = trained(seed, data, samples, args.models)
        result["full"][str(seed)] = accuracy(full, data)
        for share in shares:
            for by in ("first", *THEIRS, "activation"):
                models = {"surgery": ours(full, by, share, data, samples)}
                if by in THEIRS:
                    models["torch-pruning"] = theirs(full, by, share, data, samples)
                for side, model in models.items():
                    row = {"seed": seed, "share": share, "by": by, "side": side}
                    row |= judged(model, full, data, samples, seed)
                    if len(models) == 2 and side == "torch-pruning":
                        row["slower"] = slower(
                            models["surgery"], model, data.normalise(data.test_x[:100]), args.repetitions
                        )
                    result["rows"].append(row)
                    report.write(result, args.out, name, done=False)
                    text = f"{row['macs']:7.3f}{row['parameters']:8.3f}{row['cut']:8.4f}{row['tuned']:8.4f}"
                    print(f"{seed:4} {by:11}{side:14}{text}  {row.get('slower', '')}", flush=True)
    report.write(result, args.out, name)


if __name__ == "__main__":
    main()
