"""Models that hold or compute their weights in unusual ways."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from benchmarks.models.case import scaled


class MaskedLinear(nn.Module):
    """Two layers whose weights are multiplied by a buffer, as in MADE."""

    def __init__(self, s: int):
        super().__init__()
        self.a, self.b = nn.Linear(7, 12 * s), nn.Linear(12 * s, 5)
        self.register_buffer("mask", (torch.arange(12 * s)[:, None] % 7 >= torch.arange(7)).float())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(F.linear(x, self.a.weight * self.mask, self.a.bias)))


class MaskSubclass(nn.Linear):
    """A Linear with a mask of its own."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        self.register_buffer("mask", (torch.rand(outputs, inputs) > 0.3).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mask * self.weight, self.bias)


class Made(nn.Module):
    """A chain of masked layers."""

    def __init__(self, s: int):
        super().__init__()
        self.net = nn.Sequential(
            MaskSubclass(7, 12 * s), nn.ReLU(), MaskSubclass(12 * s, 11 * s), nn.ReLU(), MaskSubclass(11 * s, 14)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Dictionary(nn.Module):
    """Weights in a ParameterDict."""

    def __init__(self, s: int):
        super().__init__()
        shapes = {"w1": (7, 12 * s), "b1": (12 * s,), "w2": (12 * s, 5)}
        self.p = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.p["w1"] + self.p["b1"]) @ self.p["w2"]


class List(nn.Module):
    """Weights in a ParameterList that forward walks through."""

    def __init__(self, s: int):
        super().__init__()
        sizes = [7, 12 * s, 11 * s, 5]
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(a, b) / a) for a, b in pairwise(sizes)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights[:-1]:
            x = torch.tanh(x @ weight)
        return x @ self.weights[-1]


def convolutions(s: int, wrap) -> nn.Module:
    """Three layers, each wrapped (normed, pruned)."""
    return nn.Sequential(
        wrap(nn.Conv2d(3, 6 * s, 3, padding=1)), nn.ReLU(), wrap(nn.Conv2d(6 * s, 10 * s, 3, stride=2)), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), wrap(nn.Linear(10 * s, 5)),
    )  # fmt: skip


def old_weight_norm(module: nn.Module) -> nn.Module:
    """Return the deprecated torch.nn.utils.weight_norm, still common: hooks, weight_g and weight_v."""
    return nn.utils.weight_norm(module)


def old_spectral_norm(module: nn.Module) -> nn.Module:
    """torch.nn.utils.spectral_norm: hooks, and buffers weight_u and weight_v."""
    return nn.utils.spectral_norm(module)


def pruned(module: nn.Module) -> nn.Module:
    """torch.nn.utils.prune: weight_orig, weight_mask and a hook."""
    return prune.l1_unstructured(module, "weight", amount=0.3)


class Hypernetwork(nn.Module):
    """A small net computes the weights of a layer of the main one."""

    def __init__(self, s: int):
        super().__init__()
        self.hidden = 6 * s
        self.code = nn.Parameter(torch.randn(9 * s))
        self.hyper = nn.Sequential(nn.Linear(9 * s, 13 * s), nn.ReLU(), nn.Linear(13 * s, 7 * self.hidden))
        self.head = nn.Linear(self.hidden, 5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.hyper(self.code).view(self.hidden, 7)
        return self.head(torch.relu(F.linear(x, weight)))


class Spline(nn.Module):
    """A layer of learned functions, one an edge, as in Kolmogorov-Arnold networks: radial bases and a residual."""

    def __init__(self, inputs: int, outputs: int, bases: int = 5):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.coefficients = nn.Parameter(torch.randn(outputs, inputs, bases) * 0.1)
        self.register_buffer("grid", torch.linspace(-1, 1, bases))

    def forward(self, x: Tensor) -> Tensor:
        bases = torch.exp(-((x[..., None] - self.grid) ** 2) * 4)
        return F.silu(self.base(x)) + torch.einsum("nib,oib->no", bases, self.coefficients)


def kan(s: int) -> nn.Module:
    """Two spline layers."""
    return nn.Sequential(Spline(7, 12 * s), Spline(12 * s, 3))


class TwoInputs(nn.Module):
    """nn.Bilinear between two hidden vectors."""

    def __init__(self, s: int):
        super().__init__()
        self.left, self.right = nn.Linear(7, 6 * s), nn.Linear(8, 10 * s)
        self.join, self.head = nn.Bilinear(6 * s, 10 * s, 13 * s), nn.Linear(13 * s, 5)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.relu(self.join(torch.relu(self.left(a)), torch.relu(self.right(b)))))


class Tied(nn.Module):
    """A language model whose head is the embedding."""

    def __init__(self, s: int):
        super().__init__()
        self.embedding = nn.Embedding(30, 12 * s)
        self.mix = nn.Sequential(nn.Linear(12 * s, 20 * s), nn.GELU(), nn.Linear(20 * s, 12 * s))
        self.head = nn.Linear(12 * s, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.mix(x))


class LowRank(nn.Module):
    """A frozen linear layer with a learned low-rank addition (LoRA), whose rank is an attribute in the scale."""

    def __init__(self, s: int):
        super().__init__()
        self.base = nn.Linear(7, 12 * s)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(7, 4 * s)), nn.Parameter(torch.zeros(4 * s, 12 * s))
        self.rank, self.head = 4 * s, nn.Linear(12 * s, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.base(x) + (x @ self.a @ self.b) * (6 / self.rank)))


class Scripted(nn.Module):
    """A part that torch.jit.script has compiled, between layers that it has not."""

    def __init__(self, s: int):
        super().__init__()
        self.first = nn.Linear(7, 12 * s)
        self.middle = torch.jit.script(nn.Sequential(nn.Linear(12 * s, 10 * s), nn.ReLU()))
        self.last = nn.Linear(10 * s, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.relu(self.first(x))))


def _row() -> Tensor:
    return torch.randn(3, 7)


def _image() -> Tensor:
    return torch.randn(3, 3, 8, 8)


MODELS = {
    "masked_linear": scaled(MaskedLinear, _row),
    "made": scaled(Made, _row),
    "parameter_dict": scaled(Dictionary, _row),
    "parameter_list": scaled(List, _row),
    "weight_norm_old": scaled(lambda s: convolutions(s, old_weight_norm), _image),
    "weight_norm": scaled(lambda s: convolutions(s, parametrizations.weight_norm), _image),
    "spectral_norm_old": scaled(lambda s: convolutions(s, old_spectral_norm), _image),
    "spectral_norm": scaled(lambda s: convolutions(s, parametrizations.spectral_norm), _image),
    "pruned": scaled(lambda s: convolutions(s, pruned), _image),
    "hypernetwork": scaled(Hypernetwork, _row),
    "kan": scaled(kan, _row),
    "bilinear": scaled(TwoInputs, lambda: (torch.randn(3, 7), torch.randn(3, 8))),
    "tied": scaled(Tied, lambda: torch.randint(30, (3, 10))),
    "low_rank": scaled(LowRank, _row),
    "scripted": scaled(Scripted, _row),
}
