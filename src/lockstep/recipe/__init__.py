"""The recipe: its schema, and the code that loads it from a YAML file and dotted overrides (`model.path=FOLDER`). Use
`load_recipe`. All other packages of lockstep may import this package."""

from lockstep.recipe.keys_data import Source
from lockstep.recipe.loader import load_recipe, recipe_text
from lockstep.recipe.schema import Recipe

__all__ = ["Recipe", "Source", "load_recipe", "recipe_text"]
