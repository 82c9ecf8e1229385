"""Time `surgery.narrow` of two versions of this repository on large models, taking turns.

    OMP_NUM_THREADS=1 python benchmarks/narrow_speed.py --against ../old    # a checkout of the other version
    ... writes benchmarks/results/narrow-cpu.json

Each side is a process that imports its own checkout. The two make the same model, then narrow it in turns, so that what
else the machine does hits both alike. The time is the process's (all of its threads), since a search is arithmetic in
Python. Reported is the other version's time over this one's (above 1: this one is faster), the median over the
repetitions and their range.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODELS = ("convnext_tiny", "efficientnet_v2_m", "densenet201", "swin_t", "vit_b_16")  # of torchvision


def serve() -> None:
    """Narrow the models whose names come in, and answer with seconds and with the narrow model's size."""
    import torch
    import torchvision

    import surgery

    model, made = None, ""
    image = torch.zeros(1, 3, 224, 224)
    for name in map(str.strip, sys.stdin):
        if name != made:
            model, made = getattr(torchvision.models, name)().eval(), name
        begin = time.process_time()
        small, _ = surgery.narrow(model, rate=0.5, example=image)
        elapsed = time.process_time() - begin
        print(elapsed, sum(p.numel() for p in small.parameters()), flush=True)


class Side:
    """A process that narrows with one checkout."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        self.process = subprocess.Popen(
            command, cwd=checkout, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def narrow(self, name: str) -> tuple[float, int]:
        """The seconds that it takes, and the narrow model's number of parameters."""
        print(name, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline().split()
        if not answer:
            raise SystemExit(f"{name}: the other process ended with status {self.process.wait()}")
        return float(answer[0]), int(answer[1])


def main() -> None:
    import torch
    from report import write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="a checkout of the other version")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    args = parser.parse_args()
    ours, theirs = Side(ROOT), Side(args.against.resolve())
    version = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=args.against, capture_output=True, text=True, check=True
    ).stdout.strip()
    rows = []
    print(f"{'model':20} {'this (s)':>8}  {version} / this (range)")
    for name in args.models:
        ours.narrow(name), theirs.narrow(name)  # the first one imports and compiles
        ratios, times, sizes = [], [], set()
        for turn in range(args.repetitions):
            both = [(side, side.narrow(name)) for side in ((ours, theirs), (theirs, ours))[turn % 2]]
            (mine, size), (other, their_size) = (dict(both)[side] for side in (ours, theirs))
            ratios.append(other / mine)
            times.append(mine)
            sizes |= {size, their_size}
        ratio = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        rows.append({"model": name, "seconds": statistics.median(times), "ratio": ratio, "parameters": sorted(sizes)})
        print(f"{name:20} {rows[-1]['seconds']:8.2f}  {ratio['median']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    about = {"against": version, "torch": torch.__version__, "machine": platform.machine()}
    write({**about, "repetitions": args.repetitions, "rows": rows}, ROOT / "benchmarks" / "results", "narrow-cpu")


if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()
