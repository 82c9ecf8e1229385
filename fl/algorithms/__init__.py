"""Federated methods, one file each, to be read next to its paper. To add one, add a file with a `METHOD`, or name a
`Method` as an entry point of the group `layer_surgery.algorithms` in a package of your own; `--algorithm module:METHOD`
takes one from any module.
"""

from typing import Any

from fl.algorithms.method import KINDS, Method
from fl.base.errors import FLError
from fl.base.plugins import declared, find, kind, load_entry_points


def _methods() -> dict[str, Method]:
    """Return the methods of this folder's files and of packages, in the order of `KINDS`."""
    found = declared("fl.algorithms", "METHOD", Method)
    for file, method in found.items():
        if method.name != file:
            raise FLError(f"{__name__}.{file}: METHOD has to be Method({file}, ...), with the function of that name")
    found |= load_entry_points("algorithms", found, _checked)
    return dict(sorted(found.items(), key=lambda item: (KINDS.index(item[1].clients), item[0])))


def _checked(found: Any, name: str = "") -> Method:
    """Return what a package or a module has if it is a method, of this name if one is given."""
    if not isinstance(found, Method):
        raise FLError(f"is {kind(found)}, not a Method")
    if name not in ("", found.name):
        raise FLError(f"is the method {found.name}: name it so")
    return found


ALGORITHMS: dict[str, Method] = _methods()
"""From a method's name to its `Method`, which makes its algorithm from (federation, options). Users may add others."""

OPTIONS = {name: method.options for name, method in ALGORITHMS.items() if method.options is not None}
"""From a method's name to the defaults of its options."""

_INSTALLED = frozenset(ALGORITHMS)

SOURCES: dict[str, str] = {}
"""From the name of a method that was given by its import path to this path, which run folders keep."""


def imported(path: str) -> Method:
    """Import a method by its import path, `module:METHOD`, without adding it to `ALGORITHMS`.

    Raises:
        FLError: for a path of no method, or of one with the name of another method.

    >>> imported("fl.algorithms.fedprox:METHOD").name
    'fedprox'
    """
    found = find("algorithms", path)
    try:
        method = _checked(found)
        known = ALGORITHMS.get(method.name, method)
        if any(getattr(known.make, name) != getattr(method.make, name) for name in ("__module__", "__qualname__")):
            raise FLError(f"has the name of another method, {method.name}: rename its function")
    except FLError as wrong:
        raise FLError(f"--algorithm {path} {wrong}") from None
    return method


def register(path: str, method: Method) -> None:
    """Add a method to those there are, with the import path that it was given by, unless it is installed."""
    if method.name in _INSTALLED:
        return
    ALGORITHMS[method.name], SOURCES[method.name] = method, path
    if method.options is not None:
        OPTIONS[method.name] = method.options


def plain_name(name: str) -> str:
    """Return the name of a method that is written as in papers.

    >>> plain_name("fedavg+")
    'fedavg_plus'
    """
    return f"{name[:-1]}_plus" if name.endswith("+") else name


def methods_of(kind: str) -> list[str]:
    """Name the methods whose clients are of a kind, see `Method.clients`.

    >>> methods_of("heterogeneous")[:4]
    ['depthfl', 'fedfa', 'fedrolex', 'fjord']
    """
    return [name for name, method in ALGORITHMS.items() if method.clients == kind]
