"""InclusiveFL against plain loops over clients, names and blocks."""

import re
from functools import cache
from itertools import cycle, product
from types import SimpleNamespace

import pytest
import torch
from fleets import SPECS, assert_close, fleet_federation, mixed, shapes, train_each
from refusals import fl_refused
from rounds import play
from selection import some
from torch import nn

from fl.algorithms.heterofl import METHOD as heterofl
from fl.algorithms.heterofl import HeteroFLOptions
from fl.algorithms.inclusivefl import METHOD as inclusivefl
from fl.algorithms.inclusivefl import InclusiveFLOptions
from fl.algorithms.nefl import METHOD as nefl
from fl.algorithms.nefl import NeFLOptions
from fl.base.rng import Rng
from fl.data import load
from fl.federation import Federation
from fl.models.fleet import ClientArchitecture, Fleet, plan_within
from fl.partition import Split
from surgery import state, ungraft

DEPTHS = {"transformer": (3, 1, 2, 2), "batch": ((3, 1, 2, 1), 1, (2, 1, 2, 1), (2, 1, 2, 1))}
COHORTS = [0, 1, 2], [2, 3], [1], [3, 1, 0], [1, 2]
BEHIND = ("tail.", "head.")


@cache
def deep(name):
    """Client 0 has three blocks in the first section, client 1 has one, and clients 2 and 3 have two."""
    return fleet_federation(SPECS[name], [(1.0, depth) for depth in DEPTHS[name]])


@cache
def four_deep():
    """Client 0 has four blocks, client 1 has one and client 2 three."""
    base = SPECS["transformer"].scale(1.0, None)
    base = type(base)(**{**vars(base), "depth": (4,)})
    return fleet_federation(base, [(1.0, depth) for depth in (4, 1, 3)], sizes=(3, 7, 12))


def ends(name, client):
    """From the last block of each section that a client's depth cuts to the blocks that it learns from.

    The second section that is cut, that of client 1, begins with a block of another shape.
    """
    if name == "four":
        return {
            1: {"section1.0": ["section1.0", "section1.1", "section1.2"]},
            2: {"section1.2": ["section1.2", "section1.3"]},
        }.get(client, {})
    first = {1: {"section1.0": ["section1.0", "section1.1"]}}.get(client, {"section1.1": ["section1.1", "section1.2"]})
    if client == 0:
        return {}
    return {**first, "section3.0": ["section3.0"]} if name == "batch" and client == 1 else first


def belongs(tensor, own, blocks):
    """Whether a tensor is one of a depth's own."""
    top = own == "top" and any(tensor.startswith(f"{block}.") for block in blocks)
    return top or (own != "none" and tensor.startswith(BEHIND))


def teacher(fed, client):
    """A client of the next larger depth."""
    larger = [c for c in range(len(fed.fleet)) if len(shapes(fed, c)) > len(shapes(fed, client))]
    return min(larger, key=lambda c: len(shapes(fed, c)), default=None)


def mean(states, sizes, tensor):
    return sum(n * state[tensor] for state, n in zip(states, sizes)) / sum(sizes)


def oracle(fed, name, own, beta, cohorts):
    """The models of all clients after each round."""
    initial, everybody = fed.initial(), range(len(fed.fleet))
    kind = [len(shapes(fed, client)) for client in everybody]  # the number of tensors tells depths apart
    models = [{tensor: initial[tensor] for tensor in shapes(fed, client)} for client in everybody]
    momentum = {}
    for number, cohort in enumerate(cohorts, 1):
        states, sizes = train_each(fed, [models[client] for client in cohort], cohort, Rng(0, number))
        trained = list(zip(cohort, states, sizes))
        after, before = [dict(model) for model in models], models
        for client in everybody:
            same = [(s, n) for c, s, n in trained if kind[c] == kind[client]]
            for tensor in models[client]:
                holders = same
                if not belongs(tensor, own, ends(name, client)):
                    holders = [(s, n) for c, s, n in trained if tensor in s and not belongs(tensor, own, ends(name, c))]
                if holders:
                    after[client][tensor] = mean(*zip(*holders), tensor)
            for block in ends(name, client) if own == "top" and same else ():
                for tensor in [one for one in models[client] if one.startswith(f"{block}.")]:
                    if "running" not in tensor:
                        moved = after[client][tensor] - before[client][tensor]
                        pulled = (1 - beta) * moved + beta * momentum.get((kind[client], tensor), 0)
                        after[client][tensor] = before[client][tensor] + pulled
        for client in everybody:
            above = teacher(fed, client)
            larger = [(s, n) for c, s, n in trained if above is not None and kind[c] == kind[above]]
            for block, blocks in ends(name, client).items() if larger else ():
                for tensor in [one for one in models[client] if one.startswith(f"{block}.") and "running" not in one]:
                    there = [tensor.replace(block, other) for other in blocks]
                    updates = [mean(*zip(*larger), one) - before[above][one] for one in there]
                    momentum[kind[client], tensor] = sum(updates) / len(updates)
        models = after
        yield models


QUICK = [("batch", "top", 0.2)]
MORE = [
    ("transformer", "classifier", 0.2),
    ("four", "top", 0.2),
    ("transformer", "none", 0.2),
    ("batch", "classifier", 0.2),
]
CASES = [  # a network for each (own, beta), in turn
    (name, own, beta)
    for name, (own, beta) in zip(cycle((*DEPTHS, "four")), product(("top", "classifier", "none"), (0.2, 0.0)))
]


@pytest.mark.parametrize(("name", "own", "beta"), some(dict.fromkeys([*QUICK, *MORE, *CASES]), QUICK))
def test_inclusivefl__rounds_of_three_depths(name, own, beta):
    """Rounds without the largest, without the smallest, and with one depth only."""
    fed = four_deep() if name == "four" else deep(name)
    cohorts = ([0, 1, 2], [2], [1], [1, 0], [1, 2]) if name == "four" else COHORTS
    if own != "top":  # without a momentum from one round to the next
        cohorts = cohorts[1:4]
    algorithm = inclusivefl(fed, InclusiveFLOptions(own, beta))
    server = algorithm.init()
    for number, (cohort, models) in enumerate(zip(cohorts, oracle(fed, name, own, beta, cohorts)), 1):
        server, _ = algorithm.round(server, cohort, Rng(0, number))
        assert_close(server["global"], models[0])
        for client, model in enumerate(models):
            (sent,) = algorithm.send(server, [client], Rng(0, number))["model"]
            assert_close(sent, model)
            expected = fed.predict(model, fed.data.test_x, fed.fleet[client].model)
            torch.testing.assert_close(algorithm.predict(server, fed.data.test_x, client), expected)


def test_inclusivefl__without_anything_of_their_own_it_is_heterofl_by_samples():
    """Bit for bit, and without a momentum to keep."""
    fed = deep("transformer")
    plain = heterofl(fed, HeteroFLOptions(scaler=False, own_rows=False, weighted=True))
    mine = inclusivefl(fed, InclusiveFLOptions("none"))
    for (a, _), (b, _) in zip(play(mine, fed, 2), play(plain, fed, 2), strict=True):
        assert a.keys() == {"global", "own"}
        assert a["own"] == {}
        assert all(torch.equal(a["global"][name], tensor) for name, tensor in b["global"].items())


def test_inclusivefl__frozen_blocks_are_not_moved():
    """Neither by their own clients nor by the larger model's."""
    fed = fleet_federation(SPECS["transformer"], [(1.0, 3), (1.0, 1), (1.0, 2)], sizes=(3, 7, 12))
    for model in (fed.model, *(kind.model for kind in fed.fleet.architectures)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("head.", "section1.1.")))
    start, algorithm = fed.initial(), inclusivefl(fed)
    *_, (server, _) = play(algorithm, fed, 3)
    assert set(server["momentum"]) == {name for name in server["own"] if re.match(r"\d:section1\.1\.", name)}
    for client in range(3):
        (sent,) = algorithm.send(server, [client], Rng(0, 3))["model"]
        still = {name for name, tensor in sent.items() if torch.equal(tensor, start[name])}
        assert still == {name for name in sent if not name.startswith(("head.", "section1.1."))}


def test_inclusivefl__what_cannot_be_shared_is_refused():
    with fl_refused("argument", "--architectures.widths"):
        inclusivefl(mixed("transformer"))
    base = SPECS["batch"]
    crossed = fleet_federation(base, [(1.0, d) for d in ((3, 1, 2, 1), (3, 1, 1, 1), (1, 1, 2, 1))], sizes=(2, 2, 2))
    with fl_refused("argument", "section3"):
        inclusivefl(crossed)
    shallow = fleet_federation(SPECS["transformer"], [(1.0, 1), (1.0, 2)], sizes=(2, 2))
    with fl_refused("argument", "--architectures.choose"):
        inclusivefl(shallow)


class Headed(nn.Module):
    """Blocks that run one after another, and heads beside each other."""

    def __init__(self):
        super().__init__()
        self.blocks, self.heads = (
            nn.ModuleList(nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, out)) for _ in range(number))
            for out, number in ((64, 2), (10, 3))
        )

    def forward(self, x):
        x = x.flatten(1)
        for block in self.blocks:
            x = x + block(x)
        return sum(head(x) for head in self.heads)


def test_inclusivefl__modules_beside_each_other_are_no_blocks():
    spec = SimpleNamespace(  # as a user's model has it, whose blocks are not declared
        architecture=SimpleNamespace(depth=None), example=lambda number, device: torch.zeros(number, 64, device=device)
    )
    data = load("digits")
    own = [Split(part, part[:0], part[:0]) for part in torch.arange(40).split(20)]
    full = Headed()
    small, _ = ungraft(full, keep={"blocks": 1}, example=torch.zeros(1, 64))
    kinds = [ClientArchitecture(net, plan_within(full, net, "none", spec=spec), spec) for net in (full, small)]
    fed = Federation(full, data, own, participants=2, fleet=Fleet(tuple(kinds), (0, 1)))
    server = inclusivefl(fed, InclusiveFLOptions(own="classifier")).init()
    assert {name.partition(":")[2] for name in server["own"]} == {n for n in state(full) if n.startswith("heads")}
    nefl(fed, NeFLOptions(keep=("01",)))
    with fl_refused("argument", "--nefl.keep"):
        nefl(fed, NeFLOptions(keep=("101",)))
