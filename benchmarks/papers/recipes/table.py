"""Recipes from the cells of a paper's table."""

from collections.abc import Callable
from functools import partial

from fl.settings import Experiment

Recipe = Callable[[], Experiment]


def recipe(about: str, row: Callable[..., Experiment], *cells: str) -> Recipe:
    """A function that makes the settings of a row, whose docstring is `about`."""
    made = partial(row, *cells)
    made.__doc__ = about
    return made
