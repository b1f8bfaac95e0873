"""A server that lockstep starts: it ends with the run, however that ends, and its last lines are kept."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from lockstep.device.base import Device
from lockstep.device.serving import serving_on
from lockstep.errors import Refusal, with_secrets
from lockstep.model.resolve import model_folder
from lockstep.processes.process import FunctionProcess
from lockstep.recipe.rollout import RolloutSettings
from lockstep.recipe.rows import ENGINES, imported
from lockstep.rollout.server.dialect import Dialect, ServerNeeds, ServerStart

HOST = "127.0.0.1"
LAST_LINES = 25
_LOOK_SECONDS = 300.0


class ServerProcess:
    """One process with all that it starts, which a warden watches over (`processes/warden.py`)."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path):
        self._command, self._environment, self.log = command, environment, log
        self._process = self._begin()

    def _begin(self) -> FunctionProcess:
        return FunctionProcess("lockstep.rollout.server.entry:serve", (self._command, self._environment), self.log)

    @property
    def alive(self) -> bool:
        return self._process.alive

    def restart(self) -> None:
        self.close()
        self._process = self._begin()

    def how_ended(self) -> str:
        return self._process.ended()

    def ended(self) -> str:
        """How it ended, and what it said last."""
        return f"{self.how_ended()}{self.last_lines()}"

    def last_lines(self) -> str:
        if not self.log.is_file():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return f"; the last lines of {self.log}:\n" + "\n".join(lines)

    def close(self) -> None:
        self._process.kill()


def python_of(settings: RolloutSettings) -> str:
    return settings.server.python or sys.executable


def dialect_of(settings: RolloutSettings) -> Dialect:
    dialect: Dialect = imported(ENGINES[settings.engine].dialect)()
    return dialect


def refuse_absent(settings: RolloutSettings, device: Device) -> None:
    """An engine that lockstep is to start and that the named Python does not have."""
    if settings.url is not None or not ENGINES[settings.engine].served:
        return
    dialect = dialect_of(settings)
    python, key = python_of(settings), "rollout.server.python"
    look = f"import importlib.util, sys; sys.exit(3 if importlib.util.find_spec({dialect.package!r}) is None else 0)"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, timeout=_LOOK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refusal.at(key, f"{python} cannot be run: {error}", "name the Python that has the engine") from error
    if found.returncode:
        unusable = serving_on(device.name, dialect.name).unusable
        if unusable is not None:
            where = f"rollout.engine {dialect.name}"
            raise Refusal.at(where, f"{python} has no package {dialect.package}, and {unusable}", "take another engine")
        raise Refusal.at(
            f"rollout.engine {dialect.name}",
            f"{python} has no package {dialect.package}",
            f"{dialect.install(device.name)}, then say {key} (these engines pin a torch of their own)",
        )


def start_server(
    dialect: Dialect,
    settings: RolloutSettings,
    device: Device,
    model: str,
    dtype: str,
    lora_rank: int | None,
    log: Path,
) -> tuple[ServerProcess, str]:
    """A server on a free port of this machine, and its address. It is not waited for."""
    server = settings.server
    start = ServerStart(
        python_of(settings),
        str(Path(model_folder(model)).absolute()),
        dtype,
        HOST,
        _free_port(),
        server.tensor_parallel,
        ServerNeeds(device.name, settings.sleep, lora_rank),
        tuple(server.args),
    )
    own = {name: with_secrets(value, f"rollout.server.env.{name}") for name, value in server.env.items()}
    environment = {**dialect.environment(start), **own}
    if server.devices is not None and device.visible_variable is not None:
        environment[device.visible_variable] = ",".join(map(str, server.devices))
    environment["PYTHONPATH"] = _python_path(dialect.environment(start), settings)
    return ServerProcess(dialect.command(start), environment, log), f"http://{HOST}:{start.port}"


def _python_path(own: dict[str, str], settings: RolloutSettings) -> str:
    """What the engine needs, what the recipe says, and the run's own only for the same Python."""
    inherited = os.environ.get("PYTHONPATH", "") if settings.server.python is None else ""
    return os.pathsep.join(filter(None, [own.get("PYTHONPATH"), settings.server.env.get("PYTHONPATH"), inherited]))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])
