"""--last-batch partial: the last batch of an epoch holds what is left, and every sample counts once."""

import logging
from dataclasses import replace

import pytest
import torch
from oracles import local_loader
from torch import nn
from torch.nn import functional as F

import surgery
from fl import engine
from fl.algorithms import fedavg
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD
from fl.engine.augment import Augment
from fl.engine.batches import make_batches
from fl.engine.objectives import cross_entropy, with_logits
from fl.federation import Federation, LocalTraining
from fl.federation.training import LocalObjective, make_group
from fl.partition import Split

RNG, CLIENTS = Rng(3, 1), (2, 0, 3, 1)
SMOOTH = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 3))


class Dropping(nn.Module):
    """A model whose forward pass is random."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3), nn.Linear(108, 3)

    def forward(self, x):
        return self.second(F.dropout(F.dropout2d(self.first(x), 0.3), 0.5, self.training).flatten(1))


class Mixing(nn.Linear):
    """A model whose logits depend on the other samples of a batch."""

    def __init__(self):
        super().__init__(64, 3)

    def forward(self, x):
        x = x.flatten(1)
        return super().forward(x - x.mean(0))


class Watching(nn.Linear):
    """A model that keeps the mean of its inputs, and gives logits without it."""

    def __init__(self):
        super().__init__(64, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen.add_(x.mean().detach())
        return super().forward(x.flatten(1))


def two_halves(call, params, context, batch):
    """A loss that cannot do with fewer labels than samples."""
    x, y = batch
    return F.cross_entropy(call(params, x), y, reduction="none").mean()


def trained(fed, backend, objective=LocalObjective()):
    starts = surgery.broadcast(fed.initial(), len(CLIENTS))
    group = make_group(fed, fed.local, fed.model, starts, CLIENTS, objective, RNG)
    return engine.train([group], backend)[0]


def assert_same(one, other, **tolerance):
    torch.testing.assert_close(one.loss, other.loss, **tolerance)
    for name in other.states:
        torch.testing.assert_close(one.states[name], other.states[name], **tolerance)


def test_batches_hold_every_sample_once():
    """3, 4 and 7 samples in batches of 4, two steps on each: the shape is one for all."""
    parts = [torch.arange(10 * k, 10 * k + n) for k, n in enumerate((3, 4, 7))]
    made = {last: make_batches(parts, [0, 1, 2], 2, 4, Rng(0, 1), "cpu", repeats=2, last=last) for last in (
        "filled", "partial"
    )}  # fmt: skip
    partial, filled = made["partial"], made["filled"]
    assert partial.steps == filled.steps == (4, 4, 8)
    assert filled.real is None
    assert partial.real == ((3,) * 4, (4,) * 4, (4, 4, 3, 3) * 2)
    assert torch.equal(partial.keys, filled.keys)
    assert torch.equal(torch.maximum(partial.index, ~partial.index), filled.index)  # the same samples in the same order
    for k, part in enumerate(parts):
        for epoch in range(2):
            steps = range(epoch * partial.steps[k] // 2, (epoch + 1) * partial.steps[k] // 2, 2)
            seen = torch.cat([partial.own(k, s).index for s in steps])
            assert seen.sort().values.tolist() == part.tolist()


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap", "auto"])
@pytest.mark.parametrize("size", [4, 5, 100])
def test_backends_equal_a_loader_of_torch(make_federation, backend, size):
    """float64, clients of 12, 3, 5 and 7 samples."""
    fed = make_federation(
        SMOOTH.double(), dtype=torch.float64, batch_size=size, last_batch="partial", optimizer=SGD(0.1, 0.9)
    )
    found = trained(fed, backend)
    for k, client in enumerate(CLIENTS):
        part, generator = fed.clients[client].train, RNG.torch("batches", client)
        orders = [torch.randperm(len(part), generator=generator) for _ in range(fed.local.epochs)]
        x = fed.data.x[part].double() / 255 * 2 - 1
        state, loss = local_loader(fed.model, fed.initial(), x, fed.data.y[part], orders, size, 0.1, 0.9)
        assert found.loss[k].item() == pytest.approx(loss, rel=1e-9)
        for name in state:
            torch.testing.assert_close(found.states[name][k], state[name], rtol=1e-9, atol=1e-9)


def test_it_is_not_what_filled_batches_give(make_federation):
    fed = make_federation("cnn", batch_size=4, backend="loop")
    filled, partial = (trained(replace(fed, last_batch=last), "loop") for last in ("filled", "partial"))
    same = [bool(torch.allclose(a, b)) for a, b in zip(filled.loss, partial.loss)]
    assert same == [True, False, False, False]  # 12 samples are three whole batches


CASES = {
    "dropout": (Dropping(), {}),
    "crops and flips": ("cnn", {"augment": Augment(crop=2, flip=True)}),
    "two steps on a batch": (SMOOTH.float(), {"repeats": 2}),
    "group norm": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3)), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_random_steps_are_the_same_in_every_backend(make_federation, case):
    model, settings = CASES[case]
    fed = make_federation(model, last_batch="partial", **settings)
    assert_same(trained(fed, "vmap"), trained(fed, "loop"), rtol=1e-4, atol=1e-5)


def test_values_of_samples_stay_with_them(make_federation):
    fed = make_federation("cnn", last_batch="partial")
    logits = torch.randn(len(fed.data.y), 3, generator=torch.Generator().manual_seed(0))
    objective = LocalObjective(with_logits(cross_entropy), per_sample=logits)
    assert_same(trained(fed, "vmap", objective), trained(fed, "loop", objective), rtol=1e-4, atol=1e-5)


def test_text_counts_every_token_once():
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randint(9, (15, 6), generator=draw) for _ in range(2))
    data = Dataset("random", x.int(), y, x[:2].int(), y[:2], 9)
    none = torch.empty(0, dtype=torch.int64)
    parts = [Split(part, none, none) for part in torch.arange(15).split([3, 7, 4, 1])]
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    fed = Federation(net, data, parts, 2, LocalTraining(2, 4, SGD(0.1), last_batch="partial"))
    loop = trained(fed, "loop")
    assert_same(trained(fed, "vmap"), loop, rtol=1e-4, atol=1e-6)
    filled = trained(replace(fed, last_batch="filled"), "loop")
    assert not torch.allclose(filled.loss[3], loop.loss[3])


@pytest.mark.parametrize("backend", ["loop", "vmap", "graphs"])
def test_a_gpu_agrees(cuda, make_federation, backend):
    fed = make_federation("cnn", last_batch="partial", augment=Augment(crop=2, flip=True))
    expected = trained(fed, "loop")
    moved = replace(fed, model=fed.model.to("cuda"), data=fed.data.to("cuda"))
    found = trained(moved, backend)
    for name, tensor in expected.states.items():
        torch.testing.assert_close(found.states[name].cpu(), tensor, rtol=1e-4, atol=1e-5)


def one_hot(call, params, context, batch):
    """A loss that has no use for labels below 0."""
    x, y = batch
    return -(call(params, x).log_softmax(1) * F.one_hot(y, 3)).sum(1).mean()


REFUSED = {
    "batch norm": (
        nn.Sequential(nn.Flatten(1, 2), nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(64, 3)),
        {},
        LocalObjective(),
        "the loss of a batch depends",
    ),
    "other samples": (Mixing(), {}, LocalObjective(), "the loss of a batch depends"),
    "a buffer": (Watching(), {}, LocalObjective(), "seen of a batch depends"),
    "an objective": (SMOOTH.float(), {}, LocalObjective(two_halves), "the loss of a batch depends"),
    "an objective that fails": (SMOOTH.float(), {}, LocalObjective(one_hot), "labels of -100, fails"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_look_at_the_filling_trains_where_there_is_none(make_federation, caplog, case):
    model, settings, objective, reason = REFUSED[case]
    fed = make_federation(model, last_batch="partial", **settings)
    for _ in range(2):  # a refusal is no acceptance
        with pytest.raises(FLError, match=rf"{reason} .*; use --backend loop, .*--last-batch filled"):
            trained(fed, "vmap", objective)
    with caplog.at_level(logging.WARNING):
        found = trained(fed, "auto", objective)
    assert_same(found, trained(fed, "loop", objective), rtol=1e-5, atol=1e-6)


def test_the_meter_counts_the_samples(make_federation):
    fed = make_federation(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), epochs=1, last_batch="partial")
    fedavg(fed).round(fedavg(fed).init(), [0, 1, 2, 3], Rng(0, 1))
    assert fed.meter.read() == 2 * 64 * 3 * (3 + 7 + 12 + 5)


def test_other_words_are_refused():
    with pytest.raises(FLError, match="there are filled, partial"):
        LocalTraining(last_batch="half").check(Dataset("x", torch.zeros(1, 2), torch.zeros(1).long(), None, None, 2))


def test_batches_that_memory_cannot_hold_are_refused_by_what_makes_them_many():
    how = {"size": 2, "rng": Rng(0), "device": "cpu"}
    with pytest.raises(FLError, match=r"the batches of 1,152,\S+ epochs would take .*: use fewer of them"):
        make_batches([torch.arange(4)], [0], epochs=2**60, **how)
    with pytest.raises(FLError, match=r"the batches of 3 epochs with 1,152,\S+ steps on each would take"):
        make_batches([torch.arange(4)], [0], epochs=3, repeats=2**60, **how)
