"""What every group of keys is, and how a key is declared: all that is known of it stands in one place."""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict

from lockstep.recipe.effects import Effect


class Section(BaseModel):
    """A group of keys. Strict: a quoted number is not a number, an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


def Field(
    *default: Any,
    effect: Effect | None = None,
    resumable: bool = False,
    read_where: tuple[str, tuple[object, ...]] | None = None,
    **rules: Any,
) -> Any:
    """A key. What is said of a group holds for the keys in it that say nothing of their own.

    `effect`: what a difference does to the curves of two runs. `resumable`: it may change when a run is resumed; so may
    every key whose effect is harmless. `read_where`: another key, and the values of it with which this one is read; it
    is always read where nothing is said.
    """
    facts: Any = {"effect": effect, "resumable": resumable, "read_where": read_where}
    return pydantic.Field(*default, json_schema_extra=facts, **rules)
