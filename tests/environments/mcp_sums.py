"""An MCP server of the package `mcp` (version 2), or of `fastmcp` where there is no such version."""

from __future__ import annotations

try:
    from mcp.server import MCPServer as Server
except ImportError:
    from fastmcp import FastMCP as Server

server = Server("sums")
total = 0


@server.tool()
def add(amount: int) -> int:
    """Adds to the total and returns it."""
    global total
    total += amount
    return total


@server.tool()
def broken(text: str) -> str:
    """Fails."""
    raise ValueError(text)


server.run("stdio")
