"""Keys whose values are the rows of a table, or a function of the user's own as `path/to/file.py:name`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lockstep.functions import is_function_path

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
