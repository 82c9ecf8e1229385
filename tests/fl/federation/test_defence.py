import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rounds import assert_same, play, poison
from selection import some

import surgery
from fl.algorithms import FedFAOptions, HeteroFLOptions, fedavg, fedfa, heterofl
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import SGD
from fl.federation.attack import Attack
from fl.federation.defence import Defence
from fl.models.fleet import make_fleet
from fl.settings import Config
from surgery import SurgeryError
from zoo import Spec

WIDE = Spec("preresnet20", 3, 1, 8, width=0.125, depth=(2, 1, 1))
KINDS = [WIDE.scaled(0.5), WIDE.scaled(0.5), WIDE.scaled(depth=(1, 1, 1)), WIDE]
ROUND = ([2, 0, 1, 3], Rng(0, 1))


def mixed(make_federation, kinds=KINDS, dtype=torch.float64, **settings):
    """Clients of different widths and depths."""
    model = WIDE.build(torch.Generator().manual_seed(0)).to(dtype)
    return make_federation(model, spec=WIDE, fleet=make_fleet(model, WIDE, kinds), **settings)


def trimmed(values, trim):
    """numpy's sort and mean along the first axis; trim 0.5 is numpy's median."""
    if trim == 0.5:
        return np.median(values, 0)
    cut = math.floor(trim * len(values) + 1e-9)
    return np.sort(values, 0)[cut : len(values) - cut].mean(0)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("rule", [Defence("median"), Defence("trimmed", 0.25), Defence("trimmed", 0.1)])
def test_fedavg_by_numpy(make_federation, monkeypatch, rule, dropped):
    """Who was dropped is in no median: three are left, of whom a quarter is nobody."""
    fed = make_federation("resnet20", dtype=torch.float64, participants=4, epochs=1, defence=rule)
    if dropped:
        poison(monkeypatch, {1}, [1])
    server, trained = fedavg(fed).round(fedavg(fed).init(), *ROUND)
    alive = [0, 2, 3] if dropped else [0, 1, 2, 3]
    assert [k for k, size in enumerate(trained.sizes) if size] == alive
    share = 0.5 if rule.rule == "median" else rule.trim
    for name, tensor in trained.received.items():
        values = tensor[alive].numpy()
        expected = trimmed(values, share) if tensor.is_floating_point() else values.max(0)
        np.testing.assert_allclose(server["global"][name], expected, rtol=1e-12, atol=1e-14)
    if rule == Defence("trimmed", 0.1):  # of four nobody goes, but nobody weighs more either
        weighted = surgery.average(trained.received, weights=trained.sizes)["head.weight"]
        assert not torch.allclose(weighted, server["global"]["head.weight"])


@pytest.mark.parametrize("scale", some(["none", "norm"], ["norm"]))
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("rule", [Defence("median"), Defence("trimmed", 0.25)])
def test_fedfa_among_those_who_cover_an_element(make_federation, rule, dropped, scale):
    """Every model embedded with NaN around it, numpy per element over who is left, the old value over nobody."""
    fed, options = mixed(make_federation, participants=4, epochs=1, defence=rule), FedFAOptions(scale=scale)
    plans = [fed.fleet[client].plan for client in ROUND[0]]
    trained = fed.train([p.extract(fed.initial()) for p in plans], *ROUND)
    sizes = tuple(0 if dropped and k in (0, 3) else size for k, size in enumerate(trained.sizes))
    trained = trained._replace(sizes=sizes)
    learnt = dict(fed.model.named_parameters())  # running statistics are not scaled
    groups = [tuple(n for n in layer.tensors if n in learnt) for layer in surgery.layers(fed.model)]
    scaling = {"q": 0.95, "groups": groups, "weights": sizes}
    factors = surgery.submodel_factors(trained.received, plans, **scaling) if scale == "norm" else None
    before = {name: tensor + 1 for name, tensor in fed.initial().items()}

    class Fixed(type(fed)):
        def train(self, *arguments):
            return trained

    fixed = Fixed(**{name: getattr(fed, name) for name, field in fed.__dataclass_fields__.items() if field.init})
    after = fedfa(fixed, options).round({"global": before}, *ROUND)[0]["global"]
    share, kept = 0.5 if rule.rule == "median" else rule.trim, 0
    for name, old in before.items():
        columns = []
        for k, (plan, state) in enumerate(zip(plans, trained.received)):
            value, mask = (part[name] for part in plan.embed(state))
            value = value * (factors[name][k] if factors and name in factors else 1)
            if sizes[k]:
                columns.append(torch.where(mask, value.double(), torch.nan).flatten().numpy())
        ordered = np.sort(np.stack(columns), 0)  # NaN last
        have = (~np.isnan(ordered)).sum(0)
        expected = old.double().flatten().numpy().copy()
        for m in set(have.tolist()) - {0}:
            values = ordered[:m, have == m]
            expected[have == m] = trimmed(values, share) if old.is_floating_point() else values.max(0)
        kept += (have == 0).sum()
        np.testing.assert_allclose(after[name].double().flatten().numpy(), expected, rtol=1e-9, atol=1e-12)
    assert bool(kept) == dropped  # the narrow ones alone leave some channels to nobody


def test_rows_that_a_client_does_not_count_for_are_in_no_median(make_federation):
    fed = mixed(make_federation, [WIDE] * 4, participants=4, epochs=1, defence=Defence("median"))
    y = fed.data.y.clone()
    for client, label in ((0, 1), (1, 2), (3, 2)):
        y[fed.clients.train[client]] = label
    y[fed.clients.train[2]] = torch.arange(12) % 2  # 0 and 1
    fed = replace(fed, data=replace(fed.data, y=y))
    server, trained = heterofl(fed, HeteroFLOptions(scaler=False)).round({"global": fed.initial()}, *ROUND)
    for row, owners in ((0, [2]), (1, [2, 0]), (2, [1, 3])):
        values = [trained.received[ROUND[0].index(client)]["head.weight"][row].numpy() for client in owners]
        np.testing.assert_allclose(server["global"]["head.weight"][row], np.median(values, 0), rtol=1e-12)


@pytest.mark.parametrize("stacked", [True, False])
def test_clipping_by_numpy(make_federation, stacked):
    """Against the median update of those that count, over all parameters together; buffers and short updates stay."""
    fed = make_federation("resnet20") if stacked else mixed(make_federation, dtype=torch.float32)
    names = {name for name, _ in fed.model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    plans = [fed.fleet_or_uniform[client].plan for client in range(4)]
    starts = [plan.extract(fed.initial()) for plan in plans]
    ends = [
        {
            n: t + scale * torch.rand(t.shape, generator=generator) if t.is_floating_point() else t + 1
            for n, t in s.items()
        }
        for s, scale in zip(starts, (1.0, 0.1, 7.0, 1e-3))
    ]
    sizes, clip = (5, 3, 2, 0), 1.5
    norms = [
        np.sqrt(sum(((b[n].double() - a[n].double()) ** 2).sum().item() for n in names & a.keys()))
        for a, b in zip(starts, ends)
    ]
    limit = clip * sorted(norms[:3])[1]
    both = (surgery.stack(ends), surgery.stack(starts)) if stacked else (ends, starts)
    clipped = Defence(clip=clip).clipped(*both, sizes, names)
    clipped = surgery.unstack(clipped) if stacked else clipped
    assert [norm > limit for norm in norms] == [False, False, True, False]
    for a, b, c, norm in zip(starts, ends, clipped, norms):
        for name, tensor in c.items():
            if norm <= limit or name not in names:
                assert torch.equal(tensor, b[name]), name
            else:
                torch.testing.assert_close(tensor, a[name] + limit / norm * (b[name] - a[name]), rtol=1e-4, atol=1e-6)


def test_a_round_clips_before_it_averages(make_federation):
    fed = make_federation("resnet20", participants=4, epochs=1)
    cut = replace(fed, defence=Defence(clip=0.25))
    start = fedavg(fed).init()
    plain, (server, trained) = fedavg(fed).round(start, *ROUND)[1], fedavg(cut).round(start, *ROUND)
    names = {name for name, _ in fed.model.named_parameters()}
    starts = surgery.broadcast(start["global"], 4)
    expected = cut.defence.clipped(plain.received, starts, plain.sizes, names)
    assert_same(trained.received, expected)
    assert_same(server["global"], surgery.average(expected, weights=plain.sizes))
    length = [
        surgery.distance(*({n: s[n] for n in names} for s in (t.received, starts))).diagonal() for t in (plain, trained)
    ]
    assert (length[1] < length[0]).all()


@pytest.mark.parametrize("make", [fedavg, fedfa])
def test_without_a_defence_it_is_the_plain_mean(make_federation, make):
    fed = mixed(make_federation, epochs=1) if make is fedfa else make_federation(epochs=1)
    options = (FedFAOptions(scale="none"),) if make is fedfa else ()
    server = {"global": fed.initial()}
    clients, rng = [0, 2, 3], Rng(0, 1)
    after, trained = make(fed, *options).round(server, clients, rng)
    if make is fedavg:
        expected = surgery.average(trained.received, weights=trained.sizes)
    else:
        plans = [fed.fleet[client].plan for client in clients]
        expected = surgery.average_submodels(trained.received, plans, fallback=server["global"], weights=trained.sizes)
    assert_same(after["global"], expected)
    far = replace(fed, defence=Defence(trim=0.4, clip=1e6))  # nobody is that far out, and nobody trims
    assert_same(make(far, *options).round(server, clients, rng)[0]["global"], expected)


@pytest.mark.parametrize("make", [fedavg, fedfa])
def test_an_amplified_attack_moves_the_mean_and_not_the_trimmed_mean(make_federation, make):
    """One of six is malicious; distances are to where the same rule ends among the honest."""
    sizes = (12,) * 6
    settings = {"sizes": sizes, "participants": 6, "optimizer": SGD(0.05, 0.0), "epochs": 1, "batch_size": 6}
    fed = (
        mixed(make_federation, [WIDE] * 6, torch.float32, **settings) if make is fedfa else make_federation(**settings)
    )
    y = fed.data.y.index_copy(0, fed.clients.train[1], (fed.data.y[fed.clients.train[1]] + 1) % 3)
    attack = Attack(frozenset({1}), replace(fed.data, y=y), 20.0)
    names = [name for name, _ in fed.model.named_parameters()]

    def moved(defence):
        ends = []
        for who in (None, attack):
            (server, _) = play(make(f := replace(fed, defence=defence, attack=who)), f, 2)[-1]
            ends.append(surgery.stack([{name: server["global"][name] for name in names}]))
        return surgery.distance(*ends).item()

    plain, others = (
        moved(Defence()),
        [moved(d) for d in (Defence("trimmed", 0.2), Defence("median"), Defence(clip=1.0))],
    )
    assert max(others) < plain / 3, (plain, others)


def test_bad_defences_are_refused():
    for defence, message in (
        (Defence("krum"), "unknown --defence.rule 'krum': there are mean, median, trimmed"),
        (Defence("trimmed", 0.5), "--defence.trim must be at least 0 and below 0.5, got 0.5"),
        (Defence(clip=-1.0), "--defence.clip .* got -1"),
    ):
        with pytest.raises(FLError, match=message):
            Config(defence=defence).check()
    with pytest.raises(SurgeryError, match="weights sum to zero"):
        Defence("median").average({"w": torch.ones(2, 1)}, [0, 0])
