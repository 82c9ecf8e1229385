"""HeteroFL and FedRolex, element by element."""

import oracles
import pytest
import torch
from fleets import IMAGES, assert_close, fleet_federation, mixed, shapes, train_each
from refusals import fl_refused
from torch import nn

import surgery
from fl.algorithms.fedrolex import METHOD as fedrolex
from fl.algorithms.heterofl import METHOD as heterofl
from fl.algorithms.heterofl import HeteroFLOptions, plan_held_rows
from fl.base.rng import Rng
from fl.models.architectures import ArchitectureOptions
from fl.models.fleet import make_fleet
from fl.runs.assembly import build
from fl.settings import Config
from zoo import Spec
from zoo.layers import Scaler

COHORT = [2, 0, 1]  # the classes and tokens of client 3 alone are nobody's
PLAIN = HeteroFLOptions(scaler=False, own_rows=False, weighted=True)
TEXT = Spec("transformer", num_classes=11, tokens=11, width=0.04, depth=1, dropout=0.0)  # as many positions as tokens


def own(fed, client):
    """The classes, or tokens, in a client's training samples, and the rows of which tensors they are."""
    index = fed.clients[client].train
    if fed.data.text:
        held = set(fed.data.x[index].flatten().tolist()) | set(fed.data.y[index].flatten().tolist())
        return held, ("head.weight", "head.bias", "embedding.token.weight")
    return set(fed.data.y[index].tolist()), ("fc2.weight", "fc2.bias")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_heterofl__a_round_is_the_mean_over_those_who_hold_the_element_and_have_the_label(name, weighted):
    fed = mixed("cnn") if name == "cnn" else fleet_federation(TEXT, [(1.0, 1), (0.5, 1), (0.75, 1), (1.0, 1)])
    algorithm, rng = heterofl(fed, HeteroFLOptions(weighted=weighted)), Rng(0, 1)
    old = algorithm.init()["global"]
    starts = [{n: oracles.corner(old[n], s) for n, s in shapes(fed, client).items()} for client in COHORT]
    states, sizes = train_each(fed, starts, COHORT, rng)
    held = [own(fed, client) for client in COHORT]

    def counts(k, name, index):
        return name not in held[k][1] or index[0] in held[k][0]

    expected = oracles.mean_of_holders(old, states, sizes if weighted else [1, 1, 1], counts)
    after, _ = algorithm.round({"global": old}, COHORT, rng)
    assert_close(after["global"], expected)
    for name in held[0][1]:  # a row that nobody counts for keeps its value, and there are such
        rows = set.union(*(classes for classes, _ in held))
        stay = (after["global"][name] == old[name]).reshape(len(old[name]), -1).all(1)
        assert {row for row in range(len(stay)) if not stay[row]} <= rows
        assert len(rows) < len(stay)


def test_heterofl__scalers_divide_by_the_rate_over_the_servers():
    """Whatever the width of the server's model: a client that is as wide as it is has rate 1."""
    spec = Spec("preresnet18", **IMAGES, width=(0.1, 0.1, 0.1, 0.05), depth=1, scaler=True)
    full = spec.build()
    fleet = make_fleet(full, spec, [spec, spec.scale(0.5), spec.scale((0.5, 0.25, 1.0, 0.5))])
    for client, rates in enumerate(((1.0,) * 4, (0.5,) * 4, (0.5, 0.25, 1.0, 0.5))):
        found = {name: m.rate for name, m in fleet[client].model.named_modules() if isinstance(m, Scaler)}
        for section, rate in enumerate(rates, 1):
            assert {r for name, r in found.items() if name.startswith(f"section{section}.")} == {rate}
    half = ArchitectureOptions(widths=(0.5, 1.0), choose="cycle")
    config = Config.of(algorithm="heterofl", model="cnn", width=(0.1,), clients=2, participants=2, architectures=half)
    fed, _ = build(config)
    rates = [{m.rate for m in fed.fleet[k].model.modules() if isinstance(m, Scaler)} for k in (0, 1)]
    assert rates == [{0.5}, {1.0}]
    plain, _ = build(config.replace(heterofl=HeteroFLOptions(scaler=False)))
    assert not any(isinstance(m, Scaler) for m in plain.fleet[0].model.modules())


def test_heterofl__the_mask_of_a_language_model_counts_for_every_client():
    """Its row follows the rows of the tokens."""
    model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 4))
    part = plan_held_rows(model, torch.tensor([True, False, False, True])).extract(surgery.state(model))
    assert torch.equal(part["0.weight"], model[0].weight[[0, 3, 4]])
    assert torch.equal(part["1.weight"], model[1].weight[[0, 3]])


# FedRolex


def window(by, channels, n):
    """The channels that a client has, ascending; all of them if it has as many as there are."""
    return torch.roll(torch.arange(channels), -by)[:n].sort().values


def positions(name, axis, by, full, small):
    """Those of one axis of a tensor: behind the flattening each channel is four pixels."""
    pixels = 4 if (name, axis) == ("fc1.weight", 1) else 1
    some = window(by, full // pixels, small // pixels) if full != small else torch.arange(full // pixels)
    return (some[:, None] * pixels + torch.arange(pixels)).flatten()


def rolled(full, sizes, by):
    """The part of each tensor that a client of these shapes has."""
    result = {}
    for name, shape in sizes.items():
        result[name] = full[name]
        for axis, size in enumerate(shape):
            result[name] = result[name].index_select(axis, positions(name, axis, by, full[name].shape[axis], size))
    return result


@pytest.mark.parametrize("name", ["cnn", "static_batch"])
def test_heterofl__the_window_moves_on_by_one_channel_each_round(name):
    fed = mixed(name)
    algorithm = fedrolex(fed, PLAIN)
    full = algorithm.init()["global"]
    for by in (1, 2, 7, 13):
        (state,), _ = train_each(fed, [rolled(full, shapes(fed, 1), by)], [1], Rng(0, by))
        after, _ = algorithm.round({"global": full}, [1], Rng(0, by))
        assert_close(rolled(after["global"], shapes(fed, 1), by), state)
        moved = sum(int((after["global"][n] != full[n]).sum()) for n in full)
        assert moved <= sum(tensor.numel() for tensor in state.values())


def test_heterofl__channels_that_cannot_be_followed_are_refused_before_the_first_round():
    base = Spec("preresnet18", **IMAGES, width=0.25, depth=1, norm="group")
    with fl_refused("unsupported", "FedRolex", "ResNet"):
        fedrolex(fleet_federation(base, [(1.0, 1), (0.5, 1)], sizes=(3, 5)))
