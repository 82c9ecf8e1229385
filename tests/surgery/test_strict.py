"""With `strict`, widths that nobody asked to shrink are no failure, and those that were to shrink are one."""

import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from timm.layers.halo_attn import HaloAttn
from torch import nn
from torch.nn.utils import parametrizations, rnn

import surgery
from surgery import narrow


class Encoded(nn.Module):
    """Two layers on features of the input."""

    def __init__(self, features, encode, **tensors):
        super().__init__()
        self.a, self.b, self.encode = nn.Linear(features, 16), nn.Linear(16, 4), encode
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        return self.b(self.a(self.encode(self, x)).relu())


def one_hot(net, x):
    return F.one_hot(torch.bucketize(x, torch.tensor([-1.0, 0, 0.5, 1])), 5).float()


def sinusoids(net, x):
    angles = x[:, None] * torch.exp(-torch.arange(8) / 8)
    return torch.cat([angles.cos(), angles.sin()], 1)


def octaves(net, x):
    angles = (x[..., None] * 2.0 ** torch.arange(4)).flatten(1)
    return torch.cat([x, angles.sin(), angles.cos()], -1)


FIXED = {
    "one_hot": (Encoded(5, one_hot), torch.randn(7)),
    "time_step": (Encoded(16, sinusoids), torch.rand(7)),
    "nerf": (Encoded(27, octaves), torch.rand(7, 3)),
    "rbf": (
        Encoded(20, lambda net, x: torch.exp(-((x[:, None] - net.c) ** 2).sum(-1)), c=torch.randn(20, 3)),
        torch.rand(7, 3),
    ),
    "random_fourier": (Encoded(20, lambda net, x: (x @ net.c).cos(), c=torch.randn(3, 20)), torch.rand(7, 3)),
    "filters": (
        Encoded(10, lambda net, x: F.conv2d(x, net.c).abs().mean((2, 3)), c=torch.randn(10, 3, 5, 5)),
        torch.rand(2, 3, 8, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIXED)
def test_narrow__fixed_features_of_the_input_are_no_widths(name, caplog):
    net, x = FIXED[name]
    small, _ = narrow(net, 0.5, x, strict=True)
    assert (small.a.in_features, small.a.out_features) == (net.a.in_features, 8)
    assert not caplog.records


class Skip(nn.Module):
    """A field that reads the encoded position a second time, beside hidden features."""

    def __init__(self, width=16):
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(4))
        self.a, self.b, self.c = nn.Linear(24, width), nn.Linear(width + 24, width), nn.Linear(width, 4)

    def forward(self, x):
        angles = (x[..., None] * self.frequencies).flatten(-2)
        encoded = torch.cat([angles.sin(), angles.cos()], -1)
        return self.c(self.b(torch.cat([self.a(encoded).relu(), encoded], -1)).relu())


def test_narrow__fixed_features_beside_hidden_ones_are_no_widths(caplog):
    net, x = Skip(), torch.rand(5, 3)
    small, _ = narrow(net, 0.5, x, strict=True)
    half = surgery.load(Skip(8), surgery.state(small))
    torch.testing.assert_close(half(x), small(x))
    assert not caplog.records


class Relative(nn.Module):
    """Attention whose bias two layers compute from coordinates in a buffer, as in timm's relative positions."""

    def __init__(self):
        super().__init__()
        self.qkv, self.fc1, self.fc2 = nn.Linear(16, 48), nn.Linear(2, 12), nn.Linear(12, 1)
        self.register_buffer("places", torch.randn(5, 5, 2))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        bias = self.fc2(self.fc1(self.places).relu())[..., 0]
        return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


def test_narrow__coordinates_in_a_buffer_are_no_width(caplog):
    small, _ = narrow(net := nn.Sequential(Relative(), nn.Linear(16, 3)), 0.5, torch.randn(2, 5, 16), strict=True)
    assert (small[0].fc1.in_features, small[0].fc1.out_features) == (2, 6)
    assert small[0].places.shape == net[0].places.shape
    assert not caplog.records


def test_narrow__distances_that_attention_looks_up_are_no_width(caplog):
    attention = HaloAttn(16, num_heads=2, block_size=4, halo_size=1)
    narrow(
        nn.Sequential(nn.Conv2d(3, 16, 1), attention, nn.Conv2d(16, 4, 1)), 0.5, torch.randn(2, 3, 8, 8), strict=True
    )
    assert not caplog.records


class Packed(nn.Module):
    """Sequences of several lengths, of the input or of embeddings."""

    def __init__(self, embed=False):
        super().__init__()
        self.embedding = nn.Embedding(20, 10) if embed else nn.Identity()
        self.rnn, self.b = nn.LSTM(10, 32, batch_first=True), nn.Linear(32, 5)

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(self.embedding(x), lengths, batch_first=True, enforce_sorted=False)
        rows, _ = rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.b(rows.sum(1))


class Mixer(nn.Module):
    """An MLP along tokens, then one along channels."""

    def __init__(self):
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(3, 12, 4, 4), nn.LayerNorm(12), nn.Linear(12, 5)
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm(x).mT).mT
        return self.head((x + self.channels(x)).mean(1))


class Bank(nn.Module):
    """Kernels that are mixed for each image."""

    def __init__(self):
        super().__init__()
        self.a, self.gate, self.head = nn.Conv2d(3, 12, 3), nn.Linear(12, 4), nn.Linear(16, 4)
        self.kernels = nn.Parameter(torch.randn(4, 16, 12, 3, 3))

    def forward(self, x):
        x = self.a(x).relu()
        kernels = torch.einsum("be,eoihw->boihw", self.gate(x.mean((2, 3))).softmax(-1), self.kernels)
        y = F.conv2d(x.flatten(0, 1)[None], kernels.flatten(0, 1), groups=len(x))
        return self.head(y.unflatten(1, (len(x), -1))[0].relu().mean((2, 3)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_narrow__fake_quantisers_are_named():
    quantization = pytest.importorskip("torch.ao.quantization")
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)).train()
    net.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    prepared = quantization.prepare_qat(net)
    with refused("width: fake quantisers", "narrow the model first"):
        narrow(prepared, 0.5, torch.rand(2, 3), strict=True)


def spectral(norm):
    convolutions = (norm(nn.Conv2d(3, 12, 3)), nn.ReLU(), norm(nn.Conv2d(12, 16, 3)))
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


IMAGES = torch.rand(2, 3, 16, 16)
PLACES = {
    "packed": (Packed(), (torch.randn(2, 6, 10), torch.tensor([6, 4]))),
    "packed_embeddings": (Packed(embed=True), (torch.randint(0, 20, (2, 6)), torch.tensor([6, 4]))),
    "mixer": (Mixer(), IMAGES),
    "kernel_bank": (Bank(), IMAGES),
    "spectral_norm": (spectral(parametrizations.spectral_norm), IMAGES),
    "old_spectral_norm": (spectral(nn.utils.spectral_norm), IMAGES),
}


@pytest.mark.parametrize("name", PLACES)
def test_narrow__places_are_no_widths(name, caplog):
    net, x = PLACES[name]
    small, _ = narrow(net.eval(), 0.5, x, strict=True)
    count = sum(one.numel() for one in surgery.state(small).values() if one.is_floating_point())
    assert count < 0.6 * sum(one.numel() for one in surgery.state(net).values() if one.is_floating_point())
    assert not caplog.records


class Learnt(Encoded):
    """Centres that are trained: what is read of them is computed with weights, and no layer makes it."""

    def __init__(self):
        super().__init__(20, lambda net, x: torch.exp(-((x[:, None] - net.c) ** 2).sum(-1)))
        self.c = nn.Parameter(torch.randn(20, 3))


class Unknown(nn.Module):
    """A width that cannot be followed further."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.b(torch.fft.fft(self.a(x)).real)


@pytest.mark.parametrize(("net", "x"), [(Learnt(), torch.rand(7, 3)), (Unknown(), torch.rand(2, 4))])
def test_narrow__what_weights_help_to_compute_is_a_width(net, x):
    with refused("width"):
        narrow(net, 0.5, x, strict=True)


class Queries(nn.Module):
    """Several heads of queries, with one or several of keys and values; the width of a head is shared by all layers."""

    def __init__(self, heads, groups):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, heads * 8), nn.Linear(8, groups * 8), nn.Linear(8, groups * 8)
        self.out, self.groups = nn.Linear(heads * 8, 8), groups
        self.register_buffer("angles", torch.ones(8))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = q * self.angles, k * self.angles
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("groups", "width"), [(1, 0.5), (2, 0.5), (2, {"1": 0.5})])
def test_narrow__with_dropped_heads_what_lies_inside_of_them_was_not_to_shrink(groups, width, caplog):
    net = nn.Sequential(nn.Linear(3, 8), Queries(4, groups), Queries(4, groups), nn.Linear(8, 2))
    for layer in net[1:3]:
        layer.angles = net[1].angles
    small, _ = narrow(net, width, torch.rand(2, 5, 3), heads="drop", strict=True)
    assert [layer.q.out_features for layer in small[1:3]] == [16, 32 if isinstance(width, dict) else 16]
    assert not caplog.records
