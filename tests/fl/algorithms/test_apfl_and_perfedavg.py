"""APFL, whose clients mix models, and Per-FedAvg, whose clients adapt one."""

import copy
from itertools import cycle, islice

import pytest
import torch
import torch.nn.functional as F
from oracles import average
from rounds import assert_same, batches_of, floats, play, row
from selection import some
from torch import nn
from torch.func import functional_call
from wrapped import within

from fl.algorithms.apfl import METHOD as apfl
from fl.algorithms.apfl import APFLOptions
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.local import METHOD as local
from fl.algorithms.perfedavg import METHOD as perfedavg
from fl.algorithms.perfedavg import PerFedAvgOptions, by_halves
from fl.base.rng import Rng
from fl.engine import SGD, Adam, losses
from fl.engine.batches import make_batches
from fl.extensions.defence import Defence

NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 3)).double()
NORMED = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
ETA = 0.1


@pytest.fixture
def federation_of(make_federation):
    """Four clients in float64, of whom two take part at a time, with plain steps."""
    defaults = {"dtype": torch.float64, "participants": 2, "optimizer": SGD(ETA, 0.0)}
    return lambda model=NET, **settings: make_federation(copy.deepcopy(model), **{**defaults, **settings})


def gradient(fed, state, rows):
    """Of the mean cross entropy of some samples."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
    logits = functional_call(fed.model, leaves, (fed.data.normalise(fed.data.x[rows], torch.float64),))
    loss = F.cross_entropy(logits, fed.data.y[rows])
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


def down(state, slope, rate):
    return {name: tensor - rate * slope[name] for name, tensor in state.items()}


def assert_close(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-9)


def mean_of(fed, states, clients):
    return average(states, [len(fed.clients.train[c]) for c in clients])


def models_of_all(algorithm, server):
    return [row(algorithm.client_models(server).levels[0].models, c) for c in range(4)]


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl__is_the_papers_algorithm(federation_of, adaptive):
    """Three rounds of two of four clients, line by line, and the models with which all four predict."""
    fed = federation_of()
    algorithm = apfl(fed, APFLOptions(alpha=0.4, adaptive=adaptive))
    server, shared = algorithm.init(), fed.initial()
    own, alpha = [fed.initial() for _ in range(4)], [0.4] * 4
    for number, clients in enumerate(([1, 3], [3, 0], [1, 3]), 1):
        sent = []
        for i in clients:
            w = shared
            for k, rows in enumerate(batches_of(fed, i, Rng(0, number))):
                mixture = {n: alpha[i] * own[i][n] + (1 - alpha[i]) * w[n] for n in w}
                of_w, of_mixture = gradient(fed, w, rows), gradient(fed, mixture, rows)
                toward = sum(((own[i][n] - w[n]) * of_mixture[n]).sum() for n in w)
                w, own[i] = down(w, of_w, ETA), down(own[i], of_mixture, ETA * alpha[i])
                if adaptive and k == 0:
                    alpha[i] = min(1.0, max(0.0, float(alpha[i] - ETA * toward)))
            sent.append(w)
        server, update = algorithm.round(server, clients, Rng(0, number))
        shared = mean_of(fed, sent, clients)
        assert_close(server["global"], shared)
        for i, found in enumerate(models_of_all(algorithm, server)):
            assert_close(found, {n: alpha[i] * own[i][n] + (1 - alpha[i]) * shared[n] for n in shared})
        torch.testing.assert_close(server["clients"]["alpha"], torch.tensor(alpha).double())
        assert update.metrics["models_down"] == update.metrics["models_up"] == 1
    assert len(set(alpha)) == (4 if adaptive else 1)


OPTIMIZERS = [SGD(ETA, 0.9, clip=0.5), SGD(ETA, 0.0, weight_decay=0.1), Adam(0.01, clip=0.5)]


HOW = [*zip(OPTIMIZERS, ("loop", "vmap", "loop"))]


@pytest.mark.parametrize(
    ("adaptive", "optimizer", "backend"),
    some(
        ((adaptive, *how) for adaptive in (False, True) for how in HOW),
        [(True, *HOW[0]), (False, *HOW[1]), (True, *HOW[2])],
    ),
)
def test_apfl__trains_the_global_model_as_fedavg_does(federation_of, backend, optimizer, adaptive):
    """Whatever its own models do: with momentum or moments, clipped gradients, and batch norms."""
    fed = federation_of(NORMED, backend=backend, optimizer=optimizer)
    pairs = zip(play(apfl(fed, APFLOptions(0.3, adaptive)), fed), play(fedavg(fed), fed), strict=True)
    for (one, seen), (other, expected) in pairs:
        assert_close(floats(one["global"]), floats(other["global"]))
        torch.testing.assert_close(seen.loss, expected.loss)
        assert seen.metrics == expected.metrics


def test_apfl_and_perfedavg__what_apfl_sends_is_clipped_as_in_fedavg(federation_of):
    fed = federation_of()
    pair = (play(within(make(fed), defence=Defence(clip=0.05)), fed) for make in (apfl, fedavg))
    for (one, _), (other, _) in zip(*pair):
        assert_close(one["global"], other["global"])


@pytest.mark.parametrize("optimizer", [SGD(ETA, 0.9, clip=0.5), Adam(0.01)])
def test_apfl__of_own_models_alone_is_local(federation_of, optimizer):
    fed = federation_of(NORMED, optimizer=optimizer)
    algorithm = apfl(fed, APFLOptions(alpha=1.0))
    for (one, _), (other, _) in zip(play(algorithm, fed), play(local(fed), fed), strict=True):
        for client, found in enumerate(models_of_all(algorithm, one)):
            assert_close(floats(found), floats(row(other["clients"], client)))


def test_apfl_and_perfedavg__a_share_stays_within_its_limits(federation_of):
    """At a rate at which one step would leave them."""
    fed = federation_of(optimizer=SGD(50.0, 0.0, clip=0.01))
    (*_, (server, _)) = play(apfl(fed, APFLOptions(0.5, adaptive=True)), fed)
    alpha = server["clients"]["alpha"]
    assert set(alpha.tolist()) & {0.0, 1.0}
    assert ((alpha >= 0) & (alpha <= 1)).all()


@pytest.mark.parametrize("size", [1, 4, 5])
def test_perfedavg__is_the_papers_algorithm(federation_of, size):
    """Two rounds, step by step, with batches of one sample, of an even number and of an odd one; then the models with
    which clients predict.
    """
    fed = federation_of(batch_size=size)
    algorithm = perfedavg(fed, PerFedAvgOptions(alpha=0.3, steps=2))
    server, shared = algorithm.init(), fed.initial()
    for number, clients in enumerate(([1, 3], [2, 0]), 1):
        sent = []
        for i in clients:
            w = shared
            for rows in batches_of(fed, i, Rng(0, number)):
                first, second = rows[: -(-size // 2)], rows[size // 2 :]
                w = down(w, gradient(fed, down(w, gradient(fed, w, first), 0.3), second), ETA)
            sent.append(w)
        server, update = algorithm.round(server, clients, Rng(0, number))
        shared = mean_of(fed, sent, clients)
        assert_close(server["global"], shared)
        assert update.metrics["models_down"] == update.metrics["models_up"] == 1
    rng = Rng(0, 2).apart("fine-tune")
    for i, found in enumerate(models_of_all(algorithm, server)):
        own, w = fed.clients.train[i], shared
        order = torch.randperm(len(own), generator=rng.torch("samples", i)).tolist()
        few = own[list(islice(cycle(order), 2 * size))]
        for rows in make_batches([few], [i], 1, size, rng, "cpu").index[0]:
            w = down(w, gradient(fed, w, rows), 0.3)
        assert_close(found, w)


def test_perfedavg__without_its_step_is_fedavg_on_the_second_halves(federation_of):
    """Of single samples, that is FedAvg; and a client that adapts by no step predicts with the global model."""
    fed = federation_of(batch_size=1, optimizer=SGD(ETA, 0.9, clip=1.0))
    algorithm = perfedavg(fed, PerFedAvgOptions(alpha=0.0, steps=0))
    for (one, seen), (other, expected) in zip(play(algorithm, fed), play(fedavg(fed), fed), strict=True):
        assert_close(one["global"], other["global"])
        torch.testing.assert_close(seen.loss, expected.loss)
        assert_same(algorithm.client_models(one).levels[0].state(0), one["global"])


def test_apfl_and_perfedavg__updates_of_a_model_with_a_single_number_are_clipped(federation_of):
    """The number is part of what trains, not of what is sent; it does not move, and does not make updates longer."""
    fed = federation_of()
    clipped = within(perfedavg(fed), defence=Defence(clip=0.005))
    (_, loose), (_, tight) = (play(each, fed, rounds=1)[0] for each in (perfedavg(fed), clipped))
    for k in range(2):
        moves = [
            torch.cat([(u.received[n][k] - t).flatten() for n, t in fed.initial().items()]) for u in (loose, tight)
        ]
        torch.testing.assert_close(moves[1], moves[0] * moves[1].norm() / moves[0].norm())
        assert moves[1].norm() < 0.5 * moves[0].norm()


def test_apfl_and_perfedavg__the_loss_of_several_numbers_is_their_mean():
    outputs, targets = torch.ones(4, 3), torch.zeros(4, 3)
    objective = by_halves(losses.by_name("mse", "regression"))
    found = objective(lambda params, x: outputs, {"second": torch.tensor(1.0)}, None, (outputs, targets))
    assert found == 1
