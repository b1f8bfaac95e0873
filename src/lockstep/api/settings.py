"""Arguments of the front door that are keys of a recipe: the same ranges hold, and the same refusals."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from lockstep.errors import Problem, Refusal
from lockstep.recipe.section import Section

SectionT = TypeVar("SectionT", bound=Section)


def checked(section: type[SectionT], **arguments: Any) -> SectionT:
    """The group of keys with these values; refused by the argument's name where a recipe would refuse it."""
    try:
        return section(**arguments)
    except ValidationError as failure:
        raise Refusal(
            [
                Problem(".".join(map(str, error["loc"])), f"{error['input']!r}: {error['msg']}", "see docs/recipe.md")
                for error in failure.errors()
            ]
        ) from failure
