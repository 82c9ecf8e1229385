"""Measure the memory and the time of a round with activation checkpointing, beside one without.

    python benchmarks/checkpointing.py    # writes benchmarks/results/checkpointing-cpu.json

A row is a process of its own, in which one client trains adapters of rank 4 on a Transformer of 12 blocks (6.7 million
parameters) for eight steps of 32 sequences of 128 bytes. It says by how much its peak resident memory grew in the
round, and how long that took. Both kinds alternate.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from report import write

import fl
from fl.data import TextOptions

OUT = Path(__file__).parent / "results"
KINDS, REPEATS = {"kept": False, "recomputed": True}, 3


def megabytes() -> float:
    """The peak of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one(kind: str) -> dict:
    """Train a round in this process."""
    config = fl.Config(
        algorithm="fedavg", dataset="pydoc", text=TextOptions("byte", length=128), samples=256, partition="iid",
        clients=1, participants=1, local_epochs=1, batch_size=32, model="transformer", depth=12, backend="loop",
        device="cpu", adapters=fl.AdapterOptions("lora", rank=4), activation_checkpointing=KINDS[kind],
    )  # fmt: skip
    fed, algorithm = fl.build(config)
    server, rng = algorithm.init(), fl.Rng(0, 1)
    before, start = megabytes(), time.perf_counter()
    algorithm.round(server, algorithm.choose(server, rng), rng)
    seconds = time.perf_counter() - start
    size = sum(tensor.numel() for tensor in (*fed.model.parameters(), *fed.model.buffers()))
    return {"kind": kind, "megabytes": megabytes() - before, "seconds": seconds, "parameters": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    if given := parser.parse_args().one:
        print(json.dumps(one(given)))
        return
    rows = []
    for _ in range(REPEATS):
        for kind in KINDS:
            command = [sys.executable, __file__, "--one", kind]
            done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print("{kind:10}: {megabytes:6.0f} MB more, {seconds:5.1f} s".format(**rows[-1]))
    middle = {
        kind: {what: median(row[what] for row in rows if row["kind"] == kind) for what in ("megabytes", "seconds")}
        for kind in KINDS
    }
    ratio = {what: middle["recomputed"][what] / middle["kept"][what] for what in ("megabytes", "seconds")}
    print(f"recomputed / kept: {ratio['megabytes']:.2f} of the memory, {ratio['seconds']:.2f} of the time")
    write({"torch": torch.__version__, "ratio": ratio, "rows": rows}, OUT, "checkpointing-cpu")


if __name__ == "__main__":
    main()
