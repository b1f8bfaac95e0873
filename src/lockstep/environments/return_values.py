"""Checks of the values that an environment returns, and their conversion to JSON. Imports no large packages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, SupportsFloat

from lockstep.environments.environment import Start, TextTurn, TokenTurn, Turn
from lockstep.environments.message_images import checked_content

# Roles of the messages that an environment may write. The model writes the messages of the role `assistant`.
ROLES = ("system", "developer", "user", "tool")
Level = Literal["messages", "text", "tokens"]
"""What an environment writes."""
# The largest numbers of messages, of tools or stop strings, and of token ids in an answer. A longer answer is a bug of
# the environment, maybe a sequence without an end.
MOST_MESSAGES, MOST_TEXTS, MOST_IDS = 10_000, 1_000, 2**22


def checked_start(value: Any, level: Level) -> dict[str, Any]:
    """Returns the fields of the start of a trajectory. Raises ValueError if the value cannot be used."""
    if level != "messages":
        fields = _raw_turn(value, level)
        if not fields[_RAW[level]]:
            raise ValueError(f"returned no {_WRITTEN[level]}, so the model has no prompt")
        return fields
    if not isinstance(value, Start):
        raise ValueError(f"returned {shown(value)}, expected Start(messages=[...])")
    messages = _messages(value.messages, roles=(*ROLES, "assistant"))
    if not messages:
        raise ValueError("returned no messages, so the model has no prompt")
    if messages[-1]["role"] == "assistant":
        raise ValueError("returned messages that end with an assistant turn, so the model would answer its own turn")
    fields = {"messages": messages, "tools": _tools(value.tools), "stop": _texts(value.stop)}
    return {**fields, "anchor": _anchor(value.anchor)}


def checked_turn(value: Any, level: Level) -> dict[str, Any]:
    """Returns the fields of the environment's answer to a turn. Raises ValueError if the value cannot be used."""
    if level != "messages":
        fields = _raw_turn(value, level)
        if not fields[_RAW[level]] and not fields["done"]:
            raise ValueError(f"returned neither {_WRITTEN[level]} nor done=True, so the trajectory cannot continue")
        return fields
    if not isinstance(value, Turn):
        raise ValueError(f"returned {shown(value)}, expected Turn(...)")
    messages = _messages(value.messages, roles=ROLES)
    if not messages and not value.done:
        raise ValueError("returned neither messages nor done=True, so the trajectory cannot continue")
    stop = None if value.stop is None else _texts(value.stop)
    return {"messages": messages, "stop": stop, **_outcome(value)}


def checked_scores(value: Any, trajectories: Sequence[Any] | None = None) -> Any:
    """Returns the scores of a trajectory by name; for a group of `trajectories`, a list with the score of each."""
    if trajectories is not None:
        scores = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(scores, list | tuple) or len(scores) != len(trajectories):
            raise ValueError(f"returned {shown(value)}, expected a list of {len(trajectories)} numbers")
        return [_number(score, "a score") for score in scores]
    if not isinstance(value, Mapping):
        return {"score": _number(value, "the score")}
    parts = {str(name): _number(number, f"the score {name!r}") for name, number in value.items()}
    if not parts:
        raise ValueError("returned an empty dict, expected a number or named numbers")
    total = parts.pop("score") if "score" in parts else sum(parts.values())
    return {"score": total, **{f"score/{name}": number for name, number in parts.items()}}


def checked_result(value: Any) -> dict[str, Any] | None:
    """Returns what an agent returned: its `scores`, `metrics` and `info`. None if it returned nothing. A result is a
    number, a dict of named numbers, or a dict with the key `reward` and optionally `metrics` and `info`."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or "reward" not in value:
        return {"scores": checked_scores(value), "metrics": {}, "info": {}}
    unknown = [str(key) for key in value if key not in ("reward", "metrics", "info")]
    if unknown:
        raise ValueError(f"returned the key {unknown[0]!r} besides reward; the other keys are metrics and info")
    metrics = value.get("metrics") or {}
    if not isinstance(metrics, Mapping):
        raise ValueError(f"returned {shown(metrics)} as metrics, expected a dict of numbers")
    return {
        "scores": checked_scores(value["reward"]),
        "metrics": {str(name): _number(number, f"the metric {name!r}") for name, number in metrics.items()},
        "info": json_object(value.get("info") or {}),
    }


def json_object(value: Any) -> dict[str, Any]:
    """Returns a dict that JSON can represent. Raises ValueError otherwise."""
    if not isinstance(value, Mapping):
        raise ValueError(f"is {shown(value)}, expected a dict")
    try:
        return dict(json.loads(json.dumps(dict(value), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None


def json_or_empty(value: Any) -> dict[str, Any]:
    """Returns a dict that JSON can represent, or an empty dict if the value is another one."""
    try:
        return json_object(value)
    except Exception:  # noqa: BLE001 - a value of a user's class may fail in any way
        return {}


def state_of(environment: Any) -> dict[str, Any]:
    """Returns the attribute `state` of an environment, or an empty dict if it cannot be read or represented."""
    try:
        return json_or_empty(getattr(environment, "state", {}))
    except Exception:  # noqa: BLE001 - a property of a user's class may fail in any way
        return {}


# The field of an observation that is not messages, and what it contains.
_RAW = {"text": "text", "tokens": "ids"}
_WRITTEN = {"text": "text", "tokens": "token ids"}


def _raw_turn(value: Any, level: Level) -> dict[str, Any]:
    if level == "text":
        if not isinstance(value, TextTurn):
            raise ValueError(f"returned {shown(value)}, expected TextTurn(text=...)")
        if not isinstance(value.text, str):
            raise ValueError(f"returned {shown(value.text)} as text, which is not text")
        fields: dict[str, Any] = {"text": value.text, "stop": None if value.stop is None else _texts(value.stop)}
    else:
        if not isinstance(value, TokenTurn):
            raise ValueError(f"returned {shown(value)}, expected TokenTurn(ids=[...])")
        fields = {"ids": _ids(value.ids, "ids")}
    stop_ids = None if value.stop_ids is None else _ids(value.stop_ids, "stop_ids")
    return {**fields, "stop_ids": stop_ids, **_outcome(value)}


def _outcome(value: Turn | TextTurn | TokenTurn) -> dict[str, Any]:
    if not isinstance(value.metrics, Mapping):
        raise ValueError(f"returned {shown(value.metrics)} as metrics, expected a dict of numbers")
    metrics = {str(name): _number(number, f"the metric {name!r}") for name, number in value.metrics.items()}
    if not isinstance(value.done, bool | int) and not hasattr(value.done, "item"):
        raise ValueError(f"returned {shown(value.done)} as done, expected True or False")
    reward = _number(value.reward, "the reward")
    return {"reward": reward, "done": bool(value.done), "metrics": metrics, "anchor": _anchor(value.anchor)}


def _anchor(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"returned {shown(value)} as anchor, expected a text or None")
    return value


def _messages(value: Any, roles: Sequence[str]) -> list[dict[str, Any]]:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise ValueError(f"returned {shown(value)} as messages, expected a list of messages")
    messages = []
    for number, message in enumerate(_limited(value, MOST_MESSAGES, "messages"), 1):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or not isinstance(role, str):
            raise ValueError(f"returned {shown(message)} as message {number}, expected a dict with role and content")
        if role not in roles:
            raise ValueError(f"returned message {number} with the role {role!r}, expected one of {', '.join(roles)}")
        content = checked_content(message.get("content"))
        if content is None and not (role == "assistant" and message.get("tool_calls")):
            raise ValueError(
                f"returned {shown(message.get('content'))} as the content of message {number}, not text or a list of "
                "texts and images (PIL images, or parts with data URIs)"
            )
        messages.append({**message, "content": message.get("content") if content is None else content})
    return messages


def _tools(value: Any) -> list[dict[str, Any]]:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    tools = _limited(value, MOST_TEXTS, "tools") if several else [value]
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"returned {shown(tool)} as a tool, expected a JSON schema of a function")
    return [dict(tool) for tool in tools]


def _texts(value: Any) -> list[str]:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    texts: list[Any] = _limited(value, MOST_TEXTS, "stop strings") if several else [None]
    if not all(isinstance(one, str) and one for one in texts):
        raise ValueError(f"returned {shown(value)} as stop, expected a list of strings")
    return texts


def _ids(value: Any, name: str) -> list[int]:
    try:
        ids = [one.item() if hasattr(one, "item") else one for one in _limited(value, MOST_IDS, f"token ids as {name}")]
    except TypeError:
        raise ValueError(f"returned {shown(value)} as {name}, expected a list of token ids") from None
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise ValueError(f"returned {shown(value)} as {name}, expected token ids")
    return ids


def _limited(values: Iterable[Any], most: int, what: str) -> list[Any]:
    found = list(islice(values, most + 1))
    if len(found) > most:
        raise ValueError(f"returned more than {most:,} {what}")
    return found


def _number(value: Any, what: str) -> float:
    """Returns the value as a finite float. Raises ValueError for text and for anything that is not a finite number."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) and not isinstance(value, str) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"returned {shown(value)} as {what}, which is not a finite number")
    return number


def shown(value: Any) -> str:
    """Returns the first 80 characters of the value's repr."""
    try:
        text = repr(value[:80] if isinstance(value, str | bytes) else value)
    except Exception:  # noqa: BLE001 - the repr of a user's object may fail
        text = f"a {type(value).__name__}"
    return text[:80] + ("..." if len(text) > 80 else "")
