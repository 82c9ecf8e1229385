"""What the blocks of a network are built from, as its spec asks for."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.norms import Norm, make_norm

_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_OTHERS = {"StochasticDepth": "p", "DropPath": "drop_prob"}  # torchvision's and timm's, known without importing these


def dropout_rate(module: nn.Module) -> str | None:
    """The name of the attribute with a module's dropout rate; None if it drops nothing at random.

    >>> dropout_rate(nn.Dropout(0.1)), dropout_rate(nn.ReLU())
    ('p', None)
    """
    if isinstance(module, _DROPOUTS):
        return "p"
    return _OTHERS.get(type(module).__name__)


def without_identities(parts: Mapping[str, nn.Module]) -> OrderedDict[str, nn.Module]:
    """The parts of a network without those that do nothing: `Kit` gives an Identity for a norm or Scaler left out.

    >>> list(without_identities({"conv": nn.Conv2d(1, 2, 3), "norm": nn.Identity()}))
    ['conv']
    """
    return OrderedDict((name, part) for name, part in parts.items() if type(part) is not nn.Identity)


class Scaler(nn.Module):
    """x / rate in training, x in evaluation mode: HeteroFL's Scaler (Diao et al., ICLR 2021, section 3).

    A layer with only a share `rate` of its inputs gives activations that are smaller by about that factor; dividing by
    it makes narrow and full models train alike. Build narrow models with Scalers from a spec: `surgery.narrow` does not
    change the rate.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return x / self.rate if self.training else x

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


def _stochastic_depth(rate: float) -> nn.Module:
    from torchvision.ops import StochasticDepth  # as slow to import as PyTorch itself, and seldom needed

    return StochasticDepth(rate, "row")


class Residual(nn.Module):
    """shortcut + branch; the branch may be scaled by a learnable step size and dropped at random.

    The step size is NeFL's (Kang et al., 2023, section 4): a block is one step in solving an ordinary differential
    equation, and a model with fewer blocks learns to take larger steps. It starts at 1.
    """

    def __init__(self, step_size: bool = False, drop_path: float = 0.0) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.ones(1)) if step_size else None
        self.drop = _stochastic_depth(drop_path) if drop_path else nn.Identity()

    def forward(self, shortcut: Tensor, branch: Tensor) -> Tensor:
        branch = self.drop(branch)
        return shortcut + (branch if self.step is None else self.step * branch)

    def reset_parameters(self) -> None:
        if self.step is not None:
            nn.init.ones_(self.step)


class LayerScale(nn.Module):
    """A learnable factor for each channel, the last axis (Touvron et al., "Going deeper with Image Transformers", ICCV
    2021): [..., C] -> [..., C].
    """

    def __init__(self, channels: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.full((channels,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)


class GlobalPool(nn.Module):
    """The mean over positions: [N, C, H, W] -> [N, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


@dataclass(frozen=True)
class Kit:
    """Makes the convolutions, norms, scalers and residual sums of one section.

    Attributes:
        norm, eps: see `zoo.norms.make_norm`.
        rate: the width rate that HeteroFL's Scaler divides by; None for no Scaler.
        step_size: whether residual branches have NeFL's learnable step size.

    >>> list(Kit().conv_norm(3, 8, kernel=3, activation=nn.ReLU).state_dict())[:2]
    ['conv.weight', 'norm.weight']
    """

    norm: Norm = "batch"
    eps: float = 1e-5
    rate: float | None = None
    step_size: bool = False

    def conv(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, bias: bool = False
    ) -> nn.Conv2d:
        """A convolution that keeps the image's size at stride 1. Without norms it always has a bias."""
        bias = bias or self.norm == "none"
        return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=bias)

    def make_norm(self, channels: int) -> nn.Module:
        return make_norm(self.norm, channels, self.eps)

    def scaler(self) -> nn.Module:
        return nn.Identity() if self.rate is None else Scaler(self.rate)

    def residual(self, drop_path: float = 0.0) -> Residual:
        return Residual(self.step_size, drop_path)

    def conv_norm(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        activation: type[nn.Module] | None = None,
        bias: bool = False,
    ) -> nn.Sequential:
        """Convolution, then Scaler, norm and (in-place) activation as far as there are any."""
        conv = self.conv(inputs, outputs, kernel, stride, groups, bias)
        parts = {"conv": conv, "scaler": self.scaler(), "norm": self.make_norm(outputs)}
        if activation is not None:
            parts["activation"] = activation(inplace=True)
        return nn.Sequential(without_identities(parts))
