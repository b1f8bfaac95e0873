"""The recipe: one schema, a YAML file and dotted overrides. Use `load_recipe`. Every folder may import this one."""

from lockstep.recipe.keys_data import Source
from lockstep.recipe.loader import load_recipe, recipe_text
from lockstep.recipe.schema import Recipe

__all__ = ["Recipe", "Source", "load_recipe", "recipe_text"]
