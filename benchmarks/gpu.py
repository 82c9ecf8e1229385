"""Run what waits for a GPU under time limits, the most telling first; `benchmarks/gpu.sh` prepares the machine for it.

    python benchmarks/gpu.py first      # 150 seconds: some tests, each in a process of its own; rounds of every backend
    python benchmarks/gpu.py rest       # six minutes: rounds by backend and precision; peers; CIFAR-10; all tests
    python benchmarks/gpu.py pack       # write .gpu/cifar10, which `rest` trains on, from the files in $FL_DATA_ROOT
    python benchmarks/gpu.py cifar10    # the last step of `rest` alone

A step that takes longer than its limit is interrupted, and killed ten seconds later; the next one begins.
gpu-first.json or gpu-rest.json says after each step what became of it and how its output ends. The programs that
measure write JSON of their own beside it.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from report import write

import fl
import zoo
from benchmarks.rounds import rate_of
from fl.engine.work import flops

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ROOT / ".gpu"
PARTS = ("data_batch_1", "data_batch_2", "test_batch")
"""What fits with the project into 64 MiB, as lossless images."""
LEFT = 2500  # characters of a step's output that are kept

TESTS = {
    "FedMR on graphs": "test_gpu__rounds_on_the_gpu_are_rounds_on_the_cpu and resnet20-graphs-fedmr",
    "FedMR as one program": "test_gpu__rounds_on_the_gpu_are_rounds_on_the_cpu and resnet20-vmap-fedmr",
    "FeMAM": "test_gpu__rounds_on_the_gpu_are_rounds_on_the_cpu and resnet20-loop-femam",
    "FedFA on graphs": "test_gpu__rounds_on_the_gpu_are_rounds_on_the_cpu and resnet20-graphs-fedfa",
    "waves of graphs": "test_gpu__waves_at_real_size and resnet20",
    "transformers": "test_gpu__a_transformer_trains_on_every_backend",
    "no step waits": "no_step_waits_for_the_device",
    "batch norm on many streams": "test_gpu__batch_norm_in_channels_last_does_not_starve_on_many_streams and float32",
}
"""What each of the first tests shows, and how pytest chooses it."""


@dataclass(frozen=True)
class Step:
    """A command, and how many seconds it may take."""

    name: str
    command: Sequence[str]
    limit: float


def pytest_command(device: str, *arguments: str) -> list[str]:
    """Return a command that runs the tests for a GPU, or the same ones on the pretended one."""
    settings = ["-o", "addopts=--import-mode=importlib --strict-markers", "-p", "no:cacheprovider", "-ra", "--tb=short"]
    chosen = ["-m", "gpu"] if device == "cuda" else []
    return [sys.executable, "-m", "pytest", *settings, *chosen, *arguments, "tests/fl/test_gpu.py"]


def program(name: str, *arguments: object) -> list[str]:
    """Return a command that runs a program of this folder."""
    return [sys.executable, f"benchmarks/{name}.py", *map(str, arguments)]


def first_steps(args: argparse.Namespace) -> list[list[Step]]:
    """Return the steps of `first`; those in one list run side by side."""
    tests = [Step(name, pytest_command(args.device, "-k", f"({chosen})"), 60) for name, chosen in TESTS.items()]
    rounds = program("rounds", *args.common, "--precisions", "float32", "--turns", 3, "--seconds", 50)
    together = os.cpu_count() // 2 or 1
    return [*(tests[at : at + together] for at in range(0, len(tests), together)), [Step("rounds", rounds, 70)]]


def rest_steps(args: argparse.Namespace) -> list[list[Step]]:
    """Return the steps of `rest`."""
    workers = ["-n", str(min(8, os.cpu_count()))]
    tests = [*pytest_command(args.device, *workers), "tests/zoo/test_gpu.py"]
    backends = "loop,vmap,graphs" if args.device == "cuda" else "loop,vmap"
    pfl = ["--pfl", args.pfl] if args.pfl else []
    peers = program("peers", *args.common, "--settings", "A", "--backend", backends, "--rounds", 5, *pfl)
    pfls = program("rounds", *args.common, "--setting", "pfl", "--seconds", 25)
    return [
        [Step("rounds", program("rounds", *args.common, "--seconds", 55), 70)],
        [Step("rounds, pfl-research's setting", pfls, 35)],
        [Step("peers", peers, 55)],
        [Step("FedMR on CIFAR-10", program("gpu", "cifar10", *args.common, "--seconds", 45), 65)],
        [Step("all tests", tests, 125)],
    ]


def run(steps: Sequence[Step], scale: float) -> list[dict]:
    """Run steps side by side and return what became of each. Their limits are multiplied by a scale."""
    started = []
    for step in steps:
        output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (read below)
        process = subprocess.Popen(
            step.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        started.append((step, process, output, time.perf_counter()))
    results = []
    for step, process, output, begin in started:
        in_time = end_by(process, begin + scale * step.limit)
        output.seek(0)
        text = output.read()
        print(f"== {step.name}\n{text[-LEFT:]}", flush=True)
        result = {"name": step.name, "seconds": round(time.perf_counter() - begin, 1), "status": process.returncode}
        tests = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", text[-400:])}
        results.append({**result, "in_time": in_time, "tests": tests, "output": text[-LEFT:]})
    return results


def end_by(process: subprocess.Popen, moment: float) -> bool:
    """Wait for a process, interrupt it at a moment, and kill it ten seconds later. Return whether it was in time."""
    try:
        process.wait(max(0.0, moment - time.perf_counter()))
        return True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return False


def pack(root: Path) -> None:
    """Write images and labels of CIFAR-10 as lossless images, and say how much there is to carry with the project."""
    folder = CARRIED / "cifar10"
    folder.mkdir(parents=True, exist_ok=True)
    data = fl.data.load("cifar10", root, download=False)
    parts = {name: (data.x[10_000 * k :][:10_000], data.y[10_000 * k :][:10_000]) for k, name in enumerate(PARTS[:2])}
    for name, (x, y) in {**parts, PARTS[2]: (data.test_x, data.test_y)}.items():
        mosaic = x.reshape(100, 100, 3, 32, 32).permute(0, 3, 1, 4, 2).reshape(3200, 3200, 3)
        Image.fromarray(mosaic.numpy()).save(folder / f"{name}.webp", lossless=True, quality=80, method=4)
        np.save(folder / f"{name}.npy", y.numpy().astype(np.uint8))
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [*map(ROOT.joinpath, filter(None, listed.split("\0"))), *filter(Path.is_file, CARRIED.rglob("*"))]
    size = sum(file.stat().st_size for file in files if file.is_file())
    print(f"the project and .gpu have {size / 2**20:.1f} MiB")


def unpack() -> fl.Dataset:
    """Return CIFAR-10's test set and as many training images as were packed."""
    x, y = [], []
    for name in PARTS:
        mosaic = np.asarray(Image.open(CARRIED / "cifar10" / f"{name}.webp").convert("RGB"))
        x.append(mosaic.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32))
        y.append(np.load(CARRIED / "cifar10" / f"{name}.npy"))
    return fl.Dataset.from_arrays(np.concatenate(x[:-1]), np.concatenate(y[:-1]), x[-1], y[-1])


def admitted_backend(out: Path, device: str) -> str:
    """Return the fastest backend whose first round was the loop's in rounds.py, and the loop if nothing is known."""
    file = out / f"rounds-{device}.json"
    known = json.loads(file.read_text()) if file.exists() else {"seconds": {}, "distance": {}}
    equal = [
        (sorted(times)[len(times) // 2], side.split()[0])
        for side, times in known["seconds"].items()
        if times and side.endswith(" float32") and known["distance"].get(side, 1) < 1e-2
    ]
    return min(equal)[1] if equal else "loop"


def train_cifar10(args: argparse.Namespace) -> None:
    """Train FedMR on real CIFAR-10 until the time is over, and write its rows."""
    begin, backend, rows = time.perf_counter(), admitted_backend(args.out, args.device), []
    data = unpack()
    config = fl.Config.of(
        algorithm="fedmr", model="lenet" if args.quick else "resnet20", clients=100, participants=10, rounds=500,
        alpha=0.5, local_epochs=1 if args.quick else 5, batch_size=50, lr=0.01, momentum=0.5, device=args.device,
        backend=backend, eval_every=2,
    )  # fmt: skip
    net = zoo.create(config.model.name, torch.Generator().manual_seed(0))
    trained = len(data.y) * config.clients.participants // config.clients.number * config.local.epochs
    floor = 3 * trained * flops(net, data) / rate_of("float32", args.device)  # of a round, as in rounds.py
    about = {
        "device": args.device, "torch": torch.__version__, "training_images": len(data.y), "backend": backend,
        "floor": floor,
    }  # fmt: skip

    def on_round(row: dict) -> bool:
        rows.append({key: value for key, value in row.items() if value == value})
        elapsed = time.perf_counter() - begin
        write(
            {**about, "elapsed": round(elapsed, 1), "rows": rows}, args.out, "gpu-cifar10", done=elapsed > args.seconds
        )
        return elapsed > args.seconds

    with tempfile.TemporaryDirectory() as folder:
        fl.simulate(config, Path(folder) / "run", dataset=data, on_round=on_round)
    took = statistics.median(row["seconds"] for row in rows)
    print(f"{backend}: {took:.3f} s a round, {floor / took:.1%} of which its arithmetic alone would take")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["first", "rest", "pack", "cifar10"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few and small rounds, to see that it runs")
    parser.add_argument("--scale", type=float, default=1, help="of all limits")
    parser.add_argument("--seconds", type=float, default=45, help="for cifar10")
    parser.add_argument("--pfl", metavar="PYTHON", help="interpreter that has pfl")
    parser.add_argument("--data-root", type=Path, default=os.environ.get("FL_DATA_ROOT"), help="for pack")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    if args.part == "pack":
        return pack(args.data_root)
    if args.part == "cifar10":
        return train_cifar10(args)
    args.common = ["--device", args.device, "--out", args.out, *(["--quick"] * args.quick)]
    begin, results = time.perf_counter(), []
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    about = {"device": device, "torch": torch.__version__, "python": sys.version.split()[0]}
    steps = first_steps(args) if args.part == "first" else rest_steps(args)
    for together in steps:
        results += run(together, args.scale)
        taken = {"seconds": round(time.perf_counter() - begin, 1)}
        write({**about, **taken, "steps": results}, args.out, f"gpu-{args.part}", done=together is steps[-1])
    for result in results:
        tests = ", ".join(f"{n} {word}" for word, n in result["tests"].items())
        state = "ended" if not result["status"] else f"failed ({result['status']})"
        print(
            f"{result['name']:32}{result['seconds']:7.1f} s  {state if result['in_time'] else 'out of time'}  {tests}"
        )
    if any(result["status"] for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
