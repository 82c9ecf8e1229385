"""Time local training of one cohort: `loop` against `vmap`, for several models, cohorts and batch sizes.

    python benchmarks/engine.py                     # prints the table, writes benchmarks/results/engine-<device>.json
    python benchmarks/engine.py --quick             # a few rows, to see that it runs

Both backends run in this process on the same job, alternating, so that what else the machine does hits both alike.
Reported is the ratio loop / vmap (above 1: vmap is faster): the median over the repetitions and their range.
The rows are what `--backend auto` decides by: it takes the nearest one (copy the JSON to fl/engine/ to update it).
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

import surgery
import zoo
from fl.batches import Batches
from fl.data import Dataset
from fl.engine import BACKENDS, SGD, Job
from fl.engine.auto import work
from fl.objectives import cross_entropy

MODELS = {
    "cnn 8x8": ("cnn", {"in_channels": 1, "image_size": 8}),
    "cnn 28x28 width 1/4": ("cnn", {"in_channels": 1, "image_size": 28, "width": 0.25}),
    "cnn 28x28": ("cnn", {"in_channels": 1, "image_size": 28}),
    "resnet20 8x8": ("resnet20", {"in_channels": 1, "image_size": 8}),
    "resnet20 32x32": ("resnet20", {"in_channels": 3, "image_size": 32}),
}


def job(model: str, k: int, batch: int, steps: int, device: str) -> tuple[Job, surgery.Stack]:
    """K clients on random images of the model's size (what is timed does not depend on the pixels)."""
    name, arguments = MODELS[model]
    generator = torch.Generator().manual_seed(0)
    net = zoo.create(name, generator, **arguments).to(device)
    shape = (256, arguments["in_channels"], arguments["image_size"], arguments["image_size"])
    x = torch.randint(256, shape, generator=generator).byte().to(device)
    y = torch.randint(10, shape[:1], generator=generator).to(device)
    index = torch.randint(256, (k, steps, batch), generator=generator).to(device)
    batches = Batches(index, (steps,) * k)
    data = Dataset("random", x, y, x, y, classes=10)
    return Job(net, data, batches, SGD(), cross_entropy), surgery.broadcast(surgery.state(net), k)


def seconds(backend: str, job: Job, starts: surgery.Stack) -> float:
    """Wall-clock seconds of one call."""
    begin = time.perf_counter()
    BACKENDS[backend](job, starts, {})
    if job.data.x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(model: str, k: int, batch: int, repetitions: int, device: str) -> dict:
    """One row: alternate the backends, pair by pair."""
    once = seconds("loop", *job(model, k, batch, 1, device))
    steps = max(2, min(20, round(0.4 / once)))  # about the same time for every row
    current = job(model, k, batch, steps, device)
    for backend in BACKENDS:
        seconds(backend, *current)
    times = {backend: [] for backend in BACKENDS}
    for repetition in range(repetitions):
        order = list(BACKENDS) if repetition % 2 else list(BACKENDS)[::-1]
        for backend in order:
            times[backend].append(seconds(backend, *current))
    ratios = [a / b for a, b in zip(times["loop"], times["vmap"])]
    per_step = {f"{b}_ms": round(1e3 * statistics.median(t) / steps, 2) for b, t in times.items()}
    return {
        "model": model, "k": k, "batch": batch, "work": work(current[0]), **per_step,
        "ratio": round(statistics.median(ratios), 3), "low": round(min(ratios), 3), "high": round(max(ratios), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    grid = [(m, k, b) for m in MODELS for k in (2, 10, 20) for b in (10, 50)]
    if args.quick:
        grid, args.repetitions = [("cnn 8x8", 2, 10), ("cnn 8x8", 10, 10)], 3
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, torch {torch.__version__}; milliseconds for one step of all K clients")
    print(f"{'model':22}{'K':>4}{'batch':>7}{'loop':>10}{'vmap':>10}{'loop/vmap':>11}   range")
    rows = []
    for model, k, batch in grid:
        row = measure(model, k, batch, args.repetitions, args.device)
        rows.append(row)
        print(
            f"{model:22}{k:4}{batch:7}{row['loop_ms']:10.2f}{row['vmap_ms']:10.2f}{row['ratio']:11.2f}   "
            f"{row['low']:.2f} to {row['high']:.2f}",
            flush=True,
        )
    result = {
        "device": args.device, "name": name, "machine": platform.machine(), "torch": torch.__version__,
        "repetitions": args.repetitions, "rows": rows,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"engine-{args.device}{'-quick' if args.quick else ''}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
