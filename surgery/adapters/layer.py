"""A layer with an adapter of low rank beside it."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from surgery.errors import SurgeryError

CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d
MERGED = nn.Linear, NonDynamicallyQuantizableLinear, nn.Embedding, *CONVOLUTIONS
"""Classes that compute with their weight as it stands, so that a product can be added to it; others may transform it
first."""


class LowRank(nn.Module):
    """A frozen layer and its adapter: y = W x + b + scale B A dropout(x).

    See Hu et al., ICLR 2022, eq. 3.

    A and B are layers as peft has them, and are named alike. For linear layers (and transformers' Conv1D) they are
    linear; for a convolution A is one with the same kernel, stride and padding, and B one with a kernel of 1; for an
    embedding A has a column for each token.

    Args:
        base_layer: what is adapted.
        a: [rank, in], for convolutions [rank, in, *kernel].
        b: [out, rank], for convolutions [out, rank, 1, ...].
        scale: what the product is multiplied by.
        dropout: the share of the adapter's inputs that are dropped in training; an embedding's inputs are not.
        magnitude: with it the layer is DoRA's (Liu et al., ICML 2024, eq. 5), W' = magnitude (W + scale B A) / norms,
            as `norms` gives them; they are constants in the gradient (section 4.3). None: LoRA's.

    >>> layer = LowRank(nn.Linear(3, 2), torch.ones(1, 3), torch.ones(2, 1), scale=0.5).double()
    >>> x = torch.ones(1, 3, dtype=torch.float64)
    >>> (layer(x) - layer.base_layer(x)).round(decimals=6).tolist()
    [[1.5, 1.5]]
    """

    def __init__(
        self,
        base_layer: nn.Module,
        a: Tensor,
        b: Tensor,
        scale: float = 1.0,
        dropout: float = 0.0,
        magnitude: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.lora_magnitude_vector = None if magnitude is None else nn.Parameter(magnitude)
        self.base_layer: Any = base_layer
        self.lora_A: Any
        self.lora_B: Any
        self.multiplier = scale  # not called scale: narrow would take it for one that follows a width
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        if isinstance(base_layer, nn.Embedding):
            self.lora_embedding_A, self.lora_embedding_B = nn.Parameter(a), nn.Parameter(b)
        elif isinstance(base_layer, _ConvNd):
            kind = type(base_layer) if type(base_layer) in CONVOLUTIONS else CONVOLUTIONS[a.ndim - 3]
            self.lora_A = _holding(
                kind, a, kernel_size=a.shape[2:], stride=base_layer.stride, padding=base_layer.padding,
                dilation=base_layer.dilation, padding_mode=base_layer.padding_mode,
            )  # fmt: skip
            self.lora_B = _holding(kind, b, kernel_size=b.shape[2:])
        else:
            self.lora_A, self.lora_B = _holding(nn.Linear, a), _holding(nn.Linear, b)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B."""
        if isinstance(self.base_layer, nn.Embedding):
            return self._parameters["lora_embedding_A"], self._parameters["lora_embedding_B"]
        return self.lora_A.weight, self.lora_B.weight

    @property
    def rank(self) -> int:
        """The number of rows of A, and of columns of B."""
        return len(self.factors[0])

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self.base_layer(x, *args, **kwargs)
        if isinstance(self.base_layer, nn.Embedding):
            rows = F.embedding(x, self.lora_embedding_A.T, self.base_layer.padding_idx)
            added = F.linear(rows, self.lora_embedding_B)
        else:
            added = self.lora_B(self.lora_A(self.lora_dropout(x.to(self.lora_A.weight.dtype))))
        added = (self.multiplier * added).to(result.dtype)
        if self.lora_magnitude_vector is None:
            return result + added
        weight = self.base_layer.weight
        share = self.lora_magnitude_vector / norms((weight + self.change()).detach(), is_transposed(self.base_layer))
        shape = [-1, *(1 for _ in weight.shape[2:])]
        bias = 0 if self.base_layer.bias is None else self.base_layer.bias.view(shape).to(result.dtype)
        return share.view(shape).to(result.dtype) * (result - bias + added) + bias

    def change(self) -> Tensor:
        """Return the adapter's change of the layer's weight, in its shape: scale B A."""
        a, b = self.factors
        change = product(a, b, self.multiplier)
        return change.T if is_transposed(self.base_layer) else change.view(self.base_layer.weight.shape)

    @property
    def weight(self) -> Tensor:
        """The weight of an equal plain layer, for code that does not call this layer.

        Raises SurgeryError for a class that transforms its weight before it computes with it.
        """
        layer = self.base_layer
        check_plain(layer, "leave it without an adapter, or do not merge")
        return add_change(layer.weight, self.change(), self.lora_magnitude_vector, is_transposed(layer))

    @property
    def bias(self) -> Tensor | None:
        """The adapted layer's bias."""
        return self.base_layer.bias

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("base_layer", "weight") or name.startswith("__"):
                raise  # __deepcopy__ of a parametrized layer would copy that layer alone
            return getattr(self.base_layer, name)  # the layer's in_features, kernel_size, ...

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.multiplier:g}" + ", dora" * (self.lora_magnitude_vector is not None)


def check_plain(layer: nn.Module, way: str) -> None:
    """Raise SurgeryError for a class that transforms its weight before it uses it."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    if hooked or (type(layer) not in MERGED and not is_conv1d(layer)):
        raise SurgeryError(
            f"a {type(layer).__name__}{' with hooks' * bool(hooked)} may not compute with its weight alone: {way}",
            code="unsupported",
        )


def product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale B A, as a matrix with a row for each output."""
    return scale * (b.flatten(1) @ a.flatten(1))


def add_change(weight: Tensor, change: Tensor, magnitude: Tensor | None = None, transposed: bool = False) -> Tensor:
    """Return their sum, in the weight's dtype; of DoRA with these norms."""
    total = weight.to(torch.promote_types(weight.dtype, change.dtype)) + change
    return (total if magnitude is None else scale_weight(total, magnitude, transposed)).to(weight.dtype)


def norms(weight: Tensor, transposed: bool) -> Tensor:
    """Return the norm of each output's weights, [out] or [1, out, 1, ...] as in peft."""
    norm = torch.linalg.vector_norm(weight.T if transposed else weight.flatten(1), dim=1)
    return norm.view(1, -1, *(1 for _ in weight.shape[2:])) if weight.ndim > 2 else norm


def scale_weight(weight: Tensor, magnitude: Tensor, transposed: bool) -> Tensor:
    """Return the weight with other norms.

    The old norms are constants in the gradient. A negative norm turns the weight around.
    """
    share = magnitude / norms(weight.detach(), transposed)
    return weight * (share if transposed else share.view(-1, *(1 for _ in weight.shape[1:])))


def _holding(kind: type[nn.Module], weight: Tensor, **settings: Any) -> nn.Module:
    """Return a layer without a bias that has this weight."""
    layer = kind(weight.shape[1], weight.shape[0], bias=False, device="meta", **settings)
    layer.weight = nn.Parameter(weight)
    return layer


def is_conv1d(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D, whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_packed(module: Any) -> bool:
    """Return whether a linear layer unpacks its weight as it computes (bitsandbytes).

    >>> layer = nn.Linear(4, 2)
    >>> layer.weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    >>> is_packed(layer)
    True
    """
    if not isinstance(module, nn.Linear) or "weight" not in module._parameters:
        return False  # a weight that is computed from others (parametrizations) is whole
    return not module.weight.is_floating_point() or module.weight.shape != (module.out_features, module.in_features)


def is_transposed(module: nn.Module) -> bool:
    """Return whether its weight has the axis of inputs first."""
    return is_conv1d(module) or isinstance(module, nn.Embedding)


def why_not(module: nn.Module) -> str | None:
    """Return why a module cannot have an adapter, or None if it can."""
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "it changes its weight whenever it is read (max_norm)"
    if is_packed(module) and not type(module).__module__.startswith("bitsandbytes."):
        weight: Any = module.weight
        return f"its weight is packed ({weight.dtype} {list(weight.shape)}): convert it to floating point"
    if is_conv1d(module) or isinstance(module, nn.Linear | nn.Embedding):
        return None
    if not isinstance(module, CONVOLUTIONS):
        return f"a {type(module).__name__} is no linear layer, convolution or embedding"
    if module.groups != 1:
        return f"its channels are in {module.groups} groups, and a product of two matrices joins all channels"
    return None


def shapes(module: Any, rank: int) -> tuple[torch.Size, torch.Size]:
    """Return the shapes of A and B beside a layer."""
    packed = is_packed(module)
    out, into, *kernel = (module.out_features, module.in_features) if packed else module.weight.shape
    if is_transposed(module):
        out, into = into, out
    return torch.Size([rank, into, *kernel]), torch.Size([out, rank, *(1 for _ in kernel)])


def initial(module: Any, rank: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Initialise A at random and B to zero as peft does; an embedding's A is zero.

    Nothing changes at first.
    """
    weight = module.weight
    dtype = torch.float32 if is_packed(module) else weight.dtype
    a, b = (torch.zeros(shape, dtype=dtype, device=weight.device) for shape in shapes(module, rank))
    if isinstance(module, nn.Embedding):
        return a, b.normal_(generator=generator)
    return nn.init.kaiming_uniform_(a, math.sqrt(5), generator=generator), b


def initial_magnitude(name: str, module: Any) -> Tensor:
    """Return DoRA's magnitude beside a layer, with which nothing changes at first.

    Raises SurgeryError where there is none.
    """
    if isinstance(module, nn.Embedding):
        raise SurgeryError(
            f"{name!r} is an embedding, which gets no DoRA: leave it out of modules, or take kind='lora'",
            code="unsupported",
        )
    check_plain(module, "leave it out of modules, or take kind='lora'")
    magnitude = norms(module.weight.detach(), is_transposed(module))
    if not magnitude.is_meta and not magnitude.all():
        raise SurgeryError(f"an output of {name!r} has no direction for DoRA: take kind='lora'", code="values")
    return magnitude
