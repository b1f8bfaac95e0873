"""Reads the JSON body of a request key by key, with OpenAI's error replies."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from lockstep.http_server.http_api import ApiError

_MISSING = object()
_LARGEST = sys.float_info.max


def bad_value(key: str, why: str) -> ApiError:
    return ApiError(400, f"{key}: {why}", param=key)


class BodyReader:
    """Reads and checks each key of a JSON body once. `check_all_read` rejects keys that were not read. As in OpenAI's
    API, `null` means a missing key."""

    def __init__(self, body: bytes):
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ApiError(400, "the body is not a JSON object")
        self._left: dict[str, Any] = {key: item for key, item in value.items() if item is not None}

    def take(self, key: str, default: Any = _MISSING) -> Any:
        value = self._left.pop(key, default)
        if value is _MISSING:
            raise bad_value(key, "is missing")
        return value

    def number(self, key: str, default: float, low: float, high: float = math.inf) -> float:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise bad_value(key, f"{_shown(value)} is not a number")
        if not low <= value <= high:
            raise bad_value(key, f"{value} is not {_range(low, high)}")
        return float(value)

    def integer(self, key: str, default: int | None, low: float, high: float = math.inf) -> int | None:
        value = self.take(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_value(key, f"{_shown(value)} is not an integer")
        if not low <= value <= high:
            raise bad_value(key, f"{value} is not {_range(low, high)}")
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise bad_value(key, f"{_shown(value)} is neither true nor false")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self.take(key, default)
        if not isinstance(value, str):
            raise bad_value(key, f"{_shown(value)} is not text")
        return value

    def object(self, key: str) -> dict[str, Any]:
        value = self.take(key, {})
        if not isinstance(value, dict):
            raise bad_value(key, f"{_shown(value)} is not an object")
        return value

    def accept_only(self, key: str, allowed: Sequence[Any], why: str) -> None:
        """Rejects an unsupported key of OpenAI's API. Values in `allowed` are accepted, because they have no effect."""
        value = self.take(key, None)
        if value is not None and value not in allowed:
            raise bad_value(key, why)

    def ignore(self, *keys: str) -> None:
        """Ignores keys of the request that do not change the answer."""
        for key in keys:
            self._left.pop(key, None)

    def check_all_read(self) -> None:
        if self._left:
            key = next(iter(self._left))
            raise ApiError(400, f"{key}: this endpoint has no such key", param=key, code="unknown_parameter")


def check_model(fields: BodyReader, names: Sequence[str]) -> None:
    """Rejects a request whose key `model` names a model that is not served."""
    name = fields.text("model", names[0])
    if name not in names:
        why = f"model: {name[:200]!r} is not served here; use {names[0]!r}"
        raise ApiError(404, why, param="model", code="model_not_found")


def valid_text(text: str, key: str) -> str:
    """Returns the text. Raises for lone surrogates, which are valid in JSON but not in a tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_value(key, "contains half of a character (a lone surrogate)") from error
    return text


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _range(low: float, high: float) -> str:
    return f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
