"""SCAFFOLD, FedNova, FedDyn and FedBN: what a client's update is worth, and what of a model stays at home."""

import pytest
import torch
from oracles import average
from refusals import fl_refused
from rounds import play, poison, row

import surgery
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.fedbn import METHOD as fedbn
from fl.algorithms.feddyn import METHOD as feddyn
from fl.algorithms.feddyn import FedDynOptions
from fl.algorithms.fednova import METHOD as fednova
from fl.algorithms.parts.progress import gradients_of
from fl.algorithms.scaffold import METHOD as scaffold
from fl.algorithms.scaffold import ScaffoldOptions
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import SGD, Adam
from fl.engine.batches import make_batches

EXACT = {"atol": 1e-10, "rtol": 1e-8}


def plain(make_federation, model="cnn", momentum=0.0, **settings):
    """A federation whose clients make steps of SGD, in float64."""
    return make_federation(model, dtype=torch.float64, optimizer=SGD(lr=0.1, momentum=momentum), **settings)


def descended(fed, start, client, rng, gradient, lr=0.1):
    """A client's model after its steps, written out: w ← w - lr gradient(loss's gradient, w)."""
    size = fed.local.size_of_batches(fed.clients.train)
    batches = make_batches([fed.clients.train[client]], [client], fed.local.epochs, size, rng, "cpu")
    weights, steps = {name: tensor.clone() for name, tensor in start.items()}, batches.steps[0]
    for s in range(steps):
        index = batches.index[0, s]
        leaves = {name: tensor.requires_grad_() for name, tensor in weights.items()}
        logits = torch.func.functional_call(fed.model, leaves, (fed.data.normalise(fed.data.x[index], torch.float64),))
        loss = torch.nn.functional.cross_entropy(logits, fed.data.y[index])
        found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
        weights = {n: (t - lr * gradient(n, found[n], t)).detach() for n, t in leaves.items()}
    return weights, steps


def assert_close(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.to(found[name]), **EXACT)


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_scaffold__is_the_papers_algorithm(make_federation, decay):
    """Three rounds of two of four clients, line by line, with option II, and a learning rate that falls."""
    fed = plain(make_federation, participants=2, schedule=lambda number: decay ** (number - 1))
    algorithm = scaffold(fed, ScaffoldOptions(lr=0.8))
    server = algorithm.init()
    x = fed.initial()
    c, own = {n: 0 * t for n, t in x.items()}, [{n: 0 * t for n, t in x.items()} for _ in range(4)]
    for number, clients in enumerate(([1, 3], [3, 0], [1, 0]), 1):
        models, changes, lr = [], [], 0.1 * decay ** (number - 1)
        for i in clients:
            y, steps = descended(fed, x, i, Rng(0, number), lambda n, g, w, i=i: g - own[i][n] + c[n], lr)  # noqa: B023
            new = {n: own[i][n] - c[n] + (x[n] - y[n]) / (steps * lr) for n in x}
            changes.append({n: new[n] - own[i][n] for n in x})
            models.append(y)
            own[i] = new
        server, update = algorithm.round(server, clients, Rng(0, number))
        x = {n: x[n] + 0.8 * sum(y[n] - x[n] for y in models) / 2 for n in x}
        c = {n: c[n] + sum(change[n] for change in changes) / 4 for n in c}
        assert_close(server["global"], x)
        assert_close(server["control"], c)
        for i in range(4):
            assert_close(row(server["clients"], i), own[i])
    assert update.metrics["models_down"] > 1.9  # the model and c
    assert update.metrics["models_up"] == 1


@pytest.mark.parametrize("method", [scaffold, feddyn])
def test_drift__who_is_dropped_remembers_nothing_new_and_counts_nowhere(make_federation, monkeypatch, method):
    """With batch norm and momentum; and a learning rate of 0 moves nobody."""
    fed = plain(make_federation, "resnet20", momentum=0.9, norm="batch", epochs=1)
    algorithm = method(fed)
    before, _ = algorithm.round(algorithm.init(), [0, 1, 2], Rng(0, 1))
    expected, _ = algorithm.round(before, [1, 2], Rng(0, 2))
    poison(monkeypatch, {1}, [0])
    found, update = algorithm.round(before, [0, 1, 2], Rng(0, 2))
    assert update.sizes[0] == 0
    for part, state in expected.items():
        assert_close(found[part], state)
    monkeypatch.undo()
    still = method(fed.with_local(schedule=lambda number: 0.0))
    after, _ = still.round(still.init(), [0, 1], Rng(0, 1))
    assert all(tensor.isfinite().all() for state in after.values() for tensor in state.values())


@pytest.mark.parametrize("last", ["filled", "partial"])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_drift__gradients_are_counted_as_steps_of_a_constant_one_move(make_federation, momentum, last):
    fed = plain(make_federation, momentum=momentum, repeats=3, last_batch=last)
    for client, count in zip([0, 2], gradients_of(fed, fed.steps([0, 2])).tolist()):
        size = fed.local.size_of_batches(fed.clients.train)
        weight = torch.nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
        for _ in range(3 * fed.local.epochs * -(-len(fed.clients.train[client]) // size)):
            weight.grad = torch.ones(())
            optimizer.step()
        assert count == pytest.approx(-weight.item(), rel=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova__is_fedavg_where_all_make_as_many_steps(make_federation, momentum):
    fed = plain(make_federation, "resnet20", momentum, sizes=(5, 7, 8, 6))
    pairs = zip(play(fednova(fed), fed), play(fedavg(fed), fed), strict=True)
    for (one, _), (other, _) in pairs:
        for name, tensor in other["global"].items():
            torch.testing.assert_close(one["global"][name], tensor, atol=1e-6, rtol=1e-6)


def test_fednova__divides_by_steps_and_multiplies_by_their_mean(make_federation):
    fed = plain(make_federation, sizes=(4, 12, 30, 5))
    algorithm, clients = fednova(fed), [2, 0, 1]
    server, update = algorithm.round(algorithm.init(), clients, Rng(0, 1))
    steps, sizes, x = [16, 2, 6], update.sizes, fed.initial()  # two epochs of batches of 4
    assert sizes == (30, 4, 12)
    effective = sum(n * t for n, t in zip(sizes, steps)) / sum(sizes)
    for name in fed.trainable:
        moves = [n / sum(sizes) * (update.states[name][k] - x[name]) / steps[k] for k, n in enumerate(sizes)]
        torch.testing.assert_close(server["global"][name], x[name] + effective * sum(moves), atol=1e-7, rtol=1e-6)


def test_feddyn__is_the_papers_algorithm(make_federation):
    """Three rounds of two of four clients, line by line."""
    fed, alpha = plain(make_federation, participants=2), 0.3
    algorithm = feddyn(fed, FedDynOptions(alpha=alpha))
    server, x = algorithm.init(), fed.initial()
    h, own = {n: 0 * t for n, t in x.items()}, [{n: 0 * t for n, t in x.items()} for _ in range(4)]
    for number, clients in enumerate(([1, 3], [3, 0], [1, 0]), 1):
        models = []
        for i in clients:
            y, _ = descended(
                fed,
                x,
                i,
                Rng(0, number),
                lambda n, g, w, i=i: g - own[i][n] + alpha * (w.detach() - x[n]),  # noqa: B023
            )
            own[i] = {n: own[i][n] - alpha * (y[n] - x[n]) for n in x}
            models.append(y)
        server, _ = algorithm.round(server, clients, Rng(0, number))
        h = {n: h[n] - alpha / 4 * sum(y[n] - x[n] for y in models) for n in h}
        x = {n: sum(y[n] for y in models) / 2 - h[n] / alpha for n in x}
        assert_close(server["global"], x)
        for i in range(4):
            assert_close(row(server["clients"], i), own[i])


@pytest.mark.parametrize("method", [scaffold, fednova])
@pytest.mark.parametrize("optimizer", [Adam(), SGD(clip=1.0), SGD(nesterov=True), SGD(weight_decay=0.1)])
def test_drift__updates_that_are_no_sum_of_gradients_are_refused(make_federation, method, optimizer):
    with pytest.raises(FLError, match=f"{method.name} takes .* for a sum of gradients"):
        method(make_federation("cnn", optimizer=optimizer))


def test_fedbn__averages_all_but_batch_norms(make_federation):
    """Two rounds: norms are what each client had last trained; all else is the mean."""
    fed = make_federation("resnet20", norm="batch", dtype=torch.float64, epochs=1)
    algorithm, server = fedbn(fed), None
    norms = {name for name in fed.initial() if "norm" in name}
    assert norms
    for number, clients in enumerate(([0, 1], [1, 2]), 1):
        server = server or algorithm.init()
        before = server
        server, update = algorithm.round(server, clients, Rng(0, number))
        mean = average(surgery.unstack(update.states), update.sizes)
        for name, tensor in server["global"].items():
            if name not in norms:
                torch.testing.assert_close(tensor, mean[name])
        for k, client in enumerate(clients):
            assert_close(row(server["clients"], client), {n: update.states[n][k] for n in norms})
        for client in set(range(4)).difference(clients):
            assert_close(row(server["clients"], client), row(before["clients"], client))


def test_fedbn__needs_batch_norms(make_federation):
    with fl_refused("unsupported", "--norm"):
        fedbn(make_federation("cnn"))
