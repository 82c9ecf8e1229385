"""What the tensors and hyper-parameters of a block show about its interface, without running it."""

import ast
import inspect
import re
import textwrap
from typing import Any

from torch import nn

from surgery.states import owners

# May differ between blocks with one interface: depth schedules, positions, and the shift of shifted windows.
_HARMLESS = re.compile(r"drop|name|ind(ex|ices)|idx|_id$|depth|shift|^_|training|inplace|dynamic_mask|always_partition")


def signature(block: nn.Module) -> tuple:
    """Equal for blocks with one interface: names and shapes of tensors, classes and hyper-parameters."""
    parts = [
        (name, type(module).__name__, {k: v for k, v in vars(module).items() if _exact(v) and not _HARMLESS.search(k)})
        for name, module in block.named_modules()
        if not isinstance(module, nn.Identity) and "drop" not in type(module).__name__.lower()
    ]
    return shapes(block), parts


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a module's tensors by state name."""
    return {name: tuple(tensor.shape) for _, _, own in owners(module) for name, tensor in own.items()}


def matrices(block: nn.Module) -> int:
    """The number of tensors with two or more axes."""
    return sum(len(shape) > 1 for shape in shapes(block).values())


def _exact(value: Any) -> bool:
    """Whether a value is no fraction: fractions do not change a shape (and often follow a schedule over depth)."""
    return isinstance(value, int | str) or (isinstance(value, tuple) and all(map(_exact, value)))


def strided(block: nn.Module) -> bool:
    """Whether anything in the block has a stride; attention does not count: it may have fewer keys and all queries."""
    for name, module in block.named_modules():
        stride = getattr(module, "stride", 1)
        largest = max((s for s in (stride if isinstance(stride, tuple | list) else (stride,)) if _exact(s)), default=1)
        if isinstance(largest, int) and largest > 1 and "att" not in name:
            return True
    return False


def widths(block: nn.Module) -> tuple[int | None, int | None]:
    """The widths of the first layer's input and of the last layer's output, in the order of registration."""
    pairs = []
    for _, module, own in owners(block):
        tensor = next((t for n, t in own.items() if n.endswith("weight")), None)
        if tensor is None:
            tensor = max(own.values(), key=lambda t: t.ndim)
        if tensor.ndim == 1:
            pairs.append((len(tensor), len(tensor)))
        elif tensor.ndim >= 2:
            groups = getattr(module, "groups", len(tensor) if tensor.shape[1] == 1 else 1)
            sides = (tensor.shape[1] * (groups if isinstance(groups, int) else 1), tensor.shape[0])
            pairs.append(sides[::-1] if getattr(module, "transposed", False) else sides)
    pairs = [pair for pair in pairs if pair != (1, 1)] or [(None, None)]  # a gate over channels has no width
    return pairs[0][0], pairs[-1][1]


def returns_several(block: nn.Module) -> bool:
    """Whether a block's forward has a statement `return a, b`; False if its source cannot be read.

    >>> returns_several(nn.Linear(2, 2)), returns_several(nn.MultiheadAttention(4, 2))
    (False, True)
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(block).forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) for node in ast.walk(tree))
