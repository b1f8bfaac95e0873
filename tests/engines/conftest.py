"""Tests with a real vLLM server, on a CPU. `make test-engines` makes its environment and runs them; they are collected
nowhere else, because a server takes minutes of processor time to start."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from hang import HANG

PYTHON = os.environ.get("LOCKSTEP_VLLM_PYTHON")
# While one works on these tests: a server that runs already, of the embedded model, with --enable-lora.
URL = os.environ.get("LOCKSTEP_VLLM_URL")
# A folder with SGLang's package unpacked, which is read.
SOURCE = os.environ.get("LOCKSTEP_SGLANG_SOURCE")
collect_ignore_glob = [*([] if PYTHON else ["test_vllm*.py"]), *([] if SOURCE else ["test_sglang*.py"])]


def pytest_report_header() -> str:
    return f"serving engines: {PYTHON or 'tests/engines is left out (make test-engines runs it)'}"


class RealServer:
    """A server that a test may kill and start again."""

    def __init__(self, model: Path, logs: Path, lora_rank: int | None):
        from lockstep.device.cpu import Cpu
        from lockstep.recipe.keys_rollout import RolloutSettings
        from lockstep.rollout.servers.adapter import ServerNeeds
        from lockstep.rollout.servers.server_process import start_server
        from lockstep.rollout.servers.vllm import Vllm

        settings = RolloutSettings(engine="vllm", server={"python": PYTHON, "env": {"OMP_NUM_THREADS": "1"}})
        # Of all servers of these tests, and of the runs that ask them.
        os.environ.setdefault("LOCKSTEP_SERVER_KEY", secrets.token_urlsafe(32))
        self.process, self.url, _ = start_server(
            Vllm(),
            settings,
            Cpu(),
            str(model),
            "fp32",
            ServerNeeds("cpu", lora_rank=lora_rank),
            logs / "vllm" / "server.log",
        )

    def wait(self) -> None:
        from lockstep.rollout.servers.adapter import ServerFailed
        from lockstep.rollout.servers.server_client import ClientThread, ServerClient
        from lockstep.rollout.servers.vllm import Vllm

        lines, given_up = ClientThread(), time.monotonic() + HANG
        line = ServerClient(lines, self.url, 60.0)
        try:
            while time.monotonic() < given_up:
                assert self.process.alive, self.process.ended()
                with suppress(ServerFailed):
                    return Vllm().healthy(line)
                time.sleep(1)
            raise TimeoutError(self.process.last_lines())
        finally:
            lines.close()


@pytest.fixture(scope="session")
def python() -> str:
    assert PYTHON is not None
    return PYTHON


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lockstep.model.tiny import write_tiny

    folder = tmp_path_factory.mktemp("embedded") / "model"
    write_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RealServer]]:
    """Starts servers that end with the session; each is waited for by who needs it."""
    running: list[RealServer] = []

    def started(model: Path, lora_rank: int | None = None) -> RealServer:
        running.append(RealServer(model, tmp_path_factory.mktemp("server"), lora_rank))
        return running[-1]

    yield started
    for server in running:
        server.process.close()


@pytest.fixture(scope="session")
def server(start: Callable[..., RealServer], embedded: Path) -> RealServer | SimpleNamespace:
    """The one server of most tests. What it holds at first does not matter: every test gives it weights."""
    if URL:
        return SimpleNamespace(url=URL)
    server = start(embedded, lora_rank=8)
    server.wait()
    return server
