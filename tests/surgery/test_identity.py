import copy

import pytest
import torch
from refusals import refused
from torch import nn
from torch.nn import functional as F
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

import surgery
from surgery import graft
from surgery.depth.sections import repeatable


class Gated(nn.Module):
    """A gated feed-forward part, with its tensors registered in one order and used in another."""

    def __init__(self, order):
        super().__init__()
        made = {"norm": nn.LayerNorm(6, bias=False), "down": nn.Linear(9, 6, bias=False)}
        made |= {name: nn.Linear(6, 9, bias=False) for name in ("gate", "up")}
        for name in order.split():
            setattr(self, name, made[name])

    def forward(self, x):
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """An attention and a gated feed-forward part, with the norms before the branches registered last."""

    def __init__(self, order="down gate up norm"):
        super().__init__()
        self.out, self.value, self.mix = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.feed, self.norm = Gated(order), nn.LayerNorm(6, bias=False)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.out(self.mix(y).softmax(-1) * self.value(y))
        return x + self.feed(x)


class Bare(nn.Module):
    """A gated part of tensors that are no layers, registered in the reverse of the order of their use."""

    def __init__(self):
        super().__init__()
        self.down, self.up, self.gate = (nn.Parameter(torch.randn(6, 6) / 3) for _ in range(3))
        self.norm = nn.LayerNorm(6, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + F.gelu(y @ self.gate) * (y @ self.up) @ self.down


class Parallel(nn.Module):
    """Two branches beside each other, with a tanh gate on one and a scale behind the other."""

    def __init__(self):
        super().__init__()
        self.gate, self.scale = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.full((6,), 0.1))
        self.second, self.first, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.gate.tanh() * self.first(y) + self.scale * self.second(y).relu()


def stacked(block):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), block(), block(), nn.Linear(6, 3)).eval()


def check_learns(net, example, depths=None, run=lambda net, given: net(given)):
    """The deeper net computes the same, and after some steps each parameter of its new blocks is another one."""
    found = [section for section in surgery.sections(net) if repeatable(net, section)]
    depths = depths or {section.name: len(section.blocks) + 1 for section in found}
    deep, plan = graft(net, depths=depths, mode="identity", example=example)
    with torch.no_grad():
        expected = run(net, example)
        torch.testing.assert_close(run(deep, example), expected, rtol=1e-4, atol=1e-5)
    old = {sources[0].name for sources in plan.entries.values()}
    start = {name: p.detach().clone() for name, p in deep.named_parameters() if name not in old}
    assert start
    optimizer = torch.optim.Adam(deep.parameters(), lr=1e-2)
    target = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    deep.train()  # in evaluation mode an untrained MobileNet's gradients vanish
    for _ in range(4):
        optimizer.zero_grad()
        (run(deep, example) - target).square().mean().backward()
        optimizer.step()
    now = dict(deep.named_parameters())
    assert [name for name, value in start.items() if torch.equal(now[name], value)] == []
    return {name for name, value in start.items() if not value.any()}


ORDERS = ["norm gate up down", "down gate up norm", "up down norm gate"]


@pytest.mark.parametrize("order", ORDERS)
def test_identity__what_a_branch_uses_last_is_zero_whatever_was_registered_last(order):
    net = stacked(lambda: Block(order))
    zero = check_learns(net, torch.randn(5, 4), {"": 4})
    assert zero == {f"{i}.{name}.weight" for i in (3, 4) for name in ("out", "feed.down")}


def test_identity__tensors_that_are_no_layers_are_zeroed_by_their_use():
    assert check_learns(stacked(Bare), torch.randn(5, 4)) == {"3.down"}


def test_identity__each_of_parallel_branches_has_its_zero():
    # tanh(0) = 0 as well, but the layer comes later
    assert check_learns(stacked(Parallel), torch.randn(5, 4)) == {"3.first.weight", "3.first.bias", "3.scale"}


class Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.b(self.a(x)).relu()


class Squared(nn.Module):
    """A layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

    def forward(self, x):
        return x + self.b(self.a(x)) * self.b(x)


@pytest.mark.parametrize("block", [Rectified, Squared])
def test_identity__a_block_that_could_not_learn_from_the_identity_is_refused(block):
    net = stacked(block)
    before = copy.deepcopy(net.state_dict())
    with refused("depth"):
        graft(net, depths=[3], mode="identity", example=torch.randn(5, 4))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


class Normed(nn.Module):
    """A branch of two layers whose weights are computed; the first one's may be in another way than the last one's."""

    def __init__(self, first, last):
        super().__init__()
        self.b, self.a = last(nn.Linear(6, 6)), first(nn.Linear(6, 6))

    def forward(self, x):
        return x + self.b(self.a(x).tanh())


class OwnNorm(nn.Module):
    """A layer that divides its weight by the norm itself."""

    def __init__(self):
        super().__init__()
        self.v, self.g, self.a = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.rand(6)), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.g * (self.a(x).tanh() @ (self.v / self.v.norm(dim=0)))


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


@pytest.mark.parametrize(
    ("first", "last", "zero"),
    [
        (parametrizations.weight_norm, parametrizations.weight_norm, "b.parametrizations.weight.original0"),
        (utils.weight_norm, utils.weight_norm, "b.weight_g"),
        (parametrizations.spectral_norm, lambda layer: layer, "b.weight"),
        (utils.spectral_norm, lambda layer: utils.weight_norm(layer, dim=None), "b.weight_g"),
        (parametrizations.orthogonal, lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "b.weight_orig"),
        (
            parametrizations.weight_norm,
            lambda layer: parametrize.register_parametrization(layer, "weight", Halved()),
            "b.parametrizations.weight.original",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_identity__of_computed_weights_what_makes_them_zero_is_zero(first, last, zero):
    net = stacked(lambda: Normed(first, last))
    assert check_learns(net, torch.randn(5, 4)) == {f"3.{zero}", "3.b.bias"}


def test_identity__where_the_last_weight_cannot_be_zero_those_before_it_are():
    net = stacked(lambda: Normed(lambda layer: layer, parametrizations.spectral_norm))
    assert check_learns(net, torch.randn(5, 4)) == {"3.a.weight", "3.a.bias", "3.b.bias"}


def test_identity__a_norm_in_the_code_is_not_made_zero():
    assert check_learns(stacked(OwnNorm), torch.randn(5, 4)) == {"3.g"}


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, utils.spectral_norm, parametrizations.orthogonal])
def test_identity__weights_that_cannot_be_zero_are_named(norm):
    with refused("depth: 'b.weight'"):
        graft(stacked(lambda: Normed(norm, norm)), depths=[3], mode="identity", example=torch.randn(5, 4))


IDS = torch.randint(3, 60, (3, 7), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
DECODERS = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
    "GPTNeoX": {},
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "Olmo2": {},
    "Phi": {},
    "Phi3": {},
    "Granite": {},
    "StableLm": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS)
def test_identity__new_blocks_of_decoders_learn(family):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **DECODERS[family]})
    name = f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}"
    net = getattr(transformers, name)(config).eval()
    check_learns(net, {"input_ids": IDS}, run=lambda net, given: net(**given).logits)
