"""Numbers in attributes and configurations: those that are a width change, those that are only as large stay."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from surgery import SurgeryError, narrow, widen

X = torch.randn(5, 4)


class Net(nn.Module):
    """Its code reads a width of 8 from an attribute, and clamps by another one that is 8 as well."""

    def __init__(self, **attributes):
        super().__init__()
        self.made, self.read = nn.Linear(4, 8), nn.Linear(8, 3)
        vars(self).update(attributes)

    def forward(self, x):
        size, most = self.numbers()
        return self.read(self.made(x).view(-1, size).clamp(max=most))


class Plain(Net):
    def numbers(self):
        return self.length, self.most


class Listed(Net):
    def numbers(self):
        return self.lengths[0], self.lengths[1]


class Configured(Net):
    def numbers(self):
        return self.settings.length, self.settings.most


class Chained(nn.Module):
    """Two widths whose sizes lie in one list, with one between them that is as large."""

    def __init__(self):
        super().__init__()
        self.lengths = (8, 8, 8)
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x).view(-1, self.lengths[0]).clamp(max=self.lengths[1])
        return self.last(self.second(x).view(-1, self.lengths[2]))


@pytest.mark.parametrize(
    ("change", "size"),
    [
        (lambda net: narrow(net, rate=0.5, example=X, strict=True), 4),
        (lambda net: widen(net, rate=2, example=X, strict=True), 16),
    ],
)
def test_what_is_only_as_large_as_a_width_stays(change, size):
    """A number of landmarks, a kernel's size and a layer's number were halved with the width."""
    plain = change(Plain(length=8, most=8))[0]
    assert (plain.length, plain.most) == (size, 8)
    assert change(Listed(lengths=(8, 8)))[0].lengths == (size, 8)
    settings = change(Configured(settings=SimpleNamespace(length=8, most=8)))[0].settings
    assert (settings.length, settings.most) == (size, 8)
    assert change(Chained())[0].lengths == (size, 8, size)


class Norm(nn.Module):
    """A norm by hand that divides by the number of its features."""

    def __init__(self, dim, by):
        super().__init__()
        self.dim, self.by, self.weight = dim, by, nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x):
        if self.by == "norm":
            return x / (x.norm(dim=-1, keepdim=True) / self.dim**0.5 + 1e-6) * self.weight
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / self.dim + 1e-6) * self.weight


def with_norm(dim, by):
    return nn.Sequential(nn.Linear(4, dim), Norm(dim, by), nn.Linear(dim, 3))


@pytest.mark.parametrize("by", ["norm", "sum"])
def test_a_norm_by_hand_is_that_of_the_new_width(by):
    """It is what its constructor makes of half of the width, and a wide one computes what it did."""
    net = with_norm(8, by)
    small, _ = narrow(net, rate=0.5, example=X, strict=True)
    half = with_norm(4, by)
    half.load_state_dict(small.state_dict())
    assert torch.equal(half(X), small(X))
    wide, _ = widen(net, rate=2, example=X, strict=True)
    assert wide[1].dim == 16
    torch.testing.assert_close(wide(X), net(X))


def test_a_sum_that_nothing_divides_does_not_grow():
    class Summed(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu().sum(-1)

    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu().sum(-1) / 8

    for kind in (Summed, Twice):
        with pytest.raises(SurgeryError, match="sum in the model itself would compute something else"):
            widen(kind(4, 8), rate=2, example=X)
