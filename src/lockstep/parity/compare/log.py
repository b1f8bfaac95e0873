"""What one side of a comparison left behind, whoever wrote it: curves by name and, of our own runs, all the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Series:
    """A metric over the steps that logged it: steps go up, none is twice there. Values may be NaN or infinite."""

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Evidence:
    """What only a run folder of ours holds."""

    recipe: dict[str, Any]
    env: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)
    """The first lines of samples.jsonl."""
    earlier: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Recipes that the run began with, by the last step that each trained; `recipe` is the one that came after."""

    def recipe_at(self, step: int) -> dict[str, Any]:
        """The recipe that trained this step."""
        return next((self.earlier[last] for last in sorted(self.earlier) if step <= last), self.recipe)


@dataclass(frozen=True)
class Log:
    """`metrics` are under our names; `written` says how the log itself calls them."""

    source: str
    kind: str
    metrics: dict[str, Series]
    written: dict[str, str]
    evidence: Evidence | None = None
    means: frozenset[str] | None = None
    """Metrics whose values are means over the steps since the one logged before; None: nobody tells."""

    def is_mean(self, metric: str) -> bool | None:
        return None if self.means is None else metric in self.means
