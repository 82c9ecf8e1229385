"""Numbers that scale sums: powers of the length follow it however they are written, others stay and are named."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from torch import nn

from surgery import Plan, load, narrow, state
from surgery.width.attempts import Request, final
from surgery.width.choose import Demand

HEADS, WIDTH = 4, 16  # positions of each head, of which half stay


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
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOW)
def test_powers_of_the_length_follow_however_they_are_written(name):
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
}


@pytest.mark.parametrize("name", STAY)
def test_other_numbers_stay_and_are_an_error_under_strict(name, caplog):
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
def test_without_a_number_that_should_have_followed_strict_is_content(scores, caplog):
    net, x = Attention(WIDTH, lambda net, d: None, scores), torch.randn(2, 3, 6)
    narrow(net, 0.5, x, strict=True)
    assert not caplog.records


class Branch(nn.Module):
    """A residual branch of which a share is added; of 256 positions 0.5 is twice the fourth root of the inverse."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.share = nn.Linear(8, 256), nn.Linear(256, 8), 0.5

    def forward(self, x):
        return x + self.share * self.b(self.a(x).relu())


def test_shares_of_residual_branches_are_no_scales():
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


def test_weights_are_scaled_by_the_root_of_their_window_and_channels():
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


def test_embeddings_are_scaled_by_the_root_of_their_width():
    x = torch.tensor([[1, 2]])
    small, plan = narrow(Embedded(), 0.5, x, strict=True)
    assert small.factor.item() == pytest.approx(8**0.5)
    assert any(edit["do"] == "fill" for edit in plan.edits)
    smaller, second = narrow(small, 0.5, x, strict=True)
    assert plan.compose(second).build(Embedded()).factor.item() == smaller.factor.item() == 2
    _, corner = narrow(Embedded(), like=Embedded(8))
    assert corner.build(Embedded()).factor.item() == pytest.approx(8**0.5)


def test_on_the_meta_device_it_is_not_known_what_a_buffer_holds():
    with torch.device("meta"):
        net = Attention(WIDTH, holds(math.sqrt), lambda net, q, k: q @ k.mT / net.factor)
    with refused("strict"):
        narrow(net, 0.5, torch.zeros(2, 3, 6, device="meta"), strict=True)


@pytest.mark.parametrize(
    ("module", "attribute", "value"), [("embedding", "weight", 0.5), ("", "factor", "x"), ("", "absent", 1.0)]
)
def test_a_plan_fills_no_weights(module, attribute, value):
    net, edit = Embedded(), {"do": "fill", "module": module, "attribute": attribute, "value": value}
    _, plan = narrow(net, 0.5, torch.tensor([[1, 2]]))
    with refused("plan"):
        plan.with_edits([edit]).build(net)


def test_gemma_is_read_back_from_its_folder(tmp_path):
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


def test_what_stays_is_part_of_the_check():
    net = Attention(WIDTH, lambda net, d: None, lambda net, q, k: q @ k.mT * 0.7)
    (only,) = final(Request(net, torch.zeros(2, 3, 6), Demand(0.5))).checked.constant
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


X = torch.randn(2, 3, 6, dtype=torch.double)


def test_a_tensor_that_several_sums_share_follows_if_all_ask_the_same(caplog):
    small, _ = narrow(Twice(shared()), 0.5, X, strict=True)
    assert small.parts[1].scale.factor.item() == (WIDTH // 2) ** -0.5
    kept, _ = narrow(Twice(shared()), {"parts.0.[qk]": 0.5}, X)
    assert kept.parts[0].scale.factor.item() == WIDTH**-0.5
    assert len(caplog.records) == 1
    with refused("strict"):
        narrow(Twice(shared()), {"parts.0.[qk]": 0.5}, X, strict=True)


def test_a_tensor_under_two_names_stays_one():
    net = Twice(shared())
    net.parts[1].scale = shared()
    net.parts[1].scale.factor = net.parts[0].scale.factor
    small, _ = narrow(net, 0.5, X, strict=True)
    assert small.parts[0].scale.factor is small.parts[1].scale.factor
    assert small.parts[0].scale.factor.item() == (WIDTH // 2) ** -0.5


def test_numbers_of_low_precision_follow():
    small, _ = narrow(Embedded(24).bfloat16(), 0.5, torch.tensor([[1, 2]]), strict=True)
    assert small.factor == torch.tensor(12**0.5, dtype=torch.bfloat16)


def test_distances_of_queries_and_keys_have_no_scale():
    def scores(net, q, k):
        return 2 * (q @ k.mT) - (q * q).sum(-1, keepdim=True) - (k * k).sum(-1, keepdim=True).mT

    narrow(Attention(WIDTH, lambda net, d: None, scores).double(), 0.5, X, strict=True)
