"""Accuracy of a narrowed ResNet by each criterion of importance, beside torch-pruning's with the same criterion.

    python benchmarks/importance.py                  # prints the table, writes benchmarks/results/importance-cpu.json
    python benchmarks/importance.py --quick          # few samples, to see that it runs
    python benchmarks/importance.py --table          # the stored results as the page shows them
    python benchmarks/importance.py --digits         # on scikit-learn's digits, in one step and in four; 20 minutes
    python benchmarks/importance.py --digits --table

A pre-activation ResNet-20 of the zoo (torch-pruning cannot cut `resnet20`, whose shortcuts pad with zero channels) is
trained on the first 12,800 images of Fashion-MNIST for 8 epochs. Both sides then cut it to a share of its
multiply-accumulates, all widths competing: `surgery.pruning.prune`, and torch-pruning's BasePruner
with `global_pruning`, whose pruning ratio is searched until its model is the largest that has no more of them.
Accuracies are those on the 10,000 test images, as it was cut and after one epoch on the images that it was trained on;
both sides have the same batches in the same order. `first` keeps the first positions of all widths, one share of each.

torch-pruning's classes for the same criteria: GroupMagnitudeImportance (p = 1, 2), BNScaleImportance,
GroupTaylorImportance, GroupHessianImportance. Gradients are those of 10 batches, and for `fisher` of 256 single images.

With `--digits` the same model is trained on 1,408 images of 8 by 8 for 15 epochs and cut to half of its MACs by
`surgery.pruning.prune`, in one step and in four with scores (and gradients) asked anew before each and no training
between, and by torch-pruning with as many `iterative_steps`. `repaired` is the accuracy after the statistics of the
batch norms were measured anew (`surgery.symmetry.repair`), without any training, on both sides. LAMP is torch-pruning's
class on both sides, and `random` draws other numbers for each.

`slower` is the time of torch-pruning's model over ours for one forward pass of 100 images, in turns: the median and the
range of the repetitions.
"""

import argparse
import copy
import itertools
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import report
import torch
import torch.nn.functional as F
import torch_pruning as tp
from torch import Tensor, nn

import zoo
from fl.data import Dataset, load
from surgery.inspect.report import count_macs
from surgery.pruning import Target, importance, prune
from surgery.symmetry import repair

MODEL = "preresnet20"


@dataclass(frozen=True)
class Setting:
    """What is cut, how far, and in how many steps."""

    data: str
    pixels: int
    samples: int
    batch: int
    epochs: int
    singles: int  # images for `fisher`
    criteria: tuple[str, ...]
    shares: tuple[float, ...]
    steps: tuple[int, ...] = (1,)

    @property
    def example(self) -> Tensor:
        return torch.zeros(1, 1, self.pixels, self.pixels)


BOTH = ("l1", "l2", "bn_scale", "taylor", "fisher")
FASHION = Setting("fashion-mnist", 28, 12800, 128, 8, 256, ("first", *BOTH, "activation"), (0.75, 0.5, 0.25))
DIGITS = Setting("digits", 8, 1408, 64, 15, 64, (*BOTH, "lamp", "random"), (0.5,), (1, 4))
THEIRS = {
    "l1": lambda: tp.importance.GroupMagnitudeImportance(p=1),
    "l2": lambda: tp.importance.GroupMagnitudeImportance(p=2),
    "bn_scale": tp.importance.BNScaleImportance,
    "taylor": tp.importance.GroupTaylorImportance,
    "fisher": tp.importance.GroupHessianImportance,
    "lamp": tp.importance.LAMPImportance,
    "random": tp.importance.RandomImportance,
}


def new_model(seed: int, what: Setting) -> nn.Module:
    """Return the model before it is trained."""
    generator = torch.Generator().manual_seed(seed)
    net = zoo.create(MODEL, generator=generator, num_classes=10, in_channels=1, image_size=what.pixels, norm="batch")
    return net.to(memory_format=torch.channels_last)


def train(model: nn.Module, data: Dataset, what: Setting, *, epochs: int, lr: float, seed: int) -> None:
    """Train with SGD, momentum 0.9, weight decay 5e-4, the learning rate going down to zero as a cosine does."""
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * (what.samples // what.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(what.samples, generator=generator).split(what.batch):
            optimizer.zero_grad()
            loss(model, (data.normalise(data.x[rows]), data.y[rows])).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset) -> float:
    """Return the share of correct answers on the test set."""
    model.eval()
    pairs = zip(data.test_x.split(500), data.test_y.split(500))
    right = sum((model(data.normalise(x)).argmax(1) == y).sum().item() for x, y in pairs)
    return right / len(data.test_y)


def trained(seed: int, data: Dataset, what: Setting, folder: Path) -> nn.Module:
    """Return the trained model, from the folder if it is there."""
    model, path = new_model(seed, what), folder / f"{MODEL}-{what.samples}-{seed}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    train(model, data, what, epochs=what.epochs, lr=0.1, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def batches_for(by: str, data: Dataset, what: Setting) -> list:
    """Return what a criterion sees, from the training images."""
    rows = torch.randperm(what.samples, generator=torch.Generator().manual_seed(0))
    parts = rows[: what.singles].split(1) if by == "fisher" else rows[: 10 * what.batch].split(what.batch)
    pairs = [(data.normalise(data.x[part]), data.y[part]) for part in parts]
    return [x for x, _ in pairs] if by == "activation" else pairs


def ours(model: nn.Module, by: str, share: float, steps: int, data: Dataset, what: Setting, seed: int) -> nn.Module:
    """Return the model cut by `surgery`."""
    generator = torch.Generator().manual_seed(seed)

    def scores(net: nn.Module) -> dict[str, Tensor]:
        known = importance(net, example=what.example)
        return {name: torch.rand(len(values), generator=generator) for name, values in known.items()}

    target = Target(macs=share)
    if by == "first":
        return prune(model, example=what.example, target=target, importance=None).model
    chosen = {"lamp": THEIRS["lamp"](), "random": scores}.get(by, by)
    given = {"importance": chosen, "batches": batches_for(by, data, what), "loss": loss}
    return prune(model, example=what.example, target=target, steps=steps, **given).model


def theirs(model: nn.Module, by: str, share: float, steps: int, data: Dataset, what: Setting, seed: int) -> nn.Module:
    """Return the model cut by torch-pruning: its largest that has no more than this share of the MACs."""
    full, batches = count_macs(model, what.example), batches_for(by, data, what)

    def pruned(ratio: float) -> nn.Module:
        net, criterion = copy.deepcopy(model), THEIRS[by]()
        torch.manual_seed(seed)  # torch-pruning's random scores are the global generator's
        options = {
            "importance": criterion,
            "global_pruning": True,
            "pruning_ratio": ratio,
            "iterative_steps": steps,
            "ignored_layers": [net.head],
        }
        pruner = tp.pruner.BasePruner(net, what.example, **options)
        for _ in range(steps):
            net.zero_grad()
            if by == "taylor":
                for batch in batches:
                    (loss(net, batch) / len(batches)).backward()
            elif by == "fisher":
                criterion.zero_grad()
                for batch in batches:
                    net.zero_grad()
                    loss(net, batch).backward()
                    criterion.accumulate_grad(net)
            pruner.step()
        net.zero_grad()
        return net

    low, high = 0.0, 1.0  # `high` is small enough, `low` is not
    best = None
    for _ in range(9):
        middle = (low + high) / 2
        net = pruned(middle)
        if count_macs(net, what.example) <= share * full:
            high, best = middle, net
        else:
            low = middle
    return best


def judged(model: nn.Module, full: nn.Module, data: Dataset, what: Setting, seed: int) -> dict:
    """Return the model's size and its accuracies."""
    row = {
        "macs": round(count_macs(model, what.example) / count_macs(full, what.example), 4),
        "parameters": round(sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in full.parameters()), 4),
        "cut": accuracy(model, data),
    }
    images = [x for x, _ in batches_for("repair", data, what)]
    row["repaired"] = accuracy(repair(model, batches=images), data)
    # torch 2.14's backward corrupts the heap on a CPU for some convolutions in channels_last, such as a plain
    # nn.Conv2d(3, 7, 1, stride=2) on 8 by 8 pixels
    tuned = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    train(tuned, data, what, epochs=1, lr=0.02, seed=seed)
    return row | {"tuned": accuracy(tuned, data)}


def slower(a: nn.Module, b: nn.Module, images: Tensor, repetitions: int) -> list[float]:
    """Return the time of b over that of a: median, least, most."""
    ratios = []
    with torch.no_grad():
        for number in range(repetitions + 1):
            times = {
                side: report.seconds(lambda side=side: side(images), "cpu") for side in ((a, b), (b, a))[number % 2]
            }
            ratios.append(times[b] / times[a])
    return [round(f(ratios[1:]), 3) for f in (statistics.median, min, max)]  # the first round warms up


def table(result: dict) -> str:
    """Return the rows as Markdown, the mean over seeds in percent: ours / torch-pruning's."""
    shares = sorted({row["share"] for row in result["rows"]}, reverse=True)
    found: dict[tuple, list[dict]] = {}
    for row in result["rows"]:
        found.setdefault((row["by"], row["share"], row["side"]), []).append(row)

    def cell(by: str, share: float, what: str) -> str:
        sides = [found.get((by, share, side), []) for side in ("surgery", "torch-pruning")]
        return " / ".join(f"{100 * statistics.mean(row[what] for row in rows):.1f}" for rows in sides if rows)

    shown = [("cut", shares[0]), *(("tuned", share) for share in shares)]  # smaller ones are useless as cut
    heads = [f"{'as cut' if what == 'cut' else 'one epoch'}, {share:g} of MACs" for what, share in shown]
    lines = [f"| by | {' | '.join(heads)} |", f"|{'---|' * (len(heads) + 1)}"]
    for by in dict.fromkeys(row["by"] for row in result["rows"]):
        cells = [cell(by, share, what) for what, share in shown]
        lines.append(f"| {by} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_steps(result: dict) -> str:
    """Return the rows of `--digits` as Markdown, in percent: ours / torch-pruning's, mean +- deviation over seeds."""
    found: dict[tuple, list[dict]] = {}
    for row in result["rows"]:
        found.setdefault((row["by"], row["steps"], row["side"]), []).append(row)

    def cell(by: str, steps: int, name: str) -> str:
        numbers = [[100 * row[name] for row in found[by, steps, side]] for side in ("surgery", "torch-pruning")]
        spread = [f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "" for values in numbers]
        return " / ".join(f"{statistics.mean(values):.1f}{more}" for values, more in zip(numbers, spread))

    lines = ["| by | steps | MACs | as cut | repaired | one epoch |", "|---|---|---|---|---|---|"]
    for by, steps in dict.fromkeys((row["by"], row["steps"]) for row in result["rows"]):
        cells = [cell(by, steps, name) for name in ("macs", "cut", "repaired", "tuned")]
        lines.append(f"| {by} | {steps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*")
    parser.add_argument("--models", type=Path, default=Path.home() / ".cache/layer-surgery/importance")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on with the stored rows of a run that was ended")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    name = "importance-digits" if args.digits else "importance-cpu"
    show, what = (table_of_steps, DIGITS) if args.digits else (table, FASHION)
    if args.table:
        print(show(json.loads((args.out / f"{name}.json").read_text())))
        return
    if args.quick:
        what, name = replace(what, samples=4 * what.batch, shares=(0.5,)), f"{name}-quick"
    seeds = args.seeds or ([0, 1, 2] if args.digits else [0, 1])
    data = load(what.data)
    result = {"model": MODEL, "torch": torch.__version__, "torch_pruning": tp.__version__, "full": {}, "rows": []}
    stored = args.out / f"{name}.json"
    if args.resume and stored.exists():
        result |= json.loads(stored.read_text()) | {"unfinished": True}
    done = {tuple(row[key] for key in ("seed", "share", "by", "steps", "side")) for row in result["rows"]}
    print(
        f"{'seed':4} {'by':11}{'side':14}{'steps':>5}{'MACs':>7}{'params':>8}{'cut':>8}{'repair':>8}{'tuned':>8} slower"
    )
    for seed in seeds:
        full = trained(seed, data, what, args.models)
        result["full"][str(seed)] = accuracy(full, data)
        for share, by, steps in itertools.product(what.shares, what.criteria, what.steps):
            cell = (seed, share, by, steps)
            if (*cell, "torch-pruning" if by in THEIRS else "surgery") in done:
                continue
            given = (full, by, share, steps, data, what, seed)
            models = {"surgery": ours(*given)}
            if by in THEIRS:
                models["torch-pruning"] = theirs(*given)
            for side, model in models.items():
                row = dict(zip(("seed", "share", "by", "steps"), cell)) | {"side": side}
                row |= judged(model, full, data, what, seed)
                if len(models) == 2 and side == "torch-pruning":
                    images = data.normalise(data.test_x[:100])
                    row["slower"] = slower(models["surgery"], model, images, args.repetitions)
                result["rows"].append(row)
            report.write(result, args.out, name, done=False)
            for row in result["rows"][-len(models) :]:
                parts = f"{steps:5}{row['macs']:7.3f}{row['parameters']:8.3f}"
                parts += "".join(f"{row[key]:8.4f}" for key in ("cut", "repaired", "tuned"))
                print(f"{seed:4} {by:11}{row['side']:14}{parts}  {row.get('slower', '')}", flush=True)
    result.pop("unfinished", None)
    report.write(result, args.out, name)


if __name__ == "__main__":
    main()
