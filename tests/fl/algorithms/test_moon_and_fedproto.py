"""MOON and FedProto, whose clients compare representations; and where a model has its representation."""

import copy
from dataclasses import replace
from itertools import product

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from oracles import average
from refusals import fl_refused
from rounds import assert_same, batches_of, floats, play, row
from selection import some
from torch import nn

import surgery
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.fedproto import METHOD as fedproto
from fl.algorithms.fedproto import FedProtoOptions
from fl.algorithms.local import METHOD as local
from fl.algorithms.moon import METHOD as moon
from fl.algorithms.moon import MOONOptions
from fl.algorithms.parts.representation import head_of
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import SGD

NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


@pytest.fixture
def federation_of(make_federation):
    """Four clients in float64, of whom two take part at a time."""
    defaults = {"dtype": torch.float64, "participants": 2, "optimizer": SGD(0.05, 0.9)}
    return lambda model=NET, **settings: make_federation(copy.deepcopy(model), **{**defaults, **settings})


def trained(fed, start, client, rng, more):
    """A client's model after its steps on cross entropy + more(z, x, y), with torch.optim on a copy of NET."""
    model = copy.deepcopy(fed.model).train()
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for rows in batches_of(fed, client, rng):
        x, y = fed.data.normalise(fed.data.x[rows], torch.float64), fed.data.y[rows]
        z = model[:4](x)
        optimizer.zero_grad()
        (F.cross_entropy(model[4](z), y) + more(z, x, y)).backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def body(fed, state, x):
    """The representations of a state in evaluation mode, sample by sample."""
    model = copy.deepcopy(fed.model).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return model[:4](x)


def assert_close(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.to(found[name].dtype), rtol=1e-9, atol=1e-10)


def test_moon__is_the_papers_algorithm(federation_of):
    """Client 3 takes part in rounds 1 and 2, client 0 first in the second: its last model is the received one."""
    fed = federation_of()
    algorithm = moon(fed, MOONOptions(mu=2.0, temperature=0.3))
    server, shared, last = algorithm.init(), fed.initial(), {}
    for number, clients in enumerate(([1, 3], [3, 0], [1, 0]), 1):
        sent = []
        for i in clients:

            def more(z, x, y, i=i, shared=shared):
                near, far = (
                    F.cosine_similarity(z, body(fed, s, x), dim=1) / 0.3 for s in (shared, last.get(i, shared))
                )
                return 2.0 * -(near.exp() / (near.exp() + far.exp())).log().mean()

            sent.append(trained(fed, shared, i, Rng(0, number), more))
        last.update(zip(clients, sent))
        server, update = algorithm.round(server, clients, Rng(0, number))
        shared = {**shared, **average([floats(s) for s in sent], [len(fed.clients.train[c]) for c in clients])}
        assert_close(server["global"], floats(shared))
        for i, state in last.items():
            assert_close({n.removeprefix("last."): t for n, t in row(server["clients"], i).items()}, floats(state))
        assert server["clients"]["took_part"].tolist() == [i in last for i in range(4)]
        assert update.metrics["models_down"] == update.metrics["models_up"] == 1


STATIC = {"model": "resnet20", "norm": "static_batch", "epochs": 1}


@pytest.mark.parametrize(
    ("settings", "backend"), some(product(({}, STATIC), ("loop", "vmap")), [({}, "vmap"), (STATIC, "loop")])
)
def test_moon__without_its_loss_is_fedavg(federation_of, make_federation, backend, settings):
    fed = (make_federation if settings else federation_of)(**settings, backend=backend)
    pairs = zip(play(moon(fed, MOONOptions(mu=0.0)), fed), play(fedavg(fed), fed), strict=True)
    for (one, seen), (other, expected) in pairs:
        assert_close(one["global"], other["global"]) if not settings else assert_same(one["global"], other["global"])
        assert seen.metrics == expected.metrics


def test_fedproto__is_the_papers_algorithm(federation_of):
    """Three rounds, sample by sample and class by class. Only prototypes are sent."""
    fed = federation_of(sizes=(3, 7, 12, 5))
    algorithm, own = fedproto(fed, FedProtoOptions(lam=0.7)), [fed.initial() for _ in range(4)]
    server, means = algorithm.init(), {}
    for number, clients in enumerate(([0], [3, 0], [1, 2]), 1):

        def more(z, x, y):
            known = [(z[k] - means[c]).square().sum() for k, c in enumerate(y.tolist()) if c in means]  # noqa: B023
            return 0.7 * sum(known) / z.numel()

        sums, counts = {}, {}
        for i in clients:
            own[i] = trained(fed, own[i], i, Rng(0, number), more)
            for k in fed.clients.train[i].tolist():
                c, x = int(fed.data.y[k]), fed.data.normalise(fed.data.x[k : k + 1], torch.float64)
                sums[c], counts[c] = sums.get(c, 0) + body(fed, own[i], x)[0], counts.get(c, 0) + 1
        means |= {c: total / counts[c] for c, total in sums.items()}
        server, update = algorithm.round(server, clients, Rng(0, number))
        assert_close(server["clients"], floats(surgery.stack(own)))
        for c in range(3):
            torch.testing.assert_close(server["prototypes"]["means"][c], means.get(c, torch.zeros(8).double()))
        assert ((server["prototypes"]["counts"] > 0) == torch.tensor([c in means for c in range(3)])).all()
        assert update.metrics["bytes_up"] == update.metrics["bytes_down"] == (3 * 8 + 3) * 8


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_fedproto__without_its_distance_is_local(federation_of, backend):
    fed = federation_of(backend=backend)
    for (one, seen), (other, expected) in zip(play(fedproto(fed, FedProtoOptions(0.0)), fed), play(local(fed), fed)):
        assert_close(floats(one["clients"]), floats(other["clients"]))
        assert_close(floats(one["global"]), floats(other["global"]))
        torch.testing.assert_close(seen.loss, expected.loss)


def test_fedproto__takes_static_norms_from_the_clients_own_samples(make_federation):
    """What a client sends depends on nobody else's data."""
    fed = make_federation("resnet20", norm="static_batch", epochs=1)
    algorithm = fedproto(fed)
    server = algorithm.init()
    x = fed.data.x.clone()
    x[fed.clients.train[2]] = 0
    other = fedproto(replace(fed, data=fed.data.__class__("other", x, fed.data.y, x, fed.data.y, classes=3)))
    one, another = (m.round(server, [0, 1], Rng(0, 1))[0]["prototypes"] for m in (algorithm, other))
    assert_same(one, another)


class TwoModelOptimizer(nn.Module):
    """Its head is registered first."""

    def __init__(self):
        super().__init__()
        self.top, self.bottom = nn.Linear(5, 3), nn.Linear(64, 5)

    def forward(self, x):
        return self.top(self.bottom(x.flatten(1)).relu())


HEADS = [
    (TwoModelOptimizer, "top"),
    (lambda: torchvision.models.mobilenet_v2(num_classes=3), "classifier.1"),
    (lambda: timm.create_model("convnext_atto", num_classes=3), "head.fc"),
]


@pytest.mark.parametrize(("make", "name"), HEADS)
def test_moon_and_fedproto__the_head_is_found_by_what_it_makes(make_federation, make, name):
    model = make()
    fed = make_federation(model)
    if name != "top":
        x = torch.randint(256, (len(fed.data.y), 3, 32, 32)).byte()
        fed = replace(fed, data=fed.data.__class__("colours", x, fed.data.y, x, fed.data.y, classes=3))
    assert head_of(fed, "moon") == name


FLAT = [nn.Flatten(), nn.Linear(64, 3)]


@pytest.mark.parametrize("method", [moon, fedproto])
@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([nn.Conv2d(1, 3, 8), nn.Flatten()], "Sequential does not end in one"),
        ([*FLAT, nn.LogSoftmax(1)], "Sequential does not end in one"),
        (FLAT, "of Sequential nothing before that is trained"),
        ([nn.Flatten(), nn.Linear(64, 4).requires_grad_(False), nn.Linear(4, 3)], "nothing before that is trained"),
    ],
)
def test_moon_and_fedproto__models_without_a_representation_are_refused(make_federation, method, layers, said):
    with pytest.raises(FLError, match=f"{method.name} .*{said}"):
        method(make_federation(nn.Sequential(*copy.deepcopy(layers))))


def test_moon_and_fedproto__messages_name_the_model_of_the_user(make_federation):
    """Not what a method puts around it."""
    fed = make_federation(copy.deepcopy(NET).float(), batch_size=1)
    for method in (fedproto, moon):
        algorithm = method(fed)
        with fl_refused("argument", "--batch-size"):
            algorithm.round(algorithm.init(), [0, 1], Rng(0, 1))
