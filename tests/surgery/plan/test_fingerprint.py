"""What the hash of a model's classes and settings sees, and what it does not."""

import functools

import pytest
import torch
from refusals import refused
from torch import nn

import surgery
from surgery.plan import Plan, structure
from surgery.plan.fingerprint import settings


class Block(nn.Module):
    """Settings of every kind, some set by a helper, and what a forward pass leaves behind."""

    def __init__(self, heads=2, scale=0.5, act="relu", sizes=(1, [2, None]), table=None, **options):
        super().__init__()
        self.heads, self.scale, self.act = heads, scale, act
        self._configure(sizes, table)
        self.drop_rate = options.get("drop", 0.1)
        self.device = options.get("device", "cpu")
        self.weight = nn.Parameter(torch.ones(2))
        self.seen, self.history, self.statistics, self.last = 0, [], {}, None

    def _configure(self, sizes, table):
        self.sizes, self.table = sizes, {"rows": table}

    @torch.no_grad()
    def forward(self, x):
        self.last = float(x.sum())
        self.history.append(self.last)
        self.statistics["mean"] = self.statistics.get("mean", 0) + 1
        self._count(len(x))
        return x * self.weight

    def _count(self, n):
        self.seen += n


def test_fingerprint__settings_are_arguments_of_the_constructor_and_not_what_forward_keeps():
    block = Block()
    expected = {"heads": 2, "scale": 0.5, "act": "relu", "sizes": (1, [2, None]), "table": {"rows": None}}
    assert settings(block) == expected
    before = structure(block)
    block(torch.ones(3, 2))
    assert block.seen == 3
    assert settings(block) == expected
    assert structure(block) == structure(block.eval()) == structure(block.requires_grad_(False)) == before
    assert structure(Block(drop=0.7, device="meta")) == before


@pytest.mark.parametrize(
    "change", [{"heads": 3}, {"scale": 0.25}, {"act": "gelu"}, {"sizes": (1, [3, None])}, {"table": True}]
)
def test_fingerprint__every_setting_counts(change):
    assert structure(Block(**change)) != structure(Block())


class Dynamic(nn.Module):
    def __init__(self, **options):
        super().__init__()
        for name, value in options.items():
            setattr(self, name, value)


class Fixed(nn.Conv2d):
    """One of torch's classes with a setting more."""

    def __init__(self, *args, mode="a", **kwargs):
        super().__init__(*args, **kwargs)
        self.mode = mode


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: nn.Conv2d(4, 4, 3), lambda: nn.Conv2d(4, 4, 3, stride=2)),
        (lambda: nn.Conv2d(4, 4, 3), lambda: nn.Conv2d(4, 4, 3, padding_mode="reflect")),
        (lambda: nn.Conv2d(4, 4, 3), lambda: nn.ConvTranspose2d(4, 4, 3)),
        (lambda: nn.LayerNorm(4), lambda: nn.LayerNorm(4, eps=1e-3)),
        (lambda: nn.BatchNorm1d(4), lambda: nn.BatchNorm1d(4, momentum=None)),
        (lambda: nn.MultiheadAttention(4, 2), lambda: nn.MultiheadAttention(4, 4)),
        (lambda: nn.LSTM(4, 4), lambda: nn.LSTM(4, 4, batch_first=True)),
        (lambda: nn.GELU(), lambda: nn.GELU("tanh")),
        (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.GELU())),
        (lambda: nn.Sequential(nn.ReLU()), lambda: nn.ModuleDict({"a": nn.ReLU()})),
        (lambda: Dynamic(num_heads=3), lambda: Dynamic(num_heads=4)),
        (lambda: Fixed(1, 1, 3), lambda: Fixed(1, 1, 3, mode="b")),
        (lambda: Fixed(1, 1, 3), lambda: Fixed(1, 1, 3, dilation=2)),
        (lambda: nn.ParameterDict({"a": torch.zeros(2)}), lambda: nn.ParameterDict({"a": torch.zeros(3)})),
        (lambda: nn.ParameterDict({"a": torch.zeros(2)}), lambda: nn.ParameterDict({"b": torch.zeros(2)})),
        (lambda: nn.ParameterList([torch.zeros(2)]), lambda: nn.ParameterList([torch.zeros(2)] * 2)),
    ],
)
def test_fingerprint__models_that_differ_have_different_hashes(one, other):
    assert structure(one()) == structure(one())
    assert structure(one()) != structure(other())


def test_fingerprint__numbers_of_heads_count_even_if_set_from_outside():
    net = nn.Sequential(Dynamic())
    before = structure(net)
    net[0].num_heads = 4
    assert structure(net) != before


@pytest.mark.parametrize("make", [lambda t: nn.ParameterDict({"a": t}), lambda t: nn.ParameterList([t])])
def test_fingerprint__lists_of_parameters_are_the_same_on_every_device(make):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.own = nn.Linear(2, 2), make(torch.ones(2))

    net = Net()
    with torch.device("meta"):
        there = Net()
    assert structure(net) == structure(there)
    values = surgery.state(there)
    whole = {n: (surgery.plan.Source(n, (None,) * t.ndim),) for n, t in values.items()}
    plan = Plan(whole, {n: tuple(t.shape) for n, t in values.items()}, structure=structure(there))
    assert surgery.state(plan.build(net)).keys() == values.keys()


def test_fingerprint__what_another_version_of_torch_prints_or_adds_changes_nothing(monkeypatch):
    def older(self, size, stride=1):
        nn.Module.__init__(self)
        self.size, self.stride = size, stride

    def newer(self, size, stride=1, flavour="plain"):
        nn.Module.__init__(self)
        self.size, self.stride, self.flavour, self.derived, self._private = size, stride, flavour, 2 * size, 3

    first, second, third = (
        type("Thing", (nn.Module,), {"__module__": "torch.nn.thing", "__init__": init, "extra_repr": printed})
        for init, printed in ((older, lambda self: "a"), (newer, lambda self: "a"), (newer, lambda self: "b"))
    )
    assert structure(first(3)) == structure(second(3)) == structure(third(3))
    assert len({structure(first(3)), structure(first(3, 2)), structure(second(3, 1, "hot"))}) == 3

    def moody(self, mood="calm"):
        nn.Module.__init__(self)
        self.mood = mood

    bare, more = (
        type("Bare", (nn.Module,), {"__module__": "torch.nn.thing", "__init__": init})
        for init in (nn.Module.__init__, moody)
    )
    assert structure(bare()) == structure(more()) != structure(more("hot"))

    compiled = functools.partialmethod(older, stride=2)  # a constructor without Python code says nothing of arguments
    assert settings(type("Thing", (nn.Module,), {"__module__": "torch.nn.thing", "__init__": compiled})(3)) == {}

    before, init = structure(nn.Sequential(nn.Linear(2, 3), Block())), nn.Module.__init__

    def module(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._new, self.new = {}, True

    monkeypatch.setattr(nn.Module, "__init__", module)
    assert nn.ReLU().new
    assert structure(nn.Sequential(nn.Linear(2, 3), Block())) == before


def test_fingerprint__a_hash_of_another_version_is_no_obstacle():
    net = nn.Linear(2, 2)
    values = {n: tuple(t.shape) for n, t in surgery.state(net).items()}
    whole = {n: (surgery.plan.Source(n, (None,) * len(shape)),) for n, shape in values.items()}
    assert Plan(whole, values, structure="2:0123456789abcdef").build(net).out_features == 2
    with refused("plan"):
        Plan(whole, values, structure="3:0123456789abcdef").build(net)
