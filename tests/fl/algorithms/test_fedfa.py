"""FedFA's rounds against its algorithms written out, and the cases in which it and its rivals are FedAvg."""

import itertools
from functools import cache, partial

import oracles
import pytest
import torch
from fleets import SPECS, assert_close, choices, fleet_federation, mixed, shapes, train_each
from hypothesis import given, settings, strategies
from rounds import play
from selection import some

import surgery
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.fedfa import METHOD as fedfa
from fl.algorithms.fedfa import FedFAOptions
from fl.algorithms.fedrolex import METHOD as fedrolex
from fl.algorithms.flexifed import METHOD as flexifed
from fl.algorithms.flexifed import FlexiFedOptions
from fl.algorithms.heterofl import METHOD as heterofl
from fl.algorithms.heterofl import HeteroFLOptions
from fl.algorithms.inclusivefl import METHOD as inclusivefl
from fl.algorithms.nefl import METHOD as nefl
from fl.algorithms.nefl import NeFLOptions
from fl.base.rng import Rng
from fl.federation.update import ClientUpdate
from fl.models.fleet import make_fleet
from zoo import Spec

COHORT = [2, 0, 3, 1]


def starts(fed, full, clients):
    """Algorithm 3: blocks fall off the ends of sections, channels off the ends of layers."""
    return [
        {name: oracles.corner(full[name], shape) for name, shape in shapes(fed, client).items()} for client in clients
    ]


def check_rounds(fed, options, oracle, rounds=2, **tolerance):
    algorithm = fedfa(fed, options)
    server = algorithm.init()
    for number in range(1, 1 + rounds):
        rng, old = Rng(0, number), server["global"]
        states, sizes = train_each(fed, starts(fed, old, COHORT), COHORT, rng)
        server, trained = algorithm.round(server, COHORT, rng)
        assert trained.sizes == sizes
        assert_close(server["global"], oracle(old, states, sizes), **tolerance)


FAMILIES = {  # with two blocks or more in a section, where that is what may be cut
    "preresnet18": (2, 3, 2, 3),
    "mobilenetv2": (1, 2, 3, 3, 2, 3, 1),
    "efficientnetv2_cifar": (1, 2, 3, 2, 3),
    "transformer": (3,),
}


@settings(max_examples=3)
@given(strategies.sampled_from(sorted(FAMILIES)), strategies.floats(0.05, 1.0), strategies.data())
def test_fedfa__every_client_contributes_to_all_of_its_width(name, width, data):
    """After grafting: to the leading corner, as large as its own layer, of every block, also of those that it lacks."""
    full = Spec(name, width=0.25, depth=FAMILIES[name], **({"tokens": 8} if name == "transformer" else {}))
    depth = tuple(data.draw(strategies.integers(min(2, blocks), blocks)) for blocks in full.depth)
    small = full.scale(width, depth)
    model = full.build()
    plan = make_fleet(model, full, [small])[0].plan
    own = plan.small_shapes
    _, mask = plan.embed({name: torch.ones(shape) for name, shape in own.items()})
    for name, tensor in surgery.state(model).items():
        section, _, rest = name.partition(".")
        last = depth[int(section[-1]) - 1] - 1 if section.startswith("section") else 0
        mine = own.get(name) or own[f"{section}.{last}.{rest.partition('.')[2]}"]
        expected = torch.zeros(tensor.shape, dtype=torch.bool)
        oracles.corner(expected, mine).fill_(True)
        assert torch.equal(mask[name], expected), name


@pytest.mark.parametrize("name", some(SPECS, ["cnn", "static_batch"]))
def test_fedfa__a_round_is_the_paper_written_out(name):
    check_rounds(mixed(name), FedFAOptions(), oracles.fedfa)


@pytest.mark.parametrize("name", some(SPECS, ["batch", "transformer"]))
def test_fedfa__every_option_is_the_paper_with_that_step_left_out(monkeypatch, name):
    """All from the same trained models."""
    fed, rng = mixed(name), Rng(0, 1)
    old = fed.initial()
    trained = fed.train(starts(fed, old, COHORT), COHORT, rng)
    monkeypatch.setattr(type(fed), "train", lambda *given: trained)
    for graft, scale in itertools.product((True, False), ("norm", "rms", "none")):
        algorithm = fedfa(fed, FedFAOptions(graft, scale))
        after, _ = algorithm.round({"global": old}, COHORT, rng)
        assert_close(after["global"], oracles.fedfa(old, trained.states, trained.sizes, graft, scale))


def test_fedfa__the_norm_of_a_client_that_was_dropped_does_not_count(make_federation):
    fed, rng = make_federation("cnn"), Rng(0, 1)
    old, algorithm = fed.initial(), fedfa(fed)
    each = [{name: k * tensor for name, tensor in old.items()} for k in (1, 2, 3, 4)]
    every, others = (
        ClientUpdate(some, torch.zeros(len(some)), sizes, some)
        for some, sizes in ((each, (3, 0, 5, 7)), ([each[0], *each[2:]], (3, 5, 7)))
    )
    expected = algorithm.aggregate({"global": old}, [COHORT[0], *COHORT[2:]], others, rng)
    assert_close(algorithm.aggregate({"global": old}, COHORT, every, rng)["global"], expected["global"])


def test_fedfa__another_quantile_and_float32():
    fed = fleet_federation(SPECS["static_batch"], choices("static_batch"), dtype=torch.float32)
    oracle = partial(oracles.fedfa, percent=60)
    check_rounds(fed, FedFAOptions(quantile=0.6), oracle, 1, rtol=1e-5, atol=1e-6)


ONE = {
    "fedfa": lambda fed: fedfa(fed, FedFAOptions(scale="none")),
    "fedfa without grafting": lambda fed: fedfa(fed, FedFAOptions(graft=False, scale="none")),
    "heterofl": lambda fed: heterofl(fed, HeteroFLOptions(scaler=False, own_rows=False, weighted=True)),
    "fedrolex": lambda fed: fedrolex(fed, HeteroFLOptions(scaler=False, own_rows=False, weighted=True)),
    "nefl": lambda fed: nefl(fed, NeFLOptions(step_sizes=False)),
    "inclusivefl": inclusivefl,
    **{f"flexifed {s}": lambda fed, s=s: flexifed(fed, FlexiFedOptions(s)) for s in ("basic", "clustered", "max")},
}


@cache
def alike(name):
    """All clients have the whole model."""
    return fleet_federation(SPECS[name], [(1.0, None)] * 4, participants=3)


@cache
def fedavg_of(name):
    """Two rounds."""
    return play(fedavg(alike(name)), alike(name), 2)


@pytest.mark.parametrize(
    ("name", "method"),
    some(
        itertools.product(("cnn", "batch", "transformer"), ONE),
        [*itertools.product(["cnn"], ONE), ("batch", "nefl"), ("transformer", "fedfa")],
    ),
)
def test_fedfa__with_one_architecture_every_method_is_fedavg(name, method):
    fed = alike(name)
    for (a, _), (b, _) in zip(play(ONE[method](fed), fed, 2), fedavg_of(name), strict=True):
        assert_close(a["global"], b["global"])
