"""How a round gets faster with more processes: one with one thread against two with one thread each, under torchrun.

    python benchmarks/scaling.py              # prints the tables, writes benchmarks/results/scaling-cpu.json
    python benchmarks/scaling.py --quick      # few and small rounds, to see that it runs
    python benchmarks/scaling.py --idle       # the idle share of ranks alone; writes benchmarks/results/ranks-idle.json

The setting is bound by computation: FedMR, ResNet-20, random images of CIFAR-10's shape, 8 clients a round of equal
size. Sides take turns, and each turn is a command of its own: `one` process, `two` under torchrun, and `workers`, one
process with two threads. Reported are the ratios of the time of a round (without evaluation; the first round of a turn
warms up) to that of `one`, median and range.

Below it stands what the measured costs say of more processes: how long a round takes on N of them is

    compute x (largest share of the clients) + server + network

Each rank sends its models to all others, and repeats the server's work. That is arithmetic, not a measurement, and the
rate of a GPU in it is an assumption (--gpu-rate).

`--idle` computes, for cohorts of unequal clients, which share of their time ranks wait for the one that ends last:
dealt in turn, as without the numbers of samples, and by the steps of each client, as `fl.distributed.deal` does.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from report import write

import fl
from fl.base.rng import Rng
from fl.data import Dataset
from fl.distributed import deal
from fl.engine.work import flops
from fl.models import create
from fl.settings.model import ModelSettings
from surgery import average, broadcast, permutations, segments, shuffle
from surgery.decomposition import layers

ROOT = Path(__file__).parent.parent
SIDES = {"one": (1, 1, "loop"), "two": (2, 1, "loop"), "workers": (1, 2, "workers")}
"""Processes, threads of each, and the backend."""

SETTINGS = {
    "CNN, K=10": ("cnn", 10, 500, 5),
    "ResNet-20, K=10": ("resnet20", 10, 500, 5),
    "ResNet-20, K=100": ("resnet20", 100, 500, 5),
    "VGG-16, K=10": ("vgg16", 10, 500, 5),
    "ResNet-18, K=512": ("resnet18", 512, 500, 5),
}
"""Model, participants of a round, samples of a client, local epochs."""

PLACES = {
    "8 GPUs, one machine, 25 GB/s": (8, 25e9, "gpu"),
    "64 machines, 10 Gbit/s": (64, 10e9 / 8, "cpu"),
    "64 machines, 100 Gbit/s": (64, 100e9 / 8, "cpu"),
    "64 GPUs, 100 Gbit/s": (64, 100e9 / 8, "gpu"),
}
"""Ranks, bytes a second that each of them sends, and what each computes with."""

SHAPE = Dataset("shape", *(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)) * 2, 10)

_WORDS = 5e-3  # seconds of a round for its words


def made(model: str) -> torch.nn.Module:
    """Return the model for images of CIFAR-10."""
    spec = ModelSettings(model).spec(num_classes=10, in_channels=3, image_size=32, text=False)
    return create(torch.Generator().manual_seed(0), spec)


def turn(side: str, samples: int, rounds: int, model: str) -> list[float]:
    """Seconds of each round but the first of one command."""
    ranks, threads, backend = SIDES[side]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        flags = f"""--dataset synthetic_images:load --model {model} --backend {backend} --rounds {rounds}
            --samples {8 * samples} --clients 8 --participants 8 --partition iid --local-epochs 1 --batch-size 50
            --eval-every {rounds + 1} --checkpoint-every {rounds + 1} --device cpu
            --out {folder} --name run""".split()
        paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent / "sides"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": paths}
        command = [sys.executable, *run, "-m", "fl.run", *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        rows = list(csv.DictReader(Path(folder, "run", "metrics.csv").read_text().splitlines()))
    return [float(row["seconds"]) for row in rows[1:]]


def server_seconds(model: str, clients: int = 4) -> float:
    """Return FedMR's server time for each byte of a cohort's models, with one thread: the mean, the shuffle, and the
    look whether all numbers are finite.
    """
    net = made(model)
    stack = {n: t.clone() for n, t in broadcast(net.state_dict(), clients).items() if t.is_floating_point()}
    pieces = segments(layers(net))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        average(stack)
        orders = permutations(len(pieces), clients, generator=torch.Generator().manual_seed(0))
        shuffle(stack, segments=pieces, permutations=orders)
        all(tensor.flatten(1).sum(1).isfinite().all() for tensor in stack.values())
        times.append(time.perf_counter() - began)
    return min(times) / sum(tensor.nbytes for tensor in stack.values())


def predicted(setting: str, place: str, rates: dict[str, float], server: float) -> dict[str, float | str]:
    """Return the time of a round on one rank and on all of a place, and what limits it there."""
    model, k, samples, epochs = SETTINGS[setting]
    ranks, bandwidth, kind = PLACES[place]
    net = made(model)
    size = sum(tensor.nbytes for tensor in net.state_dict().values())
    compute = k * 3 * samples * epochs * flops(net, SHAPE) / rates[kind]
    most = max(map(len, deal([1] * k, ranks)))
    sent = most * size * (ranks - 1)
    alone = server * k * size / (rates["gpu"] / rates["cpu"] if kind == "gpu" else 1)
    parts = {
        "few clients": compute * (most / k - 1 / ranks),
        "server": alone,
        "network": sent / bandwidth + _WORDS,
    }
    one, many = compute + alone, compute / ranks + sum(parts.values())
    return {"one": one, "many": many, "speedup": one / many, "limit": max(parts, key=parts.get)}


def idle_shares(ranks: int, alpha: float, participants: int = 20, rounds: int = 200) -> dict[str, float]:
    """Mean share of a round in which ranks are idle: 50,000 samples of 10 classes, 100 clients, batches of 50."""
    config = fl.Config.of(partition="dirichlet", alpha=alpha, clients=100, participants=participants)
    x, y = torch.zeros(50_000, 1, dtype=torch.uint8), torch.arange(50_000) % 10
    parts, _ = config.data.deal(Dataset("labels", x, y, x[:10], y[:10], 10), 100, Rng(0).numpy("partition"))
    steps = [max(1, size // 50) for size in parts.sizes.tolist()]
    idle: dict[str, list[float]] = {"in turn": [], "by steps": []}
    for number in range(rounds):
        chosen = torch.randperm(100, generator=Rng(0, number).torch("sample"))[:participants]
        work = [steps[client] for client in chosen.tolist()]
        turns = [list(range(rank, participants, ranks)) for rank in range(ranks)]
        for name, dealt in (("in turn", turns), ("by steps", deal(work, ranks))):
            loads = [sum(work[row] for row in rows) for rows in dealt]
            idle[name].append(1 - sum(loads) / ranks / max(loads))
    return {name: statistics.mean(shares) for name, shares in idle.items()}


def print_idle(out: Path) -> None:
    """Print and write the idle shares."""
    rows = [{"ranks": n, "alpha": alpha, **idle_shares(n, alpha)} for alpha in (0.1, 0.5, 10.0) for n in (2, 4, 8)]
    write({"rows": rows}, out, "ranks-idle")
    print("idle share of ranks: 20 of 100 clients a round, 200 rounds\n  alpha  ranks   in turn  by steps")
    for row in rows:
        print(f"{row['alpha']:7}{row['ranks']:7}{row['in turn']:10.1%}{row['by steps']:10.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--samples", type=int, default=500, help="of a client")
    parser.add_argument("--rounds", type=int, default=3, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--gpu-rate", type=float, default=5e12, help="assumed: floating-point operations a second")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--idle", action="store_true", help="the idle share of ranks, and nothing else")
    args = parser.parse_args()
    if args.idle:
        return print_idle(args.out)
    if args.quick:
        args.model, args.samples, args.rounds, args.turns = "lenet", 50, 2, 1
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(args.turns):
        order = list(SIDES)
        for side in order[number % 3 :] + order[: number % 3]:
            times[side].append(statistics.median(turn(side, args.samples, args.rounds, args.model)))
    net = made(args.model)
    work = 8 * 3 * -(-args.samples // 50) * 50 * flops(net, SHAPE)
    rates = {"cpu": work / statistics.median(times["one"]), "gpu": args.gpu_rate}
    server = server_seconds("resnet20")
    table = {setting: {place: predicted(setting, place, rates, server) for place in PLACES} for setting in SETTINGS}
    about = {"torch": torch.__version__, "cores": os.cpu_count(), "model": args.model, "samples": args.samples}
    costs = {"rates": rates, "server seconds a byte": server}
    result = {**about, "seconds": times, **costs, "predicted": table}
    write(result, args.out, f"scaling-cpu{'-quick' if args.quick else ''}")
    print(f"{args.model}, 8 clients of {args.samples} samples; {os.cpu_count()} cores, torch {torch.__version__}")
    for side, values in times.items():
        ratios = [a / b for a, b in zip(times["one"], values)]
        print(
            f"{side:10}{statistics.median(values):9.3f} s a round   one / {side} "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"\na thread computes {rates['cpu'] / 1e9:.1f} GFLOP/s")
    print(f"computed from these, with {args.gpu_rate / 1e12:g} TFLOP/s assumed for a GPU: speedup, and what limits it")
    for setting, places in table.items():
        print(setting)
        for place, said in places.items():
            times = f"{said['one']:12.3f} s -> {said['many']:9.3f} s"
            print(f"    {place:32}{times} {said['speedup']:7.1f}x   {said['limit']}")


if __name__ == "__main__":
    main()
