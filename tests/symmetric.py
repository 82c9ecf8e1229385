"""Small modules that show what a width may run through, and what else tests of symmetries share."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import surgery
from surgery.forward import arguments, tensors_in


class Made(nn.Module):
    """Layers, and a function of them and the inputs."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, nn.Parameter(layer) if isinstance(layer, torch.Tensor) else layer)

    def forward(self, *inputs):
        return self.function(self, *inputs)


class Residual(nn.Module):
    """A residual stream with batch norms and an inner width of its own."""

    def __init__(self, c=6, middle=4):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.conv1, self.norm1 = nn.Conv2d(c, middle, 3, padding=1, bias=False), nn.BatchNorm2d(middle)
        self.conv2, self.norm2 = nn.Conv2d(middle, c, 1), nn.BatchNorm2d(c)
        self.head = nn.Linear(c, 5)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return self.head(x.mean((2, 3)))


class Joined(nn.Module):
    """A concatenation that is flattened, and a channel that is sliced off."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 6, 1), nn.Conv2d(10, 8, 1)
        self.head = nn.Linear(8 * 36, 5)

    def forward(self, x):
        gate, value = self.c(torch.cat([self.a(x), self.b(x)], 1)).chunk(2, 1)
        return self.head(torch.cat([gate.sigmoid() * value, value], 1).flatten(1))


class Grouped(nn.Module):
    """A grouped and a depthwise convolution around a group norm and a channel shuffle."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 12, 1), nn.GroupNorm(3, 12)
        self.grouped, self.depthwise = nn.Conv2d(12, 12, 3, groups=3), nn.Conv2d(12, 12, 3, groups=12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.grouped(self.norm(self.stem(x)).relu())
        x = x.unflatten(1, (3, -1)).transpose(1, 2).flatten(1, 2)
        return self.head(self.depthwise(x).relu().mean((2, 3)))


class Attention(nn.Module):
    """Fused attention in a residual stream with layer norms and an MLP."""

    def __init__(self, dim=8, heads=2):
        super().__init__()
        self.heads, self.embed = heads, nn.Linear(3, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down, self.head = nn.Linear(dim, 12), nn.Linear(12, dim), nn.Linear(dim, 5)

    def forward(self, x):
        x = self.embed(x.flatten(2).transpose(1, 2))
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


SMALL = {"residual": Residual, "joined": Joined, "grouped": Grouped, "attention": Attention}
IMAGE = torch.zeros(2, 3, 6, 6)


def randomized(model, seed=0):
    """The model in float64 and evaluation mode, with random numbers in every tensor; variances are positive."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    for name, tensor in surgery.state(model).items():
        if tensor.is_floating_point():
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(values.abs() + 0.5 if "running_var" in name else 0.3 * values)
    return model


def image(shape=(2, 3, 6, 6), seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class InFloat64(TorchDispatchMode):
    """What a model computes in float32 whatever its weights are (Llama's norms and softmax) is computed in float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def same_outputs(net, other, x):
    """Whether two models give the same on an input: to 1e-10 of the largest number of each output."""
    args, kwargs = arguments(x)
    with torch.no_grad(), InFloat64():
        one, two = tensors_in(net(*args, **kwargs)), tensors_in(other(*args, **kwargs))
    return all(torch.allclose(a, b, rtol=0, atol=1e-10 * a.abs().max().item()) for a, b in zip(one, two, strict=True))
