"""What nobody trains comes out of every round as it went in, bit for bit, whatever a method averages."""

from dataclasses import replace

import pytest
import torch
from fleets import SPECS, choices, fleet_federation
from rounds import SMALL, made, play
from selection import some
from torch import nn

from fl.algorithms import ALGORITHMS, MIXED, FeMAMOptions
from fl.federation import Federation
from fl.federation.defence import Defence

CONFIG = replace(SMALL, femam=FeMAMOptions(("global", "2", "personal"), (1, 1), start="global"))


def frozen(model: nn.Module) -> nn.Module:
    """With the first layer frozen."""
    first = next(iter(model.children()))
    return first.requires_grad_(False) and model


def of_fleet(name: str) -> Federation:
    """Four clients of different architectures that the method takes, the first layer of every model frozen."""
    spec, kinds = SPECS["cnn"], choices("cnn")
    if name == "flexifed":  # shares layers of equal widths
        spec, kinds = SPECS["group"], [(1.0, depth) for depth in ((3, 1, 2, 1), 1, 1, (2, 1, 2, 1))]
    fed = fleet_federation(spec, kinds, dtype=torch.float32, epochs=1)
    for model in (fed.model, *(kind.model for kind in fed.fleet.architectures)):
        frozen(model)
    return fed


def tensors(server, start):
    """(place, tensor, what it has to be) of every frozen parameter that a server keeps."""
    for part, content in server.items():
        for name, tensor in content.items() if isinstance(content, dict) else ():
            if name in start:
                yield f"{part}/{name}", tensor, start[name].expand_as(tensor)


def assert_kept(name, fed, rounds=3):
    kept = {n for n, p in fed.model.named_parameters() if not p.requires_grad}
    assert kept
    algorithm = made(name, fed, CONFIG)
    start = {n: t.clone() for n, t in algorithm.init()["global"].items() if n in kept}
    before = {n: t.clone() for n, t in fed.initial().items()}
    for server, _ in play(algorithm, fed, rounds):
        for place, tensor, expected in tensors(server, start):
            assert torch.equal(tensor, expected), f"{place}: {(tensor - expected).abs().max()}"
    moved = [n for n, t in server["global"].items() if n not in kept and not torch.equal(t, before[n])]
    assert len(moved) > 2


@pytest.mark.parametrize("name", some(list(ALGORITHMS), ["fedavg", "fedmr", "fedrep", "fesem", "local", "heterofl"]))
def test_a_frozen_layer_stays_as_it_is(make_federation, name):
    fed = make_federation("cnn", epochs=1)
    frozen(fed.model)
    assert_kept(name, fed)


@pytest.mark.parametrize("name", some(MIXED, ["nefl"]))
def test_so_it_does_in_clients_of_different_architectures(name):
    assert_kept(name, of_fleet(name), rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["median", "trimmed"])
@pytest.mark.parametrize("name", ["fedavg", "heterofl"])
def test_so_it_does_under_other_rules(make_federation, name, rule):
    fed = replace(make_federation("cnn", epochs=1), defence=Defence(rule))
    frozen(fed.model)
    assert_kept(name, fed, rounds=2)
