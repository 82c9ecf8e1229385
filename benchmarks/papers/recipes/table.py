"""Recipes from the cells of a paper's table."""

from collections.abc import Callable
from functools import partial

from fl.settings import Config

Recipe = Callable[[], Config]


def recipe(about: str, row: Callable[..., Config], *cells: str) -> Recipe:
    """A function that makes the settings of a row, whose docstring is `about`."""
    made = partial(row, *cells)
    made.__doc__ = about
    return made
