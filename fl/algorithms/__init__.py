"""Federated methods, one file each, to be read next to its paper. To add one, add a file with a `METHOD`, or name a
`Method` as an entry point of the group `layer_surgery.algorithms` in a package of your own.
"""

import logging
from collections.abc import Container

from fl.algorithms.method import KINDS, Method
from fl.base.errors import FLError
from fl.base.plugins import declared, failed, installed, kind

_log = logging.getLogger("fl")


def _methods() -> dict[str, Method]:
    """The methods of this folder's files and of packages, in the order of `KINDS`."""
    found = declared("fl.algorithms", "METHOD", Method)
    for file, method in found.items():
        if method.name != file:
            raise FLError(f"{__name__}.{file}: METHOD has to be Method({file}, ...), with the function of that name")
    found |= _of_packages(found)
    return dict(sorted(found.items(), key=lambda item: (KINDS.index(item[1].clients), item[0])))


def _of_packages(taken: Container[str]) -> dict[str, Method]:
    """The methods that installed packages have. One that cannot be had is left out with a warning, so that a broken
    package stops nobody from using the others.
    """
    found = {}
    for name, point in installed("algorithms").items():
        try:
            method = point.load()
        except Exception as error:  # another package's code
            wrong = f"cannot be loaded: {failed(error)}"
        else:
            if isinstance(method, Method) and method.name == name and name not in taken:
                found[name] = method
                continue
            if isinstance(method, Method):
                wrong = (
                    "has the name of another method" if name in taken else f"is the method {method.name}: name it so"
                )
            else:
                wrong = f"is {kind(method)}, not a Method"
        _log.warning("warning: the method %s of an installed package (%s) is left out: it %s", name, point.value, wrong)
    return found


ALGORITHMS: dict[str, Method] = _methods()
"""From a method's name to its `Method`, which makes its algorithm from (federation, options). Users may add others."""

OPTIONS = {name: method.options for name, method in ALGORITHMS.items() if method.options is not None}
"""From a method's name to the defaults of its options."""


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
