"""FeMAM and FeSEM against a version with nothing remembered, their degenerate cases, and what a level's end does."""

import dataclasses
import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from oracles import average
from rounds import assert_same, play
from selection import some
from torch import nn
from torch.func import functional_call

import surgery
import zoo
from fl.algorithms import FeMAMOptions, FeSEMOptions, fedavg, femam, fesem, local
from fl.algorithms.parts import additive, clustering
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import SGD
from fl.engine.augment import Augment
from fl.engine.batches import make_batches
from fl.federation.client_models import Level, predict, predict_all
from fl.federation.defence import Defence
from fl.federation.update import ClientUpdate
from fl.partition import Split
from fl.runs.pathways import Pathways

LEVELS = ("global", "2", "personal")
STILL = SGD(1e-30, 0.0)


def linear(make_federation, scale=0.1, **settings):
    """A federation of linear models, which train in no time."""

    def create(generator):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        for p in model.parameters():
            nn.init.normal_(p, std=scale, generator=generator)
        return model

    return make_federation(create(torch.Generator().manual_seed(1)), create=create, **settings)


def level(server, number):
    """A level, counted from 1."""
    return Level(server.get(f"level{number}", server.get("clients")), server["structure"]["pathways"][number - 1])


def losses(fed, levels, parts, mean=False):
    """Each client's mean cross entropy, its models' logits added up anew."""
    result = []
    for client, index in enumerate(parts):
        logits = predict(fed.predict, levels, client, fed.data.x[index], mean)
        logits = torch.zeros(len(index), fed.data.classes) if logits is None else logits
        result.append(F.cross_entropy(logits.double(), fed.data.y[index]).item())
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize(
    ("backend", "model"), some(product(("loop", "vmap"), ("cnn", "resnet20")), [("loop", "resnet20")])
)
def test_one_level_is_a_known_method(make_federation, backend, model):
    fed = make_federation(model, backend=backend)
    for mine, other in (
        (femam(fed, FeMAMOptions(("global",), prox=0.0)), fedavg(fed)),
        (femam(fed, FeMAMOptions(("1",), prox=0.0)), fedavg(fed)),
        (femam(fed, FeMAMOptions(("personal",), prox=0.0)), local(fed)),
        (femam(fed, FeMAMOptions(("2",), prox=0.0)), fesem(fed, FeSEMOptions(2))),
        (fesem(fed, FeSEMOptions(1)), fedavg(fed)),
        (fesem(fed, FeSEMOptions(1, "kmeans")), fedavg(fed)),
    ):
        for (a, _), (b, _) in zip(play(mine, fed), play(other, fed), strict=True):
            assert_same(a["global"], b["global"])
            for part in {"clients", "clusters"} & b.keys():
                assert_same(level(a, 1).models, b[part])


def by_hand(fed, clients, server, at, objective, rng, mean=False):
    """The participants' models after a round on one level: plain SGD on the sum (or mean) of logits, all of them
    computed in every step, those of earlier levels in evaluation mode.
    """
    names = [name for name, _ in fed.model.named_parameters()]
    parts = [fed.clients.train[c] for c in clients]
    batches = make_batches(parts, clients, fed.local.epochs, fed.local.batch_size, rng, "cpu")
    trained = []
    for k, client in enumerate(clients):
        models, mapping, _ = level(server, at)
        state = {n: t[max(int(mapping[client]), 0)].clone() for n, t in models.items()}
        start = {n: t.clone() for n, t in state.items()}
        for s in range(batches.steps[k]):
            x, y = fed.data.normalise(fed.data.x[batches.index[k, s]], torch.float64), fed.data.y[batches.index[k, s]]
            with torch.no_grad():
                fed.model.eval()
                below, used_levels = torch.zeros(len(x), fed.data.classes, dtype=torch.float64), 1
                for number in range(1, at):
                    frozen, used, _ = level(server, number)
                    if used[client] >= 0:
                        one = {n: t[used[client]] for n, t in frozen.items()}
                        below += functional_call(fed.model, one, (x,))
                        used_levels += 1
            fed.model.train()
            leaves = {n: state[n].requires_grad_() for n in names}
            logits = functional_call(fed.model, {**state, **leaves}, (x,)) + below
            loss = objective(logits / (used_levels if mean else 1), y, leaves, start, client)
            for name, g in zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                state[name] = (state[name] - fed.local.optimizer.lr * g).detach()
        trained.append({n: t.detach() for n, t in state.items()})
    return trained


@pytest.mark.parametrize(
    ("released", "model"), some(product((False, True), ("cnn", "resnet20")), [(False, "resnet20"), (True, "cnn")])
)
def test_rounds_are_those_written_out(make_federation, model, released):
    """Three levels, two rounds each: who trains what from where, the pull, the nearest centre, the weighted means; with
    and without what the released code does. After the second level, client 2 loses its model.
    """
    fed = make_federation(model, dtype=torch.float64, optimizer=SGD(0.05, 0.0), participants=4)
    options = FeMAMOptions(LEVELS, level_rounds=(2, 2), prox=0.3, prune=False)
    if released:
        options = dataclasses.replace(options, share_gradients=True, combine="mean", prox_all_levels=True)
    method, sizes = femam(fed, options), fed.clients.train.sizes.tolist()

    def objective(logits, y, leaves, start, client):
        weight = sizes[client] / sum(sizes) if released and at == 2 else 1.0
        apart = sum(((leaves[n] - start[n]) ** 2).sum() for n in leaves) if released or at == 2 else 0
        return weight * F.cross_entropy(logits, y) + 0.3 / 2 * apart

    before = method.init()
    for number in range(1, 7):
        at, rng = (number + 1) // 2, Rng(0, number)
        clients = fed.sample(rng)
        after, _ = method.round(before, clients, rng)
        begun, part = dict(before), "clients" if at == 3 else f"level{at}"
        if at > 1 and number % 2:
            start = fed.initial(Rng(0).torch("level", at - 1))
            begun[part] = surgery.broadcast(start, {2: 2, 3: 4}[at])
            if at == 3:
                begun["structure"] = {
                    "pathways": torch.cat([before["structure"]["pathways"][:2], torch.arange(4)[None]])
                }
        trained = by_hand(fed, clients, begun, at, objective, rng, mean=released)
        models, mapping, _ = level(after, at)
        if at == 2 and number == 4:  # not its first round, whose clusters K-means tells
            for k, client in enumerate(clients):
                apart = [
                    sum(((trained[k][n] - begun["level2"][n][c]) ** 2).sum() for n, _ in fed.model.named_parameters())
                    for c in range(2)
                ]
                assert mapping[client] == torch.stack(apart).argmin()
        for c in range(len(next(iter(models.values())))):
            members = [k for k, client in enumerate(clients) if mapping[client] == c]
            expected = {n: t[c] for n, t in begun[part].items()}
            if members:
                expected = average([trained[k] for k in members], [sizes[clients[k]] for k in members])
            for name, tensor in expected.items():
                torch.testing.assert_close(models[name][c].double(), tensor.double(), rtol=1e-6, atol=1e-8)
        for earlier in range(1, at):
            assert_same(level(after, earlier)[0], level(before, earlier)[0])  # frozen
        if number == 4:
            after["structure"]["pathways"][1, 2] = -1
        before = after


def test_remembered_logits_are_those_computed_anew(make_federation):
    fed = make_federation("resnet20", participants=4)
    options = FeMAMOptions(("global", "2", "3", "personal"), level_rounds=(1, 1, 1))
    *_, (server, _) = play(femam(fed, options), fed, 4)
    levels = [level(server, number) for number in (1, 2, 3)]
    grown, anew = additive.Cache(fed), additive.Cache(fed)
    tables = [grown.table(levels[:n]) for n in (1, 2, 3)]
    assert torch.equal(tables[2], anew.table(levels))
    assert grown.table(levels) is tables[2]
    assert torch.equal(tables[0], additive.Cache(fed).table(levels[:1]))  # whoever has it keeps it as it was
    for client, split in enumerate(fed.clients):
        for part in (split.train, split.valid):
            expected = predict(fed.predict, levels, client, fed.data.x[part], mean=False)
            torch.testing.assert_close(tables[2][part], expected, rtol=1e-5, atol=1e-6)
        assert not tables[2][split.test].any()

    models, mapping, _ = levels[1]
    other = mapping.clone()
    other[2] = -1 if other[2] >= 0 else 0
    assert not torch.equal(grown.table([levels[0], Level(models, other), levels[2]]), tables[2])
    assert torch.equal(grown.table(levels), tables[2])
    levels[0].models["head.bias"] += 1  # written to in place; all clients use the first level
    assert not torch.equal(grown.table(levels), tables[2])
    assert torch.equal(grown.table(levels), additive.Cache(fed).table(levels))


@pytest.mark.parametrize("combine", ["sum", "mean"])
def test_clients_keep_the_models_that_lower_their_validation_loss(make_federation, combine):
    fed = make_federation("cnn", sizes=(9, 7, 12, 5, 8, 10), participants=6, optimizer=SGD(0.1, 0.0))
    kept = FeMAMOptions(("global", "2", "2", "personal"), (2, 2, 2), combine=combine, prune=False)
    options = dataclasses.replace(kept, prune=True)
    mean = combine == "mean"
    *_, (before, _) = play(femam(fed, options), fed, 3)  # one round before the second level ends
    rng = Rng(0, 4)
    clients = fed.sample(rng)
    pruned, trained = femam(fed, options).round(before, clients, rng)
    whole, _ = femam(fed, kept).round(before, clients, rng)
    below, every = [level(before, 1)], level(whole, 2)
    gain = losses(fed, below, fed.clients.valid, mean) - losses(fed, [*below, every], fed.clients.valid, mean)
    models, mapping, _ = level(pruned, 2)
    assert torch.equal(mapping, torch.where(gain > 0, every[1], -1))
    for c in range(2):  # those that left are not in the mean
        members = [k for k, client in enumerate(clients) if mapping[client] == c]
        expected = {n: t[c] for n, t in every[0].items()}
        if members:
            states = surgery.unstack(trained.states)
            sizes = [int(fed.clients.train.sizes[clients[k]]) for k in members]
            expected = average([states[k] for k in members], sizes)
        for name, tensor in expected.items():
            torch.testing.assert_close(models[name][c].double(), tensor.double(), rtol=1e-5, atol=1e-6)
    strict, _ = femam(fed, dataclasses.replace(options, min_gain=1e6)).round(before, clients, rng)
    assert (level(strict, 2)[1] == -1).all()
    assert (level(strict, 1)[1] == 0).all()
    assert 0 < (mapping >= 0).sum() < 6, "the example has both kinds"


def test_the_personal_level_is_judged_after_every_round(make_federation):
    fed = make_federation("cnn", participants=4, optimizer=SGD(0.1, 0.0))
    options = FeMAMOptions(("global", "personal"), level_rounds=(2,))
    for server, trained in play(femam(fed, options), fed, 6)[2:]:
        models, mapping, _ = level(server, 2)
        own = Level(models, torch.arange(4))
        gain = losses(fed, [level(server, 1)], fed.clients.valid) - losses(
            fed, [level(server, 1), own], fed.clients.valid
        )
        assert torch.equal(mapping, torch.where(gain > 0, torch.arange(4), -1))
        assert trained.metrics["bytes_up"] == trained.metrics["bytes_down"] == 0
        assert trained.metrics["level"] == 2
        assert trained.metrics["models_used"] == 1 + (mapping >= 0).double().mean().item()


def test_the_last_number_of_rounds_holds_for_further_levels(make_federation):
    fed = make_federation("cnn", participants=4)
    history = play(femam(fed, FeMAMOptions(("global", "2", "2", "personal"), level_rounds=(2, 1))), fed, 6)
    assert [trained.metrics["level"] for _, trained in history] == [1, 1, 2, 3, 4, 4]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # of models that are alike
def test_a_level_ends_when_accuracy_stands_still(make_federation):
    fed = make_federation("cnn", participants=4)
    still = fed.with_local(optimizer=SGD(1e-12, 0.0))
    options = FeMAMOptions(("global", "2", "personal"), window=3, variance=1e-6)
    levels = [trained.metrics["level"] for _, trained in play(femam(still, options), still, 8)]
    assert levels == [1, 1, 1, 2, 2, 2, 3, 3]
    never = FeMAMOptions(("global", "2"), window=2, variance=0.0)
    assert {trained.metrics["level"] for _, trained in play(femam(still, never), still, 5)} == {1}


def test_convergence_is_the_variance_of_validation_accuracy(make_federation):
    fed = make_federation("cnn", participants=4, optimizer=SGD(0.1, 0.0))
    options = FeMAMOptions(("global", "personal"), window=3, variance=200.0)
    seen, ended = [], None
    for number, (server, trained) in enumerate(play(femam(fed, options), fed, 12), 1):
        if trained.metrics["level"] == 1:
            right = [
                (predict(fed.predict, [level(server, 1)], c, fed.data.x[v], False).argmax(1) == fed.data.y[v])
                for c, v in enumerate(fed.clients.valid)
            ]
            seen.append(100 * sum(r.double().mean().item() for r in right) / len(right))
            ended = number
    spread = [torch.tensor(seen[n - 3 : n]).var(correction=0).item() for n in range(3, len(seen) + 1)]
    assert spread[-1] < 200 <= min([*spread[:-1], math.inf])
    assert ended == len(seen) < 12


def test_the_window_holds_percent_and_their_population_variance(make_federation):
    """Accuracies in % that are 1 apart: 0.25, where a sample's variance would be 0.5."""
    fed = linear(make_federation, participants=4, optimizer=STILL)
    for variance, number in ((0.3, 1), (0.2, 0)):
        method = femam(fed, FeMAMOptions(("global", "personal"), window=2, variance=variance))
        server, _ = method.round(method.init(), [0, 1, 2, 3], Rng(0, 1))
        server["progress"]["accuracy"] += 0.01
        server, _ = method.round(server, [0, 1, 2, 3], Rng(0, 2))
        assert server["progress"]["level"] == number


def test_accuracy_is_a_mean_over_clients_not_samples(make_federation):
    fed = linear(make_federation, participants=4)
    ragged = [
        Split(train[n:], torch.cat([train[:n], valid]), test)
        for n, (train, valid, test) in zip((0, 0, 10, 0), fed.clients)
    ]
    fed = dataclasses.replace(fed, clients=ragged)
    ((server, _),) = play(femam(fed, FeMAMOptions(("global", "personal"))), fed, 1)
    right = [(fed.predict(server["global"], fed.data.x[v]).argmax(1) == fed.data.y[v]).double() for _, v, _ in ragged]
    mean = sum(r.mean().item() for r in right) / 4
    assert abs(mean - torch.cat(right).mean().item()) > 0.01, "the example tells the two apart"
    assert server["progress"]["accuracy"][-1].item() == pytest.approx(mean)


def test_a_model_that_gains_exactly_the_minimum_is_taken_away(make_federation):
    """Of zeros, to which training adds less than float32 has next to the other logits."""
    fed = linear(make_federation, participants=4, optimizer=STILL)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in fed.initial().items()}
    for gain, kept in ((0.0, []), (-1e-9, [0, 1, 2, 3])):
        method = femam(fed, FeMAMOptions(("global", "personal"), (1,), min_gain=gain, start="global"))
        server, _ = method.round(method.init(), [0, 1, 2, 3], Rng(0, 1))
        server = {**server, "global": zeros, "clients": surgery.broadcast(zeros, 4)}
        server, _ = method.round(server, [0, 1, 2, 3], Rng(0, 2))
        assert (level(server, 2)[1] >= 0).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("kinds", [("global", "personal"), ("global", "2", "personal")])
def test_a_level_may_begin_from_the_first_ones_model(make_federation, kinds):
    fed = linear(make_federation, participants=2, optimizer=SGD(0.1, 0.0))
    for start in ("random", "global"):
        method = femam(fed, FeMAMOptions(kinds, (1,), start=start, prune=False))
        server, history = method.init(), []
        for number in range(1, len(kinds) + 1):
            server, _ = method.round(server, [0, 1], Rng(0, number))
            history.append(server)
        personal = history[-1]["clients"]
        begun = history[0]["global"] if start == "global" else fed.initial(Rng(0).torch("level", len(kinds) - 1))
        assert_same({name: tensor[3] for name, tensor in personal.items()}, begun)  # client 3 never took part


def test_without_pruning_who_took_no_part_has_no_model(make_federation):
    fed = linear(make_federation, participants=2)
    method = femam(fed, FeMAMOptions(LEVELS, (1, 1), prune=False))
    server = method.init()
    for number, clients in enumerate(([0, 1], [3, 1], [1, 2], [2, 1]), 1):
        server, _ = method.round(server, clients, Rng(0, number))
    assert level(server, 1)[1].tolist() == [0, 0, 0, 0]
    assert (level(server, 2)[1] >= 0).tolist() == [False, True, False, True]
    assert level(server, 3)[1].tolist() == [-1, 1, 2, -1]


def test_nobody_is_given_another_clients_personal_model(make_federation):
    """Not even where any model would be kept: clients 0 and 3 miss the personal level."""
    fed = linear(make_federation, participants=2)
    method = femam(fed, FeMAMOptions(("global", "personal"), (1,), min_gain=-100.0))
    server = method.init()
    for number, clients in enumerate(([0, 1], [1, 2], [2, 1]), 1):
        server, _ = method.round(server, clients, Rng(0, number))
    assert level(server, 2)[1].tolist() == [-1, 1, 2, -1]


def test_a_client_without_any_model_predicts_with_the_global_one(make_federation):
    """Alone, and where all clients are evaluated at once: 2 and 3 never took part."""
    fed = linear(make_federation, participants=2, optimizer=SGD(0.1, 0.0))
    method = femam(fed, FeMAMOptions(("2",)))
    server, _ = method.round(method.init(), [0, 1], Rng(0, 1))
    assert (level(server, 1)[1] < 0).tolist() == [False, False, True, True]
    samples, owners = torch.arange(4), torch.arange(4)
    together = predict_all(fed, method.client_models(server), samples, owners)
    for client in range(4):
        state = server["global"] if client > 1 else level(server, 1).state(int(level(server, 1).used[client]))
        expected = fed.predict(state, fed.data.x[client : client + 1])
        torch.testing.assert_close(together[client : client + 1], expected)
        assert torch.equal(method.predict(server, fed.data.x[client : client + 1], client), expected)
    assert expected.any()


def test_a_last_level_of_clusters_is_judged_after_every_round(make_federation):
    """Who is better off without its model goes on training it."""
    fed = linear(make_federation, participants=4, optimizer=SGD(0.1, 0.0))
    options, seen = FeMAMOptions(("global", "2"), (1,)), []
    kept = play(femam(fed, dataclasses.replace(options, prune=False)), fed, 5)
    for (server, trained), (whole, _) in list(zip(play(femam(fed, options), fed, 5), kept, strict=True))[1:]:
        below, every = [level(server, 1)], level(whole, 2)
        assert_same(server["level2"], every[0])
        assert torch.equal(server["progress"]["members"], every[1])
        gain = losses(fed, below, fed.clients.valid) - losses(fed, [*below, every], fed.clients.valid)
        assert torch.equal(level(server, 2)[1], torch.where(gain > 0, every[1], -1))
        assert trained.metrics["models_down"] == 1
        seen += (gain > 0).tolist()
    assert 0 < sum(seen) < len(seen), "the example has both kinds"


def test_the_end_of_a_level_sends_its_models(make_federation):
    """Counted client by client: its model, for who missed the level all that are used, and the cluster's new mean where
    somebody left it.
    """
    fed = linear(make_federation, sizes=(9, 7, 12, 5, 8, 10, 6, 4), participants=3, optimizer=SGD(0.1, 0.0))
    rounds = ([0, 1, 2], [0, 3, 4], [1, 2, 5], [3, 4, 5])  # 0, 6 and 7 miss the second level
    ends, kinds = [], set()
    for gain in (-100.0, -0.1, 0.0, 0.1, 0.3, 100.0):
        method = femam(fed, FeMAMOptions(("global", "3", "2"), (2, 2), min_gain=gain))
        server, down = method.init(), []
        for number, clients in enumerate(rounds, 1):
            before, (server, trained) = server, method.round(server, clients, Rng(0, number))
            down.append(trained.metrics["models_down"])
        whole = femam(fed, FeMAMOptions(("global", "3", "2"), (2, 2), prune=False))
        members = level(whole.round(before, clients, Rng(0, number))[0], 2)[1].tolist()
        mapping = level(server, 2)[1].tolist()
        left = {old for old, new in zip(members, mapping) if old >= 0 > new}
        copies = [1 if old >= 0 else len(set(members) - {-1}) for old in members]
        again = [new in left for new in mapping]
        assert down == pytest.approx([1, 1 + 8 / 3, 1, 1 + (sum(copies) + sum(again)) / 3])
        ends.append(down[-1])
        kinds |= {(new >= 0, more) for new, more in zip(mapping, again)}
    assert members.count(-1) == 3
    assert ends[0] == ends[-1] == 1 + (5 + 3 * 3) / 3  # nobody left, nobody stayed
    assert kinds == {(True, True), (True, False), (False, False)}, "the example has all kinds"


def test_new_clients_are_not_offered_models_that_nobody_uses():
    spec = zoo.Spec("lenet", num_classes=3, in_channels=1, image_size=32)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in surgery.state(spec.build(torch.Generator())).items()}
    levels = []
    for bonus in ([0.0], [1.0, 9.0]):  # for the class that all samples have
        stack = surgery.broadcast(nothing, len(bonus))
        stack["fc3.bias"] = torch.tensor([[0.0, b, 0.0] for b in bonus])
        levels.append(Level(stack, torch.zeros(2, dtype=torch.int64)))
    for used, expected in ((torch.tensor([0, -1]), 0), (torch.tensor([0, 1]), 1), (torch.tensor([-1, -1]), -1)):
        pathways = Pathways(spec, ("global", "2"), [levels[0], Level(levels[1].models, used)], mean=False)
        client = pathways.join(torch.zeros(4, 1, 32, 32), torch.ones(4, dtype=torch.int64))
        assert pathways.pathway(client) == [0, expected]


def test_predictions_add_up_the_levels(make_federation):
    fed = make_federation("cnn", participants=4, optimizer=SGD(0.1, 0.0))
    images = fed.data.test_x
    for combine in ("sum", "mean"):
        method = femam(fed, FeMAMOptions(("global", "2", "personal"), (2, 2), combine=combine))
        *_, (server, _) = play(method, fed, 6)
        for client, pathway in enumerate(server["structure"]["pathways"].T.tolist()):
            parts = [
                fed.predict(level(server, number).state(k), images) for number, k in enumerate(pathway, 1) if k >= 0
            ]
            expected = torch.stack(parts).sum(0) / (len(parts) if combine == "mean" else 1)
            torch.testing.assert_close(method.predict(server, images, client), expected)
        assert torch.equal(method.predict(server, images, None), fed.predict(server["global"], images))
    strict = femam(fed, FeMAMOptions(("global", "2"), (1,), min_gain=1e6))
    *_, (server, _) = play(strict, fed, 1)
    assert torch.equal(strict.predict(server, images, 1), fed.predict(server["global"], images))


def test_clients_that_miss_rounds(make_federation):
    """Client 0 takes part in the first round of the clusters, 1 from the second on, 2 not at all: it gets, at the end,
    the model that is best for its validation data.
    """
    fed = make_federation("cnn", sizes=(9, 7, 12, 5), participants=2, optimizer=SGD(0.1, 0.0))
    method = femam(fed, FeMAMOptions(("global", "2", "personal"), (1, 3), min_gain=-100.0))  # so that all are kept
    server, _ = method.round(method.init(), [0, 1], Rng(0, 1))
    first, _ = method.round(server, [0, 3], Rng(0, 2))
    assert (level(first, 2)[1] >= 0).tolist() == [True, False, False, True]
    seen = []
    honest = fed.train

    class Watched:
        def train(self, starts, *rest, **more):
            seen.append(starts)
            return honest(starts, *rest, **more)

    object.__setattr__(fed, "train", Watched().train)
    second, _ = method.round(first, [1, 0], Rng(0, 3))
    centre = clustering.centre(fed, *level(first, 2)[:2])
    models, mapping, _ = level(first, 2)
    for name, tensor in seen[0].items():
        assert torch.equal(tensor[0], centre[name])
        assert torch.equal(tensor[1], models[name][mapping[0]])
    third, _ = method.round(second, [0, 1], Rng(0, 4))
    mapping = level(third, 2)[1]
    assert (mapping >= 0).all()
    assert level(second, 2)[1][2] == -1
    everybody = femam(fed, FeMAMOptions(("global", "2", "personal"), (1, 3), prune=False))
    unpruned, _ = everybody.round(second, [0, 1], Rng(0, 4))
    offers = [Level(unpruned["level2"], torch.tensor([-1, -1, k, -1])) for k in range(2)]
    judged = [losses(fed, [level(third, 1), offer], fed.clients.valid)[2] for offer in offers]
    assert mapping[2] == torch.stack(judged).argmin()
    last, _ = method.round(third, [2, 3], Rng(0, 5))
    start = fed.initial(Rng(0).torch("level", 2))
    for name, tensor in level(last, 3)[0].items():
        assert torch.equal(tensor[0], start[name])  # who misses the personal level has its beginning, and is judged


def test_a_cluster_without_clients_keeps_its_model(make_federation):
    fed = make_federation("cnn", participants=2)
    method = fesem(fed, FeSEMOptions(4))
    server, _ = method.round(method.init(), [0, 1], Rng(0, 1))
    used = server["structure"]["pathways"][0]
    assert sorted(used.tolist())[:2] == [-1, -1]
    assert used[0] != used[1]
    for cluster in set(range(4)) - set(used.tolist()):
        assert_same({n: t[cluster] for n, t in server["clusters"].items()}, fed.initial())


def planted(generator, k, each, apart, noise):
    """Models around k centres."""
    centres = apart * torch.randn(k, 40, generator=generator)
    truth = torch.arange(k).repeat(each)
    return {"w": centres[truth] + noise * torch.randn(k * each, 40, generator=generator)}, truth


def test_kmeans_finds_clusters_and_keeps_their_numbers():
    generator = torch.Generator().manual_seed(0)
    models, truth = planted(generator, 4, 5, 3.0, 0.1)
    old = {"w": torch.stack([models["w"][truth == c].mean(0) for c in (2, 0, 3, 1)])}
    for begun, numbers in ((True, [[1], [3], [0], [2]]), (False, [[0], [1], [2], [3]])):
        found = torch.tensor(clustering._kmeans(models, old, begun, Rng(0, 1)))
        assert [found[truth == c].unique().tolist() for c in range(4)] == numbers
    points = clustering._coordinates(models)
    expected = torch.cdist(models["w"].double(), models["w"].double())
    torch.testing.assert_close(torch.cdist(torch.tensor(points), torch.tensor(points)), expected, atol=1e-5, rtol=1e-5)


def updated(states, centres, mapping, how="nearest", compare="all", clients=None):
    """The clusters of clients whose models are linear layers; theirs and the centres' weights are lists of rows."""
    states, centres = ({"weight": torch.tensor(rows)[:, None]} for rows in (states, centres))
    clients = list(range(len(mapping))) if clients is None else clients
    trained = ClientUpdate(states, torch.zeros(len(clients)), (1,) * len(clients), states)
    made = clustering.Clustering.make(
        SimpleNamespace(model=nn.Linear(1, 1, bias=False), average=Defence().average), how, compare, "fesem"
    )
    return made.update(centres, torch.tensor(mapping), clients, trained, Rng(0, 1))[1].tolist()


def test_classifiers_are_compared_by_what_is_left_of_their_length_but_not_their_sign():
    for centre in ([3.0, 4.0], [-2.0, -5.0]):
        sign = 1 if centre[0] > 0 else -1
        states = [[sign * 3.0, sign * 3.0], centre]
        assert updated(states, [[1.0, 1.0], centre], [0, 0]) == [1, 1]
        assert updated(states, [[1.0, 1.0], centre], [0, 0], compare="classifier") == [0 if sign > 0 else 1, 1]


def test_clusters_are_numbered_by_clients_however_they_come():
    kinds = [5.0, 0.0, 9.0, 0.1, 5.1, 9.1]
    for clients in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 1, 0, 5, 4, 3]):
        states = [[kinds[client], 0.0] for client in clients]
        assert updated(states, [[0.0, 0.0]] * 3, [-1] * 6, clients=clients) == [0, 1, 2, 1, 0, 2]


def test_kmeans_afresh_is_not_the_nearest_centre():
    states, centres = [[1.0], [2.0], [20.0], [21.0]], [[0.0], [100.0]]
    assert updated(states, centres, [0, 0, 0, 0], "nearest") == [0, 0, 0, 0]
    assert updated(states, centres, [0, 0, 0, 0], "kmeans") == [0, 0, 1, 1]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_there_may_be_fewer_models_than_clusters():
    for how, mapping in (("nearest", [-1] * 4), ("kmeans", [2] * 4)):
        assert updated([[7.0]] * 4, [[7.0]] * 3, mapping, how) == [0, 0, 0, 0]
    two = [[0.0], [0.0], [9.0], [9.0]]
    assert updated(two, [[0.0], [9.0], [5.0]], [0] * 4, "kmeans") == [0, 0, 1, 1]


def test_equal_models_are_equal_points():
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    points = clustering._coordinates({"w": rows[[0, 1, 0, 2, 1, 0]]})
    assert len({tuple(point) for point in points}) == 3
    assert not clustering._coordinates({"w": torch.ones(4, 5)}).any()


def test_running_statistics_are_not_compared():
    made = clustering.Clustering.make(
        SimpleNamespace(model=nn.BatchNorm1d(1, affine=True), average=Defence().average), "nearest", "all", "fesem"
    )
    parts = ("weight", "bias", "running_mean", "running_var")
    states = dict(zip(parts, torch.tensor([[[0.1]], [[0.0]], [[50.0]], [[50.0]]])))
    centres = dict(zip(parts, torch.tensor([[[0.0], [1.0]], [[0.0], [1.0]], [[0.0], [50.0]], [[0.0], [50.0]]])))
    trained = ClientUpdate(states, torch.zeros(1), (1,), states)
    assert made.update(centres, torch.tensor([0]), [0], trained, Rng(0, 1))[1].tolist() == [0]


@pytest.mark.parametrize("how", ["nearest", "kmeans"])
@pytest.mark.parametrize("compare", ["all", "classifier"])
def test_planted_clusters_are_found(make_federation, how, compare):
    """Two kinds of clients, each with one class."""
    fed = make_federation("cnn", sizes=(12,) * 6, participants=6, epochs=3, optimizer=SGD(0.05, 0.0))
    y = fed.data.y.clone()
    for client, split in enumerate(fed.clients):
        for part in split:
            y[part] = client % 2
    fed = dataclasses.replace(fed, data=dataclasses.replace(fed.data, y=y))
    *_, (server, _) = play(fesem(fed, FeSEMOptions(2, how, compare)), fed, 3)
    assert server["structure"]["pathways"][0].tolist() in ([0, 1] * 3, [1, 0] * 3)


def test_what_cannot_be_done_is_refused(make_federation):
    fed = make_federation("cnn")
    for options, said in (
        (FeMAMOptions(("2", "global")), "'global' cannot stand there"),
        (FeMAMOptions(("personal", "2")), "'personal' cannot stand there"),
        (FeMAMOptions(("global", "5")), "'5' cannot stand there"),
        (FeMAMOptions(LEVELS, level_rounds=(3, 1, 1)), "--femam.level-rounds 3,1,1"),
        (FeMAMOptions(()), "--femam.level-rounds"),
        (FeMAMOptions(LEVELS, window=1), "--femam.window"),
        (FeMAMOptions(LEVELS, combine="max"), "unknown --femam.combine 'max': there are sum, mean"),
        (FeMAMOptions(LEVELS, start="zero"), "unknown --femam.start 'zero'"),
        (FeMAMOptions(LEVELS, clustering="ward"), "--femam.clustering"),
        (FeMAMOptions(LEVELS, compare="biases"), "--femam.compare"),
    ):
        with pytest.raises(FLError, match=said):
            femam(fed, options)
    options = FeMAMOptions(LEVELS)
    with pytest.raises(FLError, match="leave --crop and --flip"):
        femam(fed.with_local(augment=Augment(flip=True)), options)
    nothing = [Split(train, test[:0], test) for train, _, test in fed.clients]
    unjudged = dataclasses.replace(fed, clients=nothing)
    with pytest.raises(FLError, match="--local-valid"):
        femam(unjudged, options)
    *_, (server, _) = play(femam(unjudged, FeMAMOptions(LEVELS, (1, 1), prune=False)), unjudged, 3)
    assert (server["structure"]["pathways"] >= 0).sum() >= 4
    shared = [Split(torch.arange(5), v, t) for _, v, t in fed.clients]
    with pytest.raises(FLError, match="disjoint"):
        femam(dataclasses.replace(fed, clients=shared), options)
    femam(dataclasses.replace(fed, clients=shared), FeMAMOptions(("global",)))
    with pytest.raises(FLError, match="create="):
        play(femam(dataclasses.replace(fed, create=None), FeMAMOptions(LEVELS, (1, 1))), fed, 2)
