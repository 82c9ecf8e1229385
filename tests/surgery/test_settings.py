"""Numbers in attributes and configurations: those that are a width change, those that are only as large stay."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from symmetric import Made
from torch import nn

from surgery import load, narrow, state
from surgery.pruning import Target, prune
from surgery.widening import widen

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
    [(lambda net: narrow(net, 0.5, X, strict=True), 4), (lambda net: widen(net, rate=2, example=X, strict=True), 16)],
)
def test_settings__what_is_only_as_large_as_a_width_stays(change, size):
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
def test_settings__a_norm_by_hand_is_that_of_the_new_width(by):
    """It is what its constructor makes of half of the width, and a wide one computes what it did."""
    net = with_norm(8, by)
    small, _ = narrow(net, 0.5, X, strict=True)
    half = with_norm(4, by)
    half.load_state_dict(small.state_dict())
    assert torch.equal(half(X), small(X))
    wide, _ = widen(net, rate=2, example=X, strict=True)
    assert wide[1].dim == 16
    torch.testing.assert_close(wide(X), net(X))


def test_settings__a_sum_that_nothing_divides_does_not_grow():
    class Summed(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu().sum(-1)

    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu().sum(-1) / 8

    for kind in (Summed, Twice):
        with refused("width"):
            widen(kind(4, 8), rate=2, example=X)


class Lora(nn.Module):
    """An adapter by hand, whose scaling is the root of its rank by chance."""

    def __init__(self, rank, alpha):
        super().__init__()
        self.layer, self.down, self.up = nn.Linear(32, 32), nn.Linear(32, rank), nn.Linear(rank, 32)
        self.scaling = alpha / rank

    def forward(self, x):
        return self.layer(x) + self.scaling * self.up(self.down(x))


@pytest.mark.parametrize(("rank", "alpha"), [(4, 8), (16, 64), (4, 16)])
def test_settings__the_scaling_of_an_adapter_is_no_root_of_a_width(rank, alpha):
    net = nn.Sequential(nn.Linear(4, 32), Lora(rank, alpha), nn.ReLU(), nn.Linear(32, 3))
    small, plan = narrow(net, 0.5, X, strict=True)
    assert small[1].scaling == alpha / rank
    zeros = load(copy.deepcopy(net), plan.embed(state(small))[0])
    torch.testing.assert_close(small(X), zeros(X))
    wide, _ = widen(net, rate=2, example=X, strict=True)
    torch.testing.assert_close(wide(X), net(X))


def scaled(forward, **attributes):
    """What becomes of one attribute of a model whose hidden width of 16 becomes 8."""
    net = Made(forward, hidden=nn.Linear(4, 16), last=nn.Linear(16, 3), **attributes)
    (name,) = attributes
    return getattr(narrow(net, 0.5, X)[0], name)


@pytest.mark.parametrize(
    ("forward", "attributes"),
    [
        (lambda net, x: net.last((net.hidden(x) / net.temperature).softmax(-1)), {"temperature": 4.0}),
        (lambda net, x: net.last(net.hidden(x).relu() + net.res_scale * net.hidden(x)), {"res_scale": 0.25}),
        (lambda net, x: net.last(net.hidden(x)) * (net.hidden(x) * net.logit_scale @ net.hidden(x).T).mean(),
         {"logit_scale": 4.0}),
        (lambda net, x: net.last(net.hidden(x) * net.norm_factor), {"norm_factor": 0.25}),
        (lambda net, x: net.last(net.hidden(x)) / net.image_width, {"image_width": 16}),
        (lambda net, x: net.last(net.hidden(x).clamp(max=net.max_dim / 10)), {"max_dim": 16}),
    ],
)  # fmt: skip
def test_settings__a_number_that_scales_no_width_stays(forward, attributes):
    assert {next(iter(attributes)): scaled(forward, **attributes)} == attributes


@pytest.mark.parametrize(
    ("forward", "attributes"),
    [
        (lambda net, x: net.last(net.hidden(x)) * (net.hidden(x) @ net.hidden(x).T * net.scale).mean(),
         {"scale": 0.25}),
        (lambda net, x: net.last(net.hidden(x)) * (net.hidden(x) / net.temperature @ net.hidden(x).T).mean(),
         {"temperature": 4.0}),
        (lambda net, x: net.last(nn.functional.normalize(net.hidden(x), dim=-1) * net.scale), {"scale": 4.0}),
    ],
)  # fmt: skip
def test_settings__a_number_that_scales_a_width_follows_it(forward, attributes):
    (value,) = attributes.values()
    new = scaled(forward, **attributes)
    assert new == pytest.approx(value * 2 ** (0.5 if value < 1 else -0.5))


class Centred(nn.Module):
    """A layer norm by hand, whose count of features has a name that says nothing."""

    def __init__(self, n):
        super().__init__()
        self.n, self.weight = n, nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().sum(-1, keepdim=True) / self.n + 1e-5).sqrt() * self.weight


def test_settings__a_count_that_divides_a_sum_follows_whatever_its_name_is():
    """The mean was that of the new width, and the variance that of the old one."""
    net = nn.Sequential(nn.Linear(4, 8), Centred(8), nn.Linear(8, 3))
    small, _ = narrow(net, 0.5, X, strict=True)
    half = nn.Sequential(nn.Linear(4, 4), Centred(4), nn.Linear(4, 3))
    half.load_state_dict(small.state_dict())
    assert torch.equal(small(X), half(X))
    wide, _ = widen(net, rate=2, example=X, strict=True)
    torch.testing.assert_close(wide(X), net(X))


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: net.last(h := net.hidden(x)) * h.sum(-1, keepdim=True) / h.shape[-1],
        lambda net, x: net.last(h := net.hidden(x)) + math.log(h.shape[-1]),
    ],
)
def test_settings__a_number_that_code_reads_from_a_shape_is_what_it_is_there(forward):
    small, _ = narrow(Made(forward, hidden=nn.Linear(4, 16), last=nn.Linear(16, 3)), 0.5, X)
    assert small.last.in_features == 8


def test_settings__a_width_along_a_constant_of_the_code_is_told_when_it_does_not_grow(caplog):
    """It stayed without a word, even with `strict`."""
    constant = torch.randn(8)

    def forward(net, x):
        return net.last(net.second((net.first(x) + constant).relu()).relu())

    net = Made(forward, first=nn.Linear(4, 8), second=nn.Linear(8, 8), last=nn.Linear(8, 3))
    wide, _ = widen(net, rate=2, example=X)
    assert (wide.first.out_features, wide.second.out_features) == (8, 16)
    assert "first.weight (8, 4)" in caplog.text
    with refused("width"):
        widen(net, rate=2, example=X, strict=True)


def test_settings__a_target_where_a_width_of_one_shrinks_with_another():
    def forward(net, x):
        x = net.first(x).view(-1, 4, 4)
        size = 2 * len(net.angles)
        one, two = x[..., :size].chunk(2, -1)
        rotated = torch.cat([one * net.angles - two, two * net.angles + one, x[..., size:]], -1)
        return net.last(rotated.flatten(1))

    net = Made(forward, first=nn.Linear(4, 16), last=nn.Linear(16, 3))
    net.register_buffer("angles", torch.rand(1), persistent=False)
    with refused("target"):  # it was a KeyError
        prune(net, target=Target(macs=0.5), importance=None, example=X)


def test_settings__all_widths_of_a_configuration_follow():
    class Configured(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, layers = config, (config.hidden, config.inner, config.labels)
            self.a, self.b, self.c = (nn.Linear(*sizes) for sizes in zip((4, *layers), layers))

        def forward(self, x):
            return self.c(self.b(self.a(x).relu()).relu())

    net = Configured(SimpleNamespace(hidden=12, inner=20, labels=2))
    small, _ = narrow(net, 0.5, X)
    assert vars(small.config) == {"hidden": 6, "inner": 10, "labels": 2}
    assert vars(net.config) == {"hidden": 12, "inner": 20, "labels": 2}
