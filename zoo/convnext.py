"""ConvNeXt: Liu et al., "A ConvNet for the 2020s" (CVPR 2022), section 2 and appendix A.

Four sections of blocks, with a norm and a 2x2 convolution of stride 2 before each but the first. The stem is a 4x4
convolution of stride 4 (`stem="imagenet"`), or a 3x3 convolution that keeps the size (`stem="cifar"`, of this project;
the default for images of up to 64x64). Layer norms are over the channels of each position, with epsilon 1e-6, as in
torchvision and timm. Stochastic depth is the paper's and torchvision's; timm builds its models without.
"""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import ZooError
from zoo.layers import GlobalPool, Kit, LayerScale, Network, without_identities
from zoo.spec import COMMON, Member, Spec, stem_for


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of each position: [N, C, H, W] -> [N, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """7x7 depthwise, norm, 1x1 up to four times the channels, GELU, 1x1 down, layer scale; plus x (figure 4, right).

    The 1x1 convolutions are linear layers on [N, H, W, C], as in the released code.
    """

    def __init__(self, channels: int, layer_scale: float, drop_path: float, kit: Kit) -> None:
        super().__init__()
        self.scale = LayerScale(channels, layer_scale) if layer_scale else nn.Identity()
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, kit.eps)
        self.fc1 = nn.Linear(channels, 4 * channels)
        self.fc2 = nn.Linear(4 * channels, channels)
        self.scaler, self.add = kit.scaler(), kit.residual(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.scaler(self.conv(x)).permute(0, 2, 3, 1))
        out = self.scaler(self.fc2(F.gelu(self.scaler(self.fc1(out)))))
        return self.add(x, self.scale(out).permute(0, 3, 1, 2))


class ConvNeXt(Network):
    """stem, section1, down2, section2, down3, ..., section4, pool, tail, head; build it with `zoo.create`."""

    torch_init = True

    def from_foreign(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The libraries' tensors as this model has them: torchvision's factors of channels are [C, 1, 1], ours [C]."""
        result = {}
        for name, tensor in state.items():
            module, _, last = name.rpartition(".")
            factor = last in ("layer_scale", "gamma")
            result[f"{module}.scale.weight" if factor else name] = tensor.flatten() if factor else tensor
        return result

    def to_foreign(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """The inverse of `from_foreign`: the tensors of this model's state as torchvision has them, in its order."""
        return [t[:, None, None] if name.endswith(".scale.weight") else t for name, t in state.items()]


def convnext(spec: Spec, channels: tuple[int, ...]) -> ConvNeXt:
    """Build a ConvNeXt; stochastic depth grows linearly over the blocks, from 0 for the first to `spec.drop_path`."""
    small, side = spec.stem == "cifar", spec.image_size
    least = 8 if small else 32
    if side < least:
        raise ZooError(
            f"{spec.name} with stem={spec.stem!r} needs images of {least}x{least} or larger, got {side}x{side}"
        )
    kit = spec.kit("section1")
    current, index, last = kit.channels(channels[0]), 0, max(1, sum(spec.blocks) - 1)
    kernel, stride, padding = (3, 1, 1) if small else (4, 4, 0)
    conv = nn.Conv2d(spec.in_channels, current, kernel, stride, padding)
    stem = {"conv": conv, "scaler": kit.scaler(), "norm": LayerNorm2d(current, kit.eps)}
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(without_identities(stem)))
    for i, (full, depth) in enumerate(zip(channels, spec.blocks), start=1):
        kit = spec.kit(f"section{i}")
        width = kit.channels(full)
        if i > 1:
            conv = nn.Conv2d(current, width, 2, 2)
            down = {"norm": LayerNorm2d(current, kit.eps), "conv": conv, "scaler": kit.scaler()}
            parts[f"down{i}"] = nn.Sequential(without_identities(down))
        drops = [spec.drop_path * (index + j) / last for j in range(depth)]
        parts[f"section{i}"] = nn.Sequential(*(Block(width, spec.layer_scale, drop, kit) for drop in drops))
        current, index = width, index + depth
    parts["pool"] = GlobalPool()
    parts["tail"] = nn.Sequential(OrderedDict(norm=nn.LayerNorm(current, kit.eps)))
    parts["head"] = nn.Linear(current, spec.num_classes)
    return ConvNeXt(parts)


MEMBERS = {
    name: Member(
        partial(convnext, channels=channels), depth, "Liu et al., CVPR 2022, section 3",
        COMMON | {
            "num_classes": 1000, "in_channels": 3, "image_size": 224, "stem": stem_for, "norm_eps": 1e-6,
            "drop_path": drop_path, "layer_scale": 1e-6, "step_size": False,
        },
        torchvision=name, timm=name,
    )
    for name, channels, depth, drop_path in (
        ("convnext_tiny", (96, 192, 384, 768), (3, 3, 9, 3), 0.1),
        ("convnext_small", (96, 192, 384, 768), (3, 3, 27, 3), 0.4),
        ("convnext_base", (128, 256, 512, 1024), (3, 3, 27, 3), 0.5),
    )
}  # fmt: skip
