"""Random networks as graphs that hypothesis draws and shrinks, and what they compute with only a part of their weights.

A node names an operation, the values that it reads (counted back from the last one) and two numbers. Where it does not
fit these values it reads earlier ones, and where it fits none it is left out. `Net` runs a graph. `live` runs it too,
beside a mask that says of each number whether a narrow network has it: what sums, counts or compares positions does so
over those alone. It knows the operations, and nothing of how `surgery` follows them.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

WIDTHS = (4, 6, 8, 12)


class Node(NamedTuple):
    """An operation on values, 0 being the last one, with two numbers that say which variant of it."""

    operation: str
    sources: tuple[int, ...] = (0, 1, 2)
    a: int = 0
    b: int = 0


class Step(NamedTuple):
    """What a node does: a function of its module (None if it has none) and its values, and the rule for masks."""

    operation: str
    function: Any
    rule: Any
    name: str = ""
    sources: tuple[int, ...] = ()


# A rule gets a step, its modules (one with the weights that are there, one whose weights are their masks), values and
# masks; it gives the value and its mask.


def apart(step, nets, values, masks):
    """Elements by themselves: a result is there if all that it is made of is."""
    return step.function(nets[0], *values), math.prod(masks)


def weighted(step, nets, values, masks):
    """Elements by themselves, each with a weight."""
    return step.function(nets[0], *values), masks[0] * nets[1].at(masks[0])


def as_first(step, nets, values, masks):
    """What is there stays."""
    return step.function(nets[0], *values), masks[0]


def summed(step, nets, values, masks):
    """Numbers that are not there are zeros: sums of products, and numbers in other places."""
    return step.function(nets[0], *values), step.function(nets[1], *masks) > 0


def slid(step, nets, values, masks):
    """A window slides over pixels: where there are as many as before, those are there that were."""
    found, mask = summed(step, nets, values, masks)
    for dim in range(2, found.ndim):
        if found.shape[dim] == masks[0].shape[dim]:
            mask = mask * masks[0].amax([other for other in range(found.ndim) if other != dim], keepdim=True)
    return found, mask


def unfolded(step, nets, values, masks):
    """The zeros around a channel that is there are there, too."""
    around = masks[0].amax((2, 3), keepdim=True).repeat(1, 1, *(n + 2 for n in masks[0].shape[2:]))
    around[:, :, 1:-1, 1:-1] = masks[0]
    return step.function(nets[0], *values), F.unfold(around, 3) > 0


def slid_maximum(step, nets, values, masks):
    """As `slid`, where nothing stands for what is not there."""
    return step.function(None, values[0].masked_fill(masks[0] == 0, -math.inf)), slid(step, nets, values, masks)[1]


def padded(step, nets, values, masks):
    """A zero at either end of the last axis."""
    edge = masks[0].amax(-1, keepdim=True)
    return step.function(None, *values), torch.cat([edge, masks[0], edge], -1)


def looked_up(step, nets, values, masks):
    """Rows of a table, or sums of several, which are there once all the same."""
    return nets[0](*values), (nets[1](*values) != 0).double()


def along(dim, fill):
    """Along an axis on which other numbers than zero stand for those that are not there."""

    def rule(step, nets, values, masks):
        found = step.function(None, values[0].masked_fill(masks[0] == 0, fill))
        mask = masks[0] if found.shape == masks[0].shape else masks[0].amax(dim, keepdim=found.ndim == masks[0].ndim)
        return found.nan_to_num(0, 0, 0), mask.expand_as(found)

    return rule


def averaged(dim, keep):
    """A mean over the positions that are there."""

    def rule(step, nets, values, masks):
        mask = masks[0].sum(dim, keepdim=keep)
        return values[0].sum(dim, keepdim=keep) / mask.clamp(min=1), mask > 0

    return rule


def moments(x, mask, dims):
    """Mean and variance of the positions that are there."""
    count = mask.sum(dims, keepdim=True).clamp(min=1)
    mean = x.sum(dims, keepdim=True) / count
    return mean, ((x - mean) * mask).square().sum(dims, keepdim=True) / count


def varied(dim, keep):
    """A variance over the positions that are there."""

    def rule(step, nets, values, masks):
        found = moments(*values, *masks, (dim,))[1]
        return found if keep else found.squeeze(dim), masks[0].amax(dim, keepdim=keep)

    return rule


def compared(dim):
    """Positions are told apart by their numbers, so that each row is there as a whole or not at all."""

    def rule(step, nets, values, masks):
        assert torch.equal(masks[0].amax(dim), masks[0].amin(dim)), "positions that data picks are cut"
        found = step.function(None, *values)
        return found, masks[0] if found.shape == masks[0].shape else step.function(None, *masks)

    return rule


def normed(first, axis, centered=True, groups=1):
    """A norm over the dimensions from this one on, after axis 1 is split in groups, with weights along `axis`."""

    def rule(step, nets, values, masks):
        x, mask = (t.unflatten(1, (groups, -1)) if groups > 1 else t for t in (values[0], masks[0]))
        mean, variance = moments(x, mask, tuple(range(first % x.ndim, x.ndim)))
        power = variance + (0 if centered else mean**2)
        found = (x - (mean if centered else 0)) / (power + nets[0].eps).sqrt()
        found = found.flatten(1, 2) if groups > 1 else found
        weight, bias = (getattr(nets[0], name, None) for name in ("weight", "bias"))
        found = found if weight is None else (found.movedim(axis, -1) * weight).movedim(-1, axis)
        return found if bias is None else (found.movedim(axis, -1) + bias).movedim(-1, axis), masks[0]

    return rule


def divided(dim):
    """Divided by the root of a size."""
    return lambda step, nets, values, masks: (values[0] / masks[0].sum(dim).max() ** 0.5, masks[0])


def attended(step, nets, values, masks, causal=False):
    """Attention: the scale is of the features that are there, and of the keys only those are read."""
    (q, k, v), (of_q, of_k, of_v) = values, masks
    if q.ndim > 3 and q.shape[-3] != k.shape[-3]:  # several heads of queries share keys
        k, v, of_k, of_v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v, of_k, of_v))
    scores = q @ k.mT / of_q.sum(-1).max() ** 0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    found = scores.masked_fill(of_k.amax(-1)[..., None, :] == 0, -math.inf).softmax(-1).nan_to_num(0) @ v
    return found, of_q.amax(-1, keepdim=True) * of_v.amax(-2, keepdim=True)


def attended_causally(step, nets, values, masks):
    """Attention of which a query reads no key behind its own place."""
    return attended(step, nets, values, masks, causal=True)


def heads_attended(step, nets, values, masks):
    """Torch's module for attention, written out."""
    pairs = [(values * 3)[:3], (masks * 3)[:3]]
    for net, of in zip(nets, pairs):
        whole = (net.q_proj_weight, net.k_proj_weight, net.v_proj_weight)
        weights = whole if net.in_proj_weight is None else net.in_proj_weight.chunk(3)
        biases = [None] * 3 if net.in_proj_bias is None else net.in_proj_bias.chunk(3)
        of[:] = [F.linear(x if net.batch_first else x.transpose(0, 1), *w) for x, *w in zip(of, weights, biases)]
        of[:] = [x.unflatten(-1, (net.num_heads, -1)).transpose(1, 2) for x in of]
    found, mask = attended(step, None, pairs[0], [(mask > 0).double() for mask in pairs[1]])
    both = (net.out_proj(x.transpose(1, 2).flatten(2)) for net, x in zip(nets, (found, mask)))
    found, mask = (x if nets[0].batch_first else x.transpose(0, 1) for x in both)
    return found, mask > 0


def recurred(step, nets, values, masks):
    """A state that is not there stays 0; each step in time is there."""
    time = nets[0].batch_first and values[0].ndim == 3
    assert torch.equal(masks[0].amax(int(time)), masks[0].amin(int(time))), "steps in time are cut"
    last = f"l{nets[0].num_layers - 1}"
    names = [last, last + "_reverse"][: 1 + nets[0].bidirectional]
    project = getattr(nets[0], "proj_size", 0) > 0
    states = [getattr(nets[1], f"weight_{'hr' if project else 'hh'}_{name}").amax(int(project)) for name in names]
    return step.function(nets[0], *values), masks[0].amax(-1, keepdim=True) * torch.cat(states)


def gated(dim):
    """The first half, times what the second one says."""
    return lambda step, nets, values, masks: (step.function(None, *values), math.prod(masks[0].chunk(2, dim)))


def neighbours(dim):
    """Differences of neighbours."""

    def rule(step, nets, values, masks):
        count = masks[0].shape[dim] - 1
        return step.function(None, *values), masks[0].narrow(dim, 1, count) * masks[0].narrow(dim, 0, count)

    return rule


def pairs(step, nets, values, masks):
    """Something of each pair of rows; numbers that are not there are zeros, also where one stands for all of a row."""
    of_x, of_y = (mask.amax(-1) for mask in masks)
    there = masks[0].amax(tuple(range(masks[0].ndim - 1))) * masks[1].amax(tuple(range(masks[1].ndim - 1)))
    return step.function(None, *(value * there for value in values)), of_x[..., :, None] * of_y[..., None, :]


class Weight(nn.Module):
    """A bare parameter or buffer, added or multiplied; of a table as many rows as there are positions."""

    def __init__(self, shape, join, buffer=False, rows=False):
        super().__init__()
        self.join, self.rows, value = join, rows, torch.randn(shape)
        self.register_buffer("weight", value) if buffer else self.register_parameter("weight", nn.Parameter(value))

    def at(self, x):
        return self.weight[: x.shape[-2]] if self.rows else self.weight

    def forward(self, x):
        return self.join(x, self.at(x))


class Product(nn.Module):
    """A bare matrix in an einsum."""

    def __init__(self, equation, sizes):
        super().__init__()
        shape = [sizes[letter] for letter in equation.split(",")[1].split("->")[0]]
        self.equation, self.weight = equation, nn.Parameter(torch.randn(shape) / 3)

    def forward(self, x):
        return torch.einsum(self.equation, x, self.weight)


def convolution(x, *args, transposed=False, **kwargs):
    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d) if transposed else (nn.Conv1d, nn.Conv2d)
    return kinds[x.ndim - 3](x.shape[1], *args, **kwargs)


def einsum(x, a, b):
    equation = ("...c,cd->...d", "...c,dc->...d", "bc...,cd->bd...", "btc,ctd->bd", "bc,cd->bd")[b % 5]
    return Product(equation, {"c": x.shape[1 if b % 5 == 2 else -1], "d": WIDTHS[a % 4], "t": x.shape[-2]})


def bare(x, a, b):
    shape = ((x.shape[-1],), (1,), x.shape[1:], (x.shape[1], *[1] * (x.ndim - 2)))[a % 4]
    return Weight(shape, (torch.mul, torch.add)[b % 2], buffer=b % 4 > 1)


def batch_norm(x, a, b):
    net = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[x.ndim - 2](x.shape[1], affine=b % 4 > 0)
    net.running_mean.normal_(), net.running_var.uniform_(0.5, 1.5)
    return net


def layer_norm(x, a, b):
    if b % 4 == 2:
        return nn.RMSNorm(x.shape[-1], eps=1e-5), normed(-1, -1, centered=False)
    if b % 4 == 3:
        return nn.LayerNorm(x.shape[-2:], elementwise_affine=False), normed(-2, -1)
    return nn.LayerNorm(x.shape[-1], elementwise_affine=b % 3 == 0, bias=a % 2 == 0), normed(-1, -1)


def group_norm(x, a, b):
    groups = 1 + a % 4
    return nn.GroupNorm(groups, x.shape[1], affine=b % 4 > 0), normed(1 + (groups > 1), 1, groups=groups)


def instance_norm(x, a, b):
    net = (nn.InstanceNorm1d, nn.InstanceNorm2d)[x.ndim - 3](x.shape[1], affine=b % 2 == 0)
    return net, normed(2, 1)


def constant(x, a, b):
    """A constant of the size that the axis has here, or of the one that it finds."""
    value = torch.randn(x.shape[-2:] if a % 2 else x.shape[-1], generator=torch.Generator().manual_seed(b))
    return (lambda x: x + torch.arange(x.shape[-1])) if a % 4 > 1 else (lambda x: x * value)


def divide(x, a, b):
    dim = a % x.ndim
    return lambda x: x / x.shape[dim] ** 0.5, divided(dim)


def multihead(x, a, b):
    """Attention of one value to itself."""
    assert x.ndim == 3
    return nn.MultiheadAttention(x.shape[-1], 1 + a % 2, bias=b % 4 < 3, batch_first=b % 2 == 0), heads_attended


def cross_attention(q, k, v, a, b):
    """Attention to keys and values of other widths."""
    assert q.ndim == 3
    options = {"kdim": k.shape[-1], "vdim": v.shape[-1], "batch_first": b % 2 == 0}
    return nn.MultiheadAttention(q.shape[-1], 1 + a % 2, **options), heads_attended


def recurrent(kind):
    def make(x, a, b):
        options = {"proj_size": WIDTHS[a % 4] // 2} if kind is nn.LSTM and b % 3 == 2 else {}
        layers, both = 1 + a // 4 % 2, a // 8 % 2 == 1
        return kind(x.shape[-1], WIDTHS[a % 4], layers, batch_first=b % 2 == 0, bidirectional=both, **options)

    return 1, recurred, make


def weight_norm(x, a, b):
    if x.ndim > 2 and b % 2:
        return weight_norm_of(nn.Conv1d if x.ndim == 3 else nn.Conv2d, x.shape[1], WIDTHS[a % 4], 3, padding=1), slid
    return weight_norm_of(nn.Linear, x.shape[-1], WIDTHS[a % 4]), summed


def weight_norm_of(kind, *args, **kwargs):
    return nn.utils.parametrizations.weight_norm(kind(*args, **kwargs))


def attention(q, k, v, a, b):
    assert q.ndim > 2
    shared = q.ndim > 3 and q.shape[-3] != k.shape[-3]
    outer = slice(None, -3 if shared else -2)
    assert (*q.shape[outer], k.shape[-2]) == (*k.shape[outer], v.shape[-2])
    assert k.shape[:-1] == v.shape[:-1]
    options = {"enable_gqa": shared, "is_causal": b % 4 == 3}
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), (
        attended_causally if b % 4 == 3 else attended
    )


def split_axis(x, a, b):
    """An axis in two, one of them of a size that is written in the code."""
    dim, n = 1 + a % (x.ndim - 1), 2 + b % 3
    before, size, after = x.shape[:dim], x.shape[dim] // n, x.shape[dim + 1 :]
    return (
        lambda x: x.reshape(*before, size, n, *after),
        lambda x: x.view(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :]),
    )[b // 3 % 2]


def index_put(x, y, a, b):
    assert x.shape == y.shape

    def function(x, y):
        x = x.clone()
        x[:, torch.tensor([1, 0, 1][b % 2 :])] += y[:, torch.tensor([0, 0, 1][b % 2 :])]
        return x

    return function


def chosen(x, dim, *at):
    """The same positions along an axis, for each of all others."""
    shape = [1] * x.ndim
    shape[dim] = len(at)
    return torch.tensor(at).view(shape).expand([len(at) if i == dim else n for i, n in enumerate(x.shape)])


def along_axis(make):
    """An operation along one of the axes behind the first: of its number, whether it is kept, and a number."""
    return 1, None, lambda x, a, b: make(1 + a % (x.ndim - 1), b % 2 == 1, b)


def along_axes(make):
    """An operation along two axes at a time."""
    return 1, None, lambda x, a, b: make((1 + a % (x.ndim - 2), x.ndim - 1), b % 2 == 1)


def moved(make, rule=summed):
    """Numbers in other places: of the axis and a number."""
    return 1, rule, lambda x, a, b: make(1 + a % (x.ndim - 1), b)


def of_image(function, rule):
    def make(x, a, b):
        assert x.ndim == 4
        return function

    return 1, rule, make


ACTIVATIONS = F.relu, F.gelu, torch.sigmoid, torch.tanh, F.silu, torch.cos, torch.abs, lambda x: 1 - x
BINARY = (
    torch.add, torch.mul, torch.sub, torch.maximum, torch.atan2,
    lambda x, y: x.clone().add_(y), lambda x, y: torch.addcmul(x, x, y), lambda x, y: x.lerp(y, 0.3),
)  # fmt: skip
EINSUMS = "b...c,b...d->bcd", "bc,bd->bcd", "btc,bsc->bts", "btc,btd->bcd", "btc,btd->btcd", "bhtc,bhsc->bths"
# By name how many values an operation reads, its rule (None: it comes with the function), and what makes a module or a
# function of values and two numbers.
OPERATIONS = {
    "linear": (1, summed, lambda x, a, b: nn.Linear(x.shape[-1], WIDTHS[a % 4], bias=b % 2 == 0)),
    "conv": (1, slid, lambda x, a, b: convolution(
        x, WIDTHS[a % 4], *((1,), (3, 1, 1), (3, 2, 1), (3, 1, 2, 2))[b % 4], bias=b < 4)),
    "grouped_conv": (1, slid, lambda x, a, b: convolution(x, WIDTHS[a % 4], 3, padding=1, groups=2 + b % 3)),
    "depthwise_conv": (1, slid, lambda x, a, b: convolution(
        x, x.shape[1] * (1 + a % 2), 3, padding=1, groups=x.shape[1])),
    "transposed_conv": (1, slid, lambda x, a, b: convolution(
        x, WIDTHS[a % 4], 2, stride=2, groups=1 + b % 2, transposed=True)),
    "product": (1, summed, einsum),
    "bilinear": (2, summed, lambda x, y, a, b: nn.Bilinear(x.shape[-1], y.shape[-1], WIDTHS[a % 4], bias=b % 2 == 0)),
    "embedding": (1, looked_up, lambda x, a, b: nn.Embedding(7, WIDTHS[a % 4])),
    "embedding_bag": (1, looked_up, lambda x, a, b: nn.EmbeddingBag(7, WIDTHS[a % 4], mode=("sum", "mean")[b % 2])),
    "weight_norm": (1, None, weight_norm),
    "scale": (1, weighted, bare),
    "positions": (1, weighted, lambda x, a, b: Weight((8, x.shape[-1]), torch.add, rows=True)),
    "batch_norm": (1, as_first, batch_norm),
    "layer_norm": (1, None, layer_norm),
    "group_norm": (1, None, group_norm),
    "instance_norm": (1, None, instance_norm),
    "prelu": (1, as_first, lambda x, a, b: nn.PReLU(x.shape[1] if a % 2 else 1)),
    "lstm": recurrent(nn.LSTM),
    "gru": recurrent(nn.GRU),
    "rnn": recurrent(nn.RNN),
    "multihead": (1, None, multihead),
    "cross_attention": (3, None, cross_attention),
    "attention": (3, None, attention),
    "activation": (1, apart, lambda x, a, b: ACTIVATIONS[a % 8]),
    "binary": (2, apart, lambda x, y, a, b: BINARY[a % 8]),
    "where": (2, apart, lambda x, y, a, b: lambda x, y: torch.where(x > 0, x, y)),
    "masked_fill": (2, apart, lambda x, y, a, b: lambda x, y: x.masked_fill(y > 0, 0.3)),
    "constant": (1, apart, constant),
    "divide": (1, None, divide),
    "glu": along_axis(lambda dim, keep, b: (lambda x: F.glu(x, dim), gated(dim))),
    "mean": along_axis(lambda dim, keep, b: (lambda x: x.mean(dim, keepdim=keep), averaged(dim, keep))),
    "sum": along_axis(lambda dim, keep, b: (lambda x: x.sum(dim, keepdim=keep), summed)),
    "amax": along_axis(lambda dim, keep, b: (lambda x: x.amax(dim, keepdim=keep), along(dim, -math.inf))),
    "max": along_axis(lambda dim, keep, b: (lambda x: x.max(dim, keepdim=keep)[0], along(dim, -math.inf))),
    "logsumexp": along_axis(lambda dim, keep, b: (lambda x: x.logsumexp(dim, keepdim=keep), along(dim, -math.inf))),
    "var": along_axis(lambda dim, keep, b: (lambda x: x.var(dim, correction=0, keepdim=keep), varied(dim, keep))),
    "norm": along_axis(lambda dim, keep, b: (lambda x: x.norm(dim=dim, keepdim=keep), summed)),
    "mean_of_two": along_axes(lambda dims, keep: (lambda x: x.mean(dims, keepdim=keep), averaged(dims, keep))),
    "softmax": along_axis(lambda dim, keep, b: (lambda x: x.softmax(dim), along(dim, -math.inf))),
    "softmax_of_all": along_axis(lambda dim, keep, b: (
        lambda x: x.flatten(1).softmax(-1).view_as(x), along(dim, -math.inf))),
    "log_softmax": along_axis(lambda dim, keep, b: (lambda x: x.log_softmax(dim), along(dim, -math.inf))),
    "normalize": along_axis(lambda dim, keep, b: (lambda x: F.normalize(x, dim=dim), as_first)),
    "cumsum": along_axis(lambda dim, keep, b: (lambda x: x.cumsum(dim), as_first)),
    "cumprod": along_axis(lambda dim, keep, b: (lambda x: x.cumprod(dim), along(dim, 1.0))),
    "sort": along_axis(lambda dim, keep, b: (lambda x: x.sort(dim)[0], along(dim, math.inf))),
    "topk": along_axis(lambda dim, keep, b: (lambda x: x.topk(2, dim)[0], along(dim, -math.inf))),
    "argsort": along_axis(lambda dim, keep, b: (lambda x: x.gather(dim, x.argsort(dim)), compared(dim))),
    "one_hot": along_axis(lambda dim, keep, b: (
        lambda x: x * F.one_hot(x.argmax(dim), x.shape[dim]).movedim(-1, dim), compared(dim))),
    "diff": along_axis(lambda dim, keep, b: (lambda x: x.diff(dim=dim), neighbours(dim))),
    "reflect": (1, None, lambda x, a, b: (
        lambda x: F.pad(x, (1, 1), mode=("reflect", "replicate", "circular")[b % 3]),
        summed if b % 3 == 2 else compared(-1))),  # around a circle the first and the last one are copied as they are
    "matmul": (2, summed, lambda x, y, a, b: (
        torch.matmul, lambda x, y: x @ y.mT, lambda x, y: x.mT @ y)[a % 3]),
    "einsum": (2, summed, lambda x, y, a, b: lambda x, y: torch.einsum(EINSUMS[a % 6], x, y)),
    "cdist": (2, pairs, lambda x, y, a, b: torch.cdist),
    "cosine": (2, pairs, lambda x, y, a, b: (
        lambda x, y: F.cosine_similarity(x[..., :, None, :], y[..., None, :, :], -1))),
    "transpose": (1, summed, lambda x, a, b: lambda x: x.transpose(a % x.ndim, b % x.ndim)),
    "permute": (1, summed, lambda x, a, b: lambda x: x.permute([*range(1, x.ndim), 0])),
    "movedim": (1, summed, lambda x, a, b: lambda x: x.movedim(1, -1).contiguous()),
    "flatten": (1, summed, lambda x, a, b: (
        lambda x: x.flatten(1 + a % (x.ndim - 1)), lambda x: x.flatten(1, 2),
        lambda x: x.reshape(x.shape[0], -1))[b % 3]),
    "unflatten": moved(lambda dim, b: lambda x: (
        x.unflatten(dim, (2 + b // 2 % 3, -1) if b % 2 else (-1, 2 + b // 2 % 3)))),
    "reshape": (1, summed, split_axis),
    "heads": (1, summed, lambda x, a, b: lambda x: x.view(*x.shape[:2], 2 + a % 2 * 2, -1).transpose(1, 2)),
    "merge_heads": (1, summed, lambda x, a, b: lambda x: x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)),
    "unsqueeze": moved(lambda dim, b: lambda x: x.unsqueeze(dim)),
    "squeeze": moved(lambda dim, b: torch.squeeze),
    "chunk": moved(lambda dim, b: lambda x: x.chunk(2 + b // 3 % 2, dim)[b % 2]),
    "split": moved(lambda dim, b: lambda x: x.split([x.shape[dim] // 2, x.shape[dim] - x.shape[dim] // 2], dim)[b % 2]),
    "narrow": moved(lambda dim, b: lambda x: x.narrow(dim, b % 2, x.shape[dim] // 2)),
    "tail": moved(lambda dim, b: lambda x: x.movedim(dim, 0)[b % 2 :].movedim(0, dim)),
    "stride": moved(lambda dim, b: lambda x: x.movedim(dim, -1)[..., b % 2 :: 2]),
    "select": moved(lambda dim, b: lambda x: x.select(dim, b % x.shape[dim])),
    "unbind": moved(lambda dim, b: lambda x: x.unbind(dim)[b % x.shape[dim]]),
    "halves": moved(lambda dim, b: lambda x: x.unflatten(dim, (2, -1)).unbind(dim)[b % 2]),
    "index_select": moved(lambda dim, b: lambda x: x.index_select(dim, torch.tensor([b % x.shape[dim], 0]))),
    "gather": moved(lambda dim, b: lambda x: x.gather(dim, chosen(x, dim, 1, 0, 1))),
    "scatter": moved(lambda dim, b: lambda x: x.scatter_add(dim, chosen(x, dim, 1, 1), x)),
    "index_add": (2, summed, lambda x, y, a, b: lambda x, y: x.index_add(1, torch.tensor([1, 0]), y[:, :2])),
    "index_put": (2, summed, index_put),
    "tril": (1, as_first, lambda x, a, b: lambda x: (torch.tril, torch.triu)[a % 2](x, b % 3 - 1)),
    "cat": (2, summed, lambda x, y, a, b: (
        lambda x, y: torch.cat([x, y, *([x] if b % 2 else [])], 1 + a % (x.ndim - 1)))),
    "stack": (2, summed, lambda x, y, a, b: lambda x, y: torch.stack([x, y], 1 + a % x.ndim)),
    "repeat": moved(lambda dim, b: lambda x: x.repeat([2 if i == dim else 1 for i in range(x.ndim)])),
    "repeat_interleave": moved(lambda dim, b: lambda x: x.repeat_interleave(2, dim)),
    "roll": moved(lambda dim, b: lambda x: x.roll(1 + b, dim)),
    "flip": moved(lambda dim, b: lambda x: x.flip(dim)),
    "expand": moved(lambda dim, b: lambda x: x.unsqueeze(dim).expand(*x.shape[:dim], 3, *x.shape[dim:])),
    "pad": (1, padded, lambda x, a, b: lambda x: F.pad(x, (1, 1))),
    "max_pool": of_image(lambda x: F.max_pool2d(x, 2), slid_maximum),
    "max_pool_same": of_image(lambda x: F.max_pool2d(x, 3, 1, 1), slid_maximum),
    "avg_pool": of_image(lambda x: F.avg_pool2d(x, 2), slid),
    "adaptive_avg_pool": of_image(lambda x: F.adaptive_avg_pool2d(x, 1), averaged((2, 3), True)),
    "adaptive_max_pool": of_image(lambda x: F.adaptive_max_pool2d(x, 2), slid_maximum),
    "interpolate": of_image(lambda x: F.interpolate(x, scale_factor=2), summed),
    "interpolate_smoothly": of_image(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), summed),
    "pixel_shuffle": of_image(lambda x: F.pixel_shuffle(x, 2), summed),
    "pixel_unshuffle": of_image(lambda x: F.pixel_unshuffle(x, 2), summed),
    "unfold": of_image(lambda x: F.unfold(x, 3, padding=1), unfolded),
    "fold": of_image(lambda x: F.fold(F.unfold(x, 2), x.shape[-2:], 2), summed),
    "channel_shuffle": of_image(lambda x: F.channel_shuffle(x, 2), summed),
    "channel_shuffle_by_view": of_image(
        lambda x: x.view(x.shape[0], 2, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2), summed),
}  # fmt: skip
BLOCKS = (  # attentions, a gated unit, a residual block, a channel shuffle, a feed-forward network, a gate's branch
    [Node("linear", a=3), Node("chunk", a=1, b=3), Node("narrow", (1,), 1, 1), Node("unbind", (2,), 1, 2),
     Node("heads", (2,)), Node("heads", (2,)), Node("heads", (2,)), Node("attention", (2, 1, 0)),
     Node("merge_heads"), Node("linear", a=1)],
    [Node("linear", a=3), Node("reshape", a=1, b=4), Node("unbind", a=1), Node("unbind", (1,), 1, 1),
     Node("unbind", (2,), 1, 2), Node("heads", (2,)), Node("heads", (2,)), Node("heads", (2,)),
     Node("attention", (2, 1, 0)), Node("merge_heads"), Node("linear", a=1)],
    [Node("linear", (1,), 2), Node("linear", (2,), 0), Node("linear", (3,), 3), Node("heads", (2,), 1),
     Node("heads", (2,)), Node("heads", (2,)), Node("attention", (2, 1, 0)), Node("merge_heads"), Node("linear", a=1)],
    [Node("linear", a=2), Node("chunk", a=1), Node("chunk", (1,), 1, 1), Node("binary", (1, 0), 1), Node("linear")],
    [Node("conv", a=2, b=1), Node("batch_norm", b=1), Node("activation"), Node("conv", b=1), Node("binary", (0, 4))],
    [Node("conv", a=2), Node("channel_shuffle_by_view"), Node("grouped_conv", a=2)],
    [Node("linear", a=2), Node("activation", a=1), Node("linear", a=1), Node("binary", (0, 3)), Node("layer_norm")],
    [Node("conv", a=1, b=1), Node("group_norm", a=1, b=1), Node("mean", a=2), Node("mean", a=1), Node("linear")],
    [Node("linear", (1,), 1), Node("lstm", a=2), Node("linear")],
    [Node("linear", (1,), 2), Node("linear", (2,), 1), Node("linear", (3,), 0), Node("cross_attention", (2, 1, 0), 1)],
)  # fmt: skip
HEADS = ("flatten", "linear"), ("mean", "flatten", "linear"), ("linear",), ()
UNFIT = (
    RuntimeError, ValueError, KeyError, IndexError, AssertionError, ZeroDivisionError, TypeError, AttributeError
)  # fmt: skip


def inputs(seed=0):
    """Numbers of words, vectors in a row, and images."""
    draw = torch.Generator().manual_seed(seed)
    vectors, images = (torch.randn(shape, generator=draw).double() for shape in ((2, 5, 6), (2, 4, 4, 4)))
    return torch.randint(7, (2, 5), generator=draw), vectors, images


def first_of(net, *values):
    """What a module returns, or the first of it."""
    values = values * 3 if isinstance(net, nn.MultiheadAttention) and len(values) == 1 else values
    found = net(*values)
    return found[0] if isinstance(found, tuple) else found


class Net(nn.Module):
    """A graph's network. The last values that no node reads go through a head, or are outputs as they are."""

    def __init__(self, graph, head=0):
        super().__init__()
        torch.manual_seed(0)
        self.steps, self.read, values = [], set(), list(inputs())
        for node in graph:
            self._add(node, values)
        for at in self._unread(values)[-3:]:
            for name in HEADS[head % 4]:
                back = len(values) - 1 - at
                at = len(values) - 1 if self._add(Node(name, (back,)), values) else at
        self.outputs = self._unread(values)
        with torch.no_grad():
            for tensor in self.double().eval().parameters():
                tensor += 0.1 * torch.randn_like(tensor)

    def _unread(self, values):
        return [at for at in range(3, len(values)) if at not in self.read]

    def _add(self, node, values):
        """Whether the node fits the values that it reads, or earlier ones."""
        for shift in range(len(values)):
            try:
                step, net = self._step(node, shift, values)
                value = step.function(net, *(values[at] for at in step.sources)).detach()
                assert value.ndim > 1 and 0 < value.numel() <= 2000 and value.abs().max() < 1e3  # noqa: PT018
            except UNFIT:
                continue
            if net is not None:
                setattr(self, step.name, net)
            self.steps.append(step)
            self.read.update(step.sources)
            values.append(value)
            return True
        return False

    def _step(self, node, shift, values):
        modules = [step for step in self.steps if step.name]
        again = modules[-1 - node.a % len(modules)] if node.operation == "again" else None  # with the same weights
        arity, rule, make = (len(again.sources), None, None) if again else OPERATIONS[node.operation]
        sources = tuple(len(values) - 1 - (back + shift) % len(values) for back in node.sources[:arity])
        if again:
            return again._replace(sources=sources), getattr(self, again.name)
        given = [values[at] for at in sources]
        assert node.operation.startswith("embedding") or all(value.is_floating_point() for value in given)
        made = make(*given, node.a, node.b)
        made, rule = made if isinstance(made, tuple) else (made, rule)
        if isinstance(made, nn.Module):
            return Step(
                node.operation, first_of, rule, f"{node.operation}{len(self.steps)}", sources
            ), made.double().eval()
        return Step(node.operation, lambda net, *values: made(*values), rule, "", sources), None

    def forward(self, *values):
        values = list(values)
        for step in self.steps:
            values.append(step.function(self.module_of(step), *(values[at] for at in step.sources)))
        return [values[at] for at in self.outputs]

    def module_of(self, step):
        return getattr(self, step.name) if step.name else None


@torch.no_grad()
def live(net, masked, given):
    """The outputs of a network whose weights are there where those of `masked` are 1, and where the outputs are."""
    values = list(given)
    masks = [torch.ones(value.shape, dtype=torch.float64) for value in values]
    for step in net.steps:
        of_step = ([of[at] for at in step.sources] for of in (values, masks))
        value, mask = step.rule(step, [one.module_of(step) for one in (net, masked)], *of_step)
        masks.append(mask.double().expand(value.shape))
        values.append(value.masked_fill(masks[-1] == 0, 0))
    return [values[at] for at in net.outputs], [masks[at] for at in net.outputs]


LAYERS = "linear", "conv", "grouped_conv", "transposed_conv", "product"
_BACK = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 5, 6])


def _node(*names, first=_BACK):
    def node(name, sources, a, b):
        return Node(name, sources[: OPERATIONS[name][0] if name in OPERATIONS else 3], a, b)

    sources = st.tuples(first, _BACK, _BACK)
    return st.builds(node, st.sampled_from(names), sources, st.integers(0, 39), st.integers(0, 13))


_ONTO = _node(*LAYERS, first=st.just(0))


def _between(name):
    """An operation between layers: three that make values of one size if it reads several."""
    if OPERATIONS[name][0] == 1:
        return st.tuples(_node(*LAYERS), _node(name, first=st.just(0)), _ONTO)
    layer = _node(*LAYERS, first=st.integers(0, 2))
    three = layer.map(lambda layer: [layer._replace(sources=(layer.sources[0] + at,)) for at in range(3)])
    return st.builds(lambda three, node, onto: (*three, node, onto), three, _node(name), _ONTO)


def graphs(name, more=1, names=(*OPERATIONS, "again"), blocks=BLOCKS):
    """Graphs that have this operation, if it fits, with so many more parts at most before it, and after."""
    some = st.lists(st.one_of(_node(*names).map(lambda node: [node]), st.sampled_from(blocks)), max_size=more)
    parts = st.tuples(some, _between(name).map(lambda part: [part]), some)
    return parts.map(lambda parts: [node for some in parts for part in some for node in part])
