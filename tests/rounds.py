"""Rounds of a method played without a run folder, and what runs in one leave."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from fl.algorithms import ALGORITHMS
from fl.algorithms.femam import FeMAMOptions
from fl.algorithms.fesem import FeSEMOptions
from fl.algorithms.fesem_plus import FeSEMPlusOptions
from fl.algorithms.fltrust import FLTrustOptions
from fl.base.rng import Rng
from fl.engine import GroupResults
from fl.engine.batches import make_batches
from fl.engine.losses import cross_entropy
from fl.federation import federation as training
from fl.runs import evaluate
from fl.runs.metrics import read
from fl.settings import Config

SMALL = {
    "fesem": FeSEMOptions(2),
    "fesem_plus": FeSEMPlusOptions(2),
    "femam": FeMAMOptions(("global", "2", "personal"), (1, 1)),
    "fltrust": FLTrustOptions(root=8),
}
"""Options of methods for federations of few clients and rounds."""


def small(name, **settings):
    """The settings of a run of a method, with its options for few clients."""
    return Config.of(**{"algorithm": name, **{one: SMALL[one] for one in [name] if one in SMALL}, **settings})


def made(name, fed, options=SMALL):
    """The algorithm of a method, with its options among these."""
    return ALGORITHMS[name](fed, options.get(name))


def play(algorithm, fed, rounds=3, first=1, server=None):
    """(server, trained) after each round."""
    server, history = server or algorithm.init(), []
    for number in range(first, first + rounds):
        rng = Rng(0, number)
        clients = algorithm.choose(server, rng)
        server, trained = algorithm.round(server, clients, rng)
        history.append((server, trained))
    return history


def played(algorithm, cohorts, server=None, first=1):
    """(server, trained) after each round, in which these clients take part."""
    server, history = server or algorithm.init(), []
    for number, clients in enumerate(cohorts, first):
        server, trained = algorithm.round(server, clients, Rng(0, number))
        history.append((server, trained))
    return history


def row(stack, k):
    """The k-th of the states in a stack."""
    return {name: tensor[k] for name, tensor in stack.items()}


def floats(state):
    """The tensors of a state that are no integers."""
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def batches_of(fed, client, rng, epochs=None):
    """The samples of each step of a client in a round."""
    epochs, size = epochs or fed.local.epochs, fed.local.batch_size
    return list(make_batches([fed.clients.train[client]], [client], epochs, size, rng, "cpu").index[0])


def on_gpu(fed, **local):
    """The federation with its model and data on the GPU."""
    there = replace(fed, model=copy.deepcopy(fed.model).to("cuda"), data=fed.data.to("cuda"))
    return there.with_local(**local)


def results(folder):
    """What interruptions must not change, nor how a run is asked for: the table without seconds, and the server."""
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in read(folder / "metrics.csv")]
    return rows, {name: tensor.tolist() for name, tensor in load_file(folder / "checkpoint.safetensors").items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def poison(monkeypatch, rounds, entries):
    """Local training whose results are spoilt for the given entries of the cohort: a weight, not the loss."""
    honest = training.train
    calls = iter(range(1, 1000))

    def train(groups, *how):
        (trained,) = honest(groups, *how)
        if next(calls) in rounds:
            for k in entries:
                next(iter(trained.states.values()))[k].view(-1)[0] = torch.nan
        return [trained]

    monkeypatch.setattr(training, "train", train)


def pretend(monkeypatch, move):
    """Local training that does nothing but `move`: it is given a copy of the starts to write to."""

    def train(groups, *how):
        ((job, starts, _),) = groups
        states = {name: tensor.clone() for name, tensor in starts.items()}
        move(states)
        return [GroupResults(states, torch.ones(len(job.batches.steps)))]

    monkeypatch.setattr(training, "train", train)


def scores(predict, x, y, classes):
    """What a round says of a model: how it does on these samples, or tokens, with the usual loss."""
    data = SimpleNamespace(test_x=x, test_y=y, classes=classes, text=y.ndim > 1, task="classification", test_sites={})
    fed = SimpleNamespace(data=data, local=SimpleNamespace(loss=cross_entropy), metrics=())
    return evaluate.evaluate_global(fed, predict)
