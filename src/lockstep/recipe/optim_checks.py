"""Checks the optimizer keys of a recipe for invalid values and combinations."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator
from typing import Any

from lockstep.errors import Problem, conflict, unfit, unused
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.schema import Recipe


def optim_problems(recipe: Recipe) -> Iterator[Problem]:
    run, optim = recipe.run, recipe.optim
    if isinstance(optim.warmup, float) and optim.warmup >= 1 and not optim.warmup.is_integer():
        yield Problem(
            "optim.warmup",
            f"{optim.warmup} is neither a fraction below 1 nor an integer number of steps",
            code="invalid-value",
        )
    if optim.schedule_unit == "step" and optim.warmup >= max(1, run.steps or math.inf):
        yield Problem(
            "optim.warmup",
            f"all {run.steps} steps of the run would be warm-up steps, because optim.warmup is {optim.warmup}",
            "set optim.warmup to fewer steps or to a fraction such as 0.1, or raise run.steps",
            code="no-steps-left",
        )
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield Problem("optim.betas", f"{optim.betas} must be in [0, 1)", code="out-of-range")
    yield from _unread_keys(optim)
    yield from _rounding_problems(recipe)
    yield from _group_problems(optim)
    if recipe.tape.record and (optim.name != "adamw" or optim.stochastic_rounding):
        setting = "optim.stochastic_rounding" if optim.name == "adamw" else "optim.name"
        yield unfit(
            "tape",
            f"a replay checks updates with AdamW's formula, and {setting} selects another update",
            "set optim.name=adamw and optim.stochastic_rounding=false to record a tape",
        )


def _unread_keys(optim: Optim) -> Iterator[Problem]:
    """Yields a problem for each key of another update rule that differs from its default."""
    for key, field in Optim.model_fields.items():
        facts: Any = field.json_schema_extra
        read_where = facts["read_where"]
        if read_where is None or read_where[0] != "optim.name" or optim.name in read_where[1]:
            continue
        if getattr(optim, key) != field.get_default(call_default_factory=True):
            names = " or ".join(str(name) for name in read_where[1])
            why = f"optim.name={optim.name} does not read this key"
            yield unused(f"optim.{key}", why, f"remove it, or set optim.name to {names}")


def _rounding_problems(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if not recipe.optim.stochastic_rounding:
        return
    key, off = "optim.stochastic_rounding", "or set optim.stochastic_rounding=false"
    if model.dtype != "bf16":
        why = f"only bf16 weights are rounded stochastically, and model.dtype is {model.dtype}"
        yield unfit(key, why, f"set model.dtype=bf16, {off}")
    elif model.master_weights or model.master_weights is None:
        yield conflict(key, "fp32 master weights keep small updates already", f"set model.master_weights=false, {off}")


def _group_problems(optim: Optim) -> Iterator[Problem]:
    names: set[str] = set()
    for number, group in enumerate(optim.groups):
        key = f"optim.groups.{number}"
        try:
            re.compile(group.match)
        except re.error as error:
            yield Problem(f"{key}.match", f"{group.match!r} is not a regular expression: {error}", code="invalid-regex")
        if group.lr is not None and group.lr_ratio is not None:
            yield conflict(f"{key}.lr_ratio", "cannot be combined with lr", "remove lr or lr_ratio")
        if group.lr is None and group.lr_ratio is None and group.weight_decay is None:
            yield Problem(
                key, "sets neither a learning rate nor weight decay", "set lr or weight_decay", code="not-set"
            )
        if group.name is not None and group.name in names:
            yield Problem(f"{key}.name", f"{group.name} names two groups", "use another name", code="invalid-name")
        names |= set() if group.name is None else {group.name}


def unmatched_groups(optim: Optim, names: Collection[str]) -> Iterator[Problem]:
    """Yields a problem for each group that has none of the trained parameters `names`."""
    used = [optim.group_of(name) for name in names]
    for number, group in enumerate(optim.groups):
        if any(one is group for one in used):
            continue
        earlier = [name for name in names if re.search(group.match, name)]
        if earlier:
            why = f"{group.match!r} matches only parameters of earlier groups, such as {earlier[0]}"
            remedy = "move this group to the front, or remove it"
        else:
            why = f"{group.match!r} matches none of the {len(names)} trained parameters"
            remedy = f"the nearest name is {_nearest(group.match, names)}"
        yield Problem(f"optim.groups.{number}.match", why, remedy, code="unknown-name")


def _nearest(expression: str, names: Collection[str]) -> str:
    """Returns the parameter name that is most like a regular expression, or has a part that is like it."""
    text = re.sub(r"[^\w.]|\\.", "", expression)
    parts = {part: name for name in reversed(list(names)) for part in name.split(".")}
    near = difflib.get_close_matches(text.strip("."), list(parts), n=1)
    return parts[near[0]] if near else difflib.get_close_matches(text, list(names), n=1, cutoff=0.0)[0]
