"""Recipes from the cells of a paper's table."""

from collections.abc import Callable
from functools import partial

from fl.settings import Experiment

Recipe = Callable[[], Experiment]


def recipe(about: str, row: Callable[..., Experiment], *cells: str) -> Recipe:
    """Return a function that makes the settings of a row, with `about` as its docstring."""
    make = partial(row, *cells)
    make.__doc__ = about
    return make
