from itertools import product

import pytest
import torch
from oracles import average, recombine
from rounds import assert_same, play
from selection import some

import surgery
from fl.algorithms import FedMROptions, FedMutOptions, FedProxOptions, fedavg, fedmr, fedmut, fedprox, indep
from fl.base.errors import FLError
from fl.base.rng import Rng


@pytest.mark.parametrize(
    ("backend", "model"), some(product(("loop", "vmap"), ("cnn", "resnet20")), [("loop", "cnn"), ("vmap", "resnet20")])
)
def test_fedprox_without_its_term_is_fedavg(make_federation, backend, model):
    fed = make_federation(model, backend=backend)
    for (a, _), (b, _) in zip(play(fedavg(fed), fed), play(fedprox(fed, FedProxOptions(mu=0.0)), fed), strict=True):
        assert_same(a["global"], b["global"])


def test_fedprox_pulls_towards_the_global_model(make_federation):
    fed = make_federation("cnn", epochs=4)
    start = surgery.broadcast(fed.initial(), 1)
    moved = [
        surgery.distance(start, surgery.stack([play(fedprox(fed, FedProxOptions(mu)), fed, 1)[0][0]["global"]])).item()
        for mu in (0.0, 1.0, 10.0)
    ]
    assert moved[0] > moved[1] > moved[2]


def test_indep_passes_whole_models_on(make_federation):
    """Each model after a round is one of the trained models, none is lost."""
    fed = make_federation("cnn", participants=4)
    for server, trained in play(indep(fed), fed):
        same = surgery.distance(server["slots"], trained.states) == 0
        assert same.sum(0).tolist() == same.sum(1).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("unit", "fraction"),
    some(product(("layer", "tensor", "block"), (0.0, 0.4)), [("layer", 0.0), ("tensor", 0.4), ("block", 0.4)]),
)
def test_fedmr_equals_its_definition(make_federation, unit, fraction):
    """Two rounds written out with the oracles: who trains what, the mean before recombination, the shuffled lists."""
    fed = make_federation("resnet20", participants=3)
    pieces = surgery.layers(fed.model, unit=unit)
    groups = surgery.segments(pieces, fraction=fraction)
    slots = [fed.initial() for _ in range(3)]
    for number, (server, _) in enumerate(play(fedmr(fed, FedMROptions(fraction, unit)), fed, 2), 1):
        rng = Rng(0, number)
        clients = fed.sample(rng)
        trained = [
            surgery.unstack(fed.train(surgery.stack([start]), [client], rng).states)[0]
            for start, client in zip(slots, clients, strict=True)
        ]
        for name, expected in average(trained, [1, 1, 1]).items():
            torch.testing.assert_close(server["global"][name].double(), expected, rtol=1e-5, atol=1e-5)
        permutations = surgery.permutations(len(groups), 3, generator=rng.torch("recombine"))
        lists = [surgery.Layer("", "", names) for names in groups]
        slots = recombine(trained, lists, permutations)
        for k, slot in enumerate(slots):
            for name in slot:
                torch.testing.assert_close(server["slots"][name][k], slot[name], rtol=1e-5, atol=1e-5)


def test_a_fedmr_round_keeps_sums_and_uses_every_layer_once(make_federation):
    fed = make_federation("resnet20", participants=4)
    for server, trained in play(fedmr(fed), fed):
        for name, before in trained.states.items():
            after = server["slots"][name]
            assert torch.equal(after.flatten(1).sort(0).values, before.flatten(1).sort(0).values)
        mean = surgery.average(server["slots"])  # recombination does not move the global model
        for name, tensor in server["global"].items():
            torch.testing.assert_close(mean[name], tensor, rtol=1e-5, atol=1e-6)


def test_stage_one_averages_and_then_recombines(make_federation):
    fed = make_federation("cnn", participants=3)
    history = play(fedmr(fed, FedMROptions(stage1_rounds=2)), fed, 3)
    for number, (server, _) in enumerate(history, 1):
        spread = surgery.distance(server["slots"], surgery.broadcast(server["global"], 3)).max().item()
        assert (spread == 0) == (number <= 2)


def test_fedavg_weighs_clients_by_their_samples(make_federation):
    fed = make_federation("cnn", sizes=(3, 7, 12), participants=3)
    ((server, trained),) = play(fedavg(fed), fed, 1)
    clients = fed.sample(Rng(0, 1))
    expected = average(surgery.unstack(trained.states), [(3, 7, 12)[c] for c in clients])
    for name, tensor in server["global"].items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_sampling_is_uniform_without_replacement(make_federation):
    fed = make_federation("cnn", participants=2)
    counts, first = torch.zeros(4), torch.zeros(4)
    for number in range(400):
        drawn = fed.sample(Rng(0, number))
        assert len(set(drawn)) == 2
        counts[drawn] += 1
        first[drawn[0]] += 1
    assert ((counts - 200).abs() < 50).all()  # five standard deviations of a binomial
    assert ((first - 100).abs() < 45).all()  # and in random order: FedMR's slots go to random clients


def test_bad_settings_are_refused(make_federation):
    fed = make_federation("cnn")
    for method, options in ((fedmr, FedMROptions(unit="block")), (fedmut, FedMutOptions(unit="block"))):
        with pytest.raises(FLError, match=f"--{method.name}.unit: .*no residual blocks"):
            method(fed, options)
    with pytest.raises(FLError, match="there are 4 clients"):
        make_federation("cnn", participants=5)
    with pytest.raises(FLError, match="client 1 has no training samples"):
        make_federation("cnn", sizes=(3, 0, 4))
