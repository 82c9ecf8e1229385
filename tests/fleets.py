"""Small federations whose clients have architectures of their own."""

import itertools
from dataclasses import fields, replace
from functools import cache, partial

import torch
from ranks import NEED_ADAPTERS
from wrapped import wrapped

import surgery
from fl.algorithms import ALGORITHMS
from fl.data import Dataset
from fl.engine import SGD
from fl.extensions.language.adapters import add_adapters, fleet_of_ranks
from fl.federation import Federation, LocalTraining
from fl.federation.cohort import per_client
from fl.models.fleet import make_fleet
from fl.partition import Split
from zoo import Spec

SIZES = (3, 7, 12, 5)
IMAGES = {"num_classes": 5, "in_channels": 1, "image_size": 8}
SPECS = {
    "cnn": Spec("cnn", **IMAGES, width=(0.125, 0.125, 0.02)),
    "static_batch": Spec("preresnet18", **IMAGES, width=0.05, depth=(3, 1, 2, 1), norm="static_batch"),
    "batch": Spec("preresnet18", **IMAGES, width=0.05, depth=(3, 1, 2, 1), norm="batch"),
    "group": Spec("preresnet18", **IMAGES, width=0.05, depth=(3, 1, 2, 1), norm="group"),
    "mobilenetv2": Spec(
        "mobilenetv2", **IMAGES, width=0.1, depth=(1, 3, 1, 2, 1, 1, 1), rounding="ceil", stem="cifar", dropout=0.0
    ),
    "transformer": Spec("transformer", num_classes=11, tokens=4, width=0.08, depth=3, dropout=0.0),
}
DEPTHS = {  # of the whole model, the smallest and one in between
    "mobilenetv2": ((1, 3, 1, 2, 1, 1, 1), 1, (1, 2, 1, 2, 1, 1, 1)),
    "transformer": (3, 1, 2),
    **dict.fromkeys(("static_batch", "batch", "group"), ((3, 1, 2, 1), 1, (2, 1, 2, 1))),
    "cnn": (None, None, None),
}


def choices(name):
    """Widths and depths of four clients: the whole model, the smallest, and two in between."""
    full, shallow, other = DEPTHS[name]
    return (1.0, full), (0.5, shallow), (0.5, full), ((0.5, 1.0, 0.75) if name == "cnn" else 0.75, other)


@cache
def mixed(name):
    """The federation of these four, made once: nothing changes it."""
    return fleet_federation(SPECS[name], choices(name))


@cache
def fleet_for(method):
    """The federation that a method for clients of several architectures trains: some need exits, some one width."""
    if method in ("flexifed", "inclusivefl"):
        return fleet_federation(SPECS["static_batch"], [(1.0, depth) for depth in ((3, 1, 2, 1), 1, (2, 1, 2, 1), 1)])
    if method in NEED_ADAPTERS:
        fed = mixed("static_batch")
        options = replace(NEED_ADAPTERS[method], ranks=(3, 1, 2, 1), modules=("section2", "head"))
        create = partial(add_adapters, fed.model, options, base_changes=ALGORITHMS[method].base_changes)
        seed = torch.Generator().manual_seed
        model = create(seed(0))
        fleet = fleet_of_ranks(lambda rank: create(seed(0), rank), (3, 1, 2, 1), len(fed.clients), model)
        return replace(fed, model=model, fleet=fleet)
    if method not in ("depthfl", "scalefl"):
        return mixed("static_batch")
    base = replace(SPECS["static_batch"], exits=True)
    return fleet_federation(base, [(1.0, base.depth), (0.5, (1, 1, 0, 0)), (0.5, base.depth), (0.75, (3, 1, 2, 0))])


def fleet_federation(base, chosen, sizes=SIZES, dtype=torch.float64, **settings):
    """Client k has the base's width and depth times chosen[k], and two classes (of text: three tokens) of its own.

    Args:
        base: what makes the global model.
    """
    data, model, fleet = _fleet(base, tuple(chosen), tuple(sizes), dtype)
    clients = [Split(part, part[:2], part[:2]) for part in torch.arange(sum(sizes)).split(list(sizes))]
    settings = {"epochs": 1, "batch_size": 6, "optimizer": SGD(0.05, 0.9, 0.01), "backend": "loop", **settings}
    participants = settings.pop("participants", len(sizes))
    around = {name: settings.pop(name) for name in ("attack", "defence", "pace") if name in settings}
    fed = Federation(model, data, clients, participants, *local(settings), spec=base, fleet=fleet, **settings)
    return wrapped(fed, **around)


@cache
def _fleet(base, chosen, sizes, dtype):
    """The data and models of such a federation, made once: nothing changes them."""
    generator, n = torch.Generator().manual_seed(0), sum(sizes)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    if base.tokens:
        tokens = torch.randint(3, (n, base.tokens + 1), generator=generator)
        tokens = (tokens + 2 * owner[:, None]) % base.num_classes
        x, y = tokens[:, :-1].int(), tokens[:, 1:]
    else:
        x = torch.randint(256, (n, base.in_channels, base.image_size, base.image_size), generator=generator).byte()
        y = (owner + torch.randint(2, (n,), generator=generator)) % base.num_classes
    model = base.build(generator).to(dtype)
    fleet = make_fleet(model, base, [base.scale(width, depth) for width, depth in chosen])
    for kind in fleet.architectures:
        kind.model.to(dtype)
    return Dataset("random", x, y, x, y, base.num_classes), model, fleet


def local(settings):
    """Those of the settings that are of local training, taken out of them."""
    return [LocalTraining(**{f.name: settings.pop(f.name) for f in fields(LocalTraining) if f.name in settings})]


def train_each(fed, starts, clients, rng):
    """(states, sizes) of the clients after local training from these starts."""
    trained = fed.train(starts, clients, rng)
    return trained.states, trained.sizes


def shapes(fed, client):
    """Of the tensors of a client's model."""
    return {name: tuple(tensor.shape) for name, tensor in surgery.state(fed.fleet_or_uniform[client].model).items()}


def spoil(monkeypatch, bad, calls=range(1, 1000)):
    """Local training of some clients, whatever their architectures, ends in weights that are no numbers.

    Args:
        calls: which of the trainings from now on.
    """
    honest, numbers = Federation._in_chunks, itertools.count(1)

    def train(fed, training):
        states, loss = honest(fed, training)
        if next(numbers) in calls:
            for client, state in zip(training.cohort.clients, per_client(states)):
                if client in bad:
                    next(iter(state.values())).view(-1)[0] = torch.nan
        return states, loss

    monkeypatch.setattr(Federation, "_in_chunks", train)


def assert_close(states, expected, rtol=1e-9, atol=1e-11):
    """Two states, or dictionaries of tensors, have the same names and nearly the same values."""
    torch.testing.assert_close(dict(states), dict(expected), rtol=rtol, atol=atol)
