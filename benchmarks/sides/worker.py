"""One side's process: `python -m sides.worker NAME`, a job on standard input, then commands; answers in JSON lines."""

import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from sides.models import MODELS

Job: TypeAlias = SimpleNamespace
"""What `Setting.job` in peers.py or `memory` in population.py makes, as attributes; equal `sizes` are one number."""


class Stop(Exception):
    """The driver needs no further round."""


class Link:
    """The line to the driver. Standard output is kept for it alone: what libraries print goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.job = Job(**self._receive())

    def ready(self, package: str, version: str, threads: str, state: Callable[[], dict[str, Tensor]]) -> None:
        """Say that rounds can begin.

        Args:
            package, version: what is measured.
            threads: in words, how the side uses the cores.
            state: returns the global model.
        """
        self._state = state
        versions = {package: version, "torch": torch.__version__, "python": platform.python_version()}
        self._send(versions=versions, threads=threads)

    def begin(self) -> int:
        """Wait for the next round, start the clock and return the round's number.

        Raises:
            Stop: if there is none.
        """
        while "round" not in (command := self._receive()):
            torch.save({name: t.detach().cpu().clone() for name, t in self._state().items()}, command["save"])
            self._send(saved=command["save"])
        self._start = time.perf_counter()
        return command["round"]

    def end(self) -> None:
        """Stop the clock and tell the driver."""
        if self.job.device == "cuda":
            torch.cuda.synchronize()
        self._send(seconds=time.perf_counter() - self._start)

    def _receive(self) -> dict[str, Any]:
        if not (line := sys.stdin.readline()):
            raise Stop
        return json.loads(line)

    def _send(self, **answer: Any) -> None:
        print(json.dumps(answer), file=self._out)


def make_model(job: Job) -> nn.Module:
    """Return the job's model with its initial weights, on the CPU; the check computes in float64."""
    model = MODELS[job.model](job.dropout)
    model.load_state_dict(torch.load(job.initial))
    return model.double() if job.check else model


class Mapped(Sequence[tuple[Tensor, Tensor]]):
    """What `client_data` returns, of a folder's memory-mapped files: a client is read when it is asked for."""

    def __init__(self, job: Job) -> None:
        self.x, self.y = (np.load(Path(job.data, f"{name}.npy"), mmap_mode="r") for name in "xy")
        self.clients, self.size = job.clients, job.sizes

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> tuple[Tensor, Tensor]:
        own = slice(client * self.size, (client + 1) * self.size)
        return torch.tensor(self.x[own], dtype=torch.float32).mul_(2 / 255).sub_(1), torch.tensor(self.y[own])


def client_data(job: Job, device: str) -> Sequence[tuple[Tensor, Tensor]]:
    """Return each client's images, normalised as `fl.data.Dataset.normalise` does to the model's dtype, and labels."""
    if Path(job.data).is_dir():
        return Mapped(job)
    data = torch.load(job.data)
    images = data["x"].to(device, torch.float64 if job.check else torch.float32).mul_(2 / 255).sub_(1)
    return list(zip(images.split(job.sizes), data["y"].to(device).split(job.sizes)))


def prepare(threads: int) -> None:
    """Torch's settings in a process that trains: its threads, and float32 without TF32, as our engine computes."""
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "ieee"


if __name__ == "__main__":
    with suppress(Stop):
        # By import and not in this module, since Ray would pickle functions of __main__ by value, caches and all.
        side, link = importlib.import_module(f"sides.{sys.argv[1]}"), Link()
        side.run(link.job, link)
