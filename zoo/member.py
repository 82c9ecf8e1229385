"""A named architecture: how it is built and what may be said about it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from zoo.blueprint import Blueprint


class Member(NamedTuple):
    """One row of a family's table.

    Attributes:
        build: makes the model of a blueprint.
        depth: blocks of each section at full depth; None if the sections are not known.
        widths: what the width rates belong to: the sections' names, then those of layers with a rate of their own.
        defaults: the fields of `Spec` that this architecture takes, with their defaults.
        source: where it is described.
        initialised: whether `build` draws the initial weights; else it is called on the meta device.
    """

    build: Callable[[Blueprint], nn.Module]
    depth: tuple[int, ...] | None
    widths: tuple[str, ...]
    defaults: Mapping[str, Any]
    source: str
    initialised: bool = False


def section_names(count: int) -> tuple[str, ...]:
    """
    >>> section_names(2)
    ('section1', 'section2')
    """
    return tuple(f"section{i}" for i in range(1, count + 1))
