"""Time operations on the widths of whole models: `narrow` beside torch-pruning, and `widen` and `align`.

    OMP_NUM_THREADS=1 python benchmarks/width_speed.py    # writes benchmarks/results/width-cpu.json
    python benchmarks/width_speed.py --table               # the stored result as a page shows it
    python benchmarks/width_speed.py --before FOLDER       # `align` of another checkout and this one's in turn, printed

`narrow` and torch-pruning (its graph of dependencies, its pruner, and one step) make the same model half as wide, in
turns in one process, so that what else the machine does hits both alike. torch-pruning cuts the model in place, so
each of its turns gets a copy, which is made before its time begins; it is told to keep the first channels, and how
many heads an attention has. All models are torchvision's or timm's, with random weights.

`widen` makes a model twice as wide, and `align` finds the order of two models of other random weights; nothing
comparable is installed beside, so their rows are seconds. Times are those of the process's processors (all threads).
"""

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import timm
import torch
import torch_pruning as tp
from judges import PROJECTIONS, KeepFirst
from report import write
from torch import nn

import surgery

OUT = Path(__file__).parent / "results"
NARROWED = ("resnet50", "convnext_base", "vit_base_patch16_224", "swin_base_patch4_window7_224", "efficientnetv2_rw_s")
ALONE = ("resnet50",)


def heads_of(model: nn.Module) -> dict[nn.Module, int]:
    """The projections of attentions, as torch-pruning wants to be told of them."""
    return {
        getattr(module, part): module.num_heads
        for module in model.modules()
        if isinstance(getattr(module, "num_heads", None), int)
        for parts in PROJECTIONS
        if all(isinstance(getattr(module, part, None), nn.Linear) for part in parts)
        for part in parts
    }


def prune(model: nn.Module, image: torch.Tensor) -> nn.Module:
    """torch-pruning's half."""
    pruner = tp.pruner.BasePruner(
        model, image, importance=KeepFirst(), pruning_ratio=0.5, ignored_layers=[model.get_classifier()],
        num_heads=heads_of(model), prune_num_heads=False, prune_head_dims=True,
    )  # fmt: skip
    pruner.step()
    return model


def timed(call: Callable, *given: object) -> tuple[float, nn.Module]:
    """The seconds of the process, and the result.

    Garbage of earlier turns is collected before: otherwise a full collection falls on one side or the other by chance,
    and takes as long as the smallest of these calls.
    """
    gc.collect()
    begin = time.process_time()
    result = call(*given)
    return time.process_time() - begin, result


def beside(name: str, repetitions: int) -> dict:
    """A row of `narrow` and torch-pruning."""
    model = timm.create_model(name).eval()
    image = torch.zeros(1, 3, 224, 224)
    times: dict[str, list[float]] = {"narrow": [], "torch_pruning": []}
    sizes = {}
    for turn in range(repetitions + 1):
        sides = {
            "narrow": lambda: timed(lambda net: surgery.narrow(net, 0.5, image)[0], model),
            "torch_pruning": lambda: timed(prune, copy.deepcopy(model), image),
        }
        for side in list(sides) if turn % 2 else list(sides)[::-1]:
            seconds, small = sides[side]()
            sizes[side] = sum(p.numel() for p in small.parameters())
            if turn:  # the first turn warms up
                times[side].append(seconds)
    ratios = [theirs / ours for ours, theirs in zip(*times.values())]
    return {"operation": "narrow", "model": name, **spread(times["narrow"], ratios), "parameters": sizes}


def alone(operation: str, name: str, repetitions: int) -> dict:
    """A row of `widen` or `align`."""
    torch.manual_seed(0)
    image, models = torch.zeros(1, 3, 224, 224), [timm.create_model(name).eval() for _ in range(2)]

    def widen() -> nn.Module:
        return surgery.widening.widen(models[0], rate=2, example=image)[0]

    def align() -> nn.Module:
        return surgery.symmetry.align(models, example=image).models[1]

    call = {"widen": widen, "align": align}[operation]
    return {"operation": operation, "model": name, **spread([timed(call)[0] for _ in range(repetitions)], [])}


def aligned_once(name: str) -> dict:
    """The seconds that `align` takes, and how well the models match then: the inner product of their parameters."""
    torch.manual_seed(0)
    models = [timm.create_model(name).eval() for _ in range(2)]
    seconds, (one, other) = timed(lambda: surgery.symmetry.align(models, example=torch.zeros(1, 3, 224, 224)).models)
    match = sum((p.double() * q.double()).sum().item() for p, q in zip(one.parameters(), other.parameters()))
    return {"seconds": seconds, "match": match}


def before_and_after(folder: str, name: str, repetitions: int) -> dict:
    """`align` of the checkout in a folder and this one's, in turn, each in a process of its own."""
    found: dict[str, list[dict]] = {"before": [], "after": []}
    for turn in range(repetitions):
        for side in list(found) if turn % 2 else list(found)[::-1]:
            here = Path(__file__).parent.parent
            path = {"before": folder, "after": str(here)}[side]
            command = [sys.executable, __file__, "--once", name]
            result = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True
            )
            found[side].append(json.loads(result.stdout.splitlines()[-1]))
    seconds = {side: [one["seconds"] for one in rows] for side, rows in found.items()}
    ratios = [old / new for old, new in zip(*seconds.values())]
    match = {f"match_{side}": rows[0]["match"] for side, rows in found.items()}
    return {"model": name, **spread(seconds["after"], ratios), "before": spread(seconds["before"], []), **match}


def spread(seconds: list[float], ratios: list[float]) -> dict:
    """The medians with their ranges."""
    every = {"seconds": seconds, "ratio": ratios}
    return {key: [f(v) for f in (statistics.median, min, max)] for key, v in every.items() if v}


def table() -> None:
    """Print what is stored."""
    found = json.loads((OUT / "width-cpu.json").read_text())
    print("| operation | model | CPU seconds | torch-pruning takes times as long |\n|---|---|---|---|")
    for row in found["rows"]:
        middle, low, high = row["seconds"]
        ratio = "{:.1f} ({:.1f} to {:.1f})".format(*row["ratio"]) if "ratio" in row else "-"
        print(f"| `{row['operation']}` | {row['model']} | {middle:.2f} ({low:.2f} to {high:.2f}) | {ratio} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=NARROWED, help="that are narrowed by both")
    parser.add_argument("--alone", nargs="*", default=ALONE, help="that are widened and aligned")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of the stored result")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--before", metavar="FOLDER", help="a checkout of an earlier commit")
    parser.add_argument("--once", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(aligned_once(args.once)))
        return
    if args.before:
        for name in args.alone:
            print(json.dumps(before_and_after(args.before, name, args.repetitions)), flush=True)
        return
    if args.table:
        table()
        return
    rows = []
    about = {"torch": torch.__version__, "torch_pruning": version("torch-pruning"), "machine": platform.machine()}
    about["threads"] = torch.get_num_threads()
    calls = [(beside, (name,)) for name in args.models]
    calls += [(alone, (operation, name)) for name in args.alone for operation in ("widen", "align")]
    for row_of, about_it in calls:
        rows.append(row_of(*about_it, args.repetitions))
        print(json.dumps(rows[-1]), flush=True)
        write({**about, "repetitions": args.repetitions, "rows": rows}, args.out, "width-cpu", done=False)
    write({**about, "repetitions": args.repetitions, "rows": rows}, args.out, "width-cpu")


if __name__ == "__main__":
    main()
