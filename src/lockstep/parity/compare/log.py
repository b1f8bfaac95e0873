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

    @property
    def planned(self) -> int | None:
        """The last step that the recipe asks for; None where it counts in epochs, or may end the run before."""
        run = self.recipe.get("run", {})
        return None if run.get("stop_early") else run.get("steps")

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

    planned: int | None = None
    """The last step of the run as it was planned; None: the log does not tell."""

    ambiguous: dict[str, str] = field(default_factory=dict)
    """Metrics with several values for one step that no resumed run explains, and in words which."""

    def is_mean(self, metric: str) -> bool | None:
        return None if self.means is None else metric in self.means
