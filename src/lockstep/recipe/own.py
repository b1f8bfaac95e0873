"""Keys that take one of our names, or a function of the user's own as `path/to/file.py:name`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lockstep.functions import is_place

PLACE = "path/to/file.py:name"


@dataclass(frozen=True)
class NamedOrOwn:
    """Goes into the annotation of a text key. Whether file and function are there is seen by the dry run."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value in self.names or is_place(value):
            return value
        names = ", ".join(repr(name) for name in self.names)
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": f"{names} or {PLACE}"})
