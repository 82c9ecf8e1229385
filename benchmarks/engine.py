"""Time a round of FedAvg: `loop` against `vmap`, for several models, cohorts and batch sizes.

    python benchmarks/engine.py                     # prints the table, writes benchmarks/results/engine-<device>.json
    python benchmarks/engine.py --quick             # a few rows, to see that it runs

A round is all of it: sampling, batches, local training of K ragged clients (their numbers of steps spread from half
to one and a half times the mean) and the weighted mean. Both backends run it in this process, alternating, so that
what else the machine does hits both alike. Reported is the ratio loop / vmap (above 1: vmap is faster): the median
over the repetitions and their range. The rows are what `--backend auto` decides by: it takes the nearest one (copy
the JSON to fl/engine/ to update it).
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

import zoo
from fl.algorithms import fedavg
from fl.batches import make_batches
from fl.data import Dataset
from fl.engine import BACKENDS, Job
from fl.engine.auto import work
from fl.federation import Federation
from fl.objectives import cross_entropy
from fl.partition import Split
from fl.rng import Rng

MODELS = {
    "cnn 8x8": ("cnn", {"in_channels": 1, "image_size": 8}),
    "cnn 28x28 width 1/4": ("cnn", {"in_channels": 1, "image_size": 28, "width": 0.25}),
    "cnn 28x28": ("cnn", {"in_channels": 1, "image_size": 28}),
    "resnet20 8x8": ("resnet20", {"in_channels": 1, "image_size": 8}),
    "resnet20 32x32": ("resnet20", {"in_channels": 3, "image_size": 32}),
}


def federation(model: str, k: int, batch: int, steps: int, device: str) -> Federation:
    """K ragged clients on random images of the model's size (what is timed does not depend on the pixels)."""
    name, arguments = MODELS[model]
    generator = torch.Generator().manual_seed(0)
    net = zoo.create(name, generator, **arguments).to(device)
    shape = (256, arguments["in_channels"], arguments["image_size"], arguments["image_size"])
    x = torch.randint(256, shape, generator=generator).byte().to(device)
    y = torch.randint(10, shape[:1], generator=generator).to(device)
    spread = [max(1, round(steps * (0.5 + c / max(1, k - 1)))) for c in range(k)]
    empty = torch.empty(0, dtype=torch.int64)
    clients = [Split(torch.randint(256, (n * batch,), generator=generator), empty, empty) for n in spread]
    return Federation(net, Dataset("random", x, y, x, y, classes=10), clients, k, epochs=1, batch_size=batch)


def seconds(fed: Federation, backend: str, number: int) -> float:
    """Wall-clock seconds of one round."""
    algorithm = fedavg(replace(fed, backend=backend))
    server, rng = algorithm.init(), Rng(0, number)
    begin = time.perf_counter()
    algorithm.round(server, fed.sample(rng), rng)
    if fed.data.x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(model: str, k: int, batch: int, repetitions: int, device: str) -> dict:
    """One row: alternate the backends, pair by pair."""
    probe = federation(model, k, batch, 1, device)
    seconds(probe, "loop", 0)
    steps = max(2, min(20, round(0.4 / seconds(probe, "loop", 1))))  # about the same time for every row
    fed = federation(model, k, batch, steps, device)
    times = {backend: [] for backend in BACKENDS}
    for number in range(repetitions + 1):  # the first warms up
        order = list(BACKENDS) if number % 2 else list(BACKENDS)[::-1]
        for backend in order:
            times[backend].append(seconds(fed, backend, number))
    times = {backend: values[1:] for backend, values in times.items()}
    ratios = [a / b for a, b in zip(times["loop"], times["vmap"])]
    batches = make_batches([fed.clients[0].train], [0], 1, batch, Rng(0), device)
    return {
        "model": model, "k": k, "batch": batch, "steps": steps,
        "work": work(Job(fed.model, fed.data, batches, fed.sgd, cross_entropy)),
        **{f"{b}_ms": round(1e3 * statistics.median(t), 1) for b, t in times.items()},
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
    print(f"{name}, torch {torch.__version__}; milliseconds for one round of FedAvg with K ragged clients")
    print(f"{'model':22}{'K':>4}{'batch':>7}{'steps':>7}{'loop':>10}{'vmap':>10}{'loop/vmap':>11}   range")
    rows = []
    for model, k, batch in grid:
        row = measure(model, k, batch, args.repetitions, args.device)
        rows.append(row)
        print(
            f"{model:22}{k:4}{batch:7}{row['steps']:7}{row['loop_ms']:10.1f}{row['vmap_ms']:10.1f}{row['ratio']:11.2f}"
            f"   {row['low']:.2f} to {row['high']:.2f}",
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
