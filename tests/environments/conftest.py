"""Tests with the packages whose environments lockstep adapts. `make test-environments` makes their environment and runs
them; they are collected nowhere else, because the packages are large."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from hang import HANG, wait_until

# The interpreter with OpenEnv's server: its dependencies do not fit into lockstep's constraints.
OPENENV = os.environ.get("LOCKSTEP_OPENENV_PYTHON")
collect_ignore_glob = [] if OPENENV else ["test_*.py"]


def pytest_report_header() -> str:
    return f"environments: {OPENENV or 'tests/environments is left out (make test-environments runs it)'}"


@pytest.fixture(scope="session")
def openenv_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real OpenEnv server with a guessing game at / and the same game as tools at /tools."""
    assert OPENENV is not None
    file = Path(__file__).with_name("openenv_games.py")
    log = (tmp_path_factory.mktemp("openenv") / "server.log").open("w")
    process = subprocess.Popen([OPENENV, str(file)], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), Path(log.name).read_text()

        def responds() -> bool:
            assert process.poll() is None, Path(log.name).read_text()
            try:
                urlopen(f"{address}/health", timeout=HANG).close()
            except (URLError, ConnectionError):
                return False
            return True

        wait_until(responds)
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session", params=["mcp", "fastmcp"])
def mcp_command(request: pytest.FixtureRequest) -> str:
    """The command of a real MCP server: of the package mcp 2, and of fastmcp 3 with mcp 1."""
    python = sys.executable if request.param == "mcp" else OPENENV
    return f"{python} {Path(__file__).with_name('mcp_sums.py')}"


@pytest.fixture(scope="session")
def mcp_address(mcp_command: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the same servers over HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (tmp_path_factory.mktemp("mcp") / "server.log").open("w")
    process = subprocess.Popen([*mcp_command.split(), str(port)], stdout=log, stderr=log)

    def listens() -> bool:
        assert process.poll() is None, Path(log.name).read_text()
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(listens)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()
