"""Attention: plain products that several threads ask for, and dropout that the engine draws."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fl
from fl.engine.draws import Drawing, Draws
from surgery.attention import plain_attention


def test_attention__the_last_to_leave_puts_the_switch_back():
    def fused():
        return torch.backends.cuda.flash_sdp_enabled()

    assert fused()
    plain_attention.__enter__()  # one thread comes,
    plain_attention.__enter__()  # another one,
    plain_attention.__exit__()  # and the first leaves before it
    assert not fused()
    plain_attention.__exit__()
    assert fused()


SHAPES = {"query": (2, 4, 5, 8), "key": (2, 4, 7, 8), "value": (2, 4, 7, 6)}
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "allowed": {"attn_mask": (torch.arange(7) < 4).expand(5, 7)},
    "added": {"attn_mask": torch.linspace(-2, 2, 35).view(5, 7)},
    "nothing allowed": {"attn_mask": (torch.arange(5) > 0)[:, None].expand(5, 7)},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", MASKS)
def test_attention__with_almost_no_dropout_is_torchs(name):
    """Values and gradients, of masks of every kind."""
    generator = torch.Generator().manual_seed(0)
    inputs = {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in SHAPES.items()}
    if name == "grouped":
        inputs |= {n: inputs[n][:, :2].contiguous() for n in ("key", "value")}
    found = []
    for p in (0.0, 1e-9):
        leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
        with Drawing(Draws(torch.tensor(3))):
            out = F.scaled_dot_product_attention(**leaves, dropout_p=p, **MASKS[name])
        out.square().sum().backward()
        found.append([out, *(t.grad for t in leaves.values())])
    torch.testing.assert_close(*found)


def test_attention__dropout_of_attention_drops_that_share_of_weights_and_keeps_the_mean():
    q, value = torch.zeros(1, 1, 200, 4), torch.eye(100)[None, None]
    key = torch.zeros(1, 1, 100, 4)
    before = torch.get_rng_state()
    with Drawing(Draws(torch.tensor(3))):
        weights = F.scaled_dot_product_attention(q, key, value, dropout_p=0.25)
    assert torch.equal(torch.get_rng_state(), before)
    assert (weights == 0).float().mean() == pytest.approx(0.25, abs=0.01)
    assert weights[weights > 0].unique().tolist() == [pytest.approx(0.01 / 0.75)]


class Encoder(nn.Module):
    """Layers of torch's own attention, with dropout everywhere."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        x = x.view(len(x), 4, 16)
        if self.attention == "fused":
            x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.2 if self.training else 0.0)
        if self.attention == "weights":
            layer = self.layer.self_attn
            x = layer(x, x, x, need_weights=True)[0]
        return self.last(self.layer(x).mean(1))


@pytest.mark.parametrize("attention", ["fused", "layer", "weights"])
def test_attention__backends_agree_on_attention_with_dropout(attention):
    torch.manual_seed(0)
    net, x = Encoder(attention), torch.randn(60, 64)
    data = fl.Dataset.from_arrays(x, torch.arange(60) % 3, x[:9], torch.arange(9) % 3)
    found = []
    for backend in ("loop", "loop", "vmap", "workers"):
        config = fl.Config.of(algorithm="fedavg", clients=3, participants=3, batch_size=10, partition="iid", lr=0.1)
        _, method = fl.build(config.replace(backend=backend, local_epochs=2), data, net)
        found.append(method.round(method.init(), [0, 1, 2], fl.Rng(0, 1))[0]["global"])
    still = Encoder(attention)
    still.load_state_dict(net.state_dict())
    for module in still.modules():
        if isinstance(module, nn.Dropout | nn.MultiheadAttention):
            setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)
    _, method = fl.build(config.replace(backend="loop", local_epochs=2), data, still)
    without, _ = method.round(method.init(), [0, 1, 2], fl.Rng(0, 1))
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name])
        for other in found[2:]:
            torch.testing.assert_close(other[name], tensor, atol=1e-5, rtol=1e-4)
    assert any(not torch.allclose(without["global"][n], t, atol=1e-4) for n, t in found[0].items())
