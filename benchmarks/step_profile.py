"""Where the time of a client's step goes, for the models of benchmarks/peers.py.

    python benchmarks/step_profile.py     # prints the table, writes benchmarks/results/step-<device>.json

One client trains with one thread in the engine's own step. `kernels` is the share of the wall clock that operations of
torch spend on their numbers (self time under torch's profiler, of all aten and library calls); what is left is Python,
dispatch and autograd's bookkeeping, and the most that a faster engine with the same kernels could save. Beside it
stand the largest kernels, and how much faster the step is in bfloat16, with channels_last, and with both (alternating,
medians).
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from report import write
from sides.models import MODELS
from torch.profiler import ProfilerActivity, profile

from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD, Precision
from fl.engine.eager import Replica
from fl.engine.job import GroupResults
from fl.federation import Federation, LocalTraining
from fl.federation.local_training import LocalObjective
from fl.partition import Split
from surgery import broadcast

SETTINGS = {
    "A": ("pfl_cnn", 3, 32, 10),
    "B": ("lenet", 3, 32, 50),
    "C": ("mcmahan_cnn", 1, 28, 10),
    "D": ("resnet20", 3, 32, 50),
}
STEPS = 10
PRECISIONS = {
    "float32": Precision(), "channels_last": Precision(channels_last=True), "bf16": Precision("bf16"),
    "bf16 channels_last": Precision("bf16", channels_last=True),
}  # fmt: skip


def replica(setting: str, precision: Precision, device: str) -> tuple[Replica, GroupResults]:
    """One client of STEPS steps on random images."""
    name, channels, size, batch = SETTINGS[setting]
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (batch * STEPS, channels, size, size), generator=generator).byte()
    y = torch.randint(10, (len(x),), generator=generator)
    empty = torch.empty(0, dtype=torch.int64)
    fed = Federation(
        MODELS[name](True).to(device), Dataset("random", x, y, x, y, 10).to(device),
        [Split(torch.arange(len(x)), empty, empty)], 1,
        LocalTraining(1, batch, SGD(0.01, 0.9), precision=precision),
    )  # fmt: skip
    group = fed.group(fed.model, broadcast(fed.initial(), 1), [0], LocalObjective(), Rng(0, 1))
    return Replica(group), GroupResults.empty(group)


def seconds(pair: tuple[Replica, GroupResults]) -> float:
    """Wall-clock seconds of a client."""
    begin = time.perf_counter()
    for _ in pair[0].train(0, pair[1]):
        pass
    if pair[1].loss.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(setting: str, repetitions: int, device: str) -> dict:
    """One row."""
    pairs = {name: replica(setting, precision, device) for name, precision in PRECISIONS.items()}
    times = {name: [] for name in pairs}
    for _ in range(repetitions + 1):
        for name, pair in pairs.items():
            times[name].append(seconds(pair))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiled:
        wall = seconds(pairs["float32"])
    what = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    totals = {
        e.key: getattr(e, what) / 1e6 for e in profiled.key_averages() if "::" in e.key and "autograd" not in e.key
    }
    largest = sorted(totals.items(), key=lambda item: -item[1])[:5]
    ratios = {
        name: statistics.median(a / b for a, b in zip(times["float32"][1:], values[1:]))
        for name, values in times.items()
    }
    return {
        "setting": setting, "model": SETTINGS[setting][0],
        "ms_a_step": round(1e3 * statistics.median(times["float32"][1:]) / STEPS, 3),
        "kernels": round(sum(totals.values()) / wall, 3),
        "largest": {name: round(value / wall, 3) for name, value in largest},
        "ratio": {name: round(r, 3) for name, r in ratios.items() if name != "float32"},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one repetition, written elsewhere")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.repetitions = 1 if args.quick else args.repetitions
    rows = []
    for setting in SETTINGS:
        rows.append(row := measure(setting, args.repetitions, args.device))
        print(f"{setting} {row['model']}: {row['ms_a_step']:.2f} ms a step, {row['kernels']:.0%} of it kernels")
        print("   " + ", ".join(f"{name} {share:.0%}" for name, share in row["largest"].items()))
        print("   faster by " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratio"].items()), flush=True)
        result = {"torch": torch.__version__, "device": args.device, "rows": rows}
        write(result, args.out, f"step-{args.device}{'-quick' if args.quick else ''}", done=len(rows) == len(SETTINGS))


if __name__ == "__main__":
    main()
