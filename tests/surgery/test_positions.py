"""Narrow models of which the caller says the positions."""

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

import surgery
import zoo
from surgery import narrow, state
from surgery.width.corner import rolling

X = torch.randn(2, 3, 5)


class Calls(nn.Module):
    """Two layers, and code of the caller between them."""

    def __init__(self, function):
        super().__init__()
        self.function, self.a, self.b, self.c = function, nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.c(self.function(self.a(x), self.b(x)))


class Attention(nn.Module):
    """Four heads of six positions, of which queries and keys may have others than values."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(5, 24) for _ in range(3))
        self.out, self.heads = nn.Linear(24, 2), 4

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


PLAIN = Calls(lambda y, z: y.relu() * z)
SIZED = Calls(lambda y, z: y.sum() + z.view(*z.shape[:-1], y.shape[-1]))  # takes two widths for one
RANGE = Calls(lambda y, z: y * z * torch.linspace(0, 1, y.shape[-1], device=y.device))
ORDER = Calls(lambda y, z: (y * z).cumsum(-1))


@pytest.mark.parametrize("given", [[0, 3, 5], (0, 3, 5), torch.tensor([0, 3, 5]), np.array([0, 3, 5])])
def test_positions__the_positions_given_are_those_that_stay(given):
    small, plan = narrow(PLAIN, positions={"a.weight:0": given}, example=X, strict=True)
    assert plan.entries["a.bias"][0].index == plan.entries["b.bias"][0].index == (((0, 1), (3, 4), (5, 6)),)
    assert torch.equal(small.c.weight, PLAIN.c.weight[:, [0, 3, 5]])
    assert small(X).shape == (2, 3, 2)


def test_positions__widths_that_are_not_named_stay():
    assert all(
        t.shape == PLAIN.get_parameter(n).shape for n, t in narrow(PLAIN, positions={}, example=X)[0].named_parameters()
    )
    net = Attention()
    small, plan = narrow(net, positions={"v.weight:0:1": [0, 5], "q.weight:0:0": [1, 2]}, example=X)
    assert [layer.out_features for layer in (small.q, small.k, small.v)] == [12, 12, 4]
    assert plan.entries["v.bias"][0].index == (((6, 7), (11, 13), (17, 18)),)


def test_positions__widths_that_the_code_takes_for_one_keep_the_same_positions():
    for positions in ({"a.weight:0": [1, 4]}, {"b.weight:0": [1, 4]}, {"a.weight:0": [1, 4], "b.weight:0": [1, 4]}):
        _, plan = narrow(SIZED, positions=positions, example=X)
        assert plan.entries["a.bias"][0].index == plan.entries["b.bias"][0].index == (((1, 2), (4, 5)),)
    with refused("argument"):
        narrow(SIZED, positions={"a.weight:0": [1, 4], "b.weight:0": [0]}, example=X)


def test_positions__a_width_whose_order_matters_keeps_its_first_positions():
    _, plan = narrow(RANGE, positions={"a.weight:0": [0, 1]}, example=X)
    assert plan.entries["a.bias"][0].index == (((0, 2),),)
    with refused("width"):
        narrow(RANGE, positions={"a.weight:0": [0, 2]}, example=X)


@pytest.mark.parametrize(
    ("net", "given", "expected"),
    [
        (PLAIN, {"a.weight:0": [3, 0]}, "argument"),
        (PLAIN, {"a.weight:0": [3, 3]}, "argument"),
        (PLAIN, {"a.weight:0": [6]}, "argument"),
        (PLAIN, {"a.weight:0": [-1, 0]}, "argument"),
        *((PLAIN, {"a.weight:0": given}, "argument") for given in ([], 3, [0.0], [True], [[0, 1]])),
        *((PLAIN, {"a.weight:0": given}, "argument") for given in ("01", None, {0, 1})),
        (PLAIN, {"a.weihgt:0": [0]}, "name: 'a.weight:0'"),
        (PLAIN, {0: [0]}, "name"),
        (PLAIN, [0, 1], "argument"),
        (PLAIN, {"c.weight:0": [0]}, "width"),
        (ORDER, {"a.weight:0": [0]}, "width"),
    ],
)
def test_positions__what_are_no_positions_of_a_width_is_refused(net, given, expected):
    with refused(expected):
        narrow(net, positions=given, example=X)


def test_positions__options_that_choose_positions_do_not_go_with_them():
    for options, expected in (
        ({"scores": {}}, "argument: scores"),
        ({"heads": "drop", "rounding": 2}, "argument: heads, rounding"),
        ({"width": 0.5}, "argument: width"),
        ({"keep": ["b"]}, "width: 'b'"),
        ({"example": None}, "argument: `example`"),
    ):
        with refused(expected):
            narrow(PLAIN, positions={"a.weight:0": [0]}, **{"example": X, **options})


def test_positions__the_window_of_fedrolex_is_positions():
    net, small = (zoo.create("cnn", width=width, in_channels=1, image_size=8) for width in (0.5, 0.2))
    image = torch.zeros(2, 1, 8, 8)
    roll, shapes = rolling(net, small, example=image), state(small)
    free = [width for width in surgery.widths(net, image) if not width.reason]
    for by in (0, 1, 26):
        kept = {w.name: shapes[w.members[0][0]].shape[w.members[0][1]] for w in free}
        window = {w.name: sorted((by + i) % w.size for i in range(kept[w.name])) for w in free}
        plan, rolled = narrow(net, positions=window, example=image)[1], roll(by)
        assert plan.entries == rolled.entries
        assert {repr(sorted(edit.items())) for edit in plan.edits} == {
            repr(sorted(edit.items())) for edit in rolled.edits
        }
