"""Targets of latency: what `surgery.prune(target=Target(latency=...))` predicts, and what is measured afterwards.

    python benchmarks/latency.py                          # writes benchmarks/results/latency-cpu.json
    python benchmarks/latency.py resnet18 --pixels 64     # one model, smaller images
    python benchmarks/latency.py --table                  # the stored results as Markdown

The models are untrained ones of torchvision and timm, cut by the sums of |w|, for one image. `found` is the time, as a
share of the full model's, that the search measured; `again` is the same measured anew once it is over, `predicted` what
the table of single widths says, and `MACs` the share of multiply-accumulates. `load` is how many processes wanted to
run on the machine (os.getloadavg): above the number of its cores, times say little.
"""

import argparse
import json
import os
import time
from pathlib import Path

import report
import timm
import torch

from surgery import SurgeryError, Target, prune
from surgery.width.latency import timed

MODELS = ("resnet18", "resnet50", "vit_tiny_patch16_224")


def row(name: str, share: float, pixels: int) -> dict:
    """A model cut to a share of its time."""
    torch.manual_seed(0)
    size = {"img_size": pixels} if name.startswith("vit") else {}
    model, x = timm.create_model(name, **size).eval(), torch.randn(1, 3, pixels, pixels)
    found: dict = {"model": name, "pixels": pixels, "target": share, "threads": torch.get_num_threads()}
    begin = time.process_time()
    try:
        small, _, (before, after) = prune(model, example=x, target=Target(latency=share), importance="l1")
    except SurgeryError as error:
        found["refused"] = str(error)
    else:
        found |= {
            "full_ms": round(1e3 * before.latency, 2),
            "predicted": round(after.predicted / before.latency, 3),
            "found": round(after.latency / before.latency, 3),
            "again": round(timed(small, model, x)[0], 3),
            "macs": round(after.macs / before.macs, 3),
        }
    return found | {"search_cpu_s": round(time.process_time() - begin, 1), "load": os.getloadavg()[0]}


def table(result: dict) -> str:
    """The rows as Markdown."""
    keys = ("model", "pixels", "target", "predicted", "found", "again", "macs", "full_ms", "search_cpu_s", "load")
    lines = [f"| {' | '.join(keys)} |", f"|{'---|' * len(keys)}"]
    return "\n".join(lines + [f"| {' | '.join(str(one.get(key, '-')) for key in keys)} |" for one in result["rows"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.75, 0.5])
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads((args.out / "latency-cpu.json").read_text())))
        return
    result: dict = {"torch": torch.__version__, "cores": os.cpu_count(), "rows": []}
    for name in args.models:
        for share in args.shares:
            result["rows"].append(row(name, share, args.pixels))
            print(json.dumps(result["rows"][-1]), flush=True)
            report.write(result, args.out, "latency-cpu", done=False)
    report.write(result, args.out, "latency-cpu")


if __name__ == "__main__":
    main()
