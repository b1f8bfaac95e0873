"""Checks the arguments of a tool call against the JSON schema of the tool, and converts text to its types.

The keywords that tool schemas use are supported: `type`, `nullable`, `enum`, `const`, `properties`, `required`,
`additionalProperties`, `items`, `prefixItems`, the limits of lengths and numbers, `pattern`, `anyOf`, `oneOf`, `allOf`
and local references (`$ref`). Other keywords are ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

DEEPEST = 64
"""Maximum number of nested levels of an argument."""
_SHOWN = 60
_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (lambda value, limit: value >= limit, "must be at least"),
    "maximum": (lambda value, limit: value <= limit, "must be at most"),
    "exclusiveMinimum": (lambda value, limit: value > limit, "must be above"),
    "exclusiveMaximum": (lambda value, limit: value < limit, "must be below"),
}
_LENGTHS = {
    "minLength": (str, False, "must have at least", "characters"),
    "maxLength": (str, True, "must have at most", "characters"),
    "minItems": (list, False, "must have at least", "items"),
    "maxItems": (list, True, "must have at most", "items"),
}


class Mismatch(Exception):
    """A value does not match its schema. The text says why, for the model."""


class InvalidJson(ValueError):
    """A text is not JSON. The text of the error says why, for the model."""


def read_json(text: str) -> Any:
    """Reads JSON as the standard defines it: without NaN, and without an object that has a key twice."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_twins)
        if "\\u" in text:  # an escape sequence can be half of a pair, which is not a character
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except InvalidJson:
        raise
    except json.JSONDecodeError as error:
        raise InvalidJson(f"{error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidJson("it is nested too deeply" if isinstance(error, RecursionError) else str(error)) from None
    return value


def _refuse_constant(name: str) -> Any:
    raise InvalidJson(f"{name} is not a JSON value")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twin = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise InvalidJson(f"an object has the key {shown(twin)} twice")
    return made


def shown(value: Any) -> str:
    """Returns a value as short JSON text, for messages."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def fitted_arguments(arguments: Any, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the arguments with the types of the schema `parameters`, and all errors.

    An argument that the schema does not name is an error, unless `additionalProperties` allows it: the tool could not
    take it.
    """
    if not isinstance(arguments, dict):
        return {}, [f"the arguments must be a JSON object, not {shown(arguments)}"]
    properties = parameters.get("properties")
    known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    extra = parameters.get("additionalProperties", not isinstance(properties, Mapping))
    required = parameters.get("required")
    errors = [
        f"the argument {shown(name)} is missing"
        for name in (required if isinstance(required, Sequence) and not isinstance(required, str) else ())
        if name not in arguments
    ]
    made: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in known and extra is False:
            names = ", ".join(known) or "none"
            errors.append(f"there is no argument {shown(name)}; the arguments are: {names}")
            continue
        try:
            made[name] = fitted(value, known.get(name, extra), parameters, f"the argument {name}")
        except Mismatch as error:
            errors.append(str(error))
    return made, errors


def fitted(value: Any, schema: Any, root: Mapping[str, Any], where: str, depth: int = 0) -> Any:
    """Returns the value with the types of the schema. Raises `Mismatch`. `root` is the schema with the definitions."""
    if depth > DEEPEST:
        raise Mismatch(f"{where} is nested too deeply")
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping):
        if schema is False:
            raise Mismatch(f"{where} is not allowed")
        return value
    for part in _list(schema.get("allOf")):
        value = fitted(value, part, root, where, depth + 1)
    choices = _list(schema.get("anyOf")) or _list(schema.get("oneOf"))
    if choices and not (value is None and schema.get("nullable")):
        value = _fitted_choice(value, choices, root, where, depth)
    value = _converted(value, _type_names(schema), where)
    if value is None and schema.get("nullable"):
        return None
    _check_value(value, schema, where)
    if isinstance(value, dict):
        return _fitted_object(value, schema, root, where, depth)
    if isinstance(value, list):
        first = _list(schema.get("prefixItems"))
        rest = schema.get("items", True)
        return [
            fitted(one, first[at] if at < len(first) else rest, root, f"item {at + 1} of {where}", depth + 1)
            for at, one in enumerate(value)
        ]
    return value


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follows local references, such as `#/$defs/Place`. A reference that cannot be resolved accepts every value."""
    for _ in range(DEEPEST):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        if not reference.startswith("#/"):
            return True
        schema = root
        for part in reference[2:].split("/"):
            schema = (
                schema.get(part.replace("~1", "/").replace("~0", "~"), True) if isinstance(schema, Mapping) else True
            )
    return True


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_names(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the allowed types; nothing if every type is allowed, or if a type is not one of JSON (`image`)."""
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else _list(kinds)
    if not names or any(name not in _TYPES for name in names):
        return ()
    return (*names, "null") if schema.get("nullable") else tuple(names)


def _fitted_choice(value: Any, choices: Sequence[Any], root: Mapping[str, Any], where: str, depth: int) -> Any:
    """Returns the value as the first alternative that it matches without a conversion, else with one."""
    errors, converted = [], []
    for choice in choices:
        try:
            made = fitted(value, choice, root, where, depth + 1)
        except Mismatch as error:
            errors.append(str(error))
            continue
        if type(made) is type(value) and made == value:
            return made
        converted.append(made)
    if converted:
        return converted[0]
    raise Mismatch("; or ".join(dict.fromkeys(errors)))


def _converted(value: Any, names: Sequence[str], where: str) -> Any:
    if not names or any(_TYPES[name](value) for name in names):
        return value
    if isinstance(value, float) and "integer" in names and value.is_integer():
        return int(value)
    if isinstance(value, str):
        for name in names:
            made = _from_text(value.strip(), name)
            if made is not None:
                return made[0]
    article = "an" if names[0][0] in "aeiou" else "a"
    raise Mismatch(f"{where} must be {article} {' or '.join(names)}, not {shown(value)}")


def _from_text(text: str, name: str) -> tuple[Any] | None:
    """Reads a value of the named type from text; None if the text is no such value."""
    if name == "boolean":
        return {"true": (True,), "false": (False,)}.get(text.lower())
    if name == "null":
        return (None,) if text in ("null", "None") else None
    try:
        value = read_json(text.removeprefix("+"))
    except InvalidJson:
        return None
    if name == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    fits = _TYPES[name](value) and not (isinstance(value, float) and not math.isfinite(value))
    return (value,) if fits else None


def _check_value(value: Any, schema: Mapping[str, Any], where: str) -> None:
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(allowed, list) and not any(_same(value, one) for one in allowed):
        raise Mismatch(f"{where} must be {' or '.join(map(shown, allowed))}, not {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise Mismatch(f"{where} must be a finite number")
    for key, (holds, text) in _LIMITS.items():
        limit = schema.get(key)
        if _TYPES["number"](value) and _TYPES["number"](limit) and not holds(value, limit):
            raise Mismatch(f"{where} {text} {limit}, not {shown(value)}")
    for key, (kind, most, text, unit) in _LENGTHS.items():
        length = schema.get(key)
        if (
            isinstance(value, kind)
            and _TYPES["integer"](length)
            and (length < len(value) if most else len(value) < length)
        ):
            raise Mismatch(f"{where} {text} {length} {unit}, not {len(value)}")
    pattern = schema.get("pattern")
    if isinstance(value, str) and isinstance(pattern, str) and not _matches(pattern, value):
        raise Mismatch(f"{where} must match the pattern {shown(pattern)}, not {shown(value)}")


def _matches(pattern: str, value: str) -> bool:
    try:
        return re.search(pattern, value) is not None
    except re.error:
        return True  # a pattern of another dialect


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _fitted_object(
    value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int
) -> Any:
    properties, extra = schema.get("properties"), schema.get("additionalProperties", True)
    known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    missing = [name for name in _list(schema.get("required")) if name not in value]
    if missing:
        raise Mismatch(f"{where} lacks {', '.join(map(shown, missing))}")
    made = {}
    for name, one in value.items():
        if name not in known and extra is False:
            raise Mismatch(f"{where} has the unknown key {shown(name)}; the keys are: {', '.join(known) or 'none'}")
        made[name] = fitted(one, known.get(name, extra), root, f"{name} of {where}", depth + 1)
    return made
