"""An MCP server of the package `mcp` (version 2), or of `fastmcp` where there is no such version. It uses its standard
input and output, or HTTP if its argument is a port."""

from __future__ import annotations

import sys

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


if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
