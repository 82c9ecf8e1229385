"""Dropout and augmentation: what is random in a step depends on the client and the step alone."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

import surgery
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import SGD
from fl.engine.augment import Augment
from fl.engine.batches import make_batches
from fl.engine.draws import Drawing, Draws

BACKENDS = ["loop", "workers", "vmap"]


def keys(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


class Net(nn.Module):
    """Every kind of dropout, in modules and as functions; one layer is called twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 3)
        self.channels, self.entries = nn.Dropout2d(0.3), nn.Dropout(0.4)
        self.depth = StochasticDepth(0.5, "row")

    def forward(self, x):
        x = self.channels(self.entries(self.conv(x)))
        x = F.dropout(self.depth(x).flatten(1), 0.2, self.training)
        return self.fc(self.entries(x))


@pytest.mark.parametrize("augment", [Augment(), Augment(crop=2, flip=True)])
def test_backends_draw_the_same_and_masks_are_those_of_the_key(make_federation, augment):
    net = Net().double()
    fed = make_federation(net, optimizer=SGD(0.1, 0.9), augment=augment)
    clients, rng = [2, 0, 3], Rng(0, 1)
    starts = surgery.broadcast(fed.initial(), 3)
    each = [fed.with_local(backend=b).train(starts, clients, rng) for b in BACKENDS]
    for other in each[1:]:
        torch.testing.assert_close(other.loss, each[0].loss, rtol=1e-9, atol=1e-9)
        for name in starts:
            torch.testing.assert_close(other.states[name], each[0].states[name], rtol=1e-9, atol=1e-9)
    alone = fed.train(surgery.broadcast(fed.initial(), 1), [3], rng)
    later = fed.train(surgery.broadcast(fed.initial(), 1), [3], Rng(0, 2))
    torch.testing.assert_close(alone.states["fc.weight"][0], each[0].states["fc.weight"][2], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(later.loss, alone.loss)

    # One client by hand: autograd and plain SGD around the same keys, batch by batch.
    batches = make_batches([fed.clients[3].train], [3], fed.local.epochs, fed.local.batch_size, rng, "cpu")
    model = Net().double().train()
    surgery.load(model, fed.initial())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for index, key in zip(batches.index[0], batches.keys[0]):
        optimizer.zero_grad()
        with Drawing(Draws(key)):
            images = fed.data.normalise(augment(fed.data.x[index], key), torch.float64)
            F.cross_entropy(model(images), fed.data.y[index]).backward()
        optimizer.step()
    for name, tensor in surgery.state(model).items():
        torch.testing.assert_close(alone.states[name][0], tensor, rtol=1e-9, atol=1e-9)


def test_a_step_without_key_would_draw_the_same_masks_twice(make_federation):
    """Masks differ from step to step, between layers, and between clients."""
    batches = make_batches([torch.arange(8), torch.arange(8)], [0, 1], 2, 4, Rng(0), "cpu")
    assert len(batches.keys.unique()) == 8
    with Drawing(Draws(keys(7)[0])):
        first, second = F.dropout(torch.ones(500)), F.dropout(torch.ones(500))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("function", "axes"), [(F.dropout, 0), (F.dropout1d, 1), (F.dropout2d, 2), (F.dropout3d, 3)])
def test_dropout_means_what_torch_means(p, function, axes):
    shape = (50, 40, *[3] * axes)
    with Drawing(Draws(keys(1)[0])):
        out = function(torch.full(shape, 2.0), p)
        assert torch.equal(function(torch.full(shape, 2.0), p, training=False), torch.full(shape, 2.0))
        inplace = torch.full(shape, 2.0)
        assert function(inplace, p, inplace=True) is inplace
    kept = (out != 0).flatten(2).float() if axes else (out != 0).float()[..., None]
    assert ((kept.mean(2) == 0) | (kept.mean(2) == 1)).all()  # whole channels
    assert abs(kept.mean() - (1 - p)) < 0.05
    if p < 1:
        torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 2 / (1 - p)))


def test_uniform_numbers_are_uniform_and_independent():
    """Kolmogorov-Smirnov, and correlations between neighbours, keys and draws, each of 100,000 numbers."""
    draws = Draws(keys(0, 1, -(2**31), 123456789))
    one, two = (draws.uniform((100_000,)).double() for _ in range(2))
    for row in (*one, *two):
        assert stats.kstest(row.numpy(), "uniform").pvalue > 1e-4
        assert row.min() >= 0
        assert row.max() < 1
    shifted = [one[:, 1:], one[:, :-1]]
    pairs = [(one[0], one[1]), (one[0], one[3]), (one[0], two[0]), (shifted[0][2], shifted[1][2])]
    pairs += [(Draws(keys(5)).uniform((100_000,))[0], Draws(keys(5), stream=1).uniform((100_000,))[0])]
    for a, b in pairs:
        assert abs(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1]) < 0.015
    counts = torch.bincount(Draws(keys(9)).below(9, (90_000,))[0], minlength=9)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_crops_and_flips_are_those_of_an_image_at_a_time():
    images = torch.randint(1, 256, (2, 6, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    out = Augment(crop=2, flip=True)(images, keys(3, 4))
    seen = set()
    for client in range(2):
        for image, result in zip(images[client], out[client]):
            padded = F.pad(image, (2, 2, 2, 2))
            options = {}
            for dy in range(5):
                for dx in range(5):
                    view = padded[:, dy : dy + 5, dx : dx + 4]
                    options[dy, dx, False], options[dy, dx, True] = view, view.flip(-1)
            found = [place for place, view in options.items() if torch.equal(view, result)]
            assert len(found) >= 1
            seen.add(found[0])
    assert len(seen) > 6
    assert out.dtype == torch.uint8
    assert torch.equal(Augment()(images, keys(3, 4)), images)
    for k in range(2):
        assert torch.equal(Augment(2, True)(images[k], keys(3, 4)[k]), out[k])
    flipped = Augment(flip=True)(images, keys(3, 4))
    same = (flipped == images).flatten(2).all(2)
    assert 0 < same.sum() < 12
    assert torch.equal(flipped[~same], images[~same].flip(-1))


def test_all_crops_are_drawn_equally_often():
    place = torch.arange(1, 50, dtype=torch.uint8).view(1, 1, 7, 7).expand(20_000, 1, 7, 7)
    corner = Augment(crop=3)(place, keys(11)[0])[:, 0, 3, 3].long() - 1
    counts = torch.bincount(corner, minlength=49)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_bernoulli_of_a_shared_tensor_is_returned_or_noticed():
    def ignores(key):
        with Drawing(Draws(key)):
            mask = torch.empty(3)
            mask.bernoulli_(0.5)
            return mask.sum()

    assert torch.func.vmap(ignores)(keys(1, 2)).isnan().all()
    assert not ignores(keys(1)[0]).isnan()


def test_text_is_not_augmented(make_federation):
    fed = make_federation("cnn")
    text = dataclasses.replace(fed.data, x=torch.zeros(27, 4, dtype=torch.int32))
    with pytest.raises(FLError, match="--crop and --flip are for images"):
        dataclasses.replace(fed.with_local(augment=Augment(flip=True)), data=text)


@pytest.mark.parametrize(
    ("function", "shape", "whole"),
    [
        (F.dropout1d, (60, 7), 1), (F.dropout1d, (8, 60, 3), 2), (F.dropout2d, (40, 30), 2),
        (F.dropout2d, (9, 60, 3), 2), (F.dropout2d, (9, 60, 3, 2), 2), (F.dropout3d, (60, 3, 2, 2), 1),
        (F.dropout3d, (9, 60, 2, 2, 2), 2),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_what_is_dropped_as_a_whole_is_what_torch_drops(function, shape, whole):
    def pattern(out):
        kept = (out != 0).flatten(whole) if out.ndim > whole else (out != 0)[..., None]
        return (kept.all(-1) | ~kept.any(-1)).all(), 0.2 < kept.double().mean() < 0.8

    torch.manual_seed(0)
    expected = function(torch.ones(shape))
    with Drawing(Draws(keys(3)[0])):
        assert pattern(function(torch.ones(shape))) == pattern(expected) == (True, True)


def test_checkpointed_dropout_is_refused(make_federation):
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop = nn.Linear(64, 3), nn.Dropout(0.5)

        def forward(self, x):
            return checkpoint(lambda t: self.drop(self.fc(t)), x.flatten(1), use_reentrant=False)

    for backend in ("loop", "workers"):
        fed = make_federation(Saving(), backend=backend)
        with pytest.raises(FLError, match="activation checkpointing"):
            fed.train(surgery.broadcast(fed.initial(), 1), [2], Rng(0, 1))


def test_draws_with_a_generator_of_their_own_are_left_alone_and_truth_values_refused():
    generator = torch.Generator().manual_seed(0)
    expected = torch.empty(9).bernoulli_(0.5, generator=torch.Generator().manual_seed(0))
    with Drawing(Draws(keys(3)[0])):
        assert torch.equal(torch.empty(9).bernoulli_(0.5, generator=generator), expected)
        with pytest.raises(FLError, match=r"bernoulli_ of torch\.bool"):
            torch.empty(3, dtype=torch.bool).bernoulli_(0.5)
