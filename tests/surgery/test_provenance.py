"""Numbers that remember which attribute they are from, and what a narrow model's attributes become by them."""

import copy
import json
import math
import operator
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from symmetric import Made
from torch import nn

import surgery
from surgery import narrow, state
from surgery.libraries import make_model
from surgery.width import check
from surgery.width.provenance import Operation, Place, Tracked, Tracking, evaluate, invert, numbers, plain, remember
from surgery.width.trace import trace_model

X = torch.zeros(2, 6)
A, B = Place("", "a"), Place("", "b")


def tracked(value, attribute="a"):
    holder = nn.Module()
    setattr(holder, attribute, value)
    remember(holder, Tracking())
    return getattr(holder, attribute)


EXPRESSIONS = st.recursive(
    st.sampled_from([A, B]) | st.integers(1, 9),
    lambda inner: st.builds(
        Operation, st.sampled_from([operator.add, operator.sub, operator.mul, operator.floordiv]), inner, inner
    ),
    max_leaves=6,
)


@given(EXPRESSIONS, st.integers(2, 99), st.integers(2, 99))
def test_provenance__arithmetic_with_numbers_that_remember_is_that_of_their_expression(expression, a, b):
    holder = nn.Module()
    holder.a, holder.b = a, b
    remember(holder, Tracking())
    try:
        expected = evaluate(expression, {A: a, B: b})
    except ZeroDivisionError:
        return
    found = evaluate(expression, {A: holder.a, B: holder.b})
    assert plain(found) == expected
    if isinstance(found, Tracked):
        assert evaluate(found.expression, {A: a, B: b}) == expected


STEP = st.tuples(st.sampled_from([operator.add, operator.sub, operator.mul]), st.integers(1, 9), st.booleans())


@given(st.integers(2, 99), st.lists(STEP, max_size=5))
def test_provenance__an_inverse_gives_the_number_back(a, steps):
    expression = A
    for apply, other, swap in steps:
        expression = Operation(apply, other, expression) if swap else Operation(apply, expression, other)
    assert invert(expression, A, evaluate(expression, {A: a}), {}) == a


def test_provenance__what_is_copied_written_or_pickled_is_a_plain_number():
    for number in (tracked(8), tracked(0.5)):
        assert type(pickle.loads(pickle.dumps(number))) is type(copy.deepcopy(number)) is type(plain(number))
        assert json.dumps(number) == json.dumps(plain(number))
        assert {plain(number): 1}[number] == 1
        assert f"{number}" == f"{plain(number)}"


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim, self.sizes, self.settings = dim, [dim, 2 * dim], SimpleNamespace(half=dim // 2)
        self.one, self.two, self.out = nn.Linear(6, dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, 3)

    def forward(self, x):
        x = self.one(x).view(-1, self.settings.half * 2)[:, : self.dim]
        x, y = torch.cat([x, self.two(x)], 1).split(self.sizes, dim=1)
        return self.out(y * (x.square().sum(1, keepdim=True) / self.dim))


def all_numbers(model):
    return [holder[key] for holder, key, _ in numbers(model)]


def test_narrow__lists_slices_objects_and_products_follow_and_nothing_is_left_of_it():
    net = Block(16)
    before = copy.deepcopy(all_numbers(net))
    small, plan = narrow(net, 0.5, X, strict=True)
    assert (small.dim, small.sizes, small.settings.half) == (8, [8, 16], 4)
    assert (net.dim, net.sizes, net.settings.half) == (16, [16, 32], 8)
    for model in (net, small, plan.build(net), pickle.loads(pickle.dumps(small))):
        flat = [n for value in all_numbers(model) for n in (value if isinstance(value, list) else [value])]
        assert {type(number) for number in flat} == {int}
    assert all_numbers(net) == before
    assert surgery.Plan.from_json(plan.to_json()) == plan
    compiled = torch.compile(small, backend="eager")
    torch.testing.assert_close(compiled(X + 1), small(X + 1))


@pytest.mark.parametrize("spelling", ["root", "power", "attribute", "inverse"])
def test_narrow__scales_follow_whatever_their_attributes_are_called(spelling):
    """Outputs of one network in four spellings are those of its class at half the width."""

    class Attention(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.n, self.zz = 4, width
            self.q, self.k, self.v, self.o = (nn.Linear(*size) for size in [(6, 4 * width)] * 3 + [(4 * width, 3)])
            if spelling in ("attribute", "inverse"):
                self.zz = width**-0.5 if spelling == "attribute" else width**0.5

        def forward(self, x):
            q, k, v = (f(x).view(*x.shape[:2], self.n, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
            weights = q @ k.mT
            if spelling == "root":
                weights = weights / math.sqrt(self.zz)
            elif spelling == "power":
                weights = weights * self.zz**-0.5
            else:
                weights = weights * self.zz if spelling == "attribute" else weights / self.zz
            return self.o((weights.softmax(-1) @ v).transpose(1, 2).flatten(2))

    x = torch.randn(2, 5, 6)
    small, plan = narrow(net := Attention(16), 0.5, x, strict=True)
    half = Attention(8)
    surgery.load(half, plan.extract(state(net)))
    torch.testing.assert_close(small(x), half(x))


def test_narrow__code_that_asks_for_plain_numbers_is_traced_with_these(caplog):
    class Exact(nn.Module):
        def __init__(self):
            super().__init__()
            self.dim, self.a, self.b = 16, nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, x):
            if type(self.dim) is not int:
                raise TypeError("give an int")
            return self.b(self.a(x).view(-1, self.dim))

    with caplog.at_level("INFO", logger="surgery"):
        small, _ = narrow(Exact(), 0.5, X, strict=True)
    assert small.dim == 8
    assert "plain numbers" in caplog.text


def test_narrow__a_label_that_no_operation_reads_says_the_new_width():
    net = Made(lambda net, x: net.b(net.a(x)), a=nn.Linear(6, 16), b=nn.Linear(16, 3), n_out=16, stride=16)
    small, _ = narrow(net, 0.5, X, strict=True)
    assert (small.n_out, small.stride) == (8, 16)


RUNS = ["timm:test_vit", "timm:test_mambaout", "timm:poolformerv2_s12", "timm:levit_128s", "timm:gcvit_xxtiny"]
RUNS += ["timm:focalnet_tiny_srf", "timm:inception_next_atto", "timm:dpn48b"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if i < 2 else pytest.mark.slow) for i, name in enumerate(RUNS)]
)
def test_narrow__the_narrow_model_runs_once(name, monkeypatch):
    """It ran up to 121 times while attributes were found by trying."""
    pytest.importorskip("timm")
    runs, difference = [], check._Comparison.difference
    monkeypatch.setattr(check._Comparison, "difference", lambda self, x: runs.append(1) or difference(self, x))
    model = make_model(name)
    narrow(model, 0.5, surgery.libraries.example_input(model))
    assert len(runs) == 1


@pytest.mark.parametrize(
    "name", ["timm:test_vit", "timm:test_resnet", pytest.param("timm:test_convnext", marks=pytest.mark.slow)]
)
def test_narrow__a_classifier_is_reset_after_a_cut(name):
    pytest.importorskip("timm")
    model = make_model(name)
    x = surgery.libraries.example_input(model)
    small, _ = narrow(model, 0.5, x)
    small.reset_classifier(7)
    assert small.eval()(x).shape[1] == 7


def test_provenance__reads_are_those_of_the_trace_alone():
    seen = trace_model(Block(16), X)
    assert {place for read in seen.found.reads for place in [read.number] if isinstance(place, Place)} >= {
        Place("", "dim"), Place("", "sizes", 0), Place("", "sizes", 1)
    }  # fmt: skip
    assert not any(isinstance(value, Tracked) for value in all_numbers(seen.model))


class Reads(nn.Module):
    """Code that a number's own class could break."""

    def __init__(self, code):
        super().__init__()
        self.code, self.dim, self.cap, self.p, self.pad = code, 16, math.inf, 0.25, 3
        self.scale = 2.0
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.b(self.code(self, self.a(x).view(-1, self.dim)))


def summed_in_a_loop(net, h):
    n = net.dim
    for _ in range(300):
        n = n + net.pad
    assert n > 0
    return h


CODES = {
    "infinite": lambda net, h: h.clamp(max=net.cap * net.scale),
    "times a flag": lambda net, h: nn.functional.dropout(h, net.p * net.training),
    "compared with a tensor": lambda net, h: h * (net.pad != torch.ones(1, dtype=torch.long)),
    "a loop": summed_in_a_loop,
}


@pytest.mark.parametrize("code", CODES)
def test_narrow__code_that_a_numbers_class_could_break(code, caplog):
    with caplog.at_level("INFO", logger="surgery"):
        small, _ = narrow(Reads(CODES[code]), 0.5, X, strict=True)
    assert small.dim == 8
    assert "plain numbers" not in caplog.text


def test_narrow__an_integer_stays_one():
    def code(net, h):
        assert h.shape[-1] == net.size * 1.0
        return h

    net = Reads(code)
    net.size = 16
    small, _ = narrow(net, 0.5, X, strict=True)
    assert (small.size, type(small.size)) == (8, int)


def test_narrow__numbers_that_a_cache_keeps_compute_plain_ones_afterwards():
    kept = []
    narrow(Reads(lambda net, h: (kept.append(net.dim // 2), h)[1]), 0.5, X)
    assert type(kept[0] * 3) is int
    before = len(kept[0].trace.compared)
    assert kept[0] == 8
    assert len(kept[0].trace.compared) == before


@pytest.mark.parametrize("name", ["value_dim", "num_key_value_dim", "hidden_layers_dim", "num_features"])
def test_narrow__words_within_a_name_exclude_no_label(name):
    net = Made(lambda net, x: net.b(net.a(x)), a=nn.Linear(6, 16), b=nn.Linear(16, 3), **{name: 16})
    assert getattr(narrow(net, 0.5, X, strict=True)[0], name) == 8


def test_narrow__what_trains_otherwise_is_seen_where_numbers_have_to_be_plain():
    class Aux(nn.Module):
        def __init__(self):
            super().__init__()
            self.dim, self.a, self.b, self.aux = 16, nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 2)

        def forward(self, x):
            if type(self.dim) is not int:
                raise TypeError("give an int")
            h = self.a(x).view(-1, self.dim)
            return (self.b(h), self.aux(h)) if self.training else self.b(h)

    small, _ = narrow(Aux().to("meta"), 0.5, X.to("meta"), strict=True)
    assert small.aux.in_features == 8
