"""Measure what imports take beyond torch, and what a run takes beside training:
`python -m benchmarks.imports [MODULE ...] [--repeats 5]`.

Each module is imported in a process of its own after torch, in turns. Printed are the minimum of the wall and the
processor seconds, how many modules were loaded, and the packages that most of them belong to. Then `python -m fl.run`
runs as often on digits: what its process takes beside the column `seconds` of metrics.csv is imports, data, evaluation
and figures. The goal is 4 s on a quiet machine.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

MODULES = ("surgery", "zoo", "fl", "fl.run")
_IMPORT = """
import importlib, json, sys, time
import torch
before, wall, cpu = {*sys.modules}, time.perf_counter(), time.process_time()
importlib.import_module(sys.argv[1])
seconds = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps([*seconds, [*{*sys.modules} - before]]))
"""


def measure(module: str, bytecode: str) -> tuple[float, float, list[str]]:
    """Import a module in a new process: wall seconds, processor seconds and modules beyond torch's.

    Args:
        bytecode: the folder that keeps what Python compiles, which would take half of the time.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    process = subprocess.run(
        [sys.executable, "-c", _IMPORT, module], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return tuple(json.loads(process.stdout.splitlines()[-1]))


def beside_training(rounds: int, bytecode: str) -> tuple[float, float]:
    """Run `python -m fl.run` in a new process: seconds beside training, and of training."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fl.run", "--rounds", str(rounds), "--out", folder]
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=environment)
        took = time.perf_counter() - start
        (metrics,) = Path(folder).glob("*/metrics.csv")
        with metrics.open() as file:
            training = sum(float(row["seconds"]) for row in csv.DictReader(file))
    return took - training, training


def main(argv: list[str] | None = None) -> None:
    """Print a table of modules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=MODULES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40, help="of python -m fl.run; 0 leaves it out")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as bytecode:
        every = [[measure(module, bytecode) for module in arguments.modules] for _ in range(arguments.repeats + 1)]
        repeats = arguments.repeats if arguments.rounds else 0
        runs = [beside_training(arguments.rounds, bytecode) for _ in range(repeats)]
    print(f"{'module':12} {'wall s':>7} {'cpu s':>7} {'modules':>8}  of")
    for module, times in zip(arguments.modules, zip(*every[1:])):
        wall, cpu = (min(column) for column in list(zip(*times))[:2])
        packages = Counter(name.partition(".")[0] for name in times[0][2])
        most = ", ".join(f"{name} {n}" for name, n in packages.most_common(8))
        print(f"{module:12} {wall:7.2f} {cpu:7.2f} {packages.total():8}  {most}")
    if runs:
        beside, training = min(runs)
        print(f"\npython -m fl.run, {arguments.rounds} rounds: {beside:.1f} s beside {training:.1f} s of training")


if __name__ == "__main__":
    main()
