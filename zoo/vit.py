"""The Vision Transformer.

Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale" (ICLR 2021), section
3.1. The base model is from table 1; tiny and small are from DeiT (Touvron et al., "Training data-efficient image
transformers & distillation through attention", ICML 2021, table 1).

An image is cut into patches of 16x16 pixels (`stem="imagenet"`) or 4x4 (`stem="cifar"`, the default for images of up to
64x64). Blocks are in pre-norm order; the class token is read off at the end. Layer norms have epsilon 1e-6, as in
torchvision and timm. Positions are learned for one size of image. Not offered: a hidden layer before the head, mean
pooling, a distillation token, layer scale, norms of queries and keys, and dropout of attention weights.

`heads` is free as long as it divides the full width. Narrow models keep the number of heads, and each head's leading
channels: zoo/transformer.py has that attention, and says in which order its channels lie.
"""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from zoo.architecture import Architecture, Rounding, Stem, check_depths
from zoo.errors import ZooError
from zoo.layers import Builder, Network
from zoo.transformer import Attention

_PATCH = {"imagenet": 16, "cifar": 4}


class Tokens(nn.Module):
    """Patches as tokens after the class token: [N, C, H, W] -> [N, 1 + P, E]."""

    def __init__(self, inputs: int, channels: int, patch: int, patches: int, dropout: float, builder: Builder) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, channels))
        self.position = nn.Parameter(torch.zeros(1, 1 + patches, channels))
        self.conv = nn.Conv2d(inputs, channels, patch, patch)
        self.scaler, self.dropout = builder.make_scaler(), nn.Dropout(dropout)
        self.draw(None)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv(x).flatten(2).mT
        count = self.position.shape[1] - 1
        torch._assert(tokens.shape[1] == count, f"images are not of the size that gives the model's {count} patches")
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), self.scaler(tokens)], dim=1)
        return self.dropout(tokens + self.position)

    def draw(self, generator: torch.Generator | None) -> None:
        """Initialise the class token and the positions: normal with deviation 0.02.

        The projection is left as it is.
        """
        for parameter in (self.class_token, self.position):
            nn.init.normal_(parameter, std=0.02, generator=generator)


class Block(nn.Module):
    """Attention, then a feed-forward network, as residuals with norms (eqs. 2 and 3)."""

    def __init__(
        self, channels: int, heads: int, hidden: int, dropout: float, drop_path: float, builder: Builder
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels, builder.norm_eps)
        self.attention = Attention(channels, heads, causal=False, builder=builder)
        self.add1 = builder.residual(drop_path)
        self.norm2 = nn.LayerNorm(channels, builder.norm_eps)
        self.fc1 = nn.Linear(channels, hidden)
        self.fc2 = nn.Linear(hidden, channels)
        self.add2 = builder.residual(drop_path)
        self.scaler, self.dropout = builder.make_scaler(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.add1(x, self.dropout(self.attention(self.norm1(x))))
        hidden = self.dropout(F.gelu(self.scaler(self.fc1(self.norm2(x)))))
        return self.add2(x, self.dropout(self.scaler(self.fc2(hidden))))


class ClassToken(nn.Module):
    """The first token: [N, T, E] -> [N, E]."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class VisionTransformer(Network):
    """stem, section1, tail, pool, head: images [N, C, H, W] -> logits [N, classes].

    The libraries have q, k and v as one matrix [3E, E], whose rows are ordered (matrix, head, channel).

    Args:
        depths: number of blocks.
        channels: of each token at full width; the feed-forward networks have four times as many.
        heads: of the attention, whatever the width.
        width: one rate.
        drop_path: rate of the last block's stochastic depth; block i of n has i/(n - 1) of it.

    >>> net = VisionTransformer(2, 64, 4, num_classes=10, image_size=32, stem="cifar", width=0.5)
    >>> net(torch.zeros(3, 3, 32, 32)).shape
    torch.Size([3, 10])
    """

    torch_init = True
    section1: Sequence[Block]

    def __init__(
        self, depths: int | Sequence[int], channels: int, heads: int, *, num_classes: int = 1000,
        in_channels: int = 3, image_size: int = 224, stem: Stem = "imagenet", dropout: float = 0.0,
        drop_path: float = 0.0, width: float | Sequence[float] = 1.0, norm_eps: float = 1e-6,
        rounding: Rounding = "ceil", scaler: bool = False, step_size: bool = False,
    ) -> None:  # fmt: skip
        self.check(num_classes=num_classes, in_channels=in_channels, image_size=image_size, stem=stem)
        self.check(channels=channels, heads=heads, dropout=dropout, drop_path=drop_path)
        (depth,) = check_depths(type(self).__name__, depths, 1)
        patch, last = _PATCH[stem], max(1, depth - 1)
        if image_size % patch:
            way_out = "" if stem == "cifar" else ", or stem='cifar', whose patches have 4x4 pixels"
            raise ZooError(
                f"patches of {patch} pixels do not fill a side of {image_size}: give another size{way_out}",
                code="argument",
            )
        if channels % heads:
            raise ZooError(f"{channels} channels at full width cannot be shared by {heads} heads", code="argument")
        (builder,) = self.builders(width, 1, norm_eps=norm_eps, rounding=rounding, scaler=scaler, step_size=step_size)
        size, hidden = heads * builder.channels(channels // heads), builder.channels(4 * channels)
        blocks = [Block(size, heads, hidden, dropout, drop_path * i / last, builder) for i in range(depth)]
        parts = {
            "stem": Tokens(in_channels, size, patch, (image_size // patch) ** 2, dropout, builder),
            "section1": nn.Sequential(*blocks),
            "tail": nn.Sequential(OrderedDict(norm=nn.LayerNorm(size, norm_eps))),
            "pool": ClassToken(),
            "head": nn.Linear(size, num_classes),
        }
        super().__init__(parts)

    def from_foreign(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return libraries' tensors by this model's names, with q, k and v apart.

        Their rows are in (channel, head) order.
        """
        heads, result = self.section1[0].attention.heads, {}
        for name, tensor in sorted(state.items(), key=lambda item: item[1].ndim != 3):  # class token, positions first
            if match := _FUSED.fullmatch(name):
                prefix, last = match.groups()
                biases = state.get(f"{name.removesuffix(last)}bias")
                for i, part in enumerate("qkv" if last == "weight" else ""):
                    result[f"{prefix}{part}.weight"] = _by_channel(tensor.chunk(3)[i], heads)
                    if biases is not None:
                        result[f"{prefix}{part}.bias"] = _by_channel(biases.chunk(3)[i], heads)
            elif tensor.ndim == 3:
                result[f"{name}.{'class_token' if tensor.shape[1] == 1 else 'position'}"] = tensor
            else:
                joins = name.endswith((".out_proj.weight", ".attn.proj.weight"))
                result[name] = _by_channel(tensor.mT, heads).mT if joins else tensor
        return result

    def to_foreign(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """Return this model's tensors by torchvision's names; inverts `from_foreign`."""
        heads, result = self.section1[0].attention.heads, []
        for name, tensor in state.items():
            if ".attention.q." in name:
                parts = [state[name.replace(".q.", f".{part}.")] for part in "qkv"]
                result.append(torch.cat([_by_head(part, heads) for part in parts]))
            elif name.endswith(".attention.out.weight"):
                result.append(_by_head(tensor.mT, heads).mT)
            elif ".attention.k." not in name and ".attention.v." not in name:
                result.append(tensor)
        result.insert(3, result.pop(1))  # the positions come after the projection
        return result


_FUSED = re.compile(r"(.*\.)(?:in_proj_|qkv\.)(weight|bias)")


def _by_channel(x: Tensor, heads: int) -> Tensor:
    """Return rows (head, channel) as (channel, head); unchanged for a wrong `heads`."""
    return rearrange(x, "(head channel) ... -> (channel head) ...", head=heads) if len(x) % heads == 0 else x


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Return the inverse of `_by_channel`."""
    return rearrange(x, "(channel head) ... -> (head channel) ...", head=heads)


def stem_for(image_size: int) -> str:
    """Return the stem for an image size: `cifar` up to 64x64, `imagenet` above.

    >>> stem_for(32), stem_for(224)
    ('cifar', 'imagenet')
    """
    return "cifar" if image_size <= 64 else "imagenet"


def _preset(channels: int, heads: int, source: str, **names: str) -> Architecture:
    arguments = {"depths": (12,), "channels": channels, "heads": heads, "stem": stem_for}
    return Architecture(VisionTransformer, arguments, source, **names)


_DEIT, _BASE = "Touvron et al., ICML 2021, table 1", "Dosovitskiy et al., ICLR 2021, table 1"

PRESETS = {
    "vit_tiny": _preset(192, 3, _DEIT, timm="vit_tiny_patch16_224"),
    "vit_small": _preset(384, 6, _DEIT, timm="vit_small_patch16_224"),
    "vit_base": _preset(768, 12, _BASE, torchvision="vit_b_16", timm="vit_base_patch16_224"),
}
