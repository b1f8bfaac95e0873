"""The MCP servers of `rollout.tools`, such as `mcp:python server.py` and `mcp:https://HOST/mcp`."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from collections.abc import Mapping
from typing import Any

from lockstep.environments.adapters.mcp_http import McpHttp
from lockstep.environments.adapters.mcp_session import McpProcess, McpSession
from lockstep.environments.tool_environment import ReportCall
from lockstep.environments.tools import FunctionTool
from lockstep.errors import Refusal


class McpServer:
    """The command or the address of a server. `open` starts a process or a session for each trajectory, because a
    server may have a state. With `shared`, all trajectories of a host process use one."""

    def __init__(self, command: str, where: str, shared: bool = False):
        try:
            self._command = shlex.split(command)
        except ValueError as error:
            raise Refusal.at(where, f"the command cannot be read: {error}", "fix it", code="invalid-syntax") from error
        if not self._command:
            remedy = "write mcp:COMMAND or mcp:ADDRESS, with the command that starts the server or its http address"
            raise Refusal.at(where, "the tool needs a command or an address", remedy, code="invalid-value")
        self._headers = _headers(self._command[1:], where) if self._remote else {}
        if not self._remote and shutil.which(self._command[0]) is None:
            why = f"there is no program {self._command[0]}"
            raise Refusal.at(where, why, "install it, or give its path", code="no-such-file")
        self._shared = shared
        self._one: McpSession | None = None
        self._starting = asyncio.Lock() if shared else None

    @property
    def _remote(self) -> bool:
        return self._command[0].startswith(("http://", "https://"))

    async def _session(self) -> McpSession:
        if self._remote:
            return await McpHttp.opened(self._command[0], self._headers)
        return await McpProcess.opened(self._command, shlex.join(self._command))

    async def open(self, row: Mapping[str, Any], report: ReportCall) -> Any:
        if self._starting is None:
            return await self._session()
        async with self._starting:
            if self._one is None or not self._one.alive:
                self._one = await self._session()
        return _SharedSession(self._one.tools)


def _headers(words: list[str], where: str) -> dict[str, str]:
    """Returns the headers after an address: `"NAME: VALUE"`."""
    pairs = [word.partition(":") for word in words]
    if any(not name.strip() or not colon for name, colon, _ in pairs):
        remedy = 'write headers in quotes: mcp:https://HOST/mcp "Authorization: Bearer ${env:NAME}"'
        raise Refusal.at(where, "has a header without a name", remedy, code="invalid-value")
    return {name.strip(): value.strip() for name, _, value in pairs}


class _SharedSession:
    """The tools of a server that other trajectories use, too."""

    def __init__(self, tools: list[FunctionTool]):
        self.tools = tools

    async def close(self) -> None:
        """The server ends with its host process."""


def mcp_tools(command: str, where: str) -> McpServer:
    """Returns the tools `mcp:COMMAND` or `mcp:ADDRESS`, with a server process or session for each trajectory."""
    return McpServer(command, where)


def shared_mcp_tools(command: str, where: str) -> McpServer:
    """Returns the tools of `mcp_shared:`, with one server or session for all trajectories of a host process."""
    return McpServer(command, where, shared=True)
