"""Time the rounds of every level of FeMAM beside rounds of FedAvg over the same clients, and with the cache left out.

    python benchmarks/femam.py                  # prints the table, writes benchmarks/results/femam-<device>.json
    python benchmarks/femam.py --model resnet9 --rounds 3
    python benchmarks/femam.py --quick          # small, to see that it runs

50 clients, all of a round, the paper's batch size (32), epochs (2), levels (global, 5, 5, 5, personal) and shares of
samples (9 to train, 1 to validate, 2 to test on); random images. Every round of a level runs next to a round of FedAvg
in this process, in turns before and after it, so that what else the machine does hits both alike. Reported is the ratio
to that round: median and range. `first` is a level's first round, in which the logits of the levels below are computed
and clusters are found by K-means; `later` one after it; `last` its last, with pruning; `level of 50` the mean over a
level of 50 rounds that these add up to; `judged` one in which convergence is judged as well; `uncached` computes the
logits of all levels below in every step, as other code does.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from report import write
from torch.func import functional_call

import zoo
from fl.algorithms import FeMAMOptions, fedavg, femam
from fl.algorithms.parts.personal import take
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD
from fl.federation import Federation, LocalTraining
from fl.partition import Parts, hold_out

CLIENTS, LEVELS = 50, ("global", "5", "5", "5", "personal")


def federation(model: str, device: str, each: int) -> Federation:
    """Clients with `each` random images of ten classes (what is timed does not depend on the pixels)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (CLIENTS * each, 1, 28, 28), generator=generator).byte().to(device)
    y = torch.randint(10, (len(x),), generator=generator).to(device)
    create = lambda g: zoo.create(model, g, num_classes=10, in_channels=1, image_size=28)  # noqa: E731
    parts = Parts(torch.arange(len(x)), torch.arange(CLIENTS + 1) * each)
    splits = hold_out(parts, 1 / 12, 1 / 6, np.random.default_rng(0))
    data = Dataset("random", x, y, x[:100], y[:100], classes=10)
    local = LocalTraining(epochs=2, batch_size=32, optimizer=SGD(0.01, 0.0))
    return Federation(create(generator).to(device), data, splits, CLIENTS, local, create=create)


def seconds(work: Callable) -> tuple[float, object]:
    """How long it takes, the device's work included, and what it returns."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def uncached(fed: Federation, server: dict, at: int) -> Callable:
    """A round in which every step runs the frozen models of its client as well."""
    below = [(server[f"level{level}"], server["structure"]["pathways"][level - 1]) for level in range(1, at + 1)]

    def objective(call, params, context, batch):
        x, y = batch
        frozen = 0
        for number in range(at):
            fed.model.eval()
            with torch.no_grad():
                frozen = frozen + context[f"kept{number}"] * functional_call(fed.model, context[f"model{number}"], (x,))
        fed.model.train()
        return F.cross_entropy(call(params, x) + frozen, y)

    clients = list(range(CLIENTS))
    context = {f"model{n}": take(models, mapping.clamp(min=0).tolist()) for n, (models, mapping) in enumerate(below)}
    context |= {f"kept{n}": (mapping >= 0).float().to(fed.data.x.device) for n, (_, mapping) in enumerate(below)}
    starts = take(server[f"level{at + 1}"], [0] * CLIENTS)
    return lambda: fed.train(starts, clients, Rng(0, 1), objective, context)


def measure(fed: Federation, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Ratios to FedAvg's round, by level and kind of round."""
    clients, average = list(range(CLIENTS)), fedavg(fed)
    scheduled = femam(fed, FeMAMOptions(LEVELS, level_rounds=(3,) * 4))
    judging = femam(fed, FeMAMOptions(LEVELS, variance=0.0))
    ratios: dict[str, dict[str, list[float]]] = {}
    for repetition in range(rounds + 1):
        server, plain = scheduled.init(), average.init()
        for number in range(1, 16):
            at, rng = int(server["progress"]["level"]), Rng(repetition, number)
            kind = ("first", "later", "last")[(number - 1) % 3]
            work = {kind: lambda: scheduled.round(server, clients, rng)}  # noqa: B023 (called at once)
            if kind == "later" and at < len(LEVELS) - 1:
                judging.round(server, clients, rng)  # which remembers the levels below
                work["judged"] = lambda: judging.round(server, clients, rng)  # noqa: B023
            if kind == "later" and at:
                work["uncached"] = uncached(fed, server, at)
            for name, one in work.items():
                pair = [one, lambda: average.round(plain, clients, rng)]  # noqa: B023
                turn = (repetition + number) % 2
                (first, a), (second, b) = (seconds(each) for each in (pair[::-1] if turn else pair))
                took, base, result = (second, first, b) if turn else (first, second, a)
                if name == kind:
                    after = result[0]
                if repetition:  # the first one warms up
                    ratios.setdefault(f"level {at + 1}", {}).setdefault(name, []).append(took / base)
            server = after
    return ratios


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--each", type=int, default=240, help="samples of a client")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of all levels")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fed = federation(arguments.model, device, 24 if arguments.quick else arguments.each)
    fed = fed.with_local(backend=arguments.backend)
    ratios = measure(fed, 1 if arguments.quick else arguments.rounds)
    for found in ratios.values():
        once = zip(found["first"], found["later"], found["last"])
        found["level of 50"] = [(first + 48 * later + last) / 50 for first, later, last in once]
    kinds = ("first", "later", "last", "level of 50", "judged", "uncached")
    print(f"{'ratio to FedAvg':16}" + "".join(kind.rjust(22) for kind in kinds))
    for level, found in ratios.items():
        cells = [found.get(kind) for kind in kinds]
        text = [f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" if c else "-" for c in cells]
        print(f"{level:16}" + "".join(cell.rjust(22) for cell in text))
    if not arguments.quick:
        about = {"device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"}
        about |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "python": platform.python_version()}
        settings = {"model": arguments.model, "samples of a client": arguments.each, "backend": arguments.backend}
        name = f"femam-{device}" if arguments.model == "lenet" else f"femam-{arguments.model}-{device}"
        write({**about, **settings, "ratios": ratios}, arguments.out, name)


if __name__ == "__main__":
    main()
