"""Training: the loops and their stages. `lockstep.train(recipe)` calls this package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.recipe import Recipe


class _Training(ModuleType):
    """A callable module: importing a module of this package binds `lockstep.train` to it, so the package itself must
    be the function that trains."""

    def __call__(self, recipe: str | Path | Recipe, **overrides: Any) -> Path:
        from lockstep.train.start import train

        return train(recipe, **overrides)


sys.modules[__name__].__class__ = _Training
