"""Recipes: named steps on checkpoints, in a YAML file."""

from surgery.recipe.reading import Recipe, read_recipe
from surgery.recipe.steps import OPERATIONS, planned

__all__ = ["OPERATIONS", "Recipe", "planned", "read_recipe"]
