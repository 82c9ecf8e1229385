"""Recipes: named steps on checkpoints, in a YAML file."""

from surgery.recipe.reading import Input, Recipe, read_recipe
from surgery.recipe.steps import planned

__all__ = ["Input", "Recipe", "planned", "read_recipe"]
