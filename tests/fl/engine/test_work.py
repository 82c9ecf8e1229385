"""What counts a model's work, on models whose copies on the meta device are easily go wrong."""

import pytest
import torch
from torch import nn

from fl.data import load
from fl.engine.work import activation_bytes, flops


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
def test_products_are_counted(made, count):
    model = made()
    assert flops(model, load("digits")) == count
    assert activation_bytes(model, load("digits")) > 0
