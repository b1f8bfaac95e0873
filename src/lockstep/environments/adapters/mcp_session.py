"""A session with an MCP server (Model Context Protocol) and its tools. `McpProcess` is a session with a command, over
its standard input and output. This client needs no package."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lockstep.environments.tools import FunctionTool, ToolFailed, ToolServerLost
from lockstep.version import package_version

# The protocol version of the request. The server replies with a version that it supports.
PROTOCOL = "2025-06-18"
# Maximum length of a message in bytes, and maximum number of pages of tools.
LONGEST, PAGES = 2**24, 100
# Seconds that a server gets to end after its input was closed.
END_SECONDS = 2.0
_NO_METHOD = -32601


class McpSession(ABC):
    """A server and its tools. Calls of several trajectories may run at once."""

    def __init__(self, shown: str):
        self.tools: list[FunctionTool] = []
        self._shown, self._last = shown, 0
        self._version = ""
        """The protocol version of the server."""
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def start(self) -> None:
        """Opens the session and reads the list of tools."""
        client = {"name": "lockstep", "version": package_version()}
        given = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
        answer = await self.request("initialize", given)
        self._version = str(answer.get("protocolVersion", ""))
        await self._send({"method": "notifications/initialized"})
        await self._list()

    @property
    @abstractmethod
    def alive(self) -> bool: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def _send(self, message: Mapping[str, Any]) -> None: ...

    async def request(self, method: str, parameters: Mapping[str, Any]) -> Any:
        """Sends a request and returns its result. A cancelled request is cancelled in the server, too."""
        self._last += 1
        number = self._last
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        if not self.alive:
            self._lose()
        try:
            await self._send({"id": number, "method": method, "params": parameters})
            return await answer
        except asyncio.CancelledError:
            await self._send({"method": "notifications/cancelled", "params": {"requestId": number}})
            raise
        finally:
            self._waiting.pop(number, None)

    async def _list(self) -> None:
        cursor: dict[str, Any] = {}
        for _ in range(PAGES):
            page = await self.request("tools/list", cursor)
            self.tools += [self._tool(tool) for tool in page["tools"]]
            if not page.get("nextCursor"):
                return
            cursor = {"cursor": page["nextCursor"]}
        raise ToolServerLost(f"{self._shown} lists tools on more than {PAGES} pages")

    def _tool(self, listed: Mapping[str, Any]) -> FunctionTool:
        name = str(listed["name"])

        async def call(**arguments: Any) -> str:
            return _text(await self.request("tools/call", {"name": name, "arguments": arguments}))

        parameters = listed.get("inputSchema") or {"type": "object", "properties": {}}
        described = {"name": name, "description": listed.get("description") or "", "parameters": parameters}
        return FunctionTool(call, {"type": "function", "function": described})

    def _handle(self, message: Any) -> dict[str, Any] | None:
        """Takes a message of the server. Returns the answer to it, if it is a request."""
        if not isinstance(message, dict):
            return None
        if "method" in message:
            if "id" not in message:
                return None
            # The client answers pings and has no other features.
            refused = {"error": {"code": _NO_METHOD, "message": "not supported by this client"}}
            return {"id": message["id"], **({"result": {}} if message["method"] == "ping" else refused)}
        answer = self._waiting.get(message.get("id", -1))
        if answer is None or answer.done():
            return None
        if "error" in message:
            why = message["error"].get("message") if isinstance(message["error"], dict) else message["error"]
            answer.set_exception(ToolFailed(f"error: {why}"))
        else:
            answer.set_result(message.get("result") or {})
        return None

    def _lose(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ToolServerLost(f"the MCP server {self._shown} has ended"))


class McpProcess(McpSession):
    """A session with a process, whose messages are lines."""

    def __init__(self, process: asyncio.subprocess.Process, shown: str):
        super().__init__(shown)
        self._process = process
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def opened(cls, command: list[str], shown: str) -> McpProcess:
        pipe = asyncio.subprocess.PIPE
        session = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=LONGEST), shown)
        try:
            await session.start()
        except BaseException:
            await session.kill()
            raise
        return session

    @property
    def alive(self) -> bool:
        return not self._reader.done()

    async def close(self) -> None:
        """Closes the input of the server, so that it ends, and kills it if it does not."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_SECONDS)
        finally:
            await self.kill()

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _send(self, message: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        # A server that has ended is reported by the reader.
        with suppress(ConnectionError, RuntimeError):
            if stdin is not None:
                stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
                await stdin.drain()

    async def _read(self) -> None:
        try:
            assert self._process.stdout is not None
            while line := await self._process.stdout.readline():
                with suppress(ValueError):  # a line that is not JSON is output of the server's own code
                    if (answer := self._handle(json.loads(line))) is not None:
                        await self._send(answer)
        except ValueError:
            await self.kill()  # a message over the limit
        finally:
            self._lose()


def _text(result: Mapping[str, Any]) -> str:
    """Returns the text of a result. Other content, such as images, becomes a note. Raises `ToolFailed` if the tool
    failed."""
    parts = [
        str(part.get("text", "")) if part.get("type") == "text" else f"[{part.get('type')} content is left out]"
        for part in result.get("content") or ()
    ]
    if not parts and "structuredContent" in result:
        parts = [json.dumps(result["structuredContent"], ensure_ascii=False)]
    text = "\n".join(parts)
    if result.get("isError"):
        raise ToolFailed(text if text.lower().startswith("error") else f"error: {text}")
    return text
