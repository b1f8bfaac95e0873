"""The docker adapter of sandboxes: each program runs in its own container, without network and capabilities."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import Refusal

_HOME = "/home/sandbox"
_SECONDS = 30.0


def docker_command(
    image: str, name: str, command: Sequence[str], folder: Path, memory_mb: int, processes: int, disk_mb: int
) -> list[str]:
    """Returns the command that runs a program in a new container. `folder` is the program's folder."""
    limits = ["--memory", f"{memory_mb}m", "--memory-swap", f"{memory_mb}m", "--pids-limit", str(processes)]
    isolated = ["--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only"]
    places = ["--tmpfs", f"/tmp:size={disk_mb}m", "--volume", f"{folder}:{_HOME}", "--workdir", _HOME]
    sizes = ["--ulimit", f"fsize={disk_mb * 2**20}", "--user", "65534:65534", "--env", f"HOME={_HOME}"]
    start = ["docker", "run", "--rm", "--interactive", "--init", "--pull", "never", "--name", name]
    return [*start, *limits, *isolated, *places, *sizes, image, *command]


def kill_container(name: str) -> None:
    """Kills and removes a container, with all its processes. A container that has ended is no error."""
    subprocess.run(["docker", "rm", "--force", name], capture_output=True, timeout=_SECONDS, check=False)


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
