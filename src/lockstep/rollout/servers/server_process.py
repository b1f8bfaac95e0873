"""Server processes that lockstep starts. Servers end with the run; error messages show their last log lines."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.device.base import Device
from lockstep.device.serving import serving_on
from lockstep.errors import LostProcess, Refusal, with_secrets
from lockstep.launch.process_pool import SupervisedProcess
from lockstep.launch.ray_engines import EngineCommand, EnginePlace, PlacedProcess, engine_link
from lockstep.masking import conceal
from lockstep.model.resolve import model_folder
from lockstep.parallel.world import World
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import ENGINES, imported
from lockstep.rollout.servers.adapter import ServerAdapter, ServerFailed, ServerNeeds, ServerStart
from lockstep.rollout.servers.server_client import ENGINE_KEY, KEY_VARIABLE
from lockstep.rollout.servers.weight_transports import own_address
from lockstep.run.files import write_private

HOST = "127.0.0.1"
LAST_LINES = 25
_LOOK_SECONDS = 300.0


class ServerProcess:
    """One server process with its children, under a supervisor (`launch/supervisor.py`). With `placed` it is the
    engine of this number on a Ray cluster."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        key_file: Path | None = None,
        placed: tuple[int, EngineCommand] | None = None,
    ):
        self._command, self._environment, self.log, self._key_file = command, environment, log, key_file
        self._placed = placed
        self._process = self._start()

    def _start(self) -> SupervisedProcess | PlacedProcess:
        if self._placed is not None:
            return PlacedProcess(*self._placed)
        process = SupervisedProcess("lockstep.launch.supervisor:run_command", (self._command,), self.log)
        # The environment contains the API key. The environment is not passed as an argument, because every user can
        # read command lines.
        process.connection.sendall(json.dumps(self._environment).encode() + b"\n")
        return process

    @property
    def alive(self) -> bool:
        return self._process.alive

    @property
    def killed(self) -> bool:
        """Whether the process was killed or stopped from outside, so that its arguments are not the cause."""
        return self._process.disturbed

    def restart(self) -> None:
        self.close()
        self._process = self._start()

    def exit_reason(self) -> str:
        return self._process.ended()

    def exit_report(self) -> str:
        """Returns the exit reason and the last log lines."""
        return f"{self.exit_reason()}{self.last_lines()}"

    def last_lines(self) -> str:
        if not self.log.is_file():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return f"; the last lines of {self.log}:\n" + "\n".join(lines)

    def close(self) -> None:
        self._process.kill()

    def remove_key(self) -> None:
        """Deletes the key file, without which the server cannot be restarted."""
        if self._key_file is not None:
            shutil.rmtree(self._key_file.parent, ignore_errors=True)


def python_of(settings: RolloutSettings) -> str:
    return settings.server.python or sys.executable


def server_adapter_of(settings: RolloutSettings) -> ServerAdapter:
    server_adapter: ServerAdapter = imported(ENGINES[settings.engine].server_adapter)()
    return server_adapter


def refuse_absent(settings: RolloutSettings, device: Device, engine: int | None = None) -> None:
    """Raises `Refusal` if lockstep must start a server and `rollout.server.python` does not have the engine's package.
    The node of an engine on a Ray cluster is asked."""
    if settings.url is not None or not ENGINES[settings.engine].served:
        return
    server_adapter = server_adapter_of(settings)
    python, key = python_of(settings), "rollout.server.python"
    package = server_adapter.package
    code = f"import importlib.util, sys; sys.exit(3 if importlib.util.find_spec({package!r}) is None else 0)"
    status: int | str
    if engine is not None:
        answer = engine_link().call(engine, "check", python, code)
        status = answer["lost"] if "lost" in answer else answer["result"]
    else:
        try:
            status = subprocess.run([python, "-c", code], capture_output=True, timeout=_LOOK_SECONDS).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            status = str(error)
    if isinstance(status, str):
        raise Refusal.at(
            key,
            f"{python} cannot be run: {status}",
            "give the path of the Python in which the engine is installed",
            code="missing-package",
        )
    if status:
        unusable = serving_on(device.name, server_adapter.name).unusable
        if unusable is not None:
            where = f"rollout.engine {server_adapter.name}"
            raise Refusal.at(
                where,
                f"{python} has no package {server_adapter.package}; {unusable}",
                "use another engine",
                code="missing-package",
            )
        raise Refusal.at(
            f"rollout.engine {server_adapter.name}",
            f"{python} has no package {server_adapter.package}",
            f"{server_adapter.install(device.name)}, then set {key} (serving engines pin another torch version)",
            code="missing-package",
        )


def start_server(
    server_adapter: ServerAdapter,
    settings: RolloutSettings,
    device: Device,
    model: str,
    dtype: str,
    needs: ServerNeeds,
    log: Path,
    host: str = HOST,
    engine: int | None = None,
    key: str = "",
) -> tuple[ServerProcess, str, str]:
    """Starts a server on a free port of this machine, or on the node of an engine of a Ray cluster, without waiting
    until it responds. `key` is the API key of earlier servers of the run. Returns the process, address and API key of
    the server."""
    server = settings.server
    place = EnginePlace(host, _free_port(host), []) if engine is None else _engine_place(engine)
    folder = str(Path(model_folder(model)).absolute())
    env = {name: with_secrets(value, f"rollout.server.env.{name}") for name, value in server.env.items()}
    # The server and the run use the same API key.
    keys = [env.pop(name, "") for name in (KEY_VARIABLE, ENGINE_KEY)]
    key = next(filter(None, keys), "") or os.environ.get(KEY_VARIABLE) or key or secrets.token_urlsafe(32)
    conceal(key)
    key_file = _key_file(server.args) if server_adapter.reads_key_file else None
    key_text = f"api-key: {json.dumps(key)}\n" if key_file is not None else ""
    arguments = ServerStart(
        python_of(settings),
        folder,
        dtype,
        place.address,
        place.port,
        server.tensor_parallel,
        needs,
        tuple(server.args),
        key,
        "" if key_file is None else str(key_file),
    )
    environment = {**server_adapter.environment(arguments), **env}
    devices = server.devices if engine is None else place.devices
    if devices is not None and device.visible_variable is not None:
        environment[device.visible_variable] = ",".join(map(str, devices))
    environment["PYTHONPATH"] = _python_path(server_adapter.environment(arguments), settings, device)
    command, placed = server_adapter.command(arguments), None
    if engine is not None:
        file = "" if key_file is None else str(key_file)
        where = (str(log.absolute()), place.address, place.port)
        placed = (engine, EngineCommand(command, environment, *where, file, key_text))
    elif key_file is not None:
        key_file.parent.mkdir(mode=0o700)
        write_private(key_file, key_text)
    return ServerProcess(command, environment, log, key_file, placed), _url(place.address, place.port), key


def _engine_place(engine: int) -> EnginePlace:
    answer = engine_link().call(engine, "place")
    if "lost" in answer:
        why = f"engine {engine} was lost with its Ray actor: {answer['lost']}"
        raise LostProcess.at("rollout.server.replicas", why, "run the same command again", code="server-lost")
    return EnginePlace(**answer)


def _key_file(args: Sequence[str]) -> Path:
    """Returns the path of the file with the API key, which only this user can read."""
    for flag in ("--config", "--api-key", "--admin-api-key"):
        if any(word == flag or word.startswith(f"{flag}=") for word in args):
            why = f"{flag} is reserved: lockstep passes the API key to the server in a config file"
            remedy = f"pass other server flags in rollout.server.args, and set {KEY_VARIABLE} to choose the key"
            raise Refusal.at("rollout.server.args", why, remedy, code="reserved-flag")
    return Path(tempfile.gettempdir()) / f"lockstep-server-{secrets.token_hex(8)}" / "flags.yaml"


RankMachine = tuple[tuple[str, str, str], str]
"""The machine of a rank, and its address as seen from the other ranks."""


def machine_of(world: World) -> RankMachine:
    address = ""
    if world.size > 1 and (master := os.environ.get("MASTER_ADDR")):
        with suppress(ServerFailed):
            address = own_address(_url(master, 1))
    return _machine(), address


def served_host(machines: Sequence[RankMachine | None]) -> str:
    """Returns the address at which all ranks reach a server on rank 0's machine. The result is the loopback address if
    all ranks are on rank 0's machine."""
    here = _machine()
    others = [rank[1] for rank in machines if rank is not None and rank[0] != here]
    if not others:
        return HOST
    try:
        return own_address(_url(next(filter(None, others)), 1))
    except (StopIteration, ServerFailed) as error:
        why = "no address of this machine is reachable from the ranks on other machines"
        raise Refusal.at(
            "rollout.server", why, "start the server yourself and set rollout.url", code="unreachable-host"
        ) from error


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _machine() -> tuple[str, str, str]:
    """Returns values that identify the machine, or a container with its own network."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return (
        socket.gethostname(),
        boot.read_text(encoding="ascii").strip() if boot.exists() else "",
        os.readlink(network) if network.is_symlink() else "",
    )


def _python_path(engine_env: dict[str, str], settings: RolloutSettings, device: Device) -> str:
    """Joins up to three values of PYTHONPATH: the value that the server adapter needs, the value in the recipe and the
    value of the run. A server with another Python gets only the vendor's packages of the last."""
    inherited = os.environ.get("PYTHONPATH", "")
    if settings.server.python is not None:
        vendor = tuple(os.environ[name] for name in device.package_variables if os.environ.get(name))
        inherited = os.pathsep.join(entry for entry in inherited.split(os.pathsep) if entry.startswith(vendor))
    return os.pathsep.join(
        filter(None, [engine_env.get("PYTHONPATH"), settings.server.env.get("PYTHONPATH"), inherited])
    )


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
