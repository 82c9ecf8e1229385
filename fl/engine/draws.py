"""Random numbers within a step, without a generator's state.

They serve dropout, stochastic depth, augmentation and noise. Each number is a hash of (key, stream, number of the draw,
position), where the key belongs to a client's step and comes from the client's own generator (`fl.engine.batches`). So
it is the same on every device (normal numbers up to rounding) and in every backend: one client after another, stacked
under vmap, in threads, or replayed in a CUDA graph.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fl.base.errors import FLError
from fl.base.torch_private import calling
from surgery.torch_private import Watch

_MOST = 2**20  # numbers of a range that 24 random bits cover evenly enough
_USUAL = {
    "requires_grad": False, "memory_format": torch.preserve_format, "layout": torch.strided, "pin_memory": False,
    "out": None,
}  # fmt: skip
_GOLDEN = -0x61C88647  # 2^32 / golden ratio: spreads the numbers of draws and streams over 32 bits


class Draws:
    """A sequence of draws that depends only on a key.

    Args:
        key: integers of 32 bits, of any leading shape: one draw for each.
        stream: the streams of one key do not overlap.
        positions: hashes of positions from earlier steps, by the number and shape of a draw; they are the same for
            every key. Draws adds new ones.

    >>> key = torch.tensor([1, 1, 2], dtype=torch.int32)
    >>> a, b, c = Draws(key).uniform((4,))
    >>> torch.equal(a, b), torch.equal(a, c)
    (True, False)
    """

    def __init__(
        self, key: Tensor, stream: int = 0, positions: dict[tuple[int, int, tuple[int, ...]], Tensor] | None = None
    ) -> None:
        self.key, self.drawn = key, stream << 16
        self._mixed: Tensor | None = None  # the key's hash
        self._positions = {} if positions is None else positions

    def several(self, count: int, shape: tuple[int, ...]) -> Tensor:
        """Return the numbers of `count` calls of `uniform`: [*leading, count, *shape].

        They take the launches of a single call.
        """
        position = self._position(shape, count)
        self.drawn += count
        if self._mixed is None:
            self._mixed = _mix(self.key.to(torch.int32, copy=True))
        bits = _mix(position + self._mixed.view((*self.key.shape, *[1] * position.ndim)))
        return (bits & 0xFFFFFF) * 2**-24

    def _position(self, shape: tuple[int, ...], count: int) -> Tensor:
        """Return the hash of each position of these draws, int32 [count, *shape]."""
        known = self._positions.get((self.drawn, count, shape))
        if known is None:
            draws = torch.arange(self.drawn + 1, self.drawn + 1 + count, dtype=torch.int32, device=self.key.device)
            position = torch.arange(math.prod(shape), dtype=torch.int32, device=self.key.device).view(shape)
            known = _mix(draws.mul_(_GOLDEN).view(-1, *[1] * len(shape)) + position)
            self._positions[self.drawn, count, shape] = known
        return known

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Random float32 in [0, 1), multiples of 2^-24."""
        return self.several(1, shape).squeeze(self.key.ndim)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Return normal float32 with mean 0 and variance 1 (Box and Muller 1958).

        None is larger than 5.8.

        Logarithm and cosine differ in their last bits between devices: unlike all other numbers here, these are the
        same on two devices only up to rounding.
        """
        radius = (-2 * (1 - self.uniform(shape)).log()).sqrt()
        return radius * (2 * math.pi * self.uniform(shape)).cos()

    def below(self, bound: int, shape: tuple[int, ...]) -> Tensor:
        """Random int64 from 0 to bound - 1, which is at most 2^20."""
        return (self.uniform(shape) * bound).long()

    def keep(self, probability: float, shape: tuple[int, ...]) -> Tensor:
        """Random booleans, true with this probability."""
        return self.uniform(shape) < probability


def _mix(h: Tensor) -> Tensor:
    """Mix 32 bits in place: a bijection in which every bit depends on all.

    It is Wellons' lowbias32 of xor, shift and multiply.

    Products wrap; the masks make shifts of negative numbers equal to shifts of unsigned ones.
    """
    h ^= (h >> 16) & 0xFFFF
    h *= 0x7FEB352D
    h ^= (h >> 15) & 0x1FFFF
    h *= -0x7B935975
    h ^= (h >> 16) & 0xFFFF
    return h


class Drawing(TorchFunctionMode):
    """Take all random numbers of a model in the block from `draws`.

    Torch's global generator stays as it is.

    This covers dropout of every kind, also within attention, torch.rand, randn, randint, rand_like and randn_like, and
    tensors' bernoulli_, uniform_ and normal_.

    Other draws from the global generator are left alone; `fl.engine.train` notices them.

    >>> with Drawing(Draws(torch.tensor(7, dtype=torch.int32))):
    ...     F.dropout(torch.ones(6), 0.5), torch.randint(9, (4,))
    (tensor([0., 0., 0., 0., 0., 2.]), tensor([5, 1, 0, 4]))
    """

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.draws = draws

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if (replaced := _REPLACED.get(function)) and kwargs.get("generator") is None:
            for name in [name for name in kwargs if name in _USUAL]:
                if (value := kwargs.pop(name)) not in (None, _USUAL[name]):
                    raise FLError(
                        f"{function.__name__}(..., {name}={value}) cannot be drawn within a step: leave {name} out",
                        code="unsupported",
                    )
            return replaced(self.draws, *args, **kwargs)
        return function(*args, **kwargs)


class NoDraws(Watch):
    """Within it nothing may be random.

    It is for backward passes, in which activation checkpointing would repeat the forward pass with other masks. It
    looks at every operation, which takes time.

    Raises:
        FLError: from an operation that draws.
    """

    def before(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.Tag.nondeterministic_seeded in operation.tags and _drops(operation, args, kwargs):
            raise FLError(
                "dropout within activation checkpointing has other masks in the backward pass: use one of the two",
                code="unsupported",
            )


def _drops(function: Any, args: tuple, kwargs: dict) -> bool:
    """Return whether an operation with torch's tag for random ones really is random.

    Fused attention has the tag even without dropout.
    """
    arguments = {a.name: a.default_value for a in function._schema.arguments if a.name == "dropout_p"}
    arguments |= {a.name: value for a, value in zip(function._schema.arguments, args)} | kwargs
    return arguments.get("dropout_p") != 0


def _dropout(dims: int | None) -> Callable[..., Tensor]:
    """Drop single entries (None), or whole channels of `dims` dimensions.

    Where torch allows it, the batch may be a single sample.
    """

    def dropout(draws: Draws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not training or p == 0:
            return input
        single = dims in (1, 3) and input.ndim == dims + 1
        lead = input.ndim if dims is None else 2 - single
        shape = (*input.shape[:lead], *[1] * (input.ndim - lead))
        mask = draws.keep(1 - p, shape).to(input.dtype) / (1 - p if p < 1 else 1)
        return input.mul_(mask) if inplace else input * mask

    return dropout


def _attention(
    draws: Draws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as `F.scaled_dot_product_attention`; with dropout in plain products.

    Fused kernels take their random numbers from elsewhere.
    """
    if dropout_p == 0:
        more: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, **more)
    if enable_gqa:
        key, value = (t.repeat_interleave(query.size(-3) // t.size(-3), -3) for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        is_allowed = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_allowed else scores + attn_mask
        alone = scores.isneginf().all(-1, keepdim=True)  # those that may look at nothing: they get zeros, as in torch
        weights = scores.masked_fill(alone, 0.0).softmax(-1).masked_fill(alone, 0.0)
    else:
        weights = scores.softmax(-1)
    return _dropout(None)(draws, weights, dropout_p).to(value.dtype) @ value


def _multi_head(draws: Draws, *args: Any, **kwargs: Any) -> Any:
    """Call `F.multi_head_attention_forward` with random numbers from `draws`.

    `nn.MultiheadAttention` calls that function.
    """
    attention = partial(_attention, draws)
    inside: dict[Any, Any] = {F.dropout: partial(_dropout(None), draws), F.scaled_dot_product_attention: attention}
    return calling(F.multi_head_attention_forward, inside)(*args, **kwargs)


def _uniform(draws: Draws, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Round numbers in [0, 1) down to a shorter dtype, so that they stay below 1."""
    step = max(torch.finfo(dtype).eps / 2, 2**-24)
    return ((draws.uniform(shape) / step).floor() * step).to(dtype)


def _normal(draws: Draws, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return draws.normal(shape).to(dtype)


def _new(kind: Callable[[Draws, tuple[int, ...], torch.dtype], Tensor]) -> Callable[..., Tensor]:
    """Make a tensor as `torch.rand` does; its size is one argument or several."""

    def new(
        draws: Draws,
        *sizes: Any,
        size: Any = None,
        generator: None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> Tensor:
        if size is None:
            size = sizes[0] if sizes and not isinstance(sizes[0], int) else sizes
        drawn = kind(draws, tuple(size), dtype or torch.get_default_dtype())
        return drawn.to(device or torch.get_default_device())

    return new


def _like(kind: Callable[[Draws, tuple[int, ...], torch.dtype], Tensor]) -> Callable[..., Tensor]:
    """`torch.rand_like` and similar functions."""
    return lambda draws, input, dtype=None, device=None: kind(draws, tuple(input.shape), dtype or input.dtype).to(
        device or input.device
    )


def _randint(
    draws: Draws,
    *given: Any,
    low: int | None = None,
    high: int | None = None,
    size: Any = None,
    generator: None = None,
    dtype: torch.dtype = torch.int64,
    device: Any = None,
) -> Tensor:
    """`torch.randint([low=0,] high, size)`."""
    rest = list(given)
    size = rest.pop() if size is None else size
    high = rest.pop() if high is None else high
    low = (rest.pop() if rest else 0) if low is None else low
    if not 0 < high - low <= _MOST:
        raise FLError(
            f"torch.randint within a step takes a range of 1 to {_MOST} numbers, got {low} to {high}",
            code="unsupported",
        )
    return (draws.below(high - low, tuple(size)) + low).to(device or torch.get_default_device(), dtype)


def _into(tensor: Tensor, kind: Callable[[tuple[int, ...], torch.dtype], Tensor], name: str) -> Tensor:
    """`tensor`, filled with what `kind` draws for its shape and dtype."""
    if not tensor.is_floating_point():
        raise FLError(
            f"{name} of {tensor.dtype} cannot be trained by clients side by side: draw floating-point numbers",
            code="unsupported",
        )
    drawn = kind(tuple(tensor.shape), tensor.dtype)
    try:
        return tensor.copy_(drawn)
    except RuntimeError:  # under vmap a tensor shared by all clients cannot hold a number for each of them:
        tensor.fill_(math.nan)  # code that reads it, instead of the returned tensor, should notice
        return drawn


def _bernoulli_(draws: Draws, self: Tensor, p: float = 0.5, generator: None = None) -> Tensor:
    """`tensor.bernoulli_(p)`, which stochastic depth uses."""
    return _into(self, lambda shape, dtype: draws.keep(p, shape).to(dtype), "bernoulli_")


def _uniform_(draws: Draws, self: Tensor, low: float = 0.0, to: float = 1.0, generator: None = None) -> Tensor:
    """`tensor.uniform_(from, to)`."""
    return _into(self, lambda shape, dtype: low + (to - low) * _uniform(draws, shape, dtype), "uniform_")


def _normal_(draws: Draws, self: Tensor, mean: float = 0.0, std: float = 1.0, generator: None = None) -> Tensor:
    """`tensor.normal_(mean, std)`."""
    return _into(self, lambda shape, dtype: mean + std * _normal(draws, shape, dtype), "normal_")


_REPLACED = {
    F.dropout: _dropout(None),
    torch.dropout: lambda draws, input, p, train: _dropout(None)(draws, input, p, train),
    F.dropout1d: _dropout(1),
    F.dropout2d: _dropout(2),
    F.dropout3d: _dropout(3),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    torch.rand: _new(_uniform),
    torch.randn: _new(_normal),
    torch.randint: _randint,
    torch.rand_like: _like(_uniform),
    torch.randn_like: _like(_normal),
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
}
