"""OpenEnv: `rollout.environment: openenv:http://localhost:8000`. Each trajectory has its own session (WebSocket).

The messages are those of OpenEnv's protocol. The package `openenv` is not needed: the server has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lockstep.environments.adapters.game import action_of, first_messages, row_seed, user
from lockstep.environments.environment import Reply, Start, Turn
from lockstep.environments.json_schema import InvalidJson, read_json
from lockstep.environments.return_values import json_or_empty
from lockstep.errors import Refusal
from lockstep.types import ENVIRONMENT, Message

LONGEST = 2**24


class InvalidAction(Exception):
    """The model's action cannot be read, or the server refused it. The text says why, for the model."""


class OpenEnvEnvironment:
    """The rewards are those of the server. An action that the server refuses costs a turn."""

    def __init__(
        self,
        environment: str,
        action: str | None = None,
        observation: str | None = None,
        tools: bool = False,
        token: str | None = None,
        **arguments: Any,
    ):
        """`action` is the field of the action that gets the model's text; without it the model writes the action as a
        JSON object. `observation` is the field that the model sees; without it, it sees all fields as JSON. With
        `tools`, the model calls the tools of the environment. Other arguments go to `reset`."""
        if not environment.startswith(("http://", "https://")):
            why = f"{environment!r} is not the address of a server"
            raise Refusal.at(ENVIRONMENT, why, "write openenv:http://HOST:PORT", code="invalid-address")
        self._url = environment.rstrip("/").replace("http", "ws", 1) + "/ws"
        self._action, self._observation, self._tools = action, observation, tools
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._arguments = arguments
        self._socket: Any = None
        self.info: dict[str, Any] = {}

    async def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        from websockets.asyncio.client import connect

        local = any(f"//{host}" in self._url for host in ("localhost", "127.", "[::1]"))
        route: dict[str, Any] = {"proxy": None} if local else {}
        try:
            self._socket = await connect(self._url, max_size=LONGEST, additional_headers=self._headers, **route)
        except OSError as error:
            why = f"no OpenEnv server answers at {self._url}: {error}"
            raise Refusal.at(ENVIRONMENT, why, "start the server, or fix the address", code="server-lost") from error
        options = {"seed": row_seed(row, seed), **self._arguments, **(row.get("options") or {})}
        first, schemas = await self._ask("reset", options), []
        if self._tools:
            listed = await self._ask("step", {"type": "list_tools"})
            schemas = [_schema(tool) for tool in listed["observation"]["tools"]]
        return Start(first_messages(row, self._text(first)), schemas)

    async def step(self, reply: Reply) -> Turn:
        if self._tools:
            return await self._call_tools(reply)
        text = action_of(reply)
        try:
            result = await self._ask("step", {self._action: text} if self._action else _json_object(text))
        except InvalidAction as error:
            return Turn(user(f"invalid action: {error}"), metrics={"invalid_actions": 1.0})
        done = bool(result.get("done"))
        messages = [] if done else user(self._text(result))
        return Turn(messages, float(result.get("reward") or 0.0), done, metrics={"invalid_actions": 0.0})

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def _call_tools(self, reply: Reply) -> Turn:
        """Runs the calls one after the other, because each one changes the environment. A reply without a call ends the
        trajectory."""
        if not reply.calls:
            return Turn(user(reply.parse_error)) if reply.parse_error else Turn(done=True)
        messages: list[Message] = []
        reward, done = 0.0, False
        for call in reply.calls:
            text = call.error
            if not text and not done:
                action = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
                result = await self._ask("step", action)
                reward, done = reward + float(result.get("reward") or 0.0), bool(result.get("done"))
                text = _tool_text(result.get("observation") or {})
            messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text})
        return Turn([] if done else messages, reward, done)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        fields = dict(answer["data"])
        if answer["type"] == "error":
            if fields.get("code") == "VALIDATION_ERROR" and kind == "step":
                raise InvalidAction("; ".join(f"{one['loc']}: {one['msg']}" for one in fields.get("errors", ())))
            raise RuntimeError(f"the server answered: {fields.get('message')} ({fields.get('code')})")
        self.info = json_or_empty(fields.get("metadata") or {})
        return fields

    def _text(self, result: Mapping[str, Any]) -> str:
        observation = dict(result.get("observation") or {})
        if self._observation is None:
            shown: Any = {name: one for name, one in observation.items() if name != "metadata" and one is not None}
        elif self._observation in observation:
            shown = observation[self._observation]
        else:
            why = f"the observation has no field {self._observation!r}"
            raise Refusal.at(ENVIRONMENT, why, f"use one of {', '.join(observation)}", code="unknown-name")
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False) if shown != {} else ""


def _json_object(text: str) -> dict[str, Any]:
    """Returns the JSON object from the first to the last brace of the text."""
    try:
        value = read_json(text[text.find("{") : text.rfind("}") + 1])
    except InvalidJson as error:
        raise InvalidAction(f"write a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise InvalidAction("write a JSON object")
    return value


def _tool_text(observation: Mapping[str, Any]) -> str:
    """Returns the result of a tool call as text for the model."""
    error, result = observation.get("error"), observation.get("result")
    if error:
        return f"error: {error.get('message') if isinstance(error, Mapping) else error}"
    parts = result.get("content") if isinstance(result, Mapping) else None
    texts = [one["text"] for one in parts if isinstance(one, Mapping) and "text" in one] if parts else []
    return "\n".join(texts) if texts else result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool.get("input_schema") or {"type": "object", "properties": {}}
    described = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": described}
