"""Time rounds with every backend and precision, beside a plain loop on the same device.

    python benchmarks/rounds.py                    # FedMR's setting; writes benchmarks/results/rounds-<device>.json
    python benchmarks/rounds.py --setting pfl      # pfl-research's; writes rounds-pfl-<device>.json
    python benchmarks/rounds.py --quick            # few and small ones, to see that it runs

FedMR: CIFAR-10 (random pixels of its shape where the files are missing), 100 clients of 500 images, 10 a round, five
local epochs of batches of 50, SGD with momentum, ResNet-20: 500 steps a round. pfl-research's CIFAR-10 benchmark:
FedAvg, 1,000 clients of 50 images, 50 a round, one epoch of batches of 10, its CNN. A round is all of it: sampling,
batches, local training, the server's rule; evaluation on the test set is timed apart. `plain` is what papers' code
does: a deep copy of the model for each client, a DataLoader, torch.optim.SGD, a mean of states (sides/plain.py).

All sides take turns in this process, in an order that rotates; the first turn warms up. After it all sides of ours have
trained the same round: `distance` is that of their global model to the loop's, as a share of the length of its update.
Reported is the ratio plain / side, median and range; the JSON is written anew after each side's turn. `--seconds` stops
after that time, with the turns there are.

`of floor` is which share of a round its arithmetic alone would take: three forward passes of all samples that are
trained on, at the rate at which this device multiplies two large matrices in that precision (`rates` in the JSON).
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from peers import load
from report import seconds, write
from sides import plain
from sides.models import MODELS
from torch.utils.data import TensorDataset

import zoo
from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.fedmr import METHOD as fedmr
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD, Precision
from fl.engine.precision import arithmetic
from fl.engine.work import flops
from fl.federation import Federation, LocalTraining
from fl.partition import Split
from fl.runs.evaluate import evaluate_global
from surgery.errors import first_line

PRECISIONS = {"cpu": ("float32",), "cuda": ("float32", "tf32", "bf16")}
BACKENDS = {"cpu": ("loop", "workers", "vmap"), "cuda": ("loop", "vmap", "graphs")}
ROUNDS = 500  # of a run, as FedMR's released code has it


@dataclass(frozen=True)
class Setting:
    """What is trained: `clients` of `samples` images each, `participants` of them a round."""

    algorithm: Callable[[Federation], Algorithm]
    model: str
    clients: int
    samples: int
    participants: int
    epochs: int
    batch: int
    optimizer: SGD


SETTINGS = {
    "fedmr": Setting(fedmr, "resnet20", 100, 500, 10, 5, 50, SGD(0.01, 0.9)),
    "pfl": Setting(fedavg, "pfl_cnn", 1000, 50, 50, 1, 10, SGD(0.1)),
}


def federation(setting: Setting, device: str, root: Path | None) -> tuple[Federation, str]:
    """Return the setting's federation on a device, and where its images are from."""
    x, y, source = load("cifar10", root)
    data = Dataset("cifar10", x, y, x[:10_000], y[:10_000], classes=10).to(device)
    none = torch.empty(0, dtype=torch.int64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    parts = order[: setting.clients * setting.samples].split(setting.samples)
    if setting.model in MODELS:
        torch.manual_seed(0)
        net = MODELS[setting.model](True).to(device)
    else:
        net = zoo.create(setting.model, torch.Generator().manual_seed(0)).to(device)
    splits = [Split(part, none, none) for part in parts]
    local = LocalTraining(epochs=setting.epochs, batch_size=setting.batch, optimizer=setting.optimizer)
    return Federation(net, data, splits, setting.participants, local), source


def plain_round(fed: Federation) -> Callable[[int], None]:
    """Return a round of the plain loop, a function of its number."""
    job = SimpleNamespace(
        batch=fed.local.batch_size, check=False, lr=fed.local.optimizer.lr, momentum=fed.local.optimizer.momentum,
        epochs=fed.local.epochs, device=fed.data.x.device,
    )  # fmt: skip
    x, y = fed.data.normalise(fed.data.x.cpu()), fed.data.y.cpu()
    sets = [TensorDataset(x[split.train], y[split.train]) for split in fed.clients]
    server = copy.deepcopy(fed.model)

    def train_round(number: int) -> None:
        clients = fed.sample(Rng(0, number))
        states = [plain.train(copy.deepcopy(server), sets[client], job) for client in clients]
        server.load_state_dict(plain.mean(states, [len(sets[client]) for client in clients]))

    return train_round


class Ours:
    """Rounds of this library, and the global model of the first."""

    def __init__(self, algorithm: Algorithm, fed: Federation) -> None:
        self.algorithm, self.fed, self.server = algorithm, fed, algorithm.init()
        self.first: torch.Tensor | None = None

    def __call__(self, number: int) -> None:
        rng = Rng(0, number)
        self.server, _ = self.algorithm.round(self.server, self.fed.sample(rng), rng)

    def flat(self) -> torch.Tensor:
        """Return the global model's floating-point tensors as one vector on the host."""
        state = self.server["global"]
        return torch.cat([t.double().flatten().cpu() for t in state.values() if t.is_floating_point()])


def rate_of(precision: str, device: str) -> float:
    """Floating-point operations a second of a product of two large matrices: the best of five."""
    n = 8192 if torch.device(device).type == "cuda" else 1024
    a, settings = torch.randn(n, n, device=device), Precision(precision)
    with arithmetic(settings, a.device), settings.autocast(a.device):
        return 2 * n**3 / min([seconds(lambda: a @ a, device) for _ in range(6)][1:])


def floor_operations(setting: Setting, fed: Federation) -> int:
    """Floating-point operations of a round's local training: a backward pass takes twice a forward one."""
    return 3 * setting.participants * setting.epochs * setting.samples * flops(fed.model, fed.data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--setting", default="fedmr", choices=SETTINGS)
    parser.add_argument("--precisions", help="comma-separated [all that the device has]")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further turn begins")
    parser.add_argument("--data-root", type=Path, default=os.environ.get("FL_DATA_ROOT"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    begin = time.perf_counter()
    kind, setting = torch.device(args.device).type, SETTINGS[args.setting]
    precisions = args.precisions.split(",") if args.precisions else PRECISIONS[kind]
    if args.quick:
        args.turns = 2
        setting = Setting(setting.algorithm, "lenet", 4, 100, 4, setting.epochs, setting.batch, setting.optimizer)
    fed, source = federation(setting, args.device, args.data_root)
    initial = Ours(setting.algorithm(fed), fed).flat()
    sides: dict[str, Callable[[int], object]] = {
        f"{backend} {name}": Ours(setting.algorithm(one), one)
        for name in precisions
        for backend in BACKENDS[kind]
        for one in [fed.with_local(backend=backend, precision=Precision(name))]
    }
    sides["plain"] = plain_round(fed)
    state = fed.initial()
    sides["evaluation"] = lambda _: evaluate_global(fed, lambda x: fed.predict(state, x))
    rates = {name: rate_of(name, args.device) for name in precisions}
    device = torch.cuda.get_device_name() if kind == "cuda" else f"{torch.get_num_threads()} CPU threads"
    floors = {name: floor_operations(setting, fed) / rate for name, rate in rates.items()}
    about = {
        "device": device, "torch": torch.__version__, "setting": args.setting, "model": setting.model, "data": source,
        "rates": rates, "floors": floors,
    }  # fmt: skip
    name = "-".join(["rounds", *([args.setting] * (args.setting != "fedmr")), kind, *(["quick"] * args.quick)])
    times: dict[str, list[float]] = {side: [] for side in sides}
    failed: dict[str, str] = {}
    distances: dict[str, float] = {}
    result, over = about, False
    for turn in range(args.turns + 1):
        order = list(times)
        for side in order[turn % len(order) :] + order[: turn % len(order)]:
            if over := time.perf_counter() - begin > args.seconds:
                break
            try:
                took = seconds(lambda: sides[side](turn + 1), args.device)  # noqa: B023 (called at once)
            except Exception as error:  # the others go on: their times are worth having
                failed[side] = first_line(error)
                print(f"{side} is left out: {failed[side]}", flush=True)
                del times[side]
                continue
            if turn:  # the first warms up
                times[side].append(took)
            elif isinstance(ours := sides[side], Ours):
                ours.first = ours.flat()
                if (loop := sides[f"loop {precisions[0]}"]).first is not None:
                    update = (loop.first - initial).norm()
                    distances[side] = float((ours.first - loop.first).norm() / update)
            known = {side: [round(t, 5) for t in values] for side, values in times.items()}
            result = {**about, "seconds": known, "distance": distances, "failed": failed}
            write(result, args.out, name, done=False)
        if over:
            break
    write(result, args.out, name, done=True)
    print(f"{device}, torch {torch.__version__}; {args.setting}, {setting.model}, {source}, {setting.clients} clients")
    print(
        f"{'':18}{'seconds a round':>28}{'of floor':>10}{'rounds a second':>17}{'plain / side':>26}{'distance':>10}"
        f"{f'{ROUNDS} rounds':>14}"
    )
    for side, values in times.items():
        if not values:
            print(f"{side:18}{'no time was left':>28}")
            continue
        ratios = [a / b for a, b in zip(times.get("plain", []), values)]
        took = f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
        distance = f"{distances[side]:.0e}" if side in distances else "-"
        whole = f"{ROUNDS * statistics.median(values) / 60:.1f} min"
        rate = f"{1 / statistics.median(values):.2f}"
        floor = floors[side.split()[-1] if " " in side else precisions[0]]  # `plain` computes in torch's own float32
        share = f"{floor / statistics.median(values):.1%}"
        more = f"{share:>10}{rate:>17}{ratio:>26}{distance:>10}{whole:>14}"
        print(f"{side:18}{took:>28}" + more * (side != "evaluation"))


if __name__ == "__main__":
    main()
