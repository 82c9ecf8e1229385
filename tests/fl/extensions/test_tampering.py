"""Malicious clients, and rules of the server that withstand some."""

import math
from dataclasses import replace
from itertools import cycle, product

import numpy as np
import pytest
import torch
from fleets import assert_close
from refusals import fl_refused, refused
from rounds import assert_same, poison
from selection import some
from wrapped import within, wrapped

import surgery
from fl import data
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.heterofl import METHOD as heterofl
from fl.algorithms.heterofl import HeteroFLOptions
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import SGD
from fl.extensions.attack import Attack, AttackOptions, draw_malicious, make_attack
from fl.extensions.defence import Defence
from fl.federation.cohort import per_client, select
from fl.models.architectures import ArchitectureOptions
from fl.models.fleet import make_fleet
from fl.runs.assembly import build
from fl.settings import Config
from zoo import Spec

WIDE = Spec("preresnet20", 3, 1, 8, width=0.125, depth=(2, 1, 1))
KINDS = [WIDE.scale(0.5), WIDE.scale(0.5), WIDE.scale(depth=(1, 1, 1)), WIDE]
CLIENTS, RNG = [2, 0, 1, 3], Rng(0, 1)


def made(make_federation, kinds=None, **settings):
    """A federation in float64, of clients of different widths and depths if these are given."""
    model = WIDE.build(torch.Generator().manual_seed(0)).double()
    fleet = make_fleet(model, WIDE, kinds) if kinds else None
    settings = {"participants": 4, "batch_size": 5, "epochs": 1, "optimizer": SGD(0.05), **settings}
    return make_federation(model, spec=WIDE, fleet=fleet, **settings)


def begin(fed):
    """What four clients are sent: a stack, or a list where they have several architectures."""
    starts = [fed.fleet_or_uniform[client].plan.extract(fed.initial()) for client in CLIENTS]
    return starts if fed.fleet else surgery.stack(starts)


@pytest.mark.parametrize("kinds", [None, KINDS])
def test_tampering__equation_1_is_two_trainings(make_federation, kinds):
    """The honest training and one on other labels; buffers and honest clients are those of the first."""
    fed, bad, factor = made(make_federation, kinds), {1, 2}, 20.0
    y = fed.data.y.clone()
    for client in bad:
        y[fed.clients.train[client]] = (y[fed.clients.train[client]] + 1) % 3
    other, starts = replace(fed.data, y=y), begin(fed)
    attacked = wrapped(fed, attack=Attack(frozenset(bad), other, factor))
    honest, spoilt, found = (f.train(starts, CLIENTS, RNG) for f in (fed, replace(fed, data=other), attacked))
    assert torch.equal(found.loss, honest.loss)  # what clients report is honest, and so is what they keep
    assert "4 arrived; the server received other models\n" in repr(found)
    lists = [per_client(s) for s in (honest.states, spoilt.states, found.states, found.received, starts)]
    for client, mine, theirs, kept, sent, start in zip(CLIENTS, *lists):
        assert_same(kept, mine)
        learnt = fed.trainable.keys() & mine.keys() if client in bad else ()
        moved = {name: mine[name] + factor * (theirs[name] - start[name]) for name in learnt}
        assert_close(sent, mine | moved, rtol=1e-10, atol=1e-12)
        assert all(torch.equal(sent[name], mine[name]) for name in mine.keys() - moved.keys())
    alone = attacked.train(select(starts, [1]), [0], RNG)  # nobody malicious takes part
    assert alone.received is alone.states


def test_tampering__honest_training_sees_only_the_classes_of_true_samples(make_federation):
    """The masked loss: the honest pass has the mask of the true labels, the spoilt one that of the spoilt labels."""
    fed = made(make_federation, masked=True)
    y = torch.where(torch.arange(len(fed.data.y)) % 2 == 0, 0, 1)  # nobody has class 2
    clean = replace(fed.data, y=y)
    bad_data = replace(clean, y=torch.where(y == 0, 2, y))
    honest, spoilt = replace(fed, data=clean), replace(fed, data=bad_data)
    attacked = wrapped(honest, attack=Attack(frozenset({1}), bad_data, 3.0))
    assert attacked.reported_classes([0, 1]).tolist() == [[True, True, False], [True, True, True]]
    assert attacked.true_classes([0, 1]).tolist() == [[True, True, False]] * 2
    start = surgery.broadcast(fed.initial(), 2)
    plain, poisoned, got = (f.train(start, [0, 1], RNG) for f in (honest, spoilt, attacked))
    for name, _ in fed.model.named_parameters():
        assert torch.equal(got.received[name][0], plain.received[name][0])
        expected = plain.received[name][1] + 3 * (poisoned.received[name][1] - start[name][1])
        torch.testing.assert_close(got.received[name][1], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_tampering__malicious_clients_keep_their_own_architecture_unless_they_are_to_take_the_largest():
    architectures = ArchitectureOptions((0.5, 1.0), ("1", "2"), choose="cycle")
    config = Config.of(
        algorithm="fedfa", model="preresnet20", width=0.125, clients=8, participants=2, architectures=architectures
    )
    honest = [one.spec for one in build(config)[0].fleet]
    own = build(config.replace(attack=AttackOptions(0.5)))[0]
    assert [one.spec for one in own.fleet] == honest
    largest = build(config.replace(attack=AttackOptions(0.5, architecture="largest")))[0]
    bad = largest.malicious
    assert bad == own.malicious
    assert [one.spec for one in largest.fleet] == [honest[3] if k in bad else honest[k] for k in range(8)]


def test_tampering__who_is_malicious_depends_on_the_seed_and_the_share_only():
    images = data.load("digits")

    def bad(algorithm="fedavg", seed=0, **attack):
        config = Config.of(algorithm=algorithm, seed=seed, clients=10, attack=AttackOptions(**attack))
        return build(config, images)[0].malicious

    assert bad(share=0.0) == set()
    with fl_refused("argument", "0.04", "0.1"):
        bad(share=0.04)
    some = bad(share=0.3)
    assert len(some) == 3
    assert some == bad("fedfa", share=0.3, amplify=20.0)
    assert some < bad(share=0.6)
    assert len({bad(share=0.3, seed=seed) for seed in range(5)}) > 1
    assert draw_malicious(AttackOptions(1.0), 4, Rng(0)) == set(range(4))


def test_tampering__labels_are_dealt_out_anew_among_the_malicious_only(make_federation):
    fed = make_federation(sizes=(9, 8, 12, 7))
    one, other = (
        make_attack(AttackOptions(0.5), frozenset({0, 2}), fed.data, fed.clients, Rng(s)).data for s in (0, 1)
    )
    own, before = torch.cat([fed.clients.train[0], fed.clients.train[2]]), fed.data.y
    assert torch.equal(before[own].sort().values, one.y[own].sort().values)
    assert not torch.equal(before[own], one.y[own])
    counts = [torch.bincount(y[fed.clients.train[0]], minlength=3) for y in (before, one.y)]
    assert not torch.equal(*counts)  # not each client's for itself
    others = torch.ones(len(before), dtype=torch.bool).index_fill(0, own, False)
    assert torch.equal(before[others], one.y[others])
    assert one.x is fed.data.x
    assert one.test_y is fed.data.test_y
    assert not torch.equal(other.y, one.y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attack": AttackOptions(share=1.5)}, "--attack.share.*1.5"),
        ({"attack": AttackOptions(amplify=-1.0)}, "--attack.amplify"),
        ({"attack": AttackOptions(architecture="mine")}, "--attack.architecture.*'mine'"),
        ({"defence": Defence("crumb")}, "--defence.rule.*'crumb'"),
        ({"defence": Defence("trimmed", 0.5)}, "--defence.trim.*0.5.*0.5"),
        ({"defence": Defence(clip=-1.0)}, "--defence.clip"),
    ],
)
def test_tampering__bad_options_are_refused(settings, message):
    with pytest.raises(FLError, match=message):
        Config.of(**settings).check()


def test_tampering__a_median_of_nobody_is_refused():
    with refused("argument"):
        Defence("median").average({"w": torch.ones(2, 1)}, [0, 0])


# Rules of the server

RULES = [Defence(), Defence("median"), Defence("trimmed", 0.25), Defence("trimmed", 0.1)]


def mean(values, rule, weights):
    """numpy's mean along the first axis by a rule."""
    if rule.rule == "mean":
        return np.average(values, 0, weights)
    if rule.rule == "median":
        return np.median(values, 0)
    cut = math.floor(rule.trim * len(values) + 1e-9)
    return np.sort(values, 0)[cut : len(values) - cut].mean(0)


WITH_AND_WITHOUT_ALL = some(product(RULES, (False, True)), [*zip(RULES, cycle((False, True)))])


@pytest.mark.parametrize(("rule", "dropped"), WITH_AND_WITHOUT_ALL)
def test_tampering__models_are_averaged_as_by_numpy(make_federation, monkeypatch, rule, dropped):
    """Who was dropped is in no mean: three are left, of whom a quarter is nobody."""
    fed = make_federation("resnet20", dtype=torch.float64, participants=4, epochs=1, defence=rule)
    if dropped:
        poison(monkeypatch, {1}, [1])
    server, trained = fedavg(fed).round(fedavg(fed).init(), CLIENTS, RNG)
    alive = [k for k, size in enumerate(trained.sizes) if size]
    assert alive == ([0, 2, 3] if dropped else [0, 1, 2, 3])
    for name, tensor in trained.received.items():
        values, sizes = tensor[alive].numpy(), [trained.sizes[k] for k in alive]
        expected = mean(values, rule, sizes) if tensor.is_floating_point() else values.max(0)
        np.testing.assert_allclose(server["global"][name], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("rule", "dropped"), WITH_AND_WITHOUT_ALL)
def test_tampering__submodels_are_averaged_among_those_who_cover_an_element(make_federation, rule, dropped):
    """Element by element over who is left, with the factors of their layers, the old value over nobody."""
    fed = made(make_federation, KINDS, defence=rule)
    plans, draw = [fed.fleet[client].plan for client in CLIENTS], torch.Generator().manual_seed(0)
    states = [
        {n: t + torch.randn(t.shape, generator=draw) if t.is_floating_point() else t for n, t in state.items()}
        for state in begin(fed)
    ]
    weights = [0, 3, 7, 0] if dropped else [12, 3, 7, 5]
    before = {name: tensor + 1 for name, tensor in fed.initial().items()}
    factors = {"head.weight": torch.tensor([1.0, 0.5, 2.0, 3.0])}
    after, kept = fed.average(states, weights, before, plans=plans, factors=factors), 0
    embedded = [plan.embed(state) for plan, state in zip(plans, states)]
    for name, old in before.items():
        if not old.is_floating_point():
            continue
        values, masks = (np.stack([e[part][name].numpy() for e in embedded]) for part in (0, 1))
        masks &= np.array(weights).reshape(-1, *[1] * old.ndim) > 0
        values = values * factors.get(name, torch.ones(4)).numpy().reshape(-1, *[1] * old.ndim)
        expected = old.numpy().copy()
        for index in np.ndindex(*old.shape):
            have = masks[(slice(None), *index)]
            if have.any():
                expected[index] = mean(values[(have, *index)], rule, np.array(weights)[have])
            kept += not have.any()
        np.testing.assert_allclose(after[name].numpy(), expected, rtol=1e-9, atol=1e-12)
    assert bool(kept) == dropped  # the narrow ones alone leave some channels to nobody


def test_tampering__rows_that_a_client_does_not_count_for_are_in_no_median(make_federation):
    fed = made(make_federation, [WIDE] * 4, defence=Defence("median"))
    y = fed.data.y.clone()
    for client, label in ((0, 1), (1, 2), (3, 2)):
        y[fed.clients.train[client]] = label
    y[fed.clients.train[2]] = torch.arange(12) % 2  # 0 and 1
    fed = replace(fed, data=replace(fed.data, y=y))
    server, trained = heterofl(fed, HeteroFLOptions(scaler=False)).round({"global": fed.initial()}, CLIENTS, RNG)
    for row, owners in ((0, [2]), (1, [2, 0]), (2, [1, 3])):
        values = [trained.received[CLIENTS.index(client)]["head.weight"][row].numpy() for client in owners]
        np.testing.assert_allclose(server["global"]["head.weight"][row], np.median(values, 0), rtol=1e-12)


def test_tampering__the_median_of_two_lengths_is_their_mean():
    start, end = {"w": torch.zeros(2, 1)}, {"w": torch.tensor([[1.0], [3.0]])}
    assert Defence(clip=1.0).clip_updates(end, start, [1, 1], {"w"})["w"].flatten().tolist() == [1, 2]


@pytest.mark.parametrize("kinds", [None, KINDS])
def test_tampering__clipping_by_numpy(make_federation, kinds):
    """Against the median update of those that count, over all parameters together; buffers and short updates stay."""
    fed, defence = made(make_federation, kinds), Defence(clip=1.5)
    names, generator = fed.trainable.keys(), torch.Generator().manual_seed(1)
    starts = per_client(begin(fed))
    ends = [
        {n: t + scale * torch.rand(t.shape, generator=generator).to(t) for n, t in state.items()}
        for state, scale in zip(starts, (1.0, 0.1, 7.0, 1e-3))
    ]
    norms = [math.sqrt(sum(((b[n] - a[n]) ** 2).sum().item() for n in names & a.keys())) for a, b in zip(starts, ends)]
    limit = 1.5 * sorted(norms[:3])[1]
    assert [norm > limit for norm in norms] == [False, False, True, False]
    form = list if kinds else surgery.stack
    clipped = defence.clip_updates(form(ends), form(starts), (5, 3, 2, 0), names)
    for a, b, c, norm in zip(starts, ends, per_client(clipped), norms):
        if norm <= limit:
            assert_same(c, b)
        else:
            shorter = {name: a[name] + limit / norm * (b[name] - a[name]) for name in names & a.keys()}
            assert_close(c, b | shorter, atol=1e-12)
    method = heterofl if kinds else fedavg
    plain, cut = method(fed), within(method(fed), defence=defence)
    plain, cut = (one.round(one.init(), CLIENTS, RNG)[1] for one in (plain, cut))
    expected = defence.clip_updates(plain.states, begin(fed), plain.sizes, names)
    for one, other, trained in zip(*map(per_client, (cut.received, expected, cut.states))):
        assert_same(one, other)
        assert trained.keys() == one.keys()
    assert_same(*(per_client(update.states)[0] for update in (cut, plain)))  # a client predicts with what it trained
