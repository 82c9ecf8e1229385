"""FeMAM and FeSEM against a version with nothing remembered, their degenerate cases, and what a level's end does."""

import dataclasses
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from oracles import average
from rounds import assert_same, play, played, row
from selection import some
from torch import nn
from torch.func import functional_call

import surgery
import zoo
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.femam import METHOD as femam
from fl.algorithms.femam import FeMAMOptions
from fl.algorithms.fesem import METHOD as fesem
from fl.algorithms.fesem import FeSEMOptions
from fl.algorithms.local import METHOD as local
from fl.algorithms.parts import additive, clustering
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import SGD
from fl.engine.augment import Augment
from fl.engine.batches import make_batches
from fl.extensions.defence import Defence
from fl.federation import Federation
from fl.federation.client_models import Level, predict, predict_all
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


def losses(fed, levels, mean=False):
    """Each client's mean cross entropy on its validation data, its models' logits added up anew."""
    result = []
    for client, index in enumerate(fed.clients.valid):
        logits = predict(fed.predict, levels, client, fed.data.x[index], mean)
        logits = torch.zeros(len(index), fed.data.classes) if logits is None else logits
        result.append(F.cross_entropy(logits.double(), fed.data.y[index]).item())
    return torch.tensor(result, dtype=torch.float64)


def keeping(fed, below, newest, mean=False):
    """The models that clients have of the newest level if they keep those that lower their loss."""
    gain = losses(fed, below, mean) - losses(fed, [*below, newest], mean)
    return torch.where(gain > 0, newest.used, -1)


@pytest.mark.parametrize(
    ("backend", "model"), some(product(("loop", "vmap"), ("cnn", "resnet20")), [("loop", "resnet20")])
)
def test_femam__one_level_is_a_known_method(make_federation, backend, model):
    fed = make_federation(model, sizes=(3, 7, 5, 6), backend=backend, epochs=1)
    same = [play(method, fed) for method in (fedavg(fed), local(fed))]
    for mine, history in (
        (femam(fed, FeMAMOptions(("global",), prox=0.0)), same[0]),
        (femam(fed, FeMAMOptions(("1",), prox=0.0)), same[0]),
        (femam(fed, FeMAMOptions(("personal",), prox=0.0)), same[1]),
        (femam(fed, FeMAMOptions(("2",), prox=0.0)), play(fesem(fed, FeSEMOptions(2)), fed)),
        (fesem(fed, FeSEMOptions(1)), same[0]),
        (fesem(fed, FeSEMOptions(1, "kmeans")), same[0]),
    ):
        for (a, _), (b, _) in zip(play(mine, fed), history, strict=True):
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
def test_femam__rounds_are_those_written_out(make_federation, model, released):
    """Three levels, two rounds each: who trains what from where, the pull, the nearest centre, the weighted means; with
    and without what the released code does. After the second level, client 2 loses its model.
    """
    fed = make_federation(model, dtype=torch.float64, optimizer=SGD(0.05, 0.0), participants=4, epochs=1)
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


def test_femam__remembered_logits_are_those_computed_anew(make_federation):
    fed = make_federation("resnet20", participants=4, epochs=1)
    options = FeMAMOptions(("global", "2", "3", "personal"), level_rounds=(1, 1, 1))
    *_, (server, _) = play(femam(fed, options), fed, 4)
    levels, grown = [level(server, number) for number in (1, 2, 3)], additive.Cache(fed)

    def anew(levels):
        return additive.Cache(fed).table(levels)

    tables = [grown.table(levels[:n]) for n in (1, 2, 3)]
    assert torch.equal(tables[2], anew(levels))
    assert grown.table(levels) is tables[2]
    assert torch.equal(tables[0], anew(levels[:1]))  # whoever has it keeps it as it was
    for client, split in enumerate(fed.clients):
        for part in (split.train, split.valid):
            expected = predict(fed.predict, levels, client, fed.data.x[part], mean=False)
            torch.testing.assert_close(tables[2][part], expected, rtol=1e-5, atol=1e-6)
        assert not tables[2][split.test].any()

    other = levels[1].used.clone()
    other[2] = -1 if other[2] >= 0 else 0
    assert not torch.equal(grown.table([levels[0], levels[1]._replace(used=other), levels[2]]), tables[2])
    assert torch.equal(grown.table(levels), tables[2])
    levels[0].models["head.bias"] += 1  # written to in place; all clients use the first level
    assert not torch.equal(grown.table(levels), tables[2])
    assert torch.equal(grown.table(levels), anew(levels))


@pytest.mark.parametrize("combine", ["sum", "mean"])
def test_femam__clients_keep_the_models_that_lower_their_validation_loss(make_federation, combine):
    fed = make_federation("cnn", sizes=(9, 7, 12, 5, 8, 10), participants=6, optimizer=SGD(0.1, 0.0))
    kept = FeMAMOptions(("global", "2", "2", "personal"), (2, 2, 2), combine=combine, prune=False)
    options = dataclasses.replace(kept, prune=True)
    *_, (before, _) = play(femam(fed, options), fed, 3)  # one round before the second level ends
    clients = fed.sample(Rng(0, 4))
    pruned, trained = femam(fed, options).round(before, clients, Rng(0, 4))
    whole, _ = femam(fed, kept).round(before, clients, Rng(0, 4))
    every = level(whole, 2)
    models, mapping, _ = level(pruned, 2)
    assert torch.equal(mapping, keeping(fed, [level(before, 1)], every, combine == "mean"))
    for c in range(2):  # those that left are not in the mean
        members = [k for k, client in enumerate(clients) if mapping[client] == c]
        expected = every.state(c)
        if members:
            sizes = [int(fed.clients.train.sizes[clients[k]]) for k in members]
            expected = average([row(trained.states, k) for k in members], sizes)
        torch.testing.assert_close(row(models, c), expected, rtol=1e-5, atol=1e-6, check_dtype=False)
    strict, _ = femam(fed, dataclasses.replace(options, min_gain=1e6)).round(before, clients, Rng(0, 4))
    assert (level(strict, 2).used == -1).all()
    assert (level(strict, 1).used == 0).all()
    assert 0 < (mapping >= 0).sum() < 6, "the example has both kinds"


@pytest.mark.parametrize("last", ["2", "personal"])
def test_femam__the_last_level_is_judged_after_every_round(make_federation, last):
    """Who is better off without its model goes on training it."""
    fed = linear(make_federation, participants=4, optimizer=SGD(0.1, 0.0))
    options, seen = FeMAMOptions(("global", last), (1,)), []
    kept = play(femam(fed, dataclasses.replace(options, prune=False)), fed, 6)
    for (server, trained), (whole, _) in list(zip(play(femam(fed, options), fed, 6), kept, strict=True))[1:]:
        every, (models, used, _) = level(whole, 2), level(server, 2)
        assert_same(models, every.models)
        assert torch.equal(server["progress"]["members"], every.used)
        assert torch.equal(used, keeping(fed, [level(server, 1)], every))
        assert trained.metrics["level"] == 2
        assert trained.metrics["models_used"] == 1 + (used >= 0).double().mean().item()
        assert trained.metrics["models_down"] == trained.metrics["models_up"] == (last != "personal")
        seen += (used >= 0).tolist()
    assert 0 < sum(seen) < len(seen), "the example has both kinds"


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # of models that are alike
@pytest.mark.parametrize(
    ("options", "levels"),
    [
        (FeMAMOptions(("global", "2", "2", "personal"), level_rounds=(2, 1)), [1, 1, 2, 3, 4, 4]),
        (FeMAMOptions(LEVELS, window=3, variance=1e-6), [1, 1, 1, 2, 2, 2, 3, 3]),
        (FeMAMOptions(("global", "2"), window=2, variance=0.0), [1] * 5),
    ],
)
def test_femam__a_level_ends_after_its_rounds_or_when_accuracy_stands_still(make_federation, options, levels):
    """The last number of rounds holds for further levels."""
    fed = linear(make_federation, participants=4, optimizer=STILL)
    history = play(femam(fed, options), fed, len(levels))
    assert [trained.metrics["level"] for _, trained in history] == levels


def test_femam__the_window_holds_percent_and_their_population_variance(make_federation):
    """Accuracies in % that are 1 apart: 0.25, where a sample's variance would be 0.5."""
    fed = linear(make_federation, participants=4, optimizer=STILL)
    for variance, number in ((0.3, 1), (0.2, 0)):
        method = femam(fed, FeMAMOptions(("global", "personal"), window=2, variance=variance))
        server, _ = method.round(method.init(), [0, 1, 2, 3], Rng(0, 1))
        server["progress"]["accuracy"] += 0.01
        server, _ = method.round(server, [0, 1, 2, 3], Rng(0, 2))
        assert server["progress"]["level"] == number


def test_femam__accuracy_is_a_mean_over_clients_not_samples(make_federation):
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


def test_femam__a_model_that_gains_exactly_the_minimum_is_taken_away(make_federation):
    """Of zeros, to which training adds less than float32 has next to the other logits."""
    fed = linear(make_federation, participants=4, optimizer=STILL)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in fed.initial().items()}
    for gain, kept in ((0.0, []), (-1e-9, [0, 1, 2, 3])):
        method = femam(fed, FeMAMOptions(("global", "personal"), (1,), min_gain=gain, start="global"))
        ((server, _),) = played(method, [range(4)])
        server = {**server, "global": zeros, "clients": surgery.broadcast(zeros, 4)}
        server, _ = method.round(server, range(4), Rng(0, 2))
        assert (level(server, 2).used >= 0).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("kinds", [("global", "personal"), ("global", "2", "personal")])
@pytest.mark.parametrize("start", ["random", "global"])
def test_femam__a_level_may_begin_from_the_first_ones_model(make_federation, kinds, start):
    fed = linear(make_federation, participants=2, optimizer=SGD(0.1, 0.0))
    options = FeMAMOptions(kinds, (1,), start=start, prune=False)
    (first, _), *_, (last, _) = played(femam(fed, options), [[0, 1]] * len(kinds))
    begun = first["global"] if start == "global" else fed.initial(Rng(0).torch("level", len(kinds) - 1))
    assert_same(row(last["clients"], 3), begun)  # client 3 never took part


@pytest.mark.parametrize(
    ("options", "cohorts", "personal"),
    [
        (FeMAMOptions(LEVELS, (1, 1), prune=False), [[0, 1], [3, 1], [1, 2], [2, 1]], [-1, 1, 2, -1]),
        (FeMAMOptions(("global", "personal"), (1,), min_gain=-100.0), [[0, 1], [1, 2], [2, 1]], [-1, 1, 2, -1]),
    ],
)
def test_femam__who_took_no_part_has_no_personal_model(make_federation, options, cohorts, personal):
    """Nor anybody else's, even where any model would be kept; without pruning nor one of a cluster."""
    fed = linear(make_federation, participants=2)
    server, _ = played(femam(fed, options), cohorts)[-1]
    first, *clusters, last = server["structure"]["pathways"]
    assert first.tolist() == [0, 0, 0, 0]
    assert [(used >= 0).tolist() for used in clusters] == [[False, True, False, True]] * len(clusters)
    assert last.tolist() == personal


def test_femam__a_client_without_any_model_predicts_with_the_global_one(make_federation):
    """Alone, and where all clients are evaluated at once: 2 and 3 never took part."""
    fed = linear(make_federation, participants=2, optimizer=SGD(0.1, 0.0))
    method = femam(fed, FeMAMOptions(("2",)))
    ((server, _),) = played(method, [[0, 1]])
    clusters = level(server, 1)
    assert (clusters.used < 0).tolist() == [False, False, True, True]
    together = predict_all(fed, method.client_models(server), torch.arange(4), torch.arange(4))
    for client, k in enumerate(clusters.used.tolist()):
        expected = fed.predict(clusters.state(k) if k >= 0 else server["global"], fed.data.x[client : client + 1])
        torch.testing.assert_close(together[client : client + 1], expected)
        assert torch.equal(method.predict(server, fed.data.x[client : client + 1], client), expected)
    assert expected.any()


def test_femam__the_end_of_a_level_sends_its_models(make_federation):
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


def test_femam__new_clients_are_not_offered_models_that_nobody_uses():
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


@pytest.mark.parametrize("combine", ["sum", "mean"])
def test_femam__predictions_add_up_the_levels(make_federation, combine):
    fed = linear(make_federation, participants=4, optimizer=SGD(0.1, 0.0))
    images, method = fed.data.test_x, femam(fed, FeMAMOptions(LEVELS, (2, 2), combine=combine))
    *_, (server, _) = play(method, fed, 6)
    for client, pathway in enumerate(server["structure"]["pathways"].T.tolist()):
        parts = [fed.predict(level(server, number).state(k), images) for number, k in enumerate(pathway, 1) if k >= 0]
        expected = torch.stack(parts).sum(0) / (len(parts) if combine == "mean" else 1)
        torch.testing.assert_close(method.predict(server, images, client), expected)
    assert torch.equal(method.predict(server, images, None), fed.predict(server["global"], images))


def test_femam__clients_that_miss_rounds(make_federation, monkeypatch):
    """Client 0 takes part in the first round of the clusters, 1 from the second on, 2 not at all: it gets, at the end,
    the model that is best for its validation data.
    """
    fed = linear(make_federation, sizes=(9, 7, 12, 5), participants=2, optimizer=SGD(0.1, 0.0))
    options = FeMAMOptions(LEVELS, (1, 3), min_gain=-100.0)  # so that all models are kept
    method = femam(fed, options)
    first, _ = played(method, [[0, 1], [0, 3]])[-1]
    models, mapping, _ = level(first, 2)
    assert (mapping >= 0).tolist() == [True, False, False, True]
    honest, seen = Federation.train, []
    monkeypatch.setattr(
        Federation, "train", lambda fed, starts, *how, **more: seen.append(starts) or honest(fed, starts, *how, **more)
    )
    ((second, _),) = played(method, [[1, 0]], first, 3)
    assert_same(row(seen[0], 0), clustering.centre(fed, models, mapping))
    assert_same(row(seen[0], 1), row(models, mapping[0]))
    ((third, _),) = played(method, [[0, 1]], second, 4)
    unpruned, _ = femam(fed, dataclasses.replace(options, prune=False)).round(second, [0, 1], Rng(0, 4))
    offers = [Level(unpruned["level2"], torch.tensor([-1, -1, k, -1])) for k in range(2)]
    judged = [losses(fed, [level(third, 1), offer])[2] for offer in offers]
    assert level(second, 2).used[2] == -1
    assert (level(third, 2).used >= 0).all()
    assert level(third, 2).used[2] == torch.stack(judged).argmin()
    ((last, _),) = played(method, [[2, 3]], third, 5)
    # who misses the personal level has its beginning, and is judged
    assert_same(row(level(last, 3).models, 0), fed.initial(Rng(0).torch("level", 2)))


def test_femam__a_cluster_without_clients_keeps_its_model(make_federation):
    fed = make_federation("cnn", participants=2)
    ((server, _),) = played(fesem(fed, FeSEMOptions(4)), [[0, 1]])
    one, other, *nobody = server["structure"]["pathways"][0].tolist()
    assert one != other
    assert nobody == [-1, -1]
    for cluster in {0, 1, 2, 3} - {one, other}:
        assert_same(row(server["clusters"], cluster), fed.initial())


# Which cluster a client belongs to


def updated(states, centres, mapping, how="nearest", compare="all", clients=None):
    """The clusters of clients after a round. What they trained, and the centres, are stacks of one layer's tensors, or
    lists of rows, which are its weights.
    """
    net = nn.BatchNorm1d(1) if isinstance(states, dict) else nn.Linear(1, 1, bias=False)
    states, centres = (
        stack if isinstance(stack, dict) else {"weight": torch.tensor(stack)[:, None]} for stack in (states, centres)
    )
    clients = list(range(len(mapping))) if clients is None else clients
    trained = ClientUpdate(states, torch.zeros(len(clients)), (1,) * len(clients), states)
    fed = SimpleNamespace(model=net, average=Defence().average)
    made = clustering.Clustering.make(fed, how, compare, "fesem")
    return made.update(centres, torch.tensor(mapping), clients, trained, Rng(0, 1))[1].tolist()


def test_femam__classifiers_are_compared_by_what_is_left_of_their_length_but_not_their_sign():
    for centre in ([3.0, 4.0], [-2.0, -5.0]):
        sign = 1 if centre[0] > 0 else -1
        states = [[sign * 3.0, sign * 3.0], centre]
        assert updated(states, [[1.0, 1.0], centre], [0, 0]) == [1, 1]
        assert updated(states, [[1.0, 1.0], centre], [0, 0], compare="classifier") == [0 if sign > 0 else 1, 1]
    states = [[-10.0, -10.0], [-10.0, -4.0]]  # a negative sum is a length, too: the first one's direction counts
    assert updated(states, [[-1.0, -1.0], states[1]], [0, 0], compare="classifier") == [0, 1]


def test_femam__running_statistics_are_not_compared():
    parts = ("weight", "bias", "running_mean", "running_var")
    states = dict(zip(parts, torch.tensor([[[0.1]], [[0.0]], [[50.0]], [[50.0]]])))
    centres = dict(zip(parts, torch.tensor([[[0.0], [1.0]], [[0.0], [1.0]], [[0.0], [50.0]], [[0.0], [50.0]]])))
    assert updated(states, centres, [0]) == [0]


def test_femam__clusters_are_numbered_by_clients_however_they_come():
    kinds = [5.0, 0.0, 9.0, 0.1, 5.1, 9.1]
    for clients in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 1, 0, 5, 4, 3]):
        states = [[kinds[client], 0.0] for client in clients]
        assert updated(states, [[0.0, 0.0]] * 3, [-1] * 6, clients=clients) == [0, 1, 2, 1, 0, 2]


def test_femam__kmeans_afresh_is_not_the_nearest_centre():
    states, centres = [[1.0], [2.0], [20.0], [21.0]], [[0.0], [100.0]]
    assert updated(states, centres, [0, 0, 0, 0], "nearest") == [0, 0, 0, 0]
    assert updated(states, centres, [0, 0, 0, 0], "kmeans") == [0, 0, 1, 1]


def test_femam__kmeans_finds_clusters_and_keeps_their_numbers():
    """Of twenty models around four centres, with many weights."""
    draw = torch.Generator().manual_seed(0)
    middle = 3 * torch.randn(4, 40, generator=draw)
    models = (middle.repeat(5, 1) + 0.1 * torch.randn(20, 40, generator=draw)).tolist()
    before = middle[[2, 0, 3, 1]].tolist()
    assert updated(models, before, [0] * 20, "kmeans") == [1, 3, 0, 2] * 5
    assert updated(models, before, [-1] * 20, "kmeans") == [0, 1, 2, 3] * 5


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_femam__there_may_be_fewer_models_than_clusters():
    for how, mapping in (("nearest", [-1] * 4), ("kmeans", [2] * 4)):
        assert updated([[7.0]] * 4, [[7.0]] * 3, mapping, how) == [0, 0, 0, 0]
    two = [[0.0], [0.0], [9.0], [9.0]]
    assert updated(two, [[0.0], [9.0], [5.0]], [0] * 4, "kmeans") == [0, 0, 1, 1]
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(4)).repeat(8, 1).tolist()
    assert updated(rows, rows[:1] * 12, [-1] * 24) == [0, 1, 2] * 8  # what is below rounding makes no clusters


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (FeMAMOptions(("2", "global")), "'global'"),
        (FeMAMOptions(("personal", "2")), "'personal'"),
        (FeMAMOptions(("global", "5")), "'5'"),
        (FeMAMOptions(LEVELS, level_rounds=(3, 1, 1)), "--femam.level-rounds 3,1,1"),
        (FeMAMOptions(()), "--femam.level-rounds"),
        (FeMAMOptions(LEVELS, window=1), "--femam.window"),
        (FeMAMOptions(LEVELS, combine="max"), "--femam.combine.*'max'"),
        (FeMAMOptions(LEVELS, start="zero"), "--femam.start.*'zero'"),
        (FeMAMOptions(LEVELS, clustering="ward"), "--femam.clustering"),
        (FeMAMOptions(LEVELS, compare="biases"), "--femam.compare"),
    ],
)
def test_femam__options_that_cannot_be_are_refused(make_federation, options, said):
    with pytest.raises(FLError, match=said):
        femam(make_federation("cnn"), options)


def test_femam__federations_that_cannot_have_levels_are_refused(make_federation):
    fed = make_federation("cnn")
    unjudged = dataclasses.replace(fed, clients=[Split(train, test[:0], test) for train, _, test in fed.clients])
    shared = dataclasses.replace(fed, clients=[Split(torch.arange(5), v, t) for _, v, t in fed.clients])
    for other, said in (
        (fed.with_local(augment=Augment(flip=True)), "--crop.*--flip"),
        (unjudged, "--local-valid"),
        (shared, "disjoint"),
        (dataclasses.replace(fed, create=None), "create="),
    ):
        with pytest.raises(FLError, match=said):
            femam(other, FeMAMOptions(LEVELS))
    femam(shared, FeMAMOptions(("global",)))
    *_, (server, _) = play(femam(unjudged, FeMAMOptions(LEVELS, (1, 1), prune=False)), unjudged, 3)
    assert (server["structure"]["pathways"] >= 0).sum() >= 4
