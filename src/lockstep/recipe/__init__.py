"""The recipe schema, and `load_recipe`, which reads a YAML file and overrides. All packages may import this package."""

from lockstep.recipe.keys_data import Source
from lockstep.recipe.loader import load_recipe, recipe_text
from lockstep.recipe.schema import Recipe

__all__ = ["Recipe", "Source", "load_recipe", "recipe_text"]
