"""Time the rounds of FedMR's own setting with every backend and precision, beside a plain loop on the same device.

    python benchmarks/rounds.py               # prints the table, writes benchmarks/results/rounds-<device>.json
    python benchmarks/rounds.py --quick       # few and small ones, to see that it runs

CIFAR-10 (random pixels of its shape where the files are missing), 100 clients of 500 images, 10 a round, five local
epochs of batches of 50, SGD with momentum, ResNet-20: 500 steps a round. A round is all of it: sampling, batches, local
training, recombination; evaluation on the test set is timed apart. `plain` is what papers' code does: a deep copy of
the model for each client, a DataLoader, torch.optim.SGD, a mean of states (sides/plain.py). All sides take turns in
this process, in an order that rotates; the first turn warms up. Reported is the ratio plain / side, median and range;
the JSON is written anew after each turn.
"""

import argparse
import copy
import os
import statistics
from pathlib import Path
from types import SimpleNamespace

import torch
from peers import load
from report import seconds, write
from sides import plain
from torch.utils.data import TensorDataset

import zoo
from fl.algorithms import fedmr
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD, Precision
from fl.federation import Federation, LocalTraining
from fl.partition import Split
from fl.runs.evaluate import evaluate_global
from surgery.errors import first_line

PRECISIONS = {"cpu": ("float32",), "cuda": ("float32", "tf32", "bf16")}
BACKENDS = {"cpu": ("loop", "workers", "vmap"), "cuda": ("loop", "vmap", "graphs")}
ROUNDS = 500  # of a run, as FedMR's released code has it


def federation(model: str, clients: int, each: int, device: str, root: Path | None) -> tuple[Federation, str]:
    """Clients with `each` images, ten of them (or all) a round."""
    x, y, source = load("cifar10", root)
    data = Dataset("cifar10", x, y, x[:10_000], y[:10_000], classes=10).to(device)
    none = torch.empty(0, dtype=torch.int64)
    parts = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[: clients * each].split(each)
    net = zoo.create(model, torch.Generator().manual_seed(0)).to(device)
    splits = [Split(part, none, none) for part in parts]
    local = LocalTraining(epochs=5, batch_size=50, optimizer=SGD(0.01, 0.9))
    return Federation(net, data, splits, min(10, clients), local), source


def plain_round(fed: Federation):
    """A round of the plain loop, as a function of its number."""
    job = SimpleNamespace(
        batch=fed.local.batch_size, check=False, lr=fed.local.optimizer.lr, momentum=fed.local.optimizer.momentum,
        epochs=fed.local.epochs, device=fed.data.x.device,
    )  # fmt: skip
    x, y = fed.data.normalise(fed.data.x.cpu()), fed.data.y.cpu()
    sets = [TensorDataset(x[split.train], y[split.train]) for split in fed.clients]
    server = copy.deepcopy(fed.model)

    def one(number: int) -> None:
        clients = fed.sample(Rng(0, number))
        states = [plain.train(copy.deepcopy(server), sets[client], job) for client in clients]
        server.load_state_dict(plain.mean(states, [len(sets[client]) for client in clients]))

    return one


def our_round(fed: Federation):
    """A round of FedMR, as a function of its number."""
    algorithm = fedmr(fed)
    kept = {"server": algorithm.init()}

    def one(number: int) -> None:
        rng = Rng(0, number)
        kept["server"], _ = algorithm.round(kept["server"], fed.sample(rng), rng)

    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--data-root", type=Path, default=os.environ.get("FL_DATA_ROOT"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    kind = torch.device(args.device).type
    if args.quick:
        args.model, args.turns = "lenet", 2
    fed, source = federation(args.model, *((4, 100) if args.quick else (100, 500)), args.device, args.data_root)
    sides = {"plain": plain_round(fed)}
    for backend in BACKENDS[kind]:
        for name in PRECISIONS[kind]:
            sides[f"{backend} {name}"] = our_round(fed.with_local(backend=backend, precision=Precision(name)))
    state = fed.initial()
    sides["evaluation"] = lambda _: evaluate_global(fed, lambda x: fed.predict(state, x))
    device = torch.cuda.get_device_name() if kind == "cuda" else f"{torch.get_num_threads()} CPU threads"
    about = {"device": device, "torch": torch.__version__, "model": args.model, "data": source}
    name = f"rounds-{kind}{'-quick' if args.quick else ''}"
    times: dict[str, list[float]] = {side: [] for side in sides}
    failed: dict[str, str] = {}
    for turn in range(args.turns + 1):
        order = list(times)
        for side in order[turn % len(order) :] + order[: turn % len(order)]:
            try:
                took = seconds(lambda: sides[side](turn + 1), args.device)  # noqa: B023 (called at once)
            except Exception as error:  # the others go on: their times are worth having
                failed[side] = first_line(error)
                print(f"{side} is left out: {failed[side]}", flush=True)
                del times[side]
                continue
            if turn:  # the first warms up
                times[side].append(took)
        known = {side: [round(t, 5) for t in values] for side, values in times.items()}
        write({**about, "seconds": known, "failed": failed}, args.out, name, done=turn == args.turns)
    print(f"{device}, torch {torch.__version__}; FedMR, {args.model}, {source}, {len(fed.clients)} clients")
    print(f"{'':18}{'seconds a round':>28}{'plain / side':>26}{f'{ROUNDS} rounds':>14}")
    for side, values in times.items():
        ratios = [a / b for a, b in zip(times.get("plain", []), values)]
        took = f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
        whole = f"{ROUNDS * statistics.median(values) / 60:.1f} min"
        print(f"{side:18}{took:>28}" + (f"{ratio:>26}{whole:>14}" if side != "evaluation" else ""))


if __name__ == "__main__":
    main()
