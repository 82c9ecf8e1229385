"""The algebra of axes in one file: make any network narrower without knowing its class.

    python speedruns/axes.py    # halves a ResNet and a ViT, in a few seconds of one core

To halve the width of a network you need to know which positions of which tensors belong together: a convolution's
outputs, the norm after it, and everything added to it. One forward pass on the meta device shows this. An axis is a
product of digits: `view(B, N, 3, heads, dim)` makes three digits of one axis. Each operation shows which axes are the
same. Some digits are fixed by the input, the output or an unknown operation; the others are the network's widths.

This file has rules for the operations of a ResNet and a ViT. The library has some 350, and also follows sums of axes.
"""

import copy
import math
import textwrap

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Digit:
    """A factor of an axis. Tracing may show that it is a product of digits (`parts`), or the `same` as another digit.

    `fixed` is the reason why all of its positions have to stay, or "".
    """

    def __init__(self, size: int, fixed: str = "") -> None:
        self.size, self.fixed, self.same, self.parts = size, fixed, None, []


Axis = list[Digit]  # a product whose last digit runs fastest; an axis of size 1 has none


def axis(size: int, fixed: str = "") -> Axis:
    """Make an axis about which nothing is known yet."""
    return [Digit(size, fixed)] if size != 1 else []


def digits(product: Axis) -> Axis:
    """Return the digits of an axis, as far as they are known."""
    result = []
    for digit in product:
        while digit.same:
            digit = digit.same
        result += digits(digit.parts) if digit.parts else [digit]
    return result


def fix(product: Axis, why: str) -> None:
    """Keep all positions of this axis."""
    for digit in digits(product):
        digit.fixed = digit.fixed or why


def split(digit: Digit, last: int) -> Axis:
    """Split a digit into two; the last one has this size."""
    digit.parts = [Digit(digit.size // last, digit.fixed), Digit(last, digit.fixed)]
    return digit.parts


def unify(a: Axis, b: Axis) -> None:
    """Make two axes one: split their digits until they agree."""
    a, b = digits(a), digits(b)
    while a and b:
        x, y = a.pop(), b.pop()
        if x is y:
            continue
        if x.size == y.size:
            x.same, y.fixed = y, y.fixed or x.fixed
        elif x.size % y.size == 0:
            a, b = a + split(x, y.size), [*b, y]
        elif y.size % x.size == 0:
            a, b = [*a, x], b + split(y, x.size)
        else:
            fix([*a, *b, x, y], "its digits do not fit together")
            return


class Trace(TorchDispatchMode):
    """Follow the axes of all tensors through the operations of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.axes: dict[int, tuple[Tensor, list[Axis]]] = {}  # the tensor is kept, so that no other gets its id

    def of(self, tensor: Tensor) -> list[Axis]:
        """Return the axes of a tensor. They are new if no operation made the tensor, as with a constant."""
        if id(tensor) not in self.axes:
            self.axes[id(tensor)] = tensor, [axis(size) for size in tensor.shape]
        return self.axes[id(tensor)][1]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        results = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)]
        rule = OPERATIONS.get(function.overloadpacket.__name__, unknown)
        for result, axes in zip(results, rule(self, args, results)):
            self.axes[id(result)] = result, axes
        return out


def unknown(trace: Trace, args: tuple, results: list[Tensor]) -> list[list[Axis]]:
    """Fix all axes of an operation without a rule."""
    for tensor in tree_leaves(args):
        for product in trace.of(tensor) if isinstance(tensor, Tensor) else ():
            fix(product, "unknown operation")
    return [[axis(size, "unknown operation") for size in result.shape] for result in results]


def convolution(trace, args, results):
    """Follow [N, C, H, W] with weights [O, C / groups, h, w] to [N, O, H', W']."""
    x, weight, bias, groups = trace.of(args[0]), trace.of(args[1]), args[2], args[8]
    for product in [*weight[2:], *([x[1], weight[0], weight[1]] if groups > 1 else [])]:
        fix(product, "windows and groups")
    if groups == 1:
        unify(x[1], weight[1])
    unify(trace.of(bias)[0], weight[0]) if bias is not None else None
    return [[x[0], weight[0], *(axis(size, "pixels") for size in results[0].shape[2:])]]


def matrix_product(trace, args, results):
    """Follow `mm` and `bmm`, [..., n, k] times [..., k, m], to [..., n, m]; `addmm` has a bias [m] before them."""
    *bias, a, b = (trace.of(arg) for arg in args)
    for left, right in [(a[-1], b[-2]), *zip(a[:-2], b[:-2]), *((axes[-1], b[-1]) for axes in bias)]:
        unify(left, right)
    return [[*a[:-1], b[-1]]]


def elementwise(trace, args, results):
    """Make the operands' axes the same, except those that are broadcast."""
    axes: list[Axis] = [[] for _ in results[0].shape]
    for operand in (arg for arg in args if isinstance(arg, Tensor)):
        for place, product in enumerate(reversed(trace.of(operand)), 1):
            if digits(product):
                unify(product, axes[-place])
                axes[-place] = axes[-place] or product
    return [axes, *([axis(size) for size in result.shape] for result in results[1:])]


def norm(trace, args, results):
    """Unify the vectors of a batch norm with the channels, and those of a layer norm with the last axis."""
    x = trace.of(args[0])
    along = x[-1] if isinstance(args[1], list | tuple) else x[1]
    for tensor in (arg for arg in args[1:5] if isinstance(arg, Tensor)):
        unify(trace.of(tensor)[0], along)
    return [x, *([axis(size) for size in result.shape] for result in results[1:])]


def view(trace, args, results):
    """Group the digits of all axes, in their order, into axes of the new sizes."""
    row, axes = [digit for product in trace.of(args[0]) for digit in digits(product)], []
    for size in reversed(results[0].shape):
        taken: Axis = []
        while (left := size // math.prod(digit.size for digit in taken)) > 1:
            digit = row.pop()
            if digit.size > left and digit.size % left == 0:
                before, digit = split(digit, left)
                row.append(before)
            elif left % digit.size:
                raise NotImplementedError(f"a view as {tuple(results[0].shape)} that cuts through a digit")
            taken.insert(0, digit)
        axes.insert(0, taken)
    return [axes]


def permute(trace, args, results):
    """Reorder the axes."""
    x = trace.of(args[0])
    return [[x[place] for place in args[1]]]


def transpose(trace, args, results):
    """Swap two axes; `t` swaps both of a matrix."""
    x = list(trace.of(args[0]))
    i, j = args[1:] or (0, 1)
    x[i], x[j] = x[j], x[i]
    return [x]


def pick(trace, args, results):
    """Fix the axis along which `select`, `unbind` or `slice` picks positions."""
    x, place, result = list(trace.of(args[0])), args[1] if len(args) > 1 else 0, results[0]
    fix(x[place], "positions are picked")
    x[place : place + 1] = [axis(result.shape[place], "positions are picked")] * (result.ndim == len(x))
    return [x for _ in results]


def concatenate(trace, args, results):
    """Fix the axis along which `cat` joins tensors, and unify the others."""
    along, axes = args[1] % results[0].ndim if len(args) > 1 else 0, list(trace.of(args[0][0]))
    for x in map(trace.of, args[0]):
        fix(x[along], "it is concatenated")
        for place, product in enumerate(x):
            unify(product, axes[place]) if place != along else None
    axes[along] = axis(results[0].shape[along], "it is a concatenation")
    return [axes]


def resize(trace, args, results):
    """Replace the axes whose size changes by pooling, a mean over pixels or broadcasting."""
    x, result = trace.of(args[0]), results[0]
    if result.ndim < len(x):
        x = [product for place, product in enumerate(x) if place not in args[1] and place - len(x) not in args[1]]
    same = [math.prod(digit.size for digit in digits(product)) == size for product, size in zip(x, result.shape)]
    return [[a if stays else axis(size, "pixels") for a, stays, size in zip(x, same, result.shape)] for _ in results]


RULES = {
    convolution: "convolution",
    matrix_product: "mm bmm addmm",
    elementwise: "add add_ mul div relu relu_ gelu _softmax clone detach _to_copy",
    norm: "native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm native_layer_norm",
    view: "view _unsafe_view",
    permute: "permute",
    transpose: "transpose t",
    pick: "select unbind slice",
    concatenate: "cat",
    resize: "mean max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d expand",
}
OPERATIONS = {name: rule for rule, names in RULES.items() for name in names.split()}


# Cutting -----------------------------------------------------------------------------------------------------------

ATTRIBUTES = {  # of a module, which say how large its tensors are: name -> tensor, axis, first digit (None: all)
    "in_features": ("weight", 1, None), "out_features": ("weight", 0, None), "in_channels": ("weight", 1, None),
    "out_channels": ("weight", 0, None), "num_features": ("weight", 0, None), "normalized_shape": ("weight", 0, None),
    "head_dim": ("qkv.weight", 0, -1), "attn_dim": ("proj.weight", 1, None),
}  # fmt: skip


def solve(model: nn.Module, image: Tensor) -> dict[str, list[Axis]]:
    """Return the axes of every parameter and buffer of a model, from one forward pass on a copy."""
    ghost = copy.deepcopy(model).to("meta").eval()
    named = dict([*ghost.named_parameters(), *ghost.named_buffers()])
    trace, image = Trace(), image.to("meta")
    for product in trace.of(image):
        fix(product, "the input")
    with torch.no_grad(), trace:
        out = ghost(image)
    for product in trace.of(out):
        fix(product, "the output")
    solved = {name: [digits(product) for product in trace.of(tensor)] for name, tensor in named.items()}
    for axes in solved.values():  # an axis of heads times dimension shrinks by its dimension only
        for product in axes:
            fix([digit for digit in product if not digit.fixed][:-1], "heads")
    return solved


def positions(product: Axis, rate: float) -> Tensor:
    """Return the positions of an axis that stay, the first ones of each width."""
    result = torch.zeros(1, dtype=torch.int64)
    for digit in product:
        stay = digit.size if digit.fixed else math.ceil(digit.size * rate)
        result = (result[:, None] * digit.size + torch.arange(stay)).flatten()
    return result


def narrow(model: nn.Module, rate: float, image: Tensor) -> nn.Module:
    """Return a copy of a model that keeps this share of each width's positions."""
    solved, small = solve(model, image), copy.deepcopy(model)
    for path, module in small.named_modules():
        for attribute, (tensor, place, first) in ATTRIBUTES.items():
            axes = solved.get(f"{path}.{tensor}".lstrip("."))
            if axes and hasattr(module, attribute):
                number = len(positions(axes[place][first:], rate))
                setattr(module, attribute, (number,) if attribute == "normalized_shape" else number)
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            cut = tensor.detach()
            for place, product in enumerate(solved[f"{path}.{name}".lstrip(".")]):
                cut = cut.index_select(place, positions(product, rate))
            setattr(module, name, nn.Parameter(cut) if isinstance(tensor, nn.Parameter) else cut)
    return small


def widths(model: nn.Module, image: Tensor) -> list[str]:
    """Describe each width of a model by its size and the tensors' axes that it runs along."""
    members: dict[Digit, list[str]] = {}
    for name, axes in solve(model, image).items():
        for place, digit in ((place, digit) for place, product in enumerate(axes) for digit in product):
            members.setdefault(digit, []).append(f"{name}[{place}]")
    return [f"{d.size:4} {textwrap.shorten(' '.join(at), 100)}" for d, at in members.items() if not d.fixed]


def main() -> None:
    """Halve a ResNet and a Vision Transformer."""
    import timm
    import torchvision

    image = torch.zeros(1, 3, 224, 224)
    for model in (torchvision.models.resnet18(), timm.create_model("vit_tiny_patch16_224", depth=2)):
        print(f"\n{type(model).__name__}: {sum(p.numel() for p in model.parameters()):,} parameters, and its widths")
        print("\n".join(widths(model, image)))
        small = narrow(model, 0.5, image)
        print(f"half as wide: {sum(p.numel() for p in small.parameters()):,}; logits {tuple(small(image).shape)}")


if __name__ == "__main__":
    main()
