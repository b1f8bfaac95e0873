"""The recipe that a command becomes: as a file with a comment at each key, and checked as any other recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from lockstep.compat.table import Conversion, WrittenKey
from lockstep.errors import Problem, Refusal
from lockstep.recipe.loader import checked_recipe, sections_of, value_text
from lockstep.recipe.methods import method_defaults
from lockstep.recipe.schema import Recipe

_ORDER = list(Recipe.model_fields)


def own_defaults(method: str) -> dict[str, Any]:
    """What holds here where a recipe of the method says nothing, by dotted key."""
    return _schema_defaults(Recipe, "") | _flat(method_defaults(method), "")


def _schema_defaults(model: Any, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        inner = sections_of(info.annotation)
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        if inner == [info.annotation] or isinstance(default, BaseModel):
            found |= _schema_defaults(inner[0], f"{prefix}{name}.")
        elif not info.is_required():
            found[prefix + name] = default
    return found


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def recipe_values(done: Conversion) -> dict[str, Any]:
    """The groups of the recipe, in the order of the schema."""
    values: dict[str, Any] = {}
    for key in sorted(done.recipe, key=lambda key: _ORDER.index(key.split(".")[0])):
        *parents, leaf = key.split(".")
        group = values
        for parent in parents:
            group = group.setdefault(parent, {})
        group[leaf] = done.recipe[key].value
    return values


def checked(done: Conversion) -> Recipe:
    """The recipe, or a refusal that also names the other trainer's keys."""
    problems = list(done.problems)
    try:
        if not problems:
            return checked_recipe(recipe_values(done))
    except Refusal as refusal:
        problems = [_with_sources(problem, done) for problem in refusal.problems]
    raise Refusal(problems)


def _with_sources(problem: Problem, done: Conversion) -> Problem:
    near = [key for key in done.recipe if key == problem.where or problem.where.startswith(key + ".")]
    sources = [done.named(name) for key in near[:1] for name in done.recipe[key].sources if done.settings.says(name)]
    origin = f" (from {', '.join(sources)})" if sources else ""
    return Problem(problem.where + origin, problem.why, problem.remedy)


def recipe_yaml(done: Conversion, origin: str) -> str:
    """The recipe as text: each key with where it comes from, and what is not quite the same."""
    head = [f"# Converted from {origin}, {done.settings.peer} {done.settings.program}."]
    head += [f"# {line}" for remark in done.remarks for line in remark.splitlines()]
    return "\n".join([*head, *_lines(recipe_values(done), done, "", 0)]) + "\n"


def _lines(values: Mapping[str, Any], done: Conversion, prefix: str, depth: int) -> list[str]:
    lines: list[str] = []
    for name, value in values.items():
        key, indent = prefix + name, "  " * depth
        written = done.recipe.get(key)
        if written is None:
            lines.append(f"{indent}{name}:")
            lines += _lines(value, done, f"{key}.", depth + 1)
        else:
            lines.append(f"{indent}{name}: {value_text(value)}  # {_comment(written, done)}")
    return lines


def _comment(written: WrittenKey, done: Conversion) -> str:
    said = [_place(key, done) for key in written.sources if done.settings.says(key)]
    # The name without its version: a comment is read beside its neighbours.
    peer = done.settings.peer.split()[0]
    unsaid = ", ".join(done.settings.spelling(key) for key in written.sources) or done.settings.program
    origin = ", ".join(said) if said else f"default of {peer}: {unsaid}"
    return f"{origin}; {written.note}" if written.note else origin


def _place(key: str, done: Conversion) -> str:
    where, shown = done.settings.given[key].where, done.settings.spelling(key)
    return f"{shown} ({where})" if where else shown
