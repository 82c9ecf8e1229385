"""Count what a round gives a GPU to do, without one: launches a step, a client, a round and its measures, and waits.

    python benchmarks/launches.py     # prints the table, writes benchmarks/results/launches.json
    python benchmarks/launches.py --before FILE    # and a table that compares with another version's launches.json

Small models wait for launches, so these are what a GPU path is judged by before it is timed. Counted are the
operations that torch dispatches while it believes in a device (tests/pretend_gpu): one kernel each, convolutions with
bias two and their backward passes three, multi-tensor kernels by their limits, views none. cuDNN and cuBLAS may take
more or fewer. Of `graphs`, `step` is what the host launches (a graph is one) and `kernels` what runs inside. The tests
hold these numbers as ceilings.
"""

import argparse
import json
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
    parser.add_argument("--before", type=Path, help="the launches.json of another version")
    args = parser.parse_args()
    rows = []
    columns = ("step", "kernels", "client", "round", "measures", "waits")
    print(f"{'launches':28}" + "".join(f"{backend:>54}" for backend in BACKENDS))
    print(" " * 28 + "".join(f"{column:>9}" for column in columns) * len(BACKENDS))
    for case in CASES:
        with PretendGPU() as gpu:
            counts = measure(case, gpu)
        rows.append({"case": case, **counts})
        cells = [f"{found[column]:9}" for found in counts.values() for column in columns]
        print(f"{case:28}" + "".join(cells), flush=True)
    write({"torch": torch.__version__, "rows": rows}, args.out, "launches")
    if args.before:
        print(compare(json.loads(args.before.read_text())["rows"], rows))


COMPARED = (
    *(("step: loop", "loop", "step"), ("vmap", "vmap", "step")),
    *(("round: loop", "loop", "round"), ("vmap", "vmap", "round"), ("graphs", "graphs", "round")),
    *(("measures", "loop", "measures"), ("waits", "loop", "waits")),
)
"""Columns of the table that compares: title, backend, number."""


def compare(before: list[dict], after: list[dict]) -> str:
    """Make a table of two versions' launches; a number that did not change stands alone."""
    old = {row["case"]: row for row in before}
    lines = [f"| model | {' | '.join(title for title, _, _ in COMPARED)} |", "|---" * (1 + len(COMPARED)) + "|"]
    for row in after:
        pairs = [(old[row["case"]][backend][what], row[backend][what]) for _, backend, what in COMPARED]
        cells = [f"{one} -> {other}" if one != other else f"{one}" for one, other in pairs]
        lines.append(f"| {row['case']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
