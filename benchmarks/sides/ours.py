"""This library: `fl.federation.Federation` and a round of `fl.algorithms.fedavg`."""

import torch

import surgery
from fl.algorithms import fedavg
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD, ranked
from fl.federation import Federation, LocalTraining
from fl.federation.local_training import LocalObjective
from fl.partition import Split
from sides.worker import Job, Link, make_model, prepare


def run(job: Job, link: Link) -> None:
    """Serve rounds until the driver stops."""
    prepare(job.threads)
    x, y = torch.load(job.data).values()
    empty = torch.empty(0, dtype=torch.int64)
    fed = Federation(
        make_model(job).to(job.device),
        Dataset("clients", x, y, x[:1], y[:1], classes=10).to(job.device),
        clients=[Split(part, empty, empty) for part in torch.arange(len(y)).split(job.sizes)],
        participants=job.participants,
        local=LocalTraining(job.epochs, job.batch, SGD(job.lr, job.momentum), backend=job.backend),
    )
    algorithm = fedavg(fed)
    server = algorithm.init()
    starts = surgery.broadcast(fed.initial(), job.participants)
    group = fed.group(fed.model, starts, range(job.participants), LocalObjective(), Rng(0))
    chosen = f"auto, which is {ranked([group])[0]}" if job.backend == "auto" else job.backend
    threads = f"1 process, {job.threads} torch threads, backend {chosen}"
    link.ready("layer-surgery", "this checkout", threads, lambda: server["global"])
    while True:
        rng = Rng(0, link.begin())
        server, _ = algorithm.round(server, fed.sample(rng), rng)
        link.end()
