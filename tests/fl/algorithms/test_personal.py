"""Methods with a model for every client."""

import copy
import dataclasses
import logging

import pytest
import torch
import torch.nn.functional as F
from oracles import average
from refusals import fl_refused
from rounds import assert_same, batches_of, floats, play, played, poison, row
from torch import nn
from wrapped import wrapped

import surgery
from fl.algorithms.ditto import METHOD as ditto
from fl.algorithms.ditto import DittoOptions
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.fedavg_plus import METHOD as fedavg_plus
from fl.algorithms.fedavg_plus import FedAvgPlusOptions
from fl.algorithms.fedrep import METHOD as fedrep
from fl.algorithms.fedrep import FedRepOptions
from fl.algorithms.fesem import METHOD as fesem
from fl.algorithms.fesem_plus import METHOD as fesem_plus
from fl.algorithms.fesem_plus import FeSEMPlusOptions
from fl.algorithms.heterofl import plan_held_rows
from fl.algorithms.local import METHOD as local
from fl.algorithms.parts.personal import classifier, last_round
from fl.algorithms.pfedme import METHOD as pfedme
from fl.algorithms.pfedme import MoreauOptimizer, PFedMeOptions, envelop
from fl.base.rng import Rng
from fl.engine import SGD, Adam
from fl.engine.objectives import cross_entropy
from fl.extensions.attack import Attack
from fl.federation import federation as training

NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
OPTIMIZER = SGD(0.05, 0.9, clip=1.0)


@pytest.fixture
def federation_of(make_federation):
    """Four clients in float64 of whom two take part at a time, with a learning rate that falls."""
    defaults = {"dtype": torch.float64, "participants": 2, "optimizer": OPTIMIZER, "schedule": lambda r: 0.8**r}
    return lambda model=NET, **settings: make_federation(copy.deepcopy(model), **{**defaults, **settings})


def by_hand(fed, start, index, round, learn=lambda name: True, pull=0.0, anchor=None, shrink=0.0, inner=1, outer=None):
    """torch.optim on a copy: (state, w). With `outer`, w follows the model after every batch, else it is the anchor."""
    model = copy.deepcopy(fed.model).train()
    model.load_state_dict(start)
    learnt = {name: p.requires_grad_(learn(name)) for name, p in model.named_parameters() if learn(name)}
    w = {name: (anchor or start)[name].clone() for name in learnt}
    settings = {"lr": fed.local.optimizer.lr * fed.local.schedule(round)}
    if isinstance(fed.local.optimizer, Adam):
        optimizer = torch.optim.Adam(learnt.values(), **settings)
    else:
        optimizer = torch.optim.SGD(learnt.values(), **settings, momentum=fed.local.optimizer.momentum)
    for batch in index:
        x, y = fed.data.normalise(fed.data.x[batch], torch.float64), fed.data.y[batch]
        for _ in range(inner):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for name, p in learnt.items():
                p.grad += pull * (p.detach() - w[name]) + shrink * p.detach()
            if fed.local.optimizer.clip:
                nn.utils.clip_grad_norm_(learnt.values(), fed.local.optimizer.clip)
            optimizer.step()
        if outer:
            w = {
                name: w[name] - outer * fed.local.schedule(round) * pull * (w[name] - learnt[name].detach())
                for name in w
            }
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, w


def assert_close(actual, expected):
    """Of what is no integer."""
    actual, expected = ({n: t.double() for n, t in floats(one).items()} for one in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def mean_of(fed, states, clients):
    return average(list(map(floats, states)), [len(fed.clients.train[c]) for c in clients])


def test_personal__local_is_each_client_alone(federation_of):
    fed = federation_of()
    own = [fed.initial() for _ in range(4)]
    for number, (server, trained) in enumerate(play(local(fed), fed), 1):
        rng = Rng(0, number)
        clients = fed.sample(rng)
        for c in clients:
            own[c], _ = by_hand(fed, own[c], batches_of(fed, c, rng), number)
        assert_close(server["clients"], surgery.stack(own))
        assert_close(server["global"], mean_of(fed, own, range(4)))
        assert_close(row(trained.states, 1), own[clients[1]])
        assert not any(trained.metrics.values())


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_personal__ditto_without_its_term_is_fedavg_beside_local(federation_of, backend):
    fed = federation_of(backend=backend)
    three = (play(algorithm, fed) for algorithm in (ditto(fed, DittoOptions(lam=0.0)), fedavg(fed), local(fed)))
    for (both, seen), (shared, expected), (alone, _) in zip(*three, strict=True):
        assert_same(both["global"], shared["global"])
        assert_same(both["clients"], alone["clients"])
        assert seen.metrics == expected.metrics
        assert torch.equal(seen.loss, expected.loss)


def test_personal__ditto_equals_its_definition(federation_of):
    fed = federation_of()
    shared, own = fed.initial(), [fed.initial() for _ in range(4)]
    for number, (server, _) in enumerate(play(ditto(fed, DittoOptions(lam=0.7)), fed), 1):
        rng = Rng(0, number)
        clients = fed.sample(rng)
        for c in clients:
            own[c], _ = by_hand(fed, own[c], batches_of(fed, c, rng), number, pull=0.7, anchor=shared)
        sent = [by_hand(fed, shared, batches_of(fed, c, rng), number)[0] for c in clients]
        shared = {**sent[0], **mean_of(fed, sent, clients)}
        assert_close(server["global"], shared)
        assert_close(server["clients"], surgery.stack(own))


def test_personal__fedrep_equals_its_definition(federation_of):
    """A head and then the body at a time; the body's batch norms are those that its own epochs leave."""
    fed = federation_of()
    head = [name for name in fed.initial() if name.startswith("4.")]
    assert len(head) == 2
    shared, heads = fed.initial(), [{name: fed.initial()[name] for name in head} for _ in range(4)]
    for number, (server, trained) in enumerate(play(fedrep(fed, FedRepOptions(head_epochs=3)), fed), 1):
        rng, sent = Rng(0, number), []
        clients = fed.sample(rng)
        for c in clients:
            received = {**shared, **heads[c]}
            index = batches_of(fed, c, rng.apart("head"), epochs=3)
            after, _ = by_hand(fed, received, index, number, learn=lambda name: name in head)
            heads[c] = {name: after[name] for name in head}
            index = batches_of(fed, c, rng)
            sent += [by_hand(fed, {**received, **heads[c]}, index, number, learn=lambda name: name not in head)[0]]
        shared = {**sent[0], **mean_of(fed, sent, clients)}
        assert_close(server["global"], shared)
        assert_close(server["clients"], surgery.stack(heads))
        whole = sum(tensor.nbytes for tensor in shared.values())
        body = whole - sum(shared[name].nbytes for name in head)
        assert trained.metrics["bytes_down"] == trained.metrics["bytes_up"] == body
        assert trained.metrics["models_up"] == pytest.approx(body / whole)
    x = fed.data.test_x
    fed.model.load_state_dict({**shared, **heads[2]})
    expected = fed.model.eval()(fed.data.normalise(x, torch.float64))
    torch.testing.assert_close(fedrep(fed).predict(server, x, 2), expected)


def test_personal__fedrep_needs_two_parts_to_train(federation_of):
    alone = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double()
    frozen = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3)).double()
    for p in frozen[2].parameters():
        p.requires_grad_(False)
    for model in (alone, frozen):
        with fl_refused("unsupported", "--model"):
            fedrep(federation_of(model))


@pytest.mark.parametrize("optimizer", [OPTIMIZER, SGD(0.05, 0.0), Adam(0.01)])
def test_personal__pfedme_equals_its_definition(federation_of, optimizer):
    """The released code's loop: K steps on a batch, then one of w, and so on with the next batch."""
    fed = federation_of(optimizer=optimizer, epochs=1)
    options = PFedMeOptions(lam=1.5, mu=0.1, inner_steps=3, outer_lr=0.3, mixing=1.2)
    shared, own = fed.initial(), [fed.initial() for _ in range(4)]
    learnt = [name for name, _ in fed.model.named_parameters()]
    for number, (server, trained) in enumerate(play(pfedme(fed, options), fed, 2), 1):
        rng, sent = Rng(0, number), []
        clients = fed.sample(rng)
        for c in clients:
            index = batches_of(fed, c, rng)
            own[c], w = by_hand(fed, shared, index, number, pull=1.5, shrink=0.1, inner=3, outer=0.3)
            sent.append({**own[c], **w})
        mean = mean_of(fed, sent, clients)
        mixed = {name: -0.2 * shared[name] + 1.2 * mean[name] for name in learnt}
        shared = {**sent[0], **mean, **mixed}
        assert_close(server["global"], shared)
        assert_close(row(trained.states, 1), sent[1])
        assert_close(server["clients"], surgery.stack(own))


def test_personal__pfedmes_trained_states_are_the_copies_that_the_server_received(federation_of):
    """Under an attack, too: what was tampered with is averaged, and both have the names of the model."""
    fed, sent = federation_of(participants=4), []
    attack = Attack(frozenset([1]), dataclasses.replace(fed.data, y=fed.data.y.flip(0)), amplify=5.0)
    for tampering in (None, attack):
        there = wrapped(fed, attack=tampering)
        ((server, trained),) = play(pfedme(there, PFedMeOptions(inner_steps=2)), there, 1)
        assert trained.states.keys() == trained.received.keys() == fed.initial().keys()
        torch.testing.assert_close(server["global"], there.average(trained.received, trained.sizes))  # mixing is 1
        sent.append(surgery.unstack(trained.received))
    changed = [k for k in range(4) if any(not torch.equal(sent[0][k][name], sent[1][k][name]) for name in sent[0][k])]
    assert changed == [fed.sample(Rng(0, 1)).index(1)]


def test_personal__an_envelope_keeps_its_pace_with_a_tensor_for_a_learning_rate():
    """As a captured step has it; a parameter without gradient moves with nothing."""
    lr, steps = torch.tensor(0.0, dtype=torch.float64), 5
    pair = [torch.zeros(2, 3), torch.ones(2, 1), torch.zeros(2, 3), torch.ones(2, 1)]
    envelope = MoreauOptimizer(0.1, SGD(momentum=0.0), inner_steps=2, pull=0.5)._replace(lr=lr)
    memory = envelope.memory(pair)
    lr.fill_(1.0)
    for _ in range(steps):
        envelope.step(pair, memory, [torch.ones(2, 3), None, None, None], lead=1)
    assert pair[0].unique().tolist() == [-5.0]
    assert pair[2].unique().tolist() == [-2.5]  # after two steps half of 2, after four half of the 3 that are left
    assert pair[1].unique().tolist() == pair[3].unique().tolist() == [1.0]
    assert memory["made"][0].item() == steps


def tuned(fed, start, client, server):
    """What a client makes of a model in three epochs, with the rates of the server's last round."""
    index = batches_of(fed, client, last_round(server).apart("fine-tune"), epochs=3)
    return by_hand(fed, start, index, last_round(server).round)[0]


def test_personal__fedavg_plus_predicts_with_what_clients_make_of_the_global_model(federation_of, monkeypatch):
    fed, calls = federation_of(), []
    honest = training.train
    monkeypatch.setattr(training, "train", lambda *a: calls.append(len(a[0][0][0].batches.steps)) or honest(*a))
    algorithm, x = fedavg_plus(fed, FedAvgPlusOptions(epochs=3)), fed.data.test_x
    histories = zip(play(algorithm, fed, 2), play(fedavg(fed), fed, 2), strict=True)
    for number, ((server, _), (plain, _)) in enumerate(histories, 1):
        assert_same(server["global"], plain["global"])
        calls.clear()
        assert torch.equal(algorithm.predict(server, x, None), fed.predict(plain["global"], x))
        assert calls == []
        assert last_round(server).round == number
        for c in (3, 0):
            expected = fed.predict(tuned(fed, plain["global"], c, server), x)
            torch.testing.assert_close(algorithm.predict(server, x, c), expected, rtol=1e-8, atol=1e-9)
        assert calls == [1, 1]  # those who were asked about


def test_personal__fesem_plus_predicts_with_what_clients_make_of_their_clusters_model(federation_of):
    """Client 2 misses both rounds and begins from the mean of the clusters."""
    fed = federation_of(participants=3)
    plus, plain = fesem_plus(fed, FeSEMPlusOptions(2, epochs=3)), fesem(fed, FeSEMPlusOptions(2))
    (server, _), (expected, _) = (played(method, [[0, 3, 1]] * 2)[-1] for method in (plus, plain))
    for part in expected:
        assert_same(server[part], expected[part])
    own, x = server["structure"]["pathways"][0].tolist(), fed.data.test_x
    assert set(own) == {0, 1, -1}
    assert torch.equal(plus.predict(server, x, None), fed.predict(server["global"], x))
    for c, k in enumerate(own):
        start = server["global"] if k < 0 else row(server["clusters"], k)
        logits = fed.predict(tuned(fed, start, c, server), x)
        torch.testing.assert_close(plus.predict(server, x, c), logits, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("rows", [[1], [0, 1, 2]])
def test_personal__clients_of_ditto_whose_own_models_diverge_keep_them_and_still_count(
    federation_of, monkeypatch, caplog, rows
):
    fed, clients = federation_of(participants=3), [0, 2, 1]
    algorithm = ditto(fed)
    before, _ = play(algorithm, fed, 2)[-1]
    well, _ = algorithm.round(before, clients, Rng(0, 3))
    poison(monkeypatch, {2}, rows)
    with caplog.at_level(logging.WARNING, "fl"):
        server, trained = algorithm.round(before, clients, Rng(0, 3))
    assert ("round 3: the personal models all diverged" in caplog.text) == (len(rows) == 3)
    assert trained.sizes == (3, 12, 7)
    assert trained.metrics["models_up"] == 1
    assert_same(server["global"], well["global"])
    lost = [clients[k] for k in rows]
    for c in range(4):
        assert_same(row(server["clients"], c), row((before if c in lost else well)["clients"], c))


def test_personal__fedavg_plus_whose_clients_all_diverge_predicts_with_the_global_model(
    federation_of, monkeypatch, caplog
):
    fed = federation_of()
    algorithm, x = fedavg_plus(fed), fed.data.test_x
    server, _ = play(algorithm, fed, 1)[0]
    poison(monkeypatch, {1}, [0])
    with caplog.at_level(logging.WARNING, "fl"):
        assert torch.equal(algorithm.predict(server, x, 1), fed.predict(server["global"], x))
    assert "the personal models all diverged" in caplog.text


def test_personal__what_is_tuned_is_a_function_of_the_server(federation_of):
    """As it comes back from a checkpoint, in another process; and it is another one after every round."""
    fed = federation_of()
    algorithm, x = fedavg_plus(fed), fed.data.test_x
    (first, _), (second, _) = play(algorithm, fed, 2)
    seen = [algorithm.predict(server, x, 1) for server in (first, second, first)]
    again = {part: {name: tensor.clone() for name, tensor in state.items()} for part, state in first.items()}
    assert torch.equal(fedavg_plus(fed).predict(again, x, 1), seen[0])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    other = {**first, "rng": {**first["rng"], "seed": first["rng"]["seed"] + 1}}
    assert not torch.equal(algorithm.predict(other, x, 1), seen[0])
    assert algorithm.predict(algorithm.init(), x, 1).isfinite().all()  # before the first round, too
    assert {t.dtype for t in first["rng"].values()} == {torch.int64}
    assert last_round(algorithm.round(first, [0, 1], Rng(7, 2))[0]) == Rng(7, 2)


def test_personal__a_fedrep_round_in_which_nobody_is_left_keeps_the_global_model(federation_of, monkeypatch):
    fed = federation_of()
    algorithm = fedrep(fed)
    before = algorithm.init()
    poison(monkeypatch, {1}, [0])
    poison(monkeypatch, {2}, [1])
    server, trained = algorithm.round(before, [0, 2], Rng(0, 1))
    assert trained.sizes == (0, 0)
    assert trained.metrics["bytes_up"] == 0
    for part in before:
        assert_same(server[part], before[part])


def test_personal__the_copy_of_pfedme_has_no_gradient():
    """Which would take the memory of one more model for each client."""
    theta, w = (torch.tensor([[value]], requires_grad=True) for value in (1.0, 2.0))
    objective = envelop(cross_entropy, 0.5, 0.0)
    batch = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    loss = objective(lambda params, x: x @ params["theta"], {"theta": theta, "w": w}, {}, batch)
    gradients = torch.autograd.grad(loss, (theta, w), allow_unused=True)
    assert gradients[0].item() == -0.5
    assert gradients[1] is None


def test_personal__a_tied_classifier_is_the_table_of_tokens():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
            self.head.weight = self.table.weight

        def forward(self, x):
            return self.head(self.inner(self.table(x)))

    assert classifier(Tied()) == ["table.weight", "head.bias"]
    held = torch.tensor([True] * 3 + [False] * 4)
    plan = plan_held_rows(Tied(), held)
    shapes = {name: tuple(t.shape) for name, t in plan.extract(surgery.state(Tied())).items()}
    assert shapes == {"table.weight": (3, 4), "inner.weight": (4, 4), "inner.bias": (4,), "head.bias": (3,)}
