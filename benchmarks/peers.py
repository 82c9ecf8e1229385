"""Time rounds of FedAvg against other simulators: a plain loop over clients, pfl-research and Flower.

    python benchmarks/peers.py --pfl pfl/bin/python --flower flower/bin/python

prints a table for each setting and writes benchmarks/results/peers-<device>.json. `--quick` takes few and small rounds,
to see that it runs. A peer whose interpreter is not given is left out; each lives in an environment of its own:

    python3.11 -m venv pfl && pfl/bin/pip install 'pfl[pytorch]==0.6.0' torch==2.15.0
    python3.11 -m venv flower && flower/bin/pip install 'flwr[simulation]==1.41.0' torch==2.15.0

Every side is a process (`sides/`) that waits for its turn: the sides train a round each, one after another, in an order
that rotates, so that what else the machine does hits all alike. A round is all of it by the wall clock: sampling,
sending, local training, aggregation; there is no evaluation. Reported is the ratio peer / ours (above 1: we are
faster), the median over the rounds and their range; the first rounds warm up. Sides have the same model, initial
weights, data, client sizes, batch size and number of steps, and compute in float32 (no TF32). Each uses the cores in
the way that is natural to it: one process with as many torch threads as there are cores, Flower as many actors of one
thread (on a GPU, which they share, `--flower-actors`). Two things favour the peers: their images are normalised before
the clock starts, while ours are bytes that each step normalises; and Flower's clock stops when its new model is made,
before it is stored and sent on.

Before the rounds, each setting is checked: one round without dropout of four clients of unequal sizes, whose samples
come in the same order on all sides, has to give the same parameters. It computes in float64, where steps do not make
rounding grow to something that one has to judge (pfl keeps the clients' updates in float32 even so). Stated is the
distance to our parameters, relative to the length of our update. Running statistics of batch norm are compared too, and
judged except for pfl's, which lets them pass from client to client instead of averaging them.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from report import write
from sides.models import MODELS
from torch import Tensor

import fl.data
import zoo
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine.batches import make_batches

HERE = Path(__file__).resolve().parent
WARM_UP = 2  # rounds; the first has start-up costs (Flower's actors, a GPU's kernels), the second may still
PATIENCE = 600  # seconds that a side may take for one answer
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Setting:
    """What all sides train: `clients` of `samples` each, `participants` of them a round."""

    title: str
    model: str
    parameters: int
    data: str
    clients: int
    samples: int
    participants: int
    epochs: int
    batch: int
    lr: float
    momentum: float

    def steps(self) -> int:
        """Local steps of all clients in one round."""
        return self.participants * self.epochs * -(-self.samples // self.batch)

    def job(self, check: bool = False) -> dict:
        """What the sides get to know; the check's clients hold 1, 2, 3 and 4 batches of 10, since float64 is slow."""
        return {
            "check": check, "model": self.model, "dropout": not check,
            "clients": 4 if check else self.clients, "sizes": [10, 20, 30, 40] if check else self.samples,
            "batch": 10 if check else self.batch, "epochs": 1 if check else self.epochs,
            "participants": 4 if check else self.participants,
            "lr": self.lr, "momentum": self.momentum,
        }  # fmt: skip


SETTINGS = {
    "A": Setting(
        "pfl-research's CIFAR-10 benchmark", "pfl_cnn", 1_626_442, "cifar10",
        clients=1000, samples=50, participants=50, epochs=1, batch=10, lr=0.1, momentum=0.0,
    ),
    "B": Setting(
        "CIFAR-10, a CNN of LeNet's size", "lenet", 62_006, "cifar10",
        clients=100, samples=500, participants=10, epochs=5, batch=50, lr=0.01, momentum=0.9,
    ),
    "C": Setting(
        "Fashion-MNIST, McMahan's CNN", "mcmahan_cnn", 1_663_370, "fashion-mnist",
        clients=100, samples=600, participants=10, epochs=1, batch=10, lr=0.01, momentum=0.9,
    ),
    "D": Setting(
        "CIFAR-10, ResNet-20", "resnet20", 269_722, "cifar10",
        clients=100, samples=500, participants=10, epochs=1, batch=50, lr=0.01, momentum=0.9,
    ),
}  # fmt: skip
SHAPES = {"cifar10": (50_000, 3, 32, 32), "fashion-mnist": (60_000, 1, 28, 28)}


class SideError(Exception):
    """A side died or did not answer. Without a peer the comparison goes on, without ours it ends."""

    def __init__(self, name: str, log: str) -> None:
        super().__init__(f"{name} stopped:\n{log}")
        self.name = name

    def report(self) -> None:
        """Print it, or raise it where it is ours."""
        if self.name == "ours":
            raise self
        print(self, flush=True)


class Side:
    """A worker process, and what it said when it was ready. "ours vmap" is ours with that backend."""

    def __init__(self, name: str, python: str, job: dict, folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        module, _, backend = name.partition(" ")
        job = job | ({"backend": backend} if backend else {})
        threads = 1 if name == "flower" else job["threads"]
        paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": str(threads),
            "PFL_PYTORCH_DEVICE": job["device"], "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, "-m", "sides.worker", module], cwd=folder, env=env, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        begin = time.perf_counter()
        self.facts = self.ask(**job)
        self.facts["setup_seconds"] = round(time.perf_counter() - begin, 2)

    def ask(self, **command) -> dict:
        """Send a command and wait for the answer."""
        timer = threading.Timer(PATIENCE, self.kill)
        timer.start()
        try:
            print(json.dumps(command), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            self.kill()
            raise SideError(self.name, self.log.read_text()[-3000:])
        return json.loads(answer)

    def close(self) -> None:
        """Let it end; what does not within a minute is killed."""
        with suppress(BrokenPipeError):  # it has ended by itself
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill it with its children, which are in a process group of their own."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def load(name: str, root: Path | None) -> tuple[Tensor, Tensor, str]:
    """Images, labels and where they are from: the real data set, or random pixels where its files are missing."""
    try:
        data = fl.data.load(name, root, download=False)
        return data.x, data.y, name
    except FLError:
        generator = torch.Generator().manual_seed(0)
        shape = SHAPES[name]
        x = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        return x, torch.randint(10, shape[:1], generator=generator), f"random pixels of {name}'s shape"


def start(sides: dict[str, str], setting: Setting, shared: dict, data, folder: Path, check: bool) -> dict[str, Side]:
    """Write the data of these clients and the initial weights, start the sides, and drop peers that fail."""
    folder.mkdir()
    torch.manual_seed(0)
    model = MODELS[setting.model](True)
    if (count := sum(p.numel() for p in model.parameters())) != setting.parameters:
        raise AssertionError(f"{setting.model} has {count} parameters, not {setting.parameters}")
    torch.save(model.state_dict(), folder / "initial.pt")
    job = setting.job(check) | shared | {"initial": str(folder / "initial.pt")}
    x, y = (tensor[: sum(job["sizes"]) if check else setting.clients * setting.samples] for tensor in data)
    torch.save({"x": x.clone(), "y": y.clone()}, folder / "data.pt")
    order = epoch_order(job) if check else slice(None)
    torch.save({"x": x[order].clone(), "y": y[order].clone()}, folder / "ordered.pt")
    started = {}
    for name, python in sides.items():
        try:
            mine = folder / ("data.pt" if name.startswith("ours") else "ordered.pt")
            started[name] = Side(name, python, job | {"data": str(mine)}, folder)
        except SideError as error:
            error.report()
    return started


def epoch_order(job: dict) -> Tensor:
    """Return the order in which our engine goes through each client's samples in round 1, one client after another."""
    parts = torch.arange(sum(job["sizes"])).split(job["sizes"])
    batches = make_batches(parts, range(len(parts)), 1, job["batch"], Rng(0, 1), "cpu")
    return torch.cat([rows[:steps].flatten() for rows, steps in zip(batches.index, batches.steps)])


def compare(running: dict[str, Side], folder: Path) -> dict[str, dict[str, float]]:
    """Measure each peer's distance to our global model after one round, relative to our update's length."""
    states = {"initial": torch.load(folder / "initial.pt")}
    for name, side in list(running.items()):
        try:
            side.ask(round=1)
            side.ask(save=str(folder / f"{name}.pt"))
            states[name] = torch.load(folder / f"{name}.pt")
        except SideError as error:
            error.report()
            del running[name]
    statistic = [name for name in states["ours"] if name.endswith(("running_mean", "running_var"))]
    kinds = {"parameters": [n for n in states["ours"] if "running" not in n and "tracked" not in n]}
    kinds |= {"statistics": statistic} if statistic else {}

    def distance(a: str, b: str, names: list[str]) -> float:
        return float(torch.cat([(states[a][n] - states[b][n]).double().flatten() for n in names]).norm())

    return {
        peer: {kind: distance(peer, "ours", n) / distance("ours", "initial", n) for kind, n in kinds.items()}
        for peer in running
        if peer != "ours"
    }


def measure(running: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side's rounds. A peer that fails leaves the comparison."""
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for number in range(1, WARM_UP + rounds + 1):
        names = list(running)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            try:
                seconds[name].append(running[name].ask(round=number)["seconds"])
            except SideError as error:
                error.report()
                del running[name], seconds[name]
    return {name: values[WARM_UP:] for name, values in seconds.items()}


def run(setting: Setting, sides: dict[str, str], shared: dict, rounds: int, root: Path | None) -> dict:
    """One setting: check, measure, print; what goes into the JSON."""
    *data, source = load(setting.data, root)
    print(
        f"\n{setting.title}, {setting.parameters:,} weights; {source}: {setting.clients} clients x {setting.samples}, "
        f"{setting.participants} a round, epochs {setting.epochs}, batch {setting.batch}; {setting.steps()} steps",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as temporary:
        running = start(sides, setting, shared, data, check := Path(temporary) / "check", check=True)
        try:
            distances = compare(running, check)
        finally:
            for side in running.values():
                side.close()
        running = start(sides, setting, shared, data, Path(temporary) / "rounds", check=False)
        try:
            seconds = measure(running, rounds)
        finally:
            for side in running.values():
                side.close()
    rows = []
    print(f"  {'side':12}{'seconds a round':>24}{'peer / ours':>24}   check")
    for name, times in seconds.items():
        ratios = [theirs / mine for theirs, mine in zip(times, seconds["ours"])]
        check = distances.get(name, {})
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if name != "ours" else ""
        took = f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})"
        print(f"  {name:12}{took:>24}{spread:>24}   {', '.join(f'{kind} {d:.0e}' for kind, d in check.items())}")
        rows.append({
            "side": name, **running[name].facts, "seconds": [round(t, 5) for t in times],
            "ratio": round(statistics.median(ratios), 3), "low": round(min(ratios), 3), "high": round(max(ratios), 3),
            "check": check,
        })  # fmt: skip
    return {**asdict(setting), "steps": setting.steps(), "source": source, "rows": rows}


def failures(results: dict[str, dict], sides: dict[str, str]) -> list[str]:
    """Return what did not go as it should: missing sides, and models that differ."""
    found = []
    for letter, result in results.items():
        checks = {row["side"]: row["check"] for row in result["rows"]}
        found += [f"{letter}: {name} is missing" for name in sides if name not in checks]
        for name, check in checks.items():
            judged = [d for kind, d in check.items() if not (name == "pfl" and kind == "statistics")]
            if any(not d < TOLERANCE for d in judged) or (name != "ours" and not judged):
                found.append(f"{letter}: {name} did not train the same model: {check}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--settings", default=",".join(SETTINGS), help="letters, separated by commas")
    parser.add_argument("--rounds", type=int, default=7, help="that are measured")
    parser.add_argument("--pfl", metavar="PYTHON", help="interpreter that has pfl")
    parser.add_argument("--flower", metavar="PYTHON", help="interpreter that has flwr")
    parser.add_argument("--flower-actors", type=int, help="default: one a core, on a GPU at most 4")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--backend", default="auto", help="of our engine; further ones, after commas, are sides as well"
    )
    parser.add_argument("--data-root", type=Path, help="default: $FL_DATA_ROOT; random pixels where files are missing")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if strange := set(args.settings.split(",")) - set(SETTINGS):
        parser.error(f"--settings {','.join(sorted(strange))}: there are {', '.join(SETTINGS)}")
    chosen = {letter: SETTINGS[letter] for letter in args.settings.split(",")}
    if args.quick:
        args.rounds = min(args.rounds, 2)
        chosen = {k: replace(s, clients=20, participants=4, epochs=1) for k, s in chosen.items()}
    if "C" in chosen and SETTINGS["C"].parameters != zoo.Spec("cnn").count().parameters:
        raise AssertionError("McMahan's CNN is not the zoo's")
    python = sys.executable
    backend, *others = args.backend.split(",")
    ours = dict.fromkeys(("ours", *(f"ours {other}" for other in others)), python)
    sides = {**ours, "plain": python, "pfl": args.pfl, "flower": args.flower}
    if left_out := [name for name, path in sides.items() if not path]:
        print(f"left out, for want of an interpreter: {', '.join(left_out)}")
    sides = {name: str(Path(path).absolute()) for name, path in sides.items() if path}
    gpu = args.device == "cuda"
    shared = {
        "device": args.device, "threads": args.threads, "backend": backend,
        "actors": args.flower_actors or (min(4, cores) if gpu else cores),
    }  # fmt: skip
    machine = torch.cuda.get_device_name() if gpu else f"{args.threads} CPU threads"
    print(f"{machine}; FedAvg, median (range) of {args.rounds} rounds; ratio above 1: ours is faster")
    results: dict[str, dict] = {}
    for letter, setting in chosen.items():
        results[letter] = run(setting, sides, shared, args.rounds, args.data_root)
        wrong = failures(results, sides)
        result = {
            **shared, "name": machine, "machine": platform.machine(), "cores": cores, "warm_up": WARM_UP,
            "rounds": args.rounds, "quick": args.quick, "failures": wrong, "settings": results,
        }  # fmt: skip
        write(
            result, args.out, f"peers-{args.device}{'-quick' if args.quick else ''}", done=len(results) == len(chosen)
        )
    for row in next(iter(results.values()))["rows"]:
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        print(f"{row['side']}: {row['threads']}; {versions}")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
