"""What the caller may ask of `narrow`, and what is said where it cannot be done."""

import itertools
import math
import random
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from symmetric import Made
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import surgery
from surgery import narrow, state
from surgery.names import matches
from surgery.pruning import Target, prune
from surgery.width.choose import exact_covers


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.ModuleDict({"a": nn.Conv2d(8, 12, 1), "b": nn.Conv2d(12, 8, 1)})
        self.layer2 = nn.ModuleDict({"a": nn.Conv2d(8, 20, 1)})
        self.head = nn.Linear(20, 5)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.layer1["b"](self.layer1["a"](x).relu())
        return self.head(self.layer2["a"](x).relu().mean((2, 3)))


IMAGE = torch.zeros(2, 3, 6, 6)


def sizes(model, width, **options):
    small, plan = narrow(model, width, IMAGE, **options)
    assert torch.equal(plan.extract(state(model))["head.weight"], state(small)["head.weight"])
    assert small(torch.randn(2, 3, 6, 6)).shape == (2, 5)
    return small.stem.out_channels, small.layer1["a"].out_channels, small.layer2["a"].out_channels


class Grid(nn.Module):
    """Rows and columns of a width, either of which may be fewer."""

    def __init__(self):
        super().__init__()
        self.make, self.rows, self.columns = nn.Linear(3, 16), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        grid = self.make(x).view(-1, self.rows.in_features, self.columns.in_features)
        return self.rows(grid.amax(2)) + self.columns(grid.amax(1))


def test_choose__of_equally_good_digits_of_a_product_the_minor_one_shrinks():
    small, plan = narrow(Grid(), 0.5, torch.zeros(2, 3))
    assert (small.rows.in_features, small.columns.in_features) == (4, 2)
    assert plan.entries["make.bias"][0].index == (((0, 2), (4, 6), (8, 10), (12, 14)),)


def test_choose__rates_are_for_what_the_named_modules_make():
    model = Residual()
    assert sizes(model, 0.5) == (4, 6, 10)
    assert sizes(model, {"layer2": 0.25}) == (8, 12, 5)
    by_name = {"layer1.a": 0.25, "layer1": 0.5}  # the first that matches; b and the stem are added
    assert sizes(model, by_name) == (4, 3, 20)
    assert sizes(model, {"*.a": 0.75, "*": 0.5}) == (4, 9, 15)
    with refused("argument: 'stem'", "'layer1.b'"):
        narrow(model, {"stem": 0.5, "layer1": 0.25}, IMAGE)


def test_choose__a_width_may_be_a_number_of_positions_whatever_the_rounding():
    model = Residual()
    for rounding in (math.ceil, 5):
        assert sizes(model, {"layer1.a": 7, "layer2": 1}, rounding=rounding) == (8, 7, 1)
    assert sizes(model, {"layer1.a": np.int64(7), "*": 0.5}) == (4, 7, 10)
    assert sizes(model, {"layer2": 20, "layer1": 1.0}) == sizes(model, {}) == (8, 12, 20)
    assert sizes(model, {"stem": 3}) == sizes(model, {"stem": 3, "layer1.b": 3}) == (3, 12, 20)
    assert sizes(model, {"*": 4}) == (4, 4, 4)  # classes are no hidden width


class Attention(nn.Module):
    """Four heads of six positions, of which queries and keys may have others than values."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(5, 24) for _ in range(3))
        self.out = nn.Linear(24, 2)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_choose__a_number_counts_the_positions_of_all_heads():
    net, x = Attention(), torch.randn(2, 3, 5)
    small, plan = narrow(net, {"q": 8, "v": 0.5}, x)
    assert [layer.out_features for layer in (small.q, small.k, small.v)] == [8, 8, 12]
    assert plan.entries["q.bias"][0].index == (((0, 2), (6, 8), (12, 14), (18, 20)),)
    small, _ = narrow(net, {"*": 12}, x, heads="drop")
    assert [layer.out_features for layer in (small.q, small.k, small.v)] == [12, 12, 12]
    for width, expected in (
        ({"q": 10}, "width: 'q'"),
        ({"q": 10}, "width"),
        ({"q": 2}, "width"),
        ({"q": 8, "k": 12}, "argument: 'q'"),
        ({"q": 25}, "width"),
    ):
        with refused(expected):
            narrow(net, width, x)


def test_choose__modules_that_are_kept_keep_all_their_tensors(caplog):
    model = Residual()
    assert sizes(model, 0.5, keep=["layer1"], strict=True) == (8, 12, 10)
    assert sizes(model, 0.5, keep=["stem"]) == (8, 6, 10)
    assert sizes(model, 0.5, keep=["layer2.a"]) == (8, 6, 20)
    assert not caplog.records


def test_choose__patterns_that_match_nothing_and_shares_that_are_none_are_refused():
    model = Residual()
    for options, expected in [
        ({"keep": ["layer3"]}, "name: 'layer3'"),
        ({"keep": "layer1"}, "argument: 'layer1'"),
        ({"example": None}, "argument: `example`"),
        *(({"width": w}, "argument: width") for w in (0, -0.5, 1.5, math.nan, "half", True)),
        *(({"width": {"layer1": w}}, "argument: 'layer1'") for w in (0, True, 8.0, math.nan, None)),
        *(({"width": {"layer2": n}}, "width") for n in (21, 1000)),
        ({"width": 4}, "argument: '*'"),
        ({"width": {3: 0.5}}, "argument"),
        ({"width": model}, "argument: `like`"),
        ({"rounding": "8"}, "argument: rounding"),
        ({"rounding": lambda share: 0}, "argument"),
        ({"rounding": lambda share: None}, "argument"),
        ({"heads": "outside"}, "argument"),
    ]:
        with refused(expected):
            narrow(model, **{"width": 0.5, "example": IMAGE, **options})
    assert sizes(model, 0.1, rounding=math.floor) == (1, 1, 2)


def test_choose__matches():
    assert matches("a.b.c", "a.*")
    assert matches("a.b.c", "?.b")
    assert not matches("", "a")
    assert not matches("ab.c", "a")


def several():
    """Also returns its hidden features."""

    def forward(net, x):
        hidden = net.a(x).relu()
        return {"logits": net.b(hidden), "hidden": hidden}

    return Made(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3))


def test_choose__output_says_what_keeps_its_shape(caplog):
    x = torch.randn(2, 6)
    with refused("width: a.weight"):
        narrow(several(), 0.5, x)
    small, _ = narrow(several(), 0.5, x, output=lambda out: out["logits"], strict=True)
    assert {name: tuple(t.shape) for name, t in small(x).items()} == {"logits": (2, 3), "hidden": (2, 4)}
    with refused("argument: `output`"):
        narrow(several(), 0.5, x, output=lambda out: None)


class Both(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


def both():
    return Made(lambda net, x: Both(net.b(hidden := net.a(x).relu()), hidden), a=nn.Linear(6, 8), b=nn.Linear(8, 4))


@pytest.mark.parametrize(
    "output",
    [
        lambda out: out.logits,
        lambda out: out.logits[:],
        lambda out: out.logits[:, :2],  # what stays whole is what it takes
        lambda out: out[0].detach().float(),
        lambda out: out.logits.data.T,
        lambda out: F.softmax(out.logits, -1),
        lambda out: {"class": out.logits.argmax(-1), "more": [row.exp() for row in out.logits]},
        # What it computes with hidden it does not give.
        lambda out: {name: tensor.double() for name, tensor in out._asdict().items()}["logits"],
        lambda out: out.logits.add_(1),
    ],
)
def test_choose__what_output_computes_with_keeps_its_shape(output):
    small, _ = narrow(both(), 0.5, torch.randn(2, 6), output=output)
    assert small.b.weight.shape == (4, 4)


@pytest.mark.parametrize(
    "output", [lambda out: {"a": out.logits[:], "b": out.hidden.exp()}, lambda out: torch.cat(out, 1)]
)
def test_choose__all_that_output_computes_with_keeps_its_shape(output):
    with refused("width: a.weight"):
        narrow(both(), 0.5, torch.randn(2, 6), output=output)


def test_choose__output_gives_what_the_model_returned():
    x = torch.randn(2, 6)
    with_input = Made(lambda net, x: (net.b(net.a(x).relu()), x), a=nn.Linear(6, 8), b=nn.Linear(8, 4))
    small, _ = narrow(with_input, 0.5, x, output=lambda out: out[1])  # an input that it returned: no class has to stay
    assert small.b.weight.shape == (2, 4)
    for output in (
        lambda out: x,
        lambda out: torch.zeros(2, 4),
        lambda out: torch.from_numpy(out.logits.numpy()),
        lambda out: torch.tensor(out.logits.tolist()),
    ):
        with refused("argument: `output` gives a tensor"):
            narrow(both(), 0.5, x, output=output)


def best_of_four(net, x):
    """The best of four experts for each token."""
    weight, best = net.gate(x).softmax(-1).max(-1)
    out, hidden = torch.zeros_like(x), net.up(x)
    for i, expert in enumerate(net.experts):
        where = (best == i).nonzero()[:, 0]
        out = out.index_add(0, where, expert(hidden[where]) * weight[where, None])
    return net.head(out + x)


def test_choose__a_gate_stays_whole_and_says_so_while_the_rest_shrinks(caplog):
    torch.manual_seed(0)
    layers = {"gate": nn.Linear(6, 4), "up": nn.Linear(6, 10), "head": nn.Linear(6, 3)}
    model = Made(best_of_four, **layers, experts=nn.ModuleList(nn.Linear(10, 6) for _ in range(4)))
    x = torch.randn(20, 6)
    small, _ = narrow(model, 0.5, x)
    assert small.gate.out_features == 4
    assert small.up.out_features == small.experts[3].in_features == 5
    assert "gate.weight (4, 6)" in caplog.text
    with refused("width: gate"):
        narrow(model, 0.5, x, strict=True)


def test_choose__weights_times_a_mask_make_a_width():
    """A masked autoregressive layer (MADE), as users write it."""
    model = Made(
        lambda net, x: F.linear(F.linear(x, net.a.weight * net.first).relu(), net.b.weight * net.second),
        a=nn.Linear(5, 8, bias=False), b=nn.Linear(8, 5, bias=False),
    )  # fmt: skip
    model.register_buffer("first", torch.ones(8, 5).tril())
    vars(model)["second"] = torch.ones(5, 8).tril()
    small, plan = narrow(model, 0.5, torch.zeros(2, 5), strict=True)
    assert small.a.weight.shape == small.first.shape == (4, 5)
    assert small.second.shape == (5, 4)
    assert torch.equal(plan.build(model).second, model.second[:, :4])


def test_choose__widths_that_code_holds_in_constants_stay_whole_in_all_blocks(caplog):
    def hidden(net, x):
        return x + net.b(net.a(x).view(-1, 3, 4).flatten(1))

    blocks = (Made(hidden, a=nn.Linear(6, 12), b=nn.Linear(12, 6)) for _ in range(12))
    net = nn.Sequential(nn.Linear(4, 6), *blocks, nn.Linear(6, 2))
    small, _ = narrow(net, 0.5, torch.zeros(3, 4))
    assert small[0].out_features == 3
    assert {block.a.out_features for block in small[1:-1]} == {12}
    assert {"12", "7"} <= {*caplog.text.split()}  # widths, of which five are listed


def test_choose__streams_that_mix_by_a_square_matrix_stay_and_the_features_of_each_shrink():
    """Hyper-connections: all 3 * 8 numbers make the matrix of 3 * 3 that mixes the streams."""

    def forward(net, x):
        streams = net.first(x).view(-1, 3, net.inner.in_features)
        mixed = net.mix(streams.flatten(1)).view(-1, 3, 3) @ streams
        return net.last((mixed + net.inner(streams).relu()).mean(1))

    net = Made(forward, first=nn.Linear(4, 24), mix=nn.Linear(24, 9), inner=nn.Linear(8, 8), last=nn.Linear(8, 2))
    x = torch.randn(5, 4)
    small, plan = narrow(net, 0.5, x)
    assert [tuple(p.shape) for p in small.parameters() if p.ndim == 2] == [(12, 4), (9, 12), (4, 4), (2, 4)]
    assert_close(small(x), surgery.load(net, plan.embed(state(small))[0])(x))
    with refused("width: mix.weight"):
        narrow(net, 0.5, x, strict=True)
    assert narrow(net, 0.5, x, strict=True, keep=["mix"])[0].inner.in_features == 8


@settings(max_examples=200)
@given(st.integers(0, 10**6))
def test_choose__exact_covers_are_all_there_are(seed):
    generator = random.Random(seed)
    products = [tuple(generator.choices("abcdef", k=generator.randint(1, 4))) for _ in range(generator.randint(1, 4))]
    letters = sorted({letter for product in products for letter in product})
    expected = {
        frozenset(chosen)
        for n in range(len(letters) + 1)
        for chosen in itertools.combinations(letters, n)
        if all(sum(letter in chosen for letter in product) == 1 for product in products)
    }
    found = list(exact_covers(products))
    assert {frozenset(cover) for cover in found} == expected
    assert len(found) == len(expected)


def test_choose__patterns_that_decide_nothing_are_refused():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    for rates, expected in (
        ({"1": 0.5}, "argument: '1'"),
        ({"4": 0.5}, "argument: '4'"),
        ({"*": 0.5, "0": 0.25}, "argument: '0'"),
    ):
        with refused(expected):
            narrow(net, rates, torch.zeros(1, 4))
    for model in (state(net), [net]):
        with refused("argument"):
            narrow(model, 0.5, torch.zeros(1, 4))


def test_choose__the_example_stays_as_it_was():
    def writing(net, x):  # and looking at numbers, so that it cannot run on the meta device
        x -= x.mean()
        return net.b(net.a(x) if x.sum().item() < 1e9 else x)

    net, x = Made(writing, a=nn.Linear(4, 8), b=nn.Linear(8, 2)), torch.arange(8.0).view(2, 4)
    narrow(net, 0.5, x)
    surgery.pruning.importance(net, example=x, by="activation", batches=[x])
    assert x.flatten().tolist() == list(range(8))


class Rotary(nn.Module):
    """Attention whose head dimension is two halves that a table of angles turns."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Linear(5, 16), nn.Linear(16, 3 * 32), nn.Linear(32, 3)
        self.heads = 4
        self.register_buffer("angles", torch.rand(6, 4))

    def turned(self, x):
        a, b = x.chunk(2, -1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.embed(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v)
        return self.out(y.transpose(1, 2).flatten(2))


def test_choose__dropped_heads_keep_their_dimension():
    for heads, angles, left in (("inside", 2, 4), ("drop", 4, 2)):
        small, _ = narrow(Rotary(), 0.5, torch.randn(2, 6, 5), heads=heads)
        assert (small.angles.shape[1], small.heads, small.qkv.out_features) == (angles, left, 48)


class Sinks(nn.Module):
    """Grouped queries with numbers for each head: a logit beside the scores, a gate, or a temperature."""

    def __init__(self, per_head, groups=2, dim=8):
        super().__init__()
        self.per_head, self.dim, self.groups = per_head, dim, groups
        self.q, self.k, self.v = (nn.Linear(12, heads * dim) for heads in (4, groups, groups))
        self.sinks, self.gate = nn.Parameter(torch.randn(4)), nn.Linear(12, 4)
        self.out = nn.Linear(4 * dim, 5)

    def forward(self, x):
        q, k, v = (made(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for made in (self.q, self.k, self.v))
        k, v = (found.repeat_interleave(q.shape[1] // k.shape[1], 1) for found in (k, v))
        scores = q @ k.mT / self.dim**0.5
        if self.per_head == "sinks":
            sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        elif self.per_head == "temperature":
            scores = (scores * self.sinks[:, None, None]).softmax(-1)
        y = scores @ v
        if self.per_head == "gate":
            y = y * self.gate(x).sigmoid().transpose(1, 2)[..., None]
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("per_head", ["sinks", "gate", "temperature"])
@torch.no_grad()
def test_choose__a_number_for_each_head_stays_where_heads_shrink_inside(per_head, groups):
    x = torch.randn(2, 3, 12)
    net = Sinks(per_head, groups).eval()
    delattr(net, "sinks" if per_head == "gate" else "gate")
    small, plan = narrow(net, 0.5, x, strict=True)
    assert (small.dim, small.q.out_features, small.k.out_features) == (4, 16, groups * 4)
    half = Sinks(per_head, groups, dim=4).eval()
    half.load_state_dict(plan.extract(state(net)), strict=False)
    torch.testing.assert_close(small(x), half(x))
    few, _ = narrow(net, 0.5, x, heads="drop")
    assert (few.dim, few.q.out_features, few.out.in_features) == (8, 16, 16)


class SharedHeadDimension(nn.Module):
    """Rotary attention, as wide as the model, that takes queries and values apart by one number."""

    def __init__(self, width=40, heads=4):
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("angles", torch.rand(6, self.head_dim // 2))

    turned = Rotary.turned

    def forward(self, x):
        q, k, v = (
            layer(x).view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("rate", [0.5, 0.7])
def test_choose__axes_that_become_one_are_those_of_the_operation_that_fails(rate):
    """Halves of queries round up apart from values: these get the queries' size, whatever the model's own width is."""
    net = nn.Sequential(nn.Linear(5, 40), SharedHeadDimension(), nn.Linear(40, 3))
    small, _ = narrow(net, rate, torch.randn(2, 6, 5), strict=True)
    dim = 2 * math.ceil(rate * 5)
    assert (small[1].head_dim, small[1].q.out_features, small[1].v.out_features) == (dim, 4 * dim, 4 * dim)
    assert small[0].out_features == 40 * rate


class Average(nn.Module):
    """Keeps a moving average of its features in training mode."""

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(8, 16), nn.Linear(16, 3)
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x):
        y = self.a(x)
        if self.training:
            self.average.mul_(0.9).add_(0.1 * y.mean(0).detach())
        return self.c(y)


def test_choose__what_only_training_uses_shrinks_too():
    model, x = Average().train(), torch.randn(4, 8)
    small, _ = narrow(model, 0.5, x, strict=True)
    assert small.average.shape == (8,)
    small(x)
    assert not model.average.any()


class Draws(Average):
    """Draws numbers in training mode, and looks at them, so that it cannot run on the meta device there."""

    def forward(self, x):
        if self.training and torch.rand(()).item() + random.random() + np.random.rand() > 3:  # noqa: NPY002
            raise ValueError
        return super().forward(x)


@pytest.mark.parametrize("on_meta", [True, False])
def test_choose__the_pass_in_training_mode_leaves_the_model_and_all_random_numbers_alone(on_meta):
    class Looks(Draws):
        def forward(self, x):
            return super().forward(x) * (1 if on_meta or x.sum().item() else 2)

    def drawn():
        return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002

    def seed():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002

    seed()
    expected = drawn()
    seed()
    model, x = Looks(), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    seed()
    small, _ = narrow(model, 0.5, x, strict=True)
    assert drawn() == expected
    assert small.average.shape == (8,)
    assert model.training
    assert not model.average.any()


@pytest.mark.parametrize("cut", [partial(narrow, width=0.5), partial(prune, target=Target(macs=0.5), importance=None)])
def test_choose__a_model_that_looks_at_numbers_in_training_mode_alone_is_traced_there_with_its_numbers(cut):
    class Counts(Average):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            if self.training and self.n >= 0:
                self.n += 1
                return super().forward(x)
            return self.c(self.a(x))

    model, x = Counts(), torch.randn(4, 8)
    small = cut(model, example=x, strict=True)[0]
    assert small.average.shape == (small.a.out_features,) < (16,)
    assert model.n == 0
    assert not model.average.any()
    with refused("strict"):  # it has no numbers
        cut(model.to("meta"), example=x.to("meta"), strict=True)


class Branch(nn.Module):
    """Runs `other` only for inputs of two dimensions."""

    def __init__(self):
        super().__init__()
        self.a, self.other, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("codes", torch.zeros(7))

    def forward(self, x):
        y = self.a(x)
        return self.c(self.other(y) if x.dim() == 2 else y)


def test_choose__what_no_pass_uses_is_named_if_it_is_as_long_as_a_width_that_shrinks(caplog):
    example = torch.randn(2, 4, 8)
    narrow(Branch(), 0.5, example)
    (record,) = caplog.records
    assert "  other.weight (16, 16)\n  other.bias (16,)\ngive an example that uses them" in record.message
    with refused("strict: Branch"):
        narrow(Branch(), 0.5, example, strict=True)
    small, _ = narrow(Branch(), 0.5, example[0], strict=True)
    assert small.other.in_features == 8
    for keep in (["other"], ["a"]):  # its own module, or what makes the width
        narrow(Branch(), 0.5, example, keep=keep, strict=keep == ["other"])


def test_choose__a_pass_in_training_mode_that_fails_is_named_where_it_might_have_used_them():
    class Refuses(Average):
        def forward(self, x):
            if self.training:
                raise ValueError("give targets")
            return super().forward(x)

    with refused("strict: average (16,)"):
        narrow(Refuses(), 0.5, torch.randn(2, 8), strict=True)


def test_choose__a_part_that_stays_whole_is_named_though_the_rest_of_its_axis_shrinks():
    half = Made(
        lambda net, x: net.c(torch.cat([net.a(x), net.b(x).cumsum(-1)], -1)),
        a=nn.Linear(6, 8), b=nn.Linear(6, 12), c=nn.Linear(20, 3),
    )  # fmt: skip
    with refused("width: axis 0 of b.weight (12, 6) stays whole") as caught:
        narrow(half, 0.5, torch.randn(2, 6), strict=True)
    assert "part" not in str(caught.value)
    one = Made(
        lambda net, x: net.b(torch.cat([net.a(x)[:, :4].cumsum(-1), net.a(x)[:, 4:]], -1)),
        a=nn.Linear(6, 12), b=nn.Linear(12, 3),
    )  # fmt: skip
    with refused("width: a part of 4 of axis 0 of a.weight (12, 6) stays whole"):
        narrow(one, 0.5, torch.randn(2, 6), strict=True)


def test_choose__widths_are_those_that_narrow_finds_for_the_same_output():
    x = torch.randn(2, 6)
    found = {width.size: width for width in surgery.widths(several(), x)}
    assert found[8].reason == "it is an axis of the output"
    for rate in (1.0, 0.5):
        found = {w.size: w for w in surgery.widths(several(), x, rate, output=lambda out: out["logits"])}
        assert (found[8].reason, found[8].kept) == ("", 8 * rate)


def test_choose__an_unused_copy_of_a_tensor_follows_it(caplog):
    class Copies(Average):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(16))
            self.register_buffer("first_scale", self.scale.detach().clone())

        def forward(self, x):
            return self.c(self.a(x) * self.scale)

    model = Copies()
    model.average = None
    small, _ = narrow(model, 0.5, torch.randn(2, 8), strict=True)
    assert torch.equal(small.first_scale, small.scale)


def test_choose__widths_take_what_narrow_takes_and_print_as_a_table():
    found = surgery.widths(Residual(), IMAGE, {"layer1.a": 7, "layer2": 0.5})
    assert {w.name: w.kept for w in found if w.kept < w.size} == {"layer1.a.weight:0": 7, "layer2.a.weight:0": 10}
    assert not any(w.reason for w in found if w.size == 8)  # it was not to shrink
    assert repr(found[0]) == "Width(stem.weight:0, 8)"
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(found)
    assert lines[1].split() == ["stem.weight:0", "8", "8", "stem.bias:0,", "+4", "more"]
    assert str(surgery.widths(nn.Identity(), IMAGE, 0.5)).split()[:3] == ["name", "size", "kept"]
    assert str(surgery.widths(nn.Identity(), IMAGE)).split()[:4] == ["name", "size", "and", "along"]
    windows = surgery.widths(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 2)), IMAGE)
    assert str(windows).splitlines()[-1] == "4 more, which all stay: it is an axis of a convolution's window"
    assert len(str(windows).splitlines()) == 1 + len(windows) - 4 + 1
    first = [surgery.width.narrow.Width(8, 4, "", ((f"t{k}", 0),), f"t{k}:0", "", "in order") for k in range(4)]
    assert len(str(surgery.width.narrow.Widths(first)).splitlines()) == 1 + 4  # these shrink


@pytest.mark.parametrize("width", [{"0": 8}, {"0": 0.5, "*": 0.5}])
def test_choose__a_width_of_modules_that_are_kept_decides_nothing(width):
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12), nn.Linear(12, 2))
    with refused("argument"):
        narrow(net, width, torch.zeros(1, 4), keep=["0"])
    assert narrow(net, {"2": 0.5}, torch.zeros(1, 4), keep=["0"])[0][2].out_features == 6


def test_narrow__a_pattern_that_names_an_output_says_what_to_name():
    with refused("argument: width['1']", "surgery.widths"):
        narrow(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), {"1": 0.5}, torch.zeros(1, 4))
