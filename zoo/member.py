"""A named architecture: how to build it, and which fields of a spec it takes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from zoo.blueprint import Blueprint


class Member(NamedTuple):
    """One row of a family's table.

    Attributes:
        build: makes a model from a blueprint.
        depth: blocks of each section at full depth; None if the sections are not known.
        rated_parts: the parts that have a width rate: the sections, then layers with a rate of their own.
        defaults: the fields of `Spec` that this architecture takes besides width and depth, with their defaults; a
            function is given the size of the images.
        source: where it is described.
        initialised: whether `build` draws the initial weights; otherwise it is called on the meta device.
    """

    build: Callable[[Blueprint], nn.Module]
    depth: tuple[int, ...] | None
    rated_parts: tuple[str, ...]
    defaults: Mapping[str, Any]
    source: str
    initialised: bool = False

    @property
    def family(self) -> str:
        """The module that describes the family."""
        return getattr(self.build, "func", self.build).__module__


def stem_for(image_size: int) -> str:
    """The stem of members that choose it by the image: `cifar` up to 64x64, `imagenet` for larger ones.

    >>> stem_for(32), stem_for(224)
    ('cifar', 'imagenet')
    """
    return "cifar" if image_size <= 64 else "imagenet"


def section_names(count: int) -> tuple[str, ...]:
    """The names of the sections of a model.

    >>> section_names(2)
    ('section1', 'section2')
    """
    return tuple(f"section{i}" for i in range(1, count + 1))
