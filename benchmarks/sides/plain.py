"""The loop of papers' code: a deep copy of the model for each client, DataLoader, torch's SGD, a mean of states."""

import copy
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sides.worker import Job, Link, client_data, make_model, prepare


def run(job: Job, link: Link) -> None:
    """Serve rounds until the driver stops."""
    prepare(job.threads)
    clients = [TensorDataset(*pair) for pair in client_data(job, "cpu")]
    server = make_model(job).to(job.device)
    link.ready("torch", torch.__version__, f"1 process, {job.threads} torch threads", server.state_dict)
    while True:
        link.begin()
        chosen = random.sample(range(len(clients)), job.participants)
        states = [train(copy.deepcopy(server), clients[c], job) for c in chosen]
        server.load_state_dict(mean(states, [len(clients[c]) for c in chosen]))
        link.end()


def train(model: nn.Module, data: TensorDataset, job: Job) -> dict[str, Tensor]:
    """One client's local training."""
    loader = DataLoader(data, job.batch, shuffle=not job.check)
    optimizer = torch.optim.SGD(model.parameters(), job.lr, job.momentum)
    model.train()
    for _ in range(job.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(job.device)), y.to(job.device)).backward()
            optimizer.step()
    return model.state_dict()


def mean(states: list[dict[str, Tensor]], sizes: list[int]) -> dict[str, Tensor]:
    """Return the mean of the states, buffers included, weighted by the clients' sizes."""
    return {name: sum(s[name] * (n / sum(sizes)) for s, n in zip(states, sizes)) for name in states[0]}
