"""Measure what imports take beyond torch: `python -m benchmarks.imports [MODULE ...] [--repeats 5]`.

Each is imported in a process of its own after torch, in turns. Printed are the minimum of the wall and the processor
seconds, how many modules were loaded, and the packages that most of them belong to.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter

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


def main(argv: list[str] | None = None) -> None:
    """Print a table of modules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=MODULES)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as bytecode:
        every = [[measure(module, bytecode) for module in arguments.modules] for _ in range(arguments.repeats + 1)]
    print(f"{'module':12} {'wall s':>7} {'cpu s':>7} {'modules':>8}  of")
    for module, times in zip(arguments.modules, zip(*every[1:])):
        wall, cpu = (min(column) for column in list(zip(*times))[:2])
        packages = Counter(name.partition(".")[0] for name in times[0][2])
        most = ", ".join(f"{name} {n}" for name, n in packages.most_common(8))
        print(f"{module:12} {wall:7.2f} {cpu:7.2f} {packages.total():8}  {most}")


if __name__ == "__main__":
    main()
