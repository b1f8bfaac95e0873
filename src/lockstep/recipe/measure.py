"""Metrics that a recipe names (`checkpoint.best`, early stopping), and what the schema says about a key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from lockstep.errors import Problem
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.schema import Recipe
from lockstep.recipe.section import Effect, Section

# What the schema says of a key, by its dotted name.


@dataclass(frozen=True)
class Facts:
    effect: Effect | None = None
    resumable: bool = False
    read_where: tuple[str, tuple[object, ...]] | None = None


@cache
def facts_of(key: str) -> Facts:
    """Of a key, or of the nearest group that says something. Numbers are indices of a list, no part of a key's name."""
    known = Facts()
    for field in _way(key):
        said: Any = field.json_schema_extra or {}
        # Nothing inside of a harmless group does harm: the columns of validation rows, say.
        harmless = known.effect is not None and known.effect.weight == "harmless"
        effect = known.effect if harmless else said.get("effect") or known.effect
        # What cannot change a curve cannot harm a run that resumes.
        resumable = said.get("resumable") or known.resumable or (effect is not None and effect.weight == "harmless")
        known = Facts(effect, resumable, said.get("read_where"))
    return known


def _way(key: str) -> Iterator[FieldInfo]:
    section: type[Section] | None = Recipe
    for name in (part for part in key.split(".") if not part.isdigit()):
        field = section.model_fields.get(name) if section is not None else None
        if field is None:
            return
        yield field
        section = _section(field.annotation)


def _section(annotation: Any) -> type[Section] | None:
    """The group of keys that a field holds: itself, or inside of `| None`, `list[...]` or `Annotated[...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section(inner)) is not None), None)


# Which metric says that one checkpoint is better than another: `checkpoint.best` and `run.stop_early.metric`.

DEFAULT = "val/loss"
# Short names, as the console's columns have them.
_SHORT = {"reward": "critic/score/mean"}
# Parts of a metric's name that say which end of it is the good one.
_LOW = ("loss", "nll", "perplexity", "kl", "ppo_kl", "grad_norm", "failed")
_HIGH = ("accuracy", "step_accuracy", "reward", "rewards", "score", "margin", "margins", "answered")
_VALIDATION = ("val/", "val-core/")


@dataclass(frozen=True)
class Measure:
    """A metric, and whether high values of it are the good ones."""

    name: str
    highest: bool

    @property
    def validated(self) -> bool:
        """Whether a validation gives it, and not every step."""
        return self.name.startswith(_VALIDATION)

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """None where it was not measured, or is no number: such a one is never the best."""
        found = metrics.get(self.name)
        return found if found is not None and math.isfinite(found) else None

    def rank(self, value: float) -> float:
        """The better the lower."""
        return -value if self.highest else value

    def __str__(self) -> str:
        return f"{self.name} {'max' if self.highest else 'min'}"


def measure_of(words: str) -> Measure:
    """`METRIC`, `METRIC max` or `METRIC min`; a metric whose good end is not known must say it (ValueError)."""
    name, *end = words.split()
    name = _SHORT.get(name, name)
    if end in (["max"], ["min"]):
        return Measure(name, end == ["max"])
    if end:
        raise ValueError(f"{' '.join(end)!r} is neither max nor min")
    parts = name.split("/")
    low = any(part in _LOW or part.endswith("_loss") for part in parts)
    high = any(part in _HIGH or part.startswith(("pass@", "maj@")) for part in parts)
    if low == high:
        raise ValueError(f"{name} does not say which end of it is good")
    return Measure(name, high)


def best_measure(recipe: Recipe) -> Measure:
    return measure_of(recipe.checkpoint.best or DEFAULT)


def measure_problems(recipe: Recipe) -> Iterator[Problem]:
    """Metrics that the run will not have, or that nobody could rank."""
    stop, settings = recipe.run.stop_early, recipe.checkpoint
    if settings.best is not None and settings.keep_best == 0 and "keep_best" in settings.model_fields_set:
        yield Problem("checkpoint.best", "checkpoint.keep_best=0 keeps no best checkpoint", "remove one of the two")
    if settings.best is not None:
        yield from _problems_of("checkpoint.best", settings.best, recipe)
    elif settings.keep_best:
        yield from _problems_of("checkpoint.keep_best", DEFAULT, recipe)
    if stop is not None:
        found = list(_problems_of("run.stop_early.metric", stop.metric, recipe))
        yield from found
        if not found and measure_of(stop.metric).validated and recipe.val.every is None:
            why = f"{stop.metric} would be measured at the end only"
            yield Problem("run.stop_early.metric", why, "set val.every")


def _problems_of(key: str, words: str, recipe: Recipe) -> Iterator[Problem]:
    if not words.split():
        yield Problem(key, "is empty", "name a metric: reward, val/accuracy, val/loss")
        return
    try:
        measure = measure_of(words)
    except ValueError as error:
        yield Problem(key, str(error), f"write `{words.split()[0]} max` or `{words.split()[0]} min`")
        return
    name, online = measure.name, recipe.method in ONLINE
    if name == "val/loss" and online:
        why = "val/loss is a loss on rows, which online runs lack"
        remedy = "name reward, or val/accuracy with val.questions"
        yield Problem(key, why, f"set checkpoint.best: {remedy}" if key == "checkpoint.keep_best" else remedy)
    elif name == "val/loss" and not recipe.data.val:
        yield Problem(key, "it is measured by val/loss, and data.val is empty", "set data.val")
    elif measure.validated and not (recipe.val.questions or recipe.data.val):
        yield Problem(key, f"nothing is validated that could give {name}", "set val.questions or data.val")
    elif not measure.validated and name.startswith("train/") == online:
        other = "reward, or critic/ and actor/ metrics" if online else "train/ and val/ metrics"
        yield Problem(key, f"a run of method {recipe.method} has no {name}", f"it has {other}")
