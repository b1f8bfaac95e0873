"""The metrics named in a recipe (`checkpoint.best`, early stopping), and the declared properties of a key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from lockstep.errors import Problem, conflict, needs
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.schema import Recipe
from lockstep.recipe.section import Effect, Section


@dataclass(frozen=True)
class Facts:
    effect: Effect | None = None
    resumable: bool = False
    read_where: tuple[str, tuple[object, ...]] | None = None


@cache
def facts_of(key: str) -> Facts:
    """Returns the declared properties of a dotted key; a key inherits properties from its groups. List indices in the
    key are skipped."""
    facts = Facts()
    for field in _fields_along(key):
        declared: Any = field.json_schema_extra or {}
        # Every key of a group with a harmless effect is harmless, for example the columns of validation rows.
        harmless = facts.effect is not None and facts.effect.weight == "harmless"
        effect = facts.effect if harmless else declared.get("effect") or facts.effect
        # A user may change a key on resume if the key cannot change the metrics.
        resumable = declared.get("resumable") or facts.resumable or (effect is not None and effect.weight == "harmless")
        facts = Facts(effect, resumable, declared.get("read_where"))
    return facts


def is_default(key: str, value: Any) -> bool:
    """Returns whether a value is the default of a dotted key."""
    fields = list(_fields_along(key))
    return bool(fields) and bool(fields[-1].get_default(call_default_factory=True, validated_data={}) == value)


def _fields_along(key: str) -> Iterator[FieldInfo]:
    section: type[Section] | None = Recipe
    for name in (part for part in key.split(".") if not part.isdigit()):
        field = section.model_fields.get(name) if section is not None else None
        if field is None:
            return
        yield field
        section = _section(field.annotation)


def _section(annotation: Any) -> type[Section] | None:
    """Returns the section class in an annotation, also inside `| None`, `list[...]` or `Annotated[...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section(inner)) is not None), None)


DEFAULT = "val/loss"
# Short names of metrics, as in the columns of the console.
_SHORT = {"reward": "critic/score/mean"}
# Substrings of a metric name that imply whether lower or higher is better.
_LOW = ("loss", "nll", "perplexity", "kl", "ppo_kl", "grad_norm", "failed")
_HIGH = ("accuracy", "step_accuracy", "reward", "rewards", "score", "margin", "margins", "answered")
_VALIDATION = ("val/", "val-core/")


@dataclass(frozen=True)
class Measure:
    """A metric, and whether higher is better."""

    name: str
    highest: bool

    @property
    def validated(self) -> bool:
        """Whether the metric is measured at validations instead of at every step."""
        return self.name.startswith(_VALIDATION)

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Returns the measured value, or None if it is missing or not finite, so that such a value is never the
        best."""
        value = metrics.get(self.name)
        return value if value is not None and math.isfinite(value) else None

    def rank(self, value: float) -> float:
        """Returns a sort key for a value of the metric: the best value has the lowest key."""
        return -value if self.highest else value

    def __str__(self) -> str:
        return f"{self.name} {'max' if self.highest else 'min'}"


def measure_of(words: str) -> Measure:
    """Parses `METRIC`, `METRIC max` or `METRIC min`. Raises ValueError if neither `max`/`min` nor the name gives the
    direction."""
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
        raise ValueError(f"the name {name} does not imply whether higher or lower is better")
    return Measure(name, high)


def best_measure(recipe: Recipe) -> Measure:
    return measure_of(recipe.checkpoint.best or DEFAULT)


def measure_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields a problem for each metric in the recipe that the run will not have, or whose direction is undefined."""
    stop, settings = recipe.run.early_stopping, recipe.checkpoint
    if settings.best is not None and settings.keep_best == 0 and "keep_best" in settings.model_fields_set:
        yield conflict(
            "checkpoint.best",
            "checkpoint.keep_best=0 keeps no best checkpoint",
            "remove checkpoint.best or checkpoint.keep_best",
        )
    if settings.best is not None:
        yield from _problems_of("checkpoint.best", settings.best, recipe)
    elif settings.keep_best:
        yield from _problems_of("checkpoint.keep_best", DEFAULT, recipe)
    if stop is not None:
        problems = list(_problems_of("run.early_stopping.metric", stop.metric, recipe))
        yield from problems
        if not problems and measure_of(stop.metric).validated and recipe.val.every is None:
            why = f"{stop.metric} is measured only at the end"
            yield needs("run.early_stopping.metric", why, "set val.every")


def _problems_of(key: str, words: str, recipe: Recipe) -> Iterator[Problem]:
    if not words.split():
        yield Problem(key, "is empty", "give a metric: reward, val/accuracy, val/loss", code="empty-value")
        return
    try:
        measure = measure_of(words)
    except ValueError as error:
        yield Problem(
            key,
            str(error),
            f"write `{words.split()[0]} max` if higher is better, or `{words.split()[0]} min` if lower is better",
            code="invalid-value",
        )
        return
    name, online = measure.name, recipe.method in ONLINE
    if name == "val/loss" and online:
        why = "val/loss is measured on the rows of data.val, and online runs have no such rows"
        remedy = "use reward, or val/accuracy with val.questions"
        yield Problem(
            key,
            why,
            f"set checkpoint.best: {remedy}" if key == "checkpoint.keep_best" else remedy,
            code="unknown-metric",
        )
    elif name == "val/loss" and not recipe.data.val:
        yield needs(key, "val/loss needs data.val, which is empty", "set data.val")
    elif measure.validated and not (recipe.val.questions or recipe.data.val):
        yield needs(key, f"no validation measures {name}", "set val.questions or data.val")
    elif not measure.validated and name.startswith("train/") == online:
        other = "reward, or critic/ and actor/ metrics" if online else "train/ and val/ metrics"
        yield Problem(key, f"a run of method {recipe.method} has no {name}", f"it has {other}", code="unknown-metric")
