"""The settings of a command of another trainer: what was said, where, and what holds where nothing was said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """A value as the other program would have it, and where it was said: a line of a script, or nothing."""

    value: Any
    where: str = ""


class Unreadable(Exception):
    """A value that is not of the kind that its key takes."""

    def __init__(self, key: str, why: str):
        super().__init__(key, why)
        self.key, self.why = key, why


@dataclass(frozen=True)
class Settings:
    """What a command sets, over the defaults of the version that it is written for."""

    peer: str
    """Name and version, for comments and reports: `verl 0.4`."""
    program: str
    """What is started: `main_ppo`, `train_dpo`."""
    given: Mapping[str, Setting]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Keys as the command writes them, where that is not the key itself."""

    def spelling(self, key: str) -> str:
        return self.spelled.get(key, key)

    def __getitem__(self, key: str) -> Any:
        """The value that the other program works with; None where it has no default of its own."""
        return self.given[key].value if key in self.given else self.defaults.get(key)

    def whole(self, key: str) -> int:
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise Unreadable(key, f"{value!r} is not a whole number")
        return int(value)

    def number(self, key: str) -> float:
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Unreadable(key, f"{value!r} is not a number")
        return float(value)

    def says(self, *keys: str) -> bool:
        """Whether the command itself sets one of the keys."""
        return any(key in self.given for key in keys)

    def below(self, prefix: str) -> list[str]:
        """The given keys of a group."""
        return [key for key in self.given if key.startswith(prefix + ".")]
