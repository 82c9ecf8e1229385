"""This library: `fl.federation.Federation` and a round of `fl.algorithms.fedavg`."""

from pathlib import Path

import torch
import torch.nn.functional as F

import surgery
from fl.algorithms.fedavg import METHOD as fedavg
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD, rank_backends
from fl.federation import Federation, LocalTraining
from fl.federation.local_training import LocalObjective
from fl.partition import Parts, Splits
from sides.worker import Job, Link, make_model, prepare


def run(job: Job, link: Link) -> None:
    """Serve rounds until the driver stops."""
    prepare(job.threads)
    sizes = torch.tensor(job.sizes).expand(job.clients)
    empty = Parts(torch.empty(0, dtype=torch.int64), torch.zeros(job.clients + 1, dtype=torch.int64))
    fed = Federation(
        make_model(job).to(job.device),
        dataset(job.data).to(job.device),
        clients=Splits(Parts(torch.arange(int(sizes.sum())), F.pad(sizes.cumsum(0), (1, 0))), empty, empty),
        participants=job.participants,
        local=LocalTraining(job.epochs, job.batch, SGD(job.lr, job.momentum), backend=job.backend),
    )
    algorithm = fedavg(fed)
    server = algorithm.init()
    starts = surgery.broadcast(fed.initial(), job.participants)
    group = fed.group(fed.model, starts, range(job.participants), LocalObjective(), Rng(0))
    chosen = f"auto, which is {rank_backends([group])[0]}" if job.backend == "auto" else job.backend
    threads = f"1 process, {job.threads} torch threads, backend {chosen}"
    link.ready("layer-surgery", "this checkout", threads, lambda: server["global"])
    while True:
        rng = Rng(0, link.begin())
        server, _ = algorithm.round(server, fed.sample(rng), rng)
        link.end()


def dataset(path: str) -> Dataset:
    """Return the clients' samples: of a folder's memory-mapped files, or of a file."""
    if Path(path).is_dir():
        return Dataset.from_folder(path)
    x, y = torch.load(path).values()
    return Dataset("clients", x, y, x[:1], y[:1], classes=10)
