"""Count what a round gives a GPU to do, without one: launches a step, a client and a round.

    python benchmarks/launches.py     # prints the table, writes benchmarks/results/launches.json

Small models wait for launches, so these are what a GPU path is judged by before it is timed. Counted are the
operations that torch dispatches while it believes in a device (tests/pretend_gpu): one kernel each, convolutions with
bias two and their backward passes three, multi-tensor kernels by their limits, views none. cuDNN and cuBLAS may take
more or fewer. Of `graphs`, `step` is what the host launches (a graph is one) and `kernels` what runs inside. The tests
hold these numbers as ceilings.
"""

import argparse
import sys
from pathlib import Path

import torch
from report import write

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from launch_counts import BACKENDS, CASES, measure
from pretend_gpu import PretendGPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    rows = []
    print(f"{'launches':28}" + "".join(f"{backend:>34}" for backend in BACKENDS))
    print(" " * 28 + f"{'step kernels client  round':>34}" * len(BACKENDS))
    for case in CASES:
        with PretendGPU() as gpu:
            counts = measure(case, gpu)
        rows.append({"case": case, **counts})
        cells = [f"{c['step']:7}{c['kernels']:8}{c['client']:7}{c['round']:7}" for c in counts.values()]
        print(f"{case:28}" + "".join(f"{cell:>34}" for cell in cells), flush=True)
    write({"torch": torch.__version__, "rows": rows}, args.out, "launches")


if __name__ == "__main__":
    main()
