"""The base class of recipe sections, and the declaration of a key and of its effect on the metrics of two runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pydantic
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lockstep.errors import RenamedKey
from lockstep.functions import is_function_path
from lockstep.recipe.renamed_keys import new_attribute

Weight = Literal["blocks", "matters", "harmless"]


class Effect(NamedTuple):
    """How the metrics of two runs differ if the runs have different values of a recipe key.

    `blocks`: the runs compute different things, so their metrics are not comparable. `matters`: the runs compute the
    same thing, and metrics differ by rounding, order or chance. `harmless`: the metrics of the runs must be equal;
    tests check this.
    """

    weight: Weight
    why: str


NAME = Effect("harmless", "only a name")
COLUMN = Effect("matters", "the runs may read other columns; compare the numbers of kept rows and tokens")
LIMIT = Effect("matters", "the runs may truncate or drop other rows; compare the numbers of kept rows and tokens")
FOLDER = Effect("matters", "the folder paths differ; the metrics differ only if the weights in the folders differ")
STORED = Effect("harmless", "this key changes what is stored or shown, not what is computed")
UPDATE = Effect("blocks", "the same gradient gives a different update")
RATE = Effect("blocks", "the two runs have different learning rates at the same step")
GROUPS = Effect("blocks", "an update uses a different number of rows: noise and progress per step differ")
SAMPLING = Effect("blocks", "responses are sampled from a different distribution")
REWARD = Effect("blocks", "the same response gets a different reward")
CACHE = Effect("harmless", "this key changes memory and speed of generation; the sampled tokens are the same")
MICRO = Effect("harmless", "this key changes only the micro-batches; the loss is normalised over the full update")
SPREAD = Effect(
    "harmless", "this key changes where the shards of a model are stored; the sums over all ranks are the same"
)


class Section(BaseModel):
    """A group of keys. Types are strict: a quoted number is a string, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns the value of a renamed key, given the old name of the key."""
            if (new := new_attribute(name, type(self).model_fields)) is None:
                return super().__getattr__(name)
            note = f"{type(self).__name__}.{name} is now {new}; the old name works until the next release"
            warnings.warn(note, RenamedKey, stacklevel=2)
            return getattr(self, new)


def Field(
    *default: Any,
    effect: Effect | None = None,
    resumable: bool = False,
    read_where: tuple[str, tuple[object, ...]] | None = None,
    **rules: Any,
) -> Any:
    """Declares a key. A key inherits `effect` and `resumable` from its group.

    `effect`: how a different value of the key affects the metrics of two runs. `resumable`: the value may change when a
    run is resumed; a key with a harmless effect is always resumable. `read_where`: another key, and the values of that
    key with which this key has an effect, or None if this key is always read.
    """
    facts: Any = {"effect": effect, "resumable": resumable, "read_where": read_where}
    return pydantic.Field(*default, json_schema_extra=facts, **rules)


FUNCTION_PATH = "path/to/file.py:name"


class Named:
    """Annotation of a string key whose value is a name in a registry or, with `allow_function`, the path of a user
    function.

    The registries are read when a recipe is validated, so plug-ins can add names. The dry run, not the schema, checks
    that the file and the function exist.
    """

    def __init__(self, *tables: Mapping[str, Any], allow_function: bool = False):
        self._tables, self.allow_function = tables, allow_function

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for table in self._tables for name in table)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value in self.names or (self.allow_function and is_function_path(value)):
            return value
        choices = [*(repr(name) for name in self.names), *([FUNCTION_PATH] if self.allow_function else [])]
        expected = " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)
        raise PydanticCustomError("literal_error", "must be {expected}", {"expected": expected})


# Our messages for pydantic's error types; the error's `ctx` fills the braces.
_REASONS = {
    "literal_error": "must be {expected}",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
}


def invalid_reason(error: Any) -> str:
    """Converts a pydantic error to the reason why a value is invalid. Messages of the schema's own validators stay
    unchanged."""
    if (reason := _REASONS.get(error["type"])) is not None:
        values = {
            key: f"{value:g}" if isinstance(value, float) else value for key, value in error.get("ctx", {}).items()
        }
        return reason.format(**values)
    return str(error["msg"][0].lower() + error["msg"][1:])
