"""Time a round of FedAvg with every backend of the engine, for several models, cohorts and batch sizes.

    python benchmarks/engine.py                     # prints the table, writes benchmarks/results/engine-<device>.json
    python benchmarks/engine.py --threads 1,2       # with one intra-op thread and with two (CPU)
    python benchmarks/engine.py --models vit,cnn --threads 1,2   # these rows anew; the file's others stay
    python benchmarks/engine.py --quick             # a few rows, to see that it runs

A round is all of it: sampling, batches, local training of K ragged clients (their numbers of steps spread from half
to one and a half times the mean) and the weighted mean. The backends run it in this process, taking turns, so that
what else the machine does hits all alike. Reported is the ratio loop / backend (above 1: faster than the loop): the
median over the repetitions and their range. The rule of `--backend auto` (`fl.engine.rank_backends`) was chosen by
these rows.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from report import write

import zoo
from fl.algorithms.fedavg import METHOD as fedavg
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import Job
from fl.engine.batches import make_batches
from fl.engine.objectives import cross_entropy
from fl.engine.work import work_of
from fl.federation import Federation, LocalTraining
from fl.partition import Split
from surgery.errors import first_line

MODELS = {
    "cnn 8x8": ("cnn", {"in_channels": 1, "image_size": 8}),
    "cnn 28x28 width 1/4": ("cnn", {"in_channels": 1, "image_size": 28, "width": 0.25}),
    "cnn 28x28": ("cnn", {"in_channels": 1, "image_size": 28}),
    "resnet20 8x8": ("resnet20", {"in_channels": 1, "image_size": 8}),
    "resnet20 32x32": ("resnet20", {"in_channels": 3, "image_size": 32}),
    "vit_tiny 8x8": ("vit_tiny", {"in_channels": 1, "image_size": 8, "width": 0.25}),
    "vit_tiny 32x32": ("vit_tiny", {"in_channels": 3, "image_size": 32, "width": 0.5, "depth": 4}),
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
    return Federation(net, Dataset("random", x, y, x, y, classes=10), clients, k, LocalTraining(1, batch))


def seconds(fed: Federation, backend: str, number: int) -> float:
    """Wall-clock seconds of one round."""
    algorithm = fedavg(fed.with_local(backend=backend))
    server, rng = algorithm.init(), Rng(0, number)
    begin = time.perf_counter()
    algorithm.round(server, fed.sample(rng), rng)
    if fed.data.x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(model: str, k: int, batch: int, threads: int, repetitions: int, device: str) -> dict:
    """One row: the backends take turns."""
    torch.set_num_threads(threads)
    able = ["loop", "vmap", *(["graphs"] if device == "cuda" else ["workers"] if threads > 1 else [])]
    probe = federation(model, k, batch, 1, device)
    seconds(probe, "loop", 0)
    steps = max(2, min(20, round(0.4 / seconds(probe, "loop", 1))))  # about the same time for every row
    fed = federation(model, k, batch, steps, device)
    times: dict[str, list[float]] = {backend: [] for backend in able}
    refused: dict[str, str] = {}
    for number in range(repetitions + 1):  # the first warms up
        for backend in list(times) if number % 2 else list(times)[::-1]:
            try:
                times[backend].append(seconds(fed, backend, number))
            except Exception as error:
                if backend == "loop":
                    raise
                refused[backend] = first_line(error)
                del times[backend]
    times = {backend: values[1:] for backend, values in times.items()}
    ratios = {b: [one / other for one, other in zip(times["loop"], times[b])] for b in times if b != "loop"}
    batches = make_batches([fed.clients[0].train], [0], 1, batch, Rng(0), device)
    return {
        "model": model, "k": k, "batch": batch, "threads": threads, "steps": steps,
        "work": work_of(Job(fed.model, fed.data, batches, fed.local.optimizer, cross_entropy)),
        "ms": {b: round(1e3 * statistics.median(t), 1) for b, t in times.items()},
        "ratio": {b: round(statistics.median(r), 3) for b, r in ratios.items()},
        "range": {b: [round(min(r), 3), round(max(r), 3)] for b, r in ratios.items()},
        **({"refused": refused} if refused else {}),
    }  # fmt: skip


def kept_rows(path: Path, models: list[str], threads: list[int]) -> list[dict]:
    """Return the rows of a file to keep. Each row compares backends that took turns, so that rows of
    different days go together.
    """
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in known if row["model"] not in models or row["threads"] not in threads]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", default=str(torch.get_num_threads()))
    parser.add_argument("--models", default="", help="beginnings of their names, comma-separated [all]")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    threads, models = (
        list(map(int, args.threads.split(","))),
        [m for m in MODELS if m.startswith(tuple(args.models.split(",")))],
    )
    if not models:
        parser.error(f"--models {args.models}: there are {', '.join(MODELS)}")
    grid = [(m, k, b, t) for t in threads for m in models for k in (2, 10, 20) for b in (10, 50)]
    if args.quick:
        grid, args.repetitions = [(models[0], k, 10, threads[-1]) for k in (2, 10)], 3
    grid.sort(key=lambda case: (case[1] != 10, case[2] != 50))  # the usual cohort first, should the time run out
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    print(
        f"{name}, torch {torch.__version__}; one round of FedAvg with K ragged clients: milliseconds of the loop, and"
    )
    print("how many times faster the others are, median and range")
    print(f"{'model':21}{'K':>3}{'batch':>6}{'threads':>8}{'steps':>6}{'loop ms':>9}")
    file = f"engine-{args.device}{'-quick' if args.quick else ''}"
    rows = kept_rows(args.out / f"{file}.json", models, threads) if args.models else []
    result = {
        "device": args.device, "name": name, "torch": torch.__version__, "repetitions": args.repetitions, "rows": rows,
    }  # fmt: skip
    for case in grid:
        row = measure(*case, args.repetitions, args.device)
        rows.append(row)
        others = "".join(
            f"   {b} {row['ratio'][b]:.2f} ({row['range'][b][0]:.2f} to {row['range'][b][1]:.2f})" for b in row["ratio"]
        ) + "".join(f"   {b}: {reason}" for b, reason in row.get("refused", {}).items())
        print(
            f"{row['model']:21}{row['k']:3}{row['batch']:6}{row['threads']:8}{row['steps']:6}{row['ms']['loop']:9.1f}{others}",
            flush=True,
        )
        write(result, args.out, file, done=case == grid[-1])


if __name__ == "__main__":
    main()
