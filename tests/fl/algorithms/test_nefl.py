"""NeFL against sums over names: which tensors belong to a submodel, and which to all who hold them."""

from dataclasses import replace
from functools import cache

import oracles
import pytest
import torch
from fleets import IMAGES, SPECS, assert_close, choices, fleet_federation, mixed, shapes, train_each
from refusals import fl_refused
from rounds import play
from selection import some

from fl.algorithms.nefl import METHOD as nefl
from fl.algorithms.nefl import NeFLOptions
from fl.base.rng import Rng
from zoo import Spec
from zoo.layers import Residual

COHORT = [2, 0, 3]
STEPS = replace(SPECS["static_batch"], step_size=True)


@cache
def stepping():
    """Clients 0 to 3 have 3, 1, 3 and 2 blocks in their first section, and step sizes."""
    return fleet_federation(STEPS, choices("static_batch"))


def block(name, fed, client, patterns):
    """The name in the global model: block 1 of two that the pattern 101 leaves is the third."""
    section, *rest = name.split(".")
    if section != "section1":
        return name
    have, count = (len(getattr(m, section)) for m in (fed.model, fed.fleet[client].model))
    kept = patterns.get((have, count), list(range(count)))
    return ".".join([section, str(kept[int(rest[0])]), *rest[1:]])


def apart(name):
    """Whether a tensor is a norm's or a step size."""
    return name.endswith(".step") or any(part.startswith("norm") for part in name.split(".")[:-1])


def check_round(fed, options, patterns, everybody_apart=False, rounds=2):
    """Some rounds; with `everybody_apart` nobody has the global architecture, to which norms then count as well."""
    algorithm, owned = nefl(fed, options), fed.fleet.owned
    server = algorithm.init()
    assert all(apart(name) for name in server["own"])

    def names(client):  # own name -> the names that it has on the server
        result = {}
        for name in shapes(fed, client):
            mine = f"{owned[client]}:{name}" if apart(name) and (owned[client] or everybody_apart) else None
            whole = block(name, fed, client, patterns)
            result[name] = [whole] if mine is None else [mine, whole] if everybody_apart else [mine]
        return result

    for number in range(1, rounds + 1):
        old, rng = server["global"] | server["own"], Rng(0, number)
        for client in range(4):
            if number == 1:  # submodels begin as parts of the global model
                for name, (first, *_) in names(client).items():
                    part = oracles.corner(old[block(name, fed, client, patterns)], shapes(fed, client)[name])
                    assert torch.equal(oracles.corner(old[first], part.shape), part)
        starts = [
            {name: oracles.corner(old[names(client)[name][0]], shape) for name, shape in shapes(fed, client).items()}
            for client in COHORT
        ]
        states, sizes = train_each(fed, starts, COHORT, rng)
        sent = [
            {place: state[name] for name, places in names(client).items() for place in places}
            for client, state in zip(COHORT, states)
        ]
        expected = oracles.mean_of_holders(old, sent, sizes)
        server, _ = algorithm.round(server, COHORT, rng)
        assert_close(server["global"] | server["own"], expected)
    return server


@pytest.mark.parametrize(
    ("keep", "patterns"), [pytest.param((), {}, marks=pytest.mark.slow), (("101", "10"), {(3, 2): [0, 2]})]
)
def test_nefl__norms_and_steps_are_averaged_in_a_submodel_and_the_rest_among_all_holders(keep, patterns):
    check_round(stepping(), NeFLOptions(keep=keep), patterns)


@pytest.mark.parametrize("name", some(["batch", "transformer"], ["transformer"]))
def test_nefl__statistics_and_layer_norms_are_a_submodels_own(name):
    check_round(mixed(name), NeFLOptions(step_sizes=False), {}, rounds=1)


def test_nefl__where_nobody_has_the_global_model_its_norms_are_the_mean_of_the_others():
    base = replace(STEPS, depth=(2, 1, 1, 1))
    fed = fleet_federation(base, [(1.0, 1), (0.5, (2, 1, 1, 1)), (1.0, 1), (0.75, 1)])
    check_round(fed, NeFLOptions(), {}, everybody_apart=True, rounds=1)


def test_nefl__step_sizes_are_trained_and_differ_between_submodels():
    server, _ = play(nefl(stepping()), stepping(), 1)[-1]
    steps = [server["global"]["section1.0.add.step"], *(server["own"][f"{k}:section1.0.add.step"] for k in (1, 2, 3))]
    assert len({step.item() for step in [*steps, torch.ones(1)]}) == 5


def test_nefl__adapt_gives_residual_branches_step_sizes_where_the_zoo_knows_them():
    adapted = NeFLOptions().adapt(SPECS["static_batch"])
    assert adapted == STEPS
    assert NeFLOptions(step_sizes=False).adapt(SPECS["static_batch"]) == SPECS["static_batch"]
    assert NeFLOptions().adapt(SPECS["cnn"]) == SPECS["cnn"]
    assert any(isinstance(m, Residual) and m.step is not None for m in adapted.build().modules())


def test_nefl__clients_predict_with_their_own_norms():
    fed = stepping()
    algorithm = nefl(fed)
    server, _ = play(algorithm, fed, 1)[-1]
    for client in (1, 3):
        state = {name: oracles.corner(server["global"][name], shape) for name, shape in shapes(fed, client).items()}
        state |= {n: server["own"][f"{fed.fleet.owned[client]}:{n}"] for n in state if apart(n)}
        expected = fed.predict(state, fed.data.test_x, fed.fleet[client].model)
        torch.testing.assert_close(algorithm.predict(server, fed.data.test_x, client), expected)


def test_nefl__blocks_that_change_the_shape_cannot_be_left_out_and_patterns_are_read():
    base = Spec("preresnet18", **IMAGES, width=0.05, depth=(1, 3, 1, 1), norm="static_batch")
    fed = fleet_federation(base, [(1.0, (1, 3, 1, 1)), (1.0, (1, 2, 1, 1))], sizes=(2, 2))
    with fl_refused("unsupported", "--nefl.keep", "011", "'section2'"):
        nefl(fed, NeFLOptions(keep=("011",)))
    for pattern in ("", "000", "1x1"):
        with fl_refused("argument", f"--nefl.keep {pattern}: a pattern has a 1 for a block that stays"):
            nefl(fed, NeFLOptions(keep=("101", pattern)))
