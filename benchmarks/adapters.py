"""Measure the memory of a round in which K clients train adapters of low rank, beside one in which they train models.

    python benchmarks/adapters.py    # writes benchmarks/results/adapters-cpu.json

A row is a process of its own, which trains K clients of two samples for one step from a module of 21 million parameters
(84 MB), and says by how much its peak resident memory grew beyond what it took before the round. Training keeps the
start and the result of every client, so whole models take twice their size for each, and adapters of rank 4 (0.7 MB)
twice theirs.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch
from report import write
from torch import nn

import fl

OUT = Path(__file__).parent / "results"
WIDTH, LAYERS, RANK = 1024, 20, 4
CLIENTS = (1, 4, 16)


def net() -> nn.Module:
    """Return a network of linear layers, the same in every process."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), *hidden, nn.Linear(WIDTH, 10))


def megabytes() -> float:
    """Return the peak of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one(kind: str, clients: int, backend: str) -> dict:
    """Train a round in this process."""
    config = fl.Config.of(
        algorithm="fedavg", clients=clients, participants=clients, samples=4 * clients + 100, partition="iid",
        local_epochs=1, batch_size=2, momentum=0.0, min_samples=1, backend=backend, device="cpu",
        adapters=fl.AdapterOptions("lora", rank=RANK) if kind == "adapters" else fl.AdapterOptions(),
    )  # fmt: skip
    _, algorithm = fl.build(config, model=net())
    server, rng = algorithm.init(), fl.Rng(0, 1)
    before = megabytes()
    algorithm.round(server, algorithm.choose(server, rng), rng)
    sent = sum(tensor.nbytes for tensor in server["global"].values()) / 2**20
    return {"kind": kind, "clients": clients, "backend": backend, "megabytes": megabytes() - before, "message": sent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, metavar=("KIND", "CLIENTS", "BACKEND"), help=argparse.SUPPRESS)
    if given := parser.parse_args().one:
        print(json.dumps(one(given[0], int(given[1]), given[2])))
        return
    rows = []
    for backend in ("loop", "vmap"):
        for clients in CLIENTS:
            for kind in ("adapters", "model"):
                command = [sys.executable, __file__, "--one", kind, str(clients), backend]
                done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print("{backend:5} {clients:3} clients train {kind:8}: {megabytes:6.0f} MB more".format(**rows[-1]))
    size = sum(p.numel() for p in net().parameters())
    write({"torch": torch.__version__, "parameters": size, "rank": RANK, "rows": rows}, OUT, "adapters-cpu")


if __name__ == "__main__":
    main()
