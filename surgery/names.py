"""Dotted names of modules and tensors."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase


def joined(module: str, name: str) -> str:
    """Return the name of something that a module holds; the root module is "".

    >>> joined("layer1.0", "conv1"), joined("", "fc")
    ('layer1.0.conv1', 'fc')
    """
    return f"{module}.{name}" if module else name


def is_inside(name: str, module: str) -> bool:
    """Return whether a name belongs to a module or to anything inside it; everything is inside the root "".

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
