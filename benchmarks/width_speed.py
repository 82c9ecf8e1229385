"""Time operations on the widths of whole models: `narrow` beside torch-pruning, and `widen` and `align`.

    OMP_NUM_THREADS=1 python benchmarks/width_speed.py    # writes benchmarks/results/width-cpu.json
    python benchmarks/width_speed.py --table               # the stored result as a page shows it
    python benchmarks/width_speed.py --before FOLDER       # `align` of another checkout and this one's in turn, printed

`narrow` and torch-pruning (its graph of dependencies, its pruner, and one step) make the same model half as wide, in
turns in one process, so that what else the machine does hits both alike. torch-pruning cuts the model in place, so
each of its turns gets a copy, which is made before its time begins; it is told to keep the first channels, and how
many heads an attention has. All models are torchvision's or timm's, with random weights. Of torchvision's ViT-B/16
torch-pruning leaves 2.6 times as many parameters, so timm's stands here; torchvision's Swin and ShuffleNet it
cannot cut, nor timm's Swin all of it, so EfficientNetV2-S and MNASNet stand here. Each narrow model has to run, and
a row says how many parameters both have left.

Other models are narrowed alone: nothing comparable cuts them, and the goal is a second. `widen` makes a model twice as
wide, and `align` finds the order of two models of other random weights; nothing comparable is installed beside, so
their rows are seconds. Times are those of the process's processors (all threads); the stored rows hold those of the
clock on the wall, too.
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
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch_pruning as tp
from judges import PROJECTIONS, KeepFirst
from report import write
from torch import nn

import surgery
from surgery.libraries import example_input, make_model

OUT = Path(__file__).parent / "results"
NARROWED = (
    "torchvision:resnet50", "timm:vit_base_patch16_224", "torchvision:convnext_tiny", "torchvision:densenet121",
    "torchvision:mobilenet_v3_large", "torchvision:regnet_y_800mf", "torchvision:efficientnet_b0",
    "torchvision:efficientnet_v2_s", "torchvision:mobilenet_v2", "torchvision:vgg16_bn", "torchvision:resnext50_32x4d",
    "torchvision:mnasnet1_0",
)  # fmt: skip
ALONE = (
    "timm:gcvit_xxtiny", "timm:levit_128s", "timm:focalnet_tiny_srf", "timm:halonet_h1", "timm:gemma4_vit_167m",
)  # fmt: skip
CHANGED = ("timm:resnet50",)


def heads_of(model: nn.Module) -> dict[nn.Module, int]:
    """Return the projections of attentions, as torch-pruning wants to be told of them."""
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
    *_, classifier = (module for module in model.modules() if isinstance(module, nn.Linear))
    pruner = tp.pruner.BasePruner(
        model, image, importance=KeepFirst(), global_pruning=False, pruning_ratio=0.5, ignored_layers=[classifier],
        num_heads=heads_of(model), prune_num_heads=False, prune_head_dims=True,
    )  # fmt: skip
    pruner.step()
    return model


def repair(model: nn.Module) -> None:
    """Set what timm's attentions say of their width, which is the caller's part with torch-pruning."""
    for module in model.modules():
        if isinstance(qkv := getattr(module, "qkv", None), nn.Linear):
            module.attn_dim = qkv.out_features // 3
            module.head_dim = module.attn_dim // module.num_heads


def halved(model: nn.Module, image: torch.Tensor) -> nn.Module:
    """Surgery's half."""
    return surgery.narrow(model, 0.5, image)[0]


class Times(NamedTuple):
    """The seconds of a call: of the process's processors, and on the wall."""

    cpu: float
    wall: float


def timed(call: Callable, *given: object) -> tuple[Times, Any]:
    """Return the seconds of a call, and the result.

    Garbage of earlier turns is collected before: otherwise a full collection falls on one side or the other by chance,
    and takes as long as the smallest of these calls.
    """
    gc.collect()
    begin, begin_wall = time.process_time(), time.perf_counter()
    result = call(*given)
    return Times(time.process_time() - begin, time.perf_counter() - begin_wall), result


def beside(name: str, repetitions: int) -> dict:
    """Return a row of `narrow` and torch-pruning."""
    torch.manual_seed(0)
    model = make_model(name).eval()
    image = example_input(model, batch=1)
    sides: dict[str, Callable] = {
        "narrow": lambda: timed(halved, model, image),
        "torch_pruning": lambda: timed(prune, copy.deepcopy(model), image),
    }
    times: dict[str, list[Times]] = {side: [] for side in sides}
    sizes = {}
    for turn in range(repetitions + 1):
        for side in list(sides) if turn % 2 else list(sides)[::-1]:
            seconds, small = sides[side]()
            if turn:  # the first turn warms up
                times[side].append(seconds)
                continue
            sizes[side] = sum(p.numel() for p in small.parameters())
            if side == "torch_pruning":
                repair(small)
            with torch.no_grad():
                small.eval()(image)
    return {
        "operation": "narrow", "model": name, **spread(times["narrow"], times["torch_pruning"]), "parameters": sizes,
    }  # fmt: skip


def alone(operation: str, name: str, repetitions: int) -> dict:
    """Return a row of an operation beside which there is nothing to compare it with; the first turn warms up."""
    torch.manual_seed(0)
    models = [make_model(name).eval() for _ in range(2)]
    image = example_input(models[0], batch=1)
    call = {
        "narrow": lambda: halved(models[0], image),
        "widen": lambda: surgery.widening.widen(models[0], rate=2, example=image),
        "align": lambda: surgery.symmetry.align(models, example=image),
    }[operation]
    return {"operation": operation, "model": name, **spread([timed(call)[0] for _ in range(repetitions + 1)][1:])}


def aligned_once(name: str) -> dict:
    """The seconds that `align` takes, and how well the models match then: the inner product of their parameters."""
    torch.manual_seed(0)
    models = [make_model(name).eval() for _ in range(2)]
    times, (one, other) = timed(lambda: surgery.symmetry.align(models, example=torch.zeros(1, 3, 224, 224)).models)
    match = sum((p.double() * q.double()).sum().item() for p, q in zip(one.parameters(), other.parameters()))
    return {"times": times, "match": match}


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
    times = {side: [Times(*one["times"]) for one in rows] for side, rows in found.items()}
    match = {f"match_{side}": rows[0]["match"] for side, rows in found.items()}
    return {"model": name, **spread(times["after"], times["before"]), "before": spread(times["before"]), **match}


def spread(ours: list[Times], theirs: Sequence[Times] = ()) -> dict:
    """Return the medians with their ranges, of our seconds and of how many times as long the others take."""
    every = {
        "seconds": [one.cpu for one in ours],
        "wall": [one.wall for one in ours],
        "ratio": [other.cpu / one.cpu for one, other in zip(ours, theirs)],
        "ratio_wall": [other.wall / one.wall for one, other in zip(ours, theirs)],
    }
    return {key: [f(v) for f in (statistics.median, min, max)] for key, v in every.items() if v}


def table() -> None:
    """Print what is stored, `narrow` where torch-pruning cuts the same model."""
    found = json.loads((OUT / "width-cpu.json").read_text())
    print("| operation | model | CPU seconds | torch-pruning takes times as long |\n|---|---|---|---|")
    for row in (row for row in found["rows"] if "ratio" in row or row["operation"] != "narrow"):
        middle, low, high = row["seconds"]
        ratio = "{:.1f} ({:.1f} to {:.1f})".format(*row["ratio"]) if "ratio" in row else "-"
        print(f"| `{row['operation']}` | {row['model']} | {middle:.2f} ({low:.2f} to {high:.2f}) | {ratio} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=NARROWED, help="that are narrowed by both")
    parser.add_argument("--alone", nargs="*", default=ALONE, help="that are narrowed with nothing beside")
    parser.add_argument("--changed", nargs="*", default=CHANGED, help="that are widened and aligned")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of the stored result")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--before", metavar="FOLDER", help="a checkout of an earlier commit")
    parser.add_argument("--once", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(aligned_once(args.once)))
        return
    if args.before:
        for name in args.changed:
            print(json.dumps(before_and_after(args.before, name, args.repetitions)), flush=True)
        return
    if args.table:
        table()
        return
    rows = []
    about = {"torch": torch.__version__, "torch_pruning": version("torch-pruning"), "machine": platform.machine()}
    about["threads"] = torch.get_num_threads()
    calls = [(beside, (name,)) for name in args.models]
    calls += [(alone, ("narrow", name)) for name in args.alone]
    calls += [(alone, (operation, name)) for name in args.changed for operation in ("widen", "align")]
    for row_of, about_it in calls:
        rows.append(row_of(*about_it, args.repetitions))
        print(json.dumps(rows[-1]), flush=True)
        write({**about, "repetitions": args.repetitions, "rows": rows}, args.out, "width-cpu", done=False)
    write({**about, "repetitions": args.repetitions, "rows": rows}, args.out, "width-cpu")


if __name__ == "__main__":
    main()
