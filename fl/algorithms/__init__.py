"""Federated methods, one file each, to be read next to its paper. To add one, add a file with a `METHOD`."""

from typing import Any

from fl.algorithms.method import KINDS, Method
from fl.base.declared import declared
from fl.base.errors import FLError


def _methods() -> dict[str, Method]:
    """The methods of this folder's files, by what clients have: one model for all, models of their own, mixed ones."""
    found = declared("fl.algorithms", "METHOD", Method)
    for file, method in found.items():
        if method.name != file:
            raise FLError(f"{__name__}.{file}: METHOD has to be Method({file}, ...), with the function of that name")
    return dict(sorted(found.items(), key=lambda item: (KINDS.index(item[1].clients), item[0])))


ALGORITHMS: dict[str, Any] = _methods()
"""From a method's name to its `Method`, which makes its algorithm from (federation, options). Users may add others."""

MIXED = [name for name, method in ALGORITHMS.items() if method.clients == "mixed"]
"""The methods whose clients may have different architectures. Users append the name of a plain function here."""

OPTIONS = {name: method.options for name, method in ALGORITHMS.items() if method.options is not None}
"""From a method's name to the defaults of its options."""


def is_mixed(name: str) -> bool:
    """Whether the clients of a method may have different architectures."""
    return name in MIXED or getattr(ALGORITHMS[name], "clients", "one") == "mixed"


def kind_of(name: str) -> str:
    """What the clients of a method have: "one" model for all, models of their "own", or "mixed" architectures."""
    return "mixed" if is_mixed(name) else getattr(ALGORITHMS[name], "clients", "one")


# `from fl.algorithms import fedmr, FedMROptions`: the functions that make methods, and their options.
globals().update({name: method.make for name, method in ALGORITHMS.items()})
globals().update({type(options).__name__: type(options) for options in OPTIONS.values()})
