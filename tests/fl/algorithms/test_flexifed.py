"""FlexiFed against a model for every client in a dictionary, and who shares what said by hand."""

from functools import cache

import pytest
import torch
from fleets import SPECS, fleet_federation, shapes, train_each
from refusals import fl_refused
from selection import some

from fl.algorithms.flexifed import METHOD as flexifed
from fl.algorithms.flexifed import FlexiFedOptions
from fl.base.rng import Rng

DEPTHS = {"transformer": (3, 1, 2, 3), "static_batch": ((3, 1, 2, 1), 1, (2, 1, 2, 1), (3, 1, 2, 1))}


@cache
def deep(name):
    """Clients 0 and 3 have three blocks in the first section, client 1 has one and client 2 two."""
    return fleet_federation(SPECS[name], [(1.0, depth) for depth in DEPTHS[name]])


def sharing(strategy, name, client):
    """Who has the tensor of this name in common with a client.

    All begin with what comes before the sections and block 0. Then clients 0, 2 and 3 have block 1, where client 1's
    model goes on with something else; then 0 and 3 have block 2, where client 2's goes on. What comes after the
    section has the same names and shapes in all, and a different past.
    """
    if name.startswith(("embedding.", "stem.", "section1.0.")):
        return {0, 1, 2, 3}
    if strategy == "basic":
        return {client}
    if strategy == "max" and name.startswith("section1.1."):
        return {0, 2, 3}
    return {0, 3} if client in (0, 3) else {client}


@pytest.mark.parametrize("strategy", some(["basic", "clustered", "max"], ["clustered", "max"]))
@pytest.mark.parametrize("name", some(DEPTHS, list(DEPTHS)[:1]))
def test_flexifed__three_rounds_of_three_architectures(name, strategy):
    """Cohorts in which some share and some are absent: their personal layers do not change, common ones do."""
    fed = deep(name)
    algorithm, initial = flexifed(fed, FlexiFedOptions(strategy)), fed.initial()
    server = algorithm.init()
    models = [{tensor: initial[tensor] for tensor in shapes(fed, client)} for client in range(4)]
    for number, cohort in enumerate(([0, 1, 2], [2, 3], [3, 1, 0]), 1):
        rng = Rng(0, number)
        states, sizes = train_each(fed, [models[client] for client in cohort], cohort, rng)
        server, _ = algorithm.round(server, cohort, rng)
        for client in range(4):
            after = {}
            for tensor, before in models[client].items():
                with_it = sharing(strategy, tensor, client)
                some = [(s[tensor], n) for c, s, n in zip(cohort, states, sizes) if c in with_it]
                after[tensor] = sum(n * s for s, n in some) / sum(n for _, n in some) if some else before
            models[client] = after
            expected = fed.predict(after, fed.data.test_x, fed.fleet[client].model)
            found = algorithm.predict(server, fed.data.test_x, client)
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
        for tensor, expected in models[0].items():
            torch.testing.assert_close(server["global"][tensor], expected, rtol=1e-9, atol=1e-11)
    spread = {c: (models[c]["head.weight"] - models[0]["head.weight"]).abs().max() > 1e-6 for c in (1, 2, 3)}
    assert spread == {1: True, 2: True, 3: strategy == "basic"}


def test_flexifed__equal_layers_with_another_past_are_not_shared():
    """The second convolution is narrower in client 1, the classifier behind it as large as that of client 0."""
    fed = fleet_federation(SPECS["cnn"], [(1.0, None), ((1.0, 0.5, 1.0), None)], sizes=(4, 4))
    algorithm = flexifed(fed)
    server, trained = algorithm.round(algorithm.init(), [0, 1], Rng(0, 1))
    assert trained.states[1]["fc2.weight"].shape == trained.states[0]["fc2.weight"].shape
    for name, tensor in trained.states[0].items():
        common = name.startswith("conv1.")
        expected = (tensor + trained.states[1][name]) / 2 if common else tensor
        torch.testing.assert_close(server["global"][name], expected)


def test_flexifed__what_cannot_be_shared_is_refused():
    fed = deep("transformer")
    with fl_refused("name", "--flexifed.strategy", "'all'"):
        flexifed(fed, FlexiFedOptions("all"))
    wide = fleet_federation(SPECS["cnn"], [(1.0, None), (0.5, None)], sizes=(2, 2))
    with fl_refused("argument", "--architectures.widths"):
        flexifed(wide)
    base = SPECS["static_batch"]
    apart = fleet_federation(base, [(1.0, 1), (1.0, (2, 1, 1, 1))], sizes=(2, 2))
    with fl_refused("argument", "--architectures.choose"):
        flexifed(apart)
