"""Networks of the wishes, made for a scale: 1 is the class at half the width of 2, with which results are compared."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IMAGE = torch.rand(2, 3, 16, 16)
WORDS = {"input_ids": torch.randint(0, 60, (2, 8))}


class Net(nn.Module):
    """A network made of modules by name, and of a function that calls them."""

    def __init__(self, call: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Tensor:
        """Call the function with the network and its inputs."""
        return self.call(self, *inputs)


def coordinate_attention(net: Net, x: Tensor) -> Tensor:
    a, b = net.split(x).chunk(2, 1)
    y = torch.cat([a, b, net.inner(b)], 1)
    pooled = torch.cat([y.mean(3, keepdim=True), y.mean(2, keepdim=True).transpose(2, 3)], 2)
    rows, columns = net.squeeze(pooled).relu().split([y.shape[2], y.shape[3]], 2)
    return net.last(y * net.rows(rows).sigmoid() * net.columns(columns.transpose(2, 3)).sigmoid())


def coordinate_attention_block(s: int) -> Net:
    """Return a C2f block with coordinate attention."""
    return Net(
        coordinate_attention,
        split=nn.Conv2d(3, 8 * s, 1),
        inner=nn.Conv2d(4 * s, 4 * s, 3, padding=1),
        squeeze=nn.Conv2d(12 * s, 4 * s, 1),
        rows=nn.Conv2d(4 * s, 12 * s, 1),
        columns=nn.Conv2d(4 * s, 12 * s, 1),
        last=nn.Conv2d(12 * s, 5, 1),
    )


def implicit_parameters(s: int) -> Net:
    """Return a detector's head with implicit parameters, added and multiplied."""
    return Net(
        lambda net, x: net.last((net.first(x) + net.a).relu()) * net.m,
        first=nn.Conv2d(3, 8 * s, 3),
        a=nn.Parameter(torch.randn(1, 8 * s, 1, 1)),
        last=nn.Conv2d(8 * s, 6, 1),
        m=nn.Parameter(torch.randn(1, 6, 1, 1)),
    )


def weighted_fusion(s: int) -> Net:
    """Return a weighted fusion of two branches, as in a BiFPN."""
    return Net(
        lambda net, x: net.last(
            (net.w.relu()[0] * net.a(x) + net.w.relu()[1] * net.b(x)) / (net.w.relu().sum() + 1e-4)
        ),
        a=nn.Conv2d(3, 8 * s, 1),
        b=nn.Conv2d(3, 8 * s, 1),
        w=nn.Parameter(torch.tensor([0.3, 0.9])),
        last=nn.Conv2d(8 * s, 4, 1),
    )


def linear_as_image(s: int) -> Net:
    """Return a generator that views a linear layer's result as an image."""
    return Net(
        lambda net, x: net.up(net.first(x).relu().view(-1, net.up.in_channels, 4, 4)),
        first=nn.Linear(6, 8 * s * 16),
        up=nn.ConvTranspose2d(8 * s, 3, 2),
    )


def one_output_channel(s: int) -> Net:
    """Return a network with a convolution of one output channel."""
    return Net(
        lambda net, x: net.last((y := net.first(x).relu()) * net.one(y).sigmoid()),
        first=nn.Conv2d(3, 8 * s, 3),
        one=nn.Conv2d(8 * s, 1, 1),
        last=nn.Conv2d(8 * s, 4, 1),
    )


def diffusion(net: Net, x: Tensor, t: Tensor) -> Tensor:
    angles = t[:, None] * torch.exp(-torch.arange(8) / 8.0)
    time = net.time(torch.cat([angles.cos(), angles.sin()], 1)).sigmoid()
    shift, scale, gate = net.modulate(time)[:, None].chunk(3, 2)
    x = net.first(x)
    return net.last(x + gate * checkpoint(net.mlp, x * (1 + scale) + shift, use_reentrant=False))


def diffusion_net(s: int) -> Net:
    """Return a diffusion transformer's block."""
    mlp = nn.Sequential(nn.Linear(8 * s, 16 * s), nn.GELU(), nn.Linear(16 * s, 8 * s))
    parts = {"time": nn.Linear(16, 6 * s), "modulate": nn.Linear(6 * s, 24 * s), "first": nn.Linear(5, 8 * s)}
    return Net(diffusion, **parts, mlp=mlp, last=nn.Linear(8 * s, 5))


def packed(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(net.embed(x), lengths, batch_first=True, enforce_sorted=False)
    return net.last(net.cell(rows)[1][0][-1])


def packed_lstm(s: int) -> Net:
    """Return an LSTM that reads packed sequences."""
    return Net(
        packed, embed=nn.Linear(5, 4 * s), cell=nn.LSTM(4 * s, 8 * s, batch_first=True), last=nn.Linear(8 * s, 3)
    )


def llama(seed: int = 0, **settings: Any) -> nn.Module:
    """Return a small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    return LlamaForCausalLM(
        LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **settings})
    ).eval()


def u_net(s: int) -> Net:
    """Return a U-Net with a skip and a depthwise convolution."""
    return Net(
        lambda net, x: net.last(
            torch.cat(
                [y := net.first(x), F.interpolate(net.deep(F.max_pool2d(net.depthwise(y) + y, 2)), scale_factor=2)], 1
            )
        ),
        first=nn.Conv2d(3, 6 * s, 1),
        depthwise=nn.Conv2d(6 * s, 6 * s, 3, padding=1, groups=6 * s),
        deep=nn.Conv2d(6 * s, 8 * s, 1),
        last=nn.Conv2d(14 * s, 4, 1),
    )


def chunks_and_remainders(s: int) -> Net:
    """Return a network that chunks channels, pads to a remainder and shuffles pixels."""
    return Net(
        lambda net, x: F.pixel_shuffle(
            net.last((y := F.pad(net.first(x), (0, -x.shape[3] % 5))).chunk(2, 1)[0] * y.chunk(2, 1)[1]), 2
        ),
        first=nn.Conv2d(3, 8 * s, 1),
        last=nn.Conv2d(4 * s, 12, 1),
    )


def restormer(net: Net, x: Tensor) -> Tensor:
    b, _, h, w = x.shape
    q, k, v = (part.reshape(b, net.heads, -1, h * w) for part in net.depthwise(net.qkv(x)).chunk(3, 1))
    weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(2, 3) * net.temperature).softmax(-1)
    return net.last((weights @ v).reshape(b, -1, h, w))


def restormer_net(heads: int) -> Net:
    """Return a Restormer's attention with so many heads."""
    c = 4 * heads
    convolutions = {"qkv": nn.Conv2d(3, 3 * c, 1), "depthwise": nn.Conv2d(3 * c, 3 * c, 3, padding=1, groups=3 * c)}
    return Net(
        restormer,
        **convolutions,
        heads=heads,
        temperature=nn.Parameter(torch.rand(heads, 1, 1)),
        last=nn.Conv2d(c, 3, 1),
    )


def point_cloud(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    turn = net.turn(y.relu().amax(2)).view(-1, 8, 8) + torch.eye(8)
    return net.last(net.second(turn @ y).relu().amax(2))


def dynamic(net: Net, x: Tensor) -> Tensor:
    kernel = torch.einsum("k,koihw->oihw", net.gate(x.mean((0, 2, 3))).softmax(0), net.bank)
    return net.last(F.conv2d(net.first(x), kernel))


def dynamic_convolutions(s: int) -> Net:
    """Return a network whose kernels are mixed for its input."""
    return Net(
        dynamic,
        first=nn.Conv2d(3, 6 * s, 1),
        gate=nn.Linear(3, 2 * s),
        bank=nn.Parameter(torch.rand(2 * s, 8 * s, 6 * s, 3, 3)),
        last=nn.Conv2d(8 * s, 4, 1),
    )


def cbam(s: int) -> Net:
    """Return a spatial attention with a maximum over a hidden width."""
    return Net(
        lambda net, x: net.last(
            (y := net.first(x))
            * net.spatial(torch.cat([torch.max(y, 1)[0][:, None], y.mean(1, keepdim=True)], 1)).sigmoid()
        ),
        first=nn.Conv2d(3, 8 * s, 1),
        spatial=nn.Conv2d(2, 1, 3, padding=1),
        last=nn.Conv2d(8 * s, 4, 1),
    )
