"""The docker adapter of sandboxes: each program runs in its own container, without network and capabilities."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import Refusal

_HOME = "/home/sandbox"
_SECONDS = 30.0
# Containers of the docker daemon do not end with the process that started them. So a guard process starts the container
# and removes it when the program or the starting process ends: then the kernel closes the other end of its connection.
_GUARD = """
import select, subprocess, sys
connection, name, *command = sys.argv[1:]
client = subprocess.Popen(command)
while client.poll() is None and not select.select([int(connection)], [], [], 0.02)[0]:
    pass
client.kill()
client.wait()
subprocess.run(["docker", "rm", "--force", name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
sys.exit(client.returncode % 256)
"""


def guarded(connection: int, name: str, command: Sequence[str]) -> list[str]:
    """Returns the command of the guard process of a container. `connection` is an inherited descriptor of a socket,
    whose other end only the starting process has."""
    return [sys.executable, "-I", "-S", "-c", _GUARD, str(connection), name, *command]


def docker_command(
    image: str,
    name: str,
    command: Sequence[str],
    folder: Path,
    memory_mb: int,
    processes: int,
    disk_mb: int,
    seconds: float,
) -> list[str]:
    """Returns the command that runs a program in a new container. `folder` is the program's folder."""
    limits = ["--memory", f"{memory_mb}m", "--memory-swap", f"{memory_mb}m", "--pids-limit", str(processes)]
    isolated = ["--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only"]
    places = ["--tmpfs", f"/tmp:size={disk_mb}m", "--volume", f"{folder}:{_HOME}", "--workdir", _HOME]
    sizes = ["--ulimit", f"fsize={disk_mb * 2**20}", "--ulimit", f"cpu={int(seconds) + 1}"]
    sizes += ["--user", "65534:65534", "--env", f"HOME={_HOME}"]
    start = [
        "docker",
        "run",
        "--rm",
        "--interactive",
        "--init",
        "--pull",
        "never",
        "--name",
        name,
        "--label",
        f"lockstep={name}",
    ]
    return [*start, *limits, *isolated, *places, *sizes, image, *command]


def refuse_without_docker(image: str, where: str) -> None:
    """Raises `Refusal` if docker is not installed, its daemon does not answer, or the image is not on this machine."""
    if shutil.which("docker") is None:
        raise Refusal.at(
            where,
            "docker is not installed on this machine",
            "install docker, or unset the variable to use Linux namespaces",
            code="no-sandbox",
        )
    try:
        answer = subprocess.run(
            ["docker", "image", "inspect", image], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        why = answer.stderr.strip().splitlines()[-1:] if answer.returncode else None
    except subprocess.TimeoutExpired:
        why = [f"it did not answer within {_SECONDS:g} s"]
    if why is not None:
        raise Refusal.at(
            where,
            f"docker cannot use the image {image!r}: {' '.join(why) or 'unknown error'}",
            f"start the docker daemon, and run: docker pull {image}",
            code="no-sandbox",
        )
