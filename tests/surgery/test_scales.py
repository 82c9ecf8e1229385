"""Numbers that scale sums: powers of the length follow it however they are written, others stay and are named."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from torch import nn

from surgery import Plan, load, narrow, state
from surgery.width.attempts import NarrowRequest, find_last_attempt
from surgery.width.choose import Demand

HEADS, WIDTH = 4, 16  # positions of each head, of which half stay
X = torch.randn(2, 3, 6, dtype=torch.double)


class Attention(nn.Module):
    """Attention whose class says by the width of a head what scales the products of queries and keys."""

    def __init__(self, width=WIDTH, begin=None, scores=None):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, HEADS * width) for _ in range(3))
        self.out, self.scores, self.width = nn.Linear(HEADS * width, 5), scores, 1
        begin(self, width)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out((self.scores(self, q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))


def sets(compute):
    return lambda net, d: setattr(net, "factor", compute(d))


def holds(compute, persistent=False):
    return lambda net, d: net.register_buffer("factor", torch.tensor(compute(d), dtype=torch.double), persistent)


def with_bias(net, d):
    net.factor, net.bias = d**-0.5, nn.Parameter(torch.ones(HEADS, 3, 3))


def inplace(net, q, k):
    scores = q @ k.mT
    scores *= net.factor
    return scores


def batched(net, q, k):
    q, k = (one.flatten(0, 1) for one in (q, k))
    return torch.baddbmm(q.new_zeros(1), q, k.mT, beta=0, alpha=net.factor).unflatten(0, (-1, HEADS))


def after(net, q, k):
    return q @ k.mT * net.factor


def root(d):
    return d**-0.5


def sums(q, k):
    """Products of queries and keys without a matrix product."""
    return (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1)


def keeps(net, d):
    net.width = d


CAUSAL = torch.ones(3, 3).triu(1).bool()
FOLLOW = {
    "after": (sets(root), after),
    "before": (sets(root), lambda net, q, k: (q * net.factor) @ k.mT),
    "both": (sets(lambda d: d**-0.25), lambda net, q, k: (q * net.factor) @ (k * net.factor).mT),
    "einsum": (sets(root), lambda net, q, k: torch.einsum("bhid,bhjd->bhij", q, k) * net.factor),
    "divides": (sets(math.sqrt), lambda net, q, k: q @ k.mT / net.factor),
    "numpy": (sets(lambda d: 1 / np.sqrt(d)), after),
    "inverse": (sets(lambda d: 1 / d), after),
    "twice_the_width": (sets(lambda d: (2 * d) ** -0.5), after),
    "all_heads": (sets(lambda d: (HEADS * d) ** -0.5), after),
    "inplace": (sets(root), inplace),
    "baddbmm": (sets(root), batched),
    "masked": (sets(root), lambda net, q, k: (q @ k.mT).masked_fill(CAUSAL, -1e9) * net.factor),
    "biased": (with_bias, lambda net, q, k: (q @ k.mT + net.bias) * net.factor),
    "buffer": (holds(math.sqrt), lambda net, q, k: q @ k.mT / net.factor),
    "tensor": (sets(lambda d: torch.tensor([d]).double() ** -0.5), after),
    "shape": (lambda net, d: None, lambda net, q, k: q @ k.mT / math.sqrt(q.shape[-1])),
    "in_range": (sets(root), lambda net, q, k: 50 * torch.tanh(q @ k.mT * net.factor / 50)),
    # numbers that the code puts into tensors
    "wrapped": (sets(root), lambda net, q, k: torch.tensor(net.factor) * (q @ k.mT)),
    "wrapped_before": (sets(root), lambda net, q, k: (q * torch.as_tensor([net.factor]).to(q)) @ k.mT),
    "wrapped_full": (sets(root), lambda net, q, k: q @ k.mT * torch.full((), net.factor)),
    "wrapped_for_heads": (sets(root), lambda net, q, k: q @ k.mT * q.new_full((HEADS, 1, 1), net.factor)),
    "wrapped_width": (keeps, lambda net, q, k: q @ k.mT / torch.sqrt(torch.tensor(net.width, dtype=q.dtype))),
    "wrapped_width_there": (keeps, lambda net, q, k: q @ k.mT * q.new_tensor(net.width).rsqrt()),
    "wrapped_power": (keeps, lambda net, q, k: q @ k.mT * (2 * q.new_tensor(net.width)) ** -0.5),
    "wrapped_shape": (lambda net, d: None, lambda net, q, k: q @ k.mT / torch.sqrt(q.new_tensor(q.size(-1)))),
    # sums that are no matrix products
    "sum": (sets(root), lambda net, q, k: sums(q, k) * net.factor),
    "sum_of_width": (keeps, lambda net, q, k: sums(q, k) * net.width**-0.5),
    "vecdot": (sets(root), lambda net, q, k: torch.linalg.vecdot(q.unsqueeze(-2), k.unsqueeze(-3)) * net.factor),
    "distance": (sets(math.sqrt), lambda net, q, k: -torch.cdist(q, k) / net.factor),
    # what keeps the scale of a sum
    "relu": (sets(root), lambda net, q, k: (q @ k.mT).relu() * net.factor),
    "clamp": (sets(root), lambda net, q, k: (q @ k.mT).clamp(-50, 50) * net.factor),
    "cat": (sets(root), lambda net, q, k: (torch.cat([q @ k.mT, sums(q, k)], -1) * net.factor)[..., :3]),
    "stack": (sets(root), lambda net, q, k: (torch.stack([q @ k.mT, q @ k.mT]) * net.factor)[0]),
    "softplus": (sets(root), lambda net, q, k: F.softplus(q @ k.mT) * net.factor),
    # tensors of equal numbers
    "buffer_for_heads": (holds(lambda d: [[[d**-0.5]]] * HEADS), after),
    "tensor_for_heads": (sets(lambda d: torch.full((HEADS, 1, 1), d**-0.5, dtype=torch.double)), after),
    "root_mean_square": (
        sets(root),
        lambda net, q, k: (q / q.square().mean(-1, keepdim=True).sqrt()) @ k.mT * net.factor,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOW)
def test_scales__powers_of_the_length_follow_however_they_are_written(name):
    begin, scores = FOLLOW[name]
    net, x = Attention(WIDTH, begin, scores).double(), torch.randn(2, 3, 6, dtype=torch.double)
    small, plan = narrow(net, 0.5, x, strict=True)
    native = load(Attention(WIDTH // 2, begin, scores).double(), state(small))
    torch.testing.assert_close(small(x), native(x), rtol=1e-12, atol=1e-12)
    again = Plan.from_json(plan.to_json()).build(net)
    torch.testing.assert_close(again(x), small(x), rtol=0, atol=0)


def with_constant(value):
    return lambda net, d: None, lambda net, q, k: q @ k.mT * value


STAY = {
    "literal": with_constant(WIDTH**-0.5),
    "another": with_constant(0.7),
    "attribute": (sets(lambda d: 0.7), after),
    "numpy_in_single_precision": (sets(lambda d: np.float32(d) ** -1), after),
    "saved_buffer": (holds(root, persistent=True), after),
    "saved_for_heads": (holds(lambda d: [[[d**-0.5]]] * HEADS, persistent=True), after),
    "another_for_heads": (holds(lambda d: [[[0.7]]] * HEADS), after),
    "wrapped": (lambda net, d: None, lambda net, q, k: q @ k.mT / torch.tensor(4.0)),
    "wrapped_there": (lambda net, d: None, lambda net, q, k: q @ k.mT / q.new_tensor(WIDTH).sqrt()),
    "wrapped_for_heads": (lambda net, d: None, lambda net, q, k: q @ k.mT * torch.full((HEADS, 1, 1), 0.25)),
    "sum": (lambda net, d: None, lambda net, q, k: sums(q, k) * 0.7),
    "distance": (lambda net, d: None, lambda net, q, k: -torch.cdist(q, k) / 4),
    "relu": (lambda net, d: None, lambda net, q, k: (q @ k.mT).relu() * 0.25),
    "cat": (lambda net, d: None, lambda net, q, k: (torch.cat([q @ k.mT, sums(q, k)], -1) * 0.25)[..., :3]),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_scales__other_numbers_stay_and_are_an_error_under_strict(name, caplog):
    begin, scores = STAY[name]
    net, x = Attention(WIDTH, begin, scores).double(), torch.randn(2, 3, 6, dtype=torch.double)
    small, _ = narrow(net, 0.5, x)
    assert len(caplog.records) == 1
    assert small.q.out_features == HEADS * WIDTH // 2
    with refused("strict"):
        narrow(net, 0.5, x, strict=True)


@pytest.mark.parametrize(
    "scores",
    [
        lambda net, q, k: q @ k.mT,
        lambda net, q, k: F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 14.3,
        lambda net, q, k: q @ k.mT * WIDTH**-0.5 if q.shape[-1] == WIDTH else q @ k.mT * q.shape[-1] ** -0.5,
    ],
)
def test_scales__without_a_number_that_should_have_followed_strict_is_content(scores, caplog):
    net, x = Attention(WIDTH, lambda net, d: None, scores), torch.randn(2, 3, 6)
    narrow(net, 0.5, x, strict=True)
    assert not caplog.records


COSINES = {
    "normalize": lambda net, q, k: F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT / net.factor,
    "norm": lambda net, q, k: (q / q.norm(dim=-1, keepdim=True)) @ F.normalize(k, dim=-1).mT / net.factor,
    "inverse_root": lambda net, q, k: unit(q) @ unit(k).mT / net.factor,
    "sum": lambda net, q, k: sums(F.normalize(q, dim=-1), F.normalize(k, dim=-1)) / net.factor,
    "of_scores": lambda net, q, k: q @ k.mT / (q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]) / net.factor,
}  # fmt: skip


def unit(x):
    return x * x.square().sum(-1, keepdim=True).add(1e-6).rsqrt()


@pytest.mark.parametrize("name", COSINES)
def test_scales__a_temperature_of_cosines_stays_though_it_is_a_power_of_the_width(name, caplog):
    small, _ = narrow(Attention(WIDTH, sets(root), COSINES[name]).double(), 0.5, X, strict=True)
    assert small.factor == WIDTH**-0.5
    assert not caplog.records


VIEWS = {
    "heads": lambda net, x: x.unflatten(-1, (net.heads, -1)),
    "width": lambda net, x: x.unflatten(-1, (-1, net.width // net.heads)),
    "literal": lambda net, x: x.unflatten(-1, (8, -1)),
}
QUOTIENTS = {
    "floor": lambda net, x: x * (net.width // net.heads) ** -0.5,
    "true": lambda net, x: x * (net.width / net.heads) ** -0.5,
    "wrapped": lambda net, x: x * torch.tensor(net.width // net.heads, dtype=x.dtype) ** -0.5,
}


class AsManyHeads(nn.Module):
    """Attention with as many heads as each has positions, whose width its code divides by them."""

    def __init__(self, view, scale):
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 64), nn.Linear(6, 64), nn.Linear(6, 64), nn.Linear(64, 5)
        self.width, self.heads, self.view, self.scale = 64, 8, view, scale

    def forward(self, x):
        q, k, v = (self.view(self, layer(x)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out((self.scale(self, q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scale", QUOTIENTS)
def test_scales__a_quotient_of_width_and_heads_follows_by_the_width(view, scale):
    small, _ = narrow(AsManyHeads(VIEWS[view], QUOTIENTS[scale]).double(), 0.5, X, strict=True)
    assert (small.width, small.heads) == (32, 8)


class Readout(nn.Module):
    """A layer whose result, or what it reads, is divided by how many it sums, as in muP."""

    def __init__(self, compute, width=16):
        super().__init__()
        self.a, self.out, self.compute = nn.Linear(4, width), nn.Linear(width, 3), compute
        self.width, self.base, self.depth = width, 64, 16

    def forward(self, x):
        return self.compute(self, self.a(x).relu())


@pytest.mark.parametrize(
    "compute",
    [
        lambda net, y: net.out(y) / net.width,
        lambda net, y: net.out(y) * (1 / net.width),
        lambda net, y: net.out(y) * (net.base / net.width),
        lambda net, y: net.out(y) / torch.tensor(net.width),
        lambda net, y: net.out(y / net.width),
        lambda net, y: net.out(y)[:, None] * net.width**-1,
    ],
)
def test_scales__an_attribute_that_is_the_length_of_a_layers_sum_follows(compute):
    net, x = Readout(compute), torch.randn(2, 4)
    small, _ = narrow(net, 0.5, x, strict=True)
    assert small.width == 8
    torch.testing.assert_close(small(x), load(Readout(compute, 8), state(small))(x))


@pytest.mark.parametrize("compute", [lambda net, y: net.out(y) / 16, lambda net, y: net.out(y / 16.0)])
def test_scales__a_constant_that_is_the_length_of_a_layers_sum_is_named(compute, caplog):
    narrow(Readout(compute), 0.5, torch.randn(2, 4))
    assert len(caplog.records) == 1
    with refused("strict"):
        narrow(Readout(compute), 0.5, torch.randn(2, 4), strict=True)


@pytest.mark.parametrize(
    "compute",
    [lambda net, y: net.out(y) / 12, lambda net, y: net.out(y) * 0.0625, lambda net, y: net.out(y) * torch.tensor(0.5)],
)
def test_scales__other_constants_behind_a_layer_are_none_of_its_scales(compute, caplog):
    narrow(Readout(compute), 0.5, torch.randn(2, 4), strict=True)
    assert not caplog.records


class Branch(nn.Module):
    """A residual branch of which a share is added; of 256 positions 0.5 is twice the fourth root of the inverse."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.share = nn.Linear(8, 256), nn.Linear(256, 8), 0.5

    def forward(self, x):
        return x + self.share * self.b(self.a(x).relu())


def test_scales__shares_of_residual_branches_are_no_scales():
    small, _ = narrow(Branch(), 0.25, torch.zeros(2, 8), strict=True)
    assert (small.share, small.a.out_features) == (0.5, 64)


class Equalised(nn.Module):
    """Weights that are multiplied by a gain over the root of what they sum over, as in StyleGAN."""

    def __init__(self, width=32):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, width, 1), nn.Conv2d(width, 4, 3)
        self.factor = math.sqrt(2) / math.sqrt(width * 9)

    def forward(self, x):
        return F.conv2d(self.a(x), self.b.weight * self.factor, self.b.bias)


def test_scales__weights_are_scaled_by_the_root_of_their_window_and_channels():
    small, _ = narrow(Equalised(), 0.5, torch.zeros(1, 3, 5, 5), strict=True)
    assert small.factor == pytest.approx(Equalised(16).factor, rel=1e-12)


class Embedded(nn.Module):
    """Embeddings times the root of their width, in a buffer that is not saved, as Gemma's."""

    def __init__(self, width=16):
        super().__init__()
        self.embedding, self.out = nn.Embedding(10, width), nn.Linear(width, 3)
        self.register_buffer("factor", torch.tensor(width**0.5), persistent=False)

    def forward(self, x):
        return self.out(self.embedding(x) * self.factor)


def test_scales__embeddings_are_scaled_by_the_root_of_their_width():
    x = torch.tensor([[1, 2]])
    small, plan = narrow(Embedded(), 0.5, x, strict=True)
    assert small.factor.item() == pytest.approx(8**0.5)
    assert any(edit["do"] == "fill" for edit in plan.edits)
    smaller, second = narrow(small, 0.5, x, strict=True)
    assert plan.compose(second).build(Embedded()).factor.item() == smaller.factor.item() == 2
    _, corner = narrow(Embedded(), like=Embedded(8))
    assert corner.build(Embedded()).factor.item() == pytest.approx(8**0.5)


def test_scales__on_the_meta_device_it_is_not_known_what_a_buffer_holds():
    with torch.device("meta"):
        net = Attention(WIDTH, holds(math.sqrt), lambda net, q, k: q @ k.mT / net.factor)
    with refused("strict"):
        narrow(net, 0.5, torch.zeros(2, 3, 6, device="meta"), strict=True)


@pytest.mark.parametrize(
    ("module", "attribute", "value"), [("embedding", "weight", 0.5), ("", "factor", "x"), ("", "absent", 1.0)]
)
def test_scales__a_plan_fills_no_weights(module, attribute, value):
    net, edit = Embedded(), {"do": "fill", "module": module, "attribute": attribute, "value": value}
    _, plan = narrow(net, 0.5, torch.tensor([[1, 2]]))
    with refused("plan"):
        plan.with_edits([edit]).build(net)


def test_scales__gemma_is_read_back_from_its_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 70}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
    kind, words = transformers.GemmaForCausalLM, {"input_ids": torch.arange(14).view(2, 7)}
    net = kind(transformers.GemmaConfig(**sizes)).eval()
    small, _ = narrow(net, 0.5, words, output=lambda y: y.logits, strict=True)
    small.save_pretrained(tmp_path)
    back = kind.from_pretrained(tmp_path)
    assert back.config.hidden_size == 32
    torch.testing.assert_close(back(**words).logits, small(**words).logits, rtol=0, atol=0)


def test_scales__what_stays_is_part_of_the_check():
    net = Attention(WIDTH, lambda net, d: None, lambda net, q, k: q @ k.mT * 0.7)
    (only,) = find_last_attempt(NarrowRequest(net, torch.zeros(2, 3, 6), Demand(0.5))).checked.unscaled
    assert (only.value, only.new, only.contraction.lengths) == (0.7, None, ((WIDTH, WIDTH // 2),))


class Twice(nn.Module):
    """Two attentions that hold one scale."""

    def __init__(self, share, precision=torch.double):
        super().__init__()
        self.parts = nn.ModuleList(Attention(WIDTH, lambda net, d: None, self.scores) for _ in range(2))
        for part in self.parts:
            part.scale = share
        self.to(precision)

    @staticmethod
    def scores(net, q, k):
        return q @ k.mT * net.scale.factor

    def forward(self, x):
        return self.parts[0](x) + self.parts[1](x)


def shared(precision=torch.double):
    scale = nn.Module()
    scale.register_buffer("factor", torch.tensor(WIDTH**-0.5, dtype=precision), persistent=False)
    return scale


def test_scales__a_tensor_that_several_sums_share_follows_if_all_ask_the_same(caplog):
    small, _ = narrow(Twice(shared()), 0.5, X, strict=True)
    assert small.parts[1].scale.factor.item() == (WIDTH // 2) ** -0.5
    kept, _ = narrow(Twice(shared()), {"parts.0.[qk]": 0.5}, X)
    assert kept.parts[0].scale.factor.item() == WIDTH**-0.5
    assert len(caplog.records) == 1
    with refused("strict"):
        narrow(Twice(shared()), {"parts.0.[qk]": 0.5}, X, strict=True)


class Settings:
    """What several modules read."""

    def __init__(self):
        self.factor, self.width = WIDTH**-0.5, WIDTH


def with_settings(scores):
    net = Twice(Settings()).double()
    for part in net.parts:
        part.scores = scores
    return net


@pytest.mark.parametrize("scores", [Twice.scores, lambda net, q, k: q @ k.mT * net.scale.width**-0.5])
def test_scales__an_attribute_that_several_sums_share_follows_if_all_ask_the_same(scores, caplog):
    small, _ = narrow(with_settings(scores), 0.5, X, strict=True)
    assert WIDTH // 2 in (small.parts[0].scale.width, round(small.parts[1].scale.factor ** -2))
    for shares in ({"parts.0.[qk]": 0.5}, {"parts.0.[qk]": 0.5, "parts.1.[qk]": 0.25}):
        caplog.clear()
        kept, _ = narrow(with_settings(scores), shares, X)
        assert (kept.parts[0].scale.width, kept.parts[1].scale.factor) == (WIDTH, WIDTH**-0.5)
        (record,) = caplog.records
        assert "parts.0.scale" in record.getMessage()
        with refused("strict"):
            narrow(with_settings(scores), shares, X, strict=True)


@pytest.mark.parametrize("value", [root, lambda d: [[[d**-0.5]]] * HEADS])
def test_scales__a_smaller_model_that_gets_a_saved_scale_is_named(value, caplog):
    full, half = (Attention(width, holds(value, persistent=True), after) for width in (WIDTH, WIDTH // 2))
    narrow(full, like=half)
    narrow(full, like=narrow(full, like=half)[0])
    assert len(caplog.records) == 3
    caplog.clear()
    full, half = (Attention(width, holds(value), after) for width in (WIDTH, WIDTH // 2))
    small, plan = narrow(full, like=half)
    assert torch.equal(small.factor, half.factor)
    assert torch.equal(plan.build(full).factor, half.factor)
    assert not caplog.records


def test_scales__statistics_of_norms_and_other_numbers_are_no_saved_scales(caplog):
    full, half = (nn.Sequential(nn.Conv2d(1, n, 1), nn.Conv2d(n, 1, 1), nn.BatchNorm2d(1)) for n in (16, 8))
    full[2].running_var.fill_(4.0)
    for net in (full, half):
        net[0].register_buffer("decay", torch.tensor(0.9))
    narrow(full, like=half)
    assert not caplog.records
    half[0].decay.fill_(0.7)  # the classes differ in it: perhaps it is a scale
    narrow(full, like=half)
    (record,) = caplog.records
    assert "0.decay, 0.9 (0.7 in the small one)" in record.getMessage()


def test_scales__a_tensor_under_two_names_stays_one():
    net = Twice(shared())
    net.parts[1].scale = shared()
    net.parts[1].scale.factor = net.parts[0].scale.factor
    small, _ = narrow(net, 0.5, X, strict=True)
    assert small.parts[0].scale.factor is small.parts[1].scale.factor
    assert small.parts[0].scale.factor.item() == (WIDTH // 2) ** -0.5


def test_scales__numbers_of_low_precision_follow():
    small, _ = narrow(Embedded(24).bfloat16(), 0.5, torch.tensor([[1, 2]]), strict=True)
    assert small.factor == torch.tensor(12**0.5, dtype=torch.bfloat16)


def test_scales__distances_of_queries_and_keys_have_no_scale():
    def scores(net, q, k):
        return 2 * (q @ k.mT) - (q * q).sum(-1, keepdim=True) - (k * k).sum(-1, keepdim=True).mT

    narrow(Attention(WIDTH, lambda net, d: None, scores).double(), 0.5, X, strict=True)


LENGTHS = {
    "norm": lambda x: x.norm(2, -1, keepdim=True),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "sum of squares": lambda x: x.square().sum(-1, keepdim=True).add(1e-12).sqrt().clamp(min=1e-9),
}


@pytest.mark.parametrize("power", [-0.5, 0.5])
@pytest.mark.parametrize("length", LENGTHS)
def test_scales__the_length_of_a_vector_is_scaled_by_the_root_of_its_width(length, power):
    """As in RMS norms that divide by length * dim ** -0.5."""

    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.last, self.factor = nn.Linear(6, width), nn.Linear(width, 5), width**power

        def forward(self, x):
            y = self.first(x)
            lengths = LENGTHS[length](y)
            return self.last(y / (lengths * self.factor if power < 0 else lengths / self.factor))

    net, other = Norm(WIDTH).double(), Norm(WIDTH // 2).double()
    small, _ = narrow(net, 0.5, X, strict=True)
    assert small.factor == pytest.approx(other.factor)
    other.load_state_dict(small.state_dict())
    torch.testing.assert_close(small(X), other(X))


def test_scales__a_sum_is_multiplied_by_one_over_its_length():
    class Mean(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.last, self.share = nn.Linear(6, width), nn.Linear(1, 5), 1 / width

        def forward(self, x):
            return self.last(self.first(x).relu().sum(-1, keepdim=True) * self.share)

    small, _ = narrow(Mean(WIDTH).double(), 0.5, X, strict=True)
    assert small.share == 2 / WIDTH
