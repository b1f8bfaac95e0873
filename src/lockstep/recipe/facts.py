"""What the schema says of a key, by its dotted name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from lockstep.recipe.effects import Effect
from lockstep.recipe.schema import Recipe
from lockstep.recipe.section import Section


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
