"""Attention as people write it."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from einops.layers.torch import Rearrange, Reduce
from torch import Tensor, nn

from benchmarks.models.case import scaled

HEADS, HEAD, VOCABULARY, LENGTH = 4, 6, 30, 10  # a head has HEAD * scale channels


class FloatMask(nn.Module):
    """nn.TransformerEncoder with a causal mask of -inf and a padding mask."""

    def __init__(self, s: int, padding: bool):
        super().__init__()
        width = HEADS * HEAD * s
        self.embedding, self.position = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, HEADS, 20 * s, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.padding = nn.Linear(width, 5), padding

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim) + self.position
        if self.padding:
            return self.head(self.encoder(x, src_key_padding_mask=tokens == 0).mean(1))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class EinopsAttention(nn.Module):
    """As in vit-pytorch: one projection to q, k and v, rearranged by einops."""

    def __init__(self, dim: int, heads: int, dim_head: int):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, heads * dim_head * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in qkv)
        attention = (q @ k.transpose(-1, -2) * self.scale).softmax(-1)
        return self.to_out(rearrange(attention @ v, "b h n d -> b n (h d)"))


class Pairs(nn.Module):
    """vit-pytorch's transformer: a ModuleList of pairs, unpacked in the loop."""

    def __init__(self, dim: int, depth: int, heads: int, dim_head: int, hidden: int):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(depth):
            ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            self.layers.append(nn.ModuleList([EinopsAttention(dim, heads, dim_head), ff]))

    def forward(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return x


class VitPytorch(nn.Module):
    """A vision transformer with einops layers, a class token and positions."""

    def __init__(self, s: int):
        super().__init__()
        dim = 22 * s
        self.embed = nn.Sequential(
            Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=4, p2=4), nn.LayerNorm(48), nn.Linear(48, dim)
        )
        self.cls, self.position = nn.Parameter(torch.randn(1, 1, dim)), nn.Parameter(torch.randn(1, 10, dim))
        self.transformer = Pairs(dim, 2, HEADS, HEAD * s, 18 * s)
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = torch.cat((repeat(self.cls, "1 1 d -> b 1 d", b=len(x)), x), dim=1) + self.position
        return self.head(self.transformer(x)[:, 0])


class Residual(nn.Module):
    """A norm, a net and a residual sum, as in the mlp-mixer of lucidrains."""

    def __init__(self, width: int, net: nn.Module):
        super().__init__()
        self.norm, self.net = nn.LayerNorm(width), net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x)) + x


def einops_mixer(s: int) -> nn.Module:
    """MLP-mixer in one Sequential: Rearrange before, Reduce behind; patches are mixed by convolutions of size 1."""
    width, patches = 22 * s, 9

    def mix(size: int, hidden: int, dense) -> nn.Module:
        return nn.Sequential(dense(size, hidden), nn.GELU(), dense(hidden, size))

    blocks = [
        block
        for _ in range(2)
        for block in (
            Residual(width, mix(patches, 26 * s, lambda a, b: nn.Conv1d(a, b, 1))),
            Residual(width, mix(width, 18 * s, nn.Linear)),
        )
    ]
    return nn.Sequential(
        Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=4, p2=4), nn.Linear(48, width), *blocks,
        nn.LayerNorm(width), Reduce("b n d -> b d", "mean"), nn.Linear(width, 5),
    )  # fmt: skip


class SelfAttention(nn.Module):
    """Separate q, k and v; subclasses add what they do to the scores or to q and k."""

    def __init__(self, s: int, kv_heads: int = HEADS):
        super().__init__()
        self.head_dim, self.kv_heads = HEAD * s, kv_heads
        width = HEADS * self.head_dim
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.q, self.k, self.v = (nn.Linear(width, n * self.head_dim) for n in (HEADS, kv_heads, kv_heads))
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 5)

    def rotate(self, x: Tensor) -> Tensor:
        return x

    def bias(self, q: Tensor, k: Tensor) -> Tensor | float:
        return 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(HEADS // self.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim) + self.bias(q, k)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
        return self.head(x + self.out(y))


class PartialRotary(SelfAttention):
    """Rotary positions for the first two thirds of each head's channels; the others pass."""

    def __init__(self, s: int):
        super().__init__(s)
        self.rotated = 4 * s  # of 6 * s
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(0, self.rotated, 2) / self.rotated))

    def rotate(self, x: Tensor) -> Tensor:
        turned, passed = x[..., : self.rotated], x[..., self.rotated :]
        angles = torch.arange(x.shape[2])[:, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        a, b = turned.chunk(2, dim=-1)
        turned = turned * angles.cos() + torch.cat((-b, a), dim=-1) * angles.sin()
        return torch.cat((turned, passed), dim=-1)


class RelativeBias(SelfAttention):
    """T5: a learned bias for each head and each bucket of distances."""

    def __init__(self, s: int):
        super().__init__(s)
        self.relative = nn.Embedding(8, HEADS)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        buckets = (place[None] - place[:, None]).clamp(-4, 3) + 4
        return self.relative(buckets).permute(2, 0, 1)[None]


class Disentangled(SelfAttention):
    """DeBERTa: content-to-position scores, gathered by relative distance."""

    def __init__(self, s: int):
        super().__init__(s)
        self.relative = nn.Embedding(2 * LENGTH, HEADS * HEAD * s)
        self.position = nn.Linear(HEADS * HEAD * s, HEADS * HEAD * s)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        length = q.shape[2]
        table = self.position(self.relative.weight).view(-1, HEADS, self.head_dim).transpose(0, 1)
        scores = q @ table.transpose(-1, -2)[None]
        place = torch.arange(length)
        index = (place[:, None] - place[None] + LENGTH).expand(len(q), HEADS, length, length)
        return torch.gather(scores, -1, index) / math.sqrt(self.head_dim)


class Einsum(nn.Module):
    """Attention in einsum, with weights that have an axis for heads."""

    def __init__(self, s: int):
        super().__init__()
        self.embed = nn.Linear(7, 22 * s)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(22 * s, HEADS, HEAD * s) / 5) for _ in range(3))
        self.o = nn.Parameter(torch.randn(HEADS, HEAD * s, 22 * s) / 5)
        self.head = nn.Linear(22 * s, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (torch.einsum("nte,ehd->nhtd", x, w) for w in (self.q, self.k, self.v))
        scores = torch.einsum("nhtd,nhsd->nhts", q, k) / q.shape[-1] ** 0.5
        y = torch.einsum("nhts,nhsd->nthd", scores.softmax(-1), v)
        return self.head(x + torch.einsum("nthd,hde->nte", y, self.o))


class Fused(nn.Module):
    """scaled_dot_product_attention and nn.MultiheadAttention beside each other, with a cross-attention to a memory."""

    def __init__(self, s: int):
        super().__init__()
        width = HEADS * HEAD * s
        self.embed, self.memory = nn.Linear(7, width), nn.Linear(9, 14 * s)
        self.cross = nn.MultiheadAttention(width, HEADS, kdim=14 * s, vdim=14 * s, batch_first=True)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 5)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.embed(x)
        memory = self.memory(memory)
        x = x + self.cross(x, memory, memory, need_weights=False)[0]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Rmsnorm(nn.Module):
    """A norm of one's own."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Gated(nn.Module):
    """Gated linear units by chunk (SwiGLU), with a norm of one's own."""

    def __init__(self, s: int):
        super().__init__()
        self.embed, self.norm = nn.Linear(7, 11 * s), Rmsnorm(11 * s)
        self.up, self.down, self.head = nn.Linear(11 * s, 2 * 13 * s), nn.Linear(13 * s, 11 * s), nn.Linear(11 * s, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        value, gate = self.up(self.norm(x)).chunk(2, dim=-1)
        return self.head(x + self.down(value * F.silu(gate)))


def _tokens() -> Tensor:
    tokens = torch.randint(1, VOCABULARY, (3, LENGTH))
    tokens[1, 7:] = 0
    return tokens


def _image() -> Tensor:
    return torch.randn(3, 3, 12, 12)


MODELS = {
    "float_mask": scaled(lambda s: FloatMask(s, padding=False), _tokens, blocks=True),
    "padding_mask": scaled(lambda s: FloatMask(s, padding=True), _tokens, blocks=True),
    "vit_pytorch": scaled(VitPytorch, _image, blocks=True),
    "einops_mixer": scaled(einops_mixer, _image, blocks=True),
    "plain_attention": scaled(SelfAttention, _tokens),
    "partial_rotary": scaled(PartialRotary, _tokens),
    "relative_bias": scaled(RelativeBias, _tokens),
    "disentangled": scaled(Disentangled, _tokens),
    "einsum_attention": scaled(Einsum, lambda: torch.randn(3, LENGTH, 7)),
    "grouped_query": scaled(lambda s: SelfAttention(s, kv_heads=2), _tokens),
    "cross_attention": scaled(Fused, lambda: (torch.randn(3, LENGTH, 7), torch.randn(3, 13, 9))),
    "gated_unit": scaled(Gated, lambda: torch.randn(3, 7)),
}
