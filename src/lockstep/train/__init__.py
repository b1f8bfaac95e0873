"""The training loops and the stages of a step. `lockstep.train(recipe)` calls this package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.recipe import Recipe


class _Training(ModuleType):
    """Makes this package callable. Importing a module of this package sets `lockstep.train` to the package, so
    `lockstep.train(recipe)` only works if the package itself can be called."""

    def __call__(self, recipe: str | Path | Recipe, **overrides: Any) -> Path:
        from lockstep.train.start import train

        return train(recipe, **overrides)


sys.modules[__name__].__class__ = _Training
