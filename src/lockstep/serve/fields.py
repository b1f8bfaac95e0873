"""The keys of a request's body, read one by one; what is wrong is told by its key, and a key that nobody read too."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from lockstep.serve.replies import ApiError

_MISSING = object()
_LARGEST = sys.float_info.max


def wrong(key: str, why: str) -> ApiError:
    return ApiError(400, f"{key}: {why}", param=key)


class Fields:
    """A JSON object. `null` is the same as a key that is not there, as in OpenAI's own interface."""

    def __init__(self, body: bytes):
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ApiError(400, "the body is not a JSON object")
        self._left: dict[str, Any] = {key: found for key, found in value.items() if found is not None}

    def take(self, key: str, default: Any = _MISSING) -> Any:
        found = self._left.pop(key, default)
        if found is _MISSING:
            raise wrong(key, "is missing")
        return found

    def number(self, key: str, default: float, low: float, high: float = math.inf) -> float:
        found = self.take(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) <= _LARGEST:
            raise wrong(key, f"{_shown(found)} is not a number")
        if not low <= found <= high:
            raise wrong(key, f"{found} is not {_range(low, high)}")
        return float(found)

    def whole(self, key: str, default: int | None, low: float, high: float = math.inf) -> int | None:
        found = self.take(key, default)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int):
            raise wrong(key, f"{_shown(found)} is not a whole number")
        if not low <= found <= high:
            raise wrong(key, f"{found} is not {_range(low, high)}")
        return found

    def switch(self, key: str, default: bool = False) -> bool:
        found = self.take(key, default)
        if not isinstance(found, bool):
            raise wrong(key, f"{_shown(found)} is neither true nor false")
        return found

    def text(self, key: str, default: Any = _MISSING) -> str:
        found = self.take(key, default)
        if not isinstance(found, str):
            raise wrong(key, f"{_shown(found)} is not text")
        return found

    def object(self, key: str) -> dict[str, Any]:
        found = self.take(key, {})
        if not isinstance(found, dict):
            raise wrong(key, f"{_shown(found)} is not an object")
        return found

    def only(self, key: str, allowed: Sequence[Any], why: str) -> None:
        """A key that OpenAI has and this endpoint does not do: only values that ask for nothing pass."""
        found = self.take(key, None)
        if found is not None and found not in allowed:
            raise wrong(key, why)

    def ignore(self, *keys: str) -> None:
        """Keys that say nothing about the answer."""
        for key in keys:
            self._left.pop(key, None)

    def nothing_left(self) -> None:
        if self._left:
            key = next(iter(self._left))
            raise ApiError(400, f"{key}: this endpoint has no such key", param=key, code="unknown_parameter")


def check_model(fields: Fields, names: Sequence[str]) -> None:
    """The model that a request names, if it names one, must be the one that is here; the first name is told."""
    name = fields.text("model", names[0])
    if name not in names:
        why = f"model: {name[:200]!r} is not served here, {names[0]!r} is"
        raise ApiError(404, why, param="model", code="model_not_found")


def sound(text: str, key: str) -> str:
    """The text, where it is one: JSON can spell halves of characters, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(key, "holds half of a character (a lone surrogate)") from error
    return text


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def _range(low: float, high: float) -> str:
    return f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
