"""The recipe: one schema, a YAML file and dotted overrides; `load_recipe` reads it. Any folder may import it."""

from lockstep.recipe.keys_data import Source
from lockstep.recipe.loader import load_recipe, recipe_text
from lockstep.recipe.schema import Recipe

__all__ = ["Recipe", "Source", "load_recipe", "recipe_text"]
