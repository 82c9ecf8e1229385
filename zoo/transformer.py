"""A Transformer for text: a causal language model, and HeteroFL's masked one.

Vaswani et al., "Attention Is All You Need" (NeurIPS 2017), encoder layers in post-norm order, with GELU and learned
positions; sizes and head as in HeteroFL (Diao et al., ICLR 2021; released code): embedding 256, 8 heads, feed-forward
512, 4 layers, dropout 0.2, sequences of 64 tokens. (Its initialisation of the feed-forward layers is not adopted; see
zoo/layers.py.) We assume that FedFA's Transformer is the same.

Narrow models keep the number of heads, and each head's leading channels. The channels of all heads are ordered as
(channel, head), not (head, channel): the leading rows of the q, k and v matrices are then the leading channels of every
head, and a narrow matrix is the leading corner of a wide one.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from zoo.architecture import Architecture, Rounding, check_depths
from zoo.errors import ZooError
from zoo.layers import Builder, Network

_HEADS, _HEAD, _HIDDEN = 8, 32, 512


class Embedding(nn.Module):
    """Tokens and positions, summed and normalised: [N, T] -> [N, T, E]."""

    def __init__(self, vocabulary: int, positions: int, channels: int, dropout: float, builder: Builder) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, channels)
        self.position = nn.Embedding(positions, channels)
        self.scaler = builder.make_scaler()
        self.norm = nn.LayerNorm(channels, builder.norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length, limit = tokens.shape[1], self.position.num_embeddings
        torch._assert(length <= limit, f"sequences are longer than the {limit} tokens that the model was made for")
        return self.dropout(self.norm(self.scaler(self.token(tokens) + self.position.weight[:length])))


@torch.fx.wrap
def split_heads(x: Tensor, heads: int) -> Tensor:
    """[N, T, channels x heads] -> [N, heads, T, channels], contiguous on a GPU.

    On the CPU it stays a view, so that attention is plain matrix products: the fused kernel has no rule for vmap. But
    torch.compile takes that kernel all the same, and torch 2.14 then mixes up the axes of a view.
    """
    result = rearrange(x, "n t (channel head) -> n head t channel", head=heads)
    return result.contiguous() if x.is_cuda or torch.compiler.is_compiling() else result


@torch.fx.wrap
def join_heads(x: Tensor) -> Tensor:
    """[N, heads, T, channels] -> [N, T, channels x heads]; inverts `split_heads`."""
    return rearrange(x, "n head t channel -> n t (channel head)")


class Attention(nn.Module):
    """Multi-head self-attention [N, T, E] -> [N, T, E] with separate q, k, v (3.2.2)."""

    def __init__(self, channels: int, heads: int, causal: bool, builder: Builder) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q = nn.Linear(channels, channels)
        self.k = nn.Linear(channels, channels)
        self.v = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)
        self.scaler = builder.make_scaler()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(self.scaler(project(x)), self.heads) for project in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.scaler(self.out(join_heads(out)))


class Block(nn.Module):
    """Attention and a feed-forward network, each before dropout, sum and norm (3.1)."""

    def __init__(self, channels: int, heads: int, hidden: int, causal: bool, dropout: float, builder: Builder) -> None:
        super().__init__()
        self.attention = Attention(channels, heads, causal, builder)
        self.add1 = builder.residual()
        self.norm1 = nn.LayerNorm(channels, builder.norm_eps)
        self.fc1 = nn.Linear(channels, hidden)
        self.fc2 = nn.Linear(hidden, channels)
        self.add2 = builder.residual()
        self.norm2 = nn.LayerNorm(channels, builder.norm_eps)
        self.scaler, self.dropout = builder.make_scaler(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.add1(x, self.dropout(self.attention(x))))
        hidden = self.dropout(F.gelu(self.scaler(self.fc1(x))))
        return self.norm2(self.add2(x, self.dropout(self.scaler(self.fc2(hidden)))))


class Transformer(Network):
    """embedding, section1, tail, head: tokens [N, T] -> logits [N, T, num_classes].

    Args:
        depths: number of blocks.
        causal: whether it is a causal language model; or a masked one, whose vocabulary has one more token: the mask.
        num_classes: size of the vocabulary, as default WikiText-2's.
        width: one rate.

    >>> net = Transformer(2, num_classes=11, tokens=6, width=0.5)
    >>> net(torch.zeros(3, 5, dtype=torch.long)).shape
    torch.Size([3, 5, 11])
    """

    def __init__(
        self, depths: int | Sequence[int] = 4, *, causal: bool = True, num_classes: int = 33_278, tokens: int = 64,
        dropout: float = 0.2, width: float | Sequence[float] = 1.0, norm_eps: float = 1e-5,
        rounding: Rounding = "ceil", scaler: bool = False, step_size: bool = False,
    ) -> None:  # fmt: skip
        self.check(num_classes=num_classes, tokens=tokens, dropout=dropout)
        (depth,) = check_depths(type(self).__name__, depths, 1)
        (builder,) = self.builders(width, 1, norm_eps=norm_eps, rounding=rounding, scaler=scaler, step_size=step_size)
        channels, hidden = _HEADS * builder.channels(_HEAD), builder.channels(_HIDDEN)
        vocabulary = num_classes if causal else num_classes + 1
        tail = {
            "fc": nn.Linear(channels, channels),
            "scaler": builder.make_scaler(),
            "activation": nn.GELU(),
            "norm": nn.LayerNorm(channels, norm_eps),
        }
        blocks = [Block(channels, _HEADS, hidden, causal, dropout, builder) for _ in range(depth)]
        parts = {
            "embedding": Embedding(vocabulary, tokens, channels, dropout, builder),
            "section1": nn.Sequential(*blocks),
            "tail": nn.Sequential(OrderedDict(tail)),
            "head": nn.Linear(channels, num_classes),
        }
        super().__init__(parts)


def mask_tokens(tokens: Tensor, vocabulary: int, generator: torch.Generator, rate: float = 0.15) -> Tensor:
    """Replace each token with probability `rate` by the mask, the token past the last.

    This makes the input of the masked language model; HeteroFL's loss is the cross entropy over all positions, masked
    or not.

    Args:
        tokens: integers of any shape.
        generator: on the device of the tokens.

    >>> tokens = torch.arange(6)
    >>> mask_tokens(tokens, 6, torch.Generator().manual_seed(0), rate=0.5)
    tensor([6, 1, 6, 6, 6, 5])
    """
    if not 0 <= rate <= 1:
        raise ZooError(f"the rate of masked tokens must be between 0 and 1, got {rate}", code="argument")
    drawn = torch.rand(tokens.shape, generator=generator, device=tokens.device)
    return tokens.masked_fill(drawn < rate, vocabulary)


PRESETS = {
    "transformer": Architecture(Transformer, {"depths": (4,)}, "Vaswani et al., NeurIPS 2017; sizes of HeteroFL"),
    "transformer_masked": Architecture(
        Transformer, {"depths": (4,), "causal": False}, "HeteroFL (Diao et al., ICLR 2021), released code"
    ),
}
