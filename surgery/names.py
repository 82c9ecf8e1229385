"""Dotted names of modules and tensors."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def join(module: str, name: str) -> str:
    """Return the name of something that a module holds; the root module is "".

    >>> join("layer1.0", "conv1"), join("", "fc")
    ('layer1.0.conv1', 'fc')
    """
    return f"{module}.{name}" if module else name


def named_modules(model: "nn.Module", tied: bool = False) -> list[tuple[str, "nn.Module"]]:
    """Return what `model.named_modules()` yields, at a third of its cost.

    Args:
        tied: whether a module that is registered several times appears under each of its names.

    >>> from torch import nn
    >>> relu = nn.ReLU()
    >>> net = nn.Sequential(relu, nn.Sequential(relu))
    >>> [name for name, _ in named_modules(net)], [name for name, _ in named_modules(net, tied=True)]
    (['', '0', '1'], ['', '0', '1', '1.0'])
    """
    modules: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    left = [("", model)]
    while left:
        name, module = left.pop()
        if not tied:
            if id(module) in seen:
                continue
            seen.add(id(module))
        modules.append((name, module))
        if children := module._modules:
            prefix = f"{name}." if name else ""
            left += [(prefix + key, child) for key, child in children.items() if child is not None][::-1]
    return modules


def is_inside(name: str, module: str) -> bool:
    """Return whether a name is a module's or inside it; all is inside the root "".

    >>> is_inside("layer1.0.conv1", "layer1"), is_inside("layer1", "layer1"), is_inside("layer10", "layer1")
    (True, True, False)
    """
    return not module or name == module or name.startswith(f"{module}.")


def outwards(name: str) -> list[str]:
    """Return the names of a module and of the modules around it, the root last.

    >>> outwards("layer1.0"), outwards("")
    (['layer1.0', 'layer1', ''], [''])
    """
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def matches(module: str, pattern: str) -> bool:
    """Return whether a pattern matches the name of a module or of one around it.

    >>> matches("layer1.0.conv1", "layer1"), matches("layer1.0.conv1", "*.conv1"), matches("layer10", "layer1")
    (True, True, False)
    """
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def hint(pattern: str, names: Sequence[str]) -> str:
    """Return what to give in place of a pattern that matches none of some modules.

    >>> hint("head", ["lm", "lm.head", "lm.body"]), hint("lm.boby", ["lm", "lm.body"]), hint("x", ["lm"])
    ("did you mean 'lm.head'?", "did you mean 'lm.body'?", 'see model.named_modules()')
    """
    ends = [name for name in names if name.endswith(f".{pattern}")]
    near = ends[:3] or get_close_matches(pattern, names, n=3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else "see model.named_modules()"
