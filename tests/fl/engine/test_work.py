"""What counts a model's work, on models whose copies on the meta device are easily go wrong."""

import sys
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fl.data import load
from fl.engine.work import activation_bytes, flops
from surgery.forward import ghost_of
from zoo import Spec


class Positions(nn.Module):
    """A module is given a view of a trainable parameter."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(64, 32), nn.Linear(32, 10)
        self.positions, self.drop = nn.Parameter(torch.zeros(2, 32)), nn.Dropout(0.0)

    def forward(self, x):
        return self.out(self.fc(x.flatten(1)) + self.drop(self.positions[:1]))


class Repeated(nn.Module):
    """The code reads the number in a plain tensor."""

    def __init__(self):
        super().__init__()
        self.fc, self.times = nn.Linear(64, 64), torch.tensor(2)

    def forward(self, x):
        x = x.flatten(1)
        for _ in range(int(self.times)):
            x = self.fc(x)
        return x


@pytest.mark.parametrize(("made", "count"), [(Positions, 2 * (64 * 32 + 32 * 10)), (Repeated, 2 * 2 * 64 * 64)])
def test_work__products_are_counted(made, count):
    model = made()
    assert flops(model, load("digits")) == count
    assert activation_bytes(model, load("digits")) > 0


class Chance(nn.Module):
    """Draws in evaluation, and has attention, which has kernels of its own on a CPU."""

    def __init__(self):
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(64, 4, batch_first=True), nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(2)
        x = x + torch.randn_like(x)
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


def test_work__counting_on_the_cpu_gives_what_the_meta_device_gives_and_draws_nothing(monkeypatch):
    """Counted are torch's formulas, without what takes seconds to import where the operations are plain."""
    digits, state = load("digits"), torch.get_rng_state()
    makers = [lambda name=name: Spec(name, in_channels=1, image_size=8).build() for name in ("cnn", "resnet20")]
    attention = nn.TransformerEncoderLayer(64, 4, 32, dropout=0.0, batch_first=True)
    pieces = nn.Sequential(nn.Flatten(2), attention, nn.Flatten(), nn.RReLU(), nn.Linear(64, 10))
    models = [*(make() for make in (*makers, Positions, Chance)), pieces]
    torch.set_rng_state(state)
    counts = [(flops(model, digits), activation_bytes(model, digits)) for model in models]
    assert torch.equal(torch.get_rng_state(), state)
    for model, (found, _) in zip(models, counts):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            ghost_of(model).eval().requires_grad_(False)(torch.zeros(2, 1, 8, 8, device="meta"))
        assert found == counter.get_total_flops() // 2
    monkeypatch.setattr(sys.modules["fl.engine.work"], "_SMALL", 0)
    monkeypatch.setattr(sys.modules["fl.engine.work"], "_KNOWN", WeakKeyDictionary())
    assert [(flops(model, digits), activation_bytes(model, digits)) for model in models] == counts
