"""FjORD against models that really are narrow, one step after another."""

import oracles
import pytest
import torch
import torch.nn.functional as F
from fleets import IMAGES, SPECS, assert_close, fleet_federation, mixed, shapes
from refusals import fl_refused
from rounds import assert_same, play

from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.fjord import METHOD as fjord
from fl.algorithms.fjord import FjORDOptions
from fl.algorithms.heterofl import METHOD as heterofl
from fl.algorithms.heterofl import HeteroFLOptions
from fl.base.rng import Rng
from fl.engine import SGD
from fl.engine.batches import make_batches
from fl.engine.draws import Draws
from zoo import Spec

BASE = Spec("preresnet18", **IMAGES, width=0.0625, depth=(2, 1, 1, 1), norm="static_batch")
OWN = [(1.0, (2, 1, 1, 1)), (0.5, 1), (0.75, (2, 1, 1, 1)), (0.25, 1)]
WIDTHS = (0.25, 0.5, 1.0)
slow = pytest.mark.slow
ONE = FjORDOptions(widths=(1.0,))


def federation(**settings):
    return fleet_federation(BASE, OWN, optimizer=SGD(0.05, 0.9, 0.01), batch_size=4, **settings)


def corner_of(state, model):
    return {name: oracles.corner(state[name], tensor.shape) for name, tensor in model.state_dict().items()}


def step_by_step(fed, client, start, rng, distil=False, frozen=()):
    """A client's model after training: each step's narrow model is built, and its gradient written into the corner.

    Returns it with the widths that were drawn.
    """
    width, depth = OWN[client]
    widths = [one for one in WIDTHS if one < width] + [width]
    w, momentum, drawn = {n: t.clone() for n, t in start.items()}, {n: 0 * t for n, t in start.items()}, []
    (steps,) = make_batches([fed.clients[client].train], [client], 1, 4, rng, "cpu").rows
    for *index, key in steps[: -(-len(fed.clients[client].train) // 4)].tolist():
        x, y = fed.data.normalise(fed.data.x[index], torch.float64), fed.data.y[index]
        one = widths[int(Draws(torch.tensor(key)).uniform(()) * len(widths))]
        drawn.append(one)
        gradients, target = {name: 0 * tensor for name, tensor in w.items()}, y
        for rate in (width, one) if distil else (one,):
            model = BASE.scale(rate, depth).build(torch.Generator()).double().train()
            model.load_state_dict(corner_of(w, model))
            logits = model(x)
            F.cross_entropy(logits, target).backward()
            target = logits.detach().softmax(1)
            for name, p in model.named_parameters():
                gradients[name][tuple(slice(0, size) for size in p.shape)] += p.grad
        for name in w.keys() - set(frozen):
            momentum[name] = 0.9 * momentum[name] + gradients[name] + 0.01 * w[name]
            w[name] = w[name] - 0.05 * momentum[name]
    return w, drawn


@pytest.mark.parametrize(
    ("backend", "distil"),
    [("vmap", True), pytest.param("loop", False, marks=slow), pytest.param("vmap", False, marks=slow)],
)
def test_fjord__a_step_is_that_of_a_narrow_model(backend, distil):
    fed, rng, drawn = federation(backend=backend), Rng(0, 1), []
    algorithm = fjord(fed, FjORDOptions(WIDTHS, distil))
    server = algorithm.init()
    clients = [2, 0, 1, 3]
    message = algorithm.send(server, clients, rng)
    update = algorithm.client(message, {}, clients, rng)
    for client, start, state in zip(clients, message["model"], update.received):
        assert {n: tuple(t.shape) for n, t in start.items()} == shapes(fed, client)
        expected, widths = step_by_step(fed, client, start, rng, distil)
        assert_close(state, expected, rtol=1e-7)
        drawn += widths
    assert {*drawn} >= {0.25, 0.5, 1.0}
    after, _ = algorithm.round(server, clients, rng)
    mean = oracles.mean_of_holders(server["global"], update.received, update.sizes, lambda *_: True)
    assert_close(after["global"], mean)


def test_fjord__frozen_layers_read_no_dropped_channels_either():
    fed, rng = federation(), Rng(0, 1)
    frozen = ["section1.0.conv2.weight", "section3.0.conv1.weight", "head.weight"]
    for kind in fed.fleet.architectures:
        for name in frozen:
            kind.model.get_parameter(name).requires_grad_(False)
            fed.model.get_parameter(name).requires_grad_(False)
    algorithm = fjord(fed, FjORDOptions(WIDTHS))
    message = algorithm.send(algorithm.init(), [2], rng)
    (state,) = algorithm.client(message, {}, [2], rng).received
    expected, drawn = step_by_step(fed, 2, message["model"][0], rng, frozen=frozen)
    assert min(drawn) < 0.75
    assert_close(state, expected, rtol=1e-7)


def test_fjord__of_one_width_it_is_heterofl():
    fed = mixed("static_batch")
    plain = heterofl(fed, HeteroFLOptions(scaler=False, own_rows=False, weighted=True))
    for (a, _), (b, _) in zip(play(fjord(fed, ONE), fed, 1), play(plain, fed, 1), strict=True):
        assert_same(a["global"], b["global"])


@pytest.mark.parametrize("name", ["cnn", pytest.param("transformer", marks=slow)])
def test_fjord__of_one_width_and_architecture_it_is_fedavg(name):
    fed = fleet_federation(SPECS[name], [(1.0, None)] * 4, participants=3)
    for (a, _), (b, _) in zip(play(fjord(fed, ONE), fed, 2), play(fedavg(fed), fed, 2), strict=True):
        assert_close(a["global"], b["global"])


@pytest.mark.parametrize("name", ["group", pytest.param("transformer", marks=slow)])
def test_fjord__norms_over_several_channels_are_refused(name):
    with fl_refused("unsupported", "FjORD"):
        fjord(mixed(name))


@slow
def test_fjord__running_statistics_stay_those_of_real_activations():
    """A channel that a step leaves out is still computed, or its variance would go to 0."""
    fed = mixed("batch").with_local(epochs=10)
    (server, _), *_ = play(fjord(fed, FjORDOptions((0.25, 1.0))), fed, 1)
    for name, tensor in server["global"].items():
        if name.endswith("running_var"):
            assert tensor.min() > 0.01 * tensor.max(), name
