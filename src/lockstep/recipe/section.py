"""Base class of a recipe section: how a key is declared, and what a difference in it means for two runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import pydantic
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lockstep.functions import is_function_path

# What a difference in a key does to the curves of two runs.

Weight = Literal["blocks", "matters", "harmless"]


class Effect(NamedTuple):
    """`blocks`: something else is computed, so the curves mean different things. `matters`: the same is meant, and the
    curves differ by rounding, order or chance. `harmless`: the curves must not change, which the tests hold."""

    weight: Weight
    why: str


NAME = Effect("harmless", "only a name")
COLUMN = Effect("matters", "other columns may be read; the counts of kept rows and tokens tell")
LIMIT = Effect("matters", "other rows may be cut or left out; the counts of kept rows and tokens tell")
FOLDER = Effect("matters", "another folder: other weights in it would give other values")
STORED = Effect("harmless", "what is stored or shown, not what is computed")
UPDATE = Effect("blocks", "another update is made from the same gradient")
RATE = Effect("blocks", "the learning rate at the same step is another")
GROUPS = Effect("blocks", "an update sees another number of rows: noise, and progress a step, are others")
SAMPLING = Effect("blocks", "responses are drawn from another distribution")
REWARD = Effect("blocks", "the same response earns another reward")
CACHE = Effect("harmless", "memory and speed of generation; the drawn tokens are the same")
MICRO = Effect("harmless", "how an update is cut into pieces; there is one division over all of it")
SPREAD = Effect("harmless", "where the parts of a model are held; the same sums are taken over all ranks")


# What every group of keys is, and how a key is declared: all that is known of it stands in one place.


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


# Keys whose values are the rows of a table, or a function of the user's own as `path/to/file.py:name`.

FUNCTION_PATH = "path/to/file.py:name"


class Named:
    """Goes into the annotation of a text key. The tables are looked at when a recipe is read: a row is all that a new
    name needs. Whether file and function of an `own` one are there is seen by the dry run."""

    def __init__(self, *tables: Mapping[str, Any], own: bool = False):
        self._tables, self.own = tables, own

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for table in self._tables for name in table)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value in self.names or (self.own and is_function_path(value)):
            return value
        choices = [*(repr(name) for name in self.names), *([FUNCTION_PATH] if self.own else [])]
        expected = " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
