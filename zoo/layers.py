"""Parts of the families: networks, blocks by their arguments, initial weights."""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from zoo.architecture import Rounding, check, check_rates
from zoo.errors import ZooError
from zoo.norms import BatchNorm2d, Norm, StaticBatchNorm2d


class Network(nn.Sequential):
    """A Sequential of named parts: stem or embedding, section1, ..., tail, pool, head.

    `net.section2[0]` is a block, `net[:3]` a network of the first three parts. A smaller model of the same name has
    some of the larger one's tensors, each the leading corner of the larger one's, so that `surgery.narrow(..., like=)`
    and `surgery.ungraft` relate the two by names and shapes alone. (`narrow` by a share may choose other channels:
    if channels are concatenated, the first ones of each part; with group norm, the first ones of each group.) Pooling
    before the head is global, except in the CNN and VGG. These flatten channel by channel, so that a smaller model's
    weights are a leading corner there as well.

    A network that is called directly has weights as torch's layers make them; `zoo.initialise(net, generator)`
    gives it the weights of `zoo.create`. Arguments that are fields of `zoo.Spec` mean what they mean there.

    Raises:
        ZooError: for arguments out of range.
    """

    torch_init = False  # whether convolutions with a bias begin as torch's do; see `initialise`
    extra_rates: ClassVar[tuple[str, ...]] = ()  # the parts besides the sections that have a width rate of their own

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__(OrderedDict(parts))

    def __getitem__(self, index: Any) -> Any:
        """Return one part, or for a slice a network of its parts."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        network = type(self).__new__(type(self))  # the class itself would ask for its own arguments
        Network.__init__(network, dict(list(self._modules.items())[index]))
        return network

    @classmethod
    def rate_names(cls, sections: int) -> tuple[str, ...]:
        """Name the parts that have a width rate: the sections, then `extra_rates`."""
        return (*(f"section{i}" for i in range(1, sections + 1)), *cls.extra_rates)

    @classmethod
    def check(cls, **fields: Any) -> None:
        """Raise ZooError for a field but width and depth that is out of range."""
        for field, value in fields.items():
            check(cls.__name__, field, value)

    @classmethod
    def builders(cls, width: float | Sequence[float], sections: int = 0, **options: Any) -> "list[Builder]":
        """Return each rated part's builder; `options` are the other fields of `Builder`."""
        cls.check(**options)
        rates = check_rates(cls.__name__, width, cls.rate_names(sections), sections)
        return [Builder(rate=rate, **options) for rate in rates]

    def from_foreign(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of torchvision's or timm's model by this model's names.

        Only families whose tensors the libraries lay out otherwise have a rule of their own; names are left to
        `zoo.load`.
        """
        return dict(state)

    def to_foreign(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """Return this model's tensors by torchvision's names; inverts `from_foreign`."""
        return list(state.values())

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Patterns of parameter names that say what the blocks are, in timm's form.

        `surgery.sections` and timm's layer-wise learning rate decay read it.
        """
        return {"stem": r"^(?:stem|embedding)", "blocks": r"^section(\d+)" if coarse else r"^section(\d+)\.(\d+)"}


@dataclass(frozen=True)
class Builder:
    """Makes the convolutions, norms, Scalers and residual sums of one part.

    What is left out has a placeholder: an Identity stands for a Scaler and a norm, and a `Residual` without a step size
    and drop path only adds. So a block reads the same with and without them, and names of tensors stay.
    (`without_identities` takes the placeholders out of a Sequential.)

    Attributes:
        norm, norm_eps: see `make_norm`.
        rate, rounding: of the part's widths, see `channels`.
        scaler: whether HeteroFL's Scaler divides by the rate.
        step_size: whether residual branches have NeFL's learnable step size.

    >>> Builder(rate=0.5).channels(64)
    32
    >>> list(Builder().conv_norm(3, 8, 3, activation=nn.ReLU).state_dict())[:2]
    ['conv.weight', 'norm.weight']
    """

    norm: Norm = "batch"
    norm_eps: float = 1e-5
    rate: float = 1.0
    rounding: Rounding = "ceil"
    scaler: bool = False
    step_size: bool = False

    def channels(self, full: int) -> int:
        """Return the number of channels for `full` at rate 1; never more at lower rates.

        `ceil` is ceil(rate * full), at least 1, as in HeteroFL. `divisor8` is the function of this name; full widths
        that are no multiples of 8 change as well.

        >>> [Builder(rate=rate).channels(64) for rate in (1.0, 0.5, 0.1)]
        [64, 32, 7]
        >>> [Builder(rate=rate, rounding="divisor8").channels(24) for rate in (1.0, 0.75, 0.5, 0.1)]
        [24, 24, 16, 8]
        """
        exact = round(self.rate * full, 6)  # 0.07 * 100 is 7, not 7.000000000000001
        return max(1, math.ceil(exact)) if self.rounding == "ceil" else divisor8(exact)

    def conv(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, *, bias: bool = False
    ) -> nn.Conv2d:
        """Return a convolution, padded to keep sizes at stride 1; with a bias if no norms."""
        bias = bias or self.norm == "none"
        return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=bias)

    def make_norm(self, channels: int) -> nn.Module:
        """Return a norm for images.

        `batch` is batch norm without a step counter; `static_batch` is HeteroFL's; `group` has the largest number of
        groups up to 8 that divides 8 and the channels; `layer` is over channels and positions (Ba et al. 2016), that is
        one group; `none` is the identity.

        >>> Builder("group").make_norm(12).num_groups
        4
        """
        match self.norm:
            case "batch":
                return BatchNorm2d(channels, self.norm_eps)
            case "static_batch":
                return StaticBatchNorm2d(channels, self.norm_eps)
            case "group":
                return nn.GroupNorm(math.gcd(8, channels), channels, self.norm_eps)
            case "layer":
                return nn.GroupNorm(1, channels, self.norm_eps)
            case "none":
                return nn.Identity()
        raise ZooError(f"unknown norm {self.norm!r}: choose {', '.join(get_args(Norm))}", code="argument")

    def make_scaler(self) -> nn.Module:
        """Return a Scaler, or an Identity without them."""
        return Scaler(self.rate) if self.scaler else nn.Identity()

    def residual(self, drop_path: float = 0.0) -> "Residual":
        """Return the sum of a shortcut and a branch."""
        return Residual(self.step_size, drop_path)

    def conv_norm(self, *sizes: int, activation: type[nn.Module] | None = None, **options) -> nn.Sequential:
        """Return a convolution (arguments as for `conv`), Scaler, norm and activation."""
        conv = self.conv(*sizes, **options)
        parts = {"conv": conv, "scaler": self.make_scaler(), "norm": self.make_norm(conv.out_channels)}
        if activation is not None:
            parts["activation"] = activation(inplace=True)
        return nn.Sequential(without_identities(parts))


def divisor8(channels: float) -> int:
    """Return the nearest multiple of 8, at least 8 and 90% of the number.

    The released models of the mobile families round in this way. `surgery.narrow(..., rounding=zoo.divisor8)` takes it.

    >>> [divisor8(channels) for channels in (1, 12, 18, 24.0)]
    [8, 16, 24, 24]
    """
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


def without_identities(parts: Mapping[str, nn.Module]) -> OrderedDict[str, nn.Module]:
    """Return the parts of a network without those that do nothing: see `Builder`.

    >>> list(without_identities({"conv": nn.Conv2d(1, 2, 3), "norm": nn.Identity()}))
    ['conv']
    """
    return OrderedDict((name, part) for name, part in parts.items() if type(part) is not nn.Identity)


class Scaler(nn.Module):
    """HeteroFL's Scaler: x / rate in training, x in evaluation mode.

    See Diao et al., ICLR 2021, section 3.

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


class Residual(nn.Module):
    """shortcut + branch, which may be scaled by a learnable step, and dropped.

    The step size is NeFL's (Kang et al., 2023, section 4): a block is one step in solving an ordinary differential
    equation, and a model with fewer blocks learns to take larger steps. It starts at 1.
    """

    def __init__(self, step_size: bool = False, drop_path: float = 0.0) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.ones(1)) if step_size else None
        self.drop: nn.Module = nn.Identity()
        if drop_path:
            from torchvision.ops import StochasticDepth  # as slow to import as PyTorch itself, and seldom needed

            self.drop = StochasticDepth(drop_path, "row")

    def forward(self, shortcut: Tensor, branch: Tensor) -> Tensor:
        branch = self.drop(branch)
        return shortcut + (branch if self.step is None else self.step * branch)

    def reset_parameters(self) -> None:
        if self.step is not None:
            nn.init.ones_(self.step)


class GlobalPool(nn.Module):
    """The mean over positions: [N, C, H, W] -> [N, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Initialise every weight of a zoo model from `generator`, and return the model.

    The weights are initialised in the order of the modules.

    Convolutions get He's normal initialisation by fan-out (He et al. 2015), and bias 0. Linear layers, and convolutions
    with a bias in the CNN and the Vision Transformer, get torch's default: weight and bias are uniform within
    1/sqrt(fan-in). Embeddings are standard normal; class tokens and positions of patches have deviation 0.02. Norms
    have weight 1 and bias 0, and step sizes start at 1.

    Args:
        generator: on the model's device; None: torch's global generator.

    Raises:
        ZooError: for a module with weights for which there is no rule here.

    >>> from zoo import create
    >>> draws = [initialise(create("cnn"), torch.Generator().manual_seed(0)).fc1.weight for _ in range(2)]
    >>> torch.equal(*draws)
    True
    """
    plain = getattr(model, "torch_init", False)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and plain and module.bias is not None):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5), generator=generator)
            bound = 1 / math.sqrt(module.weight[0].numel())
            nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, nn.Conv2d):
            fan_out = module.weight[0, 0].numel() * module.out_channels / module.groups
            nn.init.normal_(module.weight, 0, math.sqrt(2 / fan_out), generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, generator=generator)
        elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm | Residual):
            module.reset_parameters()
        elif hasattr(module, "draw"):  # the tokens of a Vision Transformer
            module.draw(generator)
        elif module._parameters or module._buffers:
            raise ZooError(f"no rule of zoo/layers.py draws {name} ({type(module).__name__})", code="unsupported")
    return model
