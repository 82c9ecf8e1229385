"""Permuted models compute what they did, and permuting by the inverse gives every bit back."""

import itertools

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_models import LIBRARY_MODELS, library_model
from refusals import refused
from symmetric import IMAGE, SMALL, Grouped, Made, image, randomized, same_outputs
from torch import nn
from torch.nn import functional as F

from surgery import load, narrow, state, widths
from surgery.pruning import importance
from surgery.symmetry import align, permute
from surgery.widening import widen
from surgery.width.corner import rolling


def movable(net, example, output=None):
    return {width.name: width for width in widths(net, example) if not width.order}


def shuffled(found, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randperm(width.size, generator=generator) for name, width in found.items()}


def check(net, example, x, seed):
    found = movable(net, example)
    assert found
    orders = shuffled(found, seed)
    other, plan = permute(net, orders, example=example)
    assert same_outputs(net, other, x)
    assert any(not torch.equal(a, b) for a, b in zip(state(net).values(), state(other).values()))
    extracted = plan.extract(state(net))
    assert all(torch.equal(tensor, extracted[name]) for name, tensor in state(other).items())
    back, inverse = permute(other, {name: order.argsort() for name, order in orders.items()}, example=example)
    assert all(torch.equal(a, b) for a, b in zip(state(net).values(), state(back).values()))
    return plan, inverse


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**31))
def test_permute__outputs_stay_and_the_inverse_gives_every_bit_back(name, seed):
    plan, inverse = check(randomized(SMALL[name](), seed), IMAGE.double(), image(seed=seed), seed)
    assert all(s[0].index == (None,) * len(s[0].index) for s in plan.compose(inverse).entries.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARY_MODELS)
def test_permute__models_of_libraries(name):
    net, example = library_model(name)
    check(net, example, example, 0)


def test_permute__heads_and_groups_are_widths_of_their_own():
    found = {w.name: w for w in widths(SMALL["attention"](), IMAGE) if not w.order}
    assert {(w.size, w.grouping) for w in found.values()} == {(8, ""), (2, "heads"), (4, ""), (12, "")}
    net = randomized(SMALL["attention"]())
    heads = next(name for name, w in found.items() if w.grouping)
    other, _ = permute(net, {heads: [1, 0]}, example=IMAGE.double())
    assert torch.equal(other.proj.weight, net.proj.weight[:, [4, 5, 6, 7, 0, 1, 2, 3]])
    assert torch.equal(other.qkv.bias.view(3, 2, 4), net.qkv.bias.view(3, 2, 4)[:, [1, 0]])


def test_permute__a_width_has_a_name_for_every_axis_of_its_own():
    net = randomized(SMALL["residual"]())
    one, _ = permute(net, {"norm1.bias:0": [3, 2, 1, 0]}, example=IMAGE.double())
    other, _ = permute(net, {"conv1.weight:0": [3, 2, 1, 0]}, example=IMAGE.double())
    assert all(torch.equal(a, b) for a, b in zip(state(one).values(), state(other).values()))
    with refused("argument"):
        permute(net, [3, 2, 1, 0], example=IMAGE.double())
    with refused("argument"):
        permute(net, {"norm1.bias:0": [3, 2, 1, 0], "conv1.weight:0": [0, 1, 2, 3]}, example=IMAGE.double())


def told():
    """Widths whose positions are told apart, each in a way of its own."""
    weights = [torch.arange(6.0)]  # no buffer, so that no operation of ours can reach it

    def forward(net, x):
        ranked = net.a(x) * torch.arange(6.0, device=x.device)
        summed = net.b(x).cumsum(-1)
        listed = net.c(x) * weights[0].to(x.device)
        mixed = net.d(x) * torch.hann_window(6, device=x.device)
        return net.head(torch.cat([ranked, summed, listed, mixed], -1))

    return Made(forward, **{name: nn.Linear(4, 6) for name in "abcd"}, head=nn.Linear(24, 2))


def between(function, width=8):
    """A function of hidden features, between two linear layers."""
    return Made(lambda net, x: net.c(function(net.a(x))), a=nn.Linear(4, width), c=nn.Linear(width, 3))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.bias:0", "width"),
        ("b.bias:0", "width"),
        ("c.bias:0", "width"),
        ("d.bias:0", "width"),
        ("a.weight:1", "width"),
        ("head.bias:0", "width"),
        ("head.weight:1", "name: 'head.weight:1:0'"),
        ("f.bias:0", "name"),
    ],
)
def test_permute__what_has_an_order_is_refused_with_the_reason(name, expected):
    with refused(expected):
        permute(told(), {name: [1, 0, 2, 3, 4, 5]}, example=torch.zeros(1, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y @ torch.eye(y.shape[-1], device=y.device, dtype=y.dtype),
        lambda y: y * torch.tensor([[1.0], [2.0]]).expand(2, y.shape[1]),
    ],
    ids=["an identity matrix", "a constant that is expanded along it"],
)
def test_permute__what_has_no_order_may_be_permuted(function):
    net, x = randomized(between(function)), torch.randn(2, 4, dtype=torch.float64)
    other, _ = permute(net, {"a.bias:0": [3, 5, 1, 0, 2, 4, 7, 6]}, example=x)
    assert same_outputs(net, other, x)
    assert not torch.equal(other.a.bias, net.a.bias)


def draw_anew(y):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        return y * torch.rand(y.shape[-1], device=y.device, dtype=y.dtype)


def put_back(y):
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(STATE)
        return y * torch.rand(y.shape[-1], device=y.device, dtype=y.dtype)


def drop(y):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return F.dropout(y, 0.5, training=True)


with torch.random.fork_rng(devices=[]):
    torch.rand(3)
    STATE = torch.get_rng_state()
FEATURES, TABLE = torch.arange(1.0, 9, dtype=torch.float64), torch.arange(99.0, dtype=torch.float64)
ORDERED = {
    "constant": lambda y: y * FEATURES[: y.shape[-1]],
    "table": lambda y: y * TABLE[: y.shape[-1]],
    "list": lambda y: y * torch.tensor([1.0 + i for i in range(y.shape[-1])], dtype=y.dtype, device=y.device),
    "numpy": lambda y: y * torch.from_numpy(np.arange(1.0, 1 + y.shape[-1])),
    "range": lambda y: y * torch.arange(y.shape[-1], device=y.device),
    "linspace": lambda y: y * torch.linspace(0, 1, y.shape[-1], device=y.device),
    "to numpy": lambda y: y * torch.from_numpy((y.detach().numpy() * np.arange(y.shape[-1])).sum(-1, keepdims=True)),
    "as array": lambda y: y * torch.from_numpy(np.asarray(y.detach()) @ np.arange(float(y.shape[-1])))[:, None],
    "tolist": lambda y: y * sum(i * v for i, v in enumerate(y[0].tolist())),
    "cumsum of numpy": lambda y: y * torch.from_numpy(y.detach().numpy().cumsum(-1)).mean(-1, keepdim=True),
    "in place": lambda y: np.multiply(a := y.detach().numpy(), np.arange(a.shape[-1]), out=a) is a and y,
    "generator": lambda y: y * torch.rand(y.shape[-1], generator=torch.Generator().manual_seed(0)),
    "drawn in place": lambda y: y * torch.zeros(y.shape[-1]).normal_(generator=torch.Generator().manual_seed(0)),
    "seed": draw_anew,
    "state": put_back,
    "apply": lambda y: y.detach().clone().apply_(lambda v, n=itertools.count(): v * (next(n) % y.shape[-1])),
}


class OfOrder(nn.Module):
    """A width whose positions are told apart by code that no operation shows, and one that is free."""

    def __init__(self, act, width=8):
        super().__init__()
        self.a, self.b, self.c, self.act = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 3), act

    def forward(self, x):
        return self.c(self.b(self.act(self.a(x))).relu())


@pytest.mark.parametrize("name", ORDERED)
def test_permute__what_code_tells_apart_keeps_its_order_whatever_is_done(name):
    net, x = randomized(OfOrder(ORDERED[name])), torch.randn(2, 4, dtype=torch.float64)
    twin, scores = randomized(OfOrder(ORDERED[name]), 1), {k: torch.arange(8.0) for k in ("a.weight:0", "b.weight:0")}
    found = {w.name: w.order for w in widths(net, x)}
    assert found["a.weight:0"]
    assert not found["b.weight:0"]
    with refused("width"):
        permute(net, {"a.weight:0": list(range(7, -1, -1))}, example=x)
    assert same_outputs(net, permute(net, by=scores, example=x)[0], x)
    aligned = align([net, twin], example=x)
    assert list(aligned.permutations[1]) == ["b.weight:0"]
    assert same_outputs(twin, aligned.models[1], x)
    assert same_outputs(net, widen(net, rate=2, example=x)[0], x)
    rolled = rolling(net, OfOrder(ORDERED[name], 4), example=x)(2)
    assert rolled.entries["b.weight"][0].index == (((2, 6),), ((0, 4),))
    if name == "tolist":  # the sum is an argument, which is another number in the narrow model
        with refused("run"):
            narrow(net, 0.5, x, scores=scores, strict=True)
        return
    if name == "linspace":  # so are the constants
        with refused("strict"):
            narrow(net, 0.5, x, scores=scores, strict=True)
    small, plan = narrow(net, 0.5, x, scores=scores, strict=name != "linspace")
    assert plan.entries["b.weight"][0].index == (((4, 8),), ((0, 4),))
    if name not in ("linspace", "cumsum of numpy"):  # whose numbers follow from the size
        full = load(OfOrder(ORDERED[name]).double(), plan.embed(state(small))[0])
        assert same_outputs(full, small, x)


def test_permute__a_seed_of_the_code_shows_although_the_caller_has_set_the_same():
    net, x = randomized(OfOrder(drop)), torch.randn(2, 4, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = {w.name: w.order for w in widths(net, x)}
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state())
    assert "random numbers of a seed" in found["a.weight:0"]


def test_permute__parts_side_by_side_that_a_constant_numbers_stay_whole():
    class Sides(OfOrder):
        def forward(self, x):
            return self.c(torch.cat([self.a(x), self.a(x).relu()], -1) * torch.cat([FEATURES, FEATURES]))

    net, x = Sides(torch.relu), torch.zeros(2, 4)
    net.c = nn.Linear(16, 3)
    with refused("width"):
        narrow(net.double(), 0.5, x.double(), strict=True)


class Heads(nn.Module):
    """Attention whose scores and results code may change with what it computes for each head."""

    def __init__(self, scores=None, results=None):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(12, 96), nn.Linear(32, 3), 4
        self.scores, self.results = scores, results

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        y = ((self.scores(self.heads, scores) if self.scores else scores).softmax(-1) @ v).transpose(1, 2)
        return self.out((y * self.results(self.heads, y) if self.results else y).reshape(b, n, -1))


def sloped(slope):
    """With a slope for each head, as ALiBi has it."""

    def function(heads, scores):
        kind = {"dtype": scores.dtype, "device": scores.device}
        slopes = torch.tensor([slope(i, heads) for i in range(heads)], **kind)
        return scores + slopes[:, None, None] * torch.arange(scores.shape[-1], device=scores.device)

    return Heads(function)


@pytest.mark.parametrize("best", [True, False])
def test_permute__heads_of_constants_are_dropped_if_those_left_compute_what_they_did(best):
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    for slope in (lambda i, heads: 2.0 ** -(i + 1), lambda i, heads: 2.0 ** (-8 * (i + 1) / heads)):
        net = randomized(sloped(slope))
        scores = {k: torch.arange(len(v)) for k, v in importance(net, example=x).items()} if best else None
        if slope(0, 4) == slope(0, 2):
            small, plan = narrow(net, 0.5, x, scores=scores, heads="drop", strict=True)
            assert plan.entries["out.weight"][0].index == (None, ((0, 16),))
            full = load(sloped(slope).double(), plan.embed(state(small))[0])
            assert same_outputs(full, small, x)
        else:
            for given in (x, x.to("meta")):
                with refused("width"):
                    narrow(net, 0.5, given, scores=scores, heads="drop")
        assert narrow(net, 0.5, x, scores=scores)[0].heads == 4


@pytest.mark.parametrize("best", [True, False])
@pytest.mark.parametrize(
    ("scale", "dropped"),
    [
        (lambda h, y: torch.full((h, 1), 1 / h, device=y.device, dtype=y.dtype), False),
        (lambda h, y: torch.ones(h, 1, device=y.device, dtype=y.dtype) * (1 / h), False),
        (lambda h, y: torch.ones(h, 1, device=y.device, dtype=y.dtype) * h, False),
        (lambda h, y: torch.tensor(1 / h, device=y.device, dtype=y.dtype), False),
        (lambda h, y: h**-0.5, False),
        (lambda h, y: h, False),
        (lambda h, y: torch.full((h, 1), 0.5, device=y.device, dtype=y.dtype), True),
        (lambda h, y: torch.tensor(y.shape[-1] ** 0.5, device=y.device, dtype=y.dtype), True),
        (lambda h, y: y.shape[-1] ** 0.5, True),
    ],
)
def test_permute__heads_scaled_by_their_number_are_not_dropped(scale, dropped, best):
    net, x = randomized(Heads(None, scale)), torch.randn(2, 5, 12, dtype=torch.float64)
    scores = {k: torch.arange(len(v)) for k, v in importance(net, example=x).items()} if best else None
    options = {"width": 0.5, "example": x, "scores": scores, "strict": True}
    if not dropped:
        with refused("width"):
            narrow(net, heads="drop", **options)
    else:
        small, plan = narrow(net, heads="drop", **options)
        assert same_outputs(load(Heads(None, scale).double(), plan.embed(state(small))[0]), small, x)
    assert narrow(net, **options)[0].heads == 4


def ordinary_attention(name):
    if name in ("BertForMaskedLM", "LlamaForCausalLM"):
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, name.partition("For")[0] + "Config")(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
        return getattr(transformers, name)(config), torch.randint(0, 50, (2, 7))
    timm = pytest.importorskip("timm")
    options = {"depth": 2, "num_heads": 4} if "vit" in name else {"depths": (2, 2), "num_heads": (2, 4)}
    return timm.create_model(name, img_size=64, embed_dim=32, num_classes=5, **options), torch.randn(1, 3, 64, 64)


@pytest.mark.slow
@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "LlamaForCausalLM", "BertForMaskedLM"]
)
def test_permute__heads_of_ordinary_attention_are_dropped(name, on_meta):
    net, x = ordinary_attention(name)
    device = "meta" if on_meta else "cpu"
    narrow(net.to(device), 0.5, x.to(device), heads="drop", strict=True)


def test_permute__constants_of_heads_that_cannot_be_compared_are_refused_with_the_reason():
    class Looks(Heads):
        def forward(self, x):
            if not x.is_meta and self.heads == 2:
                raise ValueError("no two heads")
            return super().forward(x)

    net, x = (
        randomized(Looks(None, lambda h, y: torch.full((h, 1), 0.5, device=y.device))),
        torch.randn(2, 5, 12, dtype=torch.float64),
    )
    with refused("width"):
        narrow(net, 0.5, x, heads="drop")


def ramped(ramp):
    """Features multiplied by a constant that the code makes along them."""
    return between(lambda y: y * ramp(y.shape[-1], {"dtype": y.dtype, "device": y.device}))


@pytest.mark.parametrize(
    ("ramp", "differs"),
    [
        (lambda n, kind: torch.linspace(0, 1, n, **kind), True),
        (lambda n, kind: torch.arange(n, **kind) / n, True),
        (lambda n, kind: torch.arange(n, 0, -1, **kind), True),
        (lambda n, kind: torch.arange(n, **kind).exp(), False),
        (lambda n, kind: torch.tensor([3.0, 1, 4, 1, 5, 9, 2, 6][:n], **kind), False),
    ],
)
def test_permute__constants_along_a_width_are_the_first_of_the_full_models(ramp, differs, caplog):
    net, x = randomized(ramped(ramp)), torch.randn(2, 4, dtype=torch.float64)
    small, plan = narrow(net, 0.5, x)
    full = load(ramped(ramp).double(), plan.embed(state(small))[0])
    assert same_outputs(full, small, x) != differs
    assert differs == any("a.weight" in message for message in caplog.messages)
    if differs:
        with refused("strict: a.weight"):
            narrow(net, 0.5, x, strict=True)
    else:
        narrow(net, 0.5, x, strict=True)


def test_permute__a_tensor_of_the_code_that_data_fill_is_no_constant():
    def filled(y):
        both = torch.zeros(y.shape, device=y.device) + torch.linspace(0, 1, y.shape[-1], dtype=y.dtype, device=y.device)
        both[:, :] = y
        return both

    narrow(randomized(between(filled)), 0.5, torch.randn(2, 4, dtype=torch.float64), strict=True)


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 0, 1, 2], [0.5, 1, 2, 3], "0123", None, [True, False, True, False]])
def test_permute__what_is_no_permutation_is_refused(order):
    with refused("argument"):
        permute(SMALL["residual"](), {"norm1.bias:0": order}, example=IMAGE)


@pytest.mark.parametrize("name", SMALL)
def test_permute__the_first_positions_of_a_sorted_model_are_the_best_of_the_model(name):
    net, x = randomized(SMALL[name]()), image()
    scores = importance(net, example=x, by="l2")
    ordered, _ = permute(net, by=scores, example=x)
    assert same_outputs(net, ordered, x)
    for rate in (0.34, 0.5):
        best, _ = narrow(net, rate, x, scores=scores)
        first, _ = narrow(ordered, rate, x)
        assert same_outputs(best, first, x)
    assert not same_outputs(narrow(net, 0.5, x)[0], first, x)


def test_permute__plans_of_models_without_weights():
    with torch.device("meta"):
        net = Grouped()
    other, plan = permute(net, {"norm.bias:0:0": [2, 0, 1]}, example=IMAGE)
    assert other.stem.weight.is_meta
    assert plan.entries["stem.bias"][0].index == (((8, 12), (0, 8)),)


class Cached(nn.Module):
    """An attention that keeps the biases of its heads by device while it is evaluated, as timm's LeViT does."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.biases = nn.Parameter(torch.randn(4, 5))
        self.register_buffer("places", torch.randint(5, (6, 6), generator=torch.Generator().manual_seed(0)))
        self.kept = {}

    def _apply(self, fn, *args, **kwargs):
        self.kept = {}
        return super()._apply(fn, *args, **kwargs)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        key = str(x.device)
        if key not in self.kept:
            self.kept[key] = self.biases[:, self.places]
        x = (q @ k.transpose(-1, -2) + self.kept[key]).softmax(-1) @ v
        return self.proj(x.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("once", [None, torch.no_grad, torch.enable_grad])
def test_permute__what_a_module_has_computed_of_its_weights_is_not_that_of_other_weights(once):
    """Its pass before is what a user does with any model; the copy must not go on with what was kept."""
    net, x = nn.Sequential(nn.Linear(3, 8), Cached(), nn.Linear(8, 2)).double().eval(), torch.randn(2, 6, 3).double()
    if once:
        with once():
            net(x)
    found = movable(net, x)
    assert bool(net[1].kept) == bool(once)  # the model is not changed
    other, _ = permute(net, shuffled(found, 0), example=x)
    assert same_outputs(net, other, x)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["levit_128s", "efficientformerv2_s0"])
def test_permute__models_of_timm_that_have_run(name):
    x = image((2, 3, 224, 224))
    net = randomized(timm.create_model(name)).double().eval()
    with torch.no_grad():
        net(x)
        check(net, x, x, 0)


class Optional(nn.Module):
    """A second input that need not be given."""

    def __init__(self):
        super().__init__()
        self.i, self.c, self.o = nn.Linear(4, 8), nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x, c=None):
        return self.o((self.i(x) if c is None else self.i(x) + self.c(c)).relu())


def test_permute__what_the_example_does_not_use_is_told(caplog):
    net, x = Optional(), torch.randn(5, 4)
    turned = {"i.weight:0": torch.arange(8).flip(0)}
    permuted, _ = permute(net, turned, example=x)
    assert "c.weight (8, 3)" in caplog.text
    assert not torch.allclose(permuted(x, x[:, :3]), net(x, x[:, :3]), atol=1e-3)
    caplog.clear()
    align([Optional(), net], example=x)
    assert "c.weight (8, 3)" in caplog.text
    caplog.clear()
    widen(net, rate=2, example=x)
    assert "c.weight (8, 3)" in caplog.text
    with refused("strict: c.weight"):
        widen(net, rate=2, example=x, strict=True)
    caplog.clear()
    permute(net, {"i.weight:0": torch.arange(8)}, example=x)
    permute(net, turned, example=(x, x[:, :3]))
    assert not caplog.text


def test_permute__an_order_is_either_permutations_or_scores_to_sort_by():
    net, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(1, 2)
    orders, scores = {"0.weight:0": [2, 0, 1]}, {"0.weight:0": torch.tensor([1.0, 2.0, 2.0])}
    assert permute(net, by=scores, example=x)[1] == permute(net, {"0.weight:0": [1, 2, 0]}, example=x)[1]
    for wrong, expected in (
        ({}, "argument"),
        ({"permutations": orders, "by": scores}, "argument"),
        ({"permutations": scores["0.weight:0"]}, "argument"),
        ({"by": "l1"}, "argument: by"),
        ({"by": {"1.weight:0": scores["0.weight:0"]}}, "name"),
    ):
        with refused(expected):
            permute(net, **wrong, example=x)
