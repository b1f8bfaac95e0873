"""Training: the loops, and the stages they are made of. `lockstep.train(recipe)` calls this very package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.recipe import Recipe


class _Training(ModuleType):
    """Importing a module of this package binds `lockstep.train` to it, so that name can be nothing else; a call of it
    trains."""

    def __call__(self, recipe: str | Path | Recipe, **overrides: Any) -> Path:
        from lockstep.train.start import train

        return train(recipe, **overrides)


sys.modules[__name__].__class__ = _Training
