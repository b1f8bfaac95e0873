"""Metrics that the recipe names, held against those that the first step gave: a typing error costs one step."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator

from lockstep.errors import Problem, refuse_all
from lockstep.recipe import Recipe
from lockstep.recipe.measure import Measure, measure_of

# What answers to questions may be measured by (`evaluate/validation.py`): of all, or of one data source.
_ANSWERS = re.compile(r"val/(accuracy|reward|answered|failed|(pass|maj)@\d+)(/.+)?|val-core/.+")


def refuse_unmeasured(recipe: Recipe, metrics: Collection[str]) -> None:
    """Refuse names that no step and no validation of this run is going to have. `metrics` are the names of a step's, of
    the first process: all come to the same answer."""
    refuse_all(list(_unmeasured(recipe, metrics)))


def _unmeasured(recipe: Recipe, metrics: Collection[str]) -> Iterator[Problem]:
    named = {"checkpoint.best": recipe.checkpoint.best}
    if recipe.run.stop_early is not None:
        named["run.stop_early.metric"] = recipe.run.stop_early.metric
    for key, words in named.items():
        measure = None if words is None else measure_of(words)
        if measure is None or _expected(measure, recipe, metrics):
            continue
        known = [name for name in sorted(metrics) if not name.startswith(("timing_s/", "perf/"))]
        known += [f"val/{name.removeprefix('train/')}" for name in known if name.startswith("train/")]
        known += ["val/accuracy", "val/reward"] if recipe.val.questions else []
        near = difflib.get_close_matches(measure.name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else "the names are those of metrics.jsonl"
        if not recipe.val.questions and _ANSWERS.fullmatch(measure.name):
            remedy = "set val.questions: it is measured on answers"
        yield Problem(key, f"the run does not measure {measure.name}", remedy)


def _expected(measure: Measure, recipe: Recipe, metrics: Collection[str]) -> bool:
    if not measure.validated:
        # Undefined, and so missing, in a step whose returns are all the same.
        sometimes = measure.name == "critic/vf_explained_var" and "critic/values/mean" in metrics
        return sometimes or measure.name in metrics
    # Rows are measured by what their method reports of an update too.
    on_rows = bool(recipe.data.val) and f"train/{measure.name.removeprefix('val/')}" in metrics
    return on_rows or bool(recipe.val.questions and _ANSWERS.fullmatch(measure.name))
