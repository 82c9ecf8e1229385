"""The tables of pruning papers on CIFAR-10 with `surgery.pruning.prune`, their published rows beside ours.

    python benchmarks/pruning_tables.py             # as the papers train, on a GPU: 200 epochs, and 100 for each row
    python benchmarks/pruning_tables.py --reduced   # minutes on a CPU; says nothing of the published accuracies
    python benchmarks/pruning_tables.py --table     # the stored results as Markdown; --reduced for those

- ResNet-56 at a 2.11th and a 2.55th of its multiply-accumulates: Fang et al., "DepGraph" (CVPR 2023), table 1, with the
  rows of others that it quotes. SGD, 200 epochs at 0.1 (a tenth of it after 120, 150 and 180), then 100 epochs at 0.01
  (after 60 and 80), batches of 128, weight decay 5e-4, crops and flips.
- ResNet-20 from 90.97 to 59.28 million FLOPs (as ModelOpt counts): FastNAS in the example of NVIDIA's ModelOpt, as cut
  and after 120 epochs. Here the target is the same share of the multiply-accumulates, and training is as above, with
  120 epochs in the end.

The models are the zoo's, with shortcuts that pad zero channels (He et al., section 4.2). `--reduced` takes a quarter of
the pixels (2 by 2 are averaged), the first 2,048 training and 2,000 test images, 8 epochs, 2 after the cut, at 0.05 and
0.01, and no augmentation.
"""

import argparse
import copy
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import report
import torch
import torch.nn.functional as F
from importance import accuracy, loss
from torch import Tensor, nn

import zoo
from fl.data import Dataset, load
from surgery.inspect.report import count_macs
from surgery.pruning import Target, prune
from surgery.symmetry import repair

STEPS = 4  # in which a model is cut, with scores asked anew before each


@dataclass(frozen=True)
class Setting:
    """How models are trained."""

    epochs: int
    lr: float
    tuned: dict[str, int]  # epochs after the cut
    samples: int
    tests: int
    pool: int
    augmented: bool


WHOLE = Setting(200, 0.1, {"resnet56": 100, "resnet20": 120}, 50_000, 10_000, 1, True)
REDUCED = Setting(8, 0.05, {"resnet56": 2, "resnet20": 2}, 2_048, 2_000, 2, False)
CELLS = [
    *(("resnet56", f"{speed}x", 1 / speed, by) for speed in (2.11, 2.55) for by in ("l1", "bn_scale", "taylor")),
    *(("resnet20", "59.28 of 90.97 M FLOPs", 59.28 / 90.97, by) for by in ("l1", "taylor")),
]
PUBLISHED = [  # model, target, method, base, as cut, tuned: in percent
    ("resnet56", "2.11x", "L1", 93.53, None, 92.93),
    ("resnet56", "2.11x", "BN scale", 93.53, None, 93.29),
    ("resnet56", "2.11x", "GReg", 93.53, None, 93.55),
    ("resnet56", "2.11x", "DepGraph, no sparse learning", 93.53, None, 93.46),
    ("resnet56", "2.11x", "DepGraph", 93.53, None, 93.77),
    ("resnet56", "2.55x", "DepGraph, no sparse learning", 93.53, None, 93.36),
    ("resnet56", "2.55x", "DepGraph", 93.53, None, 93.64),
    ("resnet20", "59.28 of 90.97 M FLOPs", "FastNAS", None, 60.37, 90.28),
]


def augment(x: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to 4 pixels, and mirror half of them."""
    n, _, height, width = x.shape
    down, right = (torch.randint(0, 9, (n, 1, 1), generator=generator) for _ in range(2))
    rows, columns = torch.arange(height)[None, :, None] + down, torch.arange(width)[None, None] + right
    mirrored = torch.rand(n, 1, 1, generator=generator) < 0.5
    columns = torch.where(mirrored, columns.flip(2), columns)
    images = torch.arange(n)[:, None, None]
    return F.pad(x, (4, 4, 4, 4)).permute(0, 2, 3, 1)[images, rows, columns].permute(0, 3, 1, 2)


def train(model: nn.Module, data: Dataset, what: Setting, epochs: int, lr: float, falls: tuple[float, ...]) -> None:
    """SGD whose learning rate falls to a tenth after each of these shares of the epochs."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [round(epochs * share) for share in falls])
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(what.samples, generator=generator).split(128):
            x = augment(data.x[rows], generator) if what.augmented else data.x[rows]
            optimizer.zero_grad()
            loss(model, (data.normalise(x), data.y[rows])).backward()
            optimizer.step()
        schedule.step()
    model.eval()


def row(full: nn.Module, cell: tuple[str, str, float, str], data: Dataset, what: Setting) -> dict:
    """Return the model cut as the cell says, before and after its training."""
    name, target, share, by = cell
    batches = [(data.normalise(data.x[i : i + 128]), data.y[i : i + 128]) for i in range(0, 1280, 128)]
    begin = time.process_time()
    given = {"importance": by, "batches": batches, "loss": loss, "steps": STEPS}
    small, _, sizes = prune(full, example=batches[0][0][:1], target=Target(macs=share), **given)
    found = {"cut_cpu_s": round(time.process_time() - begin, 1), "cut": accuracy(small, data)}
    found["repaired"] = accuracy(repair(small, batches=[x for x, _ in batches]), data)
    tuned = copy.deepcopy(small)
    train(tuned, data, what, what.tuned[name], 0.01, (0.6, 0.8))
    size = {"macs": sizes[-1].macs / sizes[0].macs, "parameters": sizes[-1].parameters}
    return {"model": name, "target": target, "by": by, **size, **found, "tuned": accuracy(tuned, data)}


def table(result: dict) -> str:
    """Return the rows as Markdown, in percent; each published row says so."""
    lines = ["| model | target | method | base | as cut | repaired | tuned |", "|---|---|---|---|---|---|---|"]
    for name, target in dict.fromkeys(cell[:2] for cell in CELLS):
        for *key, method, base, cut, tuned in PUBLISHED:
            if key == [name, target]:
                numbers = [f"{value or '-'}" for value in (base, cut, None, tuned)]
                lines.append(f"| {name} | {target} | {method} (published) | {' | '.join(numbers)} |")
        for one in result["rows"]:
            if (one["model"], one["target"]) == (name, target):
                values = (result["base"][name], one["cut"], one["repaired"], one["tuned"])
                numbers = [f"{100 * value:.1f}" for value in values]
                lines.append(f"| {name} | {target} | {one['by']}{result['note']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    what, stored = (REDUCED, "pruning-tables-reduced") if args.reduced else (WHOLE, "pruning-tables")
    if args.table:
        print(table(json.loads((args.out / f"{stored}.json").read_text())))
        return
    data = load("cifar10")
    parts = {key: getattr(data, key)[: what.samples].to(args.device) for key in ("x", "y")}
    parts |= {key: getattr(data, key)[: what.tests].to(args.device) for key in ("test_x", "test_y")}
    if what.pool > 1:
        parts |= {key: F.avg_pool2d(parts[key].float(), what.pool).to(data.x.dtype) for key in ("x", "test_x")}
    data = replace(data, **parts)
    note = ", reduced" if args.reduced else ""
    result: dict = {"torch": torch.__version__, "setting": vars(what), "note": note, "base": {}, "rows": []}
    for name in dict.fromkeys(cell[0] for cell in CELLS):
        generator = torch.Generator().manual_seed(0)
        full = zoo.create(name, generator=generator, num_classes=10, image_size=32 // what.pool).to(args.device)
        train(full, data, what, what.epochs, what.lr, (0.6, 0.75, 0.9))
        result["base"][name] = accuracy(full, data)
        macs = count_macs(full, data.normalise(data.x[:1]))
        print(f"{name}: {macs / 1e6:.2f} M MACs, {result['base'][name]:.2%}", flush=True)
        for cell in (cell for cell in CELLS if cell[0] == name):
            result["rows"].append(row(full, cell, data, what))
            print(json.dumps(result["rows"][-1]), flush=True)
            report.write(result, args.out, stored, done=False)
    report.write(result, args.out, stored)


if __name__ == "__main__":
    main()
